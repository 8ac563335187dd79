"""After one GRPO step of a real run, the gradient is what float64 makes of the recorded samples, and of nothing else.

Samples come from the ledger, weights from the model folder, formulas from tests/reference. The gradient is read from
AdamW's first moment, which after one step is (1 - beta1) times it.
"""

import importlib.util
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from recorded import run_here
from safetensors.torch import load_file

from slime_core.clusters import build_cluster
from slime_core.config.load import load_config
from slime_core.testing import tiny_model
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.system

REFERENCE = Path(__file__).parents[1] / "reference"
BETA1 = 0.9


def _reference(name):
    spec = importlib.util.spec_from_file_location(name, REFERENCE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _one_step(tmp_path):
    """Run one step; answers its samples as the ledger has them, and the gradients that AdamW saw."""
    rows = "".join(f'{{"q": "{a}+{b}=", "a": "{a + b}"}}\n' for a in range(3) for b in range(3))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "digits.py").write_text(
        "def reward(args, sample, **kw):\n    return sum(char.isdigit() for char in sample.response) / 3\n"
    )
    flags = [
        *("--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "rows.jsonl")),
        *("--input-key", "q", "--label-key", "a", "--custom-rm-path", f"{tmp_path / 'digits.py'}:reward"),
        *("--num-rollout", "1", "--rollout-batch-size", "3", "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "9", "--lr", "1e-3", "--clip-grad", "0", "--adam-beta1", str(BETA1)),
        *("--dtype", "float32", "--device", "cpu", "--cpu-threads", "1", "--max-tokens-per-gpu", "40"),
    ]
    config = load_config(None, flags)
    seen = {}

    @asynccontextmanager
    async def watched(config, plugins, report):
        async with build_cluster(config, plugins, report) as components:
            yield components
            seen["samples"] = await components.ledger.samples(await components.ledger.composition(1))
            (tmp_path / "state").mkdir()
            await components.trainer.save(tmp_path / "state")
            await components.trainer.saved()

    run_here(tmp_path / "run", config, cluster=watched)
    moments = load_file(tmp_path / "state" / "moments.safetensors")
    first = {name.removeprefix("moment1."): m for name, m in moments.items() if name.startswith("moment1.")}
    return seen["samples"], {name: moment.double() / (1 - BETA1) for name, moment in first.items()}


def test_one_grpo_step_of_a_run_has_the_gradient_of_its_recorded_samples(tmp_path):
    tiny_model(tmp_path / "model", tied=True)
    samples, gradients = _one_step(tmp_path)
    ref_grpo, ref_model = _reference("ref_grpo"), _reference("ref_model")
    folder = ModelFolder.open(tmp_path / "model")
    params = {n: p.detach().double().requires_grad_() for n, p in folder.build_model("float32").named_parameters()}
    advantages = ref_grpo.advantages(
        [s.reward for s in samples], [s.group_index for s in samples], [s.rollout_id for s in samples], std=True
    )
    assert any(advantages), "every group's rewards are equal: the step proves nothing"
    losses = []
    for sample, advantage in zip(samples, advantages):
        log_probs, _ = ref_model.log_probs(params, folder.config, sample.tokens, sample.response_length)
        torch.testing.assert_close(
            log_probs.detach(), torch.tensor(sample.rollout_log_probs).double(), atol=2e-5, rtol=0
        )
        losses.append([ref_grpo.token_loss(lp, lp.detach(), advantage, 0.2, 0.2) for lp in log_probs])
    total = ref_grpo.mean_over_rollouts(losses, [s.loss_mask for s in samples], [s.rollout_id for s in samples])
    wanted = dict(zip(params, torch.autograd.grad(total, list(params.values()))))
    assert set(gradients) == set(wanted)
    for name, want in wanted.items():
        scale = max(float(want.abs().max()), 1e-6)
        assert float((gradients[name] - want).abs().max()) / scale < 5e-5, name

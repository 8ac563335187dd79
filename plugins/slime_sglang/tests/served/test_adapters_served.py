"""Adapters on a real SGLang server on this CPU: what it computes is peft's, version after version, and a run with them.

On a CPU SGLang multiplies by plain torch (`torch_native`), the only backend there that needs no Triton.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_server import START_TIMEOUT, RawServer
from served_engine import EPOCH, begin, computing, serving, update

from slime_core.lora.folder import PREFIX
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.transports.adapters import AdapterSenders
from slime_core.weights.transports.buckets import TensorSource, one_part
from slime_sglang.adapters import ATTENTION, MLP
from slime_sglang.engine import SglangEngine
from slime_sglang.senders.tensor import TensorSender

pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(900)]

NAMES = ("solver", "critic")
TEXT = [13, 14, 15, 20, 33, 41, 50, 61, 70, 22]
FLAGS = ("--lora-rank", "4", "--lora-use-rslora", "--lora-sync", "adapter", "--lora-adapters", *NAMES)
OPTIONS = (
    *("--enable-lora", "--max-lora-rank", "4", "--lora-backend", "torch_native", "--max-loras-per-batch", "3"),
    *("--max-loaded-loras", "3", "--lora-target-modules", *ATTENTION, *MLP),
)
"""As `slime_sglang.adapters.options` has them for the flags."""


class Adapter:
    """peft's model over the served one, with an adapter of a seed: the reference, and what is sent."""

    def __init__(self, folder: Path, seed: int) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=[*ATTENTION, *MLP])
        self.model: Any = get_peft_model(base, config)
        self.config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True}
        self.config["target_modules"] = [*ATTENTION, *MLP]
        self.factors = {
            name.removeprefix(PREFIX).replace(".default", ""): tensor.detach()
            for name, tensor in self.model.named_parameters()
            if "lora_" in name
        }
        for name, factor in self.factors.items():
            if "lora_B" in name:
                torch.nn.init.normal_(factor, std=0.1)

    def sources(self) -> list[TensorSource]:
        """As a trainer has them."""
        return [TensorSource(one_part(name, factor.shape), factor.clone) for name, factor in self.factors.items()]

    @torch.no_grad()
    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Of all tokens but the first."""
        table = self.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return table.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def adapting(start_server: Callable[..., RawServer]) -> Iterator[RawServer]:
    """A server with room for both adapters."""
    server = start_server(*OPTIONS)
    yield server
    server.stop()


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_each_version_of_an_adapter_is_pefts_and_nothing_of_an_older_one_is_used(
    transport: str, adapting: RawServer, served_model: Path, tmp_path: Path
) -> None:
    names = [(name, version) for version in (1, 2) for name in NAMES]
    of = {name: Adapter(served_model, seed) for seed, name in enumerate(names)}
    senders = AdapterSenders(TensorSender)

    async def sync(engine: SglangEngine, version: int) -> None:
        route = await engine.route("all")
        assert route is not None
        assert route.base is (version == 1)
        sent = WeightUpdate(version=version, epoch=EPOCH, transport="disk", handle={})
        if route.base:
            sent = await update(engine, served_model, version)
        adapters = {name: (of[name, version].config, of[name, version].sources()) for name in NAMES}
        sent.handle["adapters"] = senders.send(adapters, version, replace(route, transport=transport))
        await engine.load(sent)

    async def check(engine: SglangEngine, version: int) -> None:
        for name in NAMES:
            expected = of[name, version].log_probs(TEXT)
            assert torch.allclose(torch.from_numpy(await engine.score(TEXT, 1, adapter=name)), expected, atol=2e-5)
        params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
        greedy = [GenerateRequest(id=name, tokens=TEXT, params=params, seed=1, adapter=name) for name in NAMES]
        for one, done in zip(greedy, await asyncio.gather(*map(engine.generate, greedy)), strict=True):  # one batch
            assert done.versions == [version] * 6
            with torch.no_grad():
                prompt, lengths = torch.tensor([TEXT]), {"max_new_tokens": 6, "eos_token_id": None}
                made = of[one.adapter, version].model.generate(prompt, do_sample=False, **lengths)
            assert done.tokens == made[0, len(TEXT) :].tolist()

    async def work() -> None:
        async with serving(adapting.server, served_model, tmp_path, [], *FLAGS) as engine:
            assert "adapters" in engine.abilities
            await sync(engine, 1)
            await check(engine, 1)
            await check(engine, 1)  # from pages that the first has left
            running = begin(engine, ["long"], 400)
            await computing(adapting, len(TEXT) + 20)
            await sync(engine, 2)
            await check(engine, 2)
            done = await running["long"]
            assert set(done.versions) == {1, 2}
            assert done.versions == sorted(done.versions)
            assert len(done.tokens) == 400

    adapting.loop.run(work(), 120)


TENANTS = "".join(
    f'[[data.tasks]]\nname = "of {name}"\nprompt_data = "rows.jsonl"\nadapter = "{name}"\n' for name in NAMES
)


@pytest.mark.parametrize("sync", ["merged", "adapter", "adapters"])
def test_a_run_with_adapters_samples_what_it_trains(
    sync: str, sglang_python: str, served_model: Path, tmp_path: Path
) -> None:
    several = sync == "adapters"
    text = "0123456789 +-= abcdef " * 4
    rows = [json.dumps({"input": text[n:] + text[:n], "label": ""}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "judge.py").write_text("async def reward(args, sample, **kw):\n    return len(sample.response) % 3\n")
    words = (
        *(
            "run",
            "--hf-checkpoint",
            served_model,
            "--prompt-data",
            "rows.jsonl",
            "--custom-rm-path",
            "judge.py:reward",
        ),
        *("--device", "cpu", "--dtype", "float32", "--rollout-engine", "sglang", "--sglang-python", sglang_python),
        *("--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--entropy-coef", "0.05"),
        *("--rollout-max-response-len", "16", "--sglang-mem-fraction-static", "0.2", "--sglang-max-total-tokens"),
        *("8000", "sglang.env.OMP_NUM_THREADS=1", "--run-dir", "run"),
        *("--lr", "1e-2", "--lora-rank", "4", "--lora-sync", sync.removesuffix("s")),
        *(("--lora-adapters", *NAMES) if several else ()),
    )
    command = [sys.executable, "-m", "slime_cli.main", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=START_TIMEOUT + 300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["canary/logprob_diff_mean"] < 2e-5
        assert metrics["train_rollout_logprob_abs_diff"] < 2e-5
    norms = [value for metrics in steps for name, value in metrics.items() if name.endswith("grad_norm")]
    assert max(norms) > 0
    tensors = [metrics.get("canary/tensors", 0) for metrics in steps]
    assert all(tensors) if sync == "merged" else not any(tensors), "the base crossed before the first step alone"

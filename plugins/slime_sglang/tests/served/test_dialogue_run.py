"""Dialogues of kernelbench through a real server: later prompts hold the very ids that the server sampled before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from raw_server import START_TIMEOUT
from served_recipe import toml

from slime_core.ledger.ledger import SqliteLedger
from slime_core.types import Sample

pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(900)]

MODEL = Path(__file__).parents[3] / "slime_kernelbench" / "src" / "slime_kernelbench" / "model"
RECIPE = """\
name = "dialogues"
plugins = ["kernelbench"]
[cluster]
device = "cpu"
cpu_threads = 1
[data]
apply_chat_template = true
tasks = [{{ name = "kernelbench_family" }}]
[rollout]
hf_checkpoint = {model}
init_weights = "random"
rollout_engine = "sglang"
num_rollout = 1
rollout_batch_size = 2
n_samples_per_prompt = 2
rollout_max_response_len = 40
rollout_max_context_len = 512
[train]
dtype = "float32"
advantage_estimator = "turn_rloo"
[plugin.kernelbench]
prompt_template = "short"
feedback_style = "kind"
stop_repeats = 0
[sglang]
python = {python}
env = {env}
mem_fraction_static = 0.2
max_total_tokens = 20000
"""


def test_sampled_ids_stand_in_later_prompts_id_by_id(sglang_python: str, tmp_path: Path) -> None:
    recipe = tmp_path / "dialogues.toml"
    recipe.write_text(RECIPE.format(model=toml(MODEL), python=toml(sglang_python), env=toml({"OMP_NUM_THREADS": "1"})))
    words = [sys.executable, "-m", "slime_cli.main", "run", str(recipe), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_TIMEOUT + 300)
    assert done.returncode == 0, done.stderr[-4000:]

    samples = {sample.id: sample for sample in asyncio.run(trained(tmp_path / "run"))}
    assert len(samples) == 2 * 2 * 3
    for sample in samples.values():
        assert set(sample.weight_versions) == {0}
        assert sample.loss_mask == [1] * sample.response_length
        turn = sample.metadata["kernelbench"]["turn"]
        if turn:
            name = sample.id.rsplit(".", 1)[0]
            before = samples[f"{name}.{turn - 1}" if turn > 1 else name]
            assert sample.tokens[: len(before.tokens)] == before.tokens
            assert sample.prompt_length > len(before.tokens)


async def trained(run: Path) -> list[Sample]:
    """The samples of the first step."""
    ledger = SqliteLedger(run)
    try:
        return await ledger.samples(await ledger.composition(1))
    finally:
        await ledger.close()

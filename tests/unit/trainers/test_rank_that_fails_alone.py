"""One rank fails in the middle of a pass while the others wait for it: its error is the call's, and nobody waits."""

import asyncio
import os
import re
from pathlib import Path

import pytest
import trainer_bench as made
from forked_channel import start_forked

from slime_core.clusters.channel import start_here
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.schema import Config
from slime_core.errors import PluginError, TrainerError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
HUNG = 120  # seconds after which ranks wait for each other
FAULTS = """
import slime_core
import torch
import torch.distributed as dist
from slime_core.protocols import Loss

def breaking(fault):
    def loss(log_probs, entropy, columns, train):
        return -columns["advantages"] * log_probs, fault() if dist.get_rank() == 1 else {}
    return loss

def memory():
    return {"of this size": torch.empty(1 << 46)}

def mistake():
    return {"no tensor": "a word"}

@slime_core.hookimpl
def slime_loss():
    return [Loss(name=fault.__name__, fn=breaking(fault), columns=("advantages",)) for fault in (memory, mistake)]

@slime_core.hookimpl
def slime_megatron_before_log_prob(model, role, ctx):
    if ctx.config.train.loss_type == "sft_loss" and dist.get_rank() == 0:
        raise RuntimeError("no log-probs here")
"""
BACKENDS = {
    "fsdp": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.fixture
def failing(tmp_path, monkeypatch, install_plugin):
    """A call of two ranks that is to fail, and what the next call says then; afterwards the ranks are gone."""
    model = tiny_model(tmp_path / "model", hidden=16, layers=2)
    path = [
        install_plugin("faults", FAULTS),
        HERE.parents[2] / "plugins" / "slime_megatron" / "tests" / "megatron_on_cpu",
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [*path, *filter(None, [os.getenv("PYTHONPATH")])])))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")

    def fail(backend, loss, method, *args):
        train = {"dtype": "float32", "loss_type": loss, "train_backend": "megatron" if BACKENDS[backend] else "fsdp"}
        given = {"rollout": {"hf_checkpoint": str(model)}, "train": train, "plugins": ("faults", "models")}
        config = Config.model_validate(
            given | {"megatron": BACKENDS[backend], "cluster": {"device": "cpu", "cpu_threads": 1}}
        )
        start = start_here if BACKENDS[backend] else start_forked  # Megatron wants a Python of its own
        ranks = RankTrainer(config, load_plugins(config), world=2, run_dir=tmp_path / "run", start=start)
        return asyncio.run(_fail(ranks, config, method, *args))

    return fail


async def _fail(ranks, config, method, *args):
    async with ranks:
        await ranks.begin(config)
        batch = made.batch_of(longest=40)
        async with asyncio.timeout(HUNG):
            with pytest.raises((TrainerError, PluginError)) as first:
                await getattr(ranks, method)(batch, *args)
            with pytest.raises(TrainerError) as second:
                await ranks.fingerprint()
    assert second.value.code == "TRN105"
    assert second.value.what == "the trainer's ranks were ended, none can answer fingerprint"
    for pid in [rank.channel.pid for rank in ranks._ranks]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return first.value, second.value


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["fsdp", "pipeline"])
def test_memory_that_runs_out_on_one_rank_is_told_with_what_would_help(failing, backend):
    error, later = failing(backend, "memory", "step")
    assert (error.code, error.exit_code) == ("TRN96", 6)
    assert "memory ran out while training on step 0" in error.what
    assert "rank 1, cpu" in error.where
    assert error.why.startswith("faults.slime_loss failed for "), error.why
    assert "train.max_tokens_per_gpu=" in error.fix
    assert "ranks that waited for it, and were ended: 0" in error.why
    assert "memory ran out" in later.why


def test_a_mistake_on_one_rank_is_told_with_its_rank_phase_and_trace(failing, tmp_path):
    error, _ = failing("fsdp", "mistake", "step")
    assert (error.code, error.exit_code) == ("TRN00", 6)
    assert error.what.startswith("TypeError: ")
    assert error.where == f"trainer rank 1 of 2, in step: {tmp_path / 'run' / 'log' / 'rank-1.log'}"
    assert re.search(r'File ".*/slime_core/trainers/optimizer_step.py", line \d+, in __call__', error.why)
    assert "ranks that waited for it, and were ended: 0" in error.why
    log = (tmp_path / "run" / "log" / "rank-1.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "row * weight" in log


@pytest.mark.nightly
def test_a_hook_that_fails_on_one_rank_keeps_its_code_and_names_the_rank(failing):
    error, _ = failing("tensor", "sft_loss", "score", frozenset({"policy"}))
    assert (error.code, error.exit_code) == ("PLG56", 4)
    assert "no log-probs here" in error.what
    assert error.where.startswith("trainer rank 0 of 2, in score: ")
    assert error.why == "ranks that waited for it, and were ended: 1"

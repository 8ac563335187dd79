"""This machine as a cluster: one process on-policy, an engine of its own where a stage runs ahead."""

import asyncio
import os
import re

import pytest
from forked_channel import fork

from slime_core.clusters.channel import ProcessChannel
from slime_core.clusters.colocation import DedicatedDevices, TimeSharing
from slime_core.clusters.engine_process import EngineProcess
from slime_core.clusters.local import local_cluster
from slime_core.clusters.machine import engines_apart, resolve_machine
from slime_core.config.load import load_config
from slime_core.engines.local import LocalEngine
from slime_core.errors import ConfigError
from slime_core.notices import notices_to
from slime_core.plugins import load_plugins
from slime_core.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

AHEAD = ("--max-staleness", "1", "--no-colocate")


def test_the_cores_are_divided_between_ranks_and_an_engine_of_its_own_and_the_config_says_so(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(*flags):
        return resolve_machine(load_config(None, ["--device", "cpu", *flags])).cluster.cpu_threads

    assert threads() == 12
    assert threads(*AHEAD) == 6
    assert threads(*AHEAD, "--actor-num-gpus-per-node", "2") == 4
    assert threads(*AHEAD, "--cpu-threads", "5") == 5
    assert threads("--no-colocate") == 12
    assert threads(*AHEAD, "--rollout-num-engines", "3") == 3
    assert threads("--no-colocate", "--eval-async", "--rollout-num-engines", "2") == 4


def test_where_nothing_trains_no_memory_is_planned_for_a_trainer(tmp_path):
    folder, lines = tiny_model(tmp_path / "model", hidden=1024, weights=False), []
    config = load_config(None, ["--hf-checkpoint", str(folder), "--device", "cpu", "--rollout-max-response-len", "32"])
    with notices_to(lines.append):
        trained = resolve_machine(config)
    with notices_to(lines.append):
        assert resolve_machine(config, trains=False) == trained
    assert [re.findall(r"[(](train|rollout)[)]", line) for line in lines] == [["train"], ["rollout"]]


@pytest.mark.parametrize(("text", "most"), [("1", 1), ("3,2", 3), ("64", 5), ("", 5), ("many", 5)])
def test_no_process_has_more_threads_than_the_environment_allows(monkeypatch, text, most):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert resolve_machine(load_config(None, ["--device", "cpu", "--cpu-threads", "5"])).cluster.cpu_threads == most


def test_the_true_on_policy_mode_needs_a_gpu():
    with pytest.raises(ConfigError, match="true_on_policy_mode with device = cpu"):
        resolve_machine(load_config(None, ["--device", "cpu", "--true-on-policy-mode"]))


def test_one_stage_that_runs_ahead_is_enough_for_an_engine_of_its_own(tmp_path):
    recipe = tmp_path / "recipe.toml"
    stages = '[cluster]\ncolocate = false\n[[stage]]\nname = "a"\n[[stage]]\nname = "b"\nmax_staleness = {}\n'
    recipe.write_text(stages.format(1))
    assert engines_apart(load_config(recipe, []))
    recipe.write_text(stages.format(0))
    assert not engines_apart(load_config(recipe, []))


@pytest.mark.parametrize("ahead", [False, True])
def test_engine_and_updates_carry_the_epoch_of_the_run_whichever_process_they_live_in(ahead, tmp_path, monkeypatch):
    monkeypatch.setattr(ProcessChannel, "start", classmethod(fork))
    flags = [
        "--hf-checkpoint",
        str(tiny_model(tmp_path / "model", hidden=32)),
        "--device",
        "cpu",
        "--cpu-threads",
        "1",
    ]
    config = resolve_machine(load_config(None, [*flags, *(AHEAD if ahead else ())]))
    plugins = load_plugins(config)
    with RunDir.create("run", at=tmp_path / "run") as run_dir:
        (run_dir.path / "config.toml").touch()

    async def look(run_dir):
        report = Report(run_dir, config)
        async with local_cluster(config, plugins, report) as components:
            await components.trainer.begin(config)
            update = await components.trainer.publish(0)
            kinds = (EngineProcess, DedicatedDevices) if ahead else (LocalEngine, TimeSharing)
            assert (type(components.engines), type(components.devices)) == kinds
            return components.engines.epoch, update.epoch

    with RunDir.reopen(tmp_path / "run") as run_dir:
        assert asyncio.run(look(run_dir)) == (2, 2)


SERVED = """
import asyncio, threading
from contextlib import asynccontextmanager
from types import SimpleNamespace
import slime_core
from slime_core.backends import EngineBackend, ServedEngines, TrainerBackend

trainer_is_made, seen = threading.Event(), []

@asynccontextmanager
async def start(start):
    seen.append(await asyncio.to_thread(trainer_is_made.wait, 0.0 if GIVES else 30.0))
    yield ServedEngines(engine=SimpleNamespace(abilities=frozenset(), seen=seen))

class Trainer:
    def __init__(self, *args, **more):
        trainer_is_made.set()
        if FAILS:
            raise RuntimeError("no trainer")

@slime_core.hookimpl
def slime_engine():
    return [EngineBackend(name="served", start=start, gives_memory=lambda config: GIVES)]

@slime_core.hookimpl
def slime_trainer():
    return [TrainerBackend(name="made", trainer=lambda: Trainer)]
"""


async def with_servers(install_plugin, tmp_path, *, gives, fails=False):
    """Whether servers of a plugin saw the trainer made before they were up."""
    install_plugin("served", SERVED.replace("GIVES", str(gives)).replace("FAILS", str(fails)))
    words = [
        "--hf-checkpoint",
        str(tiny_model(tmp_path / "model", hidden=32)),
        "--device",
        "cpu",
        "--plugin",
        "served",
    ]
    config = resolve_machine(load_config(None, [*words, "--rollout-engine", "served", "--train-backend", "made"]))
    with RunDir.create("run", at=tmp_path / "run") as run_dir:
        async with local_cluster(config, load_plugins(config), Report(run_dir, config)) as components:
            return components.engines.seen


@pytest.mark.parametrize("gives", [True, False])
def test_servers_that_give_no_memory_start_beside_the_trainer(gives, install_plugin, tmp_path):
    assert asyncio.run(with_servers(install_plugin, tmp_path, gives=gives)) == [not gives]


def test_a_trainer_that_fails_ends_the_start_of_the_servers_beside_it(install_plugin, tmp_path):
    with pytest.raises(RuntimeError, match="no trainer"):
        asyncio.run(with_servers(install_plugin, tmp_path, gives=False, fails=True))

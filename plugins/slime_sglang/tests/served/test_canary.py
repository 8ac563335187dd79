"""The canary before a real server: weights that went wrong on the way are caught by the update that has them.

The trainer publishes a folder, and a test changes the folder before the server reads it: as a wrong mapping, a lost
file or a stale path would. The server says each time that it took the version.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_server import RawServer
from safetensors.torch import load_file, save_file
from served_engine import serving

from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.errors import EngineError
from slime_core.plugins import load_plugins
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import WeightUpdate
from slime_core.weights.folder import ModelFolder
from slime_core.weights.update import Canary, sync_weights
from slime_sglang.engine import SglangEngine

pytestmark = pytest.mark.system

Tensors = dict[str, torch.Tensor]
TIED = "model.embed_tokens.weight"


class Learner:
    """A real trainer whose steps are noise, and which may damage the folders that it publishes."""

    def __init__(self, folder: Path) -> None:
        self.config: Config = load_config(None, ["train.dtype=float32", f"rollout.hf_checkpoint={folder}"])
        self.thread = TorchThread(1)
        plugins, model = load_plugins(self.config), ModelFolder.open(folder)
        self.trainer = FsdpTrainer(self.config, plugins, model, thread=self.thread)
        self.damage: Callable[[Path], str | None] | None = None
        self.last = ""

    def step(self, size: float = 1e-3) -> None:
        """Change every weight a little."""
        for tensor in self.trainer._worker.actor.locals().values():
            tensor.add_(torch.randn_like(tensor) * size)

    async def begin(self, stage: Config) -> None:
        await self.trainer.begin(stage)

    async def publish(self, version: int, route: Any = None) -> WeightUpdate:
        update = await self.trainer.publish(version, route)
        folder = Path(update.handle["folder"])
        if self.damage is not None:
            other = await asyncio.to_thread(self.damage, folder)
            update.handle = {"folder": other or str(folder)}
        self.last = update.handle["folder"]
        return update

    async def score(self, batch: Any, roles: Any) -> Any:
        return await self.trainer.score(batch, roles)


def rewritten(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    """A damage that reads a folder's tensors and writes them back changed."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file)

    return damage


@pytest.fixture(scope="module")
def learner(served_model: Path) -> Iterator[Learner]:
    made = Learner(served_model)
    asyncio.run(made.begin(made.config))
    yield made
    made.thread.close()


Run = Callable[..., list[dict[str, float]]]


@pytest.fixture
def run(learner: Learner, server: RawServer, served_model: Path, tmp_path: Path) -> Run:
    """Make some good updates and a damaged one; the answer is the good ones' figures."""

    def updates(damage: Callable[[Path], str | None] | None = None, *, good: int = 2, **changes: str) -> Any:
        keys = [f"{name}={value}" for name, value in {"train.dtype": "float32", **changes}.items()]
        canary = Canary(config=load_config(None, keys), vocab_size=99)
        learner.damage, found = None, []

        async def one(engine: SglangEngine, version: int) -> None:
            learner.step()
            check = canary.check(version, first=version == 0)
            await sync_weights(learner, engine, version, canary=canary, check=check)  # type: ignore[arg-type]
            await canary.compare_log_probs(engine)
            found.append(canary.pop_metrics())

        async def all_of_them() -> None:
            async with serving(server.server, served_model, tmp_path, []) as engine:
                for version in range(good):
                    await one(engine, version)
                if damage is not None:
                    learner.damage = damage
                    await one(engine, good)

        try:
            server.loop.run(all_of_them(), 150)
        finally:
            learner.damage = None
        return found

    return updates


def caught(run: Run, damage: Callable[[Path], str | None], **more: Any) -> EngineError:
    """The error of an update with this damage."""
    with pytest.raises(EngineError) as error:
        run(damage, **more)
    assert error.value.code == "ENG83"
    return error.value


def test_updates_that_arrive_pass_and_log_probs_are_the_trainers(run: Run) -> None:
    """Figures of the float32 band: docs/sglang.md."""
    first, *others = run(good=5)
    assert first["canary/tensors"] == 18
    assert {figures["canary/tensors"] for figures in others} == {8 + 2}
    assert all(figures["canary/logprob_diff_mean"] < 1e-5 for figures in (first, *others))
    assert others[-1]["canary/band"] <= 1e-4


def test_a_stale_engine_is_caught(run: Run, learner: Learner, tmp_path: Path) -> None:
    """The server is told to read the folder of the version before, and stamps the new one."""

    def stale(folder: Path) -> str:
        kept = shutil.copytree(learner.last, tmp_path / "kept")
        return str(kept)

    assert "the engine is stale, the update changed nothing" in caught(run, stale).why


@pytest.mark.parametrize("good", [1, 2])
def test_a_missing_shard_is_caught(run: Run, good: int) -> None:
    """Half of the tensors are not in the folder; the server takes it without a word."""

    def half(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}

    error = caught(run, rewritten(half), good=good)
    assert "model.layers.1." in error.what
    assert "did not arrive" in error.why or "left them out" in error.why


@pytest.mark.parametrize(("one", "other"), [("q", "k"), ("k", "v")])
def test_swapped_q_k_or_v_is_caught(run: Run, one: str, other: str) -> None:
    def swapped(tensors: Tensors) -> Tensors:
        return {
            name.replace(f"{one}_proj", "#").replace(f"{other}_proj", f"{one}_proj").replace("#", f"{other}_proj"): t
            for name, t in tensors.items()
        }

    error = caught(run, rewritten(swapped))
    assert "qkv_proj.weight holds " in error.why
    assert "swapped on the way" in error.why


def test_a_tied_embedding_that_is_not_synced_is_caught(run: Run) -> None:
    """The server's one matrix for both embeddings stays as it was."""
    error = caught(run, rewritten(lambda tensors: {name: t for name, t in tensors.items() if name != TIED}))
    assert f"tensors of the engine are not the trainer's version 2: {TIED}" in error.what
    assert "as they were before" in error.why


def test_a_partial_bucket_is_caught(run: Run) -> None:
    """The last tensors of a bucket are missing."""

    def cut(tensors: Tensors) -> Tensors:
        names = sorted(tensors)
        return {name: tensors[name] for name in names[: len(names) // 2]}

    assert "as they were before" in caught(run, rewritten(cut)).why


def test_without_checksums_log_probs_catch_swapped_weights(run: Run) -> None:
    def swapped(tensors: Tensors) -> Tensors:
        up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
        return tensors | {up: tensors[gate], gate: tensors[up]}

    error = caught(run, rewritten(swapped), **{"rollout.check_weights": "off"})
    assert "log-probs of trainer and engine differ" in error.what
    assert error.where.startswith("prompt canary/")

"""debug_rollout_only before a real server: it serves the weights that the run starts from, and they are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from raw_server import Loop, RawServer
from safetensors.torch import load_file, save_file
from served_engine import request, serving, whole

from slime_core.clusters.debug import IdleTrainer
from slime_core.config.load import load_config
from slime_core.errors import EngineError
from slime_core.threads import TorchThread
from slime_core.weights.folder import ModelFolder
from slime_core.weights.update import Canary, sync_weights

pytestmark = pytest.mark.system


def test_a_server_gets_the_starting_weights_of_a_run_that_trains_nothing(
    server: RawServer, loop: Loop, served_model: Path, tmp_path: Path
) -> None:
    config = load_config(None, ["train.dtype=float32", "rollout.debug_rollout_only=true"])
    canary = Canary(config=config, vocab_size=ModelFolder.open(served_model).vocab_size)
    drawn = ModelFolder.open(served_model, init_weights="random")  # not what the server has now
    thread = TorchThread(1)

    async def rolled() -> None:
        async with serving(server.server, served_model, tmp_path, []) as engine:
            trainer = IdleTrainer(load_config(None, ["seed=11"]), drawn, thread, device="cpu", epoch=7)
            await sync_weights(trainer, engine, 0, canary=canary, check="all")
            await canary.compare_log_probs(engine)
            found = canary.pop_metrics()
            assert found["canary/tensors"] == 18
            assert "canary/kl" not in found
            done = await engine.generate(request("a-0", 6))
            whole(done, 6)
            assert set(done.versions) == {0}

            def damage(folder: Path) -> None:
                file = folder / "model.safetensors"
                tensors = load_file(file)
                tensors["model.norm.weight"] += 1
                save_file(tensors, file)

            route = await engine.route("all")
            assert route is not None
            update = await trainer.publish(1, route)
            damage(Path(update.handle["folder"]))
            await engine.load(update)
            with pytest.raises(EngineError, match=r"ENG83.*model\.norm\.weight"):
                await canary.compare_tensors(engine, route, update)

    try:
        with torch.no_grad():
            loop.run(rolled())
    finally:
        thread.close()

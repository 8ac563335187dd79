"""Several ranks, with pictures, a video too or words alone in their micro-batches, do what one rank does."""

import sys
from pathlib import Path

import pytest
import torch
import trainer_bench as made
from pictures import FAMILIES, picture_batch
from safetensors.torch import load_file, save_file

from slime_core.plugins import load_plugins
from slime_core.testing import tiny_vision_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.trainers.fsdp.shards import full
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration


def train_rank(folders, out, rank, world):
    """Write log-probs, a step's norm and the parameters after it, of towers that learn and one that does not.

    Ranks share the sequences of one family; of the others each has samples of its own.
    """
    for number, (family, frozen) in enumerate((("qwen3_vl", False), ("smolvlm", True), ("qwen2_5_vl", False))):
        thread = TorchThread(1)
        folder = Path(folders) / family
        train = {"max_tokens_per_gpu": 48, "adam_eps": 1e-3, "freeze_vision_tower": frozen}
        train["context_parallel_size"] = 2 if family == "qwen3_vl" and world > 1 else 1
        config = made.config_of(folder, **train)
        trainer = FsdpTrainer(
            config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
            rendezvous=Path(out) / f"meet-{number}" if world > 1 else None,
        )  # fmt: skip
        worker = trainer._worker
        thread.call(worker.begin, config)
        batch = picture_batch(family, worker.folder.config)
        rows = {
            "log_probs": torch.from_numpy(
                thread.call(worker.score, batch, frozenset({"policy"}))["policy"]["log_probs"]
            )
        }
        found = thread.call(worker.verify, batch)
        assert max(found["gradient_error"], found["loss_error"]) < 1e-5, found
        rows["grad_norm"] = torch.tensor(thread.call(worker.step, batch)["grad_norm"])
        rows |= {n: full(p.detach()).clone() for n, p in worker.actor.parameters().items()}
        if rank == 0:
            save_file({name: row.contiguous() for name, row in rows.items()}, str(Path(out) / f"{family}.safetensors"))
        thread.close()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_change_nothing_whatever_kinds_of_media_each_has(zygote, tmp_path, tmp_path_factory, world):
    place = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_vision_model(place / family, family)
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    train_rank(place, one, 0, 1)
    zygote.together(tmp_path_factory.mktemp("said"), [[__file__, place, many, rank, world] for rank in range(world)])
    for family in FAMILIES:
        want, got = (load_file(str(out / f"{family}.safetensors")) for out in (one, many))
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=2e-4, atol=3e-6, msg=lambda t, name=name: f"{name}: {t}"
            )


if __name__ == "__main__":
    train_rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""Ranks that save and restore, a layout after another in the same processes; each rank writes what it found.

python saving_main.py RANK ROOT            two ranks: two shards, two stages, copies, one of them alone, and back
python saving_main.py alone ROOT           one rank: files that are damaged, other models, a process that is killed
"""

import asyncio
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests" / "unit" / "trainers")]

TP, PP, EP = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
EXPERTS = {  # each expert whole, halves of all on ranks that are copies else, halves as of other tensors, no expert's
    "ep": EP,
    "etp": {"expert_tensor_parallel_size": 2, "moe_grouped_gemm": True},
    "tp": TP,
    "tp ep": {**TP, **EP, "expert_tensor_parallel_size": 1, "moe_grouped_gemm": True},
    "tp copies": {**TP, "expert_tensor_parallel_size": 1},
}
PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "kl_loss_coef": 0.05}


def config_of(folder, megatron, **train):
    """A stage's config."""
    from slime_core.config.schema import Config

    given = {"rollout": {"hf_checkpoint": str(folder)}, "seed": 3, "plugins": ("models",), "megatron": megatron}
    # AdamW divides by the size of the gradient: with its usual epsilon, rounding of a gradient near 0 would be compared
    given["train"] = {"dtype": "float32", "lr": 1e-3, "adam_eps": 1e-3, "max_tokens_per_gpu": 40, **train}
    return Config.model_validate(given)


def with_columns(train):
    """A batch with what a stage's loss reads."""
    import trainer_bench

    batch = trainer_bench.batch_of()
    old = batch.columns["rollout_log_probs"]
    columns = {"old_policy": old, "reference": old - 0.1}
    if "critic_lr" in train:
        columns |= {"values": old * 0, "returns": old}
    return replace(batch, columns=batch.columns | columns)


class Ranks:
    """A worker of a layout, made in a process that held another before."""

    def __init__(self, root, name, megatron, rank, world, meeting="first", **train):
        from megatron.core import parallel_state

        from slime_core.plugins import load_plugins
        from slime_core.weights.folder import ModelFolder
        from slime_megatron.worker import MegatronWorker

        parallel_state.destroy_model_parallel()
        if dist.is_initialized() and dist.get_world_size() != world:
            dist.destroy_process_group()
        config = config_of(root / name, megatron, **train)
        folder = ModelFolder.open(root / name)
        self.worker = MegatronWorker(
            config, load_plugins(config), folder, rank, world, "cpu", root / meeting if world > 1 else None
        )
        self.worker.begin(config)
        self.batch = with_columns(train)

    def step(self):
        """A step, then the fingerprint."""
        self.worker.step(self.batch)
        return self.worker.fingerprint()

    def save(self, path):
        """Save, and wait until every rank has; the names of this rank's files."""
        self.worker.save(path)
        marks = self.worker.staging.writing.result()
        self.worker.barrier()
        return sorted(marks)

    def restore(self, path):
        """Restore, then the fingerprint."""
        self.worker.restore(path)
        return self.worker.fingerprint()

    def whole(self, path):
        """Store all weights."""
        found = self.worker.whole()
        if found:
            torch.save(found, path)


def pair(rank, root):
    """Both ranks."""
    found = {}
    ranks = Ranks(root, "dense", TP, rank, 2, **PPO)
    ranks.worker.export(root / "exported")
    found["begin"] = ranks.worker.fingerprint()
    found["first"] = ranks.step()
    found["second"] = ranks.step()
    found["files"] = ranks.save(root / "tp")
    generator = torch.get_rng_state()
    found["third"] = ranks.step()
    ranks.whole(root / "third.pt")
    torch.rand(3)
    found["restored"] = ranks.restore(root / "tp")
    found["generator"] = bool(torch.equal(torch.get_rng_state(), generator))
    found["third again"] = ranks.step()
    found["counters"] = [ranks.worker.steps, ranks.worker.actor.steps, ranks.worker.critic.learner.steps]
    ranks = Ranks(root, "dense", PP, rank, 2, **PPO)
    found["pp"] = ranks.restore(root / "tp")
    ranks.save(root / "pp")
    ranks.step()
    ranks.whole(root / "third-pp.pt")
    ranks = Ranks(root, "dense", {}, rank, 2, **PPO)
    found["dp"] = ranks.restore(root / "pp")
    ranks.save(root / "dp")
    ranks.step()
    ranks.whole(root / "third-dp.pt")
    experts(rank, root, found)
    halves(rank, root, found)
    ranks.worker.barrier()
    dist.destroy_process_group()
    if rank == 0:
        ranks = Ranks(root, "dense", {}, 0, 1, **PPO)
        found["alone"] = ranks.restore(root / "dp")
        ranks.save(root / "alone")
        ranks.step()
        ranks.whole(root / "third-alone.pt")
        dist.destroy_process_group()
    ranks = Ranks(root, "dense", TP, rank, 2, "second", **PPO)  # rank 1 waits where they meet
    found["back"] = ranks.restore(root / "alone")
    found["third at last"] = ranks.step()
    (root / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def experts(rank, root, found):
    """A mixture of experts, by stages, by experts and by rows of experts."""
    ranks = Ranks(root, "moe", PP, rank, 2)
    found["moe begin"] = ranks.worker.fingerprint()
    found["moe first"] = ranks.step()
    ranks.save(root / "moe-pp")
    found["moe second"] = ranks.step()
    ranks, before = Ranks(root, "moe", PP, rank, 2), "pp"
    ranks.restore(root / "moe-pp")
    found["moe norms"] = {"pp": ranks.worker.step(ranks.batch)["grad_norm"]}
    for name, flags in EXPERTS.items():
        ranks = Ranks(root, "moe", flags, rank, 2)
        found[f"moe {name}"] = ranks.restore(root / f"moe-{before}")
        ranks.save(root / f"moe-{name}")
        found["moe norms"][name], before = ranks.worker.step(ranks.batch)["grad_norm"], name
    ranks = Ranks(root, "moe", PP, rank, 2)
    found["moe back"] = ranks.restore(root / f"moe-{before}")
    found["moe second again"] = ranks.step()


def halves(rank, root, found):
    """Weights in bfloat16, whose masters are saved beside them."""
    ranks = Ranks(root, "dense", TP, rank, 2, dtype="bfloat16")
    found["half first"] = ranks.step()
    ranks.save(root / "half-tp")
    found["half second"] = ranks.step()
    ranks = Ranks(root, "dense", {}, rank, 2, dtype="bfloat16")
    found["half dp"] = ranks.restore(root / "half-tp")
    ranks.save(root / "half-dp")
    ranks = Ranks(root, "dense", TP, rank, 2, dtype="bfloat16")
    found["half back"] = ranks.restore(root / "half-dp")
    found["half second again"] = ranks.step()


class Here:
    """The torch thread is this one: what stands in for devices holds for the thread that enters it."""

    async def run(self, fn, *args):
        """As `TorchThread.run`."""
        return fn(*args)


def refused(ranks, path):
    """How a restore is refused, and whether anything has changed."""
    before = ranks.worker.fingerprint(), ranks.worker.steps, ranks.worker.actor.steps
    try:
        ranks.worker.restore(path)
    except Exception as error:
        same = before == (ranks.worker.fingerprint(), ranks.worker.steps, ranks.worker.actor.steps)
        return [getattr(error, "code", repr(error)), str(error), same]
    return ["restored", "", False]


def alone(root):
    """One rank: what is refused, what megatron-core itself reads, and a process that ends while it saves."""
    found = {}
    ranks = Ranks(root, "dense", {}, 0, 1)
    found["begin"] = ranks.worker.fingerprint()
    found["kept"] = ranks.step()
    ranks.save(root / "whole")
    found["loaded"] = loaded(ranks, root / "whole")
    found["next"] = ranks.step()
    for name, damage in DAMAGES.items():
        shutil.copytree(root / "whole", root / name)
        damage(root / name)
        found[name] = refused(ranks, root / name)
    other = Ranks(root, "other", {}, 0, 1)
    found["other"] = refused(other, root / "whole")
    plain = Ranks(root, "dense", {"use_distributed_optimizer": False}, 0, 1)
    found["plain"] = [plain.restore(root / "whole"), plain.step()]
    plain.restore(root / "whole")
    plain.save(root / "plain")
    found["distributed"] = [ranks.restore(root / "plain"), ranks.step()]
    half = Ranks(root, "dense", {}, 0, 1, dtype="bfloat16")
    half.step()
    half.save(root / "half")
    found["half"] = [half.step(), half.restore(root / "half"), half.step()]
    found["away"] = away(half, root)
    found["reference"] = reference(root)
    found["no critic"] = refused(Ranks(root, "dense", {}, 0, 1, **PPO), root / "whole")
    (root / "alone.json").write_text(json.dumps(found))
    asyncio.run(killed(root))


def away(ranks, root):
    """Names of files that differ where the state was given away before a save, and bytes that came back for it."""
    ranks.save(root / "half-here")
    offload, held = ranks.worker.offload, ranks.worker.policy.tensors.held.values()
    offload.leave({"parameters", "optimizer", "gradients"})
    names = ranks.save(root / "half-away")
    back = sum(one.tensor.untyped_storage().nbytes() for one in held)
    offload.back(offload.away)
    files = [[(root / where / name).read_bytes() for where in ("half-here", "half-away")] for name in names]
    return [[name for name, (here, gone) in zip(names, files) if here != gone], back]


def reference(root):
    """Names of a second stage's reference that come back otherwise, and whether a fresh worker's was another."""
    ranks = Ranks(root, "dense", {}, 0, 1, **PPO)
    ranks.step()
    ranks.worker.begin(ranks.worker.stage)
    ranks.save(root / "stage")
    fresh = Ranks(root, "dense", {}, 0, 1, **PPO)
    meant, before = ranks.worker.frozen.reference, dict(fresh.worker.frozen.reference)
    fresh.restore(root / "stage")
    found = fresh.worker.frozen.reference
    wrong = [name for name in meant if not torch.equal(meant[name], found[name])]
    return [wrong, any(not torch.equal(meant[name], before[name]) for name in meant)]


def loaded(ranks, path):
    """Names of weights that megatron-core's own loading gives otherwise than they are."""
    from megatron.core import dist_checkpointing

    stage = ranks.worker.policy.stage
    mine = {name: tensor.detach().clone() for name, tensor in stage.named_parameters()}
    wanted = stage.sharded_state_dict()
    given = dist_checkpointing.load({"model": wanted}, str(path))["model"]
    return [name for name, tensor in mine.items() if not torch.equal(given[name], tensor)] or len(mine)


def cut(folder):
    """The last bytes of a rank's file are lost."""
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100)


def overwritten(folder):
    """The begin of a rank's file is something else."""
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.write(b"\0" * 20_000)


def of_fsdp(folder):
    """Counters as the other backend writes them."""
    (folder / "trainer.json").write_text('{"format": 2}')


DAMAGES = {
    "cut": cut,
    "overwritten": overwritten,
    "lost": lambda folder: (folder / "__0_0.distcp").unlink(),
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "no counters": lambda folder: (folder / "trainer.json").unlink(),
    "of fsdp": of_fsdp,
}


async def killed(root):
    """A checkpoint; then another, in which this process dies between `save` and `saved`."""
    from slime_core import failpoints
    from slime_core.checkpoint.manifest import CheckpointMetadata
    from slime_core.checkpoint.store import Checkpoints
    from slime_megatron.trainer import MegatronTrainer

    class Nothing:
        async def counts(self):
            return {}

    ranks = Ranks(root, "dense", {}, 0, 1)
    trainer = MegatronTrainer.__new__(MegatronTrainer)
    trainer._thread, trainer._worker = Here(), ranks.worker
    checkpoints = Checkpoints(root / "checkpoints", keep=2, note=print)
    about = CheckpointMetadata(state={}, config={}, plugins="", machine={}, epoch=1)
    ranks.step()
    await checkpoints.begin(1, about, trainer, Nothing())
    await checkpoints.settle()
    (root / "first.txt").write_text(await trainer.fingerprint())
    ranks.step()
    failpoints.arm("checkpoint.begin=kill")
    await checkpoints.begin(2, about, trainer, Nothing())


def again(root):
    """After it was killed: the newest whole checkpoint, with its fingerprint."""
    from slime_core.checkpoint.store import Checkpoints

    ranks = Ranks(root, "dense", {}, 0, 1)
    latest = Checkpoints(root / "checkpoints", keep=2, note=print).latest()
    (root / "again.json").write_text(json.dumps([latest.version, ranks.restore(latest.trainer)]))


def main(which, root):
    """See above."""
    from cpu import cpu_redirect

    torch.set_num_threads(1)
    with cpu_redirect():
        if which in ("alone", "again"):
            {"alone": alone, "again": again}[which](root)
        else:
            pair(int(which), root)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

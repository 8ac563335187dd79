"""State that is saved at one layout and goes on at another, bit by bit; folders that are refused; exports; fingerprints.

Ranks do all of it once, and the tests look at what they found.
"""

import asyncio
import hashlib
import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from megatron_ranks import (
    EVERYTHING,
    PIPELINE,
    PPO,
    TENSOR,
    CallerThread,
    Ranks,
    answer,
    mixture,
    rank_command,
    run_ranks,
)
from safetensors.torch import load_file

from slime_convert.folder_writing import How
from slime_core.testing import tiny_model
from slime_core.trainers.fsdp.model import fingerprint
from slime_core.weights.folder import ModelFolder
from slime_megatron.convert.conversion import dist_to_hf

pytest.importorskip("megatron.core", reason="not proven: no megatron-core; pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

EP = {"expert_model_parallel_size": 2}
EXPERTS = {  # each expert whole, halves of all on ranks that are copies else, halves as of other tensors, no expert's
    "ep": EP,
    "etp": {"expert_tensor_parallel_size": 2, "moe_grouped_gemm": True},
    "tp": TENSOR,
    "tp ep": {**TENSOR, **EP, "expert_tensor_parallel_size": 1, "moe_grouped_gemm": True},
    "tp copies": {**TENSOR, "expert_tensor_parallel_size": 1},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Model folders: one whose output matrix is tied, another family's, and a mixture of experts."""
    folder = tmp_path_factory.mktemp("root")
    tiny_model(folder / "dense", tied=True)
    tiny_model(folder / "other", "llama", layers=3)
    mixture(folder / "moe")
    return folder


@pytest.fixture(scope="module")
def pair(root, zygote, tmp_path_factory):
    """What both ranks found."""
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), two_ranks, 2, root)


@pytest.fixture(scope="module")
def alone(root, zygote, tmp_path_factory):
    """What one rank found."""
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), one_rank, 1, root)[0]


def of_fsdp(folder):
    """The other backend's fingerprint of a folder's model."""
    return fingerprint(dict(ModelFolder.open(folder).build_model("float32").named_parameters()), 1)


def converted(source, target, origin):
    """Tensors of a checkpoint by `slime convert dist-to-hf`."""
    from slime_models.families import BRIDGES

    dist_to_hf(source, target, origin, lambda config: BRIDGES[config.model_type], How(), trusted=True)
    return load_file(target / "model.safetensors")


def test_the_next_step_is_that_of_the_run_that_went_on(pair):
    for found in pair:
        assert found["restored"] == found["second"] != found["first"] != found["begin"]
        assert found["third again"] == found["third"] != found["second"]
        assert found["generator"]
        assert found["counters"] == [3, 3, 3]


@pytest.mark.parametrize("layout", ["pp", "dp", "alone"])
def test_another_layout_holds_the_same_weights_and_makes_the_same_step(root, pair, layout):
    assert pair[0][layout] == pair[0]["second"]
    meant, found = torch.load(root / "third.pt"), torch.load(root / f"third-{layout}.pt")
    assert meant.keys() == found.keys()
    for name, tensor in meant.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-4, atol=3e-6, msg=lambda t, name=name: f"{name}: {t}")


def test_weights_moments_and_critic_come_back_from_all_layouts_bit_by_bit(pair):
    for found in pair:  # shards -> stages -> copies -> one rank -> shards
        assert found["back"] == found["second"]
        assert found["third at last"] == found["third"]


def test_experts_come_back_from_ranks_that_shared_them(pair):
    for found in pair:
        for name in ("ep", "etp", "tp", "tp ep", "tp copies", "back"):
            assert found["moe first"] == found[f"moe {name}"] != found["moe begin"], name
        assert found["moe second again"] == found["moe second"] != found["moe first"]


def test_a_gradients_norm_counts_each_expert_once_at_every_layout(pair):
    for found in pair:
        for name, norm in found["moe norms"].items():
            assert norm == pytest.approx(found["moe norms"]["pp"], rel=1e-5), name


def test_the_fingerprint_is_the_other_backends(root, pair, alone):
    assert alone["begin"] == of_fsdp(root / "dense")
    assert pair[0]["moe begin"] == of_fsdp(root / "moe")


def test_each_rank_answers_for_its_own_files(root, pair):
    small = [".metadata", "common.pt", "metadata.json", "trainer.json"]
    assert pair[0]["files"] == sorted(["__0_0.distcp", "generators-1-of-2.json", *small])
    assert pair[1]["files"] == ["__1_0.distcp", "generators-2-of-2.json"]
    listed = json.loads((root / "tp" / "trainer.json").read_text())["files"]
    assert {*listed, "trainer.json"} == {file.name for file in (root / "tp").iterdir()}


def test_ranks_with_the_same_weights_write_a_half_each(root, pair):
    halves = [(root / "dp" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(halves) < 1.2 * min(halves), halves
    assert sum(halves) < 1.1 * (root / "alone" / "__0_0.distcp").stat().st_size


def test_a_checkpoint_becomes_a_model_folder(root, pair, alone, tmp_path):
    found = converted(root / "whole", tmp_path / "whole", root / "dense")
    assert fingerprint(found, 1) == alone["kept"]
    shards, one = (converted(root / name, tmp_path / name, root / "dense") for name in ("tp", "alone"))
    assert shards.keys() == found.keys()
    assert all(torch.equal(shards[name], one[name]) for name in shards)


def test_an_export_is_the_folder_that_went_in(root, pair):
    made, meant = root / "exported", root / "dense"
    given = load_file(meant / "model.safetensors")
    given.pop("lm_head.weight", None)  # tied
    written = load_file(made / "model.safetensors")
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in given)
    opened = ModelFolder.open(made)
    assert json.loads((made / "config.json").read_text()) == json.loads((meant / "config.json").read_text())
    assert opened.tokenizer().encode("a b") == ModelFolder.open(meant).tokenizer().encode("a b")


def test_megatron_core_itself_loads_every_weight(alone):
    assert isinstance(alone["loaded"], int), alone["loaded"]
    assert alone["loaded"] > 10


@pytest.mark.parametrize(
    ("damage", "code", "word"),
    [
        ("cut", "STO112", "cut short"),
        ("overwritten", "STO112", "__0_0.distcp"),
        ("lost", "STO111", "__0_0.distcp"),
        ("no metadata", "STO111", "at this or any other layout"),
        ("no counters", "STO111", "dist-to-hf"),
        ("of fsdp", "STO113", "fsdp-to-hf"),
        ("other", "TRN108", "output_layer.weight"),
        ("no critic", "TRN108", "critic"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_changes(alone, damage, code, word):
    found, text, same = alone[damage]
    assert found == code
    assert word in text
    assert same


def test_an_optimizer_that_shares_nothing_goes_on_with_the_states_of_one_that_does(alone):
    assert alone["plain"] == alone["distributed"] == [alone["kept"], alone["next"]]


def test_a_stages_reference_comes_back(alone):
    assert alone["reference"] == [[], True]


def test_masters_of_bfloat16_weights_come_back_from_another_layout(pair):
    for found in pair:
        assert found["half first"] == found["half dp"] == found["half back"]
        assert found["half second again"] == found["half second"] != found["half first"]


def test_masters_of_bfloat16_weights_come_back(alone):
    after, restored, again = alone["half"]
    assert after == again != restored


def test_offloaded_state_is_saved_from_the_host(alone):
    assert alone["away"] == [[], 0]


def test_a_process_that_dies_while_it_saves_leaves_the_checkpoint_before(root, zygote, tmp_path):
    folder, scripts = root / "checkpoints", [[str(word) for word in rank_command(killed_while_saving, 0, root)]]
    zygote.ask(scripts=scripts, log=str(tmp_path / "killed.txt"), path=[], hung=240)
    assert sorted(path.name[:6] for path in folder.iterdir()) == [".tmp-2", "step-1"]
    assert run_ranks(zygote, tmp_path, resumed, 1, root) == [[1, (root / "first.txt").read_text()]]
    marks = json.loads((folder / "step-1" / "MANIFEST.json").read_text())["files"]
    for name in ("__0_0.distcp", ".metadata", "common.pt", "trainer.json"):
        data = (folder / "step-1" / "trainer" / name).read_bytes()
        assert marks[f"trainer/{name}"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def two_ranks(rank, root):
    """A layout after another in the same processes: two shards, two stages, copies, one of them alone, and back."""
    found = {}
    ranks = Ranks(root, "dense", TENSOR, rank, 2, **PPO)
    ranks.worker.export(root / "exported")
    found["begin"] = ranks.worker.fingerprint()
    found["first"] = ranks.step()
    found["second"] = ranks.step()
    found["files"] = ranks.save(root / "tp")
    generator = torch.get_rng_state()
    found["third"] = ranks.step()
    store_weights(ranks, root / "third.pt")
    torch.rand(3)
    found["restored"] = ranks.restore(root / "tp")
    found["generator"] = bool(torch.equal(torch.get_rng_state(), generator))
    found["third again"] = ranks.step()
    found["counters"] = [ranks.worker.steps, ranks.worker.actor.steps, ranks.worker.critic.learner.steps]
    ranks = Ranks(root, "dense", PIPELINE, rank, 2, **PPO)
    found["pp"] = ranks.restore(root / "tp")
    ranks.save(root / "pp")
    ranks.step()
    store_weights(ranks, root / "third-pp.pt")
    ranks = Ranks(root, "dense", {}, rank, 2, **PPO)
    found["dp"] = ranks.restore(root / "pp")
    ranks.save(root / "dp")
    ranks.step()
    store_weights(ranks, root / "third-dp.pt")
    experts(rank, root, found)
    halves(rank, root, found)
    ranks.worker.barrier()
    dist.destroy_process_group()
    if rank == 0:
        ranks = Ranks(root, "dense", {}, 0, 1, **PPO)
        found["alone"] = ranks.restore(root / "dp")
        ranks.save(root / "alone")
        ranks.step()
        store_weights(ranks, root / "third-alone.pt")
        dist.destroy_process_group()
    ranks = Ranks(root, "dense", TENSOR, rank, 2, "second", **PPO)  # rank 1 waits where they meet
    found["back"] = ranks.restore(root / "alone")
    found["third at last"] = ranks.step()
    return found


def store_weights(ranks, path):
    """Store all weights, by rank 0."""
    tensors = ranks.worker.whole()
    if tensors:
        torch.save(tensors, path)


def experts(rank, root, found):
    """A mixture of experts, by stages, by experts and by rows of experts."""
    ranks = Ranks(root, "moe", PIPELINE, rank, 2)
    found["moe begin"] = ranks.worker.fingerprint()
    found["moe first"] = ranks.step()
    ranks.save(root / "moe-pp")
    found["moe second"] = ranks.step()
    ranks, before = Ranks(root, "moe", PIPELINE, rank, 2), "pp"
    ranks.restore(root / "moe-pp")
    found["moe norms"] = {"pp": ranks.worker.step(ranks.batch)["grad_norm"]}
    for name, flags in EXPERTS.items():
        ranks = Ranks(root, "moe", flags, rank, 2)
        found[f"moe {name}"] = ranks.restore(root / f"moe-{before}")
        ranks.save(root / f"moe-{name}")
        found["moe norms"][name], before = ranks.worker.step(ranks.batch)["grad_norm"], name
    ranks = Ranks(root, "moe", PIPELINE, rank, 2)
    found["moe back"] = ranks.restore(root / f"moe-{before}")
    found["moe second again"] = ranks.step()


def halves(rank, root, found):
    """Weights in bfloat16, whose masters are saved beside them."""
    ranks = Ranks(root, "dense", TENSOR, rank, 2, dtype="bfloat16")
    found["half first"] = ranks.step()
    ranks.save(root / "half-tp")
    found["half second"] = ranks.step()
    ranks = Ranks(root, "dense", {}, rank, 2, dtype="bfloat16")
    found["half dp"] = ranks.restore(root / "half-tp")
    ranks.save(root / "half-dp")
    ranks = Ranks(root, "dense", TENSOR, rank, 2, dtype="bfloat16")
    found["half back"] = ranks.restore(root / "half-dp")
    found["half second again"] = ranks.step()


def refused(ranks, path):
    """How a restore is refused, and whether anything has changed."""
    before = ranks.worker.fingerprint(), ranks.worker.steps, ranks.worker.actor.steps
    try:
        ranks.worker.restore(path)
    except Exception as error:
        same = before == (ranks.worker.fingerprint(), ranks.worker.steps, ranks.worker.actor.steps)
        return [getattr(error, "code", repr(error)), str(error), same]
    return ["restored", "", False]


def one_rank(rank, root):
    """Files that are damaged, other models, what megatron-core itself reads, and other optimizers."""
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
    return found


def away(ranks, root):
    """Names of files that differ where the state was given away before a save, and bytes that came back for it."""
    ranks.save(root / "half-here")
    offload, held = ranks.worker.offload, ranks.worker.policy.tensors.by_name.values()
    offload.to_host(EVERYTHING)
    names = ranks.save(root / "half-away")
    back = sum(one.tensor.untyped_storage().nbytes() for one in held)
    offload.to_device(offload.on_host)
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

    (stage,) = ranks.worker.policy.stage
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


DAMAGES = {
    "cut": cut,
    "overwritten": overwritten,
    "lost": lambda folder: (folder / "__0_0.distcp").unlink(),
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "no counters": lambda folder: (folder / "trainer.json").unlink(),
    "of fsdp": lambda folder: (folder / "trainer.json").write_text('{"format": 2}'),
}


def killed_while_saving(rank, root):
    """A checkpoint; then another, in which this process dies between `save` and `saved`."""
    from slime_core import failpoints
    from slime_core.checkpoint.manifest import CheckpointMetadata
    from slime_core.checkpoint.store import Checkpoints
    from slime_megatron.trainer import MegatronTrainer

    class NoGroups:
        async def counts(self):
            return {}

    ranks = Ranks(root, "dense", {}, 0, 1)
    trainer = MegatronTrainer.__new__(MegatronTrainer)
    trainer._thread, trainer._worker = CallerThread(), ranks.worker
    checkpoints = Checkpoints(root / "checkpoints", keep=2, note=print)
    metadata = CheckpointMetadata(state={}, config={}, plugins="", machine={}, epoch=1)

    async def save_twice():
        ranks.step()
        await checkpoints.begin(1, metadata, trainer, NoGroups())
        await checkpoints.wait()
        (root / "first.txt").write_text(await trainer.fingerprint())
        ranks.step()
        failpoints.arm("checkpoint.begin=kill")
        await checkpoints.begin(2, metadata, trainer, NoGroups())

    asyncio.run(save_twice())


def resumed(rank, root):
    """After it was killed: the newest whole checkpoint, with its fingerprint."""
    from slime_core.checkpoint.store import Checkpoints

    latest = Checkpoints(root / "checkpoints", keep=2, note=print).latest()
    return [latest.version, Ranks(root, "dense", {}, 0, 1).restore(latest.trainer)]


if __name__ == "__main__":
    answer(two_ranks, one_rank, killed_while_saving, resumed)

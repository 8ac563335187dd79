"""State that is saved at one layout and goes on at another, bit by bit; folders that are refused; exports; fingerprints.

The ranks of `saving_main.py` do all of it once, and the tests look at what they found.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from family_models import mixture
from safetensors.torch import load_file

from slime_convert.folder_writing import How
from slime_core.testing import tiny_model
from slime_core.trainers.fsdp.model import fingerprint
from slime_core.weights.folder import ModelFolder
from slime_megatron.convert.conversion import dist_to_hf

pytest.importorskip("megatron.core", reason="not proven: no megatron-core; pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

MAIN = Path(__file__).with_name("saving_main.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Model folders: one whose output matrix is tied, another family's, and a mixture of experts."""
    found = tmp_path_factory.mktemp("root")
    tiny_model(found / "dense", tied=True)
    tiny_model(found / "other", "llama", layers=3)
    mixture(found / "moe")
    return found


@pytest.fixture(scope="module")
def pair(root, zygote, tmp_path_factory):
    """What both ranks found."""
    zygote.together(tmp_path_factory.mktemp("said"), [[MAIN, rank, root] for rank in range(2)])
    return [json.loads((root / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(root, zygote, tmp_path_factory):
    """What one rank found, before it was killed."""
    log = tmp_path_factory.mktemp("said") / "scripts.txt"
    zygote.ask(scripts=[[str(MAIN), "alone", str(root)]], log=str(log), path=[], hung=240)
    assert (root / "alone.json").is_file(), log.read_text()
    return json.loads((root / "alone.json").read_text())


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
def test_what_does_not_fit_is_refused_and_nothing_changes(alone, damage, code, word):
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


def test_what_the_trainer_gave_away_is_saved_from_the_host(alone):
    assert alone["away"] == [[], 0]


def test_a_process_that_dies_while_it_saves_leaves_the_checkpoint_before(root, alone, zygote, tmp_path):
    folder = root / "checkpoints"
    assert sorted(path.name[:6] for path in folder.iterdir()) == [".tmp-2", "step-1"]
    zygote.together(tmp_path, [[MAIN, "again", root]])
    assert json.loads((root / "again.json").read_text()) == [1, (root / "first.txt").read_text()]
    marks = json.loads((folder / "step-1" / "MANIFEST.json").read_text())["files"]
    for name in ("__0_0.distcp", ".metadata", "common.pt", "trainer.json"):
        data = (folder / "step-1" / "trainer" / name).read_bytes()
        assert marks[f"trainer/{name}"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

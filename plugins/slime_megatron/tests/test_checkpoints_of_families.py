"""Checkpoints of every family, saved at one layout and restored at another: weights, masters and moments, bit by bit.

    two shards -> an interleaved pipeline -> experts on two ranks, or two copies -> two shards, and a model folder

Two ranks do all of it, in bfloat16: masters are in the checkpoint beside the weights.
"""

import pytest
import torch
from megatron_ranks import PIPELINE, TENSOR, Ranks, answer, equal, optimizer_states, run_ranks, weights
from safetensors.torch import load_file
from test_families import FAMILIES, draw

from slime_convert.folder_writing import How
from slime_core.testing.models import VOCAB, char_tokenizer
from slime_megatron.convert.conversion import dist_to_hf

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-families")]


FREQUENT = ("qwen2-tied", "deepseek_v3", "qwen3_5_moe")
"""By day: a tied embedding, latent and linear attention with experts, a vision tower that learns."""
PARAMS = [name if name in FREQUENT else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]


@pytest.fixture(scope="module", params=PARAMS)
def family(request):
    """Its name."""
    return request.param


@pytest.fixture(scope="module")
def root(family, tmp_path_factory):
    """Where the family's folder is, with a tokenizer."""
    folder = tmp_path_factory.mktemp("family")
    draw(family, folder)
    char_tokenizer(VOCAB).save_pretrained(folder / family / "model")
    return folder / family


@pytest.fixture(scope="module")
def ranks(root, zygote, tmp_path_factory):
    """What both found."""
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), through_layouts, 2, root)


def test_state_goes_through_every_layout_and_comes_back_bit_by_bit(ranks):
    for found in ranks:
        assert found["changed"], "the step changed nothing"
        assert len({*found["fingerprints"]}) == 1, found["fingerprints"]
        assert found["weights"]
        assert found["states"] > 20


def test_the_checkpoint_of_the_last_layout_becomes_the_folder_that_the_first_exports(root, ranks, tmp_path):
    from slime_models.families import BRIDGES

    target = tmp_path / "hf"
    dist_to_hf(root / "2", target, root / "model", lambda config: BRIDGES[config.model_type], How(), trusted=True)
    exported, converted = tensors_of(root / "hf"), tensors_of(target)
    assert exported.keys() == converted.keys()
    assert [name for name in exported if not torch.equal(exported[name], converted[name])] == []


def tensors_of(folder):
    """All tensors of a model folder by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def through_layouts(rank, root):
    """A step at the first layout, its state through the others, and the first one's again."""
    train = {"dtype": "bfloat16", "freeze_vision_tower": False}
    ranks = Ranks(root, "model", TENSOR, rank, 2, **train)
    sizes = ranks.worker.settings.sizes
    chunks = PIPELINE | {"pipeline_model_parallel_layout": f"E{'t' * (sizes.layers - 2)}|t|t|L"}
    shared = {"expert_model_parallel_size": 2} if sizes.experts else {}
    before = weights(ranks.worker)
    fingerprints = [ranks.step()]
    held, states = weights(ranks.worker), optimizer_states(ranks.worker)
    ranks.worker.export(root / "hf")
    for number, layout in enumerate((chunks, shared, TENSOR)):
        ranks.save(root / str(number))
        ranks = Ranks(root, "model", layout, rank, 2, **train)
        fingerprints.append(ranks.restore(root / str(number)))
    return {
        "changed": not equal(before, held),
        "fingerprints": fingerprints,
        "weights": equal(held, weights(ranks.worker)),
        "states": equal(states, optimizer_states(ranks.worker)) and len(states),
    }


if __name__ == "__main__":
    answer(through_layouts)

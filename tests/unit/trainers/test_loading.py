"""A base is read, rounded and dropped a tensor at a time: the host holds what stays, and one tensor more."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peak_memory import ROUNDING, mixture_folder, peak_of, sizes

from slime_core.planning.fsdp import loading
from slime_core.planning.sizes import ModelSizes
from slime_core.testing.families import family_model
from slime_core.trainers.fsdp.adapters import rounded_on
from slime_core.weights.build import load_converted
from slime_core.weights.folder import ModelFolder
from slime_core.weights.loading import places_of

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")


def test_the_peak_of_a_base_in_4_bits_is_what_is_kept_and_one_tensor(zygote, tmp_path):
    mixture_folder(tmp_path / "large")
    mixture_folder(tmp_path / "small", hidden_size=128, num_hidden_layers=1, moe_intermediate_size=128)
    zygote.together(tmp_path, [[__file__, tmp_path]])
    peak, kept, plain, largest = json.loads((tmp_path / "peak.json").read_text())
    assert plain > 180e6
    assert kept < 0.3 * plain
    assert peak < kept + largest + ROUNDING < plain / 2


def test_a_plan_counts_the_largest_tensor(tmp_path):
    sizes_of = ModelSizes.of(mixture_folder(tmp_path / "large"))
    assert loading(sizes_of, 2) == 2 * 16 * 512 * 1024  # gates and ups of a layer's experts
    assert loading(sizes_of, 4) == 3 * loading(sizes_of, 2), "as it was read, and in float32"


def measure(root):
    """Peak of a base in nf4, after a small one brought what is imported and kept."""
    for name in ("small", "large"):
        folder = ModelFolder.open(root / name)
        put = rounded_on(CPU, folder, "nf4")
        peak, model = peak_of(lambda f=folder, p=put: f.build_model("bfloat16", put=p))
    (root / "peak.json").write_text(json.dumps([peak, *sizes(model)]))


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "qwen3-next", "neox"])
def test_tensors_that_are_read_one_by_one_are_those_that_transformers_reads(family, tmp_path):
    folder = ModelFolder.open(family_model(tmp_path / "m", family))
    expected = load_converted(folder.path, folder.config, "bfloat16", None, False).state_dict()
    names = []

    def put(name, tensor):
        names.append(name)
        return tensor.clone()

    model = folder.build_model("bfloat16", put=put)
    assert names == [name for name, _ in model.named_parameters()]
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert places_of(model, folder.tensors()) is not None


if __name__ == "__main__":
    measure(Path(sys.argv[1]))

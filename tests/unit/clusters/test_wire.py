"""Frames between the driver and its children bring back what was sent."""

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from slime_core.clusters.channel import decode, encode
from slime_core.config.schema import Config
from slime_core.durable import FileMark
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.types import ArrayRef, Completion, GenerateRequest, Media, SamplingParams, WeightUpdate

pytestmark = pytest.mark.unit


def _round_trip(value):
    return decode(encode(value))


def test_nested_values_and_arrays_return_as_they_were():
    value = {
        "a": [1, 2.5, "x", None, True],
        "b": {"c": np.arange(6, dtype=np.int32).reshape(2, 3)},
        "d": np.float32(0.5),
    }
    back = _round_trip(value)
    assert back["a"] == [1, 2.5, "x", None, True]
    assert back["d"] == 0.5
    np.testing.assert_array_equal(back["b"]["c"], value["b"]["c"])
    assert back["b"]["c"].dtype == np.int32
    back["b"]["c"][0, 0] = 9  # arrays that arrive are writable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_tensors_keep_dtype_shape_and_bits(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    update = WeightUpdate(version=3, epoch=1, transport="tensors", tensors={"w": tensor.T}, fingerprints={"w": "ab"})
    back = _round_trip(update)
    assert isinstance(back, WeightUpdate)
    assert back.version == 3
    assert back.tensors["w"].dtype == dtype
    assert torch.equal(back.tensors["w"], tensor.T)


def test_a_weight_in_few_bits_crosses_as_the_floats_it_stands_for():
    weight = QuantisedWeight.of(torch.arange(256.0).view(2, 128), "nf4", torch.bfloat16)
    back = _round_trip({"w": weight, "parameter": torch.nn.Parameter(weight, requires_grad=False)})
    assert {type(one) for one in back.values()} == {torch.Tensor}
    assert all(torch.equal(one, weight.dense()) for one in back.values())


def test_empty_and_scalar_arrays_cross():
    back = _round_trip([np.zeros((0, 3)), np.array(2.0), torch.zeros(0)])
    assert back[0].shape == (0, 3)
    assert back[1] == 2.0
    assert back[2].shape == (0,)


def test_a_reference_keeps_its_shape_a_tuple():
    ref = ArrayRef(segment="a.seg", offset=1, dtype="int16", shape=(2, 3), crc32=7)
    assert _round_trip(ref) == ref


def test_other_types_are_refused_by_name():
    with pytest.raises(TypeError, match="a complex does not cross"):
        encode({"x": 1j})


def test_arguments_of_protocols_arrive_as_they_are():
    config = Config.model_validate({"seed": 7})
    value = [{"kv", "weights"}, frozenset({"policy"}), Path("/a/b"), config, FileMark(size=3, sha256="ab")]
    assert _round_trip(value) == value
    assert isinstance(_round_trip(value)[1], frozenset)


def test_an_engines_requests_and_completions_lose_nothing():
    params = SamplingParams(max_new_tokens=3, temperature=0.1, top_p=0.9, stop=("\n", "é"), stop_token_ids=(3, 7))
    request = GenerateRequest(id="main/1-0", tokens=[1, 2], params=params, seed=2**64 - 1, session_id="s", kept=1)
    assert _round_trip(request) == request
    assert hash(_round_trip(request).params) == hash(params)
    pixels = np.arange(6, dtype=np.float32).reshape(2, 3)
    media = _round_trip(replace(request, media=Media(images=(b"\x89PNG\x00",), arrays={"pixel_values": pixels}))).media
    assert media.images == (b"\x89PNG\x00",)
    np.testing.assert_array_equal(media.arrays["pixel_values"], pixels)
    floats = [0.1 + 0.2, -1e-320, math.nextafter(1.0, 2.0), float(np.float32(0.1)), -0.0, float("-inf")]
    done = Completion(
        id="a", tokens=[5] * 6, log_probs=floats, plain_log_probs=floats, finish="abort", versions=[3] * 6, epoch=2
    )
    back = _round_trip([done])[0]
    assert back == done
    assert [struct.pack("<d", x) for x in back.log_probs] == [struct.pack("<d", x) for x in floats]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
        max_leaves=12,
    )
)
def test_any_nested_value_returns_with_its_types(value):
    back = _round_trip(value)
    assert (back, repr(back)) == (value, repr(value))

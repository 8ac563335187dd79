"""Frames between driver and ranks bring back what was sent."""

import socket

import numpy as np
import pytest
import torch

from slime_core.clusters.wire import encode, receive_blocking, send_blocking
from slime_core.types import ArrayRef, WeightUpdate

pytestmark = pytest.mark.unit


def _round_trip(value):
    a, b = socket.socketpair()
    with a, b:
        send_blocking(a, value)
        return receive_blocking(b)


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


def test_empty_and_scalar_arrays_cross():
    back = _round_trip([np.zeros((0, 3)), np.array(2.0), torch.zeros(0)])
    assert back[0].shape == (0, 3)
    assert back[1] == 2.0
    assert back[2].shape == (0,)


def test_a_reference_keeps_its_shape_a_tuple():
    ref = ArrayRef(segment="a.seg", offset=1, dtype="int16", shape=(2, 3), crc32=7)
    assert _round_trip(ref) == ref


def test_other_types_are_refused_by_name():
    with pytest.raises(TypeError, match="a set does not cross"):
        encode({"x": {1, 2}})


def test_a_closed_connection_is_an_end_of_file():
    a, b = socket.socketpair()
    a.close()
    with b, pytest.raises(EOFError):
        receive_blocking(b)

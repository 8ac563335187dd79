"""State that no file can hold is refused before the first step, and another dtype before the next."""

import asyncio
import math

import numpy as np
import pytest

from slime_core.checkpoint import check_dtype, check_state
from slime_core.errors import PluginError, TrainerError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("value", "key", "why"),
    [
        ({"seen": {1, 2}}, "seen", "a set"),
        ({"a": [{"b": np.float32(1)}]}, "a[0].b", "a numpy.float32"),
        ({"a": {3: "x"}}, "a", "its key 3 is a int, not a str"),
        ({"a": (1, 2)}, "a", "a tuple"),
        ({"a": math.nan}, "a", "nan"),
        ({"a": [0.5, math.inf]}, "a[1]", "inf"),
        ({"a": b"x"}, "a", "a bytes"),
        ({"a": "\ud800"}, "a", "not valid Unicode"),
        (lambda: 0, "", "a function"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_plugin_state_that_is_not_json_names_plugin_and_key(value, key, why):
    """Before the first step, not at the first checkpoint."""
    with pytest.raises(PluginError) as caught:
        check_state({"good": {"n": 1}, "curriculum": value})
    error = caught.value
    assert error.code == "PLG64"
    assert "curriculum" in error.what
    assert error.where == "slime_state of curriculum" + (f", key {key}" if key else "")
    assert why in error.why


def test_plugin_state_that_is_json_passes():
    check_state({"a": {"list": [1, 2.5, None, True, "text", {"deep": []}]}, "b": {}, "c": None})


def found_of(saves, **changes):
    saves(4, **changes)
    return saves.reopened().latest()


def test_another_dtype_is_refused(saves):
    """Float32 when it was saved, and auto makes bfloat16 of this machine."""
    found = found_of(saves)
    with pytest.raises(TrainerError, match="TRN108") as caught:
        check_dtype(found, "bfloat16")
    assert "float32 and would continue in bfloat16" in caught.value.what
    assert "--dtype float32" in caught.value.fix
    check_dtype(found, "bfloat16", forced=["train.dtype"])
    check_dtype(found, "float32")


def test_a_state_that_is_not_json_fails_the_call_and_leaves_nothing(saves):
    async def run():
        with pytest.raises(TypeError):
            await saves.checkpoints.begin(4, saves.about(state={"a": object()}), saves.trainer, saves.ledger)

    asyncio.run(run())
    assert saves.names() == []

"""State that no file can hold is refused before the first step, and a checkpoint of another run before the next."""

import asyncio
import math

import numpy as np
import pytest

from slime_core.checkpoint import check_compatible, check_state, differences
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
    """Case 64: before the first step, not at the first checkpoint."""
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
    """Case 108: float32 when it was saved, bfloat16 now."""
    found, machine = found_of(saves), saves.about().machine
    with pytest.raises(TrainerError, match="TRN108") as caught:
        check_compatible(found, saves.about(machine={**machine, "dtype": "bfloat16"}))
    assert 'machine.dtype: "float32" -> "bfloat16"' in caught.value.why
    assert check_compatible(found, saves.about(machine={**machine, "dtype": "bfloat16"}), forced={"machine.dtype"})


def test_other_plugins_are_refused_with_the_whole_report(saves):
    """Case 115: another plugin set, and what else differs."""
    found, machine = found_of(saves), saves.about().machine
    now = saves.about(plugins="def", machine={**machine, "world": 2, "device": "cuda"})
    with pytest.raises(PluginError) as caught:
        check_compatible(found, now)
    assert caught.value.why.splitlines() == [
        'plugins: "abc" -> "def"',
        'machine.device: "cpu" -> "cuda"',
        "machine.world: 1 -> 2",
    ]


def test_another_world_size_is_told_and_passes(saves):
    """Case 115: another world size."""
    found = found_of(saves)
    known = check_compatible(found, saves.about(machine={**saves.about().machine, "world": 2}))
    assert [(one.key, one.saved, one.now, one.safe) for one in known] == [("machine.world", 1, 2, True)]


def test_the_same_run_has_no_differences(saves):
    assert differences(found_of(saves), saves.about()) == []


def test_a_state_that_is_not_json_fails_the_call_and_leaves_nothing(saves):
    async def run():
        with pytest.raises(TypeError):
            await saves.checkpoints.begin(4, saves.about(state={"a": object()}), saves.trainer, saves.ledger)

    asyncio.run(run())
    assert saves.names() == []

"""Pending samples: what a later turn or another branch has of the sample that was issued, and what it has not."""

import pytest

from slime_core.rollout.groups import sibling
from slime_core.types import Sample

pytestmark = pytest.mark.unit


def test_a_sibling_is_of_the_same_rollout_and_has_nothing_of_its_answer():
    issued = Sample(id="grpo/7-1", task="sum", role="solver", model="lora", prompt="1+1=", tokens=[5, 6], label="2")
    issued.group_index, issued.index, issued.rollout_id, issued.attempt = 7, 15, 15, 2
    issued.temperature, issued.session_id, issued.metadata = 0.7, "grpo/7-1", {"seen": 1}
    issued.append_response([8, 9], [-0.5, -0.25], text="2", version=3)
    issued.reward = 1.0
    found = sibling(issued, 4, (5, 6, 8, 9, 10))
    expected = Sample(id="grpo/7-1.4", task="sum", role="solver", model="lora", prompt="1+1=", label="2")
    expected.tokens, expected.metadata = [5, 6, 8, 9, 10], {"seen": 1}
    expected.group_index, expected.index, expected.rollout_id, expected.attempt = 7, 15, 15, 2
    expected.temperature, expected.session_id = 0.7, "grpo/7-1"
    assert found == expected
    found.metadata["turn"] = 1
    assert "turn" not in issued.metadata, "each has metadata of its own"

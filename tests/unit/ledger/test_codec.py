"""Samples to bytes and back, whatever they hold."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from slime_core.errors import PluginError
from slime_core.ledger.codec import decode, encode, plain_reward
from slime_core.types import ArrayRef, Sample, Status

pytestmark = pytest.mark.unit

# Unicode with lone surrogates, right-to-left marks, joiners and combining marks
TEXT = st.text(st.characters(codec=None), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw):
    n = draw(st.integers(0, 12))
    floats = st.lists(draw(st.sampled_from([FLOAT32, st.floats(allow_nan=False)])), min_size=n, max_size=n)
    return Sample(
        id=draw(TEXT),
        prompt=draw(TEXT | st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2)),
        response=draw(TEXT),
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n + 5)),
        response_length=n,
        loss_mask=draw(st.none() | st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        reward=draw(st.none() | FLOAT32 | st.dictionaries(TEXT, FLOAT32, max_size=2)),
        label=draw(JSON),
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        status=draw(st.sampled_from(Status)),
        rollout_log_probs=draw(st.none() | floats),
        weight_versions=draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)),
        advantages=draw(st.none() | floats),
        attempt=draw(st.integers(0, 3)),
        rollout_routed_experts=draw(
            st.none() | st.just(ArrayRef(segment="000001.seg", offset=8, dtype="int16", shape=(2, 3), crc32=5))
        ),
    )


@settings(max_examples=200, deadline=None)
@given(sample=samples())
def test_a_sample_comes_back_as_it_was(sample):
    body = b"".join(bytes(part) for part in encode(sample))
    assert decode(body).to_dict() == sample.to_dict()


def body_of(**fields):
    return b"".join(bytes(part) for part in encode(Sample(**fields)))


@pytest.mark.parametrize(
    "text",
    ["\ud800 half", "\u202eright to left", "👩‍👩‍👧", "𝔘", "é", "e\u0301", "\u0000", "\ufeff"],
    ids=["surrogate", "rtl", "zwj", "4 bytes", "NFC", "NFD", "NUL", "BOM"],
)
def test_text_keeps_every_code_point(text):
    back = decode(body_of(id=text, response=text, metadata={text: text}, label=[text]))
    assert (back.id, back.response, back.metadata, back.label) == (text, text, {text: text}, [text])


def test_tokens_are_stored_as_they_were_sampled_not_as_their_text_would_encode():
    """Ids 4 2 4 spell the same text as the single id 9; what came from the engine is what comes back."""
    spelled = {9: "abb", 4: "ab", 2: "b"}
    sample = Sample(prompt="x", tokens=[7], response="")
    sample.append_response([4, 2], log_probs=[-0.5, -0.25], text=spelled[4] + spelled[2])
    back = decode(b"".join(bytes(part) for part in encode(sample)))
    assert back.response == spelled[9]
    assert back.response_tokens == [4, 2]


def test_log_probs_keep_every_bit_in_the_smaller_width_that_allows_it():
    exact = [-0.5, -math.log(2.0)]  # the second needs 64 bits
    assert decode(body_of(rollout_log_probs=exact)).rollout_log_probs == exact
    narrow, wide = (len(body_of(rollout_log_probs=[value] * 1000)) for value in (-0.5, -math.log(2.0)))
    assert 3900 < wide - narrow < 4100


def test_masks_and_versions_cost_their_changes_only():
    plain = len(body_of(loss_mask=[1], weight_versions=[3]))
    long = len(body_of(loss_mask=[1] * 4000 + [0] * 4000, weight_versions=[3] * 7000 + [4] * 1000))
    assert long - plain < 40


@pytest.mark.parametrize(
    ("field", "value"),
    [("metadata", {"model": object()}), ("rollout_routed_experts", np.zeros((2, 1, 1), np.uint8))],
    ids=["an object", "an array in memory"],
)
def test_what_json_cannot_hold_names_the_sample(field, value):
    with pytest.raises(PluginError, match=r"sample main/3-0 cannot be stored: a .* is not JSON") as caught:
        encode(Sample(id="main/3-0", **{field: value}))
    assert caught.value.code == "PLG57"
    assert "ArrayRef" in caught.value.fix


def test_a_record_of_a_later_format_is_refused():
    body = body_of(id="x").replace(b'"format":1', b'"format":9')
    with pytest.raises(ValueError, match="record format 9"):
        decode(body)


@pytest.mark.parametrize(
    ("reward", "want"), [(0.5, 0.5), (1, 1.0), (None, None), ({"a": 1.0}, None), (math.nan, None)]
)
def test_the_ledgers_reward_column_holds_plain_numbers(reward, want):
    assert plain_reward(Sample(reward=reward)) == want

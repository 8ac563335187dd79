"""A request, its body, and what SGLang says to it."""

import pytest
from faulty import Canned

from slime_core.errors import EngineError
from slime_core.types import GenerateRequest, SamplingParams
from slime_sglang import bodies, wire

VOCAB, CONTEXT = 1000, 64


def request(tokens=(3, 4, 12), *, seed=7, kept=0, **params):
    """A request of a few tokens."""
    return GenerateRequest(
        id="grpo/17-0",
        tokens=list(tokens),
        params=SamplingParams(**{"max_new_tokens": 8, **params}),
        seed=seed,
        kept=kept,
    )


def body(asked, **changes):
    """Its body."""
    words = {
        "rid": "r",
        "limit": asked.params.max_new_tokens,
        "stream": False,
        "features": frozenset(),
        "dp_rank": None,
    }
    return bodies.body(asked, **(words | changes))


def expected(asked, **changes):
    """What its answer must fit."""
    words = {"request": asked, "limit": 8, "vocab_size": VOCAB, "epoch": 3, "low": 7, "high": 7, "spans": True}
    return wire.ExpectedAnswer(**(words | changes))


def answer(asked, made=8, finish="length", **changes):
    """A right answer, with changes of its meta_info."""
    found = Canned().answer(body(asked), made, finish)
    found["meta_info"].update(changes)
    return found


def code_of(call, kind=EngineError):
    """The code of the error that a call raises, and the whole error as text."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value.code, str(caught.value)

"""The second witness of what torch computes: hears what the dispatch mode is kept from hearing."""

import pytest
import torch
from corpus_of_kernels import problem_of, sources

from slime_kernelbench.judge import policy
from slime_kernelbench.judge.recorder import SWITCHED_OFF, Recorder


def heard(work):
    recorder, x = Recorder(), torch.ones(4, 4)
    recorder.begin()
    work(x)
    return recorder.end() - {"aten::empty"}


def test_operators_are_heard_where_dispatch_modes_are_off():
    def work(x):
        with torch._C._DisableTorchDispatch():
            torch.add(x, x)

    assert heard(work) == {"aten::add"}


def test_composite_operators_are_recorded_as_those_that_they_are_made_of():
    assert "aten::reshape" not in heard(lambda x: x.reshape(2, 8))
    assert heard(lambda x: torch.nn.functional.silu(x).flatten()) == {"aten::silu", "aten::view"}


@pytest.mark.parametrize(
    "off", [torch.autograd._disable_profiler, lambda: torch.autograd._enable_record_function(False)]
)
def test_a_witness_that_is_silenced_says_so(off):
    try:
        assert heard(lambda x: off()) == {SWITCHED_OFF}
    finally:
        torch.autograd._enable_record_function(True)


def test_a_sum_made_beside_the_watch_is_a_hack_without_the_policy(monkeypatch, with_judge):
    monkeypatch.setattr(policy, "read", lambda source, allow: policy.Reading(status="ok"))
    text = sources("cheats")["computes_beside_the_watch"]
    verdict = with_judge(lambda judge: judge.judge(text, problem_of(text)))
    assert verdict.status == "hack"
    assert [flag.detail for flag in verdict.flags] == ["torch computed: add"]

"""What compiles functions where that pays, and goes on without where it fails."""

import logging

import pytest
import torch

from slime_core.notices import notices_to
from slime_core.trainers.compiling import COMPILING, LARGE, Compiled, pays

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("choice", "device", "parameters", "wanted"),
    [("on", "cpu", 1, True), ("off", "cuda", LARGE, False), ("auto", "cpu", LARGE, False), ("auto", "cuda", 1, False)],
)
def test_the_setting_the_device_and_the_size_decide_what_is_compiled(choice, device, parameters, wanted):
    assert pays(choice, torch.device(device), parameters) is wanted


def test_a_compiler_that_fails_is_told_once_and_the_plain_function_goes_on(caplog):
    calls = []

    def broken(graph, inputs):
        calls.append(graph)
        raise OSError("no compiler here")

    def twice(x):
        return x + x

    one = Compiled(twice, backend=broken)
    with caplog.at_level(logging.WARNING):
        assert [float(one(torch.tensor(float(n)))) for n in (1, 2)] == [2.0, 4.0]
    assert not one.works
    assert len(calls) == 1
    (told,) = [record.message for record in caplog.records if record.name.startswith("slime_core.trainers")]
    assert "twice is not compiled" in told
    assert "no compiler here" in told


def test_a_notice_says_once_before_the_first_call_that_it_waits_for_the_compiler():
    said = []

    def backend(graph, inputs):
        said.append("compiles")
        return graph.forward

    with notices_to(said.append):
        for function in (torch.sin, torch.cos):
            one = Compiled(lambda x, function=function: function(x) + 1, backend=backend)
            assert float(one(torch.tensor(0.0))) == float(function(torch.tensor(0.0))) + 1
    assert said == [COMPILING, "compiles", "compiles"]


def test_errors_of_the_compiled_function_pass_through():
    def wrong(x):
        raise ValueError(f"a shape of {tuple(x.shape)}")

    one = Compiled(wrong, backend="eager")
    with pytest.raises(ValueError, match="a shape of"):
        one(torch.ones(2))
    assert one.works

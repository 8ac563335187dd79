"""A judge that can judge nothing ends the run; one that fails now and then does not."""

import asyncio

import pytest
from dialogue_actors import INFRA, PROBLEM, WRONG, Known

from slime_core.errors import SandboxError
from slime_kernelbench.patience import Patient

pytestmark = pytest.mark.unit


def ask(verdicts, most):
    known = Known({"": list(verdicts)})
    judge = Patient(known, most)

    async def all_of_them():
        found = [(await judge.judge(str(number), PROBLEM)).status for number in range(len(verdicts))]
        await judge.aclose()
        return found

    return asyncio.run(all_of_them()), known


def test_failures_in_a_row_end_the_run_with_the_reason():
    with pytest.raises(SandboxError) as caught:
        ask([WRONG, INFRA, INFRA, INFRA], 3)
    assert (caught.value.code, caught.value.why) == ("SBX140", "no process can be made")


def test_a_verdict_between_them_begins_the_count_again():
    found, known = ask([INFRA, INFRA, WRONG, INFRA, INFRA], 3)
    assert found == ["infra", "infra", "wrong", "infra", "infra"]
    assert known.closed == 1


def test_without_a_limit_nothing_ends():
    assert len(ask([INFRA] * 9, 0)[0]) == 9

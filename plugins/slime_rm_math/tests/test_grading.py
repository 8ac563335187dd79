"""The exact-match rule, case by case."""

import pytest

from slime_core import Sample, Status
from slime_rm_math.grading import exact_match

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("response", "value"),
    [("42", 1.0), (" 42\n", 1.0), ("042", 0.0), ("+42", 0.0), ("42.", 0.0), ("4 2", 0.0), ("-42", 0.0), ("", 0.0)],
    ids=["equal", "blanks", "leading-zero", "plus", "point", "inner-blank", "minus", "empty"],
)
def test_a_response_is_right_where_it_is_the_label(response, value):
    assert exact_match(Sample(response=response, label="42", status=Status.COMPLETED)).value == value


@pytest.mark.parametrize("status", [Status.TRUNCATED, Status.ABORTED, Status.PENDING, Status.FAILED])
def test_an_answer_that_did_not_end_by_itself_is_wrong(status):
    assert exact_match(Sample(response="42", label="42", status=status)).value == 0.0


def test_a_number_is_a_label_too():
    assert exact_match(Sample(response="-7", label=-7, status=Status.COMPLETED)).value == 1.0

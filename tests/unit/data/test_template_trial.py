"""A chat template is tried in a child first: one without end, or that takes gigabytes, is refused and harms nothing."""

import pytest

from slime_core.data import template_trial
from slime_core.data.prompts import Encoder
from slime_core.errors import DataError
from slime_core.testing.models import VOCAB, char_tokenizer

pytestmark = pytest.mark.unit

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% if a < 0 %}x{% endif %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param(LOOP, "does not end", id="loops in loops"),
        pytest.param("{{ 'a' * 10 ** 11 }}", "MiB of memory", id="one text of 100 GB"),
        pytest.param("{{ 10 ** (10 ** 9) }}", "does not end", id="a call into C that does not end"),
    ],
)
def test_a_template_beyond_its_bounds_is_refused_before_a_row_is_read(monkeypatch, template, reason):
    monkeypatch.setattr(template_trial.try_template, "__kwdefaults__", {"seconds": 1, "memory": 1 << 30})
    with pytest.raises(DataError) as caught:
        Encoder(char_tokenizer(VOCAB, template), template=True)
    assert caught.value.code == "TOK50"
    assert reason in caught.value.what


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ raise_exception('no') }}"], ids=["sound", "raises"]
)
def test_other_templates_are_left_to_the_rows(template):
    Encoder(char_tokenizer(VOCAB, template), template=True)

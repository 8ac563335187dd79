"""Messages to text to tokens: the template's own words, and its sandbox."""

import pytest
from tokenizers.processors import TemplateProcessing

from slime_core.data.chat import decode, encode, raw_prompt_notices, render
from slime_core.errors import DataError
from slime_core.testing.models import char_tokenizer

pytestmark = pytest.mark.unit


def rendered(template, prompt, **kwargs):
    return render(prompt, char_tokenizer(chat_template=template), template=True, where="here", **kwargs)


def test_a_string_becomes_one_user_message(chat_tokenizer):
    text = render("1+1=", chat_tokenizer, template=True, where="here")
    assert text == "user: 1+1=\nassistant: "


def test_without_a_template_the_text_is_what_the_row_says(tokenizer):
    assert render(" 1+1= ", tokenizer, template=False, where="here") == " 1+1= "


def test_notices_say_what_raw_prompts_lack():
    """A chat template that is not applied; a first token that the tokenizer puts before a text, as Gemma's does."""
    plain = char_tokenizer()
    assert raw_prompt_notices(plain) == []
    (said,) = raw_prompt_notices(char_tokenizer(chat_template="{{ messages }}"))
    assert "without the tokenizer's chat template; data.apply_chat_template=true" in said
    plain.add_special_tokens({"bos_token": "<unk>"})
    assert raw_prompt_notices(plain) == []  # named, but not put before a text
    plain.backend_tokenizer.post_processor = TemplateProcessing("<unk> $A", special_tokens=[("<unk>", 2)])
    assert plain.encode("1")[0] == 2
    (said,) = raw_prompt_notices(plain)
    assert "prompts are read without <unk>" in said


def test_encoding_adds_nothing_and_decoding_hides_nothing(chat_tokenizer):
    ids = encode(chat_tokenizer, "12<eos>")
    assert ids == [4, 5, 1]
    assert decode(chat_tokenizer, ids) == "12<eos>"


def test_keyword_arguments_and_tools_reach_the_template():
    template = "{{ tools[0]['name'] if tools }}|{{ thinking }}|{{ add_generation_prompt }}"
    assert rendered(template, "x", kwargs={"thinking": False}, tools=[{"name": "f"}]) == "f|False|True"
    assert rendered(template, "x", kwargs={"add_generation_prompt": False, "thinking": 1}) == "|1|False"


def test_tools_of_a_row_may_be_json_text(write, source):
    tok = char_tokenizer(chat_template="{{ tools[0]['name'] }}: {{ messages[0]['content'] }}")
    path = write({"input": "hi", "tools": '[{"name": "f"}]'}, {"input": "hi", "tools": [{"name": "g"}]})
    first, second = source(path, tok=tok, apply_chat_template=True, tool_key="tools").next(2)
    assert (first.prompt, second.prompt) == ("f: hi", "g: hi")
    assert first.metadata["tools"] == [{"name": "f"}]


def test_messages_that_the_template_refuses_show_its_reason(write, source):
    tok = char_tokenizer(
        chat_template="{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}x"
    )
    path = write({"input": "hi"})
    with pytest.raises(DataError) as caught:
        source(path, tok=tok, apply_chat_template=True).next(1)
    assert caught.value.code == "DAT25"
    assert "system first" in caught.value.what
    assert caught.value.where == f"{path}:1"
    assert "roles are user" in caught.value.why
    assert "data.apply_chat_template_kwargs" in caught.value.fix


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
    ids=["classes", "globals", "mutation", "range"],
)
def test_a_template_cannot_leave_its_sandbox(template):
    with pytest.raises(DataError) as caught:
        rendered(template, "x")
    assert caught.value.code == "DAT25"


def test_prompt_text_is_never_a_template():
    assert rendered("{{ messages[0]['content'] }}", "{{ 7 * 7 }} {__class__} %s") == "{{ 7 * 7 }} {__class__} %s"

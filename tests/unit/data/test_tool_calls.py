"""A call that a published chat template renders is parsed back, and the format is read from the template itself."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from slime_core.data.tool_calls import PARSERS, parser_of, template_tools

pytestmark = pytest.mark.unit

PUBLISHED = Path(find_spec("trl").origin).parent / "chat_templates"
MISTRAL_V3 = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif message.role == "assistant" %} {{ message.content }}{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
MISTRAL_V11 = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]
{%- elif message.role == "assistant" %}{{ message.content }}{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}
{%- if ids %}[CALL_ID]{{ call.id }}{% endif %}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
DEEPSEEK_V31 = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}<｜User｜>{{ message.content }}
{%- elif message.role == "assistant" %}<｜Assistant｜></think>{{ message.content or "" }}{% if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"""
OWN = {"mistral v3": MISTRAL_V3, "mistral v11": MISTRAL_V11, "deepseek v3.1": DEEPSEEK_V31}

ARGUMENTS = {
    "add": {"a": 1, "b": -2.5},
    "note": {
        "text": 'two\nlines, "quoted" {brace} <b>ü</b> ```py\n1```',
        "number": "007",
        "flags": [True, None],
        "more": {"k": []},
        "code": "42",
    },
    "now": {},
}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}  # as pydantic writes `str | None`
SCHEMAS = {"text": {"type": "string"}, "number": {"type": "string"}, "code": OPTIONAL}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": SCHEMAS}}}
    for name in ARGUMENTS
]


class Templated:
    """A tokenizer of which only the chat template matters, rendered by transformers."""

    bos_token, eos_token = "<s>", "</s>"

    def __init__(self, name):
        self.chat_template = OWN.get(name) or (PUBLISHED / f"{name}.jinja").read_text()

    def apply_chat_template(self, messages, tools, tokenize, **kwargs):
        from transformers.utils.chat_template_utils import render_jinja_template

        words = {"bos_token": self.bos_token, "eos_token": self.eos_token, **kwargs}
        return render_jinja_template([messages], tools=tools, chat_template=self.chat_template, **words)[0][0]


FORMATS = [
    ("qwen2_5", "hermes", True, 3),
    ("qwen3", "hermes", True, 3),
    ("qwen3_instruct_2507", "hermes", True, 3),
    ("qwen3_5_think", "qwen_xml", True, 3),
    ("nemotron_3_nano", "qwen_xml", True, 3),
    ("glm4moe", "glm", True, 3),
    ("llama3_1", "llama", True, 1),
    ("llama3_2", "llama", True, 1),
    ("deepseekv3", "deepseek", False, 3),
    ("deepseek_r1_distill", "deepseek", False, 3),
    ("deepseek v3.1", "deepseek", False, 3),
    ("mistral v3", "mistral", True, 3),
    ("mistral v11", "mistral", True, 3),
]


@pytest.mark.parametrize(("template", "parser", "describes", "at_once"), FORMATS, ids=[row[0] for row in FORMATS])
def test_calls_of_a_published_template_come_back_whole(template, parser, describes, at_once):
    tokenizer = Templated(template)
    trial = template_tools(tokenizer)
    assert (trial.parser, trial.describes) == (parser, describes)
    assert PARSERS[parser](trial.example, ())[1] == [("probe_tool", {"text": "x y", "count": 3})]
    expected = list(ARGUMENTS.items())
    for start in range(0, 3, at_once):
        calls = expected[start : start + at_once]
        as_text = parser == "deepseek"  # its templates join texts
        message = {
            "role": "assistant",
            "content": None if as_text else "",
            "tool_calls": [
                {
                    "id": f"call{number:05}",
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(value, ensure_ascii=False) if as_text else value,
                    },
                }
                for number, (name, value) in enumerate(calls)
            ],
        }
        text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}, message], None, False)
        said = text[text.index(trial.example[: trial.example.index("probe_tool")].strip()) :]
        for end in ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</s>"):
            said = said.removesuffix("\n").removesuffix(end)
        assert PARSERS[parser](said, TOOLS) == ("", calls)
        if parser != "llama":
            assert PARSERS[parser](f"so {said}", TOOLS) == ("so", calls)


@pytest.mark.parametrize("template", ["gemma3", "phi3", "llama3", "gptoss"])
def test_a_template_without_a_known_format_has_no_parser(template):
    assert template_tools(Templated(template)).parser == ""


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("hermes", "<tool_call>{add}</tool_call>", "not valid"),
        ("hermes", '<tool_call>["add"]</tool_call>', "not a JSON object"),
        ("hermes", r'<tool_call>{"name": "f\ud83d"}</tool_call>', "surrogates not allowed"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{"name', "no </tool_call>"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "too deep|not valid"),
        ("qwen_xml", "<tool_call><function=f></function></tool_call>", [("f", {})]),
        ("qwen_xml", "<tool_call><function=f>stray</function></tool_call>", "no <parameter="),
        ("qwen_xml", "<tool_call><function=f><parameter=a>1</tool_call>", "not <function=NAME>"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</tool_call>", "no </arg_value>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key>x<arg_value>1</arg_value></tool_call>", "text between"),
        ("glm", "<tool_call></tool_call>", "not a name"),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', [("f", {}), ("g", {})]),
        ("llama", '<|python_tag|>search.call(query="a; b")', [("search", {"query": "a; b"})]),
        ("llama", '{"name": "f", "parameters": {}} and so on', "text after"),
        ("llama", "<|python_tag|>import os", "no NAME.call"),
        ("llama", "<|python_tag|>f.call(x)", "no NAME.call"),
        ("llama", "<|python_tag|>" + "-" * 100_000, "no NAME.call"),
        ("llama", "<|python_tag|>a.call(x=1); b.call()", [("a", {"x": 1}), ("b", {})]),
        ("llama", '{"answer": 4}', None),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("mistral", "[TOOL_CALLS] {}", "not NAME"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", ', "not valid"),
        ("deepseek", "<｜tool▁calls▁begin｜>", "no <｜tool▁call▁begin｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function f", "not function"),
        ("none", '<tool_call>{"name": "f"}</tool_call>', None),
        *((name, "plain {text}", None) for name in PARSERS),
    ],
)
def test_calls_are_well_formed_or_an_error_says_what_is_wrong(name, text, calls):
    if isinstance(calls, str):
        with pytest.raises(ValueError, match=calls):
            PARSERS[name](text, ())
    else:
        assert PARSERS[name](text, ()) == (("", calls) if calls else (text, []))


def test_null_is_the_value_of_an_optional_text():
    text = "<tool_call>note<arg_key>code</arg_key><arg_value>null</arg_value></tool_call>"
    assert PARSERS["glm"](text, TOOLS) == ("", [("note", {"code": None})])


def test_a_parser_may_be_a_function_and_names_are_checked():
    assert parser_of(lambda text: ("", [(text, {})]))("f", ()) == ("", [("f", {})])
    with pytest.raises(ValueError, match="known are hermes"):
        parser_of("hermse")

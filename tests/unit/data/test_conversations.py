"""Replies of the data: which tokens of a conversation train, whatever the chat template, and what is refused."""

from itertools import groupby
from pathlib import Path

import pytest
import trl
from speakers import speaker
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_core import Context, DataError, Group, Prompt, Sample
from slime_core.builtin import Core
from slime_core.config.schema import Config
from slime_core.data.conversations import ReplyEncoder
from slime_core.data.prompts import Encoder, Keys, parse_row

pytestmark = pytest.mark.unit

TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "7 (seven)"},
]
MARKED = """\
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{% generation %}{{- m.content -}}{% endgeneration %}{{- '<|im_end|>\\n' -}}
{%- else -%}{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def trained(encoder, reply):
    """The text of each run of trained tokens."""
    runs, previous = [], 0
    for token, mask in zip(reply.tokens, reply.loss_mask, strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return [encoder.tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def text_of(encoder, reply):
    return encoder.tokenizer.decode([*reply.prompt, *reply.tokens], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("style", "answers"),
    [
        ("qwen2.5", ["4.<|im_end|>", "7 (seven)<|im_end|>"]),
        (
            "qwen3",
            ["4.<|im_end|>", "<think>\n\n</think>\n\n7 (seven)<|im_end|>"],
        ),  # writes reasoning into the last one
        ("llama3", ["4.<|eot_id|>", "7 (seven)<|eot_id|>"]),
        ("bare", ["4.\n", "7 (seven)\n<|im_end|>"]),  # the template has no end of a turn: the tokenizer's, at the end
    ],
)
def test_every_answer_trains_with_its_end_and_nothing_else_does(style, answers):
    encoder = ReplyEncoder(speaker(style))
    reply = encoder.conversation(TALK, None, "rows.jsonl:1")
    assert trained(encoder, reply) == answers
    rendered = encoder.tokenizer.apply_chat_template(TALK, tokenize=False)
    assert rendered.startswith(text_of(encoder, reply).removesuffix("<|im_end|>" if style == "bare" else ""))
    prompt = encoder.tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert reply.prompt == encoder.tokenizer.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize("legacy", [True, False])
def test_pieces_of_sentencepiece_are_encoded_as_in_the_whole_text(legacy):
    """Llama 2, TinyLlama and Mistral put a space before every text that they encode alone."""
    vocab = {char: number for number, char in enumerate([*map(chr, range(33, 127)), "▁", "▁4", "▁7", "▁(", "▁a"])}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", piece[1]) for piece in ("▁4", "▁7", "▁(", "▁a")]))
    if legacy:
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    reply = ReplyEncoder(tokenizer).conversation(TALK, None, "r:1")
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert reply.prompt + reply.tokens == tokenizer.encode(whole, add_special_tokens=False)
    assert sum(reply.loss_mask) == len("4.$") + len("7 (seven)$") - 1
    sample = Sample(id="a", tokens=tokenizer.encode("[INST] 2+2 [/INST] (", add_special_tokens=False), label="4")
    group = Group(prompt=Prompt(id="a"), samples=[sample], rollouts={0: [0]})
    Core().slime_rollout([group], Context(config=Config(), tokenizer=tokenizer))
    assert sample.tokens == tokenizer.encode("[INST] 2+2 [/INST] (4</s>", add_special_tokens=False), (
        "no space before 4"
    )


def test_the_last_turn_alone_and_turns_of_weight_0():
    tokenizer = speaker("llama3")
    last = ReplyEncoder(tokenizer, last_turn=True)
    assert trained(last, last.conversation(TALK, None, "r:1")) == ["7 (seven)<|eot_id|>"]
    for key in ("weight", "step_loss_mask"):
        every = ReplyEncoder(tokenizer)
        talk = [{**message, key: 0 if message is TALK[1] else None} for message in TALK]  # a table's empty cells
        assert trained(every, every.conversation(talk, None, "r:1")) == ["7 (seven)<|eot_id|>"]


def test_what_follows_the_last_answer_is_left_out():
    encoder = ReplyEncoder(speaker("llama3"))
    longer = encoder.conversation([*TALK, {"role": "user", "content": "thanks"}], None, "r:1")
    assert longer == encoder.conversation(TALK, None, "r:1")


def test_a_template_that_drops_reasoning_trains_the_last_turn_and_is_refused_for_all():
    encoder = ReplyEncoder(speaker("r1"), last_turn=True)
    talk = [*TALK[:3], {"role": "assistant", "content": "<think>\n4 and 3\n</think>\n\n7"}]
    reply = encoder.conversation(talk, None, "r:1")
    assert trained(encoder, reply) == ["4 and 3\n</think>\n\n7<|im_end|>"]
    assert text_of(encoder, reply).endswith("<|im_start|>assistant\n<think>\n4 and 3\n</think>\n\n7<|im_end|>")
    apart = [*TALK[:3], {"role": "assistant", "content": "7", "reasoning_content": "4 and 3"}]
    assert encoder.conversation(apart, None, "r:1") == reply
    with pytest.raises(DataError, match="writes message 3 in another way"):
        encoder.conversation([*TALK[:3], CALLING], None, "r:1")
    with pytest.raises(DataError, match="writes message 1 in another way") as refusal:
        ReplyEncoder(speaker("r1")).conversation(talk, None, "rows.jsonl:3")
    assert refusal.value.where == "rows.jsonl:3"
    assert "loss_mask_type=last" in refusal.value.fix


def test_a_templates_own_markers_decide():
    tokenizer = clone("qwen2.5", MARKED)  # which do not mark the end
    encoder = ReplyEncoder(tokenizer)
    assert trained(encoder, encoder.conversation(TALK, None, "r:1")) == ["4.", "7 (seven)"]
    last = ReplyEncoder(tokenizer, last_turn=True)
    assert trained(last, last.conversation(TALK, None, "r:1")) == ["7 (seven)"]


PUBLISHED = [
    "cohere",
    "cohere2",
    "gemma",
    "gemma3",
    "glm4moe",
    "lfm2",
    "llama3",
    "phi3",
    "qwen2_5",
    "qwen3_instruct_2507",
    "qwen3_vl",
]
ENDS = [
    "<|im_end|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|end|>",
    "</s>",
    "<|END_OF_TURN_TOKEN|>",
    "<|user|>",
    "<|im_start|>",
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_train_what_trls_marked_copies_of_them_mark(name):
    """TRL ships templates as published, and beside each a copy in which it has marked the answers by hand."""
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer = clone("qwen2.5", (folder / f"{name}_training.jinja").read_text(), ENDS)
    marked = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    pairs = groupby(zip(marked["input_ids"], marked["assistant_masks"], strict=True), key=lambda pair: pair[1])
    runs = [tokenizer.decode([token for token, _ in run]) for mask, run in pairs if mask]
    encoder = ReplyEncoder(clone("qwen2.5", (folder / f"{name}.jinja").read_text(), ENDS))
    ours = trained(encoder, encoder.conversation(TALK, None, "r:1"))
    # TRL marks white space around an answer too, and its GLM ends a last answer with a user's turn instead of the end
    last = {"glm4moe": "<|im_end|>"}.get(name, "")
    assert ours[-1].endswith(last)
    ours[-1] = ours[-1].removesuffix(last)
    assert [run.strip() for run in ours] == [
        *(run.strip() for run in runs[:-1]),
        runs[-1].strip().removesuffix("<|user|>" if last else ""),
    ]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1"])
def test_tool_calls_train_and_their_results_do_not(name):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    talk = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "RESULT"},
        {"role": "assistant", "content": "It is 4."},
    ]
    folder = Path(trl.__file__).parent / "chat_templates"
    encoder = ReplyEncoder(clone("qwen2.5", (folder / f"{name}.jinja").read_text(), ENDS))
    reply = encoder.conversation(talk, [{"type": "function", "function": {"name": "add", "parameters": {}}}], "r:1")
    first, second = trained(encoder, reply)
    assert '"add"' in first
    assert "It is 4." in second
    assert "RESULT" not in first + second
    assert "RESULT" in text_of(encoder, reply)


CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TALK[:1], "no assistant message"),
        ([TALK[0], {**TALK[1], "weight": 0}], "no assistant message"),
        ([TALK[0], CALLING], "the chat template leaves out the tool call 'add'"),
    ],
)
def test_a_conversation_with_nothing_to_train_on_is_refused(messages, message):
    with pytest.raises(DataError, match=message):
        ReplyEncoder(speaker("llama3")).conversation(messages, None, "rows.jsonl:1")


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{not JSON"}}]}
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ({**PAIR, "chosen": " "}, "DAT24", "the reply is empty"),
        ({"prompt": "2+2?", "chosen": "4"}, "DAT18", "no 'rejected'"),
        ({"chosen": TALK[:2], "rejected": TALK[2:]}, "DAT18", "share no prompt"),
        ({**PAIR, "prompt": [*TALK[:1], CALL]}, "DAT25", "arguments that are no JSON"),
        ({**PAIR, "prompt": [{"role": "robot", "content": "x"}]}, "DAT25", "unknown role 'robot'"),
    ],
)
def test_bad_pairs_are_refused_with_their_row(row, code, message):
    with pytest.raises(DataError, match=message) as refusal:
        parse_row(row, PAIRS, "rows.jsonl:7", None)
    assert refusal.value.code == code
    assert refusal.value.where.startswith("rows.jsonl:7")


PAIRS = Keys(input="prompt", label="", metadata="", tools="", id="", replies=("chosen", "rejected"))


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": [{"role": "user", "content": "2+2?"}], "chosen": [TALK[1] | {"content": "4"}], "rejected": "5"},
        {side: [TALK[0], {"role": "assistant", "content": PAIR[side]}] for side in ("chosen", "rejected")},
    ],
)
def test_pairs_of_texts_of_messages_and_of_whole_conversations_are_the_same(row):
    tokenizer = speaker("llama3")
    encoder = Encoder(tokenizer, template=True, replies=ReplyEncoder(tokenizer))
    prompt = encoder.prompt(parse_row(row, PAIRS, "rows.jsonl:7", None), id="p", task="t", position=0)
    chosen, rejected = prompt.metadata["replies"]
    assert prompt.prompt.endswith("2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    assert tokenizer.decode(chosen["tokens"]) == "4<|eot_id|>"
    assert tokenizer.decode(rejected["tokens"]) == "5<|eot_id|>"
    assert chosen["loss_mask"] == [1, 1]


@pytest.mark.parametrize(("policy", "length"), [("drop", None), ("truncate", 5), ("error", "DAT26")])
def test_a_conversation_beyond_the_context_follows_the_policy(policy, length):
    tokenizer = speaker("llama3")
    encoder = Encoder(tokenizer, template=True, replies=ReplyEncoder(tokenizer), overlong=policy)
    talk = Keys(input="messages", label="", metadata="", tools="", id="")
    parsed = parse_row({"messages": TALK}, talk, "rows.jsonl:7", None)
    encoder.limit = len(encoder.prompt(parsed, id="p", task="t", position=0).tokens) + 5
    if policy == "error":
        with pytest.raises(DataError, match="the conversation has"):
            encoder.prompt(parsed, id="p", task="t", position=0)
        return
    prompt = encoder.prompt(parsed, id="p", task="t", position=0)
    assert (prompt and len(prompt.metadata["replies"][0]["tokens"])) == length


def clone(style, template, specials=()):
    """The tokenizer of a style with another chat template, and more special tokens."""
    base = speaker(style)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        bos_token="<s>",
        additional_special_tokens=[*base.all_special_tokens, *specials],
    )
    tokenizer.chat_template = template
    return tokenizer

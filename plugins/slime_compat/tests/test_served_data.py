"""slime.utils.{mask_utils,data,eval_config,processing_utils,types} as served: what slime's functions get from them."""

import base64
import copy
import io
import json
from types import SimpleNamespace

import pytest
from PIL import Image
from speakers import speaker

from slime_compat.served.collection import _sampling
from slime_compat.served.datasets import Dataset, filter_long_prompt, get_source, read_file
from slime_compat.served.evaluation import EvalDatasetConfig, build_eval_dataset_configs, ensure_dataset_list
from slime_compat.served.masks import MultiTurnLossMaskGenerator, get_response_lengths
from slime_compat.served.processing import build_processor_kwargs, encode_image_for_rollout_engine, process_vision_info
from slime_compat.served.samples import MultimodalTypes
from slime_core.compat.sample import Sample

pytestmark = pytest.mark.unit

TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4.", "step_loss_mask": 0},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "7 (seven)"},
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n9"},
]


@pytest.mark.parametrize(
    ("style", "kind", "answers"),
    [
        ("qwen2.5", "qwen", ["7 (seven)<|im_end|>\n", "<think>\nhm\n</think>\n\n9<|im_end|>\n"]),
        ("qwen3", "qwen3", ["<think>\n\n</think>\n\n7 (seven)<|im_end|>\n", "<think>\nhm\n</think>\n\n9<|im_end|>\n"]),
        # a token of two line breaks reaches from the opening into the answer
        ("qwen3", "qwen3_5", ["\n\n</think>\n\n7 (seven)<|im_end|>\n", "hm\n</think>\n\n9<|im_end|>\n"]),
    ],
)
def test_answers_are_trained_through_the_line_break_that_ends_their_turn(style, kind, answers):
    tokenizer = speaker(style)
    generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=kind)
    ids, mask = generator.get_loss_mask(TALK)
    assert generator.get_text_from_loss_mask(ids, mask) == answers
    if kind != "qwen3":  # which writes the earlier answer as if it were the last
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert generator.get_response_lengths([mask]) == [len(mask) - mask.index(1)]


RESULTS = """\
{%- for m in messages -%}
{%- if m.role != 'tool' -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- else -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>' + m.content + '</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def test_results_of_tools_that_follow_each_other_share_a_turn():
    tokenizer = copy.deepcopy(speaker("qwen2.5"))
    tokenizer.chat_template = RESULTS
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert text.count("<tool_response>") == 2
    for kind, turns in (("qwen3", 1), ("qwen", 2)):
        ids, _ = MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(TALK)
        assert tokenizer.decode(ids).count("<|im_start|>user\n<tool_response>") == turns
        assert (tokenizer.decode(ids) == text) == (turns == 1)


def test_the_templates_own_system_message_stands_once():
    generator = MultiTurnLossMaskGenerator(speaker("qwen2.5"))
    ids, mask = generator.get_loss_mask([*TALK[:2], {"role": "system", "content": "be brief"}])
    text = generator.tokenizer.decode(ids)
    assert text.count("You are helpful.") == 1
    assert text.endswith("be brief<|im_end|>\n")
    assert generator.system_message_length == len(
        generator.tokenizer.encode("<|im_start|>system\nYou are helpful.<|im_end|>\n")
    )
    assert generator.gen_token_length == len(generator.tokenizer.encode("<|im_start|>assistant\n"))
    assert not any(mask), "step_loss_mask 0 leaves the only answer out"


def test_a_distilled_model_trains_the_last_message_without_an_end_token():
    tokenizer = speaker("qwen2.5")
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen").get_loss_mask([TALK[0], TALK[3]])
    assert tokenizer.decode(ids).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n7 (seven)")
    assert tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if one]) == "7 (seven)"
    tokenizer.add_tokens(["<｜Assistant｜>"])
    assert MultiTurnLossMaskGenerator(tokenizer, "qwen").get_loss_mask([TALK[0], TALK[3]]) == (ids, mask)


def test_masks_of_texts_are_aligned_at_the_end_of_what_a_processor_made():
    generator = MultiTurnLossMaskGenerator(speaker("qwen2.5"))
    parted = [
        {"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "2+2?"}]},
        TALK[3],
    ]
    _, mask = generator.get_loss_mask([TALK[0], TALK[3]])
    longer = [0] * (len(mask) + 5)
    assert generator.get_loss_mask_with_multimodal_alignment(parted, longer) == (longer, [0] * 5 + mask)
    with pytest.raises(ValueError, match="the processor made 1 tokens"):
        generator.get_loss_mask_with_multimodal_alignment(parted, [0])


def test_an_unknown_type_of_mask_and_a_template_of_another_form_are_refused():
    with pytest.raises(ValueError, match="llama; types are qwen, qwen3"):
        MultiTurnLossMaskGenerator(speaker("qwen3"), "llama").get_loss_mask(TALK)
    with pytest.raises(ValueError, match="3 assistant messages, but 0 "):
        MultiTurnLossMaskGenerator(speaker("llama3"), "qwen3_5").get_loss_mask(TALK)
    assert get_response_lengths([[0, 1, 0], [0, 0]]) == [2, 0]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"p{n}", "label": n, "source": "x"}) for n in range(5)]
    path.write_text("\n".join([*lines[:3], "", "no json", *lines[3:]]))
    return str(path)


@pytest.mark.parametrize(
    ("part", "labels"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("@[1:3]", [1, 2]),
        ("@[3:]", [3, 4]),
        ("@[-2:]", [3, 4]),
        ("@[:-2]", [0, 1, 2]),
        ("@[-9:2]", [0, 1]),
    ],
)
def test_a_file_of_rows_is_read_by_slice_and_a_damaged_line_is_logged(rows, part, labels, caplog):
    assert [row["label"] for row in read_file(rows + part)] == labels
    assert ("rows.jsonl:5 is not JSON" in caplog.text) == (4 in labels or "-" in part)


def test_another_suffix_or_no_file_is_refused(rows, tmp_path):
    with pytest.raises(ValueError, match=r"none of \.jsonl, \.parquet"):
        list(read_file(__file__))
    with pytest.raises(FileNotFoundError, match="no file of prompts"):
        list(read_file(str(tmp_path / "absent.jsonl")))


def test_a_data_set_renders_prompts_keeps_tools_and_shuffles_by_epoch(rows):
    tokenizer = speaker("qwen2.5")
    data = Dataset(rows, tokenizer, None, None, label_key="label", apply_chat_template=True)
    assert data[1].prompt.endswith("<|im_start|>user\np1<|im_end|>\n<|im_start|>assistant\n")
    assert data[1].label == 1
    data.shuffle(0)
    first = [sample.label for sample in data.samples]
    data.shuffle(1)
    assert sorted(first) == list(range(5))
    assert first != [sample.label for sample in data.samples]
    data.shuffle(0)
    assert [sample.label for sample in data.samples] == first
    assert len(data) == 5
    assert [
        get_source(data[0]),
        get_source(Sample(source="s")),
        get_source(Sample(metadata={"source_name": "m"})),
    ] == [
        "unknown",
        "s",
        "m",
    ]


def test_placeholders_take_the_media_of_their_row_in_order(tmp_path):
    path = tmp_path / "media.jsonl"
    row = {"text": "<image>and<image>?", "pictures": ["a", {"type": "image", "image": "b", "max_pixels": 4}]}
    path.write_text(json.dumps(row))
    keys = {"image": "pictures"}
    (sample,) = Dataset(str(path), None, None, None, multimodal_keys=keys).samples
    first, word, second, end = sample.prompt[0]["content"]
    assert first == {"type": "image", "image": "a"}
    assert second["max_pixels"] == 4
    assert [word["text"], end["text"]] == ["and", "?"]
    for text, problem in (("<image>", "more media than its prompt"), ("<image>" * 3, "more <image> than its row")):
        path.write_text(json.dumps({**row, "text": text}))
        with pytest.raises(ValueError, match=problem):
            Dataset(str(path), None, None, None, multimodal_keys=keys)
    assert [kind.placeholder for kind in MultimodalTypes.all()] == ["<image>", "<video>", "<audio>"]


def test_long_prompts_are_left_out_in_order_whether_text_or_media():
    def count(prompt, **_):
        return {"input_ids": [[0] * 9]} if isinstance(prompt, str) else {"input_ids": [[0] * len(p) for p in prompt]}

    samples = [Sample(prompt=text) for text in ("aaaa", "b", "cc")]
    samples[1].multimodal_inputs = {"images": ["picture"]}
    remaining = filter_long_prompt(samples, count, lambda text, **_: {"input_ids": [[0] * 9]}, 3)
    assert [sample.prompt for sample in remaining] == ["cc"]
    assert filter_long_prompt(samples, count, None, None) == samples
    messages = [Sample(prompt=[{"role": "user", "content": "x"}])]
    assert filter_long_prompt(messages, count, None, 1) == messages
    assert filter_long_prompt([], count, None, 1) == []


def test_an_evaluation_set_takes_its_own_value_then_the_default_then_that_of_args():
    args = SimpleNamespace(eval_temperature=None, rollout_temperature=0.8, rollout_stop=["END"], input_key="question")
    sets = ensure_dataset_list({"aime": {"path": "a.jsonl", "temperature": 0.2, "top_p": None}, "gpqa": {"path": "g"}})
    first, second = build_eval_dataset_configs(args, sets, {"top_p": 0.9, "rm_type": "math"})
    assert (first.name, first.temperature, first.top_p, first.rm_type) == ("aime", 0.2, None, "math")
    assert (second.temperature, second.top_p, second.stop, second.input_key) == (0.8, 0.9, ["END"], "question")
    assert first.inject_metadata({"rm_type": "x", "k": 1}) == {"rm_type": "math", "k": 1}
    assert first.cache_key == ("aime", "a.jsonl", "question", None, None, None)
    with pytest.raises(ValueError, match=r"unknown keys.*: temperture"):
        build_eval_dataset_configs(args, sets, {"temperture": 1})
    with pytest.raises(ValueError, match="'aime' must be positive"):
        build_eval_dataset_configs(args, sets, {"min_eval_samples": 0})
    with pytest.raises(ValueError, match="needs a `name`"):
        ensure_dataset_list([{"path": "a"}])


def test_an_evaluation_sets_penalty_is_sent_where_it_is_set():
    args, penalized = (
        SimpleNamespace(rollout_skip_special_tokens=True),
        {"repetition_penalty": 1.2, "min_new_tokens": 4},
    )
    plain, strict = (_sampling(args, EvalDatasetConfig("a", "a.jsonl", **more)) for more in ({}, penalized))
    assert strict == plain | penalized


def test_a_processor_gets_lists_of_ids_and_tensors_of_media():
    kwargs = build_processor_kwargs({"images": ["i"], "images_kwargs": {"size": 3}})
    assert kwargs["text_kwargs"] == {"return_tensors": None, "return_mm_token_type_ids": False}
    assert kwargs["images_kwargs"] == {"size": 3, "return_tensors": "pt"}
    assert kwargs["images"] == ["i"]
    assert kwargs["videos_kwargs"] == kwargs["audio_kwargs"] == {"return_tensors": "pt"}


def test_images_are_read_from_files_base64_and_addresses(tmp_path):
    image = Image.new("RGBA", (2, 3), (255, 0, 0, 255))
    address = encode_image_for_rollout_engine(image)
    head, _, data = address.partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).mode == "RGB"
    image.save(tmp_path / "picture.png")
    sources = [address, data, str(tmp_path / "picture.png"), image]
    parts = [{"type": "image", "image": source} for source in sources]
    media = process_vision_info([{"role": "user", "content": parts}, {"role": "user", "content": "no part"}], None)
    assert [one.size for one in media["images"]] == [(2, 3)] * 4
    assert media["videos"] is None

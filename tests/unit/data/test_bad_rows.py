"""Bad input in data sets: what is refused, with which code, where, and the fix."""

import gzip
import json
import subprocess
import tracemalloc
from decimal import Decimal

import pytest

from slime_core.errors import DataError

pytestmark = pytest.mark.unit

GOOD = {"input": "1+1="}


def test_an_empty_file_is_refused(write, source, refused):
    error = refused("DAT17", source, write())
    assert "rows.jsonl has no rows" in error.what
    assert "data.prompt_data" in error.where


def test_a_file_of_blank_lines_is_refused(write, source, refused):
    refused("DAT17", source, write(b"", b"  ", b"\r", b"\t"))


def test_a_file_without_a_valid_row_counts_its_errors(write, source, refused):
    error = refused("DAT17", source, write(b"{", b"[1]", b"{}"), max_bad_rows=9)
    assert "none of 3 rows" in error.what
    assert "1 x DAT19" in error.why
    assert "1 x DAT24" in error.why
    assert "1 x DAT18" in error.why


@pytest.mark.parametrize(
    ("key", "setting"), [("input_key", "data.input_key"), ("label_key", "data.label_key"), ("id_key", "data.id_key")]
)
def test_a_missing_key_names_row_keys_and_setting(write, source, refused, key, setting):
    path = write({"input": "a", "questions": "1"}, {"input": "a", "questions": "1"})
    error = refused("DAT18", source, path, **{key: "question"})
    assert error.where == f"{path}:1"
    assert "'input', 'questions'" in error.why
    assert setting in error.fix
    assert "did you mean 'questions'?" in error.fix


def carried_out(fix, path):
    """The lines of the file that a printed command writes; the file that it reads stays as it was."""
    before = path.read_bytes()
    command, then = fix.split("   ", 1)
    subprocess.run(command, shell=True, check=True, cwd=path.parent)
    assert path.read_bytes() == before
    return path.with_name(then.removeprefix("then name ").split(" in its place")[0]).read_text().splitlines()


@pytest.mark.parametrize("name", ["rows.jsonl", "it's 1 $HOME.jsonl"])
def test_the_printed_fix_of_an_array_named_jsonl_leaves_the_data_alone(tmp_path, source, refused, name):
    path = tmp_path / name
    path.write_text(json.dumps([GOOD, GOOD]))
    assert [json.loads(line) for line in carried_out(refused("DAT19", source, path).fix, path)] == [GOOD, GOOD]


def test_a_compressed_file_is_unpacked_beside_itself_by_the_printed_fix(tmp_path, source, refused):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() + b"\n"))
    assert json.loads(carried_out(refused("DAT30", source, path).fix, path)[0]) == GOOD


def test_broken_json_shows_file_line_and_column(write, source, refused):
    path = write(GOOD, b"", b'{"input": "x", }')
    error = refused("DAT19", source, path)
    assert error.where == f"{path}:3:16"
    assert "data.max_bad_rows" in error.fix


def test_a_json_array_is_told_how_to_become_lines(tmp_path, source, refused):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD], indent=1))
    error = refused("DAT19", source, path)
    assert error.where == f"{path}:1:1"
    assert carried_out(error.fix, path)[0].startswith('{"input": "1+1="')


def test_bad_rows_are_skipped_counted_and_copied_out(write, source, tmp_path):
    path = write(GOOD, b'{"input": \xff}', {"input": "2+2="}, b"{oops")
    found = source(path, max_bad_rows=2)
    assert [p.prompt for p in found.next(4)] == ["1+1=", "2+2=", "1+1=", "2+2="]
    assert found.counts() == {"read": 7, "prompts": 4, "dropped/bad_row": 3}
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [(r["where"], r["code"]) for r in rejected] == [(f"{path}:2, byte 28", "DAT20"), (f"{path}:4:2", "DAT19")]
    assert rejected[0]["line"] == '{"input": \\xff}'
    assert rejected[1]["line"] == "{oops"
    source(path, max_bad_rows=2)
    assert len((tmp_path / "rejected.jsonl").read_text().splitlines()) == 2, "a second start copies nothing twice"


def test_one_bad_row_more_than_allowed_stops(write, source, refused):
    error = refused("DAT19", source, write(b"{", GOOD, b"}", b"]"), max_bad_rows=2)
    assert "3 unreadable rows, data.max_bad_rows is 2" in error.why
    assert ":4:" in error.where


@pytest.mark.parametrize(
    ("line", "place"),
    [(b'{"input": "caf\xe9"}', 14), (b'{"input": "a\0b"}', 12), (b'{"input": "\xed\xa0\x80"}', 11)],
    ids=["latin-1", "NUL", "surrogate in UTF-8"],
)
def test_bytes_that_are_no_text_show_their_offset(write, source, refused, line, place):
    first = json.dumps(GOOD).encode()
    path = write(first, line)
    at = len(first) + 1 + place
    error = refused("DAT20", source, path)
    assert error.where == f"{path}:2, byte {at}"
    assert f"byte {at}" in error.what
    assert "data.max_bad_rows" in error.fix if b"\0" in line else len(carried_out(error.fix, path)) == 2


@pytest.mark.parametrize(("encoding", "place"), [("utf-16", "rows.jsonl:1, byte 0"), ("utf-16-be", "byte 0")])
def test_utf16_is_recognised(tmp_path, source, refused, encoding, place):
    path = tmp_path / "rows.jsonl"
    path.write_bytes((json.dumps(GOOD) + "\n").encode(encoding))
    error = refused("DAT20", source, path, max_bad_rows=0 if encoding == "utf-16-be" else 99)
    assert json.loads(carried_out(error.fix, path)[0]) == GOOD
    assert error.where.endswith(place)


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path, source):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "1"}\r\n\r\n{"input": "2"}\r\n')
    assert [(p.prompt, p.where) for p in source(path).next(2)] == [("1", f"{path}:1"), ("2", f"{path}:3")]


def test_a_line_beyond_the_cap_names_the_key(write, source, refused):
    path = write(GOOD, {"input": "x" * 5000})
    error = refused("DAT21", source, path, max_line_bytes=1024)
    assert error.where == f"{path}:2"
    assert "data.max_line_bytes" in error.fix
    assert len(source(path, max_line_bytes=1024, max_bad_rows=1).next(1)) == 1


def test_a_huge_file_without_newline_is_refused_in_small_memory(tmp_path, source, refused):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"input": "')
        file.truncate(200 << 20)
    tracemalloc.start()
    try:
        refused("DAT21", source, path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80 << 20, "a cap of 8 MiB, a block of 4 MiB and its line index; not the 200 MiB of the file"


def test_duplicate_ids_list_the_first_five(write, source, refused):
    rows = [{"input": str(i), "id": f"q{i % 7}"} for i in range(14)]
    path = write(*rows)
    error = refused("DAT22", source, path, id_key="id")
    assert "7 ids" in error.what
    assert f"'q0' at {path}:1 and {path}:8" in error.what
    assert "'q4'" in error.what
    assert "'q5'" not in error.what
    assert "data.id_key" in error.fix


def test_the_number_one_and_the_text_one_are_the_same_id(write, source, refused):
    refused("DAT22", source, write({"input": "a", "id": 1}, {"input": "b", "id": "1"}), id_key="id")


def test_equal_rows_without_ids_are_different_rows(write, source):
    first, second = source(write(GOOD, GOOD)).next(2)
    assert first.prompt == second.prompt
    assert (first.metadata["row_id"], second.metadata["row_id"]) == ("rows.jsonl:1", "rows.jsonl:2")
    assert first.id != second.id


@pytest.mark.parametrize(
    ("value", "what"),
    [(3, "int"), (None, "null"), ({}, "dict"), ([], "an empty list"), (["a"], "not messages"), (True, "bool")],
    ids=str,
)
def test_a_prompt_of_another_type_shows_what_is_expected(write, source, refused, value, what):
    path = write(GOOD, {"input": value})
    error = refused("DAT24", source, path)
    assert what in error.what
    assert error.where == f"{path}:2: input"
    assert '"role": "user"' in error.why
    assert "data.input_key" in error.fix


def test_an_empty_prompt_is_refused(write, source):
    with pytest.raises(DataError, match="the prompt is empty") as caught:
        source(write({"input": ""})).next(1)
    assert caught.value.code == "DAT24"


@pytest.mark.parametrize("line", [b"[1, 2]", b'"text"', b"17", b"null", b"true"], ids=bytes.decode)
def test_a_row_that_is_no_object_is_refused(write, source, refused, line):
    assert refused("DAT24", source, write(GOOD, line)).where.endswith("rows.jsonl:2")


@pytest.mark.parametrize("value", [3, "text", [1]], ids=str)
def test_metadata_that_is_no_object_is_refused(write, source, refused, value):
    assert "data.metadata_key" in refused("DAT24", source, write({**GOOD, "metadata": value})).fix


@pytest.mark.parametrize("value", [3, {"name": "f"}, "{not json"], ids=str)
def test_tools_that_are_no_list_are_refused(write, source, refused, value):
    assert refused("DAT24", source, write({**GOOD, "tools": value}), tool_key="tools").where.endswith("1: tools")


def test_messages_without_a_chat_template_name_the_key(write, source):
    with pytest.raises(DataError) as caught:
        source(write({"input": [{"role": "user", "content": "hi"}]})).next(1)
    assert caught.value.code == "DAT24"
    assert "chat_template.jinja" in caught.value.fix, "the tokenizer has none"


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"content": "hi"}, "has no role"),
        ({"role": "root", "content": "hi"}, "unknown role 'root'"),
        ({"role": "user"}, "user message has no content"),
        ({"role": "user", "content": None}, "user message has no content"),
        ({"role": "user", "content": 3}, "content of type int"),
        ({"role": "user", "content": ["text"]}, "content of type list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_message_shows_its_row_and_place(write, source, chat_tokenizer, refused, message, what):
    path = write({"input": [{"role": "system", "content": "be brief"}, message]})
    error = refused("DAT25", source, path, tok=chat_tokenizer, apply_chat_template=True)
    assert what in error.what
    assert error.where == f"{path}:1: input[1]"


def test_a_message_that_only_calls_tools_needs_no_content():
    from slime_core.data.chat import check_prompt
    from slime_core.media.references import Access

    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert check_prompt([call], "here", "input", Access()) == [call]


def test_longer_prompts_are_dropped_and_counted(write, source):
    found = source(write({"input": "1234"}, {"input": "12345"}, {"input": "12"}), rollout_max_prompt_len=4)
    assert [p.prompt for p in found.next(4)] == ["1234", "12", "1234", "12"]
    assert found.counts() == {"read": 6, "prompts": 4, "dropped/overlong": 2}


def test_longer_prompts_are_cut_at_the_front(write, source):
    found = source(write({"input": "12345"}), rollout_max_prompt_len=3, overlong_prompt="truncate")
    (prompt,) = found.next(1)
    assert prompt.tokens == [6, 7, 8], "the characters 3 4 5, whose ids start at 3 for 0"
    assert prompt.metadata["prompt_tokens"] == 5


def test_longer_prompts_stop_the_run_where_asked(write, source, refused):
    path = write(GOOD, {"input": "12345"})
    found = source(path, rollout_max_prompt_len=4, overlong_prompt="error", max_bad_rows=9)
    error = refused("DAT26", found.next, 2)
    assert error.where == f"{path}:2"
    assert "5 tokens, more than 4" in error.what
    assert "data.rollout_max_prompt_len" in error.fix


def test_without_a_key_the_bound_is_what_the_context_leaves(write, source):
    sections = {"rollout": {"rollout_max_context_len": 10, "rollout_max_response_len": 6}}
    found = source(write({"input": "12345"}, {"input": "1234"}), sections=sections)
    assert [p.prompt for p in found.next(2)] == ["1234", "1234"]


def test_the_models_own_context_counts_where_none_is_set(write, source, tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    sections = {"rollout": {"hf_checkpoint": str(tmp_path), "rollout_max_response_len": 4}}
    found = source(write({"input": "12345"}, {"input": "1234"}), sections=sections)
    assert [p.prompt for p in found.next(2)] == ["1234", "1234"]


def test_a_set_whose_rows_are_all_dropped_shows_the_histogram(write, source, refused):
    found = source(write({"input": "123"}, {"input": "1234"}, b"{"), rollout_max_prompt_len=2, max_bad_rows=1)
    error = refused("DAT27", found.next, 1)
    assert "'default'" in error.what
    assert error.why == "2 x overlong, 1 x bad_row; overlong prompts have 3 to 4 tokens, at most 2 fit"
    assert "raise data.rollout_max_prompt_len, now 2" in error.fix


def test_the_histogram_counts_a_whole_epoch_once_wherever_it_began(write, source, refused):
    found = source(write({"input": "1"}, {"input": "123"}, {"input": "1234"}), rollout_max_prompt_len=2)
    found.next(1)
    found._streams[0].supply.encoder.limit = 0
    found.next(1)
    found._streams[0].supply.encoder.limit = -1
    assert refused("DAT27", found.next, 1).why.startswith("3 x overlong")


@pytest.mark.parametrize(
    ("rollout", "fix"),
    [
        (
            {"rollout_max_context_len": 8},
            "raise rollout.rollout_max_context_len, or lower the response length, now 6 of",
        ),
        ({"hf_checkpoint": "."}, "lower the response length, now 6 of the 8 tokens that hold prompt and response"),
    ],
    ids=["the run's context", "the model's context"],
)
def test_an_error_of_dropped_rows_names_what_bounds_the_prompt(
    write, source, refused, tmp_path, monkeypatch, rollout, fix
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    sections = {"rollout": {**rollout, "rollout_max_response_len": 6}}
    error = refused("DAT27", source(write({"input": "123"}), sections=sections).next, 1)
    assert error.fix.startswith(fix)
    assert error.why == "1 x overlong; overlong prompts have 3 to 3 tokens, at most 2 fit"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_one_row_without_a_label_is_an_error_that_asks_to_complete_it(write, source, refused, missing):
    rows = [{"input": "1", "label": "2"} for _ in range(3)]
    del rows[missing]["label"]
    error = refused("DAT18", source, write(*rows), label_key="label")
    assert error.where.endswith(f":{missing + 1}")
    assert "other rows have 'label'" in error.why
    assert error.fix == "complete the row, or leave such rows out: data.max_bad_rows=1"


def test_a_set_smaller_than_a_step_goes_round(write, source):
    found = source(write(*({"input": str(i)} for i in range(3))))
    prompts = found.next(8)
    assert [p.prompt for p in prompts] == ["0", "1", "2", "0", "1", "2", "0", "1"]
    assert [p.id for p in prompts] == [f"main/{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("head", "name"), [(b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh9", "bzip2")], ids=str
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_compressed_files_are_refused_unopened_with_the_command(tmp_path, source, refused, head, name, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(head + b"\0" * 100)
    error = refused("DAT30", source, path)
    assert name in error.what
    assert str(path) in error.fix


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("NaN", ": metadata.v"),
        ("Infinity", ": metadata.v"),
        ('{"w": [0, -Infinity]}', ": metadata.v.w[1]"),
        ("1e400", ": metadata.v"),
        ('{"a": 1, "a": 2}', ""),
    ],
)
def test_numbers_and_keys_that_json_does_not_have_are_refused(write, source, refused, text, place):
    path = write(GOOD, b'{"input": "x", "metadata": {"v": %b}}' % text.encode())
    assert refused("DAT31", source, path).where == f"{path}:2{place}"


def test_a_parquet_value_that_json_does_not_have_is_named_by_its_column(tmp_path, source, refused):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    columns = {"input": ["a"], "label": [Decimal("1.5")], "other": [Decimal("1.5")]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert refused("DAT24", source, path, label_key="label").where == f"{path}[0]: label"


def test_a_duplicate_key_is_named(write, source, refused):
    assert "'input'" in refused("DAT31", source, write(b'{"input": "a", "input": "b"}')).what


@pytest.mark.parametrize("depth", [101, 2000, 100_000])
def test_deep_nesting_is_a_typed_error(write, source, refused, depth):
    path = write(b'{"input": "x", "metadata": {"a": %b%b}}' % (b"[" * depth, b"]" * depth))
    assert refused("DAT32", source, path).where == f"{path}:1"


def test_a_hundred_levels_are_fine(write, source):
    path = write(b'{"input": "x", "metadata": {"a": %b%b}}' % (b"[" * 95, b"]" * 95))
    assert len(source(path).next(1)) == 1


@pytest.mark.parametrize(
    "media",
    [
        "file:///etc/passwd",
        "http://169.254.169.254/latest",
        "https://example.com/a.png",
        "ftp://host/a",
        "/etc/passwd",
        "../secret.png",
        "a/../../secret.png",
        "..\\secret.png",
        "link/outside.png",
        "a\0.png",
        {"url": "http://localhost/"},
        {"path": "/etc/passwd"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["image", "image_url", "video", "audio"])
def test_media_outside_the_datas_folder_are_refused(write, source, refused, tmp_path, media, kind):
    (tmp_path / "link").symlink_to("/usr")
    path = write({"input": [{"role": "user", "content": [{"type": kind, kind: media}]}]})
    error = refused("DAT33", source, path)
    assert error.where == f"{path}:1: input[0]"
    assert "beside the data" in error.fix


@pytest.mark.parametrize("media", ["images/a.png", "data:image/png;base64,AAAA", {"url": "images/a.png"}], ids=str)
def test_media_beside_the_data_are_fine_and_get_their_whole_path(tmp_path, media):
    from slime_core.data.chat import check_prompt
    from slime_core.media.references import Access

    expected = media if str(media).startswith("data:") else str(tmp_path / "images" / "a.png")
    for part in ({"type": "image", "image": media}, {"type": "image_url", "image_url": media}):
        (message,) = check_prompt([{"role": "user", "content": [part]}], "here", "input", Access(tmp_path))
        assert message["content"] == [{"type": "image", "image": expected}]


@pytest.mark.parametrize(
    "value", ["../../x", "/abs", "~/x", "a/../b", "..\\x", "", "a\nb", "a\0b", "x" * 513], ids=repr
)
def test_an_id_that_could_be_taken_for_a_path_is_refused(write, source, refused, value):
    path = write({"input": "x", "id": value})
    error = refused("DAT34", source, path, id_key="id")
    assert error.where == f"{path}:1"
    assert "data.id_key" in error.fix


@pytest.mark.parametrize("value", [True, None, 1.5, ["a"]], ids=str)
def test_an_id_of_another_type_is_refused(write, source, value):
    with pytest.raises(DataError, match="not a string or number") as caught:
        source(write({"input": "x", "id": value}), id_key="id")
    assert caught.value.code == "DAT24"


def test_a_number_of_a_million_digits_is_flagged(write, source, refused):
    error = refused("DAT35", source, write(b'{"input": "x", "label": %b}' % (b"9" * 1_000_000)), label_key="label")
    assert "1000000 digits" in error.what
    found = source(write({"input": "x", "label": 10**3999}), label_key="label")
    assert found.next(1)[0].label == 10**3999


TEXTS = ["\u202eabc\u202c", "👩\u200d👩\u200d👧", "𝔘𝔫𝔦", "é", "e\u0301", "\ufeffa", "\u2028", "\x7f", "a\u0000b"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("escaped", [True, False], ids=["escaped", "raw"])
def test_unicode_comes_through_bit_exact(tmp_path, source, text, escaped):
    row = {"input": text, "label": text, "metadata": {text: text}, "id": "x" + text.replace("\0", "")}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=escaped) + "\n", encoding="utf-8", newline="")
    (prompt,) = source(path, label_key="label", id_key="id").next(1)
    assert (prompt.prompt, prompt.label, prompt.metadata[text]) == (text, text, text)
    assert prompt.metadata["row_id"] == row["id"]


def test_composed_and_decomposed_ids_are_two_ids(write, source):
    assert len(source(write({"input": "a", "id": "é"}, {"input": "b", "id": "e\u0301"}), id_key="id").next(2)) == 2


def test_half_a_character_may_be_a_label_but_not_a_prompt(write, source, refused):
    path = write({"input": "x", "label": "\ud800"})
    assert source(path, label_key="label").next(1)[0].label == "\ud800"
    path = write({"input": "x\ud800"})
    error = refused("DAT36", source, path)
    assert "U+D800 at character 1" in error.what
    messages = write({"input": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]})
    refused("DAT36", source, messages)


def test_a_file_cut_short_while_in_use_is_not_a_bad_row(write, source, refused):
    path = write(*({"input": str(i)} for i in range(100)))
    found = source(path, max_bad_rows=1000)
    found.next(1)
    path.write_bytes(path.read_bytes()[:60])
    error = refused("DAT37", found.next, 100)
    assert str(path) in error.where

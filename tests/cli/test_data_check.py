"""`slime data check FILE`: bad input of every kind, with its code, place and message."""

import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from slime_cli.survey import survey
from slime_core.data.opening import open_rows
from slime_core.data.prompts import Keys
from slime_core.errors import DataError

pytestmark = pytest.mark.integration

GOOD = b'{"input": "1+1=", "label": "2"}'
LABELLED = ("--label-key", "label")
LIMITED = ("--rollout-max-prompt-len", "3")


def deep(levels):
    return b'{"input": "x", "label": ' + b"[" * levels + b"]" * levels + b"}"


def part(kind, value):
    return {"input": [{"role": "user", "content": [{"type": kind, kind: value}]}]}


BAD = [  # case, file's bytes or lines, flags, code, where it is (at the end), what is told
    ("empty", b"", (), "DAT17", "rows.jsonl", "has no rows"),
    ("blank", b"\n  \n\r\n", (), "DAT17", "rows.jsonl", "has no rows"),
    ("none usable", [b"{", b"[1]"], ("--max-bad-rows", "2"), "DAT17", "rows.jsonl", "1 x DAT19, 1 x DAT24"),
    ("key", [b'{"inputs": "x"}'], (), "DAT18", ":1", "did you mean 'inputs'?"),
    ("no label", [b'{"input": "x"}', b'{"input": "y"}'], LABELLED, "DAT18", ":1", "set data.label_key"),
    ("one label", [GOOD, b'{"input": "x"}'], LABELLED, "DAT18", ":2", "complete the row"),
    ("JSON", [GOOD, b'{"input": "x", }'], (), "DAT19", ":2:16", "line 2 is not JSON"),
    ("many", [b"{", GOOD, b"]"], ("--max-bad-rows", "1"), "DAT19", ":1:2", "2 of 3 rows are unreadable"),
    ("array", b'[{"input": "x"}]', (), "DAT19", ":1:1", "json.load"),
    ("latin-1", [GOOD, b'{"input": "caf\xe9"}'], (), "DAT20", "byte 46", "0xe9) is not UTF-8"),
    ("NUL", [b'{"input": "a\0b"}'], (), "DAT20", "byte 12", "NUL byte"),
    ("UTF-16", '{"input": "x"}\n'.encode("utf-16"), (), "DAT20", "byte 0", "iconv -f UTF-16"),
    ("long line", [b'{"input": "%b"}' % (b"x" * 5000)], ("--max-line-bytes", "1024"), "DAT21", ":1", "longer than 1024"),
    ("ids", [b'{"input": "x", "id": 7}', b'{"input": "y", "id": "7"}'], ("--id-key", "id"), "DAT22", "rows.jsonl", ":2"),
    ("integer", [b'{"input": 3}'], (), "DAT24", ":1: input", "the prompt is int"),
    ("null", [b'{"input": null}'], (), "DAT24", ":1: input", "the prompt is null"),
    ("empty", [GOOD, b'{"input": ""}'], (), "DAT24", ":2", "the prompt is empty"),
    ("not messages", [b'{"input": [1]}'], (), "DAT24", ":1: input", "items that are not messages"),
    ("no role", [b'{"input": [{"content": "x"}]}'], (), "DAT25", "input[0]", "has no role"),
    ("no content", [b'{"input": [{"role": "user"}]}'], (), "DAT25", "input[0]", "has no content"),
    ("role", [b'{"input": [{"role": "bot", "content": "x"}]}'], (), "DAT25", "input[0]", "unknown role 'bot'"),
    ("error", [GOOD], (*LIMITED, "--overlong-prompt", "error"), "DAT26", ":1", "has 4 tokens, more than 3"),
    ("all dropped", [GOOD, GOOD], LIMITED, "DAT27", "rows.jsonl", "2 x overlong; overlong prompts have 4 to 4 tokens, at most 3 fit"),
    ("gzip", b"\x1f\x8b\x08\0" + b"\0" * 60, (), "DAT30", "rows.jsonl", "gunzip -c"),
    ("zstd", b"\x28\xb5\x2f\xfd" + b"\0" * 60, (), "DAT30", "rows.jsonl", "zstd -d"),
    ("Parquet without footer", b"PAR1" + b"\0" * 60, (), "DAT30", "rows.jsonl", "not a readable Parquet file"),
    ("NaN", [b'{"input": "x", "label": NaN}'], LABELLED, "DAT31", ":1: label", "NaN"),
    ("Infinity", [b'{"input": "x", "label": -Infinity}'], LABELLED, "DAT31", ":1: label", "Infinity"),
    ("1e999", [b'{"input": "x", "label": 1e999}'], LABELLED, "DAT31", ":1: label", "inf"),
    ("key twice", [b'{"input": "x", "input": "y"}'], (), "DAT31", ":1", "'input' occurs twice"),
    ("nesting", [deep(100_000)], (), "DAT32", ":1", "nested deeper than 100"),
    ("absolute", [part("image", "/etc/passwd")], (), "DAT33", "input[0]", "leaves the folder"),
    ("traversal", [part("image", "../x.png")], (), "DAT33", "input[0]", "leaves the folder"),
    ("link out", [part("image", "link/x.png")], (), "DAT33", "input[0]", "leaves the folder"),
    ("file URL", [part("video", "file:///etc/passwd")], (), "DAT33", "input[0]", "fetch or open an address"),
    ("http", [part("audio", "http://example.com/y.wav")], (), "DAT33", "input[0]", "fetch or open an address"),
    ("own column", [{"input": "x", "pics": ["../a"]}], ("data.multimodal_keys={image = 'pics'}",), "DAT33", "pics[0]", "leaves"),
    ("id", [b'{"input": "x", "id": "../../x"}'], ("--id-key", "id"), "DAT34", ":1", "could be taken for a path"),
    ("digits", [b'{"input": "x", "label": %b}' % (b"9" * 1_000_000)], LABELLED, "DAT35", ":1", "1000000 digits"),
    ("half a character", [b'{"input": "a\\ud800"}'], (), "DAT36", ":1", "lone surrogate U+D800 at character 1"),
]  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Write a file of bytes, or of lines; answers its path."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path)

    def write(content, name="rows.jsonl"):
        path = tmp_path / "data" / name
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in content]
        path.write_bytes(content if isinstance(content, bytes) else b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.mark.parametrize(("content", "flags", "code", "where", "what"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
def test_a_file_that_a_run_would_refuse_is_an_error(cli, written, model, content, flags, code, where, what):
    limited = ("--hf-checkpoint", model) if "--rollout-max-prompt-len" in flags else ()
    path = written(content)
    done = cli("data", "check", path, *flags, *limited)
    assert done.code == 3, done.out
    first, place = done.err.split("error ")[1].splitlines()[:2]
    assert first.startswith(code), done.err
    assert place.strip().removeprefix("where").strip().endswith(where), done.err
    assert what in done.err, done.err
    assert "Traceback" not in done.err
    assert "fix" in done.err


def test_a_missing_file_is_a_config_error(cli, tmp_path):
    done = cli("data", "check", "gone.jsonl")
    assert (done.code, "CFG05" in done.err, f"{tmp_path}/gone.jsonl" in done.err) == (2, True, True)


def test_rows_keys_lengths_and_duplicates_of_a_file_are_reported(cli, written, model):
    rows = [{"input": "1+1=" + "+1" * i, "label": str(i)} for i in range(7)]
    repeated = [dict(rows[0]), {"input": "1+1=", "label": "other"}]
    path = written([*rows, *repeated, b"", b'{"input": "x", "label": 3, "more": null}', b"{"])
    done = cli("data", "check", path, "--json", *LABELLED, "--max-bad-rows", "1", "--hf-checkpoint", model,
               "--rollout-max-prompt-len", "14")  # fmt: skip
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["rows"], facts["prompts"], facts["dropped"], facts["problem"]) == (11, 9, {"overlong": 1}, None)
    assert facts["keys"] == {"input": {"string": 10}, "label": {"string": 9, "integer": 1}, "more": {"null": 1}}
    lengths = facts["lengths"]
    assert (lengths["unit"], lengths["limit"], lengths["min"], lengths["p50"], lengths["max"]) == (
        "tokens",
        14,
        1,
        6,
        16,
    )
    assert lengths["histogram"] == [[1, 1, 1], [2, 3, 0], [4, 7, 4], [8, 15, 4], [16, 31, 1]]
    same = facts["duplicates"]
    assert (same["same_prompt_and_label"], same["same_prompt_other_label"]) == (1, 1)
    assert same["first"] == [[f"{path}:1", f"{path}:8"], [f"{path}:8", f"{path}:9"]]
    assert [row["where"] for row in facts["bad_rows"]["first"]] == [f"{path}:12:2"]
    assert facts["notes"] == ["a step of 32 prompts goes round 3.6 times"]
    shown = cli("data", "check", path, *LABELLED)
    assert shown.code == 3
    for text in ("prompt lengths in characters", "8-15", "####", "DAT19", f"{path}:12:2", "string 9, integer 1"):
        assert text in shown.out
    problem = cli("data", "check", path, *LABELLED, "--json")
    assert (problem.code, json.loads(problem.out)["problem"]["code"]) == (3, "DAT19")


def test_equal_rows_are_allowed_and_counted(cli, written):
    done = cli("data", "check", written([GOOD, GOOD]), "--json")
    assert done.code == 0
    facts = json.loads(done.out)
    assert (facts["prompts"], facts["duplicates"]["ids"], facts["duplicates"]["same_prompt_and_label"]) == (2, 0, 1)
    assert "goes round 16.0 times" in facts["notes"][0]


def test_longer_prompts_are_dropped_and_counted(cli, written, model):
    done = cli("data", "check", written([GOOD, b'{"input": "1"}']), *LIMITED, "--hf-checkpoint", model, "--json")
    facts = json.loads(done.out)
    assert (done.code, facts["rows"], facts["prompts"], facts["dropped"]) == (0, 2, 1, {"overlong": 1})
    cut = cli(
        "data", "check", facts["file"], *LIMITED, "--hf-checkpoint", model, "--overlong-prompt", "truncate", "--json"
    )
    assert json.loads(cut.out)["prompts"] == 2


def test_a_file_is_checked_against_the_rows_of_a_run(cli, written, halted, own):
    assert cli("data", "check", own.path / "my.jsonl", "--input-key", "question", "--run", halted).code == 0
    other = written([b'{"question": "1+1="}'])
    done = cli("data", "check", other, "--input-key", "question", "--run", halted)
    assert (done.code, "error DAT29" in done.err, done.err.count("sha256:")) == (3, True, 2)
    assert cli("data", "check", other, "--input-key", "question", "--run", other.parent).code == 3
    with (own.path / "my.jsonl").open("a") as file:  # as a resumed run: rows that are appended are told, and no error
        file.write('{"question": "1+1=", "answer": "2"}\n')
    grown = cli("data", "check", own.path / "my.jsonl", "--input-key", "question", "--run", halted)
    assert (grown.code, "bytes were appended since the run began" in grown.err) == (0, True)


def test_parquet_is_checked_like_lines(cli, written, tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"input": ["1", None], "label": ["a", "b"]}), path)
    done = cli("data", "check", path, *LABELLED)
    assert (done.code, "DAT24" in done.err, f"{path}[1]: input" in done.err) == (3, True, True)
    assert "did you mean 'label'" in cli("data", "check", path, "--label-key", "labels").err
    path.write_bytes(b"")
    assert "error DAT30" in cli("data", "check", path).err


@pytest.mark.parametrize("label", ["9" * 4001, "9**9**9", "9^{9^9}", "x = 2 ^ (10^9)"], ids=lambda label: label[:9])
def test_a_label_that_no_grader_should_work_out_is_flagged(cli, written, label):
    done = cli(
        "data", "check", written([GOOD, {"input": "x", "label": label}, {"input": "y", "label": "2^3"}]), *LABELLED
    )
    assert done.code == 0, done.err
    assert "notice: label of" in done.err
    assert "rows.jsonl:2" in done.err
    assert done.err.count("notice: label of") == 1


def test_unicode_is_counted_as_it_stands(cli, written):
    rows = [{"input": text} for text in ("é", "e\u0301", "\u202ea", "👩\u200d👧")]
    facts = json.loads(cli("data", "check", written(rows), "--json").out)
    assert (facts["prompts"], facts["duplicates"]["same_prompt_and_label"]) == (4, 0)
    assert facts["lengths"]["max"] == 3


KEYS = Keys(input="input", label="", metadata="metadata", tools="", id="")


def test_a_file_that_vanishes_or_shrinks_while_it_is_checked_is_an_error(written):
    path = written([GOOD] * 2500)
    with pytest.raises(DataError, match="is gone during the run") as caught:
        survey(open_rows(str(path), max_line_bytes=1024), KEYS, progress=lambda n: n == 1000 and path.unlink())
    assert (caught.value.code, caught.value.where) == ("DAT37", str(path))
    written([GOOD] * 2500)
    with pytest.raises(DataError, match="cut short") as caught:
        survey(open_rows(str(path), max_line_bytes=1024), KEYS, progress=lambda n: n == 1000 and os.truncate(path, 40))
    assert caught.value.code == "DAT37"


def test_lines_that_are_appended_while_it_is_checked_are_not_read(written):
    path = written([GOOD] * 2500)

    def append(number):
        if number == 1000:
            with path.open("ab") as file:
                file.write(b"{half a li")

    found = survey(open_rows(str(path), max_line_bytes=1024), KEYS, progress=append)
    assert (found.rows, found.prompts, found.bad.total()) == (2500, 2500, 0)


def test_media_of_a_row_are_checked_counted_and_kept(cli, written, tmp_path):
    (tmp_path / "data" / "a.png").write_bytes(b"x")
    path = written([{"input": "x", "pics": ["a.png", "a.png"]}, {"input": "y", "pics": None}])
    done = cli("data", "check", path, "data.multimodal_keys={image = 'pics'}", "--json")
    assert (done.code, json.loads(done.out)["media"]) == (0, {"images": 2}), done.err


def test_a_chat_template_needs_a_model(cli, written):
    done = cli("data", "check", written([GOOD]), "--apply-chat-template")
    assert (done.code, "--hf-checkpoint" in done.err) == (2, True)


def test_the_files_own_folder_is_where_a_relative_path_starts(cli, written, monkeypatch):
    path = written([GOOD])
    monkeypatch.chdir(path.parent)
    assert cli("data", "check", Path(path.name + "@[0:1]")).code == 0

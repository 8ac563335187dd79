"""Files and sets by number: slices, kinds, Parquet by row group, hub sets and folders."""

import json
import os
import tracemalloc

import pytest

from slime_core.data.hub import HubRows, is_hub_name
from slime_core.data.opening import open_rows
from slime_core.data.parquet import ParquetRows
from slime_core.data.rows import split_slice

pytestmark = pytest.mark.unit


def opened(spec, **kwargs):
    return open_rows(str(spec), max_line_bytes=1 << 20, **kwargs)


@pytest.fixture
def ten(write):
    return write(*({"input": str(i)} for i in range(10)))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[0:3]", [0, 1, 2]),
        ("[:3]", [0, 1, 2]),
        ("[7:]", [7, 8, 9]),
        ("[-2:]", [8, 9]),
        ("[:-7]", [0, 1, 2]),
        ("[-4:-2]", [6, 7]),
        ("[8:99]", [8, 9]),
        ("[-99:1]", [0]),
        ("[:]", list(range(10))),
        ("[ 2 : 4 ]", [2, 3]),
    ],
)
def test_slices_are_pythons(ten, text, want):
    rows = opened(f"{ten}@{text}")
    assert [rows[i]["input"] for i in range(len(rows))] == [str(i) for i in want]
    assert rows.where(0) == f"{ten}:{want[0] + 1}", "messages keep the file's own line numbers"
    for row in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[row]


@pytest.mark.parametrize("text", ["[3]", "[]", "[a:b]", "[1:2:3]", "[1.5:2]", "[1-2]"])
def test_a_malformed_slice_is_refused_with_the_form(ten, refused, text):
    error = refused("CFG03", opened, f"{ten}@{text}", key="data.tasks[1].prompt_data")
    assert f"@{text} is not a slice" in error.what
    assert error.where.startswith("data.tasks[1].prompt_data = ")
    assert "@[a:b]" in error.fix


def test_an_empty_slice_tells_how_many_rows_there_are(ten, refused):
    assert "10 rows" in refused("DAT17", opened, f"{ten}@[20:]").what


def test_a_slice_is_part_of_the_fingerprint(ten):
    marks = {opened(f"{ten}{part}").fingerprint() for part in ("", "@[:3]", "@[1:4]")}
    assert len(marks) == 3
    assert opened(f"{ten}@[0:3]").fingerprint() == opened(f"{ten}@[:-7]").fingerprint()


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("a.jsonl", ("a.jsonl", None)),
        ("a@b.jsonl@[1:]", ("a@b.jsonl", slice(1, None))),
        ("x@[:2]", ("x", slice(None, 2))),
    ],
)
def test_a_slice_is_only_what_stands_at_the_end(spec, want):
    assert split_slice(spec) == want


def test_a_missing_file_shows_the_absolute_path_and_the_working_folder(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused("CFG05", opened, "nowhere.jsonl")
    assert str(tmp_path / "nowhere.jsonl") in error.where
    assert f"working folder {tmp_path}" in error.where


def test_a_pipe_is_refused_by_name_and_not_waited_for(tmp_path, refused):
    os.mkfifo(tmp_path / "rows.jsonl")
    error = refused("CFG05", opened, tmp_path / "rows.jsonl")
    assert "rows.jsonl is not a regular file" in error.what
    assert error.fix == "write it to a file first"


@pytest.fixture
def parquet(tmp_path):
    """Write columns as Parquet, ten rows a group."""
    import pyarrow
    import pyarrow.parquet

    def make(name="rows.parquet", group=10, **columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / name, row_group_size=group)
        return tmp_path / name

    return make


def test_parquet_rows_are_found_across_row_groups(parquet):
    path = parquet(input=[str(i) for i in range(35)], other=list(range(35)))
    rows = opened(path, columns={"input", "metadata"})
    assert len(rows) == 35
    for i in (0, 9, 10, 34, 20, 3):
        assert rows[i] == {"input": str(i)}, "only wanted columns are decoded"
    assert rows.where(20) == f"{path}[20]"
    for row in (-1, 35):
        with pytest.raises(IndexError):
            rows[row]


def test_parquet_is_recognised_by_its_bytes(parquet):
    assert isinstance(opened(parquet(name="data.bin", input=["a"])), ParquetRows)


def test_parquet_messages_lose_arrows_padding(parquet, source, chat_tokenizer):
    """Arrow gives each struct the keys of all; a template that asks `is defined` must not see them."""
    messages = [[{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "a", "name": "x"}]]
    path = parquet(input=messages, label=[{"a": 1, "b": None}])
    assert opened(path)[0]["input"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a", "name": "x"},
    ]
    (prompt,) = source(path, label_key="label", tok=chat_tokenizer, apply_chat_template=True).next(1)
    assert prompt.prompt == "user: hi\nassistant: a\nassistant: "
    assert prompt.label == {"a": 1}


def test_parquet_is_read_a_row_group_at_a_time(parquet):
    path = parquet(group=50, input=["x" * 100_000 + str(i) for i in range(400)])
    import pyarrow

    from slime_core.data import parquet as module

    before = pyarrow.total_allocated_bytes()
    rows = ParquetRows(path)
    rows[0], rows[399]
    assert len(rows._groups) == 2
    assert pyarrow.total_allocated_bytes() - before < 3 * 50 * 100_000 * 1.1
    assert module.KEPT_BYTES == 256 << 20


def test_parquet_groups_beyond_the_budget_are_forgotten(parquet, monkeypatch):
    from slime_core.data import parquet as module

    monkeypatch.setattr(module, "KEPT_BYTES", 2000)
    rows = ParquetRows(parquet(input=["x" * 100] * 100))
    for i in range(100):
        assert rows[i]["input"] == "x" * 100
    assert 1 <= len(rows._groups) <= 2


def test_a_row_group_that_claims_too_much_is_refused(parquet, refused, monkeypatch):
    from slime_core.data import parquet as module

    monkeypatch.setattr(module, "MAX_GROUP_BYTES", 100)
    assert "row_group_size" in refused("DAT30", opened, parquet(input=["x" * 200])).fix


@pytest.mark.parametrize("damage", ["empty", "footer cut", "head only", "noise"])
def test_a_damaged_parquet_file_is_a_typed_error(parquet, refused, damage):
    path = parquet(input=["a", "b"])
    data = path.read_bytes()
    kinds = {"empty": b"", "footer cut": data[:-6], "head only": data[:4], "noise": b"PAR1" + b"\xff" * 64 + b"PAR1"}
    path.write_bytes(kinds[damage])
    error = refused("DAT30", opened, path)
    assert str(path) in error.where
    assert f"{len(kinds[damage])} bytes" in error.what


def test_a_damaged_page_is_a_typed_error_too(parquet, source, refused):
    path = parquet(input=["abcdefgh" * 50 + str(i) for i in range(50)], group=50)
    data = bytearray(path.read_bytes())
    data[8:400] = b"\xff" * 392
    path.write_bytes(data)
    assert "row group 0" in refused("DAT30", source, path).why


def test_a_missing_column_is_found_before_any_row_is_read(parquet, source, refused):
    error = refused("DAT18", source, parquet(question=["a"], answer=["b"]), input_key="questoin")
    assert "'question', 'answer'" in error.why
    assert "did you mean 'question'?" in error.fix


@pytest.mark.parametrize("value", [b"bytes", float("nan")], ids=["bytes", "NaN"])
def test_parquet_values_that_json_cannot_say_are_refused(parquet, source, refused, value):
    code = "DAT24" if isinstance(value, bytes) else "DAT31"
    refused(code, source, parquet(input=["a"], label=[value]), label_key="label")


def test_a_parquet_file_without_rows_is_refused(parquet, source, refused):
    import pyarrow

    refused("DAT17", source, parquet(input=pyarrow.array([], pyarrow.string())))


def test_the_fingerprint_of_parquet_follows_its_content(parquet):
    first = opened(parquet(input=["a", "b"])).fingerprint()
    assert opened(parquet(input=["a", "b"])).fingerprint() == first
    assert opened(parquet(input=["a", "c"])).fingerprint() != first


@pytest.fixture
def saved(tmp_path):
    """A data set that `datasets` saved, with two splits."""
    import datasets

    parts = {
        "train": datasets.Dataset.from_list([{"q": str(i), "a": i} for i in range(6)]),
        "test": datasets.Dataset.from_list([{"q": "t", "a": 0}]),
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    return tmp_path / "set"


def test_a_saved_data_set_is_read_by_split(saved, source):
    assert len(opened(saved)) == 6
    assert opened(f"{saved}:test@[0:1]")[0] == {"q": "t", "a": 0}
    found = source(f"{saved}@[-2:]", input_key="q", label_key="a")
    assert [(p.prompt, p.label) for p in found.next(3)] == [("4", 4), ("5", 5), ("4", 4)]
    assert found.next(1)[0].metadata["row_id"] == "set[5]"


def test_a_saved_single_split_is_read_as_it_is(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"q": "x"}]).save_to_disk(str(tmp_path / "one"))
    assert opened(tmp_path / "one")[0] == {"q": "x"}


def test_a_folder_of_files_is_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    for part in range(2):
        (tmp_path / "folder" / f"{part}.jsonl").write_text(json.dumps({"q": str(part)}) + "\n")
    rows = HubRows(str(tmp_path / "folder"))
    assert sorted(rows[i]["q"] for i in range(len(rows))) == ["0", "1"]


def test_a_folder_that_holds_much_more_than_a_set_is_refused_at_once(tmp_path, refused, monkeypatch):
    """A home folder, say: `datasets` would look at every file below it."""
    monkeypatch.setattr("slime_core.data.hub.MOST_FILES", 3)
    for part in range(4):
        (tmp_path / str(part)).mkdir()
        (tmp_path / str(part) / "x.jsonl").write_text(json.dumps({"q": "1"}) + "\n")
    error = refused("DAT30", lambda: opened(tmp_path))
    assert "more than 3 files" in error.what
    assert "name the set's own folder" in error.fix


README = """---
configs:
- config_name: easy
  data_files: [{split: train, path: easy-train.jsonl}, {split: test, path: easy-test.jsonl}]
- config_name: hard
  data_files: hard.jsonl
---
"""


@pytest.fixture
def with_configs(tmp_path, monkeypatch):
    """A folder in the hub's form with the configurations easy and hard; each row is the name of its file."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "README.md").write_text(README)
    for name in ("easy-train", "easy-test", "hard"):
        (tmp_path / "hub" / f"{name}.jsonl").write_text(json.dumps({"q": name}) + "\n")
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("part", "row"), [("#easy", "easy-train"), ("#easy:test", "easy-test"), ("#hard", "hard"), ("#hard@[0:1]", "hard")]
)
def test_a_folder_in_the_form_of_the_hub_has_configurations(with_configs, part, row):
    assert opened(f"{with_configs}{part}")[0] == {"q": row}


@pytest.mark.parametrize(
    ("part", "fix"), [("", "name one: "), (":test", "name one: "), ("#hrad", "did you mean 'hard'?")]
)
def test_a_folder_with_several_configurations_lists_them(with_configs, refused, part, fix):
    error = refused("DAT18", opened, f"{with_configs}{part}")
    assert error.why == "it has easy, hard"
    assert fix in error.fix


def test_a_split_that_is_not_there_is_named(saved, refused):
    error = refused("DAT18", opened, f"{saved}:tset")
    assert "train, test" in error.what
    assert "did you mean 'test'?" in error.fix


def test_a_hub_set_that_cannot_be_had_is_a_typed_error(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    error = refused("CFG05", opened, "nobody/nothing#main:test")
    assert "nobody/nothing#main:test" in error.what
    assert "hf download" in error.fix


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("a/b", True),
        ("a/b#c", True),
        ("a/b:train", True),
        ("a/b#c:test", True),
        ("a", False),
        ("/a/b", False),
        ("../b", False),
    ],
)
def test_hub_names_have_a_form(spec, want):
    assert is_hub_name(spec) == want


def test_opening_a_slice_of_a_large_file_holds_no_rows(write):
    path = write(*({"input": "y" * 2000} for _ in range(5000)))
    tracemalloc.start()
    rows = opened(f"{path}@[100:4000]")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 3900
    assert peak < 5000 * 2000

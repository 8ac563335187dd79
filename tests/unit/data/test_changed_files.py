"""Files that change under a run: gone, cut, replaced or edited is an error; appended rows wait for another run."""

import json
import os
from hashlib import sha256

import pytest

from slime_core.errors import DataError
from slime_core.notices import notices_to

pytestmark = pytest.mark.unit

KINDS = ["jsonl", "parquet"]


def rows(count, prefix=""):
    return [{"input": f"{prefix}{i:03d}", "label": str(i)} for i in range(count)]


def store(path, given):
    """Write rows by the path's suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), path, row_group_size=10)
    return path


def texts(prompts):
    return [prompt.prompt for prompt in prompts]


def touched(path, seconds=1):
    """Give the file a later time, as a write would have."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + seconds * 10**9))


@pytest.fixture
def said():
    """What was said to people."""
    lines = []
    with notices_to(lines.append):
        yield lines


@pytest.fixture(params=KINDS)
def file(request, tmp_path):
    return store(tmp_path / f"rows.{request.param}", rows(30))


def lost(source, path, *expected):
    """The next row must be refused with DAT37, the path, and what was expected and found."""
    with pytest.raises(DataError) as caught:
        source.next(1)
    error = caught.value
    assert (error.code, error.exit_code) == ("DAT37", 3)
    assert str(path) in error.where
    assert "slime run --resume" in error.fix
    for part in expected:
        assert part in error.why
    return error


def test_a_file_that_is_removed_during_the_run_is_an_error_and_the_run_goes_on_when_it_is_back(file, source):
    """The path, what was expected, and nothing lost."""
    data = file.read_bytes()
    found = source(file)
    found.next(5)
    state = json.loads(json.dumps(found.state()))
    file.unlink()
    error = lost(found, file, f"expected {len(data)} bytes", sha256(data).hexdigest(), "found nothing")
    assert "is gone" in error.what
    assert found.state() == state, "the place in the data is that of the last prompt"
    file.write_bytes(data)
    again = source(file)
    again.restore(state)
    assert texts(again.next(3)) == ["005", "006", "007"]


def test_a_file_that_comes_back_with_the_same_bytes_is_the_same_file(file, source):
    """Identity is the content, not the inode."""
    found = source(file)
    found.next(5)
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)
    touched(file)
    assert texts(found.next(2)) == ["005", "006"]


def test_a_file_that_is_cut_short_names_both_sizes(file, source):
    """Truncated in the middle of a run."""
    size = file.stat().st_size
    found = source(file)
    found.next(1)
    os.truncate(file, size - 40)
    error = lost(found, file, f"expected {size} bytes", f"found {size - 40} bytes")
    assert "cut short" in error.what


def test_a_file_that_is_replaced_by_another_one_names_both_hashes(file, source):
    """Another file under the same name."""
    before = file.read_bytes()
    found = source(file)
    found.next(1)
    store(file.with_name("new" + file.suffix), rows(30, "9")).replace(file)
    after = file.read_bytes()[: len(before)]
    error = lost(found, file, sha256(before).hexdigest(), sha256(after).hexdigest())
    assert "replaced" in error.what


def test_an_edit_in_place_of_the_same_length_is_found(file, source):
    """The size says nothing here."""
    found = source(file)
    found.next(1)
    data = file.read_bytes()
    with file.open("r+b") as handle:
        handle.write(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    touched(file)
    error = lost(found, file, f"found {len(data)} bytes")
    assert "was changed" in error.what


def test_bad_rows_that_are_tolerated_do_not_hide_a_lost_file(tmp_path, source):
    """Max_bad_rows is for rows, not for the file."""
    path = store(tmp_path / "rows.jsonl", rows(10))
    found = source(path, max_bad_rows=100)
    found.next(1)
    path.unlink()
    lost(found, path)


def append(path, count, prefix="8"):
    with path.open("a") as handle:
        handle.write("".join(json.dumps(row) + "\n" for row in rows(count, prefix)))


def test_rows_that_are_appended_during_the_run_are_not_read_and_are_told_once(tmp_path, source, said):
    """The byte range of the opening is pinned."""
    path = store(tmp_path / "rows.jsonl", rows(10))
    size = path.stat().st_size
    found = source(path)
    assert texts(found.next(4)) == ["000", "001", "002", "003"]
    append(path, 5)
    append(path, 5)
    assert texts(found.next(16)) == [f"{i % 10:03d}" for i in range(4, 20)]
    assert len(said) == 1
    assert str(path) in said[0]
    assert f"{path.stat().st_size - size} bytes were appended" in said[0]


@pytest.mark.parametrize("noted", [True, False], ids=["in the same run directory", "without its note"])
@pytest.mark.parametrize("part", ["", "@[2:8]", "@[-4:]"], ids=["whole", "slice", "slice from the end"])
def test_a_resumed_run_uses_the_rows_of_then_of_a_file_that_has_grown(tmp_path, source, said, part, noted):
    """The prefix is compared, the longer file is accepted with a notice."""
    path = store(tmp_path / "rows.jsonl", rows(10))
    first = source(f"{path}{part}", rollout_shuffle=True)
    first.next(3)
    state = json.loads(json.dumps(first.state()))
    assert state["tasks"]["default"]["file"] == {
        "bytes": path.stat().st_size,
        "rows": 10,
        "sha256": sha256(path.read_bytes()).hexdigest(),
    }
    rest = texts(first.next(20))
    append(path, 7)
    again = source(f"{path}{part}", rollout_shuffle=True, same_run=noted)
    again.restore(state)
    assert texts(again.next(20)) == rest
    assert again.state()["tasks"]["default"]["fingerprint"] == state["tasks"]["default"]["fingerprint"]
    assert any("grew from" in line and "the 10 rows" in line for line in said)


def test_a_line_that_is_half_written_after_the_saved_rows_does_not_stop_the_resume(tmp_path, source, said):
    """What was appended is not even judged."""
    path = store(tmp_path / "rows.jsonl", rows(10))
    state = source(path).state()
    with path.open("a") as handle:
        handle.write('{"input": "hal')
    again = source(path, same_run=True)
    again.restore(state)
    assert texts(again.next(11))[-1] == "000"
    assert said


@pytest.mark.parametrize("noted", [True, False], ids=["in the same run directory", "without its note"])
def test_a_file_that_grew_but_also_changed_is_refused_with_both_hashes(tmp_path, source, refused, noted):
    """The pinned range must be the same."""
    path = store(tmp_path / "rows.jsonl", rows(10))
    state = source(path).state()
    path.write_text(path.read_text().replace("003", "333", 1))
    append(path, 3)

    def resume():
        source(path, same_run=noted).restore(state)

    error = refused("DAT29", resume)
    assert state["tasks"]["default"]["file"]["sha256"] in error.why
    size = state["tasks"]["default"]["file"]["bytes"]
    data = path.read_bytes()
    assert sha256(data[:size] if noted else data).hexdigest() in error.why


@pytest.mark.parametrize("noted", [True, False], ids=["in the same run directory", "without its note"])
def test_another_file_of_the_same_size_or_a_shorter_one_is_refused(tmp_path, source, refused, noted):
    """For both kinds of file."""
    for suffix in KINDS:
        path = store(tmp_path / f"rows.{suffix}", rows(10))
        state = source(path).state()
        for other in (rows(10, "1")[:9], [*rows(9), {"input": "0x9", "label": "9"}]):
            store(path, other)
            with pytest.raises(DataError) as caught:
                source(path, same_run=noted).restore(state)
            assert caught.value.code == "DAT29"


def test_a_parquet_file_with_other_values_under_an_equal_footer_is_refused(tmp_path, source, refused):
    """The hash is of the whole file, not of its figures."""
    path = store(tmp_path / "rows.parquet", rows(10))
    state = source(path).state()
    data = path.read_bytes()
    path.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    with pytest.raises(DataError) as caught:
        source(path).restore(state)
    assert caught.value.code in ("DAT29", "DAT30")


def test_a_run_that_is_resumed_before_its_first_checkpoint_reads_the_rows_of_its_beginning(tmp_path, source, said):
    """What the rows were is noted when the run opens them, durably, not with the first checkpoint."""
    path = store(tmp_path / "rows.jsonl", rows(10))
    first = texts(source(path, rollout_shuffle=True).next(30))
    append(path, 7)
    again = source(path, rollout_shuffle=True, same_run=True)
    assert texts(again.next(30)) == first
    assert again.state() != source(path, rollout_shuffle=True).state()


def test_a_run_that_is_resumed_before_its_first_checkpoint_refuses_other_rows(tmp_path, source, refused):
    """Prompts of the ledger must not be taken for others."""
    path = store(tmp_path / "rows.jsonl", rows(10))
    source(path)
    refused("DAT29", source, path, same_run=True, seed=1)
    store(path, rows(10, "7"))
    refused("DAT29", source, path, same_run=True)
    (tmp_path / "data.json").write_text("{")
    error = refused("DAT29", source, path, same_run=True)
    assert "data.json" in error.where


def test_every_stage_notes_its_own_data(tmp_path, source):
    """Stages may read different files."""
    one, two = (store(tmp_path / f"{name}.jsonl", rows(5, name)) for name in "12")
    for path, stage in ((one, "warmup"), (two, "main"), (one, "warmup"), (two, "main")):
        assert texts(source(path, stage=stage, same_run=True).next(1)) == [f"{path.stem}000"]

"""`slime report` of what is no run, empty, running, damaged, older or twice the same, and what a run records for it."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.ledger.ledger import SqliteLedger
from slime_core.report.rundir import RunDir
from slime_core.types import Batch, Group, Prompt, Sample, StepReport
from slime_report.recorder import StepRecorder, read_record, read_steps, recorded_versions
from slime_report.samples import SampleBook, choose_groups
from slime_report.tokens import Vocabulary

pytestmark = pytest.mark.integration


def make_run(path: Path, groups: int = 3) -> Path:
    """A run directory of one step of ``groups`` groups of two samples, and one group that was dropped."""
    path.mkdir()
    (path / "config.toml").write_text(
        'name = "x"\nunknown_key = 1\n[gone_section]\na = 1\n'
    )  # as an older version wrote
    (path / "metrics.jsonl").write_text(
        '{"kind": "step", "version": 1, "metrics": {"loss": 1.0}}\n{"kind": "eval", "vers'
    )
    asyncio.run(fill(path, groups))
    return path


async def fill(path: Path, groups: int) -> None:
    ledger = SqliteLedger(path)
    ids = []
    for position in range(groups + 1):
        prompt = Prompt(id=f"main/{position}", position=position)
        samples = [Sample(id=f"{prompt.id}-{n}", tokens=[1], rollout_id=n, reward=float(n)) for n in range(2)]
        for sample in samples:
            sample.append_response([5, 6, 7], [-0.5, -1.5, -1.0], text="héllo", version=0)
        group = Group(prompt=prompt, samples=samples, rollouts={0: [0], 1: [1]})
        if position < groups:
            await ledger.finish(group)
            ids += [sample.id for sample in samples]
        else:
            await ledger.issue([group])
    await ledger.journal_step(1, "main", ids)
    await ledger.trained(1)
    await ledger.close()


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def test_a_folder_that_is_no_run_and_a_file_that_cannot_be_written_are_errors(cli: Any, tmp_path: Path) -> None:
    refused = cli("report", tmp_path)
    assert (refused.code, refused.out) == (2, "")
    assert "holds no run (no config.toml)" in refused.err
    refused = cli("report", make_run(tmp_path / "run"), "--output", tmp_path / "none" / "x.html")
    assert refused.code == 7
    assert "the report cannot be written" in refused.err
    assert "choose another file: --output FILE" in refused.err
    assert list(tmp_path.rglob("*.tmp")) == []


def test_runs_without_steps_running_older_damaged_and_twice_the_same_are_reported_as_they_are(
    cli: Any, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text("")
    done = cli("report", empty)
    assert (done.code, done.out) == (0, f"{empty / 'report.html'}\n")
    assert "empty: no step is finished yet: there are no curves" in done.err
    assert "empty: there is no ledger that can be read: samples are left out" in done.err
    older = make_run(tmp_path / "older")
    locked = RunDir.open(older)
    locked.lock()
    done = cli("report", older, older)
    locked.close()
    assert (done.code, done.out) == (0, f"{older / 'report.html'}\n")
    assert "1 of the lines of metrics.jsonl cannot be read" in done.err
    assert ">running<" in (older / "report.html").read_text()
    damage(next((older / "segments").glob("*.seg")), -2)
    done = cli("report", older)
    assert "the texts and tokens of 1 samples are damaged or gone" in done.err
    (older / "ledger.sqlite").write_bytes(b"no database" * 100)
    done = cli("report", older)
    assert done.code == 0
    assert "older: the ledger cannot be read (file is not a database): samples are left out" in done.err


def test_a_table_has_every_sample_and_texts_are_of_every_kth_group_where_not_all_fit(tmp_path: Path) -> None:
    book = SampleBook(RunDir.open(make_run(tmp_path / "run", groups=5)))
    table = book.table()
    assert table["groups"] == [f"main/{position}" for position in range(6)]
    assert table["names"]["fate"] == ["pending", "trained"]
    assert table["columns"]["fate"] == [1] * 10 + [0] * 2
    assert table["columns"]["log_prob"] == [-1] * 10 + [None] * 2
    assert table["columns"]["reward"][:2] == [0, 1]
    assert choose_groups(book, 1 << 20) == ([0, 1, 2, 3, 4], "")
    groups, policy = choose_groups(book, 3 * book.bytes_of(0))
    assert groups == [0, 2, 4]
    assert policy == "texts and tokens are here of every 2th group, 3 of 5; all have a row"
    header = zlib.decompress(book.page([0]))
    fields = json.loads(header[4 : 4 + int.from_bytes(header[:4], "little")])["fields"]
    assert [sample["response"] for sample in fields["samples"]] == ["héllo"] * 2
    assert fields["vocabulary"]["ids"] == [1, 5, 6, 7]


def test_a_book_forgets_what_it_could_not_read_once_it_can(tmp_path: Path) -> None:
    run_dir = RunDir.open(make_run(tmp_path / "run"))
    aside = run_dir.ledger.rename(tmp_path / "aside")
    book = SampleBook(run_dir)
    assert "the ledger cannot be read (unable to open database file)" in book.notices()[0]
    aside.rename(run_dir.ledger)
    segment = next(run_dir.segments.glob("*.seg"))
    damage(segment, -2)
    book.refresh()
    book.table()
    assert "the texts and tokens of 1 samples are damaged" in book.notices()[0]
    damage(segment, -2)
    book.refresh()
    assert book.table()["columns"]["log_prob"][:6] == [-1] * 6
    assert [notice for notice in book.notices() if "recorded" not in notice] == []


def test_a_step_is_recorded_by_sample_replaced_when_repeated_and_pruned_as_far_behind_a_checkpoint(
    tmp_path: Path,
) -> None:
    recorder = StepRecorder()
    for version, value in ((0, 1.0), (1, 2.0), (1, 3.0)):
        batch = Batch(
            version=version,
            sample_ids=["a-0", "b-0"],
            tasks=[],
            group=np.zeros(2, int),
            rollout=np.zeros(2, int),
            reward=np.zeros(2),
            tokens=np.zeros(5, np.int32),
            offsets=np.array([0, 3, 5]),
            loss_mask=np.ones(3, np.float32),
            response_offsets=np.array([0, 2, 3]),
            columns={"advantages": np.array([value, value, -value]), "rollout_log_probs": np.zeros(3)},
        )
        recorder.generated()
        recorder.batch(batch, tmp_path, keep_steps=0)
        report = StepReport(
            version=version + 1, stage="main", step=version, of=2, metrics={}, seconds={"rollout": 1e-9}
        )
        recorder.step(report, tmp_path)
    assert set(recorded_versions(tmp_path)) == {1, 2}
    record = read_record(tmp_path, 2)
    assert {name: {key: list(values) for key, values in columns.items()} for name, columns in record.items()} == {
        "a-0": {"advantages": [3.0, 3.0]},
        "b-0": {"advantages": [-3.0]},
    }
    assert read_steps(tmp_path)[2]["memory"]["driver"] > 0
    assert 0 <= read_steps(tmp_path)[2]["reward_seconds"] <= 1e-9
    (tmp_path / "report" / "step-000009").write_bytes(b"of before a resume")
    for oldest, kept in ((2, {1, 2}), (3, {2})):
        (tmp_path / "checkpoints" / f"step-{oldest}").mkdir(parents=True)
        recorder.batch(batch, tmp_path, keep_steps=1)
        assert set(recorded_versions(tmp_path)) == kept
        (tmp_path / "checkpoints" / f"step-{oldest}").rmdir()
    (tmp_path / "report" / "step-000002").write_bytes(b"half")
    assert read_record(tmp_path, 2) == {}


def test_tokens_are_bytes_so_that_characters_of_several_tokens_join(model: Path) -> None:
    vocabulary = Vocabulary.of(["no/such/folder", model])
    ids = vocabulary.tokenizer.encode("12+30=é").ids
    text = "".join(vocabulary.texts(ids)).encode("latin-1").decode()
    assert text == vocabulary.tokenizer.decode(ids, skip_special_tokens=False)
    assert Vocabulary().texts([7])[0].encode("latin-1").decode() == "⟨7⟩"

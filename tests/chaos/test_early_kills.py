"""Killed before there was anything to lose: the same command starts it again."""

import json

import pytest

from slime_cli import resume
from slime_cli.starts import begin
from slime_core.errors import ConfigError
from slime_core.report import RunDir

pytestmark = pytest.mark.unit


def test_a_run_folder_without_a_config_is_reused(tmp_path):
    with RunDir.create("run", at=tmp_path / "run"):
        pass
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("checkpoints", "errors", "lock", "log", "run.json", "segments")
    ]
    with RunDir.create("run", at=tmp_path / "run") as run_dir:
        assert run_dir.epoch == 1


@pytest.mark.parametrize("name", ["config.toml", "ledger.sqlite", "metrics.jsonl", "notes.txt", "segments/000001.seg"])
def test_a_run_folder_that_holds_a_file_is_refused(tmp_path, name):
    with RunDir.create("run", at=tmp_path / "run"):
        pass
    (tmp_path / "run" / name).write_text("x")
    with pytest.raises(ConfigError, match="CFG12"):
        RunDir.create("run", at=tmp_path / "run")


def test_a_run_that_was_killed_before_its_first_sample_starts_afresh(tmp_path, capsys):
    """Its status is still that of a run that goes on; an evaluation of version 0 is none of a step."""
    with RunDir.create("run", at=tmp_path / "run") as run_dir:
        line = {"kind": "eval", "version": 0, "name": "heldout", "metrics": {}, "seconds": {}}
        run_dir.metrics.write_text(json.dumps(line) + "\n")
        begin(run_dir, 0, {})
        resume.say_no_checkpoint(run_dir)
        assert "a fresh start at version 0" in capsys.readouterr().err
        run_dir.metrics.write_text(json.dumps({**line, "kind": "step", "version": 1}) + "\n")
        with pytest.raises(ConfigError, match="CFG14"):
            resume.say_no_checkpoint(run_dir)
        run_dir.metrics.unlink()
        (run_dir.segments / "000001.seg").write_bytes(b"slimeSG1")
        with pytest.raises(ConfigError, match="CFG14"):
            resume.say_no_checkpoint(run_dir)


def test_leftovers_of_a_killed_process_are_removed_when_the_run_is_reopened(tmp_path):
    with RunDir.create("run", at=tmp_path / "run") as run_dir:
        run_dir.config.write_text("")
    left = [run_dir.path / ".run.json.123.tmp", run_dir.path / ".ranks-0123456789abcdef", run_dir.log / "rendezvous-1"]
    for path in left:
        path.write_text("x")
    with RunDir.reopen(run_dir.path):
        assert [path for path in left if path.exists()] == []

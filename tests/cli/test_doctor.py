"""`slime doctor`: named checks with fixes; what is broken is a row, never a crash."""

import json
import sys
from collections import namedtuple

import pytest

from slime_cli import checks
from slime_cli.doctor import run_check
from slime_core.errors import SlimeError
from slime_core.protocols import Check, CheckResult

pytestmark = pytest.mark.integration

CHECKING = """
import slime_core
from slime_core import Check, CheckResult

def bad():
    raise OSError("no compiler")

@slime_core.hookimpl
def slime_checks():
    return [Check(name="compiler", run=bad), Check(name="gpu", run=lambda: CheckResult(status="warn", found="none", fix="buy one"))]
"""


def test_this_machine_passes(cli):
    done = cli("doctor", "--json")
    answer = json.loads(done.out)
    rows = {row["name"]: row for row in answer["checks"]}
    assert {"python", "installation", "torch", "transformers", "device", "processor"} <= set(rows)
    assert {"memory", "disk", "open files", "hub", "runs", "plugin rm_math"} <= set(rows)
    assert all(set(row) == {"name", "status", "found", "fix"} for row in rows.values())
    assert [row for row in rows.values() if row["status"] == "fail"] == []
    assert (done.code, answer["ok"]) == (0, True)


def test_failed_checks_of_a_plugin_have_their_rows_and_exit_code_one(cli, install_plugin):
    install_plugin("checking", CHECKING)
    done = cli("doctor", "--plugin", "checking")
    assert done.code == 1
    assert "FAIL checking: compiler" in done.out
    assert "OSError: no compiler" in done.out
    assert "warn checking: gpu" in done.out
    assert "fix: buy one" in done.out
    assert "1 warnings, 1 failed" in done.out


@pytest.mark.parametrize(("named", "status", "code"), [(True, "fail", 1), (False, "warn", 0)])
def test_a_plugin_that_does_not_load_is_a_row(cli, install_plugin, named, status, code):
    install_plugin("broken", "import no_such_module\n")
    done = cli("doctor", "--json", *(["--plugin", "broken"] if named else []))
    (row,) = [row for row in json.loads(done.out)["checks"] if row["name"] == "plugin broken"]
    assert row["status"] == status
    assert "no_such_module" in row["found"]
    assert "pip install no_such_module" in row["fix"]
    assert done.code == code


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        pytest.param(lambda: None, "not a CheckResult", id="nothing"),
        pytest.param(lambda: CheckResult(status="maybe"), "not a CheckResult", id="unknown status"),
        pytest.param(lambda: 1 / 0, "ZeroDivisionError", id="raises"),
    ],
)
def test_a_check_that_misbehaves_fails_alone(answer, found):
    result = run_check(Check(name="x", run=answer))
    assert result.status == "fail"
    assert found in result.found


def test_an_error_of_ours_in_a_check_keeps_its_fix():
    def check():
        raise SlimeError("what", fix="do this")

    assert run_check(Check(name="x", run=check)) == CheckResult(status="fail", found="what", fix="do this")


def test_an_old_python_fails(monkeypatch):
    version = namedtuple("version", "major minor micro")
    monkeypatch.setattr(sys, "version_info", (*version(3, 10, 9), "final", 0))
    result = checks.python()
    assert result.status == "fail"
    assert "3.11 to 3.13" in result.fix


@pytest.mark.parametrize(("installed", "status"), [("2.11.0", "ok"), ("2.10.1+cpu", "fail"), ("3.0.0rc1", "ok")])
def test_library_versions_are_compared_as_numbers(monkeypatch, installed, status):
    monkeypatch.setattr(checks.metadata, "version", lambda name: installed)
    result = checks.version("torch")
    assert result.status == status
    if status == "fail":
        assert "2.11 or newer" in result.found
        assert result.fix == 'pip install "slime-rl[fsdp]"'


def test_a_missing_library_fails_with_its_extra(monkeypatch):
    monkeypatch.setattr(checks.util, "find_spec", lambda name: None)
    assert checks.version("torch").status == "fail"
    assert checks.device().status == "warn"


def test_a_stranger_that_ships_slime_core_fails(tmp_path, monkeypatch):
    info = tmp_path / "slime_core-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slime-core\nVersion: 0.0.1\n")
    (info / "RECORD").write_text("slime_core/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = checks.installation()
    assert result.status == "fail"
    assert "pip uninstall slime-core" in result.fix


def test_a_copy_that_is_not_the_installed_one_fails(tmp_path, monkeypatch):
    import slime_core

    monkeypatch.setattr(slime_core, "__file__", str(tmp_path / "slime_core" / "__init__.py"))
    result = checks.installation()
    assert result.status == "fail"
    assert "PYTHONPATH" in result.fix


@pytest.mark.parametrize(("free", "status"), [(100, "ok"), (5, "warn"), (0.5, "fail")])
def test_free_disk_space(monkeypatch, free, status):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(0, 0, int(free * checks.GIB)))
    assert checks.disk().status == status


@pytest.mark.parametrize(("total", "status"), [(8, "ok"), (3, "warn"), (1, "fail")])
def test_memory(monkeypatch, total, status):
    monkeypatch.setattr(checks.os, "sysconf", lambda name: total * checks.GIB if name == "SC_PHYS_PAGES" else 1)
    assert checks.memory().status == status


def test_few_open_files_are_a_warning(monkeypatch):
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (256, 4096))
    assert checks.open_files().status == "warn"


def test_one_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: {0})
    assert checks.processor().status == "warn"


def test_an_offline_hub_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in checks.hub().found


def test_a_folder_that_cannot_be_written_fails(monkeypatch):
    def refuse(**kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    result = checks.runs()
    assert result.status == "fail"
    assert "--run-dir" in result.fix

"""`slime doctor`: named checks with fixes; what is broken is a row, never a crash."""

import json
import resource
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest

from slime_cli import backend_checks, checks, preflight
from slime_cli.checks import open_files
from slime_cli.doctor import run_check
from slime_core.config.load import load_config
from slime_core.errors import SlimeError, StorageError
from slime_core.protocols import Check, CheckResult
from slime_core.weights.folder import parameter_count

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
    assert {"shared memory", "temporary files", "network", "home", "locale", "clock"} <= set(rows)
    assert {"backend fsdp", "backend sglang", "backend megatron", "backend ray"} <= set(rows)
    assert "megatron-core" in rows["backend megatron"]["found"]
    assert [name for name in rows if name.startswith("sandbox")] == ["sandbox: level", "sandbox: gpu"]
    assert all(set(row) == {"name", "status", "found", "fix", "details"} for row in rows.values())
    assert [row for row in rows.values() if row["status"] == "fail"] == []
    assert (done.code, answer["ok"]) == (0, True)


@pytest.mark.parametrize(
    ("name", "absent", "status", "fix"),
    [
        ("fsdp", "torch", "fail", '"torch>=2.11"'),
        ("megatron", "megatron-core", "ok", "--train-backend megatron needs it: pip install"),
        ("ray", "slime-ray", "ok", "pip install -e plugins/slime_ray"),
        ("sglang", "aiohttp", "ok", '"aiohttp>=3.10"'),
    ],
)
def test_a_backend_without_a_package_says_which_and_how_to_install_it(monkeypatch, name, absent, status, fix):
    there = backend_checks.is_installed
    monkeypatch.setattr(backend_checks, "is_installed", lambda package: package != absent and there(package))
    result = backend_checks.backend(name)
    assert result.status == status
    assert f"missing: {absent}" in result.found
    assert fix in result.found + result.fix


def test_failed_checks_of_a_plugin_have_their_rows_and_exit_code_one(cli, install_plugin):
    install_plugin("checking", CHECKING)
    done = cli("doctor", "--plugin", "checking")
    assert done.code == 1
    assert "FAIL checking: compiler" in done.out
    assert "OSError: no compiler" in done.out
    assert "warn checking: gpu" in done.out
    assert "fix: buy one" in done.out
    assert "1 warnings, 1 failed" in done.out


def test_details_of_a_check_are_printed_on_request(cli, install_plugin):
    install_plugin("checking", CHECKING.replace('found="none"', 'found="none", details=("no card", "no driver")'))
    assert "no driver" not in cli("doctor", "--plugin", "checking").out
    lines = [line.strip() for line in cli("doctor", "-v", "--plugin", "checking").out.splitlines()]
    assert lines[lines.index("no card") :][:3] == ["no card", "no driver", "fix: buy one"]


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
        assert '"torch>=2.11"' in result.fix


def test_a_missing_library_fails_with_its_extra(monkeypatch):
    monkeypatch.setattr(checks.util, "find_spec", lambda name: None)
    assert checks.version("torch").status == "fail"
    assert checks.device().status == "warn"


def test_a_stranger_that_ships_slime_core_fails(tmp_path, monkeypatch):
    info = tmp_path / "slime_core-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slime-core\nVersion: 0.0.1\n")
    (info / "RECORD").write_text("slime_core/__init__.py,,\n")
    package = tmp_path / "slime_core"
    package.mkdir()
    (package / "__init__.py").touch()  # importlib.metadata lists files that exist alone, from Python 3.12 on
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


@pytest.mark.parametrize(
    ("limits", "status"), [((256, 1 << 20), "ok"), ((256, 1000), "warn"), ((100, 200), "fail"), ((-1, -1), "ok")]
)
def test_open_files_are_judged_by_the_hard_limit(monkeypatch, limits, status):
    """A run raises the soft limit itself; the row has both numbers."""
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: limits)
    result = checks.open_files()
    assert result.status == status
    assert "needs 272" in result.found


def test_one_core_is_a_warning(monkeypatch):
    """It works, and says what it costs."""
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: {0})
    result = checks.processor()
    assert result.status == "warn"
    assert "1 core, 2 or more are wanted" in result.found


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


def test_small_shared_memory_is_fine(monkeypatch):
    """64 MiB of /dev/shm, or none."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 0))
    result = checks.shared_memory()
    assert (result.status, "64 MiB" in result.found) == ("ok", True)
    monkeypatch.setattr(checks.Path, "is_dir", lambda path: False)
    assert checks.shared_memory().status == "ok"


def test_no_ipv6_is_fine(monkeypatch):
    monkeypatch.setattr(checks.Path, "exists", lambda path: False)
    result = checks.network()
    assert (result.status, "no IPv6" in result.found) == ("ok", True)


def test_a_loopback_that_is_down_fails_and_a_run_refuses_it(cli, own, monkeypatch):
    """torch's process groups need it, even one rank's."""

    def refuse(*args, **kwargs):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(preflight.socket, "create_connection", refuse)
    assert checks.network().status == "fail"
    done = cli("run", *own.flags, "--run-dir", "out")
    assert done.code == 6
    assert "error TRN131" in done.err
    assert "ip link set lo up" in done.err


def test_a_read_only_home_is_fine(monkeypatch):
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    result = checks.home()
    assert (result.status, "read-only" in result.found) == ("ok", True)


def test_the_c_locale_is_fine_where_files_are_utf8(monkeypatch):
    monkeypatch.setenv("LANG", "C")
    monkeypatch.setenv("TZ", "C")
    assert checks.locale().status == "ok"
    monkeypatch.setattr(checks.sys, "getfilesystemencoding", lambda: "ascii")
    assert checks.locale().status == "warn"


def test_a_machine_without_a_monotonic_clock_fails(monkeypatch):
    """Everything that waits counts on it."""
    assert checks.clock().status == "ok"
    monkeypatch.setattr(
        checks.time, "get_clock_info", lambda name: SimpleNamespace(monotonic=False, resolution=1, implementation="x")
    )
    assert checks.clock().status == "fail"


def test_no_temporary_folder_is_a_warning(monkeypatch):
    def refuse():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    assert checks.temporary().status == "warn"


POOR = """
import ctypes, fcntl, os, resource, socket, struct, sys
from slime_cli.main import main
NEWUSER, NEWNET, UP = 0x10000000, 0x40000000, 0x8914
resource.setrlimit(resource.RLIMIT_NOFILE, (320, 4096))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ.update(HOME="/proc/1", TZ="C", LANG="C", LC_ALL="C", HF_HUB_OFFLINE="1")
if ctypes.CDLL(None).unshare(NEWUSER | NEWNET) == 0:
    with socket.socket() as sock:
        fcntl.ioctl(sock, UP, struct.pack("16sH14s", b"lo", 1, b""))
os.chdir(sys.argv.pop(1))
assert main(sys.argv[1:]) == 0
"""


def test_a_poor_machine_can_train(own, tmp_path, zygote):
    """One core, few open files, no network, a home that cannot be written, TZ and LANG = C, all at once."""
    (tmp_path / "poor.py").write_text(POOR)
    words = ["run", *own.flags, "--num-rollout", "1", "--run-dir", "out"]
    zygote.together(tmp_path, [[tmp_path / "poor.py", tmp_path, *words]])
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


def test_doctor_and_a_run_ask_for_as_many_open_files(own, monkeypatch):
    limit = preflight.needed_files() - 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    config = load_config(None, ["--hf-checkpoint", str(own.path / "model")])
    with pytest.raises(StorageError, match="STO120") as caught:
        preflight.check_machine(config, str)
    checked = open_files()
    assert checked.status == "fail"
    assert "a run needs 272" in checked.found
    assert "a run needs 272" in caught.value.what


def test_a_run_that_needs_more_memory_than_there_is_is_refused_with_numbers(cli, own, monkeypatch):
    """Before anything is loaded, with what is needed for what."""
    monkeypatch.setattr(preflight, "available_memory", lambda: 512 << 20)
    done = cli("run", *own.flags, "--run-dir", "out")
    assert done.code == 6
    assert "error TRN132" in done.err
    assert "0.6 GiB of memory, 0.5 GiB are free" in done.err
    assert "GiB for processes" in done.err


def test_little_memory_is_a_notice(own, monkeypatch, model):
    config = load_config(None, ["--hf-checkpoint", str(model), "--device", "cpu", "--dtype", "float32"])
    needed = preflight.needed_memory(config)
    said = []
    monkeypatch.setattr(preflight, "available_memory", lambda: int(1.1 * sum(needed.values())))
    preflight.check_machine(config, said.append)
    assert "memory is short" in said[0]
    monkeypatch.setattr(preflight, "available_memory", lambda: 100 * sum(needed.values()))
    preflight.check_machine(config, said.append)
    assert len(said) == 1


def test_memory_is_counted_from_the_files_of_the_model(model):
    import torch
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        exact = sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    assert parameter_count(model) == pytest.approx(exact, rel=0.05)
    config = load_config(
        None, ["--hf-checkpoint", str(model), "--dtype", "bfloat16", "--max-staleness", "1", "--no-colocate"]
    )
    needed = preflight.needed_memory(config)
    assert needed["for weights, gradients and optimizer"] == 16 * parameter_count(model)
    assert needed["for the engine"] == 2 * parameter_count(model)
    assert needed["for processes"] == 2 * preflight.PROCESS


def test_memory_of_the_cache_is_counted_by_what_a_step_needs(tmp_path):
    """4 layers of 2 heads of 16 numbers, float32: 1 KiB a token; 32 samples of 256 tokens and 256 of prompt, or one."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 131072}))
    flags = [
        "--hf-checkpoint",
        str(tmp_path),
        "--device",
        "cpu",
        "--rollout-batch-size",
        "16",
        "--n-samples-per-prompt",
        "2",
    ]
    config = load_config(None, flags)
    assert preflight.cache_memory(config, 1 << 30) == 32 * 512 << 10
    assert preflight.cache_memory(config, 8 << 20) == 4 << 20, "half of what is free"
    assert preflight.cache_memory(config, 0) == 512 << 10, "one sequence"
    assert preflight.cache_memory(load_config(None, [*flags, "--rollout-engine", "sglang"]), 1 << 30) == 0


def test_a_model_without_weights_is_counted_from_its_config(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert parameter_count(tmp_path) == 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert parameter_count(tmp_path / "hub" / "name") == 0


def test_too_few_open_files_are_refused_with_numbers_and_a_soft_limit_is_raised(monkeypatch):
    limits = [(100, 200)]
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(preflight.resource, "setrlimit", lambda which, pair: limits.append(pair))
    with pytest.raises(StorageError) as caught:
        preflight.check_files(256)
    assert caught.value.code == "STO120"
    assert "may open 200 files, a run needs 256" in caught.value.what
    limits[:] = [(100, 1 << 20)]
    preflight.check_files(256)
    assert limits[-1] == (4096, 1 << 20)

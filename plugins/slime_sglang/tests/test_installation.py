"""What an SGLang elsewhere is and can do, read in its own Python: small packages stand in for it."""

import json
import os
import select
import subprocess
import sys

import pytest

from slime_core.errors import ConfigError
from slime_sglang import installation
from slime_sglang.installation import (
    PYTHON_ENV,
    STAND_INS,
    arguments,
    cache_folder,
    environment_of,
    find_python,
    read_installation,
)

pytestmark = pytest.mark.integration

SERVER_ARGS = """
import argparse, json, os
print("noise on stdout")
with open(os.environ["IMPORTS"], "a") as file:
    file.write("x")

class Deprecated(argparse.Action):
    def __init__(self, *args, nargs=0, **more):
        super().__init__(*args, nargs=nargs, **more)

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        add = parser.add_argument
        add("--model-path", "--model", type=str, required=True, help="A folder.\\n   Or a name.")
        add("--mem-fraction-static", type=float)
        add("--disable-radix-cache", action="store_true")
        add("--old-flag", action=Deprecated)
        add("--fdfo", action=argparse.BooleanOptionalAction, default=True)
        add("--bs", type=int, nargs="+", default=[1, 2])
        add("--domains", nargs="*")
        add("--checksum", nargs="?", const="x")
        add("--labels", type=json.loads)
        add("--backend", choices={"b", "a"})
        add("--strange", default=object)
        add("--hidden", default=argparse.SUPPRESS)
"""
REQUESTS = """
class GenerateReqInput:
    routed_dp_rank: int = None
class PauseGenerationReqInput:
    '''retract: Pause the scheduler'''
"""


@pytest.fixture
def make_sglang(tmp_path):
    """A folder with a package named sglang; returns the variables that make a Python find it."""

    def make(version="0.5.23", server_args=SERVER_ARGS, requests=REQUESTS, name="site", metadata=True):
        site = tmp_path / name
        files = {
            "sglang/__init__.py": "",
            "sglang/version.py": f'__version__ = "{version}"',
            "sglang/srt/__init__.py": "",
            "sglang/srt/server_args.py": server_args,
            "sglang/srt/managers/io_struct.py": requests,
            "sglang/srt/entrypoints/http_server.py": '@app.post("/update_weights_from_disk")\n',
        }
        if metadata:
            text = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
            files[f"sglang-{version}.dist-info/METADATA"] = text
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        return {"PYTHONPATH": str(site), "IMPORTS": str(tmp_path / "imports"), "PYTHONDONTWRITEBYTECODE": "1"}

    return make


@pytest.fixture
def read(tmp_path):
    """Read the package that variables lead to, with a cache folder of the test's own."""
    return lambda env, **more: read_installation(sys.executable, env, more.get("cache", tmp_path / "cache"))


def imports(tmp_path):
    path = tmp_path / "imports"
    return len(path.read_text()) if path.exists() else 0


def test_version_options_and_features_are_read_without_an_import_here(make_sglang, read):
    found = read(make_sglang())
    assert (found.version, found.python) == ("0.5.23", sys.executable)
    assert found.features >= {"routed_dp_rank", "pause_modes", "disk_update"}
    assert not found.features & {"version_spans", "weights_checker", "nccl_update"}
    assert {name: option.kind for name, option in found.options.items()} == {
        "model_path": "value",
        "model": "value",
        "mem_fraction_static": "value",
        "disable_radix_cache": "flag",
        "old_flag": "flag",
        "fdfo": "switch",
        "bs": "list",
        "domains": "list",
        "checksum": "maybe",
        "labels": "value",
        "backend": "value",
        "strange": "value",
        "hidden": "value",
    }
    assert found.options["model"].help == "A folder. Or a name."
    assert (found.options["labels"].type, found.options["bs"].type) == ("loads", "int")
    assert (found.options["backend"].choices, found.options["bs"].default) == (("a", "b"), [1, 2])
    assert (found.options["hidden"].default, found.options["domains"].empty) == (None, True)
    assert "sglang" not in sys.modules


def test_its_options_become_arguments_and_the_reserved_keys_do_not(make_sglang, read):
    table = {"python": "x", "env": {"A": "1"}, "mem-fraction-static": 0.5, "bs": [1], "fdfo": False}
    words = arguments(read(make_sglang()), table)
    assert words == ["--mem-fraction-static", "0.5", "--bs", "1", "--no-fdfo"]


@pytest.mark.parametrize("metadata", [True, False])
def test_a_second_reading_imports_nothing(make_sglang, read, tmp_path, metadata):
    env = make_sglang(metadata=metadata)
    first, second = read(env), read(env)
    assert first == second
    assert imports(tmp_path) == 1


def test_an_installation_that_has_changed_is_read_anew(make_sglang, read, tmp_path):
    env = make_sglang()
    read(env)
    os.utime(tmp_path / "site" / "sglang/srt/server_args.py", (2e9, 2e9))
    read(env)
    assert imports(tmp_path) == 2, "the source"
    os.utime(tmp_path / "site" / "sglang-0.5.23.dist-info/METADATA", (2.1e9, 2.1e9))
    read(env)
    assert imports(tmp_path) == 3, "the metadata"
    (tmp_path / "site/sglang-0.5.23.dist-info").rename(tmp_path / "site/sglang-0.5.24.dist-info")
    metadata = tmp_path / "site/sglang-0.5.24.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("0.5.23", "0.5.24"))
    os.utime(metadata, (2.1e9, 2.1e9))
    assert read(env).version == "0.5.24"
    assert imports(tmp_path) == 4, "the version"
    read(env | {"SGLANG_USE_CPU_ENGINE": "1"})
    assert imports(tmp_path) == 5, "its variables"
    read(env | {"PYTHONPATH": make_sglang(name="elsewhere")["PYTHONPATH"]})
    assert imports(tmp_path) == 6, "another folder"


def test_a_broken_cache_is_read_anew(make_sglang, read, tmp_path):
    env = make_sglang()
    first = read(env)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    another_kind = json.loads(whole)
    another_kind["options"][0]["kind"] = "nonsense"
    tables = [another_kind, *({**json.loads(whole), "options": told} for told in (None, 5, [{"flags": []}], [{}]))]
    broken = [b"", b"[]", b"\xff\xfe", b'{"key": 1}', whole[:-20], *(json.dumps(table).encode() for table in tables)]
    key = json.loads(whole)["key"]
    assert installation._cached(file, key) == (first.options, first.router_options)
    for text in broken:
        file.write_bytes(text)
        assert installation._cached(file, key) is None, text[:40]
    assert read(env) == first
    assert imports(tmp_path) == 2
    assert file.read_bytes() == whole, "it was written anew"


def test_without_a_writable_cache_folder_it_works_all_the_same(make_sglang, read, tmp_path):
    (tmp_path / "file").write_text("")
    env = make_sglang()
    assert read(env, cache=tmp_path / "file" / "cache").version == "0.5.23"
    assert read(env, cache=tmp_path / "file" / "cache").options
    assert imports(tmp_path) == 2


def test_the_cache_holds_no_value_of_a_variable(make_sglang, read, tmp_path):
    read(make_sglang() | {"HF_TOKEN": "a-secret"})
    (file,) = (tmp_path / "cache").iterdir()
    assert "a-secret" not in file.read_text()


def test_an_environment_without_sglang_says_so_and_how_to_install_it(read, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        read({"PYTHONPATH": str(tmp_path / "empty")})
    error = caught.value
    assert (error.code, error.where) == ("CFG04", "sglang.python")
    assert "ModuleNotFoundError: No module named 'sglang'" in error.why
    assert "-m pip install sglang" in error.fix
    assert PYTHON_ENV in error.fix


def test_an_import_that_fails_is_shown_in_its_own_words(make_sglang, read, tmp_path):
    env = make_sglang(server_args="def load():\n    import no_such_kernel\nload()\n")
    with pytest.raises(ConfigError) as caught:
        read(env)
    assert "ModuleNotFoundError: No module named 'no_such_kernel'" in caught.value.why
    assert "server_args.py" in caught.value.why
    assert 'import sglang.srt.server_args" must work' in caught.value.fix
    assert not (tmp_path / "cache").exists()


def test_an_error_of_the_probe_shows_no_secret(make_sglang, read):
    secret = "hf_" + "x" * 30
    env = make_sglang(server_args=f'raise RuntimeError("token {secret}")\n')
    with pytest.raises(ConfigError) as caught:
        read(env)
    assert secret not in str(caught.value)


def test_a_python_that_is_none_is_refused(read, tmp_path):
    for text, why in (("#!/bin/sh\nexit 3\n", "status 3"), ("#!/bin/sh\necho 5\n", "nonsense")):
        script = tmp_path / "python"
        script.write_text(text)
        script.chmod(0o755)
        with pytest.raises(ConfigError, match=why):
            read_installation(str(script), {}, tmp_path / "cache")
    script.write_text("not a program")
    with pytest.raises(ConfigError, match="cannot be started"):
        read_installation(str(script), {}, tmp_path / "cache")


def test_a_probe_that_never_answers_is_killed_with_its_children(make_sglang, read, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    hangs = (
        "import os, subprocess, sys, threading\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "threading.Event().wait()\n"
    )
    monkeypatch.setattr(installation, "OPTIONS_SECONDS", 3.0)
    with pytest.raises(ConfigError, match="did not answer in 3 seconds"):
        read(make_sglang(server_args=hangs))
    for pid in map(int, pids.read_text().split()):
        assert ended(pid), "it, or what it started, lives on"


def ended(pid, seconds=10):
    """Killed a moment ago, it may still be dying."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


@pytest.mark.parametrize("version", ["0.4.9", "0.5.11.post3", "0.5.2"])
def test_a_version_that_is_too_old_is_refused(make_sglang, read, version):
    with pytest.raises(ConfigError, match="is the oldest that slime knows") as caught:
        read(make_sglang(version=version))
    assert 'install --upgrade "sglang>=0.5.12"' in caught.value.fix


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.6.0rc1", "1.0", "0.0.0.dev1+gabc"])
def test_a_later_or_unknown_version_is_taken(make_sglang, read, version):
    assert read(make_sglang(version=version)).version == version


def test_modules_beside_the_probe_do_not_stand_in_the_way_of_sglangs(make_sglang, read, tmp_path):
    env = make_sglang(server_args=SERVER_ARGS + "import client, options\nassert client.mine and options.mine\n")
    for name in ("client", "options"):
        (tmp_path / "site" / f"{name}.py").write_text("mine = True\n")
    assert read(env).options


# -- which Python


@pytest.fixture
def nowhere(monkeypatch):
    """No SGLang beside slime, and no variable that names one."""
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    monkeypatch.setattr(installation, "is_here", lambda: False)


def test_nothing_named_and_nothing_found_says_how_to_install_it(nowhere):
    with pytest.raises(ConfigError) as caught:
        find_python({})
    assert caught.value.code == "CFG04"
    assert "python -m venv" in caught.value.fix
    assert PYTHON_ENV in caught.value.fix


def test_the_table_is_asked_before_the_variable(nowhere, tmp_path, monkeypatch):
    mine, other = tmp_path / "mine", tmp_path / "other"
    for path in (mine, other):
        path.symlink_to(sys.executable)
    monkeypatch.setenv(PYTHON_ENV, str(other))
    assert find_python({"python": str(mine)}) == str(mine), "a link stays a link: it tells the environment"
    assert find_python({}) == str(other)


def test_sglang_beside_slime_is_asked_before_the_variable(make_sglang, monkeypatch, tmp_path):
    make_sglang()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv(PYTHON_ENV, "/no/such/python")
    assert find_python({}) == sys.executable
    assert "sglang" not in sys.modules


def test_a_stray_folder_named_sglang_is_no_installation(monkeypatch, tmp_path):
    (tmp_path / "sglang").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not installation.is_here()


def test_a_name_is_looked_up_and_a_tilde_is_home(nowhere, tmp_path, monkeypatch):
    (tmp_path / "python-of-sglang").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_python({"python": "python-of-sglang"}) == str(tmp_path / "python-of-sglang")
    assert find_python({"python": "~/python-of-sglang"}) == str(tmp_path / "python-of-sglang")


@pytest.mark.parametrize("named", ["/no/such/python", "/tmp", "no-such-python"])
def test_a_python_that_does_not_exist_is_refused(nowhere, named, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        find_python({"python": named})
    assert (caught.value.code, caught.value.where) == ("CFG05", "sglang.python")
    monkeypatch.setenv(PYTHON_ENV, named)
    with pytest.raises(ConfigError) as caught:
        find_python({})
    assert caught.value.where == PYTHON_ENV


def test_a_python_that_is_no_text_is_refused():
    with pytest.raises(ConfigError) as caught:
        find_python({"python": 3})
    assert caught.value.code == "CFG02"


# -- variables and cache


def test_variables_are_text():
    assert environment_of({"env": {"A": "x", "B": 1, "C": 0.5}}, "cuda") == {"A": "x", "B": "1", "C": "0.5"}
    assert environment_of({}, "cuda") == {}


def test_modules_without_a_build_for_cpus_are_stood_in_for_and_installed_ones_are_not(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    env = environment_of({}, "cpu")
    assert env["PYTHONPATH"].split(os.pathsep) == ["/ours", str(STAND_INS)]
    assert environment_of({"env": {"PYTHONPATH": "/theirs"}}, "cpu")["PYTHONPATH"].startswith(f"/theirs{os.pathsep}")
    program = "import json, sgl_kernel.elementwise; print(json.__file__, sgl_kernel.__version__)"
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.stdout == f"{json.__file__} 0.0.0\n", done.stderr


@pytest.mark.parametrize(
    ("env", "code"),
    [(5, "CFG02"), ({"A": True}, "CFG02"), ({"A": [1]}, "CFG02"), ({"CUDA_VISIBLE_DEVICES": "0"}, "CFG04")],
)
def test_variables_that_cannot_be_are_refused(env, code):
    with pytest.raises(ConfigError) as caught:
        environment_of({"env": env}, "cuda")
    assert caught.value.code == code


def test_processes_of_that_environment_get_ours_and_more(make_sglang, read, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    found = read(make_sglang() | {"THEIRS": "2"})
    env = found.environment({"THEIRS": "3"})
    assert (env["MINE"], env["THEIRS"]) == ("1", "3")


def test_the_cache_lies_where_the_system_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "slime"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "slime"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "slime"

"""The command itself: quick to start, helpful when it is mistyped, honest about how it ended."""

import asyncio
import json
import resource
import subprocess
import sys

import click
import pytest

from slime_cli.failure import CliSession, Terminated, loop_kept, report_failure
from slime_cli.main import COMMANDS, main
from slime_core.errors import (
    ConfigError,
    DataError,
    EngineError,
    PluginError,
    Preempted,
    SandboxError,
    SlimeError,
    StorageError,
    TrainerError,
)
from slime_core.report import RunDir

pytestmark = pytest.mark.integration

HEAVY = ("torch", "numpy", "ray", "transformers", "pydantic", "rich", "wandb", "pyarrow", "datasets")
LOOK = "import sys; from slime_cli.main import main; code = main(sys.argv[1:]); print([m for m in {!r} if m in sys.modules]); sys.exit(code)"


def modules_of(*args):
    code = LOOK.format(HEAVY)
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("args", [("--help",), ("--version",), ()], ids=lambda args: " ".join(args) or "nothing")
def test_help_imports_nothing_heavy(args):
    assert modules_of(*args)[1] == "[]"


def test_a_usage_error_imports_nothing_heavy():
    assert modules_of("--no-such-option") == (2, "[]")


def test_an_unknown_command_imports_nothing_heavy():
    assert modules_of("rnu") == (2, "[]")


def test_the_list_of_plugins_loads_no_torch_numpy_ray_or_transformers():
    code, found = modules_of("plugins", "list")
    assert code == 0
    assert not {"torch", "numpy", "ray", "transformers"} & set(json.loads(found.replace("'", '"')))


def test_help_lists_every_command(cli):
    done = cli("--help")
    assert "\n  report " in done.out
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(cli, name):
    done = cli(name, "--help")
    assert done.code == 0
    assert "Usage: slime" in done.out
    assert done.err == ""


@pytest.mark.parametrize("name", ["models", "convert", "plugins", "config"])
def test_a_group_alone_shows_its_help_and_no_error(cli, name):
    done = cli(name)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"Usage: slime {name} [OPTIONS] COMMAND")
    assert "error" not in done.err


def test_a_fix_names_the_run_directory_itself(tmp_path, capsys):
    with RunDir.create("demo", at=tmp_path / "a run") as run_dir:
        error = TrainerError("trainer rank 1 ended", code="TRN105", fix="slime run --resume RUN_DIR", lost=True)
        assert report_failure(error, CliSession(run_dir=run_dir)) == 6
    said = capsys.readouterr().err
    assert f"fix: slime run --resume '{run_dir.path}'" in said
    assert "RUN_DIR" not in said


@pytest.mark.parametrize("name", ["show", "keys", "check"])
def test_every_config_command_has_help(cli, name):
    assert cli("config", name, "--help").code == 0


def test_version_is_the_distributions(cli):
    assert cli("--version").out == "slime-rl 0.1.0\n"


def test_an_unknown_command_is_answered_with_the_nearest(cli):
    done = cli("rnu")
    assert (done.code, done.out) == (2, "")
    assert "slime has no command 'rnu'" in done.err
    assert "did you mean 'run'?" in done.err
    assert "slime --help" in done.err


def test_a_word_of_another_program_is_answered_with_the_command_here(cli):
    assert "fix: slime run --resume RUN_DIR" in cli("resume", "runs/a").err


def test_a_command_of_a_package_that_is_not_installed_names_the_package(cli, monkeypatch):
    from slime_core import plugins

    monkeypatch.setattr(plugins, "available", list)
    done = cli("buffer", "serve", "folder")
    assert (done.code, done.out) == (2, "")
    assert "slime-buffer is not installed here" in done.err
    assert "pip install -e plugins/slime_buffer" in done.err


def test_an_unknown_option_names_the_help(cli):
    done = cli("show", "--nope", "x")
    assert done.code == 2
    assert "--nope" in done.err
    assert "slime show --help" in done.err
    assert "Traceback" not in done.err


def test_a_plugins_own_command_is_reached_by_its_name(cli, install_plugin):
    install_plugin(
        "tool",
        "import click, slime_core\n"
        "@click.group()\ndef group(): 'Tools.'\n"
        "@group.command()\n@click.argument('word')\ndef say(word): click.echo(f'said {word}')\n"
        "@slime_core.hookimpl\ndef slime_command(): return group\n",
    )
    done = cli("tool", "say", "hello")
    assert (done.code, done.out) == (0, "said hello\n")


def test_a_broken_plugin_does_not_touch_other_commands(cli, install_plugin):
    install_plugin("broken", "raise RuntimeError('at import')\n")
    assert cli("--help").code == 0
    assert cli("config", "keys", "lr").code == 0
    done = cli("broken", "x")
    assert done.code == 4
    assert "broken" in done.err
    assert "at import" in done.err
    assert "Traceback" not in done.err


def test_a_plugin_without_commands_says_so(cli, install_plugin):
    install_plugin("plain", "import slime_core\n@slime_core.hookimpl\ndef slime_reward(group, ctx): return []\n")
    done = cli("plain", "x")
    assert done.code == 4
    assert "has no commands of its own" in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SlimeError("x"), 1),
        (ConfigError("x"), 2),
        (DataError("x"), 3),
        (PluginError("x"), 4),
        (EngineError("x"), 5),
        (TrainerError("x"), 6),
        (StorageError("x"), 7),
        (SandboxError("x"), 8),
        (Preempted("x"), 75),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (Terminated(), 143),
        (RuntimeError("x"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_kind_of_end_has_its_exit_code(error, code, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert report_failure(error, CliSession()) == code


def test_every_part_of_an_error_is_shown_and_a_terminal_does_not_obey_it(capsys):
    error = ConfigError("what \x1b[2J", code="CFG99", where="file:3", why="because", fix="do this\nor that")
    assert report_failure(error, CliSession()) == 2
    text = capsys.readouterr().err
    for part in ("error CFG99  what \\x1b[2J", "where: file:3", "why: because", "fix: do this", "or that", "(exit 2)"):
        assert part in text
    assert "see:" not in text, "a code of a plugin has no entry"


def test_json_callers_get_the_error_as_json_too(cli):
    done = cli("show", "nowhere", "--json")
    error = json.loads(done.out)["error"]
    assert set(error) == {"what", "code", "where", "why", "fix", "exit_code"}
    assert (error["code"], error["exit_code"], done.code) == ("CFG05", 2, 2)
    assert "nowhere" in done.err


def test_an_unforeseen_error_is_short_and_its_traceback_is_in_the_run(tmp_path, capsys):
    with RunDir.create("demo", root=tmp_path) as run_dir:
        with pytest.raises(ZeroDivisionError) as caught:
            raise ZeroDivisionError("division by zero with api hf_abcdefghijklmnopqrstuvwxyz")
        assert report_failure(caught.value, CliSession(run_dir=run_dir)) == 1
        text = capsys.readouterr().err
        assert "ZeroDivisionError" in text
        assert "Traceback" not in text
        (saved,) = run_dir.errors.glob("*.txt")
        assert str(saved) in text
        assert "Traceback" in saved.read_text()
        assert "hf_abc" not in saved.read_text() + text


def test_an_unforeseen_error_without_a_run_is_kept_in_the_temporary_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report_failure(ValueError("odd"), CliSession()) == 1
    (saved,) = tmp_path.glob("slime-error-*.txt")
    assert str(saved) in capsys.readouterr().err


def test_verbose_shows_the_traceback(capsys):
    with pytest.raises(ConfigError) as caught:
        raise ConfigError("x")
    report_failure(caught.value, CliSession(verbose=True))
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m slime_cli.main config keys | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_words_come_from_the_command_line_when_none_are_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["slime", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("slime-rl")


@pytest.mark.parametrize("streams", ["> /dev/full", "> /dev/full 2>&1", ">&-", ">&- 2>&-"])
def test_a_run_that_is_done_has_succeeded_whatever_takes_its_answer(streams):
    source = (
        "from slime_cli.main import let_go_of_streams; from slime_cli.summary import say_answer\n"
        "say_answer({'run_dir': 'runs/demo-0'}, as_json=False)\n"
        "let_go_of_streams()"
    )
    done = subprocess.run(["sh", "-c", f'"$0" -c "$1" {streams}', sys.executable, source], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (b"stdout takes no answer" in done.stderr) == (streams == "> /dev/full")


async def stop_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(3600)


async def cancel_every_task():
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("harm", "told"), [(stop_the_loop, "stopped its event loop"), (cancel_every_task, "cancelled its tasks")]
)
def test_code_that_ends_the_runs_loop_is_at_fault(harm, told):
    with pytest.raises(PluginError, match=told) as caught, loop_kept():
        asyncio.run(harm())
    assert caught.value.code == "PLG62"
    with pytest.raises(RuntimeError, match="another"), loop_kept():
        raise RuntimeError("another")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_room_that_runs_out_is_no_failure_of_ours(capsys, monkeypatch, error):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 << 30 if kind == resource.RLIMIT_AS else -1, -1))
    assert report_failure(error, CliSession()) == 6
    told = capsys.readouterr().err
    assert "error TRN132" in told
    assert "address space 3072 MiB" in told
    assert "fix: ulimit -v unlimited" in told

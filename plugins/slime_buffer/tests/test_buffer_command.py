"""`slime buffer` on the command line: what it refuses, and how it says so."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def test_help_loads_no_server():
    code = "import sys; from slime_cli.main import main; main(['buffer', 'serve', '--help']); "
    code += "print([m for m in ('fastapi', 'uvicorn', 'httpx', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_another_host_needs_a_token_file(cli):
    done = cli("buffer", "serve", "folder", "--host", "0.0.0.0")
    assert done.code == 2
    assert "--token-file" in done.err


@pytest.mark.parametrize("command", ["stats", "generate"])
def test_a_missing_token_is_told(cli, monkeypatch, command):
    monkeypatch.delenv("SLIME_BUFFER_TOKEN", raising=False)
    more = ["--function", "json:loads"] if command == "generate" else []
    done = cli("buffer", command, "http://127.0.0.1:9", *more)
    assert done.code == 2
    assert "SLIME_BUFFER_TOKEN" in done.err


def test_a_function_that_is_not_there_is_told(cli, monkeypatch):
    monkeypatch.setenv("SLIME_BUFFER_TOKEN", "x" * 20)
    done = cli("buffer", "generate", "http://127.0.0.1:9", "--function", "nowhere.py:fn")
    assert done.code == 4
    assert "nowhere.py" in done.err


def test_a_service_that_is_away_ends_with_the_engines_code(cli, monkeypatch):
    monkeypatch.setattr("slime_buffer.generator.WAIT", 0.2)
    monkeypatch.setenv("SLIME_BUFFER_TOKEN", "x" * 20)
    done = cli("buffer", "generate", "http://127.0.0.1:9", "--function", "json:loads", "--patience", "0", "--json")
    assert done.code == 5
    assert "ENG69" in done.err


def test_a_run_without_the_token_does_not_start(cli, monkeypatch, tmp_path):
    monkeypatch.delenv("SLIME_BUFFER_TOKEN", raising=False)
    done = cli(
        "run", "--plugin", "rm_math", "--rollout-buffer-url", "http://127.0.0.1:9", "--run-dir", tmp_path / "out"
    )
    assert done.code == 2
    assert "SLIME_BUFFER_TOKEN is not set" in done.err
    assert not (tmp_path / "out").exists()

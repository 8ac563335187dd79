"""What the commands say about SGLang before any server starts; a small package stands in for it."""

import json
import sys

import pytest

from slime_core.testing import tiny_model
from slime_sglang.installation import PYTHON_ENV
from slime_sglang.planning import sglang

pytestmark = pytest.mark.integration

SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("model-path", "device", "dtype", "attention-backend"):
            parser.add_argument(f"--{name}")
        for name in ("tp-size", "random-seed", "port", "max-running-requests"):
            parser.add_argument(f"--{name}", type=int, help="How many.")
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--model-impl", default="auto")
"""

MODELS = {  # a registry that has Qwen3 and takes what transformers has for a fallback
    "srt/models/qwen3.py": "class Qwen3ForCausalLM: ...\nEntryClass = [Qwen3ForCausalLM, Qwen3ForCausalLM]\n",
    "srt/models/registry.py": "",
    "srt/configs/model_config.py": """
import json
from types import SimpleNamespace
class ModelConfig:
    def __init__(self, path, trust_remote_code, model_impl):
        self.hf_config = SimpleNamespace(**json.load(open(path + "/config.json")))
        self.model_impl = model_impl
""",
    "srt/model_loader/utils.py": """
import os
def get_model_architecture(config):
    open(os.environ["ASKED"], "a").write("x")
    (name,) = config.hf_config.architectures
    if not hasattr(__import__("transformers"), name):
        raise ValueError(f"Cannot find model module. {name}")
    return None, "TransformersForCausalLM"
""",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """SLIME_SGLANG_PYTHON leads to an environment with a package of this version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(version="0.5.23", server_args=SERVER_ARGS):
        files = {"__init__.py": "", "version.py": f'__version__ = "{version}"', "srt/__init__.py": ""}
        for name, text in {**files, **MODELS, "srt/server_args.py": server_args}.items():
            path = tmp_path / "site" / "sglang" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        program = tmp_path / "python-of-sglang"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv(PYTHON_ENV, str(program))
        return program

    return make


@pytest.fixture
def recipe(tmp_path):
    """A recipe whose rollouts SGLang serves; further lines stand at its end."""

    def write(*lines):
        (tmp_path / "rows.jsonl").write_text('{"input": "a"}\n')
        (tmp_path / "model").mkdir(exist_ok=True)
        text = (
            '[data]\nprompt_data = "rows.jsonl"\n[cluster]\ndevice = "cpu"\n'
            '[rollout]\nhf_checkpoint = "model"\nrollout_engine = "sglang"\n[sglang]\n'
        )
        path = tmp_path / "recipe.toml"
        path.write_text(text + "\n".join(lines) + "\n")
        return path

    return write


def test_config_check_shows_the_servers_and_how_they_would_start(cli, stand_in, recipe):
    program = stand_in()
    done = cli("config", "check", recipe("max-running-requests = 8"), "--sglang-disable-radix-cache", "--json")
    assert done.code == 0, done.err
    servers = json.loads(done.out)["servers"]
    assert (servers["version"], servers["python"]) == ("0.5.23", str(program))
    (group,) = servers["groups"]
    assert (group["name"], group["servers"]) == ("policy", [[]])
    words = group["arguments"]
    assert words[words.index("--max-running-requests") + 1] == "8"
    assert "--disable-radix-cache" in words
    assert words[words.index("--device") + 1] == "cpu"


@pytest.mark.parametrize(
    ("line", "flags", "code", "parts"),
    [
        ("max_runing_requests = 8", (), "CFG01", ["recipe.toml:9", "did you mean 'max_running_requests'?"]),
        ("max_running_requests = 'many'", (), "CFG02", ["recipe.toml:9", "takes an integer"]),
        ("", ("--sglang-port", "30000"), "CFG04", ["command line: --sglang-port", "set by slime"]),
        ("", ("--rollout-deterministic",), "CFG04", ["no attention backend for a CPU"]),
        ("", ("--sglang-python", "/no/such/python"), "CFG05", ["/no/such/python"]),
    ],
)
@pytest.mark.parametrize("command", [("config", "check"), ("run", "--dry-run"), ("run",)])
def test_a_fault_is_found_before_anything_starts(cli, stand_in, recipe, tmp_path, command, line, flags, code, parts):
    stand_in()
    done = cli(*command, recipe(line), *flags)
    assert done.code == 2
    assert code in done.err
    assert all(part in done.err for part in parts), done.err
    assert not (tmp_path / "runs").exists()


def test_a_family_that_servers_hold_in_ways_unknown_is_compared_by_log_probs_alone(cli, stand_in, recipe, tmp_path):
    stand_in()
    path = recipe()
    config = tiny_model(tmp_path / "model", weights=False, chat_template="{{ messages }}") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "olmo2"}))
    (tmp_path / "judge.py").write_text("async def reward(args, sample, **kw):\n    return 1.0\n")
    flags = ("--init-weights", "random", "--custom-rm-path", tmp_path / "judge.py:reward")
    done = cli("run", "--dry-run", path, *flags)
    assert done.code == 0, done.err
    assert "of type olmo2 is not known here, so log-probs alone tell" in done.out
    assert "not known here" not in cli("run", "--dry-run", path, *flags, "--check-weights", "off").out


def test_a_model_that_sglang_lacks_is_refused_and_one_of_transformers_is_named(
    cli, stand_in, recipe, tmp_path, monkeypatch
):
    stand_in()
    path, asked = recipe(), tmp_path / "asked"
    monkeypatch.setenv("ASKED", str(asked))
    (tmp_path / "judge.py").write_text("async def reward(args, sample, **kw):\n    return 1.0\n")
    config = tiny_model(tmp_path / "model", weights=False, chat_template="{{ messages }}") / "config.json"
    fields = json.loads(config.read_text())

    def dry_run(name):
        config.write_text(json.dumps(fields | {"architectures": [name]}))
        more = ("--init-weights", "random", "--custom-rm-path", tmp_path / "judge.py:reward")
        return cli("run", "--dry-run", path, *more)

    own = dry_run("Qwen3ForCausalLM")
    assert (own.code, "transformers' code" in own.out, asked.exists()) == (0, False, False), own.err
    other = dry_run("LlamaForCausalLM")
    assert (other.code, "LlamaForCausalLM: not SGLang's own" in other.out) == (0, True), other.err
    other = cli("config", "check", path, "--json")
    assert list(json.loads(other.out)["servers"]["fallbacks"]) == ["policy"], other.err
    assert asked.read_text() == "x", "the second answer comes from the cache"
    config.write_text(json.dumps(fields | {"architectures": ["NowhereForCausalLM"]}))
    absent = cli("run", path)  # before it has a directory
    assert absent.code == 2
    for part in ("CFG04", "recipe.toml:6", "does not serve NowhereForCausalLM", "Cannot find model module"):
        assert part in absent.err
    assert not (tmp_path / "runs").exists()


def test_servers_that_run_already_need_no_sglang_here(cli, recipe, monkeypatch):
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    address = "http://127.0.0.1:30000"
    done = cli("config", "check", recipe(), "--rollout-external-engine-addrs", address, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["servers"] == {"external": [address]}


RAY = ("--cluster", "ray", "--ray-address", "local")


def test_on_a_cluster_the_servers_machines_may_have_sglang_alone(cli, recipe, monkeypatch):
    """The driver's machine has none: servers are shown, and their options are read where they start."""
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    path = recipe('python = "/only/there/bin/python"')
    done = cli("config", "check", path, *RAY, "--rollout-num-engines", 2, "--json")
    assert done.code == 0, done.err
    servers = json.loads(done.out)["servers"]
    assert (servers["python"], servers["groups"][0]["servers"]) == ("", [[], []])
    assert "arguments" not in servers["groups"][0]
    assert cli("config", "check", path).code == 2, "on this machine it is missed"
    wrong = cli("config", "check", path, "sglang.python=3", *RAY)
    assert (wrong.code, "CFG02" in wrong.err) == (2, True)


@pytest.mark.parametrize("here", [True, False])
def test_servers_that_would_lie_on_two_machines_are_refused_before_a_cluster_is_asked(cli, stand_in, recipe, here):
    """Servers of two GPUs on the GPUs of three ranks a machine; --device cuda, whatever this machine has."""
    path = recipe('python = "/only/there/bin/python"' * (not here))
    if here:
        stand_in()
    ranks = ("--actor-num-nodes", 2, "--actor-num-gpus-per-node", 3, "--rollout-num-gpus-per-engine", 2)
    done = cli("config", "check", path, *RAY, "--device", "cuda", *ranks)
    assert done.code == 2
    assert "server 1 of 2 GPUs would lie on two machines" in done.err


def test_training_from_a_dump_needs_no_sglang(cli, recipe, monkeypatch, tmp_path):
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    (tmp_path / "dump").mkdir()
    done = cli("config", "check", recipe(), "--debug-train-only", "--load-debug-rollout-data", "dump", "--json")
    assert done.code == 0, done.err
    assert "servers" not in json.loads(done.out)


def test_the_options_of_the_installation_are_listed(cli, stand_in):
    stand_in()
    rows = {row["key"]: row for row in json.loads(cli("config", "keys", "--sglang", "--json").out)}
    assert rows["sglang.max_running_requests"] == {
        "section": "sglang",
        "key": "sglang.max_running_requests",
        "flag": "--sglang-max-running-requests",
        "type": "an integer",
        "default": "",
        "text": "How many.",
    }
    assert rows["sglang.port"]["text"].startswith("Set by slime: ")
    assert "  disable_radix_cache " in cli("config", "keys", "radix", "--sglang").out


def test_the_doctor_names_version_place_and_features(stand_in):
    program = stand_in()
    found = sglang()
    assert found.status == "ok"
    assert f"0.5.23 at {program}; 10 options" in found.found


def test_the_doctor_needs_no_sglang(monkeypatch):
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    found = sglang()
    assert found.status == "ok"
    assert PYTHON_ENV in found.found


def test_an_installation_that_does_not_work_is_a_failed_row(cli, stand_in):
    stand_in(server_args="import no_such_kernel\n")
    done = cli("doctor", "--json")
    (row,) = [row for row in json.loads(done.out)["checks"] if row["name"] == "sglang: installation"]
    assert (done.code, row["status"]) == (1, "fail")
    assert "no usable SGLang" in row["found"]
    assert "must work" in row["fix"]

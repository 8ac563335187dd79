"""When a run goes on by itself, and with what it gives up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_cli.restarts import Death, Past, allowed, given_up, mendable, pause, refusal, unsaved
from slime_core.config.schema import Config
from slime_core.config.sections.cluster import ClusterSection
from slime_core.errors import ConfigError, EngineError, Hung, PluginError, TrainerError
from slime_core.report import RunDir
from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration


def died(version, code="TRN105"):
    return Death(version=version, kind="TrainerError", error=TrainerError(f"at {version}", code=code).as_dict())


@pytest.mark.parametrize(
    ("versions", "limit", "reason"),
    [
        pytest.param([3], 1, "", id="first"),
        pytest.param([3], 0, "0 restart(s) were allowed", id="none allowed"),
        pytest.param([3, 4, 5], 3, "", id="each further than the one before"),
        pytest.param([3, 4, 5], 2, "2 restart(s) were allowed", id="too many"),
        pytest.param([3, 3], 9, "step 4 was not finished after the restart either", id="the same step twice"),
        pytest.param([3, 2], 9, "step 3 was not finished after the restart either", id="not even as far"),
    ],
)
def test_a_run_is_restarted_while_it_gets_further(versions, limit, reason):
    found = refusal([died(version) for version in versions], limit)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_no_room_after_a_machine_was_lost_is_no_lack_of_progress():
    assert refusal([died(3), died(3, "CFG18")], 2) == ""
    assert "1 restart(s) were allowed" in refusal([died(3), died(3, "CFG18")], 1)


def test_the_first_cause_is_told_first_and_the_last_beside_it():
    first = EngineError(
        "the engine's process 7 was killed", code="ENG84", where="engine-0.log", why="its log", fix="mend"
    )
    deaths = [Death.of(first, 3), died(4), died(4)]
    error = given_up(deaths, "so it was given up")
    assert type(error) is EngineError
    assert (error.what, error.code, error.where, error.fix) == (first.what, "ENG84", "engine-0.log", "mend")
    assert error.why.splitlines()[:4] == [
        "its log",
        "at version 3",
        "restart 1 ended with TRN105 at 4 (at version 4)",
        "restart 2 ended with TRN105 at 4 (at version 4)",
    ]
    assert error.why.endswith("so it was given up")


def test_only_what_was_lost_is_tried_again():
    assert mendable(TrainerError("gone", code="TRN105", lost=True))
    assert mendable(Hung("rank 1 is stopped"))
    for error in (
        TrainerError("loss is nan", code="TRN95"),
        TrainerError("ended after another failed", code="TRN105"),
        EngineError("other weights", code="ENG83"),
        PluginError("the reward raised"),
        ConfigError("no room", code="CFG18"),
    ):
        assert not mendable(error)


def test_pauses_grow_up_to_a_minute():
    assert [pause(number) for number in (1, 2, 3, 6, 20)] == [2, 4, 8, 60, 60]


def test_runs_on_ray_restart_by_themselves_and_others_when_asked():
    def config(**cluster):
        return Config(cluster=ClusterSection(**cluster))

    assert allowed(config()) == 0
    assert allowed(config(cluster_backend="ray")) == 3
    assert allowed(config(max_restarts=7)) == 7
    assert allowed(config(cluster_backend="ray", max_restarts=0)) == 0


BECOMING = """
import json, os, subprocess, sys
from slime_cli.failure import CliSession
from slime_cli.restarts import RestartCommand, Death, MEMORY, Past, past
from slime_core.errors import TrainerError
from slime_core.report import RunDir
from pathlib import Path

if sys.argv[1:2] == ["run"]:
    found = past()
    again = past()
    print(json.dumps([os.getpid(), sys.argv[1:], os.getcwd(), found.number, found.allowed, found.deaths[0].summary,
                      found.secrets, again.number, MEMORY in os.environ, len(os.listdir("/proc/self/fd"))]))
else:
    folder = os.getcwd()
    command = RestartCommand(CliSession(argv=sys.argv[1:], verbose=True), forced=("lr",), stop_after=60.0, verify_step=3, as_json=True)
    os.environ["LATER"] = "x"
    os.chdir("/")
    held = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(held, True)  # as a library may have left it
    child = subprocess.Popen(["sleep", "600"])
    death = Death.of(TrainerError("rank 1 is gone", code="TRN105", lost=True), 2)
    past = Past(deaths=[death], allowed=3, secrets={"plugin.x.api_key": "hush"})
    print(json.dumps([os.getpid(), folder, child.pid]))
    command.become(RunDir(Path("/runs/a b")), past, int(sys.argv[1]))
"""


@pytest.mark.parametrize(("version", "verify"), [(2, ["--verify-step", "3"]), (3, [])])
def test_a_process_becomes_the_command_that_goes_on_and_knows_its_past(tmp_path, version, verify):
    """The same process id and folder, nothing inherited, every child ended; secrets are on no command line."""
    script = tmp_path / "becoming.py"
    script.write_text(BECOMING)
    ended = subprocess.run([sys.executable, script, str(version)], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (pid, folder, child), after = map(json.loads, ended.stdout.splitlines())
    words = [
        "run",
        "--resume",
        "/runs/a b",
        "--force-key",
        "lr",
        "--stop-after",
        "60.0",
        *verify,
        "--json",
        "--verbose",
    ]
    assert after[:3] == [pid, words, folder]
    assert after[3:6] == [1, 3, "TRN105 rank 1 is gone (at version 2)"]
    assert after[6] == {"plugin.x.api_key": "hush"}
    assert after[7:9] == [0, False]
    assert after[9] == 4  # three streams, and the folder that was listed
    assert not alive(child)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_secrets_that_were_not_saved_are_brought_by_the_process_before(tmp_path, install_plugin):
    from slime_cli.failure import CliSession
    from slime_cli.resume import load_saved
    from slime_cli.settings import load_settings
    from slime_core.config.dump import redacted, to_toml

    install_plugin("paid", PAID)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "1+1="}\n')
    reward = tmp_path / "one.py"
    reward.write_text("def reward(args, sample, **kw):\n    return 1.0\n")
    model = tiny_model(tmp_path / "model", weights=False)
    words = [
        "--plugin",
        "paid",
        "plugin.paid.api_key=hush-hush",
        "--hf-checkpoint",
        str(model),
        "--init-weights",
        "random",
    ]
    words += ["--prompt-data", str(rows), "--custom-rm-path", f"{reward}:reward"]
    settings = load_settings(words, CliSession())
    with RunDir.create("run", at=tmp_path / "run") as run_dir:
        run_dir.write_config(to_toml(redacted(settings.config, settings.loaded.secrets)))
        carried = Past(deaths=[died(1)], allowed=3, secrets=unsaved(settings))
    assert carried.secrets == {"plugin.paid.api_key": "hush-hush"}
    assert "hush" not in run_dir.config.read_text()
    assert "hush" not in repr(carried)
    settings.plugins.close()
    again = load_saved(run_dir.path, [], CliSession(past=carried))
    again.plugins.close()
    assert again.config.plugin["paid"]["api_key"] == "hush-hush"
    with pytest.raises(ConfigError, match="CFG09"):
        load_saved(run_dir.path, [], CliSession(past=Past()))


PAID = """
import pydantic
from slime_core.hookspecs import hookimpl

class Options(pydantic.BaseModel):
    api_key: str = ""

@hookimpl
def slime_options():
    return Options
"""

"""slime.agent.sandbox and slime.agent.harness: coding agents in containers, with programs that stand for both."""

import asyncio
import copy
import shlex
import sys
import tarfile
from dataclasses import replace

import pytest

from slime_compat.served.harnesses import ClaudeCodeHarness
from slime_compat.served.sandboxes import EXIT_TIME_BUDGET_EXCEEDED, E2BSandbox, exec_and_wait
from slime_core.config.schema import Config
from slime_core.config.sections.rollout import RolloutSection
from slime_core.errors import SandboxError

pytestmark = pytest.mark.integration


@pytest.fixture
def program(tmp_path, functions, monkeypatch):
    """Write a program of the image; the image is a folder."""
    monkeypatch.setenv(
        "SLIME_AGENT_CONTAINER", shlex.join([sys.executable, "-IS", str(functions / "container_engine.py")])
    )
    folder = tmp_path / "image" / "usr" / "local" / "bin"
    for path in (folder, tmp_path / "image" / "tmp", tmp_path / "image" / "home" / "agent"):
        path.mkdir(parents=True)

    def write(name, text="true"):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    for name in ("useradd", "chown"):
        write(name)
    return write


@pytest.fixture
def image(program, tmp_path):
    return str(tmp_path / "image")


@pytest.mark.parametrize(("agent", "name", "prefix"), [("claude_code", "claude", "CC"), ("codex", "codex", "CODEX")])
def test_an_agents_program_works_in_a_container_and_its_dialogue_is_a_sample(
    image, program, connect, make_group, functions, tokenizer, monkeypatch, agent, name, prefix
):
    program(name, f'exec {shlex.quote(sys.executable)} {functions}/coding_program.py {name} "$@"')
    monkeypatch.setenv(f"SLIME_AGENT_{prefix}_EXTRA_ARGS", "--fast")
    monkeypatch.setenv(f"SLIME_AGENT_{prefix}_EXTRA_ENVS", '{"MODE": "fast"}')
    path = f"{functions}/coding_shape.py:generate"
    plugins, ctx = connect(Config(rollout=RolloutSection(custom_generate_function_path=path)), {"1\n": "2"})
    speaker = copy.deepcopy(tokenizer)
    speaker.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    group = make_group("1+1", "2", n=1)
    for sample in group.samples:
        sample.metadata |= {"agent": agent, "image": image}
    done = asyncio.run(plugins.generate(group, replace(ctx, tokenizer=speaker)))
    assert len(done.samples) == len(group.samples)
    for sample in done.samples:
        assert tokenizer.decode(sample.tokens) == "1+1\n2<eos>"
        assert (sample.reward, sample.loss_mask, sample.metadata["agent_exit_code"]) == (1.0, [1, 1], 0)


def test_a_command_says_its_exit_code_and_is_ended_after_its_time(image):
    async def work():
        async with E2BSandbox(image, timeout=60, size="md") as sb:
            assert await sb.exec("echo out; echo err >&2; exit 3", env={"A": "b"}) == (3, "out\n", "err\n")
            assert (await sb.exec('echo "$A"', env={"A": "b\n'c'"}))[1] == "b\n'c'\n"
            assert (await sb.exec("echo $PATH", env={"PATH": "/own"}))[1] == "/own\n"  # not the container program's
            with pytest.raises(RuntimeError, match="exit code 3: exit 3"):
                await sb.exec("exit 3", check=True)
            assert [(await sb.exec(f"exit {code}"))[0] for code in (124, 137)] == [124, 137]  # of the command itself
            ends = [sb.exec(f"{first}sleep 60", timeout=1) for first in ("", "trap '' TERM; ")]
            for error in await asyncio.gather(*ends, return_exceptions=True):
                assert isinstance(error, TimeoutError)
                assert str(error).startswith("was ended after 1 s")
            long = {"cmd": "echo begun; sleep 60", "time_budget_sec": 1, "tag": "long"}
            assert await exec_and_wait(sb, **long) == (EXIT_TIME_BUDGET_EXCEEDED, "begun\n")
            assert await exec_and_wait(sb, cmd="echo done", time_budget_sec=60, tag="short") == (0, "")
            await sb.write_file("/tmp/a", "a file")
            with pytest.raises(RuntimeError, match="/tmp/a/b could not be written"):
                await sb.write_file("/tmp/a/b", b"\xff")

    asyncio.run(work())


@pytest.mark.parametrize("fails", [False, True], ids=["installed", "a package that npm refuses"])
def test_a_package_of_this_machine_is_installed_with_its_node(image, program, tmp_path, monkeypatch, fails):
    """npm of the archive makes the program of the package that it is handed; the image cannot read .xz."""
    program("xz", "exit 1")
    (tmp_path / "node").mkdir()
    npm = f'case $1 in install) tar xzf "$6" -C {tmp_path}/unpacked; exit {int(fails)};; esac'
    (tmp_path / "unpacked").mkdir()
    for name, text in {"node": "true", "npm": npm, "npx": "true"}.items():
        (tmp_path / "node" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "node" / name).chmod(0o755)
    with tarfile.open(tmp_path / "node.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "node", "node-v22/bin")
    (tmp_path / "main.js").write_text("claude")
    with tarfile.open(tmp_path / "claude.tgz", "w:gz") as archive:
        archive.add(tmp_path / "main.js", "main.js")
    program("claude")
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(tmp_path / "node.tar.xz"))
    monkeypatch.setenv("SLIME_AGENT_CC_TARBALL", str(tmp_path / "claude.tgz"))

    async def work():
        async with E2BSandbox(image) as sb:
            await ClaudeCodeHarness().install_cli(sb)

    if fails:
        with pytest.raises(RuntimeError, match=r"npm could not install claude.tgz \(exit code 1\)"):
            asyncio.run(work())
    else:
        asyncio.run(work())
    assert (tmp_path / "unpacked" / "main.js").read_text() == "claude"


@pytest.mark.parametrize(
    ("program_name", "what", "why", "fix"),
    [
        ("", "no container of image nowhere", "no such image: nowhere", "pull nowhere"),
        (
            "no-such-docker",
            "could not be started: no-such-docker",
            "No such file",
            "export SLIME_AGENT_CONTAINER=podman",
        ),
    ],
    ids=["an image that is not there", "a program that is not there"],
)
def test_a_container_that_cannot_be_started_says_why(program, monkeypatch, program_name, what, why, fix):
    if program_name:
        monkeypatch.setenv("SLIME_AGENT_CONTAINER", program_name)

    async def work():
        async with E2BSandbox("nowhere"):
            pass

    with pytest.raises(SandboxError) as caught:
        asyncio.run(work())
    assert what in caught.value.what
    assert why in caught.value.why
    assert fix in caught.value.fix
    assert caught.value.code == "SBX141"

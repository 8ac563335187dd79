"""`slime.agent.sandbox`: what an agent works in. In place of a cloud's sandbox it is a container on this machine."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from slime_core.errors import SandboxError

ExecResult = tuple[int, str, str]
"""Exit code, stdout and stderr."""
FileContent = str | bytes | Path
"""A text, bytes, or a file of this machine."""
EXIT_TIME_BUDGET_EXCEEDED = -1
ENGINE = "SLIME_AGENT_CONTAINER"
LIFETIME = "SLIME_AGENT_SANDBOX_LIFETIME_SEC"
TIMED_OUT = (124, 137)  # exit codes of the program timeout: what it ended ended by TERM, or by KILL
SHOWN = 500  # characters of an error
RUN = 'eval "$(cat)"; exec < /dev/null; exec "$BASH" -c "$1"'
"""Run a command with the variables that stdin sets: no other user sees them, and no other program has them."""
WRITE = 'folder=$(dirname "$1"); [ -d "$folder" ] || { mkdir -p "$folder" && chown "$2" "$folder"; }; '
WRITE += 'cat > "$1" && chown "$2" "$1"'
AGENT = """
id agent > /dev/null 2>&1 || useradd --create-home --shell /bin/bash agent
mkdir -p {workdir} && chown -R agent: /home/agent {workdir} && git config --system --replace-all safe.directory '*'
"""


@runtime_checkable
class AgentSandbox(Protocol):
    """What agents and graders need of a sandbox."""

    sandbox_id: str

    async def __aenter__(self) -> Any:
        """Start it."""

    async def __aexit__(self, *error: object) -> None:
        """End it, with everything in it."""

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run a command of bash."""
        ...

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file that ``user`` owns."""

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """The text of a file; empty where there is none."""
        ...


class E2BSandbox:
    """A container of ``image``, by the program that the variable SLIME_AGENT_CONTAINER names (``docker``).

    It shares this machine's network, since an adapter listens on 127.0.0.1. ``image_metadata_key``, ``rpc_retries``
    and ``size`` are E2B's and change nothing.

    Args:
        image: of containers, with bash, git, timeout and useradd.
        timeout: seconds after which the container ends; SLIME_AGENT_SANDBOX_LIFETIME_SEC, or an hour.
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        self.image, self.sandbox_id = image, ""
        self.timeout = timeout or int(os.environ.get(LIFETIME) or 3600)

    async def __aenter__(self) -> Self:
        words = ["run", "--detach", "--rm", "--network", "host", "--entrypoint", "sleep"]
        code, stdout, stderr = await _run_engine([*words, self.image, str(self.timeout)])
        if code:
            raise SandboxError(
                f"no container of image {self.image} could be started",
                code="SBX141",
                where=f"{_engine()[0]} run",
                why=stderr.strip()[-SHOWN:],
                fix=f"{_engine()[0]} pull {self.image}",
            )
        self.sandbox_id = stdout.strip()
        return self

    async def __aexit__(self, *error: object) -> None:
        await _run_engine(["rm", "--force", self.sandbox_id])

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run a command of bash; its exit code, stdout and stderr.

        Raises:
            TimeoutError: it was ended after ``timeout`` seconds.
            RuntimeError: with ``check`` an exit code other than 0.
        """
        words = ["exec", "--interactive", "--user", user, self.sandbox_id]
        command = ["timeout", "-k", "5", str(timeout), "bash", "-c", RUN, "bash", cmd]
        variables = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in (env or {}).items())
        start = time.monotonic()
        code, stdout, stderr = await _run_engine([*words, *command], stdin=variables)
        if code in TIMED_OUT and time.monotonic() - start >= timeout:
            raise TimeoutError(f"was ended after {timeout} s: {cmd[:SHOWN]}")
        if check and code:
            raise RuntimeError(f"exit code {code}: {cmd[:SHOWN]}\n{stderr[-SHOWN:]}")
        return code, stdout, stderr

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file that ``user`` owns, and the folder that it lies in; raises RuntimeError where it cannot."""
        words = ["exec", "--interactive", "--user", "root", self.sandbox_id, "bash", "-c", WRITE, "bash"]
        code, _, stderr = await _run_engine([*words, sandbox_path, user], stdin=content)
        if code:
            raise RuntimeError(f"{sandbox_path} could not be written: {stderr[-SHOWN:]}")

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """The text of a file; empty where there is none."""
        return (await _run_engine(["exec", "--user", user, self.sandbox_id, "cat", sandbox_path]))[1]


def _engine() -> list[str]:
    return shlex.split(os.environ.get(ENGINE) or "docker")


async def _run_engine(words: list[str], *, stdin: FileContent = b"") -> ExecResult:
    """Run a container program to its end."""
    try:
        process = await asyncio.create_subprocess_exec(
            *_engine(),
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise SandboxError(
            f"a container program could not be started: {_engine()[0]}",
            code="SBX141",
            where=ENGINE,
            why=error.strerror or str(error),
            fix=f"install docker, or name another program: export {ENGINE}=podman",
        ) from error
    if isinstance(stdin, Path):
        stdin = await asyncio.to_thread(stdin.read_bytes)
    try:
        stdout, stderr = await process.communicate(stdin.encode() if isinstance(stdin, str) else stdin)
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace")


async def exec_and_wait(
    sb: AgentSandbox,
    *,
    cmd: str,
    time_budget_sec: int,
    tag: str,
    user: str = "root",
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run a long command, with its output in a file; its exit code, and the output that is of use.

    Args:
        sb: where.
        cmd: lines of bash.
        time_budget_sec: seconds after which it is ended, with :data:`EXIT_TIME_BUDGET_EXCEEDED` as exit code.
        tag: names its script, ``/tmp/.TAG.sh``.
        user: who runs it; with ``workdir``, in their home.
        env: added to its environment.
        workdir: the folder that it starts in.
        out_file: of stdout and stderr; ``/tmp/.TAG.out``.
        want_output: return all of the output; else its end, where the command failed.
    """
    script, output = f"/tmp/.{tag}.sh", out_file or f"/tmp/.{tag}.out"
    start = f"cd {shlex.quote(workdir)} || exit\nexport HOME=/home/{user}\n" if workdir else ""
    await sb.write_file(script, f"{start}{cmd}\n", user=user)
    line = f"bash {script} < /dev/null > {shlex.quote(output)} 2>&1"
    try:
        code, _, _ = await sb.exec(line, user=user, env=env, timeout=time_budget_sec, idempotent=False)
    except TimeoutError:
        code = EXIT_TIME_BUDGET_EXCEEDED
    if code == 0 and not want_output:
        return code, ""
    text = await sb.read_file(output, user=user)
    return code, text if want_output else text[-SHOWN:]


async def ensure_agent_user(sb: AgentSandbox, workdir: str) -> None:
    """Let the user ``agent``, who is added where missing, own ``workdir``, and git accept folders of anyone."""
    await sb.exec(AGENT.format(workdir=shlex.quote(workdir)), user="root", check=True, timeout=60)


Sandbox = AgentSandbox
__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "E2BSandbox",
    "ExecResult",
    "FileContent",
    "Sandbox",
    "ensure_agent_user",
    "exec_and_wait",
]

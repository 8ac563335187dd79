"""`slime.agent.harness`: coding agents in a sandbox, from the installation of their program to its end."""

from __future__ import annotations

import asyncio
import json
import lzma
import os
import shlex
from abc import ABC, ABCMeta, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slime_compat.served.loading import SingletonMeta
from slime_compat.served.sandboxes import AgentSandbox, ensure_agent_user, exec_and_wait

HOME = "/home/agent"
NODE = "SLIME_AGENT_NODE_TARBALL"
INSTALL_SECONDS = 300
NODE_ARCHIVE, CLI_ARCHIVE = "/tmp/node22.tar", "/tmp/harness-cli.tgz"
NODE_PROGRAMS = "for name in node npm npx; do ln -sf /opt/node22/bin/$name /usr/local/bin/$name; done"


class SingletonABCMeta(ABCMeta, SingletonMeta):
    """An abstract class whose calls all give one instance."""


@dataclass(frozen=True)
class HarnessContext:
    """A run of an agent; ``model_label`` is the name under which its program asks for the model."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness(ABC, metaclass=SingletonABCMeta):
    """An agent's program in a sandbox."""

    name = ""

    @abstractmethod
    async def install_cli(self, sb: AgentSandbox) -> None:
        """Install the program."""

    @abstractmethod
    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Write the program's configuration."""

    @abstractmethod
    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run the program to its end, and return its exit code."""

    async def run(
        self, sb: AgentSandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: int, prompt: str
    ) -> int:
        """Configure and run the agent as the user ``agent``, and return its exit code.

        Args:
            sb: with the program and the agent's task.
            workdir: the folder that the agent works in.
            session_id: the key that its requests bear.
            adapter_url: whom it asks, without ``/v1``.
            time_budget_sec: seconds; an agent that needs more is ended, with exit code -1.
            prompt: what it is to do.
        """
        await ensure_agent_user(sb, workdir)
        ctx = HarnessContext(workdir=workdir, session_id=session_id, adapter_url=adapter_url)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


class _ProgramHarness(BaseHarness):
    """A program with a command line: of an npm package where a variable names its archive, else the image's own."""

    program = ""
    arguments = ""
    tarball_env = ""
    extra_args_env = ""  # words added to the command
    extra_envs_env = ""  # JSON: variables added to the environment

    async def install_cli(self, sb: AgentSandbox) -> None:
        """Install the npm package of this harness's variable; without one, require the program of the image."""
        check, package = f"{self.program} --version", os.environ.get(self.tarball_env)
        if package:
            await install_npm_cli(sb, node_runtime=Path(os.environ[NODE]), npm_package=Path(package), check_cmd=check)
        else:
            await sb.exec(check, user="root", check=True)

    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run the program with the prompt, and return its exit code."""
        words = [self.program, self.arguments, shlex.quote(prompt), os.environ.get(self.extra_args_env, "")]
        more = json.loads(os.environ.get(self.extra_envs_env) or "{}")
        env = {**self.environment(ctx), **more}
        command = " ".join(filter(None, words))
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec)

    @abstractmethod
    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """The variables that lead the program to the adapter."""


class ClaudeCodeHarness(_ProgramHarness):
    """Claude Code, over Anthropic's Messages."""

    name = "claude_code"
    program = "claude"
    arguments = "--permission-mode bypassPermissions --output-format stream-json --verbose -p"
    tarball_env = "SLIME_AGENT_CC_TARBALL"
    extra_args_env, extra_envs_env = "SLIME_AGENT_CC_EXTRA_ARGS", "SLIME_AGENT_CC_EXTRA_ENVS"
    quiet: ClassVar[dict[str, str]] = {  # nothing is asked that is not the agent's own
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Answer the questions of a first start."""
        answers = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})
        for path in (f"{HOME}/.claude.json", f"{HOME}/.claude/settings.json"):
            await sb.write_file(path, answers, user="agent")

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """Address, key and model."""
        return {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            **self.quiet,
        }


class CodexHarness(_ProgramHarness):
    """Codex, over OpenAI's Responses."""

    name = "codex"
    program = "codex"
    arguments = "exec --skip-git-repo-check"
    tarball_env = "SLIME_AGENT_CODEX_TARBALL"
    extra_args_env, extra_envs_env = "SLIME_AGENT_CODEX_EXTRA_ARGS", "SLIME_AGENT_CODEX_EXTRA_ENVS"

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Name the adapter as provider: Codex reads addresses of other providers than OpenAI from its file alone."""
        provider = {
            "name": "slime",
            "base_url": f"{ctx.adapter_url}/v1",
            "env_key": "OPENAI_API_KEY",
            "wire_api": "responses",
        }
        lines = [f"model = {json.dumps(ctx.model_label)}", 'model_provider = "slime"', "[model_providers.slime]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
        await sb.write_file(f"{HOME}/.codex/config.toml", "\n".join(lines) + "\n", user="agent")

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """Address and key."""
        return {"OPENAI_API_KEY": ctx.session_id, "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1"}


async def run_agent(
    sb: AgentSandbox, *, workdir: str, start_cmd: str, env: dict[str, str], time_budget_sec: int
) -> int:
    """Run an agent's command as the user ``agent``, and return its exit code.

    Its output is ``.harness/trajectory.jsonl`` in ``workdir``.
    """
    folder = f"{workdir}/.harness"
    quoted = shlex.quote(folder)
    await sb.exec(f"mkdir -p {quoted} && chown agent: {quoted}", user="root", check=True, timeout=30)
    output = f"{folder}/trajectory.jsonl"
    code, _ = await exec_and_wait(
        sb,
        cmd=start_cmd,
        time_budget_sec=time_budget_sec,
        tag="run",
        user="agent",
        env=env,
        workdir=workdir,
        out_file=output,
    )
    return code


async def install_npm_cli(sb: AgentSandbox, *, node_runtime: Path, npm_package: Path, check_cmd: str) -> None:
    """Install Node, then the package of an npm archive for all users, and run ``check_cmd``.

    Raises:
        RuntimeError: one of them failed, with the end of its output.
    """
    await install_node22(sb, node_runtime)
    await sb.write_file(CLI_ARCHIVE, npm_package)
    command = f"npm install --global --prefix=/usr/local --no-audit --no-fund {CLI_ARCHIVE} && {check_cmd}"
    code, output = await exec_and_wait(sb, cmd=command, time_budget_sec=INSTALL_SECONDS, tag="harness-npm-install")
    if code:
        raise RuntimeError(f"npm could not install {npm_package.name} (exit code {code}): {output}")


async def install_node22(sb: AgentSandbox, host_tarball: Path) -> None:
    """Unpack an archive of Node as the sandbox's ``node``; one in .xz is decompressed here, as few images have xz."""
    archive = Path(host_tarball)
    content = await asyncio.to_thread(_decompressed, archive) if archive.suffix == ".xz" else archive
    await sb.write_file(NODE_ARCHIVE, content)
    unpack = f"mkdir -p /opt/node22 && tar xf {NODE_ARCHIVE} -C /opt/node22 --strip-components=1"
    command = f"{unpack} && {NODE_PROGRAMS} && node --version && npm --version"
    await sb.exec(command, user="root", check=True, timeout=INSTALL_SECONDS)


def _decompressed(file: Path) -> bytes:
    with lzma.open(file) as content:
        return content.read()


__all__ = [
    "BaseHarness",
    "ClaudeCodeHarness",
    "CodexHarness",
    "HarnessContext",
    "SingletonABCMeta",
    "install_node22",
    "install_npm_cli",
    "run_agent",
]

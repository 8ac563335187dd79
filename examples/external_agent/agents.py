"""The run's side: an agent process a sample, and what its dialogues earn."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime_chat import Session, converse
from slime_core import Context
from slime_core.types import Group, Reward

AGENT = (sys.executable, "-I", str(Path(__file__).with_name("agent.py")))
SECONDS = 600.0  # of one agent
THREADS = ThreadPoolExecutor(64, "agent")  # so many at once; starting a process would hold the event loop


async def generate(group: Group, ctx: Context) -> Group:
    """Let an agent work on every sample; its requests become samples, each dialogue one."""

    async def agent(session: Session) -> None:
        await asyncio.get_running_loop().run_in_executor(THREADS, work, session)

    return await converse(group, ctx, agent)


def work(session: Session) -> None:
    """One agent, from its start to its end.

    Raises:
        subprocess.SubprocessError: it failed, or takes too long.
    """
    sample = session.sample
    job = json.dumps({"question": sample.prompt, "weights": sample.metadata["weights"]})
    env = {"PATH": os.environ.get("PATH", ""), **session.env}
    done = subprocess.run(AGENT, input=job, env=env, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    sample.metadata["said"] = done.stdout.strip()


def reward(group: Group, ctx: Context) -> list[Reward]:
    """1 for a dialogue that ends with the two weights."""
    return [Reward(value=float(s.metadata["chat"]["answer"].strip() == s.label)) for s in group.samples]

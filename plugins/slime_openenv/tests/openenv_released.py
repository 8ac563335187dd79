"""Environments of the released openenv-core, unmodified, in one process: run by the environment that has it.

    python openenv_released.py PORT FOLDER       # the template of `openenv init` at /echo, MCP tools at /tools

The template's environment allows one session at a time, as it is written.
"""

import os
import sys

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.cli.commands.init import init
from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

port, folder = int(sys.argv[1]), sys.argv[2]


class Sums(MCPEnvironment):
    """A tool that adds; the answer 7 is worth 1 and ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None):
        return Observation()

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        sum_ = getattr(getattr(observation, "result", None), "data", None)
        return observation.model_copy(update={"reward": 0.5 if sum_ is not None else 0.0, "done": sum_ == 7})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


path, os.environ["PATH"] = os.environ["PATH"], ""  # without uv, which would look for packages
init("echo_env", folder)
os.environ["PATH"] = path
sys.path.append(folder)
from echo_env.server.app import app as echo  # noqa: E402

app = FastAPI()
app.mount("/echo", echo)
app.mount("/tools", create_app(Sums, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=8))


@app.get("/health")
def health():
    return {"status": "healthy"}


uvicorn.run(app, port=port, log_level="warning")

"""The options of `[plugin.mcp]`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

Command = Annotated[list[str], BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value)]


class McpServer(BaseModel, extra="forbid", frozen=True):
    """One MCP server: a ``command`` that speaks over stdio, or the ``url`` of streamable HTTP.

    Example: McpServer(name="files", command="python files.py", per="sample", deny=["delete_*"])
    """

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    command: Command = []
    url: str = ""
    env: dict[str, str] = {}  # of the command; $NAME in a value is read from the run's own environment
    headers: dict[str, str] = {}  # of HTTP requests, likewise
    allow: list[str] = []  # patterns of tools' names; none allows all
    deny: list[str] = []
    per: Literal["run", "sample"] = "run"  # a server that keeps state gets one process, or session, a sample

    @model_validator(mode="after")
    def one_way(self) -> McpServer:
        """Check that there is a command or a URL."""
        if bool(self.command) == bool(self.url):
            raise ValueError(f"server '{self.name}' needs a command or a url, and not both")
        return self

    def offers(self, tool: str) -> bool:
        """Whether the model may see a tool."""
        allowed = not self.allow or any(fnmatchcase(tool, pattern) for pattern in self.allow)
        return allowed and not any(fnmatchcase(tool, pattern) for pattern in self.deny)


class Options(BaseModel, extra="forbid", frozen=True):
    """`[plugin.mcp]`."""

    servers: list[McpServer] = []
    max_turns: int = Field(8, ge=1)  # answers of the model in a dialogue; calls of the last one are not made
    max_calls: int = Field(16, ge=1)  # of one answer, which run at the same time; the others are refused
    call_timeout: float = Field(30.0, gt=0)  # seconds of one call
    start_timeout: float = Field(60.0, gt=0)  # seconds until a server has said which tools it has
    result_chars: int = Field(4000, ge=100)  # of a result that the model reads; the middle of a longer one is cut
    sample_servers: int = Field(16, ge=1)  # samples that hold servers of their own at the same time
    tool_parser: str = "auto"  # as the template writes calls, a format, or a function: "FILE.py:NAME"
    describe: Literal["template", "system"] = "template"  # system: in a system prompt, for templates without tools

    @model_validator(mode="after")
    def names_differ(self) -> Options:
        """Check that no two servers have one name."""
        names = [server.name for server in self.servers]
        if len(names) > len({*names}):
            raise ValueError(f"servers need different names, not {', '.join(names)}")
        return self


def expanded(values: Mapping[str, str]) -> dict[str, Any]:
    """Values with ``$NAME`` replaced from the environment."""
    return {name: os.path.expandvars(value) for name, value in values.items()}

"""The plugin `mcp`: offers the tools of MCP servers in the prompt, and generates dialogues that call them.

The reward is the run's: `rm_type`, a function by path, or another plugin's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from slime_core import ConfigError, Context, DataError, Group, Status, hookimpl
from slime_core.config.problems import Problem, conflict
from slime_core.config.schema import Config
from slime_core.data.tool_calls import PARSERS, TemplateTools, parser_of, template_tools
from slime_core.data.turns import Speech
from slime_core.plugins.boundary import together
from slime_core.plugins.locate import locate
from slime_core.types import Message
from slime_mcp.dialogue import Talk, converse
from slime_mcp.options import Options
from slime_mcp.servers import McpServers, Tool, ToolResult

slime_api = 1
CHOICE = "mcp_tools"
"""Key of a row's metadata: patterns of the names of the tools that it offers."""
PLAIN = TemplateTools(
    describes=False,
    parser="hermes",
    example='<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>',
)
PROMPT = """You can call these functions:

{definitions}

To call one, write its name and its arguments like this:

{example}

Several calls in one answer run at the same time. The next message has their results."""

_servers: dict[str, McpServers] = {}  # by options
_talks: dict[tuple[int, str], tuple[Any, Talk, TemplateTools]] = {}  # by tokenizer and options


@hookimpl
def slime_options() -> type[BaseModel]:
    """The model of `[plugin.mcp]`."""
    return Options


@hookimpl
def slime_config_rules(config: Config) -> list[Problem]:
    """Refuse a run without a chat template, which is what describes the tools."""
    if config.data.apply_chat_template:
        return []
    return [
        conflict(
            "tools are described by the chat template, which is not applied",
            ["data.apply_chat_template", "plugins"],
            fix="--apply-chat-template",
        )
    ]


@hookimpl
def slime_messages(
    messages: list[Message], tools: list[Any] | None, metadata: dict[str, Any], ctx: Context
) -> tuple[list[Message], list[Any] | None]:
    """The row's messages, and the definitions of the tools that it may call."""
    options: Options = ctx.options
    if not options.servers:
        return messages, tools
    if tools:
        raise DataError(
            "the row has tools of its own, which no MCP server serves",
            code="DAT24",
            where=f"{ctx.config.data.tool_key} of the row",
            fix=f"leave them out, or unset data.tool_key; a row chooses tools by metadata.{CHOICE}, a list of names",
        )
    chosen = _chosen(_servers_of(options, ctx).tools(), metadata)
    if not chosen:
        return messages, None
    definitions = [tool.definition for tool in chosen.values()]
    _, template = _talk_of(options, ctx)
    if options.describe == "template":
        return messages, definitions
    text = PROMPT.format(definitions="\n".join(map(json.dumps, definitions)), example=template.example)
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    if first is None:
        return [{"role": "system", "content": text}, *messages], None
    content = first["content"]
    both = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [{**first, "content": both}, *messages[1:]], None


@hookimpl
async def slime_generate(group: Group, ctx: Context) -> Group:
    """Every pending sample's dialogue, all at the same time."""
    options: Options = ctx.options
    servers = _servers_of(options, ctx)
    tools = _chosen(await servers.tools_async(), group.prompt.metadata)
    talk = _talk_of(options, ctx)[0] if tools else None
    waiting = [sample for sample in group.samples if sample.status in (Status.PENDING, Status.ABORTED)]
    await together(converse(sample, group.prompt, ctx, servers, tools, talk, options) for sample in waiting)
    return group


@hookimpl
def slime_run_done(ctx: Context) -> None:
    """End all servers."""
    _talks.clear()
    while _servers:
        _servers.popitem()[1].close()


def _servers_of(options: Options, ctx: Context) -> McpServers:
    key = options.model_dump_json()
    if key not in _servers:
        _servers[key] = McpServers(options, ctx.run_dir / "log" if ctx.run_dir else None)
    return _servers[key]


def _chosen(tools: Mapping[str, Tool], metadata: Mapping[str, Any]) -> dict[str, Tool]:
    """The tools that a row's metadata choose; all where they say nothing."""
    patterns = metadata.get(CHOICE)
    if patterns is None or not tools:
        return dict(tools)
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in tools)]
    if unknown:
        raise DataError(
            f"the row chooses the tools {', '.join(unknown)}, which no server has",
            code="DAT24",
            where=f"metadata.{CHOICE} of the row",
            why=f"tools are {', '.join(tools)}",
            fix="fix the row, or add the server to plugin.mcp.servers",
        )
    return {name: tool for name, tool in tools.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _talk_of(options: Options, ctx: Context) -> tuple[Talk, TemplateTools]:
    """How the run's model is spoken to: looked up in its chat template once.

    Raises:
        ConfigError: CFG04 the template takes no tools, or its calls are in no known format.
        DataError: TOK43 the template has no border between an answer and results, DAT25 it refuses results.
    """
    kwargs = dict(ctx.config.data.apply_chat_template_kwargs)
    key = id(ctx.tokenizer), json.dumps([options.tool_parser, options.describe, kwargs], default=str)
    if key not in _talks:
        template = template_tools(ctx.tokenizer, kwargs)
        plain = options.describe == "system"
        if not plain and not template.describes:
            raise ConfigError(
                "the model's chat template does not describe tools",
                code="CFG04",
                where="plugin.mcp.describe",
                why="the model would not know that there are any",
                fix='describe = "system" describes them in a system prompt; or use a model whose template takes tools',
            )
        if plain and not template.parser:
            template = PLAIN
        name = template.parser if options.tool_parser == "auto" else options.tool_parser
        by_path = ":" in name
        if not by_path and name not in PARSERS:
            raise ConfigError(
                f"there is no parser of tool calls '{name}'"
                if name
                else "the model's chat template writes tool calls in no known format",
                code="CFG04",
                where="plugin.mcp.tool_parser",
                why=f"known are {', '.join(PARSERS)}, or a function by path",
                fix='name the parser of the format that the model writes: tool_parser = "hermes"',
            )
        talk = Talk(
            speech=Speech(ctx.tokenizer, template=True, kwargs=kwargs, media=ctx.media),
            parser=parser_of(locate(name, "plugin.mcp.tool_parser") if by_path else name),
            plain=template is PLAIN,
        )
        talk.results([("probe", ToolResult(text="x"))] * 2, [])  # raises where the template takes no results
        _talks[key] = ctx.tokenizer, talk, template
    return _talks[key][1:]

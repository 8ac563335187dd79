"""Servers that die, freeze, break the protocol or never start: their own samples pay, and a message says why."""

import asyncio
import socket
import sys

import pytest
from mcp_tasks import ASK, STDIO

from slime_core.errors import SlimeError
from slime_core.types import Group, Prompt, Status
from slime_mcp import plugin
from slime_mcp.options import McpServer, Options
from slime_mcp.servers import McpServers, Tool

pytestmark = pytest.mark.unit

OWN = {**STDIO, "per": "sample"}


def test_a_call_that_ends_its_server_takes_no_other_along(context, play, call, results, tmp_path):
    once = call(("die", {"once": str(tmp_path / "once")}))
    hoard = call(("hoard", {"count": 10_000}))
    killer, neighbour = play(
        context([call(("die", {})), once, hoard, "so<|im_end|>"], [call(("slow", {"seconds": 0.5})), "so<|im_end|>"]),
        2,
    )
    *ends, sockets = results(killer)
    assert ends == ["Error: the server of die ended during a call of die.", "went on"]
    assert sockets in ("10000 are open", "Error executing tool hoard: [Errno 24] Too many open files")
    assert results(neighbour) == ["done"]
    assert [sample.status for sample in (killer, neighbour)] == [Status.COMPLETED] * 2
    assert [sample.metadata["metrics"]["mcp/errors/crash"] for sample in (killer, neighbour)] == [1, 0]


def test_a_call_without_an_answer_ends_and_a_frozen_server_is_replaced(context, play, call, results, tmp_path):
    turns = [call(("hang", {})), call(("freeze", {"once": str(tmp_path / "once")})), "so<|im_end|>"]
    (sample,) = play(context(*turns, call_timeout=1.0))
    assert results(sample) == ["Error: hang did not answer in 1 s.", "went on"]
    assert sample.metadata["metrics"]["mcp/errors/timeout"] == 1


@pytest.mark.nightly
def test_servers_of_a_sample_keep_state_and_cost_that_sample_alone(context, play, call, results):
    twice = [call(("count", {}), ("count", {})), call(("count", {})), "so<|im_end|>"]
    dies = [call(("count", {})), call(("die", {})), "so<|im_end|>"]
    ctx = context(twice, dies, twice, servers=(OWN,), sample_servers=2)
    first, lost, second = play(ctx, 3)
    assert [sorted(results(sample)) for sample in (first, second)] == [["1", "2", "3"]] * 2
    assert lost.status is Status.FAILED
    assert lost.metadata["mcp"]["infra"] == "an MCP server ended during a call of die"
    assert [first.status, second.status] == [Status.COMPLETED] * 2


def test_a_call_that_is_stopped_while_it_waits_for_a_server_gives_no_place_away():
    servers = McpServers(Options(servers=(OWN,), sample_servers=1), None)

    async def work():
        tool = (await servers.tools_async())["count"]
        await servers.call("first", tool, {})
        second = asyncio.ensure_future(servers.call("second", tool, {}))
        while "second" not in servers._waiting:
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await servers.release("second")
        return servers._places.locked()

    assert asyncio.run(work())
    servers.close()


def test_a_sample_that_was_stopped_goes_on_or_begins_again(context, call, results, play):
    """The engine stops the second turn once; without state the dialogue goes on, with a server of its own it begins."""
    for server, requests in ((STDIO, 3), (OWN, 4)):
        ctx = context(call(("count", {})), "so<|im_end|>", servers=(server,))
        say, stops = ctx.engine.say, iter([False, True])

        def stopping(request, say=say, stops=stops):
            return ([], "abort") if next(stops, False) else say(request)

        ctx.engine.say = stopping
        (sample,) = play(ctx)
        assert (sample.status, results(sample)) == (Status.ABORTED, ["1"])
        prompt = Prompt(id="main/0", tokens=sample.tokens[: sample.prompt_length])
        group = Group(prompt=prompt, samples=[sample], rollouts={0: [0]})
        asyncio.run(plugin.slime_generate(group, ctx))
        assert (sample.status, results(sample), len(ctx.engine.requests)) == (Status.COMPLETED, ["1"], requests)
        assert sample.metadata["mcp"]["turns"] == 2
        plugin.slime_run_done(ctx)


@pytest.mark.parametrize("target", ["https://example.org/a.json", "#/$defs/a", "#/properties/a"])
def test_arguments_whose_schema_is_elsewhere_are_judged_by_the_server(target):
    schema = {"type": "object", "properties": {"a": {"$ref": target}, "b": {"type": "integer"}}}
    tool = Tool(McpServer(**STDIO), "add", "", schema)
    assert tool.problem({"a": 1, "b": 1}) == ""
    assert tool.problem([1]) == "the arguments are not a JSON object"


NONSENSE = "import sys\nwhile True:\n    sys.stdin.readline()\n    print('<html>', flush=True)\n"


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("servers", "told"),
    [
        (({"name": "a", "command": ["/no/such/program"]},), r"'a' did not start: FileNotFoundError"),
        (({"name": "a", "command": [sys.executable, "-c", "raise SystemExit('no')"]},), r"'a' did not start"),
        (({"name": "a", "command": [sys.executable, "-c", NONSENSE]},), r"'a' did not start in 1 s"),
        (({"name": "a", "command": [sys.executable, "-c", "input(); input()"]},), r"'a' did not start in 1 s"),
        (({"name": "a", "url": "http://127.0.0.1:{port}/mcp"},), r"'a' did not start: .*Connect.*address"),
        (({**STDIO, "name": "a"}, {**STDIO, "name": "b"}), r"'a' and 'b' both have a tool 'add'.*deny = \[\"add\"\]"),
        (({**STDIO, "allow": ["sub"]},), r"'tools' offers no tool.*it has add, meet"),
    ],
    ids=["no program", "ends", "nonsense", "silent", "nobody listens", "one name twice", "nothing allowed"],
)
def test_what_cannot_start_is_named_before_a_row_is_read(context, servers, told):
    servers = [
        {key: value.format(port=closed_port()) if key == "url" else value for key, value in s.items()} for s in servers
    ]
    ctx = context("x", servers=servers, start_timeout=1.0 if told.endswith("1 s") else 60.0)
    with pytest.raises(SlimeError, match=told) as caught:
        plugin.slime_messages(list(ASK), None, {}, ctx)
    assert caught.value.fix
    if "SystemExit" in str(servers):
        assert (ctx.run_dir / "log" / "mcp-a.log").read_text().strip() == "no"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"servers": [{"name": "a"}]}, "needs a command or a url"),
        ({"servers": [{"name": "a", "command": "x y", "url": "http://h"}]}, "needs a command or a url"),
        ({"servers": [{"name": "a", "command": "x"}, {"name": "a", "url": "y"}]}, "servers need different names"),
        ({"servers": [{"name": "a/b", "command": "x"}]}, "should match pattern"),
    ],
)
def test_options_are_checked(options, told):
    with pytest.raises(ValueError, match=told):
        plugin.Options(**options)
    (server,) = plugin.Options(servers=[{"name": "a", "command": "python 'a b.py'"}]).servers
    assert server.command == ["python", "a b.py"]

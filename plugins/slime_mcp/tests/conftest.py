"""Dialogues with a scripted engine, a published chat template and a real MCP server."""

import asyncio
import json
import socket
import subprocess

import pytest
from mcp_tasks import ASK, FORKING, STDIO, TEMPLATES, TOOLS
from scripts import forking, python

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.models import char_tokenizer
from slime_core.types import Group, Prompt, Sample, SamplingParams
from slime_mcp import plugin
from slime_mcp.options import Options


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\nü", (TEMPLATES / "qwen2_5.jinja").read_text())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


@pytest.fixture(scope="session", autouse=True)
def forked_servers():
    """Servers begin where their imports have ended."""
    with forking(FORKING, ["mcp.server", "mcp.server.stdio", "anyio._backends._asyncio"]):
        yield


@pytest.fixture(scope="session")
def http_server(forked_servers):
    """The URL of a server over streamable HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*python(FORKING), TOOLS, str(port)], stderr=subprocess.DEVNULL)
    while True:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture
def context(tokenizer, tmp_path):
    """A hook's context; the model says the given turns, each dialogue its own list."""

    def make(*turns, tokenizer=tokenizer, servers=(STDIO,), **options):
        def say(request):
            dialogue = turns[0] if isinstance(turns[0], str) else turns[int(request.id.rpartition("-")[2])]
            words = turns if isinstance(turns[0], str) else dialogue
            ends = tokenizer.decode(request.tokens).count("<|im_start|>assistant\n") - 1
            text = words[min(ends, len(words) - 1)]
            return encode(tokenizer, text), "length" if text.endswith("...") else "stop"

        config = Config(data={"apply_chat_template": True}, plugins=["mcp"])
        return Context(
            config=config,
            engine=ScriptedEngine(say, vocab_size=len(tokenizer), version=3),
            tokenizer=tokenizer,
            sampling=SamplingParams(max_new_tokens=500),
            run_dir=tmp_path,
            options=Options(servers=servers, **options),
        )

    yield make
    plugin.slime_run_done(None)


@pytest.fixture
def play():
    """Samples of one row, each with its dialogue; the answer are the samples."""

    def play(ctx, count=1, metadata=None):
        metadata = metadata or {}
        messages, tools = plugin.slime_messages(list(ASK), None, metadata, ctx)
        text = ctx.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        tokens = encode(ctx.tokenizer, text)
        samples = [Sample(id=f"main/0-{n}", prompt=text, tokens=list(tokens)) for n in range(count)]
        prompt = Prompt(id="main/0", tokens=tokens, metadata=metadata)
        group = Group(prompt=prompt, samples=samples, rollouts={n: [n] for n in range(count)})
        asyncio.run(plugin.slime_generate(group, ctx))
        return samples

    return play


@pytest.fixture(scope="session")
def call():
    """The text of calls as Qwen2.5 writes them."""

    def call(*calls):
        blocks = (
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in calls
        )
        return "\n".join(blocks) + "<|im_end|>"

    return call


@pytest.fixture(scope="session")
def results():
    """The results that the model read, turn after turn."""

    def results(sample):
        parts = sample.response.split("<tool_response>\n")[1:]
        return [part.partition("\n</tool_response>")[0] for part in parts]

    return results

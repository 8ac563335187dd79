"""Episodes before an engine that answers from a script, and servers in this process or in one of their own."""

import asyncio
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp
from aiohttp import web

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.errors import EngineError
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.models import CHAT_TEMPLATE, VOCAB, char_tokenizer
from slime_core.types import Group, Prompt, Sample, SamplingParams
from slime_openenv.options import Options
from slime_openenv.plugin import OpenEnv
from slime_openenv.servers import LocalServer

HERE = Path(__file__).parent
TOKENIZER = char_tokenizer(VOCAB + "{}[]<>_|", CHAT_TEMPLATE)


@contextmanager
def started(log, *words):
    """A server of another process; its address."""
    server = LocalServer(0, Options(command=tuple(map(str, words)), start_timeout=250.0), log)

    async def start():
        async with aiohttp.ClientSession() as http:
            await server.ready(http)

    try:
        asyncio.run(start())
        yield server.url
    finally:
        asyncio.run(server.stop())


@asynccontextmanager
async def serving(*servers):
    """Servers of this process; their addresses."""
    runners = [web.AppRunner(server.app, shutdown_timeout=0.1) for server in servers]
    try:
        urls = []
        for runner in runners:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield urls
    finally:
        for runner in runners:
            await runner.cleanup()


def context(options, say, *, template="", run_dir=None, context_len=100_000, **sampling):
    """A run's context before an engine that answers ``say(tokens so far, as text)``; "..." cuts an answer."""
    tokenizer = char_tokenizer(VOCAB + "{}[]<>_|", template) if template else TOKENIZER

    def answer(request):
        if len(request.tokens) >= context_len:
            raise EngineError("no room", code="ENG72")
        text = say(tokenizer.decode(request.tokens))
        end = [] if text.endswith("...") else [tokenizer.eos_token_id]
        return [*encode(tokenizer, text), *end], "length" if not end else "stop"

    return Context(
        config=Config.model_validate({"data": {"apply_chat_template": bool(template)}}),
        options=options,
        engine=ScriptedEngine(answer, vocab_size=len(tokenizer), version=3),
        tokenizer=tokenizer,
        sampling=SamplingParams(max_new_tokens=256, **sampling),
        run_dir=run_dir,
    )


def group_of(count=1, position=0, prompt="go", **metadata):
    samples = [
        Sample(id=f"main/{position}-{j}", prompt=prompt, tokens=[1], metadata=dict(metadata), group_index=position)
        for j in range(count)
    ]
    return Group(
        prompt=Prompt(id=f"main/{position}", prompt=prompt, tokens=[1]),
        samples=samples,
        rollouts={j: [j] for j in range(count)},
    )


async def play(ctx, *groups):
    """The groups' samples and rewards; everything is closed afterwards."""
    plugin = OpenEnv()
    try:
        await asyncio.gather(*(plugin.slime_generate(group, ctx) for group in groups))
    finally:
        await plugin.slime_run_done(ctx)
    return [pair for group in groups for pair in zip(group.samples, plugin.slime_reward(group, ctx), strict=True)]


def obeys(text):
    """The letter that the last hint asks for."""
    return text.rpartition("say: ")[2][0]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def servers_of(folder):
    """Processes of the server whose command names ``folder``."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes()
            if str(folder).encode() in words and b"openenv_protocol" in words and b"launcher" not in words:
                pids.append(int(path.parent.name))
    return pids


def command(folder, *faults):
    return (sys.executable, str(HERE / "openenv_protocol.py"), "{port}", f"{folder}", *faults)

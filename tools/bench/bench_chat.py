"""The embedded engine asked by agents over `/v1/chat/completions` against the same engine asked with token ids.

    python tools/bench/bench_chat.py          # a thread for the engine, 64 agents of 4 turns in another process
    python tools/bench/bench_chat.py --tools  # answers are searched for tool calls

Both go through dialogues of the same lengths, the same number in flight; they alternate, and each pair begins with the
other one. "ids" continues token lists in this process and looks at no text. "chat" is the endpoint with everything
that it does: HTTP, JSON, the tree, the template, decoding, samples. Its agents are a process of their own, as in a
run, so the machine needs a core beside the engine's thread. The ratio is of the two rounds of a pair; its median is
the result. ``cpu`` are processor seconds of this process alone, which other load changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks it up.", "parameters": {}}}]
QUESTION = "What stands in the book on page 17, and who wrote it? "
RESULT = "It says that rain fell for a week, and names nobody."


@dataclass(slots=True)
class Round:
    """What one round took."""

    seconds: float
    cpu: float
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


async def ask(reader: Any, writer: Any, key: str, payload: dict[str, Any]) -> Any:
    """One request over a connection that stays open."""
    body = json.dumps(payload).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
    answer = await reader.readexactly(length)
    assert lines[0].split()[1] == b"200", answer
    return json.loads(answer)


def length_of(agent: int, turn: int, response: int) -> int:
    """Tokens of an answer: half to one and a half of the usual, so that agents do not keep step."""
    return response // 2 + (37 * agent + 17 * turn) % response


async def one_agent(number: int, key: str, settings: dict[str, Any]) -> None:
    """A dialogue of some turns."""
    port, response = settings["port"], settings["response"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION * settings["repeat"]}]
    more = {"tools": TOOLS} if settings["tools"] else {}
    for turn in range(settings["turns"]):
        limit = length_of(number, turn, response)
        answer = await ask(reader, writer, key, {"messages": messages, "max_tokens": limit, **more})
        messages += [answer["choices"][0]["message"], {"role": "user", "content": RESULT}]
    writer.close()


async def agents() -> None:
    """The process of the agents: a line of JSON in, all dialogues of a round, a line out."""
    for line in sys.stdin:
        told = json.loads(line)
        await asyncio.gather(*(one_agent(number, key, told) for number, key in enumerate(told["keys"])))
        print("done", flush=True)


class Bench:
    """An engine, its context, and the process of the agents."""

    def __init__(self, args: argparse.Namespace, ctx: Any, process: asyncio.subprocess.Process) -> None:
        self.args, self.ctx, self.process = args, ctx, process
        self.rounds = 0

    async def chat(self) -> Round:
        """A round through the endpoint."""
        from slime_chat import open_session
        from slime_core.types import Sample

        self.rounds += 1
        async with AsyncExitStack() as stack:
            issued = [Sample(id=f"{self.rounds}-{number}") for number in range(self.args.agents)]
            sessions = [await stack.enter_async_context(open_session(sample, self.ctx)) for sample in issued]
            port = int(sessions[0].base_url.split(":")[2].split("/")[0])
            told = {"port": port, "keys": [session.api_key for session in sessions], **vars(self.args)}
            begin, cpu = time.perf_counter(), time.process_time()
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps(told).encode() + b"\n")
            assert await self.process.stdout.readline() == b"done\n"
            samples = [sample for session in sessions for sample in session.samples()]
            took, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert len(samples) == self.args.agents, "an agent's history was not known again"
        self.last = samples[-1]
        return Round(took, cpu, sum(sum(sample.loss_mask or ()) for sample in samples))

    async def ids(self) -> Round:
        """The same dialogues as token lists."""
        sample = self.last
        inside, mask = sample.response_tokens, sample.loss_mask or []
        places = [place for place in range(len(mask)) if not mask[place]]
        words = inside[places[0] : places[0] + len(places) // max(1, self.args.turns - 1)] if places else []
        prompt = sample.tokens[: sample.prompt_length]
        begin, cpu = time.perf_counter(), time.process_time()
        made = await asyncio.gather(*(self._continue(number, prompt, words) for number in range(self.args.agents)))
        return Round(time.perf_counter() - begin, time.process_time() - cpu, sum(made))

    async def _continue(self, number: int, prompt: list[int], words: list[int]) -> int:
        from slime_core.types import GenerateRequest, SamplingParams

        tokens, made = list(prompt), 0
        for turn in range(self.args.turns):
            params = SamplingParams(max_new_tokens=length_of(number, turn, self.args.response))
            request = GenerateRequest(id=f"i{number}", tokens=tokens, params=params, seed=number * 100 + turn)
            done = await self.ctx.engine.generate(request)
            tokens, made = [*tokens, *done.tokens, *words], made + len(done.tokens)
        return made


async def measure(args: argparse.Namespace) -> list[tuple[Round, Round]]:
    """Pairs of rounds: ids, chat."""
    import transformers
    from bench_engine import Folder, make_model

    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.engines.local import LocalEngine
    from slime_core.testing.models import CHAT_TEMPLATE, char_tokenizer
    from slime_core.threads import TorchThread
    from slime_core.types import SamplingParams, WeightUpdate

    transformers.logging.set_verbosity_error()
    tokenizer = char_tokenizer(chat_template=CHAT_TEMPLATE)
    shape = {
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": args.hidden // 4,
        "intermediate": args.hidden * 5 // 2,
    }
    given = {**shape, "hidden": args.hidden, "vocab": len(tokenizer), "seed": 0, "dtype": "float32"}
    thread = TorchThread(1)
    model = thread.call(make_model, argparse.Namespace(**given))
    folder: Any = Folder(model.config)
    slots = max(1, args.agents // 2)  # some always wait, so that what an agent does in between leaves no slot empty
    engine = LocalEngine(folder, slots=slots, context_len=1024, dtype="float32", device="cpu", thread=thread)
    await engine.load(WeightUpdate(version=0, epoch=0, transport="tensors", tensors=dict(model.state_dict())))
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--agents-process", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    sampling = SamplingParams(max_new_tokens=2 * args.response)
    bench = Bench(args, Context(config=Config(), engine=engine, tokenizer=tokenizer, sampling=sampling), process)
    await bench.chat()
    await bench.ids()
    pairs = []
    for number in range(args.pairs):
        first = [await one() for one in ((bench.ids, bench.chat) if number % 2 else (bench.chat, bench.ids))]
        pairs.append((first[0], first[1]) if number % 2 else (first[1], first[0]))
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    await engine.close()
    thread.close()
    return pairs


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"agents": 64, "turns": 4, "response": 48, "repeat": 2, "hidden": 256, "pairs": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tools", action="store_true", help="agents send tools, so answers are searched for calls")
    parser.add_argument("--agents-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    if args.agents_process:
        return asyncio.run(agents())
    pairs = asyncio.run(measure(args))
    for ids, chat in pairs:
        print(
            f"ids {ids.rate:7.0f} tokens/s, cpu {ids.cpu:.2f} s   chat {chat.rate:7.0f} tokens/s, cpu {chat.cpu:.2f} s"
            f"   ratio {chat.rate / ids.rate:.3f}   cpu {chat.cpu / ids.cpu:.3f}"
        )
    ratio = statistics.median(chat.rate / ids.rate for ids, chat in pairs)
    cpu = statistics.median(chat.cpu / ids.cpu for ids, chat in pairs)
    print(f"median: {ratio:.3f} of the tokens a second, {cpu:.3f} of the processor time")
    if args.json:
        print(json.dumps({"ratio": ratio, "cpu": cpu, **vars(args)}))


if __name__ == "__main__":
    main()

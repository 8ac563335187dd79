"""Turns a second of multi-turn episodes with an engine that costs nothing: what slime itself does for a turn.

    python tools/bench/bench_environments.py                # a trivial environment in hooks, in slime-gym, over HTTP
    python tools/bench/bench_environments.py hooks --profile

All episodes run at the same time. "hooks" is a `slime_generate` by path whose environment says one line; "gym" plays a
game of slime-gym in its process; "chat" are agents in another process that speak to the endpoint of slime-chat. Each
goes through `Plugins.generate`, the checks of the returned groups, and the reward. The best round counts. "processor"
is the rate by the processor time of this process alone, which other load on the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_chat import ask

from slime_core.config.load import read
from slime_core.context import Context
from slime_core.plugins import load_plugins, option_models
from slime_core.rollout.groups import check_group, issued_ids, pending_group
from slime_core.rollout.score import score_group
from slime_core.testing.fakes import FakeEngine
from slime_core.testing.models import CHAT_TEMPLATE, char_tokenizer
from slime_core.types import Completion, GenerateRequest, Prompt, SamplingParams

WORDS = "The lamp is still off. Which of the switches do you press now?"
FUNCTIONS = """
import asyncio
from slime_core.data.turns import Speech

async def generate(group, ctx):
    speech = ctx.shared.setdefault("speech", Speech(ctx.tokenizer, template=True))

    async def episode(sample):
        for turn in range(TURNS):
            done = await ctx.generate(sample)
            if turn + 1 < TURNS:
                ids = speech.between(f"{turn}: WORDS", done.tokens)
                sample.append_response(ids, mask=0, text=ctx.tokenizer.decode(ids))

    await asyncio.gather(*(episode(sample) for sample in group.samples))
    return group

async def chat(group, ctx):
    from slime_chat import converse

    return await converse(group, ctx, ctx.shared["agent"])

def reward(group, ctx):
    return [1.0] * len(group.samples)
"""
GAME = """
import random
import textarena

class Lamp(textarena.Env):
    def reset(self, num_players, seed=None):
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "WORDS")

    def step(self, action):
        self.state.add_observation(f"{self.state.turn}: WORDS", textarena.ObservationType.GAME_MESSAGE)
        if self.state.turn + 1 == TURNS:
            self.state.set_outcome(1.0, "off")
        return self.state.step()

textarena.envs.register("Lamp-v0", Lamp)
"""


class InstantEngine(FakeEngine):
    """Answers with the same ids at once."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.version, self._tokens = 0, tokens
        self._log_probs, self._versions = [-0.5] * len(tokens), [0] * len(tokens)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        await asyncio.sleep(0)
        numbers = self._log_probs
        return Completion(
            id=request.id,
            tokens=list(self._tokens),
            log_probs=list(numbers),
            plain_log_probs=list(numbers),
            finish="stop",
            versions=list(self._versions),
            text="press 3",
        )


class Bench:
    """Plugins, a context, and the groups of a round."""

    def __init__(self, mode: str, args: argparse.Namespace, folder: Path) -> None:
        self.mode, self.args = mode, args
        for name, text in (("functions.py", FUNCTIONS), ("lamp.py", GAME)):
            (folder / name).write_text(text.replace("TURNS", str(args.turns)).replace("WORDS", WORDS))
        flags = [
            "--n-samples-per-prompt",
            "8",
            "--apply-chat-template",
            "--custom-rm-path",
            f"{folder}/functions.py:reward",
        ]
        if mode == "gym":
            flags += ["--plugin", "gym", "--game", "Lamp-v0", "--modules", f"{folder}/lamp.py"]
        else:
            name = "chat" if mode == "chat" else "generate"
            flags += ["--custom-generate-function-path", f"{folder}/functions.py:{name}"]
        self.config = read(None, flags, models=option_models).config
        self.plugins = load_plugins(self.config)
        self.tokenizer = char_tokenizer(chat_template=CHAT_TEMPLATE)
        tokens = self.tokenizer.encode("I press switch 3")[: args.tokens]
        self.ctx = Context(
            config=self.config,
            engine=InstantEngine(tokens),
            tokenizer=self.tokenizer,
            sampling=SamplingParams(max_new_tokens=64),
        )

    def groups(self) -> list[Any]:
        """Pending groups of one round."""
        tokens = self.tokenizer.encode(f"user: {WORDS}\nassistant: ")
        gym = {"gym": {"game": "Lamp-v0", "seed": 1, "players": 1, "library": "textarena"}}
        count = self.args.episodes // 8
        prompts = (Prompt(id=f"main/{n}", position=n, prompt=WORDS, tokens=tokens, metadata=gym) for n in range(count))
        return [pending_group(prompt, self.config) for prompt in prompts]

    async def round(self) -> tuple[float, float]:
        """Turns a second of all episodes at once, by the clock and by processor time."""
        groups = self.groups()
        begin, processor = time.perf_counter(), time.process_time()
        turns = sum(await asyncio.gather(*map(self._group, groups)))
        assert turns == self.args.turns * len(groups) * 8, turns
        return turns / (time.perf_counter() - begin), turns / (time.process_time() - processor)

    async def _group(self, group: Any) -> int:
        ids = issued_ids(group)
        done = await self.plugins.generate(group, self.ctx)
        check_group(done, ids, len(self.tokenizer))
        scored, _ = await score_group(done, self.plugins, self.ctx)
        assert scored is not None
        answer = len(self.ctx.engine._tokens)  # type: ignore[union-attr]
        return sum(sum(sample.loss_mask or ()) for sample in scored.samples) // answer

    async def run(self) -> tuple[float, float]:
        """The best of some rounds."""
        async with self.plugins.running(self.ctx):
            if self.mode == "chat":
                return await self._with_agents()
            return await self._best()

    async def _best(self) -> tuple[float, float]:
        rounds = [await self.round() for _ in range(self.args.rounds)]
        return max(wall for wall, _ in rounds), max(processor for _, processor in rounds)

    async def _with_agents(self) -> tuple[float, float]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--agents-process", str(self.args.turns)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        waiting: dict[str, asyncio.Future[None]] = {}
        to_agents = process.stdin

        async def agent(session: Any) -> None:
            future = waiting[session.api_key] = asyncio.get_running_loop().create_future()
            to_agents.write(json.dumps([session.base_url, session.api_key]).encode() + b"\n")
            await future

        async def ends(lines: asyncio.StreamReader) -> None:
            while line := await lines.readline():
                waiting.pop(line.decode().strip()).set_result(None)

        self.ctx.shared["agent"] = agent
        reading = asyncio.create_task(ends(process.stdout))
        best = await self._best()
        to_agents.close()
        await process.wait()
        await reading
        return best


async def agents(turns: int) -> None:
    """The process of the agents: a line names a session, and another says that its dialogue is over."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks, beginning = set(), asyncio.Semaphore(64)  # the server closes connections where many say nothing yet

    async def dialogue(url: str, key: str) -> None:
        port = int(url.split(":")[2].split("/")[0])
        messages: list[dict[str, Any]] = [{"role": "user", "content": WORDS}]
        async with beginning:
            connection = await asyncio.open_connection("127.0.0.1", port)
            answer = await ask(*connection, key, {"messages": messages})
        for turn in range(turns):
            if turn:
                answer = await ask(*connection, key, {"messages": messages})
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"{turn}: {WORDS}"}]
        connection[1].close()
        os.write(1, f"{key}\n".encode())

    while line := await reader.readline():
        task = asyncio.create_task(dialogue(*json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", default=["hooks", "gym", "chat"], help="hooks, gym, chat")
    for name, value in {"episodes": 1000, "turns": 8, "tokens": 16, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--agents-process", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agents_process:
        return asyncio.run(agents(args.agents_process))
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.modes:
            bench = Bench(mode, args, Path(folder))
            with cProfile.Profile() if args.profile else tempfile.TemporaryFile() as profile:
                rates[mode] = asyncio.run(bench.run())
            print("{:6s} {:7.0f} turns/s   processor {:7.0f} turns/s".format(mode, *rates[mode]))
            if isinstance(profile, cProfile.Profile):
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if args.json:
        print(json.dumps(rates))


if __name__ == "__main__":
    main()

"""ReTool's dialogue as functions by path: `generate`, `reward`, `demonstrate` (the warm-up), `run_done`.

    problem -> <code>print(347*582)</code> -> <interpreter>201954</interpreter> -> ... -> \\boxed{201954}
               `-- the model's ----------'    `-- the sandbox's: do not train'            `-- the model's

One sample is one whole dialogue: tokens are only ever appended, and the model's come with the engine's log-probs.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from interpreter import Broken, Interpreter, Settings

from slime_core import Context, EngineError, Group, Reward, Sample, Status
from slime_core.data.chat import encode
from slime_core.data.turns import Speech
from slime_core.plugins.boundary import together

CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
FENCE = re.compile(r"\A\s*```(?:python|py)?\s*\n(.*?)```\s*\Z", re.DOTALL)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
PYTHON = Interpreter()


@cache
def _read(file: Path) -> Settings:
    settings = Settings(**json.loads(file.read_text()))
    return replace(settings, preload=tuple(settings.preload))


async def generate(group: Group, ctx: Context) -> Group:
    """Every pending sample's dialogue, all at the same time."""
    settings = _read(Path(ctx.config.rollout.custom_config_path))
    waiting = [sample for sample in group.samples if sample.status in (Status.PENDING, Status.ABORTED)]
    await together(converse(sample, ctx, settings) for sample in waiting)
    return group


async def converse(sample: Sample, ctx: Context, settings: Settings) -> None:
    """One dialogue, until a turn without code, or a limit, ends it. What the reward reads is left in ``metadata``."""
    assert ctx.sampling is not None
    params = replace(ctx.sampling, stop=("</code>",))
    state = sample.metadata  # an aborted sample goes on where it was
    for turn in range(state.get("turns", 0), settings.max_turns):
        begin = state.setdefault("begin", len(sample.tokens))
        try:
            done = await ctx.generate(sample, params)
        except EngineError as error:
            if not error.ends_dialogue:
                raise
            sample.status = Status.TRUNCATED
            return
        answer = sample.tokens[begin:]
        text = Speech(ctx.tokenizer, template=False).text(answer)
        sample.response = ctx.tokenizer.decode(sample.response_tokens)  # for people: with the tags that ended turns
        if done.finish != "stop":
            return
        state["turns"] = turn + 1
        code = CODE.search(text)
        if code is None:
            state["answer"] = (BOXED.findall(text) or [""])[-1]
            return
        if turn + 1 < settings.max_turns:
            try:
                printed = await PYTHON.run(unfenced(code[1]), settings, ctx)
            except Broken as error:
                sample.status, state["infra"] = Status.FAILED, f"the sandbox: {error}"
                return
            tell(sample, printed, ctx, answer)
            del state["begin"]


def unfenced(code: str) -> str:
    """Code without the fence that models put around it."""
    found = FENCE.match(code)
    return found[1] if found else code


def tell(sample: Sample, printed: str, ctx: Context, answer: list[int]) -> None:
    """Append what the model's code printed after ``answer``; it does not train."""
    ids = Speech(ctx.tokenizer, template=False).between(f"<interpreter>{printed}</interpreter>", answer)
    sample.append_response(ids, mask=0, text=ctx.tokenizer.decode(ids))


def reward(group: Group, ctx: Context) -> list[Reward]:
    """1 for the right answer in the model's last words, 0 for any other. Term ``code``: whether it ran any."""
    return [judge(sample) for sample in group.samples]


def judge(sample: Sample) -> Reward:
    """One sample's reward; what the interpreter printed is not looked at."""
    state = sample.metadata
    if "infra" in state:
        return Reward(value=0.0, kind="infra_error", reason=state["infra"])
    right = float("answer" in state and plain(state["answer"]) == plain(str(sample.label)))
    return Reward(value=right, terms={"right": right, "code": float(state.get("turns", 0) > 1)})


def plain(answer: str) -> str:
    """An answer without spaces and thousands' commas."""
    return re.sub(r"(?<=\d),(?=\d{3})|\s", "", answer)


async def demonstrate(groups: list[Group], ctx: Context) -> list[Group]:
    """The warm-up's rollout (`rollout_function_path`): traces of `make_problems.py`; the pupil's words train."""
    for group in groups:
        for sample in group.samples:
            *turns, last = sample.metadata["trace"]
            for code, printed in turns:
                tell(sample, printed, ctx, say(sample, f"<code>{code}</code>", ctx))
            say(sample, last, ctx, end=[ctx.tokenizer.eos_token_id])
            sample.status, sample.reward = Status.COMPLETED, 0.0
    return groups


def say(sample: Sample, text: str, ctx: Context, end: list[int] | None = None) -> list[int]:
    """Append a pupil's turn; the answer is its ids."""
    ids = [*encode(ctx.tokenizer, text), *(end or [])]
    sample.append_response(ids, log_probs=[0.0] * len(ids), text=text)
    return ids


async def run_done(ctx: Context) -> None:
    """End the sandbox."""
    await PYTHON.aclose()

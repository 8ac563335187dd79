"""Search-R1's dialogue as functions by path: `generate`, `demonstrate` (the warm-up), `reward`, `run_done`.

    question -> <search>kelo</search> -> <information>...</information> -> ... -> <answer>zafu</answer>
                `-- the model's ----'    `-- the index's: do not train'           `-- the model's ----'

One sample is one whole dialogue: tokens are only ever appended, and the model's come with the engine's log-probs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from string import punctuation

from retrieval import Index, Remote, Unanswered

from slime_core import Context, EngineError, Group, Reward, Sample, Status
from slime_core.data.chat import encode
from slime_core.data.turns import Speech
from slime_core.plugins.boundary import together
from slime_core.seeds import seed_of

ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
STOPS = ("</search>", "</answer>")
INVALID = "That is no action. Write <search>a query</search>, or <answer>the answer</answer>."
FACT = re.compile(r"works for (\w+) and lives in (\w+)")
REMOTES: dict[Settings, Remote] = {}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of `custom_config_path`."""

    corpus: str = ""  # JSONL file, its path from the settings' own folder
    retriever_url: str = ""  # of a retriever that is asked instead
    retriever_seconds: float = 30.0  # for one search, its retries included
    retriever_retries: int = 3
    topk: int = 3  # documents a search
    max_turns: int = 4  # the model's; the last is for the answer
    careless: float = 0.0  # how often the warm-up's pupil leaves out the second search

    @classmethod
    def of(cls, ctx: Context) -> Settings:
        """Those of a run."""
        return _read(Path(ctx.config.rollout.custom_config_path))


@cache
def _read(file: Path) -> Settings:
    settings = Settings(**json.loads(file.read_text()))
    return replace(settings, corpus=str(file.parent / settings.corpus))


@cache
def _index(corpus: str) -> Index:
    return Index.read(Path(corpus))


async def generate(group: Group, ctx: Context) -> Group:
    """Every pending sample's dialogue, all at the same time."""
    waiting = [sample for sample in group.samples if sample.status in (Status.PENDING, Status.ABORTED)]
    await together(converse(sample, ctx, Settings.of(ctx)) for sample in waiting)
    return group


async def converse(sample: Sample, ctx: Context, settings: Settings) -> None:
    """One dialogue, until it is answered or something ends it. What the reward reads is left in ``metadata``."""
    assert ctx.sampling is not None
    params = replace(ctx.sampling, stop=STOPS)
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
        if done.finish != "stop":
            return
        answer = sample.tokens[begin:]
        sample.response = ctx.tokenizer.decode(sample.response_tokens)  # for people: with the tags that ended turns
        said = ACTION.search(Speech(ctx.tokenizer, template=False).text(answer))
        state |= {"turns": turn + 1, "valid": state.get("valid", 0) + bool(said)}
        if said and said[1] == "answer":
            state["answer"] = said[2].strip()
            return
        if turn + 1 < settings.max_turns:
            try:
                words = await information(said[2], settings) if said else INVALID
            except Unanswered as error:
                sample.status, state["infra"] = Status.FAILED, str(error)
                return
            tell(sample, words, ctx, answer)
            del state["begin"]


async def information(query: str, settings: Settings) -> str:
    """What a search finds, as Search-R1 shows it.

    Raises:
        Unanswered: the remote retriever could not say.
    """
    if settings.retriever_url:
        if settings not in REMOTES:
            seconds, retries = settings.retriever_seconds, settings.retriever_retries
            REMOTES[settings] = Remote(settings.retriever_url, seconds=seconds, retries=retries)
        found = await REMOTES[settings].search(query.strip(), settings.topk)
    else:
        found = _index(settings.corpus).search(query, settings.topk)
    parts = [document.contents.partition("\n") for document in found]
    passages = [f"Doc {n}(Title: {title}) {text}" for n, (title, _, text) in enumerate(parts, 1)]
    return "<information>" + "\n".join(passages) + "</information>"


def tell(sample: Sample, words: str, ctx: Context, answer: list[int]) -> None:
    """Append what the model is told after ``answer``; it does not train."""
    ids = Speech(ctx.tokenizer, template=False).between(words, answer)
    sample.append_response(ids, mask=0, text=ctx.tokenizer.decode(ids))


def reward(group: Group, ctx: Context) -> list[Reward]:
    """1 for the exact answer. Terms: ``exact``, and ``format``, the share of turns that were an action, if answered.

    `reward_weights = { exact = 1.0, format = 0.1 }` trains on both.
    """
    return [judge(sample) for sample in group.samples]


def judge(sample: Sample) -> Reward:
    """One sample's reward; nothing but the model's own answer is looked at."""
    state = sample.metadata
    if "infra" in state:
        return Reward(value=0.0, kind="infra_error", reason=state["infra"])
    golden = sample.label if isinstance(sample.label, list) else [sample.label]
    answered = "answer" in state
    exact = answered and any(plain(state["answer"]) == plain(str(one)) for one in golden)
    valid = state.get("valid", 0) / max(state.get("turns", 0), 1)
    return Reward(value=float(exact), terms={"exact": float(exact), "format": valid if answered else 0.0})


def plain(text: str) -> str:
    """SQuAD's normal form: lower case, without punctuation, articles and surplus spaces (Rajpurkar et al. 2016)."""
    bare = "".join(letter for letter in text.lower() if letter not in punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


async def demonstrate(groups: list[Group], ctx: Context) -> list[Group]:
    """The warm-up's rollout (`rollout_function_path`): a pupil talks to the same index, and its words train."""
    for group in groups:
        for sample in group.samples:
            await perform(sample, ctx, Settings.of(ctx))
    return groups


async def perform(sample: Sample, ctx: Context, settings: Settings) -> None:
    """A pupil's dialogue, as tokens."""
    careless = Random(seed_of(ctx.config.seed, "pupil", sample.id)).random() < settings.careless
    pupil = pupils_turns(str(sample.prompt), careless)
    said = next(pupil)
    while True:
        ids = encode(ctx.tokenizer, said)
        sample.append_response(ids, log_probs=[0.0] * len(ids), text=said)
        if said.startswith("<answer>"):
            break
        words = await information(said.removeprefix("<search>").removesuffix("</search>"), settings)
        tell(sample, words, ctx, ids)
        said = pupil.send(words)
    sample.status, sample.reward = Status.COMPLETED, 0.0


def pupils_turns(question: str, careless: bool) -> Generator[str, str, None]:
    """Search the person, search the boss, answer; a careless pupil answers with where the person lives."""
    person = question.rpartition("boss of ")[2].partition(" ")[0]
    boss, town = FACT.findall((yield f"<search>{person}</search>"))[0]
    if not careless:
        _, town = FACT.findall((yield f"<search>{boss}</search>"))[0]
    yield f"<answer>{town}</answer>"


async def run_done(ctx: Context) -> None:
    """Close the connections to retrievers."""
    while REMOTES:
        await REMOTES.popitem()[1].aclose()

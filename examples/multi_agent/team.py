"""A team of one policy: solvers, rewriters who read the solutions, and a selector who names the best rewriting.

    problem -> solver x 3 -> rewriter x 2 (each reads all solutions) -> selector (reads both rewritings) -> the answer

Each agent speaks once, to a prompt of its own. What it said is a training sample with its `role`, and all samples of
a team share one rollout id. Others' answers reach an agent as text in its prompt; nothing that was sampled to be
trained is encoded again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_core import Context, Group, Reward, Sample
from slime_core.data.chat import encode, render
from slime_core.evaluation.questions import ANSWER, final_answer
from slime_core.rollout.groups import sibling

SOLVERS, REWRITERS = 3, 2  # of a team, each at the same time
TOGETHER, APART = 1.2, 0.8  # what an agent's right answer is worth where the team is right, and where it is not
WORTH = {"solver": 0.1, "rewriter": 1.0, "selector": 1.0}  # of a right answer: the pace at which a role learns


@dataclass(frozen=True)
class Words:
    """What the agents are asked; a solver is asked the problem itself."""

    rewriter: str
    selector: str
    solution: str  # one of those that the others are shown


SHORT = Words(rewriter="R{problem}{solutions}=", selector="S{problem}{solutions}=", solution="/{text}")
CHAT = Words(
    rewriter="{problem}\n\nOthers have answered:\n{solutions}\n\nFind their mistakes and write your own solution. Put "
    "the final answer within \\boxed{{}}.",
    selector="{problem}\n\nThese are the candidates:\n{solutions}\n\nCheck each of them. End with the number of the "
    "best one, as in: Judgment: 1",
    solution="\n### Solution {number}\n{text}\n",
)


async def generate(group: Group, ctx: Context) -> Group:
    """One team a rollout; what its agents say beside the first solver joins the group as siblings."""
    teams = await asyncio.gather(*(work(group.samples[places[0]], ctx) for places in group.rollouts.values()))
    for places, team in zip(group.rollouts.values(), teams, strict=True):
        for sample in team[1:]:
            places.append(len(group.samples))
            group.samples.append(sample)
    return group


def reward(group: Group, ctx: Context) -> list[Reward]:
    """Each agent for its own answer, the selector for the one it chose; more where the team's answer is right.

    In evaluation every agent of a team has the team's reward; what a role got right by itself is the term of its name.
    """
    right = [float(sample.metadata[ANSWER] == answer_in(str(sample.label))) for sample in group.samples]
    found = [Reward(value=0.0)] * len(right)
    for places in group.rollouts.values():
        team = right[places[-1]]
        for place in places:
            role = group.samples[place].role
            own = WORTH[role] * right[place] * (TOGETHER if team else APART)
            found[place] = Reward(value=team if ctx.evaluation else own, terms={role: right[place]})
    return found


async def work(issued: Sample, ctx: Context) -> list[Sample]:
    """One team's samples: solvers (the first is the one that was issued), rewriters, the selector."""
    solvers = [issued, *(agent(issued, "solver", number, issued.prompt, ctx) for number in range(1, SOLVERS))]
    issued.role = "solver"
    solutions = await speak(solvers, ctx)
    asked = ask("rewriter", issued, solutions, ctx)
    rewriters = [agent(issued, "rewriter", SOLVERS + number, asked, ctx) for number in range(REWRITERS)]
    candidates = await speak(rewriters, ctx)
    selector = agent(issued, "selector", SOLVERS + REWRITERS, ask("selector", issued, candidates, ctx), ctx)
    [judgment] = await speak([selector], ctx)
    chosen = choice(judgment, REWRITERS)
    selector.metadata[ANSWER] = None if chosen is None else answer_in(candidates[chosen])
    return [*solvers, *rewriters, selector]


async def speak(samples: Sequence[Sample], ctx: Context) -> list[str]:
    """One turn of each agent, at the same time; the answers without reasoning.

    A role that a frozen engine serves (a group of that role in `engine_topology`) speaks, and does not learn.
    """
    frozen = ctx.engines.get(samples[0].role)
    mouth = replace(ctx, engine=frozen) if frozen else ctx
    await asyncio.gather(*(mouth.generate(sample) for sample in samples))
    for sample in samples:
        sample.metadata[ANSWER] = answer_in(sample.response)
        if frozen:
            sample.model = sample.role
            sample.loss_mask = [0] * sample.response_length
            sample.weight_versions = [-1] * sample.response_length
    return [sample.response.rpartition("</think>")[2].strip() for sample in samples]


def agent(issued: Sample, role: str, number: int, prompt: str | list[dict[str, str]], ctx: Context) -> Sample:
    """The pending sample of one more agent of the team."""
    text = render(prompt, ctx.tokenizer, template=chats(prompt, ctx), where=role, kwargs=kwargs(ctx))
    made = sibling(issued, number, encode(ctx.tokenizer, text))
    made.role, made.prompt = role, prompt
    return made


def ask(role: str, issued: Sample, texts: Sequence[str], ctx: Context) -> str | list[dict[str, str]]:
    """What an agent that reads others is asked: messages where the problem is such, else a text."""
    chat = chats(issued.prompt, ctx)
    problem = issued.prompt if isinstance(issued.prompt, str) else str(issued.prompt[-1]["content"])
    asked = shown(CHAT if chat else SHORT, role, problem, texts)
    return asked if isinstance(issued.prompt, str) else [*issued.prompt[:-1], {"role": "user", "content": asked}]


def shown(words: Words, role: str, problem: str, texts: Sequence[str]) -> str:
    """A role's words with the problem and the others' texts in them.

    Example: shown(SHORT, "rewriter", "47+38=", ["570", "580"]) == "R47+38=/570/580="
    """
    solutions = "".join(words.solution.format(number=n, text=text) for n, text in enumerate(texts, 1))
    return str(getattr(words, role)).format(problem=problem, solutions=solutions)


def answer_in(text: str) -> str:
    """The final answer of a text (boxed, or after "####" or "Answer:"), else the text itself."""
    return final_answer(text) or text.strip()


def choice(judgment: str, candidates: int) -> int | None:
    """The candidate that the last number names, from 0; None where it names none. "Judgment: 2" names 1."""
    numbers = re.findall(r"\d+", judgment)
    chosen = int(numbers[-1]) - 1 if numbers else -1
    return chosen if 0 <= chosen < candidates else None


def chats(prompt: str | list[dict[str, str]], ctx: Context) -> bool:
    """Whether prompts go through the chat template."""
    return ctx.config.data.apply_chat_template or not isinstance(prompt, str)


def kwargs(ctx: Context) -> dict[str, object]:
    return dict(ctx.config.data.apply_chat_template_kwargs)

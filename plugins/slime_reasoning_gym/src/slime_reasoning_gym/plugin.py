"""The plugin `reasoning_gym`: a task of the run is a task of reasoning_gym by name.

    slime run --plugin reasoning_gym --tasks:0.5,gsm_symbolic:0.5 --hf-checkpoint MODEL

In an evaluation the same name is the task's held-out set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click
from pydantic import BaseModel

from slime_core import ConfigError, Context, Reward, hookimpl
from slime_core.config.problems import KeyPath, Problem, conflict, raise_all
from slime_core.config.schema import Config
from slime_core.config.sections.data import DataTask
from slime_core.evaluation.questions import ANSWER
from slime_core.notices import notice
from slime_core.types import Batch, Group, Sample, StepReport
from slime_reasoning_gym.answers import answer_in
from slime_reasoning_gym.curriculum import Curriculum
from slime_reasoning_gym.options import Options
from slime_reasoning_gym.rows import KEY, HeldoutRows, TrainingRows
from slime_reasoning_gym.tasks import TABLE, problems_of, task_of, unknown_task
from slime_reasoning_gym.workers import WorkerError, Workers

slime_api = 1
WORKERS = Workers()
CURRICULUM = Curriculum()


@hookimpl
def slime_options() -> type[BaseModel]:
    """The model of `[plugin.reasoning_gym]`."""
    return Options


@hookimpl
def slime_recipes() -> Mapping[str, Path]:
    """`default` trains a pretrained model by flags; `smollm2` does on one GPU, with a held-out curve."""
    folder = Path(__file__).parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


@hookimpl
def slime_command() -> click.Group:
    """`slime reasoning_gym tasks`."""
    return command


@click.group("reasoning_gym", epilog="Example: slime reasoning_gym tasks")
def command() -> None:
    """The tasks of reasoning_gym."""


@command.command("tasks", epilog="Example: slime reasoning_gym tasks chain_sum")
def list_tasks() -> None:
    """List every task with the highest level of its curriculum."""
    for name, top in WORKERS.describe()["levels"].items():
        click.echo(f"{name:32}" + ("" if top is None else f"levels 0-{top}").rstrip())
    WORKERS.close()


@hookimpl
def slime_config_rules(config: Config) -> list[Problem]:
    """What is wrong with the tasks, all of them at once, and what would hide success from a curriculum."""
    options = Options.model_validate(config.plugin.get(KEY, {}))
    named: list[tuple[KeyPath, DataTask]] = [
        (("data", "tasks", number), task) for number, task in enumerate(config.data.tasks)
    ]
    named += [(("eval", "eval_tasks", number), task) for number, task in enumerate(config.eval.eval_tasks)]
    problems = [
        problem
        for keys, task in named
        if not task.prompt_data and task.plugin in ("", KEY)
        for problem in problems_of(task_of(task.name, options, WORKERS), options, WORKERS, keys)
    ]
    levels = WORKERS.describe()["levels"] if options.parameters else ()
    problems += [unknown_task(name, WORKERS, (*TABLE, name)) for name in options.parameters if name not in levels]
    if options.curriculum and config.rollout.dynamic_sampling_filter_path:
        problems.append(
            conflict(
                "curriculum = true with dynamic_sampling_filter_path",
                ["plugin.reasoning_gym.curriculum", "rollout.dynamic_sampling_filter_path"],
                why="groups that are all right or all wrong are dropped, and success is measured without them",
                fix="remove one of them",
            )
        )
    return problems


@hookimpl
def slime_prompts(task: str, ctx: Context) -> TrainingRows | HeldoutRows:
    """The rows of a task: endless ones in training, its held-out set in an evaluation."""
    options: Options = ctx.options
    if task == "default":
        fix = "--tasks chain_sum:0.5,gsm_symbolic:0.5   (all tasks: slime reasoning_gym tasks)"
        raise ConfigError("no task of reasoning_gym is named", code="CFG04", where="data.tasks", fix=fix)
    source = task_of(task, options, WORKERS)
    raise_all(list(problems_of(source, options, WORKERS, ("data", "tasks"))))
    if ctx.evaluation:
        return HeldoutRows(source, options, ctx, WORKERS)
    levels = CURRICULUM.open(ctx.stage, task, options.start_level, source.top or 0) if source.follows else None
    return TrainingRows(source, options, ctx, WORKERS, levels)


@hookimpl
def slime_sample_done(sample: Sample, ctx: Context) -> None:
    """Note the answer, which votes in an evaluation, and for the curriculum the level."""
    if KEY in sample.metadata:
        sample.metadata[ANSWER] = answer_in(sample.response, ctx.options.answer)
        sample.train_metadata[KEY] = {"level": sample.metadata[KEY]["level"]}


@hookimpl
async def slime_reward(group: Group, ctx: Context) -> list[Reward]:
    """The task's own score of each answer, 0 without one; ``format`` says whether there is an answer."""
    return list(await asyncio.gather(*(asyncio.to_thread(score, sample, ctx) for sample in group.samples)))


def score(sample: Sample, ctx: Context) -> Reward:
    """One sample's reward; a failed candidate where it makes the scorer raise.

    A scorer that raises for the task's own answer too, is late or ends its process is an infrastructure error.
    """
    facts, answer = sample.metadata.get(KEY), answer_in(sample.response, ctx.options.answer)
    if facts is None:
        return Reward(value=0.0, kind="infra_error", reason="the row is none of reasoning_gym's: its metadata says so")
    address = {name: value for name, value in facts.items() if name != "question"}
    terms = {"format": float(answer is not None)}
    if facts["level"] is not None and not ctx.config.reward.reward_weights:
        terms[f"level/{sample.task}"] = float(facts["level"])
    if answer is None:
        return Reward(value=0.0, terms={"score": 0.0, **terms})
    try:
        value = WORKERS.score(answer, ctx.options.score_seconds, **address)
    except WorkerError as error:
        kind: Literal["failed", "infra_error"] = "failed" if error.by_answer else "infra_error"
        reason = f"the scorer of {sample.task}: {error}"
        return Reward(value=0.0, kind=kind, reason=reason, terms={"score": 0.0, **terms})
    return Reward(value=value, terms={"score": value, **terms})


@hookimpl
def slime_batch(batch: Batch, ctx: Context) -> None:
    """Note the success of the step's groups, each by its mean reward."""
    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(batch.group.tolist()):
        groups.setdefault(group, []).append(sample)
    for members in groups.values():
        levels = CURRICULUM.levels.get((batch.stage, batch.tasks[members[0]]))
        if levels and batch.train_metadata[members[0]].get(KEY, {}).get("level") == levels.current:
            levels.rewards.append(float(batch.reward[members].mean()))


@hookimpl
def slime_step_done(report: StepReport, ctx: Context) -> None:
    """Move the levels of rows to come."""
    for (stage, task), levels in CURRICULUM.levels.items():
        success = levels.move(ctx.options) if stage == report.stage else None
        if success is not None:
            text = f"{task}: level {levels.current} from row {levels.next_row} on, success {success:.2f}"
            notice((KEY, stage, task, levels.next_row), text)


@hookimpl
def slime_state() -> Curriculum:
    """The levels of the curricula."""
    return CURRICULUM


@hookimpl
def slime_run_done(ctx: Context) -> None:
    """End the workers, and forget the run's levels."""
    WORKERS.close()
    CURRICULUM.clear()

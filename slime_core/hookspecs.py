"""Every hook a plugin may implement, each with a complete plugin in its docstring.

    import slime_core

    @slime_core.hookimpl
    def slime_reward(group, ctx):
        return [float(s.response.strip() == str(s.label)) for s in group.samples]

An implementation names the arguments it wants, in any order, and may leave out the rest. Kinds:

    owner     one provider a task: function by path > the task's choice > owning plugin > other plugin > core
    vote      all are called, any Drop wins           event    all are called, nothing is returned
    by name   registers things the config names       declare  read once at start
    claim     called in turn, None declines

pluggy marks implementations; `slime_core.plugins` checks and calls them, because a hook may be async, has a deadline,
and is chosen by its task.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import click
    from pydantic import BaseModel

    from slime_core.backends import ClusterBackend, EngineBackend, TrainerBackend
    from slime_core.config.problems import Problem
    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.protocols import Check, Estimator, Loss, PromptSource, Sink, SpanObserver
    from slime_core.types import Batch, Drop, Group, Message, Prompt, Reward, Sample, SamplingParams, StepReport

API_VERSION = 1
"""A plugin module may say ``slime_api = 1``, the hook API it was written for."""

GROUP = "slime.plugins"
"""The entry-point group of plugins."""

hookspec = pluggy.HookspecMarker("slime")
hookimpl = pluggy.HookimplMarker("slime")

OWN_PROCESS = "slime_own_process"
Fn = TypeVar("Fn", bound="Callable[..., Any]")


def own_process(fn: Fn) -> Fn:
    """A reward (the hook `slime_reward`, or a function of `slime_reward_types`) that runs in a process of its own.

    Example:
        @slime_core.hookimpl
        @own_process
        def slime_reward(group, ctx): ...
    """
    setattr(fn, OWN_PROCESS, True)
    return fn


@dataclass(slots=True, frozen=True, kw_only=True)
class HookInfo:
    """One row of `slime plugins hooks`."""

    kind: Literal["owner", "vote", "event", "by name", "declare", "claim"]
    may_await: bool = False
    replaces: tuple[str, ...] = ()  # THUDM/slime's flags that this hook stands for


HOOKS: dict[str, HookInfo] = {
    "slime_options": HookInfo(kind="declare", replaces=("custom-config-path",)),
    "slime_recipes": HookInfo(kind="declare"),
    "slime_checks": HookInfo(kind="declare"),
    "slime_command": HookInfo(kind="declare"),
    "slime_prompts": HookInfo(kind="owner", replaces=("data-source-path",)),
    "slime_messages": HookInfo(kind="owner"),
    "slime_rollout": HookInfo(kind="owner", may_await=True, replaces=("rollout-function-path", "eval-function-path")),
    "slime_sampling": HookInfo(kind="owner"),
    "slime_generate": HookInfo(kind="owner", may_await=True, replaces=("custom-generate-function-path",)),
    "slime_sample_done": HookInfo(kind="event", may_await=True, replaces=("rollout-sample-hook-path",)),
    "slime_reward": HookInfo(
        kind="owner", may_await=True, replaces=("custom-rm-path", "group-rm", "custom-reward-post-process-path")
    ),
    "slime_reward_types": HookInfo(kind="by name", replaces=("rm-type",)),
    "slime_filter": HookInfo(
        kind="vote",
        may_await=True,
        replaces=("dynamic-sampling-filter-path", "rollout-sample-filter-path", "buffer-filter-path"),
    ),
    "slime_advantage": HookInfo(kind="by name", replaces=("custom-advantage-function-path",)),
    "slime_loss": HookInfo(
        kind="by name",
        replaces=("custom-loss-function-path", "custom-tis-function-path", "custom-pg-loss-reducer-function-path"),
    ),
    "slime_batch": HookInfo(
        kind="event", replaces=("rollout-data-postprocess-path", "custom-convert-samples-to-train-data-path")
    ),
    "slime_model_bridge": HookInfo(kind="claim", replaces=("custom-model-provider-path",)),
    "slime_megatron_init": HookInfo(kind="event", replaces=("custom-megatron-init-path",)),
    "slime_megatron_before_log_prob": HookInfo(kind="event", replaces=("custom-megatron-before-log-prob-hook-path",)),
    "slime_megatron_before_train_step": HookInfo(
        kind="event", replaces=("custom-megatron-before-train-step-hook-path",)
    ),
    "slime_state": HookInfo(kind="declare"),
    "slime_sinks": HookInfo(kind="declare"),
    "slime_spans": HookInfo(kind="declare"),
    "slime_step_done": HookInfo(
        kind="event",
        replaces=(
            "custom-rollout-log-function-path",
            "custom-eval-rollout-log-function-path",
            "rollout-all-samples-process-path",
        ),
    ),
    "slime_run_done": HookInfo(kind="event", may_await=True),
    "slime_engine": HookInfo(kind="by name"),
    "slime_trainer": HookInfo(kind="by name"),
    "slime_cluster": HookInfo(kind="by name"),
    "slime_config_rules": HookInfo(kind="declare"),
}


def signature_of(hook: str) -> str:
    """``slime_reward(group, ctx)``."""
    return f"{hook}({', '.join(inspect.signature(globals()[hook]).parameters)})"


@hookspec
def slime_options() -> type[BaseModel]:  # type: ignore[empty-body]
    """Return the pydantic model of ``[plugin.NAME]``; hooks find it, filled, in ``ctx.options``.

    import pydantic

    import slime_core

    class Options(pydantic.BaseModel, extra="forbid", frozen=True):
        digits: int = 2

    @slime_core.hookimpl
    def slime_options():
        return Options
    """


@hookspec
def slime_recipes() -> Mapping[str, Path]:  # type: ignore[empty-body]
    """Return recipe names and their TOML files; ``default`` is what `slime run --plugin NAME` runs.

    from pathlib import Path

    import slime_core

    @slime_core.hookimpl
    def slime_recipes():
        return {"default": Path(__file__).parent / "recipes" / "default.toml"}
    """


@hookspec
def slime_checks() -> list[Check]:  # type: ignore[empty-body]
    """Return rows of `slime doctor`.

    import shutil

    import slime_core
    from slime_core import Check, CheckResult

    def compiler():
        path = shutil.which("gcc")
        return CheckResult(status="ok" if path else "warn", found=path or "no gcc", fix="apt-get install gcc")

    @slime_core.hookimpl
    def slime_checks():
        return [Check(name="compiler", run=compiler)]
    """


@hookspec
def slime_command() -> click.Group:  # type: ignore[empty-body]
    """Return a click group, reached as `slime NAME ...`.

    import click

    import slime_core

    @click.group()
    def tool(): ...

    @tool.command(epilog="Example: slime mine greet")
    def greet():
        click.echo("hello")

    @slime_core.hookimpl
    def slime_command():
        return tool
    """


@hookspec
def slime_prompts(task: str, ctx: Context) -> PromptSource:  # type: ignore[empty-body]
    """Return the rows of a task, by number; order, epochs and resume are the core's.

    import slime_core
    from slime_core import Prompt

    class Squares:
        def __len__(self): return 100
        def at(self, position):
            return Prompt(id="", position=position, prompt=f"{position}^2=", label=str(position**2))
        async def prepare(self, positions): ...  # optional: make rows that take long, before `at` of these positions
        def state(self): return {"version": 1}

    @slime_core.hookimpl
    def slime_prompts(task, ctx):
        return Squares()
    """


@hookspec
def slime_messages(  # type: ignore[empty-body]
    messages: list[Message], tools: list[Any] | None, metadata: dict[str, Any], task: str, ctx: Context
) -> tuple[list[Message], list[Any] | None]:
    """Return the messages, and the definitions of tools, that the chat template renders for a row.

    import slime_core

    @slime_core.hookimpl
    def slime_messages(messages, tools):
        return [{"role": "system", "content": "Think step by step."}, *messages], tools
    """


@hookspec
def slime_rollout(groups: list[Group], ctx: Context) -> list[Group]:  # type: ignore[empty-body]
    """Replace generation, reward and filter of a whole step; may be async.

    import slime_core
    from slime_core import Status

    @slime_core.hookimpl
    def slime_rollout(groups, ctx):              # supervised: the label is the response
        for group in groups:
            for s in group.samples:
                ids = ctx.tokenizer.encode(s.label, add_special_tokens=False)
                s.append_response(ids, log_probs=[0.0] * len(ids))
                s.status, s.reward = Status.COMPLETED, 0.0
        return groups
    """


@hookspec
def slime_sampling(prompt: Prompt, ctx: Context) -> SamplingParams:  # type: ignore[empty-body]
    """Return the sampling parameters of one prompt; ``ctx.sampling`` holds the config's.

    import dataclasses

    import slime_core

    @slime_core.hookimpl
    def slime_sampling(prompt, ctx):
        return dataclasses.replace(ctx.sampling, stop=("\\n",))
    """


@hookspec
def slime_generate(group: Group, ctx: Context) -> Group:  # type: ignore[empty-body]
    """Fill a group's pending samples, in any number of turns; may be async. No reward belongs here.

    import asyncio

    import slime_core

    @slime_core.hookimpl
    async def slime_generate(group, ctx):
        await asyncio.gather(*(ctx.generate(s) for s in group.samples))
        return group
    """


@hookspec
def slime_sample_done(sample: Sample, ctx: Context) -> None:
    """Look at, or annotate, a generated sample before its reward; may be async.

    import slime_core

    @slime_core.hookimpl
    def slime_sample_done(sample, ctx):
        sample.metadata["words"] = len(sample.response.split())
    """


@hookspec
def slime_reward(group: Group, ctx: Context) -> list[Reward]:  # type: ignore[empty-body]
    """Return one Reward (or plain number) a sample, in order; may be async.

    import slime_core

    @slime_core.hookimpl
    def slime_reward(group, ctx):
        return [float(s.response == s.label) for s in group.samples]
    """


@hookspec
def slime_reward_types() -> Mapping[str, Callable[..., Any]]:  # type: ignore[empty-body]
    """Return reward functions by `rm_type` name: ``fn(sample, ctx) -> float | Reward``, sync or async.

    import slime_core

    @slime_core.hookimpl
    def slime_reward_types():
        return {"exact": lambda sample, ctx: float(sample.response == sample.label)}
    """


@hookspec
def slime_filter(group: Group, ctx: Context) -> Drop | None:
    """Return a Drop with a reason, or None to keep the group; any Drop wins; may be async.

    import slime_core
    from slime_core import Drop

    @slime_core.hookimpl
    def slime_filter(group, ctx):
        rewards = {s.reward for s in group.samples}
        return Drop(reason="zero_std") if len(rewards) == 1 else None
    """


@hookspec
def slime_advantage() -> list[Estimator]:  # type: ignore[empty-body]
    """Return advantage estimators that `advantage_estimator` may name; the core adds KL, distillation and whitening.

    import numpy as np

    import slime_core
    from slime_core import Estimator

    def centred(batch, train):
        _, group = np.unique(batch.group, return_inverse=True)
        means = np.bincount(group, batch.reward) / np.bincount(group)
        per_sample = batch.reward - means[group]
        return {"advantages": per_sample[batch.sample_of_token()].astype("float32")}

    @slime_core.hookimpl
    def slime_advantage():
        return [Estimator(name="centred", fn=centred)]
    """


@hookspec
def slime_loss() -> list[Loss]:  # type: ignore[empty-body]
    """Return losses that `loss_type` may name: a value a response token; the core weights and sums.

    import slime_core
    from slime_core import Loss

    def reinforce(log_probs, entropy, columns, train):
        return -columns["advantages"] * log_probs, {}

    @slime_core.hookimpl
    def slime_loss():
        return [Loss(name="reinforce", fn=reinforce, columns=("advantages",))]
    """


@hookspec
def slime_batch(batch: Batch, ctx: Context) -> None:
    """Look at, or edit, the step's columns after the advantages and before packing.

    import slime_core

    @slime_core.hookimpl
    def slime_batch(batch, ctx):
        batch.columns["advantages"].clip(-5, 5, out=batch.columns["advantages"])
    """


@hookspec
def slime_model_bridge(hf_config: Any) -> Any:
    """Return a `slime_convert.bridge.Bridge` for a Hugging Face config, or None to decline.

    import slime_core

    @slime_core.hookimpl
    def slime_model_bridge(hf_config):
        from slime_models.families import BRIDGES

        return BRIDGES["qwen3"] if hf_config.model_type == "mine" else None
    """


@hookspec
def slime_megatron_init(args: Any, ctx: Context) -> None:
    """Run in each Megatron rank when parallel state is up.

    import slime_core

    @slime_core.hookimpl
    def slime_megatron_init(args, ctx):
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
    """


@hookspec
def slime_megatron_before_log_prob(model: Any, role: str, ctx: Context) -> None:
    """Run in each Megatron rank before every forward-only pass.

    import slime_core

    @slime_core.hookimpl
    def slime_megatron_before_log_prob(model, role, ctx):
        model[0].eval()
    """


@hookspec
def slime_megatron_before_train_step(model: Any, optimizer: Any, step: int, ctx: Context) -> None:
    """Run in each Megatron rank after gradients are zeroed and before the step's first forward pass; a critic's too.

    import slime_core

    @slime_core.hookimpl
    def slime_megatron_before_train_step(model, optimizer, step, ctx):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if step == 0 else 1.0
    """


@hookspec
def slime_state() -> Any:
    """Return an object with ``state() -> dict`` and ``load(dict)``, saved in every checkpoint (JSON).

    import slime_core

    class Curriculum:
        level = 1
        def state(self): return {"level": self.level}
        def load(self, state): self.level = state["level"]

    curriculum = Curriculum()

    @slime_core.hookimpl
    def slime_state():
        return curriculum
    """


@hookspec
def slime_sinks(ctx: Context) -> list[Sink]:  # type: ignore[empty-body]
    """Return trackers that receive every StepReport.

    import slime_core

    class Rewards:
        def start(self, run_dir, config): self.file = open(run_dir / "rewards.txt", "a")
        def write(self, report): print(report.version, report.metrics.get("reward/mean"), file=self.file)
        def close(self): self.file.close()

    @slime_core.hookimpl
    def slime_sinks(ctx):
        return [Rewards()]
    """


@hookspec
def slime_spans(ctx: Context) -> list[SpanObserver]:  # type: ignore[empty-body]
    """Return observers of what takes time: requests to the engine, rewards and the parts of a step.

    import slime_core

    class Slow:
        def begin(self, span): pass
        def end(self, span):
            if span.seconds > 60:
                print(span.name, span.facts, span.seconds)

    @slime_core.hookimpl
    def slime_spans(ctx):
        return [Slow()]
    """


@hookspec
def slime_step_done(report: StepReport, ctx: Context) -> None:
    """Run after every finished step.

    import slime_core

    @slime_core.hookimpl
    def slime_step_done(report, ctx):
        print(report.version, report.metrics["reward/mean"])
    """


@hookspec
def slime_run_done(ctx: Context) -> None:
    """End what the plugin has started for a run or an evaluation, however that ended; may be async.

    from concurrent.futures import ThreadPoolExecutor

    import slime_core

    judges = ThreadPoolExecutor(4)

    @slime_core.hookimpl
    def slime_run_done(ctx):
        judges.shutdown()
    """


@hookspec
def slime_engine() -> list[EngineBackend]:  # type: ignore[empty-body]
    """Return engines that `rollout_engine` may name; `ENGINE_CHECKS` of `slime_core.testing.contracts` check one.

    from contextlib import asynccontextmanager

    import slime_core
    from slime_core.backends import EngineBackend, ServedEngines
    from slime_core.testing.fakes import FakeEngine

    @asynccontextmanager
    async def serve(start):
        yield ServedEngines(engine=FakeEngine())

    @slime_core.hookimpl
    def slime_engine():
        return [EngineBackend(name="mine", start=serve)]
    """


@hookspec
def slime_trainer() -> list[TrainerBackend]:  # type: ignore[empty-body]
    """Return trainers that `train_backend` may name; `TRAINER_CHECKS` of `slime_core.testing.contracts` check one.

    import slime_core
    from slime_core.backends import TrainerBackend

    def trainer():
        from slime_core.trainers.fsdp import FsdpTrainer

        return FsdpTrainer                       # or a class of yours with its methods

    @slime_core.hookimpl
    def slime_trainer():
        return [TrainerBackend(name="mine", trainer=trainer)]
    """


@hookspec
def slime_cluster() -> list[ClusterBackend]:  # type: ignore[empty-body]
    """Return clusters that `cluster_backend` may name: where ranks and engines live.

    from contextlib import asynccontextmanager

    import slime_core
    from slime_core.backends import ClusterBackend

    @asynccontextmanager
    async def cluster(config, plugins, report):
        from slime_core.clusters.local import local_cluster

        async with local_cluster(config, plugins, report) as components:
            yield components                     # or what you start: engines, trainer ranks

    @slime_core.hookimpl
    def slime_cluster():
        return [ClusterBackend(name="mine", start=cluster)]
    """


@hookspec
def slime_config_rules(config: Config) -> list[Problem]:  # type: ignore[empty-body]
    """Return what cannot hold together in a stage's config; all problems of all plugins are named at once.

    import slime_core
    from slime_core.config.problems import conflict

    @slime_core.hookimpl
    def slime_config_rules(config):
        if config.rollout.n_samples_per_prompt < 2:
            return [conflict("geo compares answers", ["rollout.n_samples_per_prompt"], fix="--n-samples-per-prompt 4")]
        return []
    """

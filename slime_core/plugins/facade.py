"""Plugins as the core sees them: one typed method a hook, which routes, awaits and checks the result."""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from slime_core.algorithms.shared.terms import add_terms, needed_roles, role_columns
from slime_core.errors import PluginError, text_of
from slime_core.notices import notice
from slime_core.plugins.boundary import CORE, HookImpl, HookThreads, Stuck, call, call_now, wrong
from slime_core.plugins.isolated import INSIDE, Processes, group_question, sample_question
from slime_core.plugins.load import LoadedPlugin, fingerprint, load_options, sources
from slime_core.plugins.result_checks import checked_columns, expect, same_groups, to_reward, to_rewards
from slime_core.plugins.router import INFRA, HookRouter, made_elsewhere
from slime_core.protocols import Estimator, Loss, PromptSource, Role, Sink, Span, SpanObserver
from slime_core.types import Batch, Columns, Drop, Group, Message, Prompt, Reward, Sample, SamplingParams, StepReport

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.schema import Config
    from slime_core.config.sections.data import DataTask
    from slime_core.context import Context

GENERATE = "rollout.generate_timeout"
REWARD = "reward.reward_timeout"
CHECKS = "slime_core.testing.hook_checks"  # of a layer above this one, loaded by name where report.check_hooks is on


class Plugins:
    """The loaded plugins of one run. Built by :func:`slime_core.plugins.load_plugins`.

    Every method raises PluginError with plugin, distribution, hook, prompt and file:line where plugin code fails, and
    lets errors of the core (EngineError, DataError) through as they are.
    """

    def __init__(self, loaded: Mapping[str, LoadedPlugin], core: LoadedPlugin, functions: Any) -> None:
        self._loaded, self._core, self._functions = dict(loaded), core, functions
        self._threads = HookThreads()
        self._processes = Processes() if INSIDE not in os.environ else None
        self._checks: Any = None  # from the first use on
        self._observers: list[SpanObserver] = []
        self.last_call = ""
        """The plugin's hook that was called last, and for what; empty before the first."""
        self._router = HookRouter(self._loaded, core, functions)
        self._options: dict[tuple[str, int], BaseModel | None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The loaded plugins, in the order of the config."""
        return tuple(self._loaded)

    @property
    def loaded(self) -> tuple[LoadedPlugin, ...]:
        """The loaded plugins themselves, for hooks that a plugin calls (`slime_model_bridge`)."""
        return tuple(self._loaded.values())

    def options(self, name: str, config: Config | None = None) -> BaseModel | None:
        """The filled ``[plugin.NAME]`` model of a loaded plugin, of the run or of a stage's config."""
        if config is None:
            return self._loaded[name].options
        self._router.hold(config)
        key = (name, id(config))
        if key not in self._options:
            self._options[key] = load_options(self._loaded[name], config.plugin.get(name, {}))
        return self._options[key]

    async def generate(self, group: Group, ctx: Context) -> Group:
        """Fill a group's pending samples (`slime_generate`)."""
        impl, about = self._owner("slime_generate", group.prompt.task, ctx), f"prompt '{group.id}'"
        done = await self._call(impl, ctx, about, GENERATE, group=group)
        return expect(impl, done, Group, about, "return the group")

    async def reward(self, group: Group, ctx: Context) -> list[Reward]:
        """One Reward a sample, in order (`slime_reward`)."""
        self._functions.note_group(group, ctx.config)
        impl = self._owner("slime_reward", group.prompt.task, ctx)
        judge = self._judge_rest if self._may_come_judged(impl, group, ctx) else self._judge
        copy = self._hook_checks().copy(group, ctx) if ctx.config.report.check_hooks else None
        with self.span("reward", group=group.id, samples=[sample.id for sample in group.samples]):
            rewards = await judge(impl, group, ctx)
        if copy is not None:
            self._hook_checks().compare(impl, copy, rewards, await judge(impl, copy, ctx))
        if not ctx.evaluation:
            self._functions.note_judged(group, ctx.config)
        return rewards

    def _may_come_judged(self, impl: HookImpl, group: Group, ctx: Context) -> bool:
        """Whether samples may come with rewards that stay: from a rollout buffer, or a generate function by path.

        A reward function by path sees to it itself; with ``reward.group_rm`` all samples are judged, as in slime.
        """
        if made_elsewhere(ctx.config, ctx.evaluation):
            return True
        maker = self._router.owner("slime_generate", group.prompt.task, ctx.config, ctx.evaluation)
        by_path = maker is not None and maker.provider.source == "path"
        return by_path and impl.provider.source != "path" and not ctx.config.reward.group_rm

    async def _judge(self, impl: HookImpl, group: Group, ctx: Context) -> list[Reward]:
        about = f"prompt '{group.id}'"
        if impl.own_process and self._processes is not None:
            return await self._processes.ask(impl, group_question(group), ctx, about)
        value = await self._call(impl, ctx, about, REWARD, group=group)
        return to_rewards(impl, value, group, ctx.config.reward.reward_key)

    async def _judge_rest(self, impl: HookImpl, group: Group, ctx: Context) -> list[Reward]:
        """Rewards that samples came with, and the run's own for the others.

        A sample that did not come is an infrastructure error, and never a reward of 0.
        """
        rewards: list[Any] = [
            Reward(value=0.0, kind="infra_error", reason=str(sample.metadata[INFRA]))
            if INFRA in sample.metadata
            else sample.reward
            for sample in group.samples
        ]
        rest = [i for i, reward in enumerate(rewards) if reward is None]
        for i, reward in zip(rest, await self._judge(impl, group.part(rest), ctx) if rest else [], strict=True):
            rewards[i] = reward
        return to_rewards(impl, rewards, group, ctx.config.reward.reward_key)

    def pop_metrics(self) -> dict[str, float]:
        """Figures about hooks since the last call: ``reward/judged_twice`` groups, ``reward/unstable`` samples."""
        return self._checks.pop() if self._checks is not None else {}

    async def reward_by_type(self, name: str, sample: Sample, ctx: Context) -> Reward:
        """One sample's reward by a function that `slime_reward_types` registered.

        Raises:
            ConfigError: CFG04 an unknown name.
        """
        impl = self._router.named["slime_reward_types"].impl(name)
        about = f"sample '{sample.id}'"
        if impl.own_process and self._processes is not None:
            return (await self._processes.ask(impl, sample_question(name, sample), ctx, about))[0]
        value = await self._call(impl, ctx, about, REWARD, sample=sample)
        return to_reward(impl, value, about, ctx.config.reward.reward_key)

    async def filter(self, group: Group, ctx: Context) -> Drop | None:
        """The first Drop of any `slime_filter`, None to keep."""
        about = f"prompt '{group.id}'"
        for impl in self._router.listeners("slime_filter", ctx.config):
            verdict = await self._call(impl, ctx, about, REWARD, group=group)
            if verdict is not None:
                fix = "return slime_core.Drop(reason=...) to drop, None to keep"
                return expect(impl, verdict, Drop, about, fix)
        return None

    async def sample_done(self, sample: Sample, ctx: Context) -> None:
        """Call every `slime_sample_done` with a generated sample."""
        for impl in self._router.listeners("slime_sample_done", ctx.config):
            await self._call(impl, ctx, f"sample '{sample.id}'", REWARD, sample=sample)

    def sampling(self, prompt: Prompt, ctx: Context) -> SamplingParams:
        """The sampling parameters of one prompt (`slime_sampling`)."""
        impl, about = self._owner("slime_sampling", prompt.task, ctx), f"prompt '{prompt.id}'"
        value = self._call_now(impl, ctx, about, prompt=prompt)
        return expect(impl, value, SamplingParams, about, "return dataclasses.replace(ctx.sampling, ...)")

    def prompts(self, task: DataTask, ctx: Context) -> PromptSource | None:
        """The task's rows by `slime_prompts`; None where the config's data holds them."""
        impl = self._router.owner("slime_prompts", task.name, ctx.config, ctx.evaluation, chosen=task)
        if impl is None or (task.prompt_data and impl.provider.source == "plugin"):
            return None
        source = self._call_now(impl, ctx, f"task '{task.name}'", task=task.name)
        if not all(callable(getattr(source, name, None)) for name in ("at", "state")):
            fix = "return an object with __len__, at(position) and state()"
            raise wrong(impl, f"returned a {type(source).__name__}", f"task '{task.name}'", code="PLG57", fix=fix)
        return source  # type: ignore[no-any-return]

    def messages(
        self, messages: list[Message], tools: list[Any] | None, prompt: Prompt, ctx: Context
    ) -> tuple[list[Message], list[Any] | None]:
        """What the chat template renders for a row: the row's own messages and tools without `slime_messages`."""
        impl = self._router.owner("slime_messages", prompt.task, ctx.config, ctx.evaluation)
        if impl is None:
            return messages, tools
        about, task = f"the row {prompt.where}", prompt.task
        arguments = {"messages": messages, "tools": tools, "metadata": prompt.metadata, "task": task}
        value = self._call_now(impl, ctx, about, **arguments)
        pair = expect(impl, value, tuple, about, fix := "return messages, tools")
        if len(pair) != 2:
            raise wrong(impl, f"returned a tuple of {len(pair)}", about, code="PLG57", fix=fix)
        return pair

    def replaces_rollout(self, task: str, config: Config, *, evaluation: bool = False) -> bool:
        """Whether :meth:`rollout` makes this task's groups; core's own does for offline losses alone."""
        return self._router.replaces_rollout(task, config, evaluation)

    def takes_replies(self, task: str, config: Config) -> bool:
        """Whether an offline loss is the core's own affair: the data's replies become this task's responses."""
        return self._router.takes_replies(task, config)

    def ends_run(self, error: PluginError, config: Config) -> bool:
        """Whether a hook's error ends the run and not only its group: by ``on_plugin_error``, or it cannot end."""
        return config.rollout.on_plugin_error == "fail" or isinstance(error, Stuck)

    def generates_itself(self, task: str, config: Config) -> bool:
        """Whether a plugin or a function makes this task's samples (`slime_generate`), and not the core's one turn."""
        impl = self._router.owner("slime_generate", task, config, False)
        return impl is None or impl.provider.source != "core"

    async def rollout(self, groups: list[Group], ctx: Context) -> list[Group]:
        """Make the groups of a step whole (`slime_rollout`), each by its task's provider, in their order."""
        results: dict[str, Group] = {}
        by_impl: dict[int, tuple[HookImpl, list[Group]]] = {}
        for group in groups:
            impl = self._owner("slime_rollout", group.prompt.task, ctx)
            by_impl.setdefault(id(impl), (impl, []))[1].append(group)
        about = f"the rollout of version {ctx.version}"
        for impl, members in by_impl.values():
            done = await self._call(impl, ctx, about, GENERATE, groups=members)
            results.update(same_groups(impl, done, members, about))
        for group in results.values():
            self._functions.note_group(group, ctx.config)
        return [results[group.id] for group in groups]

    def evaluates_by_function(self, config: Config) -> bool:
        """Whether :meth:`evaluate` makes the evaluation sets of a config."""
        return self._functions.evaluation(config) is not None

    async def evaluate(
        self, sets: Mapping[str, list[Group]], ctx: Context
    ) -> tuple[dict[str, list[Group]], dict[str, float]]:
        """The judged groups of each set that the config's evaluation function returns, and its own metrics."""
        impl = self._functions.evaluation(ctx.config)
        about = f"the evaluation of version {ctx.version}"
        return await self._call(impl, ctx, about, GENERATE, sets=sets)  # type: ignore[no-any-return]

    def loss(self, name: str) -> Loss:
        """The loss of that name, with the run's functions by path (loss, correction, reducer) applied.

        Raises:
            ConfigError: CFG04 no plugin registers it.
        """
        loss, impl = self._router.loss(name), self._router.named["slime_loss"].impl(name)
        if impl.provider.source == CORE:
            return loss
        limit = self._router.limit

        def fn(*arguments: Any) -> tuple[Any, dict[str, Any]]:
            target = replace(impl, fn=partial(loss.fn, *arguments), takes=None)
            return call_now(target, {}, about="a micro-batch", limit=limit)  # type: ignore[no-any-return]

        return replace(loss, fn=fn)

    def needs(self, train: Any) -> frozenset[Role]:
        """The roles that the estimator, the shared terms and the loss of this [train] section read."""
        estimator, loss = self._router.estimator(train), self._router.loss(train.loss_type)
        parts: tuple[Estimator | Loss, ...] = (estimator, loss)
        more = [part.needs_when(train) for part in parts if part.needs_when is not None]
        more += [frozenset({"policy"})] if train.routing_replay == "policy" and not train.offline else []
        return frozenset().union(estimator.needs, loss.needs, needed_roles(estimator, train), *more)

    def advantage(self, batch: Batch, columns: dict[str, Columns], train: Any) -> Batch:
        """The batch with one column per role, ``advantages`` and perhaps ``returns``; the estimator runs once.

        KL, distillation and whitening of the [train] section are added to the advantages of every estimator.

        Raises:
            PluginError: PLG57 no ``advantages`` or a wrong type, PLG58 not finite, PLG59 another length.
        """
        scored = replace(batch, columns={**batch.columns, **role_columns(columns)})
        estimator = self._router.estimator(train)
        registered = self._router.named["slime_advantage"].impl(train.estimator)
        impl = replace(registered, fn=estimator.fn, takes=None)
        arguments, about = {"batch": scored, "train": train}, f"step {batch.version}"
        with self._watched(impl, arguments, about, self._router.check_hooks) or nullcontext():
            columns_returned = call_now(impl, arguments, about=about, limit=self._router.limit)
        columns_checked = checked_columns(impl, columns_returned, scored)
        columns_checked["advantages"] = add_terms(estimator, columns_returned["advantages"], scored, train)
        return replace(scored, columns={**scored.columns, **columns_checked})

    def note_group(self, group: Group, config: Config) -> None:
        """Show functions by path a group before its samples are scored, or one that this process did not generate."""
        self._functions.note_group(group, config)

    def note_judged(self, group: Group, config: Config) -> None:
        """Show functions by path a group that an earlier process ended: it was judged, unless rewards are missing."""
        self._functions.note_group(group, config)
        if all(sample.reward is not None for sample in group.samples):
            self._functions.note_judged(group, config)

    def batch(self, batch: Batch, ctx: Context) -> None:
        """Call every `slime_batch` with the step's columns."""
        self.notify("slime_batch", f"step {batch.version}", ctx, batch=batch)
        self._functions.finish_batch(batch, ctx)

    def notify(self, hook: str, about: str, ctx: Context, **arguments: Any) -> None:
        """Call every implementation of an event hook: `slime_batch`, `slime_step_done`, and those of a trainer."""
        for impl in self._router.listeners(hook, ctx.config):
            self._call_now(impl, ctx, about, **arguments)

    def sinks(self, ctx: Context) -> list[Sink]:
        """Every tracker of every plugin (`slime_sinks`)."""
        sinks: list[Sink] = []
        for impl in self._declared("slime_sinks"):
            sinks += expect(impl, self._call_now(impl, ctx, "the run"), list, "the run", "return a list")
        return sinks

    @property
    def observed(self) -> bool:
        """Whether a plugin observes the run's spans."""
        return bool(self._observers)

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[Span]:
        """Show the block to every observer (`slime_spans`); one that raises is not called again."""
        span = Span(name=name, start=time.monotonic(), facts=facts)
        self._observe("begin", span)
        try:
            yield span
        finally:
            span.seconds = time.monotonic() - span.start
            self._observe("end", span)

    def _observe(self, method: str, span: Span) -> None:
        for observer in self._observers:
            try:
                getattr(observer, method)(span)
            except Exception as error:
                self._observers = [other for other in self._observers if other is not observer]
                name = type(observer).__name__
                notice(("span", name, id(observer)), f"{name} failed; it sees no more spans: {text_of(error)}")

    def step_done(self, report: StepReport, ctx: Context) -> None:
        """Call every `slime_step_done` with a finished step."""
        self.notify("slime_step_done", f"step {report.version}", ctx, report=report)

    @asynccontextmanager
    async def running(self, ctx: Context) -> AsyncIterator[None]:
        """A run, or an evaluation alone; every `slime_run_done` is called when it is over, however it ended."""
        for impl in self._declared("slime_spans"):
            value = self._call_now(impl, ctx, "the run")
            self._observers = [*self._observers, *expect(impl, value, list, "the run", "return a list")]
        try:
            yield
        finally:
            self._observers = []
            for impl in self._router.listeners("slime_run_done", ctx.config):
                await self._call(impl, ctx, "the run", REWARD)

    def evaluated(self, sets: Mapping[str, list[Group]], metrics: Mapping[str, float], ctx: Context) -> None:
        """Call functions by path with an evaluation: its groups by set, and its metrics."""
        for impl in self._functions.evaluation_listeners(ctx.config):
            self._call_now(impl, ctx, f"the evaluation at version {ctx.version}", sets=sets, metrics=dict(metrics))

    def state(self) -> dict[str, Any]:
        """What plugins keep in a checkpoint (`slime_state`), by plugin name.

        Raises:
            PluginError: PLG64 with the plugin, where it has no ``state`` and ``load``, or ``state()`` raises or
                returns no dict.
        """
        states = {}
        for name, impl, holder in self._states():
            states[name] = self._call_holder(impl, holder.state, "its state()")
            if not isinstance(states[name], dict):
                message = f"returned a {type(states[name]).__name__}"
                raise wrong(impl, message, "its state()", code="PLG64", fix="return a dict")
        return states

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Hand :meth:`state` back; raises as it does."""
        for name, impl, holder in self._states():
            if name in state:
                self._call_holder(impl, partial(holder.load, state[name]), "load(state)")

    def _call_holder(self, impl: HookImpl, fn: Callable[[], Any], about: str) -> Any:
        try:
            return call_now(replace(impl, fn=fn, takes=None), {}, about=about, limit=self._router.limit)
        except PluginError as error:
            error.code = "PLG64" if error.code == "PLG56" else error.code
            raise

    def resolve(self, config: Config) -> None:
        """Route everything of a config (a stage's) before the start; raises as `HookRouter.resolve`."""
        self._router.resolve(config)

    def routing(self) -> list[dict[str, str]]:
        """Rows ``hook task provider``: which implementation serves which task, as `slime show` prints them."""
        return self._router.rows()

    def fingerprint(self) -> str:
        """A checksum of plugins, versions, routing and all their sources: equal in every process of a run."""
        return fingerprint(self._loaded, self.routing(), self._functions.files())

    def sources(self) -> dict[str, str]:
        """A checksum a plugin and a file of functions: where :meth:`fingerprint` moved, these say which."""
        return sources(self._loaded, self._functions.files())

    def close(self) -> None:
        """End the processes of rewards, and what functions by path need: the import finder and the loopback server."""
        if self._processes is not None:
            self._processes.close()
        self._functions.close()

    def _owner(self, hook: str, task: str, ctx: Context) -> HookImpl:
        impl = self._router.owner(hook, task, ctx.config, ctx.evaluation)
        if impl is None:
            raise PluginError(f"nothing implements {hook} for task '{task}'", fix="slime plugins hooks")
        return impl

    def _declared(self, hook: str) -> list[HookImpl]:
        return [plugin.hooks[hook] for plugin in (*self._loaded.values(), self._core) if hook in plugin.hooks]

    def _states(self) -> Iterator[tuple[str, HookImpl, Any]]:
        for impl in self._declared("slime_state"):
            holder = call_now(impl, {}, about="its state")
            if holder is None:
                continue
            missing = [name for name in ("state", "load") if not callable(getattr(holder, name, None))]
            if missing:
                message = f"returned a {type(holder).__name__} without {' and '.join(missing)}()"
                fix = "return an object with state() -> dict and load(dict)"
                raise wrong(impl, message, "its state", code="PLG64", fix=fix)
            yield impl.provider.name, impl, holder

    def _ctx_of(self, impl: HookImpl, ctx: Context) -> Context:
        owner = impl.provider
        return ctx.with_options(self.options(owner.name, ctx.config) if owner.source == "plugin" else None)

    def _call(self, impl: HookImpl, ctx: Context, about: str, key: str, **arguments: Any) -> Awaitable[Any]:
        arguments["ctx"] = self._ctx_of(impl, ctx)
        section, _, name = key.partition(".")
        limit = getattr(getattr(ctx.config, section), name)
        if impl.provider.source == CORE and impl.hook == "slime_reward":
            limit = math.inf  # the reward types that it calls have it
        watch = self._watched(impl, arguments, about, ctx.config.report.check_hooks)
        value = call(self._threads, impl, arguments, about=about, deadline=limit, key=key)
        return value if watch is None else _inside(watch, value)

    def _call_now(self, impl: HookImpl, ctx: Context, about: str, **arguments: Any) -> Any:
        arguments["ctx"] = self._ctx_of(impl, ctx)
        with self._watched(impl, arguments, about, ctx.config.report.check_hooks) or nullcontext():
            return call_now(impl, arguments, about=about, limit=ctx.config.rollout.generate_timeout, key=GENERATE)

    def _watched(
        self, impl: HookImpl, arguments: Mapping[str, Any], about: str, check: bool
    ) -> AbstractContextManager[None] | None:
        """Note the call; with ``report.check_hooks`` what watches the plugin's changes."""
        if impl.provider.source == CORE:
            return None
        self.last_call = f"{impl.provider.name}.{impl.hook} ({about}), {impl.provider}"
        return self._hook_checks().watch(impl, arguments, about) if check else None  # type: ignore[no-any-return]

    def _hook_checks(self) -> Any:
        """`HookChecks` of the run, where ``report.check_hooks`` is on."""
        if self._checks is None:
            self._checks = import_module(CHECKS).HookChecks()
        return self._checks


async def _inside(watch: AbstractContextManager[None], value: Awaitable[Any]) -> Any:
    with watch:
        return await value

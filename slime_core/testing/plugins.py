"""The contract suite of plugins: one finding a promise. Nothing but CPU and fakes is needed.

    from slime_core.testing.plugins import check_plugin

    def test_the_plugin_keeps_its_contract():
        assert [f for f in check_plugin("mine") if f.status == "fail"] == []

`slime plugins check NAME` runs the same in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slime_core.checkpoint.manifest import check_state
from slime_core.config.load import load_config, stages
from slime_core.config.paths import plugin_path
from slime_core.config.schema import Config
from slime_core.config.sections.data import DataTask
from slime_core.context import Context
from slime_core.errors import SlimeError
from slime_core.hookspecs import API_VERSION
from slime_core.notices import notices_to
from slime_core.plugins.assemble import connect, load_plugins, option_models
from slime_core.plugins.boundary import call_now
from slime_core.plugins.load import LoadedPlugin, load_plugin, options_model
from slime_core.protocols import Check
from slime_core.rollout.groups import pending_group, training_params
from slime_core.testing.fakes import CharTokenizer, ChatTokenizer, FakeEngine
from slime_core.types import Batch, Group, Prompt, Status

if TYPE_CHECKING:
    from slime_core.plugins.facade import Plugins

TORCH_FREE = "torch"
PROMISES = ("options", "recipes", "checks", "command", "prompts", "generation", "rewards", "filter", "names", "state")
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@dataclass(slots=True, frozen=True, kw_only=True)
class PluginFinding:
    """One check of a plugin: passed, failed, or not applicable.

    Example:
        Finding(name="rewards", status="fail", found="PLG59 mine.slime_reward returned 1 rewards, not 2", fix="...")
    """

    name: str
    status: Literal["ok", "warn", "fail", "skip"]
    found: str = ""
    where: str = ""
    fix: str = ""


class Broken(Exception):
    """A check that failed."""

    def __init__(self, message: str, fix: str = "", *, warn: bool = False) -> None:
        super().__init__(message)
        self.message, self.fix, self.warn = message, fix, warn


def check_plugin(name: str) -> list[PluginFinding]:
    """Load one plugin, by name or by the path of its file, and try every hook that it implements, against fakes.

    A promise is a line: import, options, recipes, checks, command, prompts, generation, rewards, filter, names,
    state. The first that fails at import ends the list. Hooks may be called with garbage on purpose: a wrong answer
    of a model is a low reward and never an exception. Around each call it is looked at what hooks change that is not
    theirs (`slime_core.testing.hook_checks`): arguments are an error, what is the process's a warning, as "manners".
    """
    had_torch = TORCH_FREE in sys.modules
    try:
        loaded = load_plugin(name)
    except SlimeError as error:
        return [_failed("import", error)]
    hooks = ", ".join(sorted(loaded.hooks)) or "no hook"
    findings = [PluginFinding(name="import", status="ok", found=hooks)]
    if not had_torch and TORCH_FREE in sys.modules:
        fix = "import torch inside the functions that need it"
        findings.append(PluginFinding(name="light import", status="warn", found="importing it imports torch", fix=fix))
    if getattr(loaded.target, "slime_api", None) is None:
        fix = f"write slime_api = {API_VERSION} in its module: a later slime then says what to change"
        findings.append(PluginFinding(name="API", status="warn", found="slime_api is not set", fix=fix))
    suite, notices = _Suite(name, loaded), list[str]()
    with notices_to(notices.append):
        findings += [_tried(promise, fn) for promise, fn in suite.promises()]
    return [*findings, *(PluginFinding(name="manners", status="warn", found=text) for text in notices)]


def _tried(promise: str, fn: Callable[[], str | None]) -> PluginFinding:
    try:
        text = fn()
        return PluginFinding(name=promise, status="skip" if text is None else "ok", found=text or "not implemented")
    except Broken as broken:
        return PluginFinding(
            name=promise, status="warn" if broken.warn else "fail", found=broken.message, fix=broken.fix
        )
    except SlimeError as error:
        return _failed(promise, error)
    except Exception as error:
        return PluginFinding(name=promise, status="fail", found=f"{type(error).__name__}: {error}")


def _failed(promise: str, error: SlimeError) -> PluginFinding:
    message = f"{error.code} {error.what}" + (f" ({error.why})" if error.why else "")
    return PluginFinding(name=promise, status="fail", found=message, where=error.where, fix=error.fix)


class _Suite:
    def __init__(self, entry: str, loaded: LoadedPlugin) -> None:
        self.entry, self.name, self.loaded = plugin_path(entry, Path.cwd()), loaded.provider.name, loaded
        self._setup: tuple[Plugins, Config] | None = None

    def promises(self) -> Iterator[tuple[str, Callable[[], str | None]]]:
        """Names and tries, in the order of a run."""
        return ((name, getattr(self, name)) for name in PROMISES)

    def options(self) -> str | None:
        """Options are a model whose defaults stand on their own."""
        model = options_model(self.loaded)
        if model is None:
            return None
        missing = [key for key, info in model.model_fields.items() if info.is_required()]
        if missing:
            raise Broken(f"required: {', '.join(missing)}", "give every option a default", warn=True)
        model()
        if not model.model_config.get("frozen") or model.model_config.get("extra") != "forbid":
            raise Broken(
                "the model is not frozen, or takes unknown keys",
                'class Options(BaseModel, extra="forbid", frozen=True)',
                warn=True,
            )
        return ", ".join(model.model_fields) or "none"

    def recipes(self) -> str | None:
        """Every recipe loads, names this plugin, and routes."""
        declared = self.loaded.hooks.get("slime_recipes")
        if declared is None:
            return None
        recipes = dict(call_now(declared, {}, about="its recipes"))
        for name, path in recipes.items():
            config = load_config(Path(path), models=option_models)
            if self.entry not in config.plugins:
                raise Broken(
                    f"recipe '{name}' does not name the plugin", f'write plugins = ["{self.entry}"] in {path}'
                )
            load_plugins(config).close()
        return ", ".join(recipes) or "none"

    def checks(self) -> str | None:
        """Rows of `slime doctor` are Checks."""
        declared = self.loaded.hooks.get("slime_checks")
        if declared is None:
            return None
        rows = call_now(declared, {}, about="its checks")
        if not isinstance(rows, list) or not all(isinstance(row, Check) for row in rows):
            raise Broken(f"slime_checks returned {rows!r}", "return a list of slime_core.Check")
        return ", ".join(row.name for row in rows) or "none"

    def command(self) -> str | None:
        """`slime NAME` is a click command."""
        declared = self.loaded.hooks.get("slime_command")
        if declared is None:
            return None
        import click

        command = call_now(declared, {}, about="its command")
        if not isinstance(command, click.Command):
            raise Broken(f"slime_command returned {command!r}", "return a click.Group")
        return f"slime {self.name}"

    def prompts(self) -> str | None:
        """Rows are Prompts, the same each time, and their source has a state that JSON holds."""
        if "slime_prompts" not in self.loaded.hooks:
            return None
        plugins, config = self._run()
        problems = []
        for task, evaluation in self._tasks(config):
            source: Any = plugins.prompts(task, self._ctx(config, evaluation=evaluation))
            if source is None:
                continue
            first, again = source.at(0), source.at(0)
            if not isinstance(first, Prompt):
                raise Broken(f"row 0 of task '{task.name}' is a {type(first).__name__}", "return slime_core.Prompt")
            if first != again:
                raise Broken(
                    f"row 0 of task '{task.name}' differs when called twice", "rows are a function of position"
                )
            check_state({self.name: source.state()}, f"the source of task '{task.name}'")
            problems.append(f"{task.name}: {_count(source)}")
        return "; ".join(problems) or None

    def generation(self) -> str | None:
        """A generated group keeps its rollouts, and every token has a log-prob or mask 0."""
        if "slime_generate" not in self.loaded.hooks:
            return None
        plugins, config = self._run()
        ctx = self._ctx(config)
        group = self._group(config, ctx)
        issued = list(group.rollouts)
        done = asyncio.run(self._generated(plugins, group, ctx))
        if sorted(done.rollouts) != sorted(issued):
            raise Broken(
                f"rollouts {sorted(done.rollouts)} came back, {sorted(issued)} were issued", "keep every rollout id"
            )
        for sample in done.samples:
            lengths = {len(x) for x in (sample.loss_mask, sample.rollout_log_probs) if x is not None}
            if lengths - {sample.response_length}:
                raise Broken(f"lengths {lengths} for {sample.response_length} tokens", "use sample.append_response")
        return f"{sum(s.response_length for s in done.samples)} tokens"

    def rewards(self) -> str | None:
        """Rewards of empty, random and labelled answers are finite, and the same on a second call."""
        if not {"slime_reward", "slime_reward_types"} & set(self.loaded.hooks):
            return None
        plugins, config = self._run()
        ctx = self._ctx(config)
        problems = []
        for text in ("", "\n<>{}", "ü 9e999", None):
            values = []
            for _ in range(2):
                group = self._group(config, ctx)
                if "slime_generate" in self.loaded.hooks:  # rewards may read what it leaves in metadata
                    group = asyncio.run(self._generated(plugins, group, ctx))
                for sample in group.samples:
                    sample.response = str(sample.label) if text is None else text
                    sample.append_response(ctx.tokenizer.encode(ascii(sample.response)), mask=0)
                    sample.status = Status.COMPLETED
                values.append([reward.value for reward in asyncio.run(self._rewards(plugins, group, ctx))])
            if values[0] != values[1]:
                raise Broken(
                    f"{values[0]} and {values[1]} for the same answers", "derive draws from the sample's id", warn=True
                )
            problems.append(f"{'label' if text is None else repr(text)} {values[0][0]:g}")
        return ", ".join(problems)

    async def _rewards(self, plugins: Plugins, group: Group, ctx: Context) -> list[Any]:
        if "slime_reward" in self.loaded.hooks:
            return await plugins.reward(group, ctx)
        declared = call_now(self.loaded.hooks["slime_reward_types"], {}, about="the run")
        first = next(iter(declared))
        return [await plugins.reward_by_type(first, sample, ctx) for sample in group.samples]

    def filter(self) -> str | None:
        """A verdict is a Drop or None."""
        if "slime_filter" not in self.loaded.hooks:
            return None
        plugins, config = self._run()
        ctx = self._ctx(config)
        group = self._group(config, ctx)
        for sample in group.samples:
            sample.reward = 0.0
        verdict = asyncio.run(plugins.filter(group, ctx))
        return "kept" if verdict is None else f"dropped: {verdict.reason}"

    def names(self) -> str | None:
        """Estimators answer one finite advantage a response token."""
        declared = self.loaded.hooks.get("slime_advantage")
        if declared is None:
            return None
        plugins, config = self._run()
        estimators = call_now(declared, {}, about="the run")
        for estimator in estimators:
            train = config.train.model_copy(update={"advantage_estimator": estimator.name, "loss_type": "policy_loss"})
            batch = _batch()
            scores = {role: _scores(role, len(batch.loss_mask)) for role in estimator.needs}
            plugins.advantage(batch, scores, train)
        return ", ".join(estimator.name for estimator in estimators)

    def state(self) -> str | None:
        """What goes into a checkpoint is JSON, and comes back equal."""
        if "slime_state" not in self.loaded.hooks:
            return None
        plugins, _ = self._run()
        check_state(plugins.state())
        state = json.loads(json.dumps(plugins.state()))
        plugins.load_state(state)
        if json.loads(json.dumps(plugins.state())) != state:
            raise Broken("the state differs after load(state())", "load everything that state() gives")
        return ", ".join(state.get(self.name, {})) or "empty"

    def _run(self) -> tuple[Plugins, Config]:
        """The plugin in its default recipe's last stage, or alone."""
        if self._setup is None:
            declared = self.loaded.hooks.get("slime_recipes")
            recipes = dict(call_now(declared, {}, about="its recipes")) if declared else {}
            if "default" in recipes:
                config = _watching(stages(load_config(Path(recipes["default"]), models=option_models))[-1])
                self._setup = load_plugins(config), config
            else:
                config = _watching(Config(plugins=(self.entry,)))
                self._setup = connect({self.name: load_plugin(self.entry)}, [config]), config
        return self._setup

    async def _generated(self, plugins: Plugins, group: Group, ctx: Context) -> Group:
        async with plugins.running(ctx):  # what the plugin started for it ends with it
            return await plugins.generate(group, ctx)

    def _tasks(self, config: Config) -> list[tuple[DataTask, bool]]:
        training = [(task, False) for task in config.data.tasks] or [(DataTask(name="default"), False)]
        return [*training, *((task, True) for task in config.eval.eval_tasks)]

    def _ctx(self, config: Config, *, evaluation: bool = False) -> Context:
        engine = FakeEngine(vocab_size=len(ALPHABET))
        engine.version = 0
        sampling = replace(training_params(config), max_new_tokens=4)
        speaks = ChatTokenizer if config.data.apply_chat_template else CharTokenizer
        return Context(
            config=config, engine=engine, tokenizer=speaks(ALPHABET), sampling=sampling, evaluation=evaluation
        )

    def _group(self, config: Config, ctx: Context) -> Group:
        """Two pending samples of the first row of the plugin's first task, or of an invented one."""
        task = self._tasks(config)[0][0]
        plugins, _ = self._run()
        source: Any = plugins.prompts(task, ctx) if "slime_prompts" in self.loaded.hooks else None
        row = source.at(0) if source is not None else Prompt(id="", prompt="1+1=", label="2")
        tokens = row.tokens or ctx.tokenizer.encode(ascii(str(row.prompt)))
        return pending_group(replace(row, id="check/0", task=task.name, position=0, tokens=tokens), config, count=2)


def _watching(config: Config) -> Config:
    return config.model_copy(update={"report": config.report.model_copy(update={"check_hooks": True})})


def _count(source: Any) -> str:
    try:
        return f"{len(source)} rows"
    except TypeError:
        return "endless"


def _batch() -> Batch:
    """Two groups of two samples with 1, 2, 1 and 3 response tokens."""
    lengths = np.array([1, 2, 1, 3])
    return Batch(
        version=0,
        sample_ids=[f"check/{i // 2}-{i % 2}" for i in range(4)],
        tasks=["default"] * 4,
        group=np.array([0, 0, 1, 1]),
        rollout=np.arange(4),
        reward=np.array([1.0, 0.0, 1.0, 1.0]),
        tokens=np.ones(11, np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths + 1)]),
        loss_mask=np.ones(7, np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )


def _scores(role: str, count: int) -> dict[str, Any]:
    name = "values" if role == "values" else "log_probs"
    return {name: np.full(count, -0.5, np.float32)}


def main(arguments: list[str]) -> int:
    """``NAME FILE``: check a plugin and write its findings, as JSON, into a file (its own output goes elsewhere)."""
    name, out = arguments
    findings = check_plugin(name)
    Path(out).write_text(json.dumps([asdict(finding) for finding in findings]))
    return 4 if any(finding.status == "fail" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

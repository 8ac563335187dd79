"""Functions given by path, as hook implementations. Nothing is loaded for an empty key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.compat import evaluations, listeners, owners, rollouts, shapes
from slime_core.compat.modules import Modules, slime_modules
from slime_core.compat.sample import Sample
from slime_core.compat.session import CompatSession
from slime_core.hookspecs import OWN_PROCESS
from slime_core.plugins.backends import trainer_of
from slime_core.plugins.boundary import HookImpl, Provider, failure
from slime_core.plugins.load import hook_impl
from slime_core.plugins.locate import locate
from slime_core.protocols import Estimator, Loss

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.types import Batch, Group

Function = Callable[..., Any]
ALL_SAMPLES = "rollout_all_samples_process_path"
LATER = (  # keys whose functions want the samples of a step after it was scored
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_advantage_function_path",
    "rollout_data_postprocess_path",
    "custom_rollout_log_function_path",
    ALL_SAMPLES,
)
ESTIMATION = {
    "convert": "custom_convert_samples_to_train_data_path",
    "post_process": "custom_reward_post_process_path",
    "advantage": "custom_advantage_function_path",
}
LOSSES = {
    "loss": "custom_loss_function_path",
    "tis": "custom_tis_function_path",
    "reducer": "custom_pg_loss_reducer_function_path",
}

CORE_MAKES = "core_makes"
"""Attribute of a function or class that slime-compat serves: ``f(config)``, whether the core is asked in its place."""

ADAPTERS: dict[str, dict[str, Callable[[Function, CompatSession], Function]]] = {
    "slime_reward": {"reward.custom_rm_path": owners.reward},
    "slime_generate": {"rollout.custom_generate_function_path": owners.generate},
    "slime_rollout": {
        "rollout.rollout_function_path": rollouts.rollout,
        "eval.eval_function_path": rollouts.rollout,  # the last key of an owner hook is evaluation's
    },
    "slime_prompts": {"rollout.data_source_path": rollouts.prompts},
    "slime_filter": {
        "rollout.dynamic_sampling_filter_path": listeners.dynamic_filter,
        "rollout.rollout_sample_filter_path": listeners.sample_filter,
        "rollout.buffer_filter_path": listeners.buffer_filter,
    },
    "slime_sample_done": {"rollout.rollout_sample_hook_path": listeners.sample_hook},
    "slime_batch": {"train.rollout_data_postprocess_path": listeners.postprocess},
    "slime_step_done": {
        f"rollout.{ALL_SAMPLES}": listeners.all_samples,
        "report.custom_rollout_log_function_path": listeners.rollout_log,
    },
    "slime_run_done": {"rollout.run_done_path": lambda fn, session: lambda ctx: fn(ctx)},  # ctx by another name
    "slime_megatron_init": {"train.custom_megatron_init_path": listeners.megatron_init},
    "slime_megatron_before_log_prob": {
        "train.custom_megatron_before_log_prob_hook_path": listeners.megatron_log_prob,
    },
    "slime_megatron_before_train_step": {
        "train.custom_megatron_before_train_step_hook_path": listeners.megatron_train_step,
    },
}
"""Hook -> config key -> what makes the hook of a function with slime's signature."""


def source_file(fn: Function) -> Path | None:
    """The file that defines ``fn``; None if it has no file, such as a module frozen into Python."""
    file = inspect.getsourcefile(inspect.unwrap(fn))
    return Path(file) if file and Path(file).is_file() else None


class FunctionsByPath:
    """The functions of a run, by hook; where no key names one, nothing is added or replaced."""

    def __init__(self) -> None:
        self._session = CompatSession()
        self._modules: Modules | None = None
        self._located: dict[tuple[str, str], Function] = {}
        self._guards: dict[tuple[str, str], Function] = {}
        self._impls: dict[tuple[str, str], HookImpl] = {}
        self._files: set[Path] = set()
        self._configs: list[Config] = []
        self._by_train: dict[int, tuple[Any, Config]] = {}  # a section keeps its id while it is kept here

    def attach(self, plugins: Plugins) -> None:
        """Hand over the facade, for functions that compute a reward by name."""
        self._session.plugins = plugins

    def owner(self, hook: str, config: Config, evaluation: bool, path: str = "") -> HookImpl | None:
        """The function of an owner hook: at the ``path`` that a task names, else the run's."""
        self._note(config)
        keys = list(ADAPTERS.get(hook, ()))
        key = keys[-1 if evaluation else 0] if keys else ""
        path = path or _value(config, key)
        return self._impl(hook, key, path) if path and not self._core_makes(key, path, hook, config) else None

    def listeners(self, hook: str, config: Config) -> list[HookImpl]:
        """Functions for a vote or event hook, in order."""
        self._note(config)
        impls = []
        for key in ADAPTERS.get(hook, ()):
            value = _value(config, key)
            paths = value if isinstance(value, tuple) else (value,)
            impls += [self._impl(hook, key, path) for path in paths if path]
        return impls

    def evaluation_listeners(self, config: Config) -> list[HookImpl]:
        """Functions called after an evaluation with ``sets``, ``metrics``, ``ctx``."""
        key = "report.custom_eval_rollout_log_function_path"
        path = _value(config, key)
        if not path:
            return []
        fn = listeners.evaluation_log(self._locate(key, path), self._session)
        return [HookImpl(provider=self._provider(key, path), hook="slime_step_done", fn=fn, takes=None)]

    def evaluation(self, config: Config) -> HookImpl | None:
        """What makes all sets of an evaluation at once; None without such a function, or where it is a hook's."""
        key, hook = "eval.eval_function_path", "slime_rollout"
        path = _value(config, key)
        if not path or shapes.is_native(fn := self._locate(key, path, hook), hook):
            return None
        by_sets = evaluations.evaluation(fn, self._session)
        return HookImpl(provider=self._provider(key, path), hook=hook, fn=by_sets, takes=None)

    def estimator(self, inner: Estimator, train: Any) -> Estimator:
        """``inner``, or its replacement."""
        config = self._config_of(train)
        paths = {name: _named(config, key) for name, key in ESTIMATION.items()}
        if not any(paths.values()):
            return inner
        from slime_core.compat.estimation import estimator

        functions = {name: self._guarded(ESTIMATION[name], path) if path else None for name, path in paths.items()}
        return estimator(
            inner,
            config,
            self._session,
            self._session.alive,
            convert=functions["convert"],
            post_process=functions["post_process"],
            advantage=functions["advantage"],
        )

    def loss(self, inner: Loss) -> Loss:
        """``inner``, or the wrapper that any stage puts before it."""
        if not any(fn for config in self._configs for fn in self._losses(config.train).values()):
            return inner
        from slime_core.compat.losses import wrap

        return wrap(inner, self._session, self._config_of, self._losses)

    def note_group(self, group: Group, config: Config) -> None:
        """Note a group's samples as slime's, where a later function wants them, with what a hook adds to them."""
        if config.rollout.rollout_sample_hook_path or any(_named(config, key) for key in LATER):
            group.samples[:] = [Sample.of(sample) for sample in group.samples]
            self._session.alive.update({sample.id: sample for sample in group.samples})

    def note_judged(self, group: Group, config: Config) -> None:
        """Keep a group that was just judged until its step is done, where a function wants those that do not train."""
        if _named(config, ALL_SAMPLES):
            self._session.judged.append(list(group.samples))

    def finish_batch(self, batch: Batch, ctx: Context) -> None:
        """Note the step's samples, and add the columns that functions around the loss need."""
        alive = [sample for name in batch.sample_ids if (sample := self._session.alive.get(name))]
        self._session.step.clear()
        self._session.rewards = None
        self._session.step.update({sample.id: owners.whole(sample, ctx) for sample in alive})
        if any(_named(self._config_of(ctx.config.train), key) for key in LOSSES.values()):
            from slime_core.compat.losses import extra_columns

            extra_columns(batch, self._config_of(ctx.config.train))

    def check(self, key: str, path: str) -> Path | None:
        """Load the function at ``path`` as a run with that ``section.key`` would; return its file, if it has one.

        Raises:
            PluginError: PLG50, PLG51 it cannot be loaded, PLG53 its signature is not that of the key.
        """
        hook = next((hook for hook, keys in ADAPTERS.items() if key in keys), "")
        return source_file(self._locate(key, path, hook))

    def files(self) -> list[Path]:
        """Files of all functions that were loaded."""
        return sorted(self._files)

    def close(self) -> None:
        """Take the import finder and the servers away again."""
        self._session.close()
        self._session.step.clear()
        if self._modules is not None:
            self._modules.remove()
            self._modules = None

    def _note(self, config: Config) -> None:
        if not any(config_noted is config for config_noted in self._configs):
            self._configs.append(config)
            self._session.args(config)  # an unreadable custom_config_path shows at the start

    def _config_of(self, train: Any) -> Config:
        """The config of a stage's [train] section, which a trainer may have changed; one config a section."""
        if id(train) not in self._by_train:
            same = [config for config in self._configs if config.train is train]
            same = same or [config for config in self._configs if config.train == train]
            config = same[-1] if same else self._configs[-1].model_copy(update={"train": train})
            self._by_train[id(train)] = (train, config)
        return self._by_train[id(train)][1]

    def _losses(self, train: Any) -> Mapping[str, Function | None]:
        return {
            name: self._guarded(key, path, "slime_loss") if (path := str(getattr(train, key))) else None
            for name, key in LOSSES.items()
        }

    def _core_makes(self, key: str, path: str, hook: str, config: Config) -> bool:
        """Whether a function of slime's own stands for what the core does itself under this config."""
        makes = getattr(self._locate(key, path, hook), "__dict__", {}).get(CORE_MAKES)
        return makes is not None and bool(makes(config))

    def _locate(self, key: str, path: str, hook: str = "") -> Function:
        """The function at ``path``, checked against the signature that slime gives it, or the ``hook``'s own."""
        if (key, path) not in self._located:
            if self._modules is None:
                megatron = any(trainer_of(config).library.startswith("megatron") for config in self._configs)
                self._modules = slime_modules(megatron=megatron)
            fn: Function = locate(path, key)
            self._modules.check(key, path)
            self._check(fn, key, path, hook)
            self._located[key, path] = fn
            self._files |= {file} if (file := source_file(fn)) else set()
        return self._located[key, path]

    def _guarded(self, key: str, path: str, hook: str = "slime_advantage") -> Function:
        """A function of the training side, whose exceptions name the file and line in it."""
        if (key, path) not in self._guards:
            fn = self._locate(key, path)
            call = HookImpl(provider=self._provider(key, path), hook=hook, fn=fn, takes=None)

            def guarded(*args: Any, **kwargs: Any) -> Any:
                try:
                    return fn(*args, **kwargs)
                except (Exception, SystemExit) as error:
                    raise failure(call, error, "a step") from error

            self._guards[key, path] = guarded
        return self._guards[key, path]

    def _check(self, fn: Function, key: str, path: str, hook: str) -> None:
        name = key.rpartition(".")[2]
        if hook and shapes.is_native(fn, hook):
            return
        if name == "custom_rm_path" and shapes.is_plain(fn) and not shapes.takes(fn, "completions"):
            return
        others = ("def reward(sample)",) if name == "custom_rm_path" else ()
        shapes.check(fn, key, path, others)

    def _provider(self, key: str, path: str) -> Provider:
        fn = self._located[key, path]
        return Provider(name=key.rpartition(".")[2], origin=path, source="path", home=source_file(fn))

    def _impl(self, hook: str, key: str, path: str) -> HookImpl:
        if (hook, path) not in self._impls:
            fn = self._locate(key, path, hook)
            native = shapes.is_native(fn, hook)
            function = fn if native else ADAPTERS[hook][key](fn, self._session)
            if getattr(fn, OWN_PROCESS, False):
                setattr(function, OWN_PROCESS, True)
            self._impls[hook, path] = hook_impl(self._provider(key, path), hook, function)
        return self._impls[hook, path]


def _value(config: Config, key: str) -> Any:
    """The value of ``section.name``, empty for an empty key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name) if key else ""


def _named(config: Config, name: str) -> str:
    """The value of a key by its own name, whichever section holds it."""
    for section in ("train", "reward", "report", "rollout"):
        if hasattr(getattr(config, section), name):
            return str(getattr(getattr(config, section), name))
    return ""

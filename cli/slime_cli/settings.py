"""Settings of a command: the recipe, the loaded config and its plugins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime_cli.failure import CliSession
from slime_core.config.load import CommandLine, LoadedConfig, read, split, stages
from slime_core.config.problems import Problem, raise_all
from slime_core.errors import ConfigError
from slime_core.plugins import load_plugin, load_plugins, option_models, recipe_path
from slime_core.plugins.boundary import call_now, listed
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_core.backends import Plan
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.weights.folder import ModelFolder

OWN_DATA = ("prompt_data",)  # keys of data that a plugin's default recipe was not written for


@dataclass(slots=True, frozen=True, kw_only=True)
class Settings:
    """A loaded config and its plugins."""

    loaded: LoadedConfig
    plugins: Plugins

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.loaded.config


def load_settings(words: Sequence[str], session: CliSession) -> Settings:
    """Config and plugins of a command line; notices go to stderr.

    Raises:
        ConfigError: CFG01 to CFG11 and CFG15.
        PluginError: PLG50 to PLG55.
    """
    loaded = load_words(split(words), session)
    loaded.require_complete()
    return with_plugins(loaded)


def with_plugins(loaded: LoadedConfig) -> Settings:
    """A config with its plugins, whose rules it keeps.

    Raises:
        ConfigError: CFG01 to CFG11 and CFG15.
        PluginError: PLG50 to PLG57.
    """
    plugins = load_plugins(loaded.config)
    problems = [problem for stage in stages(loaded.config) for problem in plugin_problems(plugins, stage)]
    raise_all([loaded.origins.place(problem) for problem in problems])
    return Settings(loaded=loaded, plugins=plugins)


def plugin_problems(plugins: Plugins, config: Config) -> Iterator[Problem]:
    """What plugins say cannot hold together in a stage's config (`slime_config_rules`).

    Raises:
        PluginError: PLG56 a rule raised, PLG57 it returned something else.
    """
    for rules in (plugin.hooks.get("slime_config_rules") for plugin in plugins.loaded):
        if rules is not None:
            value = call_now(rules, {"config": config}, about="the config")
            yield from listed(rules, value, Problem, "the config", "slime_core.config.problems.Problem")


def load_words(
    words: CommandLine, session: CliSession, *, quiet: Collection[str] = (), data_keys: Collection[str] = OWN_DATA
) -> LoadedConfig:
    """The config of a split command line; notices go to stderr, but for those about the keys in ``quiet``.

    ``data_keys`` as :func:`find_recipe` has it.
    """
    loaded = read(find_recipe(words, data_keys), words, models=option_models)
    session.secrets = loaded.secrets
    for notice in loaded.notices:
        if not any(key in notice for key in quiet):
            say(notice)
    return loaded


def find_recipe(words: CommandLine, data_keys: Collection[str] = OWN_DATA) -> Path | None:
    """The recipe's file: a path, ``PLUGIN/NAME``, ``NAME`` of a named plugin, or a named plugin's default recipe.

    With a flag for one of ``data_keys``, data of the user's own, no default recipe is taken: it has other data.

    Raises:
        ConfigError: CFG05 there is no such recipe.
        PluginError: a named plugin does not load.
    """
    if words.recipe is None and any(word.name.rpartition(".")[2] in data_keys for word in words.overrides):
        return None
    if words.recipe is None:
        return next((path for name in words.plugins if (path := default_recipe(name)) is not None), None)
    path = Path(words.recipe).expanduser()
    if path.exists() or path.suffix == ".toml":
        return path
    plugin, slash, name = words.recipe.rpartition("/")
    if slash and "/" not in plugin and not plugin.startswith("."):
        return recipe_path(plugin, name)
    if words.plugins and not slash:
        return recipe_path(words.plugins[0], name)
    raise ConfigError(
        f"there is no recipe '{words.recipe}'",
        code="CFG05",
        where=str(path.absolute()),
        why=f"it is not a file (the current folder is {Path.cwd()}) and no plugin is named that could have it",
        fix="give a TOML file, or PLUGIN/RECIPE, or --plugin NAME for its default recipe",
    )


def default_recipe(plugin: str) -> Path | None:
    """A plugin's default recipe; None where it brings no recipes."""
    return recipe_path(plugin) if "slime_recipes" in load_plugin(plugin).hooks else None


def plans(settings: Settings, config: Config | None = None, folder: ModelFolder | None = None) -> dict[str, Plan]:
    """What the run's backends would do, by kind, everything about them checked; with ``folder`` completely.

    ``config`` has the machine settled; None settles it, where a backend has something to check.

    Raises:
        ConfigError, DataError, EngineError: as the backends say.
    """
    from slime_core.backends import Planning
    from slime_core.clusters.machine import resolve_machine
    from slime_core.notices import notices_to
    from slime_core.plugins.backends import cluster_of, engine_of, trainer_of

    stage = settings.config
    backends = {"trainer": trainer_of(stage), "cluster": cluster_of(stage), "servers": engine_of(stage)}
    planned = {kind: backend.plan for kind, backend in backends.items() if backend.plan is not None}
    if not planned:
        return {}
    with notices_to(lambda _: None):  # whoever runs it says what was chosen
        config = config or resolve_machine(stage)
    planning = Planning(
        config=config,
        origins=settings.loaded.origins,
        plugins=settings.plugins,
        folder=folder,
        complete=folder is not None,
    )
    answers = {kind: plan(planning) for kind, plan in planned.items()}
    return {kind: answer for kind, answer in answers.items() if answer is not None}

"""A run's whole config, frozen and strict. Key names are unique across the sections.

THUDM/slime's name is used wherever it has one. A key's text is what `slime config keys` prints.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from slime_core.config.sections import NAME, ResumeClass, Section, key
from slime_core.config.sections.cluster import ClusterSection
from slime_core.config.sections.data import DataSection
from slime_core.config.sections.evaluation import EvalSection
from slime_core.config.sections.report import ReportSection
from slime_core.config.sections.reward import RewardSection
from slime_core.config.sections.rollout import RolloutSection
from slime_core.config.sections.train import TrainSection

SCHEMA_VERSION = 1
FORMAT = ResumeClass("unsafe", "the format of the recipe itself")
SEED = ResumeClass("unsafe", "every draw derives from it")
PLUGINS = ResumeClass("unsafe", "plugins make rollouts and rewards")


class Config(Section, extra="allow"):
    """A whole run, resolved. Written to config.toml in the run directory.

    Further tables are those of backends, such as ``[sglang]``; :meth:`table` reads one.
    """

    __pydantic_extra__: dict[str, dict[str, Any]]

    schema_version: int = key(SCHEMA_VERSION, "Of the recipe format.", FORMAT)
    name: str = key("run", "The run directory is runs/NAME-N.", NAME, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    seed: int = key(0, "Every draw of the run derives from it.", SEED, ge=0, lt=2**63)
    plugins: tuple[str, ...] = key(
        (), "Plugins to load, in order: names, or paths of Python files. Flag: --plugin, repeatable.", PLUGINS
    )
    cluster: ClusterSection = ClusterSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    report: ReportSection = ReportSection()
    plugin: dict[str, dict[str, Any]] = Field({}, description="[plugin.NAME] tables, typed by each plugin.")
    stage: tuple[dict[str, Any], ...] = Field(
        (), description="[[stage]] tables: a name and overriding core keys; run in order, one version counter."
    )

    def table(self, name: str) -> dict[str, Any]:
        """The table ``[NAME]`` of a backend; empty where there is none."""
        return self.tables.get(name, {})

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The tables of backends, by name."""
        return self.__pydantic_extra__


SECTIONS = ("cluster", "data", "rollout", "train", "reward", "eval", "report")

"""The schema, seen as a flat table: section, type, bounds, default, meaning and resume class of each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.schema import SECTIONS, Config
from slime_core.config.sections import ResumeClass, fact
from slime_core.config.values import bounds, describe, unwrap


@dataclass(slots=True, frozen=True)
class ConfigKey:
    """One core key.

    Example:
        core_keys()["lr"].path == "train.lr"
    """

    name: str
    section: str  # empty at the top
    info: FieldInfo

    @property
    def path(self) -> str:
        """Section and name, dotted."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def kind(self) -> str:
        """Its type and bounds in words."""
        return " ".join([describe(self.info.annotation), *bounds(self.info)])

    @property
    def resume(self) -> ResumeClass:
        """How a resumed run treats a changed value."""
        resume: ResumeClass = fact(self.info, "resume")
        return resume

    @property
    def once(self) -> bool:
        """Whether it belongs to what is built once a run."""
        return self.section == "cluster" or bool(fact(self.info, "once"))


@cache
def core_keys() -> Mapping[str, ConfigKey]:
    """Every core key by its name, which is unique over all sections."""
    top = {name: info for name, info in Config.model_fields.items() if fact(info, "resume")}
    keys = {name: ConfigKey(name, "", info) for name, info in top.items()}
    for section in SECTIONS:
        model = section_model(section)
        keys |= {name: ConfigKey(name, section, info) for name, info in model.model_fields.items()}
    return keys


def section_model(section: str) -> type[BaseModel]:
    """The pydantic model of a core section."""
    model: type[BaseModel] = unwrap(Config.model_fields[section].annotation)
    return model


def sections_of_keys() -> dict[str, str]:
    """Key name to section, for the keys that have one."""
    return {name: key.section for name, key in core_keys().items() if key.section}

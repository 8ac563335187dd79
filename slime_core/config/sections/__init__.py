"""Keys by section: type, bounds, default, meaning and resume class of each, with the rules that it is about.

A new key is a line of its section, and the code that reads it; docs/config.md is `slime config keys --markdown`. A
rule between sections stands where the key is that it is about, and takes the other sections as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

Verdict = Literal["safe", "notice", "unsafe"]


@dataclass(slots=True, frozen=True)
class ResumeClass:
    """What a changed key makes of a resumed run, and why.

    safe      the same weights                              resumes
    notice    the same mathematics, perhaps other bits      resumes with a notice
    unsafe    another experiment under the old one's name   refused unless --force-key names it
    """

    verdict: Verdict
    reason: str


NAME = ResumeClass("safe", "a name")
FIGURES = ResumeClass("safe", "figures, exports and checkpoints do not train")
LIMIT = ResumeClass("safe", "a limit, not a rule of what trains")
MACHINE = ResumeClass("notice", "the same mathematics on another machine or in another split; bits may differ")
PROMPTS = ResumeClass("unsafe", "other prompts, or in another order")
MODEL = ResumeClass("unsafe", "another model")

Reader = Literal["servers", "placed engines", "separate engines", "other machines", "megatron hooks"]
"""Who alone reads a key: servers; embedded engines too where they are placed on a cluster, or apart from training."""


def key(
    default: Any,
    text: str,
    resume: ResumeClass | None = None,
    *,
    path: Literal["", "data", "model", "function", "input", "output"] = "",
    reader: Reader | None = None,
    switch: str = "",
    once: bool = False,
    fills: bool = False,
    **bounds: Any,
) -> Any:
    """A key's ``Field``.

    Args:
        resume: what a change makes of a resumed run; keys of tasks have the class of their array.
        path: what a local path in it leads to, which must exist where it is read; a function for names in _path.
        reader: who alone reads it.
        switch: the key of its section without which it does nothing.
        once: whether it is of what is built once a run, so that stages cannot change it.
        fills: whether its function may fill samples, as with log-probs of a teacher.
    """
    facts = {"resume": resume, "path": path, "reader": reader, "switch": switch, "once": once, "fills": fills}
    return Field(default, description=text, json_schema_extra=facts, **bounds)  # type: ignore[arg-type]


def fact(info: FieldInfo, name: str) -> Any:
    """What :func:`key` says of a field under ``name``; None for a field that it did not make."""
    return info.json_schema_extra.get(name) if isinstance(info.json_schema_extra, dict) else None


def empty_for(default: str) -> BeforeValidator:
    """Empty a key that names ``default``: THUDM/slime's own function, whose place is the core's own way."""
    return BeforeValidator(lambda value: "" if str(value).replace(":", ".") == default else value)


class Section(BaseModel):
    """A frozen section: unknown keys and wrong types are errors, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def arrays_are_tuples(cls, data: Any) -> Any:
        """Take arrays of TOML or JSON as tuples."""
        table = data.items() if isinstance(data, dict) else ()
        return {name: tuple(value) if isinstance(value, list) else value for name, value in table} or data

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of the keys that differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]

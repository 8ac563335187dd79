"""Keys by section: type, bounds, default, meaning and resume class of each, with the rules that it is about.

A new key is a line of its section and the code that reads it; `slime config keys --markdown` prints docs/config.md.
A rule between sections is a method of the section whose key it is about; the other sections are its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from pydantic.fields import FieldInfo

Verdict = Literal["safe", "notice", "unsafe"]


@dataclass(slots=True, frozen=True)
class ResumeClass:
    """How a resumed run treats a changed key, and why.

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
KIND = ResumeClass("unsafe", "saved weights and states are of this kind")

AutoBool = Annotated[
    bool | None,
    BeforeValidator(lambda value: None if value == "auto" else value),
    PlainSerializer(lambda value: "auto" if value is None else value),
]
"""True, false, or ``auto``, which is None until the memory of a run is planned."""

AutoCount = Annotated[int, BeforeValidator(lambda value: 0 if value == "auto" else value)]
"""A number, or ``auto``, which is 0 until the memory of a run is planned."""

Reader = Literal[
    "servers", "servers or adapters", "placed engines", "separate engines", "other machines", "megatron hooks"
]
"""Only readers of a key. Placed engines are servers, or on other machines; separate ones also run beside training."""


def key(
    default: Any,
    text: str,
    resume: ResumeClass | None = None,
    *,
    path: Literal["", "data", "model", "function", "input", "start", "output"] = "",
    reader: Reader | None = None,
    switch: str = "",
    once: bool = False,
    fills: bool = False,
    **bounds: Any,
) -> Any:
    """A key's ``Field``.

    Args:
        resume: how a resumed run treats a change; None for keys of a task, which have the class of their array.
        path: what a local path leads to; it must exist, but for an output; a start is looked at when a fresh
            run begins. Keys named ``*_path`` name functions.
        reader: the only reader.
        switch: the key of the same section without which this one does nothing.
        once: whether it belongs to what is built once a run, so that stages cannot change it.
        fills: whether its function may fill samples, such as with a teacher's log-probs.
    """
    facts = {"resume": resume, "path": path, "reader": reader, "switch": switch, "once": once, "fills": fills}
    return Field(default, description=text, json_schema_extra=facts, **bounds)  # type: ignore[arg-type]


def fact(info: FieldInfo, name: str) -> Any:
    """The fact ``name`` that :func:`key` was given; None for a field of another origin."""
    return info.json_schema_extra.get(name) if isinstance(info.json_schema_extra, dict) else None


def empty_for(default: str) -> BeforeValidator:
    """Leave a key empty that names ``default``, THUDM/slime's own function: the core does the same."""
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

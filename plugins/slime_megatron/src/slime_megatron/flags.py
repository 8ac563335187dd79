"""Flags of [megatron]: what they set in megatron-core's configs, and every problem with them.

Names are Megatron-LM's own, as in slime's scripts (`--swiglu` is `swiglu`). Each has one row in one of the tables:

    model     describes the model: config.json says so already, and a flag that disagrees is refused
    run       sets fields of megatron-core's configs, or a size of the layout
    only      slime fixes the value; the flag may say the same
    idle      means nothing here and does no harm: accepted with a notice
    refused   means nothing here, or cannot be had: an error that names what replaces it

Nothing here imports torch or megatron: the command line needs the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slime_core.config.fields import core_keys
from slime_core.config.problems import Problem
from slime_core.config.values import kind_of, show
from slime_core.errors import nearest

if TYPE_CHECKING:
    from slime_core.config.sections.train import TrainSection

Role = Literal["model", "run", "only", "idle", "refused"]
KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a value or an array of them",
}


@dataclass(slots=True, frozen=True)
class MegatronFlag:
    """One name of [megatron].

    ``sets`` holds ``CONFIG.FIELD``, and what the field becomes: None is the flag's own value; for a flag that is
    true or false, anything else is what true means, and false means its opposite.

    Example:
        Flag("disable_bias_linear", bool, "model", "No bias in linear layers.", {"transformer.add_bias_linear": False})
    """

    name: str
    kind: type
    role: Role
    text: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Any, ...] = ()

    @property
    def dashed(self) -> str:
        """As it is typed."""
        return f"--{self.name.replace('_', '-')}"

    def claims(self, value: Any) -> dict[str, Any]:
        """``CONFIG.FIELD`` to what a value of the flag makes of it."""
        if self.kind is not bool:
            return {path: value if meant is None else meant for path, meant in self.sets.items()}
        claims = {}
        for path, meant in self.sets.items():
            expected = True if meant is None else meant
            if value or isinstance(expected, bool):
                claims[path] = expected if value else not expected
        return claims


@dataclass(slots=True, frozen=True, kw_only=True)
class Values:
    """What flags of the run set, by config."""

    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ahead: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def flags() -> dict[str, MegatronFlag]:
    """Every name that [megatron] knows, with its row."""
    from slime_megatron.flags_elsewhere import IDLE, ONLY, REFUSED
    from slime_megatron.flags_of_model import MODEL
    from slime_megatron.flags_of_run import RUN

    return {flag.name: flag for table in (MODEL, RUN, ONLY, IDLE, REFUSED) for flag in table}


def kinds() -> dict[str, Any]:
    """Name to the type of its value: what a command line needs to read bare flags."""
    return {name: flag.kind for name, flag in flags().items()}


def problems(table: Mapping[str, Any], *, train: TrainSection | None = None) -> list[Problem]:
    """Everything that is wrong with a [megatron] table by itself; ``train`` where its dtype is settled."""
    known_flags, problems, names = flags(), list[Problem](), set[str]()
    for written, value in table.items():
        name = written.replace("-", "_")
        if name in names:
            reason = "dashes and underscores are the same"
            problems.append(_of(name, "CFG07", f"megatron.{name} is given twice", reason, f"keep one {name}"))
        names.add(name)
        flag = known_flags.get(name)
        problem = _unknown(name, list(known_flags)) if flag is None else _problem(flag, value, train)
        problems += [problem] if problem else []
    return problems


def values(table: Mapping[str, Any]) -> Values:
    """What the run's flags set; the table has no problems."""
    known_flags = flags()
    names = ("transformer", "ddp", "optimizer", "layout", "vocabulary", "ahead")
    tables: dict[str, dict[str, Any]] = {name: {} for name in names}
    notices = []
    for written, value in table.items():
        flag = known_flags[written.replace("-", "_")]
        if flag.role == "idle":
            notices.append(f"{flag.dashed} has no effect: {flag.text}")
        for path, meant in flag.claims(value).items() if flag.role == "run" else ():
            config, _, name = path.partition(".")
            tables[config][name] = meant
    configs = {name: tables[name] for name in ("transformer", "ddp", "optimizer", "ahead")}
    return Values(**configs, notices=tuple(notices))


def _unknown(name: str, names: list[str]) -> Problem:
    key = core_keys().get(name)
    if key is not None:
        return _of(name, "CFG01", f"unknown key 'megatron.{name}'", "it is in the wrong table", f"it is {key.path}")
    near = nearest(name, names).replace("'", "'megatron.", 1)
    fix = "\n".join(filter(None, [near, "all names: docs/megatron.md"]))
    return _of(name, "CFG01", f"unknown key 'megatron.{name}'", "no option of Megatron that slime knows has it", fix)


def _problem(flag: MegatronFlag, value: Any, train: TrainSection | None) -> Problem | None:
    shown = f"megatron.{flag.name} = {show(value)}"
    if flag.role == "refused":
        return _of(flag.name, "CFG04", f"{flag.dashed} cannot be had here", flag.text.partition("; ")[0], _fix(flag))
    if not _is(value, flag.kind):
        reason = f"it is {kind_of(value)}, and {flag.name} takes {KINDS[flag.kind]}"
        return _of(flag.name, "CFG02", f"{shown} has the wrong type", reason, f"give {KINDS[flag.kind]}")
    if flag.name == "bf16" and train is not None and train.dtype != "auto" and value != (train.dtype == "bfloat16"):
        reason = f"train.dtype is {train.dtype}, which alone sets the compute dtype"
        return _of(flag.name, "CFG04", shown, reason, "leave --bf16 out, or --dtype bfloat16")
    wrong = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if one not in flag.choices]
    if not flag.choices or not wrong:
        return None
    allowed = ", ".join(show(one) for one in flag.choices)
    if flag.role == "only":
        return _of(flag.name, "CFG04", f"{shown} cannot be had here", flag.text, f"leave it out; it may be {allowed}")
    near = nearest(str(wrong[0]), [str(one) for one in flag.choices])
    return _of(
        flag.name, "CFG03", f"{shown} is out of range", f"it must be one of {allowed}", near or f"one of {allowed}"
    )


def _fix(flag: MegatronFlag) -> str:
    return flag.text.partition("; ")[2] or f"leave {flag.dashed} out"


def _of(name: str, code: str, what: str, why: str, fix: str) -> Problem:
    return Problem(code=code, what=what, keys=(("megatron", name),), why=why, fix=fix)


def _is(value: Any, kind: type) -> bool:
    if kind is list:
        return not isinstance(value, dict)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)

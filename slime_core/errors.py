"""Every error a user can meet: one tree, each with a code, an exit code and a fix.

    SlimeError                what | where | why | fix; exit 1
    |- ConfigError            2    also ValueError     CFG..
    |- DataError              3    also ValueError     DAT..  TOK..
    |- PluginError            4    also RuntimeError   PLG..
    |- EngineError            5    also RuntimeError   ENG..
    |- TrainerError           6    also RuntimeError   TRN..
    |- StorageError           7    also OSError        STO..
    |- SandboxError           8    also RuntimeError   SBX..
    |- Hung                   9    also TimeoutError   HNG125
    `- Preempted             75    stopped on request; `slime run --resume` continues

Plugin and user code raises plain Python errors; the boundary that called it turns them into one of these and says
where they came from. One with ``lost`` came from a process, server or machine that died, so the same work may
succeed elsewhere, or later. A SlimeError stays itself through pickle, so that workers can hand it to the driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from slime_core.error_codes import MEANINGS, anchor

END_NOW = os._exit
"""The system's own: in a run others meet one that raises."""

DISTRIBUTION = "slime-rl"
UPDATE = "update slime: git pull in its clone, or install its newer wheels"


class SlimeError(Exception):
    """An error for a person: what happened, where, why, and the key or command that fixes it.

    Example:
        raise ConfigError("unknown key 'train.lrr'", code="CFG01", where="recipe.toml:12", why="no section has it",
                          fix="did you mean train.lr?")
    """

    exit_code = 1
    default_code = "SLM00"

    def __init__(
        self, what: str, *, code: str = "", where: str = "", why: str = "", fix: str = "", lost: bool = False
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = code or self.default_code
        self.where = where
        self.why = why
        self.fix = fix
        self.lost = lost

    def __reduce__(self) -> tuple[Callable[..., SlimeError], tuple[type[SlimeError], dict[str, Any]]]:
        return _rebuild, (type(self), {**self.as_dict(), "lost": self.lost})

    def __str__(self) -> str:
        return " | ".join(part for part in (f"{self.code} {self.what}", self.where, self.why, self.fix) if part)

    def as_dict(self) -> dict[str, Any]:
        """The five parts, with stable keys (what `--json` prints)."""
        return {"what": self.what, "code": self.code, "where": self.where, "why": self.why, "fix": self.fix}

    def render(self) -> str:
        """Several lines for a terminal: the first says what, the rest where, why, the fix and where to read more."""
        lines = [f"error {self.code}  {self.what}"]
        lines += [f"  {name}: {text}" for name, text in (("where", self.where), ("why", self.why)) if text]
        lines += [f"  fix: {line}" if i == 0 else f"       {line}" for i, line in enumerate(self.fix.splitlines())]
        lines += [f"  see: {anchor(self.code)}   or   slime explain {self.code}"] * (self.code in MEANINGS)
        return "\n".join([*lines, f"  (exit {self.exit_code})"])


def _rebuild(kind: type[SlimeError], parts: dict[str, Any]) -> SlimeError:
    return kind(**parts)


def remade(kind: str, parts: Mapping[str, Any], otherwise: type[SlimeError]) -> SlimeError:
    """Rebuild another process's error from its class's name and ``as_dict``; ``otherwise`` for an unknown name."""
    kind_class = globals().get(kind)
    if isinstance(kind_class, type) and issubclass(kind_class, SlimeError):
        return kind_class(**parts)
    return otherwise(**parts)


class ConfigError(SlimeError, ValueError):
    """A recipe, flag or environment that cannot be run."""

    exit_code = 2
    default_code = "CFG00"


class DataError(SlimeError, ValueError):
    """A data set, tokenizer or model folder that cannot be used."""

    exit_code = 3
    default_code = "DAT00"


class PluginError(SlimeError, RuntimeError):
    """A plugin or a user's function that did not load, or broke its contract."""

    exit_code = 4
    default_code = "PLG00"


class EngineError(SlimeError, RuntimeError):
    """A rollout engine that failed or answered something impossible."""

    exit_code = 5
    default_code = "ENG00"

    @property
    def ends_dialogue(self) -> bool:
        """Whether a dialogue has no next turn: no room in the model's context (ENG72), or a placeholder that the model
        drew, which the engine would take for a picture (ENG08)."""
        return self.code in ("ENG72", "ENG08")


class TrainerError(SlimeError, RuntimeError):
    """A trainer that failed, or a loss or gradient that is not finite."""

    exit_code = 6
    default_code = "TRN00"


class StorageError(SlimeError, OSError):
    """A ledger, checkpoint or run directory that cannot be written or read."""

    exit_code = 7
    default_code = "STO00"


class SandboxError(SlimeError, RuntimeError):
    """A sandbox that cannot provide the requested isolation."""

    exit_code = 8
    default_code = "SBX00"


class Hung(SlimeError, TimeoutError):
    """A part of the run did nothing for longer than ``cluster.hang_timeout``, and the run was ended."""

    exit_code = 9
    default_code = "HNG125"


class Preempted(SlimeError):
    """The run stopped in order, after a signal or `--stop-after`, and can be resumed."""

    exit_code = 75
    default_code = "RUN75"


def text_of(error: BaseException, longest: int = 2000) -> str:
    """``Kind: message`` of code that is not ours, whose message may be huge, or fail itself."""
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its message cannot be read: {type(failed).__name__})"
    return f"{type(error).__name__}: {shortened(text, longest)}"


def shortened(text: str, longest: int) -> str:
    """The text, without its middle where it is longer."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} ... {len(text) - longest} characters ... {text[-longest // 2 :]}"


def nearest(name: str, names: list[str] | set[str] | tuple[str, ...]) -> str:
    """`did you mean 'x'?` for the closest known name, or an empty string."""
    near = closest(name, names)
    return f"did you mean '{near}'?" if near else ""


def closest(name: str, names: list[str] | set[str] | tuple[str, ...]) -> str:
    """The known name that is nearly ``name``, or an empty string."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)), "")


def install_line(extra: str) -> str:
    """``pip install "aiohttp>=3.10" ...``: what ``extra`` and slime's own package behind it need of others.

    It works whether slime came from a clone or from wheels. Those of ``fsdp`` are named for that extra alone.

    Example: install_line("sglang") == 'pip install "aiohttp>=3.10" "orjson>=3.9"'
    """
    needed = needs(DISTRIBUTION)
    if not needed:
        return f'pip install -e ".[{extra}]"   in a clone of slime'
    names = needed.get(f'extra == "{extra}"', [])
    common = [*needed.get("", []), *([] if extra == "fsdp" else needed.get('extra == "fsdp"', []))]
    for package in [name for name in names if name.startswith("slime-") and name not in common]:
        names += needs(re.split(r"[^\w-]", package)[0]).get("", [])
    prefixes = ("slime-", "editables")  # the second is of editable installs
    others = [f'"{name}"' for name in dict.fromkeys(names) if name not in common and not name.startswith(prefixes)]
    return f"pip install {' '.join(others)}"


def needs(distribution: str) -> dict[str, list[str]]:
    """Requirements of an installed distribution by their marker; empty where it is not installed."""
    try:
        rows = [row.partition(";") for row in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return {}
    modules: dict[str, list[str]] = {}
    for name, _, marker in rows:
        modules.setdefault(marker.replace("'", '"').strip(), []).append(name.strip())
    return modules

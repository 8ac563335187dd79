"""Prompts and requests around problems and verdicts, from a TOML file.

Device neutral, in the manner of KernelBench: a sentence for the system, one worked example, the problem. A file of a
run's own (`prompt_template`) may set any of the keys; the others keep their words. ``{{NAME}}`` is put in once, in one
pass, so that a problem's text is never taken for a template.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import ConfigError
from slime_core.types import Message
from slime_kernelbench.dialogue.short import short_form
from slime_kernelbench.types import KernelProblem

PLACE = re.compile(r"\{\{([a-z_]+)\}\}")
OURS = Path(__file__).with_name("words.toml")
SHIPPED = {"short": OURS.with_name("short.toml")}  # other words of ours, by name
REQUESTS = ("no_code", "rejected", "compile_error", "runtime_error", "wrong", "timeout", "hack", "correct")
TEXTS = ("system", "user", "plain", "between", "attempt", "history")


@dataclass(slots=True, frozen=True, kw_only=True)
class Words:
    """One file's texts.

    Example:
        words = load_words("")
        words.prompt(problem, chat=True)      # [{"role": "system", ...}, {"role": "user", ...}]
    """

    system: str
    user: str  # {{problem}}: its source; {{short}}: sizes and forward alone; {{name}}
    plain: str  # {{system}}, {{user}}: the whole prompt, where no chat template is applied
    between: str  # {{feedback}}: between answers, where no chat template is applied
    attempt: str  # {{number}}, {{code}}, {{feedback}}: an earlier attempt, with context = history
    history: str  # {{attempts}}, {{number}}, {{question}}: what is asked after these
    requests: Mapping[str, str]  # what is asked next, by the verdict's status

    def prompt(self, problem: KernelProblem, *, chat: bool) -> str | list[Message]:
        """What the model is asked first: messages for a chat template, else a text."""
        values = {"problem": problem.source.strip("\n"), "name": problem.name, "short": short_form(problem.source)}
        user = put(self.user, **values)
        if not chat:
            return put(self.plain, system=self.system, user=user)
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": user}]

    def block(self, number: int, code: str | None, feedback: str) -> str:
        """An earlier attempt, from 1, in a history."""
        return put(self.attempt, number=str(number), code=(code or "").strip("\n"), feedback=feedback)


def put(text: str, **values: str) -> str:
    """``text`` with ``{{NAME}}`` replaced, once; names that are not given stay."""
    return PLACE.sub(lambda match: values.get(match[1], match[0]), text)


def load_words(path: str) -> Words:
    """The texts of a file, or of a name in ``SHIPPED``, ours where it has none; the empty path is ours alone.

    Raises:
        ConfigError: CFG05 no such file, CFG06 no TOML, CFG01 an unknown key, CFG02 a value that is no text.
    """
    defaults, overrides = _read(OURS), _read(SHIPPED.get(path, Path(path).expanduser())) if path else {}
    where = f"plugin.kernelbench.prompt_template = {path}"
    requests = overrides.get("requests", {})
    unknown = [*(set(overrides) - {*TEXTS, "requests"}), *(set(requests) - set(REQUESTS))]
    if unknown:
        names = ", ".join((*TEXTS, *(f"requests.{name}" for name in REQUESTS)))
        raise ConfigError(f"'{sorted(unknown)[0]}' is not text of a prompt", code="CFG01", where=where, fix=names)
    merged = {**defaults, **overrides, "requests": {**defaults["requests"], **requests}}
    for name, text in [*((name, merged[name]) for name in TEXTS), *merged["requests"].items()]:
        if not isinstance(text, str):
            raise ConfigError(f"'{name}' is {text!r}, no text", code="CFG02", where=where)
    if not {"problem", "short"} & set(PLACE.findall(merged["user"])):
        fix = "write {{problem}} in it, or {{short}}"
        raise ConfigError("'user' does not show the problem", code="CFG02", where=where, fix=fix)
    return Words(**merged)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"the prompt template cannot be read: {error.strerror}",
            code="CFG05",
            where=str(path.resolve()),
            fix="set plugin.kernelbench.prompt_template to a TOML file, or leave it out",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt template is not TOML: {error}", code="CFG06", where=str(path)) from error

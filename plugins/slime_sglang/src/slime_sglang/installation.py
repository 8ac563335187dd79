"""Which SGLang a run uses, and what that one can do: read in its own Python, kept in the user's cache.

[sglang] python, env -> find_python -> read_installation (probe.py, another process) -> Installation -> arguments
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slime_core.config.dump import scrub
from slime_core.errors import ConfigError
from slime_sglang import options as _options
from slime_sglang.options import Option, Place, no_such_installation, read_options

PROBE = Path(__file__).with_name("probe.py")
STAND_INS = Path(__file__).with_name("stand_ins")
PYTHON_ENV = "SLIME_SGLANG_PYTHON"
RESERVED = ("python", "env", "router")  # of [sglang]; the rest are SGLang's own
OLDEST = (0, 5, 12)
FACTS_SECONDS, OPTIONS_SECONDS = 120.0, 600.0
INSTALL = (
    "python -m venv ~/sglang && ~/sglang/bin/pip install sglang, then\n"
    f'export {PYTHON_ENV}=~/sglang/bin/python   or   python = "~/sglang/bin/python" under [sglang]'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """One SGLang, somewhere on this machine.

    Example: read_installation(find_python(config.table("sglang")), environment_of(config.table("sglang"), device))
    """

    python: str  # of its environment
    env: Mapping[str, str]  # added to ours
    version: str
    options: Mapping[str, Option] = field(repr=False)  # by every name they have
    features: frozenset[str]  # see probe.FEATURES: version_spans weights_checker pause_modes tensor_update ...
    folder: str = ""
    architectures: frozenset[str] = field(default=frozenset(), repr=False)  # of models that it implements itself
    torch: str = ""  # version in its environment
    router: str = ""  # version of SGLang's router there; empty where there is none
    router_options: Mapping[str, Option] = field(default_factory=dict, repr=False)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of a process of that environment: ours, ``[sglang.env]``, and ``more``."""
        return {**os.environ, **self.env, **(more or {})}


def read_installation(python: str, env: Mapping[str, str], cache: Path | None = None) -> Installation:
    """What the SGLang of ``python`` is and can do.

    A cached answer is used as long as path, version and files are the same; the first one takes as long as an import
    of SGLang.

    Args:
        python: of :func:`find_python`.
        env: variables for its processes, of :func:`environment_of`.
        cache: folder for answers; None is the user's, and one that cannot be written is done without.

    Raises:
        ConfigError: CFG04 there is no SGLang, it is too old, or its import fails (its own words are shown).
    """
    facts = ask(python, env, FACTS_SECONDS, "facts")
    version = str(facts.get("version", ""))
    _check_version(python, version)
    file = _file(cache if cache is not None else cache_folder(), python, env)
    key = {name: facts[name] for name in ("folder", "changed", "router")} | {"python": python, "version": version}
    key["probe"] = hashlib.sha256(PROBE.read_bytes()).hexdigest()[:16]
    tables = _cached(file, key)
    if tables is None:
        listed = ask(python, env, OPTIONS_SECONDS, "options")
        tables = _tables(listed)
        keep(file, {"key": key, "options": listed["options"], "router": listed["router"]})
    options, router_options = tables
    return Installation(
        python=python,
        env=dict(env),
        version=version,
        options=options,
        features=frozenset(facts["features"]),
        folder=str(facts["folder"]),
        architectures=frozenset(facts["architectures"]),
        torch=str(facts["torch"]),
        router=str(facts["router"]) if router_options else "",
        router_options=router_options,
    )


def arguments(
    installation: Installation, table: Mapping[str, Any], *, where: str | Place = "sglang", by_slime: bool = False
) -> list[str]:
    """The options of a table as words of this installation's command line; ``python`` and ``env`` are left out.

    Raises:
        ConfigError: as :func:`slime_sglang.options.arguments`.
    """
    options = {name: value for name, value in table.items() if name not in RESERVED}
    return _options.arguments(
        installation.options, options, version=installation.version, where=where, by_slime=by_slime
    )


def find_python(table: Mapping[str, Any]) -> str:
    """The Python that has SGLang: ``[sglang] python``, else ours, else the one that SLIME_SGLANG_PYTHON names.

    Nothing is imported. Symbolic links stay: they are how an environment's Python is told from the system's.

    Raises:
        ConfigError: CFG02 ``python`` is no text, CFG04 SGLang is nowhere to be found, CFG05 no such program.
    """
    named = table.get("python", "")
    if not isinstance(named, str):
        message = f"sglang.python = {named!r} has the wrong type"
        raise ConfigError(message, code="CFG02", where="sglang.python", fix='python = "/path/to/bin/python"')
    if named:
        return _program(named, "sglang.python")
    if is_here():
        return sys.executable
    if named := named_here():
        return _program(named, PYTHON_ENV)
    raise ConfigError(
        "SGLang is not found",
        code="CFG04",
        where="rollout.rollout_engine",
        why=f"it is not installed beside slime, [sglang] names no python and {PYTHON_ENV} is not set",
        fix=INSTALL,
    )


def is_here() -> bool:
    """Whether our own environment has SGLang; a stray folder of that name is none."""
    try:
        spec = find_spec("sglang")
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def named_here() -> str:
    """The Python that SLIME_SGLANG_PYTHON names; empty where it is not set."""
    return os.environ.get(PYTHON_ENV, "")


def environment_of(table: Mapping[str, Any], device: str) -> dict[str, str]:
    """Variables of SGLang's processes: ``[sglang.env]`` as text, and on a CPU a way to the stand-ins for what has no
    build there.

    Raises:
        ConfigError: CFG02 it is no table of texts and numbers, CFG04 a variable that slime sets.
    """
    env = table.get("env", {})
    if not isinstance(env, Mapping):
        fix = "sglang.env.NAME=value   or   a table [sglang.env]"
        raise ConfigError("sglang.env is not a table", code="CFG02", where="sglang.env", fix=fix)
    for name, value in env.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value) or "=" in name:
            raise ConfigError(
                f"sglang.env.{name} is not a value for an environment variable",
                code="CFG02",
                where=f"sglang.env.{name}",
                fix=f'write it as text: {name} = "1"',
            )
        if name == "CUDA_VISIBLE_DEVICES":
            raise ConfigError(
                "CUDA_VISIBLE_DEVICES of servers is set by slime",
                code="CFG04",
                where="sglang.env.CUDA_VISIBLE_DEVICES",
                fix="--rollout-num-gpus N   or   --engine-topology FILE; to hide GPUs from the whole run, export it",
            )
    variables = {str(name): str(value) for name, value in env.items()}
    if device == "cpu":
        paths = [variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH", ""), str(STAND_INS)]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


def cache_folder() -> Path:
    """The user's cache folder for slime; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "slime"


def _program(named: str, where: str) -> str:
    text = os.path.expanduser(named)
    path = shutil.which(text)
    if path is None:
        reason = "it is a folder" if os.path.isdir(text) else "there is no such program, or it cannot be executed"
        raise ConfigError(
            f"{where} = {named} is not Python",
            code="CFG05",
            where=where,
            why=reason,
            fix="name the Python of the environment that has SGLang, such as ~/sglang/bin/python",
        )
    return os.path.abspath(path)


def _check_version(python: str, version: str) -> None:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in match.groups()) if match else ()
    if numbers and (0, 0, 0) < numbers < OLDEST:  # 0.0.0 is a checkout without tags
        oldest = ".".join(map(str, OLDEST))
        fix = f'{python} -m pip install --upgrade "sglang>={oldest}"'
        raise no_such_installation(python, f"it is SGLang {version}; {oldest} is the oldest that slime knows", fix)


def ask(python: str, env: Mapping[str, str], seconds: float, *question: str) -> dict[str, Any]:
    """What `probe.py` answers.

    Raises:
        ConfigError: CFG04.
    """
    command = [python, str(PROBE), *question]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
        )
    except OSError as error:
        raise no_such_installation(python, f"it cannot be started: {error.strerror or error}", INSTALL) from error
    try:
        out, talk = process.communicate(timeout=seconds)
    except BaseException as error:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            reason = f"it did not answer in {seconds:.0f} seconds"
            raise no_such_installation(python, reason, f"try it: {' '.join(command)}") from error
        raise
    try:
        answer = json.loads(out)
    except ValueError:
        answer = {"error": f"it ended with status {process.returncode}"}
    if not isinstance(answer, dict) or "error" in answer:
        reason = str(answer["error"]) if isinstance(answer, dict) else "it answered nonsense"
        raise no_such_installation(python, _with_talk(reason, talk, question[0]), _way_out(python, reason))
    return answer


def _with_talk(why: str, talk: bytes, question: str) -> str:
    """The error, and where an import failed the last lines before it."""
    if question == "facts":
        return scrub(why)
    lines = [line for line in talk.decode(errors="replace").splitlines() if line.strip()][-6:-1]
    return scrub("\n    ".join(["its import fails: " + why, *(line[:200] for line in lines)]))


def _way_out(python: str, why: str) -> str:
    if "No module named 'sglang'" in why:
        return f"{python} -m pip install sglang, or name another:\n{INSTALL.splitlines()[1]}"
    return f'repair that environment: {python} -c "import sglang.srt.server_args" must work'


def _file(folder: Path, python: str, env: Mapping[str, str]) -> Path:
    text = json.dumps([python, sorted(env.items())])
    return folder / f"sglang-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _tables(listed: Mapping[str, Any]) -> tuple[dict[str, Option], dict[str, Option]]:
    return read_options(listed["options"]), read_options(listed["router"])


def _cached(file: Path, key: Mapping[str, Any]) -> tuple[dict[str, Option], dict[str, Option]] | None:
    """Options of an earlier answer; None where there is none, it is another's, or it cannot be read."""
    try:
        data = json.loads(file.read_bytes())
        return _tables(data) if data["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def keep(file: Path, data: Mapping[str, Any]) -> None:
    """Write the answer under its name at once; a folder that cannot be written is done without."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(data))
        os.replace(fresh, file)
    with suppress(OSError):
        fresh.unlink()


def read_here(table: Mapping[str, object], device: str = "cpu", named: str = "") -> Installation:
    """The SGLang of this machine that a ``[sglang]`` table names, else the one beside slime, else the one of the
    environment, else ``named``; raises as :func:`read_installation`. Stand-ins of a CPU change nothing where SGLang is
    whole."""
    if named and not (table.get("python") or is_here() or named_here()):
        table = {**table, "python": named}
    return read_installation(find_python(table), environment_of(table, device))

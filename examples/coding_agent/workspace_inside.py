"""What the sandbox runs: a workspace that serves an agent's tools, and the tests of what it leaves; no verdict."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_sandbox import CandidateChannel

ROOTS = re.compile(r"(?<![\w./-])/(app|tests|solution|logs)(?![\w-])")
"""Folders of a task's container, which are folders of the sandbox's own one here."""
LARGEST = 1 << 20  # bytes of a file that is kept


def serve(channel: CandidateChannel) -> None:
    """Take the files of a package, then one call of a tool after another: ``bash``, ``edit``, ``files``."""
    write("app", json.loads(channel.receive()))
    tools: dict[str, Callable[..., Any]] = {"bash": bash, "edit": edit, "files": files}
    while True:
        call = json.loads(channel.receive())
        try:
            result = tools[call["name"]](**call["arguments"])
        except (OSError, TypeError, ValueError) as error:
            result = f"{type(error).__name__}: {error}"
        channel.send(json.dumps(result).encode())


def verify(channel: CandidateChannel) -> None:
    """Take files and their tests; send what the cases return, or what `tests/test.sh` wrote as its reward."""
    task = json.loads(channel.receive())
    write("app", task["files"])
    write("tests", {name: localized(text) for name, text in task.get("tests", {}).items()})
    if "tests" not in task:
        channel.send(json.dumps(results(task["module"], task["calls"])).encode())
        return
    folder = Path("logs/verifier")
    folder.mkdir(parents=True)
    output = bash("bash /tests/test.sh", task["seconds"])
    rewards = [path.read_text() for path in (folder / "reward.txt", folder / "reward.json") if path.exists()]
    channel.send(json.dumps([output, *rewards[:1]]).encode())


def results(module: str, calls: Sequence[Any]) -> list[str]:
    """What functions of the package's module return for their arguments, or their errors, as texts."""
    sys.path.insert(0, os.path.abspath("app"))
    values = []
    for name, arguments in calls:
        try:
            values.append(repr(getattr(importlib.import_module(module), name)(*arguments)))
        except Exception as error:
            values.append(f"{type(error).__name__}: {error}")
    return values


def bash(command: str, seconds: float = 30.0) -> str:
    """What a command prints, in the package's folder, and its exit code where it is not 0."""
    process = subprocess.Popen(
        ["bash", "-c", localized(command)],
        cwd="app",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        ending = f"\nexit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ending = f"\nthe command did not end in {seconds:g} s"
    return (output.decode(errors="replace").rstrip("\n") + ending).lstrip("\n")


def edit(path: str, old: str, new: str) -> str:
    """Replace the one place of a file that says ``old``."""
    file = Path("app", localized(path))
    text = file.read_text()
    if text.count(old) != 1:
        return f"the text occurs {text.count(old)} times"
    file.write_text(text.replace(old, new))
    return "edited"


def files() -> dict[str, str]:
    """The package's text files as they are now."""
    texts = {}
    for path in sorted(Path("app").rglob("*")):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            try:
                texts[str(path.relative_to("app"))] = path.read_bytes()[: LARGEST + 1].decode()
            except UnicodeDecodeError:
                continue
    return {name: text for name, text in texts.items() if len(text) <= LARGEST}


def write(folder: str, texts: Mapping[str, Any]) -> None:
    """Write files below a folder."""
    Path(folder).mkdir(exist_ok=True)
    for name, text in texts.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def localized(text: str) -> str:
    """A text in which the folders of a task's container are those of this one."""
    return ROOTS.sub(lambda match: os.path.abspath(match[1]), text)

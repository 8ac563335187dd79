"""Task folders in harbor's format as rows: task.toml, instruction.md, environment/, tests/test.sh, solution/.

    python examples/coding_agent/harbor.py FOLDER... > rows.jsonl

A task's container is the sandbox here: Python and the system's programs, no network, no root. So an environment may be
files, or a Dockerfile that only copies files onto an image of Python; another one is refused.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from slime_core.errors import DataError

APP = "/app"


def read_task(folder: Path) -> dict[str, Any]:
    """A row: ``question``, and as ``metadata`` a task with files and tests, and the solution's script if there is one.

    Raises:
        DataError: it is no task, or it needs Docker.
    """
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} has no {name}", where=str(folder), fix="name a task folder in harbor's format")
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"task.toml is not TOML: {error}", where=str(folder / "task.toml")) from error
    environment = settings.get("environment", {})
    for name in ("docker_image", "gpus"):
        if environment.get(name):
            raise docker(folder / "task.toml", f"environment.{name} = {environment[name]!r}")
    solution = folder / "solution" / "solve.sh"
    metadata = {
        "files": _environment(folder / "environment"),
        "tests": texts_in(folder / "tests"),
        "name": folder.name,
    }
    if solution.is_file():
        metadata["solution"] = solution.read_text()
    return {"question": (folder / "instruction.md").read_text(), "answer": "", "metadata": metadata}


def texts_in(folder: Path) -> dict[str, str]:
    """All files of a folder.

    Raises:
        DataError: a file is no text.
    """
    try:
        return {
            path.relative_to(folder).as_posix(): path.read_text()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    except UnicodeDecodeError as error:
        raise DataError(f"a file is not UTF-8: {error}", where=str(folder), fix="leave binary files out") from error


def docker(where: Path, reason: str) -> DataError:
    """The error of a task that needs a container of its own."""
    return DataError(
        f"the task {where.parent.name} needs Docker",
        where=str(where),
        why=f"{reason}; here a task runs in slime's sandbox",
        fix="use an environment of plain files, or a Dockerfile with FROM python, WORKDIR and COPY alone",
    )


def _environment(folder: Path) -> dict[str, str]:
    """The files of the package, by their path below the working directory."""
    texts = texts_in(folder) if folder.is_dir() else {}
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if name in texts:
            raise docker(folder, f"environment/{name}")
    recipe = texts.pop("Dockerfile", None)
    if recipe is None:
        return texts
    files: dict[str, str] = {}
    place = PurePosixPath("/")
    for line in recipe.splitlines():
        word, _, rest = line.strip().partition(" ")
        parts = rest.split()
        if word.upper() == "FROM" and rest.startswith("python"):
            continue
        if word.upper() == "WORKDIR" and rest.rstrip("/") == APP:
            place = PurePosixPath(APP)
        elif word.upper() == "COPY" and len(parts) == 2 and not parts[0].startswith("--"):
            files |= _copied(texts, parts[0], place / parts[1], parts[1].endswith("/"), folder)
        elif word and not word.startswith("#"):
            raise docker(folder, f"environment/Dockerfile says {line.strip()!r}")
    return files


def _copied(texts: dict[str, str], source: str, target: PurePosixPath, into: bool, folder: Path) -> dict[str, str]:
    """What `COPY SOURCE TARGET` leaves below the working directory."""
    source = source.removeprefix("./").rstrip("/")
    if source in texts:
        pairs = {target / PurePosixPath(source).name if into or str(target) == APP else target: texts[source]}
    else:
        prefix = "" if source in (".", "") else f"{source}/"
        pairs = {target / name.removeprefix(prefix): text for name, text in texts.items() if name.startswith(prefix)}
    if not all(path.is_relative_to(APP) for path in pairs):
        raise docker(folder, f"environment/Dockerfile copies to {target}, outside of {APP}")
    return {str(path.relative_to(APP)): text for path, text in pairs.items()}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(json.dumps(read_task(Path(argument))) + "\n")

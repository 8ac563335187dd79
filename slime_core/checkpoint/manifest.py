"""What a checkpoint's manifest says, and whether a folder holds exactly that.

MANIFEST.json   schema version epoch files {path: size sha256} config plugins machine ledger random sha256

The last is of all the others, in JSON with sorted keys and no spaces, in this schema and in every later one.
Paths are relative to the checkpoint's folder, so a run directory may be moved, or reached through a link.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from slime_core.durable import FileMark, sha256_of, storage_error
from slime_core.errors import PluginError, StorageError, TrainerError

SCHEMA = 1
MANIFEST, STATE, TRAINER, LEDGER = "MANIFEST.json", "state.json", "trainer", "ledger.sqlite"
PREFIX, ASIDE, CORRUPT = "step-", ".tmp-", "corrupt-"
READERS = 8  # files that are hashed side by side
NAME = re.compile(rf"{PREFIX}(0|[1-9][0-9]*)")


@dataclass(slots=True, frozen=True, kw_only=True)
class CheckpointMetadata:
    """What a checkpoint says of its run. All of it is JSON, and secrets are redacted.

    ``machine``: world, dtype, device, cpu_threads, cpu features.
    """

    state: dict[str, Any]  # of the loop, the data source, the collector, plugins
    config: dict[str, Any]
    plugins: str  # their fingerprint
    machine: dict[str, Any]
    epoch: int  # of the process


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A whole checkpoint. The trainer's files lie in ``path / "trainer"``, see :attr:`trainer`."""

    path: Path
    version: int
    epoch: int
    state: dict[str, Any]
    config: dict[str, Any]
    plugins: str
    machine: dict[str, Any]
    ledger: dict[str, int] = field(default_factory=dict)  # its counts when the checkpoint was begun
    random: dict[str, Any] = field(default_factory=dict)  # the driver's generators, for `seeds.set_generators`

    @property
    def trainer(self) -> Path:
        """The folder for `Trainer.restore`."""
        return self.path / TRAINER

    @property
    def ledger_copy(self) -> Path | None:
        """The copy of the ledger's database; None in a checkpoint of an earlier slime."""
        path = self.path / LEDGER
        return path if path.is_file() else None


def head(version: int, metadata: CheckpointMetadata, **more: Any) -> str:
    """All of a manifest but its files, as JSON."""
    fields = {name: getattr(metadata, name) for name in ("config", "plugins", "machine", "epoch")}
    return json.dumps({"schema": SCHEMA, "version": version, **fields, **more}, allow_nan=False)


def write_manifest(files: Mapping[str, FileMark], head: str) -> bytes:
    """The manifest's bytes."""
    listed = {name: {"size": mark.size, "sha256": mark.sha256} for name, mark in sorted(files.items())}
    return sealed({**json.loads(head), "files": listed})


def sealed(data: Mapping[str, Any]) -> bytes:
    """A manifest's bytes, with the hash of its own content."""
    return (json.dumps({**data, "sha256": _seal(data)}, indent=1, sort_keys=True) + "\n").encode()


def _seal(data: Mapping[str, Any]) -> str:
    content = {name: value for name, value in data.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def names_in(folder: Path) -> list[tuple[int, Path]]:
    """Versions and folders of the published checkpoints, newest first; their content is not verified."""
    steps = [(int(name[1]), path) for path in folder.glob(f"{PREFIX}*") if (name := NAME.fullmatch(path.name))]
    return sorted(steps, reverse=True)


def read(path: Path, version: int, *, full: bool = True) -> LoadedCheckpoint:
    """The checkpoint in ``path``, after every file was compared with the manifest; without ``full`` sizes alone.

    Raises:
        StorageError: STO111 a file is missing or belongs to nothing, STO112 other bytes than were written, STO113
            written by another version of slime.
    """
    data = _manifest(path)
    if data["version"] != version:
        raise _damaged(path / MANIFEST, f"it is of version {data['version']}, the folder's name says {version}")
    marks = {name: FileMark(size=mark["size"], sha256=mark["sha256"]) for name, mark in data["files"].items()}
    compare(path, marks, full=full)
    try:
        state = json.loads((path / STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path / STATE, f"it cannot be read: {error}") from error
    return LoadedCheckpoint(
        path=path,
        version=version,
        epoch=data["epoch"],
        state=state,
        config=data["config"],
        plugins=data["plugins"],
        machine=data["machine"],
        ledger=data.get("ledger", {}),
        random=data.get("random", {}),
    )


def compare(path: Path, marks: Mapping[str, FileMark], *, full: bool) -> None:
    """Refuse a folder that does not hold exactly these files.

    Raises:
        StorageError: STO111, STO112.
    """
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()} - {MANIFEST}
    if missing := sorted(set(marks) - present):
        raise StorageError(
            f"{path.name} misses {len(missing)} of its files: {', '.join(missing[:5])}", code="STO111", where=str(path)
        )
    if extra := sorted(present - set(marks)):
        raise StorageError(
            f"{path.name} holds {len(extra)} files that its manifest does not list: {', '.join(extra[:5])}",
            code="STO111",
            where=str(path),
        )
    with ThreadPoolExecutor(READERS) as pool:  # a hash takes a second a GB
        list(pool.map(lambda name: check_file(path / name, marks[name], full=full), sorted(marks)))


def check_file(file: Path, mark: FileMark, *, full: bool) -> None:
    """Verify a file against its manifest entry.

    Raises:
        StorageError: STO112.
    """
    try:
        size = file.stat().st_size
        if size != mark.size:
            raise _damaged(file, f"it has {size} bytes, {mark.size} were written")
        if full and (digest := sha256_of(file)) != mark:
            raise _damaged(file, f"its sha256 is {digest.sha256[:12]}.., {mark.sha256[:12]}.. was written")
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, file, f"{file.name} cannot be read") from error


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except OSError as error:
        raise storage_error(error, file, f"{path.name} has no readable manifest") from error
    try:
        data = json.loads(text)
        schema = data["schema"]
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise TypeError(f"schema is {schema!r}")
        if data["sha256"] != _seal(data):
            raise ValueError("its content is not that of its sha256")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(file, f"{len(text)} bytes that are not a manifest: {error!r}") from error
    if schema != SCHEMA:
        raise StorageError(
            f"{path.name} was written in the checkpoint format {schema}, this slime reads {SCHEMA}",
            code="STO113",
            where=str(file),
            fix="resume with the slime that wrote it",
        )
    _check_form(file, data)
    return data  # type: ignore[no-any-return]


FORM = {"version": int, "epoch": int, "files": dict, "config": dict, "plugins": str, "machine": dict}


def _check_form(file: Path, data: Mapping[str, Any]) -> None:
    wrong = [name for name, kind in FORM.items() if not isinstance(data.get(name), kind)]
    if wrong:
        raise _damaged(file, f"it has no {', '.join(wrong)}")
    for name, mark in data["files"].items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise _damaged(file, f"it lists {name!r}, which is outside the folder")
        if not isinstance(mark, dict) or not isinstance(mark.get("size"), int) or "sha256" not in mark:
            raise _damaged(file, f"it has no size and hash for {name}")


def _damaged(file: Path, why: str) -> StorageError:
    return StorageError(f"{file.name} is not what was written", code="STO112", where=str(file), why=why)


def check_state(state: Mapping[str, Any], holder: str = "slime_state") -> None:
    """Refuse plugin state that cannot be stored and come back equal; ``state`` of ``holder`` is by plugin name.

    Called before the first step, so that it does not fail at the first checkpoint.

    Raises:
        PluginError: PLG64 with the plugin and the key.
    """
    for plugin, value in state.items():
        if trouble := _trouble(value, ""):
            key, reason = trouble
            raise PluginError(
                f"the state of plugin '{plugin}' cannot be saved",
                code="PLG64",
                where=f"{holder} of {plugin}" + (f", key {key}" if key else ""),
                why=reason,
                fix="return JSON: dicts with str keys, lists, str, int, finite float, bool, None",
            )


def _trouble(value: Any, key: str) -> tuple[str, str] | None:
    """Where and why a value is not JSON that comes back equal; None where it is."""
    if value is None or type(value) in (bool, int):
        return None
    if type(value) is float:
        return None if math.isfinite(value) else (key, f"it is {value}, which JSON does not have")
    if type(value) is str:
        return None if _encodes(value) else (key, "it is text that is not valid Unicode")
    if type(value) is list:
        troubles = (_trouble(item, f"{key}[{index}]") for index, item in enumerate(value))
        return next((one for one in troubles if one), None)
    if type(value) is dict:
        for name, item in value.items():
            if type(name) is not str:
                return key, f"its key {name!r} is a {type(name).__name__}, not a str"
            if found_in := _trouble(item, f"{key}.{name}" if key else name):
                return found_in
        return None
    return key, f"it is a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_dtype(checkpoint: LoadedCheckpoint, dtype: str, forced: Collection[str] = ()) -> None:
    """Refuse to resume in another dtype than the run computed in: ``train.dtype = auto`` follows the machine.

    Parameters and moments are float32 in every checkpoint; steps would round otherwise than those before them.

    Raises:
        TrainerError: TRN108, unless ``train.dtype`` is forced.
    """
    saved = checkpoint.machine.get("dtype", dtype)
    if saved != dtype and not {"train.dtype", "dtype"} & set(forced):
        raise TrainerError(
            f"the run computed in {saved} and would continue in {dtype}",
            code="TRN108",
            where=str(checkpoint.path),
            why=f"train.dtype = auto is {dtype} on this machine; the checkpoint was written on {checkpoint.machine}",
            fix=f"--dtype {saved}   or   --force-key train.dtype",
        )

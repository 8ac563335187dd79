"""The run directory: where everything of a run lies, and the lock that keeps a second process out.

runs/NAME-N/   config.toml run.json metrics.jsonl samples.jsonl ledger.sqlite segments/ log/ errors/ checkpoints/
               final/ (a Hugging Face folder, when the run has ended)   lock (held while a process runs)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from slime_core.durable import replace_file, storage_error
from slime_core.errors import ConfigError, StorageError

FOLDERS = ("segments", "log", "errors", "checkpoints")
MARKS = ("config.toml", "metrics.jsonl", "ledger.sqlite", "lock")
"""Files that say that a folder holds a run."""
EARLY = ("lock", "run.json", "driver.json", "log/driver.log")
"""Files that are there before a run has begun."""
LOOK = 2.0
"""Seconds that a start waits for those who look whether a process runs: :meth:`RunDir.holder` locks for a moment."""


class RunDir:
    """Paths of one run, and its lock.

    Example:
        with RunDir.create("demo") as run_dir:             # runs/demo-0
            (run_dir.log / "engine.txt").write_text("...")
        run_dir = RunDir.reopen(Path("runs/demo-0"))       # another process resumes it
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"  # the resolved config, secrets redacted
        self.info = path / "run.json"  # who started the run, with what, and the routing table
        self.metrics = path / "metrics.jsonl"  # one JSON object a step and an evaluation
        self.samples = path / "samples.jsonl"  # best and worst samples of each step
        self.ledger = path / "ledger.sqlite"  # states of all samples
        self.segments = path / "segments"  # payloads of samples
        self.log = path / "log"  # of the driver and of every process that it starts
        self.phase = self.log / "phase"  # what the run does, and since when: a line of one length, written in place
        self.errors = path / "errors"  # tracebacks
        self.checkpoints = path / "checkpoints"  # one folder a checkpoint
        self.final = path / "final"  # the trained model, a Hugging Face folder, when the run has ended
        self.epoch = 1  # of the process that holds the run: 1 at creation, one more at each reopening
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, name: str, *, at: Path | None = None, root: Path | None = None) -> RunDir:
        """Make and lock a new run: ``at`` where given, else the first free ``runs/NAME-N`` in ``root`` (the cwd).

        Raises:
            ConfigError: CFG12 ``at`` holds a run or other files, CFG16 another process runs there.
            StorageError: STO110 the folder cannot be written.
        """
        try:
            path = _claim(at) if at is not None else _number(name, (root or Path.cwd()) / "runs")
            for folder in FOLDERS:
                (path / folder).mkdir(exist_ok=True)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise unwritable(error, Path(error.filename or at or root or Path.cwd())) from error
        run_dir = cls(path)
        run_dir.lock()
        run_dir.write_info({"epoch": run_dir.epoch})
        return run_dir

    @classmethod
    def reopen(cls, path: Path, *, epoch: int = 0) -> RunDir:
        """Lock an existing run for a new process, in an epoch after all earlier ones and after ``epoch``.

        Raises:
            ConfigError: CFG05 there is no run, CFG16 another process runs there.
            StorageError: STO109, STO110 or STO121 it cannot be written.
        """
        run_dir = cls.open(path)
        try:
            for folder in FOLDERS:
                (run_dir.path / folder).mkdir(exist_ok=True)
            run_dir.lock()
            for file in (
                *run_dir.path.glob(".*.tmp"),
                *(file for file in run_dir.path.glob("*/.*.tmp") if file.is_file()),  # evaluations/, a plugin's
                *run_dir.path.glob(".ranks-*"),
                *run_dir.log.glob("rendezvous-*"),
            ):
                file.unlink(missing_ok=True)  # of a process that was killed
            run_dir.raise_epoch(max(epoch, _whole(run_dir.read_info().get("epoch"), 1)))
        except BaseException as error:
            run_dir.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise storage_error(error, run_dir.path, "the run directory cannot be written") from error
            raise
        return run_dir

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run, to read; no lock is taken.

        Raises:
            ConfigError: CFG05 there is no run at ``path``.
        """
        resolved = path.expanduser().absolute()
        if not (resolved / "config.toml").is_file():
            problem = "holds no run (no config.toml)" if resolved.is_dir() else "does not exist"
            raise ConfigError(
                f"{path} {problem}",
                code="CFG05",
                where=str(resolved),
                why=f"the current folder is {Path.cwd()}",
                fix="name a run directory, such as runs/NAME-0",
            )
        return cls(resolved)

    def lock(self) -> None:
        """Hold the run for this process; the kernel lets go when the process ends, however it ends.

        Raises:
            ConfigError: CFG16 with the pid and host of the holder.
        """
        if self._lock is not None:
            return
        handle = (self.path / "lock").open("a+", encoding="utf-8")
        end = time.monotonic() + LOOK
        while not _has(handle):
            holder = self.holder()
            if holder is not None or time.monotonic() > end:
                handle.close()
                raise _in_use(self.path, holder or {})
            time.sleep(0.01)
        handle.seek(0)
        handle.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now()}, handle)
        handle.flush()
        self._lock = handle

    def holder(self) -> dict[str, Any] | None:
        """Pid, host and start of the process that runs here, or None."""
        path = self.path / "lock"
        if self._lock is not None or not path.exists():
            return None
        with path.open("r", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read_holder(handle)
        return None

    def publish_final(self, folder: Path) -> None:
        """Replace ``final/`` by a written ``folder`` with one rename."""
        old = self.final.with_name(f".{self.final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.final.exists():
            self.final.rename(old)
        folder.rename(self.final)
        shutil.rmtree(old, ignore_errors=True)

    def raise_epoch(self, past: int) -> None:
        """Make :attr:`epoch` one more than ``past``, durably; it never goes down."""
        self.epoch = max(self.epoch, past + 1)
        self.write_info({"epoch": self.epoch})

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Replace ``run.json`` as a whole; keys already there stay unless ``info`` has them.

        Raises:
            StorageError: STO109, STO110 or STO121; the file is unchanged then.
        """
        text = json.dumps({**self.read_info(), **info}, indent=1, sort_keys=True, default=str)
        self._replace(self.info, text + "\n")

    def write_config(self, text: str) -> None:
        """Replace ``config.toml`` as a whole.

        Raises:
            StorageError: as :meth:`write_info`.
        """
        self._replace(self.config, text)

    def _replace(self, path: Path, text: str) -> None:
        try:
            replace_file(path, text.encode())
        except OSError as error:
            raise storage_error(error, path, f"{path.name} cannot be written") from error

    def read_info(self) -> dict[str, Any]:
        """What ``run.json`` holds; empty where it is missing or broken."""
        with contextlib.suppress(OSError):
            return _table(self.info.read_bytes())
        return {}

    def read_phase(self) -> tuple[str, float]:
        """The part of a step that runs, such as ``train`` (empty between parts), and when it began, a Unix time."""
        with contextlib.suppress(OSError, ValueError):
            name, _, since = self.phase.read_text(encoding="utf-8").rpartition(" ")
            return name.strip(), float(since)
        return "", 0.0

    def save_hang(self, text: str) -> Path:
        """Write the page of a hang, ``log/hang-N.txt``; a full disk must not keep the run from ending."""
        path = self.log / f"hang-{len(list(self.log.glob('hang-*.txt')))}.txt"
        with contextlib.suppress(OSError):
            path.write_text(text, encoding="utf-8", errors="replace")
        return path

    def close(self) -> None:
        """Let another process have the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def next_path(name: str, root: Path | None = None) -> Path:
    """The folder that the next run of this name would get; nothing is made."""
    runs = (root or Path.cwd()) / "runs"
    number = 0
    while (runs / f"{name}-{number}").exists():
        number += 1
    return runs / f"{name}-{number}"


def check_free(path: Path) -> None:
    """Refuse a folder that holds a run or anything else.

    Raises:
        ConfigError: CFG12, or CFG16 where a process runs there.
    """
    path = path.expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(
            "the run directory is a file", code="CFG12", where=str(path), fix="choose another: --run-dir DIR"
        )
    if not path.is_dir() or not any(path.iterdir()):
        return
    holder = RunDir(path).holder()
    if holder is not None:
        raise _in_use(path, holder)
    if _never_began(path):
        return
    is_run = any((path / mark).exists() for mark in MARKS)
    raise ConfigError(
        "the run directory already holds a run" if is_run else "the run directory is not empty",
        code="CFG12",
        where=str(path),
        why="a run never writes over another" if is_run else "a run needs an empty folder",
        fix=f"choose a new name: --run-dir {path}-2\nor leave --run-dir out for runs/NAME-N"
        + (f"\nto resume it: slime run --resume {path}\nto look at it: slime show {path}" if is_run else ""),
    )


def unwritable(error: OSError, where: Path) -> StorageError:
    """STO110: a run directory that cannot be made."""
    return StorageError(
        f"the run directory cannot be made: {error.strerror or error}",
        code="STO110",
        where=str(where),
        fix="choose a writable folder: --run-dir DIR",
    )


def _never_began(path: Path) -> bool:
    """Whether all there is was made by a process that ended before it had a config, and says nothing of a run."""
    files = [
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.relative_to(path).as_posix() not in FOLDERS
    ]
    return all(name in EARLY or name.startswith((".run.json.", ".config.toml.", ".driver.json.")) for name in files)


def _claim(path: Path) -> Path:
    check_free(path)
    path = path.expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _number(name: str, runs: Path) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        path = next_path(name, runs.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


def status_of(info: Mapping[str, Any], holder: Mapping[str, Any] | None) -> str:
    """``running``, how the run ended, or ``crashed``: its last process recorded no end."""
    if holder is not None:
        return "running"
    status = str(info.get("status", "unknown"))
    return "crashed" if status == "running" else status


def _in_use(path: Path, holder: Mapping[str, Any]) -> ConfigError:
    holder_text = f"pid {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
    return ConfigError(
        "another process runs in this run directory",
        code="CFG16",
        where=str(path),
        why=f"it is locked by {holder_text}",
        fix=f"slime attach {path}   follows it\nslime stop {path}   ends it\nor choose another: --run-dir DIR",
    )


def _has(handle: IO[str]) -> bool:
    """Whether this process has the lock now."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _read_holder(handle: IO[str]) -> dict[str, Any]:
    handle.seek(0)
    return _table(handle.read())


def _table(text: str | bytes) -> dict[str, Any]:
    """A JSON object; empty where the text is none."""
    with contextlib.suppress(ValueError):
        data = json.loads(text)
        return data if isinstance(data, dict) else {}
    return {}


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def now() -> str:
    """Local time as ``run.json`` and the lock have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")

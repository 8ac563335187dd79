"""One folder of planned files: written in parallel, kept when interrupted, published by one rename.

    claim .tmp-NAME  ->  keep the journal's files  ->  room?  ->  write the rest  ->  [look]  ->  rename to NAME
                     .tmp-NAME.journal: the plan, then a line with size and hash for each file that is durable

The same job started again continues: files of the journal whose size and hash match are not written again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import ConfigError, StorageError
from slime_core.failpoints import failpoint

PIECE = 16 << 20
AGAIN = "free space or choose another folder, then give the same command again: finished files are kept"


@dataclass(slots=True, frozen=True, kw_only=True)
class PlannedFile:
    """A planned file: its size in bytes is known, its bytes are produced on demand."""

    name: str
    size: int
    parts: Callable[[], Iterator[bytes | memoryview]]


@dataclass(slots=True, frozen=True)
class Mark:
    """What a file holds: its size in bytes and the XXH3 (128 bit) of its content, in hex."""

    size: int
    xxh128: str


class JobStopped(Exception):
    """Another file failed, or the user wants to stop."""


class Job:
    """One folder to be made; a context manager that holds it, so that two processes never make the same one.

    Example:
        with Job(Path("out"), {"source": ...}, files, workers=2) as job:
            job.write()
            job.publish()

    Args:
        target: the folder that will be there at the end; nothing, or an empty folder, is there now
        plan: JSON that is the same only when the same files would be made
        force: replace ``target``, as the last step
        moved: called with numbers of bytes written, kept or verified; from any thread
        note: called with a line for the user
    """

    def __init__(
        self,
        target: Path,
        plan: Mapping[str, Any],
        files: Sequence[PlannedFile],
        *,
        workers: int = 1,
        force: bool = False,
        moved: Callable[[int], None] = lambda count: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.target = Path(os.path.abspath(target))
        self.aside = self.target.parent / f".tmp-{self.target.name}"
        self._journal = self.target.parent / f".tmp-{self.target.name}.journal"
        self._plan = json.dumps({"plan": dict(plan)}, sort_keys=True)
        self.files, self.marks = list(files), dict[str, Mark]()
        self._workers, self._force, self._moved, self._note = workers, force, moved, note
        self._stop = threading.Event()
        self._written = threading.Lock()
        self._fd = -1
        self.reused = 0  # files finished by an earlier attempt

    def __enter__(self) -> Job:
        try:
            self._claim()
            self._keep()
            self._check_room()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._release()

    def _claim(self) -> None:
        try:
            if self._is_taken():
                raise ConfigError(
                    f"{self.target.name or self.target} is there already",
                    code="CFG12",
                    where=str(self.target),
                    fix="choose another folder, or --force, which replaces it when the new one is complete",
                )
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._journal, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.aside.mkdir(exist_ok=True)
        except BlockingIOError:
            raise ConfigError(
                f"another process makes {self.target.name}",
                code="CFG16",
                where=str(self._journal),
                fix="wait until it ends, or choose another folder",
            ) from None
        except OSError as error:
            raise self._failed(error, self.target.parent, f"{self.target} cannot be made") from error

    def _is_taken(self) -> bool:
        """Whether something is there that only ``force`` replaces."""
        try:
            os.stat(self.target)  # Path.exists says no to a path that cannot be
        except FileNotFoundError:
            return False
        return not self._force and (not self.target.is_dir() or any(self.target.iterdir()))

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _keep(self) -> None:
        """Take over what an earlier try of the same job finished; the rest of it goes."""
        lines = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace").splitlines()
        listed: dict[str, Mark] = {}
        if lines and lines[0] == self._plan:
            listed = dict(entry for line in lines[1:] if (entry := _listed(line)) is not None)
        elif lines:
            self._note(f"{self.aside.name} was started from other files or with other options: it starts again")
        sizes = {file.name: file.size for file in self.files}
        for path in sorted(self.aside.rglob("*"), reverse=True):
            if path.is_dir():
                continue
            name = path.relative_to(self.aside).as_posix()
            mark = listed.get(name)
            if mark is not None and sizes.get(name) == mark.size and self._mark(path) == mark:
                self.marks[name] = mark
            else:
                durable.disk.remove(path)
        self.reused = len(self.marks)
        if self.reused:
            self._note(f"{self.reused} of {len(self.files)} files are kept from an earlier try")
        os.ftruncate(self._fd, 0)
        text = "".join(f"{line}\n" for line in (self._plan, *(_line(name, mark) for name, mark in self.marks.items())))
        durable.disk.write(self._fd, text.encode(), 0)
        durable.disk.sync(self._fd)

    def _check_room(self) -> None:
        """Refuse to begin what cannot end."""
        needed = sum(file.size for file in self.files if file.name not in self.marks)
        free = shutil.disk_usage(self.aside).free
        if needed > free:
            raise StorageError(
                f"{self.target.name} needs {needed:,} bytes more, the disk has {free:,}",
                code="STO109", where=str(self.target.parent), fix=AGAIN,
            )  # fmt: skip

    def write(self) -> None:
        """Make every file that is not there yet.

        Raises:
            StorageError: STO109 full disk and others, with the file; finished files stay.
            DataError: a source is damaged.
        """
        todo = [file for file in self.files if file.name not in self.marks]
        self._run_all([lambda file=file: self._make(file) for file in todo])  # type: ignore[misc]

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Do other work with the job's workers; the first error ends it."""
        self._run_all(tasks)

    def check_stop(self) -> None:
        """Called often by tasks: raises where another one failed."""
        if self._stop.is_set():
            raise JobStopped

    def _run_all(self, tasks: Sequence[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(max(1, self._workers), thread_name_prefix="convert") as pool:
            futures = [pool.submit(self._guarded, task) for task in tasks]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                if any(not future.done() or future.exception() for future in futures):
                    self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
        errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
        for error in errors:
            if not isinstance(error, JobStopped):
                raise error

    def _guarded(self, task: Callable[[], None]) -> None:
        self.check_stop()
        try:
            task()
        except BaseException:
            self._stop.set()
            raise

    def _make(self, file: PlannedFile) -> None:
        path = self.aside / file.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mark = self._write(path, file)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise self._failed(error, path, f"{file.name} cannot be written") from error
            raise
        failpoint("convert.file")
        with self._written:
            end = os.lseek(self._fd, 0, os.SEEK_END)
            durable.disk.write(self._fd, f"{_line(file.name, mark)}\n".encode(), end)
            durable.disk.sync(self._fd)
            self.marks[file.name] = mark
        failpoint("convert.journaled")

    def _write(self, path: Path, file: PlannedFile) -> Mark:
        digest, place, disk = xxhash.xxh3_128(), 0, durable.disk
        fd = disk.create(path)
        try:
            for part in file.parts():
                self.check_stop()
                digest.update(part)
                disk.write(fd, part, place)
                place += len(part)
                self._moved(len(part))
            disk.sync(fd)
        finally:
            disk.close(fd)
        assert place == file.size, f"{file.name}: {place} bytes were made, {file.size} were planned"
        return Mark(place, digest.hexdigest())

    def _mark(self, path: Path) -> Mark:
        digest, size = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(PIECE))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
                self._moved(count)
        return Mark(size, digest.hexdigest())

    def publish(self) -> None:
        """Publish the folder; with ``force`` the replaced one is removed afterwards.

        Raises:
            StorageError: it cannot be renamed; all is still in the folder aside.
        """
        disk, old = durable.disk, self.target.parent / f".tmp-{self.target.name}.old"
        try:
            for folder in sorted({path.parent for path in self.aside.rglob("*")} | {self.aside}):
                disk.sync_folder(folder)
            failpoint("convert.publish")
            if old.exists():
                disk.remove_tree(old)
            if self.target.exists() and self._force:
                disk.rename(self.target, old)
            disk.rename(self.aside, self.target)
            disk.sync_folder(self.target.parent)
            failpoint("convert.published")
            disk.remove(self._journal)
            if old.exists():
                disk.remove_tree(old)
        except OSError as error:
            raise self._failed(error, self.target, f"{self.target.name} cannot be published") from error

    def _failed(self, error: OSError, where: Path, what: str) -> StorageError:
        failure = storage_error(error, where, what)
        if failure.code in ("STO109", "STO121"):
            failure.fix = AGAIN
        elif failure.code != "STO120":
            failure.fix = "choose another folder"
        return failure


def _line(name: str, mark: Mark) -> str:
    return json.dumps({"file": name, "size": mark.size, "xxh128": mark.xxh128})


def _listed(line: str) -> tuple[str, Mark] | None:
    """A line of the journal; None of one that was cut."""
    try:
        entry = json.loads(line)
        return str(entry["file"]), Mark(int(entry["size"]), str(entry["xxh128"]))
    except (ValueError, KeyError, TypeError):
        return None

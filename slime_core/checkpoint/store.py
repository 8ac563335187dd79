"""A run's checkpoints: written in the background, published by one rename, verified when read.

    begin: trainer.save -> .tmp-N-ID/trainer     then, in the background:
    trainer.saved -> state.json -> MANIFEST.json -> fsync -> rename to step-N -> fsync -> verify -> retention

Nothing but the name `step-N` says that a checkpoint is whole, and it has that name only when everything in it is
durable. Older ones go only after every hash of the newest was read back.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core import durable
from slime_core.checkpoint import manifest
from slime_core.checkpoint.manifest import CheckpointMetadata, LoadedCheckpoint
from slime_core.durable import FileMark, storage_error
from slime_core.errors import StorageError
from slime_core.failpoints import failpoint
from slime_core.seeds import generators

if TYPE_CHECKING:
    from slime_core.protocols import Ledger, Trainer


class _PendingCheckpoint:
    """A snapshot of the loop's state when the checkpoint began; the loop changes its own meanwhile."""

    def __init__(
        self, version: int, metadata: CheckpointMetadata, counts: dict[str, int], random: dict[str, Any]
    ) -> None:
        self.version = version
        self.state = (json.dumps(metadata.state, indent=1, allow_nan=False) + "\n").encode()
        self.head = manifest.head(version, metadata, ledger=counts, random=random)


class Checkpoints:
    """Publishes and finds checkpoints in ``folder``; one owner at a time, the process that holds the run's lock.

    Example:
        checkpoints = Checkpoints(run_dir.checkpoints, keep=2, note=report.note)
        checkpoint = checkpoints.latest()
        await checkpoints.begin(12, metadata, trainer, ledger)     # training continues
        checkpoints.raise_failed()                                 # at every step boundary
        await checkpoints.wait()
    """

    def __init__(self, folder: Path, *, keep: int, note: Callable[[str], None]) -> None:
        self.folder, self.keep, self._note = folder, keep, note
        self._task: asyncio.Task[None] | None = None
        self._aside: Path | None = None  # the checkpoint that is being written
        self._verified: set[int] = set()  # versions whose hashes this process has read back
        self.seconds = 0.0  # the longest way of one, from begun to published

    async def begin(self, version: int, metadata: CheckpointMetadata, trainer: Trainer, ledger: Ledger) -> None:
        """Copy the trainer's state, and write and publish the rest in the background.

        Waits for one in progress. A version that exists and verifies is left unchanged.

        Raises:
            StorageError: this one cannot be begun, or the one before it failed.
        """
        await self.wait()
        began = time.monotonic()
        if await asyncio.to_thread(self._is_there, version):
            return
        aside = await asyncio.to_thread(self._make_aside, version)
        self._aside = aside
        try:
            pending = _PendingCheckpoint(version, metadata, dict(await ledger.counts()), generators())
            await trainer.save(aside / manifest.TRAINER)
        except Exception:
            await asyncio.to_thread(self._drop_aside)
            raise
        failpoint("checkpoint.begin")
        self._task = asyncio.create_task(self._finish(aside, pending, trainer, ledger, began))

    async def wait(self) -> None:
        """Wait until the one under way is published.

        Raises:
            StorageError: it could not be written; the checkpoints before it are as they were.
        """
        if self._task is not None:
            await asyncio.wait({self._task})
            self.raise_failed()

    def raise_failed(self) -> None:
        """Raise what went wrong in the background, once; nothing happens while the checkpoint is being written.

        Raises:
            StorageError: as :meth:`wait`.
        """
        task = self._task
        if task is not None and task.done():
            self._task = None
            task.result()

    async def _finish(
        self, aside: Path, pending: _PendingCheckpoint, trainer: Trainer, ledger: Ledger, began: float
    ) -> None:
        try:
            marks = {f"{manifest.TRAINER}/{name}": mark for name, mark in (await trainer.saved()).items()}
            failpoint("checkpoint.files")
            backup: Any = getattr(ledger, "backup", None)
            if backup is not None:
                marks[manifest.LEDGER] = await backup(aside / manifest.LEDGER)
            await asyncio.to_thread(self._publish, aside, pending, marks)
            self.seconds = max(self.seconds, time.monotonic() - began)
        except OSError as error:
            await asyncio.to_thread(self._drop_aside)
            if isinstance(error, StorageError):
                raise
            raise storage_error(error, aside, f"checkpoint {pending.version} cannot be written") from error
        except Exception:  # a task that is cancelled leaves the folder to the next sweep: a thread may be in it
            await asyncio.to_thread(self._drop_aside)
            raise

    def _publish(self, aside: Path, pending: _PendingCheckpoint, marks: dict[str, FileMark]) -> None:
        disk = durable.disk
        marks[manifest.STATE] = durable.write_file(aside / manifest.STATE, [pending.state])
        failpoint("checkpoint.state")
        manifest.compare(aside, marks, full=False)
        durable.write_file(aside / manifest.MANIFEST, [manifest.write_manifest(marks, pending.head)])
        for folder in sorted({(aside / name).parent for name in marks} | {aside}):
            disk.sync_folder(folder)
        failpoint("checkpoint.manifest")
        path = self.folder / f"{manifest.PREFIX}{pending.version}"
        disk.rename(aside, path)
        failpoint("checkpoint.renamed")
        disk.sync_folder(self.folder)
        self._aside = None
        failpoint("checkpoint.published")
        self._retire(pending.version)

    def _is_there(self, version: int) -> bool:
        """Whether this version is published and whole; one that is not is set aside."""
        path = self.folder / f"{manifest.PREFIX}{version}"
        if not path.exists():
            return False
        if version in self._verified:
            return True
        try:
            manifest.read(path, version)
        except StorageError as error:
            self._quarantine(path, error)
            return False
        self._verified.add(version)
        return True

    def _make_aside(self, version: int) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.sweep()
            aside = self.folder / f"{manifest.ASIDE}{version}-{uuid.uuid4().hex[:12]}"
            durable.disk.make_folder(aside)
        except OSError as error:
            raise storage_error(error, self.folder, f"checkpoint {version} cannot be written") from error
        return aside

    def _drop_aside(self) -> None:
        """Remove the unfinished checkpoint."""
        aside, self._aside = self._aside, None
        if aside is not None and aside.exists():
            with suppress(OSError):
                durable.disk.remove_tree(aside)

    def sweep(self) -> None:
        """Remove what dead processes left half written or half removed. Raises OSError."""
        for path in self.folder.glob(f"{manifest.ASIDE}*"):
            if path != self._aside:
                durable.disk.remove_tree(path)

    def _retire(self, newest: int) -> None:
        """Keep the newest ``keep`` that verify, ``newest`` first, and remove the older ones."""
        self.sweep()
        saved = manifest.names_in(self.folder)
        if len(saved) <= self.keep:
            return
        with ThreadPoolExecutor(self.keep) as pool:
            list(pool.map(self._is_there, [version for version, _ in saved[: self.keep]]))
        count = 0
        for version, path in saved:
            if count == self.keep:
                self._remove(path)
            elif self._is_there(version):
                count += 1
            elif version == newest:
                raise StorageError(
                    f"checkpoint {version} is not what was written", code="STO112", where=str(path),
                    why="it was read back after it was published", fix="look at the disk (dmesg)",
                )  # fmt: skip

    def _remove(self, path: Path) -> None:
        """First by name, so that no half of it is ever taken for a checkpoint."""
        failpoint("checkpoint.retention")
        aside = self.folder / f"{manifest.ASIDE}removed-{path.name}-{uuid.uuid4().hex[:12]}"
        durable.disk.rename(path, aside)
        durable.disk.sync_folder(self.folder)
        durable.disk.remove_tree(aside)

    def _quarantine(self, path: Path, error: StorageError) -> Path:
        """Rename a damaged checkpoint; its content is not changed."""
        corrupt = self.folder / f"{manifest.CORRUPT}{path.name}-{uuid.uuid4().hex[:8]}"
        try:
            durable.disk.rename(path, corrupt)
            durable.disk.sync_folder(self.folder)
        except OSError as failed:
            self._note(f"DAMAGED CHECKPOINT {path.name}: {error}; it cannot be renamed: {failed}")
            return path
        self._note(f"DAMAGED CHECKPOINT {path.name}: {error}; it is now {corrupt.name}")
        return corrupt

    def oldest(self) -> int | None:
        """The version of the oldest checkpoint; None without checkpoints."""
        return min((version for version, _ in manifest.names_in(self.folder)), default=None)

    def latest(self, *, strict: bool = False) -> LoadedCheckpoint | None:
        """The newest checkpoint whose files all verify; None without one.

        One that is damaged is said loudly, renamed to `corrupt-...`, and the one before it is taken.

        Raises:
            StorageError: with ``strict``, STO111 or STO112 of the newest; always, STO113 written by another slime.
        """
        lost: int | None = None
        for version, path in manifest.names_in(self.folder):
            try:
                checkpoint = manifest.read(path, version)
            except StorageError as error:
                if strict or error.code == "STO113":
                    raise
                self._quarantine(path, error)
                lost = version if lost is None else lost
                continue
            self._verified.add(version)
            self._tell(lost, version)
            return checkpoint
        self._tell(lost, 0)
        aside = len(list(self.folder.glob(f"{manifest.ASIDE}*")))
        if aside and lost is None:
            self._note(f"no complete checkpoint in {self.folder}, {aside} were being written when a run ended")
        return None

    def _tell(self, lost: int | None, version: int) -> None:
        if lost is not None:
            where = f"checkpoint {version}" if version else "version 0, there is no other checkpoint"
            self._note(f"DAMAGED CHECKPOINT costs {lost - version} steps: the run resumes from {where}")

"""Where a database may live: SQLite's write-ahead log needs a local file system, and never says so."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from slime_core.durable import storage_error
from slime_core.errors import StorageError

NAME = "ledger.sqlite"
NETWORK = frozenset(
    (
        *(
            "9p",
            "afs",
            "beegfs",
            "ceph",
            "cifs",
            "coda",
            "gfs2",
            "glusterfs",
            "gpfs",
            "lustre",
            "ncpfs",
            "nfs",
            "nfs4",
        ),
        *("ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "weka", "wekafs"),
    )
)
LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.lxcfs"})
MOUNTS = Path("/proc/self/mountinfo")
ESCAPE = re.compile(r"\\([0-7]{3})")


def network_type(path: Path) -> str:
    """The type of the network file system that holds ``path``; empty for a local one, or where nobody can tell."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, kind = "", ""
    resolved = str(path.resolve())
    for line in lines:
        place, _, behind = line.partition(" - ")
        mount = ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), place.split()[4])
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(found):  # a later mount covers an earlier one
            found, kind = mount, behind.split()[0]
    remote = kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)
    return kind if remote else ""


def database_path(run_dir: Path, ledger_dir: Path | None) -> Path:
    """``ledger.sqlite`` in the run directory, or in a folder of the run's own below ``ledger_dir``, which is made.

    Raises:
        StorageError: STO118 it would lie on a network file system, STO110 the folder cannot be made.
    """
    if ledger_dir is None:
        _require_local(run_dir, "the run directory", "keep the ledger on a local disk: --ledger-dir /var/tmp/slime")
        return run_dir / NAME
    _require_local(ledger_dir, "report.ledger_dir", "choose a folder on a local disk: --ledger-dir /var/tmp/slime")
    folder = own_folder(run_dir, ledger_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, folder, "the ledger's folder cannot be made") from error
    return folder / NAME


def own_folder(run_dir: Path, ledger_dir: Path) -> Path:
    """The folder of a run below ``ledger_dir``, by the run directory's path; nothing is made."""
    resolved = run_dir.resolve()
    digest = hashlib.sha256(str(resolved).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return ledger_dir / f"{resolved.name}-{digest}"


def _require_local(path: Path, what: str, fix: str) -> None:
    kind = network_type(path)
    if kind:
        raise StorageError(
            f"{what} is on a network file system ({kind})",
            code="STO118",
            where=str(path),
            why="SQLite's write-ahead log is shared memory: over a network it loses commits",
            fix=fix,
        )

"""A run that goes on from a version in; its figures and samples without the lines that will be written again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_cli.evaluation_records import trim_records
from slime_core.durable import replace_file, storage_error
from slime_core.failpoints import failpoint

if TYPE_CHECKING:
    from slime_core.checkpoint import LoadedCheckpoint
    from slime_core.report.rundir import RunDir


def trim_figures(run_dir: RunDir, version: int, *, evaluations: int = 1) -> int:
    """Take the lines of later steps from ``metrics.jsonl`` and ``samples.jsonl``; the answer is how many went.

    Records of later evaluations are removed with them.

    A line that is torn goes too. Of the evaluations at ``version`` itself the first ``evaluations`` of each set stay.

    Raises:
        StorageError: STO109, STO110 or STO121; each file is then as it was, or trimmed.
    """
    gone = 0
    for path in (run_dir.metrics, run_dir.samples):
        try:
            lines = path.read_bytes().splitlines(keepends=True)
            kept = list(_kept(lines, version, evaluations))
            gone += len(lines) - len(kept)
            if len(kept) != len(lines):
                replace_file(path, b"".join(kept))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, path, f"{path.name} cannot be trimmed") from error
    try:
        trim_records(run_dir.path, version)
    except OSError as error:
        raise storage_error(error, run_dir.path, "records of later evaluations cannot be removed") from error
    failpoint("rundir.metrics.trimmed")
    return gone


def _kept(lines: list[bytes], version: int, evaluations: int) -> Iterator[bytes]:
    """Whole lines of ``version`` and before."""
    seen: Counter[str] = Counter()
    for line in lines:
        try:
            row = json.loads(line if line.endswith(b"\n") else b"torn")
            made = int(row["version"])
        except (ValueError, KeyError, TypeError):
            continue
        if made == version and row.get("kind") == "eval":
            seen[str(row.get("name"))] += 1
            if seen[str(row.get("name"))] > evaluations:
                continue
        if made <= version:
            yield line


def evaluations_kept(found: LoadedCheckpoint | None) -> int:
    """How many evaluations of each set at the checkpoint's own version will not be made again.

    A stage that follows another begins with one at the version where the other ended with one.
    """
    if found is None:
        return 0
    between = int(found.state["step"] == 0 and found.state["stage"] > 0)
    return between + (0 if found.state["eval_due"] else 1)

"""Trimming of a resumed run's metrics and samples: lines that will be written again are removed."""

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
        StorageError: STO109, STO110 or STO121; each file is then unchanged or trimmed.
    """
    dropped = 0
    for path in (run_dir.metrics, run_dir.samples):
        try:
            lines = path.read_bytes().splitlines(keepends=True)
            remaining = list(_remaining_lines(lines, version, evaluations))
            dropped += len(lines) - len(remaining)
            if len(remaining) != len(lines):
                replace_file(path, b"".join(remaining))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, path, f"{path.name} cannot be trimmed") from error
    try:
        trim_records(run_dir.path, version)
    except OSError as error:
        raise storage_error(error, run_dir.path, "records of later evaluations cannot be removed") from error
    failpoint("rundir.metrics.trimmed")
    return dropped


def _remaining_lines(lines: list[bytes], version: int, evaluations: int) -> Iterator[bytes]:
    """Whole lines of ``version`` and before."""
    counts: Counter[str] = Counter()
    for line in lines:
        try:
            row = json.loads(line if line.endswith(b"\n") else b"torn")
            version_of = int(row["version"])
        except (ValueError, KeyError, TypeError):
            continue
        if version_of == version and row.get("kind") == "eval":
            counts[str(row.get("name"))] += 1
            if counts[str(row.get("name"))] > evaluations:
                continue
        if version_of <= version:
            yield line


def evaluations_kept(checkpoint: LoadedCheckpoint | None) -> int:
    """How many evaluations of each set at the checkpoint's own version will not be made again.

    A stage that follows another begins with one at the version where the other ended with one.
    """
    if checkpoint is None:
        return 0
    between = int(checkpoint.state["step"] == 0 and checkpoint.state["stage"] > 0)
    return between + (0 if checkpoint.state["eval_due"] else 1)

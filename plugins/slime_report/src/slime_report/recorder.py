"""What the ledger does not keep, recorded while a run trains with `--plugin report`.

    RUN/report/step-000007    the trainer's figures of every token of step 7: log-probs, advantages, ...
    RUN/report/steps.jsonl    a line a step: when it was done, memory, how long it waited for rewards alone

A step's file is deflated, in the ledger's own record form (`slime_core.ledger.codec`): sample ids and response lengths
in the header, a float32 array a column behind it, all samples' tokens in order. What the ledger has (tokens, the
engine's log-probs, masks) is not in it. A repeated step replaces its file, and those after it, of before a resume, go.
`report.ledger_keep_steps` removes a file when it removes the tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.checkpoint.manifest import names_in
from slime_core.durable import replace_file
from slime_core.ledger.codec import pack, unpack
from slime_core.report.history import read_lines

if TYPE_CHECKING:
    from slime_core.types import Batch, Columns, StepReport

FOLDER = "report"
LINES = "steps.jsonl"
RECORDED = ("policy", "reference", "teacher", "values", "advantages", "returns")
"""Columns of a batch that are recorded, where it has them."""


class StepRecorder:
    """Writes the records of one run.

    Example:
        recorder = StepRecorder()
        recorder.batch(batch, run_dir, keep_steps=0)     # slime_batch: the advantages are there
        recorder.step(report, run_dir)                   # slime_step_done
    """

    def __init__(self) -> None:
        self._generated = 0.0  # when the last sample was generated, monotonic seconds; 0: none in this step
        self._batched = 0.0  # when the step's batch was complete

    def generated(self) -> None:
        """A sample for training was generated."""
        self._generated = time.monotonic()

    def batch(self, batch: Batch, run_dir: Path, *, keep_steps: int) -> None:
        """Write the columns of a step and remove those of later steps, which a resume goes back behind.

        With ``keep_steps`` the steps more than that behind the oldest checkpoint go too, as the ledger's payloads do.

        Raises:
            OSError: the disk.
        """
        self._batched = time.monotonic()
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"step-{batch.version + 1:06d}", zlib.compress(record_of(batch), 1))
        oldest = min((version for version, _ in names_in(run_dir / "checkpoints")), default=0)
        first = oldest - keep_steps if keep_steps else 0
        for step in list(recorded_versions(run_dir)):
            if not first <= step <= batch.version + 1:
                (folder / f"step-{step:06d}").unlink()

    def step(self, report: StepReport, run_dir: Path) -> None:
        """Write the line of a step.

        Raises:
            OSError: the disk.
        """
        row = {"version": report.version, "time": time.time(), "memory": memory()}
        if self._generated and self._batched:
            waited = self._batched - self._generated - report.seconds.get("score", 0.0)
            row["reward_seconds"] = min(max(waited, 0.0), report.seconds.get("rollout", 0.0))
        self._generated = self._batched = 0.0
        (run_dir / FOLDER).mkdir(exist_ok=True)
        with (run_dir / FOLDER / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def record_of(batch: Batch) -> bytes:
    """A step's file before it is deflated."""
    lengths = np.diff(batch.response_offsets).tolist()
    arrays = [
        (name, np.ascontiguousarray(batch.columns[name], dtype="<f4")) for name in RECORDED if name in batch.columns
    ]
    return b"".join(pack({"ids": batch.sample_ids, "lengths": lengths}, arrays))


def read_record(run_dir: Path, version: int) -> dict[str, Columns]:
    """The columns of the step that made ``version``, by sample id; none where it was not recorded or is damaged."""
    try:
        fields, arrays = unpack(zlib.decompress((run_dir / FOLDER / f"step-{version:06d}").read_bytes()))
        ends = np.cumsum([0, *fields["lengths"]]).tolist()
        return {
            sample: {name: array[start:end] for name, array in arrays.items()}
            for sample, start, end in zip(fields["ids"], ends[:-1], ends[1:], strict=True)
        }
    except (OSError, ValueError, KeyError, zlib.error):
        return {}


def read_steps(run_dir: Path) -> dict[int, Mapping[str, Any]]:
    """The lines of steps, by version; of a step that was repeated, the later one."""
    return {row["version"]: row for row in read_lines(run_dir / FOLDER / LINES) if "version" in row}


def recorded_versions(run_dir: Path) -> Iterator[int]:
    """Steps whose columns were recorded."""
    return (int(file.name[5:]) for file in (run_dir / FOLDER).glob("step-*") if file.name[5:].isdecimal())


def memory() -> dict[str, float]:
    """GiB in use: the resident memory of this process, and what is not free of its CUDA device if it has one."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    figures = {"driver": pages * os.sysconf("SC_PAGE_SIZE") / 2**30}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        figures["device"] = (total - free) / 2**30
    return figures

"""Named places where a process can be made to die, so that tests can prove what survives.

    SLIME_FAILPOINT=ledger.journal.after:2=kill slime run ...        the second time it gets there: SIGKILL

Without the variable a failpoint is one comparison. Every durable boundary has one on each side; `NAMES` is the list.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

from slime_core.errors import StorageError

NAMES = (
    "ledger.issue.before",
    "ledger.issue.after",
    "ledger.finish.written",  # payloads are written, not yet durable
    "ledger.finish.synced",  # payloads are durable, nothing names them yet
    "ledger.finish.after",
    "ledger.drop.before",
    "ledger.drop.after",
    "ledger.suspend.before",
    "ledger.suspend.after",
    "ledger.journal.before",
    "ledger.journal.after",
    "ledger.trained.before",
    "ledger.trained.after",
    "ledger.rewind.before",
    "ledger.rewind.after",
    "ledger.prune.before",
    "ledger.prune.committed",  # rows name no payload any more, the files are still there
    "ledger.prune.after",
    "checkpoint.begin",
    "checkpoint.files",  # the trainer's files are durable
    "checkpoint.state",  # so is the loop's state
    "checkpoint.manifest",  # so is the manifest; nothing is published yet
    "checkpoint.renamed",  # the folder has its name, the parent is not yet durable
    "checkpoint.published",
    "checkpoint.retention",  # one older checkpoint is about to be removed
    "loop.stepped",  # the optimizer step is done, the ledger does not say so yet
    "loop.synced",  # the engine serves the new version
    "loop.reported",  # the step's metrics are written
    "loop.exported",  # final/ is written, the run does not say so yet
    "rundir.metrics.trimmed",  # metrics of steps that will be repeated are removed
)

SERVICE_NAMES = (
    "buffer.commit.before",  # of the rollout buffer service's own tables
    "buffer.commit.after",
    "buffer.ledger.before",  # its tables hold requested or dropped groups that the ledger lacks
    "buffer.ledger.after",
    "buffer.write.staged",  # the last rollout of a group is stored, the ledger does not have the group
    "buffer.write.finished",  # the ledger has it, the tables do not say so
    "buffer.ack.noted",  # an acknowledgement is stored, the ledger does not know
    "buffer.ack.told",
)
"""Those of `slime buffer serve`, which a run never reaches."""


class _Armed:
    """The environment's setting, read once."""

    def __init__(self, text: str) -> None:
        place, _, self.action = text.partition("=")
        self.name, _, nth = place.partition(":")
        self.nth = int(nth or 1)
        self.counts: Counter[str] = Counter()
        if text and (self.name not in (*NAMES, *SERVICE_NAMES) or self.action not in ("kill", "stop", "raise")):
            raise StorageError(
                f"SLIME_FAILPOINT={text} names no failpoint", why="NAME:NTH=kill, =stop or =raise; see NAMES"
            )


_armed = _Armed(os.environ.get("SLIME_FAILPOINT", ""))


def failpoint(name: str) -> None:
    """Die here, if the environment says so: ``kill`` is SIGKILL to this process, ``raise`` a StorageError.

    ``stop`` is SIGSTOP: the waiting parent may then kill the process here, or continue it.
    """
    if _armed.name != name:
        return
    _armed.counts[name] += 1
    if _armed.counts[name] != _armed.nth:
        return
    if _armed.action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if _armed.action == "kill" else signal.SIGSTOP)
        return
    raise StorageError(f"failpoint {name}", why="requested by SLIME_FAILPOINT")


def arm(text: str) -> None:
    """Set the failpoint as the environment variable does, for forked processes."""
    global _armed  # noqa: PLW0603
    _armed = _Armed(text)

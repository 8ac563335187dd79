"""The conservation law: every sample that was issued has trained, was dropped for a reason, or is pending."""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.errors import StorageError


def dropped_in(counts: Mapping[str, int]) -> int:
    """Samples of a ledger's counts that were dropped, whatever the reason."""
    return sum(count for name, count in counts.items() if name.startswith("dropped/"))


def conservation(counts: Mapping[str, int]) -> str:
    """A ledger's counts as one line: ``24 issued = 20 trained + 4 dropped + 0 pending``.

    Raises:
        StorageError: STO00 with the counts, where they do not add up.
    """
    dropped = dropped_in(counts)
    issued, trained, pending = counts["issued"], counts["trained"], counts["pending"]
    if issued != trained + dropped + pending or min(counts.values()) < 0:
        raise StorageError(
            f"samples were lost or doubled: {dict(counts)}",
            code="STO00",
            why=f"issued = trained + dropped + pending, here {issued} and {trained} + {dropped} + {pending}",
            fix="keep the run directory as it is and report this; slime show RUN_DIR tells the counts",
        )
    return f"{issued} issued = {trained} trained + {dropped} dropped + {pending} pending"

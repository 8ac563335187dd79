"""What a trainer holds of its state now, and which calls need what: `release` and `reacquire` of a `Trainer`."""

from __future__ import annotations

from collections.abc import Set

from slime_core.errors import TrainerError

HOLDS = frozenset({"gradients", "optimizer", "parameters"})


class Holding:
    """Starts with everything.

    Example:
        holding = Holding()
        holding.need({"parameters"}, "score")
        holding.now -= holding.known({"optimizer"})
    """

    def __init__(self) -> None:
        self.now = set(HOLDS)

    def known(self, what: Set[str]) -> set[str]:
        """The same names.

        Raises:
            TrainerError: a name that no trainer holds.
        """
        if unknown := what - HOLDS:
            raise TrainerError(f"a trainer holds {sorted(HOLDS)}, not {sorted(unknown)}")
        return set(what)

    def need(self, what: Set[str], call: str) -> None:
        """Refuse a call whose state was released.

        Raises:
            TrainerError: with what to reacquire.
        """
        if missing := sorted(what - self.now):
            raise TrainerError(f"{call} was called while {missing} were released", fix=f"reacquire({missing}) first")

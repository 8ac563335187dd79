"""What the model of the ledger remembers: its samples, a row each, and what became of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from slime_core.protocols import RequestTurn
from slime_core.types import Completion, GenerateRequest, Group, Prompt, Sample, SamplingParams

N = 2  # samples a prompt
REASONS = ("equal_rewards", "over_sampled", "infra_error", "plugin_error")


@dataclass
class Row:
    """One sample and attempt, as the model has it."""

    id: str
    attempt: int
    state: str = "pending"
    reason: str = ""
    payload: Sample | None = None  # None: none was stored, or it is pruned
    place: int = -1
    newest: int = -1
    step: int = 0  # version for whose step it is journaled


@dataclass
class Model:
    """All rows in the order in which they were made, journals, weights, suspended turns."""

    rows: list[Row] = field(default_factory=list)
    by_position: dict[int, list[Row]] = field(default_factory=dict)
    journals: dict[int, list[str]] = field(default_factory=dict)
    fingerprints: dict[int, str] = field(default_factory=dict)
    turns: dict[str, list[RequestTurn]] = field(default_factory=dict)
    position: int = 0  # of the next prompt
    version: int = 0
    checkpoints: list[int] = field(default_factory=list)  # newest last

    def add(self, row: Row) -> Row:
        """A new row, the last."""
        self.rows.append(row)
        self.by_position.setdefault(int(row.id.rpartition("-")[0].rpartition("/")[2]), []).append(row)
        return row

    def of(self, position: int) -> list[Row]:
        """Rows of a prompt's latest attempts."""
        mine = self.by_position.get(position, [])
        latest: dict[str, int] = {}
        for row in mine:
            issued = row.id.split(".")[0]
            latest[issued] = max(latest.get(issued, 0), row.attempt)
        return [row for row in mine if row.attempt == latest[row.id.split(".")[0]]]

    def groups(self, wanted: Callable[[list[Row]], bool], last: int = 200) -> list[int]:
        """Positions, of the ``last`` ones, whose rows are as wanted."""
        return [p for p in range(max(0, self.position - last), self.position) if wanted(self.of(p))]

    def counts(self) -> dict[str, int]:
        """What the ledger must answer."""
        found = Counter(f"dropped/{r.reason}" if r.state == "dropped" else r.state for r in self.rows)
        pending = found.pop("pending", 0) + found.pop("finished", 0)
        return {"issued": len(self.rows), "trained": found.pop("trained", 0), "pending": pending, **found}


def group_of(prompt: Prompt, samples: list[Sample]) -> Group:
    """Siblings share a rollout."""
    rollouts: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        rollouts.setdefault(sample.rollout_id or 0, []).append(index)
    return Group(prompt=prompt, samples=samples, rollouts=rollouts)


def is_pending(rows: list[Row]) -> bool:
    return any(row.state == "pending" for row in rows)


def is_free(rows: list[Row]) -> bool:
    """Finished, and in no step."""
    kept = [row for row in rows if row.state == "finished"]
    return bool(kept) and not is_pending(rows) and not any(row.step for row in kept)


def prompt_of(position: int) -> Prompt:
    """The prompt of a place in the data."""
    return Prompt(id=f"main/{position}", position=position, prompt="1+2=", tokens=[2, 3])


def turns_of(rng: random.Random, name: str, version: int) -> list[RequestTurn]:
    """One turn of a request that was stopped under way."""
    request = GenerateRequest(
        id=name, tokens=[2, 3], params=SamplingParams(max_new_tokens=8), seed=rng.getrandbits(32)
    )
    count = rng.randint(1, 4)
    piece = Completion(
        id=name,
        tokens=[rng.randrange(17) for _ in range(count)],
        log_probs=[-rng.random() for _ in range(count)],
        plain_log_probs=[-rng.random() for _ in range(count)],
        finish="abort",
        versions=[version] * count,
    )
    return [RequestTurn(request=request, pieces=[piece])]

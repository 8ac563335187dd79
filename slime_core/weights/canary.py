"""The exact half of the canary: which tensors are compared after an update, and how a difference is described.

    layout.layout -> Choice.take(check) -> WeightRoute.checks -> WeightUpdate.fingerprints \\
                                                     servers -> merged -> Engine.fingerprints -> compare

A rolling choice has every kind of tensor and every layer in every step: of layer n the kinds k with (n + k) mod steps
equal to the step's number, and all that belongs to no layer (embeddings, the last norm). So whatever goes wrong in all
layers, in one whole layer or in an embedding is seen after the next step, and any one tensor within ``steps`` (at most
as many as a layer has kinds). The other half is `logprob_check`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from slime_core.errors import EngineError
from slime_core.types import RankTensor, WeightCheck, WeightUpdate
from slime_core.weights.hashing import EITHER

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = re.compile(r"^(model\.layers\.\d+\.)(.+)$")
TWIN = "#"  # NAME#2,0,1: what NAME would hold with its pieces in that order; no engine has such a name
ON = " on "  # CHECKSUM on LABEL, CHECKSUM on LABEL: of servers that differ
SHOWN = 5  # names in a message


class Choice:
    """Which rows an update is compared on.

    Example:
        choice = Choice(layout(names, config, tp=1))
        route = WeightRoute(transport="disk", dtype="bfloat16", checks=choice.take("rolling"))
    """

    def __init__(self, rows: Sequence[RankTensor]) -> None:
        self.rows = tuple(rows)
        self._kinds = _kinds(rows)
        layers = {layer for row in rows for layer, _ in [_place(row)] if layer >= 0}
        self.steps = max(1, min(len(layers), len(self._kinds)))  # until every tensor had its turn
        self._step = 0

    def take(self, check: WeightCheck) -> tuple[RankTensor, ...]:
        """The rows of an update, every rank's; those of ``rolling`` continue where the last call ended.

        A few rows of joined tensors come with twins, their pieces in other orders: from them `compare` tells a swap.
        """
        if check == "none":
            return ()
        rows = self.rows
        if check == "rolling":
            rows = tuple(row for row in rows if self._turn(row))
            self._step = (self._step + 1) % self.steps
        return (*rows, *_twins(rows))

    def _turn(self, row: RankTensor) -> bool:
        layer, kind = _place(row)
        return layer < 0 or (layer + self._kinds[kind]) % self.steps == self._step


def _place(row: RankTensor) -> tuple[int, str]:
    """Layer and kind of a row; layer -1 for what belongs to none."""
    match = LAYER.match(row.name)
    return (int(match[1].split(".")[2]), match[2]) if match else (-1, row.name)


def _kinds(rows: Sequence[RankTensor]) -> dict[str, int]:
    """Numbers of the kinds of tensors that layers have."""
    names = dict.fromkeys(kind for layer, kind in map(_place, rows) if layer >= 0)
    return {kind: number for number, kind in enumerate(names)}


def _twins(rows: Sequence[RankTensor]) -> Iterator[RankTensor]:
    """Of each kind of joined tensor, the first one's: q, k, v or gate, up in every other order."""
    done: dict[str, str] = {}
    for row in rows:
        _, kind = _place(row)
        joined = len({piece.name for piece in row.pieces}) == len(row.pieces) in (2, 3)
        if not joined or not all(piece.name for piece in row.pieces) or done.setdefault(kind, row.name) != row.name:
            continue
        orders = permutations(range(len(row.pieces)))
        next(orders)  # as it should be
        for order in orders:
            name = f"{row.name}{TWIN}{','.join(map(str, order))}"
            yield replace(row, name=name, pieces=tuple(row.pieces[n] for n in order))


def merged(answers: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Checksums of several servers as one result, by `RankTensor.key`; ``answers`` is by the name of a server.

    Where all agree that is the checksum; else ``CHECKSUM on LABEL, CHECKSUM on LABEL``, which equals no checksum.
    """
    sums: dict[str, str] = {}
    for key in dict.fromkeys(key for answer in answers.values() for key in answer):
        values = {label: answer.get(key, "none") for label, answer in answers.items()}
        alike = len(set(values.values())) == 1
        sums[key] = next(iter(values.values())) if alike else ", ".join(f"{v}{ON}{n}" for n, v in values.items())
    return sums


def compare(
    checks: Sequence[RankTensor],
    expected: Mapping[str, str],
    served: Mapping[str, str],
    version: int,
    before: Mapping[str, str] | None = None,
) -> int:
    """Compare what engines hold with what they should; the answer counts the tensors.

    Args:
        checks: rows of the update, twins included.
        expected: the trainer's checksums of them, by `RankTensor.key`.
        served: the engine's, of all that it holds.
        version: that was loaded.
        before: checksums served at the last call, to recognise a tensor that did not change.

    Raises:
        EngineError: ENG83 a tensor that differs, or that one side has no checksum of: its name, the server and rank,
            and what kind of damage it looks like.
    """
    rows = [row for row in checks if TWIN not in row.name]
    if untold := [row.key for row in rows if row.key not in expected]:
        raise _error(version, untold, len(rows), "the trainer sent no checksum of them, so nothing is known", "")
    if lost := [row.key for row in rows if row.key not in served]:
        raise _error(version, lost, len(rows), "the engine does not hold them: a shard is missing", "")
    wrong = [row for row in rows if served[row.key] not in expected[row.key].split(EITHER)]
    if wrong:
        look = _Look(rows, wrong, expected, served, before or {})
        raise _error(version, [row.key for row in wrong], len(rows), look.damage(), look.where())
    return len(rows)


def compare_adapters(update: WeightUpdate, served: Mapping[str, str]) -> None:
    """Compare what an engine holds of an update's adapters, by ``ADAPTER/NAME``, with the trainer's checksums.

    Raises:
        EngineError: ENG83 an adapter that differs: its name, and what kind of damage it looks like.
    """
    for name, adapter in update.adapters.items():
        expected = {key: update.fingerprints.get(f"{name}/{key}", "") for key in adapter.tensors}
        wrong = [key for key, one in expected.items() if not one or served.get(f"{name}/{key}") != one]
        if wrong:
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise EngineError(
                f"{len(wrong)} of {len(expected)} tensors of adapter {name} on the engine are not the trainer's "
                f"version {update.version}: {', '.join(wrong[:SHOWN])}{more}",
                code="ENG83",
                where=f"adapter {name}",
                why=_adapter_damage(name, wrong, update, served),
                fix="no step trained on samples of this adapter; restart the engine with slime run --resume RUN_DIR, "
                "or sync whole weights: --lora-sync merged",
            )


def _adapter_damage(name: str, wrong: Sequence[str], update: WeightUpdate, served: Mapping[str, str]) -> str:
    """One sentence; the first that fits."""
    if not any(f"{name}/{key}" in update.fingerprints for key in wrong):
        return "the trainer sent no checksum of them, so nothing is known"
    if not any(f"{name}/{key}" in served for key in wrong):
        return "the engine does not hold them: the adapter did not reach it"
    for other in update.adapters:
        sums = [update.fingerprints.get(f"{other}/{key}") for key in wrong]
        if other != name and sums == [served.get(f"{name}/{key}") for key in wrong]:
            return f"they are those of adapter {other}: swapped on the way"
    if len({key.rpartition(".lora_")[2] for key in wrong}) == 1 < len(update.adapters[name].tensors) / len(wrong):
        return "the other factors are right: one half of the adapter did not arrive"
    return "they are of another version or damaged: the update left them out, or they changed on the way"


def _error(version: int, keys: Sequence[str], count: int, why: str, where: str) -> EngineError:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return EngineError(
        f"{len(keys)} of {count} tensors of the engine are not the trainer's version {version}: "
        f"{', '.join(keys[:SHOWN])}{more}",
        code="ENG83",
        where=where or "weight update",
        why=why,
        fix="no step trained on samples of these weights; restart the engine with slime run --resume RUN_DIR, "
        "or try another update_weight_transport to see whether the transfer is at fault",
    )


class _Look:
    """Differences, and what they look like."""

    def __init__(
        self,
        rows: Sequence[RankTensor],
        wrong: Sequence[RankTensor],
        expected: Mapping[str, str],
        served: Mapping[str, str],
        before: Mapping[str, str],
    ) -> None:
        self.rows, self.wrong, self.expected, self.served, self.before = rows, wrong, expected, served, before

    def where(self) -> str:
        """The servers and ranks that hold something else."""
        labels = {label for row in self.wrong for label in self._bad(row.key)}
        ranks = sorted({row.rank for row in self.wrong})
        of = sorted(label for label in labels if label) or ["every server"]
        return f"{', '.join(of)}, rank {', '.join(map(str, ranks))}"

    def damage(self) -> str:
        """One sentence; the first that fits."""
        if order := self._swapped():
            return order
        stale = [row for row in self.wrong if self._stale(row.key)]
        if len(stale) == len(self.wrong):
            moved = [row for row in self.rows if self.expected[row.key] != self.before.get(row.key)]
            if len(moved) == len(stale) > 1:
                return "every tensor is as it was before: the engine is stale, the update changed nothing"
            if all(row.name == HEAD and row.pieces[0].name == EMBED for row in stale):
                return "the output embedding, which is tied, was not synced with the input embedding"
            if run := self._run():
                return f"{run} are as they were before: a bucket or a shard of the update did not arrive"
            return "they are as they were before: the update left them out"
        if all(row.name == HEAD and row.pieces[0].name == EMBED for row in self.wrong):
            return "the output embedding, which is tied, is not the input embedding"
        return "the bytes are others: damaged on the way, another dtype, or rearranged by the engine"

    def _bad(self, key: str) -> dict[str, str]:
        """Checksum by server, of the servers that differ; an empty name stands for all of them."""
        values = _split(self.served[key])
        return {label: value for label, value in values.items() if value != self.expected[key]}

    def _stale(self, key: str) -> bool:
        checksums = _split(self.before.get(key, ""))
        return all(value == checksums.get(label, checksums.get("")) for label, value in self._bad(key).items())

    def _swapped(self) -> str:
        for row in self.wrong:
            values = set(self._bad(row.key).values())
            for order in permutations(range(len(row.pieces))) if len(row.pieces) <= 3 else ():
                twin = replace(row, name=f"{row.name}{TWIN}{','.join(map(str, order))}").key
                if values == {self.expected.get(twin)}:
                    parts = [piece.name.split(".")[-2] for piece in row.pieces]
                    return (
                        f"{row.key} holds {', '.join(parts[n] for n in order)} in this order, not {', '.join(parts)}: "
                        "swapped on the way"
                    )
        return ""

    def _run(self) -> str:
        """``FIRST to LAST``, where the wrong tensors are neighbours, up to what did not change either."""
        names = list(dict.fromkeys(key.partition("@")[0] for key in self.served))
        places = sorted({names.index(row.name) for row in self.wrong})
        names_checked, wrong = {row.name for row in self.rows}, {row.name for row in self.wrong}
        between = [name for name in names[places[0] : places[-1] + 1] if name not in wrong]
        if len(places) < 2 or any(name in names_checked or not self._unchanged(name) for name in between):
            return ""
        first, last = places[0], places[-1]
        while first > 0 and names[first - 1] not in names_checked and self._unchanged(names[first - 1]):
            first -= 1
        while last < len(names) - 1 and names[last + 1] not in names_checked and self._unchanged(names[last + 1]):
            last += 1
        return f"{last - first + 1} neighbours, {names[first]} to {names[last]},"

    def _unchanged(self, name: str) -> bool:
        return name in self.before and self.served.get(name) == self.before[name]


def _split(value: str) -> dict[str, str]:
    """What :func:`merged` wrote of one key, by server; under an empty name where all agree."""
    if ON not in value:
        return {"": value}
    pairs = (part.split(ON, 1) for part in value.split(", "))
    return {label: checksum for checksum, label in pairs}

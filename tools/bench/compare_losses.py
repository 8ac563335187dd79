"""One recorded batch under slime's losses and those of TRL, THUDM/slime, verl and OpenRLHF, term by term.

    python tools/bench/compare_losses.py                       # the batch generated from --seed
    python tools/bench/compare_losses.py --framework trl --all # also the terms that agree
    python tools/bench/compare_losses.py --save batch.json     # write the batch; --batch batch.json reads one

TRL's numbers come from its own GRPOTrainer._compute_loss, the others' from their published formulas
(`published_losses.py`); ours from the loss that the trainer calls. Terms are taken out of each by differentiation:

    aggregation   a token's share of the loss, at ratio 1
    ratio         a token's ratio times its share, clip bounds out of reach
    clip          the same within the clip bounds
    kl, entropy   their part of the loss
    total         the loss          gradient  its slope by every log-prob

The exit code is 1 where a term that must agree does not, or one that must differ does not (generated batch only).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import published_losses as published
import torch
from comparisons import COMPARISONS, SAMPLES, Comparison, direct
from published_losses import Inputs, Side

from slime_core.algorithms.shared.aggregate import token_weights
from slime_core.builtin.losses import losses
from slime_core.config.presets import settle
from slime_core.config.sections.train import TrainSection

TOLERANCE = 1e-6
DIVISOR = 16  # of the constant aggregation, and TRL's max_completion_length
FIELDS = ("valid", "mask", "new", "old", "engine", "ref", "advantages", "entropy", "reward", "group", "rollout")
POLICY = losses()[0]


@dataclass(slots=True, frozen=True)
class Row:
    """One term of one comparison."""

    framework: str
    variant: str
    term: str
    ours: float  # where they differ most
    theirs: float
    difference: float
    expected: str  # "agree" or "differ"
    agree: bool
    why: str = ""

    @property
    def as_expected(self) -> bool:
        return self.agree == (self.expected == "agree")


@dataclass(slots=True)
class Outcome:
    """Everything one run of the tool found."""

    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what could not be compared, and why


def generated(seed: int) -> Inputs:
    """Two prompts of four samples with tool tokens; two outliers beyond the dual clip and the bound of low_var_kl."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 9, 5, 7, 4, 8, 6, 5])
    shape = (SAMPLES, int(lengths.max()))

    def normal(mean: float, std: float) -> torch.Tensor:
        return mean + std * torch.randn(shape, generator=draw, dtype=torch.float64)

    valid = torch.arange(shape[1])[None, :] < lengths[:, None]
    mask = valid & ((torch.rand(shape, generator=draw) > 0.2) | (torch.arange(shape[1]) == 0))
    old = normal(-1.5, 0.4).clamp(max=-0.05)
    reward = torch.tensor([1.0, 0.2, 0.0, 0.4, 0.11, 0.1, 0.13, 0.12], dtype=torch.float64)
    new, ref = old + 0.25 * normal(0, 1), old + 0.3 * normal(0, 1)
    new[2, 0] = old[2, 0] + 1.5  # a ratio of 4.5 where the advantage is negative
    ref[3, 0] = new[3, 0] + 4.0  # k3 of 49.6
    group = torch.arange(SAMPLES) // 4
    advantages = published.positional(reward, 4, 1e-6)[:, None].expand(shape).clone()
    return Inputs(
        valid, mask.double(), new, old, old - 0.2 * normal(0, 1), ref, advantages, normal(2, 0.3).abs(), reward, group,
        torch.arange(SAMPLES),
    )  # fmt: skip


def variants(x: Inputs) -> dict[str, Inputs]:
    """The batch, one whose second sample is all masked, and one whose samples 0 and 1 are siblings."""
    mask, rollout = x.mask.clone(), x.rollout.clone()
    mask[1] = 0
    rollout[1] = rollout[0]
    return {"plain": x, "masked": replace(x, mask=mask), "siblings": replace(x, rollout=rollout)}


def ours(keys: dict[str, Any]) -> Side:
    """The loss that the trainer calls, under ``[train]`` keys, with its token weights."""

    def side(x: Inputs, wide: bool) -> torch.Tensor:
        train = settle(TrainSection(**keys))
        if wide:
            train = train.model_copy(update={"eps_clip": 1.0, "eps_clip_high": published.WIDE, "eps_clip_c": 0.0})
        sample = torch.arange(len(x.new))[:, None].expand(x.valid.shape)[x.valid]
        named = {"loss_mask": x.mask, "policy": x.old, "rollout_log_probs": x.engine, "reference": x.ref}
        columns = {name: values[x.valid] for name, values in (named | {"advantages": x.advantages}).items()}
        columns["sample"] = sample
        if POLICY.prepare is not None:
            made = POLICY.prepare({name: values.detach().numpy() for name, values in columns.items()}, train)
            columns |= {name: torch.from_numpy(values) for name, values in made.items()}
        value, _ = POLICY.fn(x.new[x.valid], x.entropy[x.valid], columns, train)
        weights = token_weights(
            columns["loss_mask"].numpy(), x.rollout[sample].numpy(), len(x.rollout.unique()), train.loss_aggregation,
            train.loss_divisor or DIVISOR,
        )  # fmt: skip
        total: torch.Tensor = (value * torch.from_numpy(weights)).sum()
        return total

    return side


def terms(side: Side, x: Inputs, wanted: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The terms of a loss."""

    def slope(of: str, at: Inputs, wide: bool = False) -> torch.Tensor:
        leaf = getattr(at, of).clone().requires_grad_(True)
        loss = side(replace(at, **{of: leaf}), wide)
        (found,) = torch.autograd.grad(loss, leaf)
        return found

    nothing = torch.zeros_like(x.advantages)
    alone = replace(x, advantages=nothing, entropy=nothing)
    how: dict[str, Callable[[], torch.Tensor]] = {
        "aggregation": lambda: -slope("advantages", x.on_policy()),
        "ratio": lambda: -slope("advantages", x, wide=True),
        "clip": lambda: -slope("advantages", x),
        "kl": lambda: side(alone, False),
        "entropy": lambda: side(replace(x, advantages=nothing), False) - side(alone, False),
        "total": lambda: side(x, False),
        "gradient": lambda: slope("new", x),
    }
    return {name: how[name]().detach() for name in wanted}


def row(framework: str, variant: str, term: str, mine: torch.Tensor, theirs: torch.Tensor, why: str) -> Row:
    """The place where the two are furthest apart."""
    gap = (mine - theirs).abs().reshape(-1)
    place = int(gap.argmax())
    here = [float(side.expand(gap.shape).reshape(-1)[place]) for side in (mine.reshape(-1), theirs.reshape(-1))]
    difference = float(gap[place])
    agree = difference <= TOLERANCE
    return Row(framework, variant, term, *here, difference, "differ" if why else "agree", agree, why)


def compared(case: Comparison, batches: dict[str, Inputs]) -> Iterator[Row]:
    """Every term of one comparison."""
    x = batches[case.batch]
    mine, theirs = terms(ours(case.keys), x, case.terms), terms(case.theirs, x, case.terms)
    for term in case.terms:
        yield row(case.framework, case.variant, term, mine[term], theirs[term], case.differs.get(term, ""))


def run(x: Inputs, frameworks: set[str]) -> Outcome:
    """All comparisons over one batch."""
    found, batches = Outcome(), variants(x)
    if "trl" in frameworks:
        try:
            published.trl_trainer()
        except ImportError as error:
            frameworks = frameworks - {"trl"}
            found.missing.append(f"trl: not compared, because it cannot be imported ({error}); pip install trl")
    for case in COMPARISONS:
        if case.framework in frameworks:
            found.rows += compared(case, batches)
    found.rows += [row(*one) for one in direct(x) if one[0] in frameworks]
    return found


def load(path: Path) -> Inputs:
    """A batch that :func:`save` wrote; ``new``, ``old``, ``engine`` and ``ref`` may come from a real run."""
    stored = json.loads(path.read_text())
    kinds = {"valid": torch.bool, "group": torch.int64, "rollout": torch.int64}
    return Inputs(*(torch.tensor(stored[name], dtype=kinds.get(name, torch.float64)) for name in FIELDS))


def save(x: Inputs, path: Path) -> None:
    """The batch as JSON: one list a field of `Inputs`."""
    path.write_text(json.dumps({name: getattr(x, name).tolist() for name in FIELDS}))


def table(outcome: Outcome, everything: bool) -> str:
    """Rows as text; agreeing terms of a comparison on one line."""
    lines = []
    by: dict[tuple[str, str], list[Row]] = {}
    for one in outcome.rows:
        by.setdefault((one.framework, one.variant), []).append(one)
    for (framework, variant), rows in by.items():
        same = [one for one in rows if one.agree]
        lines.append(f"{framework:9} {variant}")
        if same and not everything:
            worst = max(one.difference for one in same)
            lines.append(f"    agree    {', '.join(one.term for one in same)} (within {worst:.0e})")
        for one in rows:
            if one.agree and not everything:
                continue
            verdict = ("agrees" if one.agree else "DIFFERS") + ("" if one.as_expected else ", NOT EXPECTED")
            lines.append(f"    {verdict:8} {one.term}: ours {one.ours:.8g}, theirs {one.theirs:.8g}")
            if one.why:
                lines.append(f"             {one.why}")
    unexpected = sum(not one.as_expected for one in outcome.rows)
    agree = sum(one.agree for one in outcome.rows)
    lines.append(f"{len(outcome.rows)} terms: {agree} agree within {TOLERANCE:.0e}, {unexpected} not as expected")
    return "\n".join([*lines, *outcome.missing])


def main() -> int:
    """Compare and print."""
    names = ("trl", "slime", "verl", "openrlhf")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the generated batch")
    parser.add_argument("--batch", type=Path, help="a batch to read instead")
    parser.add_argument("--save", type=Path, help="write the batch there, and stop")
    parser.add_argument("--framework", choices=names, action="append", help="repeatable; all by default")
    parser.add_argument("--all", action="store_true", help="one line a term, also for terms that agree")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    asked = parser.parse_args()
    x = load(asked.batch) if asked.batch else generated(asked.seed)
    if asked.save:
        save(x, asked.save)
        return 0
    outcome = run(x, set(asked.framework or names))
    if asked.json:
        print(json.dumps({"rows": [asdict(one) for one in outcome.rows], "missing": outcome.missing}))
    else:
        print(table(outcome, asked.all))
    return 1 if any(not one.as_expected for one in outcome.rows) and not asked.batch else 0


if __name__ == "__main__":
    sys.exit(main())

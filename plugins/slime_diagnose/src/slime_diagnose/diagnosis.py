"""What a rule finds: a sentence, its evidence, and what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["note", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "critical")
"""Mildest first. critical: the run cannot learn, or its result is lost; warning: it learns less, or something else."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Diagnosis:
    """One finding of one rule about one stage of a run.

    Example:
        Diagnosis(
            rule="learning-rate-zero",
            severity="critical",
            summary="the learning rate is 0 in all 12 steps",
            evidence=("lr 0 at steps 1 to 12",),
            fix="set a learning rate: --lr 1e-6",
            key="train.lr",
            stage="main",
        )
    """

    rule: str = ""  # its name in the table; the runner of the rules fills it in
    severity: Severity
    summary: str  # one sentence: what is wrong
    evidence: tuple[str, ...]  # figures with their steps, and samples, a line each
    fix: str  # what to change, the likeliest first
    key: str = ""  # of the config that the fix changes; empty where none does
    stage: str = ""
    adapter: str = ""  # of several in a run, the one whose figures it is about

    def as_dict(self) -> dict[str, Any]:
        """Stable keys, ready for JSON."""
        return asdict(self) | {"evidence": list(self.evidence)}

    def lines(self) -> list[str]:
        """The finding as text: severity, rule and summary, then indented evidence and fix."""
        parts = [f"stage {self.stage}"] if self.stage not in ("", "main") else []
        parts += [f"adapter {self.adapter}"] if self.adapter else []
        where = f" ({', '.join(parts)})" if parts else ""
        fix = self.fix + (f"   [{self.key}]" if self.key else "")
        return [
            f"{self.severity}: {self.rule}{where}: {self.summary}",
            *(f"  {line}" for text in self.evidence for line in text.splitlines()),
            f"  fix: {fix}",
        ]

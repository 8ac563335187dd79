"""The table of rules, and what runs it.

A rule is a function of a stage's `History` that returns a `Diagnosis` or None. Another package adds rules by entry
points of the group ``slime.diagnosis``:

    [project.entry-points."slime.diagnosis"]
    my-rule = "my_package.rules:my_rule"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from slime_diagnose.diagnosis import SEVERITIES, Diagnosis
from slime_diagnose.history import History, read_run
from slime_diagnose.rules import hacking, optimizer, policy, responses, rewards

Rule = Callable[[History], Diagnosis | None]
GROUP = "slime.diagnosis"
"""The entry-point group of rules of other packages."""

RULES: dict[str, Rule] = {
    "grader-never-matches": rewards.grader_never_matches,
    "reward-constant": rewards.reward_constant,
    "term-never-matches": rewards.term_never_matches,
    "groups-too-hard": rewards.groups_too_hard,
    "groups-too-easy": rewards.groups_too_easy,
    "groups-equal": rewards.groups_equal,
    "samples-dropped": rewards.samples_dropped,
    "reward-collapses": rewards.reward_collapses,
    "noise-amplified": rewards.noise_amplified,
    "never-stops": responses.never_stops,
    "truncated": responses.truncated,
    "length-bias": responses.length_bias,
    "length-collapses": responses.length_collapses,
    "entropy-collapses": policy.entropy_collapses,
    "entropy-explodes": policy.entropy_explodes,
    "kl-explodes": policy.kl_explodes,
    "ratio-explodes": policy.ratio_explodes,
    "engine-gap": policy.engine_gap,
    "experts-collapse": policy.experts_collapse,
    "lr-zero": optimizer.lr_zero,
    "warmup-too-long": optimizer.warmup_too_long,
    "lr-too-small": optimizer.lr_too_small,
    "weights-unchanged": optimizer.weights_unchanged,
    "all-masked": optimizer.all_masked,
    "advantages-cancelled": optimizer.advantages_cancelled,
    "always-clipped": optimizer.always_clipped,
    "not-finite": optimizer.not_finite,
    "heldout-falls": hacking.heldout_falls,
    "judges-disagree": hacking.judges_disagree,
    "length-pays": hacking.length_pays,
    "repetition-pays": hacking.repetition_pays,
    "one-answer-pays": hacking.one_answer_pays,
}
"""Name of a rule -> its function; docs/diagnosis.md has a row for each."""


def diagnose(run_dir: Path | str) -> list[Diagnosis]:
    """What the rules find in a run, worst first; empty for a run that looks healthy, or has no step.

    Example:
        [diagnosis.rule for diagnosis in diagnose("runs/demo-0")]

    Raises:
        ConfigError: CFG05 there is no run.
    """
    findings = [finding for history in read_run(Path(run_dir)) for finding in findings_of(history)]
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))


def findings_of(history: History, rules: Mapping[str, Rule] | None = None) -> Iterator[Diagnosis]:
    """What the rules find in one stage, in the table's order; a rule that fails is a note, and the others go on."""
    for name, rule in ({**RULES, **installed_rules()} if rules is None else rules).items():
        try:
            finding = rule(history)
        except Exception as error:
            finding = Diagnosis(
                severity="note",
                summary=f"the rule failed: {type(error).__name__}: {error}",
                evidence=(),
                fix="report it" if name in RULES else f"correct the package that brings it as entry point of {GROUP}",
            )
        if finding is not None:
            yield replace(finding, rule=name, stage=history.name, adapter=history.adapter)


@cache
def installed_rules() -> Mapping[str, Rule]:
    """Rules of other packages, by name; one that cannot be imported fails when it is called."""
    return {entry.name: _imported(entry) for entry in entry_points(group=GROUP) if entry.name not in RULES}


def _imported(entry: EntryPoint) -> Rule:
    def rule(history: History) -> Diagnosis | None:
        finding: Diagnosis | None = entry.load()(history)
        return finding

    return rule

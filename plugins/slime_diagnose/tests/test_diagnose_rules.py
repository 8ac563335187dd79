"""Every rule finds its fault in recorded figures that were changed, and nothing in figures that are close to it."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from histories import STEPS, history, rising, sample

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_diagnose import rules
from slime_diagnose.history import History, Trained, of_adapter
from slime_diagnose.plugin import Diagnose
from slime_diagnose.texts import compression_ratio, has_label
from slime_diagnose.trends import correlation, course_of

pytestmark = pytest.mark.unit
PAGE = Path(__file__).parents[3] / "docs" / "diagnosis.md"
PROSE = (
    "The train leaves the first town at nine and covers sixty miles an hour; the other one starts an hour later from "
    "the second town, which lies three hundred miles away, so they must share what is left of the track between them "
    "before noon. Adding both speeds gives the rate at which the gap closes, and dividing yields the answer wanted."
)


def findings(past: History) -> dict[str, Any]:
    return {finding.rule: finding for finding in rules.findings_of(past, rules.RULES)}


def answers(response: str, *, label: str = "7", reward: float = 0.0, count: int = 12) -> list[dict[str, Any]]:
    """Best samples of the last steps."""
    return [
        sample(STEPS - row % 10, response.format(row), label=label.format(row), reward=reward, row=row)
        for row in range(count)
    ]


def groups(pairs: list[tuple[float, int]], count: int = 20) -> list[Trained]:
    """Groups of the last step with these rewards and lengths, a little apart in length."""
    return [Trained(STEPS, at, reward, length + at) for at in range(count) for reward, length in pairs]


NOTHING = {"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "reward/std": 0.0, "reward/equal_groups": 1.0}
SOLVED = {"reward/equal_groups": 0.95, "advantages/abs_mean": 0.03}
NEAR = {
    "clip_fraction": 0.25,
    "ppo_kl": 0.15,
    "kl_loss": 0.5,
    "truncated_ratio": 0.15,
    "reward/equal_groups": 0.8,
    "grad_norm": 12.0,
    "advantages/abs_mean": 0.002,
    "train/masked_ratio": 0.99,
    "dropped/infra_error": 30.0,
    "entropy": rising(0.5, 0.9),
    "response_len/mean": rising(100, 130),
}
CRITIC_FIRST = {
    "optimizer_steps": lambda step: float(step >= 20),
    "critic_only_steps": lambda step: None if step >= 20 else 1.0,
}
SOLVED_BY_ALL = {"reward/mean": 1.0, "reward/std": 0.0, "advantages/abs_mean": 0.0}
HELDOUT = [(0, 0.5), (20, 0.8), (40, 0.7), (60, 0.55)]
FAULTS: dict[str, list[History]] = {
    "grader-never-matches": [
        history(NOTHING, samples=answers("the answer is 12", label="12")),
        history(NOTHING, samples=answers("no idea", label="12")),
        history(NOTHING | {"truncated_ratio": 0.9}, samples=answers("well, first", label="12")),
    ],
    "term-never-matches": [
        history({"reward/accuracy/mean": 0.0, "reward/format/mean": rising(0.2, 0.9)}, samples=answers("<answer>12"))
    ],
    "reward-constant": [history(NOTHING | {"reward/min": 1.0, "reward/max": 1.0, "reward/mean": 1.0}), history(NOTHING)],
    "groups-too-hard": [history(SOLVED | {"reward/mean": 0.01})],
    "groups-too-easy": [history(SOLVED | {"reward/mean": 0.97})],
    "groups-equal": [history(SOLVED | {"reward/mean": 0.5}), history(SOLVED | {"reward/mean": 0.5}, ["--rollout-top-k", "1"])],
    "samples-dropped": [
        history({"dropped/equal_rewards": 4000.0}),
        history({"dropped/infra_error": 80.0}),
        history({"dropped/of_my_filter": 1600.0}),
    ],
    "reward-collapses": [history({"reward/mean": lambda step: 0.1 + 0.02 * step if step < 40 else 0.15})],
    "noise-amplified": [
        history(trained=[*groups([(0.5, 9), (0.5001, 9), (0.5002, 9)]), *groups([(0.9, 9), (0.9001, 9)], 2)])
    ],
    "never-stops": [
        history({"truncated_ratio": 1.0, "reward/mean": mean}) for mean in (0.5, 0.95, rising(0.1, 0.5))
    ],
    "truncated": [history({"truncated_ratio": 0.4}, samples=[*answers("a", reward=1.0), *answers("b")])],
    "length-bias": [
        history({"response_len/mean": rising(200, 600), "reward/mean": 0.5}),
        history({"response_len/mean": rising(200, 600), "reward/mean": 0.5}, ["--loss-aggregation", "token_mean"]),
    ],
    "length-collapses": [history({"response_len/mean": rising(200, 9), "reward/mean": 0.5})],
    "entropy-collapses": [history({"entropy": lambda step: 0.4 * 0.9**step, "reward/mean": 0.5})],
    "entropy-explodes": [
        history({"entropy": rising(0.4, 3.0), "reward/mean": 0.5}),
        history({"entropy": rising(0.4, 3.0), "reward/mean": 0.5}, ["--entropy-coef", "0.01"]),
    ],
    "kl-explodes": [history({"kl_loss": rising(0.01, 4.0)})],
    "ratio-explodes": [
        history({"ratio_overflow": lambda step: float(step == STEPS - 2)}),
        history({"clip_fraction": 0.6}),
        history({"ppo_kl": 0.5, "staleness/mean": 1.0}),
    ],
    "engine-gap": [
        history({"train_rollout_logprob_abs_diff": 0.2}, ["--rollout-top-p", "0.9"]),
        history({"train_rollout_logprob_abs_diff": rising(0.01, 0.09)}),
        history({"train_rollout_logprob_abs_diff": 0.5, "staleness/mean": 1.0}),
    ],
    "experts-collapse": [
        history({"moe/load_max_violation": rising(0.8, 5.0), "moe/dead_experts": 0.0}),
        history({"moe/load_max_violation": 1.5, "moe/dead_experts": rising(0.0, 0.3)}),
    ],
    "lr-zero": [history({"lr": 0.0}), history({"lr": lambda step: 1e-3 if step < 30 else 0.0})],
    "warmup-too-long": [
        history(flags=["--lr-warmup-iters", "61"]),
        history(CRITIC_FIRST, ["--lr-warmup-iters", "41"], steps=30),
    ],
    "lr-too-small": [
        history({"lr": 1e-9}, ["--lr", "1e-9", "--dtype", "bfloat16"]),
        history({"lr": 1e-12}, ["--lr", "1e-12"]),
    ],
    "weights-unchanged": [history(fingerprints=["ab"] * 10)],
    "all-masked": [
        history({"train/masked_ratio": 1.0}),
        history({"train/masked_ratio": 1.0, "truncated_ratio": 1.0}, ["--mask-truncated"]),
    ],
    "advantages-cancelled": [history({"advantages/abs_mean": 1e-7})],
    "always-clipped": [history({"grad_norm": 80.0})],
    "not-finite": [history({"skipped_steps/nonfinite": lambda step: float(step == 7)})],
    "heldout-falls": [history(evaluations={"held": HELDOUT})],
    "judges-disagree": [history({"reward/quality/mean": rising(0.8, 0.3)})],
    "length-pays": [
        history({"response_len/mean": rising(200, 600)}, trained=groups([(1.0, 400), (0.0, 200), (1.0, 420), (0.0, 220)]))
    ],
    "repetition-pays": [
        history(samples=[sample(2, PROSE, reward=1.0), *answers("the answer is good " * 40, reward=1.0)]),
        history(samples=answers("the answer is good " * 40, reward=1.0)),
    ],
    "one-answer-pays": [history(samples=answers("", label="label {}", reward=1.0))],
}  # fmt: skip
HEALTHY: dict[str, History] = {
    "the recorded run": history(),
    "figures not far from their limits": history(
        NEAR, trained=[*groups([(0.5, 9), (0.53, 9)]), *groups([(0.9, 9), (0.92, 9)], 2)]
    ),
    "a supervised stage": history(NOTHING, ["--loss-type", "sft_loss"]),
    "a hard task that begins": history(NOTHING | {"rollout/samples": 8.0}, steps=4),
    "a penalty that is never earned": history({"reward/overlong/mean": 0.0}, samples=answers("7", reward=1.0)),
    "right answers": history(samples=answers("it is {}", label="it is {}", reward=1.0)),
    "prose": history(samples=[sample(2, PROSE, reward=1.0), *answers(PROSE + " So it is 7.", reward=1.0)]),
    "over-sampling": history({"dropped/over_sampled": 1600.0, "dropped/equal_rewards": 700.0}),
    "length that works": history({"response_len/mean": rising(200, 600)}),
    "length that works and varies": history(
        {"response_len/mean": rising(200, 600)}, trained=groups([(1.0, 400), (0.0, 390), (1.0, 420), (0.0, 450)])
    ),
    "entropy that falls with learning": history({"entropy": lambda step: 0.4 * 0.9**step}),
    "a KL that is usual": history({"kl_loss": rising(0.001, 0.08)}),
    "experts of a narrow task": history({"moe/load_max_violation": 4.0, "moe/dead_experts": 0.3}),
    "the gap of bfloat16": history({"train_rollout_logprob_abs_diff": rising(0.012, 0.03)}),
    "GSPO": history({"clip_fraction": 0.6}, ["--advantage-estimator", "gspo"]),
    "a warm-up of the whole stage": history(flags=["--lr-warmup-iters", "60"]),
    "a critic that learns first": history(CRITIC_FIRST, ["--lr-warmup-iters", "40"], steps=30),
    "a task that is solved": history(
        {name: (lambda step, end=end: 0.5 if step < 40 else end) for name, end in SOLVED_BY_ALL.items()}
        | {"reward/min": lambda step: float(step >= 40), "reward/equal_groups": lambda step: None}
    ),
    "a schedule that ends at 0": history({"lr": lambda step: 1e-3 * (1 - step / STEPS)}),
    "skipped steps": history({"lr": 0.0, "optimizer_steps": 0.0, "skipped_steps": 1.0}),
    "lr 1e-6 in bfloat16": history({"lr": 1e-6}, ["--lr", "1e-6", "--dtype", "bfloat16"]),
    "weights that change": history(fingerprints=[str(step) for step in range(10)]),
    "tools' tokens": history({"train/masked_ratio": 0.9}),
    "a norm above the limit": history({"grad_norm": 5.0}),
    "held-out figures that waver": history(evaluations={"held": [(0, 0.5), (20, 0.8), (40, 0.82), (60, 0.78)]}),
    "held-out falls with training": history(
        {"reward/mean": lambda step: 0.8 - 0.004 * step}, evaluations={"held": HELDOUT}
    ),
    "terms that rise": history({"reward/quality/mean": rising(0.3, 0.8)}),
    "a curriculum": history(
        {"reward/mean": lambda step: 0.8 - 0.6 * (step > 30)}, evaluations={"held": [(0, 0.2), (30, 0.4), (60, 0.6)]}
    ),
    "rewards of a small scale": history(
        {"reward/std": 1e-6, "advantages/abs_mean": 1e-6}, ["--advantage-estimator", "dr_grpo"]
    ),
    "pure distillation": history(NOTHING, ["--advantage-estimator", "on_policy_distillation", "--teacher-load", "t"]),
    "scores that mean something": history(trained=groups([(0.2, 9), (0.5, 9), (0.9, 9)])),
}


@pytest.mark.parametrize("rule", rules.RULES)
def test_a_rule_finds_its_fault_and_says_what_to_change(rule: str) -> None:
    for past in FAULTS[rule]:
        finding = findings(past)[rule]
        assert finding.summary
        assert finding.fix
        assert finding.evidence
        assert finding.key == "" or past.config.model_dump()[finding.key.split(".")[0]].keys() >= {
            finding.key.split(".")[1]
        }


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str) -> None:
    assert [finding.lines() for finding in findings(HEALTHY[name]).values()] == []


def test_the_recorded_run_has_no_finding_at_any_step() -> None:
    early = {steps: findings(history(steps=steps)) for steps in range(1, STEPS)}
    assert {steps: found for steps, found in early.items() if found} == {}


def test_responses_that_never_stop_are_a_note_where_the_reward_rises_or_is_high() -> None:
    assert [findings(past)["never-stops"].severity for past in FAULTS["never-stops"]] == ["critical", "note", "note"]


def test_a_run_that_cannot_be_read_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.toml").write_text('name = "none"\n')
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "samples.jsonl").mkdir()
    Diagnose().slime_run_done(Context(config=Config(), run_dir=tmp_path))
    assert "not diagnosed: IsADirectoryError" in caplog.text


def test_one_fault_has_one_finding() -> None:
    """The rules look away where another one names the cause."""
    follows = {
        "grader-never-matches": {"truncated"},
        "term-never-matches": set(),
        "all-masked": {"never-stops"},
    }
    for rule, cases in FAULTS.items():
        for past in cases:
            assert findings(past).keys() - {rule} <= follows.get(rule, set()), rule


@pytest.mark.parametrize(
    ("response", "label", "truncated", "reason"),
    [
        ("So the answer is 1,024.", "1024", 0.0, "extractor or the format"),
        ("I give up", "1024", 0.0, "does not know"),
        ("I begin with", "1024", 0.9, "cut off"),
    ],
    ids=["format", "too hard", "truncated"],
)
def test_a_grader_that_never_matches_shows_three_answers_and_the_reason(
    response: str, label: str, truncated: float, reason: str
) -> None:
    past = history(NOTHING | {"truncated_ratio": truncated}, samples=answers(response, label=label))
    finding = findings(past)["grader-never-matches"]
    assert reason in finding.fix
    assert len(finding.evidence) == 3
    assert all(f'label "{label}"' in line and f'response "{response}"' in line for line in finding.evidence)


def test_figures_of_texts_and_trends_by_hand() -> None:
    assert has_label("It is 1,024 .", "1024")
    assert not has_label("It is 10245", "1024")
    assert not has_label("It is 7.5", "7")
    assert not has_label("anything", "")
    assert compression_ratio("ab" * 500) < 0.05 < 0.4 < compression_ratio(PROSE)
    assert compression_ratio("") == 8.0  # zlib's header of nothing
    assert correlation([(1, 2), (2, 4), (3, 6)]) == pytest.approx(1)
    assert correlation([(1, 1), (1, 2)]) == 0
    assert course_of([1.0] * 14) is None
    line = course_of([float(step) for step in range(20)])
    assert line is not None
    assert (line.early, line.late, line.error) == (1.5, 17.5, pytest.approx(0.5))  # steps of 1: sqrt(1 / 4)
    wave = course_of([float(step % 2) for step in range(20)])
    assert wave is not None
    assert not wave.up
    assert not wave.down


def test_another_package_adds_the_page_s_rule_and_one_that_fails_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    (tmp_path / "rules_of_the_page.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {"few-prompts": "rules_of_the_page:few_prompts", "broken": "rules_of_the_page:nothing"}
    entries = EntryPoints(EntryPoint(name, value, rules.GROUP) for name, value in values.items())
    monkeypatch.setattr(rules, "entry_points", lambda group: entries.select(group=group))
    rules.installed_rules.cache_clear()
    of_page = {finding.rule: finding for finding in rules.findings_of(history({"data/prompts": 40.0}))}
    rules.installed_rules.cache_clear()
    assert of_page["few-prompts"].summary.startswith("few prompts")
    assert of_page["broken"].summary.startswith("the rule failed: AttributeError")


def test_the_page_has_a_row_for_every_rule_in_order() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), flags=re.M) == list(rules.RULES)


def test_of_several_adapters_each_is_judged_by_its_own_figures():
    names, masked = ("solver", "critic"), {"optimizer_steps": 0.0, "skipped_steps/nonfinite": 1.0}
    past = history(flags=["--lora-rank", "4", "--lora-adapters", '["solver", "critic"]'])
    for step, row in enumerate(past.steps):
        own = {name: value for name, value in row["metrics"].items() if not name.startswith("rollout/")}
        own["rollout/samples"] = 8.0
        row["metrics"] |= {f"solver/{name}": value for name, value in own.items()}
        if step % 2:
            row["metrics"] |= {f"critic/{name}": value for name, value in (own | NOTHING | masked).items()}
            row["metrics"]["skipped_steps/nonfinite"] = 1.0
    solver, critic = (of_adapter(past, name, names) for name in names)
    assert findings(solver) == findings(history())
    assert len(critic.steps) == STEPS // 2
    found = list(rules.findings_of(critic, rules.RULES))
    assert {"reward-constant", "not-finite"} <= {finding.rule for finding in found}
    assert {finding.adapter for finding in found} == {"critic"}
    assert found[0].lines()[0].startswith("critical: reward-constant (adapter critic): ")

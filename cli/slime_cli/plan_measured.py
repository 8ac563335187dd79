"""`slime plan RUN`: what was planned beside what the run measured, memory by phase and seconds by part."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from slime_cli.plan import PLAN
from slime_cli.plan_tables import MARKS, gib
from slime_cli.tables import heading, print_pairs, print_table
from slime_core.errors import ConfigError

WARM_UP = 2  # steps that compile, and are not counted where there are more
GROUPS = {"train": ("train", "update"), "rollout": ("rollout",), "score": ("score",), "sync": ("sync",)}
"""Phase of a measurement -> phases of a plan that it covers."""
PARTS = {
    "rollout": ("rollout",),
    "train": ("score", "train", "update"),
    "sync": ("sync", "swap"),
    "other": ("other",),
}
"""Part of a step as metrics.jsonl has it -> parts of a plan."""
SERVED = ("engine weights", "engine adapters", "KV cache", "engine passes", "server process")
"""Parts of servers, which have processes of their own."""
MEASURED_PARTS = {"rollout": ("rollout",), "train": ("score", "train"), "sync": ("sync",), "other": ("other",)}


def beside(run_dir: Path) -> dict[str, Any]:
    """A run's plan and measurements.

    Raises:
        ConfigError: CFG05 the run has no plan, or made no step.
    """
    try:
        plan = json.loads((run_dir / PLAN).read_text())
        if "error" in plan:
            raise ValueError(plan["error"])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir} has no plan",
            code="CFG05",
            where=str(run_dir / PLAN),
            why=f"a run writes it at its start: {error}",
            fix="slime plan RECIPE   plans a run anew",
        ) from error
    steps = [line for line in _lines(run_dir / "metrics.jsonl") if "seconds" in line and "step" in line]
    return {
        "plan": plan,
        "memory": _memory(run_dir, plan),
        "seconds": _seconds(plan, steps),
        "lengths": _lengths(plan, steps),
        "steps": len(steps),
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def _memory(run_dir: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of phase, planned and measured bytes; of several processes the one that had most."""
    files = [json.loads(file.read_text()) for file in sorted((run_dir / "memory").glob("*.json"))]
    planned: dict[str, int] = {}
    for device in plan["devices"]:
        for phase, parts in device["phases"].items():
            sizes = [size for name, size in parts.items() if "server process" not in parts or name not in SERVED]
            planned[phase] = max(planned.get(phase, 0), sum(sizes))
    rows = []
    for phase, covered in GROUPS.items():
        peaks = [file["peaks"][phase] - file["start"] for file in files if phase in file["peaks"]]
        expected = max((planned[one] for one in covered if one in planned), default=0)
        if peaks and expected:
            rows.append({"phase": phase, "planned": expected, "measured": max(peaks), "ratio": max(peaks) / expected})
    return rows


def _seconds(plan: dict[str, Any], steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of part, planned and median measured seconds."""
    planned = plan["time"].get("seconds", {})
    counted = steps[WARM_UP:] if len(steps) > WARM_UP else steps
    if not counted:
        return []
    rows = []
    for part, covered in PARTS.items():
        expected = sum(planned.get(one, 0.0) for one in covered)
        measured = median(sum(s["seconds"].get(one, 0.0) for one in MEASURED_PARTS[part]) for s in counted)
        rows.append({"part": part, "planned": expected or None, "measured": measured})
    total = median(sum(s["seconds"].values()) for s in counted)
    rows.append({"part": "a step", "planned": plan["time"].get("total"), "measured": total})
    for row in rows:
        row["ratio"] = row["measured"] / row["planned"] if row["planned"] else None
    return rows


def _lengths(plan: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Tokens of prompts and responses, planned and as they were."""
    planned = plan["lengths"]
    means = {"prompt": "prompt_len/mean", "response": "response_len/mean"}
    measured = {
        name: [step["metrics"][key] for step in steps if key in step.get("metrics", {})] for name, key in means.items()
    }
    return {
        name: {"planned": planned[name], "measured": median(values) if values else None}
        for name, values in measured.items()
    }


def print_beside(answer: dict[str, Any]) -> None:
    """The same as tables."""
    plan = answer["plan"]
    heading(f"planned beside measured, {answer['steps']} steps on {plan['gpu']['name']}")
    lengths = answer["lengths"]
    print_pairs(
        {
            name: f"{values['planned']:,.0f} tokens planned, "
            + (f"{values['measured']:,.1f} measured" if values["measured"] is not None else "none measured")
            for name, values in lengths.items()
        }
    )
    if answer["memory"]:
        heading("GiB at the peak, the process's own start left out" if plan["gpu"]["name"] == "cpu" else "GiB")
        rows = [
            [MARKS[r["phase"]], gib(r["planned"]), gib(r["measured"]), f"{r['ratio']:.2f}"] for r in answer["memory"]
        ]
        print_table(["", "planned", "measured", "ratio"], rows)
    if answer["seconds"]:
        heading("seconds, the median step")
        print_table(
            ["", "planned", "measured", "ratio"],
            [
                [
                    row["part"],
                    f"{row['planned']:.3g}" if row["planned"] else "-",
                    f"{row['measured']:.3g}",
                    f"{row['ratio']:.2f}" if row["ratio"] else "-",
                ]
                for row in answer["seconds"]
            ],
        )

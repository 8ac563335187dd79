"""`slime show RUN`: settings, course and results of a run."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.adapters import adapters_line
from slime_cli.starts import starts_of
from slime_cli.tables import cell, heading, print_pairs, print_table

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.report.rundir import RunDir

MAIN = (
    "reward/mean",
    "reward/std",
    "reward/equal_groups",
    "response_len/mean",
    "truncated_ratio",
    "loss",
    "train/loss",
    "kl",
    "entropy",
    "grad_norm",
    "staleness/max",
    "stale/dropped_rate",
    "stale/restarted_rate",
    "stale/masked_rate",
    "async/engine_idle_seconds",
    "async/trainer_wait_seconds",
)
"""Metrics that are shown without --all, with every task's and term's reward."""
DIAGNOSE = "slime_diagnose"
"""A plugin's package: it is imported by name, where it is installed."""
SHOWN = 10
"""Newest starts that are printed; --json has all of them."""


@click.command("show", epilog="Example: slime show runs/demo-0")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Every metric, not only the main ones.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def command(run: Path, everything: bool, as_json: bool) -> None:
    """Explain a run directory: settings, stages, metrics, drops, times, evaluations, samples, final model.

    Of a folder of dumped rollouts (--save-debug-rollout-data) it lists the files.
    """
    from slime_core.report.rundir import RunDir

    if not (run / "config.toml").exists() and any(run.glob("*.rollout")):
        list_dump(run, as_json)
        return
    facts = explain(RunDir.open(run))
    if as_json:
        click.echo(json.dumps(facts, indent=1, sort_keys=True))
    else:
        print_facts(facts, everything)


def list_dump(folder: Path, as_json: bool) -> None:
    """A row a file of dumped rollouts."""
    from slime_cli.dumps import dumps_of

    rows = dumps_of(folder)
    if as_json:
        click.echo(json.dumps(rows, indent=1, sort_keys=True))
    else:
        heading(str(folder))
        names = list(rows[0])
        print_table(names, [[row[name] for name in names] for row in rows])


def explain(run_dir: RunDir) -> dict[str, Any]:
    """Everything that `slime show` knows, with stable keys."""
    from slime_core.config.load import read, stage_name, stages
    from slime_core.report import history
    from slime_core.report.rundir import status_of

    config = read(run_dir.config, check=False).config
    holder = run_dir.holder()  # before run.json: a run writes its end, then lets go
    info = run_dir.read_info()
    status = status_of(info, holder)
    saved = checkpoints(run_dir)
    steps = history.steps_of(run_dir)
    parts = []
    for stage in stages(config):
        name = stage_name(stage)
        stage_steps = [step for step in steps if step.get("stage") == name]
        parts.append(
            {
                "name": name,
                "steps": len(stage_steps),
                "of": stage.rollout.num_rollout,
                "prompts_per_step": stage.rollout.rollout_batch_size,
                "samples_per_prompt": stage.rollout.n_samples_per_prompt,
                "loss_type": stage.train.loss_type,
                "advantage_estimator": stage.train.advantage_estimator,
                "lr": stage.train.lr,
                "metrics": history.summary(stage_steps),
                "seconds": history.times(stage_steps),
                "tokens_per_second": history.tokens_per_second(stage_steps),
            }
        )
    return {
        "run_dir": str(run_dir.path),
        "status": "crashed (no exit recorded)" if status == "crashed" else status,
        "diagnosis": diagnosis_of(run_dir.path),
        "holder": holder,
        "info": info,
        "config": {
            "name": config.name,
            "seed": config.seed,
            "plugins": list(config.plugins),
            "hf_checkpoint": config.rollout.hf_checkpoint,
            "init_weights": config.rollout.init_weights,
            "adapters": adapters_line(config),
            "dtype": config.train.dtype,
            "device": config.cluster.device,
            "cpu_threads": config.cluster.cpu_threads,
        },
        "version": steps[-1]["version"] if steps else 0,
        "starts": starts_of(run_dir),
        "checkpoints": saved,
        "resume": where_to_resume(run_dir, config, info, saved),
        "stages": parts,
        "samples_by_state": history.states(run_dir),
        "evaluations": history.evaluations_of(run_dir),
        "routing": info.get("routing", []),
        "samples": history.last_samples(run_dir),
        "errors": sorted(str(path) for path in run_dir.errors.glob("*.txt")),
        "final": str(run_dir.final) if run_dir.final.exists() else None,
    }


def diagnosis_of(path: Path) -> list[dict[str, Any]] | None:
    """What the package slime-diagnose finds in a run; None where it is not installed."""
    if find_spec(DIAGNOSE) is None:
        return None
    return [finding.as_dict() for finding in import_module(DIAGNOSE).diagnose(path)]


def checkpoints(run_dir: RunDir) -> list[dict[str, Any]]:
    """Published checkpoints, newest first, checked by file sizes; a resume checks hashes."""
    from slime_core.checkpoint import manifest
    from slime_core.errors import StorageError

    rows = []
    for version, path in manifest.names_in(run_dir.checkpoints):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        row = {"version": version, "path": str(path), "bytes": size, "damage": None}
        try:
            manifest.read(path, version, full=False)
        except StorageError as error:
            row["damage"] = error.what
        rows.append(row)
    return rows


def where_to_resume(
    run_dir: RunDir, config: Config, info: dict[str, Any], saved: list[dict[str, Any]]
) -> dict[str, Any]:
    """``version`` and ``from`` (checkpoint, ledger, nothing, or finished), and the command; nothing is locked."""
    from slime_core.report import history
    from slime_core.report.progress import total_steps

    whole = next((row["version"] for row in saved if not row["damage"]), None)
    answer: dict[str, Any] = {"version": 0, "from": "nothing", "command": f"slime run --resume {run_dir.path}"}
    if info.get("status") == "finished" and info.get("version", 0) >= total_steps(config):
        return answer | {"version": info.get("version", 0), "from": "finished", "command": None}
    if whole is not None:
        return answer | {"version": whole, "from": "checkpoint"}
    if history.states(run_dir).get("issued"):
        return answer | {"from": "ledger"}
    return answer | {"command": None}


def print_facts(facts: dict[str, Any], everything: bool) -> None:
    """The facts as tables on stdout."""
    info, config = facts["info"], facts["config"]
    heading(facts["run_dir"])
    status = facts["status"] + (f" ({info['error']})" if info.get("error") and facts["status"] == "failed" else "")
    print_pairs(
        {
            "status": status + (f", pid {facts['holder'].get('pid')}" if facts["holder"] else ""),
            "command": " ".join(info.get("command", [])) or "-",
            "started": info.get("started", "-"),
            "plugins": ", ".join(info.get("plugins", {}).values() or config["plugins"]) or "none",
            "model": f"{config['hf_checkpoint'] or '-'} (weights: {config['init_weights']})",
            **({"adapters": config["adapters"]} if config["adapters"] else {}),
            "machine": f"{config['device']}, {config['dtype']}, {config['cpu_threads']} threads",
            "seed": config["seed"],
            "steps": facts["version"],
            "resume": _resume_line(facts["resume"]),
        }
    )
    _print_starts(facts["starts"], facts["checkpoints"])
    _print_diagnosis(facts["diagnosis"] or [])
    heading("stages")
    columns = ("name", "steps", "of", "prompts_per_step", "samples_per_prompt", "loss_type", "lr", "tokens_per_second")
    print_table(
        ["stage", "steps", "of", "prompts", "x", "loss", "lr", "tok/s"],
        [[stage[key] for key in columns] for stage in facts["stages"]],
    )
    for stage in facts["stages"]:
        _print_metrics(stage, everything)
    _print_evaluations(facts["evaluations"])
    states = facts["samples_by_state"]
    if states:
        heading("samples: issued = trained + dropped + pending")
        print_table(["state", "count"], [[name, count] for name, count in states.items()])
    if facts["routing"]:
        heading("routing")
        names = list(dict.fromkeys(["hook", "task", "provider", *(key for row in facts["routing"] for key in row)]))
        print_table(names, [[row.get(name, "") for name in names] for row in facts["routing"]])
    for row in facts["samples"]:
        _print_sample(row)
    print_pairs(
        {"final model": facts["final"] or "none yet"}
        | ({"errors": "\n".join(facts["errors"])} if facts["errors"] else {})
    )


def _resume_line(resume: dict[str, Any]) -> str:
    begin = {
        "finished": "all steps are done; --num-rollout N adds more",
        "checkpoint": f"resumes from checkpoint {resume['version']}",
        "ledger": "no checkpoint: starts again at version 0 from the ledger",
        "nothing": "no checkpoint, and the ledger is empty: nothing to resume",
    }[resume["from"]]
    return begin + (f"\n{resume['command']}" if resume["command"] else "")


def _print_starts(starts: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if len(starts) > 1:
        heading("starts" + (f" (the last {SHOWN} of {len(starts)})" if len(starts) > SHOWN else ""))
        keys = ("epoch", "started", "pid", "host", "from_version", "status", "version")
        print_table(
            ["epoch", "started", "pid", "host", "from", "ended as", "at"],
            [[start.get(key) for key in keys] for start in starts[-SHOWN:]],
        )
    if saved:
        heading("checkpoints")
        rows = [[row["version"], f"{row['bytes'] / 2**20:.1f} MiB", row["damage"] or "whole"] for row in saved]
        print_table(["version", "size", "state"], rows)


def _print_diagnosis(findings: list[dict[str, Any]]) -> None:
    if findings:
        heading("diagnosis   (the evidence: slime diagnose RUN)")
        print_pairs({f"{row['severity']}: {row['rule']}": f"{row['summary']}\nfix: {row['fix']}" for row in findings})


def _print_metrics(stage: dict[str, Any], everything: bool) -> None:
    metrics = stage["metrics"]
    chosen = [
        name
        for name in metrics
        if everything
        or name in MAIN
        or name.startswith("task/")
        or (name.startswith("reward/") and name.count("/") == 2)
    ]
    if chosen:
        heading(f"metrics of {stage['name']}" + ("" if everything else "   (all of them: --all)"))
        rows = [[name, *(cell(metrics[name][key]) for key in ("first", "last", "best"))] for name in chosen]
        print_table(["metric", "first", "last", "best"], rows)
    total = sum(stage["seconds"].values())
    if total:
        heading(f"times of {stage['name']}")
        parts = sorted(stage["seconds"].items(), key=lambda item: -item[1])
        print_table(["part", "seconds", "share"], [[n, round(s, 2), f"{s / total:.0%}"] for n, s in parts])


def _print_evaluations(rows: list[dict[str, Any]]) -> None:
    if rows:
        heading("evaluations")
        rest = ("samples", "response_len/mean", "truncated_ratio", "infra_errors")
        keys = ("reward/mean", "reward/best", "pass@1", *rest)
        print_table(
            ["set", "step", *keys],
            [[row["name"], row["version"], *(cell(row["metrics"].get(key)) for key in keys)] for row in rows],
        )


def _print_sample(row: dict[str, Any]) -> None:
    heading(f"{row['rank']} sample {row['id']}: reward {cell(row['reward'])}")
    terms = ", ".join(f"{name} {cell(value)}" for name, value in row.get("terms", {}).items())
    print_pairs(
        {
            "prompt": row["prompt"],
            "response": row["response"],
            "label": row["label"],
            "ended": f"{row['status']} after {row['response_length']} tokens" + (f"; {terms}" if terms else ""),
        }
    )

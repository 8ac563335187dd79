"""Train SmolLM2-135M-Instruct by flags alone, beside TRL, and say where a step's time goes.

    python tools/bench/smollm2.py FOLDER                                     # makes FOLDER/model
    python tools/bench/bench_real_model.py FOLDER                            # embedded engine, SGLang, TRL
    python tools/bench/bench_real_model.py FOLDER --engines local --steps 3 --prompts 8 --samples 4 --length 48
    python tools/bench/bench_real_model.py FOLDER --engines local --verify 1 # and --verify-step

Rows are the sums of examples/real_model. Medians leave out the first two steps, which compile. Peak memory is the
largest of all processes of a run. "All in" is the process from its start to its end: evaluations before and after,
and for slime the final folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import util
from pathlib import Path
from typing import Any

WARM = 2  # steps that are left out of medians, where more are made
HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "real_model"
COLUMNS = ("run", "step, median s", "of it", "first step", "all in", "held out")
NAMES = {"local": "slime, embedded engine", "sglang": "slime, SGLang", "trl": "TRL, transformers' generate"}


def flags(model: Path, chosen: argparse.Namespace, engine: str) -> list[str]:
    """The command line of one run."""
    rows = EXAMPLE / "rows"
    words = [
        *("run", "--hf-checkpoint", str(model), "--prompt-data", str(rows / "chain_sum_train.jsonl")),
        *("--input-key", "question", "--label-key", "answer", "--apply-chat-template", "true"),
        *("--custom-rm-path", f"{EXAMPLE / 'reward.py'}:reward"),
        *("--eval-prompt-data", "held", str(rows / "chain_sum_heldout.jsonl")),
        *("--rollout-batch-size", str(chosen.prompts), "--n-samples-per-prompt", str(chosen.samples)),
        *("--rollout-max-response-len", str(chosen.length), "--num-rollout", str(chosen.steps), "--lr", "1e-5"),
        *("--rollout-engine", engine),
    ]
    if chosen.dtype:
        words += ["--dtype", chosen.dtype]
    if chosen.verify:
        words += ["--verify-step", str(chosen.verify)]
    return words + (served(chosen.prompts * chosen.samples) if engine == "sglang" else []) + chosen.flags


def served(in_flight: int) -> list[str]:
    """Where SGLang is, CUDA graphs as far as they are used, and what a trimmed installation of it needs."""
    from sglang_place import GPU_OPTIONS, Place

    place = Place.find()
    assert place is not None
    words = ["--sglang-python", place.python, f"sglang.env={json.dumps(dict(place.env))}"]
    options: dict[str, Any] = {}
    if place.device == "cuda":
        options = {"cuda_graph_max_bs": in_flight, "disable_piecewise_cuda_graph": True}
        options |= GPU_OPTIONS if os.environ.get("SGLANG_SITE") else {}
    for name, value in options.items():
        words += [f"--sglang-{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def lacking(engine: str) -> str:
    """What is not installed; empty where it can be measured."""
    from sglang_place import NO_SGLANG, Place

    if engine == "sglang" and Place.find() is None:
        return NO_SGLANG
    if engine == "trl" and not os.environ.get("TRL_SITE") and util.find_spec("trl") is None:
        return "no TRL here: pip install trl, or TRL_SITE names a folder with it"
    return ""


def measured(model: Path, chosen: argparse.Namespace, engine: str) -> dict[str, Any]:
    """One run, to its end, and its figures."""
    with tempfile.TemporaryDirectory() as work:
        began, clock = time.monotonic(), time.time()
        if engine == "trl":
            sizes = {name: str(getattr(chosen, name)) for name in ("steps", "prompts", "samples", "length")}
            words = [
                str(HERE / "trl_grpo.py"),
                str(model),
                *(word for k, v in sizes.items() for word in (f"--{k}", v)),
                *("--limit", str(chosen.trl_seconds)),
            ]
        else:
            words = ["-m", "slime_cli.main", *flags(model, chosen, engine), "--run-dir", f"{work}/run"]
        out = None if engine != "trl" else subprocess.PIPE
        done = subprocess.run([sys.executable, *words], cwd=work, check=False, stdout=out, text=True)
        seconds = time.monotonic() - began
        figures = of_trl(done.stdout) if engine == "trl" else of_run(Path(work, "run"), clock)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1 << 20)
    about = {"engine": engine, "exit": done.returncode, "whole_run_s": round(seconds, 1)}
    return about | figures | {"peak_gib": round(peak, 2)}


def of_run(run: Path, began: float) -> dict[str, Any]:
    """Figures of a run of slime, whose command was given at the time ``began``."""
    metrics, log = run / "metrics.jsonl", run / "log" / "run.log"
    marks = [line for line in log.read_text().splitlines() if "first step: rollout" in line] if log.exists() else []
    rollout = time.mktime(time.strptime(marks[0][:19], "%Y-%m-%dT%H:%M:%S")) - began if marks else None
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["kind"] == "step"]
    parts = sorted({part for line in steps for part in line["seconds"]})
    return {
        "steps": len(steps),
        "first_rollout_after_s": rollout and round(rollout),
        "all_steps_s": round(sum(sum(line["seconds"].values()) for line in steps), 1),
        **times([sum(line["seconds"].values()) for line in steps]),
        "parts_s": {p: median([line["seconds"].get(p, 0.0) for line in steps]) for p in parts},
        "held_out": [line["metrics"].get("reward/mean") for line in lines if line["kind"] == "eval"],
        "verify": {k: v for line in steps for k, v in line["metrics"].items() if k.startswith("verify")},
    }


def of_trl(out: str) -> dict[str, Any]:
    """Figures of TRL's process."""
    said = json.loads(next((line for line in reversed(out.splitlines()) if line.startswith("{")), "{}"))
    steps = said.get("steps", [])
    return {"steps": len(steps), **times(steps), "parts_s": {}, "held_out": [None, said.get("held_out")]}


def times(steps: list[float]) -> dict[str, Any]:
    """Seconds of the first step and of the median one."""
    return {"first_step_s": round(steps[0], 2) if steps else None, "step_s": median(steps)}


def median(values: list[float]) -> float | None:
    """Of all but the warm-up."""
    values = values[WARM:] if len(values) > WARM + 1 else values
    return round(statistics.median(values), 3) if values else None


def row(figures: dict[str, Any]) -> str:
    """A line of the table."""
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in figures["parts_s"].items() if seconds >= 0.005)
    held = " to ".join("-" if value is None else f"{value:.3f}" for value in figures["held_out"])
    return (
        f"| {NAMES[figures['engine']]} | {figures['step_s']} | {parts or '-'} | {figures['first_step_s']} "
        f"| {figures['whole_run_s']:.0f} s for {figures['steps']} steps | {held} |"
    )


def main() -> None:
    """Run each engine; print a line of figures for it, and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(os.environ.get("SLIME_SMOLLM2", "smollm2")))
    parser.add_argument("--engines", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--verify", type=int, default=0)
    parser.add_argument("--trl-seconds", type=float, default=240.0, help="After them TRL begins no further step.")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="More flags of `slime run`, to the end.")
    chosen = parser.parse_args()
    model = chosen.folder.resolve() / "model"
    if not model.is_dir():
        print(f"no model in {chosen.folder}: python tools/bench/smollm2.py {chosen.folder}; nothing was measured")
        return
    table = []
    for engine in chosen.engines:
        if reason := lacking(engine):
            print(f"{engine}: {reason}; not measured", file=sys.stderr)
            continue
        figures = measured(model, chosen, engine)
        print(json.dumps(figures), flush=True)
        table.append(row(figures))
    if len(chosen.engines) > 1:
        print(f"\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        print("\n".join(table))


if __name__ == "__main__":
    main()

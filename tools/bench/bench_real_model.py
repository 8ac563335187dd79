"""Train SmolLM2-135M-Instruct by flags alone, and say where a step's time goes; `smollm2.py` makes the folder.

    python tools/bench/smollm2.py FOLDER && python tools/bench/bench_real_model.py FOLDER  # embedded, SGLang
    python tools/bench/bench_real_model.py FOLDER --engines local --steps 3 --prompts 8 --samples 4 --length 48
    python tools/bench/bench_real_model.py FOLDER --verify 1                               # and --verify-step

Medians leave out the first two steps, which compile. Peak memory is the largest of all processes of a run.
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
from pathlib import Path
from typing import Any

WARM = 2  # steps that are left out of medians, where more are made


def flags(folder: Path, chosen: argparse.Namespace, engine: str) -> list[str]:
    """The command line of one run."""
    words = [
        *("run", "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "train.jsonl")),
        *("--input-key", "question", "--label-key", "answer", "--apply-chat-template", "true"),
        *(
            "--custom-rm-path",
            f"{folder / 'reward.py'}:reward",
            "--eval-prompt-data",
            "held",
            str(folder / "held.jsonl"),
        ),
        *("--rollout-batch-size", str(chosen.prompts), "--n-samples-per-prompt", str(chosen.samples)),
        *("--rollout-max-response-len", str(chosen.length), "--num-rollout", str(chosen.steps), "--lr", "1e-5"),
        *("--rollout-engine", engine),
    ]
    if chosen.dtype:
        words += ["--dtype", chosen.dtype]
    if chosen.verify:
        words += ["--verify-step", str(chosen.verify)]
    return words + (served() if engine == "sglang" else []) + chosen.flags


def served() -> list[str]:
    """Where SGLang is, and what a trimmed installation of it needs; nothing where the environment says it all."""
    from sglang_place import GPU_OPTIONS, NO_SGLANG, Place

    place = Place.find()
    if place is None:
        sys.exit(NO_SGLANG)
    words = ["--sglang-python", place.python, f"sglang.env={json.dumps(dict(place.env))}"]
    options = GPU_OPTIONS if place.device == "cuda" and os.environ.get("SGLANG_SITE") else {}
    for name, value in options.items():
        words += [f"--sglang-{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def measured(folder: Path, chosen: argparse.Namespace, engine: str) -> dict[str, Any]:
    """One run, to its end, and its figures."""
    with tempfile.TemporaryDirectory() as work:
        began = time.monotonic()
        command = [sys.executable, "-m", "slime_cli.main", *flags(folder, chosen, engine), "--run-dir", f"{work}/run"]
        done = subprocess.run(command, cwd=work, check=False)
        seconds = time.monotonic() - began
        metrics = Path(work, "run", "metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["kind"] == "step"]
    warm = steps[WARM:] if len(steps) > WARM + 1 else steps
    parts = sorted({part for line in warm for part in line["seconds"]})
    held = [line["metrics"].get("reward/mean") for line in lines if line["kind"] == "eval"]
    return {
        "engine": engine,
        "exit": done.returncode,
        "steps": len(steps),
        "whole_run_s": round(seconds, 1),
        "first_step_s": round(sum(steps[0]["seconds"].values()), 2) if steps else None,
        "step_s": round(statistics.median(sum(line["seconds"].values()) for line in warm), 2) if warm else None,
        "parts_s": {p: round(statistics.median(line["seconds"].get(p, 0.0) for line in warm), 2) for p in parts},
        "held_out": held,
        "verify": {k: v for line in steps for k, v in line["metrics"].items() if k.startswith("verify")},
        "peak_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1 << 20), 2),
    }


def main() -> None:
    """Run each engine and print a line of figures for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(os.environ.get("SLIME_SMOLLM2", "smollm2")))
    parser.add_argument("--engines", nargs="+", default=["local", "sglang"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--verify", type=int, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="More flags of `slime run`, to the end.")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    if not (folder / "model").is_dir():
        print(f"no model in {folder}: python tools/bench/smollm2.py {chosen.folder}; nothing was measured")
        return
    figures = [measured(folder, chosen, engine) for engine in chosen.engines]
    for row in figures:
        print(json.dumps(row))


if __name__ == "__main__":
    main()

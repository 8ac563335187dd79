"""Where the time of a run's steps goes, and how much of it is neither computing nor bringing weights to the engine.

    python tools/bench/bench_step_gaps.py runs/arithmetic-1 ...                     # runs that are there
    python tools/bench/bench_step_gaps.py --run --backend megatron --engine sglang  # one GPU, Qwen3-4B's shape
    python tools/bench/bench_step_gaps.py --run --smoke                             # what a CPU can: a tiny model

Read from ``seconds`` of each step in metrics.jsonl: ``rollout`` (waiting for samples), ``score``, ``train`` and
``verify`` compute, ``sync`` brings weights; the rest is ``fingerprint``, ``dump``, ``checkpoint``, and ``other``.
"outside" is all of that rest over the whole step. Each stage is read by itself, its first ``--skip`` steps left out;
its very first step has no ``other``. Where engine and trainer give each other their memory, what of it lies outside of
``sync`` is in ``other``, and the last line tells the seconds of a whole turn.

``--run`` draws a model of the shape from a seed, with prompts of arithmetic and a reward that says nothing but is not
constant; a run that is cut off at ``--limit`` is read as far as it came. Responses go on to their greatest length.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE = ("rollout", "score", "verify", "train")
SYNC = ("sync",)
OTHER = "other"
REWARD = "def reward(args, sample, **kwargs):\n    return float(sum(sample.tokens[-sample.response_length:]) % 7)\n"


class Ended(Exception):
    """Somebody's limit is over: what there is, is read."""


def end(*_: Any) -> None:
    """What SIGTERM does while the run is waited for; a second one, which `timeout` sends to its group, nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


@dataclass(slots=True, frozen=True)
class Step:
    """One step: its version, its stage, seconds by part, and what a turn of memory took."""

    version: int
    stage: str
    seconds: Mapping[str, float]
    swap: float = 0.0

    @property
    def wall(self) -> float:
        """Seconds of all of it."""
        return sum(self.seconds.values())

    @property
    def outside(self) -> float:
        """Share that is neither computing nor weight sync."""
        inside = sum(self.seconds.get(name, 0.0) for name in (*COMPUTE, *SYNC))
        return 1.0 - inside / self.wall if self.wall else 0.0


def read_steps(run_dir: Path) -> list[Step]:
    """The steps of a run whose time is known whole; a line that was cut off is left out."""
    found = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True):
        row = json.loads(line) if line.endswith("\n") else {"kind": ""}
        if row["kind"] == "step" and OTHER in row["seconds"]:
            swap = row["metrics"].get("swap/total_seconds", 0.0)
            found.append(Step(row["version"], row["stage"], row["seconds"], swap))
    return found


def table(steps: Sequence[Step], last: int = 12) -> list[str]:
    """Seconds and shares of the last steps of one stage, and the medians of all of them."""
    names = [*dict.fromkeys(name for step in steps for name in step.seconds if name != OTHER), OTHER]
    lines = [f"{'step':>8} {'seconds':>8} " + " ".join(f"{name:>10}" for name in names) + f" {'outside':>9}"]

    def row(label: str, wall: float, shares: Sequence[float], outside: float) -> str:
        return f"{label:>8} {wall:8.3f} " + " ".join(f"{share:10.2%}" for share in shares) + f" {outside:9.2%}"

    def shares(step: Step) -> list[float]:
        return [step.seconds.get(name, 0.0) / step.wall if step.wall else 0.0 for name in names]

    lines += [row(str(step.version), step.wall, shares(step), step.outside) for step in steps[-last:]]
    middle = [statistics.median(column) for column in zip(*map(shares, steps), strict=True)]
    lines.append(row("median", statistics.median(s.wall for s in steps), middle, outside(steps)))
    return lines


def outside(steps: Sequence[Step]) -> float:
    """The median share."""
    return statistics.median(step.outside for step in steps)


def show(run_dir: Path, what: str, skip: int) -> None:
    """Tables of all stages of a run, and a row for docs/benchmarks.md each."""
    steps = read_steps(run_dir)
    for stage in dict.fromkeys(step.stage for step in steps):
        mine = [step for step in steps if step.stage == stage]
        mine = mine[skip:] or mine
        print(f"\n{what}, stage {stage}, {len(mine)} steps", *table(mine), sep="\n")
        wall, part = statistics.median(s.wall for s in mine), outside(mine)
        whole = sum(s.wall * s.outside for s in mine) / sum(s.wall for s in mine)
        print(f"| outside compute and weight sync: {what}, {stage} | under 2 % | {part:.2%} of {wall:.2f} s", end="")
        print(f" (median of {len(mine)} steps; {whole:.2%} of all their time) |")
        if swap := statistics.median(s.swap for s in mine):
            print(f"memory given and taken in a turn, part of it within sync: {swap:.3f} s")
    if not steps:
        print(f"\n{what}: no step whose time is known whole in {run_dir}; the first of a stage is not")


def make_run(args: argparse.Namespace, folder: Path) -> int:
    """Run `slime run` on a recipe that is made here; its exit code, 124 where it was cut off."""
    from sglang_place import NO_SGLANG, Place, make_folder

    place = Place.find("cpu" if args.smoke else "cuda") if args.engine == "sglang" else None
    if args.engine == "sglang" and place is None:
        raise SystemExit(NO_SGLANG)
    make_folder(folder / "model", args.shape)
    digits = "".join(f"{n}+" for n in range(100, 100 + args.prompt // 4))
    rows = [{"q": f"{n}+{digits}1=", "a": str(n)} for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.py").write_text(REWARD)
    (folder / "recipe.toml").write_text(recipe(args, place))
    command = [sys.executable, "-m", "slime_cli.main", "run", "recipe.toml", "--run-dir", "run"]
    env = {**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        signal.signal(signal.SIGTERM, end)
        try:
            return process.wait(args.limit)
        except (subprocess.TimeoutExpired, Ended):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what the run has done is still to be read
            process.terminate()
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return 124


def recipe(args: argparse.Namespace, place: Any) -> str:
    """The recipe's text."""
    from sglang_place import CPU_OPTIONS, GPU_OPTIONS, _toml

    cuda = not args.smoke
    tables: dict[str, dict[str, Any]] = {
        "cluster": {"device": "cuda", "cpu_threads": 8, "colocate": True} if cuda else {"cpu_threads": 1},
        "rollout": {
            "hf_checkpoint": "model",
            "rollout_engine": args.engine,
            "num_rollout": args.steps,
            "rollout_batch_size": args.batch,
            "n_samples_per_prompt": 8,
            "rollout_max_response_len": args.response,
        },
        "data": {"prompt_data": "rows.jsonl", "input_key": "q", "label_key": "a"},
        "reward": {"custom_rm_path": "sums.py:reward"},
        "train": {"lr": 1e-6, "dtype": "bfloat16" if cuda else "float32", "train_backend": args.backend},
        "report": {"save_interval": 0, "export_final": False},
    }
    if args.keep:
        tables["cluster"] |= {"offload_train": False, "offload_rollout": False}
    if args.tokens:
        tables["train"]["max_tokens_per_gpu"] = args.tokens
    if args.recompute:
        tables["train"]["gradient_checkpointing"] = True
    if args.engine == "local":
        tables["rollout"]["rollout_slots"] = args.batch * 8
    if place is not None:
        graphs = {"mem_fraction_static": args.mem_fraction, "cuda_graph_bs": [8, 32, 64], "max_running_requests": 64}
        graphs |= {"disable_piecewise_cuda_graph": True}
        options = {**GPU_OPTIONS, **graphs} if cuda else CPU_OPTIONS
        tables["sglang"] = {"python": place.python, "env": dict(place.env), **options}
    lines = ['name = "gaps"', 'plugins = ["models"]']
    for name, keys in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    return "\n".join([*lines, ""])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--skip", type=int, default=1, help="steps of a stage that are left out, after its first")
    parser.add_argument("--run", action="store_true", help="make a run first")
    parser.add_argument("--backend", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--engine", choices=("sglang", "local"), default="local")
    parser.add_argument("--shape", choices=("4B", "0.6B", "tiny"), default="4B")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="prompts a step, 8 samples each")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--response", type=int, default=1024, help="tokens")
    parser.add_argument("--tokens", type=int, default=0, help="max_tokens_per_gpu; 0: slime's own")
    parser.add_argument("--recompute", action="store_true", help="gradient_checkpointing")
    parser.add_argument("--keep", action="store_true", help="both sides keep their memory: no offload")
    parser.add_argument("--mem-fraction", type=float, default=0.5, help="SGLang's mem_fraction_static")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds until the run is cut off and read")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU: it proves nothing")
    args = parser.parse_args()
    if args.smoke:
        args.shape, args.response, args.prompt, args.batch = "tiny", 32, 16, 2
        if args.backend == "megatron":
            parser.error("--backend megatron needs a GPU")
    if not args.run and not args.runs:
        parser.error("name run directories, or --run")
    return args


def main() -> None:
    """Run where asked, read, print."""
    args = parse()
    for run_dir in args.runs:
        show(run_dir, run_dir.name, args.skip)
    if not args.run:
        return
    import torch

    if not args.smoke and not torch.cuda.is_available():
        print("no GPU here: --smoke is what runs on a CPU; nothing was measured")
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        code = make_run(args, folder)
        if code:
            print(f"the run ended with exit code {code}" + (": cut off at --limit" if code == 124 else ""))
            for log in [folder / "log.txt", *sorted((folder / "run" / "log").glob("*.log*"))]:
                print(f"-- {log.name}", log.read_text(errors="replace")[-3000:], sep="\n")
        if keep := os.environ.get("OUT"):
            name = f"gaps-{args.backend}{'-keep' * args.keep}"
            shutil.copytree(folder / "run" / "log", Path(keep) / name, dirs_exist_ok=True)
        if (folder / "run" / "metrics.jsonl").is_file():
            device = "CPU" if args.smoke else torch.cuda.get_device_name()
            what = f"{args.shape}, {args.backend}, {args.engine} engine, {args.batch} x 8 samples of {args.response}"
            show(folder / "run", f"{device}: {what}", args.skip)
        if code not in (0, 124):
            raise SystemExit(1)


if __name__ == "__main__":
    main()

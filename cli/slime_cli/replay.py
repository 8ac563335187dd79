"""`slime replay RUN --step N`: a recorded step made again from the ledger; whether it is the same, and why not."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.failure import CliSession
from slime_cli.tables import heading, print_pairs, print_table
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.replaying.replay import Replayed
    from slime_core.config.schema import Config
    from slime_core.report.rundir import RunDir

SHOWN = 40
"""Samples that are printed; ``--json`` has all."""


@click.command("replay", epilog="Example: slime replay runs/demo-0 --step 3")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), required=True, metavar="N", help="The step, counted from 1.")
@click.option("--verify", is_flag=True, help="Recompute its gradient slowly, too.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.pass_obj
def command(session: CliSession, run: Path, step: int, verify: bool, as_json: bool) -> int:
    """Make a recorded step again from the ledger and compare it with what was recorded.

    Begins at the nearest checkpoint before it, or at the starting weights; starts no engine; changes nothing of the
    run, which may be going on. Exit code 0: loss, gradient norm, metrics and weights are identical; 1: they are not.
    """
    from slime_core.report.rundir import RunDir

    answer = make_again(RunDir.open(run), step, verify=verify)
    verified = verdict(answer)
    if as_json:
        click.echo(json.dumps({**answer.as_dict(), "verify_ok": verified}, indent=1, sort_keys=True))
    else:
        print_answer(answer, verified)
    return 0 if answer.identical and verified is not False else 1


def make_again(run_dir: RunDir, step: int, *, verify: bool = False) -> Replayed:
    """The step, made again in a folder that is removed afterwards."""
    from slime_cli.libraries import quiet_libraries
    from slime_cli.replaying.replay import replay
    from slime_core.config.load import read
    from slime_core.plugins import load_plugins, option_models

    quiet_libraries()
    config = local_config(read(run_dir.config, check=False, models=option_models).config)
    plugins = load_plugins(config)
    try:
        with tempfile.TemporaryDirectory(prefix="slime-replay-") as scratch:
            return asyncio.run(replay(run_dir, step, config, plugins, Path(scratch), verify=verify, note=say))
    finally:
        plugins.close()


def local_config(config: Config) -> Config:
    """The recorded config, on a device that this machine has."""
    import torch

    from slime_core.clusters.machine import resolve_machine

    if config.cluster.device == "cuda" and not torch.cuda.is_available():
        say("the run trained on a GPU, but this machine has none: the step runs on the CPU and will differ")
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cpu"})})
    return resolve_machine(config)


def verdict(answer: Replayed) -> bool | None:
    """Whether the slow recomputation agrees; None if it was not requested."""
    errors = answer.verified
    return None if errors is None else max(errors["gradient_error"], errors["loss_error"]) <= errors["limit"]


def print_answer(answer: Replayed, verified: bool | None) -> None:
    """One sentence, then tables."""
    click.echo(sentence(answer))
    click.echo()
    pairs: dict[str, Any] = {
        "made from": f"{answer.origin}, by {answer.step - answer.began} steps",
        "weights": " ".join(dict.fromkeys(answer.fingerprint)) or "no fingerprint was recorded",
        "metrics": f"{answer.compared} compared, {len(answer.metrics)} differ",
        "machine": machine_text(answer),
    }
    if verified is not None and answer.verified is not None:
        error = answer.verified["gradient_error"]
        pairs["verify"] = f"gradient error {error:.1e}: " + ("agrees" if verified else "DIFFERS")
    print_pairs(pairs)
    if answer.metrics:
        heading("metrics that differ")
        rows = [[name, repr(pair[0]), repr(pair[1])] for name, pair in answer.metrics.items()]
        print_table(["metric", "recorded", "now"], rows)
    heading("samples" + (f"   (the first {SHOWN}; all of them: --json)" if len(answer.samples) > SHOWN else ""))
    print_table(
        ["sample", "reward", "tokens", "advantage", "min", "max", "log-prob diff", "largest"],
        [[getattr(row, name) for name in row.__dataclass_fields__] for row in answer.samples[:SHOWN]],
    )
    if answer.worst:
        heading("tokens at which trainer and engine differ most")
        print_table(
            ["sample", "response token", "id", "text", "trainer", "rollout"],
            [[t.sample, t.place, t.token, repr(t.text), repr(t.trainer), repr(t.rollout)] for t in answer.worst],
        )


def sentence(answer: Replayed) -> str:
    """Whether the step is the one that was recorded."""
    name = f"step {answer.step} ({answer.stage})"
    if answer.identical and answer.fingerprint[0]:
        return f"{name} is identical: {answer.compared} metrics and the weights, bit for bit"
    if answer.identical:
        return f"{name} has {answer.compared} identical metrics; no fingerprint of its weights was recorded"
    if answer.parted and answer.parted[0] < answer.step:
        return f"{name} differs: already step {answer.parted[0]} made other weights than were recorded"
    compared = [f"{len(answer.metrics)} metrics"] if answer.metrics else []
    compared += ["the weights"] if answer.parted else []
    return f"{name} DIFFERS from what was recorded: {' and '.join(compared)}"


def machine_text(answer: Replayed) -> str:
    """The differences."""
    if not answer.machine:
        return "as recorded"
    return "\n".join(f"{key}: {was} recorded, {now} here" for key, (was, now) in answer.machine.items())

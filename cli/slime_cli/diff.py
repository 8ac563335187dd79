"""`slime diff RUN RUN`: where two runs first part, step by step and tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.tables import heading, print_pairs, print_table
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.replaying.compare import ComparedPart, StepComparison
    from slime_core.report.rundir import RunDir

MOST = 40
"""Equal steps at the ends of a long table are left out beyond this many rows."""


@click.command("diff", epilog="Example: slime diff runs/demo-0 runs/demo-1")
@click.argument("one", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("other", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--no-weights", is_flag=True, help="Leave the final weights out.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def command(one: Path, other: Path, no_weights: bool, as_json: bool) -> int:
    """Compare two runs step by step: samples, tokens, log-probs, rewards, metrics, weights.

    Says where they first part. Exit code 0: every step that they made is equal; 1: they differ. Differences of the
    config are shown and do not count. A running run is compared up to its last step.
    """
    from slime_core.report.rundir import RunDir

    runs = RunDir.open(one), RunDir.open(other)
    facts = compare_runs(*runs, weights=not no_weights)
    if as_json:
        click.echo(json.dumps(facts, indent=1, sort_keys=True, default=_plain))
    else:
        print_facts(facts)
    return 0 if facts["equal"] else 1


def compare_runs(one: RunDir, other: RunDir, *, weights: bool = True) -> dict[str, Any]:
    """Everything that `slime diff` knows, with stable keys."""
    from slime_cli.replaying.compare import compare_steps
    from slime_core.report.recorded import open_recorded

    with open_recorded(one) as first, open_recorded(other) as second:
        steps = compare_steps(one, other, (first, second), decode_of(one))
    final = compare_final(one, other) if weights else None
    facts = {
        "runs": [str(one.path), str(other.path)],
        "config": config_changes(one, other),
        **steps.as_dict(),
        "final": final,
        "table": rows_of(steps),
    }
    if steps.equal and final is not None and final["equal"] is False:
        facts["first_divergence"] = f"{steps.sentence()}; final/ differs: {final['detail']}"
    facts["equal"] = steps.equal and (final is None or final["equal"] is not False)
    return facts


def config_changes(one: RunDir, other: RunDir) -> list[dict[str, Any]]:
    """Keys whose values differ: ``key first second verdict reason``."""
    from slime_cli.resume_compatibility import compare, shown
    from slime_core.config.load import read

    tables = [read(run.config, check=False).config.model_dump(mode="json") for run in (one, other)]
    return [
        {
            "key": change.key,
            "first": shown(change.was),
            "second": shown(change.now),
            "verdict": change.verdict,
            "reason": change.reason,
        }
        for change in compare(*tables)
    ]


def decode_of(run_dir: RunDir) -> Callable[[Sequence[int]], str] | None:
    """The run's tokenizer, where its folder is on this machine; else None."""
    from slime_core.config.load import read
    from slime_core.errors import SlimeError
    from slime_core.weights.folder import ModelFolder

    with suppress(SlimeError, OSError, ValueError):
        config = read(run_dir.config, check=False).config
        final = run_dir.final if run_dir.final.is_dir() else None
        folder = Path(config.rollout.hf_checkpoint)
        chosen = folder if folder.is_dir() else final
        if chosen is not None:
            tokenizer = ModelFolder.open(str(chosen), init_weights="random").tokenizer()
            return lambda tokens: str(tokenizer.decode(list(tokens)))
    return None


def compare_final(one: RunDir, other: RunDir) -> dict[str, Any]:
    """``final/`` of both, tensor by tensor; ``equal`` is None where one has none."""
    lacking = [str(run.final) for run in (one, other) if not run.final.is_dir()]
    if lacking:
        return {"equal": None, "detail": f"not there: {', '.join(lacking)}", "tensors": 0, "differ": {}}
    from slime_cli.replaying.difference import compare_folders

    difference = compare_folders(one.final, other.final)
    if difference.equal:
        detail = f"{difference.tensors} tensors, every bit equal"
    elif difference.differ:
        name, largest = next(iter(difference.differ.items()))
        detail = f"{len(difference.differ)} of {difference.tensors} tensors, most {name} by {largest:.3g}"
    else:
        odd = [*difference.shapes, *difference.only[0], *difference.only[1]]
        detail = f"{len(odd)} tensors are of another form or in one folder alone, such as {odd[0]}"
    return {
        "equal": difference.equal,
        "detail": detail,
        "tensors": difference.tensors,
        "differ": difference.differ,
        "shapes": {name: list(forms) for name, forms in difference.shapes.items()},
        "only_in_first": difference.only[0],
        "only_in_second": difference.only[1],
    }


def rows_of(steps: StepComparison) -> list[list[Any]]:
    """A row a step: version, stage, and a word a part."""
    from slime_cli.replaying.compare import PARTS

    return [[s.version, s.stage[0], *(_word(s.parts[name]) for name in PARTS)] for s in steps.steps]


def _word(part: ComparedPart) -> str:
    if part.verdict == "same":
        return "="
    if part.verdict == "unknown":
        return "?"
    return "differ" if part.largest is None else f"{part.largest:.1e}"


def print_facts(facts: dict[str, Any]) -> None:
    """The answer on stdout: one sentence, then tables."""
    from slime_cli.replaying.compare import PARTS

    click.echo(facts["first_divergence"])
    click.echo()
    if facts["config"]:
        heading("config")
        rows = [[row["key"], row["first"], row["second"], row["reason"]] for row in facts["config"]]
        print_table(["key", "first", "second", "it means"], rows)
    heading("steps: = equal, ? cannot be compared, a number: the largest difference")
    print_table(["step", "stage", *PARTS], _shortened(facts["table"]))
    first = next((step for step in facts["steps"] if step["first"]), None)
    if first is not None:
        _print_step(first)
    unknown = {step["parts"][name]["detail"] for step in facts["steps"] for name in PARTS} - {""}
    for detail in sorted(d for d in unknown if any(_is_unknown(step, d) for step in facts["steps"])):
        say(f"cannot be compared: {detail}")
    for sentence in facts["evaluations"]:
        click.echo(sentence)
    if facts["final"] is not None:
        print_pairs({"final weights": facts["final"]["detail"]})


def _is_unknown(step: dict[str, Any], detail: str) -> bool:
    return any(part["verdict"] == "unknown" and part["detail"] == detail for part in step["parts"].values())


def _print_step(step: dict[str, Any]) -> None:
    heading(f"step {step['version']}, the first that differs")
    print_pairs({n: part["detail"] for n, part in step["parts"].items() if part["verdict"] == "differs"})
    if step["metrics"]:
        rows = [[name, repr(pair[0]), repr(pair[1])] for name, pair in step["metrics"].items()]
        print_table(["metric", "first", "second"], rows)


def _shortened(rows: list[list[Any]]) -> list[list[Any]]:
    """Of a long table the rows around the first that differs."""
    if len(rows) <= MOST:
        return rows
    first = next((i for i, row in enumerate(rows) if any(cell not in ("=", "?") for cell in row[2:])), len(rows) - 1)
    begin = max(0, min(first - MOST // 4, len(rows) - MOST))
    return rows[begin : begin + MOST]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)

"""`slime kernelbench`: judge files, serve the judge, measure a model, look at problems and at what a run wrote."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slime_kernelbench.show import show

if TYPE_CHECKING:
    from slime_kernelbench.options import Options
    from slime_kernelbench.secret import Secret
    from slime_kernelbench.types import Judge

T = TypeVar("T")
ISOLATION = ["auto", "strong", "medium", "none"]
OPTIONS = {
    "url": "judge_url",
    "timeout": "judge_timeout",
    "workers": "judge_workers",
    "sandbox": "sandbox",
    "trusted": "i_trust_this_code",
}
AS_JSON = click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
WHERE = click.option(
    "--problems",
    "where",
    default="shipped",
    show_default=True,
    metavar="WHERE",
    help="Our own (shipped), a JSONL, Parquet or Python file, a folder, or OWNER/NAME on the hub.",
)
LEVELS = click.option(
    "--level", "levels", type=int, multiple=True, help="Problems of this level alone; may be repeated."
)
JUDGE = (
    click.option(
        "--url", default="", help="A judge that `slime kernelbench serve` runs; default: one in this process."
    ),
    click.option("--timeout", type=click.FloatRange(min=0.1), help="Seconds for one candidate; default 30."),
    click.option("--workers", type=click.IntRange(0), help="Candidates judged at once; default one a core."),
    click.option("--sandbox", type=click.Choice(ISOLATION), help="Least isolation; default auto, the strongest."),
    click.option("--i-trust-this-code", "trusted", is_flag=True, default=None, help="Required by --sandbox none."),
)


def judged(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that judges; they arrive as ``options``."""
    for option in reversed(JUDGE):
        command = option(command)
    return command


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: slime kernelbench eval kernels/relu.py"
)
def kernelbench() -> None:
    """GPU kernels: judge them, serve the judge, measure a model."""


@kernelbench.command("eval", epilog="Example: slime kernelbench eval kernels/relu.py --problem relu")
@click.argument("path", metavar="FILE|DIR", type=click.Path(path_type=Path))
@click.option("--problem", help="Problem of every file: an id, its last part, or a file in KernelBench's format.")
@WHERE
@judged
@AS_JSON
def eval_(path: Path, problem: str | None, where: str, as_json: bool, **options: Any) -> None:
    """Judge kernels: a row a file; the exit code is 1 where any is not correct.

    A file has `class ModelNew`. What it must compute is its own `class Model`, or the file NAME.problem.py beside
    NAME.py, or --problem, or the sum of two matrices.
    """
    from slime_kernelbench.files import entries, find_problem, judge_all

    items = entries(path, find_problem(problem, where) if problem else None)
    settings = _options(options)
    rows = _run(settings, lambda judge: judge_all(items, judge, at_once=_at_once(settings)))
    if as_json:
        _print_json(rows)
    else:
        columns = ("file", "problem", "status", "reached", "speedup", "why")
        _table(columns, [[_cell(row, column) for column in columns] for row in rows])
        click.echo(f"  {sum(row['correct'] for row in rows)} of {len(rows)} are correct")
    sys.exit(not all(row["correct"] for row in rows))


@kernelbench.command(epilog="Example: slime kernelbench serve ./judge --gpus auto")
@click.argument("folder", metavar="[DIR]", default="kernelbench-judge", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Another than the loopback needs --token-file.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Default: DIR/token, made where it is missing.")
@click.option("--gpus", default="none", show_default=True, help="auto, none, or UUIDs and numbers: 0,GPU-1b2c...")
@click.option("--workers", default=0, type=click.IntRange(0), help="Without GPUs: workers; default one a core.")
@click.option("--lanes", default=4, show_default=True, type=click.IntRange(1), help="Candidates under way on a GPU.")
@click.option("--queue", default=256, show_default=True, type=click.IntRange(1), help="Candidates that may wait.")
@click.option("--grace", default=30.0, show_default=True, type=click.FloatRange(0), help="Seconds to finish in.")
@click.option("--timeout", default=30.0, show_default=True, type=click.FloatRange(min=0.1), help="For one candidate.")
@click.option("--sandbox", default="auto", show_default=True, type=click.Choice(ISOLATION), help="Least isolation.")
@click.option("--i-trust-this-code", "trusted", is_flag=True, help="Required by --sandbox none.")
def serve(folder: Path, gpus: str, lanes: int, queue: int, timeout: float, workers: int, **options: Any) -> None:
    """Serve the judge until SIGTERM. stdout gets one line: the address."""
    from slime_kernelbench.service.devices import list_gpus
    from slime_kernelbench.service.pool import PoolLimits
    from slime_kernelbench.service.serve import TOKEN_ENV, JudgeSettings, serve as run

    chosen: tuple[str, ...] = {"auto": tuple(list_gpus().values()), "none": ()}.get(
        gpus, tuple(filter(None, gpus.split(",")))
    )

    lanes = lanes if chosen else 1

    def started(url: str, path: Path | None) -> None:
        click.echo(f"token in {path}" if path else f"token from {TOKEN_ENV}", err=True)
        click.echo(url)

    settings = JudgeSettings(
        folder=folder,
        gpus=chosen,
        workers=workers or _cores(),
        limits=PoolLimits(waiting=queue, judging=2 * timeout + 30, deadline=15 * timeout, lanes=lanes),
        options={
            "judge_timeout": timeout,
            "judge_workers": lanes,
            "sandbox": options.pop("sandbox"),
            "i_trust_this_code": options.pop("trusted"),
        },
        **options,
    )
    run(settings, started)


@kernelbench.command(epilog="Example: slime kernelbench bench ./model --samples 8 --k 1 --k 8")
@click.argument("model", metavar="[MODEL_DIR]", required=False, type=click.Path(path_type=Path))
@WHERE
@LEVELS
@click.option("--samples", default=1, show_default=True, type=click.IntRange(1), help="Answers to each problem.")
@click.option("--k", "ks", type=click.IntRange(1), multiple=True, help="pass@k; may be repeated; default 1.")
@click.option("--p", "ps", type=click.FloatRange(0), multiple=True, help="fast_p; may be repeated; default 0 1 1.5 2.")
@click.option("--answers", type=click.Path(path_type=Path), help="JSONL of finished answers; no model is needed.")
@click.option("--out", type=click.Path(path_type=Path), help="Write answers and verdicts here, as JSONL.")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0))
@click.option("--max-tokens", default=4096, show_default=True, type=click.IntRange(1), help="Of an answer.")
@click.option("--prompt-template", default="", help="TOML file of the prompt's words.")
@click.option("--seed", default=0, show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A key of slime's for the engine.")
@judged
@AS_JSON
def bench(as_json: bool, **flags: Any) -> None:
    """Measure a model: correctness, pass@k and fast_p over a problem set, with 95 % intervals.

    A problem's answers are single turns; `slime eval` measures whole dialogues.
    """
    from slime_kernelbench.bench.command import run_bench, table

    options = _options({name: flags.pop(name) for name in OPTIONS})
    report = _run(options, lambda judge: run_bench(judge, at_once=_at_once(options), say=_say, **flags))
    if as_json:
        _print_json(report)
    else:
        _table(("figure", "value", "95 % interval", "problems"), table(report))


@kernelbench.command(epilog="Example: slime kernelbench screen --out sound.jsonl")
@WHERE
@LEVELS
@click.option("--out", type=click.Path(path_type=Path), help="Write the sound ones here, as JSONL to train on.")
@judged
@AS_JSON
def screen(where: str, levels: tuple[int, ...], out: Path | None, as_json: bool, **options: Any) -> None:
    """Look for problems that ask nothing: would zeros, a constant or the input pass?

    The references run in the sandbox, on inputs of several kinds. The exit code is 1 where any problem is unsound.
    """
    from slime_kernelbench.problems import load
    from slime_kernelbench.problems.screen import screen_all, write_sound

    problems = load(where, levels=levels)
    settings = _options(options)
    rows = asyncio.run(screen_all(problems, settings, at_once=_at_once(settings)))
    if out is not None:
        write_sound(out, rows)
    if as_json:
        _print_json([row.as_json() for row in rows])
    else:
        _table(("problem", "name", "verdict", "why"), [row.cells() for row in rows])
        click.echo(f"  {sum(row.verdict == 'sound' for row in rows)} of {len(rows)} are sound")
    sys.exit(any(row.verdict == "unsound" for row in rows))


@kernelbench.group(epilog="Example: slime kernelbench problems list")
def problems() -> None:
    """Problems: which there are, and what they ask."""


@problems.command("list", epilog="Example: slime kernelbench problems list --level 1")
@WHERE
@LEVELS
@click.option("--heldout", type=click.FloatRange(0, 1), help="Share that is held out; shows each problem's side.")
@click.option("--split-seed", default=0, show_default=True)
@AS_JSON
def list_(where: str, levels: tuple[int, ...], heldout: float | None, split_seed: int, as_json: bool) -> None:
    """Problems by id, level and name, and their side of the split."""
    from slime_kernelbench.problems import load, split

    catalogue = load(where, levels=levels)
    rows: list[dict[str, Any]] = [
        {"id": problem.id, "level": problem.level, "name": problem.name} for problem in catalogue
    ]
    if heldout is not None:
        sides = split(load(where), heldout=heldout, seed=split_seed)
        side = {problem.id: "heldout" for problem in sides.heldout} | {problem.id: "train" for problem in sides.train}
        twin = {problem.id: f"left out: like {other.id}" for problem, other in sides.left_out}
        rows = [{**row, "side": (side | twin)[row["id"]]} for row in rows]
    if as_json:
        _print_json(rows)
    else:
        _table(tuple(rows[0]), [list(map(str, row.values())) for row in rows])


@problems.command("show", epilog="Example: slime kernelbench problems show shipped/1/relu")
@click.argument("problem", metavar="ID")
@WHERE
def show_problem(problem: str, where: str) -> None:
    """The source of a problem."""
    from slime_kernelbench.files import find_problem

    click.echo(find_problem(problem, where).source)


kernelbench.add_command(show)


@kernelbench.command("rescore", epilog="Example: slime kernelbench rescore runs/kernels-0")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@judged
@AS_JSON
def rescore_(run: Path, as_json: bool, **options: Any) -> None:
    """Judge every kernel that a run wrote again, each once; the exit code is 1 where a verdict is another.

    A row each: how often it was written, the verdict of the run and the one of now.
    """
    from slime_kernelbench.rescore import kernels, rescore
    from slime_kernelbench.secret import FILE, Secret

    candidates, settings = kernels(run), _options(options)
    secret = Secret.load_or_create(run / FILE) if (run / FILE).exists() else None
    rows = _run(settings, lambda judge: rescore(candidates, judge, at_once=_at_once(settings)), secret)
    if as_json:
        _print_json(rows)
    else:
        columns = ("first", "problem", "times", "before", "now", "why")
        changed = [row for row in rows if row["before"] != row["now"]]
        _table(columns, [[_cell(row, column) for column in columns] for row in changed])
        click.echo(f"  {len(rows) - len(changed)} of {len(rows)} kernels have the verdict that they had")
    sys.exit(any(row["before"] != row["now"] for row in rows))


def _options(flags: dict[str, Any]) -> Options:
    from slime_kernelbench.options import Options

    return Options(**{OPTIONS[name]: value for name, value in flags.items() if value is not None})


def _run(options: Options, work: Callable[[Judge], Coroutine[Any, Any, T]], secret: Secret | None = None) -> T:
    """Do work with a judge, which is ended afterwards."""
    from slime_kernelbench.run import make_judge

    async def whole() -> T:
        judge = make_judge(options, secret)
        try:
            return await work(judge)
        finally:
            await judge.aclose()

    return asyncio.run(whole())


def _at_once(options: Options) -> int:
    return options.judge_workers or _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cell(row: dict[str, Any], column: str) -> str:
    if column == "why":
        return ", ".join(row["flags"]) or next((item["message"][:100] for item in row["diagnostics"]), "")
    value = row[column]
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _print_json(answer: Any) -> None:
    click.echo(json.dumps(answer, indent=1, sort_keys=True))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        cells = (_printable(str(value)) for value in row)
        click.echo("  " + "  ".join(f"{value:<{width}}" for value, width in zip(cells, widths)).rstrip())


def _printable(text: str) -> str:
    """A candidate's messages may hold anything; a terminal gets none of its commands."""
    return "".join(char if char.isprintable() else "?" for char in text)

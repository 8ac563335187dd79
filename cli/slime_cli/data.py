"""`slime data check FILE`: the content of a data file or set, and every row that a run could not use."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.failure import CliSession
from slime_cli.tables import heading, print_pairs, print_table
from slime_cli.words import KEY_WORDS, PASSING, KeyCommand
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.survey import Survey
    from slime_core.config.schema import Config
    from slime_core.data.prompts import Encoder
    from slime_core.data.rows import DataRows

BAR = 40  # characters of the longest bar of the histogram
EVERY = 10.0  # seconds between lines of progress


@click.group("data", epilog="Example: slime data check my.jsonl --input-key question")
def command() -> None:
    """Look at data sets before a run does."""


@command.command(
    "check",
    epilog="Example: slime data check my.jsonl --input-key question --label-key answer --hf-checkpoint ./model",
    cls=KeyCommand,
    context_settings=PASSING,
    options_metavar="[OPTIONS]",
)
@click.argument("file", metavar="FILE")
@click.argument("words", nargs=-1, type=KEY_WORDS, metavar="[RECIPE] [--KEY VALUE]...")
@click.option("--run", "run_dir", type=click.Path(path_type=Path), help="A run that must still find its rows in FILE.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.pass_obj
def check(session: CliSession, file: str, words: tuple[str, ...], run_dir: Path | None, as_json: bool) -> int:
    """Read FILE whole as a run would: rows, keys, lengths, duplicates, bad rows with line and column.

    FILE is what data.prompt_data may be: JSONL, Parquet, a folder or a hub set, with @[a:b] for a slice. The columns
    and limits are those of RECIPE and the flags (--input-key, --label-key, ...). With --hf-checkpoint lengths are in
    tokens of that model, its chat template applied where data.apply_chat_template says so. Exit code 3 where a run
    would refuse the data.
    """
    from slime_cli.settings import load_words
    from slime_cli.survey import survey
    from slime_core.config.load import split
    from slime_core.config.sections.data import DataTask
    from slime_core.data.opening import open_rows
    from slime_core.data.prompts import Keys, check_columns

    config = load_words(split([*words, "--prompt-data", file]), session).config
    keys = Keys.of(config, DataTask(name="default"))
    rows = open_rows(config.data.prompt_data, max_line_bytes=config.data.max_line_bytes)
    try:
        check_columns(rows, keys)
        if run_dir is not None:
            check_run(run_dir, rows, config)
        result = survey(rows, keys, encoder(config), progress(len(rows)))
        facts = facts_of(result, rows, config)
    finally:
        rows.close()
    problem = result.problem(config.data.prompt_data, config.data.max_bad_rows)
    if as_json:
        error_fields = {**problem.as_dict(), "exit_code": problem.exit_code} if problem else None
        click.echo(json.dumps({**facts, "problem": error_fields}, indent=1, sort_keys=True))
        return problem.exit_code if problem else 0
    print_facts(facts)
    if problem is not None:
        raise problem
    return 0


def encoder(config: Config) -> Encoder | None:
    """What counts tokens; None where no model is named.

    Raises:
        ConfigError: CFG04 a chat template is required, and no model has one.
    """
    from slime_core.data.opening import encoder_of
    from slime_core.errors import ConfigError
    from slime_core.weights.folder import ModelFolder

    model = config.rollout.hf_checkpoint
    if model:
        trusted = config.rollout.trust_remote_code
        folder = ModelFolder.open(model, init_weights="random", trust_remote_code=trusted)
        return encoder_of(config, folder.tokenizer(), config.rollout.rollout_max_response_len)
    if config.data.apply_chat_template:
        raise ConfigError(
            "data.apply_chat_template is set, but no model is given whose template to use",
            code="CFG04",
            where="data.apply_chat_template",
            fix="name the model: --hf-checkpoint DIR",
        )
    return None


def progress(total: int) -> Callable[[int], None]:
    """A line on stderr every ten seconds."""
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            say(f"read {done} of {total} rows")

    return tell


def check_run(run_dir: Path, rows: DataRows, config: Config) -> None:
    """Refuse rows that differ from those the run began with; a file that has grown gives a notice, as at a resume.

    Raises:
        DataError: DAT29 with both fingerprints; DAT17 the run has noted no data.
    """
    from slime_core.data.opening import KEPT, kept_sources
    from slime_core.data.supply import changed
    from slime_core.errors import DataError

    tasks = [item for stage in kept_sources(run_dir / KEPT).values() for item in stage["tasks"].items()]
    if not tasks:
        raise DataError(
            "the run has noted no data", code="DAT17", where=str(run_dir / KEPT), fix=f"slime show {run_dir}"
        )
    fingerprint = rows.fingerprint()
    if all(state["fingerprint"] not in (fingerprint, _as_far(state, config)) for _, state in tasks):
        name, state = tasks[-1]
        raise changed(name, f"saved {state['fingerprint']}, found {fingerprint}")


def _as_far(state: Mapping[str, Any], config: Config) -> str:
    """The fingerprint of a JSONL file as far as it reached when the run began; "" where it has not grown."""
    from slime_core.data.opening import open_rows
    from slime_core.data.rows import split_slice

    mark, path = state.get("file"), Path(split_slice(config.data.prompt_data)[0]).expanduser()
    if not mark or not path.is_file() or path.suffix in (".parquet", ".pq") or path.stat().st_size <= mark["bytes"]:
        return ""
    rows = open_rows(config.data.prompt_data, max_line_bytes=config.data.max_line_bytes, mark=mark)
    try:
        fingerprint = rows.fingerprint()
        if fingerprint == state["fingerprint"]:
            more = path.stat().st_size - mark["bytes"]
            say(f"notice: {more} bytes were appended since the run began; it uses the {mark['rows']} rows of then")
        return fingerprint
    finally:
        rows.close()


def facts_of(result: Survey, rows: DataRows, config: Config) -> dict[str, Any]:
    """Everything that `slime data check` says, with stable keys."""
    batch_size = config.rollout.rollout_batch_size
    notes = (
        [f"a step of {batch_size} prompts goes round {batch_size / result.prompts:.1f} times"]
        if (0 < result.prompts < batch_size)
        else []
    )
    if result.hashed < result.rows:
        notes.append(f"duplicates were looked for in the first {result.hashed} rows")
    if rows.mark() is not None and (grown := _grown(config, rows)):
        notes.append(grown)
    return {
        "file": config.data.prompt_data,
        "fingerprint": rows.fingerprint(),
        "rows": result.rows,
        "prompts": result.prompts,
        "dropped": dict(result.dropped),
        "keys": {name: dict(types) for name, types in result.keys.items()},
        "lengths": {
            "unit": result.unit,
            "limit": result.limit,
            **result.quantiles(),
            "histogram": [list(step) for step in result.histogram()],
        },
        "duplicates": {
            "same_prompt_and_label": result.repeated,
            "same_prompt_other_label": result.contradicting,
            "ids": len(result.repeated_ids),
            "first": [list(pair) for pair in (*result.first_repeated, *result.first_contradicting)],
        },
        "labels": {"flagged": dict(result.labels), "first": result.first_labels},
        "media": dict(result.media),
        "bad_rows": {
            "count": result.bad.total(),
            "by_code": dict(result.bad),
            "first": [{"code": e.code, "where": e.where, "what": e.what, "fix": e.fix} for e in result.first_bad],
        },
        "notes": notes,
    }


def _grown(config: Config, rows: DataRows) -> str:
    from slime_core.data.rows import split_slice

    mark = rows.mark() or {}
    size = Path(split_slice(config.data.prompt_data)[0]).expanduser().stat().st_size
    return f"{size - mark['bytes']} bytes were appended during the check and not read" if size > mark["bytes"] else ""


def print_facts(facts: dict[str, Any]) -> None:
    """The answer for people."""
    lengths, same, bad = facts["lengths"], facts["duplicates"], facts["bad_rows"]
    dropped = ", ".join(f"{count} {reason}" for reason, count in facts["dropped"].items())
    print_pairs(
        {
            "file": facts["file"],
            "fingerprint": facts["fingerprint"],
            "rows": facts["rows"],
            "prompts": facts["prompts"],
            "dropped": dropped or "none",
            "bad rows": bad["count"] or "none",
            "repeated": f"{same['same_prompt_and_label']} rows; the same prompt with another label: "
            f"{same['same_prompt_other_label']}" + (f"; ids: {same['ids']}" if same["ids"] else ""),
            **({"media": ", ".join(f"{n} {kind}" for kind, n in facts["media"].items())} if facts["media"] else {}),
        }
    )
    heading("keys")
    rows = [[k, sum(t.values()), ", ".join(f"{n} {c}" for n, c in t.items())] for k, t in facts["keys"].items()]
    print_table(["key", "rows", "types"], rows)
    if lengths["histogram"]:
        heading(f"prompt lengths in {lengths['unit']}" + (f", at most {lengths['limit']}" if lengths["limit"] else ""))
        print_pairs({name: lengths[name] for name in ("min", "p50", "p90", "p99", "max")})
        most = max(count for _, _, count in lengths["histogram"])
        bars = [[f"{a}-{b}", n, "#" * -(-BAR * n // most)] for a, b, n in lengths["histogram"]]
        print_table([lengths["unit"], "rows", ""], bars)
    if bad["count"]:
        heading(f"bad rows, the first {len(bad['first'])} of {bad['count']}")
        print_table(["code", "where", "what"], [[row["code"], row["where"], row["what"]] for row in bad["first"]])
    for first, second in same["first"]:
        say(f"notice: {second} has the prompt of {first}")
    for place in facts["labels"]["first"]:
        say(f"notice: label of {place}")
    for note in facts["notes"]:
        say(f"notice: {note}")

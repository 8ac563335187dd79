"""Run directories as plain data: what `slime report` embeds in its page and a live page serves.

    metrics.jsonl -> steps, evaluations, restarts      ledger.sqlite -> counts by state
    config.toml   -> keys, differences of runs         run.json      -> command, machine, plugins, starts

Nothing is written and no lock is taken; the run may be running. What cannot be read is left out and stated in
``notices``. All values are JSON-ready; a figure that is not finite is None.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core import SlimeError, __version__
from slime_core.report.history import evaluations_among, figures_among, read_lines, states, steps_among
from slime_core.report.rundir import RunDir, now, status_of
from slime_diagnose import diagnose
from slime_report.recorder import read_steps

DIGITS = 7
"""Significant digits of a figure in the page, as many as float32 has."""


def overview(run_dirs: Sequence[RunDir]) -> dict[str, Any]:
    """All of the page but samples: ``made slime runs differences``, see :func:`run_facts`.

    Raises:
        OSError: a file that is there and cannot be read.
    """
    runs = [run_facts(run_dir) for run_dir in run_dirs]
    for run, name in zip(runs, unique_names([run["path"] for run in runs]), strict=True):
        run["name"] = name
    return {"made": now(), "slime": __version__, "runs": runs, "differences": differences(runs)}


def run_facts(run_dir: RunDir) -> dict[str, Any]:
    """One run.

    ``steps``       columns by step: ``version``, ``stage``, and by name ``metrics`` and ``seconds`` (None: no figure)
    ``evaluations`` by set, likewise: ``version``, ``metrics``, ``seconds``
    ``stages``      name, first and last version
    ``states``      samples by state, as the ledger counts them
    ``config``      key (``rollout.num_rollout``) to value
    ``findings``    of `slime diagnose`
    ``notices``     sentences on what is missing or damaged
    """
    holder = run_dir.holder()  # first: a run that ends in between recorded its end
    info, config, counts, records = run_dir.read_info(), config_of(run_dir), states(run_dir), read_steps(run_dir.path)
    written, lines = lines_in(run_dir.metrics), list(read_lines(run_dir.metrics))
    figures = figures_among(lines)
    steps = [with_record(step, records) for step in steps_among(figures)]
    findings, undiagnosed = findings_of(run_dir)
    return {
        "name": run_dir.path.name,
        "path": str(run_dir.path),
        "status": status_of(info, holder),
        "info": {key: info.get(key) for key in ("command", "started", "host", "error", "python", "slime", "recipe")},
        "machine": info.get("machine") or {},
        "plugins": info.get("plugins") or {},
        "starts": info.get("starts") or [],
        "of": steps[-1].get("of") if steps else None,
        "stages": stages_of(steps),
        "steps": columns_of(steps, ("stage",)),
        "evaluations": evaluation_columns(evaluations_among(figures)),
        "restarts": [row for row in lines if row.get("kind") == "restart"],
        "states": counts,
        "config": config,
        "findings": findings,
        "notices": notices_of(config, max(0, written - len(lines)), steps, counts) + undiagnosed,
    }


def notices_of(
    config: Mapping[str, Any], damaged: int, steps: Sequence[Mapping[str, Any]], counts: Mapping[str, int]
) -> list[str]:
    """Sentences on what is missing, on the ``damaged`` lines of ``metrics.jsonl``, and on rollouts in fp8."""
    notices = []
    if not config:
        notices.append("config.toml cannot be read: settings and differences are left out")
    if damaged:
        notices.append(f"{damaged} of the lines of metrics.jsonl cannot be read and are left out")
    if not steps:
        notices.append("no step is finished yet: there are no curves")
    if not counts:
        notices.append("there is no ledger that can be read: samples are left out")
    if config.get("rollout.rollout_quantization") == "fp8":
        correction = "weighed tokens by trainer over engine" if config.get("train.use_tis") else "was off"
        notices.append(f"rollouts were made with weights in fp8; use_tis {correction}")
    return notices


def findings_of(run_dir: RunDir) -> tuple[list[dict[str, Any]], list[str]]:
    """What `slime diagnose` finds, and a sentence where it cannot read the run, such as one of an older version."""
    try:
        return [finding.as_dict() for finding in diagnose(run_dir.path)], []
    except SlimeError as error:
        return [], [f"slime diagnose cannot read the run: {error.what}"]


def with_record(step: Mapping[str, Any], records: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A step with what `--plugin report` recorded: ``memory/...`` in GiB, and the rollout's time for rewards alone."""
    record = records.get(step["version"], {})
    metrics = {
        **(step.get("metrics") or {}),
        **{f"memory/{name}": gib for name, gib in record.get("memory", {}).items()},
    }
    seconds = dict(step.get("seconds") or {})
    if reward := record.get("reward_seconds"):
        seconds |= {"reward": reward, "rollout": (seconds.get("rollout") or 0.0) - reward}
    return {**step, "metrics": metrics, "seconds": seconds}


def columns_of(rows: Sequence[Mapping[str, Any]], texts: Sequence[str] = ()) -> dict[str, Any]:
    """Rows of ``metrics.jsonl`` as columns.

    Example: [{"version": 1, "metrics": {"loss": 2.0}}] -> {"version": [1], "metrics": {"loss": [2.0]}, "seconds": {}}
    """
    columns: dict[str, Any] = {"version": [row["version"] for row in rows]}
    columns |= {name: [row.get(name) for row in rows] for name in texts}
    for part in ("metrics", "seconds"):
        tables = [row.get(part) or {} for row in rows]
        names = sorted({name for table in tables for name in table})
        columns[part] = {name: [figure(table.get(name)) for table in tables] for name in names}
    return columns


def evaluation_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Evaluations by the name of their set."""
    names = dict.fromkeys(row["name"] for row in rows)
    return {name: columns_of([row for row in rows if row["name"] == name]) for name in names}


def stages_of(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stages in the order of their first step."""
    stages: dict[str, dict[str, Any]] = {}
    for step in steps:
        name = str(step.get("stage", "main"))
        stages.setdefault(name, {"name": name, "first": step["version"]})["last"] = step["version"]
    return list(stages.values())


def config_of(run_dir: RunDir) -> dict[str, Any]:
    """Every key of ``config.toml`` by its full name; stages are ``stage.NAME.KEY``. Empty where it is no TOML."""
    try:
        table = tomllib.loads(run_dir.config.read_text(encoding="utf-8", errors="replace"), parse_float=_number)
    except (OSError, tomllib.TOMLDecodeError):
        return {}
    stages = table.pop("stage", [])
    if isinstance(stages, list):
        table["stage"] = {str(stage.get("name", place)): stage for place, stage in enumerate(stages)}
    return dict(sorted(_flat("", table)))


def _number(text: str) -> float | str:
    """A float that JSON can write; infinity and NaN stay text."""
    value = float(text)
    return value if math.isfinite(value) else text


def differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Keys, plugins and machines that are not the same in all runs: ``key`` and ``values``, one a run."""
    tables = [
        {
            **run["config"],
            **{f"plugin {name}": origin for name, origin in run["plugins"].items()},
            **{f"machine {name}": value for name, value in run["machine"].items()},
            "slime": run["info"]["slime"],
        }
        for run in runs
    ]
    keys = sorted({key for table in tables for key in table})
    rows = [{"key": key, "values": [table.get(key) for table in tables]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def unique_names(paths: Sequence[str]) -> list[str]:
    """The shortest endings of paths that tell them apart.

    Example: ["/a/runs/x-0", "/b/runs/x-0", "/b/runs/y-0"] -> ["a/runs/x-0", "b/runs/x-0", "y-0"]
    """
    names = []
    for path in paths:
        parts, count = Path(path).parts, 1
        others = [Path(other).parts for other in paths if other != path]
        while count < len(parts) and any(other[-count:] == parts[-count:] for other in others):
            count += 1
        names.append("/".join(parts[-count:]).removeprefix("//"))
    return names


def lines_in(path: Path) -> int:
    """Lines of a file that are not blank; 0 where there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def figure(value: Any) -> float | None:
    """A number of :data:`DIGITS` digits, whole ones as such."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif prefix:
        yield prefix, value

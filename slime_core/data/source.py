"""A config in; the run's prompts out, one position after another, and evaluation sets.

    task draw at a position -> its stream -> permutation of the epoch -> row -> Prompt "STAGE/POSITION"

The order is a function of (seed, stage, task, epoch, position). A set smaller than a step begins its next epoch inside
the step. State is a handful of numbers, whatever the data's size.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.data.order import pick
from slime_core.data.prompts import Encoder, Keys
from slime_core.data.rows import Rows, open_rows, split_slice
from slime_core.data.streams import (
    BadRows,
    FileSupply,
    PluginSupply,
    Stream,
    Supply,
    changed,
    nothing_left,
    say_grown,
)
from slime_core.durable import replace_file, storage_error
from slime_core.errors import ConfigError, DataError
from slime_core.seeds import seed_of
from slime_core.types import Prompt

if TYPE_CHECKING:
    from slime_core.config.schema import Config, EvalTask, Task
    from slime_core.context import Context
    from slime_core.plugins import Plugins

REJECTED = "rejected.jsonl"
KEPT = "data.json"
SET_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class DataSource:
    """The prompts of a stage, over all its tasks.

    Example:
        source = open_source(config, plugins, tokenizer, ctx)
        prompts = source.next(32)
        saved = source.state()
    """

    def __init__(self, streams: list[Stream], *, stage: str, seed: int, bad: BadRows) -> None:
        self._streams, self._stage, self._seed, self._bad = streams, stage, seed, bad
        self._position = 0

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts, as many epochs as it takes; fewer only where endless sources have ended.

        Raises:
            DataError: a row that cannot be read (beyond `data.max_bad_rows`), DAT26, DAT27 nothing usable is left.
            PluginError: a plugin's source raised.
        """
        prompts: list[Prompt] = []
        while len(prompts) < count:
            open_streams = [s for s in self._streams if not s.ended]
            if not open_streams:
                break
            stream = open_streams[pick([s.weight for s in open_streams], self._seed, self._position)]
            prompt = stream.next(id=f"{self._stage}/{self._position}", position=self._position)
            if prompt is not None:
                prompts.append(prompt)
                self._position += 1
        return prompts

    def text(self, count: int) -> list[int]:
        """Return up to ``count`` tokens of the first rows' prompts, task after task; nothing is drawn or counted."""
        tokens: list[int] = []
        for number, stream in enumerate(self._streams):
            tokens += stream.text((count - len(tokens)) // (len(self._streams) - number))
        return tokens

    def counts(self) -> dict[str, int]:
        """``read``, ``prompts`` and ``dropped/REASON``; read = prompts + dropped."""
        dropped = sum((s.dropped for s in self._streams), Counter[str]())
        prompts = sum(s.prompts for s in self._streams)
        return {
            "read": prompts + dropped.total(),
            "prompts": prompts,
            **{f"dropped/{reason}": count for reason, count in sorted(dropped.items())},
        }

    def state(self) -> dict[str, Any]:
        """JSON-ready: the next position, and each task's place and fingerprint."""
        return {
            "stage": self._stage,
            "seed": self._seed,
            "position": self._position,
            "tasks": {stream.name: stream.state() for stream in self._streams},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the source that gave ``state`` would have.

        Raises:
            DataError: DAT29, other tasks, another seed or other rows.
        """
        mine = {"stage": self._stage, "seed": self._seed, "tasks": sorted(s.name for s in self._streams)}
        saved = {"stage": state["stage"], "seed": state["seed"], "tasks": sorted(state["tasks"])}
        if mine != saved:
            raise DataError(
                "the data settings changed since the run was saved",
                code="DAT29",
                where="data",
                why=f"saved {json.dumps(saved)}, now {json.dumps(mine)}",
                fix="put the settings back as they were, or start another run",
            )
        for stream in self._streams:
            stream.restore(state["tasks"][stream.name])
        self._position = int(state["position"])


@dataclass(slots=True, kw_only=True)
class EvalSet:
    """A named set of prompts to measure on."""

    name: str
    task: EvalTask
    prompts: list[Prompt]
    dropped: Counter[str] = field(default_factory=Counter)  # rows left out, by reason


def open_source(config: Config, plugins: Plugins, tokenizer: Any, ctx: Context) -> DataSource:
    """Open a stage's data and check it: small sets whole, large ones at their beginning.

    What the rows were when the stage was first opened is kept in ``data.json`` of the run directory. A later opening
    must find the same: a file that has grown since is read, and checked, as far as it reached then.

    Raises:
        ConfigError: CFG04 no data at all, CFG03 a malformed slice, CFG05 no such file.
        DataError: DAT17-DAT34 and DAT36 as the checks find them, TOK41 no chat template.
        PluginError: a plugin's source that raised.
    """
    encoder = encoder_of(config, tokenizer, config.rollout.rollout_max_response_len)
    bad = BadRows(config.data.max_bad_rows, ctx.run_dir / REJECTED if ctx.run_dir else None)
    kept = kept_sources(ctx.run_dir / KEPT) if ctx.run_dir else {}
    saved = kept.get(ctx.stage, {})
    streams = []
    for task, key in train_tasks(config):
        mark = saved.get("tasks", {}).get(task.name, {}).get("file")
        supply = _supply(config, task, plugins, encoder, bad, ctx, key, mark)
        streams.append(Stream(task.name, task.weight, supply, _keys(config, ctx.stage, task)))
    source = DataSource(streams, stage=ctx.stage, seed=seed_of(config.seed, "order", ctx.stage), bad=bad)
    if saved:
        source.restore(saved)
    elif ctx.run_dir is not None:
        _keep(ctx.run_dir / KEPT, {**kept, ctx.stage: source.state()})
    return source


def kept_sources(path: Path) -> dict[str, Any]:
    """By stage, the state of its source when it was first opened."""
    try:
        kept: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(
            "the run's note of its data cannot be read",
            code="DAT29",
            where=str(path),
            why=str(error),
            fix="start another run; or remove the file, where the data is surely that of the beginning",
        ) from error
    return kept


def _keep(path: Path, kept: Mapping[str, Any]) -> None:
    try:
        replace_file(path, json.dumps(kept, indent=1, sort_keys=True).encode() + b"\n")
    except OSError as error:
        raise storage_error(error, path, "the run's note of its data cannot be written") from error


def eval_sets(config: Config, plugins: Plugins, tokenizer: Any, ctx: Context) -> list[EvalSet]:
    """Every evaluation set of a config, read whole, in row order, with ids ``eval/NAME/ROW``.

    Raises:
        ConfigError: CFG03 an odd number of `eval_prompt_data` entries or an unusable name, CFG07 a name used twice.
        DataError: as :func:`open_source`; CFG04 an endless source.
    """
    bad = BadRows(config.data.max_bad_rows, ctx.run_dir / REJECTED if ctx.run_dir else None)
    found: list[EvalSet] = []
    for name, task, key in eval_tasks(config):
        if not SET_NAME.fullmatch(name):
            raise ConfigError(
                f"an evaluation set cannot be called {name!r}", code="CFG03", where=key, fix="use A-Z a-z 0-9 . _ -"
            )
        if name in {other.name for other in found}:
            raise ConfigError(f"two evaluation sets are called {name!r}", code="CFG07", where=key, fix="rename one")
        encoder = _eval_encoder(config, task, tokenizer)
        found.append(_read_whole(name, task, _supply(config, task, plugins, encoder, bad, ctx, key), key))
    return found


def _eval_encoder(config: Config, task: EvalTask, tokenizer: Any) -> Encoder:
    """How a set's prompts are rendered and bounded: its own keys, then those of its section, then of training."""
    section, rollout = config.eval, config.rollout
    length = task.max_response_len or section.eval_max_response_len or rollout.rollout_max_response_len
    data = config.data.model_copy(
        update={
            "apply_chat_template": config.data.apply_chat_template
            if task.apply_chat_template == "auto"
            else task.apply_chat_template == "on",
            "apply_chat_template_kwargs": config.data.apply_chat_template_kwargs | task.apply_chat_template_kwargs,
        }
    )
    return encoder_of(config.model_copy(update={"data": data}), tokenizer, length)


def train_tasks(config: Config) -> list[tuple[Task, str]]:
    """Every training task and the key of its data; a config without ``data.tasks`` has the one named "default"."""
    from slime_core.config.schema import Task

    if not config.data.tasks:
        return [(Task(name="default", prompt_data=config.data.prompt_data), "data.prompt_data")]
    return [(task, f"data.tasks[{number}].prompt_data") for number, task in enumerate(config.data.tasks)]


def no_data(task: str, key: str) -> ConfigError:
    """CFG04: nobody brings prompts of a task."""
    return ConfigError(
        f"task {task!r} has no data" if task != "default" else "no data is named",
        code="CFG04",
        where=key,
        fix="name a file: --prompt-data FILE.jsonl, or a plugin that brings prompts: --plugin NAME",
    )


def eval_tasks(config: Config) -> list[tuple[str, EvalTask, str]]:
    """Name, task and key of every evaluation set.

    Raises:
        ConfigError: CFG03 names and paths that are not pairs.
    """
    from slime_core.config.schema import EvalTask

    pairs = config.eval.eval_prompt_data
    if len(pairs) % 2:
        raise ConfigError(
            f"eval_prompt_data has {len(pairs)} entries, not NAME PATH pairs",
            code="CFG03",
            where="eval.eval_prompt_data",
            fix="write NAME PATH [NAME PATH ...], such as: --eval-prompt-data aime aime.jsonl",
        )
    training = [task.name for task in config.data.tasks] or ["default"]
    found = []
    for name, path in zip(pairs[::2], pairs[1::2], strict=True):
        # judged like the training task of that name, or like the only one
        task = name if name in training or len(training) > 1 else training[0]
        found.append((name, EvalTask(name=task, prompt_data=path), "eval.eval_prompt_data"))
    return [*found, *((t.name, t, f"eval.eval_tasks[{i}]") for i, t in enumerate(config.eval.eval_tasks))]


def _read_whole(name: str, task: EvalTask, supply: Supply, key: str) -> EvalSet:
    count = supply.count()
    if count is None:
        raise ConfigError(
            f"the source of evaluation set {name!r} is endless", code="CFG04", where=key, fix="give it a __len__"
        )
    found = EvalSet(name=name, task=task, prompts=[])
    for row in range(count):
        made = supply.make(row, id=f"eval/{name}/{row}", position=row)
        if isinstance(made, Prompt):
            found.prompts.append(made)
        else:
            found.dropped[made] += 1
    if not found.prompts:
        raise nothing_left(name, found.dropped, supply.encoder)
    return found


def _supply(
    config: Config,
    task: Task,
    plugins: Plugins,
    encoder: Encoder,
    bad: BadRows,
    ctx: Context,
    key: str,
    mark: Mapping[str, Any] | None = None,
) -> Supply:
    source = None if ctx.evaluation and task.prompt_data else plugins.prompts(task, ctx)
    if source is not None:
        return PluginSupply(source, task.name, encoder, bad)
    if not task.prompt_data:
        raise no_data(task.name, key)
    keys = Keys.of(config, task)

    def opened(mark: Mapping[str, Any] | None) -> Rows:
        limit = config.data.max_line_bytes
        return open_rows(task.prompt_data, max_line_bytes=limit, columns=keys.columns, key=key, mark=mark)

    rows = opened(mark)
    if mark:
        _same_as(mark, rows, task)
    return FileSupply(rows, task.name, keys, encoder, bad, opened)


def _same_as(mark: Mapping[str, Any], rows: Rows, task: Task) -> None:
    """Refuse another file than the saved run had, before its rows are judged; tell of one that has grown."""
    found = rows.mark() or {}
    if found.get("sha256") != mark["sha256"]:
        rows.close()
        raise changed(
            task.name,
            f"saved {mark['bytes']} bytes, sha256 {mark['sha256']}; "
            f"found {found.get('bytes')} of them, sha256 {found.get('sha256')}, in {task.prompt_data}",
        )
    path = Path(split_slice(task.prompt_data)[0]).expanduser()
    if (now := path.stat().st_size) > mark["bytes"]:
        say_grown(rows.where(0), mark, now)


def _keys(config: Config, stage: str, task: Task) -> Any:
    if not config.data.rollout_shuffle:
        return None
    return lambda epoch: seed_of(config.seed, "shuffle", stage, task.name, epoch)


def encoder_of(config: Config, tokenizer: Any, response_len: int) -> Encoder:
    """What turns rows into prompts; the longest prompt leaves ``response_len`` tokens of the context."""
    data, given = config.data, config.rollout.rollout_max_context_len
    context = given or _model_context(config.rollout.hf_checkpoint)
    part = max(1, context - response_len) if context else 0
    longest = data.rollout_max_prompt_len
    wider = f"raise data.rollout_max_prompt_len, now {longest}"
    if part and (not longest or part < longest):
        wider = f"lower the response length, now {response_len} of the {context} tokens that hold prompt and response"
        wider += (
            " (rollout.rollout_max_response_len)" if response_len == config.rollout.rollout_max_response_len else ""
        )
        wider = f"raise rollout.rollout_max_context_len, or {wider}" if given else wider
    return Encoder(
        tokenizer,
        template=data.apply_chat_template,
        template_kwargs=dict(data.apply_chat_template_kwargs),
        limit=min((limit for limit in (longest, part) if limit), default=0),
        overlong=data.overlong_prompt,
        wider=wider,
    )


def _model_context(folder: str) -> int:
    """Positions that the model's config.json states; 0 where it cannot be read here (a hub name)."""
    try:
        raw = json.loads((Path(folder) / "config.json").read_bytes())
        raw = raw.get("text_config") or raw
        value = raw.get("max_position_embeddings") or raw.get("n_positions") or 0
        return int(value)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0

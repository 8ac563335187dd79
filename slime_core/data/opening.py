"""What a config names as data, opened and checked: a stage's source, evaluation sets, and files of rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.paths import folder_of_set
from slime_core.config.sections.data import DataTask
from slime_core.config.sections.evaluation import EvalTask
from slime_core.data.conversations import LAST_TURN, ReplyEncoder
from slime_core.data.hub import HubRows, is_hub_name
from slime_core.data.jsonl import JsonlRows
from slime_core.data.parquet import ParquetRows
from slime_core.data.prompts import Encoder, Keys, limits_of
from slime_core.data.rows import DataRows, SlicedRows, split_slice
from slime_core.data.source import DataSource, Stream
from slime_core.data.strict import converted
from slime_core.data.supply import BadRows, FileSupply, PluginSupply, Supply, changed, nothing_left, say_grown
from slime_core.durable import replace_file, storage_error
from slime_core.errors import ConfigError, DataError
from slime_core.media.processor import MediaProcessor, blindness, not_taken
from slime_core.seeds import seed_of
from slime_core.types import Prompt

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.plugins import Plugins

REJECTED = "rejected.jsonl"
KEPT = "data.json"
SET_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
TO_LINES = "python3 -c 'import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]' <"


@dataclass(slots=True, kw_only=True)
class EvalSet:
    """A named set of prompts to measure on."""

    name: str
    task: EvalTask
    prompts: list[Prompt]
    dropped: Counter[str] = field(default_factory=Counter)  # rows left out, by reason


def open_source(config: Config, plugins: Plugins, tokenizer: Any, ctx: Context) -> DataSource:
    """Open a stage's data and check it: small sets whole, large ones at their beginning.

    The rows' fingerprint at the stage's first opening is kept in ``data.json`` of the run directory. A later opening
    must find the same: a file that has grown since is read, and checked, as far as it reached then.

    Raises:
        ConfigError: CFG04 no data at all, CFG03 a malformed slice, CFG05 no such file.
        DataError: DAT17-DAT34 and DAT36 as the checks find them, TOK41 no chat template.
        PluginError: a plugin's source that raised.
    """
    bad = BadRows(config.data.max_bad_rows, ctx.run_dir / REJECTED if ctx.run_dir else None)
    sources = kept_sources(ctx.run_dir / KEPT) if ctx.run_dir else {}
    saved = sources.get(ctx.stage, {})
    streams = []
    for task, key in train_tasks(config):
        mark = saved.get("tasks", {}).get(task.name, {}).get("file")
        encoder = train_encoder(config, task, tokenizer, offline=plugins.takes_replies(task.name, config))
        supply = _supply(config, task, plugins, encoder, bad, ctx, key, mark)
        streams.append(Stream(task.name, task.weight, supply, _keys(config, ctx.stage, task)))
    source = DataSource(streams, stage=ctx.stage, seed=seed_of(config.seed, "order", ctx.stage))
    if saved:
        source.restore(saved)
    elif ctx.run_dir is not None:
        _keep(ctx.run_dir / KEPT, {**sources, ctx.stage: source.state()})
    return source


def kept_sources(path: Path) -> dict[str, Any]:
    """By stage, the state of its source when it was first opened."""
    try:
        sources: dict[str, Any] = json.loads(path.read_bytes())
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
    return sources


def _keep(path: Path, sources: Mapping[str, Any]) -> None:
    try:
        replace_file(path, json.dumps(sources, indent=1, sort_keys=True).encode() + b"\n")
    except OSError as error:
        raise storage_error(error, path, "the run's note of its data cannot be written") from error


def eval_sets(config: Config, plugins: Plugins, tokenizer: Any, ctx: Context) -> list[EvalSet]:
    """Every evaluation set of a config, read whole, in row order, with ids ``eval/NAME/ROW``.

    Raises:
        ConfigError: CFG03 an odd number of `eval_prompt_data` entries or an unusable name, CFG07 a name used twice.
        DataError: as :func:`open_source`; CFG04 an endless source.
    """
    bad = BadRows(config.data.max_bad_rows, ctx.run_dir / REJECTED if ctx.run_dir else None)
    sets: list[EvalSet] = []
    for name, task, key in eval_tasks(config):
        check_set_name(name, key)
        if name in {other.name for other in sets}:
            raise ConfigError(f"two evaluation sets are called {name!r}", code="CFG07", where=key, fix="rename one")
        encoder = _eval_encoder(config, task, tokenizer)
        sets.append(_read_whole(name, task, _supply(config, task, plugins, encoder, bad, ctx, key), key))
    return sets


def check_set_name(name: str, key: str = "eval.eval_function_path") -> str:
    """``name``, which names files.

    Raises:
        ConfigError: CFG03 it cannot.
    """
    if not SET_NAME.fullmatch(name):
        fix = "use A-Z a-z 0-9 . _ -"
        raise ConfigError(f"an evaluation set cannot be called {name!r}", code="CFG03", where=key, fix=fix)
    return name


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


def train_tasks(config: Config) -> list[tuple[DataTask, str]]:
    """Every training task and the key of its data; a config without ``data.tasks`` has the one named "default"."""
    if not config.data.tasks:
        return [(DataTask(name="default", prompt_data=config.data.prompt_data), "data.prompt_data")]
    return [(task, f"data.tasks[{number}].prompt_data") for number, task in enumerate(config.data.tasks)]


def no_data(task: str, key: str) -> ConfigError:
    """CFG04: no plugin and no file provides a task's prompts."""
    return ConfigError(
        f"task {task!r} has no data" if task != "default" else "no data is named",
        code="CFG04",
        where=key,
        fix="name a file: --prompt-data FILE.jsonl, or a plugin that provides prompts: --plugin NAME",
    )


def eval_tasks(config: Config) -> list[tuple[str, EvalTask, str]]:
    """Name, task and key of every evaluation set.

    Raises:
        ConfigError: CFG03 names and paths that are not pairs.
    """
    pairs = config.eval.eval_prompt_data
    if len(pairs) % 2:
        raise ConfigError(
            f"eval_prompt_data has {len(pairs)} entries, not NAME PATH pairs",
            code="CFG03",
            where="eval.eval_prompt_data",
            fix="write NAME PATH [NAME PATH ...], such as: --eval-prompt-data aime aime.jsonl",
        )
    training = [task.name for task in config.data.tasks] or ["default"]
    tasks = []
    for name, path in zip(pairs[::2], pairs[1::2], strict=True):
        # judged like the training task of that name, or like the only one
        task = name if name in training or len(training) > 1 else training[0]
        tasks.append((name, EvalTask(name=task, prompt_data=path), "eval.eval_prompt_data"))
    return [*tasks, *((t.name, t, f"eval.eval_tasks[{i}]") for i, t in enumerate(config.eval.eval_tasks))]


def _read_whole(name: str, task: EvalTask, supply: Supply, key: str) -> EvalSet:
    count = supply.count()
    if count is None:
        raise ConfigError(
            f"the source of evaluation set {name!r} is endless", code="CFG04", where=key, fix="give it a __len__"
        )
    eval_set = EvalSet(name=name, task=task, prompts=[])
    for row in range(count):
        prompt = supply.make(row, id=f"eval/{name}/{row}", position=row)
        if isinstance(prompt, Prompt):
            eval_set.prompts.append(prompt)
        else:
            eval_set.dropped[prompt] += 1
    if not eval_set.prompts:
        raise nothing_left(name, eval_set.dropped, supply.encoder)
    return eval_set


def _supply(
    config: Config,
    task: DataTask,
    plugins: Plugins,
    encoder: Encoder,
    bad: BadRows,
    ctx: Context,
    key: str,
    mark: Mapping[str, Any] | None = None,
) -> Supply:
    encoder.rewrite = partial(plugins.messages, ctx=ctx)
    if encoder.media is None and not _by_function(plugins, task, config):
        encoder.blindness = f"{blindness(encoder.tokenizer)}, and no function generates"
    source = None if ctx.evaluation and task.prompt_data else plugins.prompts(task, ctx)
    if source is not None:
        return PluginSupply(source, task.name, encoder, bad)
    if not task.prompt_data:
        raise no_data(task.name, key)
    keys = Keys.of(config, task)
    if keys.media and encoder.blindness:
        raise not_taken(" or ".join(keys.media), "data.multimodal_keys", encoder.blindness)

    def opened(mark: Mapping[str, Any] | None) -> DataRows:
        limit = config.data.max_line_bytes
        return open_rows(task.prompt_data, max_line_bytes=limit, columns=keys.columns, key=key, mark=mark)

    rows = opened(mark)
    if mark:
        _same_as(mark, rows, task)
    return FileSupply(rows, task.name, keys, encoder, bad, opened)


def _by_function(plugins: Plugins, task: DataTask, config: Config) -> bool:
    return plugins.replaces_rollout(task.name, config) or plugins.generates_itself(task.name, config)


def _same_as(mark: Mapping[str, Any], rows: DataRows, task: DataTask) -> None:
    """Refuse another file than the saved run had, before its rows are checked; report one that has grown."""
    digest_mark = rows.mark() or {}
    if digest_mark.get("sha256") != mark["sha256"]:
        rows.close()
        raise changed(
            task.name,
            f"saved {mark['bytes']} bytes, sha256 {mark['sha256']}; "
            f"found {digest_mark.get('bytes')} of them, sha256 {digest_mark.get('sha256')}, in {task.prompt_data}",
        )
    path = Path(split_slice(task.prompt_data)[0]).expanduser()
    if (now := path.stat().st_size) > mark["bytes"]:
        say_grown(rows.where(0), mark, now)


def _keys(config: Config, stage: str, task: DataTask) -> Any:
    if not config.data.rollout_shuffle:
        return None
    return lambda epoch: seed_of(config.seed, "shuffle", stage, task.name, epoch)


def train_encoder(config: Config, task: DataTask, tokenizer: Any, *, offline: bool) -> Encoder:
    """What turns a task's rows into prompts; where ``offline`` stages learn replies, the context holds both."""
    data, keys = config.data, Keys.of(config, task)
    if not (offline and task.prompt_data and (keys.replies or not keys.label)):
        by_function = bool(config.rollout.rollout_function_path) and not offline
        response_len = 0 if by_function and config.train.offline else config.rollout.rollout_max_response_len
        return replace(encoder_of(config, tokenizer, response_len), keeps_messages=by_function)
    last = data.loss_mask_type in LAST_TURN
    replies = ReplyEncoder(tokenizer, last_turn=last, kwargs=dict(data.apply_chat_template_kwargs))
    return replace(encoder_of(config, tokenizer, 0), replies=replies)


def encoder_of(config: Config, tokenizer: Any, response_len: int) -> Encoder:
    """What turns rows into prompts; the longest prompt leaves ``response_len`` tokens of the context."""
    data, max_context = config.data, config.rollout.rollout_max_context_len
    context = max_context or _model_context(config.rollout.hf_checkpoint)
    part = max(1, context - response_len) if context else 0
    longest = data.rollout_max_prompt_len
    wider = f"raise data.rollout_max_prompt_len, now {longest}"
    if part and (not longest or part < longest):
        wider = f"lower the response length, now {response_len} of the {context} tokens that hold prompt and response"
        wider += (
            " (rollout.rollout_max_response_len)" if response_len == config.rollout.rollout_max_response_len else ""
        )
        wider = f"raise rollout.rollout_max_context_len, or {wider}" if max_context else wider
    return Encoder(
        tokenizer,
        template=data.apply_chat_template,
        template_kwargs=dict(data.apply_chat_template_kwargs),
        limit=min((limit for limit in (longest, part) if limit), default=0),
        overlong=data.overlong_prompt,
        wider=wider,
        media=MediaProcessor.of(tokenizer, limits_of(data)),
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


def open_rows(
    spec: str,
    *,
    max_line_bytes: int,
    columns: Collection[str] = (),
    key: str = "data.prompt_data",
    mark: Mapping[str, Any] | None = None,
) -> DataRows:
    """Open what ``spec`` names; ``columns`` are those that a column store needs to decode, ``key`` names the setting.

    With ``mark``, which `DataRows.mark` gave to a saved run, a JSONL file is read as far as it reached then.

    Raises:
        ConfigError: CFG03 a malformed slice, CFG05 no such file.
        DataError: DAT17 no rows, DAT19 a JSON array or too many blank lines, DAT20, DAT30 an unreadable file.
    """
    path, inside = split_slice(spec, key)
    rows = _open(path, max_line_bytes, columns, key, mark)
    opened = rows if inside is None else SlicedRows(rows, *inside.indices(len(rows))[:2])
    if len(opened) == 0:
        total = len(rows)
        rows.close()
        raise DataError(
            f"{spec} has no rows" if not total else f"the slice of {spec} is empty: the whole has {total} rows",
            code="DAT17",
            where=f"{key} = {spec}",
            fix="name a file with at least one JSON object a line" if not total else "widen the slice",
        )
    return opened


def _open(
    spec: str, max_line_bytes: int, columns: Collection[str], key: str, mark: Mapping[str, Any] | None
) -> DataRows:
    path = Path(spec).expanduser()
    if path.is_file():
        return _open_file(path, max_line_bytes, columns, mark)
    if folder_of_set(spec) is not None:
        return HubRows(spec)
    if is_hub_name(spec) and path.suffix not in (".jsonl", ".json", ".parquet"):
        return HubRows(spec)
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{spec} is not a regular file",
            code="CFG05",
            where=f"{key} = {path.absolute()}",
            why="a pipe can be read only once and in order; rows are read in any order, and again on a resume",
            fix="write it to a file first",
        )
    raise ConfigError(
        f"there is no data file {spec!r}",
        code="CFG05",
        where=f"{key} = {path.absolute()} (working folder {Path.cwd()})",
        fix=f"set {key} to a JSONL or Parquet file, a folder, or a hub set OWNER/NAME",
    )


def _open_file(path: Path, max_line_bytes: int, columns: Collection[str], mark: Mapping[str, Any] | None) -> DataRows:
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read", code="DAT30", where=str(path), why=str(error)) from error
    if path.suffix in (".parquet", ".pq") or head.startswith(b"PAR1"):
        return ParquetRows(path, columns=columns)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise DataError(
            f"{path.name} is one JSON array, not one object a line",
            code="DAT19",
            where=f"{path}:1:1",
            fix=converted(TO_LINES, path, "lines"),
        )
    return JsonlRows(path, max_line_bytes=max_line_bytes, size=int(mark["bytes"]) if mark else None)

"""Resume compatibility: a table of changed keys with verdicts, from the saved and the present config.

Every key of the schema has its class in its section, as has an option of a plugin that declares one
(`config.sections.key`); other tables of plugins and backends are unsafe as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slime_core.config.fields import core_keys
from slime_core.config.problems import error_of
from slime_core.config.recipe import without_slots_of_stages
from slime_core.config.schema import SECTIONS, Config
from slime_core.config.sections import ResumeClass, Verdict, fact
from slime_core.config.stages import stage_name, stages
from slime_core.config.validate import check_model
from slime_core.errors import ConfigError, SlimeError, nearest
from slime_core.plugins.assemble import option_models
from slime_core.plugins.backends import brought_by
from slime_core.plugins.discover import paths

PLUGINS = "plugins"
"""What `--force-key` calls plugins whose code changed."""
STAGE = "stage"


STRUCTURE = ResumeClass("unsafe", "stages have other names or another order")
EARLIER = ResumeClass("unsafe", "versions of later stages count from the end of this one")
SCHEDULE = ResumeClass("unsafe", "the learning rate decays over the whole stage (set lr_decay_iters to fix it)")
LAYOUT = ResumeClass("notice", "the same mathematics in another layout, or with other memory; bits may differ")
"""Of a backend's keys that it calls resumable; its other keys change what is learnt, or may."""
TABLE = ResumeClass("unsafe", "only its plugin or backend knows what it changes")


@dataclass(slots=True, frozen=True, kw_only=True)
class ConfigChange:
    """A key whose value is not that of the saved run; with several stages, perhaps of one of them."""

    key: str  # train.lr, plugin.rm_math.digits, stage.warmup.train.lr
    was: Any
    now: Any
    verdict: Verdict
    reason: str

    def named_by(self, force: str) -> bool:
        """Whether ``--force-key FORCE`` means this key: in full, without its stage, or its bare name."""
        force = force.replace("-", "_")
        key = self.key.replace("-", "_")
        ways = {key, key.rpartition(".")[2]}
        if key.startswith("stage."):
            ways.add(key.split(".", 2)[2])
        return force in ways or any(way.startswith((f"{force}.", f"{force}[")) for way in ways)


def compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[ConfigChange]:
    """Changed keys of two whole configs as plain tables (secrets redacted in both), in the schema's order.

    Raises:
        ConfigError: CFG01 to CFG03, where the saved one is not a config of this version.
    """
    was = without_slots_of_stages(was)
    before, after = stages(_config(was)), stages(_config(now))
    names = [stage_name(stage) for stage in before], [stage_name(stage) for stage in after]
    if names[0] != names[1]:
        structure = ConfigChange(
            key=STAGE, was=names[0], now=names[1], verdict=STRUCTURE.verdict, reason=STRUCTURE.reason
        )
        before, after = before[-1:], after[-1:]
        return [structure, *_of_stage(before[0], after[0], was, now, last=True)]
    changes: dict[str, list[tuple[str, ConfigChange]]] = {}
    for name, old, new in zip(names[0], before, after):
        for change in _of_stage(old, new, was, now, last=name == names[0][-1]):
            changes.setdefault(change.key, []).append((name, change))
    return [change for key in changes for change in _merged(changes[key], len(before))]


def signature(data: Mapping[str, Any]) -> str:
    """16 hex digits over every key, of every stage, that is not safe to change: equal where the same bits come out."""
    values = {
        f"{index}.{path}": value
        for index, stage in enumerate(stages(_config(data)))
        for path, value in _flat(stage.model_dump(mode="json"))
        if (_of_table(path) if _is_table(path) else core_keys()[_core(path)].resume).verdict != "safe"
    }
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def refused(changes: Sequence[ConfigChange], forced: Collection[str] = ()) -> list[ConfigChange]:
    """The unsafe ones that no ``--force-key`` names."""
    return [c for c in changes if c.verdict == "unsafe" and not any(c.named_by(force) for force in forced)]


def table(changes: Sequence[ConfigChange]) -> str:
    """Lines ``key  was -> now  verdict: reason``, aligned."""
    rows = [(c.key, f"{shown(c.was)} -> {shown(c.now)}", f"{c.verdict}: {c.reason}") for c in changes]
    widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else [0, 0]
    return "\n".join(f"{key.ljust(widths[0])}  {values.ljust(widths[1])}  {reason}" for key, values, reason in rows)


def shown(value: Any) -> str:
    """A value in few characters."""
    text = json.dumps(value, ensure_ascii=False, default=str) if value is not _ABSENT else "(none)"
    return text if len(text) <= 120 else text[:80] + "..." + text[-37:]


def check(changes: Sequence[ConfigChange], forced: Collection[str], where: str) -> None:
    """Refuse what would make another experiment of the run.

    Raises:
        ConfigError: CFG13 with the whole diff, CFG01 a forced key that does not exist.
    """
    check_forced(forced, changes)
    wrong = refused(changes, forced)
    if wrong:
        flags = " ".join(f"--force-key {change.key}" for change in wrong)
        raise ConfigError(
            f"{len(wrong)} key(s) of the saved run changed in a way that makes it another experiment",
            code="CFG13",
            where=where,
            why="\n    " + table(changes).replace("\n", "\n    "),
            fix=f"restore them, start another run, or resume anyway: {flags}",
        )


def check_forced(forced: Collection[str], changes: Sequence[ConfigChange] = ()) -> None:
    """Every ``--force-key`` is a key; it need not have changed.

    Raises:
        ConfigError: CFG01.
    """
    keys = core_keys()
    names = {key.path for key in keys.values()} | set(keys) | {PLUGINS, STAGE}
    for force in forced:
        plain = force.replace("-", "_")
        if plain in names or _is_table(plain) or any(c.named_by(force) for c in changes):
            continue
        raise ConfigError(
            f"--force-key {force} names no key",
            code="CFG01",
            where=f"command line: --force-key {force}",
            fix="\n".join(filter(None, [nearest(plain, names), "all keys: slime config keys"])),
        )


class _Absent:
    """No value: a plugin's table that one side does not have."""

    def __repr__(self) -> str:
        return "(none)"


_ABSENT = _Absent()


def _config(data: Mapping[str, Any]) -> Config:
    config = check_model(Config, data)
    if isinstance(config, list):
        raise error_of(config)
    return config


def _of_stage(
    old: Config, new: Config, was: Mapping[str, Any], now: Mapping[str, Any], *, last: bool
) -> Iterator[ConfigChange]:
    """Changes of one resolved stage. A key that only follows from another (``auto``) is left out."""
    before, after = dict(_flat(old.model_dump(mode="json"))), dict(_flat(new.model_dump(mode="json")))
    written = _written(was, old), _written(now, new)
    for path in dict.fromkeys((*before, *after)):
        one, two = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if one == two or _core(path) in _settled(written, path):
            continue
        resume = _class_at(path, old, new, last)
        yield ConfigChange(key=path, was=one, now=two, verdict=resume.verdict, reason=resume.reason)


def _written(data: Mapping[str, Any], stage: Config) -> dict[str, Any]:
    """[train] as written for a stage, before ``auto`` was resolved."""
    train = dict(data.get("train", {}))
    for entry in data.get("stage", ()):
        if entry.get("name") == stage_name(stage):
            train |= {key: value for key, value in entry.items() if key in train}
            train |= entry.get("train", {})
    return train


def _settled(written: tuple[dict[str, Any], dict[str, Any]], path: str) -> tuple[str, ...]:
    name = _core(path)
    same = path.startswith("train.") and written[0].get(name, _ABSENT) == written[1].get(name, _ABSENT)
    return (name,) if same and name in written[0] else ()


def _core(path: str) -> str:
    """The bare name of a core key: ``tasks`` of ``data.tasks[0].weight``."""
    head, _, rest = path.partition(".")
    return (rest if head in SECTIONS else head).split(".")[0].split("[")[0]


def _is_table(path: str) -> bool:
    """Whether a key is of a plugin's or a backend's table."""
    head, dot, _ = path.partition(".")
    return bool(dot) and head not in SECTIONS and "[" not in head


def _class_at(path: str, old: Config, new: Config, last: bool) -> ResumeClass:
    if _is_table(path):
        return _of_table(path)
    if path == "rollout.num_rollout":
        trains = old.train, new.train
        if not last:
            return EARLIER
        if any(t.lr_decay_style != "constant" and not t.lr_decay_iters for t in trains):
            return SCHEDULE
    return core_keys()[_core(path)].resume


def _of_table(path: str) -> ResumeClass:
    """The class of a key of a plugin's or a backend's table."""
    head, _, name = path.replace("-", "_").partition(".")
    if head == "plugin":
        plugin, _, option = path.removeprefix("plugin.").partition(".")
        return _option_classes(plugin, paths()).get(option.partition(".")[0], TABLE)
    return LAYOUT if any(name in b.resumable for b in brought_by(head)) else TABLE


@lru_cache(maxsize=16)
def _option_classes(plugin: str, _: object) -> dict[str, ResumeClass]:
    """What a plugin's options declare; nothing of one that is not installed, or does not load."""
    try:
        model = option_models([plugin])[plugin]
    except (SlimeError, KeyError):
        return {}
    fields = model.model_fields.items() if model is not None else ()
    return {name: fact(info, "resume") for name, info in fields if fact(info, "resume")}


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; arrays of tables by index, other arrays whole; stage tables are resolved already."""
    if isinstance(data, Mapping) and (data or not path):
        for key, value in data.items():
            if path or key != STAGE:
                yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, (list, tuple)) and data and all(isinstance(item, Mapping) for item in data):
        for index, item in enumerate(data):
            yield from _flat(item, f"{path}[{index}]")
    elif data or path in core_keys() or "." in path:
        yield path, list(data) if isinstance(data, tuple) else data


def _merged(changes: list[tuple[str, ConfigChange]], count: int) -> list[ConfigChange]:
    """One row where all stages changed alike, else a row a stage."""
    same = len(changes) == count and len({(shown(c.was), shown(c.now), c.verdict) for _, c in changes}) == 1
    if count == 1 or same:
        return [changes[-1][1]]
    return [
        ConfigChange(key=f"{STAGE}.{name}.{c.key}", was=c.was, now=c.now, verdict=c.verdict, reason=c.reason)
        for name, c in changes
    ]

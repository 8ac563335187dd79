"""`slime run --resume`: the checkpoint to resume from, or the reason for refusing.

which run -> its config under the flags -> finished? -> lock, epoch -> newest whole checkpoint
  -> changed keys, plugins, machine -> figures trimmed -> the ordinary loop
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_cli.failure import CliSession
from slime_cli.starts import starts_of
from slime_core.config.command_line import Word
from slime_core.config.dump import REDACTED, texts_in
from slime_core.config.load import CommandLine, split, stages
from slime_core.errors import ConfigError, PluginError
from slime_core.report.progress import total_steps
from slime_core.report.rundir import RunDir
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.resume_compatibility import ConfigChange
    from slime_cli.settings import Settings
    from slime_core.checkpoint import LoadedCheckpoint
    from slime_core.config.schema import Config
    from slime_core.ledger.repair import ResumePoint
    from slime_core.plugins import Plugins

AUTO = "auto"
SERVERS = "sglang.env."
"""Variables of servers, by name."""
_REFERENCE = re.compile(r"(?<!\$)\$\{")


@dataclass(slots=True, kw_only=True)
class ResumedRun:
    """A run that another process resumes."""

    run_dir: RunDir
    checkpoint: LoadedCheckpoint | None
    exact: bool  # steps that were recorded must give the recorded weights
    changes: list[ConfigChange]

    @property
    def version(self) -> int:
        """Where it resumes."""
        return self.checkpoint.version if self.checkpoint else 0


def choose(word: str, at: Path | None, words: Sequence[str], session: CliSession) -> tuple[Settings, Path | None]:
    """The settings, and the run to resume; None if ``auto`` finds none and starts a fresh one.

    Raises:
        ConfigError: CFG00 two run directories, CFG05 no run there, CFG09 a secret that was not saved.
    """
    from slime_cli.settings import load_settings

    if word == AUTO:
        settings = load_settings(words, session)
        name, path = settings.config.name, newest(settings.config.name, at)
        where = at or Path.cwd() / "runs"
        say(
            f"resume auto: {path}" if path else f"resume auto: no unfinished run of '{name}' in {where}: a fresh start"
        )
        return settings, path
    if at is not None:
        raise ConfigError(
            "--resume and --run-dir both name the run directory",
            code="CFG00",
            where=f"command line: --resume {word} --run-dir {at}",
            fix=f"--resume {word}   or   --resume auto --run-dir {at}, which starts the run where there is none",
        )
    path = RunDir.open(Path(word)).path
    return load_saved(path, words, session), path


def newest(name: str, at: Path | None = None) -> Path | None:
    """``at`` where it holds a run, else the unfinished run of this name in ``./runs`` with the highest number."""
    if at is not None:
        path = at.expanduser().absolute()
        return path if (path / "config.toml").is_file() else None
    numbered = re.compile(re.escape(name) + r"-(\d+)")
    runs = [(int(match[1]), path) for path in Path.cwd().glob("runs/*") if (match := numbered.fullmatch(path.name))]
    for _, path in sorted(runs, reverse=True):
        if (path / "config.toml").is_file() and RunDir(path).read_info().get("status") != "finished":
            return path
    return None


def load_saved(path: Path, words: Sequence[str], session: CliSession) -> Settings:
    """The config of a run under flags; a recipe among ``words`` replaces it, and is compared with it later.

    Raises:
        ConfigError: CFG01 to CFG11, CFG09 with every key whose secret was not saved.
    """
    from slime_cli.settings import load_words, with_plugins

    arguments = split(words)
    sources: dict[str, str] = {}
    if arguments.recipe is None:
        arguments.recipe = str(path / "config.toml")
        sources = _of_servers(path) | _from_environment(RunDir(path).read_info().get("references"))
        sources |= session.past.secrets if session.past else {}  # of the process that this one was
    arguments.overrides[:0] = [
        Word(key, (_plain(key, value),), f"{key} of run.json") for key, value in sources.items()
    ]
    loaded = load_words(arguments, session, quiet=sources)
    loaded = replace(loaded, secrets=loaded.secrets | set(sources.values()))
    session.secrets = loaded.secrets
    loaded.require_complete()
    _refuse_redacted(loaded.config.model_dump(mode="json"), path)
    return with_plugins(loaded)


def references(recipe: Path | None, saved: Mapping[str, Any]) -> dict[str, str]:
    """Keys whose secret is not ``saved`` but came from a variable: ``{"plugin.x.api_key": "${KEY}"}``."""
    from slime_core.config.recipe import read_recipe

    if recipe is None:
        return {}
    written = dict(texts_in(read_recipe(recipe).written))
    redacted = {key for key, text in texts_in(saved) if REDACTED in text}
    return {key: text for key, text in written.items() if key in redacted and _REFERENCE.search(text)}


def already_finished(path: Path, settings: Settings) -> dict[str, Any] | None:
    """The output of `slime run` for a run that has made all its steps; None for an unfinished one."""
    run_dir, total = RunDir(path), total_steps(settings.config)
    info = run_dir.read_info()
    version = info.get("version", 0)
    if info.get("status") != "finished" or version < total or run_dir.holder() is not None:
        return None
    say(f"already finished: {version} steps are done, {total} requested")
    say("to train further: --num-rollout N (it counts the steps of the last stage)")
    final = run_dir.final if run_dir.final.exists() else None
    return {
        "run_dir": str(path),
        "version": version,
        "final": str(final) if final else None,
        "metrics": {},
        "seconds": 0,
    }


def reopen(path: Path, settings: Settings, config: Config, forced: Collection[str]) -> ResumedRun:
    """Lock the run, find its checkpoint, and refuse changes that would make it another experiment.

    Raises:
        ConfigError: CFG13 changed keys, CFG14 no checkpoint, CFG16 another process runs there.
        PluginError: PLG65 other plugins than the run had.
        TrainerError: TRN108 another dtype than the run had.
        StorageError: the run directory cannot be written, STO113 a checkpoint of another slime, STO117 a damaged
            ledger of which there is no copy.
    """
    from slime_cli.resume_compatibility import check_forced
    from slime_cli.trim import evaluations_kept, trim_figures
    from slime_core.checkpoint import Checkpoints, check_dtype

    check_forced(forced)
    run_dir = RunDir.reopen(path)
    try:
        checkpoint = Checkpoints(run_dir.checkpoints, keep=config.report.save_keep, note=say).latest()
        if checkpoint is not None and checkpoint.epoch >= run_dir.epoch:
            run_dir.raise_epoch(checkpoint.epoch)
        changes = check_config(run_dir, checkpoint, config, settings, forced)
        check_plugins(run_dir, checkpoint, settings.plugins, forced)
        if checkpoint is not None:
            check_dtype(checkpoint, config.train.dtype, forced)
        recover_ledger(run_dir, checkpoint, config)
        if checkpoint is None:
            say_no_checkpoint(run_dir)
        else:
            say(f"resume {path} from checkpoint {checkpoint.version}, epoch {run_dir.epoch}")
        same = kind_of(config, settings.plugins)
        kinds = {start.get("kind") or same for start in starts_of(run_dir)}
        exact = kinds <= {same} and all(change.verdict == "safe" for change in changes)
        say_machine(run_dir, checkpoint, config)
        trim_figures(run_dir, checkpoint.version if checkpoint else 0, evaluations=evaluations_kept(checkpoint))
    except BaseException:
        run_dir.close()
        raise
    return ResumedRun(run_dir=run_dir, checkpoint=checkpoint, exact=exact, changes=changes)


def say_no_checkpoint(run_dir: RunDir) -> None:
    """Say that the ledger alone is there.

    Raises:
        ConfigError: CFG14 where it has nothing either, though figures or payloads say that there were samples.
    """
    from slime_core.report import history

    states, steps = history.states(run_dir), history.recorded_steps(run_dir)
    if issued := states.get("issued", 0):
        say(
            f"resume {run_dir.path}: there is no checkpoint. It starts again at version 0 FROM THE LEDGER: "
            f"{issued} samples are stored, and {steps} recorded steps train again on them"
        )
        return
    trained = any(line.get("version") != 0 for line in history.read_lines(run_dir.metrics))
    if not trained and (states or not any(run_dir.segments.glob("*.seg"))):
        say(f"resume {run_dir.path}: it ended before its first sample; a fresh start at version 0")
        return
    raise ConfigError(
        "there is nothing to resume: no checkpoint, and the ledger is empty",
        code="CFG14",
        where=str(run_dir.path),
        why="there were samples: resuming would silently start from the beginning",
        fix="start another run: slime run ... --run-dir NEW_DIR",
    )


def recover_ledger(run_dir: RunDir, checkpoint: LoadedCheckpoint | None, config: Config) -> None:
    """Put the checkpoint's copy in the place of a damaged ledger, and forget samples that cannot be read; say so.

    Raises:
        StorageError: STO117 the ledger is damaged or missing, and there is no copy.
    """
    from slime_core.ledger.repair import recover

    thorough = run_dir.read_info().get("error") == "STO117"
    where = standing(checkpoint, len(stages(config)))
    for line in recover(run_dir.path, where, config.report.ledger_dir, thorough=thorough):
        say(line)


def standing(checkpoint: LoadedCheckpoint | None, stages: int) -> ResumePoint:
    """Check that the ledger holds what a run of so many stages needs to resume from ``checkpoint``."""
    from slime_core.ledger.repair import ResumePoint

    if checkpoint is None:
        return ResumePoint()
    collector, issued = checkpoint.state["collector"], checkpoint.ledger.get("issued", 0)
    in_last = collector is not None and checkpoint.state["stage"] == stages - 1
    first = min(collector.get("open", ()), default=collector.get("issued", 0)) if collector and in_last else 0
    return ResumePoint(version=checkpoint.version, copy=checkpoint.ledger_copy, issued=issued, first=first)


def check_config(
    run_dir: RunDir, checkpoint: LoadedCheckpoint | None, config: Config, settings: Settings, forced: Collection[str]
) -> list[ConfigChange]:
    """The keys that differ from the saved ones. Unsafe ones are refused, the others give a notice.

    Raises:
        ConfigError: CFG13.
    """
    from slime_cli.resume_compatibility import check, compare, table
    from slime_core.config.dump import redacted
    from slime_core.config.load import read

    was = checkpoint.config if checkpoint else read(run_dir.config, check=False).config.model_dump(mode="json")
    plain, scrubbed = (redacted(config, keys).model_dump(mode="json") for keys in ((), settings.loaded.secrets))
    keys = {change.key for change in compare(was, scrubbed)}  # a secret that is redacted on one side has not changed
    changes = [change for change in compare(was, plain) if change.key in keys]
    check(changes, forced, str(checkpoint.path if checkpoint else run_dir.config))
    if changes:
        say("changed since it was saved:\n  " + table(changes).replace("\n", "\n  "))
    return changes


def check_plugins(
    run_dir: RunDir, checkpoint: LoadedCheckpoint | None, plugins: Plugins, forced: Collection[str]
) -> None:
    """Refuse plugins of other versions or with other sources than the run had.

    A plugin or function that the config no longer names, or names for the first time, is a changed key and no matter
    of this.

    Raises:
        PluginError: PLG65 with both versions of each, unless ``plugins`` is forced.
    """
    info = run_dir.read_info()
    saved = checkpoint.plugins if checkpoint else info.get("plugins_fingerprint")
    if saved == plugins.fingerprint():
        return
    lines = list(_plugin_lines(info, plugins))
    if not lines and info.get("sources") is not None:
        return  # other routes alone: keys say so
    text = "\n    ".join(lines or [f"fingerprint {saved} was saved, now {plugins.fingerprint()}"])
    if "plugins" in forced:
        say(f"plugins changed since it was saved (--force-key plugins):\n    {text}")
        return
    raise PluginError(
        "the run was saved with other plugins",
        code="PLG65",
        where=str(run_dir.path),
        why=f"\n    {text}",
        fix="install what the run had (pip install NAME==VERSION), or resume with these: --force-key plugins",
    )


def _plugin_lines(info: Mapping[str, Any], plugins: Plugins) -> Iterator[str]:
    versions, sources = info.get("plugins") or {}, info.get("sources") or {}
    now, sources_now = plugin_versions(plugins), plugins.sources()
    for name in dict.fromkeys((*versions, *now)):
        if name in versions and name in now and versions[name] != now[name]:
            yield f"plugin {name}: {versions[name]} was saved, {now[name]} is installed"
    for name in dict.fromkeys((*sources, *sources_now)):
        plain = name.removeprefix("plugin ")
        edited = name in sources and name in sources_now and sources[name] != sources_now[name]
        if edited and versions.get(plain) == now.get(plain):
            yield f"{name}: its source files changed ({sources[name]} was saved, now {sources_now[name]})"


def plugin_versions(plugins: Plugins) -> dict[str, str]:
    """``NAME: DISTRIBUTION==VERSION`` of the loaded plugins; of a plugin in one file its path."""
    return {plugin.provider.name: plugin.provider.origin for plugin in plugins.loaded}


def kind_of(config: Config, plugins: Plugins) -> str:
    """Starts of one kind make the same bits: keys that are not safe, plugins and machine are equal."""
    from slime_cli.resume_compatibility import signature
    from slime_core.clusters.machine import machine_facts
    from slime_core.config.dump import redacted

    facts = [signature(redacted(config).model_dump(mode="json")), plugins.fingerprint(), machine_facts(config)]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def say_machine(run_dir: RunDir, checkpoint: LoadedCheckpoint | None, config: Config) -> None:
    """Name changes of the machine and of slime itself: only bits may differ."""
    from slime_core import __version__
    from slime_core.clusters.machine import machine_facts

    info, now = run_dir.read_info(), machine_facts(config)
    was = checkpoint.machine if checkpoint else info.get("machine") or now
    lines = [f"{key} {was.get(key)} -> {now.get(key)}" for key in {**was, **now} if was.get(key) != now.get(key)]
    if info.get("slime", __version__) != __version__:
        lines.append(f"slime {info['slime']} -> {__version__}")
    if lines:
        say(f"notice: another machine than before ({'; '.join(lines)}): recorded steps may get other bits")


def _from_environment(saved: Any) -> dict[str, str]:
    """Values of the references in ``run.json`` whose variables are set."""
    from slime_core.config.problems import Origins
    from slime_core.config.recipe import resolve_env

    values = {}
    for key, text in (saved if isinstance(saved, dict) else {}).items():
        data, problems, _ = resolve_env({"x": text}, Origins())
        if not problems and data["x"]:
            values[key] = data["x"]
    return values


def _of_servers(path: Path) -> dict[str, str]:
    """Values of redacted variables of `[sglang.env]` that our own environment has: the same name, the same value."""
    from slime_core.config.recipe import read_recipe

    names = [
        key.removeprefix(SERVERS)
        for key, text in texts_in(read_recipe(path / "config.toml").written)
        if key.startswith(SERVERS) and REDACTED in text
    ]
    return {SERVERS + name: os.environ[name] for name in names if os.environ.get(name)}


def _plain(key: str, value: str) -> str:
    """A word that stands for exactly this text: in a table of anything ``1e5`` would be a number."""
    return json.dumps(value) if key.startswith(SERVERS) else value


def _refuse_redacted(data: Any, path: Path) -> None:
    """Check that every secret left out of ``config.toml`` is set again."""
    missing = [key for key, text in texts_in(data) if REDACTED in text]
    if missing:
        saved = RunDir(path).read_info().get("references") or {}
        names = {key: saved[key][2:-1] if key in saved else key.removeprefix(SERVERS) for key in missing}
        ways = [f"export {name}=..." if name != key else f"{key}=VALUE" for key, name in names.items()]
        raise ConfigError(
            f"{len(missing)} secret(s) of the run were not saved: {', '.join(missing)}",
            code="CFG09",
            where=str(path / "config.toml"),
            why="secrets are kept out of everything that slime writes",
            fix="pass them again: " + "   ".join(ways),
        )


__all__ = ["AUTO", "CommandLine", "ResumedRun", "already_finished", "choose", "kind_of", "references", "reopen"]

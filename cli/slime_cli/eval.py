"""`slime eval MODEL [CONFIG]`: figures of each evaluation set of a model folder or a run, with intervals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.failure import CliSession, exit_refused
from slime_cli.libraries import quiet_libraries
from slime_cli.run import drive, reporting, terminable
from slime_cli.starts import end
from slime_cli.tables import heading, print_table
from slime_cli.watched import watched
from slime_cli.words import KEY_WORDS, PASSING, KeyCommand
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.report import Report

OWN_SETS = ("eval_prompt_data", "eval_config")  # sets on the command line: --plugin then adds no default recipe


@click.command(
    "eval",
    epilog="Example: slime eval runs/demo-0 --n-samples-per-eval-prompt 4",
    cls=KeyCommand,
    context_settings=PASSING,
    options_metavar="[OPTIONS]",
)
@click.argument("model", metavar="MODEL")
@click.argument("words", nargs=-1, type=KEY_WORDS, metavar="[CONFIG] [--KEY VALUE]...")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where results lie; default runs/NAME-eval-N.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("--markdown", is_flag=True, help="The answer as Markdown tables.")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.pass_obj
def command(
    session: CliSession,
    model: str,
    words: tuple[str, ...],
    run_dir: Path | None,
    as_json: bool,
    markdown: bool,
    verbose: bool,
) -> None:
    """Evaluate. MODEL is a model folder, an adapter folder, or a run directory, whose config then is the default
    CONFIG.

    Figures stand with their 95 % intervals. Every question's scores and answers lie in evaluations/ of the run
    directory, for `slime compare`. A set of which nothing could be judged is an error.
    """
    session.verbose = session.verbose or verbose
    with terminable():
        results, path = evaluate(model, words, session, run_dir)
    if as_json:
        _check_judged(results, path)
        click.echo(json.dumps({"model": model, "run_dir": path, "evaluations": results}, indent=1, sort_keys=True))
        return
    from slime_cli.evaluation_tables import figure_tables, to_markdown

    for table in figure_tables(results):
        if markdown:
            click.echo(to_markdown(table))
        else:
            heading(table.title)
            print_table(table.columns, table.rows)
    _check_judged(results, path)


def _check_judged(results: dict[str, dict[str, float]], path: str) -> None:
    """Refuse to call it an evaluation where no answer of a set could be judged.

    Raises:
        PluginError: PLG67.
    """
    unjudged = [name for name, figures in results.items() if figures["infra_errors"] == figures["samples"] > 0]
    if unjudged:
        from slime_core.errors import PluginError

        raise PluginError(
            f"nothing could be judged of {', '.join(unjudged)}",
            code="PLG67",
            where=f"{path}/evaluations",
            why="the reward function failed on every answer, as reported above; this is not a score of the model",
            fix="fix the judge (its server, key or processes), then evaluate again",
        )


def evaluate(
    model: str, words: tuple[str, ...], session: CliSession, at: Path | None
) -> tuple[dict[str, dict[str, float]], str]:
    """Metrics by set name, and the directory that holds them."""
    from slime_cli.settings import Settings, load_words
    from slime_core.clusters.machine import resolve_machine
    from slime_core.config.load import split, stages
    from slime_core.errors import ConfigError
    from slime_core.plugins import load_plugins
    from slime_core.report import RunDir

    quiet_libraries()
    folder, adapters, own_config = find_model(model)
    arguments = split([*words, "--hf-checkpoint", folder, "--init-weights", "load"])
    if arguments.recipe is None and own_config is not None:
        arguments.recipe = str(own_config)
    loaded = load_words(arguments, session, data_keys=OWN_SETS)
    config = resolve_machine(stages(loaded.config)[-1], trains=False)
    if adapters:
        _check_named(Path(adapters), config.train.lora_adapters)
    served = {"lora_load": adapters, "lora_sync": "adapter" if adapters else "merged"}
    if own_config is None or arguments.recipe != str(own_config):  # not the config that the adapter was trained by
        served["base_weights"] = "auto"
    config = config.model_copy(update={"train": config.train.model_copy(update=served)})
    if not (config.eval.eval_prompt_data or config.eval.eval_tasks or config.eval.eval_function_path):
        raise ConfigError(
            "there is nothing to evaluate",
            code="CFG04",
            where=str(loaded.recipe or "command line"),
            why="the config names no evaluation set",
            fix="--eval-prompt-data NAME FILE.jsonl   or a CONFIG with [[eval.eval_tasks]]",
        )
    settings = Settings(loaded=loaded, plugins=load_plugins(loaded.config))
    try:
        with RunDir.create(f"{config.name}-eval", at=at) as run_dir:
            session.run_dir = run_dir
            say(f"evaluation {run_dir.path}")
            watching = watched(run_dir.path, config.cluster.hang_timeout)
            with watching, reporting(settings, run_dir, config, session) as (report, _), exit_refused():
                results: dict[str, Any] = asyncio.run(drive(alone(config, settings.plugins, report)))
            end(run_dir, "finished", {})
    finally:
        settings.plugins.close()
    return results, str(run_dir.path)


def _check_named(folder: Path, names: tuple[str, ...]) -> None:
    """Refuse several adapters of which the config does not say which one a set is evaluated with.

    Raises:
        ConfigError: CFG05.
    """
    if names_in(folder) and not names:
        raise _several(folder, "the config has no lora_adapters")


def names_in(folder: Path) -> list[str]:
    """Names of the adapters that have a folder each in this one."""
    from slime_core.lora.folder import CONFIG

    return sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))


def _several(folder: Path, reason: str) -> Exception:
    from slime_core.errors import ConfigError

    names = names_in(folder)
    return ConfigError(
        f"{folder} has {len(names)} adapters: {', '.join(names)}",
        code="CFG05",
        where="command line: MODEL",
        why=reason,
        fix=f"name one: slime eval {folder / names[0]} CONFIG; or the run that trained them",
    )


async def alone(config: Config, plugins: Plugins, report: Report) -> dict[str, dict[str, float]]:
    """Evaluate the model folder ``config.rollout.hf_checkpoint``, with no trainer.

    Raises:
        ConfigError: CFG04 the config names no evaluation set.
    """
    from slime_core.clusters import build_serving
    from slime_core.context import Context
    from slime_core.data.prompts import limits_of
    from slime_core.errors import ConfigError
    from slime_core.evaluate import Evaluator
    from slime_core.media.processor import MediaProcessor

    async with build_serving(config) as serving:
        ctx = Context(
            config=config,
            engine=serving.engines,
            engines=serving.roles,
            tokenizer=serving.tokenizer,
            media=MediaProcessor.of(serving.tokenizer, limits_of(config.data)),
            run_dir=report.run_dir.path,
            stage="eval",
        )
        evaluator = Evaluator(serving.vocab_size, plugins, ctx, report)
        if not evaluator.sets and not evaluator.by_function:
            raise ConfigError(
                "there is nothing to evaluate", code="CFG04", fix="set eval.eval_prompt_data or [[eval.eval_tasks]]"
            )
        async with plugins.running(ctx), report.watched_live():
            with report.during("evaluating", evaluator.progress):
                return await evaluator.run(0)


def find_model(text: str) -> tuple[str, str, Path | None]:
    """The model folder (or hub name), the folder of adapters beside it, and the config of a run directory.

    Raises:
        ConfigError: CFG05 the run has no final model, or a folder has several adapters; CFG01 a flag in the model's
            place.
        DataError: TOK00, TOK46 an adapter folder that cannot be read.
    """
    from slime_core.errors import ConfigError
    from slime_core.lora.folder import CONFIG
    from slime_core.lora.served import base_of

    if text.startswith("-"):
        raise ConfigError(
            f"a model is missing before {text}",
            code="CFG01",
            where=f"command line: {text}",
            fix="slime eval MODEL [CONFIG] [--KEY VALUE]...",
        )
    path = Path(text).expanduser()
    config = path / "config.toml"
    if (path / CONFIG).is_file():
        return base_of(path), str(path), None
    if not config.is_file():
        for folder in (path, path / "adapter"):
            if names_in(folder) and not (path / "config.json").is_file():
                raise _several(folder, "its base and one of them are a model")
        return text, "", None
    final = path / "final"
    if not final.is_dir():
        raise ConfigError(
            f"the run {text} has no final model",
            code="CFG05",
            where=str(final.absolute()),
            why="it has not ended, or report.export_final was off",
            fix=f"slime show {text}",
        )
    if names_in(final / "adapter") or (not (final / "config.json").is_file() and (final / "adapter").is_dir()):
        return base_of(final / "adapter"), str(final / "adapter"), config
    return str(final), "", config

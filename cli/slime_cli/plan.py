"""`slime plan`: what a run takes of its GPUs, before any is taken; of a run, planned beside measured."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.failure import CliSession
from slime_cli.words import KEY_WORDS, PASSING, KeyCommand

if TYPE_CHECKING:
    from slime_cli.settings import Settings
    from slime_core.config.schema import Config
    from slime_core.planning.footprint import Lengths
    from slime_core.planning.gpus import Gpu
    from slime_core.planning.memory import LengthsOf
    from slime_core.planning.sizes import ModelSizes
    from slime_core.plugins import Plugins

PLAN = "plan.json"
"""Of a run directory."""
NO_GPU = "no GPU was named and this machine has none: planned for its processors; slime plan --gpu h100 plans for GPUs"
EPILOG = """\b
  slime plan --hf-checkpoint Qwen/Qwen3-8B --gpu h100 --lora-rank 32
  slime plan recipe.toml --gpu 4090 --lora-rank 32 --response-tokens 600,2000
  slime plan recipe.toml --gpu h200 --gpus 8 --json
  slime plan runs/demo-0
Every key of the config is a flag, as for slime run. Exit code 1: it does not fit."""


@click.command("plan", cls=KeyCommand, context_settings=PASSING, epilog=EPILOG, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=KEY_WORDS, metavar="[RECIPE|RUN_DIR] [--KEY VALUE]...")
@click.option("--gpu", "gpu_name", metavar="NAME[=GiB]", help="h100, h200, a100, 4090 ...; default: this machine's.")
@click.option("--gpus", type=click.IntRange(min=1), help="How many there are: trainer ranks where they are shared.")
@click.option("--response-tokens", metavar="MEAN[,P95]", help="Of responses; default: as long as the config allows.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="Of prompts, on average; default 256.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.pass_obj
def command(
    session: CliSession,
    words: tuple[str, ...],
    gpu_name: str | None,
    gpus: int | None,
    response_tokens: str | None,
    prompt_tokens: int | None,
    as_json: bool,
) -> None:
    """Say what a run takes: memory by part and phase, seconds of a step, settings that fit. Starts nothing."""
    from slime_cli.plan_tables import print_plan

    run_dir = Path(words[0]).expanduser() if words else None
    if run_dir is not None and (run_dir / "run.json").is_file():
        from slime_cli.plan_measured import beside, print_beside

        answer = beside(run_dir)
        click.echo(json.dumps(answer, indent=1)) if as_json else print_beside(answer)
        return
    settings = _settings(words, session, gpus)
    try:
        config, lengths = settings.loaded.config, _lengths(response_tokens, prompt_tokens)
        gpu = _gpu(gpu_name, config)
        config, choice = _chosen(config, gpu, lengths, named=gpu_name is not None)
        answer = planned(config, gpu, settings.plugins, lengths, gpus or 0)
    finally:
        settings.plugins.close()
    answer["notices"] += [choice] if choice else []
    if as_json:
        click.echo(json.dumps(answer, indent=1))
    else:
        print_plan(answer, f"plan of {config.name} (nothing was started)")
    if not answer["fits"]:
        raise SystemExit(1)


def _settings(words: tuple[str, ...], session: CliSession, gpus: int | None) -> Settings:
    """A run's settings, with as many ranks as there are GPUs."""
    from slime_cli.settings import load_words, with_plugins
    from slime_core.config.load import split

    loaded = load_words(split([*words, *_ranks(gpus)]), session)
    loaded.require_complete(data=False)
    return with_plugins(loaded)


def _ranks(gpus: int | None) -> list[str]:
    if gpus is None:
        return []
    nodes = next(count for count in range(-(-gpus // 8), gpus + 1) if gpus % count == 0)
    return ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(gpus // nodes)]


def _gpu(name: str | None, config: Config) -> Gpu:
    """The GPU that was named, or this machine's; its processors where there is none."""
    from slime_core.memory import available_memory
    from slime_core.planning.automatic import gpu_named
    from slime_core.planning.gpus import gpu_of, of_machine, processor

    if name is not None:
        return gpu_of(name)
    facts = None if config.cluster.device == "cpu" else of_machine()
    return gpu_named(*facts) if facts is not None else processor(available_memory())


def _chosen(config: Config, gpu: Gpu, lengths: LengthsOf, *, named: bool) -> tuple[Config, str]:
    """The config with what is ``auto`` as a run on this GPU would choose it, and a line about that."""
    from slime_core.memory import machine_memory
    from slime_core.planning.automatic import with_plan

    gpu = replace(gpu, memory=machine_memory()) if gpu.processor else gpu
    return with_plan(config, gpu, lengths, 0 if named else machine_memory())


def planned(config: Config, gpu: Gpu, plugins: Plugins, lengths: LengthsOf, gpus: int = 0) -> dict[str, Any]:
    """The facts of a run's plan.

    Raises:
        ConfigError: CFG05 no model folder.
    """
    from slime_cli.plan_tables import facts
    from slime_core.planning.memory import fits
    from slime_core.weights.folder import resolve

    model = resolve(config.rollout.hf_checkpoint)
    answer = facts(fits(config, model, gpu, lengths=lengths, needs=plugins.needs), gpus)
    if gpu.processor and config.cluster.device != "cpu":
        answer["notices"].append(NO_GPU)
    return answer


def _lengths(response_tokens: str | None = None, prompt_tokens: int | None = None) -> LengthsOf:
    """Lengths of a stage, as far as they are stated; the rest is assumed.

    Raises:
        ConfigError: CFG03 lengths that are no numbers.
    """
    from slime_core.planning.memory import assumed_lengths

    response = _stated(response_tokens) if response_tokens is not None else {}
    prompt: dict[str, Any] = {}
    if prompt_tokens is not None:
        source = "--prompt-tokens, and responses as long as the config allows"
        prompt = {"prompt": prompt_tokens, "source": source}

    def of(stage: Config, sizes: ModelSizes) -> Lengths:
        lengths = replace(assumed_lengths(stage, sizes), **(prompt | response))
        longest = int(lengths.prompt + min(lengths.p95, stage.rollout.rollout_max_response_len))
        return replace(lengths, longest=max(lengths.longest, longest))

    return of


def _stated(text: str) -> dict[str, Any]:
    from slime_core.errors import ConfigError

    try:
        mean, *more = (float(part) for part in text.split(","))
        p95 = more[0] if more else mean
    except ValueError:
        mean, p95, more = 0.0, 0.0, []
    if mean < 1 or p95 < mean or len(more) > 1:
        raise ConfigError(
            f"--response-tokens {text} is not a length",
            code="CFG03",
            where="--response-tokens",
            why="it is the mean, and where you know it the 95th percentile, which is not below the mean",
            fix="--response-tokens 600   or   --response-tokens 600,2000",
        )
    return {"response": mean, "p95": p95, "source": "--response-tokens", "assumed": False}


def of_run(config: Config, plugins: Plugins, prompt_tokens: int | None = None) -> dict[str, Any]:
    """The plan of a run on this machine."""
    return planned(config, _gpu(None, config), plugins, _lengths(prompt_tokens=prompt_tokens or None))


def write_plan(config: Config, plugins: Plugins, file: Path) -> None:
    """Write a run's plan; a model that cannot be planned trains all the same, and its file says why there is none."""
    from slime_core.durable import replace_file
    from slime_core.errors import text_of

    try:
        answer = of_run(config, plugins)
    except Exception as error:  # a forecast, of whatever model: it ends no run
        answer = {"error": text_of(error)}
    with suppress(OSError):
        replace_file(file, json.dumps(answer, indent=1).encode())

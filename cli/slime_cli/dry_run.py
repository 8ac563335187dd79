"""`slime run --dry-run`: check data, model and routing, and show the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_cli.tables import heading, print_pairs, print_table
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.settings import Settings
    from slime_core.config.schema import Config
    from slime_core.context import Context

EXCERPT = 200  # characters of the first row that are shown


async def make_plan(settings: Settings, run_dir: Path | None) -> dict[str, Any]:
    """Run all checks of a run's start and show what it would do; nothing is started or written.

    Raises:
        SlimeError: any error of the run's start: data, model folder, plugins, run directory.
    """
    from slime_cli.plan import of_run
    from slime_cli.preflight import check_cores, check_inputs
    from slime_cli.settings import plans
    from slime_core.clusters.embedded import context_len, notices, open_folder
    from slime_core.clusters.machine import resolve_machine
    from slime_core.config.load import stages
    from slime_core.report.rundir import check_free, next_path

    config = resolve_machine(settings.config)
    if run_dir is not None:
        check_free(run_dir)
    path = (run_dir or next_path(config.name)).expanduser().absolute()
    check_writable(path)
    if crowded := check_cores(config):
        say(crowded)
    plans(settings, config)
    check_inputs(settings, config)
    folder = open_folder(config)
    backends = plans(settings, config, folder)
    tokenizer = folder.tokenizer()
    limit = context_len(config, folder)
    stage_plans = [stage_plan(stage, settings, tokenizer) for stage in stages(config)]
    return {
        "recipe": str(settings.loaded.recipe) if settings.loaded.recipe else None,
        "run_dir": str(path),
        "seed": config.seed,
        "model": {
            "path": str(folder.path),
            "type": getattr(folder.config, "model_type", ""),
            "weights": config.rollout.init_weights,
            "vocab_size": folder.vocab_size,
            "context_len": limit,
            "notices": notices(config, folder),
        },
        "machine": {
            "device": config.cluster.device,
            "dtype": config.train.dtype,
            "cpu_threads": config.cluster.cpu_threads,
            "cluster_backend": config.cluster.cluster_backend,
            "rollout_engine": config.rollout.rollout_engine,
            "train_backend": config.train.train_backend,
        },
        **{kind: backend.facts for kind, backend in backends.items()},
        "rows": {name: text for backend in backends.values() for name, text in backend.rows.items()},
        "plugins": list(settings.plugins.names),
        "stages": stage_plans,
        "routing": settings.plugins.routing(),
        "resources": of_run(config, settings.plugins, stage_plans[-1]["first_row"]["prompt_tokens"]),
    }


def stage_plan(config: Config, settings: Settings, tokenizer: Any) -> dict[str, Any]:
    """Sizes of one stage, its first row and its evaluation sets."""
    from slime_cli.dumps import first_prompt
    from slime_core.config.load import stage_name
    from slime_core.data.opening import eval_sets, open_source

    rollout, train = config.rollout, config.train
    rollouts = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    ctx = stage_context(config, tokenizer)
    dump = rollout.load_debug_rollout_data
    first = first_prompt(Path(dump)) if dump else open_source(config, settings.plugins, tokenizer, ctx).next(1)[0]
    evaluated = (
        []
        if rollout.debug_train_only
        else eval_sets(config, settings.plugins, tokenizer, replace(ctx, evaluation=True))
    )
    return {
        "name": stage_name(config),
        "steps": rollout.num_rollout,
        "prompts_per_step": rollout.rollout_batch_size,
        "samples_per_prompt": rollout.n_samples_per_prompt,
        "rollouts_per_step": rollouts,
        "optimizer_steps_per_rollout": rollouts // train.global_batch_size
        if train.global_batch_size
        else train.num_steps_per_rollout,
        "max_response_tokens_per_step": rollouts * rollout.rollout_max_response_len,
        "max_tokens_per_micro_batch": train.max_tokens_per_gpu or "automatic",
        "loss_type": train.loss_type,
        "advantage_estimator": train.advantage_estimator,
        "lr": train.lr,
        "max_staleness": rollout.max_staleness,
        "first_row": {
            "id": first.id,
            "task": first.task,
            "where": first.where,
            "prompt_tokens": len(first.tokens),
            "prompt": _excerpt(first.prompt),
            "label": _excerpt(first.label),
        },
        "eval_sets": [{"name": eval_set.name, "prompts": len(eval_set.prompts)} for eval_set in evaluated],
    }


def stage_context(config: Config, tokenizer: Any) -> Context:
    """What the data source and plugins may see before anything runs."""
    from slime_core.config.load import stage_name
    from slime_core.context import Context
    from slime_core.data.prompts import limits_of
    from slime_core.media.processor import MediaProcessor
    from slime_core.rollout.groups import training_params

    return Context(
        config=config,
        tokenizer=tokenizer,
        media=MediaProcessor.of(tokenizer, limits_of(config.data)),
        sampling=training_params(config),
        stage=stage_name(config),
    )


def print_plan(plan: dict[str, Any]) -> None:
    """The plan as tables on stdout."""
    from slime_cli.plan_tables import print_plan as print_resources

    model, machine = plan["model"], plan["machine"]
    heading("plan (nothing was started)")
    print_pairs(
        {
            "run directory": plan["run_dir"],
            "recipe": plan["recipe"] or "none (defaults and flags)",
            "plugins": ", ".join(plan["plugins"]) or "none",
            "seed": plan["seed"],
            "model": f"{model['path']} ({model['type']}, weights: {model['weights']}, "
            f"vocabulary {model['vocab_size']}, context {model['context_len']})",
            "machine": f"{machine['device']}, {machine['dtype']}, {machine['cpu_threads']} threads, cluster "
            f"{machine['cluster_backend']}, engine {machine['rollout_engine']}, trainer {machine['train_backend']}",
            **{f"notice {number}": text for number, text in enumerate(model["notices"], 1)},
            **plan["rows"],
        }
    )
    columns = {
        "stage": "name",
        "steps": "steps",
        "prompts": "prompts_per_step",
        "x": "samples_per_prompt",
        "rollouts": "rollouts_per_step",
        "updates": "optimizer_steps_per_rollout",
        "tokens <=": "max_response_tokens_per_step",
        "loss": "loss_type",
        "lr": "lr",
    }
    print_table(list(columns), [[stage[key] for key in columns.values()] for stage in plan["stages"]])
    for stage in plan["stages"]:
        row = stage["first_row"]
        heading(f"first row of {stage['name']}")
        print_pairs(
            {
                "task": row["task"],
                "from": row["where"] or "plugin",
                "prompt": row["prompt"],
                "label": row["label"],
                "tokens": row["prompt_tokens"],
                "evaluation": ", ".join(f"{s['name']} ({s['prompts']})" for s in stage["eval_sets"]) or "none",
            }
        )
    print_resources(plan["resources"], "what it takes")
    heading("routing")
    print_table(["hook", "task", "provider"], [[r["hook"], r["task"], r["provider"]] for r in plan["routing"]])


def _excerpt(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= EXCERPT else text[:EXCERPT] + "..."


def check_writable(path: Path) -> None:
    """Refuse a run directory that cannot be created; tries with a sibling folder, removed at once.

    Raises:
        StorageError: STO110.
    """
    import tempfile

    from slime_core.report.rundir import unwritable

    path = path.expanduser().absolute()
    above = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".slime-", dir=above):
            return
    except OSError as error:
        raise unwritable(error, path) from error

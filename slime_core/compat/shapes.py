"""How a user's function wants to be called: one of the documented shapes, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.errors import PluginError
from slime_core.hookspecs import signature_of
from slime_core.plugins.load import line_of

SAMPLE_NAMES = ("sample", "samples", "_sample")

SHAPES = {  # config key -> slime's signature, positional part and keywords apart
    "custom_rm_path": (("args", "sample"), ()),
    "custom_generate_function_path": (("args", "sample", "sampling_params"), ()),
    "rollout_function_path": (("args", "rollout_id", "data_buffer"), ("evaluation",)),
    "eval_function_path": (("args", "rollout_id", "data_buffer"), ("evaluation",)),
    "data_source_path": (("args",), ()),
    "rollout_sample_hook_path": (("args", "sample"), ()),
    "dynamic_sampling_filter_path": (("args", "samples"), ()),
    "rollout_sample_filter_path": (("args", "data"), ()),
    "rollout_all_samples_process_path": (("args", "all_groups", "data_source"), ()),
    "buffer_filter_path": (("args", "rollout_id", "buffer", "num_samples"), ()),
    "custom_reward_post_process_path": (("args", "samples"), ()),
    "custom_convert_samples_to_train_data_path": (("args", "samples"), ()),
    "custom_advantage_function_path": (("args", "rollout_data"), ()),
    "custom_loss_function_path": (("args", "batch", "logits", "sum_of_sample_mean"), ()),
    "custom_tis_function_path": (
        ("args",),
        ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths"),
    ),
    "custom_pg_loss_reducer_function_path": (
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        (),
    ),
    "rollout_data_postprocess_path": (("args", "rollout_id", "rollout_data"), ()),
    "run_done_path": (("ctx",), ()),
    "custom_megatron_init_path": (("args",), ()),
    "custom_megatron_before_log_prob_hook_path": (("args", "model", "store_prefix"), ()),
    "custom_megatron_before_train_step_hook_path": (
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        (),
    ),
    "custom_rollout_log_function_path": (
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        (),
    ),
    "custom_eval_rollout_log_function_path": (("rollout_id", "args", "data", "extra_metrics"), ()),
}


def is_native(fn: Callable[..., Any], hook: str) -> bool:
    """Whether ``fn`` is written like the hook itself, ``reward(group, ctx)``."""
    parameters = signature_of(hook).partition("(")[2].rstrip(")").split(", ")
    names = list(inspect.signature(fn).parameters)
    if names == ["args"]:  # slime's own, where a hook has an argument of that name too
        return False
    return bool(names) and names[0] == parameters[0] and set(names) <= set(parameters)


def is_plain(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` wants the sample alone (and perhaps ``ctx``), with no ``args`` before it."""
    parameters = list(inspect.signature(fn).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and positional[0].name in SAMPLE_NAMES:
        return True
    return len(positional) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters)


def takes(fn: Callable[..., Any], name: str) -> bool:
    """Whether ``fn`` has a parameter of that name."""
    return name in inspect.signature(fn).parameters


def accepted(fn: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the offered keyword arguments that ``fn`` takes."""
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    names = {p.name for p in parameters}
    return {name: value for name, value in offered.items() if name in names}


def check(fn: Callable[..., Any], key: str, path: str, others: Sequence[str] = ()) -> None:
    """Refuse a function that cannot be called as slime calls it.

    Raises:
        PluginError: PLG53 with the expected signature.
    """
    name = key.rpartition(".")[2]
    positional, keywords = SHAPES[name]
    try:
        if name == "custom_rm_path" and takes(fn, "completions"):
            raise TypeError("'completions' is TRL's signature")
        inspect.signature(fn).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        expected = f"def {fn.__name__}({', '.join([*positional, *(f'{k}=...' for k in keywords)])})"
        raise PluginError(
            f"{key} = '{path}' cannot be called with {', '.join([*positional, *keywords])}: {error}",
            code="PLG53",
            where=line_of(fn),
            why=f"found {fn.__name__}{inspect.signature(fn)}",
            fix="\n".join([f"write it as {expected}", *(f"or {other}" for other in others)]),
        ) from error

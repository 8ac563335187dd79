"""The recipe of every test that runs rm_math on SGLang's servers: a warm-up on the pupil's answers, then GRPO."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COUNTING = Path(__file__).parents[4] / "examples" / "visual_counting"
RECIPE: dict[str, Any] = {
    "plugins": ["rm_math"],
    "rollout": {"rollout_engine": "sglang"},
    "eval": {"skip_eval_before_train": True},
    "plugin.rm_math": {"operations": ["+"], "ones_first": True, "padded": True},
}
BESIDE = {"device": "cuda", "cpu_threads": 4, "colocate": True, "offload_train": False, "offload_rollout": False}
"""[cluster] of a run whose trainer and small server stay in one GPU's memory."""

SMALL_SERVER = {
    **{"mem_fraction_static": 0.3, "skip_server_warmup": True, "disable_piecewise_cuda_graph": True},
    **{"cuda_graph_bs": [8, 64, 256], "attention_backend": "triton", "sampling_backend": "pytorch"},
    "grammar_backend": "none",
}
"""[sglang] of that server, with few CUDA graphs."""

WARMUP = {
    "name": "warmup",
    "tasks": [{"name": "arithmetic_pupil"}],
    "loss_type": "sft_loss",
    "n_samples_per_prompt": 1,
}
GRPO = {"name": "grpo", "tasks": [{"name": "arithmetic"}], "n_samples_per_prompt": 8}


def recipe(*, warmup: Mapping[str, Any], grpo: Mapping[str, Any], tables: Mapping[str, Any]) -> str:
    """The recipe's text: keys and tables added to what is always so, and keys of both stages."""
    whole = copy.deepcopy(RECIPE)
    for name, value in tables.items():
        whole[name] = {**whole.get(name, {}), **value} if isinstance(value, Mapping) else value
    lines = [f"{name} = {toml(value)}" for name, value in whole.items() if not isinstance(value, Mapping)]
    for name, table in whole.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    for stage in ({**WARMUP, **warmup}, {**GRPO, **grpo}):
        lines += ["", "[[stage]]", *(f"{key} = {toml(value)}" for key, value in stage.items())]
    return "\n".join([*lines, ""])


def toml(value: Any) -> str:
    """A value as TOML has it; tables in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {toml(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def enlarged_counting(path: Path) -> None:
    """The example that counts in pictures, in a folder: its pictures are enlarged to patches of 14 pixels, the only
    ones that SGLang takes of Qwen2.5-VL."""
    shutil.copytree(COUNTING, path, dirs_exist_ok=True)
    for name, table, changes in (
        ("config.json", "vision_config", {"patch_size": 14, "window_size": 56}),
        ("preprocessor_config.json", "size", {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}),
    ):
        file = path / "model" / name
        values = json.loads(file.read_text())
        values[table] |= changes
        file.write_text(json.dumps(values | ({"patch_size": 14} if table == "size" else {})))

"""Published folders whose config.json names code of its own, though transformers has their layers.

That code is never run: the values of config.json make a config of transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "minimax_m2": "minimax_m2"}
"""``model_type`` of such a folder -> the ``model_type`` whose layers transformers has."""


def native_config(raw: Mapping[str, Any]) -> Any:
    """The config (transformers.PreTrainedConfig) of such a folder, from its config.json; None for any other folder.

    MiniMax-M2 states the rotated columns of a head as ``rotary_dim``, which transformers 5.17 does not read.
    """
    layers = LAYERS.get(str(raw.get("model_type", "")))
    if layers is None:
        return None
    from transformers import CONFIG_MAPPING

    values = {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}
    if "rotary_dim" in values:
        values.setdefault("partial_rotary_factor", values["rotary_dim"] / values["head_dim"])
    return CONFIG_MAPPING[layers].from_dict(values)

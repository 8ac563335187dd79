"""Megatron's layout and flags checked before anything starts, the row of a plan, the tables of its flags."""

from __future__ import annotations

import warnings
from typing import Any

from slime_convert.bridges import find_bridge
from slime_core.backends import Plan, Planning
from slime_core.clusters.embedded import open_folder
from slime_core.config.values import show
from slime_megatron import settings as megatron
from slime_megatron.flags import KINDS, flags


def plan(planning: Planning) -> Plan | None:
    """How Megatron's ranks share the model, everything about it checked; None where it trains nothing.

    A complete plan makes megatron-core's config objects too, so that it can refuse; that imports it.

    Raises:
        ConfigError: flags that mean nothing or disagree with config.json, a layout that does not divide, no bridge.
        DataError: a model folder that cannot be read.
    """
    config = planning.config
    if config.rollout.debug_rollout_only:
        return None
    folder = planning.folder or open_folder(config)
    bridge = find_bridge(planning.plugins.loaded, folder.config)
    world = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    settings = megatron.settings(
        bridge,
        folder.config,
        config.table("megatron"),
        config.train,
        world,
        config.cluster.device,
        origins=planning.origins,
    )
    if planning.complete:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            megatron.build(settings)
    layout = settings.layout
    idle = () if config.cluster.device == "cuda" else ("this machine has no GPU, and megatron-core trains on GPUs",)
    names = ("tp", "pp", "cp", "dp", *(("ep", "etp", "edp") if settings.sizes.experts else ()))
    facts = {
        "family": bridge.family,
        "ranks": world,
        "layout": {name: getattr(layout, name) for name in names},
        "layers": layout.stages(settings.sizes.layers),
        "chunks": layout.vp,
        "vocabulary": settings.sizes.padded_vocab,
        "sequence_parallel": settings.transformer["sequence_parallel"],
        "notices": [*idle, *settings.notices],
    }
    return Plan(facts=facts, rows={"megatron": line(facts)})


def line(row: dict[str, Any]) -> str:
    """The same in one line."""
    sizes = [f"{name} {size}" for name, size in row["layout"].items()]
    shared, experts = " * ".join(sizes[:4]), " * ".join(sizes[4:])
    stages = ", ".join(map(str, row["layers"])) + (f" in {row['chunks']} chunks" if row["chunks"] > 1 else "")
    text = f"{row['family']}, {row['ranks']} ranks = {shared}" + (f"; experts {experts}" if experts else "")
    return "; ".join([f"{text}; layers {stages}; vocabulary {row['vocabulary']}", *row["notices"]])


HEADINGS = {
    "model": "Flags that describe the model",
    "run": "Flags of the run",
    "only": "Flags whose value slime fixes",
    "idle": "Flags that mean nothing here and do no harm",
    "refused": "Flags that are refused",
}
"""Role of a flag -> the heading of its table."""


def option_rows() -> list[dict[str, str]]:
    """Every name of [megatron]: ``section key flag type default text role``."""
    return [
        {
            "section": "megatron",
            "key": f"megatron.{flag.name}",
            "flag": flag.dashed,
            "type": f"one of {', '.join(show(one) for one in flag.choices)}" if flag.choices else KINDS[flag.kind],
            "default": "",
            "text": flag.text,
            "role": flag.role,
        }
        for flag in flags().values()
    ]


def markdown(rows: list[dict[str, str]]) -> str:
    """The tables of docs/megatron.md: one a role; names with the same text share a line where they are of no use."""
    lines = []
    for role, heading in HEADINGS.items():
        section = [row for row in rows if row["role"] == role]
        if not section:
            continue
        useful = role in ("model", "run", "only")
        lines += [f"### {heading}", ""]
        if useful:
            lines += ["| flag | value | meaning |", "| --- | --- | --- |"]
            lines += [f"| `{row['flag']}` | {row['type']} | {row['text']} |" for row in section]
        else:
            lines += ["| flags | why | instead |" if role == "refused" else "| flags | why |"]
            lines += ["| --- | --- | --- |" if role == "refused" else "| --- | --- |"]
            for text in dict.fromkeys(row["text"] for row in section):
                names = " ".join(f"`{row['flag']}`" for row in section if row["text"] == text)
                lines.append(f"| {names} | {text.replace('; ', ' | ')} |")
        lines.append("")
    return "\n".join(lines)

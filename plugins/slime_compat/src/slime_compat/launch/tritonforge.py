"""TritonForge's own words: a line whose reward type is one of its kernel tasks becomes a run of slime-kernelbench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

RM_TYPES: Mapping[str, tuple[str, ...]] = {
    "kernelbench_multiturn": ("--plugin", "kernelbench", "--preset", "tritonforge"),
    "kernelbench": ("--plugin", "kernelbench", "--preset", "tritonforge", "--max-turns", "1"),
}
"""Words of `slime run` in place of a reward type."""
AGENT_ROLLOUT = "slime.rollout.agent_rollout.generate_rollout"
UNNEEDED: Mapping[str, str] = {
    "--agent-rollout-buffer-url": "dialogues are part of the rollout, without a server between",
    "--disable-rewards-normalization": "the estimator normalises a group's returns, as the buffer did",
    "--loss-mask-type": "a turn's sampled ids are trained, and nothing else",
    "--offload-old-actor": "the old policy's log-probs are the engine's own",
    "--offload-ref": "colocate offloads the reference too",
}
"""Flags that a kernel task has no use for here, and why."""


def unneeded(name: str, values: tuple[str, ...], rm_type: str) -> str:
    """Why a flag of a kernel task's line is not needed; empty where it is."""
    if name == "--max-turns" and rm_type == "kernelbench":
        return "the task kernelbench has one turn"
    if name == "--rollout-function-path" and values[:1] == (AGENT_ROLLOUT,):
        return "slime-kernelbench generates dialogues"
    return UNNEEDED.get(name, "")


def row_flags(names: Mapping[str, object]) -> Iterator[list[str]]:
    """Flags by which the rows of TritonForge's files are read, where the line has none."""
    if "--metadata-key" not in names:
        yield ["--metadata-key", "extra_info"]
    if "--apply-chat-template" not in names:
        yield ["--apply-chat-template"]

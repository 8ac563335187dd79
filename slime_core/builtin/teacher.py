"""A generated sample in; the log-probs of its response under a teacher that is an engine, on the sample, out.

An engine scores under the plain softmax, at temperature 1, so the sample must have been drawn at that temperature: the
student's log-probs are at the temperature of the draw, and a difference of the two would be no log-ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.errors import ConfigError, EngineError
from slime_core.types import Sample

if TYPE_CHECKING:
    from slime_core.context import Context


async def score_by_teacher(sample: Sample, ctx: Context) -> None:
    """Set ``sample.teacher_log_probs``, one a response token, turns of the environment included.

    Raises:
        ConfigError: CFG04 a sample that was drawn at another temperature than 1.
        EngineError: ENG83 the cluster started no teacher; or what `Engine.score` raises.
    """
    where = f"sample {sample.id}"
    teacher = ctx.engines.get("teacher")
    if teacher is None:
        raise EngineError(
            "there is no teacher engine",
            code="ENG83",
            where=where,
            why="train.teacher_place = engine, and the cluster started none",
            fix="--teacher-place trainer",
        )
    if sample.temperature != 1:
        raise ConfigError(
            f"{where} was drawn at temperature {sample.temperature}, the teacher scores at 1",
            code="CFG04",
            where="train.teacher_place, rollout.rollout_temperature",
            why="log-probs at two temperatures cannot be compared",
            fix="--teacher-place trainer   (scores at the draw's temperature), or --rollout-temperature 1",
        )
    if not sample.response_length:
        sample.teacher_log_probs = []
        return
    scored = await teacher.score(sample.tokens, sample.prompt_length)
    sample.teacher_log_probs = [float(value) for value in scored]

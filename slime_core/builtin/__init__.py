"""Core's own plugin, registered through the same hooks as any other and of the lowest rank.

slime_generate   one model turn a sample          slime_rollout    replies of the data (`sft_loss`, `dpo_loss`)
slime_reward     by rm_type                       slime_sampling   the config's
slime_advantage  `slime_core.algorithms`          slime_loss       policy_loss, sft_loss, dpo_loss
slime_sample_done  the teacher's log-probs, where it is an engine
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm, algorithms
from slime_core.builtin.losses import losses
from slime_core.data.chat import decode
from slime_core.data.conversations import ReplyEncoder
from slime_core.data.prompts import REPLIES
from slime_core.errors import ConfigError, DataError, EngineError
from slime_core.hookspecs import hookimpl
from slime_core.plugins.boundary import together
from slime_core.plugins.router import task_named
from slime_core.protocols import Estimator, Loss
from slime_core.types import Group, Prompt, Reward, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from slime_core.context import Context

RewardByType = Callable[[str, Sample, "Context"], Awaitable[Reward]]


class Core:
    """The plugin object. ``reward_by_type`` is set by whoever builds the registry of reward types."""

    reward_by_type: RewardByType

    @hookimpl
    async def slime_generate(self, group: Group, ctx: Context) -> Group:
        """One model turn a sample, all at once; finished samples stay as they are."""
        open_ones = [s for s in group.samples if s.status in (Status.PENDING, Status.ABORTED)]
        await together(ctx.generate(sample) for sample in open_ones)
        return group

    @hookimpl
    def slime_sampling(self, prompt: Prompt, ctx: Context) -> SamplingParams:
        """The config's sampling parameters."""
        if ctx.sampling is None:
            raise RuntimeError("the context has no sampling parameters")
        return ctx.sampling

    @hookimpl
    async def slime_sample_done(self, sample: Sample, ctx: Context) -> None:
        """With ``teacher_place = engine``: ``teacher_log_probs`` of a training sample, under the plain softmax."""
        train = ctx.config.train
        if train.teacher_load and train.teacher_place == "engine" and not ctx.evaluation:
            await score_by_teacher(sample, ctx)

    @hookimpl
    async def slime_reward(self, group: Group, ctx: Context) -> list[Reward]:
        """By name: the row's ``metadata.rm_type``, else the task's ``reward``, else ``reward.rm_type``.

        A sample whose generate function has set ``reward`` keeps it.
        """
        return await together(self._reward(sample, group, ctx) for sample in group.samples)

    async def _reward(self, sample: Sample, group: Group, ctx: Context) -> Any:
        if sample.reward is not None:
            return sample.reward
        return await self.reward_by_type(_rm_type(sample, group, ctx), sample, ctx)

    @hookimpl
    def slime_rollout(self, groups: list[Group], ctx: Context) -> list[Group]:
        """The data's replies become responses: of conversations and pairs, or the label and the end token."""
        for group in groups:
            for number, sample in enumerate(group.samples):
                replies = sample.metadata.pop(REPLIES, ())
                if not replies:
                    _respond_with_label(sample, group, ctx)
                elif not sample.response_length:
                    _respond_with_reply(sample, number, replies, ctx)
        return groups

    @hookimpl
    def slime_advantage(self) -> list[Estimator]:
        """Every algorithm of `slime_core.algorithms`."""
        return [_estimator(algorithm) for algorithm in algorithms().values()]

    @hookimpl
    def slime_loss(self) -> list[Loss]:
        """``policy_loss``: clipped ratio, KL and entropy. ``sft_loss``: negative log-prob. ``dpo_loss``: pairs."""
        return losses()


def _estimator(algorithm: Algorithm) -> Estimator:
    return Estimator(
        name=algorithm.name,
        fn=algorithm.advantages,
        needs=algorithm.needs,
        needs_when=algorithm.needs_when,
        terms=algorithm.terms,
        kl_in_reward=algorithm.kl_in_reward,
        whitens=algorithm.whitens,
    )


def _rm_type(sample: Sample, group: Group, ctx: Context) -> str:
    task = task_named(ctx.config, group.prompt.task, ctx.evaluation)
    name = sample.metadata.get("rm_type") or (task.reward if task else "") or ctx.config.reward.rm_type
    if not name:
        raise no_reward(group.prompt.task)
    return str(name)


def no_reward(task: str) -> ConfigError:
    """CFG04: nobody judges a task's samples."""
    return ConfigError(
        f"there is no reward for task '{task}'",
        code="CFG04",
        where="reward",
        why="no plugin, function or rm_type implements slime_reward",
        fix="reward.custom_rm_path=my_reward.py:reward\n"
        "reward.rm_type=TYPE   (with the plugin that provides the type: --plugin NAME)\n"
        "--plugin NAME   (a plugin that implements slime_reward)",
    )


def _respond_with_reply(sample: Sample, number: int, replies: list[dict[str, Any]], ctx: Context) -> None:
    """The reply of a conversation; of a pair, the chosen one for its first sample, whose reward is 1."""
    reply = replies[number if len(replies) > 1 else 0]
    ids, text = reply["tokens"], decode(ctx.tokenizer, reply["tokens"])
    sample.append_response(ids, [0.0] * len(ids), reply["loss_mask"], text=text)
    sample.status, sample.reward = Status.COMPLETED, float(len(replies) > 1 and number == 0)


def _respond_with_label(sample: Sample, group: Group, ctx: Context) -> None:
    if not isinstance(sample.label, str) or not sample.label:
        raise DataError(
            f"sample {sample.id} has label {sample.label!r}; a supervised stage trains on a text",
            code="DAT18",
            where=group.prompt.where or f"prompt '{group.id}'",
            fix="set data.label_key to the column of the answers",
        )
    if sample.response_length:
        return
    ids = ReplyEncoder(ctx.tokenizer).answer(decode(ctx.tokenizer, sample.tokens), sample.label)
    limit = ctx.config.rollout.rollout_max_context_len
    if limit and len(sample.tokens) + len(ids) > limit:
        raise DataError(
            f"sample {sample.id} has {len(sample.tokens)} prompt and {len(ids)} label tokens, more than {limit}",
            code="DAT26",
            where=group.prompt.where or f"prompt '{group.id}'",
            fix="raise rollout.rollout_max_context_len, or shorten the row",
        )
    sample.append_response(ids, log_probs=[0.0] * len(ids), text=sample.label)
    sample.status, sample.reward = Status.COMPLETED, 0.0


async def score_by_teacher(sample: Sample, ctx: Context) -> None:
    """Set ``sample.teacher_log_probs``, one a response token, turns of the environment included.

    An engine scores under the plain softmax, at temperature 1, so the sample must have been drawn at that: otherwise
    the difference to the student's log-probs, which are at the temperature of the draw, would be no log-ratio.

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
    scored = await ctx.score(teacher, sample, sample.prompt_length)
    sample.teacher_log_probs = [float(value) for value in scored]

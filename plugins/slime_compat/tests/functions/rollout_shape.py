"""Written as for THUDM/slime: a rollout and an evaluation around slime's own, and rewards that tell samples apart."""

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import eval_rollout, generate_rollout as default_generate_rollout
from slime.utils.async_utils import run


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    output = default_generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
    assert isinstance(output, RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput)
    return output


def evaluate(args, rollout_id, data_source, evaluation=True):
    output, aborted = run(eval_rollout(args, rollout_id))
    assert aborted == []
    return output


async def reward_func(args, sample, **kwargs):
    return float(sample.index % 4)

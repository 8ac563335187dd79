"""Functions of a whole run, written as for THUDM/slime: a background worker, an evaluation, logs that write args."""

import asyncio
import queue
import threading

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.types import Sample

RESULTS = queue.Queue()
WORKERS = []


async def work(args, data_buffer, params):
    """Take groups as they come, also those of later steps; an empty answer is no reason to end."""
    while True:
        for group in data_buffer.get_samples(1):
            RESULTS.put(await generate_and_rm_group(args, group, sampling_params=params.copy(), evaluation=False))
        await asyncio.sleep(0.001)


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    assert args.rollout_global_dataset
    params = GenerateState(args).sampling_params
    if not WORKERS:
        WORKERS.append(
            threading.Thread(target=lambda: asyncio.run(work(args, data_buffer, params)), daemon=True),
        )
        WORKERS[0].start()
    groups = [RESULTS.get() for _ in range(args.rollout_batch_size)]
    args.rollouts = getattr(args, "rollouts", 0) + 1
    return RolloutFnTrainOutput(samples=groups, metrics={})


async def reward(args, sample, **kwargs):
    return float(sample.index % 2 + args.bonus)


def evaluate(args, rollout_id, data_source, evaluation=False):
    samples = [Sample(index=i, prompt="p", tokens=[1, 2], response_length=1, reward=0.25) for i in range(3)]
    output = {"mine": {"rewards": [0.25, 0.75, 1.0], "truncated": [False, True, False], "samples": samples}}
    return RolloutFnEvalOutput(data=output, metrics={"rollouts": getattr(args, "rollouts", 0)})


def fail(args, samples, **kwargs):
    raise KeyError(samples[0].id)


def keep(args, samples, **kwargs):
    return samples[0].group_index % 2 == 0


def process_all(args, all_groups, data_source):
    args.groups_seen = getattr(args, "groups_seen", 0) + len(all_groups)


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    print(f"step {rollout_id} trained {len(samples)} samples, saw {args.groups_seen} groups", flush=True)
    return True

"""Small groups with known figures."""

import pytest

from slime_core.types import Group, Prompt, Sample, Status


def make_group(position, rewards, lengths, *, task="default", version=3, status=Status.COMPLETED, terms=None):
    """One group of two prompt tokens and responses of the given lengths."""
    prompt = Prompt(id=f"main/{position}", position=position, task=task, prompt=f"p{position}", tokens=[1, 2])
    samples = []
    for j, (reward, length) in enumerate(zip(rewards, lengths)):
        sample = Sample(id=f"main/{position}-{j}", task=task, prompt=prompt.prompt, tokens=[1, 2], label="L")
        sample.append_response([5] * length, log_probs=[-0.5] * length, text=f"r{position}{j}", version=version)
        sample.reward, sample.status = reward, status
        if terms is not None:
            sample.metadata["reward_terms"] = terms
        samples.append(sample)
    return Group(prompt=prompt, samples=samples, rollouts={j: [j] for j in range(len(samples))})


@pytest.fixture
def group():
    return make_group

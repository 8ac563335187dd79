"""Gradients summed and weights gathered beside passes change nothing: not a step, nor whatever reads weights after it.

A step changes a rank's share of each bucket; the rest is another rank's until it is gathered. Log-probs, a reference,
what engines get, checkpoints, verification: each comes right after a step, and is compared to the bit with ranks that
gather at once. Buckets are small, so that every layer has its own.
"""

import numpy as np
import pytest
from megatron_ranks import PIPELINE, Ranks, answer, equal, mimo, run_ranks
from splits import rank_batch_of

from slime_core.testing import tiny_model

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = [pytest.mark.integration, pytest.mark.nightly]

INTERLEAVED = PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1}
AHEAD = PIPELINE | {"enable_mtp_training": True}
LAYOUTS = {
    "data": (2, {}, False),
    "pipeline": (4, PIPELINE, True),
    "interleaved": (4, INTERLEAVED, False),
    "ahead": (4, AHEAD, False),
}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}
ROLES = ("reference", "policy")
TRAIN = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "kl_loss_coef": 0.05, "clip_grad": 0.0, "lr": 1e-2}
"""No clipping: the sum of squares over other shards rounds otherwise, and would be in every weight."""


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, zygote, tmp_path_factory):
    """What the ranks of a layout found; an output matrix of its own is one that no module's pass waits for."""
    root = tmp_path_factory.mktemp("root")
    world, flags, tied = LAYOUTS[request.param]
    write = mimo if request.param == "ahead" else tiny_model
    write(root / "model", tied=tied, layers=4 if request.param == "interleaved" else 2)
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), with_and_without, world, root, world, flags)


def test_steps_and_whatever_reads_weights_are_those_of_ranks_that_wait(ranks):
    for found in ranks:
        assert found["wrong"] == []
        assert found["compared"] > 15


def test_weights_of_other_ranks_were_pending_and_buckets_were_several(ranks):
    for found in ranks:
        assert found["ungathered"]
        assert found["micro_batches"] > 1
    assert max(found["buckets"] for found in ranks) > 3


def with_and_without(rank, root, world, flags):
    """The same things twice, in the order of a run."""
    plain = run(Ranks(root, "model", flags, rank, world, **TRAIN), root / "plain")
    ranks = Ranks(root, "model", flags | OVERLAPPED, rank, world, **TRAIN)
    return {
        "wrong": differences(run(ranks, root / "overlapped"), plain),
        "compared": len(plain.found),
        "micro_batches": len(ranks.worker.packs(rank_batch_of(ranks.worker, ranks.batch))[0]),
        "buckets": sum(len(ddp.bucket_groups) for ddp in ranks.worker.actor.wrapped),
        "ungathered": ungathered(ranks),
    }


class Notes:
    """What one worker did: arrays and tensors by name, as the other has to have them to the bit."""

    def __init__(self, ranks):
        self.ranks, self.found, self.metrics = ranks, {}, []

    def step(self, count=1):
        """Steps, with their figures."""
        for _ in range(count):
            self.metrics.append(self.ranks.worker.step(self.ranks.batch))

    def scores(self, name):
        """Log-probs of the reference, for which the policy stands aside, and of the policy."""
        for number, role in enumerate(ROLES):
            columns = self.ranks.worker.score(self.ranks.batch, frozenset({role}))[role]
            self.found[f"{name} {number} {role}"] = columns["log_probs"]
        columns = self.ranks.worker.score(self.ranks.batch, frozenset({"values"}))
        self.found[f"{name} values"] = columns["values"]["values"]

    def published(self, name):
        """Weights as an engine gets them."""
        tensors = self.ranks.worker.publish(1).tensors
        self.found |= {f"{name} {key}": tensor.numpy() for key, tensor in tensors.items()}

    def everywhere(self, name):
        """Whether all data-parallel ranks have the same parameters once they are settled."""
        for learner in self.ranks.worker.learners():
            learner.settle()
            for number, parameter in enumerate(learner.stage.parameters()):
                self.found[f"{name} {number}"] = parameter.detach().numpy().copy()


def run(ranks, path):
    """Everything that reads weights, each right after a step has changed this rank's share of them."""
    notes, worker = Notes(ranks), ranks.worker
    notes.step()
    notes.published("first")
    notes.step(2)
    notes.scores("third")
    notes.step()
    path.mkdir(exist_ok=True)
    notes.found["fingerprint"] = np.frombuffer(ranks.worker.fingerprint().encode(), np.uint8)
    ranks.save(path / "saved")
    notes.step()
    notes.published("fifth")
    notes.step()
    ranks.restore(path / "saved")
    notes.step()
    notes.published("fifth again")
    notes.step()
    worker.begin(worker.stage)  # its reference is the policy of now
    notes.scores("begun")
    notes.step()
    worker.release({"parameters"})
    notes.found["verified"] = np.array(worker.verify(ranks.batch)["gradient_error"] < 1e-4)
    notes.step()
    notes.found["verified again"] = np.array(worker.verify(ranks.batch)["gradient_error"] < 1e-4)
    worker.export(path / "exported")
    notes.everywhere("last")
    return notes


def differences(mine, theirs):
    """Names of what is another, and the figures that are far apart."""
    same = mine.found.keys() == theirs.found.keys()
    wrong = [name for name in mine.found if not same or not np.array_equal(mine.found[name], theirs.found[name])]
    for one, other in zip(mine.metrics, theirs.metrics, strict=True):
        far = [name for name in other if abs(one[name] - other[name]) > 1e-5 * max(1, abs(other[name]))]
        wrong += [f"{name}: {one[name]} and {other[name]}" for name in far]
    return wrong


def ungathered(ranks):
    """Whether a rank's weights are really another's after a step that nothing has waited for."""
    ranks.step()
    before = [p.detach().clone() for p in ranks.worker.actor.stage.parameters()]
    ranks.worker.actor.settle()
    return not equal(before, list(ranks.worker.actor.stage.parameters()))


if __name__ == "__main__":
    answer(with_and_without)

"""Ranks that sum gradients and gather weights beside their passes, against ranks that wait; each writes what it found.

    python overlap_main.py RANK WORLD ROOT MODEL '{"pipeline_model_parallel_size": 2}'

Buckets are small, so that every layer has its own. The ranks do the same things twice, in the order of a run.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests" / "unit" / "trainers")]

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}
ROLES = ("reference", "policy")
TRAIN = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "kl_loss_coef": 0.05, "clip_grad": 0.0, "lr": 1e-2}
"""No clipping: the sum of squares over other shards rounds otherwise, and would be in every weight."""


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


def ungathered(ranks, path):
    """Whether a rank's weights are really another's after a step that nothing has waited for."""
    ranks.step()
    before = [p.detach().clone() for p in ranks.worker.actor.stage.parameters()]
    ranks.worker.actor.settle()
    after = ranks.worker.actor.stage.parameters()
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


if __name__ == "__main__":
    from cpu import cpu_redirect
    from saving_main import Ranks
    from splits import rank_batch_of

    torch.set_num_threads(1)
    number, count, where, model = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    with cpu_redirect():
        flags = json.loads(sys.argv[5])
        plain = run(Ranks(where, model, flags, number, count, **TRAIN), where / "plain")
        ranks = Ranks(where, model, flags | OVERLAPPED, number, count, **TRAIN)
        mine = run(ranks, where / "overlapped")
        found = {
            "wrong": differences(mine, plain),
            "compared": len(plain.found),
            "micro_batches": len(ranks.worker.packs(rank_batch_of(ranks.worker, ranks.batch))[0]),
            "buckets": len(ranks.worker.actor.ddp.bucket_groups),
            "ungathered": ungathered(ranks, where),
        }
    (where / f"found-{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()

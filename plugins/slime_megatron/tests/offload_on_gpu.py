"""One rank on a GPU, its optimizer on the GPU or in main memory: steps, memory, a checkpoint, and another's.

python offload_on_gpu.py ROOT CASE FLAGS [OTHER]      OTHER: the case whose checkpoint it goes on from
"""

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests" / "unit" / "trainers")]


def made(root, flags):
    """A worker and its batch; PPO, whose critic has a float32 head beside other weights."""
    from saving_main import PPO, config_of, with_columns

    from slime_core.plugins import load_plugins
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.worker import MegatronWorker

    config = config_of(root / "model", flags, dtype="bfloat16", clip_grad=0.05, weight_decay=0.1, **PPO)
    worker = MegatronWorker(config, load_plugins(config), ModelFolder.open(root / "model"), 0, 1, "cuda:0", None)
    worker.begin(config)
    return worker, with_columns(PPO)


def weights(worker):
    """Every parameter, on the host."""
    return [p.detach().float().cpu() for learner in worker.learners() for p in learner.stage.parameters()]


def kept(worker):
    """Every master and moment, on the host."""
    from slime_megatron.masters import MOMENTS, masters

    found = []
    for learner in worker.learners():
        for master in masters(learner.optimizer):
            found += [read.cpu() for read in (master.weights(), *(master.moment(name) for name in MOMENTS))]
    return found


def parked(worker):
    """Whether memory becomes free when all state goes, and the state is the same when it is back."""
    before, held = worker.fingerprint(), torch.cuda.memory_allocated()
    everything = {"parameters", "optimizer", "gradients"}
    worker.release(everything)
    free = held - torch.cuda.memory_allocated()
    worker.reacquire(everything)
    return [free, worker.fingerprint() == before]


def main(root, case, flags, other):
    """See above."""
    worker, batch = made(root, flags)
    metrics = [worker.step(batch) for _ in range(2)]
    torch.cuda.synchronize()
    found = {
        "memory": torch.cuda.memory_allocated(),
        "parameters": sum(p.numel() for learner in worker.learners() for p in learner.stage.parameters()),
        "metrics": metrics,
        "places": sorted({str(t.device.type) for learner in worker.learners() for t in learner.states()}),
    }
    for learner in worker.learners():
        for one in learner.optimizer.chained_optimizers:
            for inner in getattr(one.optimizer, "cpu_optimizers", ()):
                locked = [p.is_pinned() for group in inner.param_groups for p in group["params"]]
                found["locked"] = found.get("locked", True) and all(locked)
    torch.save([weights(worker), kept(worker)], root / f"{case}.pt")
    worker.save(root / case)
    worker.staging.writing.result()
    found["fingerprint"] = worker.fingerprint()
    found["parked"] = parked(worker)
    worker.step(batch)
    torch.save(weights(worker), root / f"{case}-third.pt")
    if other:
        worker.restore(root / other)
        mine, theirs = kept(worker), torch.load(root / f"{other}.pt")[1]
        found["restored"] = [worker.fingerprint(), all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))]
        worker.step(batch)
        torch.save(weights(worker), root / f"{case}-after-{other}.pt")
    (root / f"{case}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), *(sys.argv[4:] or [""]))

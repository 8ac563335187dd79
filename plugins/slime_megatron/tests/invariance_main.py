"""Ranks of one layout: each setting of the tests of invariance, cut into micro-batches of several sizes, verified.

    python invariance_main.py RANK MODEL OUT.json WORLD '{"tensor_model_parallel_size": 2}' SETTING ...

Rank 0 writes the errors against the slow way in float64, and the gradients' norm, by setting and size.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from cpu import cpu_redirect

sys.path.append(str(Path(__file__).parents[3] / "tests" / "unit" / "trainers"))
SIZES = (17, 40, 10_000)


def main(rank: int, model: str, out: Path, world: int, flags: dict, cases: list) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with cpu_redirect():
        import splits
        import trainer_bench as made

        from slime_core.config.schema import Config
        from slime_core.plugins import load_plugins
        from slime_core.weights.folder import ModelFolder
        from slime_megatron.worker import MegatronWorker

        def config(**train):
            given = {
                "rollout": {"hf_checkpoint": model},
                "plugins": ("models",),
                "train": {"dtype": "float32", **train},
            }
            return Config.model_validate(given | {"megatron": flags})

        first = config()
        meeting = str(out.with_suffix(".meet"))
        worker = MegatronWorker(first, load_plugins(first), ModelFolder.open(model), rank, world, "cpu", meeting)
        found = {}
        for case in cases:
            for size in SIZES:
                worker.begin(config(max_tokens_per_gpu=size, **splits.SETTINGS[case]))
                batch = splits.with_roles(made.batch_of(groups=2, rollouts=3))
                answer = worker.verify(batch)
                found[f"{case}-{size}"] = {
                    "micro_batches": len(worker.packs(splits.rank_batch_of(worker, batch))[0]),
                    **{name: answer[name] for name in ("float64", "gradient_error", "loss_error")},
                }
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    number, folder, answer, count, table, *names = sys.argv[1:]
    main(int(number), folder, Path(answer), int(count), json.loads(table), names)

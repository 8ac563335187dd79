"""Ranks of one layout over every family's model: log-probs, gradients and gathered weights against transformers'.

    python families_main.py ROOT WORLD '{"tensor_model_parallel_size": 2}' FAMILY ...

DEVICE (cpu), DTYPE (float32) and COMPILE (auto) are variables of the environment; GPUs are taken in the order of ranks.
Writes ROOT/answers-RANK.json: the family's worst relative errors.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from cpu import cpu_redirect
from family_models import WITHIN, loss, packs

DEVICE, DTYPE = os.environ.get("DEVICE", "cpu"), os.environ.get("DTYPE", "float32")


@dataclass
class Folder:
    """What a stage is built from."""

    path: Path
    init_weights: str = "load"

    @property
    def config(self):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path)

    def tensors(self):
        from slime_core.weights.shards import Shards

        return Shards.open(self.path)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The error's norm over the tensor's."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


def check(name: str, root: Path, world: int, flags: dict) -> dict:
    """One family on this rank."""
    from slime_convert.bridge import join, shard
    from slime_core.config.load import load_config
    from slime_core.protocols import Loss
    from slime_core.trainers.optimizer_step import LossSums
    from slime_megatron.learner import MegatronLearner
    from slime_megatron.model import build_model
    from slime_megatron.passes import speaks, totals
    from slime_megatron.settings import build, settings
    from slime_models.families import BRIDGES

    folder = Folder(root / name / "model")
    bridge = BRIDGES[folder.config.model_type]
    train = load_config(None, ["--dtype", DTYPE, "train.compile=" + os.environ.get("COMPILE", "auto")]).train
    table = {name: value for name, value in flags.items() if name not in WITHIN}
    made = settings(bridge, folder.config, table, train, world, DEVICE)
    made = replace(made, transformer={**made.transformer, **{n: v for n, v in flags.items() if n in WITHIN}})
    model = build_model(made, bridge, folder, torch.device(DEVICE))
    learner = MegatronLearner(model.stage)
    learner.wrap(build(made))
    model.learn(learner.ddp)
    model.passes.chunk = 4
    from megatron.core import parallel_state

    mine = parallel_state.get_data_parallel_rank()
    micros = packs() if made.layout.dp == 1 else [packs()[mine]]
    expected = torch.load(root / name / "expected.pt")
    wanted = expected["rows"] if made.layout.dp == 1 else [expected["rows"][mine]]
    answer = {"log_probs": 0.0, "entropy": 0.0, "gradients": 0.0, "tensor": "", "gathered": []}
    for got, want in zip(model.passes.scores(micros), wanted):
        for key, a, b in zip(("log_probs", "entropy"), got, want, strict=True):
            answer[key] = max(answer[key], relative(a, b))
    learner.forget()
    sums = LossSums(None, torch.device(DEVICE))
    model.passes.backward(micros, Loss(name="test", fn=loss), train, sums)
    answer["loss"] = abs(totals(sums)[0]["loss"] - float(expected["loss"])) / abs(float(expected["loss"]))
    gradients = Folder(root / name / "gradients").tensors()
    for key, held in model.tensors.held.items():
        if held.entry.megatron.endswith("expert_bias"):
            continue
        whole = join(held.entry, [gradients[n] for n in held.entry.hf], made.sizes)
        error = relative(held.tensor.main_grad, shard(held.entry, whole, held.group.rank(), held.group.size()))
        if error > answer["gradients"]:
            answer["gradients"], answer["tensor"] = error, key
    stored = folder.tensors()
    for source in model.tensors.sources():
        whole = source.gather()
        if dist.get_rank() == 0:
            answer["gathered"] += [
                p.name for p in source.parts if not torch.equal(p.cut(whole).cpu(), stored[p.name].to(whole.dtype))
            ]
            answer["count"] = answer.get("count", 0) + len(source.parts)
    answer["speaks"] = speaks()
    answer["copied"] = copied(model.stage)
    return answer


def copied(stage) -> list:
    """Layers whose experts are multiplied from a copy of their weights."""
    from slime_megatron.experts import GroupedExperts, stacked

    found = []
    for name, module in stage.named_modules():
        if isinstance(module, GroupedExperts):
            for linear in ("linear_fc1", "linear_fc2"):
                weights = [getattr(expert, linear).weight for expert in module.local_experts]
                found += [f"{name}.{linear}"] if stacked(weights).data_ptr() != weights[0].data_ptr() else []
    return found


def main(rank: int, root: Path, world: int, flags: dict, names: list) -> None:
    torch.set_num_threads(1)
    with cpu_redirect() if DEVICE == "cpu" else nullcontext():
        from slime_core.trainers.process_group import join_group
        from slime_megatron.layout import Layout
        from slime_megatron.state import start

        join_group(rank, world, DEVICE, root / "rendezvous")
        start(Layout.of({n: v for n, v in flags.items() if n not in WITHIN}, world), 0)
        answers = {name: check(name, root, world, flags) for name in names}
    (root / f"answers-{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    where, count, table, number, *families = sys.argv[1:]  # a rank's number, or all: they are started from here
    arguments = (Path(where), int(count), json.loads(table), families)
    if number == "all":
        torch.multiprocessing.start_processes(main, arguments, nprocs=int(count), start_method="spawn")
    else:
        main(int(number), *arguments)

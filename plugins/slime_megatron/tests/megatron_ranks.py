"""What ranks of Megatron tests share: a config and a batch, a worker of a layout, and the way a test starts its ranks.

A test file is also the program of its ranks: `run_ranks` starts it once a rank, and there it calls `answer`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from cuda_on_cpu import cpu_redirect

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[2] / "tests" / "unit" / "trainers"))

import trainer_bench  # noqa: E402

from slime_core.types import MicroBatch  # noqa: E402

PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "kl_loss_coef": 0.05}
PIPELINE, TENSOR = {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
EVERYTHING = {"parameters", "optimizer", "gradients"}


def rank_command(job, rank, root, *words):
    """The command of a rank that does a job: a function ``job(rank, root, *words)`` of a test file."""
    return [job.__code__.co_filename, job.__name__, rank, root, json.dumps(words)]


def run_ranks(zygote, log, job, world, root, *words, path=(), **env):
    """Do a job on ``world`` ranks at the same time; return what each of them returned."""
    zygote.together(log, [rank_command(job, rank, root, *words) for rank in range(world)], path=path, **env)
    return [json.loads((root / f"{job.__name__}-{rank}.json").read_text()) for rank in range(world)]


def answer(*jobs):
    """Do the job of this process's command line, and store what it returns for `run_ranks`."""
    name, rank, root, words = sys.argv[1:]
    torch.set_num_threads(1)
    with cpu_redirect():
        returned = {job.__name__: job for job in jobs}[name](int(rank), Path(root), *json.loads(words))
    (Path(root) / f"{name}-{rank}.json").write_text(json.dumps(returned))
    if dist.is_initialized():
        dist.destroy_process_group()


def config_of(folder, megatron=None, plugins=("models",), **train):
    """A stage's config.

    AdamW divides by the size of the gradient: with its usual epsilon, rounding of a gradient near 0 would be compared.
    """
    from slime_core.config.schema import Config

    sections = {"rollout": {"hf_checkpoint": str(folder)}, "seed": 3, "plugins": plugins, "megatron": megatron or {}}
    base = {"dtype": "float32", "lr": 1e-3, "adam_eps": 1e-3, "max_tokens_per_gpu": 40}
    return Config.model_validate(sections | {"train": base | train})


def make_worker(config, rank, world, meeting, device="cpu"):
    """A rank's worker; ranks meet in the file ``meeting``."""
    from slime_core.plugins import load_plugins
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.worker import MegatronWorker

    folder = ModelFolder.open(config.rollout.hf_checkpoint)
    return MegatronWorker(config, load_plugins(config), folder, rank, world, device, meeting if world > 1 else None)


class Ranks:
    """This rank's worker of a layout and a batch, in a process that may have held another before."""

    def __init__(self, root, name, megatron, rank, world, meeting="meeting", device="cpu", **train):
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if dist.is_initialized() and dist.get_world_size() != world:
            dist.destroy_process_group()
        config = config_of(root / name, megatron, **train)
        self.worker = make_worker(config, rank, world, root / meeting, device)
        self.worker.begin(config)
        batch = trainer_bench.batch_of()
        old = batch.columns["rollout_log_probs"]
        columns = {"old_policy": old, "reference": old - 0.1}
        if "critic_lr" in train:
            columns |= {"values": old * 0, "returns": old}
        self.batch = replace(batch, columns=batch.columns | columns)

    def step(self):
        """A step, then the fingerprint."""
        self.worker.step(self.batch)
        return self.worker.fingerprint()

    def save(self, path):
        """Save, and wait until every rank has; the names of this rank's files."""
        self.worker.save(path)
        marks = self.worker.staging.writing.result()
        self.worker.barrier()
        return sorted(marks)

    def restore(self, path):
        """Restore, then the fingerprint."""
        self.worker.restore(path)
        return self.worker.fingerprint()


class CallerThread:
    """In the place of `TorchThread`: what stands in for devices holds for the thread that entered it."""

    def call(self, fn, *args, **kwargs):
        """As `TorchThread.call`."""
        return fn(*args, **kwargs)

    async def run(self, fn, *args, **kwargs):
        """As `TorchThread.run`."""
        return fn(*args, **kwargs)


def copies(tensors):
    """The tensors as they are now, on the host."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def weights(worker):
    """Every parameter of a rank, policy and critic."""
    return copies(parameter for learner in worker.learners() for parameter in learner.stage.parameters())


def optimizer_states(worker):
    """Every master and moment of a rank."""
    from slime_megatron.masters import MOMENTS, masters

    every = [master for learner in worker.learners() for master in masters(learner.optimizer)]
    return copies(tensor for one in every for tensor in (one.weights(), *map(one.moment, MOMENTS)))


def equal(tensors, others):
    """Whether all tensors are the same, to the bit."""
    return len(tensors) == len(others) and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def offloaded(worker):
    """Bytes that are left on the device when all state is away, and whether the optimizer's state comes back."""
    before = copies(worker._tensors("optimizer"))
    worker.offload.to_host(EVERYTHING)
    left = sum(tensor.untyped_storage().nbytes() for kind in EVERYTHING for tensor in worker._tensors(kind))
    worker.offload.to_device(EVERYTHING)
    return [left, equal(before, list(worker._tensors("optimizer")))]


def mixture(folder, hidden=64, width=16, dense=(0,)):
    """A mixture of experts, each so wide, but in ``dense`` layers, with the tokenizer of the tests' small dense model."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from slime_core.testing import tiny_model

    tiny_model(folder, hidden=hidden)
    source = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_id")
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        **{name: source[name] for name in (*names, "pad_token_id")},
        bos_token_id=None, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=256,
        mlp_only_layers=[*dense], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def mimo(folder, **shape):
    """The tests' small dense model with a layer that predicts further ahead, as MiMo stores it."""
    from safetensors.torch import load_file, save_file

    from slime_core.testing import tiny_model

    stored = load_file(tiny_model(folder, "qwen2", **shape) / "model.safetensors")
    hidden = stored["model.norm.weight"].shape[0]
    last = {name: tensor for name, tensor in stored.items() if name.startswith("model.layers.1.")}
    stored |= {name.replace("model.layers.1.", "model.mtp_layers.0."): t.clone() for name, t in last.items()}
    norms, draw = ("token_layernorm", "hidden_layernorm", "final_layernorm"), torch.Generator().manual_seed(0)
    stored |= {f"model.mtp_layers.0.{name}.weight": torch.ones(hidden) for name in norms}
    stored["model.mtp_layers.0.input_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mimo", "num_nextn_predict_layers": 1}))
    return folder


def micro_batch(lengths, responses, seed, vocab=99):
    """Sequences whose last tokens, so many of each, are responses; each has a column and a weight of its own."""
    draw = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = draw.integers(3, vocab, cu[-1])
    predict = np.concatenate([np.arange(end - r, end) - 1 for end, r in zip(cu[1:], responses, strict=True)])
    return MicroBatch(
        samples=np.arange(len(lengths)),
        tokens=tokens,
        position_ids=np.concatenate([np.arange(n) for n in lengths]),
        cu_seqlens=cu,
        prefix=np.full(len(lengths), -1, np.int32),
        predict=predict,
        target=tokens[predict + 1],
        response=np.arange(len(predict)),
        weight=np.linspace(0.5, 1.5, len(predict), dtype=np.float32),
        columns={"scale": draw.normal(size=len(predict)).astype(np.float32)},
    )

"""Every family through megatron-core at every form of parallelism, against transformers: numbers, gradients, weights.

As a program this is a rank of one layout, with a number or ``all``, which starts them:

    python test_families.py ROOT WORLD '{"tensor_model_parallel_size": 2}' all FAMILY ...

DEVICE (cpu), DTYPE (float32) and COMPILE (auto) are variables of the environment; GPUs are taken in the order of ranks.
Each writes ROOT/answers-RANK.json: the families' worst relative errors.
"""

import json
import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from adapted import adapted
from cuda_on_cpu import cpu_redirect
from megatron_ranks import TENSOR, micro_batch
from safetensors.torch import load_file, save_file
from seeing import SEES, TOKENS, arrays_of, inputs, seeing_packs

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-families")]

DEVICE, DTYPE = os.environ.get("DEVICE", "cpu"), os.environ.get("DTYPE", "float32")
VALUES, GRADIENTS = 1e-5, 1e-4  # relative, of a tensor's norm; float32 gives 1e-6 and less
COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
SIGMOID = {"num_local_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid", "use_qk_norm": True}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 8,
    "head_dim": 4,
}
HYBRID = {
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-3,
}
SIGHT = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
WINDOWS = {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
DEEPSTACK = {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
FEW = {"num_attention_heads": 4, "num_key_value_heads": 2}
PICTURES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
FAMILIES = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2-tied": {"model_type": "qwen2", "head_dim": 4, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen3_next": {"model_type": "qwen3_next", **HYBRID, "mlp_only_layers": [1]},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "rope_parameters": SECTIONS, **FEW, "vision_config": SIGHT | WINDOWS},
    "qwen3_vl": {"model_type": "qwen3_vl", "rope_parameters": SECTIONS, "vision_config": SIGHT | DEEPSTACK},
    "qwen3_5": {"model_type": "qwen3_5", **HYBRID, "tie_word_embeddings": True, "vision_config": PICTURES},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", **HYBRID, "vision_config": PICTURES},
    "glm4": {"model_type": "glm4"},
    "glm4_moe": {"model_type": "glm4_moe", **ROUTED, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **LATENT, "rms_norm_eps": 1e-3},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, "rope_parameters": YARN, "rms_norm_eps": 1e-3},
    "kimi_k2": {"model_type": "kimi_k2", **LATENT, "n_group": 1, "rope_parameters": YARN | {"beta_fast": 1.0}},
    "mimo": {"model_type": "mimo", "attention_bias": True, "rope_theta": 640000},
    "minimax_m2": {"model_type": "minimax_m2", **SIGMOID, "rotary_dim": 4, "rope_theta": 1e4},
}
SPARSE = (
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "minimax_m2",
)
MOST = tuple(name for name in FAMILIES if name != "qwen3_5")
"""Where it would prove nothing that others do not."""
GROUPED = {"moe_grouped_gemm": True}
WITHIN = {"gradient_accumulation_fusion": True}  # the default on GPUs, no flag: the ranks set it
INTERLEAVED = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
DEEP = "deep"  # where families have four layers, for two chunks of two stages
HALVES = {"make_vocab_size_divisible_by": 2}  # ids on both ranks; else the second has filling alone
LAYOUTS = {  # ranks, flags, families
    "one": (1, {}, tuple(FAMILIES)),
    "tensor": (2, TENSOR, tuple(FAMILIES)),
    "tensor, gradients within products": (2, TENSOR | WITHIN | HALVES, MOST),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}, MOST),
    "pipeline, interleaved": (2, INTERLEAVED, MOST),
    "pipeline, interleaved, tensor": (4, INTERLEAVED | TENSOR, MOST),
    "context": (2, {"context_parallel_size": 2, "use_distributed_optimizer": False}, MOST),
    "expert": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}, SPARSE),
    "expert tensor": (2, {"expert_tensor_parallel_size": 2, "use_distributed_optimizer": False}, SPARSE),
    "tensor, whole experts": (
        2,
        TENSOR | {"expert_tensor_parallel_size": 1, "use_distributed_optimizer": False},
        SPARSE,
    ),
    "grouped": (1, GROUPED, SPARSE),
    "grouped tensor": (2, GROUPED | TENSOR, SPARSE),
    "grouped tensor, expert": (
        2,
        GROUPED | WITHIN | TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        SPARSE,
    ),
    "grouped tensor, expert, expert tensor": (
        4,
        GROUPED | TENSOR | {"expert_model_parallel_size": 2, "use_distributed_optimizer": False},
        SPARSE,
    ),
}
LORA = {"lora": True}  # no flag: an adapter learns, over a base that is the model less what it adds
ADAPTED = ("qwen2-tied", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_5_moe", "glm4", "deepseek_v3", "minimax_m2")
"""Families of layers in which adapters lie differently."""
LAYOUTS |= {
    "adapter": (1, LORA, ADAPTED),
    "adapter, tensor, grouped": (2, LORA | GROUPED | TENSOR, ADAPTED),
    "adapter, tensor without sequence": (2, LORA | TENSOR | {"sequence_parallel": False}, ADAPTED[:1]),
    "adapter, tensor, expert": (
        2,
        LORA | GROUPED | WITHIN | TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        ADAPTED[1:3],
    ),
    "adapter, pipeline, interleaved, recomputed": (
        2,
        LORA | INTERLEAVED | {"recompute_granularity": "full"},
        ADAPTED[:2],
    ),
}
RARE = (
    "adapter",
    *("tensor, gradients within products", "pipeline", "pipeline, interleaved, tensor", "tensor, whole experts"),
    *("grouped", "grouped tensor", "grouped tensor, expert", "grouped tensor, expert, expert tensor"),
)
"""Layouts whose parts other layouts prove one by one."""

MIXTURES = ("qwen3_moe", "qwen3_5_moe", "deepseek_v3", "minimax_m2")
BY_DAY = {
    "pipeline, interleaved": ("llama", "qwen2-tied", "qwen3_moe", "qwen3_next", "qwen3_vl", "deepseek_v3"),
    "context": ("llama", "qwen3_moe", "qwen3_next", "qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "deepseek_v3"),
    "expert": MIXTURES,
    "expert tensor": MIXTURES,
    "adapter, tensor, grouped": tuple(name for name in ADAPTED if name not in ("qwen3_5_moe", "minimax_m2")),
}
"""Families of layers that such a layout cuts differently; at night all of the layout."""
RUNS = [pytest.param(name, BY_DAY.get(name, LAYOUTS[name][2]), id=name) for name in LAYOUTS if name not in RARE]
RUNS += [
    pytest.param(name, LAYOUTS[name][2], id=f"{name}, all", marks=pytest.mark.nightly) for name in (*RARE, *BY_DAY)
]

COMPILED = {"one": {"TORCH_COMPILE_DISABLE": "0"}}
"""Where Megatron's own functions are compiled; elsewhere that takes ten times as long as all the rest."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What transformers makes of every family."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        draw(name, root)
    return root


@pytest.mark.parametrize(("layout", "names"), RUNS)
def test_log_probs_gradients_and_weights_are_those_of_transformers(models, zygote, tmp_path, layout, names):
    world, flags, _ = LAYOUTS[layout]
    if "interleaved" in layout:
        models = models / DEEP
        for name in names:
            if not (models / name).exists():
                draw(name, models, num_hidden_layers=4)
    (models / "rendezvous").unlink(missing_ok=True)
    ranks = [[__file__, models, world, json.dumps(flags), rank, *names] for rank in range(world)]
    zygote.together(tmp_path, ranks, **COMPILED.get(layout, {}))
    for rank in range(world):
        answers = json.loads((models / f"answers-{rank}.json").read_text())
        assert set(answers) == set(names)
        for name, found in answers.items():
            where = f"{name}, rank {rank}: {found}"
            assert max(found["log_probs"], found["entropy"], found["loss"]) < VALUES, where
            assert 0 < found["gradients"] < GRADIENTS, where
            assert found["gathered"] == [], where
            assert found["copied"] == [] or not flags.get("use_distributed_optimizer", True), where
            if rank == 0:
                assert found["count"] > 20, where


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fingerprint_sums_the_parameters_and_router_biases_of_transformers(models, name):
    from slime_core.trainers.fsdp.experts import router_biases
    from slime_core.weights.build import skeleton
    from slime_models.families import BRIDGES

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core imports
        from slime_megatron.adapter_entries import spots
    config = Folder(models / name / "model").config
    bridge = BRIDGES[config.model_type]
    tensors = SimpleNamespace(sizes=bridge.sizes(config), parameter_name=bridge.parameter_name)
    summed = {spot.name: spot.shape for entry in bridge.entries(config) for spot in spots(entry, tensors)}
    model = skeleton(config)
    learned = dict(model.named_parameters()) | router_biases(model)
    assert summed == {key: tuple(tensor.shape) for key, tensor in learned.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_embedded_engine_takes_what_megatron_gathers_as_transformers_does(models, name):
    from slime_core.engines.local.twin import Twin
    from slime_core.types import WeightUpdate
    from slime_core.weights.build import load_converted

    folder = Folder(models / name / "model")
    twin = Twin(folder.config, torch.float32, "cpu", False)
    twin.load(WeightUpdate(version=1, epoch=0, transport="tensors", tensors=dict(folder.tensors())))
    loaded = load_converted(folder.path, folder.config, "float32", "eager", False).state_dict()
    served = twin.model.state_dict()
    assert served.keys() == loaded.keys()
    assert [key for key, tensor in loaded.items() if not torch.equal(served[key], tensor)] == []


ENTROPY = 0.1  # its weight in the loss


def loss(log_probs, entropy, columns, train):
    """Of each response token, by a column of its own, so that every row's gradient is another."""
    return columns["scale"] * (ENTROPY * entropy - log_probs), {}


def packs(config):
    """Two micro-batches: sequences of several lengths; and one beside a prompt of 4 tokens that two share."""
    if config.model_type in SEES:
        return seeing_packs(config)
    shared = micro_batch([20, 4, 3, 5], [11, 0, 3, 5], seed=2)
    positions, predict = shared.position_ids.copy(), shared.predict.copy()
    positions[24:] += 4
    predict[11 + 3] = 23  # the first token after the prompt, as of the sequence before
    shared = replace(shared, prefix=np.array([-1, -1, 1, 1], np.int32), position_ids=positions, predict=predict)
    return [micro_batch([7, 12, 5], [3, 6, 2], seed=1), shared]


def draw(name: str, root: Path, **changes: object) -> None:
    """Save the family's model under ``root/NAME/model``, and its gradients as a folder of the same names."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from slime_core.weights.native_configs import native_config

    torch.manual_seed(7)
    values, kind = {**COMMON, **FAMILIES[name], **changes}, AutoModelForCausalLM
    if vision := values.pop("vision_config", None):
        outer = {"model_type": values.pop("model_type"), "tie_word_embeddings": "tie_word_embeddings" in values}
        outer |= TOKENS if name in SEES else {}
        values, kind = {**outer, "text_config": values, "vision_config": vision}, AutoModelForImageTextToText
    config = native_config(values) or AutoConfig.for_model(**values)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim == 1 and "inv_freq" not in key:  # norms, biases: away from 1 and 0
                tensor.add_(torch.randn_like(tensor) * 0.1)
            if key.endswith("A_log"):  # states that last: drawn as transformers does they fade within a token
                tensor.uniform_(-4, -1)
    model.save_pretrained(root / name / "model")
    file = root / name / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": values["model_type"]}))
    if name == "qwen3_5_moe":
        stack_experts(root / name / "model")
    found, total, size = [], torch.zeros(()), torch.zeros(())
    for micro in packs(config):
        parts, rows = np.split(micro.tokens, micro.cu_seqlens[1:-1]), []
        for number, (part, head) in enumerate(zip(parts, micro.prefix, strict=True)):
            tokens = np.concatenate([parts[head], part]) if head >= 0 else part
            media = arrays_of(micro, head if head >= 0 else number)
            rows.append(model(**inputs(tokens, media)).logits[0, -len(part) :])
        logs = torch.cat(rows)[micro.predict].log_softmax(-1)
        log_probs = logs.gather(1, torch.from_numpy(micro.target)[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        values, _ = loss(log_probs, entropy, {"scale": torch.from_numpy(micro.columns["scale"])}, None)
        terms = values * torch.from_numpy(micro.weight)
        total, size = total + terms.sum(), size + terms.detach().abs().sum()
        found.append((log_probs.detach(), entropy.detach()))
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    model.save_pretrained(root / name / "gradients")
    torch.save({"loss": total.detach(), "size": size, "rows": found}, root / name / "expected.pt")


def stack_experts(folder: Path) -> None:
    """Store the experts of a layer as published folders of Qwen3.5 do, in two tensors."""
    tensors = load_file(folder / "model.safetensors")
    for layer in {name.partition("experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}experts.{n}.{which}_proj.weight") for n in range(HYBRID["num_experts"])])
            for which in ("gate", "up", "down")
        )
        tensors |= {f"{layer}experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{layer}experts.down_proj": down}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@dataclass
class Folder:
    """What a stage is built from."""

    path: Path
    init_weights: str = "load"
    trust_remote_code: bool = False

    @cached_property
    def config(self):
        from slime_core.weights.folder import read_config

        return read_config(self.path)

    def tensors(self):
        from slime_core.weights.shards import Shards

        return Shards.open(self.path)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The error's norm over the tensor's."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


def same(got: torch.Tensor, want: torch.Tensor, lora: bool) -> bool:
    """Whether a gathered weight is the folder's: to the bit, or to the rounding of its base."""
    rounding = VALUES if DTYPE == "float32" else 1e-2
    return relative(got, want) < rounding if lora else torch.equal(got, want)


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
    options = ["--dtype", DTYPE, "train.compile=" + os.environ.get("COMPILE", "auto"), "--no-freeze-vision-tower"]
    if lora := "lora" in flags:
        options = [*options[:-1], "train.lora_rank=8", "train.lora_alpha=6"]
    train = load_config(None, options).train
    table = {name: value for name, value in flags.items() if name not in WITHIN | LORA}
    options = settings(bridge, folder.config, table, train, world, DEVICE)
    options = replace(
        options,
        frozen_tower=False,
        transformer={**options.transformer, **{n: v for n, v in flags.items() if n in WITHIN}},
    )
    model = build_model(options, bridge, folder, torch.device(DEVICE))
    stored, gradients = folder.tensors(), Folder(root / name / "gradients").tensors()
    if lora:
        gradients = adapted(model, stored, gradients)
    learner = MegatronLearner(model.stage)
    learner.wrap(build(options))
    model.learn(learner.wrapped)
    model.passes.chunk = 4
    from megatron.core import parallel_state

    mine = parallel_state.get_data_parallel_rank()
    micros = packs(folder.config) if options.layout.dp == 1 else [packs(folder.config)[mine]]
    expected = torch.load(root / name / "expected.pt")
    wanted = expected["rows"] if options.layout.dp == 1 else [expected["rows"][mine]]
    answer = {"log_probs": 0.0, "entropy": 0.0, "gradients": 0.0, "tensor": "", "gathered": []}
    for got, want in zip(model.passes.scores(micros), wanted):
        for key, a, b in zip(("log_probs", "entropy"), got, want, strict=True):
            answer[key] = max(answer[key], relative(a, b))
    learner.zero_grad()
    sums = LossSums(None, torch.device(DEVICE))
    model.passes.backward(micros, Loss(name="test", fn=loss), train, sums)
    answer["loss"] = abs(totals(sums)[0]["loss"] - float(expected["loss"])) / float(expected["size"])
    for key, held in model.trained.by_name.items():
        if held.entry.megatron.endswith("expert_bias"):
            continue
        whole = join(held.entry, [gradients[n] for n in held.entry.hf], options.sizes)
        error = relative(held.tensor.main_grad, shard(held.entry, whole, held.group.rank(), held.group.size()))
        if error > answer["gradients"]:
            answer["gradients"], answer["tensor"] = error, key
    for source in model.sources():
        whole = source.gather()
        if dist.get_rank() == 0:
            answer["gathered"] += [
                p.name for p in source.parts if not same(p.cut(whole).cpu(), stored[p.name].to(whole.dtype), lora)
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


def check_families(rank: int, root: Path, world: int, flags: dict, names: list) -> None:
    """What one rank finds, in ROOT/answers-RANK.json."""
    torch.set_num_threads(1)
    with cpu_redirect() if DEVICE == "cpu" else nullcontext():
        from slime_core.trainers.process_group import join_group
        from slime_megatron.layout import Layout
        from slime_megatron.state import start

        join_group(rank, world, DEVICE, root / "rendezvous")
        start(Layout.of({n: v for n, v in flags.items() if n not in WITHIN | LORA}, world), 0)
        answers = {name: check(name, root, world, flags) for name in names}
    (root / f"answers-{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    where, count, table, number, *families = sys.argv[1:]  # a rank's number, or all: they are started from here
    arguments = (Path(where), int(count), json.loads(table), families)
    if number == "all":
        torch.multiprocessing.start_processes(check_families, arguments, nprocs=int(count), start_method="spawn")
    else:
        check_families(int(number), *arguments)

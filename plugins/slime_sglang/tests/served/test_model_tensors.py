"""What SGLang's own models hold of a folder and of an update, byte by byte, against the layout: every family, shared by
two ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_server import ENVIRONMENT, START_TIMEOUT
from safetensors.torch import load_file, save_file

from slime_core.errors import EngineError
from slime_core.types import RankTensor
from slime_core.weights.canary import compare
from slime_core.weights.folder import read_config
from slime_core.weights.hashing import layout_name, text_name
from slime_core.weights.native_configs import native_config
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import TensorPart, lay_out
from slime_sglang.hashing import expected
from slime_sglang.layout import layout

pytestmark = [pytest.mark.system, pytest.mark.sglang]

DRIVER = Path(__file__).with_name("model_tensors.py")
WIDTH = 64  # of MLPs: SGLang fills narrower ones up on a CPU
BIAS = "e_score_correction_bias"
COMMON = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = ROUTED | {
    "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 8, "head_dim": 4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
NEXT = {
    "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "partial_rotary_factor": 0.5,
}  # fmt: skip
PICTURES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
OLD_TOWER = PICTURES | {"intermediate_size": 20, "window_size": 56, "fullatt_block_indexes": [0]}
TOWER = PICTURES | {"depth": 2, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
SEEN = ("qwen2_5_vl", "qwen3_vl")  # whose towers are trained
EVERY = {"full_attention_interval": 4}
DENSE = {name: value for name, value in NEXT.items() if "expert" not in name and "moe" not in name}
FAMILIES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    # class, expert-parallel groups, values, values of a published config.json that transformers does not write
    "glm4": ("Glm4", 1, {"attention_bias": True}, {}),
    "glm4_moe": ("Glm4Moe", 1, {**ROUTED, "attention_bias": True, "use_qk_norm": True}, {}),
    "glm4_moe_lite": ("Glm4MoeLite", 1, LATENT, {}),
    "deepseek_v3": ("DeepseekV3", 2, {**LATENT, "n_shared_experts": 2, "rope_parameters": YARN}, DEEPSEEK),
    "kimi_k2": ("DeepseekV3", 1, {**LATENT, "q_lora_rank": None, "rope_parameters": YARN}, DEEPSEEK),
    "mimo": ("MiMo", 1, {"head_dim": 4}, {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}),
    "minimax_m2": ("MiniMaxM2", 1, {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
                   {"use_routing_bias": True, "use_qk_norm": True, "scoring_func": "sigmoid"}),
    "qwen3_next": ("Qwen3Next", 1, NEXT, EVERY),
    "qwen3_5": ("Qwen3_5", 1, {**DENSE, "vision_config": PICTURES, "tie_word_embeddings": True}, EVERY),
    "qwen3_5_moe": ("Qwen3_5Moe", 1, {**NEXT, "vision_config": PICTURES}, EVERY),
    "qwen3_5_moe_text": ("Qwen3_5Moe", 1, NEXT, EVERY),
    "qwen2_5_vl": ("Qwen2_5_VL", 1, {"num_attention_heads": 4, "vision_config": OLD_TOWER, "rope_parameters": AXES,
                                     "tie_word_embeddings": True}, {}),
    "qwen3_vl": ("Qwen3VL", 1, {"vision_config": TOWER, "rope_parameters": AXES | {"mrope_interleaved": True}}, {}),
}  # fmt: skip
MIMO = "from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = 'mimo'\n"


def write_model(path: Path, family: str) -> None:
    """A folder as it is published: weights in bfloat16 and router biases in float32. Beside it, an update by names, in
    buckets that are as small as they get."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, _, values, published = FAMILIES[family]
    raw, model_class, task = {"model_type": family, **COMMON, **values}, AutoModelForCausalLM, "CausalLM"
    if pictures := raw.pop("vision_config", None):
        tied = {"tie_word_embeddings": "tie_word_embeddings" in raw}
        raw = {"model_type": raw.pop("model_type"), "text_config": raw, "vision_config": pictures, **tied}
        model_class, task = AutoModelForImageTextToText, "ConditionalGeneration"
    model: Any = model_class.from_config(native_config(raw) or AutoConfig.for_model(**raw), dtype=torch.float32)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": family, "architectures": [f"{kind}For{task}"]}
    config.get("text_config", config).update(published)
    (path / "config.json").write_text(json.dumps(config))
    (path / "configuration_mimo.py").write_text(MIMO)
    draw, file = torch.Generator().manual_seed(1), path / "model.safetensors"
    tensors = {name: torch.randn(tensor.shape, generator=draw) for name, tensor in load_file(file).items()}
    kinds = {name: torch.float32 if name.endswith(BIAS) else torch.bfloat16 for name in tensors}
    tensors = {name: tensor.to(kinds[name]) for name, tensor in tensors.items()}
    if family == "qwen3_5_moe":
        tensors = stacked(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    sent = Shards.open(path)  # of Qwen3.5 FSDP sends a text model's names, Megatron those of the folder
    same = family in ("qwen3_5", *SEEN)
    names = {name if same else text_name(name): name for name in sent if family in SEEN or ".visual." not in name}
    update = {name: -sent[stored] for name, stored in names.items()}
    save_file(update, path.with_suffix(".safetensors"))
    parts = [TensorPart(name, tuple(tensor.shape), lambda whole: whole) for name, tensor in update.items()]
    buckets = [bucket.described()["names"] for bucket in lay_out(parts, "bfloat16", most=1)]
    path.with_suffix(".json").write_text(json.dumps(buckets))


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in two tensors, as published folders of Qwen3.5 have them."""
    tensors = dict(tensors)
    for layer in {name.partition("experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}experts.{n}.{which}_proj.weight") for n in range(NEXT["num_experts"])])
            for which in ("gate", "up", "down")
        )
        tensors |= {f"{layer}experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{layer}experts.down_proj": down}
    return tensors


@pytest.fixture(scope="module")
def held(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders, and beside them what each rank of SGLang holds of each."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_model(root / family, family)
    models = [f"{root / family}:2:{ep}" for family, (_, ep, _, _) in FAMILIES.items()]
    environment = {**os.environ, **ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    log = root / "log.txt"
    with log.open("w") as said:
        command = [sglang_python, str(DRIVER), str(root), "bfloat16", *models]
        subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=START_TIMEOUT, check=True)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_sglangs_ranks_hold_the_bytes_that_the_layout_says_and_any_damaged_tensor_is_seen(
    held: Path, family: str
) -> None:
    files = [held / f"{family}-{rank}.json" for rank in range(2)]
    assert all(file.is_file() for file in files), (held / "log.txt").read_text()[-4000:]
    ranks = [json.loads(file.read_text()) for file in files]
    rows = layout(list(ranks[0][0]), read_config(held / family), 2, ep=FAMILIES[family][1], cpu=True)
    stored, sent = Shards.open(held / family), load_file(held / f"{family}.safetensors")
    for number, tensors in enumerate((stored, sent)):
        seen_by_layout = family in SEEN
        tensors = {layout_name(name): t for name, t in tensors.items() if seen_by_layout or ".visual." not in name}
        served = {
            f"{name}@1" if rank else name: digest for rank in range(2) for name, digest in ranks[rank][number].items()
        }
        assert compare(rows, expected(tensors, rows, torch.bfloat16, "sha256"), served, number) == len(rows)
    for name, tensor in tensors.items():
        damaged = tensor.clone()
        damaged.view(-1)[-1] += 1
        of_name = [row for row in rows if name in {piece.name for piece in row.pieces}]
        assert seen(of_name, tensors | {name: damaged}, served), name


def seen(rows: list[RankTensor], tensors: dict[str, torch.Tensor], served: dict[str, str]) -> bool:
    """Whether the engine's tensors are told from these."""
    try:
        compare(rows, expected(tensors, rows, torch.bfloat16, "sha256"), served, 1)
    except EngineError as error:
        return error.code == "ENG83"
    return False

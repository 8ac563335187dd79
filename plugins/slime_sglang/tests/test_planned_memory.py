"""What a server has ready for adapters, by hand from the shapes of SGLang's buffers."""

import pytest

from slime_core.config.schema import Config
from slime_core.planning.footprint import Lengths, Subject
from slime_core.planning.gpus import gpu_of
from slime_core.planning.memory import fits
from slime_core.planning.sizes import ModelSizes
from slime_sglang.memory import adapter_buffers

pytestmark = pytest.mark.unit
QWEN3_4B = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36, "hidden_size": 2560,
    "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
QKV, OUT, GATE_UP, DOWN = (3 * 2560, 4096 + 2 * 1024), (4096, 2560), (2 * 2560, 2 * 9728), (9728, 2560)
"""Columns of A that an adapter has a row of, and rows of B, in a layer."""


def config_of(**train: object) -> Config:
    rollout = {"hf_checkpoint": "/", "rollout_engine": "sglang"}
    return Config.model_validate({"rollout": rollout, "train": {"lora_rank": 16, "lora_sync": "adapter", **train}})


def bytes_of(config: Config, tensor: int = 1) -> int:
    lengths = Lengths(prompt=1, response=1, longest=2, p95=1, source="")
    config = config.model_copy(update={"train": config.train.model_copy(update={"dtype": "bfloat16"})})
    return adapter_buffers(
        Subject(config=config, sizes=ModelSizes.of(QWEN3_4B), gpu=gpu_of("h100"), lengths=lengths), tensor
    )


@pytest.mark.parametrize(
    ("train", "tensor", "adapters", "numbers"),
    [
        ({}, 1, 2, sum(map(sum, (QKV, OUT, GATE_UP, DOWN)))),
        ({"lora_adapters": ["a", "b", "c"]}, 1, 4, sum(map(sum, (QKV, OUT, GATE_UP, DOWN)))),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, 1, 2, sum(QKV)),
        (
            {},
            2,
            2,
            QKV[0] + QKV[1] // 2 + OUT[0] // 2 + OUT[1] + GATE_UP[0] + GATE_UP[1] // 2 + DOWN[0] // 2 + DOWN[1],
        ),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, 16, 2, QKV[0] + 4096 // 16 + 2 * 128),
        ({"lora_sync": "merged"}, 1, 0, 0),
    ],
    ids=["all layers", "three adapters", "joined", "two ranks", "more ranks than heads", "merged"],
)
def test_buffers_of_adapters_are_as_many_as_sglang_allocates(train, tensor, adapters, numbers):
    assert bytes_of(config_of(**train), tensor) == 2 * adapters * 16 * 36 * numbers


def test_buffers_of_adapters_leave_less_for_the_cache():
    gpu = gpu_of("h100")
    merged, apart = (fits(config_of(lora_sync=sync), QWEN3_4B, gpu).engine for sync in ("merged", "adapter"))
    assert merged is not None
    assert apart is not None
    buffers = bytes_of(config_of())
    assert apart.bytes["rollout"]["engine adapters"] == buffers
    assert merged.bytes["rollout"]["KV cache"] - apart.bytes["rollout"]["KV cache"] == buffers

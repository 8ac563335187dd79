"""What a forward pass keeps for the backward pass, and what both need for a while: numbers of a token in one layer.

Counted from the layers as they are written (`trainers.fsdp.fused_cuda`, megatron-core's with this repository's norms
and attention), not from a general formula: h is the model's width, q and k are heads times their width, f the MLP's.

    written out    x, qkv, turned q and k, attention's output, y, gate and up       h + qkv + q + k + q + h + 2f
    megatron-core  the same, normed inputs, v, a copy of attention's output, act    + 2h + v + q + f
    transformers   norms keep float32 inputs; every step of the activation          8h + qkv + 5(q + k) + 2q + 4f
    adapters       the same; a frozen layer keeps no input, its adapter does        6h + 3(q + k) + v + q + 4f
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_core.planning.sizes import LayerSizes

Form = Literal["fused", "megatron", "plain", "adapters"]
SUMS = 4  # bytes of attention's log-sum a head
ROUTING = 20  # bytes a token and expert: order and place (int64), weight
LINEAR = 7  # linear layers of a layer, whose adapters keep what A makes of a row
SPREAD = 2  # see `trainers.packing`


@dataclass(slots=True, frozen=True)
class TokenCosts:
    """Bytes of one token in one layer."""

    saved: float  # from the forward pass to the backward pass
    input: float  # of a recomputed layer
    forward: float  # for a while, in a pass that keeps nothing
    backward: float  # for a while, beside what is kept

    @classmethod
    def of(
        cls,
        layer: LayerSizes,
        form: Form,
        *,
        itemsize: int = 2,
        tensor: int = 1,
        sequence_parallel: bool = False,
        spread: float = 1.0,
        rank: int = 0,
    ) -> TokenCosts:
        """Of a layer in one of the forms.

        Args:
            tensor: ranks that share each product
            sequence_parallel: whether they share the rows between products, too
            spread: rows of attention by rows of the pack, where samples share a prompt
            rank: of adapters on all linear layers
        """
        h = layer.hidden / (tensor if sequence_parallel else 1)
        q, k, v = (
            n / tensor for n in (layer.heads * layer.head, layer.kv_heads * layer.head, layer.kv_heads * layer.value)
        )
        f, qkv = layer.inner / tensor, q + k + v
        attention = spread * (qkv + 2 * q + k)  # v is a view of qkv
        if form == "fused":
            saved = 2 * h + attention + 2 * f + (q if spread > 1 else 0)  # attention's output, of the pack's rows too
        elif form == "megatron":
            saved = 4 * h + attention + v + q + 3 * f
        elif form == "adapters":
            saved = 6 * h + 3 * (q + k) + v + q + 4 * f
        else:
            saved = 8 * h + qkv + 5 * (q + k) + 2 * q + 4 * f
        gathered = layer.hidden if sequence_parallel and tensor > 1 else 0
        mlp = 3 * f + 2 * h + gathered
        mixed = spread * (6 * q + 2 * qkv + k) - 2 * f + h  # float32 sums of dq, dk and dv of all heads; gate is gone
        backward, forward = max(mlp, mixed), 3 * f + 2 * h + gathered + qkv
        extra = 0.0
        if layer.experts:
            extra = layer.top_k * layer.hidden * 2 * itemsize + layer.top_k * ROUTING + layer.experts * 4
            backward += layer.top_k * layer.hidden
            forward += layer.top_k * layer.hidden
        saved += LINEAR * rank
        sums = SUMS * layer.heads / tensor * spread
        return cls(saved * itemsize + sums + extra, h * itemsize, forward * itemsize, backward * itemsize)


def spread_of(prompt: float, response: float, samples: int, tokens: float) -> float:
    """Rows of attention by rows of a pack of ``tokens`` in which samples share their prompt."""
    together = max(1.0, min(float(samples), (tokens - prompt) / max(response, 1.0)))
    if together < 2 or prompt <= 0:
        return 1.0
    return min(float(SPREAD), together * (prompt + response) / (prompt + together * response))


def logits_rows(rows: float, row: int, budget: int, chunk: int = 0) -> int:
    """Rows of a block of logits, as `logprobs.blocks` cuts ``rows`` of ``row`` bytes."""
    most = max(budget // row, 1)
    most = min(most, chunk or most)
    count = max(1, -(-int(rows) // most))
    return -(-int(rows) // count)


def head_bytes(
    rows: float, hidden: int, vocab: int, itemsize: int, memory: int, chunk: int = 0, *, frozen: bool = False
) -> tuple[int, int]:
    """Bytes of a block of logits, and of the gradients of the output matrix and of hidden states beside it.

    Args:
        rows: that predict a token
        memory: of the GPU; 0 is a processor
        frozen: the output matrix does not learn
    """
    budget = max(512 << 20, memory // 64) if memory else 64 << 20
    block = logits_rows(rows, vocab * itemsize, budget, chunk) * vocab * itemsize
    if frozen:
        return block, int(rows * hidden * itemsize)
    matrix = vocab * hidden * 4
    return block, matrix + int(rows * hidden * itemsize) + max(0, vocab * hidden * itemsize - block)

"""Linear attention of Qwen3-Next and Qwen3.5 over packs: a gated delta net (arXiv:2412.06464), dealt by key head.

hidden -> norm -> q, k, v | gate z | strength, fading
q, k, v -> short convolution, SiLU -> gated delta rule -> norm, times SiLU of z -> projection

A sequence of a pack starts with an empty state and nothing before its convolution. One that continues a shared
prompt, and one that context-parallel ranks share, is computed from its first token: a rank gathers what goes into the
rule, and keeps the rows that are its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.nn import functional as F

from slime_megatron.delta_rule import causal_convolution, gated_delta_rule
from slime_megatron.norms import Norm, rms_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig

    from slime_megatron.packing import Pack


class LinearAttention(MegatronModule):  # type: ignore[misc]
    """[T, 1, hidden] to the same; with sequence parallelism both are this rank's rows. Its norm is its own."""

    def __init__(
        self, config: TransformerConfig, *, layer_number: int, apart: bool, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.tp = layer_number, pg_collection.tp
        self.input_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.linear_attn = GatedDeltaNet(config, apart, pg_collection)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        """The delta net over the pack in ``packed_seq_params``; the output, and None for its bias."""
        hidden = self.input_layernorm(hidden_states)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp)
        output, bias = self.linear_attn(hidden, kwargs["packed_seq_params"])
        return output, bias


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """The delta net of this tensor-parallel rank's heads.

    Args:
        apart: whether q, k, v, z and the two numbers of each value head are projected by four matrices, all heads' q
            first (Qwen3.5), or by two, head by head (Qwen3-Next).
    """

    def __init__(self, config: TransformerConfig, apart: bool, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.cp, tp, self.apart = pg_collection.cp, pg_collection.tp, apart
        self.key_heads = config.linear_num_key_heads // tp.size()
        self.heads = config.linear_num_value_heads // tp.size()
        self.key_width, self.width = config.linear_key_head_dim, config.linear_value_head_dim
        self.sizes = [self.key_heads * self.key_width] * 2 + [self.heads * self.width]  # of q, k, v
        hidden, qkv, z = config.hidden_size, sum(self.sizes), self.sizes[2]
        if apart:
            self.in_proj_qkv = Projection(config, qkv, hidden)
            self.in_proj_z = Projection(config, z, hidden)
            self.in_proj_b = Projection(config, self.heads, hidden)
            self.in_proj_a = Projection(config, self.heads, hidden)
        else:
            self.in_proj_qkvz = Projection(config, qkv + z, hidden)
            self.in_proj_ba = Projection(config, 2 * self.heads, hidden)
        self.conv1d = ShortConvolution(config, qkv, 1, config.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = (_dealt(config, self.heads) for _ in range(2))
        self.norm = GatedNorm(config, self.width, tp)
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self.width,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp,
        )

    def forward(self, hidden: torch.Tensor, pack: Pack) -> tuple[Any, Any]:
        """[T, 1, hidden], all rows of a context-parallel rank, to its rows, or this tensor-parallel rank's of them."""
        qkv, z, b, a = self._projected(hidden[:, 0])
        rows = torch.cat([qkv, b, a], dim=-1)
        if self.cp.size() > 1:
            rows = gather_from_sequence_parallel_region(rows, group=self.cp)
        if pack.keys is not None:
            rows = rows.index_select(0, pack.keys)
        lengths = [len(rows_of_span) for _, _, rows_of_span in pack.spans]
        qkv, b, a = rows.split([sum(self.sizes), self.heads, self.heads], dim=-1)
        q, k, v = F.silu(self.conv1d(qkv, lengths)).split(self.sizes, dim=-1)
        times = self.heads // self.key_heads
        q, k = (x.unflatten(-1, (self.key_heads, -1)).repeat_interleave(times, dim=1) for x in (q, k))
        fading = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        out = delta_rule(q, k, v.unflatten(-1, (self.heads, -1)), fading, b.float().sigmoid(), lengths)
        if pack.query_rows is not None:
            out = out.index_select(0, pack.query_rows)
        out = self.norm(out, z.unflatten(-1, (self.heads, -1)))
        output, bias = self.out_proj(out.flatten(1)[:, None])
        return output, bias

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q over k over v, z, and the numbers of strength and of fading, each [T, of this rank's heads]."""
        if self.apart:
            return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)
        times = self.heads // self.key_heads
        by_head = self.in_proj_qkvz(hidden).unflatten(-1, (self.key_heads, -1))
        widths = [self.key_width] * 2 + [times * self.width] * 2
        q, k, v, z = (x.flatten(1) for x in by_head.split(widths, dim=-1))
        b, a = (x.flatten(1) for x in self.in_proj_ba(hidden).unflatten(-1, (self.key_heads, 2, times)).unbind(2))
        return torch.cat([q, k, v], dim=-1), z, b, a


class Projection(nn.Module):
    """This rank's rows of a matrix, for rows that are gathered already."""

    def __init__(self, config: TransformerConfig, *shape: int) -> None:
        super().__init__()
        self.weight = _dealt(config, *shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        return F.linear(x, self.weight)


class ShortConvolution(Projection):
    """This rank's channels of a causal convolution."""

    def forward(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:  # type: ignore[override]
        """[T, channels] to the same; see `causal_convolution`."""
        return causal_convolution(x, self.weight, lengths)


class GatedNorm(nn.Module):
    """RMSNorm of each head, times SiLU of its gate; the weight is the same for all heads of all ranks."""

    def __init__(self, config: TransformerConfig, width: int, tp: Any) -> None:
        super().__init__()
        self.eps, self.tp = config.layernorm_epsilon, tp
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[..., width] and a gate alike, to the same."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp)  # gradients of all ranks' heads
        return (rms_norm(x, weight, self.eps) * F.silu(gate.float())).to(x.dtype)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fading: torch.Tensor,
    strength: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """`gated_delta_rule`, on a GPU in half precision by flash-linear-attention's kernel where that is installed.

    Its products take heads of 16 to 256 numbers.
    """
    sizes = all(width % 16 == 0 and width <= 256 for width in (k.shape[-1], v.shape[-1]))
    if not v.is_cuda or v.dtype == torch.float32 or not sizes or find_spec("fla") is None:
        return gated_delta_rule(q, k, v, fading, strength, lengths)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    ends = torch.tensor([0, *lengths], device=v.device).cumsum(0)
    rows = {"q": q, "k": k, "v": v, "g": fading, "beta": strength}
    packed = {name: x.contiguous()[None] for name, x in rows.items()}
    out, _ = chunk_gated_delta_rule(**packed, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
    result: torch.Tensor = out[0]
    return result


def _dealt(config: TransformerConfig, *shape: int) -> nn.Parameter:
    """A rank's share of a tensor whose rows are dealt; filled from the model folder."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter

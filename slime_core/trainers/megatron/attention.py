"""Core attention of every model here: packed sequences, any context-parallel split, MLA, with no mask that grows.

q [T, 1, heads, d], k, v of this rank --all-gather over context-parallel ranks--> spans of queries with what they see

On a GPU in half precision all spans are one varlen flash call (torch's `varlen_attn`); elsewhere each is a call of
torch's scaled_dot_product_attention. It stands where megatron-core's own would: that one takes no packs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from slime_core.errors import TrainerError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from slime_core.trainers.megatron.packing import Pack


EIGHTS = 8  # flash attention takes heads of a multiple of this many numbers, the same of q, k and v


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """softmax(q k^T * scale) v over what each span sees. Dropout is none: log-probs of the policy have none."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,  # k_channels, v_channels of MLA: the tensors tell
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp = groups.cp
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Pack | None = None,
    ) -> torch.Tensor:
        """q [T, 1, heads, d] or [T, heads, d], k and v likewise with fewer heads; [T, 1, heads * d of v].

        Raises:
            TrainerError: no pack came with them.
        """
        if packed_seq_params is None:
            raise TrainerError("the model was called without its pack", fix="call it through `model.PackedGPT`")
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if self.cp.size() > 1:
            k, v = (gather_from_sequence_parallel_region(x, group=self.cp) for x in (k, v))
        scale = self.scale or 1 / math.sqrt(q.shape[-1])
        attend = _varlen if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) else _by_span
        return attend(q, k, v, packed_seq_params, scale).flatten(1).unsqueeze(1)


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack: Pack, scale: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if pack.keys is not None:
        k, v = k.index_select(0, pack.keys), v.index_select(0, pack.keys)
    if k.shape[1] != q.shape[1]:  # varlen_attn knows grouped heads from torch 2.12 on only
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    width, whole = v.shape[-1], -(-max(q.shape[-1], v.shape[-1]) // EIGHTS) * EIGHTS
    q, k, v = (x if x.shape[-1] == whole else pad(x, (0, whole - x.shape[-1])) for x in (q, k, v))
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    assert pack.cu_q is not None
    assert pack.cu_k is not None
    out = varlen_attn(q, k, v, pack.cu_q, pack.cu_k, pack.most_q, pack.most_k, scale=scale, window_size=(-1, 0))
    assert isinstance(out, torch.Tensor)
    return out[..., :width]


def _by_span(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack: Pack, scale: float) -> torch.Tensor:
    found = []
    grouped = k.shape[1] != q.shape[1]
    for first, last, rows in pack.spans:
        mine, keys, values = (
            x.transpose(0, 1)[None] for x in (q[first:last], k.index_select(0, rows), v.index_select(0, rows))
        )
        mask: Any = None if last - first == len(rows) else causal_lower_right(last - first, len(rows))
        out = scaled_dot_product_attention(
            mine, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)

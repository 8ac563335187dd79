"""Core attention of every model here: packed sequences, any context-parallel split, MLA, with no mask that grows.

q [T, 1, heads, d], k, v of this rank --rotated by the pack's angles--> --all-gather of k, v over context-parallel
ranks--> spans of queries with what they see

On a GPU in half precision all spans are one varlen flash call (torch's `varlen_attn`), or each whole sequence is a
call of torch's scaled_dot_product_attention where sequences are long and cuDNN's kernels are there: they take 0.6 of
the time. Elsewhere each span is such a call. It stands where megatron-core's own would: that one takes no packs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from torch._dynamo import maybe_mark_dynamic
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from slime_core.errors import TrainerError
from slime_core.trainers.flash import EIGHTS, filled, has_cudnn, varlen
from slime_megatron.rotary import TURN, turn

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from slime_megatron.packing import Pack


FULL = 1 << 15
"""Rows times heads of a mean sequence from which a call of its own fills a GPU: 256 tiles of 128 rows for the 132
processors of a Hopper. Below it one call for all of them wins."""
WIDEST = 128  # numbers of a head that cuDNN's forward and backward kernels take on every GPU that has them


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
        self.compiled = False  # `PackedGPT.choose_compiling`

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
        pack = packed_seq_params
        if pack is None:
            raise TrainerError("the model was called without its pack", fix="call it through `model.PackedGPT`")
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if pack.turn is not None:
            for x in (q, k, *pack.turn) if self.compiled else ():
                maybe_mark_dynamic(x, 0)
            q, k = (TURN if self.compiled else turn)(q, k, *pack.turn, self.config.rotary_interleaved)
        if self.cp.size() > 1:
            k, v = (gather_from_sequence_parallel_region(x, group=self.cp) for x in (k, v))
        scale = self.scale or 1 / math.sqrt(q.shape[-1])
        half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
        if half and not self._is_per_sequence(q, v, pack):
            assert pack.cu_q is not None
            assert pack.cu_k is not None
            if pack.keys is not None:
                k, v = k.index_select(0, pack.keys), v.index_select(0, pack.keys)
            out = varlen(q, k, v, pack.cu_q, pack.cu_k, pack.most_q, pack.most_k, scale=scale)
        elif pack.lengths:
            out = by_sequence(q, k, v, pack.lengths, scale, fill=half)
        else:
            out = _by_span(q, k, v, pack, scale)
        return out.flatten(1).unsqueeze(1)

    def _is_per_sequence(self, q: torch.Tensor, v: torch.Tensor, pack: Pack) -> bool:
        """Whether each sequence is a call of its own on a GPU. cuDNN's gradients have not the same bits every time."""
        config = self.config
        if not pack.lengths or config.attention_backend is not AttnBackend.auto:
            return False
        if config.deterministic_mode or torch.are_deterministic_algorithms_enabled():
            return False
        fits = q.shape[-1] == v.shape[-1] <= WIDEST and q.shape[-1] % EIGHTS == 0
        return fits and has_cudnn(q.device) and q.shape[0] * q.shape[1] >= FULL * len(pack.lengths)


def by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float, *, fill: bool
) -> torch.Tensor:
    """Causal attention of sequences that lie end to end, a call each: q [T, heads, d], k and v with heads or fewer.

    Args:
        lengths: of the sequences; their sum is T
        fill: call with one of few lengths; no row sees those that come behind it
    """
    grouped, outputs = k.shape[1] != q.shape[1], []
    parts = zip(*(x.split(lengths) if len(lengths) > 1 else (x,) for x in (q, k, v)), strict=True)
    for length, part in zip(lengths, parts, strict=True):
        more = filled(length) - length if fill else 0
        queries, keys, values = ((pad(x, (0, 0, 0, 0, 0, more)) if more else x).transpose(0, 1)[None] for x in part)
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
        outputs.append(out[0].transpose(0, 1)[:length])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _by_span(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack: Pack, scale: float) -> torch.Tensor:
    outputs = []
    grouped = k.shape[1] != q.shape[1]
    for first, last, rows in pack.spans:
        queries, keys, values = (
            x.transpose(0, 1)[None] for x in (q[first:last], k.index_select(0, rows), v.index_select(0, rows))
        )
        mask: Any = None if last - first == len(rows) else causal_lower_right(last - first, len(rows))
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)

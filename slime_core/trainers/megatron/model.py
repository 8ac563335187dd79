"""A pipeline stage of a bridge's model: megatron-core's GPTModel, fed packs, that ends in hidden states.

Pack -> embedding -> layers with our core attention -> last norm -> rows that predict -> `vocabulary.log_probs`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from slime_core.trainers.megatron.rotary import PackRotary
from slime_core.trainers.megatron.spec import block_spec
from slime_core.trainers.megatron.vocabulary import Slice, log_probs

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from slime_core.trainers.megatron.packing import Pack
    from slime_core.weights.bridge import Bridge


class PackedGPT(GPTModel):  # type: ignore[misc]
    """GPTModel over packs. ``vocab`` is the number of real ids: rows of the vocabulary beyond are filling.

    Example:
        model = PackedGPT(config, bridge, vocab=151936, vocab_size=151936, max_sequence_length=40960)
        hidden = model(pack)
        log_prob, entropy = model.score(hidden, pack, target, temperature, chunk=2048)
    """

    def __init__(self, config: TransformerConfig, bridge: Bridge, *, vocab: int, **kwargs: Any) -> None:
        super().__init__(config=config, transformer_layer_spec=block_spec(config, bridge), **kwargs)
        self.vocab = vocab
        mla = bool(config.multi_latent_attention)
        owners: list[Any] = [layer.self_attention for layer in self.decoder.layers] if mla else [self]
        for owner in owners:
            owner.rotary_pos_emb = PackRotary(owner.rotary_pos_emb, middle=not mla)

    def forward(self, pack: Pack) -> torch.Tensor:
        """Hidden states [T, 1, h] of this stage; with sequence parallelism this rank's rows of them."""
        decoder_input = None
        if self.pre_process:
            assert pack.tokens is not None
            assert pack.positions is not None
            decoder_input = self.embedding(input_ids=pack.tokens[None], position_ids=pack.positions[None])
        rotary = None if self.config.multi_latent_attention else self.rotary_pos_emb(pack)
        if isinstance(rotary, tuple):
            rotary = rotary[0]
        hidden: torch.Tensor = self.decoder(
            hidden_states=decoder_input, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=pack
        )
        return hidden

    def predicting(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        """The rows that predict this rank's response tokens, [R, h], from the last stage's hidden states."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.pg_collection.tp)
        assert pack.predict is not None
        return hidden[:, 0].index_select(0, pack.predict)

    def score(
        self, hidden: torch.Tensor, pack: Pack, target: torch.Tensor, temperature: torch.Tensor | None, *, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of this context-parallel rank's response tokens; see `vocabulary.log_probs`."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        tp = self.pg_collection.tp
        part = Slice(first=tp.rank() * len(weight), vocab=self.vocab, group=tp if tp.size() > 1 else None)
        return log_probs(self.predicting(hidden, pack), weight, target, temperature, part=part, chunk=chunk)

"""Floating-point operations of a training step: what balances ranks and what MFU divides by.

    6 * N * tokens + 3 * layers * heads * (score width + value width) * length^2

N counts the weights that multiply a token: every matrix but the input embedding, the output matrix (tied or not),
and of experts those that one token is routed to. A product of n weights is 2n operations forward and 4n backward: 6N
a token (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, PaLM, appendix B). Attention's two products are
2 * width operations each for a query and a key that it sees, and backward twice that. A causal mask leaves half of
length^2 pairs, where PaLM's 12 * layers * heads * width * length counts all of them.

A vision tower has no causal mask, and sees pictures of n placeholders, each of which stands for g patches:

    6 * (g * weights of a patch + projector) * n + 12 * width * (layers * (g * n)^2 + windowed * g * n * window)

with windows of so many patches in the windowed layers (Bai et al. 2025, Qwen2.5-VL, section 2.1). A frozen tower has a
third of this: it has no backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Number = TypeVar("Number", float, "NDArray[Any]")


@dataclass(slots=True, frozen=True)
class Flops:
    """Forward and backward, recomputation not counted.

    Example: Flops(token=6e9, pair=1e6).sequence(1000) == 6e12 + 1e6 * 1000**2
    """

    token: float  # a token
    pair: float  # a token squared, of one sequence
    tower: TowerFlops | None = None  # of pictures, for a model that sees

    def sequence(self, length: Number, prefix: Number | float = 0) -> Number:
        """Of a sequence of ``length`` tokens; of its tokens behind the first ``prefix`` alone, which they see."""
        return self.token * (length - prefix) + self.pair * (length**2 - prefix**2)

    @staticmethod
    def sparse_layers(config: Any) -> list[int]:
        """Layers with experts, of a text model's config that has some."""
        return _Sizes(config).sparse()

    @classmethod
    def of(cls, config: Any, *, frozen_tower: bool = False) -> Flops:
        """Of a Hugging Face config: an estimate, whatever sizes it names.

        Windows, sparse attention and state-space layers of the text model count as full attention.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes = _Sizes(text)
        weights = sizes.layers * sizes.attention + sizes.feed_forward + sizes.number("vocab_size") * sizes.hidden
        return cls(
            token=6.0 * weights,
            pair=3.0 * sizes.layers * sizes.heads * (sizes.score + sizes.value),
            tower=TowerFlops.of(config, frozen=frozen_tower),
        )


@dataclass(slots=True, frozen=True)
class TowerFlops:
    """Of a vision tower and its projector; windows and frames of a video at edges count as whole ones.

    Example: TowerFlops(token=6e8, pair=1e5, placeholders=(151655,)).picture(256)
    """

    token: float  # a placeholder
    pair: float  # a placeholder squared, of one picture
    placeholders: tuple[int, ...]  # token ids

    def picture(self, length: Number) -> Number:
        """Of a picture that ``length`` placeholders stand for."""
        return self.token * length + self.pair * length**2

    def pictures(self, tokens: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Where in ``tokens`` [T] each picture begins, and its operations."""
        import numpy as np

        from slime_core.media.positions import runs

        bounds = np.array(runs(np.isin(tokens, self.placeholders)), dtype=np.int64).reshape(-1, 2)
        return bounds[:, 0], self.picture((bounds[:, 1] - bounds[:, 0]).astype(np.float64))

    @classmethod
    def of(cls, config: Any, *, frozen: bool = False) -> TowerFlops | None:
        """Of a Hugging Face config; None for a model of text alone, or one of a family whose pictures nobody reads."""
        if not hasattr(config, "vision_config"):
            return None
        from slime_core.media.positions import MediaLayout  # of numpy, which a plan of text alone does without

        layout = MediaLayout.of(config)
        if layout is None:
            return None
        vision = _Named(config.vision_config)
        layers = vision.number("depth", "num_hidden_layers")
        width = vision.number("embed_dim", "hidden_size")
        matrices = 3 if config.model_type == "qwen2_5_vl" else 2  # of an MLP
        inner = vision.number("intermediate_size") or int(width * config.vision_config.mlp_ratio)
        pixels = vision.number("patch_size") ** 2 * vision.number("temporal_patch_size", least=1)
        patch = layers * width * (4 * width + matrices * inner) + 3 * pixels * width
        full = getattr(config.vision_config, "fullatt_block_indexes", None)
        windowed = 0 if full is None else layers - len(full)
        window = (vision.number("window_size") // vision.number("patch_size")) ** 2
        group = (layout.merge or int(config.scale_factor)) ** 2
        token = group * (6 * patch + 12 * width * windowed * window) + 6 * _projector(config, width * group)
        pair = 12 * width * (layers - windowed) * group**2
        share = 3.0 if frozen else 1.0
        return cls(token / share, pair / share, layout.ids)


def _projector(config: Any, width: int) -> int:
    """Weights between a tower and its text model, from the ``width`` of a group of patches."""
    vision, text = config.vision_config, config.get_text_config()
    if config.model_type in ("smolvlm", "idefics3"):
        return int(width * text.hidden_size)
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return int(mergers * width * (width + text.hidden_size))


class _Named:
    """What families call by several names."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def number(self, *names: str, least: int = 0) -> int:
        """The first of these attributes that is a positive number, else ``least``."""
        values = (getattr(self._config, name, None) for name in names)
        return next((int(value) for value in values if isinstance(value, (int, float)) and value > 0), least)


class _Sizes(_Named):
    """Of a text model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers, self.hidden = self.number("num_hidden_layers", least=1), self.number("hidden_size", least=1)
        self.heads = self.number("num_attention_heads", least=1)
        head = self.number("head_dim") or self.hidden // self.heads
        latent = self.number("kv_lora_rank")
        self.score = self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim") if latent else head
        self.value = self.number("v_head_dim") if latent else head
        self.attention = self._latent(latent) if latent else self._plain(head)

    def _plain(self, head: int) -> int:
        groups = self.number("num_key_value_heads") or self.heads
        return self.hidden * head * (2 * self.heads + 2 * groups)

    def _latent(self, rank: int) -> int:
        """Multi-head latent attention: queries, keys and values through matrices of low rank."""
        low, rope = self.number("q_lora_rank"), self.number("qk_rope_head_dim")
        queries = self.heads * self.score
        query = low * (self.hidden + queries) if low else self.hidden * queries
        keys = self.hidden * (rank + rope) + rank * self.heads * (self.score - rope + self.value)
        return query + keys + self.heads * self.value * self.hidden

    @property
    def feed_forward(self) -> int:
        """Weights of all layers' gated MLPs that a token passes through."""
        dense = 3 * self.hidden * self.number("intermediate_size", "ffn_dim", "n_inner", least=4 * self.hidden)
        experts = self.number("num_experts", "n_routed_experts", "num_local_experts")
        if experts < 2:
            return self.layers * dense
        width = self.number("moe_intermediate_size") or dense // (3 * self.hidden)
        shared = self.number("shared_expert_intermediate_size") or self.number("n_shared_experts") * width
        chosen = self.number("num_experts_per_tok", "moe_topk", least=1)
        sparse = self.hidden * (3 * (chosen * width + shared) + experts)
        count = len(self.sparse())
        return count * sparse + (self.layers - count) * dense

    def sparse(self) -> list[int]:
        """Layers with experts."""
        step, first = self.number("decoder_sparse_step", least=1), self.number("first_k_dense_replace")
        dense = getattr(self._config, "mlp_only_layers", None) or ()
        return [n for n in range(self.layers) if n >= first and (n + 1) % step == 0 and n not in dense]

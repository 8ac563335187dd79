"""What of a model's config decides on the tensors that SGLang holds of it, and the model's own tensors by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_core.errors import EngineError
from slime_core.types import Piece
from slime_core.weights.canary import EMBED, HEAD
from slime_sglang.towers import TowerSizes

PLAIN = ("qwen2", "mimo", "qwen3", "llama", "mistral", "glm4")
LATENT = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
TOWERS = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}  # that see pictures -> family of the text model
PICTURES = ("qwen3_5", "qwen3_5_moe")  # of which the text model alone is trained
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # linear attention in some layers
FAMILIES = (*PLAIN, "qwen3_moe", *HYBRID, *PICTURES, *TOWERS, "glm4_moe", "minimax_m2", *LATENT)
OUTPUT_BIAS = ("qwen3", "qwen3_moe", "llama", "mistral")  # where attention_bias means the output too
ATTENTION, LINEAR = "self_attn.", "linear_attn."
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(slots=True, frozen=True, kw_only=True)
class Latent:
    """Widths of multi-latent attention."""

    q_rank: int = 0  # 0: queries are not compressed
    nope: int = 0
    rope: int = 0
    value: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class Linear:
    """Heads of linear attention, and their widths."""

    keys: int = 0
    values: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class Experts:
    """Names and sizes of the experts of a layer."""

    count: int = 0
    inner: int = 0
    layers: frozenset[int] = frozenset()  # that have them
    prefix: str = "mlp."
    names: tuple[str, str, str] = MLP  # gate, up, down
    bias: str = ""  # of the router
    shared: str = ""  # prefix of the experts of all tokens
    shared_inner: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerSizes:
    """What of a config decides on tensors; counts of rows are of the whole model."""

    family: str
    pictures: bool  # the engine holds layers for them too, which are not trained
    tower: TowerSizes | None  # of layers for pictures that are
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of a dense MLP
    experts: Experts
    latent: Latent
    linear: Linear
    linear_layers: frozenset[int]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tp: int
    ep: int
    fused: bool = False  # shared experts lie behind the others, as one of them

    @classmethod
    def of(cls, config: Any, tp: int, ep: int, *, tower_ranks: int = 0, cpu: bool = False) -> ServerSizes:
        """Raises EngineError, ENG86, for a model that :func:`unknown` names."""
        if reason := unknown(config):
            raise layout_error(reason)
        tied, pictures = bool(config.tie_word_embeddings), config.model_type in PICTURES
        sees = config.model_type in TOWERS
        tower = TowerSizes.of(config, tower_ranks or tp, tp=tp, cpu=cpu) if sees else None
        family = TOWERS.get(config.model_type) or str(_text(config).model_type)
        config = _text(config)
        heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
        bias = bool(getattr(config, "attention_bias", False))
        kinds = getattr(config, "layer_types", None) or () if family in HYBRID else ()
        return cls(
            family=family,
            pictures=pictures,
            tower=tower,
            layers=layers,
            vocab=int(config.vocab_size),
            heads=heads,
            kv_heads=int(config.num_key_value_heads or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            inner=int(getattr(config, "intermediate_size", 0)),
            experts=_experts(config, family),
            latent=_latent(config) if family in LATENT else Latent(),
            linear=_linear(config) if kinds else Linear(),
            linear_layers=frozenset(n for n, kind in enumerate(kinds) if kind == "linear_attention"),
            tied=tied,
            qkv_bias=bias or family in ("qwen2", "mimo"),
            output_bias=bias and family in OUTPUT_BIAS,
            qk_norm=family in ("qwen3", "qwen3_moe", *HYBRID, "minimax_m2")
            or (family == "glm4_moe" and bool(config.use_qk_norm)),
            tp=tp,
            ep=ep,
        )

    @property
    def query_dim(self) -> int:
        """Rows of a head's queries, with its gate where it has one."""
        return self.head_dim * (2 if self.family in HYBRID else 1)

    def names(self) -> list[str]:
        """Every Hugging Face tensor of the model."""
        names = [EMBED, "model.norm.weight", *(() if self.tied else (HEAD,))]
        for number in range(self.layers):
            part = [*self._norms(), *self._attention(number), *self._mlp(number)]
            names += (f"model.layers.{number}.{name}" for name in part)
        names += self.tower.names() if self.tower is not None else ()
        return names

    def _norms(self) -> list[str]:
        more = ("post_self_attn", "post_mlp") if self.family == "glm4" else ()
        return [f"{name}_layernorm.weight" for name in ("input", "post_attention", *more)]

    def _attention(self, number: int) -> list[str]:
        if number in self.linear_layers:
            into = ("qkvz", "ba") if self.family == "qwen3_next" else ("qkv", "z", "b", "a")
            parts = (*(f"in_proj_{part}.weight" for part in into), "conv1d.weight", "A_log", "dt_bias", "norm.weight")
            return [LINEAR + part for part in (*parts, "out_proj.weight")]
        if self.family in LATENT:
            queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if self.latent.q_rank else ("q_proj",)
            keys = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
            return [f"{ATTENTION}{name}.weight" for name in (*queries, *keys)]
        names = [f"{ATTENTION}{name}_proj.weight" for name in "qkvo"]
        names += [f"{ATTENTION}{name}_proj.bias" for name in "qkv" if self.qkv_bias]
        names += [f"{ATTENTION}o_proj.bias"] if self.output_bias else []
        return names + [f"{ATTENTION}{name}_norm.weight" for name in "qk" if self.qk_norm]

    def _mlp(self, number: int) -> list[str]:
        of = self.experts
        if number not in of.layers:
            dense = ("gate_up_proj", "down_proj") if self.family == "glm4" else MLP
            return [f"mlp.{name}.weight" for name in dense]
        names = [f"{of.prefix}gate.weight", *([of.prefix + of.bias] if of.bias else [])]
        names += [f"{of.prefix}experts.{n}.{part}.weight" for n in range(of.count) for part in of.names]
        names += [f"{of.shared}{part}.weight" for part in MLP if of.shared]
        names += ["mlp.shared_expert_gate.weight"] if self.family in HYBRID else []
        return names

    def share(self, name: str, count: int, rank: int, parts: int, *, dim: int = 0, rows: int = 1) -> Piece:
        """Part ``rank`` of ``parts`` equal ones of a tensor of ``count`` times ``rows`` rows (or columns)."""
        return self.run(name, 0, count, rank, parts, dim=dim, rows=rows) if parts > 1 else Piece(name=name, dim=dim)

    def run(self, name: str, first: int, count: int, rank: int, parts: int, *, dim: int = 0, rows: int = 1) -> Piece:
        """The same of ``count`` times ``rows`` rows from row ``first`` on."""
        if count % parts:
            raise layout_error(
                f"{count} parts of {name} do not divide by {parts} ranks", fix="change the tensor-parallel size"
            )
        size = count // parts * rows
        return Piece(name=name, dim=dim, start=first + rank * size, stop=first + (rank + 1) * size)


def _experts(config: Any, family: str) -> Experts:
    layers = range(int(config.num_hidden_layers))
    if family in (*PLAIN, "qwen3_5_text"):
        return Experts()
    if family == "minimax_m2":
        return Experts(
            count=int(config.num_local_experts),
            inner=int(config.intermediate_size),
            layers=frozenset(layers),
            prefix="block_sparse_moe.",
            names=("w1", "w3", "w2"),
            bias="e_score_correction_bias",
        )
    inner = int(config.moe_intermediate_size)
    if family in ("qwen3_moe", *HYBRID):
        step, dense = int(getattr(config, "decoder_sparse_step", 1)), set(getattr(config, "mlp_only_layers", ()) or ())
        return Experts(
            count=int(config.num_experts),
            inner=inner,
            layers=frozenset(n for n in layers if n not in dense and (n + 1) % step == 0),
            shared="mlp.shared_expert." if family in HYBRID else "",
            shared_inner=int(getattr(config, "shared_expert_intermediate_size", 0)),
        )
    shared = int(config.n_shared_experts or 0)
    return Experts(
        count=int(config.n_routed_experts),
        inner=inner,
        layers=frozenset(layers[int(getattr(config, "first_k_dense_replace", 0) or 0) :]),
        bias="gate.e_score_correction_bias",
        shared="mlp.shared_experts." if shared else "",
        shared_inner=shared * inner,
    )


def _latent(config: Any) -> Latent:
    return Latent(
        q_rank=int(config.q_lora_rank or 0),
        nope=int(config.qk_nope_head_dim),
        rope=int(config.qk_rope_head_dim),
        value=int(config.v_head_dim),
    )


def _linear(config: Any) -> Linear:
    return Linear(
        keys=int(config.linear_num_key_heads),
        values=int(config.linear_num_value_heads),
        key_dim=int(config.linear_key_head_dim),
        value_dim=int(config.linear_value_head_dim),
    )


def _text(config: Any) -> Any:
    """The config of the text model."""
    return config.text_config if config.model_type in (*PICTURES, *TOWERS) else config


def unknown(config: Any) -> str:
    """Why checksums of servers cannot be compared for a model, or an empty string."""
    family = str(config.model_type)
    if family not in FAMILIES:
        odd = f"of type {family}"
    elif getattr(config, "mlp_bias", False):
        odd = "with biases in its MLPs"
    elif family in (*LATENT, *HYBRID, *PICTURES) and getattr(_text(config), "attention_bias", False):
        odd = f"of type {family} with biases in its attention"
    else:
        return ""
    return (
        f"how SGLang holds a model {odd} is not known here, so log-probs alone tell; known are {', '.join(FAMILIES)}"
    )


def layout_error(message: str, *, why: str = "", fix: str = "") -> EngineError:
    """ENG86."""
    return EngineError(message, code="ENG86", where="the servers' tensors", why=why, fix=fix)

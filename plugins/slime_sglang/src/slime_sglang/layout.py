"""What each of an engine's tensors holds of which Hugging Face tensors.

    SGLang:  qkv_proj = q, k, v    gate_up_proj = gate, up    w13_weight = gate, up of expert 0, of expert 1, ...

A rank of N tensor-parallel ones holds its heads' rows of q, k and v (key and value heads are repeated where there are
more ranks than heads), its rows of gate and up, its columns of the output projections, and its rows of the
vocabulary, which is padded with zeros to a multiple of 64. Norms and routers are whole on every rank. A tied output
embedding has no name; where an engine keeps one all the same, it must hold what the input embedding holds.
Read in SGLang 0.5.12.post1 and 0.5.23 (`srt/models`, `srt/layers/linear.py`, `vocab_parallel_embedding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import EngineError
from slime_core.types import Piece, RankTensor
from slime_core.weights.canary import EMBED, HEAD, LAYER

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe")
VOCAB_MULTIPLE = 64
ATTENTION = "self_attn."

Pieces = tuple[Piece, ...]


def layout(names: Sequence[str], config: Any, tp: int, *, ep: int = 1) -> tuple[RankTensor, ...]:
    """What every rank holds under each name: rows in the order of ``names``, then of ranks.

    Args:
        names: all tensors of a rank, as `/weights_checker` names them; every rank has the same.
        config: the model's, from transformers.
        tp: tensor-parallel ranks of a server.
        ep: of those, how many groups share the experts out.

    Raises:
        EngineError: ENG86 a model family or a tensor that is not known here (named), a Hugging Face tensor that none
            of the names holds (named), or sizes that do not divide by the ranks.
    """
    sizes = ServerSizes.of(config, tp, ep)
    rows = [RankTensor(name=n, rank=rank, pieces=_pieces(n, sizes, rank)) for n in names for rank in range(tp)]
    if lost := uncovered(rows, sizes.names()):
        raise _error(
            f"{len(lost)} tensors of the model are in none that the engine holds: {', '.join(lost[:5])}",
            why=f"it names {len(names)} tensors",
            fix="serve the model that is trained; its config.json must be the same",
        )
    return tuple(rows)


def uncovered(rows: Iterable[RankTensor], names: Iterable[str]) -> list[str]:
    """Which of these Hugging Face tensors no row has a piece of."""
    names_held = {piece.name for row in rows for piece in row.pieces}
    return sorted(set(names) - names_held)


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerSizes:
    """What of a config decides on tensors; counts of rows are of the whole model."""

    family: str
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of a dense MLP
    experts: int  # 0 in a dense model
    expert_inner: int
    sparse: frozenset[int]  # layers with experts
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tp: int
    ep: int

    @classmethod
    def of(cls, config: Any, tp: int, ep: int) -> ServerSizes:
        """Raises EngineError, ENG86, for a model that :func:`unknown` names."""
        if reason := unknown(config):
            raise _error(reason)
        family = str(config.model_type)
        heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
        moe = family == "qwen3_moe"
        bias = bool(getattr(config, "attention_bias", False))
        step, dense = int(getattr(config, "decoder_sparse_step", 1)), set(getattr(config, "mlp_only_layers", ()) or ())
        experts = int(config.num_experts) if moe else 0
        sparse = frozenset(n for n in range(layers) if experts and n not in dense and (n + 1) % step == 0)
        return cls(
            family=family,
            layers=layers,
            vocab=int(config.vocab_size),
            heads=heads,
            kv_heads=int(config.num_key_value_heads or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            inner=int(config.intermediate_size),
            experts=experts,
            expert_inner=int(config.moe_intermediate_size) if moe else 0,
            sparse=sparse,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=bias or family == "qwen2",
            output_bias=bias and family != "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            tp=tp,
            ep=ep,
        )

    def names(self) -> list[str]:
        """Every Hugging Face tensor of the model."""
        names = [EMBED, "model.norm.weight", *(() if self.tied else (HEAD,))]
        for number in range(self.layers):
            names += (f"model.layers.{number}.{name}" for name in self._layer_names(number))
        return names

    def _layer_names(self, number: int) -> list[str]:
        names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        names += [f"{ATTENTION}{name}_proj.weight" for name in "qkvo"]
        names += [f"{ATTENTION}{name}_proj.bias" for name in "qkv" if self.qkv_bias]
        names += [f"{ATTENTION}o_proj.bias"] if self.output_bias else []
        names += [f"{ATTENTION}{name}_norm.weight" for name in "qk" if self.qk_norm]
        parts = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
        if number not in self.sparse:
            return names + [f"mlp.{part}" for part in parts]
        return [
            *names,
            "mlp.gate.weight",
            *(f"mlp.experts.{expert}.{part}" for expert in range(self.experts) for part in parts),
        ]

    def share(self, name: str, count: int, rank: int, parts: int, *, dim: int = 0, rows: int = 1) -> Piece:
        """Part ``rank`` of ``parts`` equal ones of a tensor of ``count`` times ``rows`` rows (or columns)."""
        if count % parts:
            raise _error(
                f"{count} parts of {name} do not divide by {parts} ranks", fix="change the tensor-parallel size"
            )
        if parts == 1:
            return Piece(name=name, dim=dim)
        size = count // parts * rows
        return Piece(name=name, dim=dim, start=rank * size, stop=(rank + 1) * size)


def _pieces(name: str, sizes: ServerSizes, rank: int) -> Pieces:
    if name in (EMBED, HEAD):
        return _vocabulary(EMBED if sizes.tied else name, sizes, rank)
    if name == "model.norm.weight":
        return (Piece(name=name),)
    match = LAYER.match(name)
    cut = PARTS.get(match[2]) if match else None
    if match is None or cut is None:
        raise _error(
            f"the engine holds a tensor {name}, which a {sizes.family} model has no place for",
            why="it is not known which of the trained weights it must equal",
            fix="serve the model that is trained, unquantised; or --check-weights off",
        )
    return cut(match[1], match[2], sizes, rank)


def _vocabulary(name: str, sizes: ServerSizes, rank: int) -> Pieces:
    """Rows of the vocabulary, and zeros up to the rank's share of the padded one."""
    multiple = VOCAB_MULTIPLE
    if -(-sizes.vocab // multiple) * multiple % sizes.tp:
        multiple *= sizes.tp
    size = -(-sizes.vocab // multiple) * multiple // sizes.tp
    start, stop = (min((rank + n) * size, sizes.vocab) for n in (0, 1))
    whole = stop - start == sizes.vocab
    piece = Piece(name=name) if whole else Piece(name=name, start=start, stop=stop)
    zeros = size - (stop - start)
    return (piece, Piece(name="", stop=zeros)) if zeros else (piece,)


def _whole(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    return (Piece(name=prefix + part),)


def _qkv(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    kind = part.rpartition(".")[2]
    parts, size = min(sizes.tp, sizes.kv_heads), sizes.head_dim
    names = {which: f"{prefix}{ATTENTION}{which}_proj.{kind}" for which in "qkv"}
    if sizes.tp % parts:
        raise _error(f"{sizes.kv_heads} key and value heads cannot be spread over {sizes.tp} ranks")
    share = rank * parts // sizes.tp  # ranks that share a head stand beside each other
    return (
        sizes.share(names["q"], sizes.heads, rank, sizes.tp, rows=size),
        *(sizes.share(names[which], sizes.kv_heads, share, parts, rows=size) for which in "kv"),
    )


def _gate_up(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    return tuple(sizes.share(f"{prefix}mlp.{n}_proj.weight", sizes.inner, rank, sizes.tp) for n in ("gate", "up"))


def _down(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    return (sizes.share(prefix + part, sizes.inner, rank, sizes.tp, dim=1),)


def _output(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    return (sizes.share(prefix + part, sizes.heads, rank, sizes.tp, dim=1, rows=sizes.head_dim),)


def _experts(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    """This rank's experts: [experts, rows, columns] has the same bytes as [experts * rows, columns]."""
    if sizes.tp % sizes.ep or sizes.experts % sizes.ep:
        raise _error(f"{sizes.experts} experts on {sizes.tp} ranks do not divide by {sizes.ep} groups")
    inside = sizes.tp // sizes.ep
    group, place = divmod(rank, inside)
    size = sizes.experts // sizes.ep
    names, dim = (("gate", "up"), 0) if "w13" in part else (("down",), 1)
    return tuple(
        sizes.share(f"{prefix}mlp.experts.{expert}.{name}_proj.weight", sizes.expert_inner, place, inside, dim=dim)
        for expert in range(group * size, (group + 1) * size)
        for name in names
    )


PARTS: dict[str, Callable[[str, str, ServerSizes, int], Pieces]] = {
    "input_layernorm.weight": _whole,
    "post_attention_layernorm.weight": _whole,
    "self_attn.q_norm.weight": _whole,
    "self_attn.k_norm.weight": _whole,
    "self_attn.qkv_proj.weight": _qkv,
    "self_attn.qkv_proj.bias": _qkv,
    "self_attn.o_proj.weight": _output,
    "self_attn.o_proj.bias": _whole,
    "mlp.gate_up_proj.weight": _gate_up,
    "mlp.down_proj.weight": _down,
    "mlp.gate.weight": _whole,
    "mlp.experts.w13_weight": _experts,
    "mlp.experts.w2_weight": _experts,
}


def _error(message: str, *, why: str = "", fix: str = "") -> EngineError:
    return EngineError(message, code="ENG86", where="the servers' tensors", why=why, fix=fix)


def unknown(config: Any) -> str:
    """Why checksums of servers cannot be compared for a model, or an empty string."""
    family = str(config.model_type)
    if family in FAMILIES and not getattr(config, "mlp_bias", False):
        return ""
    odd = f"of type {family}" if family not in FAMILIES else "with biases in its MLPs"
    return (
        f"how SGLang holds a model {odd} is not known here, so log-probs alone tell; known are {', '.join(FAMILIES)}"
    )

"""What each of an engine's tensors holds of which Hugging Face tensors.

    SGLang:  qkv_proj = q, k, v    gate_up_proj = gate, up    w13_weight = gate, up of expert 0, of expert 1, ...
             fused_qkv_a_proj_with_mqa = q_a, kv_a    conv1d = this rank's rows of q, of k and of v

A rank of N tensor-parallel ones holds its heads' rows of q, k and v (key and value heads are repeated where there are
more ranks than heads), its rows of gate and up, its columns of the output projections, and its rows of the
vocabulary, which is padded with zeros to a multiple of 64. Norms, routers and the compressed halves of latent
attention are whole on every rank. A tied output embedding has no name; where an engine keeps one all the same, it must
hold what the input embedding holds. An engine may keep routers and their biases in float32. What it makes of a weight
after loading (kv_b_proj's absorbed halves, 1 + a norm's weight) is not compared, but the weight is, as it was loaded.
Layers for pictures are in `towers`; those of Qwen3.5 are not trained and not compared. Pieces have the names of
`slime_core.weights.hashing.layout_name`.
Read in SGLang 0.5.12.post1 and 0.5.23 (`srt/models`, `srt/layers/linear.py`, `vocab_parallel_embedding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from slime_core.types import Piece, RankTensor
from slime_core.weights.canary import EMBED, HEAD, LAYER
from slime_sglang.server_sizes import ATTENTION, HYBRID, LINEAR, MLP, ServerSizes, layout_error
from slime_sglang.towers import TOWER

VOCAB_MULTIPLE = 64
DERIVED = ("gemma_weight", "axis_map")  # last parts of names: of 1 + a norm's weight, of axes of positions
WIDE = ("gate.weight", "e_score_correction_bias", f"{LINEAR}A_log", f"{LINEAR}dt_bias", f"{LINEAR}norm.weight")
"""Ends of the names of tensors that an engine may keep in float32, by its version."""

Pieces = tuple[Piece, ...]


def layout(
    names: Sequence[str], config: Any, tp: int, *, ep: int = 1, tower_ranks: int = 0, cpu: bool = False
) -> tuple[RankTensor, ...]:
    """What every rank holds under each name: rows in the order of ``names``, then of ranks.

    Args:
        names: all tensors of a rank, as `/weights_checker` names them; every rank has the same.
        config: the model's, from transformers.
        tp: tensor-parallel ranks of a server.
        ep: of those, how many groups share the experts out.
        tower_ranks: that share layers for pictures, 0 for ``tp``.
        cpu: whether the servers run on one, where layers for pictures are filled up further.

    Raises:
        EngineError: ENG86 a model family or a tensor that is not known here (named), a Hugging Face tensor that none
            of the names holds (named), or sizes that do not divide by the ranks.
    """
    sizes = ServerSizes.of(config, tp, ep, tower_ranks=tower_ranks, cpu=cpu)
    if sizes.experts.shared and not any(f".{sizes.experts.shared}" in name for name in names):
        sizes = replace(sizes, fused=True)
    stored, of_model = [name for name in names if name.rpartition(".")[2] not in DERIVED], set(sizes.names())
    if sizes.pictures:
        stored = [name for name in stored if not name.startswith(TOWER)]
    rows = [_row(name, _model_pieces(name, sizes, of_model, rank), rank) for name in stored for rank in range(tp)]
    if lost := uncovered(rows, of_model):
        raise layout_error(
            f"{len(lost)} tensors of the model are in none that the engine holds: {', '.join(lost[:5])}",
            why=f"it names {len(names)} tensors",
            fix="serve the model that is trained; its config.json must be the same",
        )
    return tuple(rows)


def _row(name: str, pieces: Pieces, rank: int) -> RankTensor:
    """A rank's tensor; columns of zeros lie beside the columns before them."""
    dim = 0 if pieces[-1].name else pieces[-1].dim
    return RankTensor(name=name, rank=rank, pieces=pieces, dim=dim, wide=name.endswith(WIDE))


def uncovered(rows: Iterable[RankTensor], names: Iterable[str]) -> list[str]:
    """Which of these Hugging Face tensors no row has a piece of."""
    names_held = {piece.name for row in rows for piece in row.pieces}
    return sorted(set(names) - names_held)


def _model_pieces(name: str, sizes: ServerSizes, of_model: set[str], rank: int) -> Pieces:
    """The pieces of a tensor, all of them of the model's."""
    pieces = _pieces(name, sizes, rank)
    if not pieces or any(piece.name and piece.name not in of_model for piece in pieces):
        raise layout_error(
            f"the engine holds a tensor {name}, which a {sizes.family} model has no place for",
            why="it is not known which of the trained weights it must equal",
            fix="serve the model that is trained, unquantised; or --check-weights off",
        )
    return pieces


def _pieces(name: str, sizes: ServerSizes, rank: int) -> Pieces:
    """The pieces of a tensor by its name alone; none where it is of no kind."""
    if name in (EMBED, HEAD):
        return _vocabulary(EMBED if sizes.tied else name, sizes, rank)
    if sizes.tower is not None and name.startswith(TOWER):
        return sizes.tower.pieces(name, rank)
    if name == "model.norm.weight":
        return (Piece(name=name),)
    match = LAYER.match(name)
    part = match[2] if match else ""
    if ATTENTION + part in PARTS and sizes.family in HYBRID:
        part = ATTENTION + part  # its layers are attention themselves
    return PARTS[part](match[1], part, sizes, rank) if match and part in PARTS else ()


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


def _heads(name: str, which: str, sizes: ServerSizes, rank: int, size: int) -> Piece:
    """A rank's rows of queries, keys or values; ranks that share a key head stand beside each other."""
    if which == "q":
        return sizes.share(name, sizes.heads, rank, sizes.tp, rows=size)
    parts = min(sizes.tp, sizes.kv_heads)
    if sizes.tp % parts:
        raise layout_error(f"{sizes.kv_heads} key and value heads cannot be spread over {sizes.tp} ranks")
    return sizes.share(name, sizes.kv_heads, rank * parts // sizes.tp, parts, rows=size)


def _qkv(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    kind, widths = part.rpartition(".")[2], {"q": sizes.query_dim, "k": sizes.head_dim, "v": sizes.head_dim}
    return tuple(
        _heads(f"{prefix}{ATTENTION}{which}_proj.{kind}", which, sizes, rank, size) for which, size in widths.items()
    )


def _qk_norm(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    """Of each head alike, or of all heads together."""
    if sizes.family != "minimax_m2":
        return _whole(prefix, part, sizes, rank)
    return (_heads(prefix + part, part.removeprefix(ATTENTION)[0], sizes, rank, sizes.head_dim),)


def _fused_a(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    return tuple(Piece(name=f"{prefix}{ATTENTION}{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa"))


def _latent_heads(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    size = sizes.latent.nope + (sizes.latent.value if "kv_b" in part else sizes.latent.rope)
    return (sizes.share(prefix + part, sizes.heads, rank, sizes.tp, rows=size),)


def _output(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    width = sizes.latent.value or sizes.head_dim
    return (sizes.share(prefix + part, sizes.heads, rank, sizes.tp, dim=1, rows=width),)


def _into_linear(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    """Rows of q, k, v and z, or of b and a: a key head after the other, or each of tensors of their own."""
    of = sizes.linear
    if sizes.family == "qwen3_next":
        values = of.values // max(1, of.keys)
        size = 2 * (of.key_dim + values * of.value_dim) if "qkvz" in part else 2 * values
        return (sizes.share(prefix + part, of.keys, rank, sizes.tp, rows=size),)
    apart = f"{prefix}{LINEAR}in_proj_"
    if "qkvz" in part:
        z = sizes.share(f"{apart}z.weight", of.values, rank, sizes.tp, rows=of.value_dim)
        return (*_convolution(prefix, f"{LINEAR}in_proj_qkv.weight", sizes, rank), z)
    return tuple(sizes.share(f"{apart}{which}.weight", of.values, rank, sizes.tp) for which in "ba")


def _by_value_head(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    columns = part.endswith("out_proj.weight")
    width = sizes.linear.value_dim if columns else 1
    return (sizes.share(prefix + part, sizes.linear.values, rank, sizes.tp, dim=int(columns), rows=width),)


def _convolution(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    of = sizes.linear
    name, keys = prefix + part, of.keys * of.key_dim
    heads = ((0, of.keys, of.key_dim), (keys, of.keys, of.key_dim), (2 * keys, of.values, of.value_dim))
    return tuple(sizes.run(name, first, count, rank, sizes.tp, rows=size) for first, count, size in heads)


def _gate_up(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    if sizes.family == "glm4":  # one tensor there too
        return tuple(sizes.run(prefix + part, first, sizes.inner, rank, sizes.tp) for first in (0, sizes.inner))
    of = part.removesuffix("gate_up_proj.weight")
    return tuple(sizes.share(f"{prefix}{of}{name}.weight", _width(part, sizes), rank, sizes.tp) for name in MLP[:2])


def _down(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    return (sizes.share(prefix + part, _width(part, sizes), rank, sizes.tp, dim=1),)


def _width(part: str, sizes: ServerSizes) -> int:
    """Of a layer's dense MLP, or of its shared experts."""
    return sizes.experts.shared_inner if ".shared_expert" in part else sizes.inner


def _experts(prefix: str, part: str, sizes: ServerSizes, rank: int) -> Pieces:
    """This rank's experts: [experts, rows, columns] has the same bytes as [experts * rows, columns]."""
    of = sizes.experts
    if sizes.tp % sizes.ep or of.count % sizes.ep:
        raise layout_error(f"{of.count} experts on {sizes.tp} ranks do not divide by {sizes.ep} groups")
    if sizes.fused and sizes.ep > 1:
        raise layout_error(
            f"which of {sizes.ep} groups has the shared experts is not known",
            fix="--sglang-disable-shared-experts-fusion; or --check-weights off",
        )
    inside = sizes.tp // sizes.ep
    group, place = divmod(rank, inside)
    size = of.count // sizes.ep
    chosen, dim = (slice(0, 2), 0) if "w13" in part else (slice(2, 3), 1)
    names = [
        f"{prefix}{of.prefix}experts.{expert}.{name}.weight"
        for expert in range(group * size, (group + 1) * size)
        for name in of.names[chosen]
    ]
    names += [f"{prefix}{of.shared}{name}.weight" for name in (MLP[chosen] if sizes.fused else ())]
    return tuple(sizes.share(name, of.inner, place, inside, dim=dim) for name in names)


PARTS: dict[str, Callable[[str, str, ServerSizes, int], Pieces]] = {
    **{f"{name}_layernorm.weight": _whole for name in ("input", "post_attention", "post_self_attn", "post_mlp")},
    **{f"{ATTENTION}{name}_norm.weight": _qk_norm for name in "qk"},
    **{f"{ATTENTION}qkv_proj.{kind}": _qkv for kind in ("weight", "bias")},
    f"{ATTENTION}o_proj.weight": _output,
    f"{ATTENTION}o_proj.bias": _whole,
    f"{ATTENTION}fused_qkv_a_proj_with_mqa.weight": _fused_a,
    **{f"{ATTENTION}{name}.weight": _whole for name in ("q_a_layernorm", "kv_a_layernorm", "kv_a_proj_with_mqa")},
    **{f"{ATTENTION}{name}.weight": _latent_heads for name in ("q_proj", "q_b_proj", "kv_b_proj")},
    **{f"{LINEAR}{name}.weight": _into_linear for name in ("in_proj_qkvz", "in_proj_ba")},
    **{LINEAR + name: _by_value_head for name in ("A_log", "dt_bias", "out_proj.weight")},
    f"{LINEAR}conv1d.weight": _convolution,
    f"{LINEAR}norm.weight": _whole,
    **{f"mlp.{shared}gate_up_proj.weight": _gate_up for shared in ("", "shared_expert.", "shared_experts.")},
    **{f"mlp.{shared}down_proj.weight": _down for shared in ("", "shared_expert.", "shared_experts.")},
    **{f"mlp.{name}": _whole for name in ("gate.weight", "gate.e_score_correction_bias", "shared_expert_gate.weight")},
    **{f"block_sparse_moe.{name}": _whole for name in ("gate.weight", "e_score_correction_bias")},
    **{f"{of}.experts.{name}_weight": _experts for of in ("mlp", "block_sparse_moe") for name in ("w13", "w2")},
}

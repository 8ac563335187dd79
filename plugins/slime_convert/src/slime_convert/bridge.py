"""Hugging Face tensors to Megatron's and back, whole or one tensor-parallel rank's, by a table of names.

    q, k, v of Hugging Face --join--> linear_qkv, whole --shard--> a rank's rows        --load it--> the model
                            <--part--                   <--unshard--

A whole tensor is what a `torch_dist` checkpoint holds and does not depend on the layout; a shard is what one
tensor-parallel rank holds. Bridges come from plugins (`slime_model_bridge`); nothing here imports megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from slime_convert.tower import MEGATRON, tower_shapes
from slime_core.errors import DataError
from slime_core.weights.hashing import text_name
from slime_core.weights.prediction_layers import prefixes

if TYPE_CHECKING:
    from pathlib import Path

    import torch

Kind = Literal[
    "whole",
    "rows",
    "columns",
    "qkv",
    "gated_qkv",
    "gate_up",
    "sections",
    "vocabulary",
    "rope_heads",
    "rope_tail",
    "halves",
]
"""How Hugging Face tensors make one of Megatron's, and how tensor-parallel ranks share it.

whole       one tensor, the same on every rank
rows        one tensor, rows dealt to ranks (column-parallel layers)
columns     one tensor, columns dealt to ranks (row-parallel layers)
qkv         q, k, v; by key-value head: its query heads, its key head, its value head; groups dealt to ranks
gated_qkv   the same where a row of q's tensor has a head's query rows over its gate rows: by key-value head, its query
            heads, their gates, its key head, its value head
gate_up     gate over up, of two tensors or already of one; a rank has its rows of gate over its rows of up
sections    one tensor of several over each other (`BridgeRow.sections`); a rank has its rows of each
vocabulary  one tensor, rows filled up with zeros to a multiple that the ranks divide
rope_heads  one tensor of heads, dealt to ranks; the rotary rows at the end of each head, stored as two halves
            (a b c, A B C), become the pairs that Megatron's latent attention turns (a A, b B, c C)
rope_tail   the same for a tensor with one such end (the key that all heads share); rows dealt to ranks
halves      one tensor whose left and right columns change places; rows dealt to ranks
"""
On = Literal["all", "dense", "moe", "full", "linear"]
GATES = {"qkv": 0, "gated_qkv": 1}  # gates of a query head
ROPE = ("rope_heads", "rope_tail")


@dataclass(slots=True, frozen=True)
class BridgeRow:
    """A line of the table: ``{layer}`` and ``{expert}`` stand for numbers.

    ``on`` says in which layers the row is there: those with dense MLPs or with experts, with full or with linear
    attention. ``when`` names an attribute of the config that must be true (or false: ``not NAME``; several with
    ``and``). ``shape`` gives the Hugging Face shapes in words of :func:`dimensions`, one for all tensors or one each:
    ``"q hidden, kv hidden, kv hidden"``. ``sections`` gives the rows of each part of a tensor of that kind, in these
    words.

    Example:
        Row("decoder.layers.{layer}.mlp.linear_fc2.weight", ("model.layers.{layer}.mlp.down_proj.weight",), "columns",
            shape="hidden ffn")
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind = "whole"
    on: On = "all"
    when: str = ""
    shape: str = ""
    sections: str = ""


@dataclass(slots=True, frozen=True)
class Entry:
    """One tensor of a model: a row with its numbers filled in. ``layer`` and ``expert`` are -1 where it has none.

    ``shapes`` are those of the Hugging Face tensors, in the order of ``hf``; empty if the row has none.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    layer: int = -1
    expert: int = -1
    shapes: tuple[tuple[int, ...], ...] = ()
    sections: tuple[int, ...] = ()

    @property
    def in_tower(self) -> bool:
        """Whether it is a tensor of a vision tower."""
        return self.megatron.startswith(MEGATRON)


@dataclass(slots=True, frozen=True, kw_only=True)
class Sizes:
    """What of a config decides how tensors are joined. ``words`` are the numbers of :func:`dimensions`."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    vocab: int  # rows of the embedding in the folder
    padded_vocab: int  # rows that a whole tensor has
    experts: int = 0
    moe_layers: frozenset[int] = frozenset()
    linear_layers: frozenset[int] = frozenset()  # those with linear attention
    tied: bool = False
    rope: int = 0  # rotary rows of a head with latent attention
    ahead: tuple[str, ...] = ()  # beginnings of names in the folder that Megatron's model does without
    words: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(slots=True, frozen=True, kw_only=True)
class Bridge:
    """One family: its tensors, its config, its layers.

    ``fields`` gives fields of Megatron's configs: an attribute of the Hugging Face config, a `Given` value, or
    a function of the config. ``only`` names attributes of the config with the values that the layers here express.
    """

    family: str
    rows: Sequence[BridgeRow]
    fields: Mapping[str, str | Given | Callable[[Any], Any]]
    attention: Literal["gqa", "mla"] = "gqa"
    sandwich: bool = False  # norms after attention and MLP too
    wide_qk_norms: bool = False  # one norm of all heads' queries, one of all their keys
    linear_apart: bool = False  # linear attention projects q, k, v, their gates and numbers by four matrices, not two
    ahead: Sequence[BridgeRow] = ()  # of layer {ahead} that predicts further ahead, beside the rows of any layer
    ahead_layer: str = "model.layers.{layer}"  # where the folder has it
    tower: str = ""  # before the names of a vision tower in the folder; empty where the text model alone is trained
    parameter_names: Mapping[str, str] = field(default_factory=dict)  # how names begin in the folder and in the model
    interleaved_axes: bool = False  # of M-RoPE: axes take turns along a head; else each has a section of it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config attributes that a folder may leave out
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def entries(self, config: Any, ahead: int = 0, experts: int | None = None) -> list[Entry]:
        """Every tensor of a model with this config, in the order of layers.

        Args:
            ahead: layers that predict further ahead, each built as the last layer is
            experts: of a layer that are listed, the first ones; None for all
        """
        whole, sizes, config = config, self.sizes(config), language_part(config)
        sizes = sizes if experts is None else replace(sizes, experts=min(experts, sizes.experts))
        rows = [row for row in self.rows if holds(row.when, config, self.defaults)]
        entries = self._tower_entries(whole)
        entries += [e for row in rows if "{layer}" not in row.megatron for e in _filled(row, -1, sizes)]
        for layer in range(sizes.layers):
            mlp = "moe" if layer in sizes.moe_layers else "dense"
            attention = "linear" if layer in sizes.linear_layers else "full"
            of_layer = [row for row in rows if "{layer}" in row.megatron and row.on in ("all", mlp, attention)]
            entries += [entry for row in of_layer for entry in _filled(row, layer, sizes)]
        for number in range(ahead):
            of_ahead = (*self.ahead, *(self._ahead(row) for row in of_layer))
            entries += [entry for row in of_ahead for entry in _filled(row, -1, sizes, number)]
        return entries

    def _tower_entries(self, config: Any) -> list[Entry]:
        """The vision tower's tensors, each whole on every rank that has it."""
        shapes = tower_shapes(config).items() if self.tower else ()
        return [Entry(MEGATRON + name, (self.tower + name,), "whole", shapes=(shape,)) for name, shape in shapes]

    def parameter_name(self, stored: str) -> str:
        """A tensor's name in transformers' model, of its name in the folder."""
        for begin, name in self.parameter_names.items():
            if stored.startswith(begin):
                return name + stored.removeprefix(begin)
        return stored if self.tower else text_name(stored)

    def _ahead(self, row: BridgeRow) -> BridgeRow:
        """A layer's row as that of the same tensor in a layer that predicts further ahead."""
        megatron = row.megatron.replace("decoder.layers.{layer}", "mtp.layers.{ahead}.transformer_layer")
        hf = tuple(name.replace("model.layers.{layer}", self.ahead_layer) for name in row.hf)
        return replace(row, megatron=megatron, hf=hf)

    def megatron(self, config: Any) -> dict[str, Any]:
        """Fields of Megatron's configs and of its GPT model, from the config of the folder.

        Raises:
            DataError: TOK00 the config lacks an attribute, TOK200 it has a value that these layers do not express.
        """
        config = language_part(config)
        for name, values in self.only.items():
            if (value := getattr(config, name, None)) is not None and value not in values:
                raise refused(self.family, name, value, f"its layers are built for {_or(values)}")
        return {name: self._value(name, source, config) for name, source in self.fields.items()}

    def sizes(self, config: Any, multiple: int = 1) -> Sizes:
        """Numbers of a config; rows of the vocabulary are filled up to a ``multiple``."""
        ahead, fields, config = prefixes(config), self.megatron(config), language_part(config)
        vocab = int(config.vocab_size)
        words = dimensions(fields, vocab)
        experts = int(fields.get("num_moe_experts") or 0)
        layers = int(fields["num_layers"])
        freq = fields.get("moe_layer_freq", 1)
        sparse = [bool(x) for x in freq] if isinstance(freq, list) else [n % freq == 0 for n in range(layers)]
        heads = int(fields["num_attention_heads"])
        return Sizes(
            layers=layers,
            hidden=int(fields["hidden_size"]),
            heads=heads,
            groups=int(fields.get("num_query_groups") or heads),
            head_dim=int(fields.get("kv_channels") or fields["hidden_size"] // heads),
            vocab=vocab,
            padded_vocab=-(-vocab // multiple) * multiple,
            experts=experts,
            moe_layers=frozenset(n for n, moe in enumerate(sparse) if moe and experts),
            linear_layers=frozenset(n for n, linear in enumerate(fields.get("linear_attention_freq", ())) if linear),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            rope=words.get("rope", 0),
            ahead=ahead,
            words=words,
        )

    def _value(self, name: str, source: str | Given | Callable[[Any], Any], config: Any) -> Any:
        if isinstance(source, Given):
            return source.value
        if not isinstance(source, str):
            return source(config)
        value = getattr(config, source, self.defaults.get(source))
        if value is None and source not in self.defaults:
            raise DataError(
                f"config.json has no {source}",
                code="TOK00",
                why=f"it becomes {name} of a {self.family} model",
                fix="save the model again with the transformers version that this slime names",
            )
        return value


def language_part(config: Any) -> Any:
    """The part of a config that describes the language model; of a model of pictures and text, its ``text_config``."""
    text = getattr(config, "text_config", None)
    if text is None:
        return config
    text = copy(text)
    text.tie_word_embeddings = config.tie_word_embeddings  # the outer one decides
    return text


@dataclass(slots=True, frozen=True)
class Given:
    """A value that every model of a family has."""

    value: Any


def dimensions(fields: Mapping[str, Any], vocab: int) -> dict[str, int]:
    """The words of ``BridgeRow.shape``, from the fields of :meth:`Bridge.megatron`; each counts rows or columns."""
    heads = int(fields["num_attention_heads"])
    head = int(fields.get("kv_channels") or fields["hidden_size"] // heads)
    dimensions: dict[str, Any] = {
        "vocab": vocab,
        "hidden": fields["hidden_size"],
        "hidden_twice": 2 * fields["hidden_size"],
        "head": head,
        "q": heads * head,
        "kv": int(fields.get("num_query_groups") or heads) * head,
        "ffn": fields["ffn_hidden_size"],
        "ffn_twice": 2 * fields["ffn_hidden_size"],  # gate and up in one tensor
        "experts": fields.get("num_moe_experts"),
        "expert": fields.get("moe_ffn_hidden_size"),  # the inner size of one
        "shared": fields.get("moe_shared_expert_intermediate_size"),
    }
    if "kv_lora_rank" in fields:
        rope, plain, value = (fields[name] for name in ("qk_pos_emb_head_dim", "qk_head_dim", "v_head_dim"))
        dimensions |= {
            "rope": rope,
            "q": heads * (plain + rope),
            "q_low": fields["q_lora_rank"],
            "kv_low": fields["kv_lora_rank"],
            "kv_down": fields["kv_lora_rank"] + rope,
            "kv": heads * (plain + value),
            "value": heads * value,
        }
    if "linear_num_key_heads" in fields:
        values, width = (int(fields[f"linear_{name}"]) for name in ("num_value_heads", "value_head_dim"))
        key, value = int(fields["linear_num_key_heads"]) * int(fields["linear_key_head_dim"]), values * width
        dimensions |= {
            "one": 1,
            "q_gated": 2 * heads * head,  # a head's query and its gate
            "linear_key": key,
            "linear_value": value,
            "linear_head": width,
            "linear_heads": values,
            "linear_qkv": 2 * key + value,
            "linear_qkvz": 2 * key + 2 * value,
            "linear_ba": 2 * values,
            "linear_conv": fields["linear_conv_kernel_dim"],
        }
    return {name: int(number) for name, number in dimensions.items() if number is not None}


def refused(family: str, name: str, value: Any, why: str) -> DataError:
    """TOK200: a value of config.json that a family's layers do not express."""
    return DataError(
        f"config.json has {name} = {value!r}, which is not trained here for {family} models",
        code="TOK200",
        where=f"config.json: {name}",
        why=why,
        fix='train it with train_backend = "fsdp", which runs the layers of transformers, or choose another model',
    )


def _or(values: Sequence[Any]) -> str:
    return " or ".join(repr(value) for value in values)


def holds(when: str, config: Any, defaults: Mapping[str, Any]) -> bool:
    """Whether a row's condition is met: ``NAME``, ``not NAME``, several with ``and`` between, or empty."""

    def true(text: str) -> bool:
        name = text.removeprefix("not ")
        return bool(getattr(config, name, defaults.get(name))) != text.startswith("not ")

    return all(true(text) for text in when.split(" and ") if text)


def _filled(row: BridgeRow, layer: int, sizes: Sizes, ahead: int = -1) -> Iterator[Entry]:
    dimensions = [tuple(sizes.words[word] for word in text.split()) for text in row.shape.split(",") if text]
    shapes = tuple(dimensions * len(row.hf) if len(dimensions) == 1 else dimensions)
    sections = tuple(sizes.words[word] for word in row.sections.split())
    for expert in range(sizes.experts) if "{expert}" in row.megatron else (-1,):
        numbers = {"layer": layer if ahead < 0 else sizes.layers + ahead, "ahead": ahead, "expert": expert}
        hf = tuple(name.format(**numbers) for name in row.hf)
        yield Entry(row.megatron.format(**numbers), hf, row.kind, layer, expert, shapes, sections)


def join(entry: Entry, tensors: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The whole Megatron tensor of Hugging Face's, in the order of ``entry.hf``."""
    import torch

    if entry.kind in GATES:
        q = _regrouped(tensors[0], (sizes.groups, sizes.heads // sizes.groups, 1 + GATES[entry.kind]))
        parts = [t.reshape(sizes.groups, -1, *t.shape[1:]) for t in (q, *tensors[1:])]
        return torch.cat(parts, dim=1).reshape(-1, *tensors[0].shape[1:])
    if entry.kind == "gate_up":
        return torch.cat(list(tensors))
    (tensor,) = tensors
    if entry.kind in ROPE:
        return _turned(entry, tensor, sizes, (2, sizes.rope // 2))
    if entry.kind == "halves":
        return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
    if entry.kind == "vocabulary" and len(tensor) < sizes.padded_vocab:
        return torch.cat([tensor, tensor.new_zeros(sizes.padded_vocab - len(tensor), *tensor.shape[1:])])
    return tensor


def part(entry: Entry, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """The Hugging Face tensors of a whole Megatron tensor, ordered as ``entry.hf``; the inverse of :func:`join`."""
    if entry.kind in GATES:
        grouped, per_query = whole.reshape(sizes.groups, -1, *whole.shape[1:]), 1 + GATES[entry.kind]
        queries = per_query * sizes.heads // sizes.groups
        one = grouped.shape[1] // (queries + 2)  # rows of a head: 1 or head_dim
        q, k, v = (x.reshape(-1, *whole.shape[1:]) for x in grouped.split([queries * one, one, one], dim=1))
        return [_regrouped(q, (sizes.groups, per_query, sizes.heads // sizes.groups)), k, v]
    if entry.kind == "gate_up":
        return list(whole.chunk(len(entry.hf)))
    if entry.kind in ROPE:
        return [_turned(entry, whole, sizes, (sizes.rope // 2, 2))]
    if entry.kind == "halves":
        return [join(entry, [whole], sizes)]
    return [whole[: sizes.vocab]] if entry.kind == "vocabulary" else [whole]


def _regrouped(tensor: torch.Tensor, groups: tuple[int, int, int]) -> torch.Tensor:
    """The tensor with the second and the third of these axes of its rows exchanged."""
    return tensor.reshape(*groups, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _turned(entry: Entry, tensor: torch.Tensor, sizes: Sizes, halves: tuple[int, int]) -> torch.Tensor:
    """The tensor with the last rows of each head transposed: from two halves to pairs, or back."""
    import torch

    heads = tensor.reshape(sizes.heads if entry.kind == "rope_heads" else 1, -1, *tensor.shape[1:])
    plain, rotary = heads.split([heads.shape[1] - sizes.rope, sizes.rope], dim=1)
    turned = rotary.unflatten(1, halves).transpose(1, 2).flatten(1, 2)
    return torch.cat([plain, turned], dim=1).reshape(tensor.shape)


def whole_shape(entry: Entry, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the whole Megatron tensor, from ``entry.shapes``."""
    rows = sizes.padded_vocab if entry.kind == "vocabulary" else sum(shape[0] for shape in entry.shapes)
    return (rows, *entry.shapes[0][1:])


def sections(entry: Entry, rows: int) -> list[int]:
    """Rows of each part of a whole tensor of so many, where a rank has its rows of each; else none."""
    return [rows // 2] * 2 if entry.kind == "gate_up" else list(entry.sections)


def shard(entry: Entry, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What one of ``size`` tensor-parallel ranks holds of a whole tensor."""
    import torch

    if size == 1 or entry.kind == "whole":
        return whole
    if heights := sections(entry, len(whole)):
        return torch.cat([section.chunk(size)[rank] for section in whole.split(heights)])
    return whole.chunk(size, dim=1 if entry.kind == "columns" else 0)[rank]


def unshard(entry: Entry, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor of all ranks' shards, in the order of ranks; the inverse of :func:`shard`."""
    import torch

    if len(shards) == 1 or entry.kind == "whole":
        return shards[0]
    if heights := sections(entry, sum(map(len, shards))):
        parts = [one.split([height // len(shards) for height in heights]) for one in shards]
        return torch.cat([part for section in zip(*parts, strict=True) for part in section])
    return torch.cat(list(shards), dim=1 if entry.kind == "columns" else 0)


def check_tensors(entries: Sequence[Entry], sizes: Sizes, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Compare a folder's tensor names and shapes with those that the entries need.

    A copy of a tied output matrix and layers that predict further ahead are let through, and nothing else that no
    entry names.

    Args:
        found: shapes by name, as in the headers (``Shards.infos``)

    Raises:
        DataError: TOK46 tensors that are missing, not of this model, or of another shape.
    """
    from slime_core.weights.build import Fit, misfit

    expected = {name: shape for entry in entries for name, shape in zip(entry.hf, entry.shapes)}
    copies = {"lm_head.weight"} if sizes.tied else set()
    met = Fit(
        missing=sorted(name for name in expected if name not in shapes),
        extra=sorted(n for n in shapes if n not in expected and n not in copies and not n.startswith(sizes.ahead)),
        shapes=[(name, shapes[name], shape) for name, shape in expected.items() if shapes.get(name, shape) != shape],
    )
    if not met:
        raise misfit(met, folder)

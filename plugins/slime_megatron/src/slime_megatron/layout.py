"""Parallel layout: who has which coordinates and layers, or why the model does not fit.

    rank = tp + TP * (cp + CP * (dp + DP * pp))           dense layers, megatron-core's order tp-cp-ep-dp-pp
    rank = etp + ETP * (ep + EP * (edp + EDP * pp))       experts

A stage has one chunk of layers, or several (an interleaved pipeline): in the order of layers chunk c is of stage
c % PP. Everything here is arithmetic, so a layout is refused before any process starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import log2, prod
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_convert.bridge import Sizes
    from slime_core.config.problems import Origins

FLAGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "vp": "num_virtual_stages_per_pipeline_rank",
    "etp": "expert_tensor_parallel_size",
}
"""Field of a layout -> its flag."""
OF_CHUNK, PATTERN = "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"
ALONE = "none of these flags: the ranks share the batch alone"
SHOWN = 3  # layouts that a message offers


@dataclass(slots=True, frozen=True, kw_only=True)
class Coordinates:
    """A rank's place in each group: 0 to the group's size."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Layout:
    """How ranks share a model and a batch.

    Example:
        Layout(world=8, tp=2, pp=2).dp == 2
        Layout(world=8, tp=2, pp=2).stages(28) == (range(0, 14), range(14, 28))
    """

    world: int
    tp: int = 1  # ranks that share each tensor
    pp: int = 1  # stages of layers
    cp: int = 1  # ranks that share each sequence
    ep: int = 1  # ranks that share the experts
    etp: int = 1  # ranks that share each expert's tensors
    vp: int = 1  # chunks of layers of a stage
    pattern: str = ""  # Megatron-LM's way to write what each chunk has: "Ett|tt|tt|tL"
    first: int | None = None  # layers of the first stage, where it has its own number
    last: int | None = None  # and of the last
    embedding_counts: bool = False  # the embedding counts as a layer of the first stage
    loss_counts: bool = False  # the output layer counts as one of the last

    @classmethod
    def of(cls, table: Mapping[str, Any], world: int, layers: int = 0) -> Layout:
        """The layout that a [megatron] table asks for; expert_tensor_parallel_size is by default the tensor's.

        Args:
            layers: of the model, which num_layers_per_virtual_pipeline_stage divides.

        Raises:
            ConfigError: CFG03 a size below 1, CFG04 a chunk of layers that the stages do not divide into.
        """
        sizes = {field: table.get(flag, 1) for field, flag in FLAGS.items()}
        if table.get(FLAGS["etp"]) is None:
            sizes["etp"] = sizes["tp"]
        for field, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"{FLAGS[field]} = {size} is out of range",
                    code="CFG03",
                    where=f"megatron.{FLAGS[field]}",
                    fix=f"set {FLAGS[field]} to an integer >= 1",
                )
        layout = cls(
            world=world,
            **sizes,
            pattern=table.get(PATTERN, ""),
            first=table.get("decoder_first_pipeline_num_layers"),
            last=table.get("decoder_last_pipeline_num_layers"),
            embedding_counts=bool(table.get("account_for_embedding_in_pipeline_split", False)),
            loss_counts=bool(table.get("account_for_loss_in_pipeline_split", False)),
        )
        return replace(layout, vp=layout._chunks(table, layers))

    def _chunks(self, table: Mapping[str, Any], layers: int) -> int:
        """Chunks of a stage, by whichever flags say it."""
        counts = {FLAGS["vp"]: self.vp} if FLAGS["vp"] in table else {}
        if table.get(OF_CHUNK) is not None:
            counts[OF_CHUNK] = self._chunks_of(table[OF_CHUNK], layers)
        if self.pattern:
            counts[PATTERN] = max(1, len(self.pattern_rows()) // self.pp)
        if len(set(counts.values())) > 1:
            raise ConfigError(
                "chunks of a pipeline stage are " + " and ".join(f"{n} by {name}" for name, n in counts.items()),
                code="CFG04",
                where=", ".join(f"megatron.{name}" for name in counts),
                why="each of these flags says how many there are",
                fix="keep one of them",
            )
        return next(iter(counts.values()), 1)

    def _chunks_of(self, size: int, layers: int) -> int:
        """Chunks of a stage that have ``size`` layers each."""
        counted = layers + self.embedding_counts + self.loss_counts
        if size > 0 and counted % (self.pp * size) == 0:
            return counted // (self.pp * size)
        sizes = [n for n in range(1, counted // self.pp) if counted % (self.pp * n) == 0]
        raise ConfigError(
            f"{OF_CHUNK} = {size} does not divide the layers of a pipeline stage",
            code="CFG04",
            where=f"megatron.{OF_CHUNK}",
            why=f"{counted} layers are on {self.pp} stages",
            fix="one of " + ", ".join(map(str, sizes)) if sizes else f"leave {OF_CHUNK} out",
        )

    def pattern_rows(self) -> list[str]:
        """The letters of each chunk, in the order of layers: E the embedding, t a layer, L the output."""
        text = self.pattern.replace(",", "")
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # a group in brackets first, then a letter
            text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
        return text.split("|") if text else []

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the dense layers and share its sequences."""
        return self.tp * self.cp * self.pp

    @property
    def expert_model(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.etp * self.ep * self.pp

    @property
    def dp(self) -> int:
        """Ranks that hold the same dense weights and other sequences."""
        return self.world // self.model

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // self.expert_model

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands in every group."""
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        etp, rest = rank % self.etp, rank // self.etp
        ep, rest = rest % self.ep, rest // self.ep
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=rest % self.edp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank with these dense coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def chunks(self, layers: int) -> tuple[range, ...]:
        """Chunks of layers in their order, of each stage in turn; sizes must have been checked."""
        counts = self._counts(layers)
        starts = [sum(counts[:chunk]) for chunk in range(len(counts))]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))

    def stages(self, layers: int) -> list[int]:
        """How many layers each pipeline stage has."""
        counts = self._counts(layers)
        return [sum(counts[stage :: self.pp]) for stage in range(self.pp)]

    def _counts(self, layers: int) -> list[int]:
        """Layers of each chunk."""
        if self.pattern:
            return [row.count("t") for row in self.pattern_rows()]
        counts = [(layers + self.embedding_counts + self.loss_counts) // self.pp] * self.pp
        if self.first is not None or self.last is not None:
            middle, edges = self._middle(layers)
            counts = [edges // middle if middle else 0] * self.pp
            counts[0] = self.first if self.first is not None else counts[0]
            counts[-1] = self.last if self.last is not None else counts[-1]
        counts = [count // self.vp for count in counts] * self.vp
        counts[0] -= self.embedding_counts
        counts[-1] -= self.loss_counts
        return counts

    def _middle(self, layers: int) -> tuple[int, int]:
        """Stages that have no number of their own, and the layers that are left for them."""
        counts = [count for count in (self.first, self.last) if count is not None]
        return self.pp - len(counts), layers - sum(counts)

    @property
    def text(self) -> str:
        """As flags, without those that are 1: what a message offers."""
        shown = {field: getattr(self, field) for field in FLAGS}
        plain = {name: size for name, size in shown.items() if size != (self.tp if name == "etp" else 1)}
        return " ".join(f"--{FLAGS[name].replace('_', '-')} {size}" for name, size in plain.items()) or ALONE


@dataclass(slots=True, frozen=True)
class Fault:
    """One reason why a layout does not fit: what, why, and the fields of the layout, or flags, that it is about."""

    what: str
    why: str
    fields: tuple[str, ...]


def check(
    layout: Layout,
    sizes: Sizes,
    fields: Mapping[str, Any],
    *,
    sequence_parallel: bool = False,
    origins: Origins | None = None,
) -> None:
    """Refuse a layout that the ranks or the model do not divide by, with every reason and layouts that would work.

    Args:
        layout: what is asked for.
        sizes: of the model.
        fields: the model's fields of TransformerConfig: ``ffn_hidden_size`` and those of experts are looked at.
        sequence_parallel: whether activations between layers are shared by tensor-parallel ranks.
        origins: where each flag was written, for the message.

    Raises:
        ConfigError: CFG04.
    """
    faults = [*of_ranks(layout), *of_model(layout, sizes, fields)]
    if layout.tp > 1 and sizes.experts and not sequence_parallel:
        message = f"experts with tensor_model_parallel_size = {layout.tp} and no sequence_parallel"
        faults.append(Fault(message, "tensor-parallel ranks would route the same tokens twice", ("tp",)))
    if not faults:
        return
    names = [FLAGS.get(name, name) for name in dict.fromkeys(name for fault in faults for name in fault.fields)]
    places = [(origins.of_own(("megatron", name)) if origins else "") or f"megatron.{name}" for name in names]
    first, *more = faults
    lines = [f"{fault.what}: {fault.why}" for fault in more]
    raise ConfigError(
        first.what,
        code="CFG04",
        where=", ".join(places),
        why="".join([first.why, *(f"\n    and {line}" for line in lines)]),
        fix="\n".join(_fixes(layout, sizes, fields, need_sequence_parallel=not sequence_parallel)),
    )


def of_ranks(layout: Layout) -> Iterator[Fault]:
    """Whether the ranks divide by the layout's groups."""
    if layout.world % layout.model:
        yield Fault(
            f"{layout.world} trainer ranks do not divide into groups of {layout.model}",
            f"tensor * context * pipeline parallel sizes are {layout.tp} * {layout.cp} * {layout.pp}",
            ("tp", "cp", "pp"),
        )
    if layout.world % layout.expert_model and (layout.etp, layout.ep) != (layout.tp, 1):
        yield Fault(
            f"{layout.world} trainer ranks do not divide into expert groups of {layout.expert_model}",
            f"expert tensor * expert * pipeline parallel sizes are {layout.etp} * {layout.ep} * {layout.pp}",
            ("etp", "ep", "pp"),
        )


def of_model(layout: Layout, sizes: Sizes, fields: Mapping[str, Any]) -> Iterator[Fault]:
    """Whether heads, widths, experts and layers divide by the layout's groups."""
    dense = len(sizes.moe_layers) < sizes.layers
    yield from _divides(
        "tp", layout.tp, sizes.heads, "attention heads", "linear_qkv and linear_proj are dealt by head"
    )
    if not fields.get("multi_latent_attention"):
        yield from _divides("tp", layout.tp, sizes.groups, "key-value heads", "linear_qkv is dealt by key-value head")
    if sizes.linear_layers:
        heads = int(fields["linear_num_key_heads"])
        reason = "the tensors of linear attention are dealt by key head"
        yield from _divides("tp", layout.tp, heads, "key heads of linear attention", reason)
    if dense and fields.get("ffn_hidden_size"):
        ffn = int(fields["ffn_hidden_size"])
        yield from _divides("tp", layout.tp, ffn, "rows of ffn_hidden_size", "mlp.linear_fc1 is dealt by row")
    if not sizes.experts:
        if layout.ep > 1:
            message = f"expert_model_parallel_size = {layout.ep}, and the model has no experts"
            yield Fault(message, "its layers are dense", ("ep",))
    else:
        yield from _divides("ep", layout.ep, sizes.experts, "experts", "mlp.experts are dealt whole")
        width = int(fields.get("moe_ffn_hidden_size") or fields.get("ffn_hidden_size") or 0)
        yield from _divides(
            "etp", layout.etp, width, "rows of moe_ffn_hidden_size", "an expert's linear_fc1 is dealt by row"
        )
        shared = int(fields.get("moe_shared_expert_intermediate_size") or 0)
        reason = "the shared expert's linear_fc1 is dealt by row"
        yield from _divides("tp", layout.tp, shared, "rows of moe_shared_expert_intermediate_size", reason)
    yield from _of_layers(layout, sizes.layers)


def _divides(field: str, size: int, count: int, of: str, why: str) -> Iterator[Fault]:
    if count % size:
        yield Fault(f"{FLAGS[field]} = {size} does not divide {count} {of}", why, (field,))


def _of_layers(layout: Layout, layers: int) -> Iterator[Fault]:
    pp, vp, counts = layout.pp, layout.vp, [n for n in (layout.first, layout.last) if n is not None]
    counted = layers + layout.embedding_counts + layout.loss_counts
    if pp == 1:
        reason = "pipeline_model_parallel_size is 1"
        if counts:
            yield Fault("layers of a first or last pipeline stage, and there is one stage", reason, ("pp",))
        if vp > 1:
            yield Fault("an interleaved pipeline, and there is one stage", reason, ("pp", "vp"))
    elif layout.pattern:
        yield from _of_pattern(layout, layers)
    elif counts and counted != layers:
        reason = "the first names numbers, the other counts"
        yield Fault("decoder_*_pipeline_num_layers and account_for_*_in_pipeline_split are both set", reason, ("pp",))
    elif counts:
        middle, edges = layout._middle(layers)
        if min(counts) < 1 or edges < middle or (edges % middle if middle else edges):
            message = (
                f"{layers} layers less {' and '.join(map(str, counts))} leave {edges} for {middle} pipeline stages"
            )
            yield Fault(message, "stages between the first and the last have equally many, at least one", ("pp",))
        elif uneven := [count for count in replace(layout, vp=1).stages(layers) if count % vp]:
            message = f"{FLAGS['vp']} = {vp} does not divide the {uneven[0]} layers of a pipeline stage"
            yield Fault(message, "a stage's chunks have equally many, at least one", ("vp",))
    elif counted % pp or counted // pp < 1 + max(layout.embedding_counts, layout.loss_counts):
        message = f"pipeline_model_parallel_size = {pp} does not divide {counted} layers"
        yield Fault(message, _uneven(layers, pp), ("pp",))
    elif counted // pp % vp or counted // (pp * vp) < 1 + max(layout.embedding_counts, layout.loss_counts):
        message = f"{FLAGS['vp']} = {vp} does not divide the {counted // pp} layers of a pipeline stage"
        yield Fault(message, "a stage's chunks have equally many, at least one", ("vp",))


def _of_pattern(layout: Layout, layers: int) -> Iterator[Fault]:
    """Whether the letters of a pattern are a pipeline of the model's layers."""
    rows = layout.pattern_rows()
    letters = "".join(rows)
    reasons = []
    if len(rows) % layout.pp:
        reasons.append(f"it has {len(rows)} chunks for {layout.pp} stages")
    if letters != f"E{'t' * layers}L":
        reasons.append(f"it must have E, then t for each of the {layers} layers, then L")
    if "" in rows:
        reasons.append("a chunk is empty")
    if layout.first is not None or layout.last is not None or layout.embedding_counts or layout.loss_counts:
        reasons.append("decoder_*_pipeline_num_layers and account_for_*_in_pipeline_split say otherwise")
    if reasons:
        yield Fault(f"{PATTERN} = {layout.pattern!r} cannot be had", "; ".join(reasons), (PATTERN,))


def _uneven(layers: int, pp: int) -> str:
    size = -(-layers // pp)
    last = layers - size * (pp - 1)
    if last < 1:
        size, last = layers // pp, layers - layers // pp * (pp - 1)
    if last < 1 or size < 1:
        return f"there are {layers} layers"
    return f"stages have equally many by default: --decoder-last-pipeline-num-layers {last} gives the others {size}"


def _fixes(layout: Layout, sizes: Sizes, fields: Mapping[str, Any], *, need_sequence_parallel: bool) -> Iterator[str]:
    layouts = nearest_layouts(layout, sizes, fields)
    if layouts[:1] == [layout]:
        yield "--sequence-parallel"
        return
    for number, one in enumerate(layouts):
        needs = " --sequence-parallel" if need_sequence_parallel and one.tp > 1 and sizes.experts else ""
        yield f"{'' if number else f'with {layout.world} ranks: '}{one.text}{needs}"
    step = max(layout.model, layout.expert_model)
    if layout.world % step and not any(True for _ in of_model(layout, sizes, fields)):
        below = layout.world // step * step
        counts = " or ".join(str(n) for n in (below, below + step) if n)
        yield f"or {counts} ranks: actor_num_nodes * actor_num_gpus_per_node"


def nearest_layouts(layout: Layout, sizes: Sizes, fields: Mapping[str, Any], most: int = SHOWN) -> list[Layout]:
    """Layouts of as many ranks that fit the model, those that change the least first."""
    divisors = [n for n in range(1, layout.world + 1) if layout.world % n == 0]
    expert = divisors if sizes.experts else [1]
    layouts = []
    for tp, pp, cp, ep in product(divisors, divisors, divisors, expert):
        if layout.world % prod((tp, pp, cp)):
            continue
        followed = tp if layout.etp == layout.tp else layout.etp
        for etp in dict.fromkeys((followed, 1, tp)) if sizes.experts else (tp,):
            one = replace(layout, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
            plain = replace(one, first=None, last=None, pattern="", vp=1)
            for candidate in dict.fromkeys((one if pp == layout.pp else replace(plain, vp=layout.vp), plain)):
                if not any(True for _ in of_ranks(candidate)) and not any(
                    True for _ in of_model(candidate, sizes, fields)
                ):
                    layouts.append(candidate)
                    break
    return sorted(layouts, key=lambda one: _distance(one, layout))[:most]


def _distance(one: Layout, other: Layout) -> tuple[float, float, float]:
    *steps, of_experts = [abs(log2(getattr(one, name) / getattr(other, name))) for name in FLAGS]
    etp_follows = (one.etp == one.tp) == (other.etp == other.tp)
    steps.append(0 if etp_follows else of_experts)
    return sum(steps), float(sum(step > 0 for step in steps)), -float(one.tp)

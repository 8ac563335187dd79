"""Logits of packed rows by the own code of any transformers model whose attention can be replaced.

The model runs on [1, N] tokens of many sequences. Everything but attention treats a row by itself; attention is ours
and finds each row's slot and position in the pass's Rows. What a model passes to attention beyond that raises
:class:`Unfit`, and the engine falls back to recomputing whole prefixes.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from slime_core.engines.local.attention import Form
from slime_core.engines.local.media import RowMedia
from slime_core.engines.local.row_counts import Product
from slime_core.engines.local.slots import LayerShape
from slime_core.media.features import embed, text_model
from slime_core.media.positions import MediaLayout

if TYPE_CHECKING:
    from slime_core.weights.routers import Routers

ATTENTION = "slime_slots"
HARMLESS = frozenset(
    {
        *("position_ids", "cache_position", "position_embeddings", "past_key_values", "use_cache", "is_causal"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        *("layer_head_mask", "head_mask"),
    }
)
PROBE_ROWS = 16


class Unfit(Exception):
    """This model's attention does something that cannot be done row by row."""


class Board:
    """What the attention function of one model reads: the pass that is running."""

    def __init__(self) -> None:
        self.rows: Any = None  # `attention.PackedTokens` over `slots.KVCache`, or `pages.PagedTokens` over its cache
        self.cache: Any = None
        self.layers: dict[int, int] = {}  # id of the attention module -> layer
        self.shapes: list[LayerShape] = []

    def run(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Form, sinks: Any
    ) -> torch.Tensor:
        """[1, H, N, d] each -> [1, N, Hq, dv]."""
        if self.rows is None or self.cache is None:
            return self._record(module, query, key, value)
        layer = self.layers[id(module)]
        self.rows.write(self.cache, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        out: torch.Tensor = self.rows.look(self.cache, layer, query[0].transpose(0, 1), form, sinks)
        return out[None]

    def _record(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if id(module) in self.layers:
            raise Unfit("one attention module runs twice in a pass")
        if key.shape[2] != query.shape[2] or query.shape[0] != 1:
            raise Unfit("keys are longer than the queries of the same pass")
        self.layers[id(module)] = len(self.shapes)
        self.shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers' AttentionInterface."""
    beyond = [name for name, argument in kwargs.items() if argument is not None and name not in HARMLESS]
    if attention_mask is not None or beyond:
        raise Unfit(f"attention is given {', '.join(beyond) or 'a mask'}")
    if not (getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False):
        raise Unfit("attention is not causal")
    form = Form(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window or 0),
        softcap=float(softcap or 0.0),
    )
    return module.slime_board.run(module, query, key, value, form, s_aux), None


class OwnPlan:
    """A plan that runs the model's own code: nothing is kept beside the parameters."""

    def refresh(self) -> None:
        """Follow the parameters."""

    def release(self) -> None:
        """Drop every copy."""

    def reach(self, positions: int) -> None:
        """Be ready for so many positions."""


class PackedPlan(OwnPlan):
    """Runs a model's own forward on packed rows.

    Of a model that sees pictures the text part runs, on embeddings.

    Raises:
        Unfit: the model does not take a replaced attention, or needs more of it than rows.
    """

    name = "packed"
    hidden_widths = False  # elementwise kernels run over sizes of no linear layer (fused experts)

    def __init__(self, model: Any, device: str) -> None:
        from transformers import AttentionInterface

        text = model.config.get_text_config()
        if getattr(text, "attention_chunk_size", None):
            raise Unfit("attention is chunked, which the packed plan does not support")
        if odd := set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
            raise Unfit(f"layers of type {', '.join(sorted(odd))} have a state that packed rows lack; SGLang keeps it")
        AttentionInterface.register(ATTENTION, slot_attention)
        self._model, self._text = model, text_model(model)
        self._sees = MediaLayout.of(model.config) is not None
        self.routers: Routers | None = None  # where choices of experts are recorded, into the cache
        self._board = Board()
        for module in self._text.modules():
            module.slime_board = self._board
        try:
            self._text.set_attn_implementation(ATTENTION)
            if hasattr(self._text, "set_experts_implementation") and device == "cpu":
                self._text.set_experts_implementation("batched_mm")  # one product a row, whatever its neighbours
        except (ValueError, KeyError, ImportError, AttributeError) as error:
            raise Unfit(str(error)) from error
        accepts = inspect.signature(self._model.forward).parameters
        self.hidden_widths = any(parameter.ndim > 2 for parameter in self._text.parameters())
        if "position_ids" not in accepts:
            raise Unfit("forward takes no position_ids")
        self._keeps = "logits_to_keep" in accepts
        zeros = torch.zeros(PROBE_ROWS, dtype=torch.int64, device=device)
        self._call(zeros, torch.arange(PROBE_ROWS, device=device), None, RowMedia())
        self.shapes = self._board.shapes
        if not self.shapes:
            raise Unfit("the model never called the replaced attention")

    def products(self) -> list[Product]:
        """Every kind of linear layer."""
        kinds: dict[tuple[int, int, bool, bool], Product] = {}
        head = [self._model.lm_head] if self._sees else []
        for module in (*self._text.modules(), *head):
            if isinstance(module, torch.nn.Linear):
                inputs, outputs = module.in_features, module.out_features
            elif type(module).__name__ == "Conv1D":  # GPT-2's linear layer, its weight transposed
                inputs, outputs = module.weight.shape
            else:
                continue
            product = Product(inputs, outputs, module.weight.dtype, module, True)
            kinds.setdefault((inputs, outputs, module.bias is None, bool(module._forward_hooks)), product)
        return list(kinds.values())

    def forward(self, rows: Any, cache: Any, *, logits: bool = True) -> torch.Tensor | None:
        """One pass; the logits [R, V] of the sampled rows, or None where they are not wanted."""
        self._board.rows, self._board.cache = rows, cache
        try:
            with nullcontext() if self.routers is None else self.routers.recording():
                out = self._call(rows.tokens, rows.position_ids(), rows.sampled if logits else 1, rows.media)
        finally:
            self._board.rows = self._board.cache = None
        if self.routers is not None:
            rows.record(cache, self.routers.rows())
        return out if logits else None

    def _call(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: Any = None, media: RowMedia | None = None
    ) -> torch.Tensor:
        """Logits of all rows, of the last one (1), or of some."""
        if self._sees:
            return self._see(tokens, positions, keep, media or RowMedia())
        options = {"logits_to_keep": keep} if self._keeps and keep is not None else {}
        out = self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
        ).logits[0]
        return out if options or not isinstance(keep, torch.Tensor) else out[keep]  # type: ignore[no-any-return]

    def _see(self, tokens: torch.Tensor, positions: torch.Tensor, keep: Any, media: RowMedia) -> torch.Tensor:
        embeddings, options = embed(self._model, tokens, media.at, media.features)
        hidden = self._text(
            inputs_embeds=embeddings, position_ids=media.position_ids(positions), use_cache=False, **options
        ).last_hidden_state[0]
        rows = hidden if keep is None else hidden[-1:] if isinstance(keep, int) else hidden[keep]
        return self._model.lm_head(rows)  # type: ignore[no-any-return]


def moving_rope(config: Any, context_len: int) -> str:
    """Why rotary frequencies depend on the longest sequence of a pass of at most ``context_len`` tokens, or nothing.

    `longrope` has two sets, of which sequences within the length of its pretraining use the first.
    """
    text = getattr(config, "get_text_config", lambda: config)()
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for p in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind, within = p.get("rope_type") or p.get("type"), p.get("original_max_position_embeddings") or 0
        if kind == "longrope" and within < context_len:
            return (
                f"its longrope frequencies change beyond {within} tokens; rollout_max_context_len={within} avoids it"
            )
        if kind == "dynamic":
            return "its rotary frequencies depend on the longest sequence of a pass"
    return ""


class RescanPlan(OwnPlan):
    """Runs the model's own forward over one whole sequence a token: right for every architecture, and slow."""

    name = "rescan"
    shapes: tuple[LayerShape, ...] = ()

    def __init__(self, model: Any) -> None:
        self._model = model
        self._growing = [m for m in model.modules() if hasattr(m, "max_seq_len_cached") and hasattr(m, "inv_freq")]

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T] ids of one sequence -> [T, V]."""
        for rotary in self._growing:  # `dynamic` frequencies stay at the longest sequence ever seen
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            if hasattr(rotary, "original_inv_freq"):
                rotary.inv_freq = rotary.original_inv_freq
        out = self._model(input_ids=tokens[None], use_cache=False, return_dict=True)
        return out.logits[0]  # type: ignore[no-any-return]

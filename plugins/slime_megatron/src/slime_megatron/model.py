"""A pipeline stage of a bridge's model: megatron-core's GPTModel, fed packs, that ends in hidden states.

Pack -> embedding -> layers with our core attention -> last norm -> rows that predict -> `vocabulary.log_probs`

Of an interleaved pipeline a stage has several chunks of layers, a GPTModel each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as concentration,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime_convert.tower import build_tower
from slime_core.trainers.compiling import Choice, pays
from slime_core.trainers.optimizer_step import to_device
from slime_megatron import few_bits
from slime_megatron.accumulating import provide
from slime_megatron.lora import StageAdapter
from slime_megatron.packing import make_pack, owned
from slime_megatron.passes import Passes
from slime_megatron.pictures import Pictures, Vision, add_level, joined, keep_levels, parted
from slime_megatron.prediction import PredictionBlock, embedded, rows_of, unshared
from slime_megatron.rotary import PackRotary, axes_of, turns
from slime_megatron.settings import MegatronSettings, build
from slime_megatron.spec import block_spec
from slime_megatron.tensors import Tensors, stored
from slime_megatron.vocabulary import Slice, log_probs

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from slime_convert.bridge import Bridge
    from slime_core.types import MicroBatch
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.transports.buckets import TensorSource
    from slime_megatron.packing import Pack

ENTRIES = 64  # forms of a compiled function that are kept, before it is run step by step


class PackedGPT(GPTModel):  # type: ignore[misc]
    """GPTModel over packs. ``vocab`` is the number of real ids: rows of the vocabulary beyond are filling.

    ``vp_stage`` is the number of its chunk of layers, where a stage has several.

    Example:
        model = PackedGPT(config, bridge, vocab=151936, vocab_size=151936, max_sequence_length=40960)
        hidden = model(pack)
        log_prob, entropy = model.score(hidden, pack, target, temperature, chunk=2048)
    """

    def __init__(
        self,
        config: TransformerConfig,
        bridge: Bridge,
        *,
        vocab: int,
        ahead: bool = False,
        vision: Vision | None = None,
        tower: Any = None,
        **kwargs: Any,
    ) -> None:
        provide()
        vp_stage = kwargs.get("vp_stage")
        spec = block_spec(config, bridge, vp_stage)
        super().__init__(config=config, transformer_layer_spec=spec, **kwargs)
        self.vocab, self.ahead = vocab, ahead
        if ahead and self.post_process:
            place = {"layer_number": len(self.decoder.layers) + 1, "vp_stage": vp_stage}
            self.mtp = PredictionBlock(config, spec.layer_specs[-1], **place, pg_collection=self.pg_collection)
        self.first_embedding: torch.Tensor | None = None  # the first stage's, where this last stage predicts ahead
        if config.num_moe_experts and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            for name, parameter in self.named_parameters():
                if ".mlp.experts." in name:  # megatron-core looks at the number of expert-parallel ranks alone, and
                    parameter.allreduce = False  # would sum over ranks that have other shards, or not over all copies
        self.wait_for: Callable[[torch.Tensor], None] | None = None  # until a parameter that is used here is gathered
        mla = bool(config.multi_latent_attention)
        layers = [*self.decoder.layers, *(layer.transformer_layer for layer in self.ahead_layers)]
        owners: list[Any] = [layer.self_attention for layer in layers] if mla else [self]
        axes = axes_of(config.mrope_section, interleaved=bridge.interleaved_axes) if config.mrope_section else ()
        for owner in owners:
            owner.rotary_pos_emb = PackRotary(owner.rotary_pos_emb, axes)
        self.vision, self.first_layer = vision, get_transformer_layer_offset(config, vp_stage=vp_stage)
        if tower is not None:
            self.vision_model = tower
        for level in self._levels:
            layer = self.decoder.layers[level - self.first_layer]
            layer.register_forward_hook(partial(add_level, level), with_kwargs=True)

    def forward(self, pack: Pack, filling: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, 1, h] of this chunk; with sequence parallelism this rank's rows of them.

        Args:
            filling: [1, T], True at rows that auxiliary losses of routers leave out; None without such losses
        """
        decoder_input = None
        if self.pre_process:
            assert pack.tokens is not None
            assert pack.positions is not None
            decoder_input = self.embedding(input_ids=pack.tokens[None], position_ids=pack.positions[None])
        if pack.pictures is not None:
            decoder_input = self._see(decoder_input, pack.pictures)
        self._turn(pack)
        if decoder_input is not None and torch.is_grad_enabled():  # of a frozen embedding too: a layer that is
            decoder_input.requires_grad_()  # computed again has gradients only if its input has
        hidden: torch.Tensor = self.decoder(
            hidden_states=decoder_input, attention_mask=None, packed_seq_params=pack, padding_mask=filling
        )
        if pack.pictures is not None:
            if carried := self._levels_behind:
                hidden = joined(hidden, pack.pictures, carried)
            if not torch.is_grad_enabled():  # else with the gradients
                pack.pictures.levels.clear()
        return hidden

    @property
    def _levels(self) -> range:
        """Levels of features of pictures that layers of this chunk add."""
        levels = self.vision.levels if self.vision is not None else 0
        return range(self.first_layer, min(levels, self.first_layer + len(self.decoder.layers)))

    @property
    def _levels_behind(self) -> range:
        """Those of later chunks."""
        levels = self.vision.levels if self.vision is not None else 0
        return range(self.first_layer + len(self.decoder.layers), levels)

    def _see(self, embedded: torch.Tensor | None, pictures: Pictures) -> torch.Tensor | None:
        """The decoder's input with features of pictures in it: embedded tokens, or what the stage before gave."""
        assert self.vision is not None
        if embedded is not None:
            hidden, levels = self._with_features(embedded, pictures)
            return keep_levels(hidden, pictures, levels, 0)
        if (count := self.vision.levels - self.first_layer) > 0:
            hidden, levels = parted(self.decoder.input_tensor, pictures, count)
            self.decoder.set_input_tensor(keep_levels(hidden, pictures, levels, self.first_layer))
        return None

    def _with_features(self, embedded: torch.Tensor, pictures: Pictures) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Embedded tokens with features at placeholders, and deeper features of these [n, h], level after level."""
        assert self.vision is not None
        if pictures.load is None:
            return embedded, [embedded.new_zeros(0, embedded.shape[-1])] * self.vision.levels
        pixels, grids = pictures.load()
        out = self.vision_model(pixels.to(self.config.params_dtype), grid_thw=grids, return_dict=True)
        features = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            features = [copy_to_tensor_model_parallel_region(one, group=tp) for one in features]
        first, *levels = [one.index_select(0, pictures.features) for one in features]
        return embedded.index_copy(0, pictures.rows, first[:, None].to(embedded.dtype)), levels

    def _turn(self, pack: Pack) -> None:
        """Give a pack its angles, but for latent attention, whose layers turn by themselves."""
        if self.config.multi_latent_attention:
            return
        rotary = self.rotary_pos_emb(pack)
        angles = rotary[0] if isinstance(rotary, tuple) else rotary
        pack.turn = turns(angles, concentration(self.config), self.config.params_dtype)

    @property
    def ahead_layers(self) -> Sequence[Any]:
        """Layers of this stage that predict further ahead."""
        return list(self.mtp.layers) if self.ahead and self.post_process else []

    def score_ahead(self, hidden: torch.Tensor, pack: Pack, micro: MicroBatch, *, chunk: int) -> torch.Tensor:
        """Weighted sum of losses (-log-prob) of the tokens that this rank predicts one further ahead, float32.

        Args:
            hidden: the last stage's output for ``pack``, which is this rank's share of ``micro``
        """
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        ahead, rows = unshared(micro)
        multiple = tp.size() if self.config.sequence_parallel else 1
        further = make_pack(ahead, cp=cp.size(), rank=cp.rank(), multiple=multiple, device=hidden.device)
        assert further.tokens is not None
        assert further.local is not None
        places = np.pad(rows, (0, further.rows - len(rows)))[owned(further.rows, cp.size(), cp.rank())]
        if self.config.sequence_parallel:
            places = np.split(places, tp.size())[tp.rank()]
        states = rows_of(hidden.detach(), pack, to_device(places, hidden.device), self.config)
        weight = self.first_embedding if self.first_embedding is not None else self.input_matrix()
        self._turn(further)
        (layer,) = self.ahead_layers
        out = layer(states, embedded(further.tokens, weight, self.config), further)
        target, weights = (to_device(column, hidden.device)[further.local] for column in (ahead.target, ahead.weight))
        log_prob, _ = self._scored(out, further, self.output_matrix().detach(), target, None, chunk)
        return -(log_prob * weights).sum()

    def input_matrix(self) -> torch.Tensor:
        """This rank's rows of the embedding, in the first chunk of a model."""
        weight: torch.Tensor = self.embedding.word_embeddings.weight
        return weight

    def output_matrix(self) -> torch.Tensor:
        """This rank's rows of the output matrix, in the last chunk of a model."""
        tied = self.share_embeddings_and_output_weights
        weight: torch.Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

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
        weight = self.output_matrix()
        if self.wait_for is not None:  # its module is never called, which would wait
            self.wait_for(weight)
        return self._scored(hidden, pack, weight, target, temperature, chunk)

    def _scored(
        self,
        hidden: torch.Tensor,
        pack: Pack,
        weight: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tp = self.pg_collection.tp
        part = Slice(first=tp.rank() * len(weight), vocab=self.vocab, group=tp if tp.size() > 1 else None)
        return log_probs(self.predicting(hidden, pack), weight, target, temperature, part=part, chunk=chunk)


class ModelStage(torch.nn.ModuleList):
    """The chunks of layers that a rank has of a model, in order: one, or several of an interleaved pipeline."""

    def __init__(self, chunks: Sequence[PackedGPT]) -> None:
        super().__init__(chunks)
        self.chunks = tuple(chunks)

    @property
    def config(self) -> TransformerConfig:
        """Of all chunks."""
        return self.chunks[0].config

    def routers(self) -> dict[int, Any]:
        """Routers of experts, by layer of the whole model."""
        layers = (layer for chunk in self.chunks for layer in chunk.decoder.layers)
        return {layer.layer_number - 1: layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")}

    @torch.no_grad()
    def share_embedding(self) -> None:
        """Send the first stage's embedding to a last stage that predicts ahead; a collective of the two."""
        first, last = self.chunks[0], self.chunks[-1]
        if not last.ahead or first.pre_process == last.post_process:
            return
        weight = first.input_matrix() if first.pre_process else torch.empty_like(last.output_matrix())
        if first.pre_process and first.wait_for is not None:  # sent before the pass that would wait
            first.wait_for(weight)
        dist.broadcast(weight.detach(), group=parallel_state.get_embedding_group(), group_src=0)
        last.first_embedding = weight if last.post_process else None

    def choose_compiling(self, choice: Choice) -> None:
        """Follow ``train.compile``: norms and rotations in few kernels, or step by step."""
        parameters = list(self.parameters())
        compiled = pays(choice, parameters[0].device, sum(p.numel() for p in parameters))
        if compiled:  # an entry for each width of a norm, with gradients and without, and for each model of the rank
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, ENTRIES)
        for module in self.modules():
            if hasattr(module, "compiled"):
                module.compiled = compiled  # type: ignore[assignment]


class Model:
    """A stage with what belongs to it: its tensors by the bridge, and passes over micro-batches."""

    packs = True  # several sequences a micro-batch

    def __init__(self, stage: ModelStage, tensors: Tensors, device: torch.device) -> None:
        self.stage, self.tensors, self.device = stage, tensors, device
        self.passes = Passes(stage.chunks, stage, device)
        self.adapters: dict[str, StageAdapter] = {}  # by name, what learns in place of the tensors

    @property
    def adapter(self) -> StageAdapter | None:
        """The adapter in use: the first, but inside of `StageAdapter.in_use`."""
        return next((one for one in self.adapters.values() if one.name == one.switch.name), None)

    @property
    def trained(self) -> Tensors:
        """What learns: all tensors, or those of the adapter in use."""
        return self.tensors if self.adapter is None else self.adapter.tensors

    def sources(self, *, rounded: bool = False) -> list[TensorSource]:
        """Tensors of the whole model in the names of its folder, an adapter in use merged into them; a collective.

        Args:
            rounded: what an adapter changes has the dtype of the base; else it is float32
        """
        if self.adapter is None or not self.adapter.switch.on:
            return self.tensors.sources()
        return self.adapter.merged_sources(rounded=rounded)

    def learn(self, wrapped: Sequence[Any]) -> None:
        """Passes go through these gradient buffers of megatron-core's from now on, a module a chunk."""
        self.passes.wrapped = wrapped
        no_sync = [ddp.no_sync for ddp in wrapped]
        self.stage.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    @torch.no_grad()
    def fill(self, folder: Mapping[str, torch.Tensor]) -> None:
        """This rank's shards from a folder's tensors."""
        self.tensors.fill(folder)
        self.spread_embedding()

    @torch.no_grad()
    def spread_embedding(self) -> None:
        """Give a last stage that is tied to the first its copy of the embedding; a collective of the two."""
        chunk = self.stage.chunks[0 if parallel_state.is_pipeline_first_stage() else -1]
        if (
            not chunk.share_embeddings_and_output_weights
            or parallel_state.get_pipeline_model_parallel_world_size() == 1
        ):
            return
        if parallel_state.is_rank_in_embedding_group():
            weight = chunk.shared_embedding_or_output_weight()
            if not chunk.pre_process:
                weight.zero_()
            dist.all_reduce(weight, group=parallel_state.get_embedding_group())


def build_model(
    settings: MegatronSettings, bridge: Bridge, folder: ModelFolder, device: torch.device, *, seed: int = 0
) -> Model:
    """This rank's stage of a folder's model, with its weights.

    Raises:
        TrainerError: TRN108 the bridge and the model disagree.
        ConfigError: CFG04 targets of adapters that cannot have them; as `factors_to_load` of ``train.lora_load``.
        DataError: the folder lacks a tensor, or is damaged.
    """
    ahead = settings.ahead > 0
    rounded = settings.base_weights != "auto"
    stage = build_stage(PackedGPT, settings, bridge, folder.config, device, ahead=ahead, on_host=rounded)
    multiple, entries = settings.vocabulary_multiple, bridge.entries(folder.config, int(ahead))
    model = Model(stage, Tensors(stage.chunks, bridge, folder.config, multiple=multiple, entries=entries), device)
    model.passes.ahead = settings.ahead
    if rounded:
        few_bits.fill(stage, model.tensors, folder, settings.base_weights, seed, device)
        model.spread_embedding()
    else:
        model.fill(stored(folder, seed))
    if settings.lora is not None:
        model.adapters = StageAdapter.attach(
            stage, model.tensors, folder, settings.lora, names=settings.adapters, seed=seed
        )
        for adapter in model.adapters.values() if settings.adapter_load else ():
            adapter.load(Path(settings.adapter_load))
    return model


def build_stage(
    kind: type[PackedGPT],
    settings: MegatronSettings,
    bridge: Bridge,
    hf_config: Any,
    device: torch.device,
    *,
    on_host: bool = False,
    **more: Any,
) -> ModelStage:
    """This rank's chunks of a model, without its weights; ``more`` are arguments of their class.

    Args:
        on_host: leave parameters there, where those that are never written take no memory
    """
    config, chunks = build(settings).transformer, settings.layout.vp
    config.use_cpu_initialization |= on_host
    config.perform_initialization &= not on_host
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    vision = tower = None
    if bridge.tower:
        vision = Vision.of(hf_config, frozen=settings.frozen_tower)
    if vision is not None and first:
        tower = build_tower(hf_config, config.params_dtype, device).requires_grad_(not vision.frozen)
    stage = ModelStage(
        [
            kind(
                config,
                bridge,
                vocab=settings.sizes.vocab,
                pre_process=first and number == 0,
                post_process=last and number == chunks - 1,
                vp_stage=number if chunks > 1 else None,
                vision=vision,
                tower=None if number else tower,
                **settings.model,
                **more,
            )
            for number in range(chunks)
        ]
    )
    if not on_host:
        stage.to(device)
    for module in stage.modules():
        module._buffers |= {name: one.to(device) for name, one in module._buffers.items() if one is not None}
    stage.choose_compiling(settings.compile)
    return stage

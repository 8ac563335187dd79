"""A module by a model config, its weights loaded by name from safetensors or drawn from a seed.

A drawn parameter depends on (seed, its name) only, in float32 on the CPU, and is then cast: the same values on every
device, for every dtype, whatever else the model holds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import nn

from slime_core.errors import DataError
from slime_core.seeds import seed_of
from slime_core.weights.prediction_layers import prefixes
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import ROUTER_BIAS
from slime_core.weights.vision import sees

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHOWN = 10
CHUNK = 1 << 22


@dataclass(slots=True)
class Fit:
    """How a folder's tensors meet a model's names: ``shapes`` is (name, in the folder, in the model)."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    stored_as: dict[str, str] = field(default_factory=dict)  # model name -> tensor name, where a tie renames it
    converted: bool = False  # transformers renames or fuses tensors of this family while loading

    def __bool__(self) -> bool:
        return not (self.missing or self.extra or self.shapes)


def auto_class(config: Any) -> Any:
    """transformers' factory for a config: of models that see pictures where the family has no text model alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def skeleton(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def fit(model: Any, shards: Shards, folder: Path) -> Fit:
    """Compare a model's tensors with those of a folder.

    Raises:
        DataError: TOK49 tied weights that are absent, or stored twice and different.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    renames = bool(get_model_conversion_mapping(model, add_legacy=False))
    optional = {*ties, *ties.values()}
    elsewhere = renames and not optional & set(shards.infos)  # under other names, which transformers knows
    fit_of = Fit(stored_as={} if elsewhere else _check_ties(ties, shards, folder))
    fit_of.missing = sorted(name for name in expected if name not in shards.infos and name not in optional)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ahead = prefixes(model.config)
    fit_of.extra = sorted(
        name
        for name in shards.infos
        if name not in expected and not name.startswith(ahead) and not any(re.search(p, name) for p in ignored)
    )
    stored = {name: shards.infos.get(fit_of.stored_as.get(name, name)) for name in expected}
    pairs = [(name, info) for name, info in stored.items() if info is not None]
    fit_of.shapes = [(name, info.shape, expected[name]) for name, info in pairs if info.shape != expected[name]]
    prefix = f"{model.base_model_prefix}."
    renamed = any(prefix + name in expected for name in fit_of.extra)
    fit_of.converted = renamed or renames
    if fit_of.missing and not fit_of.extra and set(fit_of.missing) <= set(_class_ties(model)):
        raise DataError(
            f"the folder has no {fit_of.missing[0]} and its config does not tie it to the embedding",
            code="TOK49",
            where=str(folder / "config.json"),
            fix='set "tie_word_embeddings": true in config.json, or save the model again',
        )
    return fit_of


def _class_ties(model: Any) -> Mapping[str, str]:
    ties = getattr(model, "_tied_weights_keys", None)
    return ties if isinstance(ties, dict) else {}


def _check_ties(ties: Mapping[str, str], shards: Shards, folder: Path) -> dict[str, str]:
    stored_as: dict[str, str] = {}
    for target, source in ties.items():
        present = [name for name in (source, target) if name in shards.infos]
        if not present:
            raise DataError(
                f"neither of the tied weights {source} and {target} is in the folder",
                code="TOK49",
                where=str(folder),
                fix="save the model again with model.save_pretrained(FOLDER)",
            )
        if len(present) == 2 and not _same(shards, source, target):
            raise DataError(
                f"{source} and {target} are tied by the config, but are stored twice and differ",
                code="TOK49",
                where=str(folder / "config.json"),
                why="one of the two would be lost",
                fix='set "tie_word_embeddings": false in config.json, or save the model again',
            )
        stored_as[source] = stored_as[target] = present[0]
    return stored_as


def _same(shards: Shards, one: str, other: str) -> bool:
    left, right = shards.infos[one], shards.infos[other]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with left.file.open("rb") as a, right.file.open("rb") as b:
        a.seek(left.begin)
        b.seek(right.begin)
        remaining = left.end - left.begin
        while remaining > 0:
            count = min(CHUNK, remaining)
            if a.read(count) != b.read(count):
                return False
            remaining -= count
    return True


def misfit(fit_result: Fit, folder: Path, against: str = "") -> DataError:
    """TOK46: the counts, and the first names and shapes of each kind; ``against`` is a config that is another's."""

    def first(items: Sequence[str]) -> str:
        more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
        return ", ".join(items[:SHOWN]) + more

    shapes = [
        f"{name} is {list(is_)} in the folder, {list(want)} in the model" for name, is_, want in fit_result.shapes
    ]
    parts = [
        f"{len(items)} {kind}: {first(items)}"
        for kind, items in (
            ("missing", fit_result.missing),
            ("not in the model", fit_result.extra),
            ("mis-shaped", shapes),
        )
        if items
    ]
    return DataError(
        f"the tensors of {folder.name} do not fit {against or 'its config.json'}: "
        f"{len(fit_result.missing)} missing, {len(fit_result.extra)} extra, {len(fit_result.shapes)} mis-shaped",
        code="TOK46",
        where=str(folder),
        why="; ".join(parts),
        fix="both must be of the same model: name another folder for one of them"
        if against
        else "config.json and the weights must come from the same model: fetch or save the folder again",
    )


def torch_dtype(name: str, device: str = "cpu") -> torch.dtype:
    """The dtype of parameters by name. Every CPU computes in bfloat16, if slowly; not every GPU does.

    Raises:
        DataError: TOK48, a dtype that is not trained in, or that the device lacks.
    """
    if name == "bfloat16" and torch.device(device).type == "cuda" and not torch.cuda.is_bf16_supported():
        raise DataError(
            "this GPU has no bfloat16", code="TOK48", where="train.dtype", fix="set train.dtype=float32 or auto"
        )
    if name not in DTYPES:
        raise DataError(
            f"models are built in {' or '.join(DTYPES)}, not in {name}",
            code="TOK48",
            where="train.dtype",
            fix="set train.dtype=float32 (works on every processor), bfloat16 or auto",
        )
    return DTYPES[name]


def allocate(config: Any, dtype: str, device: str, attn_implementation: str | None, trust_remote_code: bool) -> Any:
    """The module with uninitialised parameters, computed buffers and tied weights."""
    from transformers.initialization import no_init_weights

    kwargs: dict[str, Any] = {"dtype": torch_dtype(dtype, device), "trust_remote_code": trust_remote_code}
    kwargs |= _attention(config, attn_implementation)
    with torch.device(device), no_init_weights():
        model = auto_class(config).from_config(copy.deepcopy(config), **kwargs)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if name.endswith(ROUTER_BIAS):
            buffer.data = buffer.data.float()
    return _evaluating(model)


def _attention(config: Any, named: str | None) -> dict[str, str]:
    """Which of transformers' attentions: ``named``, or its default, unless that would leave a soft cap out."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    name = named or ("eager" if capped else None)
    return {} if name is None else {"attn_implementation": name}


def _evaluating(model: Any) -> Any:
    """The model in eval mode, without the search for padding that GPT-2 makes of every input, on the host."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _ignore
    return model.eval()


def _ignore(*_: Any) -> None:
    """Say nothing."""


@torch.no_grad()
def attention_window(attention: Any) -> int:
    """Positions that a row of this attention module sees, itself included; 0 is all.

    Qwen says it layer by layer, Mistral in its config, and Llama has none, whatever its config holds.
    """
    config = attention.config
    whole_model = config.sliding_window if config.model_type == "mistral" else None
    return int(getattr(attention, "sliding_window", whole_model) or 0)


def load_converted(
    folder: Path, config: Any, dtype: str, attn_implementation: str | None, trust_remote_code: bool
) -> Any:
    """Load through transformers, which renames and fuses tensors of some families; the result is checked as ours is.

    Raises:
        DataError: TOK46.
    """
    kwargs: dict[str, Any] = {"dtype": torch_dtype(dtype), "trust_remote_code": trust_remote_code}
    kwargs |= _attention(config, attn_implementation) | {"config": copy.deepcopy(config)}
    model_class: Any = auto_class(config)
    source: str | None = str(folder)
    shards = Shards.open(folder)
    if any(info.stored for info in shards.infos.values()):  # transformers would make layers of another kind
        model_class = type(skeleton(config, trust_remote_code=trust_remote_code))
        source, kwargs["state_dict"] = None, {name: UnreadTensor(shards, name) for name in shards}
    loaded: Any = model_class.from_pretrained(
        source,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **kwargs,
    )
    model, info = loaded
    fit_result = Fit(
        missing=sorted(info["missing_keys"]),
        extra=sorted(name for name in info["unexpected_keys"] if not name.startswith(prefixes(model.config))),
        shapes=[(name, tuple(is_), tuple(want)) for name, is_, want in sorted(info["mismatched_keys"])],
    )
    if not fit_result or info.get("conversion_errors"):
        raise misfit(fit_result, folder)
    return _evaluating(model)


@dataclass(slots=True, frozen=True)
class UnreadTensor:
    """A tensor that transformers reads from its folder when it takes all of it."""

    shards: Shards
    name: str

    def __getitem__(self, whole: EllipsisType) -> torch.Tensor:
        return self.shards[self.name]


@torch.no_grad()
def draw(model: Any, seed: int) -> None:
    """Fill every parameter: matrices normal with the family's ``initializer_range``, biases 0, the rest as it does.

    What is neither a linear layer nor an embedding (norms, state-space parameters, fused experts) is filled by the
    family's own initialiser under a seed of the module's name; a layer of experts may fill its router, so parents
    come first.
    """
    config = model.config.get_text_config()
    std = float(getattr(config, "initializer_range", None) or 0.02)
    pointers: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.data_ptr() not in pointers:
                    pointers.add(parameter.data_ptr())
                    _fill(parameter, seed, f"{name}.{key}", 0.0 if key == "bias" else std)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(seed, "init", name) % 2**63)
                model._init_weights(module)


def _fill(parameter: torch.Tensor, seed: int, name: str, std: float) -> None:
    if std == 0.0:
        parameter.zero_()
        return
    generator = np.random.Generator(np.random.Philox(seed_of(seed, "init", name)))
    values = generator.standard_normal(parameter.numel(), dtype=np.float32) * np.float32(std)
    parameter.copy_(torch.from_numpy(values).view(parameter.shape))

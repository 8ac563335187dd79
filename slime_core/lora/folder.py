"""An adapter in peft's format: adapter_config.json beside adapter_model.safetensors.

    base_model.model.MODULE.lora_A.weight                [rank, in]       of a linear layer
                           .lora_B.weight                [out, rank]
                           .lora_magnitude_vector        [out]            with DoRA
    base_model.model.EXPERTS.lora_A.weight               [E * rank, in]   of a stack, expert by expert
                            .lora_B.weight               [out, rank * E]  rank by rank
                            .base_layer.lora_A.weight    of the stack before it: peft wraps one in another

Here an adapter is its `Factors` by the name of the weight that they adapt, as in the base model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import ConfigError, DataError
from slime_core.lora.layers import Adapters, LoraExperts, LoraLinear
from slime_core.lora.spec import DEFAULT, LoraSpec
from slime_core.weights.shards import Shards, header, read_header, read_metadata
from slime_core.weights.tensor_info import TensorInfo

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
INNER = ".base_layer"
FEW_BITS = ("nf4", "fp8")
SHOWN = 5
OTHER_BASE = "name the adapter's own base model (base_model_name_or_path in its config), or fetch the folder again"


@dataclass(slots=True, frozen=True)
class Factors:
    """What an adapter has of one weight, in float32: [rank, in] and [out, rank], of a stack with [E] in front."""

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None = None  # [out], with DoRA


@dataclass(slots=True, frozen=True)
class BaseForm:
    """What an adapter was trained on: as `train.base_weights`, and the dtype of few bits; empty where not known."""

    form: str = ""
    dtype: str = ""

    def metadata(self) -> dict[str, str]:
        """Of the header of adapter_model.safetensors."""
        few_bits = {"dtype": self.dtype} if self.form in FEW_BITS else {}
        return {"format": "pt"} | ({"base_weights": self.form} if self.form else {}) | few_bits


def read_base_form(path: Path) -> BaseForm:
    """What an adapter was trained on, as far as its header says so; TOK46 no file, TOK47 a damaged one.

    Other programs, and slime before it trained on few bits, do not say it.
    """
    if not (path / WEIGHTS).is_file():
        raise _no_weights(path)
    metadata = read_metadata(path / WEIGHTS)
    form, dtype = metadata.get("base_weights"), metadata.get("dtype")
    if form == "auto":
        return BaseForm(form)
    return BaseForm(form, dtype) if form in FEW_BITS and dtype in ("float32", "bfloat16") else BaseForm()


def factors_of(adapters: Adapters, name: str) -> dict[str, Factors]:
    """An adapter's parameters by the weight that they adapt, in the order of the model."""
    return {weight: _factors(module, key, name) for weight, (module, key) in adapters.weights().items()}


def _factors(module: LoraLinear | LoraExperts, key: str, name: str) -> Factors:
    if isinstance(module, LoraLinear):
        magnitude = module.lora_magnitude_vector[name] if module.adapters.spec.use_dora else None
        return Factors(module.lora_A[name], module.lora_B[name], magnitude)
    a, b = (module.get_parameter(f"{kind}.{key}.{name}") for kind in ("lora_A", "lora_B"))
    return Factors(a, b)


def to_peft(factors: Mapping[str, Factors]) -> dict[str, torch.Tensor]:
    """Tensors by peft's names without `base_model.model.`; ``factors`` by weight, in the order of the model."""
    tensors = {}
    places = _places(factors)
    for weight, one in factors.items():
        a, b = one.a, one.b
        if a.ndim == 3:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        tensors[places[weight] + A], tensors[places[weight] + B] = a, b
        if one.magnitude is not None:
            tensors[places[weight] + MAGNITUDE] = one.magnitude
    return tensors


def _places(weights: Collection[str]) -> dict[str, str]:
    """Where peft has the factors of weights that an adapter has, in the order of the model, by weight."""
    stacks: dict[str, list[str]] = {}
    for weight in weights:
        if not weight.endswith(".weight"):
            stacks.setdefault(weight.rpartition(".")[0], []).append(weight)
    places = {weight: weight.removesuffix(".weight") for weight in weights}
    for module, inside in stacks.items():
        places |= {weight: module + INNER * depth for depth, weight in enumerate(reversed(inside))}
    return places


def from_peft(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Factors], where: Path | str = "", fix: str = OTHER_BASE
) -> dict[str, Factors]:
    """Factors by weight, in the order of the model, in float32 on the host.

    Args:
        tensors: by peft's names without `base_model.model.`
        expected: the factors of the model that takes them, which may be on the meta device
        where: of tensors that do not fit; ``fix`` is of the error

    Raises:
        DataError: TOK46 tensors that are missing, of no target of the model, or of another shape.
    """
    model_tensors = to_peft(expected)
    missing = [name for name in model_tensors if name not in tensors]
    extra = [name for name in tensors if name not in model_tensors]
    other = [
        f"{name} is {list(tensors[name].shape)} in the folder and {list(one.shape)} in the model"
        for name, one in model_tensors.items()
        if name in tensors and tensors[name].shape != one.shape
    ]
    if missing or extra or other:
        raise _misfit(missing, extra, other, where, fix)
    factors = {}
    for weight, place in _places(expected).items():
        a, b = tensors[place + A].float(), tensors[place + B].float()
        if expected[weight].a.ndim == 3:
            experts, rank, _ = expected[weight].a.shape
            a = a.unflatten(0, (experts, rank))
            b = b.unflatten(1, (rank, experts)).permute(2, 0, 1).contiguous()
        magnitude = tensors[place + MAGNITUDE].float() if expected[weight].magnitude is not None else None
        factors[weight] = Factors(a, b, magnitude)
    return factors


def _misfit(missing: list[str], extra: list[str], other: list[str], where: Path | str, fix: str) -> DataError:
    kinds = (("missing", missing), ("of no target in the model", extra), ("of another shape", other))
    parts = [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}" + (f" and {len(names) - SHOWN} more" * (len(names) > SHOWN))
        for kind, names in kinds
        if names
    ]
    return DataError(
        "the adapter's tensors do not fit the base model and the targets",
        code="TOK46",
        where=str(where),
        why="; ".join(parts),
        fix=fix,
    )


def write_adapter(
    path: Path, config: Mapping[str, Any], factors: Mapping[str, Factors], base: BaseForm = BaseForm()
) -> None:
    """Write an adapter folder; ``config`` is what `LoraSpec.to_peft` gives, ``factors`` are in the model's order.

    Raises:
        StorageError: it cannot be written.
    """
    tensors = {PREFIX + name: tensor.detach().float().cpu().contiguous() for name, tensor in to_peft(factors).items()}
    head = header(((name, one.dtype, one.shape) for name, one in tensors.items()), base.metadata())
    try:
        path.mkdir(parents=True, exist_ok=True)
        durable.replace_file(path / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        (path / WEIGHTS).unlink(missing_ok=True)
        durable.write_file(path / WEIGHTS, [head, *map(_bytes, tensors.values())])
    except OSError as error:
        raise storage_error(error, path, "the adapter folder cannot be written") from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def read_factors(path: Path, expected: Mapping[str, Factors], fix: str = OTHER_BASE) -> dict[str, Factors]:
    """The factors in an adapter folder, as :func:`from_peft`; :func:`read_spec` comes first.

    Raises:
        DataError: TOK46 no tensors, or such that do not fit the model; TOK47, TOK48 damaged ones.
    """
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in Shards(_header(path)).items()}
    return from_peft(tensors, expected, path / WEIGHTS, fix)


def _header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of an adapter folder; TOK46 none, TOK47, TOK48 damaged ones."""
    if not (path / WEIGHTS).is_file():
        raise _no_weights(path)
    return read_header(path / WEIGHTS)


def read_spec(path: Path, key: str = "train.lora_load") -> LoraSpec:
    """How the adapter in a folder adapts; ``key`` is where the folder was named.

    Raises:
        ConfigError: CFG05 there is no such folder.
        DataError: TOK00 it is no adapter folder; TOK46 of a kind that is not computed here.
    """
    if not path.is_dir():
        raise ConfigError(
            f"there is no adapter folder {path}",
            code="CFG05",
            where=f"{key} (working folder {Path.cwd()})",
            fix=f"name a folder with {CONFIG}; one of the hub: hf download OWNER/NAME --local-dir FOLDER",
        )
    file = path / CONFIG
    if not file.is_file():
        raise _no_adapter(path, key)
    try:
        config = json.loads(file.read_bytes())
        return LoraSpec.from_peft(config, str(file))
    except DataError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path.name} is not an adapter folder",
            code="TOK00",
            where=str(file),
            why=f"it cannot be read as peft's config: {error!r}",
            fix="name a folder that peft's save_pretrained wrote, or a run's final/adapter",
        ) from error


def _no_adapter(path: Path, key: str) -> DataError:
    """TOK00, with the adapter folders that are near."""
    places = (path, path / "adapter", path / "final" / "adapter")
    named = [file.parent for place in places for form in (CONFIG, f"*/{CONFIG}") for file in sorted(place.glob(form))]
    fix = "name a folder that peft's save_pretrained wrote, or a run's final/adapter"
    return DataError(
        f"{path.name} is not an adapter folder: it has no {CONFIG}",
        code="TOK00",
        where=f"{key} = {path.absolute()}",
        fix=f"name {'   or   '.join(map(str, dict.fromkeys(named[:SHOWN])))}" if named else fix,
    )


def _no_weights(path: Path) -> DataError:
    pickle = (path / PICKLE).is_file()
    return DataError(
        f"the adapter folder has no {WEIGHTS}",
        code="TOK46",
        where=str(path),
        why=f"{PICKLE} cannot be trusted: pickles can run any code" if pickle else "found no weights",
        fix="load it with peft where you trust it, then model.save_pretrained(FOLDER)"
        if pickle
        else "fetch the folder again",
    )


def check_start(train: Any) -> None:
    """Refuse a ``lora_load`` of the [train] section that its adapters cannot start from, before a model is loaded.

    Raises:
        ConfigError, DataError: as :func:`factors_to_load`, but for shapes of tensors.
    """
    spec = LoraSpec.of(train)
    if spec is None or not train.lora_load:
        return
    for name in train.lora_adapters or (DEFAULT,):
        folder = _folder_of(Path(train.lora_load), name)
        _check_spec(read_spec(folder), spec, folder)
        _header(folder)


def start_notices(train: Any) -> list[str]:
    """Sentences on adapters of ``lora_load`` that were trained on another base than the run's, as far as they say."""
    names = train.lora_adapters or (DEFAULT,)
    folders = dict.fromkeys(_folder_of(Path(train.lora_load), name) for name in names) if train.lora_load else ()
    forms = {folder: read_base_form(folder).form for folder in folders if (folder / WEIGHTS).is_file()}
    return [
        f"the adapter {folder} was trained with base_weights = {form}, and starts here with {train.base_weights}: "
        f"its base has other values; --base-weights {form} is what it was trained on"
        for folder, form in forms.items()
        if form and form != train.base_weights
    ]


def _folder_of(path: Path, name: str) -> Path:
    """Where the adapter of a name starts from: the folder itself, or one in it by the name."""
    return path if (path / CONFIG).is_file() or not (path / name).is_dir() else path / name


def factors_to_load(adapters: Adapters, name: str, path: Path) -> dict[str, Factors]:
    """The factors that an adapter starts from: of the folder of one, or of one with a folder for each by its name.

    Args:
        adapters: what the folder must fit, which may be on the meta device

    Raises:
        ConfigError: CFG04 adapters of another rank, scaling or kind; CFG05 no such folder.
        DataError: as :func:`read_spec` and :func:`read_factors`.
    """
    folder = _folder_of(path, name)
    spec = read_spec(folder)
    _check_spec(spec, adapters.spec, folder)
    targets = ", ".join(f'"{target}"' for target in (*spec.target_modules, *spec.target_parameters))
    return read_factors(folder, factors_of(adapters, name), f"{OTHER_BASE};\nits targets are {targets}")


@torch.no_grad()
def load_adapters(adapters: Adapters, path: Path) -> None:
    """Let a model's adapters start from a folder, see :func:`factors_to_load`."""
    for name in adapters.names:
        factors = factors_of(adapters, name)
        for weight, one in factors_to_load(adapters, name, path).items():
            for part in ("a", "b", "magnitude"):
                if (tensor := getattr(one, part)) is not None:
                    getattr(factors[weight], part).copy_(tensor)


def _check_spec(folder_spec: LoraSpec, spec: LoraSpec, folder: Path) -> None:
    keys = {"rank": "lora_rank", "alpha": "lora_alpha", "use_dora": "lora_use_dora", "use_rslora": "lora_use_rslora"}
    values = {key: (getattr(folder_spec, name), getattr(spec, name)) for name, key in keys.items()}
    other = {key: pair for key, pair in values.items() if pair[0] != pair[1]}
    if other:
        raise ConfigError(
            "the adapter to start from is of another kind than the run's",
            code="CFG04",
            where=f"train.lora_load = {folder}",
            why="; ".join(f"its {key} is {was}, the run's {now}" for key, (was, now) in other.items()),
            fix=" ".join(f"--{key.replace('_', '-')} {str(was).lower()}" for key, (was, _) in other.items()),
        )

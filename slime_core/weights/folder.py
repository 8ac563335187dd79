"""A Hugging Face model folder (or hub name): its config, tokenizer, tensors and a built model.

Everything that can be wrong with a folder is found when it is opened, before any engine starts:

    path | remote code TOK45 | config | tokenizer TOK39 TOK42 | headers TOK47 TOK48 | names and shapes TOK46 TOK49

End and padding: a response ends at any id of ``eos_token_ids``, which are those of generation_config.json, of
config.json and of the tokenizer together, as SGLang has it. Nothing in slime masks by token id, lengths do; so a pad
token that equals the end token, or no pad token, never hides the end token from training.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime_core.errors import ConfigError, DataError
from slime_core.weights.fp8 import BlockFormat
from slime_core.weights.native_configs import LAYERS, native_config
from slime_core.weights.nf4 import Nf4Format
from slime_core.weights.shards import Shards
from slime_core.weights.stored_forms import StoredForm, refuse_quantised, storage_form
from slime_core.weights.vision import sees

if TYPE_CHECKING:
    from torch import nn

    from slime_core.weights.build import Fit
    from slime_core.weights.loading import Put

REMOTE_CODE_FILES = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
NO_LIMIT = 1 << 20  # context of a model that states none
AGAIN = "fetch or save the model again"
FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


class ModelFolder:
    """A checked model folder.

    Example:
        folder = ModelFolder.open("my-model")
        model = folder.build_model(dtype="float32", seed=0)
        ids = folder.tokenizer().encode("12+30=")
    """

    path: Path
    config: Any  # transformers.PreTrainedConfig
    stored_in: StoredForm | None  # of quantised weights
    eos_token_ids: tuple[int, ...]  # ids that end a response, ascending
    vocab_size: int  # rows of the embedding: every id below it is legal
    context_len: int  # positions the model was made for
    notices: tuple[str, ...]  # unusual but accepted properties
    init_weights: Literal["load", "random"]
    trust_remote_code: bool

    def __init__(self, path: Path, *, trust_remote_code: bool, init_weights: Literal["load", "random"]) -> None:
        self.path = path
        self.trust_remote_code = trust_remote_code
        self.init_weights = init_weights
        self.notices = ()
        self._tokenizer: Any = None
        self._shards: Shards | None = None
        self._fit: Fit | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        trust_remote_code: bool = False,
        init_weights: Literal["load", "random"] = "load",
        stop_token_ids: Sequence[int] = (),
    ) -> ModelFolder:
        """Find and check a folder; ``stop_token_ids`` stand in for an end token that the folder does not name.

        Raises:
            ConfigError: CFG05, no such folder.
            DataError: TOK39, TOK42, TOK45-TOK49 as above; TOK00 an incomplete folder.
        """
        folder = cls(resolve(path), trust_remote_code=trust_remote_code, init_weights=init_weights)
        folder.config = read_config(folder.path, trust_remote_code=trust_remote_code)
        folder.stored_in = storage_form(_read_json(folder.path / "config.json"))
        if folder.stored_in:
            folder._note(f"weights are {folder.stored_in.form}: they train as floats, and what a run writes is not")
            if isinstance(folder.stored_in, Nf4Format):
                folder._note("--base-weights nf4 holds the base of adapters in the folder's own 4 bits")
        text = folder.config.get_text_config()
        folder.vocab_size = int(text.vocab_size)
        folder._check_tokenizer(stop_token_ids)
        folder.context_len = _context_len(text)
        if init_weights == "load":
            folder._check_weights()
        return folder

    def tokenizer(self) -> Any:
        """The folder's tokenizer (transformers.PreTrainedTokenizerBase), loaded once."""
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(self.path, self.config, self.trust_remote_code)
            if (
                self._tokenizer.chat_template is None
            ):  # older folders of vision models state it for the processor alone
                self._tokenizer.chat_template = _read_json(self.path / "chat_template.json").get("chat_template")
        return self._tokenizer

    def tensors(self) -> Shards:
        """Stored tensors by name, each read on access."""
        if self._shards is None:
            self._shards = Shards.open(self.path)
        return self._shards

    def build_model(
        self,
        dtype: str = "float32",
        seed: int = 0,
        device: str = "cpu",
        *,
        attn_implementation: str | None = None,
        put: Put | None = None,
    ) -> nn.Module:
        """The causal language model in eval mode, with the folder's weights or, for ``random``, drawn from the seed.

        Args:
            put: takes each parameter as soon as it was read, so that no more than one is on the host beside what stays
                there; drawn ones, and those of families that transformers alone can load, when all have values

        Raises:
            DataError: TOK48 a dtype other than float32 and bfloat16, TOK46 tensors that do not fit, TOK47 damage.
        """
        from slime_core.weights import build, loading

        attention, trusted, places = attn_implementation, self.trust_remote_code, None
        renamed = self.init_weights == "load" and self._fit is not None and not self._fit
        model: Any = None
        if put is not None or not renamed:
            model = build.allocate(self.config, dtype, device, attention, trusted)
        if renamed and put is not None:
            places = loading.places_of(model, self.tensors())
        if renamed and places is None:
            model = build.load_converted(self.path, self.config, dtype, attention, trusted).to(device)
        elif self.init_weights == "random":
            build.draw(model, seed)
        elif places is not None:
            loading.load_by_places(model, self.tensors(), places, put)
            return model  # type: ignore[no-any-return]
        else:
            assert self._fit is not None
            loading.load_by_name(model, self.tensors(), self._fit.stored_as, put)
            return model  # type: ignore[no-any-return]
        if put is not None:
            loading.put_all(model, put)
        return model  # type: ignore[no-any-return]

    def _note(self, text: str) -> None:
        self.notices = (*self.notices, text)

    def _check_tokenizer(self, stop_token_ids: Sequence[int]) -> None:
        tokenizer = self.tokenizer()
        top = max(tokenizer.get_vocab().values(), default=-1) + 1
        if top > self.vocab_size:
            beyond = [token for token, number in tokenizer.get_vocab().items() if number >= self.vocab_size]
            raise DataError(
                f"the tokenizer has {top} ids and the model's embedding {self.vocab_size} rows",
                code="TOK39",
                where=str(self.path),
                why=f"outside the embedding lie {', '.join(map(repr, beyond[:3]))}",
                fix=f"model.resize_token_embeddings({top}) and save again, or use the model's own tokenizer",
            )
        if top < self.vocab_size:
            self._note(f"the embedding has {self.vocab_size} rows, the tokenizer {top} ids: the rest is padding")
        ends = _end_ids(self.path, tokenizer)
        self.eos_token_ids = tuple(sorted(ends))
        if outside := [i for i in (*self.eos_token_ids, *stop_token_ids) if not 0 <= i < self.vocab_size]:
            raise DataError(
                f"end token id {outside[0]} lies outside the vocabulary of {self.vocab_size}",
                code="TOK42",
                where=str(self.path),
                fix="set eos_token_id in generation_config.json to ids of the tokenizer",
            )
        if not self.eos_token_ids and not stop_token_ids:
            raise DataError(
                "the model names no end-of-sequence token",
                code="TOK42",
                where=f"{self.path}: config.json, generation_config.json, tokenizer_config.json",
                why="every response would run to its length limit",
                fix="set eos_token in tokenizer_config.json, or rollout.rollout_stop_token_ids=[ID]",
            )
        if len(ends) > 1:
            named = (f"{i} {tokenizer.decode([i])} ({', '.join(ends[i])})" for i in self.eos_token_ids)
            self._note(f"a response ends at any of {'; '.join(named)}")
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id in self.eos_token_ids:
            kind = "there is no pad token" if tokenizer.pad_token_id is None else "the pad token is an end token"
            self._note(f"{kind}: nothing to do, lengths say what is padding, and the end token trains")

    def _check_weights(self) -> None:
        from slime_core.weights import build

        self._shards = Shards.open(self.path)
        if isinstance(self.stored_in, BlockFormat):
            names = frozenset(name for name, info in self._shards.infos.items() if info.stored)
            self.stored_in = replace(self.stored_in, weights=names)
        self._fit = build.fit(
            build.skeleton(self.config, trust_remote_code=self.trust_remote_code), self._shards, self.path
        )
        if not self._fit and not self._fit.converted:
            raise build.misfit(self._fit, self.path)


def read_config(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The config of a local model folder (transformers.PreTrainedConfig); its tokenizer and weights are not looked at.

    Of a quantised folder it is that of the model which is trained, without ``quantization_config``.

    Raises:
        DataError: TOK00 no config, or none that can be used; TOK45 code of its own; TOK48 quantised.
    """
    raw = _read_json(path / "config.json", needed=True)
    if not trust_remote_code:
        _refuse_remote_code(path, str(raw.get("model_type", "")))
    refuse_quantised(path, raw)
    config = _load_config(path, raw, trust_remote_code)
    _refuse_uneven_heads(path, config.get_text_config())
    return config


def resolve(path: str | os.PathLike[str], key: str = "rollout.hf_checkpoint") -> Path:
    """The local folder of a path or of a hub name that is cached or can be fetched; ``key`` is where it was named.

    Raises:
        ConfigError: CFG05, neither a folder nor a hub name that can be had.
    """
    text = os.fspath(path)
    local = Path(text).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.is_file() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text):
        raise ConfigError(
            (f"{text} is a file, no model folder" if local.is_file() else f"there is no model folder {text!r}")
            if text
            else "no model is named",
            code="CFG05",
            where=f"{key} = {local.absolute() if text else ''} (working folder {Path.cwd()})",
            fix=f"set {key} to a folder with config.json, or to a hub name OWNER/NAME",
        )
    return _from_hub(text, key)


def _from_hub(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, allow_patterns=list(FETCHED), local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=list(FETCHED)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"the model {name} is neither a folder nor in the hub's cache, and the hub did not give it",
            code="CFG05",
            where=f"{key} = {name} (working folder {Path.cwd()})",
            why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix=f"fetch it where there is a network (hf download {name}), or name a local folder",
        ) from error


def parameter_count(folder: Path) -> int:
    """Parameters of a model folder, from the headers of its files or else from its config; 0 if neither has them."""
    try:
        return sum(math.prod(info.shape) for info in Shards.open(folder).infos.values())
    except (DataError, OSError, ValueError):  # whoever opens it says so
        pass
    try:
        raw = text_config(folder)
        hidden, layers = raw["hidden_size"], raw["num_hidden_layers"]
        embedding = raw["vocab_size"] * hidden * (1 if raw.get("tie_word_embeddings") else 2)
        return int(embedding + layers * (4 * hidden * hidden + 3 * hidden * raw["intermediate_size"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def text_config(folder: Path) -> dict[str, Any]:
    """The part of config.json that describes the language model. Raises OSError, ValueError."""
    raw = json.loads((folder / "config.json").read_bytes())
    return raw.get("text_config") or raw  # type: ignore[no-any-return]


def _read_json(file: Path, *, needed: bool = False) -> dict[str, Any]:
    if not file.is_file():
        if not needed:
            return {}
        raise DataError(
            f"{file.parent.name} is not a model folder: it has no {file.name}",
            code="TOK00",
            where=str(file.parent),
            fix="save a model there with model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER)",
        )
    try:
        value = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file.name} is not JSON: {error.msg}",
            code="TOK00",
            where=f"{file}:{error.lineno}:{error.colno}",
            fix=AGAIN,
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name} is not JSON: {error}", code="TOK00", where=str(file), fix=AGAIN) from error
    if not isinstance(value, dict):
        raise DataError(f"{file.name} is not a JSON object", code="TOK00", where=str(file), fix=AGAIN)
    return value


def _refuse_remote_code(folder: Path, model_type: str) -> None:
    for name in REMOTE_CODE_FILES:
        if name == "config.json" and model_type in LAYERS:
            continue
        raw = _read_json(folder / name)
        named = raw.get("auto_map") or raw.get("custom_pipelines") or raw.get("custom_generate")
        if not named:
            continue
        code = ", ".join(sorted(str(v) for v in named.values())) if isinstance(named, dict) else str(named)
        from transformers import CONFIG_MAPPING

        native = model_type in CONFIG_MAPPING
        instead = f"\nor delete auto_map from {name}: transformers knows {model_type} itself" if native else ""
        raise DataError(
            f"{name} requires Python code from the model folder: {code}",
            code="TOK45",
            where=str(folder / name),
            why="code from a model is not run unless you say so",
            fix=f"read that code, then set rollout.trust_remote_code=true, which lets a run execute it{instead}",
        )


def _refuse_uneven_heads(folder: Path, text: Any) -> None:
    """TOK00 for heads that cannot share the hidden size or the key-value heads: attention would fail on its shapes."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, shared = (getattr(text, name, None) for name in names)
    reason = ""
    if not isinstance(heads, int) or heads < 1:
        return  # of a class with names of its own, which checks them
    if not getattr(text, "head_dim", None) and isinstance(hidden, int) and hidden % heads:
        reason = f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
    elif isinstance(shared, int) and (shared < 1 or heads % shared):
        reason = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}"
    if reason:
        raise DataError(
            "config.json states heads that do not fit",
            code="TOK00",
            where=str(folder / "config.json"),
            why=reason,
            fix="correct config.json, or fetch the model again",
        )


def _load_config(folder: Path, raw: Mapping[str, Any], trust_remote_code: bool) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = native_config(raw) or AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
        config.name_or_path = str(folder)
        int(config.get_text_config().vocab_size)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    except Exception as error:  # whatever a config class raises on bad values
        raise DataError(
            "config.json is not one that transformers can use",
            code="TOK00",
            where=str(folder / "config.json"),
            why=f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}",
            fix="save the model again, or upgrade transformers",
        ) from error
    if not trust_remote_code and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not sees(config):
        raise DataError(
            f"model type {config.model_type!r} is not a causal language model of transformers, with pictures or not",
            code="TOK00",
            where=str(folder / "config.json"),
            fix="name a causal language model",
        )
    return config


def _load_tokenizer(folder: Path, config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # A folder that declares the generic class means its tokenizer.json as it stands. AutoTokenizer would put another
    # pipeline around its vocabulary for some model types (qwen2 in transformers 5.17), and encode other ids.
    # It would also make an empty tokenizer of a folder that has none, and without a config run config.json's code.
    if not trust_remote_code and not any(file for name in VOCABULARIES for file in folder.glob(name)):
        raise _no_tokenizer(folder, f"it has none of {', '.join(VOCABULARIES)}")
    generic = _read_json(folder / "tokenizer_config.json").get("tokenizer_class") in GENERIC_TOKENIZERS
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        if generic and (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(str(folder), **kwargs)
        return AutoTokenizer.from_pretrained(str(folder), config=config, **kwargs)
    except Exception as error:  # tokenizers raises bare Exception
        raise _no_tokenizer(folder, f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}") from error


def _no_tokenizer(folder: Path, why: str) -> DataError:
    return DataError(
        "the model folder has no tokenizer that transformers can load",
        code="TOK00",
        where=str(folder),
        why=why,
        fix="save the tokenizer beside the model: tokenizer.save_pretrained(FOLDER)",
    )


def _end_ids(folder: Path, tokenizer: Any) -> dict[int, list[str]]:
    """Where each id that ends a response is named. Defaults of a config's class do not count."""
    raw = {name: _read_json(folder / name) for name in ("generation_config.json", "config.json")}
    stated = {name: values.get("eos_token_id") for name, values in raw.items()}
    if stated["config.json"] is None:
        text = raw["config.json"].get("text_config")
        stated["config.json"] = text.get("eos_token_id") if isinstance(text, dict) else None
    stated["the tokenizer"] = tokenizer.eos_token_id
    ends: dict[int, list[str]] = {}
    for name, value in stated.items():
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            ends.setdefault(int(number), []).append(name)
    return ends


def _context_len(text_config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return NO_LIMIT

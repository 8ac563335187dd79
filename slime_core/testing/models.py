"""Small model folders, made from a seed with nothing downloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

VOCAB = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!'\"\n"
"""Characters of :func:`tiny_model`'s tokenizer; ids 0 to 2 are ``<pad> <eos> <unk>``."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""A chat template for :func:`tiny_model`, in its own characters."""

Family = Literal["qwen3", "qwen2", "llama"]


def tiny_model(
    path: Path,
    family: Family = "qwen3",
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    vocab: str = VOCAB,
    *,
    tied: bool = False,
    context_len: int = 512,
    chat_template: str = "",
    weights: bool = True,
) -> Path:
    """Write a Hugging Face folder with a character-level tokenizer, and safetensors unless ``weights`` is False.

    Example:
        folder = ModelFolder.open(tiny_model(tmp_path / "model"))
    """
    import transformers

    from slime_core.weights.folder import ModelFolder

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = char_tokenizer(vocab, chat_template)
    tokenizer.save_pretrained(str(path))
    kind = {"qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig"}[family]
    shape: dict[str, Any] = {"head_dim": hidden // 4} if family != "qwen2" else {}
    config = getattr(transformers, kind)(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_len,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    config.architectures = [kind.removesuffix("Config") + "ForCausalLM"]
    config.save_pretrained(str(path))
    if weights:
        model: Any = ModelFolder.open(path, init_weights="random").build_model(seed=seed)
        model.save_pretrained(str(path))
    return path


def fp8_model(path: Path, origin: Path) -> Path:
    """Write a model folder in fp8, in the form of published ones, of a folder with float weights; ``path`` again.

    Example:
        folder = ModelFolder.open(fp8_model(tmp_path / "fp8", tiny_model(tmp_path / "model", hidden=256)))
    """
    from safetensors.torch import save_file

    from slime_core.weights.fp8 import SCALE, BlockFormat
    from slime_core.weights.shards import SINGLE, Shards

    shutil.copytree(origin, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    block_format, tensors = BlockFormat(), dict(Shards.open(origin))
    for name in filter(block_format.covers, list(tensors)):
        scales = block_format.scales(tensors[name])
        tensors |= {name: block_format.quantise(tensors[name], scales), f"{name}{SCALE}": scales}
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    config = json.loads((origin / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": block_format.table()}))
    return path


def write_tokenizer(folder: Path, backend: Any, *, context_len: int, chat_template: str = "") -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, in a form that git can diff.

    ``backend`` is a `tokenizers.Tokenizer` that has the tokens ``<pad> <eos> <unk>``; ``context_len`` are tokens.
    """
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        **({"chat_template": chat_template} if chat_template else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_len,
    }
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def piece_tokenizer(pieces: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer` with one id for each of ``pieces`` and for every other printable ASCII character.

    ``<pad>`` 0, ``<eos>`` 1, ``<unk>`` 2 are special; no token spans two pieces. For :func:`write_tokenizer`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<unk>"]
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*special, *pieces, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    escaped = "|".join("".join(c if c.isalnum() else f"\\{c}" for c in piece) for piece in pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{escaped}|.|\\n"), behavior="isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def char_tokenizer(vocab: str = VOCAB, chat_template: str = "") -> Any:
    """A tokenizer with one id a character: ``<pad>`` 0, ``<eos>`` 1, ``<unk>`` 2, then ``vocab`` in its order."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *dict.fromkeys(vocab)]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer

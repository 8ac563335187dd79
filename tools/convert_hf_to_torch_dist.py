"""slime's tool of this name: MODEL_ARGS are compared with config.json, and `slime convert hf-to-dist` does the rest.

    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint Qwen3-4B --save Qwen3-4B_torch_dist

Under torchrun the first process does it all and the others end at once.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_cli.convert import finder, folder_of
from slime_cli.failure import Session, report_failure, say
from slime_cli.main import main as slime
from slime_core.errors import ConfigError
from slime_core.trainers.megatron.agreement import disagreements
from slime_core.trainers.megatron.flags import kinds, problems


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `slime convert`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face folder")
    parser.add_argument("--save", required=True, help="folder to be made")
    parser.add_argument("--make-vocab-size-divisible-by", default="128")
    parser.add_argument("--tensor-model-parallel-size", default="1")
    parser.add_argument("--dtype", default="keep", help="keep, bfloat16, float32 or float16")
    for name in ("--verify", "--force", "--quiet", "--json"):
        parser.add_argument(name, action="store_true", help="as slime convert hf-to-dist has it")
    given, rest = parser.parse_known_args(argv)
    if os.environ.get("RANK", "0") != "0":
        return 0
    try:
        compare(model_args(rest), folder_of(Path(given.hf_checkpoint), "--hf-checkpoint"))
    except Exception as error:
        return report_failure(error, Session(as_json=given.json))
    words = ["convert", "hf-to-dist", given.hf_checkpoint, given.save, "--dtype", given.dtype]
    words += ["--make-vocab-size-divisible-by", given.make_vocab_size_divisible_by]
    words += ["--tensor-model-parallel-size", given.tensor_model_parallel_size]
    return slime(words + [f"--{name}" for name in ("verify", "force", "quiet", "json") if getattr(given, name)])


def model_args(words: Sequence[str]) -> dict[str, Any]:
    """Flags as a [megatron] table: `--num-layers 36 --swiglu` is {"num_layers": 36, "swiglu": True}."""
    known, table, name = kinds(), dict[str, Any](), ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").replace("-", "_").partition("=")
            table[name] = _value(value) if equals else True
        elif not name:
            raise ConfigError(f"{word!r} belongs to no flag", code="CFG00", where="command line")
        elif table[name] is True:
            table[name] = [_value(word)] if known.get(name) is list else _value(word)
        elif isinstance(table[name], list):
            table[name].append(_value(word))
        else:
            raise ConfigError(f"--{name.replace('_', '-')} has two values", code="CFG00", where="command line")
    return {name: float(v) if known.get(name) is float and type(v) is int else v for name, v in table.items()}


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def compare(table: dict[str, Any], folder: Path) -> None:
    """Refuse flags that are none, or that describe another model than the folder's config.json.

    Raises:
        ConfigError: the first such flag.
    """
    from slime_core.weights.folder import read_config

    found = problems(table)
    if not found:
        config = read_config(folder)
        bridge = finder(())(config)
        found = disagreements(table, bridge, config, bridge.megatron(config), bridge.sizes(config))
    for problem in found[1:]:
        say(f"also: {problem.what}")
    if found:
        one = found[0]
        raise ConfigError(one.what, code=one.code, where=one.where or "command line", why=one.why, fix=one.fix)


if __name__ == "__main__":
    sys.exit(main())

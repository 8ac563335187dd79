"""slime's tool of this name: MODEL_ARGS are compared with config.json, and `slime convert hf-to-dist` does the rest.

    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint Qwen3-4B --save Qwen3-4B_torch_dist

Under torchrun the first process does it all and the others end at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_cli.failure import CliSession, report_failure
from slime_cli.main import main as slime
from slime_core.config.command_line import resolve, split
from slime_core.config.problems import Problem, raise_all
from slime_core.errors import ConfigError
from slime_core.report.text import say
from slime_megatron.agreement import disagreements
from slime_megatron.convert.command import finder
from slime_megatron.flags import problems


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
        compare(model_args(rest), Path(given.hf_checkpoint))
    except Exception as error:
        return report_failure(error, CliSession(as_json=given.json))
    words = ["convert", "hf-to-dist", given.hf_checkpoint, given.save, "--dtype", given.dtype]
    words += ["--make-vocab-size-divisible-by", given.make_vocab_size_divisible_by]
    words += ["--tensor-model-parallel-size", given.tensor_model_parallel_size]
    return slime(words + [f"--{name}" for name in ("verify", "force", "quiet", "json") if getattr(given, name)])


def model_args(words: Sequence[str]) -> dict[str, Any]:
    """Flags as a [megatron] table, read as `slime run` reads them: `--swiglu --num-layers 36 --moe-layer-freq [1]*36`.

    Raises:
        ConfigError: a word that belongs to no flag of Megatron.
    """
    split_up = split(words)
    if split_up.recipe is not None:
        raise ConfigError(
            f"{split_up.recipe!r} belongs to no flag", code="CFG00", where="command line", fix="leave it out"
        )
    overrides, found = resolve(split_up, {})
    found += [
        Problem(
            code="CFG01",
            what=f"{one.place.partition(': ')[2]} describes no model",
            where=one.place,
            fix="leave it out",
        )
        for one in overrides
        if one.path[0] != "megatron"
    ]
    raise_all(found)
    return {one.path[1]: one.value for one in overrides}


def compare(table: dict[str, Any], folder: Path) -> None:
    """Refuse flags that are none, or that describe another model than the folder's config.json.

    Raises:
        ConfigError: the first such flag.
    """
    from slime_core.weights.folder import read_config, resolve as resolve_folder

    found = problems(table)
    if not found:
        config = read_config(resolve_folder(folder, "--hf-checkpoint"))
        bridge = finder(())(config)
        found = disagreements(table, bridge, config, bridge.megatron(config), bridge.sizes(config))
    for problem in found[1:]:
        say(f"also: {problem.what}")
    if found:
        one = found[0]
        raise ConfigError(one.what, code=one.code, where=one.where or "command line", why=one.why, fix=one.fix)


if __name__ == "__main__":
    sys.exit(main())

"""slime's tool of this name: its flags in, `slime convert dist-to-hf` does it.

python tools/convert_torch_dist_to_hf.py --input-dir out/iter_0000010 --output-dir hf --origin-hf-dir Qwen3-4B
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slime_cli.failure import CliSession, report_failure
from slime_cli.main import main as slime
from slime_core.errors import ConfigError
from slime_core.report.text import say


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `slime convert`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--input-dir", required=True, help="torch_dist checkpoint")
    parser.add_argument("--output-dir", required=True, help="folder to be made")
    parser.add_argument("--origin-hf-dir", help="folder that config and tokenizer come from; needed")
    parser.add_argument("--model-name", help="not needed: config.json of --origin-hf-dir says it")
    parser.add_argument("-f", "--force", action="store_true", help="replace the output folder")
    parser.add_argument("--chunk-size", default=str(5 << 30), help="bytes of tensors in a file")
    parser.add_argument("--vocab-size", help="not needed: config.json of --origin-hf-dir says it")
    parser.add_argument("--dtype", default="keep", help="keep, bfloat16, float32 or float16")
    for name in ("--trust-metadata", "--verify", "--quiet", "--json"):
        parser.add_argument(name, action="store_true", help="as slime convert dist-to-hf has it")
    given = parser.parse_args(argv)
    if not given.origin_hf_dir:
        error = ConfigError(
            "--origin-hf-dir is needed", code="CFG02", where="command line",
            why="config.json says how tensors are named and cut, and DST needs one",
            fix="--origin-hf-dir FOLDER, the model folder that training started from",
        )  # fmt: skip
        return report_failure(error, CliSession(as_json=given.json))
    for name in ("model_name", "vocab_size"):
        if getattr(given, name):
            say(f"--{name.replace('_', '-')} is not needed: config.json of {given.origin_hf_dir} says it")
    words = ["convert", "dist-to-hf", given.input_dir, given.output_dir, "--origin-hf-dir", given.origin_hf_dir]
    words += ["--max-shard-size", given.chunk_size, "--dtype", given.dtype]
    flags = ("trust_metadata", "force", "verify", "quiet", "json")
    return slime(words + [f"--{name.replace('_', '-')}" for name in flags if getattr(given, name)])


if __name__ == "__main__":
    sys.exit(main())

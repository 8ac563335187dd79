"""The tool of this name: its flags in, `slime convert fsdp-to-hf` does it.

python tools/convert_fsdp_to_hf.py --input-dir runs/mine-0/checkpoints/step-40 --output-dir hf --origin-hf-dir Qwen3-4B
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slime_cli.main import main as slime


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `slime convert`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--input-dir", required=True, help="checkpoints/step-N, or a run directory")
    parser.add_argument("--output-dir", required=True, help="folder to be made")
    parser.add_argument("--origin-hf-dir", help="folder that config and tokenizer come from; default: the run's")
    parser.add_argument("-f", "--force", action="store_true", help="replace the output folder")
    parser.add_argument("--dtype", default="keep", help="keep, bfloat16, float32 or float16")
    for name in ("--verify", "--quiet", "--json"):
        parser.add_argument(name, action="store_true", help="as slime convert fsdp-to-hf has it")
    given = parser.parse_args(argv)
    words = ["convert", "fsdp-to-hf", given.input_dir, given.output_dir, "--dtype", given.dtype]
    words += ["--origin-hf-dir", given.origin_hf_dir] if given.origin_hf_dir else []
    return slime(words + [f"--{name}" for name in ("force", "verify", "quiet", "json") if getattr(given, name)])


if __name__ == "__main__":
    sys.exit(main())

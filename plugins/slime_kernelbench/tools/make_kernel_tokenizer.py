"""Write the tokenizer of `src/slime_kernelbench/model/`: byte-pair merges of the family's questions and kernels.

Run once, `python plugins/slime_kernelbench/tools/make_kernel_tokenizer.py`; its output is kept as data, and a test
compares the two. Every printable ASCII character is a token, so that any text of them can be written; merges stay
within a line, have at most 12 characters, and never join digits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from slime_core.testing.models import write_tokenizer
from slime_kernelbench.dialogue.short import short_form
from slime_kernelbench.warmup.pupil import fenced, random_slips
from slime_kernelbench.warmup.rows import Family, sizes

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHARACTERS = ("\n", *map(chr, range(32, 127)))
VOCABULARY, LONGEST, TEXTS = 512, 12, 4000
MODEL = Path(__file__).parents[1] / "src" / "slime_kernelbench" / "model"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<assistant>{{ m.content }}<eos>{% else %}<user>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def texts() -> Iterator[str]:
    """What the tokenizer is trained on: questions and answers of the training side."""
    rng, operators = Random(0), Family(heldout=0.15, seed=0).operators("train")
    for _ in range(TEXTS):
        operator = rng.choice(operators)
        yield short_form(operator.problem(*sizes("train", rng)).source)
        yield fenced(operator.kernel(random_slips(operator, 0.5, rng)))


def make() -> Tokenizer:
    """Train it; the same texts give the same merges."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+ *|[0-9]|[^\n0-9]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        max_token_length=LONGEST,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=list(CHARACTERS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def main(folder: Path = MODEL) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``folder``."""
    write_tokenizer(folder, make(), context_len=1024, chat_template=TEMPLATE)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

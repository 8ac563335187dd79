"""Write the corpus, the questions and the tokenizer of this folder; what it writes is kept, and a test compares them.

    python examples/search/make_facts.py

A person works for another one and lives in a town; all names are drawn at random, two syllables each. People come in
two groups, and nobody works for somebody of the other group: held-out questions are about people whom no training
question, nor any document that one leads to, ever names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from slime_core.testing.models import piece_tokenizer, write_tokenizer

HERE = Path(__file__).parent
TRAIN, HELDOUT = 800, 200
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
TAGS = [f"<{slash}{name}>" for name in ("search", "information", "answer") for slash in ("", "/")]
WORDS = ["Where does the boss of", " live?", "Doc", "(Title: ", " works for ", " and lives in "]


def facts(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, object]]]:
    """The corpus, and its questions: training questions first."""
    draw = Random(seed)
    names = [first + second for first in SYLLABLES for second in SYLLABLES]
    drawn = draw.sample(names, 2 * (TRAIN + HELDOUT))
    people, towns = (
        drawn[: TRAIN + HELDOUT],
        dict(zip(drawn[: TRAIN + HELDOUT], drawn[TRAIN + HELDOUT :], strict=True)),
    )
    bosses = {}
    for circle in (people[:TRAIN], people[TRAIN:]):
        bosses |= dict(zip(circle, [*circle[1:], circle[0]], strict=True))
    corpus = [
        {"id": str(number), "contents": f"{name}\n{name} works for {bosses[name]} and lives in {towns[name]}."}
        for number, name in enumerate(people)
    ]
    draw.shuffle(corpus)
    rows = [
        {"question": f"Where does the boss of {name} live?\n", "golden_answers": [towns[bosses[name]]]}
        for name in people
    ]
    return corpus, rows


def main(folder: Path = HERE) -> None:
    """Write everything into ``folder``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    corpus, rows = facts()
    for name, lines in {"corpus": corpus, "train": rows[:TRAIN], "heldout": rows[TRAIN:]}.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "data" / f"{name}.jsonl").write_text(text)
    write_tokenizer(folder / "model", piece_tokenizer([*TAGS, *WORDS, *SYLLABLES]), context_len=512)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

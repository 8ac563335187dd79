"""Write the pictures, the questions and the model folder of this example; what it writes is kept, and a test compares.

    python examples/visual_counting/make_pictures.py

A picture has 4 by 4 cells of 8 by 8 pixels, some with a red or blue square. Its file is in the row, as a data URI.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw
from tokenizers import AddedToken

from slime_core.testing.models import piece_tokenizer, write_tokenizer

HERE = Path(__file__).parent
COLORS = {"red": (220, 40, 40), "blue": (50, 80, 220)}
SIDE, CELL, MOST = 4, 8, 4
SETS = {"train": (1, 1024), "heldout": (2, 128)}  # seed and rows
QUESTION = "How many squares are red?"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def draw(colors: list[str], cells: list[int]) -> str:
    """A picture with a square of each color in the cell beside it, as a data URI."""
    picture = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for color, cell in zip(colors, cells, strict=True):
        y, x = (CELL * place + 1 for place in divmod(cell, SIDE))
        pen.rectangle((x, y, x + CELL - 3, y + CELL - 3), fill=COLORS[color])
    file = io.BytesIO()
    picture.quantize(4).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def row(dice: Random) -> dict[str, object]:
    """A question about a picture with up to MOST red squares, and at least one blue one."""
    count = dice.randint(0, MOST)
    colors = ["red"] * count + ["blue"] * dice.randint(1, MOST)
    picture = draw(colors, dice.sample(range(SIDE**2), len(colors)))
    return {"question": f"<image>{QUESTION}", "images": [picture], "label": str(count)}


def main(folder: Path = HERE) -> None:
    """Write everything into ``folder``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, (seed, count) in SETS.items():
        dice = Random(seed)
        lines = (json.dumps(row(dice)) for _ in range(count))
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = piece_tokenizer([QUESTION])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    write_tokenizer(folder / "model", tokenizer, context_len=64)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Write rows of Geometry3K's format (`images`, `problem`, `answer`) with the instruction that asks for a boxed answer.

    python examples/geometry/geometry_rows.py DATASET FOLDER        DATASET: a hub name, or a folder of Parquet files

A picture stays the bytes that the data set has, in the row as a data URI.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

INSTRUCTION = "Think step by step, then put the final answer in \\boxed{}."


def rows(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of this example, of those of the data set as its files have them."""
    for record in records:
        files = (base64.b64encode(picture["bytes"]).decode() for picture in record["images"])
        yield {
            "problem": f"{record['problem']}\n{INSTRUCTION}",
            "images": [f"data:image/png;base64,{file}" for file in files],
            "answer": record["answer"],
        }


def main(dataset: str, folder: Path) -> None:
    """Write ``train.jsonl`` and ``test.jsonl`` into ``folder``."""
    import datasets

    for split in ("train", "test"):
        records = datasets.load_dataset(dataset, split=split).cast_column(
            "images", datasets.Sequence(datasets.Image(decode=False))
        )
        lines = map(json.dumps, rows(records))
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

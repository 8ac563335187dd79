"""The task of small whole runs: a tiny model, 25 sums, and a reward of the test's own."""

import json

from slime_core.testing import tiny_model


def write_task(folder, reward):
    """``model``, ``rows.jsonl`` and ``digits.py`` with the source ``reward``, into a folder; the folder again."""
    tiny_model(folder / "model", hidden=32)
    rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits.py").write_text(reward)
    return folder

"""What lies in memory when it is fullest, from an allocator's history made by hand."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

FILE = str(Path(__file__).parents[3] / "slime_core" / "a.py")
GIB = 1 << 30


def event(action, addr, gib, line=1):
    torch_frame = {"filename": "/site/torch/nn.py", "line": 9, "name": "call"}
    frames = [torch_frame, {"filename": FILE, "line": line, "name": "step"}]
    return {"action": action, "addr": addr, "size": gib * GIB, "frames": frames}


def test_bytes_at_the_peak_count_under_the_line_of_ours(tool):
    table = tool("memory_peak").table
    history = [
        event("alloc", 1, 2, line=3),
        event("free_requested", 9, 1),
        event("free_completed", 9, 1),
        event("alloc", 2, 1, line=4),
        event("alloc", 3, 2, line=4),
        event("free_completed", 1, 2),
        event("alloc", 1, 1, line=5),
    ]
    lines = table(history, 4 * GIB, least=0.5)
    assert lines == ["8.00 GiB at the peak, 3.00 from earlier", "  3.00  a.py:4 step", "  2.00  a.py:3 step"]
    assert table([], GIB, least=0.5) == ["1.00 GiB at the peak, 1.00 from earlier"]

"""Order, resume and memory of files that are much larger than memory should be."""

import json
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from slime_core.data import jsonl, supply

ROOT = Path(__file__).parents[3]


@pytest.mark.unit
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_memory_and_order_do_not_depend_on_the_files_size(tmp_path, source, monkeypatch, shuffle):
    monkeypatch.setattr(jsonl, "MAX_STARTS", 512)
    monkeypatch.setattr(supply, "SCAN_ROWS", 100)
    row = json.dumps({"input": "1+1=", "more": "x" * 1000}).encode() + b"\n"
    path, peaks = tmp_path / "rows.jsonl", []
    for megabytes in (8, 40):
        path.write_bytes(row * (megabytes * (1 << 20) // len(row)))
        tracemalloc.start()
        found = source(path, rollout_shuffle=shuffle)
        found.next(500)
        saved = found.state()
        again = source(path, rollout_shuffle=shuffle)
        again.restore(saved)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(json.dumps(saved)) < 600
        assert [p.where for p in again.next(50)] == [p.where for p in found.next(50)]
    assert peaks[1] - peaks[0] < 150_000, peaks


@pytest.mark.nightly
def test_ten_gigabytes_are_opened_read_and_resumed_in_flat_memory():
    place = next(p for p in ("/var/tmp", tempfile.gettempdir()) if shutil.disk_usage(p).free > 12e9)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        tool = [
            sys.executable,
            str(ROOT / "tools" / "bench" / "bench_data.py"),
            "--gigabytes",
            "10",
            "--rows",
            "20000",
            "--json",
        ]
        done = subprocess.run(tool, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    large = json.loads(done.stdout)["large"]
    assert large["bytes"] > 10e9
    assert large["rows"] > 30_000_000
    assert large["peak_mib/after"] - large["peak_mib/before"] < 150, "the index of lines is 32 MiB"

"""Families whose layout in SGLang is not known here are served and trained by flags alone; docs/sglang.md has them all.

smollm3 has no model in SGLang, which takes transformers' code for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from raw_server import START_TIMEOUT

from slime_core.testing.families import family_model

pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(900)]

BAND = 1e-3  # of the canary in float32


@pytest.mark.parametrize("family", ["smollm3", "olmo2"])
def test_a_family_of_unknown_layout_trains_with_log_probs_in_the_band(
    sglang_python: str, tmp_path: Path, family: str
) -> None:
    model = family_model(tmp_path / "model", family)
    text = "0123456789 +-= abcdef " * 4
    rows = [json.dumps({"input": text[n:] + text[:n], "label": ""}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "judge.py").write_text("async def reward(args, sample, **kw):\n    return len(sample.response) % 3\n")
    words = (
        *("run", "--hf-checkpoint", model, "--prompt-data", "rows.jsonl", "--custom-rm-path", "judge.py:reward"),
        *("--device", "cpu", "--dtype", "float32", "--rollout-engine", "sglang", "--sglang-python", sglang_python),
        *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "8", "--sglang-mem-fraction-static", "0.2"),
        *("--sglang-max-total-tokens", "4000", "sglang.env.OMP_NUM_THREADS=1", "--run-dir", "run"),
    )
    command = [sys.executable, "-m", "slime_cli.main", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=START_TIMEOUT + 300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "log-probs alone tell" in done.stderr + done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["canary/logprob_diff_max"] < BAND
        assert metrics["train_rollout_logprob_abs_diff"] < BAND
        assert "canary/tensors" not in metrics

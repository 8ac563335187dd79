"""`slime doctor` about the sandbox: the level, and one thing allowed and one denied for each layer."""

import pytest

from slime_core.testing.plugins import check_plugin
from slime_sandbox import Sandbox, checks
from slime_sandbox.levels import WAYS, out_of_reach

pytestmark = pytest.mark.integration


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("sandbox") if finding.status in ("fail", "warn")] == []


def test_every_layer_is_a_line_with_what_was_allowed_and_what_was_denied():
    row = checks.level()
    assert row.status == "ok", row
    assert row.found.startswith("level strong, memory by ")
    lines = dict(line.split(": ", 1) for line in row.details)
    assert list(lines) == [*WAYS["strong"][0], "deadline"]
    assert all("allowed: " in lines[layer] for layer in WAYS["strong"][0])
    assert "setuid to root" in lines["uid"]
    assert "counted {'socket': 1" in lines["seccomp"]
    assert "did not end in 0.2 s" in lines["deadline"]


def test_a_machine_without_any_level_is_warned_with_the_layer_and_the_fix(monkeypatch):
    async def refuse(*args, **kwargs) -> None:
        raise out_of_reach("medium", "landlock", "Function not implemented")

    monkeypatch.setattr(Sandbox, "open", refuse)
    row = checks.level()
    assert row.status == "warn"
    assert row.found.startswith("sandbox level 'medium' is out of reach: landlock: Function not implemented")
    assert "lsm=" in row.fix


def test_a_gpu_on_which_a_candidate_cannot_compute_is_warned_of_in_torchs_words():
    """Real: no machine has a GPU of that name."""
    row = checks.gpu_result("GPU-not-there")
    assert row.status == "warn"
    assert row.found.startswith("GPU-not-there: ended with exit code 1; ")
    assert "CUDA" in row.found or "NVIDIA" in row.found

"""`slime doctor` about the sandbox: the level, and one thing allowed and one denied for each layer."""

import pytest

from slime_cli import sandbox_checks
from slime_cli.doctor import run_check
from slime_core.errors import SandboxError
from slime_core.sandbox.levels import WAYS, out_of_reach

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _again():
    """Each test tries for itself."""
    sandbox_checks._tried.cache_clear()
    yield
    sandbox_checks._tried.cache_clear()


def rows():
    return {check.name: run_check(check) for check in sandbox_checks.sandbox_checks(each_layer=True)}


def test_every_layer_is_a_row_with_what_was_allowed_and_what_was_denied():
    found = rows()
    assert list(found) == [
        "sandbox",
        *(f"sandbox {layer}" for layer in WAYS["strong"][0]),
        "sandbox deadline",
        "sandbox gpu",
    ]
    assert {row.status for row in found.values()} == {"ok"}, found
    assert found["sandbox"].found.startswith("level strong, memory by ")
    assert all("allowed: " in found[f"sandbox {layer}"].found for layer in WAYS["strong"][0])
    assert "setuid to root" in found["sandbox uid"].found
    assert "counted {'socket': 1" in found["sandbox seccomp"].found
    assert "did not end in 0.2 s" in found["sandbox deadline"].found


def test_a_machine_without_any_level_is_warned_with_the_layer_and_the_fix(monkeypatch):
    error = out_of_reach("medium", "landlock", "Function not implemented")

    async def refuse(*args, **kwargs) -> None:
        raise error

    monkeypatch.setattr(sandbox_checks.Sandbox, "open", refuse)
    found = rows()
    assert {row.status for name, row in found.items() if name != "sandbox gpu"} == {"warn"}
    assert found["sandbox"].found.startswith(
        "sandbox level 'medium' is out of reach: landlock: Function not implemented"
    )
    assert "lsm=" in found["sandbox"].fix
    assert isinstance(error, SandboxError)


def test_a_gpu_on_which_a_candidate_cannot_compute_is_warned_of_in_torchs_words():
    """Real: no machine has a GPU of that name."""
    found = sandbox_checks.gpu_result("GPU-not-there")
    assert found.status == "warn"
    assert found.found.startswith("GPU-not-there: ended with exit code 1; ")
    assert "CUDA" in found.found or "NVIDIA" in found.found

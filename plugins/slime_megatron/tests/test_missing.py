"""Flags whose library, device or other flag is not there; what an optimizer in main memory brings with it."""

import pytest
import torch
from test_settings import built, made, refused

from slime_megatron import missing

pytestmark = pytest.mark.unit

OFFLOAD = {"optimizer_cpu_offload": True}
ENGINE = "use_precision_aware_optimizer"


def test_an_optimizer_in_main_memory_leaves_no_masters_on_the_device():
    config = built(made(OFFLOAD, device="cuda")).optimizer
    assert (config.optimizer_offload_fraction, config.use_precision_aware_optimizer) == (1.0, True)
    assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    assert (config.main_params_dtype, config.exp_avg_dtype) == (torch.float32, torch.float32)
    plain = built(made(device="cuda")).optimizer
    assert not plain.optimizer_cpu_offload
    assert not plain.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def test_other_flags_of_optimizer_offload_reach_megatron():
    table = {"overlap_cpu_optimizer_d2h_h2d": True, "no_pin_cpu_params": True, ENGINE: True}
    config = built(made({**OFFLOAD, **table}, device="cuda")).optimizer
    assert (config.overlap_cpu_optimizer_d2h_h2d, config.pin_cpu_params, config.pin_cpu_grads) == (True, False, True)


@pytest.mark.parametrize(
    ("table", "code", "words"),
    [
        pytest.param({"use_distributed_optimizer": False}, "CFG04", "provides it", id="shared"),
        pytest.param({ENGINE: False}, "CFG04", "provides it", id="masters"),
        pytest.param({"optimizer_offload_fraction": 0.0}, "CFG03", "above 0, up to 1", id="nothing"),
        pytest.param({"optimizer_offload_fraction": 1.5}, "CFG03", "above 0, up to 1", id="more than all"),
        pytest.param({"exp_avg_dtype": "bf16"}, "CFG04", "leave exp_avg_dtype out", id="moments"),
        pytest.param({"main_params_dtype": "fp16"}, "CFG04", "leave main_params_dtype out", id="halves"),
    ],
)
def test_flags_that_optimizer_offload_excludes_are_refused(table, code, words):
    error = refused({**OFFLOAD, **table}, device="cuda")
    assert error.code == code
    assert f"megatron.{next(iter(table))}" in error.what
    assert words in error.fix


def test_flags_that_mean_something_with_it_alone_are_named():
    table = {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}
    notices = [f"{name} has no effect without --optimizer-cpu-offload" for name in table]
    assert list(made(table, device="cuda").notices) == notices
    assert not made({**OFFLOAD, **table}, device="cuda").notices


def test_weights_that_nobody_shares_are_gathered_by_nobody():
    error = refused({"overlap_param_gather": True, "use_distributed_optimizer": False})
    assert error.what == "megatron.overlap_param_gather has nothing to gather"
    assert error.fix == "leave overlap_param_gather out"


def test_residuals_in_float32_are_refused_where_transformer_engine_computes(monkeypatch):
    table = {"fp32_residual_connection": True}
    assert built(made(table, device="cuda")).transformer.pipeline_dtype == torch.float32
    monkeypatch.setattr(missing, "installed", lambda name: name == "transformer_engine")
    assert refused(table, device="cuda").fix == "leave fp32_residual_connection out"
    assert made(table).transformer["fp32_residual_connection"]


def test_norms_are_not_made_again_without_transformer_engine(monkeypatch):
    table = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "core_attn"]}
    assert refused(table, device="cuda").fix.startswith("leave layernorm out of recompute_modules")
    monkeypatch.setattr(missing, "installed", lambda name: True)
    assert made(table, device="cuda")
    monkeypatch.undo()
    assert made({**table, "recompute_modules": ["core_attn"]}, device="cuda")

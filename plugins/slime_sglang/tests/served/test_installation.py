"""The installation that the suite serves with: what is read of it is what its own parser takes."""

import json
import re
import subprocess

import pytest
from raw_server import ENVIRONMENT

from slime_core.errors import ConfigError
from slime_core.testing.families import family_config
from slime_sglang.architectures import fallback
from slime_sglang.command import Command
from slime_sglang.installation import arguments, read_installation
from slime_sglang.options import OWN

pytestmark = pytest.mark.integration

PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
found = vars(parser.parse_args(json.loads(sys.argv[1])))
print("ANSWER" + json.dumps({name: found[name] for name in json.loads(sys.argv[2])}))
"""
NOT_EVERYWHERE = {"grpc_port", "smg_http_sidecar_port", "smg_grpc_mode"}  # 0.5.12 has none of them


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def installed(sglang_python, cache):
    return read_installation(sglang_python, ENVIRONMENT, cache)


def test_every_option_and_what_this_version_can_do_is_read(installed):
    assert installed.version.startswith("0.5.")
    assert len({option.name for option in installed.options.values()}) > 350
    assert installed.features >= {"weights_checker", "pause_modes", "disk_update", "tensor_update", "nccl_update"}
    assert installed.features >= {"routed_dp_rank", "abort", "memory_tags", "sampling_seed"}
    assert installed.torch


def test_spans_of_versions_are_known_from_0_5_23_on(installed):
    numbers = tuple(int(part) for part in installed.version.split(".")[:3] if part.isdigit())
    assert numbers < (0, 5, 23) or "version_spans" in installed.features


def test_a_second_reading_comes_from_the_cache(installed, sglang_python, cache):
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    assert read_installation(sglang_python, ENVIRONMENT, cache) == installed
    assert file.stat().st_mtime_ns == before


def test_every_option_that_slime_sets_or_refuses_exists(installed):
    assert set(OWN) - set(installed.options) <= NOT_EVERYWHERE


@pytest.mark.nightly
def test_sglangs_own_parser_reads_our_words_as_they_were_meant(installed, sglang_python):
    table = {
        "mem-fraction-static": 0.4,
        "max_total_tokens": "20k",
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
        "skip_server_warmup": False,
        "attention_backend": "torch_native",
        "extra_metric_labels": {"run": "a b"},
        "bucket_inter_token_latency": [0.1, 1],
        "json_model_override_args": {"max_position_embeddings": 512},
        "served_model_name": 7,
        "expert_parallel_size": 1,
    }
    words = arguments(installed, {"model_path": "/m", "tp_size": 1}, by_slime=True) + arguments(installed, table)
    names = [*(name.replace("-", "_") for name in table if name != "expert_parallel_size"), "ep_size", "model_path"]
    done = subprocess.run(
        [sglang_python, "-c", PARSE, json.dumps(words), json.dumps(names)],
        env=installed.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.rpartition("ANSWER")[2]) == {
        "mem_fraction_static": 0.4,
        "max_total_tokens": 20000,
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
        "skip_server_warmup": False,
        "attention_backend": "torch_native",
        "extra_metric_labels": {"run": "a b"},
        "bucket_inter_token_latency": [0.1, 1.0],
        "json_model_override_args": '{"max_position_embeddings": 512}',
        "served_model_name": "7",
        "ep_size": 1,
        "model_path": "/m",
    }


def test_a_misspelt_option_of_the_real_one_is_caught(installed):
    with pytest.raises(ConfigError, match="mem_fraction_static"):
        arguments(installed, {"mem-fraction-statik": 0.5})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("Qwen3ForCausalLM", "^$"),
        ("NowhereForCausalLM", "does not serve NowhereForCausalLM"),
        pytest.param("SmolLM3ForCausalLM", "TransformersForCausalLM", marks=pytest.mark.nightly),
    ],
)
def test_the_registry_of_the_real_one_has_the_last_word(installed, tmp_path, architecture, said):
    family_config("smollm3", 82, architectures=[architecture]).save_pretrained(str(tmp_path))
    command, words = Command(arguments=(), env=ENVIRONMENT), {"where": "rollout.hf_checkpoint", "cache": tmp_path}
    try:
        text = fallback(installed, command, tmp_path, trust=False, **words)
    except ConfigError as error:
        text = str(error)
    assert re.search(said, text)


@pytest.mark.nightly
def test_a_config_of_code_that_may_not_run_is_refused_with_the_key_that_lets_it_run(installed, tmp_path):
    names = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps({**names, "num_hidden_layers": 2, "hidden_size": 64}))
    command = Command(arguments=(), env=ENVIRONMENT)
    with pytest.raises(ConfigError) as error:
        fallback(installed, command, tmp_path, trust=False, where="rollout.hf_checkpoint", cache=tmp_path)
    assert "trust_remote_code" in error.value.why
    assert error.value.fix.startswith("rollout.trust_remote_code = true")
    assert fallback(installed, command, tmp_path, trust=True, where="", cache=tmp_path) == ""

"""SGLang's options as words of its command line: types, flags, lists, and what slime sets itself."""

import pytest

from slime_core.errors import ConfigError
from slime_sglang.options import OWN, Option, arguments, describe, read_options

pytestmark = pytest.mark.unit


def entry(*flags, kind="value", type="str", **more):
    """One line of what the probe prints."""
    told = {"name": flags[0][2:].replace("-", "_"), "flags": list(flags), "kind": kind, "type": type}
    return told | {"empty": False, "choices": [], "default": None, "help": ""} | more


OPTIONS = read_options(
    [
        entry("--mem-fraction-static", type="float"),
        entry("--max-running-requests", type="int"),
        entry("--max-total-tokens", type="human_readable_int"),
        entry("--dtype", choices=["auto", "float32", "bfloat16"]),
        entry("--max-lora-chunk-size", type="int", choices=["16", "32"]),
        entry("--disable-radix-cache", kind="flag"),
        entry("--dllm-fdfo", "--no-dllm-fdfo", kind="switch", default=True),
        entry("--cuda-graph-bs", kind="list", type="int"),
        entry("--allowed-media-domains", kind="list", empty=True),
        entry("--model-checksum", kind="maybe"),
        entry("--extra-metric-labels", type="loads"),
        entry("--forward-hooks", type="json_list_type"),
        entry("--json-model-override-args"),
        entry("--cuda-graph-config", type="parse_cuda_graph_config_arg"),
        entry("--ep-size", "--expert-parallel-size", "--ep", type="int"),
        entry("--fp8-gemm-backend", name="fp8_gemm_runner_backend"),
        entry("--model-path", "--model"),
        entry("--port", type="int"),
        entry("--enable-deterministic-inference", kind="flag"),
    ]
)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        pytest.param("mem_fraction_static", 0.5, ["--mem-fraction-static", "0.5"], id="number"),
        pytest.param("mem-fraction-static", 1, ["--mem-fraction-static", "1"], id="dashes, integer for a number"),
        pytest.param("max_running_requests", 8, ["--max-running-requests", "8"], id="integer"),
        pytest.param("max_running_requests", -1, ["--max-running-requests=-1"], id="a minus is not taken for a flag"),
        pytest.param("max_total_tokens", "32k", ["--max-total-tokens", "32k"], id="count with a letter"),
        pytest.param("max_total_tokens", 32768, ["--max-total-tokens", "32768"], id="count"),
        pytest.param("dtype", "float32", ["--dtype", "float32"], id="choice"),
        pytest.param("max_lora_chunk_size", 16, ["--max-lora-chunk-size", "16"], id="choice that is a number"),
        pytest.param("disable_radix_cache", True, ["--disable-radix-cache"], id="flag"),
        pytest.param("disable_radix_cache", False, [], id="a false flag is left out"),
        pytest.param("dllm_fdfo", False, ["--no-dllm-fdfo"], id="a switch is turned off"),
        pytest.param("dllm_fdfo", True, ["--dllm-fdfo"], id="a switch is turned on"),
        pytest.param("cuda_graph_bs", [1, 2, 4], ["--cuda-graph-bs", "1", "2", "4"], id="array"),
        pytest.param("cuda_graph_bs", (1,), ["--cuda-graph-bs", "1"], id="tuple"),
        pytest.param("cuda_graph_bs", 8, ["--cuda-graph-bs", "8"], id="one value for an array"),
        pytest.param("allowed_media_domains", [], ["--allowed-media-domains"], id="empty array where it may be"),
        pytest.param("model_checksum", True, ["--model-checksum"], id="alone"),
        pytest.param("model_checksum", "a.json", ["--model-checksum", "a.json"], id="with a value"),
        pytest.param("extra_metric_labels", {"a": 1}, ["--extra-metric-labels", '{"a": 1}'], id="table as JSON"),
        pytest.param("extra_metric_labels", '{"a":1}', ["--extra-metric-labels", '{"a": 1}'], id="JSON text"),
        pytest.param("forward_hooks", [{"a": 1}], ["--forward-hooks", '[{"a": 1}]'], id="array as JSON"),
        pytest.param("json_model_override_args", {"a": 1}, ["--json-model-override-args", '{"a": 1}'], id="text JSON"),
        pytest.param("cuda_graph_config", {"a": [1]}, ["--cuda-graph-config", '{"a": [1]}'], id="a type of SGLang's"),
        pytest.param("expert_parallel_size", 2, ["--ep-size", "2"], id="another name of the same option"),
        pytest.param("fp8_gemm_backend", "triton", ["--fp8-gemm-backend", "triton"], id="its flag, not its field"),
    ],
)
def test_a_value_becomes_the_words_that_sglang_reads(name, value, words):
    assert arguments(OPTIONS, {name: value}) == words


def test_words_stand_in_the_order_of_the_table():
    table = {"dtype": "auto", "disable_radix_cache": True, "mem_fraction_static": 0.5}
    assert arguments(OPTIONS, table) == ["--dtype", "auto", "--disable-radix-cache", "--mem-fraction-static", "0.5"]


@pytest.mark.parametrize(
    ("name", "value", "code", "parts"),
    [
        ("mem_fraction_statik", 0.5, "CFG01", ["no option 'mem_fraction_statik'", "'mem_fraction_static'"]),
        ("server_concurrency", 64, "CFG01", ["no option", "--server-concurrency N"]),
        ("max_lora", 16, "CFG01", ["did you mean 'max_lora_chunk_size'?"]),
        ("mem_fraction_static", "much", "CFG02", ["it is a string", "takes a number", "mem_fraction_static = 0.5"]),
        ("mem_fraction_static", True, "CFG02", ["it is a boolean"]),
        ("mem_fraction_static", float("nan"), "CFG02", ["takes a number"]),
        ("max_running_requests", 1.5, "CFG02", ["takes an integer"]),
        ("max_running_requests", [1, 2], "CFG02", ["it is an array", "put the recipe before all flags"]),
        ("max_total_tokens", "32kk", "CFG02", ["takes a count"]),
        ("max_total_tokens", "1.5Ki", "CFG02", ["takes a count"]),
        ("disable_radix_cache", "demo", "CFG02", ["takes true or false", "put the recipe before all flags"]),
        ("disable_radix_cache", 1, "CFG02", ["takes true or false"]),
        ("cuda_graph_bs", ["a"], "CFG02", ["takes an array of integers"]),
        ("cuda_graph_bs", [], "CFG02", ["takes an array of integers"]),
        ("extra_metric_labels", "{", "CFG02", ["takes a table"]),
        ("forward_hooks", {"a": 1}, "CFG02", ["takes an array"]),
        ("dtype", ["auto"], "CFG02", ["takes one of auto, float32"]),
        ("model_checksum", "a\0b", "CFG02", ["wrong type"]),
        ("dtype", "bfloat61", "CFG03", ["'bfloat61' is not a choice", "did you mean 'bfloat16'?"]),
        ("max_lora_chunk_size", 17, "CFG03", ["one of 16, 32"]),
        ("port", 30000, "CFG04", ["set by slime", "--rollout-external-engine-addrs"]),
        ("model", "/m", "CFG04", ["'model' of SGLang is set by slime", "--hf-checkpoint"]),
        ("enable-deterministic-inference", True, "CFG04", ["--rollout-deterministic"]),
    ],
)
def test_an_option_that_sglang_would_not_take_is_refused_with_the_way_out(name, value, code, parts):
    with pytest.raises(ConfigError) as caught:
        arguments(OPTIONS, {name: value}, version="0.5.23")
    error = caught.value
    assert (error.code, error.where) == (code, f"sglang.{name}")
    assert all(part in str(error) for part in parts), str(error)


@pytest.mark.parametrize("table", [{"ep": 1, "ep_size": 2}, {"ep-size": 1, "ep_size": 1}])
def test_one_option_under_two_names_is_refused(table):
    with pytest.raises(ConfigError, match="given twice") as caught:
        arguments(OPTIONS, table)
    assert caught.value.code == "CFG07"


def test_all_problems_are_named_at_once_with_their_places():
    places = {"dtyp": "recipe.toml:3", "port": "command line: --sglang-port"}
    with pytest.raises(ConfigError) as caught:
        arguments(OPTIONS, {"dtyp": "auto", "port": 1}, where=lambda name: places[name])
    assert "2 problems" in caught.value.what
    assert "recipe.toml:3" in caught.value.where
    assert "command line: --sglang-port" in caught.value.where


def test_slime_itself_may_set_its_own():
    assert arguments(OPTIONS, {"port": 30000, "model_path": "/m"}, by_slime=True) == [
        "--port",
        "30000",
        "--model-path",
        "/m",
    ]


def test_every_refused_option_says_what_to_do():
    assert all(text.strip() for text in OWN.values())


def test_a_secret_is_not_repeated_in_a_message():
    options = read_options([entry("--x-token", choices=["a"])])
    secret = "hf_" + "x" * 30
    with pytest.raises(ConfigError) as caught:
        arguments(options, {"x_token": secret})
    assert secret not in str(caught.value)


def test_the_first_option_of_a_name_keeps_it():
    found = read_options([entry("--a", "--b"), entry("--b", "--c")])
    assert (found["b"].flag, found["c"].flag) == ("--a", "--b")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (Option(name="a", flag="--a", kind="flag"), "true or false"),
        (Option(name="a", flag="--a", kind="list", type="int"), "an array of integers"),
        (Option(name="a", flag="--a", choices=("x", "y")), "one of x, y"),
        (Option(name="a", flag="--a", type="some_parser"), "a string"),
    ],
)
def test_an_option_is_described_in_words(option, text):
    assert describe(option) == text

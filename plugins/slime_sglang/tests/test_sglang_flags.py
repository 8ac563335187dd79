"""Options of SGLang on the command line and in a recipe: names, values, lists, flags, and which of two wins."""

import pytest

from slime_core.config.load import load_config, split

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("words", "table"),
    [
        pytest.param(["--sglang-mem-fraction-static", "0.5"], {"mem_fraction_static": 0.5}, id="number"),
        pytest.param(["--sglang-mem-fraction-static=0.5"], {"mem_fraction_static": 0.5}, id="equals"),
        pytest.param(["--sglang-attention-backend", "fa3"], {"attention_backend": "fa3"}, id="text"),
        pytest.param(["--sglang-disable-radix-cache"], {"disable_radix_cache": True}, id="flag at the end"),
        pytest.param(["--sglang-disable-radix-cache", "--lr", "1"], {"disable_radix_cache": True}, id="flag"),
        pytest.param(["--sglang-disable-radix-cache", "train.lr=1"], {"disable_radix_cache": True}, id="before a key"),
        pytest.param(["--sglang-router-policy", "manual"], {"router": {"policy": "manual"}}, id="router"),
        pytest.param(
            ["--sglang-router-cache-threshold=0.5"], {"router": {"cache_threshold": 0.5}}, id="router equals"
        ),
        pytest.param(["--sglang-router-enable-trace"], {"router": {"enable_trace": True}}, id="router flag"),
        pytest.param(["--no-sglang-router-enable-trace"], {"router": {"enable_trace": False}}, id="router no"),
        pytest.param(["--no-sglang-dllm-fdfo", "--lr", "1"], {"dllm_fdfo": False}, id="no"),
        pytest.param(["--sglang-chunked-prefill-size", "-1"], {"chunked_prefill_size": -1}, id="minus"),
        pytest.param(["--sglang-cuda-graph-bs", "1", "2", "4"], {"cuda_graph_bs": [1, 2, 4]}, id="several"),
        pytest.param(["--sglang-cuda-graph-bs", "[1, 2]"], {"cuda_graph_bs": [1, 2]}, id="array"),
        pytest.param(["--sglang-extra-metric-labels", '{"a": 1}'], {"extra_metric_labels": {"a": 1}}, id="table"),
        pytest.param(["sglang.mem-fraction-static=0.5"], {"mem_fraction_static": 0.5}, id="dotted"),
        pytest.param(["--sglang.mem-fraction-static", "0.5"], {"mem_fraction_static": 0.5}, id="dotted flag"),
        pytest.param(["sglang.env.OMP_NUM_THREADS=1"], {"env": {"OMP_NUM_THREADS": 1}}, id="variable"),
        pytest.param(["--sglang-python", "python3"], {"python": "python3"}, id="python by name"),
    ],
)
def test_an_option_lands_in_its_table(tmp_path, monkeypatch, words, table):
    monkeypatch.chdir(tmp_path)
    assert load_config(None, words).sglang == table


def test_a_value_that_is_a_path_ends_before_the_next_word():
    words = split(["--sglang-download-dir", "/models/x", "kernelbench/demo"])
    assert words.recipe == "kernelbench/demo"
    assert words.overrides[0].values == ("/models/x",)


def test_a_negated_flag_takes_no_value():
    words = split(["--no-sglang-dllm-fdfo", "kernelbench/demo"])
    assert (words.recipe, words.overrides[0].negated, words.overrides[0].values) == ("kernelbench/demo", True, ())


def test_a_recipe_file_is_never_a_value():
    words = split(["--sglang-disable-radix-cache", "demo.toml"])
    assert (words.recipe, words.overrides[0].values) == ("demo.toml", ())


def test_the_flag_wins_over_the_recipe_however_that_is_spelled(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[sglang]\nmem-fraction-static = 0.9\ndtype = "auto"\nenv = { A-B = "1", A_B = "2" }\n')
    config = load_config(recipe, ["--sglang-mem-fraction-static", "0.5", "sglang.env.A_B=3"])
    assert config.sglang == {"mem_fraction_static": 0.5, "dtype": "auto", "env": {"A-B": "1", "A_B": 3}}


def test_the_python_of_a_recipe_starts_at_its_folder_and_stays_a_link(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/usr/bin/env")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[sglang]\npython = "bin/python"\n')
    assert load_config(recipe).sglang["python"] == str(tmp_path / "bin" / "python")


def test_the_folder_of_weights_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["--update-weight-disk-dir", "weights"])
    assert config.rollout.update_weight_disk_dir == str(tmp_path / "weights")


def test_the_flag_wins_over_the_recipe_for_the_router_too(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[sglang.router]\ncache-threshold = 0.9\npolicy = "manual"\n')
    config = load_config(recipe, ["--sglang-router-cache-threshold", "0.5"])
    assert config.sglang == {"router": {"policy": "manual", "cache_threshold": 0.5}}

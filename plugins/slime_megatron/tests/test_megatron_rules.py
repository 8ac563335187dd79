"""Keys where Megatron trains: what cannot hold, what has no effect, and what a resumed run may change."""

import pytest

from slime_cli.resume_compatibility import compare
from slime_core.config import rules
from slime_core.config.load import load_config, read
from slime_core.config.schema import Config
from slime_megatron.flags import flags, problems
from slime_megatron.plugin import RESUMABLE

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("words", "what", "fix", "where"),
    [
        pytest.param(
            ["--device", "cpu"],
            "train_backend = megatron with device = cpu",
            "--train-backend fsdp",
            "command line: --train-backend, command line: --device",
            id="a-processor",
        ),
        pytest.param(
            ["--gradient-checkpointing", "--recompute-granularity", "selective"],
            "gradient_checkpointing and megatron.recompute_granularity are both set",
            "leave gradient_checkpointing out",
            "command line: --gradient-checkpointing, command line: --recompute-granularity",
            id="two-ways-to-recompute",
        ),
        pytest.param(
            ["--fsdp-cpu-offload"],
            "train_backend = megatron with fsdp_cpu_offload",
            "--optimizer-cpu-offload",
            "command line: --train-backend, command line: --fsdp-cpu-offload",
            id="another-backends-offload",
        ),
        pytest.param(
            ["--tensor-parallel-size", "2"],
            "tensor_parallel_size with train_backend = megatron",
            "--tensor-model-parallel-size N",
            "command line: --tensor-parallel-size, command line: --train-backend",
            id="another-backends-tensor-parallelism",
        ),
        pytest.param(
            ["--context-parallel-size", "2", "megatron.context_parallel_size=4"],
            "train.context_parallel_size = 2 with megatron.context_parallel_size = 4",
            "remove one of them",
            "command line: --context-parallel-size, command line: megatron.context_parallel_size",
            id="two-numbers-of-ranks-that-share-a-sequence",
        ),
        pytest.param(
            ["--lora-rank", "8", "--enable-mtp-training"],
            "megatron.enable_mtp_training with lora_rank",
            "leave enable_mtp_training out",
            "command line: --enable-mtp-training, command line: --lora-rank",
            id="a-layer-ahead-of-a-frozen-base",
        ),
        pytest.param(
            [
                "--lora-rank",
                "8",
                "--lora-dropout",
                "0.1",
                "--lora-target-modules",
                "q_proj",
                "--recompute-granularity",
                "selective",
                "--recompute-modules",
                "mlp",
            ],
            "lora_dropout with mlp in megatron.recompute_modules",
            "--recompute-granularity full",
            "command line: --lora-dropout, command line: --recompute-modules",
            id="dropout-in-what-is-computed-again-apart",
        ),
    ],
)
def test_keys_that_cannot_hold_where_megatron_trains(recipe, refused, words, what, fix, where):
    recipe()
    error = refused(None, "--train-backend", "megatron", *words)
    assert (error.code, error.what, error.where) == ("CFG04", what, where)
    assert fix in error.fix


def test_the_same_keys_hold_where_fsdp_trains():
    config = load_config(None, ["--device", "cpu", "--gradient-checkpointing", "--fsdp-cpu-offload"])
    assert rules.conflicts(config) == []


def test_megatrons_table_without_megatron_is_said_to_have_no_effect():
    loaded = read(None, ["--tensor-model-parallel-size", "2", "--swiglu"])
    (notice,) = [text for text in loaded.notices if "[megatron]" in text]
    assert "[megatron] tensor_model_parallel_size, swiglu: no effect without the backend megatron" in notice
    assert read(None, ["--train-backend", "megatron", "--swiglu"]).notices == ()


def test_functions_of_megatron_ranks_without_megatron_are_said_to_have_no_effect():
    train = {"custom_megatron_init_path": "mine.py:init"}
    (notice,) = rules.notices(Config(train=train))
    assert notice == "custom_megatron_init_path: no effect with train_backend = fsdp, which has no such place"
    assert not list(rules.notices(Config(train=train | {"train_backend": "megatron"})))


def test_a_resumed_run_may_have_another_layout_but_no_other_mathematics():
    was = load_config(None, ["megatron.tensor_model_parallel_size=2", "megatron.moe_aux_loss_coeff=0.0"])
    now = load_config(None, ["megatron.tensor-model-parallel-size=4", "megatron.moe_aux_loss_coeff=0.1"])
    found = {
        change.key: change.verdict for change in compare(was.model_dump(mode="json"), now.model_dump(mode="json"))
    }
    assert found == {"megatron.tensor_model_parallel_size": "notice", "megatron.moe_aux_loss_coeff": "unsafe"}


def test_a_flag_stands_before_a_recipes_other_spelling(recipe):
    path = recipe("[megatron]\ntensor-model-parallel-size = 2\n")
    config = read(path, ["--tensor-model-parallel-size", "4"]).config
    assert config.megatron == {"tensor_model_parallel_size": 4}


def test_a_name_in_two_spellings_is_given_twice():
    (problem,) = problems({"num-layers": 2, "num_layers": 3})
    assert (problem.code, problem.what) == ("CFG07", "megatron.num_layers is given twice")


def test_a_resumed_run_may_change_flags_of_the_run():
    known = flags()
    assert {known[name].role for name in RESUMABLE} == {"run"}


def test_a_flag_takes_the_words_that_are_its_value_and_leaves_the_recipe(recipe):
    path = recipe("[megatron]\nnum_layers = 3\n")
    config = read(None, ["--swiglu", "--num-layers", "4", "--no-qk-layernorm"]).config
    assert config.megatron == {"swiglu": True, "num_layers": 4, "qk_layernorm": False}
    over = read(path, ["--swiglu", "--recompute-modules", "mlp", "moe", "--lr", "1e-5"]).config
    assert over.megatron == {"num_layers": 3, "swiglu": True, "recompute_modules": ["mlp", "moe"]}
    assert over.train.lr == 1e-5


def test_a_flag_without_its_value_is_refused(recipe, refused):
    recipe()
    error = refused(None, "--num-layers", "--swiglu")
    assert (error.code, error.what) == ("CFG02", "--num-layers needs a value")
    assert error.why == "megatron.num_layers takes an integer"


def test_an_unknown_bare_flag_finds_megatrons_nearest(recipe, refused):
    recipe()
    error = refused(None, "--tensor-model-paralel-size", "2")
    assert error.fix.startswith("did you mean --tensor-model-parallel-size? (megatron.tensor_model_parallel_size)")

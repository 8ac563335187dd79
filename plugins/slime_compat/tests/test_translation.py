"""Flags of slime's train.py: those of another name or meaning, those that are not needed, those that cannot be had."""

import json
from itertools import pairwise

import pytest

from slime_compat.launch.flags import OTHERS, RULES, slime_flags
from slime_compat.launch.translation import DEFAULTS, translate
from slime_core.config.fields import core_keys
from slime_core.errors import ConfigError
from slime_core.plugins.backends import tracker_keys
from slime_megatron.flags import flags

pytestmark = pytest.mark.integration


LENGTH = ("--rollout-max-response-len", "8")
REQUIRED = (*LENGTH, "--num-rollout", "1")
"""What every line of slime's has; behind the flags of a test."""


def words_of(*argv, ahead=0):
    """Words of `slime run`, without those of REQUIRED."""
    required = LENGTH if "--num-epoch" in argv else REQUIRED
    translation = translate([*argv, *required], ahead=ahead)
    translation.require_complete()
    words = translation.words
    at = words.index(LENGTH[0])
    return words[:at] + words[at + len(required) :]


def values_of(*argv, ahead=0):
    """Flag -> the word behind it."""
    return dict(pairwise(words_of(*argv, ahead=ahead)))


def test_train_async_runs_a_step_ahead_on_gpus_of_its_own():
    assert values_of("--hf-checkpoint", "m", ahead=1)["--max-staleness"] == "1"
    assert words_of("--max-staleness", "3", ahead=1).count("--max-staleness") == 1
    assert "--max-staleness" not in words_of("--loss-type", "sft_loss", ahead=1)


def test_what_slime_has_without_a_flag_is_given_unless_a_recipe_speaks():
    assert words_of("--lr", "1e-6", "--n-samples-per-prompt=4") == [
        *("run", "--lr", "1e-6", "--n-samples-per-prompt=4", "--train-backend", "megatron"),
        *("--rollout-engine", "sglang", "--actor-num-gpus-per-node", "8", "--kl-loss-type", "k1"),
        *("--lr-decay-style", "linear", "--weight-decay", "0.01", "--adam-beta2", "0.999", "--tool-key", "tools"),
        *("--no-colocate", "--loss-aggregation", "rollout_mean", "--eval-temperature", "1.0", "--eval-top-p", "1.0"),
        *("--eval-top-k", "0", "--plugin", "models"),
    ]
    assert words_of("mine.toml", "--lr", "1") == ["run", "mine.toml", "--lr", "1", "--plugin", "models"]
    assert "--no-colocate" in words_of("--engine-topology", "servers.toml")  # a flag's value is no recipe


def test_reward_types_of_slimes_names_come_with_their_plugin():
    assert words_of("--rm-type", "math")[-4:] == ["--plugin", "models", "--plugin", "rm_math"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(["--gamma", "0.9"], ["--gae-gamma", "0.9"], id="renamed"),
        pytest.param(["--lambd=0.9"], ["--gae-lambda", "0.9"], id="renamed-with-equals"),
        pytest.param(["--log-probs-chunk-size", "-1"], [], id="off"),
        pytest.param(["--rollout-top-k", "-1"], ["--rollout-top-k", "0"], id="off-by-another-number"),
        pytest.param(["--save", "/x", "--lr", "1"], ["--lr", "1"], id="with-its-value"),
        pytest.param(["--update-weight-mode", "full"], [], id="refused-but-for-the-value-that-holds-anyway"),
        pytest.param(
            ["--calculate-per-token-loss"], ["--loss-aggregation", "token_mean"], id="a-flag-that-is-a-value"
        ),
        pytest.param(["--balance-data", "--lr", "1"], ["--lr", "1"], id="without-one"),
        pytest.param(["--eval-prompt-data", "a.jsonl"], ["--eval-prompt-data", "aime", "a.jsonl"], id="a-set-alone"),
        pytest.param(
            ["--eval-prompt-data", "x", "x.jsonl"], ["--eval-prompt-data", "x", "x.jsonl"], id="a-set-with-its-name"
        ),
        pytest.param(
            ["--save-debug-rollout-data", "d/{rollout_id}.pt"], ["--save-debug-rollout-data", "d"], id="a-template"
        ),
        pytest.param(["--kl-loss-coef", "0.1"], [], id="read-only-with-another"),
        pytest.param(["--use-kl-loss", "--kl-loss-coef", "0.1"], ["--kl-loss-coef", "0.1"], id="read-with-another"),
        pytest.param(["--dump-details", "d"], ["--save-debug-rollout-data", "d/rollout_data"], id="a-folder-of-dumps"),
        pytest.param(["--sglang-context-length", "9"], ["--rollout-max-context-len", "9"], id="a-context"),
        pytest.param(
            ["--sglang-context-length", "9", "--rollout-max-context-len", "32"],
            ["--rollout-max-context-len", "32"],
            id="a-context-of-its-own",
        ),
        pytest.param(
            ["--rollout-max-context-len", "32", "--eval-max-response-len", "32"],
            ["--rollout-max-context-len", "32", "--eval-max-response-len", "8"],
            id="evaluation-without-room",
        ),
        pytest.param(
            ["--disable-rewards-normalization", "--advantage-estimator", "ppo"],
            ["--advantage-estimator", "ppo"],
            id="of-rewards-that-are-not-normalised",
        ),
        pytest.param(["--custom-tis-function-path", "f.py:f"], [], id="called-only-with-another"),
        pytest.param(
            ["--get-mismatch-metrics", "--custom-tis-function-path", "f.py:f"],
            ["--custom-tis-function-path", "f.py:f"],
            id="called-with-another",
        ),
        pytest.param(
            ["--loss-type", "custom_loss", "--custom-loss-function-path", "f.py:f"],
            ["--custom-loss-function-path", "f.py:f"],
            id="a-loss-by-its-path",
        ),
        pytest.param(["--custom-loss-function-path", "f.py:f"], [], id="a-loss-that-is-not-called"),
        pytest.param(["--debug-train-only"], ["--debug-train-only"], id="of-a-dump"),
        pytest.param(
            ["--advantage-estimator", "gspo", "--eps-clip", "0.1"],
            ["--advantage-estimator", "gspo", "--eps-clip", "0.1"],
            id="the-same",
        ),
    ],
)
def test_flags_of_other_names_and_meanings(argv, words):
    translation = words_of(*argv)
    assert translation[1 : 1 + len(words)] == words
    assert translation[1 + len(words)] == "--train-backend"


def test_defaults_of_slime_that_depend_on_the_estimator():
    gspo = values_of("--advantage-estimator", "gspo", "--eps-clip", "0.1")
    assert (gspo["--eps-clip"], gspo["--eps-clip-high"]) == ("0.1", "0.1")
    cispo = values_of("--advantage-estimator", "cispo")
    assert (cispo["--eps-clip"], cispo["--eps-clip-high"]) == ("0.2", "0.2")
    assert "--eps-clip" not in words_of("--advantage-estimator", "grpo")  # 0.2 here too
    assert values_of("--kl-coef", "0.1", "--kl-loss-type", "k2")["--kl-reward-type"] == "k2"
    assert values_of("--advantage-estimator", "ppo", "--lr", "3e-6")["--critic-lr"] == "3e-6"


def test_a_router_bias_without_a_rate_moves_at_the_one_of_megatron():
    bias = "--moe-router-enable-expert-bias"
    rate = "--moe-router-bias-update-rate"
    assert values_of(bias)[rate] == "0.001"
    assert values_of(bias, rate, "0")[rate] == "0"
    assert rate not in words_of("--num-experts", "8")


def test_a_supervised_script_counts_its_steps_from_the_rows(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": []}) + "\n")
    data.write_text(data.read_text() * 10)
    argv = (
        *("--loss-type", "sft_loss", "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"),
        *("--prompt-data", str(data), "--num-epoch", "3", "--rollout-batch-size", "4", "--global-batch-size", "2"),
        *("--debug-train-only", "--disable-compute-advantages-and-returns", "--lr-warmup-fraction", "0.25"),
    )
    values = values_of(*argv)
    assert "--apply-chat-template" in values  # of a list of messages, as slime's masks do without the flag
    assert values["--num-rollout"] == "6"  # 3 * (10 rows // 4)
    assert values["--lr-warmup-iters"] == "3"  # a quarter of 6 * 4 // 2 = 12 optimizer steps
    assert "counted too" in "".join(translate([*argv, "--rollout-max-prompt-len", "9"], ahead=0).notices)
    critic = (*argv[2:], "--advantage-estimator", "ppo", "--lr-decay-iters", "8")
    assert values_of(*critic, "--debug-train-only")["--critic-lr-warmup-iters"] == "2"
    assert not {"--debug-train-only", "--rollout-function-path", "--num-epoch"} & set(values)
    data.write_text(data.read_text()[: len(data.read_text()) // 10] * 4)
    assert values_of(*argv)["--num-rollout"] == "3"
    with pytest.raises(ConfigError, match="--num-epoch cannot be had"):
        words_of(*argv, "--rollout-batch-size", "5")


def test_epochs_of_rows_that_cannot_be_counted_ask_for_steps():
    with pytest.raises(ConfigError, match="--num-epoch cannot be had") as caught:
        words_of("--prompt-data", "nowhere.jsonl", "--num-epoch", "1", "--rollout-batch-size", "4")
    assert "--num-rollout N" in caught.value.fix
    assert "nowhere.jsonl" in caught.value.fix


def test_a_checkpoint_that_slime_starts_from_is_refused_unless_it_trains_here(tmp_path):
    for name, file in (("Qwen_slime", "latest_checkpointed_iteration.txt"), ("Qwen", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    trained, hf = str(tmp_path / "Qwen_slime"), str(tmp_path / "Qwen")
    with pytest.raises(ConfigError, match="--load cannot be had") as caught:
        words_of("--hf-checkpoint", hf, "--load", trained)
    assert f"slime convert dist-to-hf {trained} FOLDER --origin-hf-dir {hf}" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        words_of("--hf-checkpoint", "Other", "--load", hf)
    assert f"--hf-checkpoint {hf}" in caught.value.fix
    assert "--load" not in words_of("--hf-checkpoint", hf, "--load", f"{hf}/")
    lines = {
        reference: translate(["--hf-checkpoint", hf, "--ref-load", reference, "--load", "none"], ahead=0).notices
        for reference in ("/x/Qwen_torch_dist", "/x/Base_torch_dist")
    }
    assert [len(notices) for notices in lines.values()] == [1, 2]
    assert f"--ref-load: the weights of --hf-checkpoint {hf} are trained" in lines["/x/Base_torch_dist"][0]


def test_keys_of_a_custom_file_are_held_against_the_same_table(tmp_path):
    """Switches count as given; a key with another flag here is refused, and so is one that slime would not read."""
    file = tmp_path / "own.yaml"
    line = ("--custom-config-path", str(file), "--kl-loss-coef", "0.1", "--custom-tis-function-path", "f.py:f")
    file.write_text("use_kl_loss: true\nuse_tis: true\nmax_turns: 3\ngamma: null\nuse_routing_replay: false\n")
    assert words_of(*line)[1 : 1 + len(line)] == list(line)
    file.write_text("gamma: 0.9\ncalculate_per_token_loss: true\nuse_routing_replay: true\nkl_loss_coef: 0.1\n")
    with pytest.raises(ConfigError, match="--custom-config-path cannot be had") as caught:
        words_of(*line)
    for text in (
        "gamma (give the flag --gamma)",
        "calculate_per_token_loss (give the flag --calculate-per-token-loss)",
        "use_routing_replay (give the flag --use-routing-replay)",
        "kl_loss_coef (slime reads it only with --use-kl-loss)",
    ):
        assert text in caught.value.fix


def test_a_line_without_a_flag_that_slime_has_no_default_for_is_refused():
    refusals = translate(["--lr", "1"], ahead=0).refusals("required")
    assert [problem.what for problem in refusals] == [
        "--num-rollout is missing",
        "--rollout-max-response-len is missing",
    ]
    for line in (["mine.toml"], ["--help"], ["rollout.num_rollout=1", "rollout.rollout_max_response_len=8"]):
        translate(line, ahead=0).require_complete()


def test_a_flag_that_cannot_be_had_names_what_can_and_all_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        words_of("--ref-update-interval", "4", "--update-weight-mode", "delta", "--use-stateless-adam")
    assert caught.value.code == "CFG04"
    for text in ("--ref-update-interval", "--update-weight-mode", "--use-stateless-adam"):
        assert f"command line: {text}" in caught.value.where
    with pytest.raises(ConfigError, match="--loss-type"):
        words_of("--loss-type", "custom_loss")
    for text in ("ref_load", "whole weights", "Adam keeps its moments"):
        assert text in caught.value.fix


def test_a_key_of_wandb_goes_to_the_environment_and_not_to_the_command_line():
    translation = translate(["--use-wandb", "--wandb-key", "secret"], ahead=0)
    assert translation.environment == {"WANDB_API_KEY": "secret"}
    assert "secret" not in repr(translation.uses)


def test_no_flag_of_the_table_is_one_of_ours_and_all_its_replacements_are():
    names = {name[2:].replace("-", "_") for name in OTHERS if not OTHERS[name].why and not OTHERS[name].to}
    megatron = {name for name, flag in flags().items() if flag.role in ("run", "model")}
    assert not names & (set(core_keys()) | megatron)
    targets = {other.to for other in OTHERS.values() if other.to} | set(DEFAULTS)
    assert {name[2:].replace("-", "_") for name in targets} <= set(core_keys())


def test_every_flag_of_slime_is_known_translated_or_refused_with_what_replaces_it():
    megatron = {name for name, flag in flags().items() if flag.role != "refused"}
    keys = {key.rpartition(".")[2] for key in core_keys()} | megatron | set(tracker_keys())
    keys |= {"rm_url", *(name[2:].replace("-", "_") for name in RULES)}  # rm_url: of rm_math
    unknown = [
        flag
        for flag in slime_flags()
        if flag not in OTHERS and not flag.startswith("--sglang-") and flag[2:].replace("-", "_") not in keys
    ]
    assert unknown == []


def test_on_policy_distillation_keeps_slimes_weight_and_names_where_the_teacher_scores():
    words = words_of("--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "t")
    assert words[1:5] == ["--teacher-place", "engine", "--teacher-load", "t"]
    assert words[words.index("--opd-kl-coef") + 1] == "1.0"
    assert words_of("--use-opd", "--opd-kl-coef", "0.5").count("--opd-kl-coef") == 1


def test_evaluation_samples_as_training_does_unless_a_flag_says_otherwise():
    argv = ["--rollout-temperature", "1.2", "rollout.rollout_temperature=0.8", "--rollout-top-k=-1"]
    words = words_of(*argv, "--eval-top-p", "0.7")
    assert "--rollout-top-k" in words
    values = dict(pairwise(words))
    assert (values["--eval-temperature"], values["--eval-top-p"], values["--eval-top-k"]) == ("0.8", "0.7", "0")
    assert words.count("--eval-top-p") == 1

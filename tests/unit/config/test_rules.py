"""Rules between keys: every conflict at once, with the lines of all keys it is about."""

import pytest

from slime_core.config import rules
from slime_core.config.load import load_config, read
from slime_core.config.problems import Origins
from slime_core.plugins import backends

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("flags", "code", "what", "fix"),
    [
        pytest.param(
            ["--rollout-batch-size=5", "--n-samples-per-prompt=3", "--global-batch-size=4"],
            "CFG04",
            "15 rollouts do not divide into optimizer steps of global_batch_size = 4",
            "such as 3",
            id="batch does not divide",
        ),
        pytest.param(
            ["--lora-alpha=16"],
            "CFG04",
            "lora_alpha = 16.0 without lora_rank",
            "set lora_rank, to 32 say",
            id="nothing reads a key of adapters",
        ),
        pytest.param(
            ["--lora-dropout=0.1", "--lora-target-parameters", "experts.down_proj", "train.lora_rank=8"],
            "CFG04",
            "lora_dropout with lora_target_parameters",
            "leave lora_dropout",
            id="dropout of experts",
        ),
        pytest.param(
            ["--lora-rank=8", "--no-freeze-vision-tower"],
            "CFG04",
            "freeze_vision_tower = false with lora_rank",
            "set lora_rank = 0",
            id="a tower beside adapters",
        ),
        pytest.param(
            ["--base-weights=nf4", "--ref-load=/", "train.kl_loss_coef=0.1", "train.lora_rank=8"],
            "CFG04",
            "base_weights = nf4 with ref_load",
            "leave ref_load out",
            id="a reference of other numbers",
        ),
        pytest.param(
            ["--lora-target-modules", "q_proj,v_proj", "train.lora_rank=8"],
            "CFG04",
            'lora_target_modules = ["q_proj,v_proj"]',
            "--lora-target-modules q_proj v_proj",
            id="names of targets in one string",
        ),
        pytest.param(
            ["--lora-exclude-modules", "(k_proj", "train.lora_rank=8"],
            "CFG04",
            'lora_exclude_modules = ["(k_proj"]',
            "--lora-exclude-modules k_proj",
            id="a regex of targets that is none",
        ),
        pytest.param(
            ["--lora-rank=8", "--lora-target-modules", "[]"],
            "CFG04",
            "lora_target_modules is empty",
            "leave it out",
            id="no targets",
        ),
        pytest.param(
            ["--lora-adapters", "solver,critic", "train.lora_rank=8"],
            "CFG04",
            "lora_adapters names 'solver,critic'",
            "--lora-adapters solver critic",
            id="names of adapters in one string",
        ),
        pytest.param(
            ["--optimizer=paged_adamw_8bit", "--fsdp-cpu-offload"],
            "CFG04",
            "optimizer = paged_adamw_8bit with fsdp_cpu_offload",
            "set optimizer = adamw_8bit",
            id="two places of moments",
        ),
        pytest.param(
            ["--lora-rank=8", "--tensor-parallel-size=2", "cluster.actor_num_gpus_per_node=2"],
            "CFG04",
            "tensor_parallel_size = 2 with lora_rank",
            "set tensor_parallel_size = 1",
            id="adapters of shared products",
        ),
        pytest.param(
            ["--rollout-batch-size=2", "--n-samples-per-prompt=2", "--global-batch-size=8"],
            "CFG04",
            "global_batch_size = 8 is more than there is",
            "to 4 or less",
            id="batch larger than the step",
        ),
        pytest.param(
            ["--rollout-batch-size=5", "--n-samples-per-prompt=3", "--num-steps-per-rollout=2"],
            "CFG04",
            "15 rollouts do not divide into num_steps_per_rollout = 2",
            "such as 1",
            id="steps do not divide",
        ),
        pytest.param(
            [
                "--rollout-batch-size=4",
                "--n-samples-per-prompt=4",
                "--num-steps-per-rollout=2",
                "--global-batch-size=4",
            ],
            "CFG04",
            "contradict each other",
            "leave the other out",
            id="steps and batch",
        ),
        pytest.param(
            ["--rollout-max-response-len=64", "--rollout-max-context-len=64"],
            "CFG04",
            "leaves no room",
            "raise the context",
            id="response fills the context",
        ),
        pytest.param(
            ["--rollout-max-response-len=40", "--rollout-max-context-len=64", "--rollout-max-prompt-len=30"],
            "CFG04",
            "40 is more than rollout_max_context_len = 64",
            "at most 24",
            id="prompt and response over the context",
        ),
        pytest.param(
            ["--rollout-max-context-len=300", "--eval-max-response-len=300"],
            "CFG04",
            "eval_max_response_len = 300",
            "raise the context",
            id="evaluation fills the context",
        ),
        pytest.param(
            ["--rollout-temperature=0"],
            "CFG03",
            "rollout_temperature = 0",
            "rollout_temperature above 0",
            id="greedy group",
        ),
        pytest.param(["--group-rm"], "CFG04", "group_rm is set", "--custom-rm-path", id="group_rm without function"),
        pytest.param(
            ["--max-staleness=1"],
            "CFG04",
            "max_staleness = 1 with colocate = true",
            "--no-colocate",
            id="ahead on one device",
        ),
        pytest.param(
            ["--lr=1e-4", "--min-lr=1e-3"],
            "CFG04",
            "min_lr = 0.001 is above lr = 0.0001",
            "at most 0.0001",
            id="min_lr",
        ),
        pytest.param(
            ["--lr-warmup-iters=9", "--lr-decay-iters=9"],
            "CFG04",
            "lr_warmup_iters = 9",
            "lower",
            id="warm-up to the end",
        ),
        pytest.param(["--eval-prompt-data", "name"], "CFG04", "not made of pairs", "NAME PATH", id="odd pairs"),
    ],
)
def test_each_conflict_names_its_flags_and_the_fix(recipe, refused, flags, code, what, fix):
    recipe()
    error = refused(None, *flags)
    assert error.code == code
    assert what in error.what
    assert fix in error.fix
    assert all(
        flag.split("=")[0] in error.where for flag in flags if flag.startswith("--") and flag != "--no-colocate"
    )


@pytest.mark.parametrize(
    ("flag", "name"), [("--rollout-engine", "sglang"), ("--train-backend", "megatron"), ("--cluster", "ray")]
)
def test_a_backend_that_is_not_installed_is_refused_with_the_package_that_brings_it(
    recipe, refused, monkeypatch, flag, name
):
    monkeypatch.setattr(backends, "is_installed", lambda _: False)
    recipe()
    error = refused(None, flag, name)
    assert (error.code, error.why) == ("CFG04", f"slime-{name} provides it")
    assert f"slime-{name} is not installed here" in error.what
    assert error.fix.startswith(f"pip install -e plugins/slime_{name}")


def test_a_rollout_buffer_without_its_package_is_refused_with_the_line_that_installs_it(recipe, refused, monkeypatch):
    real = backends.is_installed
    monkeypatch.setattr(backends, "is_installed", lambda name: name != "buffer" and real(name))
    recipe()
    error = refused(None, "--rollout-buffer-url", "http://127.0.0.1:9")
    assert (error.code, error.why) == ("CFG04", "slime-buffer provides it")
    assert error.fix.startswith("pip install -e plugins/slime_buffer")


def test_a_rollout_buffer_in_clear_text_on_another_machine_is_noticed(tmp_path):
    def noticed(url):
        words = ["--hf-checkpoint", str(tmp_path), "--rollout-buffer-url", url]
        return [notice for notice in read(None, words).notices if "clear text" in notice]

    assert len(noticed("http://buffer.example:1")) == 1
    assert noticed("http://127.0.0.1:1") == noticed("https://buffer.example:1") == []


def test_a_backend_that_nobody_brings_gets_the_nearest_name(recipe, refused):
    recipe()
    error = refused(None, "--rollout-engine", "sglng")
    assert (error.code, error.fix) == ("CFG04", "did you mean 'sglang'?")
    assert "no installed package provides it" in error.what


def test_all_conflicts_are_listed_at_once_with_their_lines(recipe, refused):
    error = refused(
        recipe(
            "[rollout]\nrollout_batch_size = 5\nn_samples_per_prompt = 3\nrollout_temperature = 0\nmax_staleness = 2\n"
            "[train]\nglobal_batch_size = 4\nmin_lr = 1.0\n[cluster]\ncolocate = true\n"
        )
    )
    assert error.what == "4 problems in the configuration"
    for part in ("15 rollouts", "rollout_temperature = 0", "colocate = true", "min_lr = 1.0"):
        assert part in error.why
    for line in (2, 3, 4, 5, 7, 8, 10):
        assert f"recipe.toml:{line}" in error.where
    assert [line[:3] for line in error.fix.splitlines()] == ["1. ", "2. ", "3. ", "4. "]


def test_runs_that_are_ahead_are_told_what_they_train_on_and_which_policies_do_nothing():
    ahead = ("--max-staleness=2", "--no-colocate")
    told = rules.notices(load_config(None, [*ahead, "--async-schedule=free", "--stale-policy=drop"]))
    assert [line.partition(";")[0] for line in told] == [
        "max_staleness = 2 trains on tokens of older weights as if the present ones had made them"
    ]
    assert rules.notices(load_config(None, [*ahead, "--use-rollout-logprobs"])) == []
    (told,) = rules.notices(load_config(None, [*ahead, "--use-rollout-logprobs", "--stale-policy=mask"]))
    assert told == "stale_policy = mask has no effect: lockstep makes no older group"
    assert "nothing runs ahead" in rules.notices(load_config(None, ["--stale-policy=drop"]))[0]


def test_tasks_must_have_names_of_their_own_and_loaded_plugins(recipe, refused):
    error = refused(
        recipe("[data]\nprompt_data = 'hub/rows'\ntasks = [{name = 'a', plugin = 'gone'}, {name = 'a'}]\n")
    )
    for part in ("both set", "two data.tasks are named 'a'", "plugin 'gone', which the run does not load"):
        assert part in error.why
    assert "--plugin gone" in error.fix


def test_a_supervised_stage_may_be_greedy_in_name(recipe):
    load_config(recipe(), ["--rollout-temperature=0", "--loss-type=sft_loss"])


def test_tasks_with_their_own_sample_counts_leave_divisibility_to_the_run(recipe):
    text = "[data]\ntasks = [{name = 'a', n_samples_per_prompt = 3}]\n[train]\nglobal_batch_size = 7\n"
    load_config(recipe(text))


@pytest.mark.parametrize("flag", ["--loss-type=sft_loss", "--advantage-estimator=mine"])
def test_other_losses_and_estimators_may_have_groups_of_one(recipe, flag):
    load_config(recipe(), ["--n-samples-per-prompt=1", flag])


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        pytest.param(["--n-samples-per-eval-prompt=4"], "greedy", id="greedy evaluation"),
    ],
)
def test_settings_that_are_seldom_meant_are_noticed(recipe, flags, part):
    assert any(part in notice for notice in read(recipe(), flags).notices)


def test_the_defaults_conflict_with_nothing(recipe):
    loaded = read(recipe(), [])
    assert loaded.notices == ()
    assert rules.conflicts(loaded.config) == []


def test_a_run_needs_a_model_and_something_to_train_on(recipe):
    loaded = read(recipe(), [])
    problems = [Origins().place(problem) for problem in rules.incomplete(loaded.config)]
    assert [problem.code for problem in problems] == ["CFG04", "CFG04"]
    assert "--hf-checkpoint" in problems[0].fix
    assert "--prompt-data" in problems[1].fix

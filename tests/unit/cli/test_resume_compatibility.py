"""A resumed run's config against the saved one: every key has a class, and what makes another experiment is refused."""

import pytest

from slime_cli.resume_compatibility import check, compare, refused, signature, table
from slime_core.config.fields import core_keys, section_model
from slime_core.config.load import load_config
from slime_core.config.schema import SECTIONS, Config
from slime_core.config.sections import ResumeClass
from slime_core.config.sections.train import TrainSection
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit

STAGES = """
[rollout]
num_rollout = 5
[[stage]]
name = "warmup"
num_rollout = 2
lr = 1e-3
[[stage]]
name = "rl"
num_rollout = 3
"""


def dumped(config):
    return config.model_dump(mode="json")


def verdicts(was, now):
    return {change.key: change.verdict for change in compare(dumped(was), dumped(now))}


def changed(*flags, base=()):
    return verdicts(load_config(None, base), load_config(None, [*base, *flags]))


def test_every_key_has_its_resume_class_in_its_field():
    for section in SECTIONS:
        fields = section_model(section).model_fields
        classes = {name: info.json_schema_extra["resume"] for name, info in fields.items()}
        assert all(isinstance(resume, ResumeClass) and resume.reason for resume in classes.values()), section
        assert classes == {name: key.resume for name, key in core_keys().items() if key.section == section}
    assert {core_keys()[name].resume.verdict for name in ("seed", "schema_version", "plugins")} == {"unsafe"}


def test_a_field_with_another_class_gets_another_verdict(monkeypatch):
    monkeypatch.setitem(TrainSection.model_fields["lr"].json_schema_extra, "resume", ResumeClass("safe", "a trial"))
    (change,) = compare(dumped(Config()), dumped(load_config(None, ["--lr", "0.5"])))
    assert (change.verdict, change.reason) == ("safe", "a trial")


def test_the_same_config_has_no_changes():
    assert changed() == {}


@pytest.mark.parametrize(
    ("flags", "key", "verdict"),
    [
        (["--save-interval", "3"], "report.save_interval", "safe"),
        (["--num-rollout", "7"], "rollout.num_rollout", "safe"),
        (["--eval-interval", "2"], "eval.eval_interval", "safe"),
        (["--reward-timeout", "9"], "reward.reward_timeout", "safe"),
        (["--on-plugin-error", "drop"], "rollout.on_plugin_error", "safe"),
        (["--rollout-slots", "8"], "rollout.rollout_slots", "safe"),
        (["--rollout-max-context-len", "512"], "rollout.rollout_max_context_len", "notice"),
        (["--cpu-threads", "3"], "cluster.cpu_threads", "notice"),
        (["--actor-num-gpus-per-node", "2"], "cluster.actor_num_gpus_per_node", "notice"),
        (["--max-tokens-per-gpu", "99"], "train.max_tokens_per_gpu", "notice"),
        (["--gradient-checkpointing"], "train.gradient_checkpointing", "notice"),
        (["--lr", "0.5"], "train.lr", "unsafe"),
        (["--seed", "4"], "seed", "unsafe"),
        (["--n-samples-per-prompt", "4"], "rollout.n_samples_per_prompt", "unsafe"),
        (["--prompt-data", __file__], "data.prompt_data", "unsafe"),
        (["--dtype", "bfloat16"], "train.dtype", "unsafe"),
        (["--hf-checkpoint", "/tmp"], "rollout.hf_checkpoint", "unsafe"),
    ],
)
def test_a_changed_key_gets_the_verdict_of_its_class(flags, key, verdict):
    """lr, data and group size are unsafe, what does not train is safe, and so is the dtype."""
    assert changed(*flags) == {key: verdict}


def test_slots_that_an_earlier_version_saved_for_a_stage_are_no_change():
    now = dumped(Config(stage=({"name": "a"}, {"name": "b", "rollout": {}})))
    tables = [{"name": "a", "rollout_slots": 8}, {"name": "b", "rollout": {"rollout_slots": 9}}]
    assert compare(now | {"stage": tables}, now) == []


def test_tables_of_plugins_and_backends_are_unsafe():
    was = Config(plugin={"math": {"digits": 2, "seed": 1}}, sglang={"tp": 1})
    now = Config(plugin={"math": {"digits": 3, "seed": 1}, "other": {"x": 1}}, sglang={"tp": 2})
    assert verdicts(was, now) == {
        "plugin.math.digits": "unsafe",
        "plugin.other.x": "unsafe",
        "sglang.tp": "unsafe",
    }


def test_one_changed_task_is_named_by_its_place():
    was = Config.model_validate({"data": {"tasks": ({"name": "a"}, {"name": "b"})}})
    now = Config.model_validate({"data": {"tasks": ({"name": "a"}, {"name": "b", "weight": 2.0})}})
    assert verdicts(was, now) == {"data.tasks[1].weight": "unsafe"}


def test_an_algorithm_is_one_change_and_not_every_key_that_follows_from_it():
    assert changed("--advantage-estimator", "gspo") == {"train.advantage_estimator": "unsafe"}


def test_writing_out_what_auto_means_is_no_change():
    assert changed("--policy-objective", "clip") == {}


def test_more_steps_are_unsafe_where_the_learning_rate_decays_over_all_of_them():
    decaying = ["--lr-decay-style", "cosine"]
    assert changed("--num-rollout", "7", base=decaying) == {"rollout.num_rollout": "unsafe"}
    fixed = [*decaying, "--lr-decay-iters", "50"]
    assert changed("--num-rollout", "7", base=fixed) == {"rollout.num_rollout": "safe"}


@pytest.fixture
def staged(tmp_path):
    """A config of two stages under flags."""
    path = tmp_path / "recipe.toml"
    path.write_text(STAGES)
    return lambda *flags: load_config(path, flags)


def test_a_change_in_all_stages_is_one_row_and_in_one_stage_names_it(staged):
    assert verdicts(staged(), staged("--clip-grad", "0.5")) == {"train.clip_grad": "unsafe"}
    assert verdicts(staged(), staged("stage.rl.clip_grad=0.5")) == {"stage.rl.train.clip_grad": "unsafe"}


def test_only_the_last_stage_may_get_longer(staged):
    assert verdicts(staged(), staged("--num-rollout", "9")) == {"stage.rl.rollout.num_rollout": "safe"}
    earlier = verdicts(staged(), staged("stage.warmup.num_rollout=1"))
    assert earlier == {"stage.warmup.rollout.num_rollout": "unsafe"}


def test_other_stages_are_unsafe(staged, tmp_path):
    path = tmp_path / "other.toml"
    path.write_text(STAGES.replace('"warmup"', '"sft"'))
    assert verdicts(staged(), load_config(path)) == {"stage": "unsafe"}


def test_the_refusal_shows_the_whole_diff_and_the_flags_that_force_it():
    """The diff is printed, and unsafe keys are refused."""
    changes = compare(dumped(Config()), dumped(load_config(None, ["--lr", "0.5", "--seed", "4", "--name", "x"])))
    with pytest.raises(ConfigError) as caught:
        check(changes, [], "runs/run-0")
    error = caught.value
    assert (error.code, error.where, error.exit_code) == ("CFG13", "runs/run-0", 2)
    for part in ("train.lr", "1e-06 -> 0.5", "seed", "0 -> 4", "name", '"run" -> "x"', "safe: a name"):
        assert part in error.why
    assert "--force-key seed --force-key train.lr" in error.fix


@pytest.mark.parametrize("force", ["train.lr", "lr", "train"])
def test_a_forced_key_passes_and_the_others_stay_refused(force):
    changes = compare(dumped(Config()), dumped(load_config(None, ["--lr", "0.5", "--seed", "4"])))
    assert [change.key for change in refused(changes, [force])] == ["seed"]
    check(changes, [force, "seed"], "here")


def test_a_key_of_a_stage_or_a_plugin_is_forced_by_any_of_its_names(staged):
    changes = compare(dumped(staged()), dumped(staged("stage.rl.clip_grad=0.5")))
    for force in ("clip-grad", "train.clip_grad", "stage.rl.train.clip_grad"):
        assert refused(changes, [force]) == []
    changes = compare(dumped(Config(plugin={"m": {"a": 1}})), dumped(Config(plugin={"m": {"a": 2}})))
    for force in ("a", "plugin.m.a", "plugin.m", "plugin"):
        assert refused(changes, [force]) == []


def test_forcing_a_key_that_did_not_change_is_fine_and_one_that_does_not_exist_is_not():
    check([], ["lr", "plugins", "plugin.m.x"], "here")
    with pytest.raises(ConfigError) as caught:
        check([], ["lrr"], "here")
    assert caught.value.code == "CFG01"
    assert "did you mean" in caught.value.fix


def test_long_values_are_cut_in_the_table():
    changes = compare(dumped(Config()), dumped(load_config(None, ["--data-source-path", "x" * 500])))
    assert len(table(changes)) < 300


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        (["--save-interval", "3", "--num-rollout", "9", "--name", "other"], True),
        (["--cpu-threads", "3"], False),
        (["--lr", "0.5"], False),
        (["plugin.x.a=1"], False),
    ],
)
def test_the_signature_moves_with_what_moves_the_bits(flags, same):
    was, now = load_config(None), load_config(None, flags)
    assert (signature(dumped(was)) == signature(dumped(now))) is same

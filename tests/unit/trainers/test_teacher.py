"""Frozen models: the teacher's log-probs against float64, which models a stage holds, and vocabularies that differ."""

import asyncio
import dataclasses
import math

import numpy as np
import pytest
import ref_model
import torch
import trainer_bench as made

from slime_core.builtin import Core
from slime_core.clusters.local import teacher_of
from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.errors import ConfigError, DataError, EngineError, TrainerError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.models import VOCAB
from slime_core.types import Media, Sample

pytestmark = pytest.mark.unit

DISTIL = {"advantage_estimator": "on_policy_distillation"}


@pytest.fixture
def teacher(tmp_path):
    """A smaller model than the policy, of another family, with its tokenizer."""
    return tiny_model(tmp_path / "teacher", "llama", seed=9, hidden=32, layers=1)


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_log_probs_of_a_teacher_of_another_size_equal_the_reference(bench, teacher, max_tokens):
    one = bench(teacher_load=str(teacher), max_tokens_per_gpu=max_tokens, **DISTIL)
    batch = made.batch_of(temperature=0.7)
    found = one.call("score", batch, frozenset({"teacher"}))["teacher"]
    assert set(found) == {"log_probs"}
    folder = type(one.folder).open(teacher)
    params = {n: p.detach().double() for n, p in folder.build_model("float32").named_parameters()}
    for i in range(len(batch)):
        start, end = batch.response_offsets[i : i + 2]
        tokens = batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].tolist()
        want, _ = ref_model.log_probs(params, folder.config, tokens, int(end - start), temperature=0.7)
        np.testing.assert_allclose(found["log_probs"][start:end], want, atol=2e-5)


def test_a_teacher_learns_nothing_is_not_saved_and_goes_with_its_stage(bench, teacher, tmp_path):
    one, batch = bench(teacher_load=str(teacher), **DISTIL), made.batch_of()
    before = one.call("score", batch, frozenset({"teacher"}))["teacher"]["log_probs"]
    held = one.worker.frozen.teacher
    one.call("step", batch)
    assert (one.call("score", batch, frozenset({"teacher"}))["teacher"]["log_probs"] == before).all()
    assert all(p.grad is None and not p.requires_grad for p in held.parameters())
    one.call("save", tmp_path / "state")
    assert not [file.name for file in (tmp_path / "state").iterdir() if "teacher" in file.name]
    one.call("begin", one.config)
    assert one.worker.frozen.teacher is held
    one.call("begin", made.config_of(one.folder.path))
    assert one.worker.frozen.teacher is None
    with pytest.raises(TrainerError, match="teacher") as caught:
        one.call("score", batch, frozenset({"teacher"}))
    assert "teacher_load" in caught.value.why


def test_a_teacher_in_bfloat16_is_kept_in_bfloat16_and_is_close(bench, teacher):
    batch, found = made.batch_of(), []
    for dtype in ("bfloat16", "float32"):
        one = bench(teacher_load=str(teacher), dtype=dtype, **DISTIL)
        assert {str(p.dtype) for p in one.worker.frozen.teacher.parameters()} == {f"torch.{dtype}"}
        found.append(one.call("score", batch, frozenset({"teacher"}))["teacher"]["log_probs"])
    np.testing.assert_allclose(*found, atol=0.05)


@pytest.mark.parametrize(
    ("train", "roles"),
    [
        ({}, set()),
        ({"kl_loss_coef": 0.1}, {"reference"}),
        ({"kl_coef": 0.1}, {"reference"}),
        ({"advantage_estimator": "ppo"}, {"values"}),
        ({"teacher_load": "T", "opd_kl_coef": 0.5}, {"teacher"}),
        ({"teacher_load": "T", **DISTIL}, {"teacher"}),
        ({"teacher_load": "T", "teacher_place": "engine", **DISTIL}, set()),
        ({"teacher_load": "T"}, set()),
    ],
)
def test_a_stage_holds_the_models_that_its_estimator_and_loss_read(bench, teacher, train, roles):
    train = {key: str(teacher) if value == "T" else value for key, value in train.items()}
    one = bench(**train)
    held = {
        "reference": one.worker.frozen.reference,
        "teacher": one.worker.frozen.teacher,
        "values": one.worker.critic,
    }
    assert {role for role, model in held.items() if model is not None} == roles
    assert load_plugins(one.config).needs(one.config.train) & set(held) == roles


def test_kl_in_the_reward_scores_the_starting_weights(bench):
    one, batch = bench(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, lr=1e-2), made.batch_of()
    start = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    one.call("step", batch)
    found = one.call("score", batch, frozenset({"policy", "reference"}))
    assert (found["reference"]["log_probs"] == start).all()
    assert (found["policy"]["log_probs"] != start).any()


@pytest.mark.parametrize(
    ("key", "train"),
    [
        ("teacher_load", DISTIL),
        ("ref_load", {"kl_loss_coef": 0.1}),
        ("critic_load", {"advantage_estimator": "ppo"}),
    ],
)
@pytest.mark.parametrize("vocab", ["0123456789+=", VOCAB[::-1]])
def test_another_vocabulary_is_refused_at_the_start_and_both_models_are_named(bench, tmp_path, key, train, vocab):
    policy, other = tiny_model(tmp_path / "policy"), tiny_model(tmp_path / "other", vocab=vocab)
    with pytest.raises(TrainerError) as caught:
        bench(folder=policy, **train, **{key: str(other)})
    error = caught.value
    assert error.code == "TRN104"
    assert f"train.{key} = {other}" in error.where
    assert f"rollout.hf_checkpoint = {policy}" in error.where
    assert "tokens differ" in error.why


def test_a_missing_folder_is_named_by_its_own_key(bench, tmp_path):
    with pytest.raises(ConfigError) as caught:
        bench(teacher_load=str(tmp_path / "nowhere"), **DISTIL)
    assert caught.value.where.startswith(f"train.teacher_load = {tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        bench(critic_load=str(tmp_path / "empty"), advantage_estimator="ppo")
    assert caught.value.where.startswith("train.critic_load = ")


def test_a_token_of_the_policys_padding_that_the_teacher_lacks_is_refused_by_sample(bench, teacher, tmp_path):
    import transformers

    path = tiny_model(tmp_path / "padded")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path))
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 4)
    model.save_pretrained(str(path))
    one, batch = bench(folder=path, teacher_load=str(teacher), **DISTIL), made.batch_of()
    one.call("score", batch, frozenset({"teacher"}))
    batch.tokens[batch.offsets[3]] = rows
    one.call("score", batch, frozenset({"policy"}))
    with pytest.raises(TrainerError, match=rf"TRN104 sample {batch.sample_ids[3]} "):
        one.call("score", batch, frozenset({"teacher"}))


def test_an_estimator_that_reads_an_unnamed_teacher_is_told_so(bench):
    one = bench()
    with pytest.raises(TrainerError, match="teacher_load"):
        one.thread.call(one.worker.frozen.begin, frozenset({"teacher"}), one.config.train, one.worker.actor)


class Scorer:
    """An engine that scores token t as -t, and keeps the media that came beside the last tokens."""

    async def score(self, tokens, start, media=None):
        self.media = media
        return -np.asarray(tokens[start:], dtype=np.float32)


class Gallery:
    """The pictures of every sample."""

    async def request(self, sample):
        return Media(images=(b"png",))


def context(config, **engines):
    return Context(config=config, engines=engines)


def sample_of(tokens, temperature=1.0):
    sample = Sample(id="main/0-0", tokens=[3, 4], temperature=temperature)
    sample.append_response(tokens, [-0.5] * len(tokens))
    return sample


def engine_config(**train):
    return Config.model_validate({"train": {"teacher_load": "t", "teacher_place": "engine", **DISTIL, **train}})


def test_the_core_fills_a_training_samples_teacher_log_probs_from_the_engine():
    config, core = engine_config(), Core()
    sample, empty, evaluated = sample_of([7, 8, 9]), sample_of([]), sample_of([7])
    ctx = context(config, teacher=Scorer())
    for one in (sample, empty):
        asyncio.run(core.slime_sample_done(one, ctx))
    asyncio.run(core.slime_sample_done(evaluated, dataclasses.replace(ctx, evaluation=True)))
    assert sample.teacher_log_probs == [-7.0, -8.0, -9.0]
    assert empty.teacher_log_probs == []
    assert evaluated.teacher_log_probs is None
    seeing, teacher = sample_of([7]), Scorer()
    ctx = dataclasses.replace(context(config, teacher=teacher), media=Gallery())
    asyncio.run(core.slime_sample_done(seeing, ctx))
    assert teacher.media.images == (b"png",), "a teacher sees what the policy saw"
    other = sample_of([7])
    asyncio.run(core.slime_sample_done(other, context(engine_config(teacher_place="trainer"), teacher=Scorer())))
    assert other.teacher_log_probs is None


def test_a_sample_of_another_temperature_or_a_cluster_without_a_teacher_is_refused():
    config, core = engine_config(), Core()
    with pytest.raises(ConfigError, match=r"temperature 0\.7"):
        asyncio.run(core.slime_sample_done(sample_of([5], 0.7), context(config, teacher=Scorer())))
    with pytest.raises(EngineError, match="no teacher engine"):
        asyncio.run(core.slime_sample_done(sample_of([5]), context(config)))


def test_a_teacher_engine_and_another_temperature_are_a_conflict_of_keys(teacher):
    flags = ["--advantage-estimator", "on_policy_distillation", "--teacher-load", str(teacher)]
    load_config(None, [*flags, "--rollout-temperature", "0.8"])
    load_config(None, [*flags, "--teacher-place", "engine"])
    with pytest.raises(ConfigError, match=r"teacher_place = engine with rollout_temperature = 0\.8") as caught:
        load_config(None, [*flags, "--teacher-place", "engine", "--rollout-temperature", "0.8"])
    assert "teacher_place = trainer" in caught.value.fix


def test_one_teacher_engine_serves_all_stages():
    def staged(*trains):
        return Config.model_validate({"stage": tuple({"name": f"s{i}", **t} for i, t in enumerate(trains))})

    engine = {"teacher_place": "engine"}
    assert teacher_of(staged({"lr": 1e-3}, {"teacher_load": "a", **engine})) == "a"
    assert teacher_of(staged({"teacher_load": "a"}, {"teacher_load": "b", **engine})) == "b"
    assert teacher_of(engine_config(teacher_place="trainer")) == ""
    with pytest.raises(ConfigError, match="2 teachers"):
        teacher_of(staged({"teacher_load": "a", **engine}, {"teacher_load": "b", **engine}))


def test_the_policys_weights_return_after_the_reference_has_scored_even_where_it_fails(bench):
    one, batch = bench(kl_loss_coef=0.1, lr=1e-2), made.batch_of()
    batch.columns["reference"] = one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"]
    one.call("step", batch)
    before = one.parameters()
    next(iter(one.worker.frozen.reference.values()))[:] = math.nan
    with pytest.raises(TrainerError, match="TRN95"):
        one.call("score", batch, frozenset({"reference"}))
    assert all(torch.equal(before[n], t) for n, t in one.parameters().items())

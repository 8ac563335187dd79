"""The critic: its values and gradients against float64, where it starts from, when it alone learns, what it saves."""

import math
import shutil

import numpy as np
import pytest
import ref_grpo
import ref_values
import torch
import trainer_bench as made
from safetensors.torch import load_file, save_file

from slime_core.errors import DataError, TrainerError
from slime_core.testing import tiny_model
from slime_core.trainers.data_parallel import explained_variance
from slime_core.trainers.optimizer_step import optimizer_steps

pytestmark = pytest.mark.unit

PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "loss_aggregation": "token_mean"}


@pytest.fixture
def ppo(bench):
    """A Bench whose estimator reads values, with a head drawn from a seed so that values differ."""

    def make(*args, draw=True, **train):
        one = bench(*args, **(PPO | train))
        if draw:
            torch.manual_seed(5)
            one.worker.critic.learner.locals()["score.weight"].normal_(std=0.5)
        return one

    return make


def judged(one, batch, noise=0.3):
    """The batch with old values near the critic's, and returns that lie elsewhere."""
    draw = np.random.default_rng(4)
    batch.columns["values"] = one.call("score", batch, frozenset({"values"}))["values"]["values"]
    batch.columns["values"] += (draw.normal(size=len(batch.loss_mask)) * noise).astype(np.float32)
    batch.columns["returns"] = draw.normal(size=len(batch.loss_mask)).astype(np.float32)
    return batch


def float64(one):
    return {name: tensor.double() for name, tensor in one.worker.critic.learner.locals().items()}


def critic_parameters(one):
    return {name: tensor.clone() for name, tensor in one.worker.critic.learner.locals().items()}


def sequences(batch):
    for i in range(len(batch)):
        start, end = batch.response_offsets[i : i + 2]
        yield i, batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].tolist(), int(end - start), slice(start, end)


def reference_values(one, batch, params):
    """Values of all response tokens in float64, one sequence at a time."""
    head = params["score.weight"], params["score.bias"]
    config = one.folder.config
    return torch.cat([ref_values.values(params, config, t, n, *head) for _, t, n, _ in sequences(batch)])


def critic_gradient(one, batch):
    def compute():
        from slime_core.trainers.fsdp.shards import local
        from slime_core.trainers.optimizer_step import LossSums

        worker = one.worker
        (rank_batch,) = worker.partitioner().partition(batch)
        sums = LossSums(rank_batch, torch.device("cpu"))
        worker.critic.backward(worker.packs(rank_batch)[0], sums)
        grads = {n: local(grad).clone() for n, grad in worker.critic.learner.gradients().items()}
        worker.critic.learner.zero_grad()
        return dict(sums.totals), grads

    return one.thread.call(compute)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_values_of_packs_equal_the_reference_one_by_one(ppo, max_tokens, tied):
    one, batch = ppo(tied=tied, max_tokens_per_gpu=max_tokens), made.batch_of()
    found = one.call("score", batch, frozenset({"values"}))["values"]["values"]
    assert found.dtype == np.float32
    assert found.std() > 0.01
    np.testing.assert_allclose(found, reference_values(one, batch, float64(one)), atol=3e-5)


@pytest.mark.parametrize(("family", "clip"), [("qwen3", 0.2), ("qwen3", 0.0), ("qwen2", 0.2), ("llama", 0.0)])
def test_loss_and_gradient_of_the_critic_equal_the_reference(ppo, family, clip):
    one = ppo(family, value_clip=clip, max_tokens_per_gpu=40)
    batch = judged(one, made.batch_of())
    params = {name: tensor.requires_grad_() for name, tensor in float64(one).items()}
    found = reference_values(one, batch, params)
    losses = [
        ref_values.value_loss(v, float(o), float(g), clip)
        for v, o, g in zip(found, batch.columns["values"], batch.columns["returns"])
    ]
    rows = [losses[rows] for *_, rows in sequences(batch)]
    want = ref_grpo.mean_over_tokens(rows, [batch.loss_mask[rows] for *_, rows in sequences(batch)])
    grads = dict(zip(params, torch.autograd.grad(want, list(params.values()), allow_unused=True)))
    totals, got = critic_gradient(one, batch)
    assert totals["loss"] == pytest.approx(want.item(), rel=1e-5)
    assert ("value_clip_fraction" in totals) == bool(clip)
    assert got.keys() == grads.keys()
    for name, gradient in got.items():
        scale = max(float(grads[name].abs().max()), 1e-6)
        assert float((gradient - grads[name]).abs().max()) / scale < 5e-5, name


def test_a_new_head_is_zero_and_the_layers_are_the_policys(ppo):
    one, batch = ppo(draw=False), made.batch_of()
    assert not one.call("score", batch, frozenset({"values"}))["values"]["values"].any()
    mine, policy = critic_parameters(one), one.parameters()
    assert set(mine) - set(policy) == {"score.weight", "score.bias"}
    assert set(policy) - set(mine) == {"lm_head.weight"}
    assert all(torch.equal(mine[name], policy[name]) for name in set(mine) & set(policy))


def test_offloaded_state_takes_no_device_memory_and_comes_back_unchanged(ppo, tmp_path):
    everything, ends = {"parameters", "optimizer", "gradients"}, []
    for leaves in (False, True):
        one = ppo(kl_loss_coef=0.1)
        batch, worker = judged(one, made.batch_of()), one.worker
        found = one.call("score", batch, frozenset({"policy", "reference"}))
        batch.columns |= {name: found[name]["log_probs"] for name in ("policy", "reference")}
        one.call("step", batch)
        before = worker.fingerprint()
        if leaves:
            held = [*worker._tensors("parameters"), *worker._tensors("optimizer")]
            worker.offload.to_host(everything)  # as `release` does beside an engine on the same GPU
            assert {tensor.untyped_storage().nbytes() for tensor in held} == {0}
            assert worker.fingerprint() == before, "a call that reads the state finds it"
            worker.save(tmp_path / "saved")
            worker.staging.writing.result()
            assert worker.offload.on_host == everything
            worker.offload.to_device(everything)
        assert worker.fingerprint() == before
        one.call("step", batch)
        ends.append(
            (worker.fingerprint(), one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"])
        )
    assert ends[0][0] == ends[1][0]
    np.testing.assert_array_equal(ends[0][1], ends[1][1])


def test_a_step_trains_both_and_reports_the_critics_figures(ppo):
    one = ppo(num_steps_per_rollout=2, critic_lr_warmup_iters=4, clip_grad=0.01)
    batch = judged(one, made.batch_of())
    batch.columns["policy"] = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    before, policy = critic_parameters(one), one.parameters()
    metrics = one.call("step", batch)
    assert metrics["optimizer_steps"] == 2.0
    assert metrics["skipped_steps"] == 0.0
    assert metrics["critic_lr"] == pytest.approx(2 / 4 * 1e-3)
    assert metrics["value_loss"] > 0
    assert metrics["critic_grad_norm"] > 0.01
    assert 0 < metrics["value_clip_fraction"] < 1
    trained = batch.loss_mask > 0
    want = ref_values.explained_variance(*(batch.columns[n][trained].tolist() for n in ("values", "returns")))
    assert metrics["explained_variance"] == pytest.approx(want, rel=1e-6)
    assert any(not torch.equal(before[n], t) for n, t in critic_parameters(one).items())
    assert any(not torch.equal(policy[n], t) for n, t in one.parameters().items())


def test_explained_variance_is_one_for_a_perfect_critic_and_left_out_where_returns_do_not_vary():
    batch = made.batch_of()
    batch.columns["returns"] = np.arange(len(batch.loss_mask), dtype=np.float32)
    batch.columns["values"] = batch.columns["returns"] + 7
    assert explained_variance(batch) == {"explained_variance": 1.0}
    batch.columns["values"] = np.zeros_like(batch.columns["returns"])
    assert explained_variance(batch)["explained_variance"] == pytest.approx(0.0)
    batch.columns["returns"][:] = 3
    assert explained_variance(batch) == {}
    batch.loss_mask[:] = 0
    assert explained_variance(batch) == {}


def test_the_critic_learns_the_returns(ppo):
    one = ppo(critic_lr=3e-3, value_clip=0.0, num_critic_only_steps=30)
    batch = made.batch_of()
    batch.columns["returns"] = np.repeat(batch.reward, batch.response_lengths).astype(np.float32)
    seen = []
    for _ in range(25):
        batch.columns["values"] = one.call("score", batch, frozenset({"values"}))["values"]["values"]
        seen.append(one.call("step", batch)["value_loss"])
    assert seen[-1] < 0.25 * seen[0]


def test_in_critic_only_steps_the_policy_and_its_schedule_stand_still(ppo):
    rollout = {"num_rollout": 5, "rollout_batch_size": 3, "n_samples_per_prompt": 4}
    settings = {"lr_decay_style": "linear", "lr_warmup_iters": 2, "rollout": rollout}
    one = ppo(num_critic_only_steps=2, **settings)
    batch = judged(one, made.batch_of())
    policy, critic = one.parameters(), critic_parameters(one)
    for done in (1, 2):
        metrics = one.call("step", batch)
        assert metrics["critic_only_steps"] == 1.0
        assert (metrics["optimizer_steps"], metrics["skipped_steps"], metrics["lr"]) == (0.0, 0.0, 0.0)
        assert metrics["value_loss"] > 0
        assert one.worker.actor.optimizer.steps == 0
        assert one.worker.critic.learner.optimizer.steps == done
        assert all(torch.equal(policy[n], t) for n, t in one.parameters().items())
    assert any(not torch.equal(critic[n], t) for n, t in critic_parameters(one).items())
    metrics = one.call("step", batch)
    assert metrics["lr"] == pytest.approx(1e-3 / 2)  # the first step of the policy's own warm-up
    assert "critic_only_steps" not in metrics
    assert any(not torch.equal(policy[n], t) for n, t in one.parameters().items())
    assert one.worker.actor.schedule.decay == optimizer_steps(one.config, 2) == 3


def test_the_critic_is_saved_and_restored_bit_for_bit(ppo, tmp_path):
    one = ppo(num_critic_only_steps=2)
    batch = judged(one, made.batch_of())
    one.call("step", batch)
    one.call("save", tmp_path / "state")
    want = [one.call("step", batch) for _ in range(2)]
    after = critic_parameters(one), one.parameters()
    other = ppo(num_critic_only_steps=2)
    other.call("restore", tmp_path / "state")
    assert [other.call("step", batch) for _ in range(2)] == want
    for mine, theirs in zip(after, (critic_parameters(other), other.parameters())):
        assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert {f.name for f in (tmp_path / "state").iterdir()} >= {"critic.safetensors", "critic_moments.safetensors"}


def test_a_checkpoint_without_a_critic_is_refused(ppo, bench, tmp_path):
    bench().call("save", tmp_path / "state")
    with pytest.raises(TrainerError, match="holds no critic"):
        ppo().call("restore", tmp_path / "state")


def test_several_stages_keep_their_critic_and_others_drop_it(ppo):
    one = ppo()
    critic = one.worker.critic
    one.call("step", judged(one, made.batch_of()))
    one.call("begin", one.config)
    assert one.worker.critic is critic
    assert critic.learner.optimizer.steps == 0
    one.call("begin", made.config_of(one.folder.path))
    assert one.worker.critic is None


def classifier(folder, path, kind="Token"):
    """The model of a folder as transformers' ForTokenClassification or ForSequenceClassification, saved; the module."""
    import transformers

    shutil.copytree(folder, path)
    (path / "model.safetensors").unlink()
    config = transformers.AutoConfig.from_pretrained(str(folder), num_labels=1)
    torch.manual_seed(11)
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    if model.score.bias is not None:
        torch.nn.init.constant_(model.score.bias, 0.7)
    model.save_pretrained(str(path))
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Token", "Sequence"])
def test_a_critic_of_transformers_gives_its_own_values(ppo, tmp_path, kind, tied):
    folder = tiny_model(tmp_path / "policy", tied=tied)
    model = classifier(tiny_model(tmp_path / "small", hidden=32, layers=1, tied=tied), tmp_path / "critic", kind)
    one, batch = ppo(folder=folder, critic_load=str(tmp_path / "critic"), draw=False), made.batch_of()
    found = one.call("score", batch, frozenset({"values"}))["values"]["values"]
    with torch.no_grad():
        for _, tokens, count, rows in sequences(batch):
            hidden = model.model(torch.tensor([tokens])).last_hidden_state
            want = model.score(hidden)[0, -count - 1 : -1, 0]
            np.testing.assert_allclose(found[rows], want, atol=2e-5)


def test_a_head_named_value_head_is_taken_and_a_plain_model_gets_a_head_of_zeros(ppo, tmp_path):
    folder = tiny_model(tmp_path / "policy")
    plain = tiny_model(tmp_path / "other", seed=8)
    one = ppo(folder=folder, critic_load=str(plain), draw=False)
    stored = load_file(plain / "model.safetensors")
    assert all(torch.equal(t, stored[n]) for n, t in critic_parameters(one).items() if n in stored)
    assert not critic_parameters(one)["score.weight"].any()
    weight = torch.randn(1, 64)
    save_file(stored | {"value_head.weight": weight}, str(plain / "model.safetensors"), metadata={"format": "pt"})
    assert torch.equal(
        critic_parameters(ppo(folder=folder, critic_load=str(plain), draw=False))["score.weight"], weight
    )


def test_a_critic_that_does_not_fit_is_refused_at_the_start(ppo, tmp_path):
    folder = tiny_model(tmp_path / "policy")
    wide = tiny_model(tmp_path / "wide")
    stored = load_file(wide / "model.safetensors")
    save_file(
        stored | {"score.weight": torch.zeros(2, 64)}, str(wide / "model.safetensors"), metadata={"format": "pt"}
    )
    with pytest.raises(DataError, match="TOK46") as caught:
        ppo(folder=folder, critic_load=str(wide))
    assert "score.weight" in caught.value.why
    other = tiny_model(tmp_path / "letters", vocab="abc+=")
    with pytest.raises(TrainerError, match="TRN104") as caught:
        ppo(folder=folder, critic_load=str(other))
    assert str(other) in caught.value.where
    assert str(folder) in caught.value.where


def test_a_value_loss_that_is_not_finite_names_its_sample_and_changes_neither_model(ppo):
    one = ppo(max_tokens_per_gpu=40)
    batch = judged(one, made.batch_of())
    policy, critic = one.parameters(), critic_parameters(one)
    batch.columns["returns"][batch.response_offsets[5]] = np.nan
    with pytest.raises(TrainerError, match="TRN95") as caught:
        one.call("step", batch)
    assert batch.sample_ids[5] in caught.value.what
    assert all(torch.equal(policy[n], t) for n, t in one.parameters().items())
    assert all(torch.equal(critic[n], t) for n, t in critic_parameters(one).items())
    batch.columns["returns"][batch.response_offsets[5]] = 0.5
    assert one.call("step", batch)["optimizer_steps"] == 1.0


def test_equal_advantages_skip_the_policy_and_still_train_the_critic(ppo):
    one = ppo(weight_decay=0.1)
    batch = judged(one, made.batch_of())
    one.call("step", batch)
    batch.columns["advantages"][:] = 0
    policy, critic = one.parameters(), critic_parameters(one)
    metrics = one.call("step", batch)
    assert metrics["skipped_steps/no_gradient"] == metrics["skipped_steps"] == 1.0
    assert all(torch.equal(policy[n], t) for n, t in one.parameters().items())
    assert any(not torch.equal(critic[n], t) for n, t in critic_parameters(one).items())
    assert (one.worker.actor.optimizer.steps, one.worker.critic.learner.optimizer.steps) == (1, 2)


def test_values_that_are_not_finite_and_columns_that_are_missing_are_named(ppo):
    one, batch = ppo(), made.batch_of()
    with pytest.raises(TrainerError, match="column values"):
        one.call("step", batch)
    one.worker.critic.learner.locals()["score.bias"][0] = math.nan
    with pytest.raises(TrainerError, match="TRN95") as caught:
        one.call("score", batch, frozenset({"values"}))
    assert batch.sample_ids[0] in caught.value.what


def test_bfloat16_compute_is_close(ppo):
    batch, found = made.batch_of(), []
    for dtype in ("bfloat16", "float32"):
        found.append(ppo(dtype=dtype).call("score", batch, frozenset({"values"}))["values"]["values"])
    np.testing.assert_allclose(*found, atol=0.1)
    assert np.corrcoef(*found)[0, 1] > 0.99


def test_recomputing_layers_and_the_size_of_packs_change_nothing(ppo):
    grads = []
    for settings in ({}, {"gradient_checkpointing": True}, {"max_tokens_per_gpu": 17}):
        one = ppo(**settings)
        grads.append(critic_gradient(one, judged(one, made.batch_of()))[1])
    for other in grads[1:]:
        for name, gradient in grads[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-5, rtol=1e-3)

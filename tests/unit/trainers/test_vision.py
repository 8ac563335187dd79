"""Steps on samples with pictures: log-probs and gradients are transformers' own, whatever lies in a pack."""

import numpy as np
import pytest
import ref_grpo
import torch
import trainer_bench as made
from pictures import FAMILIES, forward_of, picture_batch, picture_groups, video_groups
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from slime_core.errors import SlimeError
from slime_core.testing import tiny_model, tiny_vision_model
from slime_core.trainers.batch import make_batch
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import stream

pytestmark = pytest.mark.unit
DISTILLATION = {"advantage_estimator": "on_policy_distillation", "kl_loss_coef": 0.1}
WITH_VIDEOS = ("qwen2_5_vl", "qwen3_vl")
TOWERS = ("model.visual.", "model.vision_model.", "model.connector.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: tiny_vision_model(tmp_path_factory.mktemp(family) / "model", family) for family in FAMILIES}


def reference(folder, batch):
    """Log-probs of response tokens, and loss and gradients, by transformers in float64, one sample at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    losses, masks, rows = [], [], []
    for i in range(len(batch)):
        count, start = int(batch.response_lengths[i]), int(batch.response_offsets[i])
        targets = torch.from_numpy(batch.tokens[batch.offsets[i + 1] - count : batch.offsets[i + 1]].astype(np.int64))
        log_probs = forward_of(model, batch, i)[-count - 1 : -1].log_softmax(-1)[torch.arange(count), targets]
        advantages = batch.columns["advantages"][start : start + count]
        losses.append([ref_grpo.token_loss(p, p.detach(), float(a), 0.2, 0.28) for p, a in zip(log_probs, advantages)])
        masks.append(batch.loss_mask[start : start + count].tolist())
        rows.append(log_probs.detach())
    total = ref_grpo.mean_over_rollouts(losses, masks, batch.rollout.tolist())
    names, parameters = zip(*model.named_parameters())
    return torch.cat(rows), (total.item(), dict(zip(names, torch.autograd.grad(total, parameters))))


def assert_close(got, want, tolerance=1e-4):
    """Losses, and gradients to the largest entry of each, or where that is near 0 of all."""
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    assert got[1].keys() == want[1].keys()
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in want[1].values())
    for name, gradient in want[1].items():
        error = float((got[1][name].double() - gradient).abs().max() / gradient.abs().max().clamp(min=least))
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers_however_packed(bench, folders, family):
    settings = {"folder": folders[family], "eps_clip_high": 0.28, "freeze_vision_tower": False}
    one = bench(max_tokens_per_gpu=64, **settings)
    assert one.worker.policy.packs
    assert one.worker.policy.fused
    batch = picture_batch(family, one.folder.config)
    log_probs, want = reference(folders[family], batch)
    scored = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    np.testing.assert_allclose(scored, log_probs, atol=3e-5)
    assert_close(one.gradient(batch), want)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_layers": 2}
    alone = [] if family in WITH_VIDEOS else [(1, {})]  # which the test of videos has
    for max_tokens, more in (*alone, (10_000, checkpointing)):
        assert_close(bench(max_tokens_per_gpu=max_tokens, **settings, **more).gradient(batch), want)


@pytest.mark.parametrize("family", WITH_VIDEOS)
def test_log_probs_and_gradients_of_videos_are_those_of_transformers(bench, folders, family):
    settings = {"folder": folders[family], "eps_clip_high": 0.28, "freeze_vision_tower": False}
    one = bench(max_tokens_per_gpu=10_000, **settings)
    batch = picture_batch(family, one.folder.config, groups=video_groups)
    log_probs, want = reference(folders[family], batch)
    scored = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    np.testing.assert_allclose(scored, log_probs, atol=3e-5)
    assert_close(one.gradient(batch), want)
    assert_close(bench(max_tokens_per_gpu=1, **settings).gradient(batch), want)


def test_pictures_of_a_shared_prompt_pass_the_tower_once_and_other_pictures_are_no_shared_prompt(bench, folders):
    one = bench(folder=folders["qwen3_vl"], max_tokens_per_gpu=10_000)
    batch, passes = picture_batch("qwen3_vl", one.folder.config), []
    tower = one.worker.policy.hf.model.visual
    handle = tower.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    one.gradient(batch)
    handle.remove()
    pixels = ("pixel_values", "pixel_values_videos")
    patches = {id(arrays): sum(len(arrays.get(name, ())) for name in pixels) for arrays in batch.multimodal if arrays}
    assert len(patches) == 5  # of two groups with one prompt each, and of three samples that differ
    assert passes == [sum(patches.values())]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_tower_keeps_its_bits_through_steps_checkpoints_and_exports(bench, folders, tmp_path, dtype):
    folder = folders["qwen2_5_vl"]
    one = bench(folder=folder, max_tokens_per_gpu=64, dtype=dtype, kl_loss_coef=0.01)
    batch = picture_batch("qwen2_5_vl", one.folder.config)
    batch.columns["reference"] = one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"]
    before = one.parameters()
    if dtype == "float32":
        assert one.call("verify", batch)["gradient_error"] < 1e-5
    assert one.call("step", batch)["grad_norm"] > 0
    after = one.parameters()
    frozen = {name for name in before if name.startswith(TOWERS)}
    assert frozen
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    one.call("save", tmp_path / "saved")
    moments = load_file(tmp_path / "saved/moments.safetensors")
    assert {name.split(".", 1)[1] for name in moments} == before.keys() - frozen
    one.call("export", tmp_path / "final")
    one.call("step", batch)
    one.call("restore", tmp_path / "saved")
    assert all(torch.equal(after[name], tensor) for name, tensor in one.parameters().items())
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "final", dtype=torch.float32)
    assert all(torch.equal(after[name], parameter) for name, parameter in exported.named_parameters())
    assert Shards.open(tmp_path / "final").keys() == Shards.open(folder).keys()
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja"):
        assert (tmp_path / "final" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tensors_are_sent_in_names_and_values_of_the_folder(bench, folders, family):
    one, stored = bench(folder=folders[family]), Shards.open(folders[family])
    sent = {part.name: part.cut(tensor) for parts, tensor in stream(one.worker.sources()) for part in parts}
    assert sent.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in sent.items())


def test_a_batch_of_words_gives_a_tower_that_learns_no_gradient(bench, folders):
    one = bench(folder=folders["qwen3_vl"], freeze_vision_tower=False)
    batch = make_batch(0, "main", picture_groups("qwen3_vl", one.folder.config)[2:3])
    batch.columns["advantages"] = np.ones(len(batch.loss_mask), dtype=np.float32)
    _, gradients = one.gradient(batch)
    assert gradients.keys() == one.parameters().keys()
    assert {name for name, g in gradients.items() if not g.any()} == {n for n in gradients if n.startswith(TOWERS)}


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_teacher_reference_and_critic_see_pictures(bench, folders, family):
    one = bench(folder=folders[family], max_tokens_per_gpu=64, **DISTILLATION, teacher_load=str(folders[family]))
    batch = picture_batch(family, one.folder.config)
    scored = one.call("score", batch, frozenset({"policy", "reference", "teacher"}))
    for role in ("reference", "teacher"):
        np.testing.assert_allclose(scored[role]["log_probs"], scored["policy"]["log_probs"], atol=1e-5)
    critic = bench(folder=folders[family], max_tokens_per_gpu=64, advantage_estimator="ppo", critic_lr=1e-3)
    torch.manual_seed(3)
    score = critic.worker.critic.learner.parameters()["score.weight"]
    score.data.copy_(torch.randn_like(score))
    values = critic.call("score", batch, frozenset({"values"}))["values"]["values"]
    model = AutoModelForImageTextToText.from_pretrained(folders[family], dtype=torch.float32)
    norm = next(
        module for name, module in model.named_modules() if name.endswith(("language_model.norm", "text_model.norm"))
    )
    hidden = []
    norm.register_forward_hook(lambda module, args, out: hidden.append(out[0].detach()))
    for i in range(len(batch)):
        forward_of(model, batch, i)
        count = int(batch.response_lengths[i])
        want = hidden[-1][-count - 1 : -1] @ score.detach()[0]
        start = int(batch.response_offsets[i])
        np.testing.assert_allclose(values[start : start + count], want.detach(), atol=1e-4)


def test_pictures_that_do_not_fit_are_refused_with_their_sample(bench, folders, tmp_path):
    one = bench(folder=folders["qwen2_5_vl"])
    batch = picture_batch("qwen2_5_vl", one.folder.config)
    batch.multimodal[1] = {**batch.multimodal[1], "image_grid_thw": np.array([[1, 2, 6]])}
    batch.multimodal[1]["image_grid_thw"][0, 2] = 8
    with pytest.raises(SlimeError, match="DAT38") as caught:
        one.call("score", batch, frozenset({"policy"}))
    assert "main/0-1" in caught.value.where
    text = bench(folder=tiny_model(tmp_path / "text"))
    words = made.batch_of()
    words.multimodal = [{"pixel_values": np.zeros((4, 12), np.float32)}, *[None] * (len(words) - 1)]
    with pytest.raises(SlimeError, match="TRN115"):
        text.call("score", words, frozenset({"policy"}))
    with pytest.raises(SlimeError, match="does not see pictures as the policy does"):
        bench(folder=folders["qwen2_5_vl"], **DISTILLATION, teacher_load=str(folders["qwen3_vl"]))

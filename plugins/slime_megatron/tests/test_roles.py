"""Critic, reference, teacher, verification, memory and hooks over layouts, against the other backend's numbers."""

import asyncio
import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_ranks import (
    EVERYTHING,
    PIPELINE,
    TENSOR,
    CallerThread,
    answer,
    config_of,
    copies,
    equal,
    offloaded,
    run_ranks,
)
from safetensors.torch import load_file, save_file
from trainer_bench import batch_of

from slime_core.errors import SlimeError
from slime_core.plugins import load_plugins
from slime_core.weights.folder import ModelFolder

LAYOUTS = {
    "one": (1, {"hidden_size": 64, "qk_layernorm": True}),  # these two describe the policy, not the teacher
    "tensor": (2, TENSOR | {"num_layers": 2}),
    "pipeline": (2, PIPELINE),
}
TRIED = [pytest.param(name, marks=[pytest.mark.nightly] * (name != "tensor")) for name in LAYOUTS]
"""By day stages have their witness in `test_learning_with_pictures.py`."""
LARGER = {
    "data": (2, {}),
    "context": (2, {"context_parallel_size": 2}),
    "tensor, pipeline": (4, TENSOR | PIPELINE),
}
"""Layouts that are held against the other backend alone; what the others prove beside that does not depend on them."""
EXPERTS = {"one": (1, {}), "expert": (2, {"expert_model_parallel_size": 2})}
BY_DAY = ("data", "expert")
"""What the suite runs of these two."""
ROLES = frozenset({"policy", "reference", "teacher", "values"})
FIRST = {
    "advantage_estimator": "ppo",
    "critic_lr": 1e-3,
    "opd_kl_coef": 0.1,
    "kl_loss_coef": 0.05,
    "lr_decay_style": "constant",
    "max_tokens_per_gpu": 80,
    "num_steps_per_rollout": 2,
    "num_critic_only_steps": 1,
    "loss_aggregation": "token_mean",
}
"""A critic and a teacher of other architectures; the reference is the policy."""
SECOND = FIRST | {"num_critic_only_steps": 0, "num_steps_per_rollout": 1}
"""A critic that copies the policy; a reference that is named."""
WATCH = """
import slime_core
CALLS, RATE = [], None

@slime_core.hookimpl
def slime_megatron_init(args, ctx):
    CALLS.append(["init", args.layout.world, ctx.config.train.advantage_estimator])

@slime_core.hookimpl
def slime_megatron_before_log_prob(model, role, ctx):
    CALLS.append(["log_prob", role, type(getattr(model[0], "module", model[0])).__name__])

@slime_core.hookimpl
def slime_megatron_before_train_step(model, optimizer, step, ctx):
    gradient = any(bool(p.main_grad.any()) for p in model[0].parameters())
    rates = {group["lr"] for group in optimizer.param_groups}
    CALLS.append(["train", type(model[0].module).__name__, step, gradient, sorted(rates)])
    if RATE is not None:
        for group in optimizer.param_groups:
            group["lr"] = RATE
"""

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The policy, tied; a critic with a head and a teacher of other families; and models that do not fit."""
    from slime_core.testing import tiny_model

    root = tmp_path_factory.mktemp("roles")
    made = {
        "policy": tiny_model(root / "policy", tied=True),
        "reference": tiny_model(root / "reference", tied=True, seed=8),
        "critic": tiny_model(root / "critic", "llama", hidden=32, seed=5),
        "teacher": tiny_model(root / "teacher", "qwen2", hidden=32, seed=9),
        "untied": tiny_model(root / "untied"),
        "letters": tiny_model(root / "letters", vocab="abc+="),
        "wide": tiny_model(root / "wide"),
    }
    torch.manual_seed(11)
    for name, head in (
        ("critic", {"value_head.weight": torch.randn(1, 32)}),
        ("wide", {"score.weight": torch.zeros(2, 64)}),
    ):
        file = made[name] / "model.safetensors"
        save_file(load_file(file) | head, str(file), metadata={"format": "pt"})
    for name in ("reference", "untied"):
        made[f"{name}_dist"] = to_dist(made[name])
    return {name: str(path) for name, path in made.items()}


def to_dist(folder):
    """A Megatron checkpoint of a model folder, as `slime convert` makes it."""
    from slime_convert.folder_writing import How
    from slime_megatron.convert.conversion import hf_to_dist
    from slime_models.families import BRIDGES

    return hf_to_dist(folder, folder.with_name(f"{folder.name}-dist"), lambda c: BRIDGES[c.model_type], How()).path


@pytest.fixture(scope="module")
def experts(folders, tmp_path_factory):
    """The same with a policy and a reference of experts; the second critic, which copies the policy, has them too."""
    import transformers

    from slime_core.testing import tiny_model

    found = {}
    for name, seed in (("policy", 0), ("reference", 8)):
        folder = tiny_model(tmp_path_factory.mktemp("experts") / name, weights=False)
        tokens = json.loads((folder / "config.json").read_text())
        config = transformers.Qwen3MoeConfig(
            **{name: tokens[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")},
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
            max_position_embeddings=512, initializer_range=0.2,
        )  # fmt: skip
        torch.manual_seed(seed)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
        found[name] = str(folder)
    return folders | found | {"reference_dist": str(to_dist(folder))}


def of_fsdp(folders):
    """Metrics and columns of the other backend."""
    from slime_core.trainers.fsdp import FsdpTrainer

    stage_of = stages(folders, plugins=())
    config = stage_of()
    trainer = FsdpTrainer(config, load_plugins(config), ModelFolder.open(folders["policy"]), thread=CallerThread())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return learn(trainer, folders, stage_of)[:2]
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def fsdp(folders):
    return of_fsdp(folders)


@pytest.fixture(scope="module")
def fsdp_with_experts(experts):
    return of_fsdp(experts)


@pytest.fixture(scope="module")
def run(zygote, tmp_path_factory):
    """Do a job on the ranks of a layout; each with the plugin that watches."""
    root, found = tmp_path_factory.mktemp("layouts"), {}
    info = root / "site" / "dist_onlooker-1.0.dist-info"
    info.mkdir(parents=True)
    (root / "site" / "onlooker_plugin_module.py").write_text(WATCH)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-onlooker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[slime.plugins]\nonlooker = onlooker_plugin_module\n")

    def once(job, name, folders, world, megatron):
        """What rank 0 found, and its columns; ranks that failed before fail again at once."""
        if name not in found:
            found[name] = None
            log, place = tmp_path_factory.mktemp("said"), root / name
            place.mkdir()
            first, *_ = run_ranks(zygote, log, job, world, place, world, folders, megatron, path=[root / "site"])
            found[name] = first, dict(np.load(place / "columns.npz"))
        assert found[name] is not None, f"{name} failed above"
        return found[name]

    yield once
    shutil.rmtree(root)


@pytest.fixture
def ranks(folders, run):
    """What the ranks of a layout found."""
    return lambda layout: run(all_roles, layout, folders, *LAYOUTS[layout])


def agree(found, columns, metrics, wanted):
    """Fail unless columns and metrics are those of the other backend."""
    assert columns.keys() == wanted.keys()
    for name, column in wanted.items():
        np.testing.assert_allclose(columns[name], column, atol=5e-5, err_msg=name)
    for mine, theirs in zip(found["metrics"], metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("layout", TRIED)
def test_all_models_score_and_learn_as_those_of_the_other_backend(ranks, fsdp, layout):
    (found, columns), (metrics, wanted) = ranks(layout), fsdp
    agree(found, columns, metrics, wanted)
    assert wanted["first.values"].std() > 0.1
    assert not wanted["causal.values"].any(), "a causal language model has no head: it is zero"
    assert not wanted["second.values"].any(), "a new head is zero"
    assert abs(wanted["second.reference"] - wanted["second.policy"]).max() > 0.1
    assert found["metrics"][0]["critic_only_steps"] == 2.0
    assert found["metrics"][-1].keys() >= {"critic_lr", "critic_grad_norm", "value_loss", "explained_variance"}


@pytest.mark.parametrize("layout", TRIED)
def test_verification_finds_the_gradient_of_the_slow_way_and_changes_nothing(ranks, layout):
    found, _ = ranks(layout)
    errors = found["verify"]
    assert errors["float64"] == 1.0
    assert 0 < errors["gradient_error"] < errors["limit"]
    assert errors["loss_error"] < 1e-4
    assert "gradient_error/model.embed_tokens.weight" in errors
    assert "gradient_error/model.layers.1.self_attn.k_proj.weight" in errors
    assert found["rounding"]["float32"] == 0 < found["rounding"]["bfloat16"] < 0.1
    assert found["unchanged"]


@pytest.mark.parametrize("layout", TRIED)
def test_memory_is_given_and_comes_back_bit_for_bit(ranks, layout):
    found, _ = ranks(layout)
    assert found["parked"] == {
        "left": 0, "states": True, "moments": True, "gradients": False, "scores": True,
        "still": ["gradients", "optimizer", "parameters"], "begun": True,
    }  # fmt: skip
    step, verify, release = found["guards"]
    assert "step was called while ['optimizer'] were released" in step
    assert "verify was called while ['optimizer'] were released" in verify
    assert "not ['weights']" in release


@pytest.mark.parametrize("layout", TRIED)
def test_a_plugin_is_told_by_every_hook_and_may_set_the_rate_of_a_step(ranks, layout):
    found, _ = ranks(layout)
    calls = found["hooks"]
    assert calls[0] == ["init", LAYOUTS[layout][0], "ppo"]
    assert calls[1:5] == [
        ["log_prob", "policy", "PackedGPT"],
        ["log_prob", "reference", "PackedGPT"],
        ["log_prob", "teacher", "PackedGPT"],
        ["log_prob", "values", "ValueGPT"],
    ]
    trained = [call[1:] for call in calls if call[0] == "train"]
    assert trained[:2] == [["ValueGPT", 0, False, [1e-3]], ["ValueGPT", 1, False, [1e-3]]]
    assert trained[2:4] == [["PackedGPT", 0, False, [1e-3]], ["ValueGPT", 2, False, [1e-3]]]
    assert found["frozen"] == [False, True]


@pytest.mark.parametrize("layout", TRIED)
def test_models_that_do_not_fit_are_refused(ranks, layout):
    refused = ranks(layout)[0]["refused"]
    assert {name: code for name, (code, _) in refused.items()} == {
        "reference": "TRN104", "untied": "TRN104", "checkpoint": "TOK46", "teacher": "TRN104", "critic": "TOK46",
    }  # fmt: skip
    assert "lm_head.weight" in refused["untied"][1]
    assert "train.ref_load = " in refused["checkpoint"][1]
    assert "1 extra" in refused["checkpoint"][1]
    assert "output_layer.weight" in refused["checkpoint"][1]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in LARGER]
)
def test_on_more_ranks_all_models_score_and_learn_as_those_of_the_other_backend(run, folders, fsdp, layout):
    found, columns = run(learning_alone, layout, folders, *LARGER[layout])
    agree(found, columns, *fsdp)
    assert 0 < found["verify"]["gradient_error"] < found["verify"]["limit"]
    assert found["rounding"]["float32"] == 0 < found["rounding"]["bfloat16"] < 0.1
    assert found["unchanged"]
    assert found["offloaded"] == [0, True]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in EXPERTS]
)
def test_models_with_experts_score_and_learn_as_those_of_the_other_backend(run, experts, fsdp_with_experts, layout):
    found, columns = run(learning_alone, f"experts, {layout}", experts, *EXPERTS[layout])
    agree(found, columns, *fsdp_with_experts)
    errors = found["verify"]
    assert 0 < errors["gradient_error"] < 1e-4
    assert errors["loss_error"] < 1e-5
    assert {f"gradient_error/model.layers.1.mlp.experts.{n}.down_proj.weight" for n in range(4)} <= errors.keys()
    assert found["unchanged"]
    assert found["offloaded"] == [0, True]


def test_memory_that_runs_out_names_the_keys_that_lower_it(run, folders):
    found, _ = run(memory_that_runs_out, "short", folders, *LAYOUTS["one"])
    step, score, *smaller = found["answers"]
    for error, what in ((step, "training on"), (score, "scoring")):
        assert error["code"] == "TRN96", error
        assert f"memory ran out while {what} step 0" in error["what"]
        for key in ("train.max_tokens_per_gpu=", "train.logprob_chunk_tokens=", "megatron.recompute_granularity=full"):
            assert key in error["fix"]
        assert "megatron.optimizer_cpu_offload=true" in error["fix"]
    assert smaller == [None, None]
    assert not found["left"]


def batch_with_returns():
    """A batch with returns, and a temperature other than 1."""
    batch = batch_of(temperature=0.8)
    batch.columns["returns"] = np.random.default_rng(4).normal(size=len(batch.loss_mask)).astype(np.float32)
    return batch


def call(trainer, method, *args):
    """One call of a trainer."""
    return asyncio.run(getattr(trainer, method)(*args))


def scored(trainer, batch, name, arrays):
    """The batch with the columns of all roles, which are noted under a name."""
    from slime_core.algorithms.shared.terms import role_columns

    columns = role_columns(call(trainer, "score", batch, ROLES))
    arrays |= {f"{name}.{role}": values for role, values in columns.items()}
    old = columns["values"] + 0.3 * batch.columns["returns"]
    return replace(batch, columns={**batch.columns, **columns, "values": old})


def learn(trainer, folders, stage_of):
    """Three stages of steps: metrics, columns, and the last batch."""
    arrays = {}
    call(trainer, "begin", stage_of(critic_load=folders["critic"], **FIRST))
    batch = scored(trainer, batch_with_returns(), "first", arrays)
    metrics = [call(trainer, "step", batch) for _ in range(2)]
    call(trainer, "begin", stage_of(critic_load=folders["teacher"], **SECOND))
    batch = scored(trainer, batch_with_returns(), "causal", arrays)
    metrics.append(call(trainer, "step", batch))
    call(trainer, "begin", stage_of(ref_load=folders["reference"], **SECOND))
    batch = scored(trainer, batch_with_returns(), "second", arrays)
    metrics.append(call(trainer, "step", batch))
    batch = scored(trainer, batch, "last", arrays)
    return metrics, arrays, batch


def stages(folders, megatron=None, plugins=("models",)):
    """What makes a stage's config of its train section."""

    def stage_of(**train):
        return config_of(folders["policy"], megatron, plugins, **{"teacher_load": folders["teacher"], **train})

    return stage_of


def make_trainer(rank, root, world, folders, stage_of):
    """This rank's trainer."""
    from slime_megatron.trainer import MegatronTrainer

    config = stage_of(critic_load=folders["critic"], **FIRST)
    return MegatronTrainer(
        config, load_plugins(config), ModelFolder.open(folders["policy"]), thread=CallerThread(),
        rank=rank, world=world, rendezvous=str(root / "meeting"),
    )  # fmt: skip


def all_roles(rank, root, world, folders, megatron):
    """Everything on this rank."""
    stage_of = stages(folders, megatron, ("models", "onlooker"))
    trainer = make_trainer(rank, root, world, folders, stage_of)
    metrics, arrays, batch = learn(trainer, folders, stage_of)
    if rank == 0:
        np.savez(root / "columns.npz", **arrays)
    found = {"metrics": metrics, "hooks": hooks(), "verify": call(trainer, "verify", batch)}
    found["rounding"] = rounding(trainer, batch)
    found["unchanged"] = same(trainer, batch, arrays["last.policy"])
    found["parked"] = parked(trainer, stage_of, batch, arrays)
    found["guards"] = guards(trainer, batch)
    found["frozen"] = frozen(trainer, batch)
    found["refused"] = refused(trainer, folders, stage_of)
    return found


def learning_alone(rank, root, world, folders, megatron):
    """What is learnt, verification, and memory that goes and comes back: of more ranks, or of experts.

    The reference comes from a Megatron checkpoint.
    """
    stage_of = stages(folders, megatron)
    trainer = make_trainer(rank, root, world, folders, stage_of)
    metrics, arrays, batch = learn(trainer, folders | {"reference": folders["reference_dist"]}, stage_of)
    if rank == 0:
        np.savez(root / "columns.npz", **arrays)
    return {
        "metrics": metrics,
        "verify": call(trainer, "verify", batch),
        "rounding": rounding(trainer, batch),
        "unchanged": same(trainer, batch, arrays["last.policy"]),
        "offloaded": offloaded(trainer._worker),
    }


def same(trainer, batch, before):
    """Whether the policy gives the very same log-probs as before."""
    found = call(trainer, "score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    return bool(np.array_equal(found, before))


def rounding(trainer, batch):
    """How far log-probs in both dtypes are from the policy's."""
    scores = call(trainer, "score", batch, frozenset({"policy", "float32", "bfloat16"}))
    own = scores.pop("policy")["log_probs"]
    return {dtype: float(abs(columns["log_probs"] - own).max()) for dtype, columns in scores.items()}


def parked(trainer, stage_of, batch, arrays):
    """All state goes and comes back; a stage begins meanwhile."""
    worker = trainer._worker
    states = copies(worker._tensors("optimizer"))
    worker.offload.to_host({"gradients", "optimizer"})
    worker.offload.to_host({"parameters"})
    left = sum(tensor.untyped_storage().nbytes() for kind in EVERYTHING for tensor in worker._tensors(kind))
    worker.offload.to_device(EVERYTHING)
    found = {
        "left": left,
        "states": equal(states, list(worker._tensors("optimizer"))),
        "moments": any(bool(tensor.any()) for tensor in states),
        "gradients": any(bool(tensor.any()) for tensor in worker._tensors("gradients")),
        "scores": same(trainer, batch, arrays["last.policy"]),
    }
    worker.offload.to_host(EVERYTHING)
    call(trainer, "begin", stage_of(ref_load="", **SECOND))
    found["still"] = sorted(worker.offload.on_host)
    worker.offload.to_device(EVERYTHING)
    return found | {"begun": same(trainer, batch, arrays["last.policy"])}


def guards(trainer, batch):
    """What is said where state was released."""
    found = []
    call(trainer, "release", {"optimizer"})
    for ask in (("step", batch), ("verify", batch), ("release", {"weights"})):
        try:
            call(trainer, *ask)
        except SlimeError as error:
            found.append(str(error))
    call(trainer, "reacquire", {"optimizer"})
    return found


def hooks():
    """Calls that the plugin saw."""
    import onlooker_plugin_module

    return list(onlooker_plugin_module.CALLS)


def frozen(trainer, batch):
    """A step whose rate a hook sets to 0, and one after it: whether each moves the policy."""
    import onlooker_plugin_module

    def policy():
        return copies(held.tensor for held in trainer._worker.policy.tensors.by_name.values())

    moved = []
    for rate in (0.0, None):
        onlooker_plugin_module.RATE = rate
        before = policy()
        call(trainer, "step", batch)
        moved.append(not equal(before, policy()))
    return moved


def refused(trainer, folders, stage_of):
    """Codes and messages of models that do not fit."""
    found = {}
    for name, train in {
        "reference": {"ref_load": folders["teacher"]},
        "untied": {"ref_load": folders["untied"]},
        "checkpoint": {"ref_load": folders["untied_dist"]},
        "teacher": {"teacher_load": folders["letters"]},
        "critic": {"critic_load": folders["wide"]},
    }.items():
        try:
            call(trainer, "begin", stage_of(**{**SECOND, **train}))
        except SlimeError as error:
            found[name] = [error.code, str(error)]
    return found


def memory_that_runs_out(rank, root, world, folders, megatron):
    """What a step and scoring say where memory really runs out; then of the same in smaller passes."""
    stage_of = stages(folders, megatron)
    trainer = make_trainer(rank, root, world, folders, stage_of)
    np.savez(root / "columns.npz")
    big = batch_of(groups=12, rollouts=8, longest=300, fan_out=False)
    answers = []
    for tokens in (1 << 20, 600):
        train = {"lr": 1e-3, "max_tokens_per_gpu": tokens, "gradient_checkpointing": False}
        call(trainer, "begin", stage_of(**train))
        for ask in (("step", big), ("score", big, frozenset({"policy"}))):
            if tokens == 600:  # once without a limit: what the process reserves for threads is not the pass's
                call(trainer, *ask)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + (24 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            try:
                call(trainer, *ask)
                answers.append(None)
            except SlimeError as error:
                answers.append(error.as_dict())
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"answers": answers, "left": any(bool(t.any()) for t in trainer._worker._tensors("gradients"))}


if __name__ == "__main__":
    answer(all_roles, learning_alone, memory_that_runs_out)

"""Critic, reference, teacher, verification, memory and hooks over layouts, against the other backend's numbers."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
LAYOUTS = {
    "one": (1, {"hidden_size": 64, "qk_layernorm": True}),  # these two describe the policy, not the teacher
    "tensor": (2, {"tensor_model_parallel_size": 2, "num_layers": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
    "context": (2, {"context_parallel_size": 2}),
}
LARGER = {
    "data": (2, {}),
    "tensor, pipeline": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
"""Layouts that are held against the other backend alone; what the others prove beside that does not depend on them."""
EXPERTS = {"one": (1, {}), "expert": (2, {"expert_model_parallel_size": 2})}
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
    sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests" / "unit" / "trainers")]
    import roles_main

    from slime_core.plugins import load_plugins
    from slime_core.trainers.fsdp import FsdpTrainer
    from slime_core.weights.folder import ModelFolder

    config = roles_main.config_of(folders, ())
    trainer = FsdpTrainer(config, load_plugins(config), ModelFolder.open(folders["policy"]), thread=roles_main.Here())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return roles_main.learn(trainer, folders, lambda **train: roles_main.config_of(folders, (), **train))[:2]
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
    """Run `roles_main.py` on the ranks of a layout; each with the plugin that watches."""
    root, found = tmp_path_factory.mktemp("layouts"), {}
    info = root / "site" / "dist_watch-1.0.dist-info"
    info.mkdir(parents=True)
    (root / "site" / "watch_plugin_module.py").write_text(WATCH)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-watch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[slime.plugins]\nwatch = watch_plugin_module\n")

    def once(what, name, folders, world, megatron):
        """What the ranks found; one that failed before fails again at once."""
        if name not in found:
            found[name] = None
            out = root / name
            out.with_suffix(".folders").write_text(json.dumps(folders))
            given = [world, out.with_suffix(".folders"), out, json.dumps(megatron), what]
            ranks = [[HERE / "roles_main.py", rank, *given] for rank in range(world)]
            zygote.together(tmp_path_factory.mktemp("said"), ranks, path=[root / "site"])
            found[name] = json.loads(Path(f"{out}.json").read_text()), dict(np.load(f"{out}.npz"))
        assert found[name] is not None, f"{name} failed above"
        return found[name]

    yield once
    shutil.rmtree(root)


@pytest.fixture
def ranks(folders, run):
    """What the ranks of a layout found."""
    return lambda layout: run("main", layout, folders, *LAYOUTS[layout])


def agree(found, columns, metrics, wanted):
    """Fail unless columns and metrics are those of the other backend."""
    assert columns.keys() == wanted.keys()
    for name, column in wanted.items():
        np.testing.assert_allclose(columns[name], column, atol=5e-5, err_msg=name)
    for mine, theirs in zip(found["metrics"], metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_models_score_and_learn_as_those_of_the_other_backend(ranks, fsdp, layout):
    (found, columns), (metrics, wanted) = ranks(layout), fsdp
    agree(found, columns, metrics, wanted)
    assert wanted["first.values"].std() > 0.1
    assert not wanted["second.values"].any(), "a new head is zero"
    assert abs(wanted["second.reference"] - wanted["second.policy"]).max() > 0.1
    assert found["metrics"][0]["critic_only_steps"] == 2.0
    assert found["metrics"][-1].keys() >= {"critic_lr", "critic_grad_norm", "value_loss", "explained_variance"}


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_that_do_not_fit_are_refused(ranks, layout):
    refused = ranks(layout)[0]["refused"]
    assert {name: code for name, (code, _) in refused.items()} == {
        "reference": "TRN104", "untied": "TRN104", "checkpoint": "TOK46", "teacher": "TRN104", "critic": "TOK46",
    }  # fmt: skip
    assert "lm_head.weight" in refused["untied"][1]
    assert "train.ref_load = " in refused["checkpoint"][1]
    assert "1 extra" in refused["checkpoint"][1]
    assert "output_layer.weight" in refused["checkpoint"][1]


@pytest.mark.parametrize("layout", LARGER)
def test_on_more_ranks_all_models_score_and_learn_as_those_of_the_other_backend(run, folders, fsdp, layout):
    found, columns = run("larger", layout, folders, *LARGER[layout])
    agree(found, columns, *fsdp)
    assert 0 < found["verify"]["gradient_error"] < found["verify"]["limit"]
    assert found["rounding"]["float32"] == 0 < found["rounding"]["bfloat16"] < 0.1
    assert found["unchanged"]
    assert found["states"]


@pytest.mark.parametrize("layout", EXPERTS)
def test_models_with_experts_score_and_learn_as_those_of_the_other_backend(run, experts, fsdp_with_experts, layout):
    found, columns = run("larger", f"experts, {layout}", experts, *EXPERTS[layout])
    agree(found, columns, *fsdp_with_experts)
    errors = found["verify"]
    assert 0 < errors["gradient_error"] < 1e-4
    assert errors["loss_error"] < 1e-5
    assert {f"gradient_error/model.layers.1.mlp.experts.{n}.down_proj.weight" for n in range(4)} <= errors.keys()
    assert found["unchanged"]
    assert found["states"]


def test_memory_that_runs_out_names_the_keys_that_lower_it(ranks):
    found = ranks("one")[0]["short"]
    step, score, *smaller = found["answers"]
    for error, what in ((step, "training on"), (score, "scoring")):
        assert error["code"] == "TRN96", error
        assert f"memory ran out while {what} step 0" in error["what"]
        for key in ("train.max_tokens_per_gpu=", "train.logprob_chunk_tokens=", "megatron.recompute_granularity=full"):
            assert key in error["fix"]
        assert "megatron.optimizer_cpu_offload=true" in error["fix"]
    assert smaller == [None, None]
    assert not found["left"]

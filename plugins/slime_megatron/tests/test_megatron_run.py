"""Whole runs that Megatron-core trains, on CPU ranks: the losses of FSDP at every layout, and checkpoints that convert."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from slime_core.testing import tiny_model, tiny_vision_model
from slime_core.testing.models import fp8_model

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("megatron-runs")]

ON_CPU = Path(__file__).parent / "megatron_on_cpu"
RECIPE = """
name = "both"
plugins = ["models"]
seed = 5

[rollout]
hf_checkpoint = "model"
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 10
rollout_slots = 8

[data]
prompt_data = "rows.jsonl"
input_key = "q"
apply_chat_template = true
label_key = "a"

[reward]
custom_rm_path = "length.py:reward"

[cluster]
cpu_threads = 1

[train]
lr = 2e-3
dtype = "float32"
adam_eps = 1e-3  # a gradient of rounding errors alone moves nothing: the losses can be compared

[report]
save_interval = 2

[[stage]]
name = "warmup"
input_key = "talk"
loss_type = "sft_loss"
num_rollout = 1
n_samples_per_prompt = 1

[[stage]]
name = "grpo"
num_rollout = 2
kl_loss_coef = 0.01
num_steps_per_rollout = 2
"""
PICTURES = """
name = "pictures"
plugins = ["models"]
seed = 5

[rollout]
hf_checkpoint = "sees"
rollout_batch_size = 3
n_samples_per_prompt = 3
rollout_max_response_len = 4
rollout_slots = 9

[data]
prompt_data = "pictures.jsonl"
input_key = "q"
multimodal_keys = { image = "images" }

[reward]
custom_rm_path = "length.py:reward"

[cluster]
cpu_threads = 1

[train]
lr = 2e-3
dtype = "float32"
adam_eps = 1e-3
freeze_vision_tower = false

[[stage]]
name = "grpo"
num_rollout = 2
"""
REWARD = """
async def reward(args, sample, **kwargs):
    return float(sum(sample.tokens[-sample.response_length:]) % 7)
"""
WATCH = """
import json, os


def note(args, *event):
    args.events = getattr(args, "events", 0) + 1
    sizes = [args.tensor_model_parallel_size, args.data_parallel_size, args.world_size]
    with open(os.path.join(os.path.dirname(__file__), f"{event[0]}-{args.rank}.jsonl"), "a") as file:
        file.write(json.dumps([*event[1:], sizes, args.events]) + "\\n")


def init(args):
    note(args, "init")


def log_prob(args, model, store_prefix):
    note(args, "scored", store_prefix, len(model))


def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note(args, "stepped", rollout_id, step_id, optimizer.param_groups[0]["lr"] > 0, opt_param_scheduler)
"""
FUNCTIONS = [
    *("--custom-megatron-init-path", "watch.py:init"),
    *("--custom-megatron-before-log-prob-hook-path", "watch.py:log_prob"),
    *("--custom-megatron-before-train-step-hook-path", "watch.py:step"),
]
"""They change nothing."""


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + '=' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments.a|string }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def talk(a, b):
    """A conversation whose first answer is a tool call; both answers are trained, the result is not."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a}}}
    return [
        {"role": "user", "content": f"{a}+{b}="},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": f"{a}+{b}={a + b}"},
    ]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with recipe, model, data and reward."""
    folder = tmp_path_factory.mktemp("megatron")
    tiny_model(folder / "model", tied=True, chat_template=TEMPLATE)
    rows = [{"q": f"{a}+{b}=", "a": str(a + b), "talk": talk(a, b)} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "length.py").write_text(REWARD)
    (folder / "both.toml").write_text(RECIPE)
    (folder / "watch.py").write_text(WATCH)
    return folder


@pytest.fixture(scope="module")
def run(work, zygote, tmp_path_factory):
    """`slime ARGS` in a process of its own, where Megatron-core runs in it or in its ranks."""
    path = os.pathsep.join([str(ON_CPU), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}

    def run(*args):
        if "--actor-num-gpus-per-node" in args:  # the ranks are processes that read PYTHONPATH
            done = zygote.slime(tmp_path_factory.mktemp("said"), *args, cwd=work, hung=280, **environment)
        else:
            command = [str(Path(sys.executable).parent / "slime"), *args]
            env = {**os.environ, **environment}
            done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]

    return run


def steps(folder):
    """Metrics of each step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def with_fsdp(work, zygote, tmp_path_factory):
    """The run that every other is held against."""
    said = tmp_path_factory.mktemp("said")
    done = zygote.slime(said, "run", "both.toml", "--run-dir", "fsdp", cwd=work, path=(), hung=280)
    assert done.returncode == 0, done.stderr
    return steps(work / "fsdp")


FIGURES = ("train/loss", "train/grad_norm", "train/entropy", "reward/mean", "loss", "grad_norm", "entropy", "reward")
LAYOUTS = {
    "one": (),
    "tensor": ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
    "pipeline": ("--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2"),
}
TRIED = [pytest.param("one", marks=pytest.mark.nightly), "tensor", pytest.param("pipeline", marks=pytest.mark.nightly)]
"""A run takes half a minute; that stages compute the same is proven without one, by the trainer's own tests."""


@pytest.fixture(scope="module")
def trained(work, run):
    """The run of a layout, made once."""
    made = set()

    def train(layout):
        if layout not in made:
            watched = FUNCTIONS if layout == "tensor" else []
            words = ("--train-backend", "megatron", *LAYOUTS[layout], *watched)
            run("run", "both.toml", "--run-dir", layout, *words)
            made.add(layout)
        return work / layout

    return train


def agree(steps_here, steps_of_fsdp):
    """Fail unless the metrics of every step are those of the other backend."""
    for ours, theirs in zip(steps_here, steps_of_fsdp, strict=True):
        names = [name for name in FIGURES if name in theirs["metrics"]]
        assert len(names) >= 3, sorted(theirs["metrics"])
        for name in names:
            want = theirs["metrics"][name]
            assert ours["metrics"][name] == pytest.approx(want, rel=5e-3, abs=1e-4), (name, ours["version"])


@pytest.mark.parametrize("layout", TRIED)
def test_losses_are_those_of_fsdp(work, with_fsdp, trained, layout):
    assert len(with_fsdp) == 3
    agree(steps(trained(layout)), with_fsdp)
    assert (work / layout / "final" / "model.safetensors").is_file()


def test_functions_by_path_are_called_in_each_rank_with_its_own_args(work, trained):
    trained("tensor")
    for rank in (0, 1):
        rows = {
            name: [json.loads(line) for line in (work / f"{name}-{rank}.jsonl").read_text().splitlines()]
            for name in ("init", "scored", "stepped")
        }
        assert rows["init"] == [[[2, 1, 2], 1]]
        steps_of_rollouts = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
        assert [row[:4] for row in rows["stepped"]] == [[*one, True, None] for one in steps_of_rollouts]
        assert [row[:2] for row in rows["scored"]] == [["", 1], ["ref_", 1]] * 2
        assert rows["stepped"][-1][-2:] == [[2, 1, 2], 10], "what one function sets in args the others see"


@pytest.mark.nightly
def test_a_run_on_pictures_has_the_losses_of_fsdp(work, run, zygote, tmp_path_factory):
    """Pictures of odd sizes, one, two and none a prompt; the tower learns, on both tensor-parallel ranks alike."""
    tiny_vision_model(work / "sees", "qwen2_5_vl")
    draw, rows = np.random.default_rng(3), []
    for number, sizes in enumerate([[(28, 56)], [(45, 70), (28, 28)], [], [(84, 30)], [(56, 56)], [(29, 57)]]):
        names = [f"{number}-{place}.png" for place in range(len(sizes))]
        for name, (height, width) in zip(names, sizes, strict=True):
            Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(work / name)
        rows.append({"q": "<image>" * len(names) + f"{number}=", "images": names})
    (work / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "pictures.toml").write_text(PICTURES)
    words, said = ("run", "pictures.toml", "--run-dir"), tmp_path_factory.mktemp("said")
    done = zygote.slime(said, *words, "pictures-fsdp", cwd=work, path=(), hung=280)
    assert done.returncode == 0, done.stderr
    run(*words, "pictures", "--train-backend", "megatron", *LAYOUTS["tensor"])
    agree(steps(work / "pictures"), steps(work / "pictures-fsdp"))
    first, last = (load_file(work / name / "model.safetensors") for name in ("sees", "pictures/final"))
    assert first.keys() == last.keys()
    assert not torch.equal(first["visual.patch_embed.proj.weight"], last["visual.patch_embed.proj.weight"])


@pytest.mark.nightly
def test_a_run_of_two_adapters_has_the_losses_of_fsdp_and_ends_with_both(work, run, zygote, tmp_path_factory):
    recipe = str(Path(__file__).parents[3] / "examples" / "two_adapters" / "recipe.toml")
    words = ("run", recipe, "--plugin", "models", "--num-rollout", "2", "--adam-eps", "1e-3", "--run-dir")
    done = zygote.slime(tmp_path_factory.mktemp("said"), *words, "adapters-fsdp", cwd=work, path=(), hung=280)
    assert done.returncode == 0, done.stderr
    run(*words, "adapters", "--train-backend", "megatron", *LAYOUTS["tensor"])
    rows, others = (
        [row for row in steps(work / name) if row["kind"] == "step"] for name in ("adapters", "adapters-fsdp")
    )
    agree(rows, others)
    for row, other in zip(rows, others, strict=True):
        for name in ("up/loss", "down/loss", "up/grad_norm", "down/grad_norm"):
            assert row["metrics"][name] == pytest.approx(other["metrics"][name], rel=5e-3, abs=1e-4), name
    for name in ("up", "down"):
        one, other = (
            load_file(work / run / "final" / "adapter" / name / "adapter_model.safetensors")
            for run in ("adapters", "adapters-fsdp")
        )
        assert one.keys() == other.keys()


def convert(*args):
    """`slime convert ARGS`."""
    from slime_cli.main import main

    assert main(["convert", *map(str, args), "--plugin", "models", "--quiet"]) == 0


def same(one, other):
    """Fail unless two model folders hold the same tensors, bit for bit, and the same config."""
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())


@pytest.mark.parametrize("layout", TRIED)
def test_the_last_checkpoint_becomes_the_folder_that_the_run_ends_in(work, trained, tmp_path, layout):
    ended = trained(layout)
    convert("dist-to-hf", ended, tmp_path / "hf", "--verify")
    same(tmp_path / "hf", ended / "final")
    first, last = load_file(work / "model" / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert not torch.equal(first["model.norm.weight"], last["model.norm.weight"]), "nothing was learnt"


@pytest.mark.nightly
def test_a_folder_in_fp8_has_the_first_loss_of_fsdp_and_is_rolled_out_in_fp8(work, run, zygote, tmp_path_factory):
    """Both read the same weights; later ones may round to neighbours of e4m3, and then other tokens are drawn."""
    fp8_model(work / "fp8", work / "model")
    words = ("run", "both.toml", "--hf-checkpoint", "fp8", "--rollout-quantization", "fp8")
    said = tmp_path_factory.mktemp("said")
    done = zygote.slime(said, *words, "--run-dir", "fp8-fsdp", cwd=work, path=(), hung=280)
    assert done.returncode == 0, done.stderr
    run(*words, "--run-dir", "fp8-megatron", "--train-backend", "megatron", *LAYOUTS["tensor"])
    both = [
        [one["metrics"] for one in steps(work / name) if one["kind"] == "step"]
        for name in ("fp8-fsdp", "fp8-megatron")
    ]
    for name in ("loss", "grad_norm"):
        assert both[1][0][name] == pytest.approx(both[0][0][name], rel=1e-4)
    for metrics in (*both[0][1:], *both[1][1:]):
        assert 1e-4 < metrics["train_rollout_logprob_abs_diff"] < 0.05
        assert "tis_weight" in metrics

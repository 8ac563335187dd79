"""Several adapters over one base: each learns, to the bit, what a run of its own learns, at every layout."""

import pytest
import torch
from megatron_ranks import PIPELINE, TENSOR, Ranks, answer, equal, mixture, run_ranks
from safetensors.torch import load_file
from trainer_bench import ADAPTERS, Bench, groups_of_adapters, of_adapter, train_adapters

from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

LORA = {
    "lora_rank": 4, "lora_sync": "adapter", "lr": 5e-3, "clip_grad": 0.1, "num_steps_per_rollout": 2,
    "kl_loss_coef": 0.1, "normalize_advantages": True, "lr_warmup_iters": 3,
    "max_tokens_per_gpu": 150,
}  # fmt: skip
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 500}
INTERLEAVED = PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1}
LAYOUTS = {  # model, flags, keys of [train]
    "tensor": ("dense", TENSOR | {"sequence_parallel": True}, {"lora_dropout": 0.2}),
    "interleaved": ("deep", INTERLEAVED, {"lora_use_dora": True}),
    "experts": ("moe", TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {}),
    "context": ("dense", {"context_parallel_size": 2}, {}),
    "data, overlapped": ("dense", OVERLAPPED, {}),
}
RARE = ("interleaved", "context", "data, overlapped")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dense model, one of four layers and a mixture of experts."""
    folder = tmp_path_factory.mktemp("root")
    tiny_model(folder / "dense", tied=True)
    tiny_model(folder / "deep", tied=True, layers=4)
    mixture(folder / "moe")
    return folder


@pytest.fixture(scope="module")
def pair(root, zygote, tmp_path_factory):
    """What both ranks answer."""
    often = [layout for layout in LAYOUTS if layout not in RARE]
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), two_ranks, 2, root, often)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in RARE])
def test_two_adapters_in_a_run_are_those_of_two_runs(pair, layout):
    are_apart(pair, layout)


@pytest.mark.nightly
def test_they_are_so_in_stages_with_shared_sequences_and_with_gradients_summed_beside_passes(root, zygote, tmp_path):
    answers = run_ranks(zygote, tmp_path, two_ranks, 2, root, RARE)
    for layout in RARE:
        are_apart(answers, layout)


def are_apart(ranks, layout):
    """Whether each adapter learned what it learns alone."""
    for answers in ranks:
        one = answers[layout]
        assert one["same"] == {"solver": [True, True, True], "critic": [True, True, True]}
        assert one["steps"] == {"solver": 4, "critic": 2}
        assert not one["critic stepped"], "without samples an adapter stays as it is"


def test_what_was_saved_between_steps_goes_on_with_every_adapter(pair, root, zygote, tmp_path):
    for answers in pair:
        one = answers["tensor"]
        assert one["again"] == one["on"]
        assert one["restored"] == one["saved"] != one["begin"]
    assert {key.split(".")[1] for key in one["keys"] if not key.startswith("optimizer")} == {*ADAPTERS}
    assert run_ranks(zygote, tmp_path, one_rank, 1, root) == [one["saved"]]


def test_each_adapter_of_a_checkpoint_converts_to_a_folder_of_its_own(pair, root, cli, tmp_path):
    flags = ("--origin-hf-dir", root / "dense", "--trust-metadata")
    several = cli("convert", "dist-to-adapter", root / "saved", tmp_path / "none", *flags)
    assert several.code == 2
    assert "--adapter solver   or   --adapter critic" in several.err
    for name in ADAPTERS:
        done = cli("convert", "dist-to-adapter", root / "saved", tmp_path / name, "--adapter", name, *flags)
        assert done.code == 0, done.err
        tensors, expected = (
            load_file(folder / name / "adapter_model.safetensors") for folder in (tmp_path, root / "final" / "adapter")
        )
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], one) for key, one in expected.items())


def test_fsdp_begins_and_steps_alike(pair, root):
    from slime_core.trainers.adapters import AdapterTrainer

    more = LAYOUTS["tensor"][2] | {"adam_eps": 1e-3}
    one = Bench(root / "dense", lora_adapters=ADAPTERS, **LORA, **more)
    assert one.call("fingerprint") == pair[0]["tensor"]["begin"]
    metrics = train_adapters(AdapterTrainer(one.trainer, ADAPTERS), one.worker, range(2), ADAPTERS)
    for expected, answers in zip(metrics, pair[0]["tensor"]["metrics"], strict=True):
        assert answers.keys() == expected.keys()
        for name in {"solver/loss", "solver/grad_norm", "critic/loss", "critic/grad_norm"} & answers.keys():
            assert answers[name] == pytest.approx(expected[name], rel=1e-5), name


def test_engines_and_folders_get_every_adapter(pair, root):
    """Updates in memory and in folders, and what a run ends with: a folder an adapter."""
    answers = pair[0]["tensor"]
    assert answers["published"] == [0, ADAPTERS]
    for one in pair:
        assert one["tensor"]["loaded"] == one["tensor"]["saved"]
    for name in ADAPTERS:
        sent, kept = (
            load_file(folder / name / "adapter_model.safetensors")
            for folder in (root / "sent" / "adapters" / "v-2", root / "final" / "adapter")
        )
        assert sent.keys() == kept.keys()
        assert all(torch.equal(kept[key], tensor) for key, tensor in sent.items())


def test_the_gradient_of_each_adapter_is_verified(pair):
    for answers in pair:
        errors = answers["tensor"]["verified"]
        assert max(errors["gradient_error"], errors["loss_error"]) < 1e-5
        assert {name.split("/")[1] for name in errors if name.startswith("gradient_error/")} == {*ADAPTERS}


class Direct:
    """A `protocols.Trainer` of a worker of this thread."""

    def __init__(self, worker):
        self.worker = worker

    async def score(self, batch, roles):
        return self.worker.score(batch, roles)

    async def step(self, batch):
        return self.worker.step(batch)

    async def verify(self, batch):
        return self.worker.verify(batch)


def trained(worker, steps, models=ADAPTERS):
    """Metrics of steps with the samples of these adapters."""
    from slime_core.trainers.adapters import AdapterTrainer

    trainer = Direct(worker) if len(models) == 1 else AdapterTrainer(Direct(worker), models)
    return train_adapters(trainer, worker, steps, models)


def state_of(worker, name):
    """An adapter's shards, and its masters and moments."""
    from slime_megatron.masters import MOMENTS, masters

    shards = [local.tensor.detach().clone() for local in worker.policy.adapters[name].tensors.by_name.values()]
    pairs = list(masters(worker.actors[name].optimizer))
    return shards, [tensor.clone() for one in pairs for tensor in (one.weights(), *map(one.moment, MOMENTS))]


def two_ranks(rank, root, layouts):
    """A run of both adapters, and one of each."""
    answers = {}
    for layout in layouts:
        model, flags, more = LAYOUTS[layout]
        keys = LORA | more

        def ranks(*names, model=model, flags=flags, keys=keys, **train):
            return Ranks(root, model, flags, rank, 2, f"meeting-{layouts[0]}", lora_adapters=[*names], **keys, **train)

        both = ranks(*ADAPTERS)
        one = {"begin": both.worker.fingerprint(), "metrics": trained(both.worker, range(2)), "same": {}}
        both.worker.settle()
        one["critic stepped"] = "critic/loss" in one["metrics"][1]
        one["steps"] = {name: actor.steps for name, actor in both.worker.actors.items()}
        states = {name: state_of(both.worker, name) for name in ADAPTERS}
        if layout == "tensor":
            one |= {"saved": both.worker.fingerprint(), "files": both.save(root / "saved")}
            one |= engines_and_folders(both, root)
            one["on"] = [trained(both.worker, [2]), both.worker.fingerprint()]
            again = ranks(*ADAPTERS)
            one["restored"] = again.restore(root / "saved")
            one["again"] = [trained(again.worker, [2]), again.worker.fingerprint()]
            one["keys"] = keys_of(root / "saved")
            one["loaded"] = ranks(*ADAPTERS, lora_load=str(root / "final" / "adapter")).worker.fingerprint()
        for name in ADAPTERS:
            alone = ranks(name)
            metrics = trained(alone.worker, range(2), [name])
            alone.worker.settle()
            pairs = zip(states[name], state_of(alone.worker, name), strict=True)
            one["same"][name] = [metrics == of_adapter(name, one["metrics"]), *(equal(*pair) for pair in pairs)]
        answers[layout] = one
    return answers


def engines_and_folders(ranks, root):
    """What engines get that have the base, what the run ends with, and errors of gradients."""
    import asyncio

    from slime_core.trainers.adapters import AdapterTrainer, estimated
    from slime_core.trainers.batch import make_batch
    from slime_core.types import WeightRoute

    worker = ranks.worker
    update = worker.publish(2, WeightRoute(transport="tensors", dtype="float32", base=False))
    worker.publish(2, WeightRoute(transport="disk", dtype="float32", folder=str(root / "sent"), base=False))
    worker.export(root / "final")
    batch = make_batch(3, "main", groups_of_adapters(3, ADAPTERS))
    trainer = AdapterTrainer(Direct(worker), ADAPTERS)
    columns = asyncio.run(trainer.score(batch, frozenset({"policy", "reference"})))
    errors = asyncio.run(trainer.verify(estimated(batch, columns, worker.plugins, worker.train)))
    return {"published": [len(update.tensors), [*update.adapters]], "verified": errors}


def one_rank(rank, root):
    """What two saved, read by one."""
    return Ranks(root, "dense", {}, rank, 1, lora_adapters=ADAPTERS, **LORA).restore(root / "saved")


def keys_of(path):
    """Names of all tensors of a checkpoint."""
    from slime_megatron.convert.dist import DistFolder

    return list(DistFolder.open(path, trusted=True).tensors)


if __name__ == "__main__":
    answer(two_ranks, one_rank)

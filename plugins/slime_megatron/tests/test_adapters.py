"""An adapter over a frozen base: saved alone, resumed at any layout, the same steps as with FSDP, sent and exported."""

import json

import pytest
import torch
from megatron_ranks import PIPELINE, TENSOR, Ranks, answer, config_of, copies, equal, mixture, run_ranks
from safetensors.torch import load_file
from splits import with_roles
from trainer_bench import batch_of

from slime_core.errors import TrainerError
from slime_core.testing import tiny_model
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lr": 1e-2}
EP = {"expert_model_parallel_size": 2}
SPLIT = {"tp": ("dense", TENSOR), "ep": ("moe", TENSOR | EP | {"expert_tensor_parallel_size": 1})}
INTERLEAVED = PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1}
STAGES = {"lora_use_dora": True, "lora_use_rslora": True, "lora_target_modules": ["q_proj", "down_proj"]}
KINDS = {"dropout": {"lora_dropout": 0.3, "lora_sync": "adapter"}, "dora": {"lora_use_dora": True}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dense model whose output matrix is tied, and a mixture of experts."""
    folder = tmp_path_factory.mktemp("root")
    tiny_model(folder / "dense", tied=True)
    tiny_model(folder / "deep", tied=True, layers=4)
    mixture(folder / "moe", dense=())
    return folder


@pytest.fixture(scope="module")
def pair(root, zygote, tmp_path_factory):
    """What both ranks found."""
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), two_ranks, 2, root)


@pytest.fixture(scope="module")
def alone(pair, root, zygote, tmp_path_factory):
    """What one rank found, after both."""
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), one_rank, 1, root)[0]


@pytest.mark.parametrize("name", SPLIT)
def test_a_checkpoint_holds_the_adapter_alone_and_the_run_goes_on_from_it_bit_by_bit(pair, name):
    for found in pair:
        one = found[name]
        assert one["restored"] == one["first"] != one["begin"]
        assert one["second again"] == one["second"] != one["first"]
        assert one["base"]
    weights = [key for key in pair[0][name]["keys"] if not key.startswith("optimizer.")]
    assert weights
    assert pair[0][name]["stored sums"] == pair[0][name]["base sums"]
    assert all(key.startswith("adapters.default.model.layers.") for key in weights)


@pytest.mark.parametrize("name", SPLIT)
def test_one_rank_reads_what_two_saved_and_fsdp_begins_and_steps_alike(pair, alone, root, name):
    one, other = pair[0][name], alone[name]
    assert other["restored"] == one["first"]
    assert other["begin"] == one["begin"] == of_fsdp(root / SPLIT[name][0], {})[0]
    assert other["base sums"] == one["base sums"]


@pytest.mark.parametrize("name", SPLIT)
def test_a_run_starts_from_an_exported_adapter_and_saves_none_of_another_base(pair, name):
    for found in pair:
        assert found[name]["loaded"] == found[name]["second"]
        assert found[name]["refused"] == "TRN116"


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_dora_step_as_with_fsdp(pair, root, kind):
    _, losses, norms = of_fsdp(root / "dense", KINDS[kind])
    for found in pair:
        assert found[kind]["losses"] == pytest.approx(losses, rel=1e-5)
        assert found[kind]["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("name", SPLIT)
def test_engines_and_the_export_get_the_base_with_the_adapter_in_it(pair, name):
    found = pair[0][f"merged {name}"]
    assert found["wrong"] == []
    assert found["changed"] == found["adapted"] > 10
    assert found["exported"]
    assert found["plain"]


def test_an_engine_that_has_the_base_gets_the_adapter_alone(pair):
    found = pair[0]["published"]
    assert found["base"]
    assert found["alone"] == [0, ["default"], True]
    assert found["factors"]
    assert found["names"] == [f"model.layers.0.self_attn.q_proj.lora_{letter}.weight" for letter in "AB"]
    assert found["rank"] == LORA["lora_rank"]


@pytest.mark.parametrize("name", SPLIT)
def test_a_checkpoint_of_any_layout_converts_to_what_the_run_exports(pair, root, cli, tmp_path, name):
    saved, folder, final = root / f"second-{name}", root / SPLIT[name][0], root / f"final-{name}"
    flags = ("--origin-hf-dir", folder, "--trust-metadata", "--verify", "--json")
    for word, of_run, file in (
        ("dist-to-adapter", final / "adapter", "adapter_model.safetensors"),
        ("dist-to-hf", final, "model.safetensors"),
    ):
        done = cli("convert", word, saved, tmp_path / word, *flags)
        assert done.code == 0, done.err
        tensors, expected = load_file(tmp_path / word / file), load_file(of_run / file)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], one) for key, one in expected.items())
    config = "adapter_config.json"
    assert (tmp_path / "dist-to-adapter" / config).read_text() == (final / "adapter" / config).read_text()


@pytest.mark.parametrize(("saved", "model"), [("second-tp", "dense"), ("second-ep", "moe"), ("stages", "deep")])
def test_peft_computes_the_trainers_logits_with_a_converted_adapter(pair, root, cli, tmp_path, saved, model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    flags = ("--origin-hf-dir", root / model, "--trust-metadata")
    assert cli("convert", "dist-to-adapter", root / saved, tmp_path / "adapter", *flags).code == 0
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(root / model), tmp_path / "adapter")
    base, batch = AutoModelForCausalLM.from_pretrained(root / model), batch_of()
    expected, of_base = (log_probs_and_entropy(one, batch) for one in (policy, base))
    for found in pair:
        scores = torch.tensor(found[saved]["scores"])
        torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)
        assert (scores - of_base).abs().max() > 1e-2


@torch.no_grad()
def log_probs_and_entropy(model, batch):
    """Of every token of the responses, [2, R], by a model of transformers."""
    columns = []
    for n in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[batch.offsets[n] : batch.offsets[n + 1]]).long()
        log_probs = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
        chosen = log_probs.gather(1, tokens[1:, None])[:, 0]
        both = torch.stack((chosen, -(log_probs.exp() * log_probs).sum(-1)))
        columns.append(both[:, -batch.response_lengths[n] :])
    return torch.cat(columns, 1).float()


def scores(worker):
    """Log-prob and entropy of every token of the responses, [2, R]."""
    policy = worker.score(batch_of(), frozenset({"policy"}))["policy"]
    return [policy[name].tolist() for name in ("log_probs", "entropy")]


def of_fsdp(folder, kind):
    """The other backend's checksum at the start, and losses and norms of two steps."""
    from slime_core.plugins import load_plugins
    from slime_core.trainers.fsdp.worker import FsdpWorker

    config = config_of(folder, **LORA | kind)
    worker = FsdpWorker(config, load_plugins(config), ModelFolder.open(folder), 0, 1, "cpu", None)
    worker.begin(config)
    begin = worker.fingerprint()
    return begin, *stepped(worker)


def stepped(worker):
    """Losses and norms of two steps."""
    batch = with_roles(batch_of(groups=2, rollouts=3))
    metrics = [worker.step(batch) for _ in range(2)]
    return [one["loss"] for one in metrics], [one["grad_norm"] for one in metrics]


def base(worker):
    """This rank's shards of the base."""
    return copies(local.tensor for local in worker.policy.tensors.by_name.values())


def two_ranks(rank, root):
    """Both layouts saved and resumed; steps with dropout and with DoRA."""
    found = {}
    for name, (model, flags) in SPLIT.items():
        ranks = Ranks(root, model, flags, rank, 2, **LORA)
        worker = ranks.worker
        one, before, sums = {"begin": worker.fingerprint()}, base(worker), worker.base_sums()
        one["first"] = ranks.step()
        ranks.save(root / f"saved-{name}")
        one["second"] = ranks.step()
        again = Ranks(root, model, flags, rank, 2, **LORA)
        one |= {"restored": again.restore(root / f"saved-{name}"), "second again": again.step(), "base sums": sums}
        one["base"] = equal(before, base(worker)) and worker.base_sums() == sums
        if rank == 0:
            one["keys"] = keys_of(root / f"saved-{name}")
            one["stored sums"] = json.loads((root / f"saved-{name}" / "base.json").read_text())
        found[name] = one
        loads = LORA | {"lora_load": str(root / f"final-{name}" / "adapter")}
        found |= gathered(again.worker, root / model, root / f"final-{name}", name)
        again.save(root / f"second-{name}")
        found[f"second-{name}"] = {"scores": scores(again.worker)}
        one["loaded"] = Ranks(root, model, flags, rank, 2, **loads).worker.fingerprint()
        one["refused"] = refusal(worker, root / "changed")
    stages = Ranks(root, "deep", INTERLEAVED, rank, 2, **LORA | STAGES)
    stepped(stages.worker)
    stages.save(root / "stages")
    found["stages"] = {"scores": scores(stages.worker)}
    for kind, train in KINDS.items():
        worker = Ranks(root, "dense", TENSOR, rank, 2, **LORA | train).worker
        losses, norms = stepped(worker)
        found[kind] = {"losses": losses, "norms": norms}
        if kind == "dropout":
            found |= published(worker, root / "dense")
    return found


def one_rank(rank, root):
    """What two saved, read by one."""
    found = {}
    for name, (model, _) in SPLIT.items():
        ranks = Ranks(root, model, {}, rank, 1, **LORA)
        found[name] = {"begin": ranks.worker.fingerprint(), "base sums": ranks.worker.base_sums()}
        found[name]["restored"] = ranks.restore(root / f"saved-{name}")
    return found


def refusal(worker, path):
    """The code of the error of a checkpoint after the base has changed on this rank."""
    tensor = next(iter(worker.policy.tensors.by_name.values())).tensor
    worker.base.checked = False
    with torch.no_grad():
        tensor[0] += 1
    try:
        worker.save(path)
    except TrainerError as error:
        return error.code
    finally:
        with torch.no_grad():
            tensor[0] -= 1


def gathered(worker, folder, final, name):
    """What engines get and what is exported, beside the folder's weights with whole factors in them."""
    whole, factors, before = worker.whole(), worker.policy.adapter.factors(), ModelFolder.open(folder).tensors()
    worker.export(final)
    with worker.unmerged():
        plain = worker.whole()
    if worker.rank:
        return {}
    deltas = {}
    for weight, one in factors.items():
        delta = worker.policy.adapter.spec.scaling * one.b.double() @ one.a.double()
        if delta.ndim == 2:
            deltas[weight] = delta
            continue
        module, _, leaf = weight.rpartition(".")
        leaves = ("down",) if leaf == "down_proj" else ("gate", "up")
        for number, of_expert in enumerate(delta):
            for which, rows in zip(leaves, of_expert.chunk(len(leaves)), strict=True):
                deltas[f"{module}.{number}.{which}_proj.weight"] = rows
    expected = {key: before[key] + deltas.get(key, 0) for key in whole}
    exported = load_file(final / "model.safetensors")
    return {
        f"merged {name}": {
            "wrong": [
                key for key, one in whole.items() if not torch.allclose(one.double(), expected[key].double(), 0, 1e-6)
            ],
            "changed": sum(not torch.equal(one, before[key]) for key, one in whole.items()),
            "adapted": len(deltas),
            "exported": all(torch.equal(whole[key], one) for key, one in exported.items()),
            "plain": all(torch.equal(one, before[key]) for key, one in plain.items()),
        }
    }


def published(worker, folder):
    """What an engine gets that computes with the adapter beside the base: both, and later the adapter alone."""
    from slime_core.types import WeightRoute

    both = worker.publish(1)
    alone = worker.publish(2, WeightRoute(transport="tensors", dtype="float32", base=False))
    if worker.rank:
        return {}
    before, tensors = ModelFolder.open(folder).tensors(), both.adapters["default"].tensors
    return {
        "published": {
            "base": all(torch.equal(one, before[key]) for key, one in both.tensors.items()) and len(both.tensors) > 20,
            "alone": [len(alone.tensors), [*alone.adapters], sorted(alone.fingerprints) == sorted(both.fingerprints)],
            "factors": all(torch.equal(one, alone.adapters["default"].tensors[key]) for key, one in tensors.items()),
            "names": [key for key in tensors if "layers.0.self_attn.q_proj" in key],
            "rank": both.adapters["default"].config["r"],
        }
    }


def keys_of(path):
    """Names of all tensors of a checkpoint."""
    from slime_megatron.convert.dist import DistFolder

    return list(DistFolder.open(path, trusted=True).tensors)


if __name__ == "__main__":
    answer(two_ranks, one_rank)

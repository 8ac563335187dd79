"""The layer that predicts further ahead against transformers' own layer, by every form of parallelism."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron_ranks import answer, config_of, make_worker, micro_batch, mimo, run_ranks, trainer_bench
from safetensors.torch import load_file, save_file
from test_families import COMMON, FAMILIES, GRADIENTS, TENSOR, VALUES, Folder, loss, relative

from slime_convert.folder_writing import How
from slime_core.types import MicroBatch

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-families")]

LAYERS, WEIGHT = 4, 0.3
NAMES = ("mimo", "glm4_moe", "glm4_moe_lite", "deepseek_v3")
LAYOUTS = {  # ranks, flags, families
    "one": (1, {}, NAMES),
    "tensor": (2, TENSOR, NAMES),
    "tensor, whole sequences": (2, TENSOR | {"sequence_parallel": False}, ("mimo",)),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}, ("mimo", "glm4_moe_lite")),
    "interleaved": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, ("mimo",)),
    "context": (2, {"context_parallel_size": 2, "use_distributed_optimizer": False}, ("mimo", "deepseek_v3")),
    "expert": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}, ("glm4_moe",)),
}
RARE = ("one", "pipeline")
"""Layouts whose parts other layouts prove one by one."""
OWN = {  # tensors beside those of a decoder layer
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


def packs():
    """Sequences end to end; and three of a shared prompt of 4 tokens, with 3, 5 and 1 of their own, all responses."""
    plain = micro_batch([7, 12, 2], [3, 6, 1], seed=1)
    shared = micro_batch([4, 3, 5, 1], [0, 3, 5, 1], seed=2)
    predict = np.array([3, 4, 5, 3, 7, 8, 9, 10, 3])
    positions = np.concatenate([np.arange(4), *(np.arange(4, 4 + n) for n in (3, 5, 1))])
    shared = replace(shared, prefix=np.array([-1, 0, 0, 0], np.int32), predict=predict, position_ids=positions)
    return [
        replace(micro, columns=micro.columns | {"sample": np.repeat(np.arange(3), counts)})
        for micro, counts in ((plain, [3, 6, 1]), (shared, [3, 5, 1]))
    ]


def sequences(micro: MicroBatch):
    """Tokens of each whole sequence, and how many of its last are responses, in the order of the response rows."""
    parts = np.split(micro.tokens, micro.cu_seqlens[1:-1])
    prefixes = micro.prefix.tolist()
    counts = np.bincount(micro.columns["sample"])
    rows = [
        np.concatenate([parts[head], part]) if head >= 0 else part
        for number, (head, part) in enumerate(zip(prefixes, parts, strict=True))
        if number not in prefixes
    ]
    return list(zip(map(torch.from_numpy, rows), counts.tolist(), strict=True))


def draw(name, root):
    """Save a model with such a layer, the gradients of a step of it, and the step's losses."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import create_causal_mask

    from slime_core.weights.native_configs import native_config

    torch.manual_seed(7)
    values = {**COMMON, **FAMILIES[name], "num_hidden_layers": LAYERS + 1}
    config = native_config(values) or AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    hidden = config.hidden_size
    own = [torch.randn(hidden), torch.randn(hidden), torch.randn(hidden, 2 * hidden) * 0.3, torch.randn(hidden)]
    own = [tensor.requires_grad_() for tensor in own]
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim == 1 and "inv_freq" not in key:  # norms, biases: away from 1 and 0
                tensor.add_(torch.randn_like(tensor) * 0.1)
    prefix = "model.mtp_layers.0." if name == "mimo" else f"model.layers.{LAYERS}."
    modules = OWN.get(name, OWN["deepseek_v3"])

    def save(folder, beside):
        model.config.num_hidden_layers = LAYERS + 1
        model.save_pretrained(folder)
        file = folder / "model.safetensors"
        stored = {k.replace(f"model.layers.{LAYERS}.", prefix): tensor for k, tensor in load_file(file).items()}
        stored |= {f"{prefix}{key}.weight": tensor.detach() for key, tensor in zip(modules, beside, strict=True)}
        save_file(stored, file, metadata={"format": "pt"})
        written = json.loads((folder / "config.json").read_text())
        changes = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, "model_type": values["model_type"]}
        changes |= {key: written[key][:LAYERS] for key in ("layer_types", "mlp_layer_types") if key in written}
        (folder / "config.json").write_text(json.dumps(written | changes))
        model.config.num_hidden_layers = LAYERS

    save(root / name / "model", own)
    block, epsilon = model.model.layers[LAYERS], config.rms_norm_eps
    enorm, hnorm, projection, norm = own

    def normed(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight

    def predicted(tokens):
        """Log-probs of the token two behind each position but the last two."""
        with torch.no_grad():
            states = model.model(input_ids=tokens[None]).last_hidden_state
            vectors = model.model.embed_tokens(torch.cat([tokens[1:], tokens[:1]]))[None]
        halves = [normed(vectors, enorm), normed(states, hnorm)]
        x = torch.cat(halves[::-1] if name == "mimo" else halves, dim=-1) @ projection.T
        at = torch.arange(len(tokens))[None]
        mask = create_causal_mask(
            config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=at
        )
        angles = model.model.rotary_emb(x, position_ids=at)
        x = block(x, attention_mask=mask, position_ids=at, position_embeddings=angles)
        x = normed(x[0] if isinstance(x, tuple) else x, norm)
        logs = (x[0] @ model.lm_head.weight.detach().T).log_softmax(-1)
        return logs[:-2].gather(1, tokens[2:, None])[:, 0]

    total, further = torch.zeros(()), torch.zeros(())
    for micro in packs():
        rows, ahead, weights = [], [], torch.from_numpy(micro.weight)
        for tokens, count in sequences(micro):
            logs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
            rows.append(logs[-count - 1 : -1])
            log_probs_ahead = torch.zeros(len(tokens)).index_add(0, torch.arange(2, len(tokens)), predicted(tokens))
            ahead.append(log_probs_ahead[-count:])
        logs = torch.cat(rows)
        log_probs = logs.gather(1, torch.from_numpy(micro.target)[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        values_of, _ = loss(log_probs, entropy, {"scale": torch.from_numpy(micro.columns["scale"])}, None)
        total = total + (values_of * weights).sum()
        further = further - (torch.cat(ahead) * weights).sum()
    (total + WEIGHT * further).backward()
    torch.save({"loss": total.detach(), "mtp_loss": further.detach()}, root / name / "expected.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    save(root / name / "gradients", [tensor.grad for tensor in own])


def check(rank, root, world, flags, names):
    """The worst relative errors of a layout, a table a family."""
    from slime_core.trainers.process_group import join_group
    from slime_megatron.layout import Layout
    from slime_megatron.state import start

    join_group(rank, world, "cpu", root / "rendezvous")
    start(Layout.of(flags, world), 0)
    return {name: errors(root / name, world, flags) for name in names}


def errors(root, world, flags):
    """One family on this rank."""
    from megatron.core import parallel_state

    from slime_convert.bridge import join, shard
    from slime_core.config.load import load_config
    from slime_core.protocols import Loss
    from slime_core.trainers.optimizer_step import LossSums
    from slime_megatron.learner import MegatronLearner
    from slime_megatron.model import build_model
    from slime_megatron.passes import totals
    from slime_megatron.settings import build, settings
    from slime_models.families import BRIDGES

    folder = Folder(root / "model")
    bridge = BRIDGES[folder.config.model_type]
    train = load_config(None, ["--dtype", "float32"]).train
    table = {**flags, "enable_mtp_training": True, "mtp_loss_scaling_factor": WEIGHT, "mtp_num_layers": 1}
    chosen = settings(bridge, folder.config, table, train, world, "cpu")
    model = build_model(chosen, bridge, folder, torch.device("cpu"))
    learner = MegatronLearner(model.stage)
    learner.wrap(build(chosen))
    model.learn(learner.wrapped)
    model.passes.chunk = 4
    number = parallel_state.get_data_parallel_rank()
    micros = packs() if chosen.layout.dp == 1 else [packs()[number]]
    learner.zero_grad()
    sums = LossSums(None, torch.device("cpu"))
    model.passes.backward(micros, Loss(name="test", fn=loss), train, sums)
    wanted, numbers = torch.load(root / "expected.pt"), totals(sums)[0]
    errors = {name: relative(torch.tensor(numbers[name]), wanted[name]) for name in ("loss", "mtp_loss")}
    gradients, worst = Folder(root / "gradients").tensors(), {"model": 0.0, "ahead": 0.0}
    for key, local in model.tensors.by_name.items():
        if key.endswith("expert_bias"):
            continue
        gradient = join(local.entry, [gradients[name] for name in local.entry.hf], chosen.sizes)
        error = relative(local.tensor.main_grad, shard(local.entry, gradient, local.group.rank(), local.group.size()))
        kind = "ahead" if key.startswith("mtp.") else "model"
        worst[kind] = max(worst[kind], error)
    stored, sent = folder.tensors(), []
    for source in model.tensors.sources():
        whole = source.gather()
        if rank_is_first():
            assert all(torch.equal(part.cut(whole), stored[part.name]) for part in source.parts)
            sent += [part.name for part in source.parts]
    return {**errors, **worst, "sent": not rank_is_first() or sorted(sent) == sorted(stored)}


def learn(rank, root, megatron):
    """A worker that trains the layer and one that does not, side by side: what they share and what they give."""
    from slime_core.engines.local.twin import Twin
    from slime_core.types import WeightUpdate
    from slime_megatron.convert.conversion import dist_to_hf

    batch = trainer_bench.batch_of()
    columns = batch.columns["rollout_log_probs"]
    batch = replace(batch, columns=batch.columns | {"old_policy": columns, "reference": columns - 0.1})
    workers = []
    for name, more in (("with", megatron), ("without", {})):
        config = config_of(root / "mimo", more, clip_grad=0.0, kl_loss_coef=0.05, ref_load=str(root / "mimo"))
        workers.append(make_worker(config, rank, 1, root / name))
        workers[-1].begin(config)
    ahead, plain = workers
    losses = [(ahead.step(batch)["mtp_loss"], plain.step(batch))[0] for _ in range(6)]
    weights, others = ahead.whole(), plain.whole()
    twin = Twin(ahead.folder.config, torch.float32, "cpu", False)
    twin.load(WeightUpdate(version=1, epoch=0, transport="tensors", tensors=weights))
    path, final = root / "state", root / "final"
    path.mkdir()
    ahead.save(path)
    ahead.staging.writing.result()
    before = ahead.fingerprint()
    ahead.step(batch)
    ahead.restore(path)
    ahead.export(final)
    dist_to_hf(path, root / "converted", root / "mimo", lambda _: ahead.bridge, How(verify=True), trusted=True)
    stored, exported, converted = (
        load_file(root / name / "model.safetensors") for name in ("mimo", "final", "converted")
    )
    return {
        "losses": losses,
        "policy_is_the_same": all(torch.equal(tensor, weights[name]) for name, tensor in others.items()),
        "trained": sorted(name for name in weights if not torch.equal(weights[name], stored[name])),
        "restored": ahead.fingerprint() == before,
        "exported": all(torch.equal(exported[name], weights[name]) for name in stored),
        "converted": exported.keys() == converted.keys()
        and all(torch.equal(exported[n], converted[n]) for n in stored),
    }


def test_a_run_with_it_trains_the_policy_as_without_and_keeps_sends_and_converts_it(zygote, tmp_path):
    stored = load_file(mimo(tmp_path / "mimo") / "model.safetensors")
    megatron = {"enable_mtp_training": True, "mtp_loss_scaling_factor": 0.5}
    (found,) = run_ranks(zygote, tmp_path, learn, 1, tmp_path, megatron)
    losses = found.pop("losses")
    assert losses[-1] < losses[0] * 0.99
    assert found.pop("trained") == sorted(stored)
    assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize(
    ("family", "changes", "flags", "reason"),
    [
        ("qwen3", {}, {}, "the bridge of qwen3 has no rows for such a layer"),
        ("qwen2", {"num_nextn_predict_layers": 0}, {}, "num_nextn_predict_layers = 0"),
        ("qwen2", {}, {"mtp_loss_scaling_factor": 0.0}, "--mtp-loss-scaling-factor is 0"),
        ("qwen2", {}, {"mtp_num_layers": 2}, "num_nextn_predict_layers = 1"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_reason(family, changes, flags, reason):
    from slime_core.config.load import load_config
    from slime_core.errors import ConfigError
    from slime_megatron.settings import settings
    from slime_models.families import BRIDGES

    config = SimpleNamespace(
        **COMMON | {"model_type": family, "hidden_act": "silu", "num_nextn_predict_layers": 1} | changes
    )
    config.rms_norm_eps = 1e-6
    train = load_config(None, ["--dtype", "float32"]).train
    with pytest.raises(ConfigError) as error:
        settings(BRIDGES[family], config, {"enable_mtp_training": True, **flags}, train, 1, "cpu")
    assert error.value.code == "CFG04"
    assert reason in error.value.why


def rank_is_first():
    """Whether this rank gets whole tensors."""
    return torch.distributed.get_rank() == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What transformers makes of every family."""
    root = tmp_path_factory.mktemp("prediction")
    for name in NAMES:
        draw(name, root)
    return root


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in LAYOUTS]
)
def test_its_loss_and_gradients_are_those_of_transformers_and_the_model_has_only_its_own(
    models, zygote, tmp_path, layout
):
    world, flags, names = LAYOUTS[layout]
    (models / "rendezvous").unlink(missing_ok=True)
    found = run_ranks(zygote, tmp_path, check, world, models, world, flags, names)
    for rank, families in enumerate(found):
        assert set(families) == set(names)
        for name, numbers in families.items():
            where = f"{name}, rank {rank}: {numbers}"
            assert max(numbers["loss"], numbers["mtp_loss"]) < VALUES, where
            assert max(numbers["model"], numbers["ahead"]) < GRADIENTS, where
            assert numbers["sent"], where


if __name__ == "__main__":
    answer(check, learn)

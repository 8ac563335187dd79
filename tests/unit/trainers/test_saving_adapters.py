"""Checkpoints of adapters alone, the checksums of their base, adapters to start from, and what a run ends with."""

import asyncio
import json

import numpy as np
import pytest
import torch
import trainer_bench as made
from forked_channel import start_forked
from safetensors.torch import load_file, save_file

from slime_convert.adapter_to_hf import adapter_to_hf
from slime_convert.folder_writing import How
from slime_convert.fsdp_to_hf import fsdp_to_adapter, fsdp_to_hf
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.sections.cluster import ClusterSection
from slime_core.errors import ConfigError, DataError, TrainerError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.families import family_model
from slime_core.trainers import base_checksums
from slime_core.trainers.fsdp import state_files as files

pytestmark = pytest.mark.unit

LORA = {"lora_rank": 3, "kl_loss_coef": 0.05}
QUERY = "model.layers.0.self_attn.q_proj"


def batch_of(one):
    batch = made.batch_of()
    batch.columns["reference"] = one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"]
    return batch


def after_a_step(bench, **train):
    one = bench(**LORA | train)
    one.call("step", batch_of(one))
    return one


def files_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("settings", [{}, {"lora_use_dora": True}, {"lora_use_rslora": True}], ids=str)
def test_a_checkpoint_has_adapters_and_moments_alone_and_goes_on_to_the_same_bits(bench, tmp_path, settings):
    one = after_a_step(bench, **settings)
    one.call("save", tmp_path / "state")
    adapters, moments = (load_file(tmp_path / "state" / f"{kind}.safetensors") for kind in files.kinds_of("default"))
    assert files_in(tmp_path / "state") == {
        *("adapter.default.safetensors", "adapter.default.moments.safetensors"),
        *("base.json", "generators.json", "trainer.json"),
    }
    assert adapters.keys() == one.parameters().keys()
    assert all(".lora_" in name for name in (*adapters, *moments))
    assert len(moments) == 2 * len(adapters)
    state = json.loads((tmp_path / "state" / "trainer.json").read_text())
    assert (state["adapters"], state["reference"], state["lora"]["r"]) == ({"default": 1}, False, 3)
    other = bench(**LORA | settings)
    other.call("restore", tmp_path / "state")
    assert other.call("fingerprint") == one.call("fingerprint")
    batch = batch_of(one)
    assert other.call("step", batch) == one.call("step", batch)
    for name, tensor in one.parameters().items():
        assert torch.equal(tensor, other.parameters()[name]), name


def test_a_base_that_changes_is_named_at_the_next_checkpoint(bench, tmp_path):
    one = after_a_step(bench)
    one.call("save", tmp_path / "good")
    with torch.no_grad():
        one.worker.policy.base()[f"{QUERY}.weight"].view(-1)[77] += 1e-6
    one.call("step", batch_of(one))
    with pytest.raises(TrainerError, match=f"1 of 25 tensors.*{QUERY}.weight") as raised:
        one.call("save", tmp_path / "bad")
    assert raised.value.code == "TRN116"
    assert not (tmp_path / "bad").exists()


def test_a_save_right_after_the_start_and_one_of_an_offloaded_trainer_have_the_sums(bench, tmp_path, monkeypatch):
    one = bench(**LORA)
    with monkeypatch.context() as patch:
        patch.setattr(one.worker, "base_sums", None)  # taken at the start
        one.call("save", tmp_path / "start")
    one.call("step", batch_of(one))
    for parameter in one.worker.policy.parameters():
        parameter.data = parameter.data.clone()  # a storage of its own, which can be emptied
    one.thread.call(one.worker.offload.to_host, {"parameters"})
    one.call("save", tmp_path / "state")
    assert one.worker.offload.on_host == {"parameters"}
    assert (tmp_path / "state" / "base.json").read_bytes() == (tmp_path / "start" / "base.json").read_bytes()


@pytest.mark.parametrize(
    ("key", "was", "now"), [("dtype", "bfloat16", "float32"), ("base_weights", "nf4", "auto")], ids=["dtype", "bits"]
)
def test_a_base_in_another_form_says_which_it_was(bench, tmp_path, key, was, now):
    one = after_a_step(bench, **{key: was})
    one.call("save", tmp_path / "state")
    with pytest.raises(TrainerError, match="tensors of the base model") as raised:
        bench(**LORA).call("restore", tmp_path / "state")
    assert raised.value.fix == f"--{key.replace('_', '-')} {was}"
    assert raised.value.why.startswith(f"{key} was {was} and is {now}; ")


def test_a_resume_with_another_base_is_refused_with_the_tensor_that_differs(bench, tmp_path):
    one = after_a_step(bench)
    one.call("save", tmp_path / "state")
    file = one.folder.path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][5] += 1
    save_file(tensors, file, {"format": "pt"})
    other = bench(**LORA)
    with pytest.raises(TrainerError, match=r"model\.norm\.weight") as raised:
        other.call("restore", tmp_path / "state")
    assert (raised.value.code, raised.value.where) == ("TRN116", str(one.folder.path))


def test_router_biases_that_an_older_run_had_in_bfloat16_are_those_of_its_base(bench, tmp_path):
    folder = family_model(tmp_path / "model", "minimax-m2")
    tensors = load_file(folder / "model.safetensors")
    biases = {name: torch.linspace(0.1, 0.4, len(one)) for name, one in tensors.items() if name.endswith("_bias")}
    assert len(biases) == 2
    save_file(tensors | biases, folder / "model.safetensors", {"format": "pt"})
    one = bench(folder=folder, **LORA, dtype="bfloat16")
    one.call("save", tmp_path / "state")
    sums = json.loads((tmp_path / "state" / "base.json").read_text())
    older = {name.replace("block_sparse_moe", "mlp"): (bias.bfloat16(), 0) for name, bias in biases.items()}
    assert older.keys() <= sums.keys()
    rounded = base_checksums.sums_of(older, 1)
    (tmp_path / "state" / "base.json").write_text(json.dumps(sums | rounded))
    one.call("restore", tmp_path / "state")
    fsdp_to_hf(tmp_path / "state", tmp_path / "merged", folder, How())
    other = {name: [a, b + 1] for name, (a, b) in rounded.items()}
    (tmp_path / "state" / "base.json").write_text(json.dumps(sums | other))
    with pytest.raises(TrainerError, match="2 of 27 tensors of the base model"):
        one.call("restore", tmp_path / "state")


def test_full_training_and_adapters_do_not_resume_each_other(bench, tmp_path):
    full, lora = bench(), after_a_step(bench)
    full.call("save", tmp_path / "full")
    lora.call("save", tmp_path / "lora")
    for one, folder, fix in ((full, "lora", "--lora-rank 3"), (lora, "full", "--lora-rank 0")):
        before = one.call("fingerprint")
        with pytest.raises(TrainerError, match="the run trains") as raised:
            one.call("restore", tmp_path / folder)
        assert raised.value.code == "TRN108"
        assert raised.value.fix.startswith(fix)
        assert one.call("fingerprint") == before


def test_an_adapter_that_a_checkpoint_does_not_have_is_not_converted(bench, tmp_path):
    full, lora = bench(), after_a_step(bench)
    full.call("save", tmp_path / "full")
    lora.call("save", tmp_path / "lora")
    for place, words in (("full", "of full training"), ("lora", "no adapter 'solver'")):
        for convert in (fsdp_to_hf, fsdp_to_adapter):
            with pytest.raises(ConfigError, match=words) as raised:
                convert(tmp_path / place, tmp_path / "out", lora.folder.path, How(), "solver")
            assert raised.value.code == "CFG05"
    with pytest.raises(ConfigError, match="of full training"):
        fsdp_to_hf(tmp_path / "full", tmp_path / "out", lora.folder.path, How(), form="nf4")


def test_sums_of_a_base_do_not_depend_on_how_it_is_stored_or_cut(monkeypatch):
    weights = {name: torch.randn(9, 6).bfloat16() for name in "ab"}
    whole = base_checksums.sums_of({name: (tensor.float(), 0) for name, tensor in weights.items()}, 1)
    monkeypatch.setattr(base_checksums, "CHUNK", 13)
    assert base_checksums.sums_of({name: (tensor, 0) for name, tensor in weights.items()}, 1) == whole
    parts = [base_checksums.sums_of({"a": (weights["a"][i : i + 3], 6 * i)}, 1)["a"] for i in (0, 3, 6)]
    modulus = 2**64
    assert [sum(column) % modulus for column in zip(*parts)] == [value % modulus for value in whole["a"]]


@pytest.mark.nightly  # two processes import torch
@pytest.mark.integration
def test_ranks_save_their_shards_of_adapters_and_one_rank_goes_on_from_them(bench, tmp_path):
    """1 -> 2 -> 1, to the last bit; sums of the base are the same on any number of ranks."""
    folder = tiny_model(tmp_path / "model", tied=True)
    one = bench(folder=folder, **LORA)
    batch = batch_of(one)
    one.call("step", batch)
    one.call("save", tmp_path / "one")

    async def two():
        config = made.config_of(folder, **LORA)
        config = config.model_copy(update={"cluster": ClusterSection(device="cpu", cpu_threads=1)})
        async with RankTrainer(
            config, load_plugins(config), world=2, run_dir=tmp_path / "run", start=start_forked
        ) as trainer:
            await trainer.begin(config)
            await trainer.restore(tmp_path / "one")
            assert await trainer.fingerprint() == one.call("fingerprint")
            await trainer.save(tmp_path / "two")
            await trainer.saved()
            await trainer.export(tmp_path / "final")

    asyncio.run(two())
    assert files_in(tmp_path / "two") == {
        *(f"{kind}-{rank}-of-2.safetensors" for kind in files.kinds_of("default") for rank in (1, 2)),
        *("generators-1-of-2.json", "generators-2-of-2.json", "base.json", "trainer.json"),
    }
    assert (tmp_path / "two" / "base.json").read_bytes() == (tmp_path / "one" / "base.json").read_bytes()
    for kind in files.kinds_of("default"):
        want = load_file(tmp_path / "one" / f"{kind}.safetensors")
        both = files.tensors_of(tmp_path / "two", kind)
        assert both.keys() == want.keys()
        assert all(torch.equal(t.read([0] * len(t.shape), t.shape), want[name]) for name, t in both.items())
    again = bench(folder=folder, **LORA)
    again.call("restore", tmp_path / "two")
    assert again.call("step", batch) == one.call("step", batch)
    assert again.call("fingerprint") == one.call("fingerprint")
    one.call("restore", tmp_path / "one")
    one.call("export", tmp_path / "alone")
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        two_ranks, alone = (load_file(tmp_path / place / name) for place in ("final", "alone"))
        assert all(torch.equal(tensor, two_ranks[key]) for key, tensor in alone.items()), name


@pytest.mark.filterwarnings("ignore")  # of what peft imports
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_final_has_the_merged_model_and_the_adapter_that_peft_and_a_run_start_from(bench, tmp_path, family):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = None if family == "qwen3" else family_model(tmp_path / family, family)
    one = after_a_step(bench, folder=folder, lr=0.1)
    one.call("export", tmp_path / "final")
    adapter = tmp_path / "final" / "adapter"
    adapter_to_hf(adapter, tmp_path / "merged", None, How(dtype="float32", verify=True))
    exported, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "merged"))
    assert exported.keys() == merged.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in exported.items())
    base = load_file(one.folder.path / "model.safetensors")
    assert any(not torch.equal(tensor, base[name].float()) for name, tensor in exported.items())
    one.call("save", tmp_path / "state")
    fsdp_to_hf(tmp_path / "state", tmp_path / "saved", one.folder.path, How(dtype="float32", verify=True))
    fsdp_to_adapter(tmp_path / "state", tmp_path / "taken", one.folder.path, How(verify=True))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in saved.items())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "taken" / name).read_bytes() == (adapter / name).read_bytes(), name
    ids = torch.arange(3, 40)[None]
    reference = AutoModelForCausalLM.from_pretrained(one.folder.path, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(reference, str(adapter)).eval()(ids).logits
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()(ids).logits
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    other = bench(folder=one.folder.path, **LORA, lora_load=str(adapter))
    for name, tensor in one.parameters().items():
        assert torch.equal(tensor, other.parameters()[name]), name


@pytest.mark.parametrize(("what", "count"), [("merged", {"model.safetensors"}), ("adapter", {"adapter"})], ids=str)
def test_one_of_both_is_written_alone(bench, tmp_path, what, count):
    one = after_a_step(bench, lora_export=what)
    one.call("export", tmp_path / "final")
    assert files_in(tmp_path / "final") & {"model.safetensors", "adapter"} == count


def test_of_several_adapters_each_has_a_folder_and_none_is_the_model(bench, tmp_path):
    several = {"lora_adapters": ["one", "two"], "lora_sync": "adapter"}
    both = bench(**LORA | several)
    both.call("save", tmp_path / "state")
    both.call("export", tmp_path / "final")
    assert files_in(tmp_path / "final") == {"adapter"}
    assert files_in(tmp_path / "final" / "adapter") == {"one", "two"}
    for convert in (fsdp_to_hf, fsdp_to_adapter):
        with pytest.raises(ConfigError, match="the checkpoint has 2 adapters") as raised:
            convert(tmp_path / "state", tmp_path / "taken", both.folder.path, How())
        assert raised.value.fix == "--adapter one   or   --adapter two"
    fsdp_to_adapter(tmp_path / "state", tmp_path / "taken", both.folder.path, How(), "two")
    taken, final = (
        path / "adapter_model.safetensors" for path in (tmp_path / "taken", tmp_path / "final/adapter/two")
    )
    assert taken.read_bytes() == final.read_bytes()


def test_an_adapter_of_another_kind_or_of_other_targets_is_no_start(bench, tmp_path):
    one = after_a_step(bench, lora_target_modules=["q_proj", "v_proj"])
    one.call("export", tmp_path / "final")
    load = {"lora_load": str(tmp_path / "final" / "adapter"), "lora_target_modules": ["q_proj", "v_proj"]}
    with pytest.raises(ConfigError, match="its lora_rank is 3, the run's 8") as raised:
        bench(**LORA | load | {"lora_rank": 8, "lora_use_rslora": True})
    assert raised.value.fix == "--lora-rank 3 --lora-use-rslora false"
    with pytest.raises(DataError, match=r"4 of no target in the model: .*v_proj\.lora_A") as other:
        bench(**LORA | load | {"lora_target_modules": ["q_proj"]})
    assert '"q_proj", "v_proj"' in other.value.fix


def test_a_resumed_run_does_not_start_from_the_adapter_again(bench, tmp_path):
    one = after_a_step(bench)
    one.call("export", tmp_path / "final")
    load = {"lora_load": str(tmp_path / "final" / "adapter")}
    two = bench(**LORA | load)
    two.call("step", batch_of(two))
    two.call("save", tmp_path / "state")
    three = bench(**LORA | load)
    three.call("restore", tmp_path / "state")
    assert three.call("fingerprint") == two.call("fingerprint") != one.call("fingerprint")
    assert np.isfinite(three.call("step", batch_of(three))["loss"])

"""Modules with weights: loaded as transformers loads them, or drawn from a seed by name."""

import json
import shutil

import pytest
import torch
import transformers

from slime_core.errors import DataError
from slime_core.testing.families import family_config, family_model
from slime_core.testing.models import VOCAB, char_tokenizer, tiny_model
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit


@pytest.fixture
def tied_folder(pristine, tmp_path):
    return shutil.copytree(pristine[True], tmp_path / "tied")


@pytest.fixture
def edit_tensors():
    """Rewrite model.safetensors after a change of its tensors."""
    from safetensors.torch import load_file, save_file

    def edit(folder, change):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def refused(path, code):
    with pytest.raises(DataError) as caught:
        ModelFolder.open(path).build_model()
    assert caught.value.code == code, caught.value
    assert caught.value.where
    assert caught.value.fix
    return caught.value


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[3, 9, 14, 5, 1]])).logits


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_loaded_model_is_the_one_that_transformers_loads(tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / "m", family, hidden=16, layers=2, tied=tied)
    ours = ModelFolder.open(path).build_model()
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert not ours.training
    assert torch.equal(logits(ours), logits(theirs))
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


def test_shards_and_bfloat16_load_as_one_float32_file_does(folder, tmp_path):
    model = ModelFolder.open(folder).build_model()
    want = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.bfloat16().save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "sharded" / name).write_bytes((folder / name).read_bytes())
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    got = ModelFolder.open(tmp_path / "sharded").build_model("bfloat16").state_dict()
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
    assert all(torch.equal(got[name], want[name]) for name in want)
    wide = ModelFolder.open(tmp_path / "sharded").build_model("float32").state_dict()
    assert all(torch.equal(wide[name], want[name].float()) for name in want)


def test_buffers_of_a_bfloat16_model_keep_their_precision(folder):
    model = ModelFolder.open(folder).build_model("bfloat16")
    expected = 1.0 / (10_000.0 ** (torch.arange(0, 4, 2).float() / 4))
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.allclose(model.model.rotary_emb.inv_freq, expected)


def test_a_family_that_transformers_fuses_loads_through_it_and_is_checked(tmp_path, edit_tensors):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=len(VOCAB) + 3,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        eos_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(str(tmp_path))
    opened = ModelFolder.open(tmp_path)
    assert "model.layers.0.mlp.experts.2.gate_proj.weight" in opened.tensors(), "stored an expert at a time"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(opened.build_model()), logits(theirs))
    drawn = ModelFolder.open(tmp_path, init_weights="random")
    first, second = (dict(drawn.build_model(seed=3).named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.0.self_attn.q_proj.weight"))
    assert "1 missing: model.layers.0.self_attn.q_proj.weight" in refused(tmp_path, "TOK46").why


def test_missing_extra_and_misshaped_tensors_are_listed_together(folder, edit_tensors):
    def change(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(9)
        tensors["surprise.weight"] = torch.ones(2, 3)

    edit_tensors(folder, change)
    error = refused(folder, "TOK46")
    assert "1 missing, 1 extra, 1 mis-shaped" in error.what
    assert "1 missing: model.layers.0.mlp.up_proj.weight" in error.why
    assert "1 not in the model: surprise.weight" in error.why
    assert "model.norm.weight is [9] in the folder, [16] in the model" in error.why


def test_ten_names_are_shown_and_the_rest_counted(folder, edit_tensors):
    edit_tensors(folder, lambda t: t.update({f"extra.{i:02d}": torch.ones(1) for i in range(14)}))
    error = refused(folder, "TOK46")
    assert "14 not in the model: extra.00" in error.why
    assert "extra.09 and 4 more" in error.why
    assert "extra.10" not in error.why


def test_a_config_of_another_size_is_found_before_anything_loads(folder, edit_json):
    edit_json(folder / "config.json", hidden_size=32)
    with pytest.raises(DataError) as caught:
        ModelFolder.open(folder)
    assert caught.value.code == "TOK46"
    assert "[82, 16] in the folder, [82, 32] in the model" in caught.value.why


def test_tied_weights_may_be_stored_under_either_name(tied_folder, edit_tensors):
    want = ModelFolder.open(tied_folder).build_model()
    edit_tensors(tied_folder, lambda t: t.update({HEAD: t.pop(EMBED)}))
    assert torch.equal(logits(ModelFolder.open(tied_folder).build_model()), logits(want))
    edit_tensors(tied_folder, lambda t: t.update({EMBED: t[HEAD].clone()}))
    assert torch.equal(logits(ModelFolder.open(tied_folder).build_model()), logits(want))


def test_tied_weights_that_are_stored_twice_and_differ_are_refused(tied_folder, edit_tensors):
    edit_tensors(tied_folder, lambda t: t.update({HEAD: t[EMBED] + 1}))
    error = refused(tied_folder, "TOK49")
    assert EMBED in error.what
    assert HEAD in error.what
    assert '"tie_word_embeddings": false' in error.fix


def test_tied_weights_that_are_nowhere_are_refused(tied_folder, edit_tensors):
    edit_tensors(tied_folder, lambda t: t.pop(EMBED))
    assert "neither" in refused(tied_folder, "TOK49").what


def test_a_head_that_should_have_been_tied_is_refused_with_the_key(tied_folder, edit_json):
    edit_json(tied_folder / "config.json", tie_word_embeddings=False)
    error = refused(tied_folder, "TOK49")
    assert HEAD in error.what
    assert '"tie_word_embeddings": true' in error.fix


def drawn(path, seed=0, dtype="float32"):
    return ModelFolder.open(path, init_weights="random").build_model(dtype, seed=seed)


def test_drawn_weights_need_no_safetensors_and_follow_the_seed(tmp_path):
    path = tiny_model(tmp_path / "m", hidden=16, layers=1, weights=False)
    assert not list(path.glob("*.safetensors"))
    first, again, other = (drawn(path, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[EMBED], other[EMBED])


def test_a_drawn_parameter_depends_on_the_seed_and_its_name_alone(tmp_path):
    shallow = drawn(tiny_model(tmp_path / "a", hidden=16, layers=1, weights=False)).state_dict()
    deep = drawn(tiny_model(tmp_path / "b", hidden=16, layers=3, tied=True, weights=False)).state_dict()
    shared = [name for name in shallow if name in deep and name != HEAD]
    assert len(shared) > 8
    assert all(torch.equal(shallow[name], deep[name]) for name in shared)
    one, two = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(deep[one], deep[two]), "another name, another draw"


def test_drawn_weights_have_the_familys_scale(tmp_path, edit_json):
    path = tiny_model(tmp_path / "m", "qwen2", hidden=64, layers=1, weights=False)
    edit_json(path / "config.json", initializer_range=0.5)
    model = drawn(path)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            # the standard deviation of n normal draws is within 5 / sqrt(2 n) of theirs, relatively
            assert abs(parameter.std().item() / 0.5 - 1) < 5 / (2 * parameter.numel()) ** 0.5, name
            assert abs(parameter.mean().item()) < 5 * 0.5 / parameter.numel() ** 0.5, name


def test_a_drawn_bfloat16_model_is_the_float32_one_rounded(tmp_path):
    path = tiny_model(tmp_path / "m", hidden=16, layers=1, weights=False)
    wide, narrow = drawn(path), drawn(path, dtype="bfloat16")
    for name, parameter in wide.state_dict().items():
        assert torch.equal(parameter.bfloat16(), narrow.state_dict()[name]), name


def test_the_draw_leaves_the_global_generator_alone(tmp_path):
    path = tiny_model(tmp_path / "m", hidden=16, layers=1, weights=False)
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    drawn(path)
    assert torch.equal(torch.rand(3), want)


def test_a_tiny_model_is_the_same_for_the_same_seed(tmp_path):
    one, two, other = (
        tiny_model(tmp_path / n, seed=s, hidden=16, layers=1) for n, s in (("a", 4), ("b", 4), ("c", 5))
    )
    first, second, third = ((path / "model.safetensors").read_bytes() for path in (one, two, other))
    assert first == second != third
    assert json.loads((one / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def gemma3_with_pictures(path):
    """Gemma 3 of 4B parameters and more: its text model lies beside one for pictures, under names of its own."""
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(str(path))
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=family_config("gemma3", len(tokenizer)).to_dict(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["neox", "gemma3 with pictures"])
def test_tied_and_output_matrices_under_other_names_are_found_by_transformers(tmp_path, name):
    path = family_model(tmp_path, name) if name == "neox" else gemma3_with_pictures(tmp_path)
    folder = ModelFolder.open(path)
    kept = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(folder.build_model().get_output_embeddings().weight, kept.get_output_embeddings().weight)
    assert folder.eos_token_ids == (1,)

"""What a model folder says when it is opened, and what is refused with which words."""

import json
import shutil
import subprocess
import sys

import pytest

from slime_core.errors import ConfigError, DataError
from slime_core.testing.models import CHAT_TEMPLATE, VOCAB, char_tokenizer, tiny_model
from slime_core.weights.folder import ModelFolder, resolve

pytestmark = pytest.mark.unit


def refused(path, code, **kwargs):
    with pytest.raises((DataError, ConfigError)) as caught:
        ModelFolder.open(path, **kwargs)
    assert caught.value.code == code, caught.value
    assert caught.value.where, "an error says where"
    return caught.value


def test_a_sound_folder_tells_its_sizes_and_end_tokens(folder):
    opened = ModelFolder.open(folder)
    assert opened.path == folder
    assert opened.vocab_size == len(VOCAB) + 3
    assert opened.context_len == 512
    assert opened.eos_token_ids == (1,)
    assert opened.config.model_type == "qwen3"
    assert opened.notices == ()
    assert set(opened.tensors()) >= {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_text_survives_the_tokenizer_of_every_family(tmp_path, family):
    path = tiny_model(tmp_path / family, family, hidden=16, layers=1, weights=False, chat_template=CHAT_TEMPLATE)
    tokenizer = ModelFolder.open(path, init_weights="random").tokenizer()
    text = "What is 12+30?\n  a b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text), "one id a character, whatever the model type"
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_a_missing_folder_shows_the_absolute_path_and_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused("nowhere", "CFG05")
    assert str(tmp_path / "nowhere") in error.where
    assert f"working folder {tmp_path}" in error.where
    assert "rollout.hf_checkpoint" in error.fix
    assert error.exit_code == 2


def test_a_folder_without_config_is_no_model(tmp_path):
    error = refused(tmp_path, "TOK00")
    assert "config.json" in error.what
    assert "save_pretrained" in error.fix


def test_a_broken_config_shows_line_and_column(folder):
    (folder / "config.json").write_text('{\n  "model_type": qwen3\n}')
    assert refused(folder, "TOK00").where.endswith("config.json:2:17")


def test_a_model_that_is_no_causal_language_model_is_refused(folder, edit_json):
    edit_json(folder / "config.json", model_type="vit")
    refused(folder, "TOK00")


@pytest.mark.parametrize(
    ("family", "values", "why"),
    [
        ("llama", {"num_attention_heads": 3, "head_dim": None}, "3"),
        ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 16 is not a multiple"),
        ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path, edit_json, family, values, why):
    """Weights that are drawn have no shape that could contradict."""
    path = tiny_model(tmp_path / family, family, hidden=16, layers=1, weights=False)
    edit_json(path / "config.json", **values)
    assert why in refused(path, "TOK00", init_weights="random").why


def test_a_folder_without_tokenizer_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "tokenizer.save_pretrained" in refused(folder, "TOK00").fix


def test_more_ids_than_embedding_rows_are_refused_with_both_numbers(folder):
    char_tokenizer(VOCAB + "éà").save_pretrained(str(folder))
    error = refused(folder, "TOK39")
    assert f"{len(VOCAB) + 5} ids" in error.what
    assert f"{len(VOCAB) + 3} rows" in error.what
    assert "resize_token_embeddings" in error.fix


def test_an_added_token_beyond_the_rows_is_found(folder):
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(str(folder))
    assert "'<tool>'" in refused(folder, "TOK39").why


def test_padding_rows_of_the_embedding_are_fine_and_noted(tmp_path):
    path = tiny_model(tmp_path / "m", hidden=16, layers=1, weights=False)
    char_tokenizer(VOCAB[:-3]).save_pretrained(str(path))
    opened = ModelFolder.open(path, init_weights="random")
    assert opened.vocab_size == len(VOCAB) + 3
    assert f"{len(VOCAB) + 3} rows, the tokenizer {len(VOCAB)} ids" in opened.notices[0]


def test_end_tokens_are_those_of_all_three_files_and_a_notice_says_whose(folder, edit_json):
    edit_json(folder / "config.json", eos_token_id=7)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 1])
    opened = ModelFolder.open(folder)
    assert opened.eos_token_ids == (1, 7, 9)
    said = "1 <eos> (generation_config.json, the tokenizer); 7 4 (config.json); 9 6 (generation_config.json)"
    assert opened.notices == (f"a response ends at any of {said}",)
    (folder / "generation_config.json").unlink()
    assert ModelFolder.open(folder).eos_token_ids == (1, 7)


def test_an_end_token_that_only_the_configs_class_names_does_not_count(folder, edit_json):
    """LlamaConfig says 2 where config.json says nothing."""
    edit_json(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"], eos_token_id=...)
    assert ModelFolder.open(folder, init_weights="random").eos_token_ids == (1,)


def test_no_end_token_is_refused_unless_one_is_named(folder, edit_json):
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=...)
    edit_json(folder / "tokenizer_config.json", eos_token=...)
    error = refused(folder, "TOK42")
    assert "rollout.rollout_stop_token_ids" in error.fix
    assert "tokenizer_config.json" in error.where
    assert ModelFolder.open(folder, stop_token_ids=(4,)).eos_token_ids == ()


def test_an_end_token_outside_the_vocabulary_is_refused(folder, edit_json):
    edit_json(folder / "generation_config.json", eos_token_id=[1, 50_000])
    assert "50000" in refused(folder, "TOK42").what


@pytest.mark.parametrize("pad", ["<eos>", ...], ids=["pad is eos", "no pad"])
def test_a_pad_token_that_is_the_end_token_hides_nothing(folder, edit_json, pad):
    edit_json(folder / "tokenizer_config.json", pad_token=pad)
    opened = ModelFolder.open(folder)
    assert opened.eos_token_ids == (1,)
    assert len(opened.notices) == 1
    assert "the end token trains" in opened.notices[0]


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_that_a_model_brings_does_not_run(folder, edit_json, name, tmp_path):
    canary = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    edit_json(folder / name, auto_map={"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", None]})
    error = refused(folder, "TOK45")
    assert not canary.exists()
    assert error.where.endswith(name)
    assert "evil.Config" in error.what
    assert "rollout.trust_remote_code=true" in error.fix
    assert "transformers knows qwen3 itself" in error.fix


def test_an_unknown_model_type_with_code_names_the_key_alone(folder, edit_json):
    edit_json(folder / "config.json", model_type="brand_new", auto_map={"AutoConfig": "evil.Config"})
    assert "\n" not in refused(folder, "TOK45").fix


def test_a_quantised_model_is_refused(folder, edit_json):
    edit_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    error = refused(folder, "TOK48")
    assert "fp8" in error.what
    assert "unquantised" in error.fix


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "int8"])
def test_a_dtype_that_is_not_trained_in_names_the_key(folder, dtype):
    with pytest.raises(DataError, match=dtype) as caught:
        ModelFolder.open(folder).build_model(dtype=dtype)
    assert caught.value.code == "TOK48"
    assert caught.value.where == "train.dtype"
    assert "train.dtype=float32" in caught.value.fix


def test_a_gpu_without_bfloat16_names_the_fallback(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: False)
    with pytest.raises(DataError, match="no bfloat16") as caught:
        ModelFolder.open(folder).build_model(dtype="bfloat16", device="cuda:0")
    assert caught.value.code == "TOK48"
    assert "train.dtype=float32" in caught.value.fix


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache of its own, and no network."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_hub_name_that_is_not_cached_says_so_offline(hub):
    error = refused("nobody/nothing", "CFG05")
    assert "nobody/nothing" in error.what
    assert "hf download nobody/nothing" in error.fix


def test_a_hub_name_that_is_cached_opens_offline(hub, pristine):
    home = hub / "models--some--model"
    shutil.copytree(pristine[False], home / "snapshots" / "abc123")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123")
    assert resolve("some/model") == home / "snapshots" / "abc123"
    assert ModelFolder.open("some/model").vocab_size == len(VOCAB) + 3


def test_importing_the_module_loads_neither_torch_nor_transformers():
    code = (
        "import sys, slime_core.weights.folder as f; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_config_that_is_no_object_is_refused(folder):
    (folder / "config.json").write_text(json.dumps(["qwen3"]))
    refused(folder, "TOK00")

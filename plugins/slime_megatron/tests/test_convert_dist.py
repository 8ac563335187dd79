"""`slime convert hf-to-dist` and `dist-to-hf`: what is made, what is printed, and each refusal with its exit code."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_family import write_folder

from slime_core.testing import tiny_model
from slime_core.testing.families import family_model
from slime_core.testing.models import fp8_model
from slime_core.weights.shards import Shards

pytestmark = pytest.mark.integration

WINDS = """
from small_family import BRIDGE
from slime_core import hookimpl

@hookimpl
def slime_model_bridge(hf_config):
    return BRIDGE if hf_config.model_type == "olmo2" else None
"""


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Qwen3 of a few thousand parameters."""
    return tiny_model(tmp_path_factory.mktemp("hf") / "m", hidden=16, layers=2)


@pytest.fixture
def dist(cli, hf):
    done = cli("convert", "hf-to-dist", hf, "dist", "--quiet")
    assert done.code == 0, done.err
    return "dist"


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_a_model_goes_to_megatrons_format_and_back(cli, hf, tmp_path):
    done = cli("convert", "hf-to-dist", hf, "dist", "--verify", "--workers", "2")
    assert (done.code, done.out) == (0, f"{tmp_path / 'dist'}\n")
    assert "tensors, " in done.err
    assert "all compared" in done.err
    done = cli("convert", "dist-to-hf", "dist", "hf", "--origin-hf-dir", hf, "--verify", "--json", "--quiet")
    said = json.loads(done.out)
    assert (said["path"], said["verified"], said["kept"], said["files"]) == (str(tmp_path / "hf"), True, 0, 1)
    assert done.err == ""
    one, other = tensors(hf), tensors(tmp_path / "hf")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_in_fp8_goes_to_megatrons_format_and_back_as_floats(cli, hf, tmp_path):
    model = fp8_model(tmp_path / "fp8", tiny_model(tmp_path / "m", hidden=192))
    assert cli("convert", "hf-to-dist", model, "dist", "--verify", "--workers", "2").code == 0
    done = cli("convert", "dist-to-hf", "dist", "hf", "--origin-hf-dir", model, "--verify")
    assert done.code == 0, done.err
    one, other = dict(Shards.open(model)), tensors(tmp_path / "hf")
    assert other["model.layers.0.self_attn.k_proj.weight"].dtype == torch.bfloat16
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["dtype"], "quantization_config" in config) == ("bfloat16", False)


def test_layers_that_predict_further_ahead_come_back_from_the_origin(cli, tmp_path):
    model = family_model(tmp_path / "glm", "glm4-moe")
    layer = {"model.layers.2.eh_proj.weight": torch.randn(8, 4)}
    save_file(tensors(model) | layer, model / "model.safetensors", {"format": "pt"})
    assert cli("convert", "hf-to-dist", model, "dist", "--quiet").code == 0
    done = cli("convert", "dist-to-hf", "dist", "hf", "--origin-hf-dir", model, "--verify")
    assert done.code == 0, done.err
    one, other = tensors(model), tensors(tmp_path / "hf")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_model_that_comes_back_loads_and_has_its_tokenizer(cli, hf, dist, tmp_path):
    from slime_core.weights.folder import ModelFolder

    assert cli("convert", "dist-to-hf", dist, "hf", "--origin-hf-dir", hf, "--dtype", "bfloat16").code == 0
    folder = ModelFolder.open(tmp_path / "hf")
    assert folder.build_model(dtype="bfloat16") is not None
    assert folder.tokenizer().encode("12+30=") == ModelFolder.open(hf).tokenizer().encode("12+30=")


@pytest.mark.parametrize(
    ("size", "files"), [("1KB", 25), ("20KiB", 1), ("1000000", 1), ("5GB", 1)], ids=lambda value: str(value)
)
def test_shards_are_as_large_as_asked(cli, hf, dist, tmp_path, size, files):
    done = cli(
        "convert", "dist-to-hf", dist, "hf", "--origin-hf-dir", hf, "--max-shard-size", size, "--dtype", "bfloat16"
    )
    assert done.code == 0, done.err
    count = len(list((tmp_path / "hf").glob("*.safetensors")))
    assert count == 1 if files == 1 else count > 5
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (files > 1)


@pytest.mark.parametrize("size", ["0", "many", "5TB", "-1"])
def test_a_size_that_is_none_is_a_usage_error(cli, hf, size):
    done = cli("convert", "dist-to-hf", "d", "h", "--origin-hf-dir", hf, f"--max-shard-size={size}")
    assert done.code == 2
    assert "is not a size" in done.err


def test_an_existing_folder_is_replaced_by_force_alone(cli, hf, dist, tmp_path):
    assert "CFG12" in cli("convert", "hf-to-dist", hf, dist).err
    assert cli("convert", "hf-to-dist", hf, dist, "--force").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist"]


def test_a_conversion_refuses_to_replace_its_own_source(cli, hf, dist, tmp_path):
    own = shutil.copytree(hf, tmp_path / "models" / "own")
    (tmp_path / "link").symlink_to(own)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    for words in (
        ("hf-to-dist", own, own),
        ("hf-to-dist", "link", own),
        ("hf-to-dist", own, "link"),
        ("hf-to-dist", own, "models"),
        ("dist-to-hf", dist, dist, "--origin-hf-dir", hf),
        ("dist-to-hf", dist, "dist/release", "--origin-hf-dir", hf),
        ("dist-to-hf", dist, own, "--origin-hf-dir", own),
    ):
        done = cli("convert", *words, "--force")
        assert (done.code, "CFG12" in done.err) == (2, True), (words, done.err)
        assert "made from" in done.err
        assert "fix: choose another folder\n" in done.err
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


def test_a_misfit_names_both_sides(cli, hf, dist, tmp_path):
    other = tiny_model(tmp_path / "other", hidden=32, layers=2)
    done = cli("convert", "dist-to-hf", dist, "hf", "--origin-hf-dir", other)
    assert "TOK46" in done.err
    assert f"do not fit {other / 'config.json'}" in done.err
    assert "fix: both must be of the same model: name another folder for one of them" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hf-to-dist", "a-file", "d"), ("a-file is a file", "where: SRC = ", "fix: set SRC to a folder")),
        (("dist-to-hf", "d", "e", "--origin-hf-dir", "no"), ("where: --origin-hf-dir = ",)),
        (("hf-to-dist", "HF", "n" * 300), ("STO00", "too long", "fix: choose another folder")),
        (("hf-to-dist", "HF", "a-file/d"), ("STO00", "fix: choose another folder")),
        (("hf-to-dist", "brackets", "d"), ("TOK00", "fix: fetch or save the model again")),
        (("hf-to-dist", "eight-bits", "d", "--dtype", "bfloat16"), ("TOK48", "fix: save the model unquantised")),
    ],
    ids=["file", "origin", "long", "below-a-file", "json", "integers"],
)
def test_each_refusal_says_what_to_do(cli, hf, tmp_path, words, said):
    (tmp_path / "a-file").write_text("")
    (shutil.copytree(hf, tmp_path / "brackets") / "config.json").write_text('{"model_type": "qwen3",}')
    held = tensors(shutil.copytree(hf, tmp_path / "eight-bits"))
    held["model.layers.0.mlp.up_proj.weight"] = held["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(held, tmp_path / "eight-bits" / "model.safetensors")
    done = cli("convert", *(hf if word == "HF" else word for word in words))
    assert done.code in (2, 3, 7), done.err
    for text in said:
        assert text in done.err, done.err


def test_a_model_of_no_family_is_refused_by_name(cli, hf, tmp_path):
    other = shutil.copytree(hf, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]})
    )
    done = cli("convert", "hf-to-dist", other, "dist")
    assert done.code == 2
    assert "CFG200" in done.err
    assert "GPTNeoXForCausalLM" in done.err
    assert not (tmp_path / "dist").exists()


def test_every_installed_plugin_is_asked_for_a_bridge_and_a_broken_one_is_named_where_none_has_it(
    cli, install_plugin, tmp_path
):
    write_folder(tmp_path / "olmo2", model_type="olmo2", architectures=["Olmo2ForCausalLM"])
    install_plugin("broken", "raise RuntimeError('half written')")
    done = cli("convert", "hf-to-dist", "olmo2", "dist")
    assert (done.code, "CFG200" in done.err) == (2, True)
    assert "not asked: plugin 'broken' (dist-broken==1.0) could not be imported" in done.err
    install_plugin("winds", WINDS)
    done = cli("convert", "hf-to-dist", "olmo2", "dist", "--verify")
    assert (done.code, "not asked" in done.err) == (0, False), done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("hf-to-dist", "nothing", "d"), 2, "CFG05"),
        (("dist-to-hf", "nothing", "d", "--origin-hf-dir", "HF"), 3, "TOK201"),
        (("dist-to-hf", "nothing", "d"), 3, "TOK201"),
        (("hf-to-dist", "HF", "d", "--plugin", "nobody"), 4, "PLG51"),
        (("hf-to-dist", "HF", "d", "--dtype", "int8"), 2, "int8"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_words_end_with_the_right_code(cli, hf, words, code, said):
    done = cli("convert", *(hf if word == "HF" else word for word in words))
    assert done.code == code, done.err
    assert said in done.err


def test_a_run_directory_is_its_newest_checkpoint_and_knows_its_model_folder(cli, hf, dist, tmp_path):
    for number in (2, 10):
        step = tmp_path / "run" / "checkpoints" / f"step-{number}"
        shutil.copytree(tmp_path / dist / "release", step / "trainer")
        named = str(hf) if number == 10 else "nowhere"
        (step / "MANIFEST.json").write_text(json.dumps({"config": {"rollout": {"hf_checkpoint": named}}}))
    done = cli("convert", "dist-to-hf", "run", "hf", "--quiet")
    assert done.code == 0, done.err
    assert {n: t.tolist() for n, t in tensors(tmp_path / "hf").items()} == {
        n: t.tolist() for n, t in tensors(hf).items()
    }
    for source, said in (("run/checkpoints/step-2", "'nowhere' is not here"), (dist, "names no model folder")):
        done = cli("convert", "dist-to-hf", source, "other")
        assert (done.code, said in done.err, "fix: --origin-hf-dir FOLDER" in done.err) == (2, True, True), done.err


def test_foreign_metadata_needs_a_word(cli, hf, dist, tmp_path):
    (tmp_path / dist / "release" / "MANIFEST.json").unlink()
    done = cli("convert", "dist-to-hf", dist, "hf", "--origin-hf-dir", hf)
    assert done.code == 3
    assert "--trust-metadata" in done.err
    assert cli("convert", "dist-to-hf", dist, "hf", "--origin-hf-dir", hf, "--trust-metadata").code == 0

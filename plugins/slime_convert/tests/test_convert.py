"""`slime convert`: the FSDP trainer's checkpoints become model folders; words of other trainers are found or refused."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.plugins import backends
from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

TOOLS = Path(__file__).parents[3] / "tools"
ECHO = """
import click
from slime_core import hookimpl
from slime_core.backends import TrainerBackend

@click.command()
def word():
    \"\"\"A format of ours to a Hugging Face folder.\"\"\"
    click.echo("converted")

@hookimpl
def slime_trainer():
    return [TrainerBackend(name="mine", trainer=lambda: object, converters=lambda: {"mine-to-hf": word})]
"""


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Qwen3 of a few thousand parameters."""
    return tiny_model(tmp_path_factory.mktemp("hf") / "m", hidden=16, layers=2)


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("size", ["0", "many", "5TB", "-1"])
def test_a_size_that_is_none_is_a_usage_error(cli, hf, size):
    done = cli("convert", "fsdp-to-hf", "d", "h", "--origin-hf-dir", hf, f"--max-shard-size={size}")
    assert done.code == 2
    assert "is not a size" in done.err


def test_a_conversion_refuses_to_replace_its_own_source(cli, hf, tmp_path):
    own = shutil.copytree(hf, tmp_path / "models" / "own")
    checkpoint(tmp_path / "run" / "checkpoints" / "step-4", own, 1)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    for words in (
        ("fsdp-to-hf", "run", "run"),
        ("fsdp-to-hf", "run", "run/checkpoints/step-4/trainer"),
        ("fsdp-to-hf", "run", own),
        ("fsdp-to-hf", "run", "models"),
    ):
        done = cli("convert", *words, "--force")
        assert (done.code, "CFG12" in done.err) == (2, True), (words, done.err)
        assert "made from" in done.err
        assert "fix: choose another folder\n" in done.err
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("HF", "d"), 7, ("STO111", "fix: name a run directory")),
        (("nothing", "d"), 2, ("CFG05", "fix: name a run directory")),
        (("nothing", "d", "--dtype", "int8"), 2, ("int8",)),
    ],
    ids=["no-checkpoint", "nowhere", "dtype"],
)
def test_each_refusal_says_what_to_do(cli, hf, words, code, said):
    for command in ("fsdp-to-hf", "fsdp-to-adapter"):
        done = cli("convert", command, *(hf if word == "HF" else word for word in words))
        assert done.code == code, done.err
        for text in said:
            assert text in done.err, done.err


def test_trainers_of_installed_plugins_bring_words(cli, install_plugin):
    install_plugin("mine", ECHO)
    install_plugin("broken", "raise RuntimeError('half written')")
    said = cli("convert", "--help").out
    assert "A format of ours" in said
    assert [word for word in ("dist-to-hf", "fsdp-to-hf", "hf-to-dist", "mine-to-hf") if word not in said] == []
    assert (cli("convert", "mine-to-hf").out, cli("convert", "mine-to-xx").code) == ("converted\n", 2)


@pytest.mark.parametrize("word", ["hf-to-dist", "dist-to-hf"])
def test_a_word_whose_package_is_not_installed_names_the_command_that_installs_it(cli, monkeypatch, word):
    monkeypatch.setattr(backends, "is_installed", lambda name: False)
    done = cli("convert", word, "a", "b")
    assert (done.code, "CFG04" in done.err) == (2, True)
    assert "slime-megatron is not installed here" in done.err
    assert "fix: pip install -e plugins/slime_megatron" in done.err


def checkpoint(folder, hf, parts, **manifest):
    """A checkpoint of the FSDP trainer as ``parts`` ranks write it; the answer is its parameters."""
    held = {name: tensor.float() + 1 for name, tensor in tensors(hf).items()}
    (folder / "trainer").mkdir(parents=True)
    for rank in range(parts):
        name = "parameters.safetensors" if parts == 1 else f"parameters-{rank + 1}-of-{parts}.safetensors"
        save_file({key: held[key] for key in sorted(held)[rank::parts]}, folder / "trainer" / name)
    files = {
        f"trainer/{path.name}": {"size": path.stat().st_size, "sha256": "0" * 64}
        for path in (folder / "trainer").iterdir()
    }
    config = {"rollout": {"hf_checkpoint": str(hf)}}
    (folder / "MANIFEST.json").write_text(json.dumps({"files": files, "config": config, **manifest}))
    return held


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_checkpoint_of_the_fsdp_trainer_becomes_a_model_folder(cli, hf, tmp_path, parts, dtype):
    held = checkpoint(tmp_path / "run" / "checkpoints" / "step-4", hf, parts)
    checkpoint(tmp_path / "run" / "checkpoints" / "step-12", hf, parts)
    checkpoint(tmp_path / "run" / "checkpoints" / "corrupt-step-13-x", hf, parts)
    done = cli("convert", "fsdp-to-hf", "run", "hf", "--dtype", dtype)
    assert done.code == 0, done.err
    made = tensors(tmp_path / "hf")
    assert made.keys() == held.keys()
    for name, tensor in held.items():
        assert torch.equal(made[name], tensor if dtype == "keep" else tensor.bfloat16()), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == ("float32" if dtype == "keep" else dtype)


def test_a_checkpoint_is_compared_with_its_manifest(cli, hf, tmp_path):
    checkpoint(tmp_path / "step-1", hf, 2)
    done = cli("convert", "fsdp-to-hf", "step-1", "hf", "--verify")
    assert (done.code, "STO112" in done.err, "hash" in done.err) == (7, True, True)
    (tmp_path / "step-1" / "trainer" / "parameters-2-of-2.safetensors").unlink()
    done = cli("convert", "fsdp-to-hf", "step-1", "hf")
    assert (done.code, "STO111" in done.err) == (7, True)
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_of_another_model_is_refused_by_names(cli, hf, tmp_path):
    checkpoint(tmp_path / "step-1", hf, 1)
    other = tiny_model(tmp_path / "other", hidden=16, layers=3, weights=False)
    done = cli("convert", "fsdp-to-hf", "step-1", "hf", "--origin-hf-dir", other)
    assert (done.code, "TOK46" in done.err) == (3, True)
    assert "11 missing, 0 extra" in done.err


def test_a_checkpoint_that_names_no_model_folder_asks_for_one(cli, hf, tmp_path):
    checkpoint(tmp_path / "step-1", hf, 1, config={})
    done = cli("convert", "fsdp-to-hf", "step-1", "hf")
    assert (done.code, "--origin-hf-dir" in done.err) == (2, True)


def test_a_checkpoint_of_the_fsdp_trainer_has_slimes_tool_too(hf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "step-1" / "trainer"
    step.mkdir(parents=True)
    shutil.copy(hf / "model.safetensors", step / "parameters.safetensors")
    spec = importlib.util.spec_from_file_location("convert_fsdp_to_hf", TOOLS / "convert_fsdp_to_hf.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(["--input-dir", "step-1", "--output-dir", "made", "--origin-hf-dir", str(hf), "--quiet"]) == 0
    assert json.loads((tmp_path / "made" / "config.json").read_text())["model_type"] == "qwen3"

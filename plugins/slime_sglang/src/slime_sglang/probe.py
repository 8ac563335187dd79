"""Facts of an installation as JSON; run by the Python of SGLang's environment, never imported by slime.

    python probe.py facts      version, folder, features; SGLang is looked at and not imported: fast
    python probe.py options    every option of its server and of its router, from their own argument parsers: imports
                               SGLang, seconds
    python probe.py model FOLDER IMPLEMENTATION TRUST    the class with which it serves a model folder, or why it does
                               not: asks its registry, which imports every model, tens of seconds

Plain Python of 3.10 and later. The answer alone goes to stdout; what SGLang prints on the way goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from importlib import metadata, util
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).with_name("stand_ins")))
importlib.import_module("slime_operations")
sys.path.pop()

REQUESTS, SERVER = "srt/managers/io_struct.py", "srt/entrypoints/http_server.py"
FEATURES = {  # name -> file of the installation, and what stands in it
    "version_spans": (REQUESTS, r"\bweight_versions\s*:"),
    "routed_dp_rank": (REQUESTS, r"\brouted_dp_rank\s*:"),
    "routed_experts": (REQUESTS, r"\breturn_routed_experts\s*:"),
    "pause_modes": (REQUESTS, r"\bretract: Pause\b|Literal\[[^\]]*\"retract\""),
    "memory_tags": (REQUESTS, r"class ReleaseMemoryOccupationReqInput\b[^@]*?\btags\s*:"),
    "sampling_seed": ("srt/sampling/sampling_params.py", r"\bsampling_seed\b"),
    "weights_checker": ("srt/utils/weight_checker.py", r"\bchecksums?\b"),
    "disk_update": (SERVER, r"\"/update_weights_from_disk\""),
    "tensor_update": (SERVER, r"\"/update_weights_from_tensor\""),
    "nccl_update": (SERVER, r"\"/update_weights_from_distributed\""),
    "update_brackets": (SERVER, r"\"/begin_weight_update\""),
    "abort": (SERVER, r"\"/abort_request\""),
    "adapters": (SERVER, r"\"/load_lora_adapter_from_tensors\""),
}
MODELS = re.compile(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)
PACKAGES = {"router": "sglang_router", "memory_saver": "torch_memory_saver", "bitsandbytes": "bitsandbytes"}


def facts() -> dict[str, Any]:
    """What can be known without an import of SGLang."""
    spec = util.find_spec("sglang")
    if spec is None or not spec.origin:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    folder = Path(spec.origin).parent
    version, changed = "", 0
    try:
        distribution = metadata.distribution("sglang")
        version = distribution.version
        changed = _changed(Path(str(distribution.locate_file(""))) / f"sglang-{version}.dist-info" / "METADATA")
    except metadata.PackageNotFoundError:
        text = _read(folder / "version.py")
        match = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
        version = match[1] if match else ""
    sources = [folder / "srt" / "server_args.py", *{folder / file for file, _ in FEATURES.values()}]
    return {
        "version": version,
        "folder": str(folder),
        "changed": max([changed, *map(_changed, sources)]),
        "features": sorted(features(folder)),
        "architectures": sorted(architectures(folder)),
        "torch": _version_of("torch"),
        "router": _version_of("sglang-router"),
        "python": sys.version.split()[0],
    }


def features(folder: Path) -> set[str]:
    """Names of what this installation can do, by what stands in its source."""
    texts = {file: _read(folder / file) for file, _ in FEATURES.values()}
    features_seen = {name for name, (file, pattern) in FEATURES.items() if re.search(pattern, texts[file])}
    return features_seen | {name for name, package in PACKAGES.items() if util.find_spec(package) is not None}


def architectures(folder: Path) -> set[str]:
    """Names of the models that this installation implements, by what stands in its source."""
    entries = [entry for file in (folder / "srt" / "models").glob("*.py") for entry in MODELS.findall(_read(file))]
    return {name for entry in entries for name in re.findall(r"\w+", entry)}


def served(model: str, implementation: str, trust: bool) -> dict[str, str]:
    """The class of SGLang's registry for a model folder, as its loader resolves it, or its own words of refusal."""
    config_module = importlib.import_module("sglang.srt.configs.model_config")
    loader = importlib.import_module("sglang.srt.model_loader.utils")
    importlib.import_module("sglang.srt.models.registry")
    try:
        config = config_module.ModelConfig(model, trust_remote_code=trust, model_impl=implementation)
        if not trust:
            config.hf_config.auto_map = None  # the loader would import code of the folder
        return {"class": loader.get_model_architecture(config)[1]}
    except Exception as error:
        traceback.print_exc()
        return {"refusal": str(error)}


def options() -> list[dict[str, Any]]:
    """Every option of the server, in the parser's order."""
    import argparse

    module = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser(add_help=False)
    module.ServerArgs.add_cli_args(parser)
    return _listed(parser)


def router_options() -> list[dict[str, Any]]:
    """Every option of the router, in its parser's order; none where it is not installed, or is another's package."""
    import argparse

    parser = argparse.ArgumentParser(add_help=False)
    try:
        module = importlib.import_module("sglang_router.router_args")
        module.RouterArgs.add_cli_args(parser)
    except Exception:
        traceback.print_exc()
        return []
    return _listed(parser)


def _listed(parser: Any) -> list[dict[str, Any]]:
    return [option(action) for action in parser._actions if any(f.startswith("--") for f in action.option_strings)]


def option(action: Any) -> dict[str, Any]:
    """One action of an argparse parser."""
    kind = {0: "flag", "?": "maybe", None: "value"}.get(action.nargs, "list")
    if action.nargs == 0 and any(flag.startswith("--no-") for flag in action.option_strings[1:]):
        kind = "switch"
    return {
        "name": action.dest,
        "flags": list(action.option_strings),
        "kind": kind,
        "type": getattr(action.type, "__name__", "str") if action.type is not None else "str",
        "empty": action.nargs == "*",
        "choices": sorted(map(str, action.choices))
        if isinstance(action.choices, (set, frozenset))
        else [str(choice) for choice in action.choices or ()],
        "default": _plain(action.default),
        "help": " ".join(str(action.help or "").split()),
    }


def _plain(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return None if value == "==SUPPRESS==" else value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Answer one question on stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what SGLang prints is no answer
    folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [
        entry for entry in sys.path if os.path.realpath(entry) != folder
    ]  # its neighbours have common names
    answer: dict[str, Any]
    try:
        question, *words = sys.argv[1:]
        if question == "model":
            answer = served(words[0], words[1], words[2] == "1")
        else:
            answer = {"options": options(), "router": router_options()} if question == "options" else facts()
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    with answers:
        json.dump(answer, answers)


if __name__ == "__main__":
    main()

"""Which parts of a launch script run here: its flags, the config that they make, its files, model and functions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_compat.launch.flags import ALL, OTHERS, differences
from slime_compat.launch.imports import unserved
from slime_compat.launch.script import DOORS, UNKNOWN, LaunchScript
from slime_compat.launch.translation import FlagUse, Translation, translate
from slime_core.backends import Planning
from slime_core.compat.functions import FunctionsByPath
from slime_core.compat.shapes import SHAPES
from slime_core.config import rules
from slime_core.config.load import LoadedConfig, read, split, stages
from slime_core.config.paths import missing_files
from slime_core.config.problems import Problem, dotted, error_of
from slime_core.errors import ConfigError, DataError, PluginError, SlimeError
from slime_core.media.families import FAMILIES as PICTURES
from slime_core.plugins import load_plugins, option_models
from slime_core.plugins.backends import trainer_of
from slime_core.weights.stored_forms import storage_form

SECTIONS = ("rollout", "train", "reward", "eval", "report")
"""Those with keys that name functions."""
OF_CONFIG = ("--moe-layer-freq",)
"""Flags that scripts work out in loops, and config.json says anyway."""
FAMILIES = {
    "glm-4.5": "glm4_moe",
    "glm-4.6": "glm4_moe",
    "glm-4.7-flash": "glm4_moe_lite",
    "glm-4.7": "glm4_moe",
    "glm-5": "glm_moe_dsa",
    "kimi-k2": "kimi_k2",
    "mimo": "mimo",
    "minimax-m2": "minimax_m2",
    "qwen3-next": "qwen3_next",
    **dict.fromkeys(("qwen3.5-35b", "qwen3.5-122b", "qwen3.5-397b", "qwen3.6-35b"), "qwen3_5_moe"),
    "qwen3.5": "qwen3_5",
    "qwen3.6": "qwen3_5",
}
"""How folders of slime's scripts begin -> the model_type of their config.json, first match first."""
QUANTISED = re.compile(r"int8|awq|gptq")
"""In names of folders whose weights are quantised in a way that does not load."""
_WORDS = re.compile(r"\$\{\w+(\[@\])?\}")
"""A variable or an array that is a word, or several, by itself."""


@dataclass(slots=True, frozen=True)
class FunctionUse:
    """A function that a flag names; ``error`` is why it would not run."""

    flag: str
    path: str  # as the run should name it: a file where the script's module is one
    error: SlimeError | None = None


@dataclass(slots=True)
class ScriptCheck:
    """What a check of a launch script says."""

    launch: LaunchScript
    translation: Translation
    left_out: list[str] = field(default_factory=list)  # arrays and variables that may be more flags
    errors: list[SlimeError] = field(default_factory=list)  # of flags, the config and the model
    functions: list[FunctionUse] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # files that are not on this machine
    model: str = ""

    @property
    def unknown(self) -> list[FlagUse]:
        """Flags with a value that only running the script could tell; they are not checked."""
        return [
            use
            for use in self.translation.uses
            if use.name not in OF_CONFIG and any(UNKNOWN.search(value) for value in use.values)
        ]

    @property
    def differences(self) -> list[str]:
        """What the script's variables switch on in slime, and nothing does here."""
        return differences(self.launch.variables)

    @property
    def exit_code(self) -> int:
        """0 where nothing is in the way but files; else that of the first error."""
        errors = [*self.errors, *(use.error for use in self.functions if use.error)]
        return errors[0].exit_code if errors else 0

    @property
    def verdict(self) -> str:
        """One sentence."""
        broken = len(self.errors) + sum(use.error is not None for use in self.functions)
        if broken:
            return f"does not run as it is: {broken} {'thing is' if broken == 1 else 'things are'} in the way"
        if self.missing or self.unknown or self.left_out:
            return "runs here once its files and variables are there" + (
                "; its model is compared then" if self.model.startswith("not compared") else ""
            )
        return "runs here" + (", and differs in what its variables switch on" if self.differences else "")

    @property
    def words(self) -> list[str]:
        """What follows `slime run`, as a shell wants it."""
        paths = {use.flag: use.path for use in self.functions}
        words = [
            word if at == 0 or word.startswith("--") else paths.get(use.words[0], word)
            for use in self.translation.uses
            for at, word in enumerate(use.words)
            if not (use.name in OF_CONFIG and any(UNKNOWN.search(value) for value in use.values))
        ]
        return [word if UNKNOWN.search(word) else shlex.quote(word) for word in words]


def check_launch(launch: LaunchScript, more: Sequence[str] = ()) -> ScriptCheck:
    """Check the command of a launch script; ``more`` are words that follow its own."""
    words, left_out = _flag_words(launch)
    translation = translate([*words, *more], ahead=DOORS[launch.door])
    check = ScriptCheck(launch, translation, left_out)
    check.missing += launch.missing
    refusals = translation.refusals("refused", *(() if left_out else ("required",)))
    if launch.cut:
        refusals.append(_cut(launch))
    if refusals:
        check.errors.append(error_of(refusals))
    uses = [use for use in translation.uses if not any(UNKNOWN.search(value) for value in use.values)]
    words = [word for use in uses for word in use.words]
    try:
        tokens = split(words)
        loaded = read(None, tokens, models=option_models, check=False)
    except SlimeError as error:
        check.errors.append(error)
        return check
    problems = [*_conflicts(loaded)]
    check.missing += map(_place, missing_files(loaded.config.model_dump()))
    if problems:
        check.errors.append(error_of([loaded.origins.place(problem) for problem in problems]))
    _check_model(check, loaded)
    check.functions += _functions(loaded, launch)
    return check


def _flag_words(launch: LaunchScript) -> tuple[list[str], list[str]]:
    """The words without the arrays and variables among them that are no flag's value, and those."""
    words: list[str] = []
    left_out = []
    flag: list[str] = []  # with its values
    for word in launch.words:
        match = _WORDS.fullmatch(word)
        if match and (match[1] or not _takes(flag, word)):
            left_out.append(word)
        else:
            words.append(word)
            flag = [word] if word.startswith("--") else [*flag, word]
    return words, left_out


def _takes(flag: Sequence[str], word: str) -> bool:
    """Whether ``word`` is a value of a flag, given with its values so far."""
    if flag and flag[0] in OTHERS:
        limit = OTHERS[flag[0]].values
        return limit == ALL or len(flag) <= limit
    return bool(flag) and split([*flag, word]).recipe is None


def _cut(launch: LaunchScript) -> Problem:
    return Problem(
        code="CFG06",
        what=f"the command ends before line {launch.cut}, which has more of its flags",
        where=f"{launch.script}:{launch.cut}",
        why="a shell ends it there too",
        fix="end the line before with a backslash",
    )


def _place(problem: Problem) -> str:
    """Key and path of a file that is not there."""
    return f"{dotted(problem.keys[0])}: {problem.why.partition(';')[0].removeprefix('it resolves to ')}"


def _conflicts(loaded: LoadedConfig) -> Iterator[Problem]:
    """What cannot hold together, on any machine."""
    data, rollout = loaded.config.data, loaded.config.rollout
    model_type, by_function = (
        _model_type(rollout.hf_checkpoint),
        bool(rollout.custom_generate_function_path or rollout.rollout_function_path),
    )
    if data.multimodal_keys and model_type not in ("", *PICTURES) and not by_function:
        yield Problem(
            code="CFG04",
            what="--multimodal-keys names media that no engine here would see",
            keys=(("data", "multimodal_keys"),),
            why=f"model_type {model_type!r} trains on text alone here; on pictures: {', '.join(PICTURES)}",
            fix="leave --multimodal-keys out to train on text, or generate with a function: "
            "--custom-generate-function-path",
        )
    for stage in stages(loaded.config):
        yield from rules.conflicts(stage)
        trainer = trainer_of(stage)
        yield from trainer.problems(_settled(stage), loaded.origins)


def _model_type(folder: str) -> str:
    """What a model folder's config.json says; "" where it is not here."""
    try:
        return str(json.loads((Path(folder) / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError):
        return ""


def _settled(config: Any) -> Any:
    """The config on a machine with GPUs, which is what a launch script is for."""
    train = config.train
    dtype = "bfloat16" if train.dtype == "auto" else train.dtype
    return config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"device": "cuda"}),
            "train": train.model_copy(update={"dtype": dtype}),
        }
    )


def _check_model(check: ScriptCheck, loaded: LoadedConfig) -> None:
    """Hold the flags that describe the model against its folder, where that is here."""
    folder = _model_folder(check, loaded)
    trainer = trainer_of(loaded.config)
    try:
        plugins = load_plugins(_without_functions(loaded.config))
        _require_model(folder, plugins)
        if not (folder / "config.json").is_file():
            check.model = f"not compared: {folder} has no config.json on this machine"
            if "fp8" in folder.name.lower() and not UNKNOWN.search(folder.name):
                check.model += "; its fp8 loads in blocks (weight_block_size), not a scale a tensor or a channel"
            return
        planning = Planning(config=_settled(loaded.config), origins=loaded.origins, plugins=plugins)
        plan = trainer.plan(planning) if trainer.plan is not None else None
        check.model = (
            "; ".join(plan.rows.values()) if plan is not None else f"{folder.name}, trained by {trainer.name}"
        )
    except SlimeError as error:
        check.errors.append(error)
        check.model = f"{folder.name}: {error.what}"


def _model_folder(check: ScriptCheck, loaded: LoadedConfig) -> Path:
    """The model's folder; its path as the script writes it where only running could tell it."""
    names = [use.values[-1] for use in check.translation.uses if use.name == "--hf-checkpoint" and use.values]
    unknown = bool(names) and UNKNOWN.search(names[-1])
    return Path(names[-1] if unknown else loaded.config.rollout.hf_checkpoint)


def _require_model(folder: Path, plugins: Any) -> None:
    """Refuse a family without a bridge and quantised weights, by config.json, else by the name of the folder.

    Raises:
        ConfigError: CFG200; DataError: TOK48.
    """
    try:
        table = json.loads((folder / "config.json").read_bytes())
        family = str(table.get("model_type", ""))
        quantised = "quantization_config" in table and storage_form(table) is None
    except (OSError, ValueError):
        name = "" if UNKNOWN.search(folder.name) else folder.name.lower()
        quantised = bool(QUANTISED.search(name))
        family = next((family for start, family in FAMILIES.items() if name.startswith(start)), "")
    families = {name for plugin in plugins.loaded for name in getattr(plugin.target, "slime_families", ())}
    if family and family not in families:
        raise ConfigError(
            f"no plugin has a bridge for {folder.name} (model_type '{family}')",
            code="CFG200",
            where="--hf-checkpoint",
            why=f"families: {', '.join(sorted(families))}",
            fix="a plugin with slime_model_bridge, or --train-backend fsdp without Megatron's flags",
        )
    if quantised:
        raise DataError(
            f"{folder.name} is quantised",
            code="TOK48",
            where="--hf-checkpoint",
            why="training starts from --hf-checkpoint, in slime from --load or --ref-load, which has float weights",
            fix="--hf-checkpoint FLOAT_FOLDER: what --ref-load was made of   (slime convert dist-to-hf makes it)",
        )


def _without_functions(config: Any) -> Any:
    """The config with no function by path, and no file of keys for them."""
    sections = {}
    for name in SECTIONS:
        section = getattr(config, name)
        keys = [key for key in (*SHAPES, "custom_config_path") if isinstance(getattr(section, key, None), str)]
        sections[name] = section.model_copy(update=dict.fromkeys(keys, ""))
    return config.model_copy(update=sections)


def _functions(loaded: LoadedConfig, launch: LaunchScript) -> Iterator[FunctionUse]:
    """Every function that a key names, loaded as a run would."""
    folders = [*launch.folders, launch.script.resolve().parent, *launch.script.resolve().parents]
    loader = FunctionsByPath()
    try:
        for section in SECTIONS:
            for key in SHAPES:
                value = getattr(getattr(loaded.config, section), key, ())
                for path in filter(None, (value,) if isinstance(value, str) else value):
                    yield _function(loader, f"--{key.replace('_', '-')}", f"{section}.{key}", path, folders)
    finally:
        loader.close()


def _function(loader: FunctionsByPath, flag: str, key: str, path: str, folders: Sequence[Path]) -> FunctionUse:
    place = file_of(path, folders)
    try:
        file = loader.check(key, place)
        names = unserved(file) if file is not None else []
        if names:
            raise PluginError(
                f"{key} = '{path}' imports what is not served here: {', '.join(names)}",
                code="PLG50",
                where=str(file),
                fix="import only the modules in docs/compat.md, or copy what is missing into the function's file",
            )
    except SlimeError as error:
        return FunctionUse(flag, place, error)
    return FunctionUse(flag, place)


def file_of(path: str, folders: Sequence[Path]) -> str:
    """``FILE.py:name`` for a dotted path whose module is a file below one of the folders; else the path itself."""
    module, _, name = path.replace(":", ".").rpartition(".")
    if path.partition(".")[0] == "slime" or ".py:" in path:
        return path
    for folder in folders:
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        if module and file.is_file():
            return f"{file}:{name}"
    return path

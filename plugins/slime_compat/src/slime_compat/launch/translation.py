"""Translation of a command line of slime's train.py or train_async.py to one of `slime run`, flag by flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from slime_compat.launch.flags import OTHERS, SlimeFlag
from slime_compat.launch.tritonforge import RM_TYPES, row_flags, unneeded
from slime_core.config.command_line import split
from slime_core.config.fields import core_keys
from slime_core.config.problems import Problem, raise_all
from slime_core.config.table_file import read_table
from slime_core.data.opening import open_rows
from slime_core.errors import SlimeError

Kind = Literal["same", "translated", "not needed", "refused", "required", "needs its data", "slime's default"]
SUPERVISED = ("slime.rollout.sft_rollout.generate_rollout", "slime.rollout.sft_rollout:generate_rollout")
WANDB_KEY, CUSTOM = "WANDB_API_KEY", "--custom-config-path"


@dataclass(slots=True, frozen=True)
class FlagUse:
    """A flag of a command line and what became of it; ``note`` says why, or what to do instead."""

    name: str
    values: tuple[str, ...]
    kind: Kind = "same"
    words: tuple[str, ...] = ()  # of `slime run`
    note: str = ""


@dataclass(slots=True)
class Translation:
    """Words of `slime run`, what became of each flag, and the variables that the run's environment gets."""

    uses: list[FlagUse] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """What follows `slime`."""
        return ["run", *(word for use in self.uses for word in use.words)]

    @property
    def notices(self) -> list[str]:
        """A line for each flag that is not needed or means something else here."""
        verbs = {"not needed": " is not needed", "translated": ""}
        return [
            f"notice: {use.name}{verbs[use.kind]}: {use.note}" for use in self.uses if use.kind in verbs and use.note
        ]

    def refusals(self, *kinds: Kind) -> list[Problem]:
        """Flags that became one of ``kinds``, as problems."""
        return [
            Problem(
                code="CFG04",
                what=f"{use.name} {'is missing' if use.kind == 'required' else 'cannot be had here'}",
                where=f"command line: {use.name}",
                fix=use.note,
            )
            for use in self.uses
            if use.kind in kinds
        ]

    def require_complete(self) -> None:
        """Refuse a command line with flags that cannot be had, or without one that it needs.

        Raises:
            ConfigError: CFG04 all of them, with what replaces each.
        """
        raise_all(self.refusals("refused", "required", "needs its data"))


def translate(argv: Sequence[str], *, ahead: int) -> Translation:
    """Translate what stands after train.py.

    Args:
        argv: the words.
        ahead: steps that rollouts run ahead of training, unless --max-staleness says so.
    """
    uses = list(_split(argv))
    flags = {use.name: use.values for use in uses if use.name.startswith("--")}
    line = SlimeLine(flags, flags_of(Path(next(iter(flags.get(CUSTOM, ())), ""))))
    translation = Translation(environment={WANDB_KEY: values[0]} if (values := line.values("--wandb-key")) else {})
    steps = StepNumbers(line)
    translation.uses = [_use(use, line, steps) for use in uses]
    bare = split(argv).recipe is None
    if bare and not line.has("--preset", "--resume", "--help"):
        translation.uses += [FlagUse(name, (), "required", (), note) for name, note in _required(line, argv)]
    defaults = [*_defaults(line, translation.words, ahead)] if bare else []
    types = line.has("--rm-type", "--rm-url") and not line.kernels
    plugins = ["--plugin", "models", *(["--plugin", "rm_math"] if types else [])]
    for words in (*defaults, *([plugins[at : at + 2] for at in range(0, len(plugins), 2)])):
        translation.uses.append(FlagUse(words[0], tuple(words[1:]), "slime's default", tuple(words)))
    return translation


def _split(argv: Sequence[str]) -> Iterator[FlagUse]:
    """Each flag with its values as typed; any other word by itself."""
    at = 0
    while at < len(argv):
        name, equals, value = argv[at].partition("=")
        at += 1
        if not name.startswith("--"):
            yield FlagUse(argv[at - 1], (), "same", (argv[at - 1],))
            continue
        start, limit = at, OTHERS[name].values if name in OTHERS else -1
        while not equals and at < len(argv) and not argv[at].startswith("--") and at - start != limit:
            at += 1
        values = (value,) if equals else tuple(argv[start:at])
        yield FlagUse(name, values, "same", (f"{name}={value}",) if equals else (name, *values))


class SlimeLine:
    """A command line's flags with their last values; ``keys``, of its file of custom keys, hold before them."""

    def __init__(self, flags: Mapping[str, tuple[str, ...]], keys: Mapping[str, tuple[str, ...]]) -> None:
        self._flags, self.keys = {**flags, **keys}, keys

    def has(self, *names: str) -> bool:
        """Whether one of the flags is given."""
        return any(name in self._flags for name in names)

    def values(self, name: str) -> tuple[str, ...]:
        """Values of a flag; empty where it is not given."""
        return self._flags.get(name, ())

    def first(self, name: str, default: str) -> str:
        """The first value of a flag, or slime's default."""
        return next(iter(self.values(name)), default)

    @property
    def supervised(self) -> bool:
        """Whether the run learns conversations, with no rollouts."""
        return self.first("--loss-type", "") == "sft_loss"

    @property
    def kernels(self) -> str:
        """The kernel task of TritonForge's that the line trains on; empty for others."""
        rm_type = self.first("--rm-type", "")
        return rm_type if rm_type in RM_TYPES else ""

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Flags and their last values."""
        return self._flags


def flags_of(file: Path) -> dict[str, tuple[str, ...]]:
    """Keys of a file of custom keys as flags with their values; those that are null or false switch nothing on.

    Raises:
        ConfigError: as `read_table`.
    """
    table = read_table(file, f"command line: {CUSTOM}") if file.is_file() else {}
    return {
        f"--{name.replace('_', '-')}": () if value is True else (str(value),)
        for name, value in table.items()
        if value is not None and value is not False
    }


def rows_of(data: str) -> int:
    """Rows of what --prompt-data names.

    Raises:
        ConfigError, DataError: as `open_rows`.
    """
    rows = open_rows(data, max_line_bytes=1 << 30)
    try:
        return len(rows)
    finally:
        rows.close()


class StepNumbers:
    """Numbers of steps that slime works out of the data's size.

    Steps are num_epoch * (rows // rollout_batch_size); a warm-up is its fraction of the optimizer steps, that is of
    lr_decay_iters or of steps * rollout_batch_size * n_samples_per_prompt // global_batch_size.
    """

    def __init__(self, line: SlimeLine) -> None:
        self._line = line

    def rollouts(self) -> int:
        """Steps of the run; raises what counting the rows raises, ValueError for what is no number."""
        if self._line.has("--num-rollout"):
            return int(self._line.first("--num-rollout", ""))
        rows = rows_of(self._line.first("--prompt-data", ""))
        return int(self._line.first("--num-epoch", "")) * (rows // self._prompts)

    def warmup(self) -> int:
        """Optimizer steps of the warm-up; raises as :meth:`rollouts`."""
        fraction = float(self._line.first("--lr-warmup-fraction", ""))
        if self._line.has("--lr-decay-iters"):
            return int(fraction * int(self._line.first("--lr-decay-iters", "")))
        samples = self._prompts * int(self._line.first("--n-samples-per-prompt", "1"))
        batch = int(self._line.first("--global-batch-size", "0")) or samples // self._steps_per_rollout
        return int(fraction * (self.rollouts() * samples // batch))

    @property
    def _prompts(self) -> int:
        return int(self._line.first("--rollout-batch-size", ""))

    @property
    def _steps_per_rollout(self) -> int:
        return int(self._line.first("--num-steps-per-rollout", "1"))


def _use(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse:
    """What becomes of one flag: as a rule of its own has it, else as its row."""
    name, values = use.name, use.values
    if line.kernels and (reason := unneeded(name, values, line.kernels)):
        return _unneeded(use, reason)
    if line.kernels and name in ("--gamma", "--max-turns"):
        return use
    special = _SPECIAL.get(name)
    if special is not None and (other := special(use, line, steps)) is not None:
        return other
    row = OTHERS.get(name)
    if row is None:
        return use
    if row.refused and not (values and set(values) <= set(row.idle)):
        return FlagUse(name, values, "refused", (), row.refused)
    if row.refused:
        return _unneeded(use, f"{' '.join(values)} is what slime does")
    if not row.to:
        return _unneeded(use, row.why)
    return _renamed(use, row)


def _renamed(use: FlagUse, row: SlimeFlag) -> FlagUse:
    if use.values == ("-1",):
        return _unneeded(use, "-1 switches it off")
    values = [row.value] if row.value else [row.renamed.get(value, value) for value in use.values]
    return FlagUse(use.name, use.values, "translated", (row.to, *values))


def _unneeded(use: FlagUse, why: str) -> FlagUse:
    return FlagUse(use.name, use.values, "not needed", (), why)


def _top_k(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    """-1 is off in slime, 0 here."""
    return FlagUse(use.name, use.values, "translated", (use.name, "0")) if use.values == ("-1",) else None


def _wandb_key(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse:
    return FlagUse(use.name, (), "translated", (), f"set as {WANDB_KEY}: a command line is seen by all users")


def _rm_type(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    return FlagUse(use.name, use.values, "translated", RM_TYPES[line.kernels]) if line.kernels else None


def _rollout_function(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    supervised = line.supervised and use.values[:1] and use.values[0] in SUPERVISED
    return _unneeded(use, "loss_type = sft_loss reads conversations itself") if supervised else None


def _debug_train_only(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    return _unneeded(use, "loss_type = sft_loss starts no engine") if line.supervised else None


def _kl_loss_coef(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    return None if line.has("--use-kl-loss") else _unneeded(use, "slime reads it only with --use-kl-loss")


def _opd_kl_coef(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    return None if line.has("--use-opd") else _unneeded(use, "slime reads it only with --use-opd")


def _custom_config(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    """Refuse a file with keys that slime reads and that as flags would not pass as they are."""
    texts = []
    for name, values in line.keys.items():
        key, flag = name[2:].replace("-", "_"), _use(FlagUse(name, values, "same", (name, *values)), line, steps)
        if flag.kind == "refused" or (flag.kind == "not needed" and key in core_keys()):
            texts.append(f"{key} ({flag.note})")
        elif flag.kind == "translated" and flag.words[:1] != (name,):
            texts.append(f"{key} (give the flag {name})")
    if not texts:
        return None
    return FlagUse(use.name, use.values, "refused", (), f"take out of {' '.join(use.values)}: {', '.join(texts)}")


def _load(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse:
    """Refuse a checkpoint from which slime would go on, unless it is --hf-checkpoint."""
    folder, hf = Path(line.first("--load", "")), line.first("--hf-checkpoint", "")
    if not is_checkpoint(folder) or (hf and folder.resolve() == Path(hf).resolve()):
        return _unneeded(use, "training starts from --hf-checkpoint; slime run --resume RUN_DIR continues a run")
    if (folder / "config.json").is_file():
        note = f"--hf-checkpoint {folder} without --load"
    else:
        origin = hf or "HF_FOLDER"
        note = (
            f"slime convert dist-to-hf {folder} FOLDER --origin-hf-dir {origin}, then --hf-checkpoint FOLDER "
            "without --load"
        )
    return FlagUse(use.name, use.values, "refused", (), f"{note} (slime starts from these weights)")


def is_checkpoint(folder: Path) -> bool:
    """Whether slime starts from a folder: a checkpoint of Megatron's, or a Hugging Face folder."""
    return any((folder / file).is_file() for file in ("latest_checkpointed_iteration.txt", "config.json"))


def _ref_load(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    """A reference of another name holds, in slime, the weights that train too."""
    hf, loads = line.first("--hf-checkpoint", ""), line.values("--load")
    model = Path(line.first(use.name, "")).name.removesuffix("_torch_dist")
    if not hf or Path(hf).name == model or (loads and is_checkpoint(Path(loads[0]))):
        return None
    note = f"the weights of --hf-checkpoint {hf} are trained; slime starts from --ref-load"
    return replace(use, kind="translated", note=note)


def _context(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    bounded = line.has("--rollout-max-context-len")
    return _unneeded(use, "--rollout-max-context-len bounds prompt and response") if bounded else None


def _eval_length(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    """Responses as long as the context, which slime's server cuts, leave room for a prompt as in training."""
    names = ("--rollout-max-context-len", "--rollout-max-response-len", "--rollout-max-prompt-len")
    try:
        context, response, prompt = (int(line.first(name, "0")) for name in names)
        if not context or int(line.first(use.name, "")) < context:
            return None
    except ValueError:
        return None
    length = str(context - prompt if prompt else response)
    note = f"lowered to {length}: prompt and response share --rollout-max-context-len"
    return FlagUse(use.name, use.values, "translated", (use.name, length), note)


def _rewards(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    estimator = line.first("--advantage-estimator", "")
    plain = estimator in ("ppo", "reinforce_plus_plus")
    return _unneeded(use, f"{estimator} normalises no rewards") if plain else None


def _tis_function(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    if line.has("--use-tis", "--get-mismatch-metrics"):
        return None
    return _unneeded(use, "slime calls it only with --use-tis or --get-mismatch-metrics")


def _loss_type(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    """slime reads a custom loss only with custom_loss; here its path is enough."""
    if line.first(use.name, "") != "custom_loss":
        return None
    if not line.has("--custom-loss-function-path"):
        return FlagUse(use.name, use.values, "refused", (), "--custom-loss-function-path FILE.py:FN, which it needs")
    return _unneeded(use, "custom_loss_function_path replaces the loss")


def _loss_function(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    if line.first("--loss-type", "") == "custom_loss":
        return None
    return _unneeded(use, "slime calls it only with --loss-type custom_loss")


def _details(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse:
    folder = str(Path(line.first(use.name, ""), "rollout_data"))
    return FlagUse(use.name, use.values, "translated", ("--save-debug-rollout-data", folder))


def _dump(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    """A template of files, ``dir/{rollout_id}.pt``, is its folder here."""
    path = next(iter(use.values), "")
    if "{rollout_id}" not in path:
        return None
    return FlagUse(use.name, use.values, "translated", (use.name, str(Path(path).parent)), "a folder, one file a step")


def _epochs(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse:
    if line.has("--num-rollout"):
        return _unneeded(use, "--num-rollout counts")
    counted = _counted(
        use, "--num-rollout", steps.rollouts, "--num-rollout N: steps, each of rollout_batch_size prompts"
    )
    if counted.words[1:] == ("0",):
        note = "--rollout-batch-size of at most the rows of --prompt-data: an epoch has no whole step"
        return FlagUse(use.name, use.values, "refused", (), note)
    if counted.words and line.has("--rollout-max-prompt-len", "--rollout-max-context-len"):
        return replace(counted, note="rows of long prompts are counted too; slime leaves them out first")
    return counted


def _warmup(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse:
    return _counted(use, "--lr-warmup-iters", steps.warmup, "--lr-warmup-iters N, in optimizer steps")


def _counted(use: FlagUse, flag: str, number: Callable[[], int], otherwise: str) -> FlagUse:
    try:
        return FlagUse(use.name, use.values, "translated", (flag, str(number())))
    except SlimeError as error:
        kind: Kind = "needs its data" if error.code == "CFG05" else "refused"
        return FlagUse(use.name, use.values, kind, (), f"{otherwise} (the rows cannot be counted: {error.what})")
    except ValueError:
        reason = "it needs numbers: --rollout-batch-size, and --num-epoch or --num-rollout"
        return FlagUse(use.name, use.values, "refused", (), f"{otherwise} ({reason})")


def _pairs(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    """One path alone is the set aime."""
    if len(use.values) != 1:
        return None
    return FlagUse(use.name, use.values, "translated", (use.name, "aime", *use.values), "a path alone is slime's aime")


def _routing_replay(use: FlagUse, line: SlimeLine, steps: StepNumbers) -> FlagUse | None:
    engine = line.has("--use-rollout-routing-replay")
    return _unneeded(use, "--use-rollout-routing-replay replays in those passes too") if engine else None


_SPECIAL: Mapping[str, Callable[[FlagUse, SlimeLine, StepNumbers], FlagUse | None]] = {
    "--rollout-top-k": _top_k,
    "--eval-top-k": _top_k,
    CUSTOM: _custom_config,
    "--load": _load,
    "--ref-load": _ref_load,
    "--sglang-context-length": _context,
    "--eval-max-response-len": _eval_length,
    "--disable-rewards-normalization": _rewards,
    "--custom-tis-function-path": _tis_function,
    "--custom-loss-function-path": _loss_function,
    "--loss-type": _loss_type,
    "--dump-details": _details,
    "--wandb-key": _wandb_key,
    "--rm-type": _rm_type,
    "--rollout-function-path": _rollout_function,
    "--debug-train-only": _debug_train_only,
    "--kl-loss-coef": _kl_loss_coef,
    "--opd-kl-coef": _opd_kl_coef,
    "--save-debug-rollout-data": _dump,
    "--load-debug-rollout-data": _dump,
    "--num-epoch": _epochs,
    "--lr-warmup-fraction": _warmup,
    "--eval-prompt-data": _pairs,
    "--use-routing-replay": _routing_replay,
}
"""Flags whose value, or another flag, decides; None leaves it to the flag's row, and without one passes it on."""

DEFAULTS = {
    "--train-backend": "megatron",
    "--rollout-engine": "sglang",
    "--actor-num-gpus-per-node": "8",
    "--n-samples-per-prompt": "1",
    "--kl-loss-type": "k1",
    "--lr-decay-style": "linear",
    "--weight-decay": "0.01",
    "--adam-beta2": "0.999",
    "--tool-key": "tools",
}
"""What slime and Megatron-LM have without a flag, and we have otherwise; a recipe stands before them."""


def _required(line: SlimeLine, argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags that a line lacks and whose default here would be another run: each with what to give."""
    if not (line.has("--num-epoch") or _last(argv, "--num-rollout")):
        yield "--num-rollout", "--num-rollout N: steps, each of rollout_batch_size prompts"
    if not (line.supervised or line.kernels or _last(argv, "--rollout-max-response-len")):
        note = "--rollout-max-response-len N, in tokens: slime has no bound without it, `slime run` has 256"
        yield "--rollout-max-response-len", note


def _defaults(line: SlimeLine, argv: Sequence[str], ahead: int) -> Iterator[list[str]]:
    """Flags for what slime has without a flag; ``argv`` are words of `slime run`."""
    yield from ([flag, value] for flag, value in DEFAULTS.items() if not line.has(flag))
    if line.supervised and not line.has("--apply-chat-template"):  # slime's masks render conversations themselves
        yield ["--apply-chat-template"]
    if not line.has("--colocate", "--no-colocate"):
        yield ["--no-colocate"]
    if line.has("--kl-coef") and not line.has("--kl-reward-type"):  # one estimator for both in slime
        yield ["--kl-reward-type", line.first("--kl-loss-type", "k1")]
    if line.has("--use-opd") and not line.has("--opd-kl-coef"):
        yield ["--opd-kl-coef", "1.0"]
    if not line.has("--calculate-per-token-loss", "--loss-aggregation"):
        yield ["--loss-aggregation", "rollout_mean"]
    if line.has("--moe-router-enable-expert-bias") and not line.has("--moe-router-bias-update-rate"):
        yield ["--moe-router-bias-update-rate", "0.001"]
    if line.first("--advantage-estimator", "grpo") in ("gspo", "cispo"):  # whose own clip stands before 0.2 here
        clip = _last(argv, "--eps-clip") or "0.2"
        yield from ([flag, clip] for flag in ("--eps-clip", "--eps-clip-high") if not line.has(flag))
    if line.first("--advantage-estimator", "") == "ppo":
        yield from (
            [flag, _last(argv, source) or default]
            for flag, source, default in (
                ("--critic-lr", "--lr", "1e-6"),
                ("--critic-lr-warmup-iters", "--lr-warmup-iters", "0"),
            )
            if not line.has(flag)
        )
    for name, default in (("temperature", "1.0"), ("top-p", "1.0"), ("top-k", "0")):
        if not line.has(f"--eval-{name}"):
            value = _last(argv, f"--rollout-{name}") or default
            yield [f"--eval-{name}", "0" if value == "-1" else value]
    if line.kernels:
        yield from row_flags(line.names)
    if ahead and not line.has("--max-staleness") and not line.supervised:
        yield ["--max-staleness", str(ahead)]


def _last(argv: Sequence[str], flag: str) -> str:
    """The last value given to ``flag`` or to its key; empty where there is none."""
    key, last = flag[2:].replace("-", "_"), ""
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == flag or (equals and name.rpartition(".")[2] == key):
            last = value if equals else argv[at + 1] if at + 1 < len(argv) else ""
    return last

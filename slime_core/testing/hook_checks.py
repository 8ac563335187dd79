"""What a hook may not do, looked at around each call: in `slime plugins check`, and in runs with `report.check_hooks`.

    change a read-only argument       PLG61, with plugin, hook, field and id
    change process-wide state         working folder, locale, signal handlers, limits: a notice
    draw from a global generator      a notice: a run that is resumed draws other numbers
    judge one group in two ways       one group in a hundred is judged twice: a notice, and a metric

May only be read: by slime_sampling and slime_generate the prompt; by slime_sample_done and slime_reward also the
samples' tokens, log-probs and versions, and the group's members; by slime_filter also rewards and status; by
slime_batch which samples a step has, and their tokens; by slime_advantage all of it; by slime_step_done the report.
"""

from __future__ import annotations

import copy
import locale
import os
import random
import resource
import signal
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.notices import notice
from slime_core.plugins.boundary import HookImpl, wrong
from slime_core.seeds import seed_of
from slime_core.types import Batch, Group, Prompt, Reward, Sample, StepReport

if TYPE_CHECKING:
    from slime_core.context import Context

PROMPT = ("id", "task", "position", "tokens", "label")
SAMPLE = ("id", "tokens", "response_length", "rollout_log_probs", "weight_versions", "rollout_id", "attempt", "label")
BATCH = ("sample_ids", "tokens", "offsets", "response_offsets")
SCORED = (*BATCH, "loss_mask", "reward", "group", "rollout")
REPORT = ("version", "stage", "step", "of", "metrics", "seconds")
OF_SAMPLES = {
    "slime_sample_done": SAMPLE,
    "slime_reward": SAMPLE,
    "slime_reward_types": SAMPLE,
    "slime_filter": (*SAMPLE, "reward", "status"),
}
OWN_SAMPLES = {"rollout_sample_hook_path", "custom_generate_function_path"}  # slime's, which may return other samples
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGQUIT")
LIMITS = ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE")
DRAWS = (
    "a run that is resumed draws other numbers; derive yours: "
    "random.Random(slime_core.seeds.seed_of(ctx.config.seed, sample.id))"
)
ONE_IN = 100  # groups that are judged twice


class HookChecks:
    """Of one run; what it finds beside PLG61 is a notice, said once."""

    def __init__(self) -> None:
        self._judged = self._unstable = 0

    @contextmanager
    def watch(self, impl: HookImpl, arguments: Mapping[str, Any], about: str) -> Iterator[None]:
        """Compare what a call may not change before and after it. Changes by concurrent calls count as its own.

        Raises:
            PluginError: PLG61 with plugin, hook, field and id.
        """
        fields, process, draws = dict(_fields(impl, arguments)), process_state(), generators()
        yield
        now = dict(_fields(impl, arguments))
        if changed := next((field for field in {**fields, **now} if fields.get(field) != now.get(field)), None):
            reason = "what was sampled and what others have found is not a hook's to change"
            fix = "work on a copy; annotations belong in sample.metadata"
            raise wrong(impl, f"changed {changed}", about, code="PLG61", why=reason, fix=fix)
        hook_name = f"{impl.provider.name}.{impl.hook}"
        for name, value in process_state().items():
            if value != process[name]:
                message = f"{hook_name} changed {name} from {process[name]} to {value}"
                notice(
                    (hook_name, name),
                    f"{message} ({about}); it is the run's: use absolute paths, or a process of your own",
                )
        for name, state in generators().items():
            if draws.get(name, state) != state:
                notice((hook_name, name), f"{hook_name} drew from {name}, or seeded it ({about}); {DRAWS}")

    def copy(self, group: Group, ctx: Context) -> Group | None:
        """The group to judge again, before the first reward can change it; None for most, by seed and position.

        In runs whose steps take groups as they finish nothing repeats anyway, and nothing is judged twice.
        """
        rollout = ctx.config.rollout
        free = rollout.max_staleness > 0 and rollout.async_schedule == "free"
        chosen = seed_of(ctx.config.seed, "twice", group.prompt.position) % ONE_IN == 0
        return copy.deepcopy(group) if chosen and not free and not ctx.evaluation else None

    def compare(self, impl: HookImpl, group: Group, first: Sequence[Reward], second: Sequence[Reward]) -> None:
        """Note the samples whose rewards are not those of the first time."""
        self._judged += 1
        pairs = list(zip(group.samples, first, second, strict=True))
        differ = [(s.id, a, b) for s, a, b in pairs if (a.value, a.kind, a.terms) != (b.value, b.kind, b.terms)]
        self._unstable += len(differ)
        if differ:
            name, a, b = differ[0]
            notice(
                ("twice", group.id),
                f"{impl.provider.name}.{impl.hook} judged {', '.join(name for name, _, _ in differ)} twice and "
                f"did not say the same: {name} had {a.value:g}, then {b.value:g}; such a run does not repeat",
            )

    def pop(self) -> dict[str, float]:
        """``reward/judged_twice`` groups and ``reward/unstable`` samples since the last call."""
        judged, unstable, self._judged, self._unstable = self._judged, self._unstable, 0, 0
        return {"reward/judged_twice": float(judged), "reward/unstable": float(unstable)} if judged else {}


def process_state() -> dict[str, Any]:
    """What is the process's, by its name."""
    state: dict[str, Any] = {"the working folder": os.getcwd(), "the locale": locale.setlocale(locale.LC_ALL)}
    state |= {f"the handler of {name}": signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    return state | {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}


def generators() -> dict[str, Any]:
    """States of the global generators that are loaded, ready to compare."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy_state: Any = np.random.get_state(legacy=False)
    states["numpy.random"] = (numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"])
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        states["torch's generator"] = torch.get_rng_state().numpy().tobytes()
    return states


def _fields(impl: HookImpl, arguments: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Names and checksums of a hook's read-only arguments."""
    fields = OF_SAMPLES.get(impl.hook, ()) if impl.provider.name not in OWN_SAMPLES else ()
    for value in arguments.values():
        if isinstance(value, Prompt):
            yield from _of(value, f"prompt '{value.id}'", PROMPT)
        elif isinstance(value, Group) and (fields or impl.hook == "slime_generate"):
            name = f"group '{value.id}'"
            yield from _of(value.prompt, f"prompt '{value.id}'", PROMPT)
            if fields:
                yield f"rollouts of {name}", _checksum(value.rollouts)
                yield f"samples of {name}", len(value.samples)
            for number, sample in enumerate(value.samples if fields else ()):
                yield from _of(sample, f"sample {number} of {name}", fields)
        elif isinstance(value, Sample) and fields:
            yield from _of(value, "the sample", fields)
        elif isinstance(value, Batch):
            yield from _of(value, "the batch", BATCH if impl.hook == "slime_batch" else SCORED)
            if impl.hook != "slime_batch":
                yield from ((f"columns[{name!r}] of the batch", _checksum(c)) for name, c in value.columns.items())
        elif isinstance(value, StepReport):
            yield from _of(value, "the report", REPORT)


def _of(value: Any, whose: str, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    return ((f"{name} of {whose}", _checksum(getattr(value, name))) for name in names)


def _checksum(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return hash((value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes())))
    return hash(repr(value))

"""`[plugin.kernelbench]`: what a run may set about problems, dialogues, rewards and the judge."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime_kernelbench.dialogue.returns import Mode

if TYPE_CHECKING:
    from slime_kernelbench.judge.options import JudgeOptions

Shape = Literal["log", "saturating", "linear", "clipped", "gain", "off"]
PRESETS: dict[str, dict[str, Any]] = {
    "": {},
    "tritonforge": {
        "return_mode": "trajectory",
        "early_end": "nothing",
        "stop_on": "speed",
        "stop_repeats": 0,
        "context": "history",
        "feedback_style": "results",
        "correct_weight": 0.2,  # 0.3 with compiled_weight
        "speed_weight": 1.0,
        "speed_shape": "gain",
        "speed_cap": 2.0,
    },
}
"""Defaults of the other keys, by preset."""


class Options(BaseModel):
    """`[plugin.kernelbench]`; every key is a flag of the same name too (`--max-turns 1`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    preset: Literal["", "tritonforge"] = Field(
        "", description="Other defaults of the keys below, in the whole run; tritonforge: docs/kernelbench.md."
    )

    # problems and prompts
    problems: str = Field("shipped", description="Our own (shipped), a file, a folder, or a hub data set.")
    heldout: float = Field(0.2, gt=0, lt=1, description="Share of problems that never train (kernelbench_heldout).")
    split_seed: int = Field(0, ge=0, description="Another number, another split; the run's seed does not move it.")
    family_problems: int = Field(64, ge=1, description="Operators of the task kernelbench_family.")
    family_heldout: int = Field(64, ge=1, description="Operators of kernelbench_family_heldout, which never train.")
    pupil_slips: float = Field(0.6, ge=0, le=1, description="How often the pupil of a warm-up slips at a place.")
    pupil_mends: float = Field(0.15, ge=0, le=1, description="How often it fixes a slip after feedback.")
    pupil_later: float = Field(0.25, ge=0, le=1, description="Share of its wrong kernels that are shown being fixed.")
    prompt_template: str = Field(
        "",
        description="TOML file of the prompt's and the feedback's words; short: sizes and forward alone; empty: ours.",
    )

    # the dialogue
    max_turns: int = Field(3, ge=1, le=64, description="Attempts at one kernel; 1 is single turn.")
    gamma: float = Field(0.4, ge=0, le=1, description="Discount of later turns' rewards in a turn's return.")
    return_mode: Mode = Field("discounted", description="What a turn trains on: see the table in docs/kernelbench.md.")
    early_end: Literal["repeat", "nothing"] = Field(
        "repeat",
        description="What a dialogue that ended early adds: its last reward, repeated to max_turns; or 0.",
    )
    ragged: Literal["reached", "padded"] = Field(
        "reached", description="A turn is compared with rollouts that reached it, or with all, ended ones padded."
    )
    context: Literal["full", "last", "best_last", "history"] = Field(
        "full",
        description="Attempts that the next turn sees: all, the last context_turns, the best and the last, or all as "
        "a history before the question.",
    )
    context_turns: int = Field(1, ge=1, description="Attempts that context = last keeps.")
    reasoning: Literal["keep", "drop"] = Field(
        "keep", description="Whether later turns see earlier reasoning (<think>); a turn's own is always trained."
    )
    stop_on: Literal["success", "speed", "correct", "never"] = Field(
        "success",
        description="What ends a dialogue: a right answer; success: as fast as stop_speedup where timed; speed: "
        "measured to be as fast.",
    )
    stop_speedup: float = Field(2.0, gt=0, description="Speed-up of a success, where speed is measured.")
    stop_repeats: int = Field(1, ge=0, description="End after this many identical answers in a row; 0 is never.")
    token_budget: int = Field(0, ge=0, description="Tokens that a dialogue may sample over all turns; 0 is no limit.")
    feedback_style: Literal["full", "brief", "kind", "results"] = Field(
        "full",
        description="brief: one line; kind: its first words, such as `wrong: values`, for small models; results: "
        "compiled, correct, runtime, speed-up and error, a line each.",
    )
    feedback_tokens: int = Field(256, ge=8, description="Tokens of each field of the feedback, such as a traceback.")

    # rewards
    reward_tier: Literal["auto", "correctness", "speed"] = Field(
        "auto", description="What is rewarded: speed where it was measured, never, or always (else it is masked)."
    )
    compiled_weight: float = Field(0.1, ge=0, description="Of a kernel that imports and compiles.")
    correct_weight: float = Field(0.9, gt=0, description="Of a right answer, beside compiled_weight.")
    cases_weight: float = Field(0.0, ge=0, description="Of the share of cases that agree, until all do.")
    speed_weight: float = Field(0.5, ge=0, description="Of the speed term of a right answer.")
    speed_shape: Shape = Field(
        "log",
        description="log2(1 + s), s / (1 + s), s, min(s, speed_cap), or s - 1 from 0 to speed_cap, of speed-up s.",
    )
    speed_cap: float = Field(3.0, gt=0, description="Highest speed term of the shapes clipped and gain.")
    hack_reward: float = Field(0.0, description="Of a kernel that was caught cheating; at most an honest failure's.")
    reward_range: tuple[float, float] | None = Field(
        None, description="Lowest and highest reward of a turn, as others rely on it; weights beyond it are refused."
    )

    # the judge
    judge_url: str = Field("", description="URL of `slime kernelbench serve`; empty judges in this process.")
    judge_token_env: str = Field("SLIME_KERNELBENCH_TOKEN", description="Environment variable with its token.")
    judge_workers: int = Field(0, ge=0, description="Candidates judged at once; 0 is one a core.")
    judge_timeout: float = Field(30.0, gt=0, description="Seconds for one candidate, all stages together.")
    judge_retries: int = Field(1, ge=0, description="Of a candidate that could not be judged; then it is masked.")
    max_unjudged: int = Field(64, ge=0, description="Candidates in a row that cannot be judged end the run; 0: never.")
    judge_compile: bool = Field(False, description="Compile ahead of time for judge_target too; needs no GPU.")
    judge_target: str = Field("cuda:90", description="What that compiles for.")
    judge_gpus: tuple[str, ...] = Field((), description="UUIDs of GPUs that measure speed; none: correctness alone.")
    judge_allow: tuple[str, ...] = Field((), description="Names of torch that may compute outside of kernels.")
    judge_tf32: bool = Field(False, description="Products of float32 may round their inputs to TF32.")
    sandbox: Literal["auto", "strong", "medium", "none"] = Field(
        "auto", description="Least isolation, of commands and of the service; a run has reward.sandbox_level."
    )
    i_trust_this_code: bool = Field(False, description="Required by sandbox = none; of commands and of the service.")

    # what is written down
    record_tokens: bool = Field(True, description="Write the token ids of every turn to kernelbench/turns.jsonl.")

    def judging(self) -> JudgeOptions:
        """What a judge in this process, or a worker of the service, needs of these."""
        from slime_kernelbench.judge.options import JudgeOptions

        return JudgeOptions(
            workers=self.judge_workers or len(os.sched_getaffinity(0)),
            level=self.sandbox,
            i_trust_this_code=self.i_trust_this_code,
            seconds=self.judge_timeout,
            compile=self.judge_compile,
            target=self.judge_target,
            allow=self.judge_allow,
            tf32=self.judge_tf32,
            gpus=self.judge_gpus,
        )

    @model_validator(mode="after")
    def _preset_defaults(self) -> Options:
        defaults = {key: value for key, value in PRESETS[self.preset].items() if key not in self.model_fields_set}
        self.__dict__.update(defaults)
        return self

    @model_validator(mode="after")
    def _rewards_fit(self) -> Options:
        from slime_kernelbench.reward import check_weights

        check_weights(self)
        return self

"""Keys of [eval], and of an evaluation set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from slime_core.config.problems import Problem, conflict
from slime_core.config.sections import ResumeClass, Section, empty_for, key
from slime_core.config.sections.cluster import ClusterSection
from slime_core.config.sections.data import DataSection, DataTask, conflicts_of_tasks
from slime_core.config.sections.rollout import RolloutSection

EVALUATION = ResumeClass("safe", "evaluation draws nothing that trains")
ASYNC = "eval.eval_async"
BETWEEN_STEPS = "--no-eval-async   which evaluates between two steps"


class EvalTask(DataTask):
    """One entry of `[[eval.eval_tasks]]`: a set with its own sampling, template and judgement."""

    temperature: float = key(-1.0, "0 is greedy; -1 takes eval_temperature.", ge=-1)
    top_p: float = key(0.0, "Nucleus; 1 is off, 0 takes eval_top_p.", ge=0, le=1)
    top_k: int = key(-1, "0 is off; -1 takes eval_top_k.", ge=-1)
    max_response_len: int = key(0, "New tokens; 0 takes eval_max_response_len.", ge=0)
    apply_chat_template: Literal["auto", "on", "off"] = key("auto", "auto: as data.apply_chat_template.")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Laid over data.apply_chat_template_kwargs.")
    category_key: str = key("", "Column of a question's category; empty takes eval_category_key.")
    pass_reward: float = key(0.0, "Reward from which a sample is right; 0 takes eval_pass_reward.")


class EvalSection(Section):
    """What is measured on the way."""

    eval_interval: int = key(0, "Steps between evaluations; 0 is only at the end of a stage.", EVALUATION, ge=0)
    eval_async: bool = key(
        False, "Train during an evaluation: one of several engines keeps the weights of its version.", EVALUATION
    )
    eval_prompt_data: tuple[str, ...] = key((), "NAME PATH pairs, as in slime.", EVALUATION, path="data")
    eval_config: str = key(
        "", "slime's file of evaluation sets (YAML, JSON or TOML), added to eval_tasks.", EVALUATION, path="input"
    )
    eval_tasks: tuple[EvalTask, ...] = key((), "Evaluation sets, each with its own plugin and reward.", EVALUATION)
    skip_eval_before_train: bool = key(False, "No evaluation before the first step.", EVALUATION)
    n_samples_per_eval_prompt: int = key(1, "Samples a prompt.", EVALUATION, ge=1)
    eval_temperature: float = key(0.0, "0 is greedy.", EVALUATION, ge=0)
    eval_top_p: float = key(1.0, "Nucleus; 1 is off.", EVALUATION, gt=0, le=1)
    eval_top_k: int = key(0, "0 is off.", EVALUATION, ge=0)
    eval_max_response_len: int = key(0, "New tokens; 0 takes rollout_max_response_len.", EVALUATION, ge=0)
    eval_pass_reward: float = key(1.0, "Reward from which a sample is right, for pass@k and maj@k.", EVALUATION)
    eval_category_key: str = key(
        "", "Column of a question's category; empty: the metadata's category, where rows have one.", EVALUATION
    )
    eval_function_path: Annotated[str, empty_for("slime.rollout.sglang_rollout.generate_rollout")] = key(
        "", "Function by path.", EVALUATION
    )

    def conflicts(
        self,
        cluster: ClusterSection,
        data: DataSection,
        rollout: RolloutSection,
        plugins: Sequence[str],
        adapters: Sequence[str],
        *,
        engines: int,
        routed: bool,
    ) -> Iterator[Problem]:
        """What cannot hold together; ``routed``: others than slime choose the engine of a request."""
        context, length = rollout.rollout_max_context_len, self.eval_max_response_len
        if context and length >= context:
            yield rollout.no_room("eval.eval_max_response_len", length)
        yield from conflicts_of_tasks("eval.eval_tasks", self.eval_tasks, plugins, adapters)
        if len(self.eval_prompt_data) % 2:
            yield conflict(
                "eval_prompt_data is not made of pairs",
                ["eval.eval_prompt_data"],
                why="it lists NAME PATH NAME PATH ...",
                fix="--eval-prompt-data NAME PATH",
            )
        if self.eval_config:
            yield conflict(
                "a stage sets its own eval_config",
                ["eval.eval_config"],
                why="the file is read once, for the whole recipe",
                fix="name it in [eval], or give the stage eval_tasks",
            )
        if self.eval_async and not rollout.debug_train_only:
            yield from self._beside_training(cluster, data, rollout, engines, routed)

    def notices(self, rollout: RolloutSection) -> Iterator[str]:
        """Sentences about settings that are legal and seldom meant."""
        if self.eval_temperature == 0 and self.n_samples_per_eval_prompt > 1:
            yield "eval_temperature = 0 is greedy: all n_samples_per_eval_prompt samples will be equal"
        for task in self.eval_tasks:
            if task.temperature == 0 and (task.n_samples_per_prompt or self.n_samples_per_eval_prompt) > 1:
                yield f"evaluation set {task.name}: temperature = 0 is greedy: all samples of a question will be equal"
        if rollout.debug_train_only and self.eval_async:
            yield "eval_async: no effect with debug_train_only, which has no engine"
        if rollout.debug_train_only and (self.eval_prompt_data or self.eval_tasks):
            yield "debug_train_only has no engine: evaluation sets are left out"

    def _beside_training(
        self, cluster: ClusterSection, data: DataSection, rollout: RolloutSection, engines: int, routed: bool
    ) -> Iterator[Problem]:
        """What keeps an engine from serving one version while others are trained."""
        if routed:
            yield conflict(
                f"eval_async = true with rollout_router = {rollout.rollout_router}",
                [ASYNC, "rollout.rollout_router"],
                why="SGLang's router spreads requests over all servers, also over the one that keeps the weights",
                fix=f"--rollout-router builtin   or   {BETWEEN_STEPS}",
            )
        if cluster.colocate:
            yield conflict(
                "eval_async = true with colocate = true",
                [ASYNC, "cluster.colocate"],
                why="an engine that shares the trainer's device cannot generate while it trains",
                fix=f"--no-colocate   or   {BETWEEN_STEPS}",
            )
        if engines < 2:
            yield conflict(
                "eval_async = true with one engine",
                [ASYNC, "rollout.rollout_num_engines"],
                why="one engine keeps the weights that are evaluated, and rollouts need another",
                fix=f"--rollout-num-engines 2   or   {BETWEEN_STEPS}",
            )
        functions = {
            "rollout.custom_generate_function_path": rollout.custom_generate_function_path,
            "rollout.rollout_function_path": rollout.rollout_function_path,
            "eval.eval_function_path": self.eval_function_path,
            "data.tasks": any(task.generate for task in data.tasks),
            "eval.eval_tasks": any(task.generate for task in self.eval_tasks),
        }
        for path in (path for path, named in functions.items() if named):
            yield conflict(
                f"eval_async = true with {path}",
                [ASYNC, path],
                why="functions by path reach all engines by one address: an evaluation could get tokens of other "
                "weights",
                fix=f"{BETWEEN_STEPS}   or generate in a plugin's slime_generate",
            )

"""Keys of [train]: how the policy learns.

A key that nothing would read is an error, not a surprise in a curve. Stages that do not learn by an estimator are left
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from slime_core.algorithms import OFFLINE, Algorithm, algorithms
from slime_core.config.presets import settle
from slime_core.config.problems import Problem, conflict
from slime_core.config.sections import KIND, LIMIT, MACHINE, MODEL, AutoBool, AutoCount, ResumeClass, fact, key
from slime_core.config.sections.data import DataSection
from slime_core.config.sections.lora import LoraKeys, lora_conflicts
from slime_core.config.sections.rollout import RolloutSection
from slime_core.config.values import show

LOSS = ResumeClass("unsafe", "another loss or advantage")
SCHEDULE = ResumeClass("unsafe", "another optimizer or schedule")
of_tis, of_rs = partial(key, switch="use_tis"), partial(key, switch="use_rs")
megatron_hook = partial(key, reader="megatron hooks")

NARROW = 0.1  # an eps_clip that no sequence's geometric mean ratio reaches
UNIVERSAL = ("disable_grpo_std_normalization",)
"""Keys that mean the same to estimators that do not read them: those divide by nothing anyway."""

FEW_TOKENS = 4096
"""Of a micro-batch, which every machine holds."""


def _adamw(name: Any) -> Any:
    """Take Megatron's ``adam``, whose weight decay is decoupled, for what it is."""
    return "adamw" if name == "adam" else name


class TrainSection(LoraKeys):
    """How the policy learns."""

    train_backend: str = key("fsdp", "fsdp (FSDP2), megatron, or one of a plugin.", KIND, min_length=1, once=True)
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Of compute; masters are float32. auto: bfloat16 where the processor has it.", KIND, once=True
    )
    freeze_vision_tower: bool = key(
        True, "A model of pictures: its tower and projector keep their weights; false trains them.", KIND, once=True
    )
    true_on_policy_mode: bool = key(
        False,
        "Trainer and embedded engine compute with the same kernels: log-probs agree bit for bit.",
        KIND,
        once=True,
    )
    loss_type: str = key("policy_loss", f"policy_loss, {', '.join(OFFLINE)}, or a name from slime_loss.", LOSS)
    dpo_beta: float = key(0.1, "Of dpo_loss: weight of the log-ratio to the reference model.", LOSS, gt=0)
    dpo_objective: Literal["sigmoid", "ipo"] = key("sigmoid", "Of dpo_loss.", LOSS)
    dpo_label_smoothing: float = key(
        0.0, "Of dpo_loss with sigmoid: the share of pairs whose order is wrong.", LOSS, ge=0, lt=0.5
    )
    advantage_estimator: str = key(
        "grpo",
        ", ".join(one.name for one in algorithms().values() if one.terms) + ", or a name from slime_advantage.",
        LOSS,
    )
    disable_grpo_std_normalization: bool = key(False, "Centre rewards in a group, do not divide by std.", LOSS)
    grpo_std_scope: Literal["group", "batch"] = key("group", "Whose standard deviation divides.", LOSS)
    credit_level: Literal["trajectory", "turn", "token"] = key(
        "trajectory", "What a reward is credited to: the whole response, a turn and what led there, a token.", LOSS
    )
    normalize_advantages: bool = key(False, "Whiten advantages over the step's trainable tokens.", LOSS)
    pass_k: int = key(4, "k of the pass_at_k estimator.", LOSS, ge=1)
    gae_gamma: float = key(1.0, "Discount a token (a turn, with credit_level = turn).", LOSS, ge=0, le=1)
    gae_lambda: float = key(1.0, "Of generalised advantage estimation.", LOSS, ge=0, le=1)
    policy_objective: Literal["auto", "clip", "cispo"] = key(
        "auto", "clip: PPO's clipped ratio. cispo: clipped weight on the log-prob. auto: the estimator's.", LOSS
    )
    importance_level: Literal["auto", "token", "sequence", "sequence_token"] = key(
        "auto", "What a ratio is of: a token, the sequence's geometric mean (GSPO), its token variant.", LOSS
    )
    loss_aggregation: Literal["auto", "rollout_mean", "token_mean", "rollout_sum", "constant"] = key(
        "auto", "Mean of token means, mean of tokens, token sums, or sums / loss_divisor; auto: the estimator's.", LOSS
    )
    loss_divisor: int = key(0, "Tokens a rollout for constant; 0 is rollout_max_response_len.", LOSS, ge=0)
    eps_clip: float = key(0.0, "The ratio's lower bound is 1 - eps_clip; 0: the estimator's.", LOSS, ge=0, le=1)
    eps_clip_high: float = key(0.0, "The upper bound is 1 + eps_clip_high; 0: the estimator's.", LOSS, ge=0)
    eps_clip_c: float = key(0.0, "Dual clip: bound of the loss at negative advantages; 0 is off.", LOSS, ge=0)
    use_rollout_logprobs: bool = key(False, "Old log-probs are the engine's, not the trainer's.", LOSS)
    use_tis: bool = key(False, "Weigh tokens by trainer over engine probability (importance sampling).", LOSS)
    tis_level: Literal["token", "sequence", "geometric"] = of_tis("token", "What that ratio is of.", LOSS)
    tis_mode: Literal["truncate", "clip", "mask"] = of_tis(
        "truncate", "Cut above tis_clip, and where tis_clip_low is set (clip) below it; mask: weight 0 outside.", LOSS
    )
    tis_clip: float = of_tis(2.0, "Upper bound of the weight.", LOSS, gt=0)
    tis_clip_low: float = of_tis(0.0, "Lower bound of the weight.", LOSS, ge=0)
    tis_batch_normalize: bool = of_tis(False, "Divide weights by their mean over the optimizer step.", LOSS)
    use_rs: bool = key(False, "Reject tokens or sequences whose ratio is out of bounds.", LOSS)
    rs_level: Literal["token", "sequence", "geometric"] = of_rs("geometric", "What that ratio is of.", LOSS)
    rs_lower_bound: float = of_rs(0.0, "0 is 1 / rs_upper_bound.", LOSS, ge=0)
    rs_upper_bound: float = of_rs(2.0, "Ratio above which is rejected.", LOSS, gt=0)
    rs_veto_threshold: float = key(0.0, "Reject sequences with a token ratio below; 0 is off.", LOSS, ge=0)
    routing_replay: Literal["off", "rollout", "policy"] = key(
        "off",
        "Experts of a token in training: rollout replays the engine's (R3), policy those of the old log-probs' pass.",
        LOSS,
        once=True,
    )
    use_opsm: bool = key(False, "Mask sequences that are off-policy and have a negative advantage.", LOSS)
    opsm_delta: float = key(
        1e-4, "Mean of old minus new log-prob above which use_opsm masks.", LOSS, ge=0, switch="use_opsm"
    )
    kl_loss_coef: float = key(0.0, "Weight of KL to the reference model in the loss.", LOSS, ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = key(
        "k3", "Schulman's estimators; k1 has no gradient; low_var_kl is k3 within [-10, 10].", LOSS
    )
    use_unbiased_kl: bool = key(False, "Multiply the loss's KL by the importance ratio.", LOSS)
    kl_coef: float = key(0.0, "Weight of KL to the reference model in the reward.", LOSS, ge=0)
    kl_reward_type: Literal["k1", "k2", "k3", "low_var_kl"] = key("k1", "Estimator of the reward's KL.", LOSS)
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.", LOSS)
    teacher_load: str = key("", "Teacher model folder of on-policy distillation.", MODEL, path="model")
    teacher_place: Literal["trainer", "engine"] = key(
        "trainer", "Where the teacher scores: in the trainer, or a frozen engine (at temperature 1 only).", MACHINE
    )
    opd_kl_coef: float = key(0.0, "Weight of reverse KL to the teacher, added to advantages.", LOSS, ge=0)
    critic_load: str = key("", "Critic model folder; empty starts from the policy's weights.", MODEL, path="model")
    critic_lr: float = key(1e-5, "The critic's peak learning rate.", SCHEDULE, ge=0)
    critic_lr_warmup_iters: int = key(0, "Optimizer steps of the critic's linear warm-up.", SCHEDULE, ge=0)
    value_clip: float = key(0.2, "How far new values may leave the old ones; 0 is off.", LOSS, ge=0)
    num_critic_only_steps: int = key(0, "Steps of a stage in which only the critic learns.", SCHEDULE, ge=0)
    max_nonfinite_steps: int = key(
        0, "Optimizer steps in a row with a loss or gradient that is not finite, skipped before an error.", LIMIT, ge=0
    )
    ref_load: str = key("", "Reference model folder; empty is the starting weights.", MODEL, path="model")
    optimizer: Annotated[Literal["adamw", "adamw_8bit", "paged_adamw_8bit"], BeforeValidator(_adamw)] = key(
        "adamw",
        "AdamW's moments: float32, 8 bits (bitsandbytes), or 8 bits that leave a full GPU for its host; FSDP.",
        KIND,
    )
    lr: float = key(1e-6, "Peak learning rate.", SCHEDULE, ge=0)
    min_lr: float = key(0.0, "Where decay ends.", SCHEDULE, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = key("constant", "After the warm-up.", SCHEDULE)
    lr_warmup_iters: int = key(0, "Optimizer steps of linear warm-up.", SCHEDULE, ge=0)
    lr_decay_iters: int = key(0, "Optimizer steps to min_lr; 0 is the whole stage.", SCHEDULE, ge=0)
    weight_decay: float = key(0.0, "AdamW's, on matrices only.", SCHEDULE, ge=0)
    adam_beta1: float = key(0.9, "AdamW.", SCHEDULE, ge=0, lt=1)
    adam_beta2: float = key(0.98, "AdamW.", SCHEDULE, ge=0, lt=1)
    adam_eps: float = key(1e-8, "AdamW.", SCHEDULE, gt=0)
    clip_grad: float = key(1.0, "Global gradient norm; 0 is off.", SCHEDULE, ge=0)
    moe_router_bias_update_rate: float = key(
        0.0, "How far an optimizer step moves router biases against the load of their experts.", SCHEDULE, ge=0
    )
    num_steps_per_rollout: int = key(1, "Optimizer steps a rollout.", SCHEDULE, ge=1)
    global_batch_size: int = key(0, "Rollouts an optimizer step; 0 follows num_steps_per_rollout.", SCHEDULE, ge=0)
    max_tokens_per_gpu: AutoCount = key(
        0,
        "Tokens of a packed micro-batch. 0 or auto: 4096, on a GPU up to 32768, by its memory.",
        MACHINE,
        ge=0,
    )
    fsdp_cpu_offload: AutoBool = key(
        None,
        "Masters and moments in host memory, with several ranks shards and gradients too: the same bits, slower. "
        "auto: where a GPU is too small.",
        MACHINE,
        once=True,
    )
    context_parallel_size: int = key(
        1,
        "Ranks that share each sequence; [megatron] may name the same number.",
        MACHINE,
        ge=1,
        once=True,
    )
    tensor_parallel_size: int = key(
        1,
        "FSDP: ranks that share each layer's products, where transformers has a plan of them.",
        MACHINE,
        ge=1,
        once=True,
    )
    fsdp_shard_size: int = key(
        0,
        "FSDP: ranks that hold the weights and their optimizer once, the others copies (HSDP); 0: all.",
        MACHINE,
        ge=0,
        once=True,
    )
    gradient_checkpointing: AutoBool = key(
        None, "Recompute layers in the backward pass. auto: where a GPU is too small.", MACHINE
    )
    gradient_checkpointing_layers: int = key(
        0, "With it: so many layers alone, of each pipeline stage the first; 0 is all of them.", MACHINE, ge=0
    )
    activation_offload: bool = key(
        False,
        "The inputs of recomputed layers wait in host memory between the passes.",
        MACHINE,
        switch="gradient_checkpointing",
    )
    compile: Literal["auto", "on", "off"] = key(
        "auto", "Compile what layers do between products: auto does on GPUs, from 1B parameters on.", MACHINE
    )
    logprob_chunk_tokens: int = key(
        0, "Rows of [tokens, vocab] logits alive at once; 0: by bytes, 64 MiB on a CPU.", MACHINE, ge=0
    )
    custom_advantage_function_path: str = key("", "Function by path.", LOSS)
    custom_loss_function_path: str = key("", "Function by path.", LOSS)
    custom_tis_function_path: str = key(
        "", "Function by path in place of use_tis, use_rs and rs_veto_threshold.", LOSS
    )
    custom_pg_loss_reducer_function_path: str = key("", "Function by path.", LOSS)
    rollout_data_postprocess_path: str = key("", "Function by path, called with the step's columns.", LOSS, fills=True)
    custom_convert_samples_to_train_data_path: str = key("", "Function by path.", LOSS, fills=True)
    custom_megatron_init_path: str = megatron_hook("", "Function by path, called where a Megatron rank starts.", LOSS)
    custom_megatron_before_log_prob_hook_path: str = megatron_hook("", "Function by path, before scoring.", LOSS)
    custom_megatron_before_train_step_hook_path: str = megatron_hook("", "Function by path, before a step.", LOSS)

    @model_validator(mode="before")
    @classmethod
    def custom_loss_is_the_policys(cls, data: Any) -> Any:
        """Take THUDM/slime's loss type ``custom_loss`` for the policy loss, which a function replaces."""
        by_function = isinstance(data, dict) and data.get("custom_loss_function_path")
        custom = by_function and data.get("loss_type") == "custom_loss"
        return data | {"loss_type": "policy_loss"} if custom else data

    @property
    def offline(self) -> bool:
        """Whether the stage neither generates nor judges: its responses are the data's."""
        return self.loss_type in OFFLINE

    @property
    def estimator(self) -> str:
        """The advantage estimator's name; offline losses have their own."""
        return OFFLINE.get(self.loss_type, self.advantage_estimator)

    @property
    def algorithm(self) -> Algorithm | None:
        """The estimator, if it is one of the core and no function replaces it."""
        return None if self.custom_advantage_function_path else algorithms().get(self.estimator)

    @property
    def _policy_loss(self) -> bool:
        return self.loss_type == "policy_loss" and not self.custom_loss_function_path

    @property
    def _teacher_reader(self) -> str:
        """The setting that asks for a teacher; empty where nothing does."""
        if self.algorithm and self.algorithm.distils:
            return f"advantage_estimator = {self.algorithm.name}"
        return f"opd_kl_coef = {self.opd_kl_coef}" if self.opd_kl_coef > 0 else ""

    def conflicts(
        self, data: DataSection, rollout: RolloutSection, *, log_probs_of_samples: bool
    ) -> Iterator[Problem]:
        """What cannot hold together, or nothing would read.

        ``log_probs_of_samples``: samples may bring the teacher's log-probs.
        """
        yield from self._batches(data, rollout)
        yield from self._schedule()
        yield from self._optimizer()
        yield from lora_conflicts(self)
        if self.true_on_policy_mode:
            yield from self._true_on_policy(rollout)
        if self.offline:
            return
        yield from self._kl()
        yield from self._teacher(rollout, log_probs_of_samples)
        if self.algorithm and self.algorithm.groups:
            yield from self._groups(data, rollout)
        if self.algorithm and self.algorithm.terms:
            yield from self._unread(self.algorithm)
        if self._policy_loss:
            yield from self._clip()
            yield from self._corrections()

    def notices(self, rollout: RolloutSection, *, log_probs_of_samples: bool) -> Iterator[str]:
        """Sentences about settings that are legal and seldom meant."""
        if self.offline:
            return
        yield from self._teacher_notices(log_probs_of_samples)
        yield from self._staleness_notices(rollout)
        if self._policy_loss:
            yield from self._quantisation_notices(rollout)
            yield from settle(self)._loss_notices(rollout)

    def _batches(self, data: DataSection, rollout: RolloutSection) -> Iterator[Problem]:
        prompts, n, batch = rollout.rollout_batch_size, rollout.n_samples_per_prompt, self.global_batch_size
        if any(task.n_samples_per_prompt not in (0, n) for task in data.tasks):
            return  # rollouts a step then depend on the tasks that were drawn
        rollouts, steps = prompts * n, self.num_steps_per_rollout
        if batch > rollouts:
            problem = f"global_batch_size = {batch} is more than there is"
            fix = f"set global_batch_size to {rollouts} or less, or raise rollout_batch_size"
        elif batch and rollouts % batch:
            problem = f"{rollouts} rollouts do not divide into optimizer steps of global_batch_size = {batch}"
            fix = f"set global_batch_size to a divisor of {rollouts}, such as {_divisor(rollouts, batch)}"
        elif batch and steps > 1 and batch * steps != rollouts:
            problem = f"num_steps_per_rollout = {steps} and global_batch_size = {batch} contradict each other"
            fix = "set one of them and leave the other out"
        elif not batch and rollouts % steps:
            problem = f"{rollouts} rollouts do not divide into num_steps_per_rollout = {steps} optimizer steps"
            fix = f"set num_steps_per_rollout to a divisor of {rollouts}, such as {_divisor(rollouts, steps)}"
        else:
            return
        keys = ["rollout.rollout_batch_size", "rollout.n_samples_per_prompt"]
        keys += [f"train.{name}" for name in self.changed(["global_batch_size", "num_steps_per_rollout"])]
        product = f"rollout_batch_size * n_samples_per_prompt = {prompts} * {n} = {rollouts} rollouts a step"
        yield conflict(problem, keys, why=product, fix=fix)

    def _schedule(self) -> Iterator[Problem]:
        if self.min_lr > self.lr:
            yield conflict(
                f"min_lr = {self.min_lr} is above lr = {self.lr}",
                ["train.min_lr", "train.lr"],
                why="the learning rate decays from lr to min_lr",
                fix=f"set min_lr to at most {self.lr}",
            )
        if self.lr_decay_iters and self.lr_warmup_iters >= self.lr_decay_iters:
            yield conflict(
                f"lr_warmup_iters = {self.lr_warmup_iters} is not below lr_decay_iters = {self.lr_decay_iters}",
                ["train.lr_warmup_iters", "train.lr_decay_iters"],
                why="decay starts where the warm-up ends",
                fix="lower lr_warmup_iters or raise lr_decay_iters",
            )

    def _optimizer(self) -> Iterator[Problem]:
        if self.optimizer == "paged_adamw_8bit" and self.fsdp_cpu_offload:
            yield conflict(
                "optimizer = paged_adamw_8bit with fsdp_cpu_offload",
                ["train.optimizer", "train.fsdp_cpu_offload"],
                why="both say where moments lie: memory that the driver moves, or the host's",
                fix="set optimizer = adamw_8bit, or leave fsdp_cpu_offload out",
            )

    def _true_on_policy(self, rollout: RolloutSection) -> Iterator[Problem]:
        mode, fix = "true_on_policy_mode", "--no-true-on-policy-mode"
        backends = {"rollout.rollout_engine": ("local", rollout.rollout_engine)}
        backends["train.train_backend"] = ("fsdp", self.train_backend)
        for name, (needed, value) in backends.items():
            if value != needed:
                reason = "the kernels that give the same bits are those of the embedded engine and of FSDP"
                problem, keys = f"{mode} with {name.partition('.')[2]} = {value}", [f"train.{mode}", name]
                yield conflict(problem, keys, why=reason, fix=f"set it to {needed}, or {fix}")
        if rollout.rollout_quantization == "fp8":
            keys, reason = [f"train.{mode}", "rollout.rollout_quantization"], "the engine's weights are then rounded"
            yield conflict(f"{mode} with rollout_quantization = fp8", keys, why=reason, fix=fix)
        cut = {"rollout_top_p": rollout.rollout_top_p < 1, "rollout_top_k": rollout.rollout_top_k > 0}
        for name in (name for name, cuts in cut.items() if cuts):
            reason = "the engine's log-probs are then of a part of the distribution, the trainer's of the whole one"
            problem, keys = f"{mode} with {name}", [f"train.{mode}", f"rollout.{name}"]
            yield conflict(problem, keys, why=reason, fix=f"leave {name} out, or {fix}")

    def _kl(self) -> Iterator[Problem]:
        if self.kl_coef > 0 and self.kl_loss_coef > 0:
            yield conflict(
                f"kl_coef = {self.kl_coef} and kl_loss_coef = {self.kl_loss_coef}",
                ["train.kl_coef", "train.kl_loss_coef"],
                why="each takes KL to the reference model into account, one in the reward and one in the loss: it "
                "would count twice",
                fix="set one of them to 0",
            )

    def _teacher(self, rollout: RolloutSection, log_probs_of_samples: bool) -> Iterator[Problem]:
        reader, temperature = self._teacher_reader, rollout.rollout_temperature
        if reader and not self.teacher_load and not log_probs_of_samples:
            yield conflict(
                f"{reader} has no teacher",
                [f"train.{reader.partition(' ')[0]}", "train.teacher_load"],
                why="teacher_load is empty, and no plugin or function is named that could set "
                "sample.teacher_log_probs",
                fix="--teacher-load DIR",
            )
        if self.teacher_load and self.teacher_place == "engine" and temperature != 1:
            yield conflict(
                f"teacher_place = engine with rollout_temperature = {temperature:g}",
                ["train.teacher_place", "rollout.rollout_temperature"],
                why="an engine scores at temperature 1; the student's log-probs are at the temperature of the draw",
                fix="set teacher_place = trainer, which scores at the draw's temperature, or rollout_temperature = 1",
            )

    def _groups(self, data: DataSection, rollout: RolloutSection) -> Iterator[Problem]:
        alone = rollout.largest_group(data) == 1 and not rollout.rollout_function_path  # which sizes its own groups
        if alone and self.loss_type == "policy_loss":
            yield conflict(
                f"advantage_estimator = {self.advantage_estimator} with n_samples_per_prompt = 1",
                ["rollout.n_samples_per_prompt", "train.advantage_estimator"],
                why="a reward is compared with the others of its group; alone, every advantage is 0 and nothing is "
                "learnt",
                fix="set n_samples_per_prompt to 2 or more, or advantage_estimator to reinforce_plus_plus",
            )

    def _unread(self, algorithm: Algorithm) -> Iterator[Problem]:
        """Keys that the estimator does not read."""
        name = algorithm.name
        for option in self.changed(selective()):
            if name in (readers := selective()[option]):
                continue
            yield conflict(
                f"{option} = {show(getattr(self, option))} with advantage_estimator = {name}",
                [f"train.{option}", "train.advantage_estimator"],
                why=f"{name} does not read {option}; {', '.join(readers)} {'does' if len(readers) == 1 else 'do'}",
                fix=f"leave {option} out, or set advantage_estimator = {readers[0]} (both in the same [[stage]])",
            )
        discounts = algorithm.discounts or self.credit_level != "trajectory"
        if "gae_gamma" in algorithm.options and self.changed(["gae_gamma"]) and not discounts:
            yield conflict(
                f"gae_gamma = {self.gae_gamma} with advantage_estimator = {name} and credit_level = trajectory",
                ["train.gae_gamma", "train.advantage_estimator"],
                why="a reward that is credited to the whole response is not discounted along it",
                fix="leave gae_gamma out, or set credit_level to turn or token",
            )

    def _clip(self) -> Iterator[Problem]:
        train = settle(self)
        if 0 < self.eps_clip_c <= 1:
            yield conflict(
                f"eps_clip_c = {self.eps_clip_c}",
                ["train.eps_clip_c"],
                why="dual clip bounds a ratio above 1; at 1 or below it stops tokens that have not moved",
                fix="set eps_clip_c to 3, or to 0 to switch it off",
            )
        elif self.eps_clip_c and train.policy_objective != "clip":
            yield conflict(
                f"eps_clip_c = {self.eps_clip_c} with policy_objective = {train.policy_objective}",
                ["train.eps_clip_c", "train.policy_objective", "train.advantage_estimator"],
                why="dual clip belongs to the clipped ratio; cispo bounds its weights by eps_clip_high",
                fix="leave eps_clip_c out, or set policy_objective = clip",
            )
        if self.loss_divisor and train.loss_aggregation != "constant":
            yield conflict(
                f"loss_divisor = {self.loss_divisor} with loss_aggregation = {train.loss_aggregation}",
                ["train.loss_divisor", "train.loss_aggregation", "train.advantage_estimator"],
                why="only the constant aggregation divides by it",
                fix="leave loss_divisor out, or set loss_aggregation = constant",
            )

    def _corrections(self) -> Iterator[Problem]:
        if self.use_tis and self.use_rollout_logprobs:
            yield conflict(
                "use_tis with use_rollout_logprobs",
                ["train.use_tis", "train.use_rollout_logprobs"],
                why="with use_rollout_logprobs the policy's ratio is taken against the engine already; use_tis would "
                "count the gap between engine and trainer twice",
                fix="--no-use-tis   or   --no-use-rollout-logprobs",
            )
        low, high = self.tis_clip_low, self.tis_clip
        if self.use_tis and low > high:
            yield _bounds("tis_clip_low", low, "tis_clip", high, "no weight lies between them")
        low, high = self.rs_lower_bound or 1 / self.rs_upper_bound, self.rs_upper_bound
        if self.use_rs and low > high:
            reason = "every sample would be rejected (0 is 1 / upper)"
            yield _bounds("rs_lower_bound", low, "rs_upper_bound", high, reason)

    def _teacher_notices(self, log_probs_of_samples: bool) -> Iterator[str]:
        reader = self._teacher_reader
        if reader and not self.teacher_load and log_probs_of_samples:
            yield f"{reader}: teacher_load is empty, so every sample has to bring teacher_log_probs"
        if self.teacher_load and not reader:
            yield "teacher_load is set and nothing reads it; set opd_kl_coef, or on_policy_distillation"
        if reader.startswith("advantage_estimator") and self.opd_kl_coef > 0:
            yield (
                f"opd_kl_coef = {self.opd_kl_coef} adds to {self.advantage_estimator}'s own term: the teacher counts "
                f"{1 + self.opd_kl_coef:g} times"
            )

    def _staleness_notices(self, rollout: RolloutSection) -> Iterator[str]:
        corrected = self.use_tis or self.use_rollout_logprobs
        if rollout.partial_rollout and not rollout.mask_offpolicy_in_partial_rollout and not corrected:
            yield (
                "partial_rollout trains on tokens of older weights as if the present ones had made them; "
                "mask_offpolicy_in_partial_rollout leaves them out, use_tis weighs them"
            )
        if rollout.max_staleness and not corrected:
            yield (
                f"max_staleness = {rollout.max_staleness} trains on tokens of older weights as if the present ones "
                "had made them; use_tis weighs them, use_rollout_logprobs clips against those that did"
            )

    def _quantisation_notices(self, rollout: RolloutSection) -> Iterator[str]:
        if rollout.rollout_quantization != "fp8":
            return
        gap = "rollout_quantization = fp8: the engine's log-probs differ from the trainer's by rounding"
        if self.use_tis:
            yield f"{gap}; use_tis weighs tokens by their ratio (on unless a correction is named: --no-use-tis)"
        elif not (self.use_rs or self.use_rollout_logprobs or self.rs_veto_threshold or self.custom_tis_function_path):
            yield f"{gap}, and no correction is on: --use-tis"

    def _loss_notices(self, rollout: RolloutSection) -> Iterator[str]:
        """Notices on the loss of a settled section."""
        if self.kl_loss_coef > 0 and self.kl_loss_type == "k1" and not self.use_unbiased_kl:
            yield "kl_loss_type = k1 has no gradient towards the reference in expectation; k3 is the usual choice"
        if self.importance_level != "token" and self.policy_objective == "clip" and self.eps_clip >= NARROW:
            yield (
                f"importance_level = {self.importance_level} with eps_clip = {self.eps_clip:g}: a sequence's ratio is "
                "a geometric mean and hardly leaves 1, so the clip never acts; GSPO has 3e-4 and 4e-4"
            )
        if self.policy_objective == "cispo" and self.eps_clip < 1:
            yield (
                f"policy_objective = cispo with eps_clip = {self.eps_clip:g}: weights are raised to at least "
                f"{1 - self.eps_clip:g}; the published form has no lower bound (eps_clip = 1)"
            )
        if self.use_tis and self.tis_clip < 1:
            yield f"tis_clip = {self.tis_clip:g} is below 1: tokens on which both sides agree are cut too"
        cut = rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0
        if cut and (self.use_tis or self.use_rs or self.use_rollout_logprobs):
            yield (
                "rollout_top_p or rollout_top_k cuts the distribution that the engine's log-probs are of, and the "
                "trainer's are of the whole one: the ratio between them holds that difference too"
            )
        one_step = self.num_steps_per_rollout == 1 and self.global_batch_size == 0
        if self.use_opsm and one_step and not self.use_rollout_logprobs:
            yield (
                "use_opsm with one optimizer step a rollout masks nothing, since old and new log-probs are the same; "
                "compare with the engine's: --use-rollout-logprobs"
            )
        switches = {name: fact(info, "switch") for name, info in type(self).model_fields.items()}
        for switch in dict.fromkeys(filter(None, switches.values())):
            idle = self.changed(name for name in switches if switches[name] == switch)
            if idle and not getattr(self, switch) and not self.custom_tis_function_path:
                yield f"{', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing without {switch}"


def selective() -> dict[str, tuple[str, ...]]:
    """Keys that only some estimators read, with the names of those."""
    learners = [algorithm for algorithm in algorithms().values() if algorithm.terms]
    keys = dict.fromkeys(option for one in learners for option in one.options if option in TrainSection.model_fields)
    readers = {name: tuple(one.name for one in learners if name in one.options) for name in keys}
    return {name: names for name, names in readers.items() if name not in UNIVERSAL and len(names) < len(learners)}


def _divisor(of: int, near: int) -> int:
    """The largest divisor of ``of`` that is at most ``near``."""
    return next(d for d in range(min(near, of), 0, -1) if of % d == 0)


def _bounds(low_key: str, low: float, high_key: str, high: float, why: str) -> Problem:
    return conflict(
        f"{low_key} = {low:g} is above {high_key} = {high:g}",
        [f"train.{low_key}", f"train.{high_key}"],
        why=why,
        fix=f"set {low_key} below 1 and {high_key} above it",
    )

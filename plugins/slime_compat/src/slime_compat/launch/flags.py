"""The flags of slime's train.py that have another name here, none, or cannot be had. Every other one is the same.

The table in docs/slime_flags.md is `slime compat flags --markdown`, from these rows and the names in slime_flags.txt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ALL = -1


@dataclass(slots=True, frozen=True, kw_only=True)
class SlimeFlag:
    """What a flag of slime's is here: ``to`` another flag, else not needed (``why``), or ``refused``.

    A refused flag would change the run; the text is what to do instead. With a value of ``idle`` it changes nothing
    and is not needed.
    """

    values: int = 1  # words that follow it; ALL: those up to the next flag
    to: str = ""
    value: str = ""  # of ``to``, where the flag stands alone
    renamed: Mapping[str, str] = field(default_factory=dict)  # values that are called otherwise here
    why: str = ""
    refused: str = ""
    idle: tuple[str, ...] = ()


def _needless(why: str, *names: str, values: int = 0) -> dict[str, SlimeFlag]:
    return {f"--{name}": SlimeFlag(values=values, why=why) for name in names}


def _refused(instead: str, *names: str, values: int = 1, idle: tuple[str, ...] = ()) -> dict[str, SlimeFlag]:
    return {f"--{name}": SlimeFlag(values=values, refused=instead, idle=idle) for name in names}


_DEEPGEMM = tuple(f"megatron-deepgemm{kind}-forward-{part}" for kind in ("", "-moe") for part in ("layers", "modules"))
_MEMORY = "a plugin with slime_megatron_init may record memory"

_RUN = {
    **_needless("checkpoints are in the run directory: --run-dir DIR", "save", values=1),
    **_needless("the run directory has final/, a Hugging Face folder", "save-hf", values=1),
    **_needless("checkpoints always hold the optimizer", "no-save-optim"),
    **_needless("a new run begins with a fresh optimizer and its seed", "no-load-optim", "no-load-rng"),
    **_needless("it belongs to slime's own CI; see --verify-step", "ci-test", "ci-disable-kl-checker"),
    **_needless("it belongs to slime's own CI; see --verify-step", "ci-load-grad-norm", "ci-save-grad-norm", values=1),
    **_needless("train_rollout_logprob_abs_diff is a metric", "ci-train-rollout-logprob-abs-diff-threshold", values=1),
    **_refused("slime run --resume RUN_DIR continues where a run ended", "start-rollout-id", idle=("0",)),
    **_refused("export them before the run", "train-env-vars", idle=("{}",)),
    **_refused("export HTTP_PROXY before the run", "http-proxy"),
}

_MODEL = {
    **_needless("the family is that of config.json", "model-name", values=1),
    **_refused("--make-vocab-size-divisible-by N", "padded-vocab-size"),
    **_refused("a plugin with slime_model_bridge", "custom-model-provider-path"),
    **_refused("leave it out: layers are megatron-core's own", "qwen-gdn-backend"),
    **_refused("leave it out: layers are megatron-core's own", *_DEEPGEMM, values=ALL),
    **_needless("Transformer Engine is used where it is installed", "transformer-impl", values=1),
}

_MACHINE = {
    "--sglang-server-concurrency": SlimeFlag(to="--server-concurrency"),
    "--sglang-router-request-timeout-secs": SlimeFlag(to="--rollout-request-timeout"),
    "--sglang-enable-deterministic-inference": SlimeFlag(values=0, to="--rollout-deterministic"),
    "--sglang-context-length": SlimeFlag(to="--rollout-max-context-len"),
    **_needless("every draw comes from --seed", "sglang-random-seed", values=1),
    **_needless("--colocate does it", "sglang-enable-memory-saver"),
    **_refused("--rollout-router sglang: slime starts it itself", "sglang-router-ip", "sglang-router-port"),
    **_refused("--rollout-num-gpus-per-engine N", "sglang-tp-size", "sglang-tensor-parallel-size"),
    **_needless("--colocate does it", "offload"),
    **_needless("slime chooses", "num-gpus-per-node", "router-policy", values=1),
    **_needless("servers that die are always restarted", "use-fault-tolerance"),
    **_needless("slime waits for servers", "rollout-health-check-first-wait", values=1),
    **_needless("the engine sends its own requests", "use-distributed-post"),
    **_needless("there is no Ray object store between rollout and training", "rollout-data-transport", values=1),
    **_needless("the folder of an update is removed once every server has read it", "update-weight-disk-keep-files"),
    **_needless("check_weights compares tensors after each update", "check-weight-update-equal"),
    **_refused("--engine-topology FILE.toml", "sglang-config", "prefill-num-servers"),
    **_refused("[megatron] in a recipe", "megatron-config-path"),
    **_refused("--max-staleness N bounds how stale a rollout may be", "update-weights-interval", idle=("1",)),
    **_refused("--colocate: the trainer frees its memory while servers work", "release-train", values=0),
    **_refused(
        "leave it out: whole weights are sent, and checked tensor by tensor", "update-weight-mode", idle=("full",)
    ),
    **_refused(
        "leave it out: whole weights are sent, and checked tensor by tensor",
        *("update-weight-delta-encoding", "update-weight-delta-checksum", "update-weight-local-checkpoint-dir"),
    ),
    **_refused(
        "--update-weight-disk-dir DIR on a file system that servers share", "custom-update-weight-post-write-path"
    ),
    **_refused("leave it out: context parallelism is megatron-core's own", "allgather-cp", values=0),
}

_DATA = {
    **_needless("an own data_source_path replaces it", "disable-rollout-global-dataset"),
    **_needless("every draw comes from --seed", "rollout-seed", values=1),
    **_needless("a generator knows its tasks", "rollout-task-type", values=1),
    **_needless("a buffer is asked until it answers", "fetch-trajectory-retry-times", values=1),
    **_refused("--load-debug-rollout-data FOLDER", "load-forge-rollout-data"),
    **_refused("leave it out: a step takes exactly rollout_batch_size prompts", "min-batch-collection-ratio"),
    **_refused("leave it out: a dump is replayed whole", "load-debug-rollout-data-subsample"),
}

_BATCHES = {
    **_needless("micro-batches are packed by tokens", "use-dynamic-batch-size", "balance-data", "balance-by-flops"),
    **_needless("micro-batches are packed by tokens: max_tokens_per_gpu", "micro-batch-size", values=1),
    **_needless("scoring packs by max_tokens_per_gpu", "log-probs-max-tokens-per-gpu", values=1),
    **_needless("packs have no padding", "data-pad-size-multiplier", values=1),
    **_needless("the loss is computed in chunks: logprob_chunk_tokens", "recompute-loss-function"),
    "--log-probs-chunk-size": SlimeFlag(to="--logprob-chunk-tokens"),
}

_LOSS = {
    "--gamma": SlimeFlag(to="--gae-gamma"),
    "--lambd": SlimeFlag(to="--gae-lambda"),
    "--calculate-per-token-loss": SlimeFlag(values=0, to="--loss-aggregation", value="token_mean"),
    "--opd-teacher-load": SlimeFlag(to="--teacher-load"),
    "--opd-type": SlimeFlag(to="--teacher-place", renamed={"sglang": "engine", "megatron": "trainer"}),
    **_needless("opd_kl_coef above 0 does it", "use-opd"),
    **_needless("kl_loss_coef above 0 does it", "use-kl-loss"),
    **_needless("losses that read no advantages compute none", "disable-compute-advantages-and-returns"),
    **_refused(
        "--custom-reward-post-process-path FUNCTION, or an estimator by plugin",
        "disable-rewards-normalization",
        values=0,
    ),
    **_refused("name the folder itself: --ref-load or --teacher-load", "ref-ckpt-step", "opd-teacher-ckpt-step"),
    **_refused("leave it out: the reference is fixed; a [[stage]] may name another ref_load", "ref-update-interval"),
    **_refused("leave it out: the old policy's log-probs are the engine's own", "keep-old-actor", values=0),
    **_refused("leave it out: the metric entropy comes from training", "use-rollout-entropy", values=0),
    "--use-rollout-routing-replay": SlimeFlag(values=0, to="--routing-replay", value="rollout"),
    "--use-routing-replay": SlimeFlag(values=0, to="--routing-replay", value="policy"),
}

_OPTIMIZER = {
    **_refused("leave it out: Adam keeps its moments", "use-stateless-adam", values=0),
    **_refused("leave it out: a [[stage]] begins with a fresh optimizer", "reset-optimizer-states", values=0),
    **_refused(
        "leave it out: all parameters train", "only-train-params-name-list", "freeze-params-name-list", values=ALL
    ),
    **_refused("leave it out: all parameters train", "freeze-indexer", values=0),
}

_FSDP = {  # of releases with an FSDP trainer
    **_needless("tensors are gathered one at a time", "fsdp-state-dict-cpu-offload", "fsdp-full-params"),
    **_needless("ranks have groups for host memory too", "fsdp-cpu-backend", values=1),
    **_needless("attention within packs is that of the device", "attn-implementation", values=1),
    **_refused("--lr-warmup-iters N", "warmup-ratio"),
}

_EVALUATION = {
    **_refused(
        "eval.eval_tasks='[{name = ..., prompt_data = ..., input_key = ...}]'", "eval-input-key", "eval-label-key"
    ),
    **_refused(
        "leave it out: evaluation sets take data.tool_key and reward.reward_key", "eval-tool-key", "eval-reward-key"
    ),
    **_refused(
        "--eval-max-response-len N bounds an evaluation's responses", "eval-max-context-len", "eval-max-prompt-len"
    ),
    **_refused("leave it out: responses end where the model ends them", "eval-min-new-tokens"),
}

_REPORT = {
    **_needless("each sample's figures are kept: slime show", "log-multi-turn", "log-passrate", "log-correct-samples"),
    **_needless("each term of a reward has its metric", "log-reward-category", values=1),
    **_needless("train_rollout_logprob_abs_diff is always measured", "get-mismatch-metrics"),
    **_needless("trackers get the run directory's name", "disable-wandb-random-suffix"),
    **_needless("a step has one number in every tracker", "wandb-always-use-train-step"),
    **_refused("slime replay RUN --step N makes a recorded step again", "save-debug-train-data"),
    **_refused("--profile N records ranks and embedded engines in step N", "profile-target", values=ALL),
    **_refused(_MEMORY, "record-memory-history", values=0),
    **_refused(_MEMORY, "memory-recorder", "memory-snapshot-dir", "memory-snapshot-num-steps"),
}

OTHERS: Mapping[str, SlimeFlag] = {
    **_RUN,
    **_MODEL,
    **_MACHINE,
    **_DATA,
    **_BATCHES,
    **_LOSS,
    **_OPTIMIZER,
    **_FSDP,
    **_EVALUATION,
    **_REPORT,
}


def slime_flags() -> tuple[str, ...]:
    """Every flag that slime's arguments.py and its arguments for SGLang add, as ``--name``."""
    return tuple(Path(__file__).with_name("slime_flags.txt").read_text().split())


def flag_rows() -> list[tuple[str, str, str]]:
    """Every flag of slime's, what it is here, and why; the rows of `slime compat flags`."""
    return [(name, *_row(name)) for name in sorted(slime_flags())]


def _row(name: str) -> tuple[str, str]:
    row = RULES.get(name) or OTHERS.get(name)
    if row is None:
        return "the same", ""
    if row.to:
        renamed = ", ".join(f"{value} is {name}" for value, name in row.renamed.items())
        words = "the same" if row.to == name else f"`{' '.join(filter(None, [row.to, row.value]))}`"
        return words, renamed or row.why
    if row.refused:
        idle = f"; {', '.join(row.idle)} is accepted" if row.idle else ""
        return "refused", row.refused + idle
    return "not needed", row.why


def _ruled(why: str, *names: str) -> dict[str, SlimeFlag]:
    return {f"--{name}": SlimeFlag(to=f"--{name}", why=why) for name in names}


RULES: Mapping[str, SlimeFlag] = {
    "--num-epoch": SlimeFlag(
        to="--num-rollout", why="num_epoch * (rows // rollout_batch_size), with rows of prompts that are too long"
    ),
    "--lr-warmup-fraction": SlimeFlag(to="--lr-warmup-iters", why="the fraction of lr_decay_iters, or of all steps"),
    "--wandb-key": SlimeFlag(to="WANDB_API_KEY", why="in the environment, which other users do not see"),
    "--load": SlimeFlag(why="training starts from --hf-checkpoint; another folder that is a checkpoint is refused"),
    "--dump-details": SlimeFlag(to="--save-debug-rollout-data", why="DIR/rollout_data"),
    "--disable-rewards-normalization": SlimeFlag(
        refused=OTHERS["--disable-rewards-normalization"].refused + "; not needed with ppo and reinforce_plus_plus"
    ),
    **_ruled("training starts from --hf-checkpoint, in slime from it", "ref-load"),
    **_ruled("required, as in slime, without --num-epoch", "num-rollout"),
    **_ruled("required: without it slime has no bound", "rollout-max-response-len"),
    **_ruled("lowered where it leaves no room for a prompt in --rollout-max-context-len", "eval-max-response-len"),
    **_ruled("not needed without --use-tis or --get-mismatch-metrics", "custom-tis-function-path"),
    **_ruled("not needed without --loss-type custom_loss", "custom-loss-function-path"),
    **_ruled("custom_loss is not needed, and refused without --custom-loss-function-path", "loss-type"),
    **_ruled("not needed without --use-kl-loss", "kl-loss-coef"),
    **_ruled("not needed without --use-opd", "opd-kl-coef"),
    **_ruled("-1 is 0", "rollout-top-k", "eval-top-k"),
    **_ruled("a path alone is the set aime", "eval-prompt-data"),
    **_ruled("DIR/{rollout_id}.pt is DIR", "save-debug-rollout-data", "load-debug-rollout-data"),
    **_ruled("not needed with --loss-type sft_loss", "debug-train-only"),
    **_ruled("slime.rollout.sft_rollout.generate_rollout is not needed with sft_loss", "rollout-function-path"),
    **_ruled("keys that another flag stands for here are refused", "custom-config-path"),
}
"""For the table: what the rules of `translation` make of flags that depend on others."""

VARIABLES = {
    "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "slime rounds weights to int4 in training and serves them so. Neither is "
    "here: servers have bfloat16, four times the memory (--rollout-quantization fp8: twice)"
}
"""Those of the environment that change a run of slime's when they are 1, and what is otherwise here."""


def differences(variables: Mapping[str, str]) -> list[str]:
    """What variables switch on in slime, and nothing does here."""
    return [f"{name}=1: {text}" for name, text in VARIABLES.items() if variables.get(name) == "1"]

"""A command line of slime's train.py or train_async.py in; words of `slime run` out. Both doors use it.

Most flags have the same name here and pass as they are. A row of the table below is one that has not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slime_cli.failure import CliSession, report_failure
from slime_cli.main import main as slime
from slime_core.errors import ConfigError
from slime_core.report.text import say


@dataclass(slots=True, frozen=True)
class Other:
    """A flag of slime's that is none here: ``to`` is ours, empty where nothing is needed; ``why`` says so.

    A flag with ``refused`` cannot be left out without another run coming out: the text is what to do.
    """

    values: int  # words that follow it; -1: all until the next flag
    to: str = ""
    value: str = ""  # of ``to``, where the flag stands alone
    renamed: Mapping[str, str] = field(default_factory=dict)  # values that are called otherwise here
    why: str = ""
    refused: str = ""


def _needless(why: str, *names: str, values: int = 0) -> dict[str, Other]:
    return {f"--{name}": Other(values, why=why) for name in names}


def _refused(instead: str, *names: str, values: int = 1) -> dict[str, Other]:
    return {f"--{name}": Other(values, refused=instead) for name in names}


SLIMES = {
    "--train-backend": "megatron",
    "--rollout-engine": "sglang",
    "--actor-num-gpus-per-node": "8",
    "--n-samples-per-prompt": "1",
    "--kl-loss-type": "k1",
}
"""What slime has without a flag, and we have otherwise; a recipe stands before them."""
ROUTING_REPLAY = ("use-routing-replay", "use-rollout-routing-replay")
DEEPGEMM = tuple(f"megatron-deepgemm{kind}-forward-{part}" for kind in ("", "-moe") for part in ("layers", "modules"))
OTHERS: dict[str, Other] = {
    "--gamma": Other(1, to="--gae-gamma"),
    "--lambd": Other(1, to="--gae-lambda"),
    "--log-probs-chunk-size": Other(1, to="--logprob-chunk-tokens"),
    "--sglang-server-concurrency": Other(1, to="--server-concurrency"),
    "--opd-teacher-load": Other(1, to="--teacher-load"),
    "--opd-type": Other(1, to="--teacher-place", renamed={"sglang": "engine", "megatron": "trainer"}),
    **_needless("opd_kl_coef above 0 does it", "use-opd"),
    **_needless("micro-batches are packed by tokens", "use-dynamic-batch-size", "balance-data", "balance-by-flops"),
    **_needless("kl_loss_coef above 0 does it", "use-kl-loss"),
    **_needless("colocate does it", "offload"),
    **_needless("dead servers are always started again", "use-fault-tolerance"),
    **_needless("servers are waited for", "rollout-health-check-first-wait", values=1),
    **_needless("checkpoints lie in the run directory: --run-dir", "save", values=1),
    **_needless("a run goes on by slime run --resume RUN_DIR", "load", values=1),
    **_needless("a run's directory has final/", "save-hf", values=1),
    "--calculate-per-token-loss": Other(0, to="--loss-aggregation", value="token_mean"),
    **_needless("packs are as long as they are", "data-pad-size-multiplier", values=1),
    **_needless("servers are asked by the engine itself", "use-distributed-post"),
    **_needless("there is no Ray object store in the way", "rollout-data-transport", values=1),
    **_needless("the model's family comes from config.json", "model-name", values=1),
    **_needless("slime sets its own", "num-gpus-per-node", "router-policy", values=1),
    **_needless("texts are decoded by slime", "rollout-skip-special-tokens"),
    **_needless("every draw comes from --seed", "rollout-seed", values=1),
    **_needless("each sample's figures are kept: slime show", "log-multi-turn", "log-passrate", "log-correct-samples"),
    **_refused("a plugin with slime_model_bridge", "custom-model-provider-path"),
    "--num-epoch": Other(1, refused="--num-rollout N: steps, each of rollout_batch_size prompts"),
    "--wandb-key": Other(1, refused="export WANDB_API_KEY; a command line is seen by every user of the machine"),
    "--sglang-config": Other(1, refused="--engine-topology FILE.toml"),
    "--megatron-config-path": Other(1, refused="[megatron] of a recipe"),
    "--update-weights-interval": Other(1, refused="--max-staleness N bounds how old a rollout's weights may be"),
    "--release-train": Other(0, refused="--colocate: the trainer gives its memory back while servers work"),
    "--train-env-vars": Other(1, refused="export them before the run"),
    "--use-stateless-adam": Other(0, refused="leave it out: Adam keeps its moments"),
    "--reset-optimizer-states": Other(0, refused="leave it out: a [[stage]] begins with a fresh optimizer"),
    "--only-train-params-name-list": Other(-1, refused="leave it out: all parameters train"),
    "--freeze-params-name-list": Other(-1, refused="leave it out: all parameters train"),
    "--freeze-indexer": Other(0, refused="leave it out: all parameters train"),
    **_needless("losses that read no advantages have none computed", "disable-compute-advantages-and-returns"),
    **_needless("check_weights compares tensors after each update", "check-weight-update-equal"),
    **_needless("it belongs to slime's own CI; see --verify-step", "ci-test", "ci-disable-kl-checker"),
    **_needless("it belongs to slime's own CI; see --verify-step", "ci-load-grad-norm", "ci-save-grad-norm", values=1),
    **_needless("train_rollout_logprob_abs_diff is a metric", "ci-train-rollout-logprob-abs-diff-threshold", values=1),
    **_needless("train_rollout_logprob_abs_diff is always measured", "get-mismatch-metrics"),
    **_needless("trackers get the run directory's name", "disable-wandb-random-suffix"),
    **_needless("a step has one number in every tracker", "wandb-always-use-train-step"),
    **_needless("scoring packs by max_tokens_per_gpu", "log-probs-max-tokens-per-gpu", values=1),
    **_needless("each term of a reward has its metric", "log-reward-category", values=1),
    **_needless("the loss is taken in chunks: logprob_chunk_tokens", "recompute-loss-function"),
    **_needless("a buffer is asked until it answers", "fetch-trajectory-retry-times", values=1),
    **_needless("a generator knows its tasks", "rollout-task-type", values=1),
    **_needless("the folder of an update is removed once every server has it", "update-weight-disk-keep-files"),
    **_refused(
        "leave it out: whole weights are sent, checked tensor by tensor",
        *("update-weight-mode", "update-weight-delta-encoding", "update-weight-delta-checksum"),
        "update-weight-local-checkpoint-dir",
    ),
    **_refused(
        "--update-weight-disk-dir on a file system that the servers share", "custom-update-weight-post-write-path"
    ),
    **_refused("leave it out: routing replay is not supported", *ROUTING_REPLAY, values=0),
    **_refused("leave it out: context parallelism is megatron-core's own", "allgather-cp", values=0),
    **_refused("leave it out: layers are megatron-core's own", "qwen-gdn-backend"),
    **_refused("leave it out: layers are megatron-core's own", *DEEPGEMM, values=-1),
    **_refused(
        "--custom-reward-post-process-path FUNCTION, or an estimator by plugin",
        "disable-rewards-normalization",
        values=0,
    ),
    **_refused("--data-source-path CLASS, or a plugin with slime_prompts", "disable-rollout-global-dataset", values=0),
    **_refused("--save-debug-rollout-data FOLDER; slime show and metrics.jsonl have the rest", "dump-details"),
    **_refused("slime replay RUN --step N makes a recorded step again", "save-debug-train-data"),
    **_refused("--load-debug-rollout-data FOLDER", "load-forge-rollout-data"),
    **_refused("leave it out: a dump is replayed whole", "load-debug-rollout-data-subsample"),
    **_refused(
        "eval.eval_tasks='[{name = ..., prompt_data = ..., input_key = ...}]'", "eval-input-key", "eval-label-key"
    ),
    **_refused(
        "leave it out: evaluation sets take data.tool_key and reward.reward_key", "eval-tool-key", "eval-reward-key"
    ),
    **_refused(
        "--eval-max-response-len N bounds an evaluation's answers", "eval-max-context-len", "eval-max-prompt-len"
    ),
    **_refused("leave it out: answers end where the model ends them", "eval-min-new-tokens"),
    **_refused(
        "name the folder itself: --ref-load or --teacher-load FOLDER", "ref-ckpt-step", "opd-teacher-ckpt-step"
    ),
    **_refused("leave it out: the reference is fixed; a [[stage]] may name another ref_load", "ref-update-interval"),
    **_refused("leave it out: the engine's own log-probs are the old policy's", "keep-old-actor", values=0),
    **_refused("leave it out: a step takes exactly rollout_batch_size prompts", "min-batch-collection-ratio"),
    **_refused("leave it out: the metric entropy comes from training", "use-rollout-entropy", values=0),
    **_refused("a plugin with slime_filter sees every group", "rollout-all-samples-process-path"),
    **_refused("slime run --resume RUN_DIR goes on where a run ended", "start-rollout-id"),
    **_refused("export HTTP_PROXY before the run", "http-proxy"),
    **_refused("--engine-topology FILE.toml", "prefill-num-servers"),
    **_refused("--profile N records ranks and embedded engines in step N", "profile-target", values=-1),
    **_refused("a plugin with slime_megatron_init may record memory", "record-memory-history", values=0),
    **_refused("a plugin with slime_megatron_init may record memory", "memory-recorder", "memory-snapshot-dir"),
    **_refused("a plugin with slime_megatron_init may record memory", "memory-snapshot-num-steps"),
}


def words_of(argv: Sequence[str], *, ahead: int) -> tuple[list[str], list[str]]:
    """Words of `slime run`, and a notice for each flag that is not needed.

    Args:
        argv: what stands after train.py.
        ahead: steps that rollouts run ahead of training, unless --max-staleness says so.

    Raises:
        ConfigError: CFG04 a flag that cannot be had, with what stands in its place.
    """
    words, notices, at = ["run"], list[str](), 0
    while at < len(argv):
        name, equals, value = argv[at].partition("=")
        other = OTHERS.get(name)
        at += 1
        if other is None:
            words.append(argv[at - 1])
            continue
        values = [value] if equals else []
        while not equals and at < len(argv) and not argv[at].startswith("--") and len(values) != other.values:
            values.append(argv[at])
            at += 1
        if other.refused:
            raise ConfigError(
                f"{name} cannot be had here", code="CFG04", where=f"command line: {name}", fix=other.refused
            )
        if other.to and values != ["-1"]:
            words += [other.to, *([other.value] if other.value else []), *(other.renamed.get(v, v) for v in values)]
        elif not other.to:
            notices.append(f"notice: {name} is not needed: {other.why}")
    return _top_k(words) + _defaults(argv, ahead), notices


def _top_k(words: list[str]) -> list[str]:
    """-1 is slime's way to say that a key is off."""
    keys = ("--rollout-top-k", "--eval-top-k")
    off = {f"{key}=-1": f"{key}=0" for key in keys}
    return ["0" if word == "-1" and words[at - 1] in keys else off.get(word, word) for at, word in enumerate(words)]


def _defaults(argv: Sequence[str], ahead: int) -> list[str]:
    """What slime has without a flag, and we have otherwise; rm_math brings the reward types of its names."""
    asks_type = any(word.partition("=")[0] in ("--rm-type", "--rm-url") for word in argv)
    plugins = ["--plugin", "models", *(["--plugin", "rm_math"] if asks_type else [])]
    if any(word.endswith(".toml") and not word.startswith("--") for word in argv):
        return plugins
    given = {word.partition("=")[0] for word in argv if word.startswith("--")}
    found = [word for flag, value in SLIMES.items() if flag not in given for word in (flag, value)]
    if not given & {"--colocate", "--no-colocate"}:
        found.append("--no-colocate")
    if "--use-opd" in given and "--opd-kl-coef" not in given:
        found += ["--opd-kl-coef", "1.0"]  # slime's default
    if "--calculate-per-token-loss" not in given and "--loss-aggregation" not in given:
        found += ["--loss-aggregation", "rollout_mean"]
    found += _evaluation(argv, given)
    if ahead and "--max-staleness" not in given:
        found += ["--max-staleness", str(ahead)]
    return [*found, *plugins]


def _evaluation(argv: Sequence[str], given: set[str]) -> list[str]:
    """Sampling of evaluation, which in slime is that of training unless a flag says otherwise."""
    found: list[str] = []
    for name, default in (("temperature", "1.0"), ("top-p", "1.0"), ("top-k", "0")):
        if f"--eval-{name}" not in given:
            found += [f"--eval-{name}", _value_of(argv, f"--rollout-{name}") or default]
    return _top_k(found)


def _value_of(argv: Sequence[str], flag: str) -> str:
    """The last value given to ``flag`` or to its key; empty where there is none."""
    key, last = flag[2:].replace("-", "_"), ""
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == flag or (equals and name.rpartition(".")[2] == key):
            last = value if equals else argv[at + 1] if at + 1 < len(argv) else ""
    return last


def main(argv: Sequence[str] | None = None, *, ahead: int) -> int:
    """The exit code of `slime run`."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        words, notices = words_of(given, ahead=ahead)
    except ConfigError as error:
        return report_failure(error, CliSession(as_json="--json" in given))
    for notice in notices:
        say(notice)
    return slime(words)

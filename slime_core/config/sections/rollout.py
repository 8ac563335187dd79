"""Keys of [rollout]: how samples are made, debug modes, and what supplies rollouts from elsewhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal
from urllib.parse import urlsplit

from slime_core.config.problems import Problem, conflict, either
from slime_core.config.sections import (
    FIGURES,
    LIMIT,
    MACHINE,
    MODEL,
    NAME,
    PROMPTS,
    AutoCount,
    ResumeClass,
    Section,
    empty_for,
    key,
)
from slime_core.config.sections.cluster import ClusterSection
from slime_core.config.sections.data import DataSection

LENGTH = ResumeClass("safe", "a longer or shorter run of the same kind")
SLOTS = ResumeClass("safe", "the embedded engine gives the same bits for any number of slots")
CONTEXT = ResumeClass("notice", "the same samples while prompts and responses fit both bounds")
SAMPLES = ResumeClass("unsafe", "other samples")
GROUPS = ResumeClass("unsafe", "other groups meet a step")
SOURCE = ResumeClass("unsafe", "rollouts come from elsewhere, or nothing trains")

served = partial(key, reader="servers")
OVER, BATCH = "rollout.over_sampling_batch_size", "rollout.rollout_batch_size"
SAVE, LOAD = "rollout.save_debug_rollout_data", "rollout.load_debug_rollout_data"
DYNAMIC, FUNCTION = "rollout.dynamic_sampling", "rollout.rollout_function_path"


class RolloutSection(Section):
    """How samples are made."""

    hf_checkpoint: str = key(
        "", "Folder (or hub name) of config, tokenizer and weights.", MODEL, path="model", once=True
    )
    init_weights: Literal["load", "random"] = key(
        "load", "random: draw the weights from the seed; the folder then needs no safetensors.", MODEL, once=True
    )
    trust_remote_code: bool = key(False, "Run Python code that the model folder brings.", MODEL, once=True)
    num_rollout: int = key(100, "Steps of the (last) stage; each trains one rollout.", LENGTH, ge=0)
    rollout_batch_size: int = key(32, "Prompts a step.", SAMPLES, ge=1)
    n_samples_per_prompt: int = key(8, "Rollouts a prompt.", SAMPLES, ge=1)
    rollout_max_response_len: int = key(256, "New tokens a model turn, at most.", SAMPLES, ge=1)
    rollout_max_context_len: int = key(0, "Prompt and response tokens; 0 is the model's own.", CONTEXT, ge=0)
    rollout_temperature: float = key(1.0, "0 is greedy.", SAMPLES, ge=0)
    rollout_top_p: float = key(1.0, "Nucleus; 1 is off.", SAMPLES, gt=0, le=1)
    rollout_top_k: int = key(0, "0 is off.", SAMPLES, ge=0)
    rollout_stop: tuple[str, ...] = key((), "Strings that end a response.", SAMPLES)
    rollout_stop_token_ids: tuple[int, ...] = key((), "Token ids that end a response.", SAMPLES)
    rollout_skip_special_tokens: bool = key(
        False, "Functions with slime's signatures read responses without special tokens.", SAMPLES
    )
    rollout_engine: str = key(
        "local", "local (the embedded engine), sglang, or one of a plugin.", SAMPLES, min_length=1, once=True
    )
    rollout_quantization: Literal["auto", "none", "fp8"] = key(
        "auto",
        "The engine's linear weights: in fp8, or as trained; auto: fp8 where servers have a folder in fp8.",
        SAMPLES,
        once=True,
    )
    rollout_slots: AutoCount = key(
        0,
        "Sequences the embedded engine decodes at once. 0 or auto: a step's samples on a GPU (64 to 1,024), else 64; "
        "fewer where memory is small.",
        SLOTS,
        ge=0,
        once=True,
    )
    rollout_num_gpus: int = key(
        0, "GPUs of all servers; 0: the trainer's, which they share.", MACHINE, ge=0, reader="placed engines"
    )
    rollout_num_gpus_per_engine: int = served(1, "GPUs of one server: its tensor-parallel size.", MACHINE, ge=1)
    rollout_num_engines: int = key(
        0, "Engines; 0 is what rollout_num_gpus gives; on a CPU, 1.", MACHINE, ge=0, reader="separate engines"
    )
    rollout_external_engine_addrs: tuple[str, ...] = served(
        (), "Servers that run already, http://HOST:PORT each; none are started.", MACHINE
    )
    rollout_engine_token_env: str = served(
        "SLIME_SGLANG_TOKEN", "Environment variable that holds the token of external servers.", MACHINE
    )
    rollout_engine_ca: str = served(
        "", "PEM file of authorities, for https servers that Python does not trust.", MACHINE
    )
    engine_topology: str = served("", "TOML file of several server groups and models.", MACHINE, path="input")
    rollout_router: Literal["auto", "builtin", "sglang"] = served(
        "auto",
        "Router of requests: slime's (builtin) or SGLang's; auto: SGLang's for several servers, if installed.",
        MACHINE,
    )
    rollout_middleware_paths: tuple[str, ...] = served(
        (), "Functions by path around every request to servers: async (request, next) -> Completion.", SAMPLES
    )
    server_concurrency: int = served(512, "Requests in flight a server; others wait here.", LIMIT, ge=1)
    rollout_start_timeout: float = served(900.0, "Seconds until a server must answer.", LIMIT, gt=0)
    rollout_request_timeout: float = served(1800.0, "Seconds for one request, its retries included.", LIMIT, gt=0)
    rollout_max_retries: int = served(3, "Of one request, where asking again is safe.", LIMIT, ge=0)
    rollout_health_check_interval: float = served(5.0, "Seconds between looks at a server.", LIMIT, gt=0)
    rollout_health_check_timeout: float = served(
        120.0, "Seconds without a new token while requests wait: the server counts as hung.", LIMIT, gt=0
    )
    rollout_max_restarts: int = served(3, "Of one server in a run; then it is retired.", LIMIT, ge=0)
    min_healthy_engines: int = served(1, "Fewer servers than this end the run.", LIMIT, ge=1)
    update_weight_transport: Literal["auto", "disk", "tensor", "nccl"] = served(
        "auto", "How weights reach servers; auto: tensor on shared GPUs, nccl on others, disk on a CPU.", MACHINE
    )
    update_weight_buffer_size: int = served(512 << 20, "Bytes of one bucket of weights.", MACHINE, ge=1 << 20)
    update_weight_disk_dir: str = served(
        "", "Folder of the disk transport; empty: in the run directory.", MACHINE, path="output"
    )
    pause_generation_mode: Literal["abort", "retract", "in_place"] = served(
        "retract",
        "Running requests at a weight update: aborted, retracted to the queue, or kept with their old cache.",
        SAMPLES,
    )
    rollout_deterministic: bool = served(
        False, "SGLang's deterministic mode, a seed a request: runs repeat bit for bit, and slower.", SAMPLES
    )
    check_weights: Literal["rolling", "all", "off"] = key(
        "rolling",
        "Tensors of servers compared with the trainer's after each step: some in turn, or all.",
        LIMIT,
        reader="servers or adapters",
    )
    canary_band: float = served(
        0.0, "Largest mean difference of trainer and engine log-probs; 0: from rounding.", LIMIT, ge=0
    )
    dynamic_sampling: Literal["off", "equal_rewards"] = key(
        "off", "equal_rewards: drop groups whose rewards are all equal, and take the next prompts.", GROUPS
    )
    over_sampling_batch_size: int = key(
        0, "Prompts in flight a step; the step takes the first that finish; 0 is rollout_batch_size.", GROUPS, ge=0
    )
    max_dropped_groups: int = key(0, "Dropped by filters in a row before an error; 0 is no limit.", LIMIT, ge=0)
    partial_rollout: bool = key(False, "Unfinished surplus is kept and continued, not dropped.", GROUPS)
    mask_offpolicy_in_partial_rollout: bool = key(
        False, "Tokens from before the last continuation do not train.", GROUPS
    )
    max_staleness: int = key(0, "0 trains on-policy; k lets the collector run k steps ahead.", GROUPS, ge=0)
    async_schedule: Literal["lockstep", "free"] = key("lockstep", "How groups meet steps when ahead.", GROUPS)
    stale_policy: Literal["wait", "restart", "mask", "drop"] = key(
        "wait",
        "For a group about to exceed max_staleness: wait for it, restart it, mask its old tokens, or drop it.",
        GROUPS,
    )
    rollout_buffer_url: str = key("", "Rollouts are made elsewhere: URL of `slime buffer serve`.", SOURCE)
    rollout_buffer_token_env: str = key("SLIME_BUFFER_TOKEN", "Environment variable that holds its token.", NAME)
    save_debug_rollout_data: str = key(
        "", "Folder that gets every step's groups, a file a step.", FIGURES, path="output"
    )
    load_debug_rollout_data: str = key("", "Folder of such files: rollouts come from there.", SOURCE, path="input")
    debug_rollout_only: bool = key(False, "Roll out and judge; train nothing.", SOURCE, once=True)
    debug_train_only: bool = key(False, "Train from load_debug_rollout_data, without an engine.", SOURCE, once=True)
    generate_timeout: float = key(3600.0, "Seconds for one group's generation.", LIMIT, gt=0)
    on_plugin_error: Literal["fail", "drop"] = key("fail", "A hook that raises: stop or drop the group.", LIMIT)
    rollout_function_path: Annotated[str, empty_for("slime.rollout.sglang_rollout.generate_rollout")] = key(
        "", "Function by path that replaces the rollout of a step.", SAMPLES, fills=True
    )
    custom_generate_function_path: str = key("", "Function by path that generates one sample.", SAMPLES, fills=True)
    data_source_path: Annotated[str, empty_for("slime.rollout.data_source.RolloutDataSourceWithBuffer")] = key(
        "", "Class by path that replaces the data source.", PROMPTS, fills=True
    )
    rollout_sample_hook_path: tuple[str, ...] = key(
        (), "Functions by path, called on each sample.", SAMPLES, fills=True
    )
    dynamic_sampling_filter_path: str = key("", "Function by path that keeps or drops a group.", GROUPS)
    rollout_sample_filter_path: str = key("", "Function by path that may set sample.remove_sample.", GROUPS)
    rollout_all_samples_process_path: str = key(
        "", "Function by path that sees a step's groups, also those that filters dropped.", FIGURES
    )
    buffer_filter_path: Annotated[str, empty_for("slime.rollout.data_source.pop_first")] = key(
        "", "Function by path that picks groups from the buffer.", GROUPS
    )
    run_done_path: str = key("", "Function by path, run_done(ctx): ends what the others have started.", FIGURES)
    custom_config_path: str = key(
        "",
        "TOML, JSON or YAML file: keys of the config hold before all else, others are args of functions by path.",
        SAMPLES,
        path="input",
    )

    def largest_group(self, data: DataSection) -> int:
        """Samples of a prompt, where the task of most has its own number of them."""
        return max(self.group_sizes(data))

    def group_sizes(self, data: DataSection) -> list[int]:
        """Samples of a prompt of each task."""
        own_sizes = [task.n_samples_per_prompt or self.n_samples_per_prompt for task in data.tasks]
        return own_sizes or [self.n_samples_per_prompt]

    def conflicts(self, cluster: ClusterSection, data: DataSection, *, offline: bool) -> Iterator[Problem]:
        """What cannot hold together; an ``offline`` stage neither generates nor judges."""
        yield from self._lengths(data)
        if not offline:
            yield from self._over_sampling()
            yield from self._partial()
            yield from self._groups(data)
        yield from self._debugging()
        if self.max_staleness and cluster.colocate:
            yield conflict(
                f"max_staleness = {self.max_staleness} with colocate = true",
                ["rollout.max_staleness", "cluster.colocate"],
                why="an engine that shares the trainer's device cannot generate while it trains",
                fix="--no-colocate   or   --max-staleness 0",
            )

    def notices(self) -> Iterator[str]:
        """Sentences about settings that are legal and seldom meant."""
        if self.stale_policy != "wait" and (not self.max_staleness or self.async_schedule == "lockstep"):
            reason = "lockstep makes no older group" if self.max_staleness else "nothing runs ahead of training"
            yield f"stale_policy = {self.stale_policy} has no effect: {reason}"
        if self.debug_rollout_only and not self.save_debug_rollout_data:
            yield "debug_rollout_only without save_debug_rollout_data: the ledger alone keeps the samples"
        url = self.rollout_buffer_url
        if url.startswith("http:") and not is_loopback(urlsplit(url).hostname or ""):
            yield (
                f"rollout_buffer_url = {url}: the token and the rollouts travel in clear text; put TLS before the "
                "buffer"
            )

    def _lengths(self, data: DataSection) -> Iterator[Problem]:
        context, response = self.rollout_max_context_len, self.rollout_max_response_len
        if context and response >= context:
            yield self.no_room("rollout.rollout_max_response_len", response)
        elif context and data.rollout_max_prompt_len + response > context:
            yield conflict(
                f"rollout_max_prompt_len + rollout_max_response_len = {data.rollout_max_prompt_len} + {response} "
                f"is more than rollout_max_context_len = {context}",
                ["data.rollout_max_prompt_len", "rollout.rollout_max_response_len", "rollout.rollout_max_context_len"],
                why="the context holds prompt and response",
                fix=f"set rollout_max_prompt_len to at most {context - response}, or 0 for what the context leaves",
            )

    def no_room(self, path: str, length: int) -> Problem:
        """A conflict: responses of the length at ``path`` leave no room for a prompt."""
        return conflict(
            f"{path.partition('.')[2]} = {length} leaves no room in "
            f"rollout_max_context_len = {self.rollout_max_context_len}",
            [path, "rollout.rollout_max_context_len"],
            why="the context holds prompt and response",
            fix="lower the response length or raise the context",
        )

    def _over_sampling(self) -> Iterator[Problem]:
        over, batch = self.over_sampling_batch_size, self.rollout_batch_size
        if 0 < over < batch:
            yield conflict(
                f"over_sampling_batch_size = {over} is below rollout_batch_size = {batch}",
                [OVER, BATCH],
                why="it is how many prompts are in flight, and a step takes rollout_batch_size of them",
                fix=f"set over_sampling_batch_size above {batch}, or to 0",
            )
        if over > batch and self.max_staleness:
            yield conflict(
                f"over_sampling_batch_size = {over} with max_staleness = {self.max_staleness}",
                [OVER, "rollout.max_staleness"],
                why="a collector that runs ahead is never held up by one slow group, and has no surplus to stop",
                fix="--max-staleness 0   or   --over-sampling-batch-size 0",
            )
        if over > batch and self.rollout_function_path:
            reason = "a function that makes the whole rollout decides itself how many prompts it tries"
            yield either(OVER, FUNCTION, why=reason)

    def _partial(self) -> Iterator[Problem]:
        if self.partial_rollout and self.over_sampling_batch_size <= self.rollout_batch_size:
            yield conflict(
                "partial_rollout without over-sampling",
                ["rollout.partial_rollout", OVER],
                why="a step that waits for all its prompts leaves nothing unfinished",
                fix=f"set over_sampling_batch_size above rollout_batch_size = {self.rollout_batch_size}",
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            yield conflict(
                "mask_offpolicy_in_partial_rollout without partial_rollout",
                ["rollout.mask_offpolicy_in_partial_rollout", "rollout.partial_rollout"],
                why="no response is continued",
                fix="--partial-rollout   or leave the mask out",
            )

    def _groups(self, data: DataSection) -> Iterator[Problem]:
        size = self.n_samples_per_prompt
        if self.rollout_temperature == 0 and size > 1:
            yield conflict(
                f"rollout_temperature = 0 with n_samples_per_prompt = {size}",
                ["rollout.rollout_temperature", "rollout.n_samples_per_prompt"],
                code="CFG03",
                why="greedy samples of one prompt are all equal, so a group teaches nothing",
                fix="set rollout_temperature above 0",
            )
        if self.dynamic_sampling == "equal_rewards" and 1 in self.group_sizes(data):
            yield conflict(
                "dynamic_sampling = equal_rewards with n_samples_per_prompt = 1",
                [DYNAMIC, "rollout.n_samples_per_prompt"],
                why="the rewards of a group of one are all equal, so every group would be dropped",
                fix="set n_samples_per_prompt to 2 or more, or dynamic_sampling to off",
            )
        if self.dynamic_sampling == "equal_rewards" and self.rollout_function_path:
            reason = "a function that makes the whole rollout judges and filters its own groups"
            yield either(DYNAMIC, FUNCTION, why=reason)

    def _debugging(self) -> Iterator[Problem]:
        if self.debug_rollout_only and self.debug_train_only:
            yield conflict(
                "debug_rollout_only and debug_train_only are both set",
                ["rollout.debug_rollout_only", "rollout.debug_train_only"],
                why="one leaves training out, the other rolling out; nothing would be left",
                fix="--no-debug-rollout-only   or   --no-debug-train-only",
            )
        elif self.debug_train_only and not self.load_debug_rollout_data:
            yield conflict(
                "debug_train_only has nothing to train on",
                ["rollout.debug_train_only", LOAD],
                why="without an engine, rollouts come from files",
                fix="name a dump: --load-debug-rollout-data DIR   (--save-debug-rollout-data DIR writes one)",
            )
        if self.debug_rollout_only and self.load_debug_rollout_data:
            yield either("rollout.debug_rollout_only", LOAD, why="nothing would be rolled out and nothing trained")
        if self.save_debug_rollout_data and self.load_debug_rollout_data:
            yield either(SAVE, LOAD, why="what would be written is what was read")
        if self.load_debug_rollout_data and self.rollout_buffer_url:
            yield either(LOAD, "rollout.rollout_buffer_url", why="each says where rollouts come from")
        for path, value in ((SAVE, self.save_debug_rollout_data), (LOAD, self.load_debug_rollout_data)):
            if "{" in value or value.endswith((".pt", ".pkl")):
                yield conflict(
                    f"{path.partition('.')[2]} = {value} is a file's name, not a folder",
                    [path],
                    code="CFG03",
                    why="a dump is a folder with a file a step, step-000001.rollout, and never a pickle",
                    fix=f"--{path.partition('.')[2].replace('_', '-')} DIR",
                )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

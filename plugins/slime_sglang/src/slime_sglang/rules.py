"""Rules of the keys of rollout servers: what cannot hold, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime_core.config.problems import Problem, conflict
from slime_core.config.sections.rollout import is_loopback
from slime_sglang import adapters
from slime_sglang.model_config import raw_config

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.config.sections.rollout import RolloutSection

DETERMINISTIC = ("fa3", "fa4", "flashinfer", "triton", "ascend", "intel_xpu")
"""SGLang's attention backends whose results do not depend on what else is in the batch."""

OVERRIDES = "json_model_override_args"
"""SGLang's option for values of config.json."""
EXTERNAL, TOPOLOGY = "rollout.rollout_external_engine_addrs", "rollout.engine_topology"
GPUS, EACH, COUNT = "rollout.rollout_num_gpus", "rollout.rollout_num_gpus_per_engine", "rollout.rollout_num_engines"


def conflicts(config: Config) -> Iterator[Problem]:
    """What cannot hold together where SGLang serves."""
    yield from _who_serves(config)
    yield from _router(config)
    yield from _sizes(config)
    yield from _transport(config)
    yield from _deterministic(config)
    if config.train.routing_replay == "rollout" and config.cluster.device == "cpu":
        yield conflict(
            "routing_replay = rollout with device = cpu",
            ["train.routing_replay", "cluster.device"],
            why="SGLang keeps the experts that it chose in memory that CUDA has registered",
            fix="--rollout-engine local   or   --routing-replay policy",
        )
    yield from _options(config)
    yield from _fp8(config)
    yield from _pictures(config)
    yield from adapters.conflicts(config)


def notices(config: Config) -> Iterator[str]:
    """Sentences about settings that have no effect, or another than one may think."""
    yield from _without_effect(config)
    yield from _log_probs(config.rollout)
    yield from _draws(config)


def spreads(config: Config) -> bool:
    """Whether SGLang's router may choose the server of a request."""
    rollout = config.rollout
    direct = rollout.rollout_router == "auto" and bool(rollout.rollout_external_engine_addrs)
    return rollout.rollout_router != "builtin" and not direct


def count(config: Config) -> int:
    """Servers that the keys ask for, 2 where a file says it; GPUs count where the device may be one."""
    rollout = config.rollout
    if rollout.engine_topology:
        return 2  # whether there are so many is told at the start
    if rollout.rollout_external_engine_addrs:
        return len(rollout.rollout_external_engine_addrs)
    if rollout.rollout_num_engines or config.cluster.device == "cpu":
        return rollout.rollout_num_engines or 1
    return max(1, rollout.rollout_num_gpus // rollout.rollout_num_gpus_per_engine)


def _default(rollout: RolloutSection, name: str) -> Any:
    return type(rollout).model_fields[name].default


def _set(config: Config, name: str) -> bool:
    return bool(getattr(config.rollout, name) != _default(config.rollout, name))


def _who_serves(config: Config) -> Iterator[Problem]:
    """Addresses, a file, or numbers: one of them says which servers there are."""
    rollout = config.rollout
    numbers = ("rollout_num_gpus", "rollout_num_engines", "rollout_num_gpus_per_engine")
    keys = [name for name in numbers if _set(config, name)]
    if rollout.rollout_external_engine_addrs:
        for name in [*keys, *(["engine_topology"] if rollout.engine_topology else [])]:
            yield conflict(
                f"{name} and rollout_external_engine_addrs are both set",
                [f"rollout.{name}", EXTERNAL],
                why="servers that run already are not placed by slime",
                fix=f"leave {name} out, or the addresses",
            )
        yield from _addresses(rollout)
    elif rollout.engine_topology:
        for name in keys:
            yield conflict(
                f"{name} and engine_topology are both set",
                [f"rollout.{name}", TOPOLOGY],
                why="the file says which servers there are, and how many GPUs each has",
                fix=f"leave {name} out, or the file",
            )


def _addresses(rollout: RolloutSection) -> Iterator[Problem]:
    addresses = rollout.rollout_external_engine_addrs
    for address in addresses:
        if reason := _address_fault(address):
            host = f"http://{address}" if "://" not in address and "/" not in address else "http://HOST:PORT"
            yield conflict(
                "rollout_external_engine_addrs holds something that is not an address of a server",
                [EXTERNAL],
                code="CFG03",
                why=reason,
                fix=f"--rollout-external-engine-addrs {host}",
            )
    plain = [address.rstrip("/") for address in addresses]
    for address in dict.fromkeys(one for one in plain if plain.count(one) > 1):
        yield conflict(
            f"{address} appears twice in rollout_external_engine_addrs", [EXTERNAL], fix="remove one of them"
        )


def _address_fault(address: str) -> str:
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.username is not None:
        return "it holds a user or a password; the token comes from rollout_engine_token_env"
    if parts.scheme not in ("http", "https") or not parts.hostname or port in (None, 0):
        return f"'{address}' is not of the form http(s)://HOST:PORT"
    if parts.query or parts.fragment or parts.path not in ("", "/"):
        return f"'{address}' holds more than scheme, host and port"
    return ""


def _router(config: Config) -> Iterator[Problem]:
    addresses = config.rollout.rollout_external_engine_addrs
    if config.rollout.rollout_router == "sglang" and any(one.startswith("https:") for one in addresses):
        yield conflict(
            "rollout_router = sglang with https:// addresses",
            ["rollout.rollout_router", EXTERNAL],
            why="SGLang's router speaks plain HTTP with servers here",
            fix="--rollout-router builtin   or leave it out",
        )


def _sizes(config: Config) -> Iterator[Problem]:
    """GPUs, servers and machines."""
    rollout, cluster = config.rollout, config.cluster
    if rollout.rollout_external_engine_addrs or rollout.engine_topology:
        servers = len(rollout.rollout_external_engine_addrs)
    else:
        size, total, count = (
            rollout.rollout_num_gpus_per_engine,
            rollout.rollout_num_gpus,
            rollout.rollout_num_engines,
        )
        actor_gpus = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
        shared = not total and cluster.colocate
        if total % size:
            yield conflict(
                f"rollout_num_gpus = {total} does not divide into servers of rollout_num_gpus_per_engine = {size}",
                [GPUS, EACH],
                fix=f"set rollout_num_gpus to a multiple of {size}, such as {total - total % size or size}",
            )
        elif count and total and count * size != total:
            yield conflict(
                f"rollout_num_engines = {count} servers of {size} GPUs are not rollout_num_gpus = {total}",
                [COUNT, GPUS, EACH],
                fix=f"leave rollout_num_engines out, or set rollout_num_gpus to {count * size}",
            )
        elif shared and cluster.device == "cuda" and actor_gpus % size:
            yield conflict(
                f"the trainer's {actor_gpus} GPUs do not divide into servers of rollout_num_gpus_per_engine = {size}",
                [EACH, "cluster.actor_num_gpus_per_node"],
                why="colocate = true: servers share the trainer's GPUs",
                fix=f"set rollout_num_gpus_per_engine to a divisor of {actor_gpus}",
            )
        servers = count or (
            total // size if total else actor_gpus // size if shared and cluster.device == "cuda" else 0
        )
        if not servers and cluster.device == "cpu":
            servers = 1
    if servers and rollout.min_healthy_engines > servers:
        yield conflict(
            f"min_healthy_engines = {rollout.min_healthy_engines} is more than the {servers} that there are",
            ["rollout.min_healthy_engines", EXTERNAL if rollout.rollout_external_engine_addrs else COUNT],
            why="the run would end before it began",
            fix=f"--min-healthy-engines {servers}   or more servers",
        )


def _transport(config: Config) -> Iterator[Problem]:
    """How weights travel, and where the two sides live."""
    road, cluster = config.rollout.update_weight_transport, config.cluster
    key = "rollout.update_weight_transport"
    if road in ("tensor", "nccl") and cluster.device == "cpu":
        yield conflict(
            f"update_weight_transport = {road} with device = cpu",
            [key, "cluster.device"],
            why="it moves tensors of GPUs",
            fix="--update-weight-transport disk   or   auto",
        )
    elif road == "tensor" and config.rollout.rollout_external_engine_addrs:
        yield conflict(
            "update_weight_transport = tensor with rollout_external_engine_addrs",
            [key, EXTERNAL],
            why="it hands over memory of a GPU that both sides share, and slime did not place these servers",
            fix="--update-weight-transport nccl   or   disk",
        )
    elif road == "tensor" and not cluster.colocate:
        yield conflict(
            "update_weight_transport = tensor with colocate = false",
            [key, "cluster.colocate"],
            why="it hands over memory of a GPU that trainer and server share",
            fix="--update-weight-transport nccl   or   --colocate",
        )
    elif road == "nccl" and cluster.colocate and not config.rollout.rollout_external_engine_addrs:
        yield conflict(
            "update_weight_transport = nccl with colocate = true",
            [key, "cluster.colocate"],
            why="NCCL takes one rank a GPU, and here two would share one",
            fix="--update-weight-transport tensor   or   --no-colocate",
        )


def _deterministic(config: Config) -> Iterator[Problem]:
    if not config.rollout.rollout_deterministic:
        return
    key = "rollout.rollout_deterministic"
    if config.cluster.device == "cpu":
        yield conflict(
            "rollout_deterministic with device = cpu",
            [key, "cluster.device"],
            why="SGLang's deterministic mode has no attention backend for a CPU",
            fix="--rollout-engine local, whose runs repeat bit for bit on a CPU",
        )
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        for written in (name, name.replace("_", "-")):
            value = config.table("sglang").get(written)
            if value is not None and value not in DETERMINISTIC:
                yield conflict(
                    f"rollout_deterministic with sglang.{written} = {value}",
                    [key, f"sglang.{written}"],
                    why=f"SGLang's deterministic mode takes one of {', '.join(DETERMINISTIC)}",
                    fix=f'{name} = "fa3"   or leave it out',
                )


def _fp8(config: Config) -> Iterator[Problem]:
    """What SGLang needs for weights in fp8, and what would quantise them a second time."""
    if config.rollout.rollout_quantization != "fp8":
        return
    key, alone = "rollout.rollout_quantization", "--rollout-quantization none"
    options = {name.replace("-", "_"): name for name in config.table("sglang")}
    if config.cluster.device == "cpu":
        yield conflict(
            "rollout_quantization = fp8 with device = cpu",
            [key, "cluster.device"],
            why="SGLang has no fp8 on this kind of processor; the embedded engine rounds weights in the same way",
            fix=f"{alone}   or   --rollout-engine local",
        )
    if config.train.dtype == "float32":
        yield conflict(
            "rollout_quantization = fp8 with dtype = float32",
            [key, "train.dtype"],
            why="SGLang's fp8 layers compute in bfloat16",
            fix=f"--dtype bfloat16   or   {alone}",
        )
    for name in ("quantization", OVERRIDES):
        if name in options:
            yield conflict(
                f"rollout_quantization = fp8 with sglang.{options[name]}",
                [key, f"sglang.{options[name]}"],
                why="slime tells the servers how the weights that it sends are quantised",
                fix=f"leave sglang.{options[name]} out   or   {alone}",
            )


def _pictures(config: Config) -> Iterator[Problem]:
    """Media of rows that the servers would refuse with the first request."""
    columns, raw = config.data.multimodal_keys, raw_config(config.rollout.hf_checkpoint)
    if not columns or "vision_config" not in raw or config.rollout.debug_train_only:
        return
    from slime_core.media.references import kind_of
    from slime_sglang.pictures import FAMILIES

    keys, family = ["data.multimodal_keys", "rollout.rollout_engine"], raw.get("model_type")
    if family not in FAMILIES:
        yield conflict(
            f"multimodal_keys with rollout_engine = sglang and a model of the family {family}",
            [*keys, "rollout.hf_checkpoint"],
            why=f"SGLang takes pictures beside token ids for {', '.join(FAMILIES)}",
            fix="--rollout-engine local",
        )
    elif others := [kind for kind in columns if kind_of(kind) != "images"]:
        yield conflict(
            f"multimodal_keys names {', '.join(others)} with rollout_engine = sglang",
            keys,
            why="SGLang takes pictures from slime; it would choose the frames of a video by itself",
            fix="--rollout-engine local   or   give the frames as pictures",
        )


def _options(config: Config) -> Iterator[Problem]:
    """Options of SGLang that contradict keys of slime."""
    table = {name.replace("-", "_"): (name, value) for name, value in config.table("sglang").items()}
    written, quantized = table.get("quantization", ("", None))
    if quantized and config.rollout.check_weights != "off":
        yield conflict(
            f"sglang.{written} = {quantized} with check_weights = {config.rollout.check_weights}",
            [f"sglang.{written}", "rollout.check_weights"],
            why="quantised tensors have other bytes than the trainer's, so the exact comparison would fail",
            fix="--check-weights off   (log-probs are still compared)",
        )
    written, bare = table.get("skip_tokenizer_init", ("", None))
    if bare and config.rollout.rollout_stop:
        yield conflict(
            f"rollout_stop with sglang.{written}",
            ["rollout.rollout_stop", f"sglang.{written}"],
            why="a server without a tokenizer knows no strings",
            fix="use rollout_stop_token_ids, or leave it out",
        )


def _without_effect(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if _set(config, "rollout_slots"):
        yield "rollout_slots: no effect with rollout_engine = sglang; server_concurrency bounds in-flight requests"
    external = rollout.rollout_external_engine_addrs
    direct = rollout.rollout_router == "builtin" or (external and rollout.rollout_router == "auto")
    if direct and config.table("sglang").get("router"):
        yield "[sglang.router]: no effect; slime's own router spreads the requests (rollout_router = sglang)"
    if external and set(config.table("sglang")) - (set() if direct else {"python", "env"}) - {"router"}:
        yield "[sglang]: no effect on servers that run already; their options were given where they were started"
    if external and not config.train.freeze_vision_tower and not rollout.debug_rollout_only:
        from slime_sglang.pictures import UNKEPT

        yield (
            "freeze_vision_tower = false with rollout_external_engine_addrs: start the servers with "
            + " ".join(f"{name}={value}" for name, value in UNKEPT.items())
            + ", or SGLang keeps features of pictures from older weights"
        )
    if external and _set(config, "rollout_max_restarts"):
        yield "rollout_max_restarts: slime starts no servers that run already; it is how often one may come back"
    if external and any(
        address.startswith("http:") and not is_loopback(urlsplit(address).hostname or "") for address in external
    ):
        yield "rollout_external_engine_addrs: the token and the rollouts travel in clear text over http://"
    if not external and _set(config, "rollout_engine_token_env"):
        yield "rollout_engine_token_env: no effect without rollout_external_engine_addrs; own servers get a token each"
    if _set(config, "rollout_engine_ca") and not any(address.startswith("https:") for address in external):
        yield "rollout_engine_ca: no effect without an https:// address in rollout_external_engine_addrs"
    if rollout.update_weight_disk_dir and rollout.update_weight_transport in ("tensor", "nccl"):
        yield f"update_weight_disk_dir: no effect with update_weight_transport = {rollout.update_weight_transport}"
    if _set(config, "update_weight_buffer_size") and rollout.update_weight_transport == "tensor":
        yield "update_weight_buffer_size: no effect with update_weight_transport = tensor; the model is one buffer"
    if config.cluster.device == "cpu" and _set(config, "rollout_num_gpus"):
        yield "rollout_num_gpus: no effect with device = cpu; rollout_num_engines says how many servers there are"
    if _set(config, "canary_band") and rollout.debug_rollout_only:
        yield "canary_band: no effect with debug_rollout_only; no trainer has log-probs to compare with"
    if _set(config, "pause_generation_mode") and adapters.adapter_names(config):
        yield (
            f"pause_generation_mode = {rollout.pause_generation_mode}: no effect with lora_sync = adapter; requests "
            "are taken back and continue with the new version"
        )
    elif _set(config, "pause_generation_mode") and not rollout.max_staleness and not rollout.partial_rollout:
        yield (
            f"pause_generation_mode = {rollout.pause_generation_mode}: no effect with max_staleness = 0; no request "
            "runs while weights change"
        )
    elif rollout.pause_generation_mode == "in_place":
        yield (
            "pause_generation_mode = in_place continues with the KV cache of older weights: later log-probs match "
            "neither version"
        )


def _log_probs(rollout: RolloutSection) -> Iterator[str]:
    """SGLang's log-probs are of softmax(logits / temperature), before top-p and top-k."""
    cut = [f"rollout_top_p = {rollout.rollout_top_p}"] if rollout.rollout_top_p < 1 else []
    cut += [f"rollout_top_k = {rollout.rollout_top_k}"] if rollout.rollout_top_k else []
    if cut:
        yield (
            f"{' and '.join(cut)}: SGLang's log-probs are of the whole softmax, not of the truncated one that was "
            "drawn from; ratios of trainer and engine leave the truncation out"
        )
    if rollout.rollout_temperature not in (0.0, 1.0):
        yield (
            f"rollout_temperature = {rollout.rollout_temperature:g}: SGLang's log-probs are at this temperature; "
            "samples carry no plain ones"
        )


def _draws(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rollout_deterministic:
        return
    text = (
        "seed has no effect on the tokens that SGLang draws: another run differs; with rollout_deterministic they "
        "follow it"
    )
    if rollout.max_staleness and rollout.async_schedule == "lockstep":
        text += ". async_schedule = lockstep repeats which weights made which group, not its tokens"
    yield text

"""Keys that servers, other clusters or other trainers read: what a config sets without effect, or in clear text."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slime_core.config.fields import changed
from slime_core.plugins.backends import chosen, cluster_of, engine_of, trainer_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SERVER_KEYS = (
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "rollout_num_engines",
    "rollout_external_engine_addrs",
    "rollout_engine_token_env",
    "rollout_engine_ca",
    "engine_topology",
    "rollout_router",
    "rollout_middleware_paths",
    "server_concurrency",
    "rollout_start_timeout",
    "rollout_request_timeout",
    "rollout_max_retries",
    "rollout_health_check_interval",
    "rollout_health_check_timeout",
    "rollout_max_restarts",
    "min_healthy_engines",
    "update_weight_transport",
    "update_weight_buffer_size",
    "update_weight_disk_dir",
    "pause_generation_mode",
    "rollout_deterministic",
    "check_weights",
    "canary_band",
)
"""Keys of [rollout] that only servers read."""

PLACED = ("rollout_num_gpus", "rollout_num_engines")
"""Those that embedded engines on a Ray cluster read too; the last one also where they have processes of their own."""

RAY_KEYS = ("ray_address", "ray_placement_timeout", "ray_py_modules", "ray_env_vars")
"""Keys of [cluster] that only a cluster of other machines reads."""

MEGATRON_HOOKS = (
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
)
"""Functions by path that only Megatron ranks call."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def notices(config: Config) -> Iterator[str]:
    """Sentences about settings that have no effect, and about an address that others can listen at."""
    cluster, rollout, train = config.cluster, config.rollout, config.train
    backend = cluster_of(config)
    if not backend.remote and (idle := changed(cluster, RAY_KEYS)):
        yield f"{', '.join(idle)}: no effect with cluster_backend = {cluster.cluster_backend}"
    if engine_of(config).embedded:
        apart = rollout.max_staleness or config.eval.eval_async
        placed = PLACED if backend.remote else PLACED[1:] if apart else ()
        if idle := changed(rollout, [name for name in SERVER_KEYS if name not in placed]):
            yield f"{', '.join(idle)}: no effect with rollout_engine = {rollout.rollout_engine}; servers read them"
    used = {backend.name for backend in chosen(config)}
    for name, table in config.tables.items():
        if table and name not in used:
            yield f"[{name}] {', '.join(table)}: no effect without the backend {name}"
    for name in changed(train, MEGATRON_HOOKS) if not trainer_of(config).megatron_hooks else ():
        yield f"{name}: no effect with train_backend = {train.train_backend}, which has no such place"
    url = rollout.rollout_buffer_url
    if url.startswith("http:") and not is_loopback(urlsplit(url).hostname or ""):
        yield f"rollout_buffer_url = {url}: the token and the rollouts travel in clear text; put TLS before the buffer"

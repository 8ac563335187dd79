"""New versions of adapters on one server, which stands still: each is loaded under a name of its own.

    ADAPTER@EPOCH.VERSION   loaded, then the adapter's version before is unloaded; then the server's list is compared

A request names the version that it wants, so what an older adapter would compute is refused and never returned.
SGLang gives every adapter that it loads a new id, by which it keeps prompts that it has computed: those of an older
version are never found again. An adapter is unloaded once no request uses it, so none may run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_sglang.client import Client
    from slime_sglang.loading import Target

LOAD, LOAD_TENSORS, UNLOAD = "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"
STAMP = "/update_weight_version"


def served_name(adapter: str, version: str) -> str:
    """An adapter's name on servers; ``version`` as `Client.version_text` has it."""
    return f"{adapter}@{version}"


async def update_adapters(to: Target, adapters: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the adapters of an update, unload those before, and have the server stamp the version.

    Args:
        to: the server.
        adapters: of the update's handle: ``config``, and ``folder`` or ``buckets``, by name.

    Raises:
        EngineError: ENG86 the server refuses one; ENG83 it has others than it said.
    """
    version = to.client.version_text(to.update.version)
    before = await loaded(to.client)
    for adapter, sent in adapters.items():
        name = served_name(adapter, version)
        if name in before:  # loaded once more, since the base was
            await to.call(UNLOAD, {"lora_name": name})
        await _load(to, name, sent)
        for old in before:
            if old != name and old.rpartition("@")[0] == adapter:
                await to.call(UNLOAD, {"lora_name": old})
    await to.call(STAMP, {"new_version": version, "abort_all_requests": False})
    await compare(to, {served_name(adapter, version) for adapter in adapters})


async def _load(to: Target, name: str, sent: Mapping[str, Any]) -> None:
    if "folder" in sent:
        await to.call(LOAD, {"lora_name": name, "lora_path": sent["folder"]})
        return
    (handles,) = to.handles(sent)  # adapters have one dtype, so they are one bucket
    body = {"lora_name": name, "config_dict": sent["config"], "load_format": "flattened_bucket"}
    # SGLang 0.5.12 has one handle for all ranks, newer ones a list
    await to.call(LOAD_TENSORS, body | {"serialized_named_tensors": handles, "serialized_tensors": handles[0]})


async def loaded(client: Client) -> list[str]:
    """Names of the adapters that a server lists as models."""
    answer = await client.get("/v1/models", timeout=60.0)
    return [str(model["id"]) for model in answer.get("data", ()) if model.get("parent") and "@" in str(model["id"])]


async def compare(to: Target, names: set[str]) -> None:
    """Check that a server serves these versions of the adapters, and no other version of them.

    Raises:
        EngineError: ENG83.
    """
    adapters = {name.rpartition("@")[0] for name in names}
    served = {name for name in await loaded(to.client) if name.rpartition("@")[0] in adapters}
    if served != names:
        raise EngineError(
            f"{to.name} does not serve the adapters of version {to.update.version}",
            code="ENG83",
            where=to.where,
            why=f"an update was lost: it lists {', '.join(sorted(served)) or 'none'}, not {', '.join(sorted(names))}",
            fix="see the server's log; --lora-sync merged sends whole weights",
        )

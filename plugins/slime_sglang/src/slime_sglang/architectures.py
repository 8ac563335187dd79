"""Whether SGLang serves the model folders of a run, asked before a server starts: its source, else its registry."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from slime_core.errors import ConfigError
from slime_sglang.command import Command
from slime_sglang.installation import PROBE, Installation, ask, cache_folder, keep

SECONDS = 600.0
FALLBACK = "Transformers"  # what names of SGLang's wrappers around transformers' models begin with
TRUST = "rollout.trust_remote_code = true, which lets SGLang run the folder's code; or "
PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def fallback(
    installation: Installation, command: Command, model: Path, *, trust: bool, where: str, cache: Path | None = None
) -> str:
    """What to say of a folder that SGLang serves by transformers' code; empty where SGLang has a model of its own.

    A name that stands in SGLang's source costs nothing, unless the folder's config needs code that may not run. Else
    its registry is asked, in its own Python, which imports every model that it has; the answer is kept.

    Args:
        installation: that serves it.
        command: of a server of this model; its variables and ``--model-impl`` count.
        model: a model folder; of a name on the hub nothing is said.
        trust: ``rollout.trust_remote_code``.
        where: key or line that names the folder, for the message.
        cache: folder for answers; None is the user's.

    Raises:
        ConfigError: CFG04 SGLang has no such model; its loader's own words are shown.
    """
    try:
        config = (model / "config.json").read_bytes()
        table = json.loads(config)
        names = [str(name) for name in table["architectures"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    words = dict(zip(command.arguments, command.arguments[1:], strict=False))
    implementation = words.get("--model-impl", "auto")
    loads = trust or "auto_map" not in table
    if implementation == "auto" and loads and installation.architectures.intersection(names):
        return ""
    question = (str(model), implementation, str(int(trust)))
    package = installation.environment(command.env).get(PACKAGE, "")
    key = json.dumps([installation.python, installation.folder, installation.version, package, *question[1:]])
    digest = hashlib.sha256(key.encode() + PROBE.read_bytes() + config).hexdigest()
    file = (cache or cache_folder()) / f"sglang-model-{digest[:16]}.json"
    try:
        name = str(json.loads(file.read_bytes())["class"])
    except (OSError, ValueError, KeyError, TypeError):
        answer = ask(installation.python, command.env, SECONDS, "model", *question)
        if "refusal" in answer:  # not kept: a package of models or an upgrade may change it
            raise ConfigError(
                f"SGLang {installation.version} does not serve {', '.join(names)}",
                code="CFG04",
                where=where,
                why=str(answer["refusal"]),
                fix=("" if loads else TRUST)
                + "--rollout-engine local, which runs models of transformers; or a newer SGLang; or "
                f'{PACKAGE} = "PACKAGE" under [sglang.env], a package that has the model',
            ) from None
        name = str(answer["class"])
        keep(file, answer)
    if not name.startswith(FALLBACK):
        return ""
    return f"{', '.join(names)}: not SGLang's own, but transformers' code inside it ({name}), which is slower"

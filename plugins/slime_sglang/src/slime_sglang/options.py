"""Options of an SGLang server as words of its command line, checked against its own parser's.

Nothing about SGLang's options is written down here but those that slime sets itself; the rest is read (`probe.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime_core.config.dump import is_secret
from slime_core.config.problems import Problem, raise_all
from slime_core.config.values import kind_of, show
from slime_core.errors import ConfigError, nearest

Kind = Literal["flag", "switch", "value", "maybe", "list"]
"""flag: present or not. switch: --x or --no-x. value: one. maybe: alone or with one. list: several."""

JSON_TYPES = ("loads", "json_list_type")
COUNT = re.compile(r"\d+(\.\d+)?[kMGT]|\d+([KMGT]i)?")
INTEGER = re.compile(r"[+-]?\d+")

ADDRESS = (
    "slime chooses it where the server lives; servers of others: --rollout-external-engine-addrs http://HOST:PORT"
)
PLACE = "slime places servers: --rollout-num-gpus N --rollout-num-gpus-per-engine N, or --engine-topology FILE"
MODEL = "--hf-checkpoint DIR, or model of a [[group]] in --engine-topology FILE"
TOKEN = "slime draws a token for its own servers; that of others: --rollout-engine-token-env NAME"
PLAIN = "slime speaks plain HTTP with its own servers; TLS: start them yourself, --rollout-external-engine-addrs https://..."
PAIRS = "mode of a [[group]] in --engine-topology FILE: regular, prefill or decode"
HTTP = "leave it out: slime speaks SGLang's HTTP"

OWN: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "tokenizer_path", "revision"), MODEL),
    **dict.fromkeys(("host", "port", "grpc_port", "fastapi_root_path", "smg_http_sidecar_port"), ADDRESS),
    **dict.fromkeys(("nccl_port", "dist_init_addr"), "slime chooses it; leave it out"),
    **dict.fromkeys(("nnodes", "node_rank"), "a server of slime's lives on one machine; leave it out"),
    **dict.fromkeys(("api_key", "admin_api_key"), TOKEN),
    **dict.fromkeys(("tp_size", "base_gpu_id", "gpu_id_step"), PLACE),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"), PLAIN),
    "enable_ssl_refresh": PLAIN,
    **dict.fromkeys(("disaggregation_mode", "disaggregation_bootstrap_port"), PAIRS),
    **dict.fromkeys(("grpc_mode", "smg_grpc_mode", "enable_http2"), HTTP),
    **dict.fromkeys(("encoder_only", "language_only"), "leave it out: slime has no groups of encoders"),
    "weight_version": "slime stamps epoch and version; leave it out",
    "random_seed": "--seed N",
    "device": "--device cpu   or   --device cuda",
    "context_length": "--rollout-max-context-len N",
    "trust_remote_code": "--trust-remote-code",
    "enable_deterministic_inference": "--rollout-deterministic",
    "enable_memory_saver": "--colocate",
    "enable_return_routed_experts": "--routing-replay rollout",
    "use_ray": "--cluster ray",
    "config": "write its options into [sglang]; several servers or models: --engine-topology FILE",
    "incremental_streaming_output": "leave it out: slime reads streams whose pieces hold all tokens so far",
    "delete_ckpt_after_loading": "leave it out: it would delete the model folder",
    "checkpoint_engine_wait_weights_before_ready": "leave it out: slime sends weights to servers that are ready",
}
"""Options that slime sets by itself, or that would break it: name -> what to write in their place."""

SLIMES: Mapping[str, str] = {
    "server_concurrency": "--server-concurrency N",
    "router_request_timeout_secs": "--rollout-request-timeout SECONDS",
    "router_ip": "--rollout-router builtin   or   --rollout-router sglang: slime starts it itself",
    "router_port": "--rollout-router builtin   or   --rollout-router sglang: slime starts it itself",
}
"""Names that THUDM/slime has under ``--sglang-`` and that are no options of SGLang -> the key that is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFamily:
    """Whose options they are, for messages, and what slime says of some of them."""

    title: str
    genitive: str
    flags: str  # what their flags begin with
    fixed: Mapping[str, str]  # set by slime -> what to write in their place
    elsewhere: Mapping[str, str]  # no options of this program -> the key that is meant


SERVER = OptionFamily(title="SGLang", genitive="SGLang's", flags="--sglang-", fixed=OWN, elsewhere=SLIMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a server, as its parser declares it.

    Example: Option(name="mem_fraction_static", flag="--mem-fraction-static", type="float")
    """

    name: str  # as in [sglang]: underscores
    flag: str  # as SGLang wants it
    kind: Kind = "value"
    type: str = "str"  # name of the parser's type: str int float loads human_readable_int ...
    empty: bool = False  # a list may be empty
    off: str = ""  # a switch's --no-...
    choices: tuple[str, ...] = ()
    default: Any = None  # JSON; None where there is none
    help: str = ""


Place = Callable[[str], str]
"""Where an option was written, by its name there: ``recipe.toml:12``."""


def arguments(
    options: Mapping[str, Option],
    table: Mapping[str, Any],
    *,
    version: str = "",
    where: str | Place = "sglang",
    by_slime: bool = False,
    family: OptionFamily = SERVER,
) -> list[str]:
    """A table of options as words of SGLang's command line, in the table's order.

    Dashes and underscores are the same. True is a bare flag, False leaves it out (or writes ``--no-...`` where there
    is one), arrays are several words, tables are JSON.

    Args:
        options: of the installation, by every name they have.
        table: what a person (or, with ``by_slime``, slime) wrote.
        version: of SGLang, for messages.
        where: the table's name for messages, or a function that knows each option's place.
        own: let options pass that slime sets by itself.
        family: the server's options, or the router's.

    Raises:
        ConfigError: CFG01 no such option, CFG02 a wrong type, CFG03 no such choice, CFG04 one that slime sets itself,
            CFG07 one given twice; several problems are one error.
    """
    words: list[str] = []
    problems: list[Problem] = []
    spellings: dict[str, str] = {}
    for written, value in table.items():
        name = written.replace("-", "_")
        place = where(written) if callable(where) else f"{where}.{written}"
        option = options.get(name)
        result: list[str] | Problem
        if option is None:
            result = _unknown(name, options, version, place, family)
        elif option.name in family.fixed and not by_slime:
            message = f"'{name}' of {family.title} is set by slime"
            result = Problem(code="CFG04", what=message, where=place, fix=family.fixed[option.name])
        elif option.name in spellings:
            message = (
                f"{option.flag} of {family.title} is given twice: as '{spellings[option.name]}' and as '{written}'"
            )
            result = Problem(code="CFG07", what=message, where=place, fix="remove one of them")
        else:
            result = _words(option, value, written, place, family)
            spellings[option.name] = written
        if isinstance(result, Problem):
            problems.append(result)
        else:
            words += result
    raise_all(problems)
    return words


def _unknown(name: str, options: Mapping[str, Option], version: str, place: str, family: OptionFamily) -> Problem:
    longer = [name_known for name_known in options if name_known.startswith(name)]
    near = f"did you mean '{longer[0]}'?" if len(longer) == 1 else nearest(name, tuple(options))
    fix = family.elsewhere.get(name) or near
    return Problem(
        code="CFG01",
        what=f"{family.title} {version} has no option '{name}'".replace("  ", " "),
        where=place,
        fix="\n".join(filter(None, [fix, "all options: slime config keys --sglang"])),
    )


def _words(option: Option, value: Any, written: str, place: str, family: OptionFamily) -> list[str] | Problem:
    """The words of one option, or what is wrong with its value."""
    if option.kind in ("flag", "switch"):
        if not isinstance(value, bool):
            return _wrong(option, value, written, place, family)
        return [option.flag] if value else [option.off] if option.off else []
    if option.kind == "maybe" and isinstance(value, bool):
        return [option.flag] if value else []
    if option.kind == "list":
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not items:
            return [option.flag] if option.empty else _wrong(option, value, written, place, family)
    else:
        items = [value]
    texts: list[str] = []
    for item in items:
        text = _text(option, item)
        if text is None:
            return _wrong(option, value, written, place, family)
        if option.choices and text not in option.choices:
            return _no_choice(option, text, written, place, family)
        texts.append(text)
    if option.kind != "list" and texts[0].startswith("-"):
        return [f"{option.flag}={texts[0]}"]
    return [option.flag, *texts]


def _text(option: Option, value: Any) -> str | None:
    """One value as SGLang's parser reads it; None where it does not fit the option's type."""
    kind = option.type
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, str) and "\0" in value:
        return None
    if kind == "int":
        fits = isinstance(value, int) or (isinstance(value, str) and INTEGER.fullmatch(value))
        return str(value) if fits else None
    if kind == "float":
        return repr(value) if isinstance(value, (int, float)) else _number(value)
    if kind == "human_readable_int":
        fits = isinstance(value, int) or (isinstance(value, str) and COUNT.fullmatch(value))
        return str(value) if fits else None
    if kind in JSON_TYPES:
        return _json(value, list if kind == "json_list_type" else None)
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return None if kind == "str" else json.dumps(value)
    return value if isinstance(value, str) else str(value) if isinstance(value, (int, float)) else None


def _number(value: Any) -> str | None:
    try:
        return value if isinstance(value, str) and math.isfinite(float(value)) else None
    except ValueError:
        return None


def _json(value: Any, type_: type | None) -> str | None:
    """A JSON value, or JSON text, as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if type_ is not None and not isinstance(value, (type_, tuple)):
        return None
    return json.dumps(value)


def _wrong(option: Option, value: Any, written: str, place: str, family: OptionFamily) -> Problem:
    description = describe(option)
    fix = f"{written} = {_example(option)}"
    if option.kind in ("flag", "switch") and isinstance(value, (str, list)):
        flag = f"{family.flags}{option.name.replace('_', '-')}"
        fix += f"   or {flag} before another flag (put the recipe before all flags)"
    elif option.kind != "list" and isinstance(value, (list, tuple)):
        fix += "   (put the recipe before all flags)"
    return Problem(
        code="CFG02",
        what=f"{written} = {show(value, option.name)} has the wrong type",
        where=place,
        why=f"it is {kind_of(value)}, and {family.genitive} {option.flag} takes {description}",
        fix=fix,
    )


def _no_choice(option: Option, text: str, written: str, place: str, family: OptionFamily) -> Problem:
    shown = "a value" if is_secret(option.name, text) else f"'{text}'"
    return Problem(
        code="CFG03",
        what=f"{written}: {shown} is not a choice of {family.genitive} {option.flag}",
        where=place,
        why=f"it takes {describe(option)}",
        fix=nearest(text, option.choices) or f"{written} = {_example(option)}",
    )


_TYPES: Mapping[str, tuple[str, str, str]] = {
    "int": ("an integer", "integers", "8"),
    "float": ("a number", "numbers", "0.5"),
    "human_readable_int": ("a count", "counts", '"32k"'),
    "loads": ("a table (JSON)", "tables (JSON)", "{ key = 1 }"),
    "json_list_type": ("an array (JSON)", "arrays (JSON)", '["a", "b"]'),
}


def describe(option: Option) -> str:
    """What an option takes, in words: ``an integer``, ``one of fa3, triton``."""
    if option.kind in ("flag", "switch"):
        return "true or false"
    one, many, _ = _TYPES.get(option.type, ("a string", "strings", ""))
    if option.choices:
        one = "one of " + ", ".join(option.choices)
        many = f"values, each {one}"
    return f"an array of {many}" if option.kind == "list" else one


def _example(option: Option) -> str:
    if option.kind in ("flag", "switch"):
        return "true"
    text = f'"{option.choices[0]}"' if option.choices else _TYPES.get(option.type, ("", "", '"..."'))[2]
    return f"[{text}]" if option.kind == "list" else text


def read_options(rows: Sequence[Mapping[str, Any]]) -> dict[str, Option]:
    """Options by every name that SGLang's parser knows them by, from what `probe.py` printed.

    Raises:
        KeyError, TypeError, ValueError: it is not what `probe.py` prints.
    """
    options: dict[str, Option] = {}
    for entry in rows:
        flags = [flag for flag in entry["flags"] if flag.startswith("--")]
        names = [flag[2:].replace("-", "_") for flag in flags]
        if entry["kind"] not in ("flag", "switch", "value", "maybe", "list"):
            raise ValueError(f"unknown kind {entry['kind']!r}")
        name = str(entry["name"]) if entry["name"] in names else names[0]
        off = next((flag for flag in flags if flag.startswith("--no-")), "") if entry["kind"] == "switch" else ""
        option = Option(
            name=name,
            flag=flags[0],
            kind=entry["kind"],
            type=str(entry["type"]),
            empty=bool(entry["empty"]),
            off=off,
            choices=tuple(str(choice) for choice in entry["choices"]),
            default=entry["default"],
            help=str(entry["help"]),
        )
        for option_name, flag in zip(names, flags, strict=True):
            if flag != off:
                options.setdefault(option_name, option)
    return options


def no_such_installation(python: str, why: str, fix: str) -> ConfigError:
    """The error for an environment that has no SGLang that can be used."""
    return ConfigError(f"there is no usable SGLang at {python}", code="CFG04", where="sglang.python", why=why, fix=fix)

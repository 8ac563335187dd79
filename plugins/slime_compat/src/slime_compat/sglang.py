"""Translation of SGLang's `/generate` payloads to requests, and of completions to its answers."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from slime_compat.handlers import HttpError
from slime_core.types import Completion, SamplingParams

DEFAULT_NEW_TOKENS = 128  # SGLang's own
PAYLOAD = {"text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "return_routed_experts"}
PAYLOAD |= {"image_data", "lora_path"}
PAYLOAD |= {"rid", "log_metrics", "priority", "stream"}  # change no answer
EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {}, -1)
_OURS = {"max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos"}
_OTHERS = {"sampling_seed", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # settings of SGLang that change nothing at these values
    "n": (None, 1),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
}


def check(payload: Mapping[str, Any]) -> None:
    """Refuse what would change the answer and is not served.

    Raises:
        HttpError: a key of SGLang's that the run's engine does not have, unless its value is empty, 0 or false.
    """
    odd = [name for name, value in payload.items() if name not in PAYLOAD and value not in EMPTY]
    if odd:
        raise HttpError(400, f"{', '.join(odd)}: not supported by the run's engine, which takes text; leave it out")


def images(data: Any, prompts: int) -> list[list[str]]:
    """The pictures of each prompt, of a payload's ``image_data``; ``prompts`` is 0 where the payload is no list.

    Raises:
        HttpError: neither texts, nor a list of them for each prompt.
    """
    values = [data] if isinstance(data, str) else list(data or ())
    lists = values if prompts else [values]
    lists = [[one] if isinstance(one, str) else list(one or ()) for one in lists] or [[]] * prompts
    if len(lists) != max(prompts, 1) or not all(isinstance(image, str) for of_prompt in lists for image in of_prompt):
        raise HttpError(400, "image_data is a list of pictures, or one for each prompt: base64 or data: URIs")
    return lists


def from_dict(params: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a payload.

    Raises:
        HttpError: a setting that the run's engine does not have, at a value that would change the draw.
    """
    odd = [
        f"{name}={value!r}"
        for name, value in params.items()
        if name not in _OURS | _OTHERS and (value not in _NEUTRAL[name] if name in _NEUTRAL else value is not None)
    ]
    if odd:
        raise HttpError(400, f"sampling_params {', '.join(odd)} are not supported by the run's engine")
    stop = params.get("stop") or ()
    new = params.get("max_new_tokens")
    try:
        return SamplingParams(
            max_new_tokens=DEFAULT_NEW_TOKENS if new is None else int(new),
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, int(params.get("top_k", -1))),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(int(token) for token in params.get("stop_token_ids") or ()),
            ignore_eos=bool(params.get("ignore_eos", False)),
        )
    except (TypeError, ValueError) as error:
        raise HttpError(400, f"sampling_params: {error}") from error


def answer(
    done: Completion,
    prompt_tokens: int,
    text: str,
    *,
    log_probs: bool,
    version: int,
    seconds: float,
    experts: bool = False,
) -> dict[str, Any]:
    """SGLang's answer to one request; log-probs are those of the distribution drawn from."""
    weight_version = max(done.versions, default=version)
    reason: dict[str, Any] = {"type": done.finish}
    if done.finish == "length":
        reason["length"] = len(done.tokens)
    meta: dict[str, Any] = {
        "id": done.id,
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(done.tokens),
        "cached_tokens": 0,
        "e2e_latency": seconds,
        "weight_version": str(weight_version),
    }
    if log_probs:
        meta["output_token_logprobs"] = entries(done.tokens, done.log_probs)
        meta["weight_versions"] = list(done.versions)  # ours: one a token
    if experts and done.routed_experts is not None:
        meta["routed_experts"] = b64encode(done.routed_experts.astype("<i4").tobytes()).decode()
        meta["routed_experts_shape"] = list(
            done.routed_experts.shape[1:]
        )  # ours: layers with experts, experts a token
    return {"text": text, "output_ids": list(done.tokens), "meta_info": meta}


def entries(tokens: Sequence[int], log_probs: Sequence[float | None]) -> list[list[Any]]:
    """``[log-prob, id, None]`` a token."""
    return [
        [None if value is None else float(value), int(token), None]
        for token, value in zip(tokens, log_probs, strict=True)
    ]

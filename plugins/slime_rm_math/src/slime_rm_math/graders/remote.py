"""A reward model behind HTTP, which answers a number or an object of numbers.

    POST rm_url  {"prompt": ..., "response": ..., "label": ...}      as THUDM/slime's remote_rm sends it
    200          0.5    or    {"reward": 0.5, "style": 0.2}           the key is reward.reward_key where that is set

Anything else is an infrastructure error, never a reward of 0: the sample is dropped and its reason counted.
"""

from __future__ import annotations

from typing import Any

from slime_core import Reward, Sample
from slime_rm_math.graders.post import Unanswered, post_json
from slime_rm_math.graders.verdict import infra

REWARD = "reward"
LARGEST = 1e6  # a reward of a greater size is a mistake
TERMS, LONGEST_NAME = 64, 100


async def remote_reward(
    sample: Sample, response: str, *, url: str, token: str, seconds: float, retries: int, key: str = ""
) -> Reward:
    """What the reward model says of a sample; ``infra_error`` where it says nothing that is a reward.

    Args:
        sample: prompt and label.
        response: what is judged.
        url: of the model.
        token: sent as a bearer token, "" for none.
        seconds: for all tries together.
        retries: after the first try.
        key: of the number that trains, in an answer that is an object; "" is ``reward``.
    """
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    try:
        reply = await post_json(url, payload, token=token, seconds=seconds, retries=retries)
    except Unanswered as error:
        return infra(f"remote_rm: {error}")
    return read(reply, key or REWARD)


def read(reply: Any, key: str) -> Reward:
    """A reward model's answer as a Reward.

    Example:
        read({"reward": 0.5, "style": 0.2}, "reward")    # Reward(value=0.5, terms={"style": 0.2})
        read("0.5", "reward")                            # an infra_error: a text is no number
    """
    if not isinstance(reply, dict):
        return Reward(value=float(reply)) if _is_number(reply) else infra(f"remote_rm: answered {_shown(reply)}")
    if not _is_number(reply.get(key)):
        return infra(f"remote_rm: answered {_shown(reply)}, without a number as '{key}'")
    rest = {str(name): value for name, value in reply.items() if name != key}
    if any(not name.strip() or len(name) > LONGEST_NAME or not name.isprintable() for name in rest):
        return infra(f"remote_rm: answered {_shown(reply)}, with a name of a term that is empty or no plain text")
    if len(rest) > TERMS or not all(_is_number(value) for value in rest.values()):
        return infra(f"remote_rm: answered {_shown(reply)}, whose other entries are not {TERMS} numbers at most")
    return Reward(value=float(reply[key]), terms={name: float(value) for name, value in rest.items()})


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= LARGEST  # not of NaN


def _shown(reply: Any) -> str:
    return f"{type(reply).__name__} {reply!r:.80}"

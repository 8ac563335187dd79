"""Whether a server's token ids are ours: how many there are, and what its tokenizer makes of a few hundred texts.

Ids alone travel, so a server of another vocabulary would answer well-formed nonsense, or end at the first id that it
does not have. Neither size nor tokenizer stands in what a server says of itself; both can be asked for:

    a logit bias for an id that no model has  -> refused with the range of ids      (nothing is computed)
    POST /tokenize                            -> ids, compared with our tokenizer's
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError
from slime_core.notices import notice
from slime_sglang.bodies import NO_TOKENIZER

if TYPE_CHECKING:
    from slime_sglang.client import Client

NO_ID = 2**31 - 1
RANGE = re.compile(r"logit_bias must has keys in \[0, (\d+)\]")
SECONDS = 60.0
IDS = 256  # evenly spread over the vocabulary, whose texts are compared
TEXTS = (
    "The quick brown fox, 0123456789 + 3.14 = ?\n\n\tdef f(x): return x**2  # comment",
    "naïve Ærøskøbing Ελλάδα Привет 你好，世界 こんにちは 안녕 עברית 🦊👩‍👩‍👧",
    " leading,  double   spaces and a trailing one ",
    '1234567890123 \\frac{a}{b} <b>x</b> {"key": [null, true]}',
)


async def check_vocabulary(client: Client, facts: Mapping[str, Any], *, vocab_size: int, tokenizer: Any) -> None:
    """Compare a server that is ready with the model that is trained.

    Args:
        facts: what the server said of itself.
        vocab_size: rows of the trainer's embedding.
        tokenizer: the trainer's; None: ids alone are of interest, and texts are not compared.

    Raises:
        EngineError: TOK40 another number of ids, or another tokenizer: both models are named.
    """
    names = f"it serves {_named(facts, 'model_path')}", f"the trainer's is {getattr(tokenizer, 'name_or_path', '')!r}"
    size = await _size(client)
    if size is None:
        _say(client, "size of its vocabulary", "it does not report the range of ids")
    elif size != vocab_size:
        raise EngineError(
            f"SGLang server {client.address.number} has {size} token ids, and the trainer's model {vocab_size}",
            code="TOK40",
            where=client.address.url,
            why="; ".join(names),
            fix="serve the model that is trained (rollout.hf_checkpoint)",
        )
    if tokenizer is None or facts.get(NO_TOKENIZER):
        return
    texts = _texts(tokenizer, vocab_size)
    server_ids = await _ids(client, texts)
    if isinstance(server_ids, str):
        return _say(client, "tokenizer", server_ids)
    for text, their in zip(texts, server_ids, strict=True):
        local_ids = tokenizer.encode(text, add_special_tokens=False)
        if list(their) != list(local_ids):
            raise EngineError(
                f"SGLang server {client.address.number} has another tokenizer than the trainer",
                code="TOK40",
                where=client.address.url,
                why=f"{text[:40]!r} is {_short(their)} there and {_short(local_ids)} here; "
                f"its tokenizer is {_named(facts, 'tokenizer_path')}, {names[1]}",
                fix="serve the tokenizer of rollout.hf_checkpoint, of the same version on both sides",
            )


async def _size(client: Client) -> int | None:
    """Ids that the server's model has; None where it does not say."""
    params = {"max_new_tokens": 1, "logit_bias": {str(NO_ID): 0.0}}
    try:
        await client.post("/generate", {"input_ids": [0], "sampling_params": params}, timeout=SECONDS)
    except EngineError as error:
        if error.code != "ENG78":
            raise
        match = RANGE.search(error.what)
        return int(match[1]) + 1 if match else None
    return None


async def _ids(client: Client, texts: Sequence[str]) -> Sequence[Sequence[int]] | str:
    """What the server's tokenizer makes of texts, or why that is not known."""
    body = {"prompt": list(texts), "add_special_tokens": False}
    try:
        answer = await client.post("/tokenize", body, timeout=SECONDS, retry=True)
    except EngineError as error:
        if error.code not in ("ENG71", "ENG75", "ENG78"):  # another route, or an answer of SGLang that says why not
            raise
        return error.why or error.what
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or len(tokens) != len(texts) or not all(isinstance(ids, list) for ids in tokens):
        return f"/tokenize answered {str(answer)[:100]}"
    return tokens


def _texts(tokenizer: Any, vocab_size: int) -> list[str]:
    """A few sentences, the special tokens, and the texts of ids from all over the vocabulary."""
    size = min(vocab_size, len(tokenizer))
    spread = range(0, size, max(1, size // IDS))
    decoded = [tokenizer.decode([number], skip_special_tokens=False) for number in spread]
    return [text for text in dict.fromkeys((*TEXTS, *tokenizer.all_special_tokens, *decoded)) if text]


def _short(ids: Sequence[int]) -> str:
    return str(list(ids[:12])) if len(ids) <= 12 else f"{list(ids[:12])} ... ({len(ids)} ids)"


def _named(facts: Mapping[str, Any], key: str) -> str:
    return repr(facts.get(key, "unknown"))


def _say(client: Client, what: str, why: str) -> None:
    text = f"the {what} of the SGLang server at {client.address.url} is not compared with the trainer's: {why}"
    notice(("vocabulary", what, client.address.url), text)

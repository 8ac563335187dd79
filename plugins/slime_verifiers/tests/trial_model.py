"""A model of a few thousand weights whose tokens are characters, and a whole tool call each."""

import json

from slime_core.testing import tiny_model

CALLS = {
    name: f'<tool_call>{{"name": "book_look", "arguments": {{"who": "{name}"}}}}</tool_call>'
    for name in ("ann", "bob")
}
LETTERS = "0123456789 abcdefghijklmnopqrstuvwxyz:(),"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def make_model(path, letters=LETTERS):
    """Write the folder; a random model calls a tool in one of ten answers."""
    stand_ins = dict(zip("AB", CALLS.values(), strict=True))
    tiny_model(path, hidden=32, vocab=letters + "AB", chat_template=CHAT_TEMPLATE)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = {stand_ins.get(word, word): id for word, id in tokenizer["model"]["vocab"].items()}
    file.write_text(json.dumps(tokenizer))
    return path

"""A tokenizer whose tokens can be read, an engine that answers from a script, and a client that speaks plain HTTP.

A message is the first letter of its role, its content and ``|``, which ends a turn: [user hi] is ``Uhi|A``.
"""

import json

import httpx

from slime_core.errors import EngineError
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import Completion

ALPHABET = "|" + "".join(chr(code) for code in range(32, 127) if chr(code) != "|") + "\n"


class LetterTokenizer(CharTokenizer):
    """See the module; ``|`` is the end of a turn, id 0."""

    def __init__(self):
        super().__init__(ALPHABET)
        self.chat_template, self.special_tokens_map = "a letter a message", {}

    def apply_chat_template(self, messages, *, tools=None, tokenize=False, add_generation_prompt=False, **_):
        head = f"F{json.dumps(tools)}|" if tools else ""
        lines = [f"{m['role'][0].upper()}{m['content']}{self._calls(m)}|" for m in messages]
        return head + "".join(lines) + ("A" if add_generation_prompt else "")

    def _calls(self, message):
        calls = message.get("tool_calls", ())
        return "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in calls)

    def ids(self, text):
        return self.encode(text)


class LineEngine(FakeEngine):
    """Gives the next line of its script, whoever asks; token i of request r has log-prob -(r + i / 1000) - 0.001."""

    def __init__(self, tokenizer, script):
        super().__init__(vocab_size=len(tokenizer))
        self.version, self.tokenizer, self.script = 3, tokenizer, list(script)
        self.requests, self.gates = [], {}

    async def generate(self, request):
        number = len(self.requests)
        self.requests.append(request)
        line = self.script[number % len(self.script)]
        if number in self.gates:
            await self.gates[number].wait()
        if isinstance(line, EngineError):
            raise line
        finish = "stop" if line.endswith("|") else "length"
        if line == "<abort>":
            line, finish = "", "abort"
        ids = self.tokenizer.ids(line)
        return Completion(
            id=request.id, tokens=ids, log_probs=[-(number + i / 1000) - 0.001 for i in range(len(ids))],
            plain_log_probs=[-1.0] * len(ids), finish=finish, versions=[self.version] * len(ids),
            text=line.removesuffix("|"),
        )  # fmt: skip


class Client:
    """An agent's way to ask a session, with messages in the form of chat completions over any of its APIs."""

    def __init__(self, session):
        headers = {"authorization": f"Bearer {session.api_key}"}
        self.http = httpx.AsyncClient(base_url=session.base_url, headers=headers, timeout=30, trust_env=False)

    async def post(self, messages, **fields):
        return await self.http.post("/chat/completions", json={"model": "policy", "messages": messages, **fields})

    async def say(self, messages, **fields):
        """The message that the endpoint returns."""
        answer = await self.post(messages, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    async def speak(self, api, messages, **fields):
        """The message that an API returns: ``chat``, ``messages`` or ``responses``."""
        if api == "chat":
            return await self.say(messages, **fields)
        path = {"messages": "/messages", "responses": "/responses"}[api]
        body = (to_anthropic if api == "messages" else to_responses)(messages)
        answer = await self.http.post(path, json={"model": "policy", **body, **fields})
        assert answer.status_code == 200, answer.text
        return (of_anthropic if api == "messages" else of_responses)(answer.json())

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.http.aclose()


def to_anthropic(messages):
    """Messages as those of `/v1/messages`."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns = []
    for message in messages:
        blocks = [{"type": "text", "text": message["content"] or ""}]
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": blocks}]
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        if message["role"] != "system":
            turns.append({"role": "assistant" if message["role"] == "assistant" else "user", "content": blocks})
    return {"max_tokens": 64, "messages": turns, **({"system": system[0]} if system else {})}


def of_anthropic(answer):
    """The message of an answer of `/v1/messages`."""
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def to_responses(messages):
    """Messages as input of `/v1/responses`."""
    items = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        if message["content"] or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": [{"type": kind, "text": message["content"] or ""}]})
        items += (
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        )
    return {"input": items}


def of_responses(answer):
    """The message of an answer of `/v1/responses`."""
    texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}

"""Episodes with a server of the published protocol, one that works and one that fails in every way."""

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from openenv_play import TOKENIZER, VOCAB, alive, command, context, group_of, obeys, play, servers_of, serving
from openenv_protocol import Faulty
from pydantic import ValidationError

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.prompts import Encoder, Parsed
from slime_core.data.tool_calls import PARSERS
from slime_core.errors import ConfigError, DataError, PluginError
from slime_core.testing.models import CHAT_TEMPLATE, char_tokenizer
from slime_core.testing.plugins import check_plugin
from slime_core.types import Group, Sample, Status
from slime_openenv.actions import to_action, to_calls
from slime_openenv.options import Options
from slime_openenv.plugin import OpenEnv
from slime_openenv.servers import LocalServer
from slime_openenv.session import EnvSession, InvalidAction

pytestmark = pytest.mark.integration


def episode(app=None, say=lambda text: "a", *, template="", metadata=None, context_len=100_000, **options):
    """One episode; the sample and its reward."""

    async def run():
        async with serving(app or Faulty()) as urls:
            ctx = context(Options(url=urls, **options), say, template=template, context_len=context_len)
            return (await play(ctx, group_of(**(metadata or {}))))[0]

    return asyncio.run(run())


def test_an_episode_trains_on_its_answers_alone_and_has_the_environments_rewards():
    sample, reward = episode(say=obeys, metadata={"reset": {"seed": 2}})
    assert TOKENIZER.decode(sample.tokens) == (
        "go\n\nsay: c" + "c<eos>" + "\nsay: d\n" + "d<eos>" + "\nsay: e\n" + "e<eos>"
    )
    trained = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(trained) == "c<eos>d<eos>e<eos>"
    assert [version for version, mask in zip(sample.weight_versions, sample.loss_mask, strict=True) if mask] == [3] * 6
    assert (reward.kind, reward.value, reward.terms) == ("score", 3.0, {"turns": 3.0, "invalid": 0.0, "done": 1.0})
    assert sample.metadata["openenv"]["turn_rewards"] == [1.0, 1.0, 1.0]
    assert sample.status is Status.COMPLETED
    _, last = episode(say=lambda text: obeys(text) if "say: c" not in text else "x", reward="last")
    assert last.value == 0.0


def test_what_the_model_reads_and_does_can_be_written_by_templates_and_functions(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def show(observation):\n    return observation['hint'].upper()\n"
        "async def act(text):\n    if text == 'no':\n        raise ValueError('never no')\n    return {'letter': text}\n"
    )
    monkeypatch.chdir(tmp_path)
    words = {
        "prompt_template": "{{ schema.required[0] | tojson }} {{ observation.hint }}: {{ text }}!",
        "observation_template": "({{ hint }} {{ reward }})",
    }
    sample, _ = episode(template=CHAT_TEMPLATE, **words)
    assert TOKENIZER.decode(sample.tokens).startswith('user: "letter" say: a: (say: a None)!\nassistant: a<eos>')
    assert "user: (say: b 1.0)\nassistant: " in TOKENIZER.decode(sample.tokens)
    sample, reward = episode(
        say=lambda text: "no",
        observation_path="mine.py:show",
        action_path="mine.py:act",
        max_turns=2,
        invalid_reward=-1.0,
    )
    assert TOKENIZER.decode(sample.tokens) == "go\n\nSAY: Ano<eos>\nInvalid action: never no\nno<eos>"
    assert (reward.value, sample.status) == (-2.0, Status.TRUNCATED)
    with pytest.raises(ConfigError, match="'hint_' is undefined") as caught:
        episode(observation_template="{{ hint_ }}")
    assert caught.value.fix.startswith("correct the template")


def test_a_row_is_rendered_once_by_the_chat_template():
    """As a run does it: the row is encoded, and its episode joins question and first observation in one message."""
    tokenizer, plugin = char_tokenizer(VOCAB + "{}[]<>_|", CHAT_TEMPLATE), OpenEnv()
    encoder = Encoder(tokenizer, template=True, rewrite=lambda m, t, row: plugin.slime_messages(m, t, row.metadata))
    talk = [{"role": "system", "content": "one letter"}, {"role": "user", "content": "go"}]
    for content, opening in (("go", ""), (talk, "system: one letter\n")):
        parsed = Parsed(prompt=content, label="", metadata={}, tools=None, row_id="1", where="rows:1")
        row = encoder.prompt(parsed, id="main/0", task="main", position=0)

        async def run(row=row):
            async with serving(Faulty()) as urls:
                ctx = context(Options(url=urls), lambda text: "a", template=CHAT_TEMPLATE)
                sample = Sample(id="main/0-0", prompt=row.prompt, tokens=row.tokens, metadata=dict(row.metadata))
                return (await play(ctx, Group(prompt=row, samples=[sample], rollouts={0: [0]})))[0][0]

        start = f"{opening}user: go\n\nsay: a\nassistant: "
        assert TOKENIZER.decode(asyncio.run(run()).tokens).startswith(start)


def test_an_episode_ends_at_its_limits():
    ends = {
        "cut": episode(say=lambda text: "aa..."),
        "turns": episode(max_turns=2),
        "done": episode(say=lambda text: "aa...", cut_answer="act"),
        "context": episode(Faulty(), context_len=100, metadata={"reset": {"fail": [1, "2000 words"], "seed": 0}}),
    }
    assert {name: sample.metadata["openenv"]["ended"] for name, (sample, _) in ends.items()} == {n: n for n in ends}
    assert [sample.status.value for sample, _ in ends.values()] == ["truncated"] * 2 + ["completed", "truncated"]
    sample, reward = ends["context"]
    assert (sample.response_length, len(sample.loss_mask), reward.value) == (2, 2, 1.0)
    assert TOKENIZER.decode(sample.tokens) == "go\n\nsay: aa<eos>"
    sample, reward = episode(context_len=5)
    assert (sample.status, reward.kind) == (Status.FAILED, "infra_error")


def test_a_server_that_looks_whether_a_session_lives_is_answered_while_the_model_thinks():
    async def run():
        answered = asyncio.Event()

        async def serve(request):
            socket = web.WebSocketResponse(autoping=False)
            await socket.prepare(request)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.PONG:
                    answered.set()
                elif "close" in message.data:
                    break
                else:
                    await socket.send_json({"type": "observation", "data": {"observation": {}}})
                    await socket.ping()
            return socket

        app = web.Application()
        app.router.add_get("/ws", serve)
        async with serving(SimpleNamespace(app=app)) as (url,), aiohttp.ClientSession() as http:
            session = EnvSession(await http.ws_connect(f"{url}/ws"))
            await session.reset({}, 60)
            await asyncio.wait_for(answered.wait(), 60)
            await session.step({}, 60)
            await session.close()

    asyncio.run(run())


FAULTS = {
    "raises": "EXECUTION_ERROR: boom",
    "drops": "closed the connection",
    "hangs": "did not answer a step in 3 s",
    "nonsense": "none of the protocol: <html>",
    "bytes": "none of the protocol: bytes",
    "other type": "none of the protocol",
    "no data": "no observation",
    "nan": "its reward is not a number",
    "huge": "its reward is not a number",
    "surrogate": "half of a character",
    "10 MB": "longer than max_message_bytes",
}


def test_a_step_that_fails_costs_its_sample_and_is_never_a_reward():
    async def run():
        async with serving(app := Faulty()) as urls:
            options = Options(url=urls, step_timeout=3.0)
            failing = [group_of(1, n, reset={"seed": 0, "fail": [2, fault]}) for n, fault in enumerate(FAULTS)]
            done = await play(context(options, obeys), *failing, group_of(2, 99))
            return done, app.figures

    done, figures = asyncio.run(run())
    *failed, (_, good), (_, other) = done
    for (sample, reward), (fault, reason) in zip(failed, FAULTS.items(), strict=True):
        assert (sample.status, reward.kind) == (Status.FAILED, "infra_error"), fault
        assert reason in reward.reason, fault
        assert sample.metadata["openenv"]["turn_rewards"][:1] == [1.0], fault
    assert good.value == other.value == 3.0
    assert figures["now"] == 0, "every session is closed"


@pytest.mark.parametrize("fault", ["http 500", *FAULTS])
def test_a_reset_that_fails_is_tried_on_another_connection(fault):
    async def run():
        async with serving(bad := Faulty([fault]), good := Faulty()) as urls:
            options = Options(url=urls, reset_timeout=3.0 if fault == "hangs" else 60.0, sessions=1)
            return await play(context(options, obeys), group_of(3)), bad.figures, good.figures

    done, bad, good = asyncio.run(run())
    if fault == "surrogate":  # the protocol is kept; its text is not
        assert {reward.kind for _, reward in done} == {"score", "infra_error"}
        return
    assert [reward.value for _, reward in done] == [3.0] * 3
    assert good["all"] == 3
    assert bad["now"] == good["now"] == 0


def test_resets_that_all_fail_cost_the_sample_after_the_tries():
    app = Faulty(["raises"])
    sample, reward = episode(app, reset_tries=4)
    assert app.figures["all"] == 4
    assert (sample.status, reward.kind) == (Status.FAILED, "infra_error")
    assert "EXECUTION_ERROR" in reward.reason

    async def nobody():
        options = Options(url=["http://127.0.0.1:1"], reset_tries=2)
        return (await play(context(options, obeys), group_of()))[0]

    assert "no connection" in asyncio.run(nobody())[1].reason


def test_two_hundred_episodes_at_once_open_no_more_connections_than_are_allowed():
    async def run():
        async with serving(one := Faulty(limit=7), two := Faulty()) as urls:
            options = Options(url=urls, sessions=20, max_turns=1)
            done = await play(context(options, obeys), *(group_of(8, number) for number in range(25)))
            return done, one.figures, two.figures

    done, one, two = asyncio.run(run())
    assert [reward.value for _, reward in done] == [1.0] * 200
    assert one["all"] + two["all"] == 200
    assert (one["most"], two["most"]) == (7, 20), "a server's own limit is kept, once it has said it"
    assert one["now"] == two["now"] == 0


def test_a_server_is_started_restarted_when_it_dies_and_ended(tmp_path):
    options = Options(command=command(tmp_path), command_env={"PYTHONPATH": ""}, command_dir=str(tmp_path), servers=1)

    async def run():
        plugin, ctx = OpenEnv(), context(options, obeys, run_dir=tmp_path)
        try:
            groups = [group_of(2), group_of(1, 1, reset={"seed": 0, "fail": [1, "dies"]}), group_of(2, 2)]
            pids = []
            for group in groups:
                await plugin.slime_generate(group, ctx)
                pids.append(servers_of(tmp_path))
            rewards = [plugin.slime_reward(group, ctx) for group in groups]
        finally:
            await plugin.slime_run_done(ctx)
        return rewards, pids

    rewards, (first, _, second) = asyncio.run(run())
    assert [[(one.kind, one.value) for one in each] for each in rewards] == [
        [("score", 3.0)] * 2,
        [("infra_error", 0.0)],
        [("score", 3.0)] * 2,
    ]
    assert len(first) == len(second) == 1
    assert first != second
    assert not alive(first[0])
    assert not alive(second[0])
    assert "ended with code 1" in (tmp_path / "log" / "openenv-0-0.log").read_text()


def test_a_server_that_does_not_start_ends_the_run_with_what_it_said(tmp_path):
    for words, said in (
        ((sys.executable, "-c", "print('no such game'); raise SystemExit(3)", "{port}"), "no such game"),
        (("no-such-program", "{port}"), "No such file"),
    ):
        with pytest.raises(PluginError, match=said) as caught:
            asyncio.run(play(context(Options(command=words), obeys), group_of()))
        assert caught.value.code == "PLG70"
    words = (sys.executable, "-c", "import time; time.sleep(60)", "{port}")
    with pytest.raises(PluginError, match=r"did not answer in 0\.5 s"):
        asyncio.run(play(context(Options(command=words, start_timeout=0.5), obeys), group_of()))


def test_a_server_whose_start_was_stopped_is_started_again(tmp_path):
    async def run():
        server = LocalServer(0, Options(command=command(tmp_path)), None)
        async with aiohttp.ClientSession() as http:
            first = asyncio.ensure_future(server.ready(http))
            while not server.url:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            try:
                await server.ready(http)
                async with http.get(f"{server.url}/health") as response:
                    assert response.status == 200
            finally:
                await server.stop()

    asyncio.run(run())


def test_answers_become_actions():
    words = {"properties": {"message": {"type": "string"}, "metadata": {}}}
    number = {"properties": {"row": {"type": "integer"}, "sure": {"type": "boolean"}}}
    assert to_action(" hello\n", words) == {"message": "hello"}
    assert to_action("7", number, "row") == {"row": 7}
    assert to_action("True", number, "sure") == {"sure": True}
    assert to_action('so {"row": 1} or {} {"row": 2, "sure": {"a": [1]}}, yes', number) == {
        "row": 2,
        "sure": {"a": [1]},
    }
    for text, field in (("x", "row"), ("maybe", "sure"), ("none", ""), ('{"row": ', "")):
        with pytest.raises(InvalidAction):
            to_action(text, number, field)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert to_calls(call, PARSERS["hermes"], ()) == [{"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}]
    assert to_calls("add(1)", PARSERS["hermes"], ()) == []
    with pytest.raises(InvalidAction):
        to_calls("<tool_call>{}", PARSERS["hermes"], ())


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"url": ["127.0.0.1:8000"]}, "is not an address"),
        ({"url": ["http://h"], "command": ["serve", "{port}"]}, "url and command exclude each other"),
        ({"command": ["serve", "8000"]}, "no word of the command has {port}"),
        ({"observation_template": "{{ text"}, "no Jinja template"),
        ({"tools": "hermse"}, "'hermse' is not a format of tool calls: auto, hermes"),
        ({"tasks": {"chess": {"max_turn": 3}}}, "max_turn"),
    ],
)
def test_options_that_cannot_be_are_refused(keys, text):
    with pytest.raises(ValidationError, match=text):
        Options(**keys)


def test_rows_have_seeds_or_arguments_of_their_own():
    options = Options(episodes=5, url=["http://h"], tasks={"chess": {"max_turns": 9, "heldout_episodes": 2}})
    ctx = Context(config=Config(), options=options)
    train, heldout = (OpenEnv().slime_prompts(task, ctx) for task in ("default", "chess_heldout"))
    assert [train.at(n).metadata["reset"]["seed"] for n in range(len(train))] == [0, 1, 2, 3, 4]
    assert [heldout.at(n).metadata["reset"]["seed"] for n in range(len(heldout))] == [1_000_000_000, 1_000_000_001]
    with pytest.raises(DataError, match=r"metadata\.reset is a list"):
        episode(metadata={"reset": [7]})


def test_tasks_have_environments_of_their_own(monkeypatch):
    monkeypatch.setenv("GAME_TOKEN", "secret")

    async def run():
        async with serving(one := Faulty(), two := Faulty()) as urls:
            other = {"url": urls[1:], "reward": "last", "max_turns": 2, "token_env": "GAME_TOKEN"}
            options = Options(url=urls[:1], tasks={"other": other})
            groups = [group_of(), group_of(1, 1)]
            groups[1].prompt = replace(groups[1].prompt, task="other_heldout")
            done = await play(context(options, obeys), *groups)
            return [reward.value for _, reward in done], one, two

    values, one, two = asyncio.run(run())
    assert values == [3.0, 1.0]
    assert one.figures["all"] == two.figures["all"] == 1
    assert (one.tokens, two.tokens) == ({None}, {"Bearer secret"})


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("openenv") if finding.status in ("fail", "warn")] == []

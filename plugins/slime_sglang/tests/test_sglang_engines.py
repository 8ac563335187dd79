"""A config in, what surrounds SGLang's servers out: middleware, limits, turns, and what a person is told."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core.backends import EngineStart
from slime_core.clusters.colocation import DedicatedDevices, TimeSharing, device_sharing
from slime_core.config.load import load_config
from slime_core.errors import ConfigError, PluginError
from slime_core.testing.models import fp8_model, tiny_model
from slime_core.types import Completion, GenerateRequest, SamplingParams
from slime_core.weights.folder import ModelFolder
from slime_sglang import start as sglang
from slime_sglang.model_servers import ModelServers, attached
from slime_sglang.router import chained
from slime_sglang.server import Server

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[3] / "docs" / "sglang.md"


def config(*flags):
    return load_config(None, ["--hf-checkpoint", ".", "--device", "cpu", *flags])


def test_the_middleware_of_the_page_runs_as_it_stands_there(tmp_path, capsys):
    code = re.search(r"```python\n(# trace\.py.*?)```", PAGE.read_text(), re.DOTALL)[1]
    (tmp_path / "trace.py").write_text(code)
    found = sglang.middleware(config("--rollout-middleware-paths", f'["{tmp_path}/trace.py:traced"]'))

    async def last(asked):
        return Completion(
            id=asked.id,
            tokens=[1, 2],
            log_probs=[0.0, 0.0],
            plain_log_probs=[0.0, 0.0],
            finish="stop",
            versions=[3, 3],
        )

    asked = GenerateRequest(id="a-0", tokens=[5], params=SamplingParams(max_new_tokens=4), seed=0)
    done = asyncio.run(chained(found, last)(asked))
    assert done.tokens == [1, 2]
    assert "a-0: 2 tokens, stop" in capsys.readouterr().out


def test_a_quantised_model_by_its_hub_name_is_refused_before_a_server_starts(tmp_path):
    folder = ModelFolder.open(fp8_model(tmp_path / "fp8", tiny_model(tmp_path / "m", hidden=32)))
    named = load_config(None, ["--hf-checkpoint", "OWNER/NAME-FP8", "--rollout-engine", "sglang", "--device", "cpu"])
    start = EngineStart(config=named, folder=folder, run_dir=tmp_path, epoch=1, note=print)

    async def begin():
        async with sglang.sglang_engines(start):
            pass

    with pytest.raises(ConfigError, match="CFG05") as caught:
        asyncio.run(begin())
    assert caught.value.fix == f"--hf-checkpoint {folder.path}"


def test_a_middleware_that_is_not_there_names_the_key(tmp_path):
    with pytest.raises(PluginError, match="rollout_middleware_paths"):
        sglang.middleware(config("--rollout-middleware-paths", f'["{tmp_path}/no.py:traced"]'))


def test_external_servers_get_the_token_of_the_environment_and_are_never_ours(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "of theirs")
    flags = [
        "--rollout-external-engine-addrs",
        '["http://a.example:1", "http://b.example:2/"]',
        "--rollout-engine-token-env",
        "MY_TOKEN",
    ]
    (part,) = attached(config("--rollout-engine", "sglang", *flags))
    assert [server.address.url for server in part.servers] == ["http://a.example:1", "http://b.example:2"]
    assert {server.address.token for server in part.servers} == {"of theirs"}
    assert not any(server.owned for server in part.servers)
    assert part.role == "policy"


def test_limits_of_the_watch_are_the_keys_of_the_section():
    found = sglang.limits(config("--rollout-max-restarts", "7", "--min-healthy-engines", "2"))
    assert (found.max_restarts, found.min_healthy) == (7, 2)
    assert found.timeout == config().rollout.rollout_health_check_timeout


def test_a_person_is_told_which_servers_there_are():
    server = Server.attach("http://a.example:1")
    part = ModelServers(role="policy", model="m", servers=(server,), features=frozenset(), version="0.5.23")
    assert sglang.summary([part]) == ["SGLang 0.5.23: 1 server, at http://a.example:1"]


class Ending:
    """A server whose end is a step of a test's."""

    def __init__(self, began, others, error=None):
        self.began, self.others, self.error = began, others, error

    async def stop(self):
        self.began.append(self)
        while len(self.began) < self.others:  # one after another would never end
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error


def test_all_servers_are_stopped_at_the_same_time_and_one_that_fails_holds_up_none():
    began = []
    servers = [Ending(began, 3), Ending(began, 3, OSError("stuck")), Ending(began, 3)]
    with pytest.raises(OSError, match="stuck"):
        asyncio.run(asyncio.wait_for(sglang._stop(servers), 20))
    assert len(began) == 3


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ([], TimeSharing),
        (["--no-colocate"], DedicatedDevices),
        (["--no-colocate", "--max-staleness", "1"], DedicatedDevices),
    ],
)
def test_turns_follow_from_where_servers_live_and_whether_they_run_ahead(flags, kind):
    engine = SimpleNamespace(abilities=frozenset({"score"}))
    assert isinstance(device_sharing(config(*flags), engine, SimpleNamespace()), kind)

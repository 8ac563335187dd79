"""The modules that stand for slime's own."""

import asyncio
import ssl
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from slime_compat.finder import SERVED, Finder, real_slime
from slime_compat.served.http import _http_client
from slime_core.compat.sample import Sample
from slime_core.errors import PluginError
from slime_core.plugins.locate import locate

pytestmark = pytest.mark.unit


@pytest.fixture
def finder():
    finder = Finder.install()
    yield finder
    finder.remove()


@pytest.mark.parametrize("name", [name for name, home in SERVED.items() if home])
def test_every_served_module_can_be_imported_and_says_where_it_comes_from(finder, name):
    module = import_module(name)
    assert "slime_compat" in module.__doc__


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "slime.ray",
            r"slime\.ray of THUDM/slime is not served here; use --cluster-backend ray; of slime are served: utils, .*rollout",
        ),
        ("slime.rollout.rm_hub.judge", r"of slime\.rollout\.rm_hub are served: math_utils, deepscaler"),
    ],
    ids=["a package", "a module of a served package"],
)
def test_a_module_that_is_not_served_names_what_replaces_it_and_those_that_are(finder, name, message):
    with pytest.raises(ModuleNotFoundError, match=message):
        find_spec(name)


@pytest.mark.parametrize(
    ("path", "code", "text", "fix"),
    [
        ("slime.ray.rollout.fn", "PLG51", "use --cluster-backend ray", "import only the modules in docs/compat.md"),
        (
            "slime.rollout.rm_hub.f1.score",
            "PLG51",
            "it defines: f1_score, normalize_answer",
            "did you mean 'f1_score'?",
        ),
        ("from slime.rollout.rm_hub.f1 import em", "PLG50", "it has f1_score, normalize_answer", "correct the file"),
        ("from slime import ray", "PLG50", "use --cluster-backend ray", "import only the modules in docs/compat.md"),
        ("import slime.ray", "PLG50", "use --cluster-backend ray", "import only the modules in docs/compat.md"),
    ],
    ids=["a module by name", "a function by name", "a name in a file", "a module of a package", "a module in a file"],
)
def test_the_error_of_a_function_says_what_is_served(finder, write, path, code, text, fix):
    path = path if path.endswith(("fn", "score")) else f"{write(path)}:fn"
    with pytest.raises(PluginError) as caught:
        locate(path, "reward.custom_rm_path")
    error = caught.value
    assert error.code == code
    assert text in f"{error.what} {error.why}"
    assert fix in error.fix
    assert "pip install" not in error.fix
    assert error.where.endswith(".py:1") or not path.endswith(".py:fn"), "the line of the user's file"


def test_two_runs_share_the_modules_until_the_last_is_over(finder):
    import slime.utils.types

    other = Finder.install()
    other.remove()
    assert sys.modules["slime.utils.types"] is slime.utils.types
    finder.remove()
    assert "slime.utils.types" not in sys.modules


REAL = """
import sys
sys.path.insert(0, {folder!r})
from slime_core.config.schema import Config
from slime_core.config.sections.reward import RewardSection
from slime_core.errors import PluginError
from slime_core.plugins import load_plugins
try:
    load_plugins(Config(reward=RewardSection(custom_rm_path={path!r})))
    print("loaded")
except PluginError as error:
    print(error.code, error.fix)
"""


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("from slime.utils.types import Sample\ndef fn(sample): return 1\n", "PLG50 pip uninstall slime"),
        ("def fn(sample): return 1\n", "loaded"),
    ],
    ids=["a function that imports it", "a function that does not"],
)
def test_a_real_slime_is_not_shadowed_and_its_functions_are_refused(tmp_path, write, source, answer):
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    for name in ("slime/__init__.py", "slime/utils/__init__.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "slime/utils/types.py").write_text("class Sample: pass\n")
    code = REAL.format(folder=str(tmp_path), path=write(source) + ":fn")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(answer)


def test_a_bare_folder_named_slime_is_no_obstacle(tmp_path, monkeypatch, finder):
    (tmp_path / "slime").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert real_slime() is None
    from slime.utils.types import Sample as Served

    assert Served is Sample


def test_every_served_module_is_on_the_page():
    page = (Path(__file__).parents[3] / "docs" / "compat.md").read_text()
    assert all(name.split(".")[2] in page for name in SERVED if name.count(".") >= 2)


def test_the_http_client_of_functions_refuses_a_server_without_a_valid_certificate(tmp_path):
    files = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*words, "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])

    async def ask():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            await _http_client.get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(ask())

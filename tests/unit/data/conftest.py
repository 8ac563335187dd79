"""A source over rows written by the test, with nothing loaded but a character tokenizer."""

import json

import pytest
from stand_ins import NoPlugins

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.opening import open_source
from slime_core.errors import ConfigError, DataError
from slime_core.testing.models import CHAT_TEMPLATE, char_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return char_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer():
    return char_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.fixture
def write(tmp_path):
    """Write rows (dicts, or raw bytes) as a JSONL file; answers its path."""

    def make(*rows, name="rows.jsonl"):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        return tmp_path / name

    return make


@pytest.fixture
def source(tmp_path, tokenizer):
    """Open a source: data keys as arguments, other sections by name. Each is of another run, unless ``same_run``."""

    def make(prompt_data="", *, plugins=None, tok=None, seed=0, stage="main", sections=None, same_run=False, **data):
        if not same_run:
            (tmp_path / "data.json").unlink(missing_ok=True)
        config = Config(seed=seed, data={"prompt_data": str(prompt_data), **data}, **(sections or {}))
        ctx = Context(config=config, run_dir=tmp_path, stage=stage)
        return open_source(config, plugins or NoPlugins(), tok or tokenizer, ctx)

    return make


@pytest.fixture
def refused():
    """Call something that must raise a typed error with this code, a place and a fix."""

    def check(code, call, *args, **kwargs):
        with pytest.raises((DataError, ConfigError)) as caught:
            call(*args, **kwargs)
        error = caught.value
        assert error.code == code, error
        assert error.where, error
        assert error.fix, error
        assert error.exit_code == (2 if isinstance(error, ConfigError) else 3)
        return error

    return check

"""A small model folder, made once and copied for every test that damages it."""

import json
import shutil

import pytest

from slime_core.testing.models import tiny_model


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    return {
        tied: tiny_model(tmp_path_factory.mktemp("models") / f"tiny-{tied}", hidden=16, layers=1, tied=tied)
        for tied in (False, True)
    }


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine[False], tmp_path / "model")


@pytest.fixture
def edit_json():
    def edit(path, **changes):
        value = json.loads(path.read_text()) if path.exists() else {}
        value.update(changes)
        path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))

    return edit

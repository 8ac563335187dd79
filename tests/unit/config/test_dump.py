"""A config written as TOML loads to the same config; secrets do not come along; a fingerprint moves with what matters."""

import datetime
import tomllib

import pytest
from hypothesis import example, given, settings, strategies as st

from slime_core.config.dump import (
    REDACTED,
    fingerprint,
    redact,
    redacted,
    scrub,
    secrets_in,
    table_to_toml,
    to_toml,
    value_to_toml,
)
from slime_core.config.load import load_config, read
from slime_core.config.positions import key_lines
from slime_core.config.problems import Origins
from slime_core.config.recipe import resolve_env
from slime_core.config.schema import Config
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
TABLES = st.dictionaries(TEXT, VALUES, max_size=5)


def plain(value):
    """Tables in order of their keys (TOML puts plain keys first), escaped references read back."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


@settings(max_examples=150, deadline=None)
@given(TABLES)
@example({"a": "${", "b": "$${X}", "c": ["$$${", "${}}", "$"]})
def test_any_table_survives_toml(table):
    back, _, _ = resolve_env(tomllib.loads(table_to_toml(table)), Origins())
    assert repr(plain(back)) == repr(plain(table))  # repr tells 1, 1.0 and True apart


@settings(max_examples=150, deadline=None)
@given(TABLES)
def test_every_key_of_a_toml_text_has_its_line(table):
    text = "# one line before\n" + table_to_toml(table)
    lines = key_lines(text)

    def walk(value, path):
        if isinstance(value, dict):
            for key, item in value.items():
                assert (*path, key) in lines
                walk(item, (*path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                assert (*path, index) in lines
                walk(item, (*path, index))

    walk(tomllib.loads(text), ())
    assert all(2 <= line <= text.count("\n") + 1 for line in lines.values())


def test_lines_by_hand():
    text = 'a = 1\n[t] # note\n"x.y" = """\none\n"""\nz = [1,\n  # note ]\n  {q = 2}]\n[[s]]\nn = \'#\'\n[s.p]\nv = 1\n[[s]]\nn.m = 2\n'
    lines = key_lines(text)
    assert lines[("a",)] == 1
    assert lines[("t", "x.y")] == 3
    assert lines[("t", "z", 0)] == 6
    assert lines[("t", "z", 1, "q")] == 8
    assert lines[("s", 0, "p", "v")] == 12
    assert lines[("s", 1, "n", "m")] == 14


@pytest.mark.parametrize("text", ['x = """a\\""""\ny = 1\n', "x = '''a''''\ny = 1\n", 'x = """\na""b"""""\n\ny = 1\n'])
def test_quotes_at_the_end_of_a_long_string_belong_to_it(text):
    assert "y" in tomllib.loads(text)
    assert key_lines(text)[("y",)] == text.count("\n")


def test_a_full_config_survives_the_file(recipe):
    config = load_config(
        recipe(
            """
            name = "all-of.it"
            seed = 9223372036854775807
            plugins = ["a", "b"]
            [data]
            tasks = [{name = "one", weight = 0.5}, {name = "two", prompt_data = "hub/rows@[1:5]"}]
            apply_chat_template_kwargs = {enable_thinking = false, depth = {x = [1, 2.5]}}
            [rollout]
            rollout_stop = ["\\n", "\\"quoted\\"", "$${literal}", "\\u007f", "\\\\"]
            [train]
            lr = 1e-300
            [plugin.a]
            when = 2026-11-21T10:00:00Z
            nested = [{x = 1}, {x = 2, y = {z = "w"}}]
            [plugin."odd name"]
            "key with dots.and space" = true
            [[stage]]
            name = "s"
            rollout_stop = ["a"]
            plugin.a.level = 3
            """
        )
    )
    text = to_toml(config)
    again = read(recipe(text, name="config.toml"), check=False).config
    assert again == config
    assert to_toml(again) == text
    assert config.rollout.rollout_stop[2] == "${literal}"


def test_default_config_survives_the_file(recipe):
    assert load_config(recipe(to_toml(Config()))) == Config()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1, "1"),
        (1.0, "1.0"),
        (1e-7, "1e-07"),
        ("a\nb", '"a\\nb"'),
        ((1, "x"), '[1, "x"]'),
        ({"a b": 1}, '{"a b" = 1}'),
        (datetime.date(2026, 11, 21), "2026-11-21"),
    ],
)
def test_values_by_hand(value, text):
    assert value_to_toml(value) == text


def test_a_value_without_a_toml_form_is_refused_with_its_key():
    with pytest.raises(ConfigError) as caught:
        to_toml(Config(plugin={"a": {"x": None}}))
    assert caught.value.where == "plugin.a.x"


def test_the_fingerprint_moves_with_what_is_trained_and_not_with_names():
    base = fingerprint(Config())
    assert base == fingerprint(Config(name="other"))
    assert base == fingerprint(Config.model_validate({"report": {"save_samples": 0}}))
    assert base != fingerprint(Config(seed=1))
    assert base != fingerprint(Config.model_validate({"train": {"lr": 0.5}}))
    assert len(base) == 16


SECRETS = [
    "hf_abcdefghijklmnopqrstuvwx",
    "sk-abcdefghijklmnopqrstuvwx",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "AKIAABCDEFGHIJKLMNOP",
    "xoxb-1234567890-abc",
    "-----BEGIN RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS, ids=[s[:4] for s in SECRETS])
def test_what_looks_like_a_secret_is_redacted_wherever_it_stands(secret):
    data = {"plugin": {"judge": {"note": f"use {secret} here", "list": [{"x": secret}]}}}
    assert secret not in str(redact(data))
    assert secret not in scrub(f"argv {secret}")
    assert len(list(secrets_in(data))) == 2


@pytest.mark.parametrize("key", ["api_key", "API-KEY", "judge_api_key", "password", "secret", "hf_token", "token"])
def test_what_stands_under_a_secrets_name_is_redacted(key):
    assert redact({"a": {key: "plain words"}}) == {"a": {key: REDACTED}}


@pytest.mark.parametrize(
    "key", ["input_key", "label_key", "rollout_stop_token_ids", "max_tokens_per_gpu", "tokenizer"]
)
def test_ordinary_keys_are_left_alone(key):
    assert redact({key: "value"}) == {key: "value"}


def test_passwords_in_addresses_are_redacted_and_addresses_stay():
    login = "user:pass"
    assert scrub(f"http://{login}@judge.example/x") == f"http://{REDACTED}@judge.example/x"
    assert scrub("http://localhost:8000/x@y") == "http://localhost:8000/x@y"


def test_known_secrets_are_redacted_under_any_key():
    config = redacted(Config(plugin={"j": {"x": "prefix canary-1 suffix"}}), {"canary-1"})
    assert config.plugin == {"j": {"x": f"prefix {REDACTED} suffix"}}


def test_no_core_key_is_taken_for_a_secret():
    assert redacted(Config()) == Config()


def test_a_config_crosses_to_another_process_as_json():
    """Ranks, engines and rewards apart get it so, lists and all."""
    config = Config(plugins=("a",), rollout={"rollout_function_path": "slime.rollout.sglang_rollout:generate_rollout"})
    assert config.rollout.rollout_function_path == ""
    assert Config.model_validate_json(config.model_dump_json()) == config

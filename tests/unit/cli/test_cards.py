"""Cards: every algorithm has one, what they name exists, the pages are made of them, and nothing heavy is imported."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from slime_cli.cards import WIDTH, card, card_text, cards, option_rows
from slime_core.algorithms import algorithms
from slime_core.builtin import Core
from slime_core.config.fields import core_keys
from slime_core.config.load import load_config
from slime_core.config.presets import settle
from slime_core.config.sections.train import TrainSection

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
CARDS = list(cards().values())


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_cards", ROOT / "tools" / "docs" / "make_cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_registered_estimator_has_a_card_and_the_shared_parts_have_theirs():
    registered = {one.name for one in Core().slime_advantage()}
    assert registered == set(algorithms())
    assert list(cards()) == [*algorithms(), "corrections", "kl", "aggregation", "sampling_control"]


@pytest.mark.parametrize("one", CARDS, ids=lambda one: one.name)
def test_a_card_names_keys_cards_and_libraries_that_exist(one):
    assert set(one.options) <= set(core_keys()), "keys of the schema"
    assert len(set(one.options)) == len(one.options)
    assert set(one.related) <= set(cards()) - {one.name}
    assert list(one.differs) == ["slime", "verl", "TRL"]
    assert all([one.title, one.advice, one.source, *one.formula.values(), *one.differs.values()])


@pytest.mark.parametrize("one", [one for one in CARDS if one.name in algorithms()], ids=lambda one: one.name)
def test_an_algorithms_card_has_the_parts_of_a_formula_and_lists_what_it_presets(one):
    assert {"advantage", "ratio", "objective", "aggregation"} <= set(one.formula)
    assert set(one.presets) <= set(one.options)
    aggregation = settle(TrainSection(advantage_estimator=one.name))
    assert one.formula["aggregation"].startswith(aggregation.loss_aggregation)


def test_values_are_those_that_a_run_would_settle_on():
    rows = {row.path: row for row in option_rows(card("gspo"))}
    assert rows["train.eps_clip"].value == "0.0003"
    assert rows["train.eps_clip"].preset
    assert not rows["train.kl_loss_type"].preset
    config = load_config(None, ["--advantage-estimator", "gspo", "--eps-clip", "0.01"])
    rows = {row.path: row for row in option_rows(card("gspo"), config)}
    assert (rows["train.eps_clip"].value, rows["train.eps_clip"].preset) == ("0.01", False)
    assert (rows["train.eps_clip_high"].value, rows["train.eps_clip_high"].preset) == ("0.0004", True)


@pytest.mark.parametrize("one", CARDS, ids=lambda one: one.name)
def test_a_card_as_text_is_narrow_and_says_everything(one):
    text = card_text(one)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert all(word in text for word in (one.title, "formula", "source", "verl", *one.options))


def test_an_estimator_of_a_plugin_has_no_card():
    assert card("mine") is None


def test_the_pages_are_up_to_date(tool):
    there = {path.name: path.read_text() for path in tool.PAGES.glob("*.md")}
    made = tool.pages()
    assert sorted(name for name in {*made, *there} if made.get(name) != there.get(name)) == [], (
        "run: python tools/docs/make_cards.py"
    )


def test_a_page_shows_the_docstring_of_the_code_and_stops_before_its_arguments(tool):
    text = tool.pages()["kl.md"]
    assert "> Estimators of KL(policy || reference)" in text
    assert "with gradient\n" not in text
    with pytest.raises(SystemExit, match=r"shared\.losses\.nothing"):
        tool.first_paragraphs("shared.losses.nothing")


def test_cells_cannot_break_a_table(tool):
    assert tool.cell("a | b * c < d") == r"a \| b \* c \< d"
    assert tool.first_sentence("Where it fits: always. And more.") == "Where it fits"


def test_cards_need_neither_numpy_nor_torch():
    code = (
        "import sys; from slime_cli.cards import card, card_text; card_text(card('grpo')); "
        "from slime_core.config.load import read; read(None); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Games in their process: what is played, what is refused and why, and what happens to others when one breaks."""

import asyncio
from pathlib import Path

import pytest

from slime_gym.games import GameError, Spec
from slime_gym.processes import GameProcesses, described

pytestmark = pytest.mark.integration

FAULTY = str(Path(__file__).with_name("faulty_games.py"))


def run(work, seconds=30.0, memory=8 << 30):
    """What ``work(processes)`` returns, with one process that plays."""

    async def inside():
        processes = GameProcesses(1, seconds, memory)
        try:
            return await work(processes)
        finally:
            await processes.close()

    return asyncio.run(inside())


async def played(episode, actions):
    """The turns of an episode; the last may be an error."""
    turns = [await episode.play()]
    try:
        for action in actions:
            if turns[-1].over:
                break
            turns.append(await episode.play(action))
    except GameError as error:
        turns.append(error)
    return turns


def test_an_episode_is_a_function_of_its_seed_and_actions_whatever_runs_beside_it():
    moves = ["[up]", "[left]", "[down]", "[right]"] * 3

    async def work(processes):
        spec = Spec(game="2048-v0", seed=5)
        alone = await played(processes.open(spec), moves)
        others = [processes.open(Spec(game="2048-v0", seed=n)) for n in (5, 6)]
        first, other = await asyncio.gather(*(played(episode, moves) for episode in others))
        return alone, first, other

    alone, first, other = run(work)
    assert alone == first
    assert [turn.text for turn in other[:2]] != [turn.text for turn in alone[:2]]
    assert run(work)[0] == alone


def test_a_player_reads_what_is_new_to_it_and_a_random_opponent_makes_legal_moves():
    async def work(processes):
        both = await played(processes.open(Spec(game="TicTacToe-v0")), ["[4]", "[0]", "[3]", "[1]", "[5]"])
        spec = Spec(game="TicTacToe-v0", random_players=(1,), random_seed=3, instructions="three in a row")
        against = await played(processes.open(spec), [f"[{n}]" for n in range(9)])
        nim = await played(processes.open(Spec(game="Nim-v0", random_players=(0,))), ["nonsense"] * 2)
        return both, against, nim

    both, against, nim = run(work)
    assert [turn.player for turn in both[:-1]] == [0, 1, 0, 1, 0]
    assert "Player 1" in both[1].text
    assert "[Player 0] [4]" in both[1].text
    assert "[4]" not in both[2].text.replace("[Player 1] [0]", "").partition("Current Board")[0]
    assert both[-1].over
    assert both[-1].rewards == {"0": 1.0, "1": -1.0}
    assert "three in a row" in against[0].text
    assert {turn.player for turn in against if not turn.over} == {0}
    assert not isinstance(against[-1], GameError)
    assert nim[0].player == 1
    assert "removes" in nim[0].text
    assert nim[1].invalid
    assert nim[-1].rewards == {"0": 1.0, "1": -1.0}


def test_environments_of_gymnasium_speak_by_their_drawing_or_a_template_and_their_rewards_come_by_step():
    names = ("hold", "take")

    async def work(processes):
        lake = Spec(game="FrozenLake-v1", arguments={"is_slippery": False}, seed=1)
        path = ["[down]", "I go down", "2", "[right] no: [down]", "right"]
        cards = Spec(game="Blackjack-v1", template="You have {0}, the dealer {1}.", actions=names, seed=4)
        errors = await played(processes.open(lake), ["jump", "[left]", "jump", "jump"])
        return await played(processes.open(lake), path), await played(processes.open(cards), ["[hold]"]), errors

    lake, cards, errors = run(work)
    assert lake[0].text.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert "[left], [down], [right], [up]" in lake[0].text
    assert lake[2].text.startswith("  (Down)\nSFFF\nFHFH\n[F]")
    assert lake[3].invalid
    assert lake[-1].rewards == {"0": 0.0}
    assert cards[0].text.startswith("You are playing Blackjack-v1. Answer with one action in square brackets: [hold]")
    assert "the dealer" in cards[0].text
    assert cards[-1].over
    assert cards[-1].rewards["0"] in (-1.0, 0.0, 1.0)
    assert [turn.invalid for turn in errors] == [False, True, False, True, True]
    assert errors[-1].over
    assert errors[-1].rewards == {"0": -1.0}


def test_an_episode_that_is_over_is_closed(tmp_path):
    async def work(processes):
        spec = Spec(game="Room-v0", modules=(FAULTY,), arguments={"closed": str(tmp_path / "closed")})
        episode = processes.open(spec)
        turns = await played(episode, ["[1]"])
        episode.close()
        await processes.open(spec).play()  # answered after the other is closed
        return turns

    assert run(work)[-1].over
    assert (tmp_path / "closed").exists()


REFUSED = {
    "TicTacTo-v0": ("there is no game", "TicTacToe-v0"),
    "Wordle-v0": ("data of nltk", "python -m nltk.downloader words"),
    "Debate-v0": ("paid service", "API key"),
    "UsedCarNegotiation-v0": ("lacks a file", "another game"),
    "CartPole-v1": ("observations other than text", "Discrete"),
    "LunarLander-v3": ("cannot be played here", "check plugin.gym.game_args"),
}


def test_games_that_cannot_be_played_are_refused_with_the_reason_and_the_fix():
    async def work(processes):
        specs = [Spec(game=name) for name in REFUSED]
        specs += [Spec(game="TicTacToe-v0", players=3), Spec(game="FrozenLake-v1", actions=("a", "b"))]
        return [(await asyncio.gather(processes.open(spec).play(), return_exceptions=True))[0] for spec in specs]

    *errors, players, names = run(work)
    for error, (what, fix) in zip(errors, REFUSED.values(), strict=True):
        assert what in f"{error.what} {error.why}", error.what
        assert fix in error.fix
    assert "cannot be played by 3 players" in players.what
    assert "has 4 actions, and 2 have names" in names.what
    assert described(Spec(game="ThreePlayerIPD-v0"))["players"] == 3
    with pytest.raises(GameError, match="ModuleNotFoundError"):
        described(Spec(game="TicTacToe-v0", modules=("no_such_module",)))


def test_a_game_that_breaks_costs_its_own_episode_and_the_others_go_on_where_they_were():
    spec = Spec(game="Faulty-v0", modules=(FAULTY,), seed=7)
    orders = ("raise", "long", "exit", "crash", "leak", "babble", "hang")

    async def work(processes):
        quiet = await played(processes.open(spec), ["x"] * 8)
        beside = processes.open(spec)
        turns, errors = [await beside.play()], []
        for order in orders:
            broken = processes.open(spec)
            await broken.play()
            error, turn = await asyncio.gather(broken.play(order), beside.play("x"), return_exceptions=True)
            errors.append(error)
            turns.append(turn)
        turns.append(await beside.play("x"))
        return quiet, turns, errors

    quiet, turns, errors = run(work, seconds=3.0, memory=4 << 30)
    reasons = [error.what for error in errors]
    assert "RuntimeError: the dice are lost (tests/faulty_games.py:" in reasons[0]
    assert "characters" in reasons[1]
    assert reasons[2:] == [
        "the game ended its process with exit code 3",
        "the game ended its process by SIGSEGV",
        "the game ran out of memory",
        "the game ended its process by SIGKILL",
        "the game did not answer in 3 s",
    ]
    assert turns == quiet
    assert turns[-1].reason == "eight moves"

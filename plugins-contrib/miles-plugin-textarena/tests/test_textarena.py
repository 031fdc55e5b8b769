"""The environment over the real games: contract, whole games, opponents, and faults by name."""

import asyncio
import random
import subprocess
import sys

import pytest

from miles import ConfigError, EpisodeError, Spec
from miles.testing import play_episode

TWO = {"game": "TicTacToe-v0", "players": 2}


@pytest.mark.miles_contract("environment", "textarena")
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.mark.miles_contract("environment", "textarena", {**TWO, "seat": 1})
def test_two_players_keep_the_contract(miles_contract):
    miles_contract()


@pytest.fixture
def build(miles_registry, miles_context):
    def make(**config):
        spec = Spec(kind="environment", name="textarena", config=config)
        return miles_registry.build(spec, miles_context)

    return make


def play(environment, task, policy):
    """Play with a function of what was heard last, or with given replies; what was heard, and the
    worth."""
    replies = (lambda ms: policy(ms[-1]["content"])) if callable(policy) else policy
    played = asyncio.run(play_episode(environment, task, replies))
    heard = [m["content"] for m in played.messages if m["role"] == "user"]
    return heard, (played.reward, played.metrics)


def bisect(low=1, high=20):
    """A policy that halves what is left."""
    bounds = [low, high]
    said = []

    def policy(heard):
        if said and "number is lower" in heard:
            bounds[1] = said[-1] - 1
        if said and "number is higher" in heard:
            bounds[0] = said[-1] + 1
        said.append(sum(bounds) // 2)
        return f"I say [{said[-1]}]"

    return policy


def test_game_of_guessing_is_won_by_halving_and_lost_by_nonsense(build):
    environment = build()
    for task in environment.tasks("train")[:8]:
        heard, (worth, metrics) = play(environment, task, bisect())
        assert heard[0] == task.prompt[-1]["content"] and "guess the number" in heard[0]
        assert worth == 1.0 and metrics["finished"] == 1.0 and metrics["moves"] <= 5
        assert all("I say" not in text for text in heard)
    heard, (worth, metrics) = play(environment, environment.tasks("train")[0], lambda _: "hm")
    assert "Please resubmit a valid move" in heard[1]
    assert (worth, metrics["broke_rules"], metrics["moves"]) == (0.0, 1.0, 2.0)


def test_move_is_put_in_brackets_and_taken_from_its_tag(build):
    environment = build(tag="move")
    task = environment.tasks("train")[0]
    heard, _ = play(environment, task, ["[99] <move>3</move>"])
    assert len(heard) == 2 and "number is" in heard[1]
    heard, _ = play(build(brackets=False), task, ["3"])
    assert "invalid move" in heard[1]


def test_game_that_does_not_end_is_worth_what_the_configuration_says(build):
    environment = build(unfinished=-0.25)
    _, (worth, metrics) = play(environment, environment.tasks("train")[0], ["[99]"])
    assert (worth, metrics["finished"], metrics["moves"]) == (-0.25, 0.0, 1.0)


def first_free(heard):
    """The first cell that TicTacToe offers."""
    return heard.rsplit("Available Moves:", 1)[1].split(",")[0].strip(" '\n")


def test_opponent_plays_the_other_seat_and_rewards_add_up(build):
    environment = build(**TWO)
    worths = [play(environment, task, first_free)[1] for task in environment.tasks("train")[:12]]
    assert {worth for worth, _ in worths} <= {-1.0, 0.0, 1.0}
    assert len({worth for worth, _ in worths}) > 1
    for worth, metrics in worths:
        assert metrics["finished"] == 1.0 and metrics["broke_rules"] == 0.0
        assert metrics["won"] == (worth == 1.0) and metrics["drawn"] == (worth == 0.0)
    second = build(seat=1, **TWO)
    heard, _ = play(second, second.tasks("train")[0], first_free)
    assert "[Player 0]" in heard[0]


def test_opponent_says_listed_moves_and_an_illegal_one_is_nobodys_victory(build):
    iterated = build(game="IteratedPrisonersDilemma-v0", players=2, moves=("[cooperate]",))
    _, (_, metrics) = play(iterated, iterated.tasks("train")[0], lambda _: "[defect]")
    assert metrics["finished"] == 1.0 and metrics["won"] == 1.0
    wrong = build(moves=("[99]",), **TWO)
    with pytest.raises(EpisodeError, match=r"seat 1 lost by its move '\[99\]'.*environment.moves"):
        play(wrong, wrong.tasks("train")[0], first_free)


def test_games_do_not_touch_each_others_luck_or_the_processs(build):
    environment = build(**TWO)
    task = environment.tasks("train")[3]
    alone = play(environment, task, first_free)
    random.seed(5)
    state = random.getstate()
    other = environment.episode(environment.tasks("train")[4], 0)
    assert random.getstate() == state
    assert play(environment, task, first_free) == alone
    assert other is not None and random.getstate() == state


@pytest.mark.parametrize("game", ["Mastermind-v0", "TowerOfHanoi-v0", "FrozenLake-v0", "Sudoku-v0"])
def test_games_of_one_player_take_any_text_to_an_end(build, game):
    environment = build(game=game, train=2, heldout=0)
    _, (worth, metrics) = play(environment, environment.tasks("train")[0], lambda _: "é ]9[ \x00")
    assert metrics["finished"] == 1.0 and -1.0 <= worth <= 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"game": "GuessTheNumbr-v0"}, r"no game 'GuessTheNumbr-v0'; did you mean 'GuessTheNumber"),
        ({"seat": 1}, "seat is 1 of 1 players; 0 to 0 are there"),
        ({"train": 0}, "train is 0 and heldout 50"),
        ({"players": 2}, "GuessTheNumber-v0 cannot be played by 2 with options"),
        (
            {"options": {"sides": 6}},
            r"GuessTheNumber-v0 cannot be played by 1 with options \{'sides': 6\}",
        ),
    ],
)
def test_configuration_that_cannot_be_played_is_refused(build, config, words):
    with pytest.raises(ConfigError, match=f"environment textarena: {words}"):
        build(**config)


def test_importing_the_component_imports_neither_torch_nor_the_library():
    code = (
        "import sys, miles_plugin_textarena.environment\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'textarena')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""plots/results.py: what its words say of samples whose answer is known."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plots"))
import results
from results import Sample

STEPS = np.arange(1, 101)


def sample(final: float, seeds=30, **curves) -> Sample:
    """Returns seeds whose final scores lie evenly within 0.5 of a return."""
    offsets = np.linspace(-0.5, 0.5, seeds)
    returns = np.repeat((final + offsets)[:, None], len(STEPS), axis=1)
    return Sample(STEPS, returns, {"returns": returns} | curves)


class Table:
    """Records of known samples, by script, environment and flags."""

    def __init__(self, samples: dict):
        self.samples = samples

    def sample(self, script: str, env: str, flags: str, seeds=30):
        return self.samples.get((script, env, flags))


def test_compare():
    """A clear difference is above or below, whichever comes first; the same seeds are level."""
    assert results.compare(sample(2.0), sample(1.0)) == "above"
    assert results.compare(sample(1.0), sample(2.0)) == "below"
    assert results.compare(sample(1.0), sample(1.0)) == "level"


def test_relations_name_games_and_p_of_the_winner():
    """Each game stands under its relation, p is of the method that is ahead, what is missing nowhere."""
    finals = {"Asterix": (2.0, 1.0), "Breakout": (1.0, 1.0), "Freeway": (1.0, 2.0)}
    samples = {}
    for game, pair in finals.items():
        for name, final in zip(("SCORER", "Baseline"), pair):
            flags = results.METHODS[name]
            samples["scorer_dqn.py", f"{game}-MinAtar", flags] = sample(final)
    text = results.relations(Table(samples), "scorer_dqn.py", "SCORER", "Baseline", with_p=True)
    above, level, below = text.split(", ")
    assert above == "above on Asterix (p < 0.001)"
    assert level.startswith("level on Breakout (p = 0.")
    assert below == "below on Freeway (p < 0.001)"


def test_a_number_of_seeds_stands_where_it_is_not_30():
    """30 seeds are understood, others are said."""
    assert results.final_return(sample(1.0)).endswith("]")
    assert results.final_return(sample(1.0, seeds=10)).endswith("] (10)")
    assert results.final_return(None) == "-"


@pytest.mark.parametrize(
    "solved, text",
    [([10, 20, 30], "20 (3 of 3)"), ([10, 20, -1], "20 (2 of 3)"), ([10, -1, -1], "> 99 (1 of 3)")],
)
def test_deep_sea_counts_what_never_solves_it_as_later(solved, text):
    """The median is over all seeds: where most never solve the sea, it lies after the end."""
    curve = np.array(solved)[:, None]
    key = ("scorer_bootstrapped_dqn.py", "", "--size 10")
    records = Table({key: sample(1.0, seeds=3, solved_episode=curve)})
    assert results.deep_sea_text(records, "--size 10 ", 99) == text


def test_faster_means_that_intervals_lie_apart():
    """Of SCORER and a baseline with one threshold, which both reach at the end."""

    def reaching(step: int) -> Sample:
        returns = np.tile(np.where(STEPS >= step, 1.0, 0.0), (30, 1))
        return Sample(STEPS, returns, {"returns": returns})

    assert results.is_faster(reaching(20), reaching(40))
    assert not results.is_faster(reaching(40), reaching(20))
    assert not results.is_faster(reaching(20), reaching(20))
    never = Sample(STEPS, np.zeros((30, len(STEPS))), {})
    assert results.is_faster(reaching(20), never)


def test_claims_are_counted(tmp_path, monkeypatch):
    """Each row's verdict counts once, and the words above the table do not."""
    page = tmp_path / "claims.md"
    page.write_text(
        "holds, partly\n| a | b | c | holds |\n| d | e | f | fails |\n| g | h | i | holds |\n"
    )
    monkeypatch.setattr(results, "CLAIMS", page)
    assert results.claims_text().startswith(
        "Of 3 claims of the paper 2 hold, 0 hold in part, 1 fail and 0"
    )


def test_r2d2_beside_a_faster_baseline(monkeypatch):
    """The end and the whole of training are two questions; what is missing is not counted."""
    monkeypatch.setattr(results, "MINIGRID_DIFFERENT", ("Late", "Lost", "Missing"))

    def reaching(step: int, final: float) -> Sample:
        offsets = np.linspace(-0.001, 0.001, 30)[:, None]
        returns = np.where(STEPS >= step, final, 0.0) + offsets
        return Sample(STEPS, returns, {"returns": returns})

    pairs = {
        "Late": (reaching(60, 1.0), reaching(30, 1.0)),
        "Lost": (reaching(51, 1.0), reaching(1, 0.5)),
    }
    samples = {}
    for place, pair in pairs.items():
        for flags, known in zip(("--scorer", "--learning-rate 3e-4"), pair):
            samples["scorer_r2d2.py", f"Navix-{place}-v0", flags] = known
    text = results.fast_r2d2_text(Table(samples))
    assert "at the end SCORER is above on Lost, level on Late;" in text
    assert "in the mean over all of training it is level on Lost, below on Late." in text


def test_atari_rows_say_their_seeds():
    """A mean of one or two seeds says of how many; steps are each game's own."""
    key = ("scorer_pqn_atari.py", "DoubleDunk-v5", "--total-timesteps 4e6")
    text = results.atari_section(Table({key: sample(-21.0, seeds=2)}))
    assert "| DoubleDunk | 4e6 | - | -21 (2) |" in text and "| Pong | 5e6 | - | - |" in text


def test_p_is_of_the_method_that_is_ahead():
    """Whichever comes first, a clear difference has a small p."""
    low, high = sample(1.0).scores, sample(2.0).scores
    assert results.relation_and_p(high, low) == "above, p < 0.001"
    assert results.relation_and_p(low, high) == "below, p < 0.001"
    assert results.relation_and_p(low, low).startswith("level, p = 0.")

"""plots/: statistics against rliable and hand-worked cases, refused records, and every tool from end to end."""

import importlib
import json
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "plots"), str(ROOT)]

import records  # noqa: E402
import stats  # noqa: E402
import tables  # noqa: E402

ARGS = dict(
    env="Breakout-MinAtar",
    seed=0,
    num_seeds=3,
    total_timesteps=1000,
    scorer=False,
    follower_loss=None,
    follower_learning_rate=None,
    learning_rate=1e-4,
    batch_size=64,
    double=False,
    dueling=False,
    runs_dir="a",
    bootstrap_at_timeout=True,
)
GAME = dict(scorer=True, follower_loss="variance", follower_learning_rate=5e-4)


def write_run(
    folder: Path, level=10.0, seeds=(0, 1, 2), points=20, curves=None, meta=None, **args
) -> Path:
    """A run whose seeds rise to `level` + seed and whose curves begin with NaN, as a script would write it."""
    args = ARGS | dict(seed=seeds[0], num_seeds=len(seeds)) | args
    timesteps = np.linspace(0, args["total_timesteps"], points + 1, dtype=int)[1:]
    returns = np.add.outer(np.array(seeds, float), np.linspace(0, level, points))
    returns[:, 0] = np.nan
    curves = dict(returns=returns) | (curves or {})
    meta = dict(
        schema=1,
        script="scorer_dqn",
        args=args,
        complete=True,
        seconds=10.0 + args["scorer"],
        compile_seconds=5.0,
        device="cpu",
        num_devices=1,
        lanes=len(seeds),
    ) | (meta or {})
    folder.mkdir(parents=True)
    np.savez_compressed(
        folder / "results.npz", timesteps=timesteps, seeds=seeds, meta=json.dumps(meta), **curves
    )
    return folder


# -------------------- Statistics against rliable


@pytest.fixture(scope="module")
def oracle():
    return json.loads((ROOT / "tests/data/rliable.json").read_text())


def assert_interval_near(ours: stats.Estimate, theirs: dict):
    """The value agrees to rounding; the interval, of 2,000 resamples, within a tenth of its width."""
    np.testing.assert_allclose(ours.value, np.squeeze(theirs["value"]), rtol=1e-12)
    low, high = np.squeeze(theirs["low"]), np.squeeze(theirs["high"])
    assert np.all(abs(ours.low - low) < 0.1 * (high - low)) and np.all(
        abs(ours.high - high) < 0.1 * (high - low)
    )


def test_iqm_of_every_number_of_seeds(oracle):
    scores = np.array(oracle["scores"])[:, 0]
    for n, value in oracle["iqm_of_first"].items():
        assert stats.iqm(scores[: int(n)]) == pytest.approx(value, rel=1e-12)
    assert stats.iqm(np.arange(30.0) ** 2) == pytest.approx(
        np.mean(np.arange(7.0, 23.0) ** 2)
    )  # 7 cut on each side


def test_iqm_and_interval(oracle):
    for scores, theirs in zip(np.array(oracle["scores"]).T, oracle["iqm"]):
        assert_interval_near(stats.bootstrap(stats.iqm, scores), theirs)


def test_iqm_of_curves(oracle):
    assert_interval_near(stats.bootstrap(stats.iqm, np.array(oracle["curve"])), oracle["curve_iqm"])


def test_aggregate_is_stratified_by_environment(oracle):
    scores = np.array(oracle["scores"])
    assert_interval_near(stats.aggregate(list(scores.T), scores.max(axis=0)), oracle["aggregate"])


def test_normalisation_is_by_the_best_iqm_of_all_methods():
    weak, strong = (
        np.outer(np.ones(3), [np.nan, 1.0, 2.0]),
        np.outer(np.ones(3), [np.nan, 5.0, 4.0]),
    )
    assert stats.scale([weak, strong]) == 5.0
    np.testing.assert_allclose(
        stats.aggregate([weak, strong], [5.0, 5.0]).value, [np.nan, 0.6, 0.6]
    )


# -------------------- Statistics by hand


def test_final_score_is_the_mean_of_the_last_tenth():
    timesteps, curve = np.arange(1, 21) * 5, np.vstack([np.arange(20.0), np.zeros(20)])
    np.testing.assert_array_equal(
        stats.final_scores(timesteps, curve), [18.5, 0.0]
    )  # of timesteps 95 and 100


def test_difference_test():
    low, high = np.arange(10.0), np.arange(10.0) + 100
    assert stats.difference_test(high, low) == 0.0
    assert (
        stats.difference_test(np.full(5, 2.0), np.full(5, 2.0)) == 1.0
    )  # a tie counts as matching
    assert stats.difference_test(np.full(5, 2.0), np.full(5, 1.0)) == 0.0
    # `other` is 0 or 1 with one half each, its mean of two matches 1 only if both draws are 1: one resample in four.
    assert stats.difference_test(np.ones(2), np.array([0.0, 1.0])) == pytest.approx(0.25, abs=0.04)
    # Two equal pairs: mean difference below, at or above 0; 1 - P(best ahead) = 1 - 5/16.
    assert stats.difference_test(np.array([0.0, 1.0]), np.array([0.0, 1.0])) == pytest.approx(
        11 / 16, abs=0.04
    )
    assert np.isnan(
        stats.difference_test(np.array([2.0]), np.array([1.0]))
    )  # one seed shows nothing


def test_ties_are_not_decided_by_rounding():
    """The same return in float32 of 30 and of 60 seeds: neither is better."""
    many = np.full(60, 0.98, np.float32)
    few = np.full(30, 0.98, np.float32)
    assert stats.difference_test(many, few) == stats.difference_test(few, many) == 1.0
    almost = np.full(30, np.nextafter(np.float32(0.98), np.float32(2)))  # one rounding more
    assert stats.difference_test(many, almost) == stats.difference_test(almost, many) == 1.0
    assert stats.difference_test(many, few - 0.01) == 0.0


def exact_difference_test(best, other) -> float:
    """The share over all equally likely resamples, by enumeration."""
    x, y = (stats.iqm(np.array(list(product(z, repeat=len(z)))), axis=1) for z in (best, other))
    return np.mean(y[None, :] >= x[:, None] - 1e-12)


@pytest.mark.parametrize(
    "best, other",
    [
        ([0.0, 1.0], [0.0, 0.0, 1.0]),
        ([0.0, 0.0, 1.0], [0.0, 1.0]),
        ([1.0, 2.0, 4.0, 5.0], [0.0, 3.0]),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.1]),
        ([-1.0, -2.0], [-1.5, -1.0, -3.0, -1.0]),
    ],
)
def test_difference_test_against_all_resamples(best, other):
    """Unequal numbers of seeds, in both directions; 0.006 is four standard errors at most."""
    for x, y in ((best, other), (other, best)):
        exact = exact_difference_test(x, y)
        assert stats.difference_test(np.array(x), np.array(y)) == pytest.approx(exact, abs=0.0064)


def test_what_more_resamples_could_settle_is_level():
    """p is known to two standard errors, 0.0014; nan, of one seed, says nothing."""
    ps = (0.04, 0.0485, 0.0487, 0.05, 0.2, np.nan)
    assert [stats.is_level(p) for p in ps] == [False, False, True, True, True, False]


def test_interval_of_one_seed_and_of_equal_seeds():
    one = stats.bootstrap(stats.iqm, np.array([3.0]))
    assert one.value == 3.0 and np.isnan(one.half_width)
    assert stats.bootstrap(stats.iqm, np.full(4, 3.0)) == (3.0, 3.0, 3.0)


def test_nan_heads_are_skipped():
    curve = np.array([[np.nan, 2.0, 4.0], [np.nan, np.nan, 6.0]])
    estimate = stats.bootstrap(stats.iqm, curve)
    np.testing.assert_array_equal(estimate.value, [np.nan, np.nan, 5.0])
    np.testing.assert_array_equal(np.isnan(estimate.low), [True, True, False])
    smooth = stats.rolling_mean(np.array([np.nan, 2.0, 4.0, 6.0]), share=0.5)
    np.testing.assert_array_equal(smooth, [np.nan, 2.0, 3.0, 5.0])
    np.testing.assert_array_equal(stats.final_scores(np.arange(1, 4), curve), [4.0, 6.0])


@pytest.mark.parametrize("points, width", [(1000, 50), (100, 5), (20, 1), (3, 1)])
def test_rolling_mean_spans_a_share_of_the_curve(points, width):
    """Five hundredths of it, whatever its length, so that a short run's end is that of the table."""
    x = np.arange(float(points)) ** 2
    smooth = stats.rolling_mean(x)
    assert smooth[-1] == pytest.approx(np.mean(x[-width:]))
    assert smooth[2] == pytest.approx(np.mean(x[:3][-width:]))


TIMESTEPS = np.array([10, 20, 30, 40])
RISING = np.array([[np.nan, 5.0, 9.9, 10.0], [10.0, 0.0, 0.0, 0.0], [np.nan, 1.0, 2.0, 3.0]])


def test_time_to_threshold():
    np.testing.assert_array_equal(
        stats.time_to_threshold(TIMESTEPS, RISING, 9.9), [30, 10, np.nan]
    )  # a tie reaches it
    estimate, successes = stats.mean_time(np.array([30.0, 10.0, np.nan]))
    assert (estimate.value, successes) == (20.0, 2)
    never, successes = stats.mean_time(np.array([np.nan, np.nan]))
    assert np.isnan(never.value) and successes == 0
    single, successes = stats.mean_time(np.array([np.nan, 30.0]))
    assert (single.value, successes) == (30.0, 1) and np.isnan(single.half_width)


def test_mean_over_survivors_can_fall_as_the_threshold_rises():
    curve = np.array([[0.0, 9.0, 9.0, 9.0], [0.0, 0.0, 0.0, 5.0]])
    means = [stats.mean_time(stats.time_to_threshold(TIMESTEPS, curve, x))[0].value for x in (4, 8)]
    assert means == [30.0, 20.0]


def test_shared_threshold_is_one_percent_below_the_best_run():
    assert stats.shared_threshold(
        [np.full(3, 50.0), np.array([10.0, 100.0, 20.0])]
    ) == pytest.approx(99.0)
    assert stats.shared_threshold([np.full(3, -500.0), np.full(3, -100.0)]) == pytest.approx(-101.0)


def test_sample_efficiency_is_not_available_where_the_iqm_stays_below():
    curve = np.vstack(
        [np.full((9, 4), 1.0), [1.0, 1.0, 8.0, 8.0]]
    )  # one lucky seed does not lift the IQM
    assert stats.sample_efficiency(TIMESTEPS, curve, 8.0) is None
    estimate, successes = stats.sample_efficiency(TIMESTEPS, curve, 1.0)
    assert (estimate, successes) == ((10.0, 10.0, 10.0), 10)


def test_speed_ratio():
    assert stats.speed_ratio([99.0, 101.0], [80.0]) == 1.25


def test_eight_curves_of_thirty_seeds_take_under_five_seconds():
    curves = np.random.default_rng(0).normal(size=(8, 30, 100))
    began = time.process_time()
    for curve in curves:
        stats.bootstrap(stats.iqm, curve)
    assert time.process_time() - began < 5


# -------------------- Records


def refused(capsys, *folders) -> str:
    """The one sentence with which these run folders are refused."""
    with pytest.raises(SystemExit) as exit:
        records.load(list(folders))
    message = capsys.readouterr().err
    assert exit.value.code == 2 and message.count("\n") == 1
    return message


def test_seeds_are_pooled_and_methods_are_named(tmp_path):
    folders = [
        write_run(tmp_path / "a", seeds=(0, 1)),
        write_run(tmp_path / "b", seeds=(2, 3), runs_dir="elsewhere"),
        write_run(tmp_path / "c", **GAME),
        write_run(tmp_path / "d", **GAME | dict(follower_loss="msbe")),
        write_run(tmp_path / "e", double=True, dueling=True),
        write_run(tmp_path / "f", **GAME, ablation="inverted-roles"),
    ]
    methods = records.load(folders)
    assert [method.label for method in methods] == [
        "DQN",
        "SCORER DQN",
        "SCORER DQN (MSBE follower)",
        "SCORER DQN (inverted roles)",
        "Dueling DDQN",
    ]
    assert methods[0].seeds.tolist() == [0, 1, 2, 3] and methods[0].returns.shape == (4, 20)
    assert methods[1].variant == "SCORER" and methods[4].variant == "Baseline"


def test_arguments_that_differ_are_in_the_names(tmp_path):
    folders = [
        write_run(tmp_path / "a", batch_size=64),
        write_run(tmp_path / "b", batch_size=128),
        write_run(tmp_path / "c", **GAME),
        write_run(tmp_path / "d", env="Asterix-MinAtar"),
    ]
    assert [method.label for method in records.load(folders)] == [
        "DQN",
        "DQN",
        "DQN (batch size 128)",
        "SCORER DQN",
    ]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(seeds=(0, 0, 1)), "counts a seed twice"),
        (dict(meta=dict(complete=False)), "did not finish"),
        (dict(meta=dict(schema=2)), "schema 2"),
        (dict(curves=dict(srank=np.zeros((3, 5)))), "shape (3, 5)"),
        (dict(curves=dict(returns=np.full((3, 20), np.nan))), "no return for seed 0"),
        (dict(meta=dict(args=dict(env="a"))), "does not say scorer and total_timesteps"),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path, capsys, change, words):
    message = refused(capsys, write_run(tmp_path / "a", **change))
    assert words in message and str(tmp_path / "a/results.npz") in message


def test_records_of_baird_are_refused(capsys):
    assert "plots/baird.py" in refused(capsys, next((ROOT / "docs/results/baird").iterdir()))


def test_missing_and_damaged_files_are_refused(tmp_path, capsys):
    assert str(tmp_path / "none/results.npz") in refused(capsys, tmp_path / "none")
    path = write_run(tmp_path / "a") / "results.npz"
    path.write_bytes(path.read_bytes()[:-200])
    assert str(path) in refused(capsys, tmp_path / "a")
    path.write_bytes(b"nonsense")
    assert f"{path} cannot be read: it is damaged, or no results.npz" in refused(
        capsys, tmp_path / "a"
    )
    assert "no run folder" in refused(capsys)


def test_usual_values_are_the_most_frequent_ones(tmp_path):
    """Two rates once each on one environment are both named; that which another environment has too is usual."""
    slow, fast = GAME | dict(follower_learning_rate=2e-4), GAME
    runs = [write_run(tmp_path / "a", **slow), write_run(tmp_path / "b", **fast)]
    names = ["SCORER (follower learning rate 0.0002)", "SCORER (follower learning rate 0.0005)"]
    assert [method.variant for method in records.load(runs)] == names
    other = write_run(tmp_path / "c", env="Freeway-MinAtar", **fast)
    assert [method.variant for method in records.load([*runs, other])] == [
        "SCORER",
        names[0],
        "SCORER",
    ]


def test_mixtures_are_never_pooled(tmp_path, capsys):
    """What cannot share a curve with the others is left out, and one line says what and why."""
    first = write_run(tmp_path / "a")
    twice = write_run(tmp_path / "b", seeds=(2, 3))
    assert "b/results.npz counts seed 2" in left_out(capsys, first, twice)
    other_points = write_run(tmp_path / "c", seeds=(7, 8), points=10)
    assert "c/results.npz has different timesteps" in left_out(capsys, first, other_points)
    longer = write_run(tmp_path / "d", total_timesteps=2000, **GAME)
    assert "not comparable" in left_out(capsys, longer, first)
    elsewhere = write_run(tmp_path / "e", seeds=(7, 8), env="Asterix-MinAtar")
    with pytest.raises(SystemExit):
        records.pool([records.read_run(folder) for folder in (first, elsewhere)], [])
    assert "e/results.npz" in capsys.readouterr().err


def left_out(capsys, *folders) -> str:
    """The line on what is left out, so that one method remains."""
    assert len(records.load(list(folders))) == 1
    message = capsys.readouterr().err
    assert message.startswith("left out: ") and message.count("\n") == 1
    return message


def test_a_real_folder_of_runs(tmp_path, capsys):
    """`runs` and `runs/*` give what fits, and a line for everything else."""
    write_run(tmp_path / "runs/a__x__baseline__s0__20260101-000000-000001", level=1.0)
    newer = write_run(tmp_path / "runs/a__x__baseline__s0__20260102-000000-000001", level=2.0)
    write_run(tmp_path / "runs/scorer", **GAME)
    write_run(
        tmp_path / "runs/stopped", **GAME | dict(follower_loss="msbe"), meta=dict(complete=False)
    )
    write_run(tmp_path / "runs/short", total_timesteps=100, double=True)
    write_run(tmp_path / "runs/no_score", curves=dict(returns=np.full((3, 20), np.nan)))
    write_run(tmp_path / "runs/baird", meta=dict(script="baird"))
    (tmp_path / "runs/just_begun").mkdir()
    (tmp_path / "runs/just_begun/args.json").write_text("{}")
    (tmp_path / "runs/notes.txt").write_text("nothing of a run")
    folders = sorted((tmp_path / "runs").glob("*"))
    for given in ([tmp_path / "runs"], [path for path in folders if path.suffix != ".txt"]):
        methods = records.load(given)
        assert [method.variant for method in methods] == ["Baseline", "SCORER"]
        assert methods[0].runs[0].path.parent == newer and len(methods[0].seeds) == 3
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 6 and all(line.startswith("left out: ") for line in lines)
        for words in (
            "20260101-000000-000001/results.npz counts seed 0 of the same method a second time",
            "stopped/results.npz is of a run that did not finish",
            "short/results.npz trains for 100 steps",
            "no_score/results.npz has no return for seed 0",
            "baird/results.npz is of baird.py",
            "just_begun/results.npz does not exist",
        ):
            assert any(words in line for line in lines), words
    with_stopped = records.load([tmp_path / "runs"], incomplete=True)
    assert [m.variant for m in with_stopped] == ["Baseline", "SCORER", "SCORER (MSBE follower)"]


def test_nothing_that_fits_is_one_sentence(tmp_path, capsys):
    runs = [write_run(tmp_path / f"{number}", meta=dict(complete=False)) for number in range(3)]
    message = refused(capsys, *runs)
    assert "0/results.npz is of a run that did not finish (nor can 2 others be used)" in message


# Each field of a record, broken in each way, and what the one sentence says.
BROKEN_META = {
    "schema": ["1", 2, None, True, 1.0, [1]],
    "script": [None, "", 3, []],
    "args": [None, [], "text", {}, dict(env="a")],
    "complete": [None, 1, "yes"],
    "device": [None, "", 3, ["cpu"]],
    "num_devices": [None, 0, -1, "1", True],
    "seconds": [None, 0, 0.0, -1.0, "10", [10], float("nan"), float("inf")],
}
BROKEN_ARGS = {
    "env": [None, "", 3, ["a"]],
    "scorer": [None, 1, "yes"],
    "total_timesteps": [None, 0, -5, "1000", True],
    "double": [1, "yes", []],
    "learning_rate": ["1e-4", 0, -1.0, [1e-4], {}, True, float("nan")],
    "batch_size": [[64], {"a": 64}, float("inf")],
    "ablation": [True, 3, {}],
}
TEXT = np.full(20, "a")
BROKEN_ARRAYS = {
    "seeds": [np.int64(0), np.zeros((3, 1), int), np.zeros(0, int), np.array([0.5, 1, 2])],
    "timesteps": [
        np.zeros(0, int),
        TEXT,
        np.arange(20) * 1j,
        np.full(20, np.nan),
        np.arange(20) - 1,
        np.append(np.arange(19.0), np.inf),
        np.ones(20, int),
        np.arange(20)[::-1],
        np.int64(3),
        np.arange(40).reshape(2, 20),
    ],
    "returns": [
        np.full((3, 20), "a"),
        np.ones((3, 20)) * 1j,
        np.full((3, 20), np.inf),
        np.full((3, 20), -np.inf),
        np.ones(20),
        np.ones((3, 19)),
        np.ones((20, 3)),
        np.array(None),
    ],
    "srank": [np.ones(3), np.full((3, 20), "a")],
}


def break_record(folder: Path, part: str, name: str, value) -> Path:
    """Changes one field of a good record; value None of an array takes it away."""
    path = folder / "results.npz"
    with np.load(path) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays["meta"]))
    if part == "meta":
        meta[name] = value
    elif part == "args":
        meta["args"][name] = value
    elif part == "missing":
        del meta[name]
    elif value is None:
        del arrays[name]
    else:
        arrays[name] = value
    if "meta" in arrays and part != "arrays":
        arrays["meta"] = json.dumps(meta)
    np.savez(path, **arrays)
    return folder


CASES = [("meta", name, value) for name, values in BROKEN_META.items() for value in values]
CASES += [("args", name, value) for name, values in BROKEN_ARGS.items() for value in values]
CASES += [("missing", name, None) for name in BROKEN_META]
CASES += [("arrays", name, value) for name, values in BROKEN_ARRAYS.items() for value in values]
CASES += [("arrays", name, None) for name in ("seeds", "timesteps", "returns", "meta")]
CASES += [("arrays", "meta", np.array(text)) for text in ("", "no JSON", "[]", "3")]


@pytest.mark.parametrize(
    "part, name, value", CASES, ids=[f"{c[0]}-{c[1]}-{n}" for n, c in enumerate(CASES)]
)
def test_every_broken_field_is_one_sentence(tmp_path, capsys, part, name, value):
    """It names the file and the field, in no words of Python's."""
    folder = break_record(write_run(tmp_path / "a"), part, name, value)
    message = refused(capsys, folder)
    assert str(folder / "results.npz") in message
    field = "points" if name == "timesteps" and np.shape(value) == (0,) else name
    if part != "args" or field in BROKEN_ARGS:
        named = field in message or (name == "args" and "does not say" in message)
        assert named or (name == "returns" and "cannot be read" in message), message
    for word in ("object", "Error", "NoneType", "attribute", "ndarray", "dtype", "Traceback"):
        assert word not in message.replace("JSON object", ""), message


def test_a_seed_that_lacks_most_of_its_end_is_refused(tmp_path, capsys):
    returns = np.ones((3, 100))
    returns[1, 91:98] = np.nan
    run = write_run(tmp_path / "a", points=100, curves=dict(returns=returns))
    assert "lacks most returns of seed 1 in the last 10 %" in refused(capsys, run)
    returns[1, 91:95] = 1.0
    records.load([write_run(tmp_path / "b", points=100, curves=dict(returns=returns))])


def test_an_argument_of_another_kind_than_beside_it(tmp_path, capsys):
    runs = [write_run(tmp_path / f"{n}", seeds=(n,)) for n in range(2)]
    odd = write_run(tmp_path / "odd", seeds=(7,), batch_size="64")
    assert 'odd/results.npz has batch_size "64", where others have a number' in left_out(
        capsys, *runs, odd
    )


# -------------------- Tools


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """SCORER and baseline on two environments, with diagnostics, and a sweep of the follower's rate."""
    root = tmp_path_factory.mktemp("runs")
    for number, env, gain in ((0, "Breakout-MinAtar", 3), (2, "Freeway-MinAtar", 1)):
        more = {
            name: np.full((3, 20), 9.0) for name in ("srank", "perception_norm", "control_norm")
        }
        write_run(root / f"main/{number}", 20, env=env, curves=more)
        write_run(root / f"main/{number + 1}", 20 * gain, env=env, curves=more, **GAME)
        write_run(root / f"rates/{number}", 15, env=env, **GAME | dict(follower_learning_rate=2e-4))
        write_run(
            root / f"rates/{number + 1}", 18, env=env, **GAME | dict(follower_learning_rate=1e-3)
        )
    write_run(root / "ablated/0", 18, **GAME, ablation="synchronous")
    return root


def run_tool(tool: str, *words) -> subprocess.CompletedProcess:
    command = [sys.executable, f"plots/{tool}.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_learning_curves(runs, tmp_path):
    done = run_tool("learning_curves", *runs.glob("main/*"), "--out", tmp_path / "new/figure.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new/figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "tool, pattern, ending",
    [
        ("ablations", "main/*", "svg"),
        ("sensitivity", "[mr]*/*", "png"),
        ("representation", "main/[01]", "pdf"),
    ],
)
def test_figures(runs, tmp_path, tool, pattern, ending):
    out = tmp_path / f"figure.{ending}"
    importlib.import_module(tool).main(list(runs.glob(pattern)), out)
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize(
    "tool, pattern, out, words",
    [
        ("learning_curves", "main/*", "figure.jpegs", "figure.jpegs must end"),
        (
            "learning_curves",
            "main/*",
            "main/0/results.npz/figure.png",
            "figure.png cannot be written: File exists",
        ),
        ("tables", "main/*", "", "cannot be written: Is a directory"),
        ("ablations", "main/[0-2]", "figure.png", "SCORER DQN has runs on 1 of 2 environments"),
        ("deep_sea", "main/*", "figure.png", "is no run of scorer_bootstrapped_dqn.py"),
        ("representation", "main/*", "figure.png", "give one environment"),
        ("representation", "rates/[01]", "figure.png", "without --diagnostics"),
        ("sensitivity", "main/[02]", "figure.png", "are baselines"),
        ("sensitivity", "ablated/*", "figure.png", "is an ablation"),
    ],
)
def test_figures_refuse_in_one_sentence(runs, tmp_path, capsys, tool, pattern, out, words):
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(tool).main(
            sorted(runs.glob(pattern)), (runs if "/" in out else tmp_path) / out
        )
    message = capsys.readouterr().err
    assert exit.value.code == 2 and words in message and message.count("\n") == 1


def test_tables(runs, tmp_path):
    folders = sorted(runs.glob("main/*"))
    done = run_tool("tables", *folders)
    assert done.returncode == 0, done.stderr
    final, time_to_threshold, breakout, _, speed = done.stdout.split("### ")[1:]
    # The last tenth of 20 points is two; seeds add 0, 1 and 2: 20 * (18 + 19) / 2 / 19 + 1.
    assert "| DQN | Baseline | 20.47 ± " in final and "| DQN | SCORER | **59.42 ± " in final
    assert final.count("**") == 4 and "*20.47 ± " in final  # on Freeway both are equal
    assert "| Breakout-MinAtar | 59.82 | DQN | Baseline | - (0/3) |" in time_to_threshold
    assert "| DQN | Baseline | 0.001 ± 0.000 (3/3) | 0.001 ± 0.000 (3/3) | N/A |" in breakout
    assert (
        "| DQN | SCORER | Freeway-MinAtar | 11.0 | 3 seeds on 1 x cpu, with diagnostics | 1.10x |"
        in speed
    )
    done = run_tool(
        "tables",
        *folders,
        "--latex",
        "--out",
        tmp_path / "new/tables.tex",
        "--thresholds",
        "5",
        "8.5",
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "new/tables.tex").read_text()
    assert (
        text.count(r"\begin{table}") == 5
        and r"\textbf{59.42 $\pm$ " in text
        and "Threshold 8.5" in text
    )


def test_one_seed_shows_no_difference(tmp_path):
    """The better one is bold; of the other nothing is said."""
    folders = [
        write_run(tmp_path / f"{level}", level=level, seeds=(0,), scorer=level > 10)
        for level in (10.0, 20.0)
    ]
    final = tables.final_return(records.load(folders))
    assert [(row[1].text, row[2].text, row[2].mark) for row in final.rows] == [
        ("Baseline", "9.74", ""),
        ("SCORER", "19.47", "best"),
    ]
    tests = tables.difference_tests(records.load(folders))
    assert [[cell.text for cell in row] for row in tests.rows] == [
        ["Baseline", "-", "nan"],
        ["SCORER", "nan", "-"],
    ]


def test_p_values(runs):
    """SCORER is better on Breakout and the same on Freeway; a row and its column add up to 1 but for ties."""
    done = run_tool("tables", *sorted(runs.glob("main/*")), "--p-values")
    assert done.returncode == 0, done.stderr
    breakout, freeway = done.stdout.split("### ")[1:]
    assert (
        breakout.startswith("Difference tests, DQN on Breakout-MinAtar")
        and "DQN on Freeway-MinAtar" in freeway
    )
    assert "| Baseline | - | 1.000 |" in breakout and "| SCORER | 0.000 | - |" in breakout
    alike = [float(number) for number in re.findall(r"\| (0\.\d{3}) ", freeway)]
    assert len(alike) == 2 and all(0.5 < p < 0.7 for p in alike)  # a half, and half of the ties


def test_paper_against_here(tmp_path, capsys):
    game = GAME | dict(bootstrap_at_timeout=False, leader_decay_power=1.0)
    like = write_run(tmp_path / "a", level=65.0, seeds=(0, 1, 2), **game)
    other = write_run(
        tmp_path / "c", level=20.0, **game | dict(follower_learning_rate=2e-4)
    )  # not the paper's
    rows = [
        [cell.text for cell in row]
        for row in tables.paper_against_here(records.load([like, other])).rows
    ]
    assert [row[:5] for row in rows] == [
        ["Breakout-MinAtar", "DQN", "SCORER", "as in the paper", "65.69 [63.17, 68.21]"],
        [
            "Breakout-MinAtar",
            "DQN, second row",
            "SCORER",
            "as in the paper",
            "63.93 [62.07, 65.79]",
        ],
    ]
    assert rows[0][5].startswith("64.29 [63.29, 65.29]") and [row[6] for row in rows] == [
        "yes",
        "yes",
    ]
    with pytest.raises(SystemExit):
        tables.paper_against_here(records.load([write_run(tmp_path / "b", env="CartPole-v1")]))
    assert "settings of the paper" in capsys.readouterr().err


def test_pqn_beside_the_paper(tmp_path):
    """PQN is compared by settings of its own."""
    pqn = dict(learning_rate=2.5e-4, td_lambda=0.65, num_epochs=2)
    runs = [
        write_run(tmp_path / f"{name}", meta=dict(script="scorer_pqn"), **pqn | change)
        for name, change in (("a", {}), ("b", GAME), ("c", dict(num_epochs=4)))
    ]
    table = tables.paper_against_here(records.load(runs))
    assert [[cell.text for cell in row[1:3]] for row in table.rows] == [
        ["PQN", "Baseline"],
        ["PQN", "SCORER"],
    ]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(thresholds=(5.0, np.nan)), "--thresholds 5.0 nan"),
        (dict(thresholds=(5.0,), p_values=True), "no meaning beside --p-values"),
        (dict(thresholds=(5.0,), paper=True), "no meaning beside --paper"),
        (dict(paper=True, p_values=True), "give one of --paper and --p-values"),
        (dict(p_values=True), "needs two variants"),
    ],
)
def test_tables_refuse_in_one_sentence(tmp_path, capsys, options, words):
    with pytest.raises(SystemExit) as end:
        tables.main([write_run(tmp_path / "a")], **options)
    message = capsys.readouterr().err
    assert end.value.code == 2 and words in message and message.count("\n") == 1


def test_times_beside_the_papers(tmp_path):
    """The paper's column is there for R2D2 on its environments alone, and empty for a variant that it lacks."""
    env, meta = "Navix-FourRooms-v0", dict(script="scorer_r2d2")
    runs = [
        write_run(tmp_path / "a", env=env, meta=meta, level=1.0, seeds=(0,)),
        write_run(tmp_path / "b", env=env, meta=meta, level=0.5, seeds=(0,), **GAME),
        write_run(
            tmp_path / "c",
            env=env,
            meta=meta,
            level=0.5,
            seeds=(0,),
            **GAME | dict(follower_loss="msbe"),
        ),
    ]
    table = tables.time_to_threshold(records.load(runs))
    assert table.header[-1] == "Paper"
    assert [[cell.text for cell in row[3:]] for row in table.rows] == [
        ["Baseline", "0.001 (1/1)", "- (0 %)"],
        ["SCORER", "- (0/1)", "0.6 ± 0.0 (97 %)"],
        ["SCORER (MSBE follower)", "- (0/1)", ""],
    ]
    assert (
        "Paper"
        not in tables.time_to_threshold(records.load([write_run(tmp_path / "d", env=env)])).header
    )


# -------------------- Speed


def ratios(folders) -> list[list[str]]:
    """Variant, seconds, run and ratio of each row of the table of speed."""
    rows = tables.speed(records.load(folders)).rows
    return [[cell.text for cell in (row[1], row[3], row[4], row[5])] for row in rows]


def test_a_ratio_is_of_like_with_like(tmp_path):
    """Not of a sweep's seconds, nor of a record that does not say what was trained in them."""
    alone, sweep, unknown = (dict(lanes=number) for number in (3, 9, None))
    baseline = write_run(tmp_path / "a", meta=alone)
    for name, meta, expected in (("b", alone, "1.10x"), ("c", sweep, "N/A"), ("d", unknown, "N/A")):
        scorer = write_run(tmp_path / name, meta=meta, **GAME)
        assert ratios([baseline, scorer])[1] == ["SCORER", "11.0", "3 seeds on 1 x cpu", expected]
    resumed = write_run(tmp_path / "h", meta=dict(continues="b"), **GAME)
    assert ratios([baseline, resumed])[1][3] == "N/A"
    other_batch = write_run(tmp_path / "e", batch_size=128, **GAME)
    assert ratios([baseline, other_batch])[1][3] == "N/A"  # no baseline with this batch
    per_layer = write_run(tmp_path / "f", follower_learning_rate=5e-4, ablation="per-layer-lr")
    scorer = write_run(tmp_path / "g", **GAME)
    assert [row[3] for row in ratios([per_layer, scorer])] == ["N/A", "N/A"]  # no plain baseline


def test_runs_with_and_without_diagnostics_are_not_averaged(tmp_path):
    srank = dict(srank=np.ones((3, 20)))
    baseline = write_run(tmp_path / "a")
    plain = write_run(tmp_path / "b", **GAME)
    diagnosed = write_run(
        tmp_path / "c",
        seeds=(5, 6, 7),
        curves=dict(srank, returns=np.ones((3, 20))),
        meta=dict(seconds=99.0),
        **GAME,
    )
    assert ratios([baseline, plain, diagnosed]) == [
        ["Baseline", "10.0", "3 seeds on 1 x cpu", "1.00x"],
        ["SCORER", "11.0", "3 seeds on 1 x cpu", "1.10x"],
        ["SCORER", "99.0", "3 seeds on 1 x cpu, with diagnostics", "N/A"],
    ]


def test_runs_at_one_time_may_have_shared_a_card(tmp_path):
    """Two that overlap have no ratio; 16 s later, after compilation and training, they have."""
    name = "scorer_dqn__a__{}__s0__20260101-0000{}-000000"
    baseline = write_run(tmp_path / name.format("baseline", "00"))
    for second, ratio in (("14", "N/A"), ("16", "1.10x")):
        scorer = write_run(tmp_path / name.format("scorer", second), **GAME)
        assert ratios([baseline, scorer])[1][3] == ratio


# -------------------- What is printed, and where

SPECIAL = "a_b & c% $d$ #1 {x} ~y ^z \\w >2 <3 |4"


def test_latex_escapes_every_special_letter():
    table = tables.Table("T & t", ["h_1"], [[tables.Cell(SPECIAL, "best")]], "n > 1 ± 2")
    text = table.latex()
    escaped = (
        r"a\_b \& c\% \$d\$ \#1 \{x\} \textasciitilde{}y \textasciicircum{}z "
        r"\textbackslash{}w \textgreater{}2 \textless{}3 \textbar{}4"
    )
    assert rf"\textbf{{{escaped}}} \\" in text and r"h\_1" in text
    assert r"\caption{T \& t. n \textgreater{} 1 $\pm$ 2}" in text


def test_a_bar_does_not_end_a_cell_of_markdown():
    assert r"| a\|b |" in tables.Table("T", ["h"], [[tables.Cell("a|b")]], "").markdown()


def test_names_with_dollars_and_capital_endings_can_be_drawn(tmp_path):
    runs = [
        write_run(tmp_path / f"{n}", env="A$b$_{c}-v0", **args) for n, args in enumerate(({}, GAME))
    ]
    out = tmp_path / "figure.PNG"
    importlib.import_module("learning_curves").main(runs, out)
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_out_is_never_overwritten(tmp_path, capsys):
    out = tmp_path / "tables.md"
    out.write_text("precious")
    with pytest.raises(SystemExit) as end:
        tables.main([write_run(tmp_path / "a")], out)
    assert end.value.code == 2 and out.read_text() == "precious"
    assert capsys.readouterr().err == f"error: --out {out} exists and is never overwritten\n"


@pytest.mark.parametrize(
    "words, code, said",
    [
        ("| head -c 1", 141, ""),
        ("> /dev/full", 2, "error: standard output cannot be written: No space left"),
    ],
)
def test_no_traceback_where_output_ends(tmp_path, words, code, said):
    """A reader that stops early, and a full disk."""
    run = write_run(tmp_path / "a", env="E" * 200_000)  # more than a pipe holds
    command = f"{sys.executable} plots/tables.py {run} {words}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == code and done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said) and "Traceback" not in done.stderr


# -------------------- Figures


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they are saved, kept open."""
    style = importlib.import_module("style")
    figures, save = [], style.save
    monkeypatch.setattr(
        style, "save", lambda figure, *words: figures.append(figure) or save(figure, *words)
    )
    return figures


def test_a_method_looks_the_same_in_all_figures(runs, tmp_path, drawn):
    """By its name, whichever others are there."""
    looks = {}
    for tool, pattern in (
        ("learning_curves", "main/*"),
        ("ablations", "[mr]*/[01]"),
        ("sensitivity", "[mr]*/[01]"),
        ("representation", "main/[01]"),
    ):
        importlib.import_module(tool).main(sorted(runs.glob(pattern)), tmp_path / f"{tool}.png")
        for line in (line for ax in drawn[-1].axes for line in ax.lines):
            name = line.get_label().partition(",")[0]
            looks.setdefault(name, set()).add(
                (line.get_color(), str(line.get_linestyle()), line.get_marker())
            )
    assert {"SCORER", "Baseline"} <= looks.keys()
    assert all(len(look) == 1 for look in looks.values()), looks


def test_looks_are_all_different():
    style = importlib.import_module("style")
    names = [*style.LOOKS, *(f"other {n}" for n in range(10))][2:]
    looks = style.choose_looks(
        [name for name in names if style.LOOKS.get(name) not in (style.SCORER, style.BASELINE)]
    )
    assert len({str(look) for look in looks.values()}) == len(looks)
    alone = style.choose_looks(["other 3"])["other 3"]
    assert alone == style.choose_looks(["SCORER", "other 3"])["other 3"]


def grey(color: str) -> float:
    """Lightness of a colour printed in grey, from 0 to 1."""
    red, green, blue = plt.matplotlib.colors.to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_methods_stay_apart_in_grey():
    """Two that are equally light have another line or another marker."""
    style = importlib.import_module("style")
    looks = list(dict.fromkeys(style.LOOKS.values()))
    for number, (color, line, marker) in enumerate(looks):
        for other_color, other_line, other_marker in looks[:number]:
            lighter = abs(grey(color) - grey(other_color)) > 0.25
            assert lighter or line != other_line or marker != other_marker


@pytest.mark.parametrize("width, columns", [(None, 4), (3.25, 2)])
def test_figures_fit_their_place(tmp_path, drawn, width, columns):
    """Letters of 7 or 8 points, in a column or on a page; the legend within, below, once."""
    runs = []
    for n in range(8):
        env = f"Navix-Dynamic-Obstacles-{n}-v0"
        runs += [
            write_run(tmp_path / f"a{n}", env=env),
            write_run(
                tmp_path / f"b{n}",
                env=env,
                learning_rate=0.123456789,
                target_update_interval=123456,
                **GAME,
            ),
        ]
    importlib.import_module("learning_curves").main(runs, tmp_path / "figure.png", width=width)
    (figure,) = drawn
    figure.draw_without_rendering()
    assert (
        figure.get_figwidth() == (width or 6.5) and figure.axes[0].get_gridspec().ncols == columns
    )
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0
    assert box.y1 <= min(ax.get_tightbbox().y0 for ax in figure.axes) + 1
    texts = figure.findobj(plt.matplotlib.text.Text)
    assert {text.get_fontsize() for text in texts if text.get_text()} <= {7, 7.5, 8}
    assert figure.axes[0].get_title() == "Dynamic-Obstacles-0"
    assert "3 seeds" in legend.get_title().get_text()
    assert figure.axes[0].get_ylabel() == "IQM return,\nmean of 5 % of steps"


def test_one_seed_is_no_iqm_and_has_no_band(tmp_path, drawn):
    run = write_run(tmp_path / "a", seeds=(0,))
    importlib.import_module("learning_curves").main([run], tmp_path / "figure.png", smooth=0.1)
    (figure,) = drawn
    (ax,) = figure.axes
    assert ax.get_ylabel() == "Return,\nmean of 10 % of steps" and not ax.collections
    assert (
        figure.get_figwidth() == 3.25 and figure.legends[0].get_title().get_text() == "DQN; 1 seed"
    )


def test_numbers_of_seeds_stand_with_each_method_where_they_differ(tmp_path, drawn):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seeds=(0, 1), **GAME)]
    importlib.import_module("learning_curves").main(runs, tmp_path / "figure.png")
    texts = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert texts == ["Baseline, 3 seeds", "SCORER, 2 seeds"]


def test_srank_is_drawn_from_zero(runs, tmp_path, drawn):
    importlib.import_module("representation").main(
        sorted(runs.glob("main/[01]")), tmp_path / "figure.png"
    )
    assert (
        drawn[0].axes[2].get_ylim()[0] == 0 and drawn[0]._suptitle.get_text() == "Breakout-MinAtar"
    )


# -------------------- Watching


def save_untrained(folder: Path, script_name: str, **flags) -> Path:
    """A run's folder with random parameters for each seed, as --save-model leaves it."""
    import jax
    from flax.traverse_util import flatten_dict
    from safetensors.numpy import save_file

    script = importlib.import_module(script_name)
    args = script.complete(script.Args(**flags))
    training = script.make_train(args, script.make_env(args))
    of_a_seed = (
        (np.uint32(0),) if script_name == "scorer_pqn_atari" else (np.uint32(0), np.float32(0))
    )
    state = jax.eval_shape(training.init, *of_a_seed)
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=(args.num_seeds, *leaf.shape)).astype(np.float32)
        for name, leaf in flatten_dict(state.params._asdict(), sep="/").items()
    }
    path = folder / f"{script_name}__{args.env}__scorer__s0"
    path.mkdir(parents=True)
    save_file(params, path / "model.safetensors")
    (path / "args.json").write_text(json.dumps(vars(args), default=str))
    return path


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "script, flags, size",
    [
        ("scorer_dqn", dict(env="Breakout-MinAtar"), (80, 80)),
        ("scorer_dqn", dict(env="CartPole-v1"), (300, 200)),
        ("scorer_pqn", dict(env="Asterix-MinAtar"), (80, 80)),
        ("scorer_r2d2", dict(env="Navix-Empty-Random-8x8-v0"), (256, 256)),
        ("scorer_bootstrapped_dqn", dict(size=7, stochastic=True), (56, 56)),
        ("scorer_pqn_atari", dict(env="Pong-v5", max_episode_steps=20), (252, 252)),
    ],
)
def test_watch(tmp_path, capsys, script, flags, size):
    """An untrained agent of the second of two seeds plays; the picture is the environment's.

    There is no record of the run: a model is enough.
    """
    from PIL import Image

    if flags.get("env") == "CartPole-v1":
        pytest.importorskip("pygame")
    folder = save_untrained(tmp_path, script, scorer=True, seed=4, num_seeds=2, **flags)
    out = tmp_path / "episode.gif"
    watch = importlib.import_module("watch")
    watch.main((folder,), out, episodes=3, which_seed=5, max_frames=5, zoom=8)
    env = flags.get("env", "DeepSea-7-stochastic")
    assert f"{env}, seed 5: mean return" in capsys.readouterr().out
    with Image.open(out) as gif:
        assert gif.size == size and gif.n_frames <= 5
    with pytest.raises(SystemExit):
        watch.main((folder,), out, which_seed=7)
    assert "has seeds 4, 5" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_compilation")
def test_watch_finds_deep_seas_own_actions(tmp_path, monkeypatch):
    """The action that goes right in each cell is that with which the seed was trained."""
    import jax

    script = importlib.import_module("scorer_bootstrapped_dqn")
    watch = importlib.import_module("watch")
    folder = save_untrained(tmp_path, "scorer_bootstrapped_dqn", size=6, seed=3, num_seeds=1)
    model = watch.load_model(folder, None)
    player = watch.make_deep_sea_player(model, 1)
    env = script.make_env(model.args)
    state = script.make_train(model.args, env).init(np.uint32(3), np.float32(0))
    _, env_state, _ = player.reset(jax.random.split(jax.random.key(0), 2))
    for action_map in np.asarray(env_state.action_map):
        np.testing.assert_array_equal(action_map, state.env_state.action_map)


@pytest.mark.usefixtures("quick_compilation")
def test_the_model_that_is_here_plays(tmp_path, capsys):
    """It has learned: an untrained agent returns less than 1."""
    (folder,) = (ROOT / "docs/models").iterdir()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
    importlib.import_module("watch").main((folder,), tmp_path / "episode.gif", episodes=5)
    printed = capsys.readouterr().out
    mean = float(re.search(r"mean return ([\d.]+)", printed)[1])
    assert mean > 5 and (tmp_path / "episode.gif").stat().st_size < 300_000


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "without --save-model"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"a"), "cannot be read"),
        (lambda folder: (folder / "args.json").write_text("[]"), "does not hold the arguments"),
        (lambda folder: add_flag(folder, colour="blue"), "another version of scorer_dqn.py"),
        (lambda folder: add_flag(folder, hidden_dim=32), "holds other networks"),
        (lambda folder: folder.rename(folder.with_name("mine")), "does not begin with the name"),
        (
            lambda folder: folder.rename(folder.with_name("baird__x")),
            "does not begin with the name",
        ),
    ],
)
def test_watch_refuses_in_one_sentence(tmp_path, capsys, change, words):
    folder = save_untrained(tmp_path, "scorer_dqn")
    changed = change(folder)
    with pytest.raises(SystemExit) as end:
        importlib.import_module("watch").main(
            (changed if isinstance(changed, Path) else folder,), tmp_path / "a.gif"
        )
    message = capsys.readouterr().err
    assert end.value.code == 2 and words in message and message.count("\n") == 1


def add_flag(folder: Path, **flags):
    """Writes another value of an argument into a run's args.json."""
    args = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(args | flags))


def test_watch_writes_gifs_alone(tmp_path, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module("watch").main((tmp_path,), tmp_path / "a.png")
    assert "must end in .gif" in capsys.readouterr().err


def test_watch_names_the_newest_of_several(tmp_path, capsys):
    older, newer = tmp_path / "b__s0__20260101-000000-1", tmp_path / "a__s0__20260102-000000-1"
    for run in (older, newer):
        run.mkdir()
        (run / "model.safetensors").touch()
    without = tmp_path / "z__s0__20990101-000000-1"
    cases = {
        (older, newer, without): f"of these 3 the newest with a model is {newer}\n",
        (without, without): "of these 2 none has a model.safetensors\n",
        (): "of these 0 none has a model.safetensors\n",
    }
    for runs, words in cases.items():
        with pytest.raises(SystemExit) as end:
            importlib.import_module("watch").main(runs, tmp_path / "a.gif")
        message = capsys.readouterr().err
        assert end.value.code == 2 and message.endswith(words) and message.count("\n") == 1

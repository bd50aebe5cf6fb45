"""plots/: statistics against rliable and hand-worked cases, refused records, and every tool from end to end."""

import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "plots"), str(ROOT)]

import records  # noqa: E402
import stats  # noqa: E402
import tables  # noqa: E402

ARGS = dict(env="Breakout-MinAtar", seed=0, num_seeds=3, total_timesteps=1000, scorer=False, follower_loss=None,
            follower_learning_rate=None, learning_rate=1e-4, batch_size=64, double=False, dueling=False, runs_dir="a",
            bootstrap_at_timeout=True)
GAME = dict(scorer=True, follower_loss="variance", follower_learning_rate=5e-4)


def write_run(folder: Path, level=10.0, seeds=(0, 1, 2), points=20, curves=None, meta=None, **args) -> Path:
    """A run whose seeds rise to `level` + seed and whose curves begin with NaN, as a script would write it."""
    args = ARGS | dict(seed=seeds[0], num_seeds=len(seeds)) | args
    timesteps = np.linspace(0, args["total_timesteps"], points + 1, dtype=int)[1:]
    returns = np.add.outer(np.array(seeds, float), np.linspace(0, level, points))
    returns[:, 0] = np.nan
    curves = dict(returns=returns) | (curves or {})
    meta = dict(schema=1, script="scorer_dqn", args=args, complete=True, seconds=10.0 + args["scorer"],
                compile_seconds=5.0, device="cpu", num_devices=1) | (meta or {})
    folder.mkdir(parents=True)
    np.savez_compressed(folder / "results.npz", timesteps=timesteps, seeds=seeds, meta=json.dumps(meta), **curves)
    return folder


# -------------------- Statistics against rliable

@pytest.fixture(scope="module")
def oracle():
    return json.loads((ROOT / "tests/data/rliable.json").read_text())


def assert_interval_near(ours: stats.Estimate, theirs: dict):
    """The value agrees to rounding; the interval, of 2,000 resamples, within a tenth of its width."""
    np.testing.assert_allclose(ours.value, np.squeeze(theirs["value"]), rtol=1e-12)
    low, high = np.squeeze(theirs["low"]), np.squeeze(theirs["high"])
    assert np.all(abs(ours.low - low) < 0.1 * (high - low)) and np.all(abs(ours.high - high) < 0.1 * (high - low))


def test_iqm_of_every_number_of_seeds(oracle):
    scores = np.array(oracle["scores"])[:, 0]
    for n, value in oracle["iqm_of_first"].items():
        assert stats.iqm(scores[: int(n)]) == pytest.approx(value, rel=1e-12)
    assert stats.iqm(np.arange(30.0) ** 2) == pytest.approx(np.mean(np.arange(7.0, 23.0) ** 2))  # 7 cut on each side


def test_iqm_and_interval(oracle):
    for scores, theirs in zip(np.array(oracle["scores"]).T, oracle["iqm"]):
        assert_interval_near(stats.bootstrap(stats.iqm, scores), theirs)


def test_iqm_of_curves(oracle):
    assert_interval_near(stats.bootstrap(stats.iqm, np.array(oracle["curve"])), oracle["curve_iqm"])


def test_aggregate_is_stratified_by_environment(oracle):
    scores = np.array(oracle["scores"])
    assert_interval_near(stats.aggregate(list(scores.T), scores.max(axis=0)), oracle["aggregate"])


def test_normalisation_is_by_the_best_iqm_of_all_methods():
    weak, strong = np.outer(np.ones(3), [np.nan, 1.0, 2.0]), np.outer(np.ones(3), [np.nan, 5.0, 4.0])
    assert stats.scale([weak, strong]) == 5.0
    np.testing.assert_allclose(stats.aggregate([weak, strong], [5.0, 5.0]).value, [np.nan, 0.6, 0.6])


# -------------------- Statistics by hand

def test_final_score_is_the_mean_of_the_last_tenth():
    timesteps, curve = np.arange(1, 21) * 5, np.vstack([np.arange(20.0), np.zeros(20)])
    np.testing.assert_array_equal(stats.final_scores(timesteps, curve), [18.5, 0.0])  # of timesteps 95 and 100


def test_difference_test():
    low, high = np.arange(10.0), np.arange(10.0) + 100
    assert stats.difference_test(high, low) == 0.0
    assert stats.difference_test(np.full(5, 2.0), np.full(5, 2.0)) == 1.0  # a tie counts as matching
    assert stats.difference_test(np.full(5, 2.0), np.full(5, 1.0)) == 0.0
    # `other` is 0 or 1 with one half each, its mean of two matches 1 only if both draws are 1: one resample in four.
    assert stats.difference_test(np.ones(2), np.array([0.0, 1.0])) == pytest.approx(0.25, abs=0.04)
    # Two equal pairs: mean difference below, at or above 0; 1 - P(best ahead) = 1 - 5/16.
    assert stats.difference_test(np.array([0.0, 1.0]), np.array([0.0, 1.0])) == pytest.approx(11 / 16, abs=0.04)
    assert np.isnan(stats.difference_test(np.array([2.0]), np.array([1.0])))  # one seed shows nothing


def test_interval_of_one_seed_and_of_equal_seeds():
    one = stats.bootstrap(stats.iqm, np.array([3.0]))
    assert one.value == 3.0 and np.isnan(one.half_width)
    assert stats.bootstrap(stats.iqm, np.full(4, 3.0)) == (3.0, 3.0, 3.0)


def test_nan_heads_are_skipped():
    curve = np.array([[np.nan, 2.0, 4.0], [np.nan, np.nan, 6.0]])
    estimate = stats.bootstrap(stats.iqm, curve)
    np.testing.assert_array_equal(estimate.value, [np.nan, np.nan, 5.0])
    np.testing.assert_array_equal(np.isnan(estimate.low), [True, True, False])
    smooth = stats.rolling_mean(np.array([np.nan, 2.0, 4.0, 6.0]), width=2)
    np.testing.assert_array_equal(smooth, [np.nan, 2.0, 3.0, 5.0])
    np.testing.assert_array_equal(stats.final_scores(np.arange(1, 4), curve), [4.0, 6.0])


def test_rolling_mean_spans_fifty_points():
    x = np.arange(60.0)
    assert stats.rolling_mean(x)[59] == np.mean(x[10:]) and stats.rolling_mean(x)[3] == np.mean(x[:4])


TIMESTEPS = np.array([10, 20, 30, 40])
RISING = np.array([[np.nan, 5.0, 9.9, 10.0], [10.0, 0.0, 0.0, 0.0], [np.nan, 1.0, 2.0, 3.0]])


def test_time_to_threshold():
    np.testing.assert_array_equal(stats.time_to_threshold(TIMESTEPS, RISING, 9.9), [30, 10, np.nan])  # a tie reaches it
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
    assert stats.shared_threshold([np.full(3, 50.0), np.array([10.0, 100.0, 20.0])]) == pytest.approx(99.0)
    assert stats.shared_threshold([np.full(3, -500.0), np.full(3, -100.0)]) == pytest.approx(-101.0)


def test_sample_efficiency_is_not_available_where_the_iqm_stays_below():
    curve = np.vstack([np.full((9, 4), 1.0), [1.0, 1.0, 8.0, 8.0]])  # one lucky seed does not lift the IQM
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
    folders = [write_run(tmp_path / "a", seeds=(0, 1)), write_run(tmp_path / "b", seeds=(2, 3), runs_dir="elsewhere"),
               write_run(tmp_path / "c", **GAME), write_run(tmp_path / "d", **GAME | dict(follower_loss="msbe")),
               write_run(tmp_path / "e", double=True, dueling=True),
               write_run(tmp_path / "f", **GAME, ablation="inverted-roles")]
    methods = records.load(folders)
    assert [method.label for method in methods] == [
        "DQN", "SCORER DQN", "SCORER DQN (MSBE follower)", "SCORER DQN (inverted roles)", "Dueling DDQN"]
    assert methods[0].seeds.tolist() == [0, 1, 2, 3] and methods[0].returns.shape == (4, 20)
    assert methods[1].variant == "SCORER" and methods[4].variant == "Baseline"


def test_arguments_that_differ_are_in_the_names(tmp_path):
    folders = [write_run(tmp_path / "a", batch_size=64), write_run(tmp_path / "b", batch_size=128),
               write_run(tmp_path / "c", **GAME), write_run(tmp_path / "d", env="Asterix-MinAtar")]
    assert [method.label for method in records.load(folders)] == [
        "DQN", "DQN", "DQN (batch size 128)", "SCORER DQN"]


@pytest.mark.parametrize("change, words", [
    (dict(seeds=(0, 0, 1)), "counts a seed twice"),
    (dict(meta=dict(complete=False)), "did not finish"),
    (dict(meta=dict(schema=2)), "schema 2"),
    (dict(curves=dict(srank=np.zeros((3, 5)))), "shape (3, 5)"),
    (dict(curves=dict(returns=np.full((3, 20), np.nan))), "no return for seed 0"),
    (dict(meta=dict(args=dict(env="a"))), "does not say scorer and total_timesteps"),
])
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
    assert f"{path} cannot be read: it is damaged, or no results.npz" in refused(capsys, tmp_path / "a")
    assert "no run folder" in refused(capsys)


def test_usual_values_are_the_most_frequent_ones(tmp_path):
    """Two rates once each on one environment are both named; that which another environment has too is usual."""
    slow, fast = GAME | dict(follower_learning_rate=2e-4), GAME
    runs = [write_run(tmp_path / "a", **slow), write_run(tmp_path / "b", **fast)]
    names = ["SCORER (follower learning rate 0.0002)", "SCORER (follower learning rate 0.0005)"]
    assert [method.variant for method in records.load(runs)] == names
    other = write_run(tmp_path / "c", env="Freeway-MinAtar", **fast)
    assert [method.variant for method in records.load([*runs, other])] == ["SCORER", names[0], "SCORER"]


def test_mixtures_are_refused(tmp_path, capsys):
    first = write_run(tmp_path / "a")
    twice = write_run(tmp_path / "b", seeds=(2, 3))
    assert "b/results.npz counts seed 2" in refused(capsys, first, twice)
    assert "different timesteps" in refused(capsys, first, write_run(tmp_path / "c", seeds=(7, 8), points=10))
    assert "not comparable" in refused(capsys, first, write_run(tmp_path / "d", total_timesteps=2000, **GAME))
    elsewhere = write_run(tmp_path / "e", seeds=(7, 8), env="Asterix-MinAtar")
    with pytest.raises(SystemExit):
        records.pool([records.read_run(folder) for folder in (first, elsewhere)], [])
    assert "e/results.npz" in capsys.readouterr().err


# -------------------- Tools

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """SCORER and baseline on two environments, with diagnostics, and a sweep of the follower's rate."""
    root = tmp_path_factory.mktemp("runs")
    for number, env, gain in ((0, "Breakout-MinAtar", 3), (2, "Freeway-MinAtar", 1)):
        more = {name: np.full((3, 20), 9.0) for name in ("srank", "perception_norm", "control_norm")}
        write_run(root / f"main/{number}", 20, env=env, curves=more)
        write_run(root / f"main/{number + 1}", 20 * gain, env=env, curves=more, **GAME)
        write_run(root / f"rates/{number}", 15, env=env, **GAME | dict(follower_learning_rate=2e-4))
        write_run(root / f"rates/{number + 1}", 18, env=env, **GAME | dict(follower_learning_rate=1e-3))
    write_run(root / "ablated/0", 18, **GAME, ablation="synchronous")
    return root


def run_tool(tool: str, *words) -> subprocess.CompletedProcess:
    command = [sys.executable, f"plots/{tool}.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_learning_curves(runs, tmp_path):
    done = run_tool("learning_curves", *runs.glob("main/*"), "--out", tmp_path / "new/figure.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new/figure.png").stat().st_size > 10_000


@pytest.mark.parametrize("tool, pattern, ending", [
    ("ablations", "main/*", "svg"), ("sensitivity", "[mr]*/*", "png"), ("representation", "main/[01]", "pdf")])
def test_figures(runs, tmp_path, tool, pattern, ending):
    out = tmp_path / f"figure.{ending}"
    importlib.import_module(tool).main(list(runs.glob(pattern)), out)
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize("tool, pattern, out, words", [
    ("learning_curves", "main/*", "figure.jpegs", "figure.jpegs must end"),
    ("learning_curves", "main/*", "main/0/results.npz/figure.png", "figure.png cannot be written: File exists"),
    ("tables", "main/*", "", "cannot be written: Is a directory"),
    ("ablations", "main/[0-2]", "figure.png", "SCORER DQN has runs on 1 of 2 environments"),
    ("representation", "main/*", "figure.png", "give one environment"),
    ("representation", "rates/[01]", "figure.png", "without --diagnostics"),
    ("sensitivity", "main/[02]", "figure.png", "are baselines"),
    ("sensitivity", "ablated/*", "figure.png", "is an ablation")])
def test_figures_refuse_in_one_sentence(runs, tmp_path, capsys, tool, pattern, out, words):
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(tool).main(sorted(runs.glob(pattern)), (runs if "/" in out else tmp_path) / out)
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
    assert "| DQN | SCORER | Freeway-MinAtar | 11.0 | 3 seeds on 1 x cpu | 1.10x |" in speed
    done = run_tool("tables", *folders, "--latex", "--out", tmp_path / "new/tables.tex", "--thresholds", "5", "8.5")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "new/tables.tex").read_text()
    assert text.count(r"\begin{table}") == 5 and r"\textbf{59.42 $\pm$ " in text and "Threshold 8.5" in text


def test_one_seed_shows_no_difference(tmp_path):
    """The better one is bold; of the other nothing is said."""
    folders = [write_run(tmp_path / f"{level}", level=level, seeds=(0,), scorer=level > 10) for level in (10.0, 20.0)]
    final = tables.final_return(records.load(folders))
    assert [(row[1].text, row[2].text, row[2].mark) for row in final.rows] == [
        ("Baseline", "9.74", ""), ("SCORER", "19.47", "best")]
    tests = tables.difference_tests(records.load(folders))
    assert [[cell.text for cell in row] for row in tests.rows] == [["Baseline", "-", "nan"], ["SCORER", "nan", "-"]]


def test_p_values(runs):
    """SCORER is better on Breakout and the same on Freeway; a row and its column add up to 1 but for ties."""
    done = run_tool("tables", *sorted(runs.glob("main/*")), "--p-values")
    assert done.returncode == 0, done.stderr
    breakout, freeway = done.stdout.split("### ")[1:]
    assert breakout.startswith("Difference tests, DQN on Breakout-MinAtar") and "DQN on Freeway-MinAtar" in freeway
    assert "| Baseline | - | 1.000 |" in breakout and "| SCORER | 0.000 | - |" in breakout
    alike = [float(number) for number in re.findall(r"\| (0\.\d{3}) ", freeway)]
    assert len(alike) == 2 and all(0.5 < p < 0.7 for p in alike)  # a half, and half of the ties


def test_paper_against_here(tmp_path, capsys):
    game = GAME | dict(bootstrap_at_timeout=False, leader_decay_power=1.0)
    like = write_run(tmp_path / "a", level=65.0, seeds=(0, 1, 2), **game)
    other = write_run(tmp_path / "c", level=20.0, **game | dict(follower_learning_rate=2e-4))  # not the paper's
    rows = [[cell.text for cell in row] for row in tables.paper_against_here(records.load([like, other])).rows]
    assert [row[:5] for row in rows] == [
        ["Breakout-MinAtar", "DQN", "SCORER", "as in the paper", "65.69 [63.17, 68.21]"],
        ["Breakout-MinAtar", "DQN, second row", "SCORER", "as in the paper", "63.93 [62.07, 65.79]"]]
    assert rows[0][5].startswith("64.29 [63.29, 65.29]") and [row[6] for row in rows] == ["yes", "yes"]
    with pytest.raises(SystemExit):
        tables.paper_against_here(records.load([write_run(tmp_path / "b", env="CartPole-v1")]))
    assert "settings of the paper" in capsys.readouterr().err


def test_pqn_beside_the_paper(tmp_path):
    """PQN is compared by settings of its own."""
    pqn = dict(learning_rate=2.5e-4, td_lambda=0.65, num_epochs=2)
    runs = [write_run(tmp_path / f"{name}", meta=dict(script="scorer_pqn"), **pqn | change)
            for name, change in (("a", {}), ("b", GAME), ("c", dict(num_epochs=4)))]
    table = tables.paper_against_here(records.load(runs))
    assert [[cell.text for cell in row[1:3]] for row in table.rows] == [["PQN", "Baseline"], ["PQN", "SCORER"]]


@pytest.mark.parametrize("options, words", [(dict(thresholds=(5.0, np.nan)), "--thresholds 5.0 nan"),
                                            (dict(paper=True, p_values=True), "give one of --paper and --p-values"),
                                            (dict(p_values=True), "needs two variants")])
def test_tables_refuse_in_one_sentence(tmp_path, capsys, options, words):
    with pytest.raises(SystemExit) as end:
        tables.main([write_run(tmp_path / "a")], **options)
    message = capsys.readouterr().err
    assert end.value.code == 2 and words in message and message.count("\n") == 1


@pytest.mark.parametrize("meta, args, out, words", [
    (dict(script="scorer_r2d2"), {}, "a.gif", "only runs of scorer_dqn.py and scorer_pqn.py"),
    ({}, dict(colour="blue"), "a.gif", "another version of scorer_dqn.py"), ({}, {}, "a.png", "must end in .gif")])
def test_watch_refuses_in_one_sentence(tmp_path, capsys, meta, args, out, words):
    folder = write_run(tmp_path / "run", meta=meta, **args)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit) as end:
        importlib.import_module("watch").main(folder, tmp_path / out)
    message = capsys.readouterr().err
    assert end.value.code == 2 and words in message and message.count("\n") == 1


def test_times_beside_the_papers(tmp_path):
    """The paper's column is there for R2D2 on its environments alone, and empty for a variant that it lacks."""
    env, meta = "Navix-FourRooms-v0", dict(script="scorer_r2d2")
    runs = [write_run(tmp_path / "a", env=env, meta=meta, level=1.0, seeds=(0,)),
            write_run(tmp_path / "b", env=env, meta=meta, level=0.5, seeds=(0,), **GAME),
            write_run(tmp_path / "c", env=env, meta=meta, level=0.5, seeds=(0,), **GAME | dict(follower_loss="msbe"))]
    table = tables.time_to_threshold(records.load(runs))
    assert table.header[-1] == "Paper"
    assert [[cell.text for cell in row[3:]] for row in table.rows] == [
        ["Baseline", "0.001 (1/1)", "- (0 %)"], ["SCORER", "- (0/1)", "0.6 ± 0.0 (97 %)"],
        ["SCORER (MSBE follower)", "- (0/1)", ""]]
    assert "Paper" not in tables.time_to_threshold(records.load([write_run(tmp_path / "d", env=env)])).header


@pytest.mark.parametrize("env, size", [("Breakout-MinAtar", (80, 80)), ("CartPole-v1", (300, 200))])
def test_watch(tmp_path, capsys, env, size):
    """An untrained agent of the second of two seeds plays; the picture is the environment's."""
    if env == "CartPole-v1":
        pytest.importorskip("pygame")
    import jax
    from flax.traverse_util import flatten_dict
    from PIL import Image
    from safetensors.numpy import save_file

    import scorer_dqn

    args, game, env_params = scorer_dqn.resolve(scorer_dqn.Args(env=env, scorer=True, num_seeds=2))
    perception, control = scorer_dqn.Perception(args), scorer_dqn.Control(args, game.action_space(env_params).n)
    obs = jax.numpy.zeros(game.observation_space(env_params).shape).reshape(-1)
    latent = jax.numpy.zeros(args.hidden_dim)
    shapes = {name: jax.eval_shape(player.init, jax.random.key(0), x)["params"]
              for name, player, x in (("perception", perception, obs), ("control", control, latent))}
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(2, *leaf.shape)).astype(np.float32)
              for name, leaf in flatten_dict(shapes, sep="/").items()}
    folder = write_run(tmp_path / "run", seeds=(4, 5), **json.loads(json.dumps(vars(args), default=str)))
    watch = importlib.import_module("watch")
    with pytest.raises(SystemExit):
        watch.main(folder)
    assert "without --save-model" in capsys.readouterr().err
    save_file(params, folder / "model.safetensors")
    out = tmp_path / "episode.gif"
    watch.main(folder, out, episodes=3, which_seed=5, max_frames=5, zoom=8)
    assert f"{env}, seed 5: mean return" in capsys.readouterr().out
    with Image.open(out) as gif:
        assert gif.size == size and gif.n_frames <= 5
    with pytest.raises(SystemExit):
        watch.main(folder, out, which_seed=7)
    assert "has seeds 4, 5" in capsys.readouterr().err

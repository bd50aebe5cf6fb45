"""plots/reproduce.py: which records count, what is missing, and that it runs what is."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))
import reproduce  # noqa: E402
from reproduce import Experiment  # noqa: E402

TINY = ("--env", "CartPole-v1", "--num-seeds", "2", "--total-timesteps", "20000")


def write_record(folder, flags, seeds=(0, 1), complete=True, curves=("returns",), **changed):
    """Writes a record of scorer_dqn.py as these flags make it, with changed arguments."""
    args = vars(reproduce.parse("scorer_dqn.py", flags.split())) | changed
    meta = dict(schema=1, script="scorer_dqn", args=args, complete=complete)
    folder.mkdir(parents=True)
    arrays = {name: np.zeros((len(seeds), 3)) for name in curves}
    text = json.dumps(meta, default=str)
    np.savez(folder / "results.npz", seeds=np.array(seeds), meta=text, **arrays)


def missing(experiment, folder):
    """Returns whether the records in a folder leave a seed of the experiment open."""
    found = reproduce.find(experiment, reproduce.read_index([folder]))
    return reproduce.is_missing(experiment, found)


SCORER = Experiment("", "scorer_dqn.py", "CartPole-v1", "--scorer", seeds=2)
FLAGS = "--scorer --env CartPole-v1"


@pytest.mark.parametrize(
    "record",
    [
        dict(flags=FLAGS),
        dict(flags=FLAGS, runs_dir="elsewhere", save_model=True, seed=7),
        dict(flags=FLAGS, follower_learning_rate=[3e-4]),
        dict(flags=FLAGS, follower_learning_rate=np.float64(np.float32(3e-4))),
        dict(flags=FLAGS, seeds=(1, 0, 2)),
        dict(flags=FLAGS, curves=("returns", "srank")),
    ],
)
def test_what_counts_as_a_record(tmp_path, record):
    """Output flags, the order of seeds and more curves leave a record what it is."""
    write_record(tmp_path / "group" / "run", **record)
    assert not missing(SCORER, tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        dict(flags="--env CartPole-v1"),
        dict(flags="--scorer --env Acrobot-v1"),
        dict(flags=FLAGS, complete=False),
        dict(flags=FLAGS, seeds=(0, 2)),
        dict(flags=FLAGS, curves=("bellman_error_mean",)),
        dict(flags=FLAGS, total_timesteps=1000),
        dict(flags=FLAGS, follower_learning_rate=4e-4),
        dict(flags=FLAGS, gamma=0.9),
    ],
)
def test_what_is_no_record(tmp_path, record):
    """Another method, environment or length, too few seeds, or no returns: the run is missing."""
    write_record(tmp_path / "group" / "run", **record)
    assert missing(SCORER, tmp_path)


def test_records_that_stand_apart_do_not_count(tmp_path):
    """Groups that answer another question are passed over."""
    write_record(tmp_path / "plain_loop" / "run", FLAGS)
    assert missing(SCORER, tmp_path)


def test_seeds_of_several_records_are_pooled_once(tmp_path):
    """A seed that two records hold is taken from one of them."""
    for number, seeds in enumerate([(0,), (1,), (0, 1)]):
        write_record(tmp_path / f"run{number}", FLAGS, seeds=seeds)
    found = reproduce.find(SCORER, reproduce.read_index([tmp_path]))
    assert [record.seeds for record in found] == [(0,), (1,)]


def test_rates_become_one_sweep():
    """Follower's rates that are missing on one environment are one command, of more seeds."""
    rates = ("2e-4", "1e-3")
    flags = [f"--scorer --follower-learning-rate {rate}" for rate in rates]
    wanted = [Experiment("", "scorer_dqn.py", "Asterix-MinAtar", one) for one in (*flags, "")]
    sweep, single = reproduce.plan(wanted, on_gpu=True)
    assert " ".join(sweep.words) == (
        "--scorer --env Asterix-MinAtar --num-seeds 30 --follower-learning-rate 2e-4 1e-3 --diagnostics"
    )
    assert sweep.is_sweep and not single.is_sweep and sweep.seconds > single.seconds


def test_every_command_is_one_that_its_script_takes():
    """The flags of all experiments pass their scripts' checks, and no two are the same."""
    expected = [
        json.dumps([e.script, e.seeds, reproduce.expected_args(e)], default=str)
        for e in reproduce.EXPERIMENTS
    ]
    assert len(set(expected)) == len(expected)


def test_missing_runs_are_made(tmp_path, capsys):
    """A command is run and leaves a record; one that fails is counted, and its output is kept."""
    good = reproduce.Run("scorer_dqn.py", TINY, 1.0, is_sweep=False)
    bad = reproduce.Run("scorer_dqn.py", ("--env", "Nowhere-v1"), 1.0, is_sweep=True)
    queue = reproduce.Queue([good], tmp_path, per_device=1)
    queue.work(None)
    (record,) = reproduce.read_index([tmp_path])
    assert record.seeds == (0, 1) and queue.failures == 0 and not list(tmp_path.glob("*.txt"))
    queue.start(bad, None)
    (log,) = tmp_path.glob("log-*.txt")
    assert queue.failures == 1 and "--env Nowhere-v1 cannot be made" in log.read_text()
    printed = capsys.readouterr().out
    assert "done in" in printed and "exit code 2" in printed and str(log) in printed


def test_a_run_that_was_cut_is_resumed(tmp_path):
    """The newest checkpoint of the same command is resumed; a finished run's or another's is not."""
    run = reproduce.Run("scorer_dqn.py", TINY, 1.0, is_sweep=False)
    args = vars(reproduce.parse("scorer_dqn.py", list(TINY)))
    for name, changed in (("a", {}), ("b", dict(gamma=0.9)), ("c", dict(num_seeds=3))):
        folder = tmp_path / f"scorer_dqn__{name}"
        folder.mkdir()
        (folder / "args.json").write_text(json.dumps(args | changed, default=str))
        (folder / "checkpoint.npz").touch()
    command = reproduce.command_of(run, tmp_path)
    assert command[command.index("--resume") + 1] == str(tmp_path / "scorer_dqn__a")
    np.savez(
        tmp_path / "scorer_dqn__a" / "results.npz",
        seeds=np.arange(2),
        meta=json.dumps(dict(script="scorer_dqn", args=args, complete=True), default=str),
    )
    assert "--resume" not in reproduce.command_of(run, tmp_path)


def test_dry_run_and_bad_input():
    """--dry-run prints commands and a time and runs none; an unknown group is one sentence."""
    tool = [sys.executable, str(ROOT / "plots" / "reproduce.py")]
    shown = subprocess.run([*tool, "atari", "--dry-run"], capture_output=True, text=True)
    assert shown.returncode == 0 and "experiments have their records" in shown.stdout
    assert "python scorer_pqn_atari.py --scorer --env Phoenix-v5" in shown.stdout
    refused = subprocess.run([*tool, "chess"], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("error: chess is no group")


def test_estimates_follow_what_a_run_does():
    """Four times as many updates take R2D2 four times as long; seeds beside each other on a GPU do not add."""

    def seconds(*words, lanes=30, on_gpu=True):
        return reproduce.estimate("scorer_r2d2.py", ["--scorer", *words], lanes, on_gpu)

    start = 60
    assert seconds("--update-interval", "20") - start == pytest.approx(4 * (seconds() - start))
    assert seconds() - start < 2 * (seconds(lanes=15) - start)
    assert seconds(on_gpu=False) > 10 * seconds()

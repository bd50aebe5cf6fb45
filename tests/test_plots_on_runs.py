"""Every tool of plots/ on runs that scorer_dqn.py has just made."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from helpers import UNOPTIMIZED
from helpers import script_variables

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))
CARTPOLE = "--env CartPole-v1 --total-timesteps 5e3 --num-seeds 2 --diagnostics"
COMMANDS = dict(
    baseline=CARTPOLE,
    scorer=f"{CARTPOLE} --scorer",
    slow=f"{CARTPOLE} --scorer --follower-learning-rate 2e-4",
    breakout="--env Breakout-MinAtar --total-timesteps 2e4 --save-model",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run folder for each of COMMANDS."""
    folder = tmp_path_factory.mktemp("runs")
    environment = script_variables(folder, **UNOPTIMIZED)
    for name, flags in COMMANDS.items():
        subprocess.run(
            [sys.executable, ROOT / "scorer_dqn.py", *flags.split(), "--runs-dir", folder / name],
            check=True,
            capture_output=True,
            env=environment,
        )
    return {name: next((folder / name).iterdir()) for name in COMMANDS}


def test_learning_curves_from_the_command_line(runs, tmp_path):
    """As a reader types it: a picture of some size, where --out says."""
    tool, out = ROOT / "plots" / "learning_curves.py", tmp_path / "figure.png"
    command = [sys.executable, tool, runs["baseline"], runs["scorer"], "--out", out]
    subprocess.run(command, check=True, capture_output=True)
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize(
    "tool, names",
    [
        ("ablations", ("baseline", "scorer", "slow")),
        ("sensitivity", ("scorer", "slow")),
        ("representation", ("baseline", "scorer")),
    ],
)
def test_figures(runs, tmp_path, tool, names):
    """A picture of some size."""
    import_module(tool).main([runs[name] for name in names], out=tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize("latex", [False, True])
def test_tables(runs, capsys, latex):
    """A row for each method that was given."""
    import_module("tables").main([runs["baseline"], runs["scorer"], runs["slow"]], latex=latex)
    printed = capsys.readouterr().out
    assert "CartPole-v1" in printed and "follower learning rate 0.0002" in printed


def test_paper_table(runs, capsys):
    """The paper's baseline on Breakout stands beside the run."""
    import_module("tables").main([runs["breakout"]], paper=True)
    assert "19.16 [17.66, 20.66]" in capsys.readouterr().out


def test_watch(runs, tmp_path, capsys):
    """A GIF below 300 kB, and the mean return with its interval."""
    import_module("watch").main((runs["breakout"],), out=tmp_path / "episode.gif", episodes=3)
    assert "Breakout-MinAtar, seed 0: mean return" in capsys.readouterr().out
    assert (tmp_path / "episode.gif").read_bytes()[:6] == b"GIF89a"
    assert (tmp_path / "episode.gif").stat().st_size < 300_000

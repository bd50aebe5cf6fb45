"""Every command of README and docs: its flags are taken, and in a short form it runs."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
from commands import PAGES
from commands import RECORD
from commands import ROOT
from commands import list_commands
from commands import list_stated_returns
from commands import list_stated_times

COMMANDS = [command for command, _ in list_commands()]

# What is added to a command so that it ends soon: of a flag given twice, the last counts.
SHORT = {
    "scorer_dqn.py": "--total-timesteps 2e4 --num-seeds 1",
    "scorer_pqn.py": "--total-timesteps 1e4 --num-seeds 1",
    "scorer_r2d2.py": "--total-timesteps 3e3 --learning-starts 2e3 --num-seeds 1",
    "scorer_bootstrapped_dqn.py": "--total-timesteps 1e3 --num-seeds 1",
    "scorer_pqn_atari.py": "--total-timesteps 2e3 --num-seeds 1 --num-envs 8 --num-steps 16",
    "baird.py": "--num-updates 100",
    "plots/reproduce.py": "--dry-run",
    "plots/results.py": "--check",
    "plots/speed.py": "--saved docs/results/speed/cpu.json",
    "plots/learning_curves.py": "--out curves.png",
    "plots/watch.py": "--out game.gif --episodes 1",
}

# Commands that another test runs, or none can.
ELSEWHERE = {
    "tests/copy_run.py": "test_project.py compares what it copies",
    "tests/commands.py": "takes minutes; its record is compared below",
    "scorer_dqn.py ...": "uv fetches what it needs from the network",
    "scorer_dqn.py --resume runs/...": "test_runs.py resumes runs",
    "plots/watch.py runs/...": "docs/tour.md has it with a folder's name",
    "scorer_dqn.py --env CartPole-v1 --num-seeds 2 --total-timesteps 2e4 --distributed": (
        "test_runs.py starts two processes"
    ),
}
RUN_HERE = [command for command in COMMANDS if command not in ELSEWHERE]
TRAINING = [command for command in RUN_HERE if command.startswith("scorer_")]


def test_what_runs_elsewhere_is_shown():
    """No exception is left over from a command that is gone."""
    assert set(ELSEWHERE) <= set(COMMANDS)


@pytest.mark.parametrize("command", TRAINING)
def test_flags_are_taken(command, monkeypatch):
    """A training script takes the command's flags as they stand; else it would exit."""
    script, *flags = command.split()
    module = importlib.import_module(script.removesuffix(".py"))
    monkeypatch.setattr(sys, "argv", [script, *flags])
    assert module.complete(module.parse_args()).scorer == ("--scorer" in flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder that looks like the repository after some runs."""
    folder = tmp_path_factory.mktemp("repository")
    for path in ROOT.iterdir():
        if path.name != "runs":
            (folder / path.name).symlink_to(path)
    (folder / "runs").mkdir()
    records = ROOT / "docs" / "results" / "control"
    for run in [*records.glob("*__CartPole-v1__*"), *(ROOT / "docs" / "models").iterdir()]:
        shutil.copytree(run, folder / "runs" / run.name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_HERE)
def test_runs_in_short(command, folder):
    """A command, shortened, ends well."""
    script = command.split()[0]
    line = f"{sys.executable} {command} {SHORT[script]}"
    done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_stated_times_are_those_of_the_record():
    """README's seconds for a command are the record's, rounded to five."""
    measured = json.loads(RECORD.read_text())["seconds"]
    stated = list_stated_times()
    assert stated and stated == {name: 5 * round(measured[name] / 5) for name in stated}


def test_stated_returns_are_those_of_the_record():
    """The returns that README and the tour promise are the record's."""
    measured = json.loads(RECORD.read_text())["returns"]
    stated = list_stated_returns()
    assert len(stated) == 3
    for command, number in stated.items():
        assert number == pytest.approx(measured[command], rel=0.05, abs=0.5), command


def test_pages_are_found():
    """The pages are there, and commands on them."""
    assert len(PAGES) > 10 and len(RUN_HERE) > 20

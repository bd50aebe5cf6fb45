"""Runs what the results need: knows every experiment, finds the records there are, runs the missing ones.

    python plots/reproduce.py --dry-run                # what is missing, and how long it would take here
    python plots/reproduce.py minatar                  # runs one group, on all devices of this machine
    python plots/reproduce.py minatar --only Asterix   # those of its runs whose command has this word

Records count wherever they lie in docs/results or in --runs-dir, by their arguments. A run that was
cut is resumed from its checkpoint. Rates that are missing on one environment run as one sweep.
"""

import functools
import importlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import command
import numpy as np
import tyro
from command import fail
from records import NOT_METHOD
from tyro.conf import Positional

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where the scripts are
# Groups of records that answer another question: no second sample of the same experiment.
APART = {"plain_loop", "minigrid_16_stopped", "atari_short", "deep_sea_rates"}
# Arguments that two records of one experiment may differ in: a shorter run is none of them.
MAY_DIFFER = NOT_METHOD - {"env", "total_timesteps"}


class Experiment(NamedTuple):
    """One method on one environment; the seeds are 0 to seeds - 1."""

    group: str
    script: str
    env: str  # Deep Sea: empty, as flags make its name
    flags: str  # beside --env, --num-seeds and --diagnostics
    seeds: int = 30
    needs: str = "returns"  # the curve that a record must hold


# ----------------------------------- The experiments, as data -------------------------------------

GAMES = ("Asterix", "Breakout", "Freeway", "SpaceInvaders")
DQN_KINDS = ("", "--double", "--dueling", "--double --dueling")
PLAYERS = ("", "--scorer")
FOLLOWER_RATES = ("2e-4", "3e-4", "7.5e-4", "1e-3")
MINIGRID = (
    "DoorKey-6x6",
    "SimpleCrossingS9N2",
    "DistShift2",
    "LavaGapS6",
    "GoToDoor-8x8",
    "Empty-Random-8x8",
    "Dynamic-Obstacles-6x6",
    "FourRooms",
)
# Where SCORER and the baseline end at different returns: there the follower's rate is a question.
MINIGRID_DIFFERENT = ("DoorKey-6x6", "SimpleCrossingS9N2", "LavaGapS6", "GoToDoor-8x8", "FourRooms")
FOUR_ROOMS_AT_20 = (
    "--scorer",
    "--scorer --no-bootstrap-at-timeout",
    "--scorer --follower-loss msbe",
    "--scorer --follower-importance-weights",
    "--scorer --per-alpha 0",
)
# Flags of depth 10 for as long as the paper's Deep Sea.
LONG_SEAS = {
    "no priors": "--prior-scale 0",
    "no priors, stochastic": "--stochastic --prior-scale 0",
    "priors, stochastic": "--stochastic",
}
ATARI = ("Phoenix", "Qbert", "BattleZone", "NameThisGame", "DoubleDunk")


def minatar_experiments() -> list[Experiment]:
    """Returns the paper's table "Final IQM return", and the controls and ablations around it."""
    found = []
    for game in GAMES:
        env = f"{game}-MinAtar"

        def add(group, flags, script="scorer_dqn.py", env=env, needs="srank"):
            found.append(Experiment(group, script, env, flags, needs=needs))

        for player in PLAYERS:
            for kind in DQN_KINDS:
                needs = "returns" if game == "Breakout" else "srank"
                add("minatar", f"{kind} {player}".strip(), needs=needs)
            add("pqn", player, script="scorer_pqn.py", needs="returns")
        add("pqn", "--ablation per-layer-lr", script="scorer_pqn.py", needs="returns")
        for flags in ("--learning-rate 5e-4", "--ablation per-layer-lr"):
            add("rates", flags, needs="returns")
        for flags in ("--scorer --follower-loss msbe",):
            add("ablations", flags, needs="returns")
        for ablation in ("inverted-roles", "synchronous"):
            add("ablations", f"--scorer --ablation {ablation}", needs="returns")
        for rate in FOLLOWER_RATES:
            add("sensitivity", f"--scorer --follower-learning-rate {rate}", needs="returns")
        for rate in ("2e-4", "1e-3"):
            add("sensitivity", f"--learning-rate {rate}", needs="returns")
    for game in ("Asterix", "Breakout"):
        for flags in ("--ablation per-layer-lr", "--scorer --follower-loss msbe"):
            flags = f"{flags} --follower-learning-rate 1e-3"
            found.append(Experiment("rates", "scorer_dqn.py", f"{game}-MinAtar", flags))
    for game in ("Asterix", "SpaceInvaders"):  # where SCORER is above the per-layer baseline
        flags = "--ablation per-layer-lr --batch-size 128"  # as much data for an update as SCORER
        found.append(Experiment("rates", "scorer_dqn.py", f"{game}-MinAtar", flags))
    for rate in ("3e-4", "7.5e-4"):
        flags = f"--learning-rate {rate}"
        found.append(Experiment("sensitivity", "scorer_dqn.py", "Breakout-MinAtar", flags))
    return found


def other_experiments() -> list[Experiment]:
    """Returns the experiments on MiniGrid, classic control, Deep Sea and Atari."""
    found = []
    for place in MINIGRID:
        for player in PLAYERS:
            env = f"Navix-{place}-v0"
            found.append(
                Experiment("minigrid", "scorer_r2d2.py", env, player, needs="best_returns")
            )
    for place in MINIGRID_DIFFERENT:
        flags = "--learning-rate 3e-4"
        found.append(Experiment("minigrid", "scorer_r2d2.py", f"Navix-{place}-v0", flags))
    for flags in FOUR_ROOMS_AT_20:
        flags = f"{flags} --update-interval 20"
        found.append(Experiment("four-rooms", "scorer_r2d2.py", "Navix-FourRooms-v0", flags, 10))
    for env in ("CartPole-v1", "Acrobot-v1"):
        for kind in DQN_KINDS:
            for player in PLAYERS:
                flags = f"{kind} {player}".strip()
                found.append(Experiment("control", "scorer_dqn.py", env, flags))
    for size in (10, 20, 30):
        for kind in ("", "--stochastic"):
            for player in ("", "--scorer", "--scorer --follower-loss msbe"):
                flags = " ".join(f"--size {size} {kind} {player}".split())
                found.append(Experiment("deep-sea", "scorer_bootstrapped_dqn.py", "", flags))
    for kind in LONG_SEAS.values():
        players = ["", "--scorer"]
        if "--prior-scale" in kind:
            players.append("--scorer --follower-learning-rate 5e-3")
        for player in players:
            flags = f"--size 10 {kind} --total-timesteps 50000 {player}".strip()
            found.append(Experiment("deep-sea", "scorer_bootstrapped_dqn.py", "", flags))
    for game in ATARI:
        for player in PLAYERS:
            found.append(Experiment("atari", "scorer_pqn_atari.py", f"{game}-v5", player, 5))
    return found


EXPERIMENTS = minatar_experiments() + other_experiments()
GROUPS = tuple(dict.fromkeys(experiment.group for experiment in EXPERIMENTS))

# Microseconds of one step of all environments: 30 seeds on one H200, and one seed on a CPU core.
STEP_US = {
    "scorer_dqn.py": (165, 1_900),
    "scorer_pqn.py": (390, 2_600),
    "scorer_r2d2.py": (890, 5_400),
    "scorer_bootstrapped_dqn.py": (300, 2_000),
    "scorer_pqn_atari.py": (7_700, 400_000),
}


# ------------------------------------ Which records there are -------------------------------------


class Record(NamedTuple):
    """What a results.npz says of itself."""

    path: Path
    meta: dict
    seeds: tuple
    curves: tuple  # names


def read_index(folders: list[Path]) -> list[Record]:
    """Returns the finished records in these folders, however deep; what is none is passed over."""
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("results.npz")):
            if APART.intersection(path.parts):
                continue
            try:
                with np.load(path) as file:
                    meta = json.loads(str(file["meta"]))
                    record = Record(path, meta, tuple(file["seeds"].tolist()), tuple(file.files))
            except (OSError, ValueError, KeyError):
                continue
            if isinstance(meta, dict) and meta.get("complete") and "args" in meta:
                found.append(record)
    return found


def load_script(name: str):
    """Returns a training script as a module."""
    return importlib.import_module(name.removesuffix(".py"))


def parse(name: str, words: list[str]):
    """Returns a script's arguments for these words of a command line, presets filled in."""
    script = load_script(name)
    return script.complete(tyro.cli(script.Args, args=words, registry=script.whole_numbers()))


def comparable(args) -> dict:
    """Returns those arguments in which all records of an experiment are alike."""
    return {name: value for name, value in vars(args).items() if name not in MAY_DIFFER}


@functools.cache
def default_args(script: str) -> dict:
    """Returns a script's arguments as they are without a command line and a preset."""
    return vars(load_script(script).Args())


def expected_args(experiment: Experiment) -> dict:
    """Returns the arguments, presets filled in, that a record of the experiment has."""
    words = experiment.flags.split()
    if experiment.env:
        words += ["--env", experiment.env]
    return comparable(parse(experiment.script, words))


def is_alike(value, other) -> bool:
    """Returns whether two values of an argument are the same: numbers within float32's rounding."""
    value, other = first_of(value), first_of(other)
    is_number = isinstance(value, int | float) and isinstance(other, int | float)
    return bool(np.isclose(value, other, rtol=1e-6, atol=0)) if is_number else value == other


def first_of(value):
    """Returns the one value of a list, or the value."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def matches(record: Record, experiment: Experiment, expected: dict) -> bool:
    """Returns whether a record is of an experiment: flags that it does not know have no effect."""
    if record.meta["script"] != experiment.script.removesuffix(".py"):
        return False
    if experiment.needs not in record.curves:
        return False
    args = default_args(experiment.script) | record.meta["args"]
    return all(is_alike(args[name], value) for name, value in expected.items())


def find(experiment: Experiment, index: list[Record]) -> list[Record]:
    """Returns the records of an experiment, each seed once: its earliest record."""
    chosen, seeds = [], set()
    for record in find_with_repeats(experiment, index):
        if not seeds.intersection(record.seeds):
            chosen.append(record)
            seeds.update(record.seeds)
    return chosen


def find_with_repeats(experiment: Experiment, index: list[Record]) -> list[Record]:
    """Returns all records of an experiment, earliest first, also where two hold the same seed.

    On a GPU a repeated seed is a new draw: sums in another order take training elsewhere.
    """
    expected = expected_args(experiment)
    found = [record for record in index if matches(record, experiment, expected)]
    return sorted(found, key=lambda record: record.path.parent.name.rpartition("__")[2])


def find_all(experiments, index: list[Record]) -> dict[Experiment, list[Record]]:
    """Returns the records of each experiment."""
    return {experiment: find(experiment, index) for experiment in experiments}


def is_missing(experiment: Experiment, records: list[Record]) -> bool:
    """Returns whether a seed of the experiment has no record."""
    seeds = {seed for record in records for seed in record.seeds}
    return not seeds.issuperset(range(experiment.seeds))


# --------------------------------------- What is to be run ----------------------------------------


class Run(NamedTuple):
    """One command, which may be a sweep of several experiments."""

    script: str
    words: tuple
    seconds: float  # that it will take here, about
    is_sweep: bool  # over rates; it keeps no checkpoints


def plan(missing: list[Experiment], on_gpu: bool) -> list[Run]:
    """Returns the commands that make what is missing; rates of one method become a sweep."""
    sweeps = {}
    for experiment in missing:
        words = experiment.flags.split()
        rates = []
        if "--follower-learning-rate" in words:
            place = words.index("--follower-learning-rate")
            rates = [words[place + 1]]
            words = words[:place] + words[place + 2 :]
        key = (experiment.script, experiment.env, tuple(words), experiment.seeds, bool(rates))
        sweeps.setdefault(key, []).extend(rates)
    runs = []
    for (script, env, words, seeds, _), rates in sweeps.items():
        words = [*words, *(["--env", env] if env else []), "--num-seeds", str(seeds)]
        if rates:
            words += ["--follower-learning-rate", *rates]
        if script == "scorer_dqn.py":
            words.append("--diagnostics")
        seconds = estimate(script, words, seeds * max(1, len(rates)), on_gpu)
        runs.append(Run(script, tuple(words), seconds, len(rates) > 1))
    return runs


def estimate(script: str, words: list[str], lanes: int, on_gpu: bool) -> float:
    """Returns about how many seconds a command takes on one GPU or on this machine's cores."""
    args = parse(script, words)
    steps = args.total_timesteps / getattr(args, "num_envs", 1)
    gpu_us, cpu_us = STEP_US[script]
    if script == "scorer_r2d2.py":  # whose time goes to the updates, one in 80 steps above
        steps *= 80 / args.update_interval
    if script == "scorer_pqn_atari.py":  # seeds one after another
        return 1e-6 * steps * lanes * (gpu_us if on_gpu else cpu_us)
    if on_gpu:
        return 60 + 1e-6 * steps * gpu_us * max(1.0, 0.25 + 0.75 * lanes / 30)
    return 30 + 1e-6 * steps * cpu_us * math.ceil(lanes / (os.cpu_count() or 1))


def find_gpus() -> list[str]:
    """Returns the numbers of this machine's NVIDIA GPUs."""
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split()
    except OSError:
        return []


def cut_run(run: Run, runs_dir: Path) -> Path | None:
    """Returns the newest folder of this command that was cut and has a checkpoint."""
    args = parse(run.script, list(run.words))
    expected = comparable(args) | dict(seed=args.seed, num_seeds=args.num_seeds)
    for path in sorted(runs_dir.glob(f"{run.script.removesuffix('.py')}__*/checkpoint.npz"))[::-1]:
        earlier = json.loads((path.parent / "args.json").read_text())
        same = all(is_alike(earlier.get(name), value) for name, value in expected.items())
        index = read_index([path.parent])
        if same and not index:
            return path.parent
    return None


def command_of(run: Run, runs_dir: Path) -> list[str]:
    """Returns the words that start a run, or that resume what was cut of it."""
    start = [sys.executable, str(ROOT / run.script)]
    keep = [] if run.is_sweep else ["--checkpoint-every-minutes", "10"]
    cut = cut_run(run, runs_dir)
    if cut is not None:
        return [*start, "--resume", str(cut), "--runs-dir", str(runs_dir), *keep]
    return [*start, *run.words, "--runs-dir", str(runs_dir), *keep]


class Queue:
    """Runs commands over the devices, several at a time on each, each into a log of its own."""

    def __init__(self, runs: list[Run], runs_dir: Path, per_device: int):
        self.waiting = sorted(runs, key=lambda run: -run.seconds)
        self.runs_dir, self.per_device = runs_dir, per_device
        self.lock = threading.Lock()
        self.failures = 0
        runs_dir.mkdir(parents=True, exist_ok=True)

    def work(self, gpu: str | None):
        """Takes one command after another, until none is waiting."""
        while True:
            with self.lock:
                if not self.waiting:
                    return
                run = self.waiting.pop(0)
            self.start(run, gpu)

    def start(self, run: Run, gpu: str | None):
        """Runs one command to its end."""
        variables = dict(os.environ)
        if gpu is not None:
            share = f"{0.9 / self.per_device:.2f}"
            variables |= dict(CUDA_VISIBLE_DEVICES=gpu, XLA_PYTHON_CLIENT_MEM_FRACTION=share)
        words = command_of(run, self.runs_dir)
        began = time.time()
        log = self.runs_dir / f"log-{time.time_ns()}.txt"
        with open(log, "w") as file:
            code = subprocess.run(
                words, stdout=file, stderr=subprocess.STDOUT, env=variables
            ).returncode
        shown = " ".join([run.script, *run.words])
        if code:
            self.failures += 1
            print(
                f"exit code {code} after {time.time() - began:.0f} s, see {log}: {shown}",
                flush=True,
            )
        else:
            log.unlink()
            print(f"done in {time.time() - began:.0f} s: {shown}", flush=True)


def run_all(runs: list[Run], runs_dir: Path, per_device: int) -> int:
    """Runs all commands; returns how many failed."""
    gpus = find_gpus() or [None]
    per_device = per_device if gpus != [None] else 1
    queue = Queue(runs, runs_dir, per_device)
    workers = [
        threading.Thread(target=queue.work, args=(gpu,)) for gpu in gpus for _ in range(per_device)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return queue.failures


def in_words(seconds: float) -> str:
    """Returns a time as a person says it."""
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def main(
    groups: Positional[tuple[str, ...]] = (),
    dry_run: bool = False,
    only: str = "",
    runs_dir: Path = Path("runs"),
    per_device: int = 2,
):
    """Runs what the results need and no record holds.

    Args:
        groups: minatar, pqn, rates, ablations, sensitivity, minigrid, four-rooms, control, deep-sea,
            atari; without any, all.
        dry_run: only print what is missing, and how long it would take here.
        only: run only commands that contain this text.
        runs_dir: the folder that gets one folder per run; its records count too.
        per_device: runs at a time on each GPU, so that one compiles while the other trains.
    """
    for group in groups:
        if group not in GROUPS:
            fail(f"{group} is no group of experiments; there are {', '.join(GROUPS)}")
    chosen = [e for e in EXPERIMENTS if not groups or e.group in groups]
    found = find_all(chosen, read_index([ROOT / "docs" / "results", runs_dir]))
    missing = [experiment for experiment in chosen if is_missing(experiment, found[experiment])]
    gpus = find_gpus()
    runs = [run for run in plan(missing, bool(gpus)) if only in " ".join([run.script, *run.words])]
    print(f"{len(chosen) - len(missing)} of {len(chosen)} experiments have their records")
    for run in runs:
        print(
            f"missing, about {in_words(run.seconds)}: {' '.join(['python', run.script, *run.words])}"
        )
    total = sum(run.seconds for run in runs) / max(1, len(gpus))
    where = f"{len(gpus)} GPUs" if gpus else f"{os.cpu_count()} CPU cores"
    if runs:
        print(f"{len(runs)} runs, about {in_words(total)} on {where}", flush=True)
    if dry_run or not runs:
        return
    if run_all(runs, runs_dir, per_device):
        sys.exit(1)


if __name__ == "__main__":
    command.run(main)

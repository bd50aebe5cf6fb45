"""Reads the runs that the scripts wrote: checks them, pools their seeds and names the methods they compare.

A run is a folder with `results.npz`: `timesteps [T]`, `seeds [N]`, curves `[N, T]` such as `returns`, and `meta`, a
JSON string. Whatever does not match ends the program with one sentence that names the file, and exit code 2.
"""

import json
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCHEMA = 1
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile,
              zlib.error)  # what a damaged or foreign file may raise
# Arguments that leave the method the same: runs which differ only in these share a curve.
NOT_METHOD = {"env", "seed", "num_seeds", "total_timesteps", "diagnostics", "runs_dir", "save_model", "resume",
              "checkpoint_every_minutes", "compilation_cache", "distributed", "track", "wandb_project", "wandb_mode",
              "eval_every", "eval_envs"}
NAMED = {"scorer", "double", "dueling", "follower_loss", "ablation"}  # spelled out in every method's name


def fail(message: str):
    """Ends the program with one sentence on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def write(out: Path, writer):
    """`writer(out)` in a folder made for it; one sentence where that cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writer(out)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror or error}")


def read_arrays(path: Path) -> dict:
    """The arrays of a results.npz; anything else ends the program."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        fail(f"{path} cannot be read: {error}")
    except UNREADABLE:
        fail(f"{path} cannot be read: it is damaged, or no results.npz")


@dataclass
class Run:
    """One results.npz."""

    path: Path
    meta: dict
    timesteps: np.ndarray  # [T] environment steps per seed
    seeds: np.ndarray  # [N]
    curves: dict[str, np.ndarray]  # each [N, T]

    @property
    def env(self) -> str:
        return self.meta["args"]["env"]

    @property
    def method(self) -> dict:
        """The script and the arguments that tell one method from another."""
        args = {name: value for name, value in self.meta["args"].items() if name not in NOT_METHOD}
        return {"script": self.meta["script"], "ablation": None} | args  # scripts without ablations do not write it


@dataclass
class Method:
    """One method on one environment, the seeds of all its runs pooled."""

    runs: list[Run]
    timesteps: np.ndarray  # [T] environment steps per seed
    seeds: np.ndarray  # [N]
    curves: dict[str, np.ndarray]  # each [N, T]
    details: list[str]  # what sets it apart from the plain method, for its name

    @property
    def env(self) -> str:
        return self.runs[0].env

    @property
    def args(self) -> dict:
        return self.runs[0].method

    @property
    def returns(self) -> np.ndarray:
        return self.curves["returns"]

    @property
    def algorithm(self) -> str:
        """The base algorithm, for example Dueling DDQN."""
        name = self.args["script"].removeprefix("scorer_").removesuffix("_atari").upper()
        name = name.replace("BOOTSTRAPPED_", "Bootstrapped ")
        name = name.replace("DQN", "DDQN") if self.args.get("double") else name
        return f"Dueling {name}" if self.args.get("dueling") else name

    @property
    def variant(self) -> str:
        """The method within its algorithm, for example SCORER (MSBE follower)."""
        return " ".join(["SCORER" if self.args["scorer"] else "Baseline"] + self._suffix)

    @property
    def label(self) -> str:
        """The method's full name, for example SCORER DQN (MSBE follower)."""
        return " ".join(["SCORER"] * self.args["scorer"] + [self.algorithm] + self._suffix)

    @property
    def _suffix(self) -> list[str]:
        return [f"({', '.join(self.details)})"] if self.details else []


def read_run(folder: Path) -> Run:
    """The complete run in `folder`; one that is missing, damaged, incomplete or of another schema ends the program."""
    path = folder / "results.npz"
    arrays = read_arrays(path)
    try:
        meta = json.loads(str(arrays.pop("meta")))
        timesteps, seeds, returns = arrays.pop("timesteps"), arrays.pop("seeds"), arrays.get("returns")
        schema, complete, missing = meta["schema"], meta["complete"], {"script", "args"} - meta.keys()
        missing = missing or {"env", "scorer", "total_timesteps"} - meta["args"].keys()
    except UNREADABLE as error:
        fail(f"{path} cannot be read: {error}")
    if schema != SCHEMA:
        fail(f"{path} has schema {schema}, but this reader knows only schema {SCHEMA}")
    if not complete:
        fail(f"{path} is of a run that did not finish")
    if returns is None:
        fail(f"{path} has no returns (plots/baird.py draws those of baird.py)")
    if missing:
        fail(f"{path} does not say {' and '.join(sorted(missing))}")
    if len(set(seeds.tolist())) < len(seeds) or (np.diff(timesteps) <= 0).any():
        fail(f"{path} counts a seed twice, or its timesteps do not rise")
    for name, curve in arrays.items():
        if curve.shape != (len(seeds), len(timesteps)):
            fail(f"{path} has {name} of shape {curve.shape} for {len(seeds)} seeds and {len(timesteps)} timesteps")
    for seed in seeds[np.isnan(returns[:, -1])]:
        fail(f"{path} has no return for seed {seed}: not every environment finished an episode")
    return Run(path, meta, timesteps, seeds, arrays)


def pool(runs: list[Run], details: list[str]) -> Method:
    """Runs of one method on one environment as one; any other mixture ends the program."""
    first, names, seeds = runs[0], set(runs[0].curves), set(runs[0].seeds.tolist())
    for run in runs[1:]:
        if (run.env, run.method) != (first.env, first.method):
            fail(f"{run.path} and {first.path} differ in environment or method, so they cannot share a curve")
        if not np.array_equal(run.timesteps, first.timesteps):
            fail(f"{run.path} and {first.path} have different timesteps, so they cannot share a curve")
        if both := seeds.intersection(run.seeds.tolist()):
            fail(f"{run.path} counts seed {min(both)} of the same method a second time")
        names, seeds = names & set(run.curves), seeds.union(run.seeds.tolist())
    curves = {name: np.concatenate([run.curves[name] for run in runs]) for name in sorted(names)}
    return Method(runs, first.timesteps, np.concatenate([run.seeds for run in runs]), curves, details)


def load(folders: list[Path]) -> list[Method]:
    """The methods in these run folders, on each environment; plain ones and baselines come first.

    Where runs of one script on one environment differ in an argument, its less usual values enter the names: usual is
    the most frequent one on that environment, and of equally frequent ones the most frequent on all of them."""
    if not folders:
        fail("no run folder was given")
    runs = [read_run(folder) for folder in folders]
    values, totals, groups = {}, {}, {}
    for run in runs:
        groups.setdefault((run.env, json.dumps(run.method, sort_keys=True)), []).append(run)
        for name, value in run.method.items():
            if value is not None:
                values.setdefault((run.env, run.method["script"], name), []).append(value)
        total = run.meta["args"]["total_timesteps"]
        if total != totals.setdefault(run.env, total):
            fail(f"{run.path} has {total:,} timesteps and another run on {run.env} {totals[run.env]:,}: not comparable")
    usual = {}
    for key, seen in values.items():
        everywhere = [value for other, found in values.items() if other[1:] == key[1:] for value in found]
        counts = {value: (seen.count(value), everywhere.count(value)) for value in seen}
        if len(counts) > 1 and key[2] not in NAMED:  # where none is the most usual one, all are named
            most = [value for value, count in counts.items() if count == max(counts.values())]
            usual[key] = most[0] if len(most) == 1 else None

    def details(run: Run) -> list[str]:
        args = run.method
        words = ["MSBE follower"] * (args.get("follower_loss") == "msbe")
        words += [args["ablation"].replace("-", " ")] if args.get("ablation") else []
        unusual = [(name.replace("_", " "), value) for name, value in sorted(args.items())
                   if value is not None and value != usual.get((run.env, args["script"], name), value)]
        return words + [{True: name, False: f"no {name}"}[value] if isinstance(value, bool) else f"{name} {value}"
                        for name, value in unusual]

    def order(method: Method):
        args = method.args
        return (method.env, args["script"], bool(args.get("dueling")), bool(args.get("double")), args["scorer"],
                len(method.details), [args.get(name) or 0 for *_, name in sorted(usual)], method.details)

    return sorted((pool(group, details(group[0])) for group in groups.values()), key=order)


def by_env(methods: list[Method]) -> dict[str, list[Method]]:
    """The methods on each environment, order kept."""
    return {env: [method for method in methods if method.env == env] for env in dict.fromkeys(m.env for m in methods)}


def by_algorithm(methods: list[Method]) -> dict[str, list[Method]]:
    """The methods of each base algorithm, order kept."""
    names = dict.fromkeys(method.algorithm for method in methods)
    return {name: [method for method in methods if method.algorithm == name] for name in names}

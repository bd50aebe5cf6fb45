"""Reads the runs that the scripts wrote: checks them, pools their seeds and names the methods.

A run is a folder with `results.npz`: `timesteps [T]`, `seeds [N]`, curves `[N, T]` such as
`returns`, and `meta`, a JSON string. What cannot be used is left out, and one line on standard
error says which file that is and why; if nothing is left, the program ends.
"""

import json
import re
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from command import fail
from command import write  # noqa: F401, for the tools that read and write
from stats import is_final

SCHEMA = 1

# Arguments that leave the method the same: runs that differ only in these share a curve.
NOT_METHOD = {
    "env",
    "seed",
    "num_seeds",
    "total_timesteps",
    "diagnostics",
    "runs_dir",
    "save_model",
    "resume",
    "checkpoint_every_minutes",
    "compilation_cache",
    "distributed",
    "track",
    "wandb_project",
    "wandb_mode",
    "eval_every",
    "eval_envs",
}
# Arguments that only SCORER or an ablation has, so that a baseline is alike in all others.
GAME = {
    "scorer",
    "follower_loss",
    "follower_learning_rate",
    "leader_decay_power",
    "ablation",
    "follower_importance_weights",
}
NAMED = {"scorer", "double", "dueling", "follower_loss", "ablation"}  # spelled out in every name

# What the tools here need of a record.
NEEDED_META = {
    "script": "text",
    "args": "a group of arguments",
    "complete": "true or false",
    "device": "text",
    "num_devices": "a positive number",
    "seconds": "a positive number",
}
NEEDED_ARGS = {"env": "text", "scorer": "true or false", "total_timesteps": "a positive number"}
OPTIONAL_ARGS = {
    "double": "true or false",
    "dueling": "true or false",
    "ablation": "text",
    "follower_loss": "text",
    "follower_learning_rate": "a positive number",
    "learning_rate": "a positive number",
}


class RecordError(Exception):
    """Says in one sentence, which names the file, why a record cannot be used."""


# ------------------------------------------ One record --------------------------------------------


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
        """The environment."""
        return self.meta["args"]["env"]

    @property
    def total_timesteps(self) -> int:
        """Environment steps that the run was to make."""
        return self.meta["args"]["total_timesteps"]

    @property
    def method(self) -> dict:
        """The script and the arguments that tell one method from another; not what is unset."""
        args = {
            name: value
            for name, value in self.meta["args"].items()
            if name not in NOT_METHOD and value is not None
        }
        return {"script": self.meta["script"]} | args

    @property
    def method_key(self) -> tuple:
        """The environment and the method as one value that can be compared and looked up."""
        return (self.env, *sorted(self.method.items()))

    @property
    def when(self) -> str:
        """The time at the end of the folder's name, or nothing."""
        found = re.search(r"__(\d{8}-\d{6}(-\d+)?)$", self.path.parent.name)
        return found[1] if found else ""


def read_run(folder: Path, incomplete=False) -> Run:
    """Returns the run in `folder`; raises RecordError unless it is whole and as it must be.

    With `incomplete`, a run that has not finished is taken as well.
    """
    path = folder / "results.npz"
    if (folder / "args.json").is_file() and not path.exists():
        raise RecordError(f"{path} does not exist: nothing of this run was saved so far")
    arrays = read_arrays(path)
    meta = read_meta(path, arrays)
    if meta["script"] == "baird":
        raise RecordError(f"{path} is of baird.py, whose runs have no returns; see plots/baird.py")
    check_values(path, meta, NEEDED_META)
    if not (meta["complete"] or incomplete):
        raise RecordError(f"{path} is of a run that did not finish")
    check_arguments(path, meta["args"])
    timesteps, seeds = read_axes(path, arrays)
    for name, curve in arrays.items():
        check_curve(path, name, curve, (len(seeds), len(timesteps)))
    if "returns" not in arrays:
        raise RecordError(f"{path} has no returns")
    check_returns(path, timesteps, seeds, arrays["returns"])
    return Run(path, meta, timesteps, seeds, arrays)


def read_arrays(path: Path) -> dict:
    """Returns the arrays of a results.npz; raises RecordError where it is not one."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error):
        pass
    except (zipfile.BadZipFile, NotImplementedError, MemoryError):
        pass
    raise RecordError(f"{path} cannot be read: it is damaged, or no results.npz")


def read_meta(path: Path, arrays: dict) -> dict:
    """Takes `meta` out of the arrays; raises RecordError unless it is of this reader's schema."""
    if "meta" not in arrays:
        raise RecordError(f"{path} cannot be read: it has no meta")
    try:
        meta = json.loads(str(arrays.pop("meta")))
    except ValueError:
        meta = None
    if not isinstance(meta, dict):
        raise RecordError(f"{path} has a meta that is no JSON object")
    if "schema" not in meta:
        raise RecordError(f"{path} does not say its schema")
    if type(meta["schema"]) is not int or meta["schema"] != SCHEMA:
        found = json.dumps(meta["schema"])
        raise RecordError(f"{path} is with schema {found}; this reader knows only schema {SCHEMA}")
    check_values(path, meta, {"script": "text"})
    return meta


def is_kind(value, kind: str) -> bool:
    """Returns whether a value from JSON is of one of the kinds that the tables above name."""
    if kind == "text":
        return isinstance(value, str) and value != ""
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a group of arguments":
        return isinstance(value, dict)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < np.inf


def check_values(path: Path, values: dict, kinds: dict[str, str]):
    """Raises RecordError unless each of these names has a value of its kind."""
    missing = sorted(kinds.keys() - values.keys())
    if missing:
        raise RecordError(f"{path} does not say {' and '.join(missing)}")
    for name, kind in kinds.items():
        if not is_kind(values[name], kind):
            found = json.dumps(values[name])
            raise RecordError(f"{path} has {name} {found:.60}; needed: {kind}")


def check_arguments(path: Path, args: dict):
    """Raises RecordError unless the arguments are single values of the right kinds."""
    check_values(path, args, NEEDED_ARGS)
    given = {name: kind for name, kind in OPTIONAL_ARGS.items() if args.get(name) is not None}
    check_values(path, args, given)
    for name, value in args.items():
        if isinstance(value, list | dict):
            found = json.dumps(value)
            raise RecordError(f"{path} has {name} {found:.60}; needed: one value")
        if isinstance(value, float) and not np.isfinite(value):
            raise RecordError(f"{path} has {name} {value}; needed: a finite number")


def read_axes(path: Path, arrays: dict):
    """Takes timesteps [T] and seeds [N] out of the arrays; raises RecordError for what is neither."""
    for name in ("timesteps", "seeds"):
        if name not in arrays:
            raise RecordError(f"{path} has no {name}")
    timesteps = arrays.pop("timesteps")
    seeds = arrays.pop("seeds")
    if seeds.ndim != 1 or len(seeds) == 0 or seeds.dtype.kind not in "iu":
        raise RecordError(f"{path} has {describe(seeds)} as seeds; needed: a list of whole numbers")
    if timesteps.ndim != 1 or timesteps.dtype.kind not in "iuf":
        raise RecordError(
            f"{path} has {describe(timesteps)} as timesteps; needed: a list of numbers"
        )
    if len(timesteps) == 0:
        raise RecordError(f"{path} has no points")
    if not (np.isfinite(timesteps).all() and (timesteps >= 0).all()):
        raise RecordError(f"{path} has timesteps that are negative or no number")
    if len(set(seeds.tolist())) < len(seeds):
        raise RecordError(f"{path} counts a seed twice")
    if (np.diff(timesteps.astype(float)) <= 0).any():
        raise RecordError(f"{path} has timesteps that do not rise")
    return timesteps, seeds


def describe(array: np.ndarray) -> str:
    """Returns an array's shape and what it holds, in words."""
    kinds = {"U": "text", "S": "text", "c": "complex numbers", "b": "truth values", "O": "objects"}
    kind = kinds.get(array.dtype.kind, "numbers")
    return f"{kind} of shape {array.shape}"


def check_curve(path: Path, name: str, curve: np.ndarray, shape: tuple[int, int]):
    """Raises RecordError unless a curve is of numbers [seeds, points], each finite or missing."""
    if curve.shape != shape:
        raise RecordError(
            f"{path} has {name} of shape {curve.shape} for {shape[0]} seeds and {shape[1]} timesteps"
        )
    if curve.dtype.kind not in "iuf":
        raise RecordError(f"{path} has {describe(curve)} as {name}; needed: numbers")
    if np.isinf(curve).any():
        raise RecordError(f"{path} has {name} that are infinite")


def check_returns(path: Path, timesteps, seeds, returns):
    """Raises RecordError where a seed has no return, or too few of them, at the end of its run."""
    for seed in seeds[np.isnan(returns[:, -1])]:
        raise RecordError(
            f"{path} has no return for seed {seed}: not every environment finished an episode"
        )
    missing = np.isnan(returns[:, is_final(timesteps)]).mean(axis=1)
    for seed in seeds[missing > 0.5]:
        raise RecordError(f"{path} lacks most returns of seed {seed} in the last 10 % of training")


# ------------------------------------- Which records to take --------------------------------------


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Returns the run folders that these paths are or hold, at any depth, each once."""
    found = {}
    for path in paths:
        files = [*path.rglob("results.npz"), *path.rglob("args.json")] if path.is_dir() else []
        inside = sorted({file.parent for file in files})
        for folder in inside or [path]:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def read_runs(
    paths: Iterable[Path],
    misfit: Callable[[Run], str | None] | None = None,
    incomplete: bool = False,
) -> list[Run]:
    """Returns the runs in these folders that can stand in one figure, and says what was left out.

    `misfit` gives the reason why a figure has no place for a run, after the file's name, or None.
    """
    folders = find_runs(paths)
    if not folders:
        fail("no run folder was given")
    runs = []
    misfits = []
    left_out = []
    for folder in folders:
        try:
            run = read_run(folder, incomplete)
            reason = misfit(run) if misfit else None
            if reason:
                misfits.append(f"{run.path} {reason}")
            else:
                runs.append(run)
        except RecordError as error:
            left_out.append(str(error))
    left_out = misfits + left_out  # the figure's own reasons first
    for choose in (drop_other_kinds, drop_other_lengths, drop_other_points, drop_repeats):
        runs, reasons = choose(runs)
        left_out += reasons
    if not runs:
        others = f" (nor can {len(left_out) - 1} others be used)" if len(left_out) > 1 else ""
        fail(left_out[0] + others)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return runs


def kind_of(value) -> str:
    """Returns what an argument is, in words."""
    if isinstance(value, bool):
        return "true or false"
    return "text" if isinstance(value, str) else "a number"


def drop_other_kinds(runs: list[Run]):
    """Leaves out runs one of whose arguments is of another kind than in most runs of the script."""
    seen = {}
    for run in runs:
        for name, value in run.method.items():
            seen.setdefault((run.method["script"], name), []).append(kind_of(value))
    kept = []
    reasons = []
    for run in runs:
        odd = None
        for name, value in run.method.items():
            usual = Counter(seen[run.method["script"], name]).most_common(1)[0][0]
            if kind_of(value) != usual:
                odd = f"{run.path} has {name} {json.dumps(value)}, where others have {usual}"
        if odd:
            reasons.append(odd)
        else:
            kept.append(run)
    return kept, reasons


def drop_other_lengths(runs: list[Run]):
    """Leaves out runs that were not to train as long as most on their environment.

    Of two lengths that are equally frequent the longer stays.
    """
    lengths = {}
    for run in runs:
        lengths.setdefault(run.env, []).append(run.total_timesteps)
    kept = []
    reasons = []
    for run in runs:
        counts = Counter(lengths[run.env])
        usual = max(counts, key=lambda length: (counts[length], length))
        if run.total_timesteps == usual:
            kept.append(run)
        else:
            reasons.append(
                f"{run.path} trains for {run.total_timesteps:,} steps, which is not comparable with "
                f"the {usual:,} of the others on {run.env}"
            )
    return kept, reasons


def drop_other_points(runs: list[Run]):
    """Leaves out runs whose timesteps differ from those of most runs of the same method."""
    grids = {}
    for run in runs:
        grids.setdefault(run.method_key, []).append(tuple(run.timesteps.tolist()))
    kept = []
    reasons = []
    for run in runs:
        counts = Counter(grids[run.method_key])
        usual = max(counts, key=lambda grid: (counts[grid], len(grid)))
        if tuple(run.timesteps.tolist()) == usual:
            kept.append(run)
        else:
            reasons.append(f"{run.path} has different timesteps than other runs of the same method")
    return kept, reasons


def drop_repeats(runs: list[Run]):
    """Leaves out runs with a seed that a newer run of the same method has as well."""
    taken = {}
    reasons = {}
    for run in sorted(runs, key=lambda run: run.when, reverse=True):
        seen = taken.setdefault(run.method_key, {})
        both = sorted(seen.keys() & set(run.seeds.tolist()))
        if both:
            reasons[id(run)] = (
                f"{run.path} counts seed {both[0]} of the same method a second time, "
                f"after {seen[both[0]]}"
            )
        else:
            seen |= dict.fromkeys(run.seeds.tolist(), run.path)
    kept = [run for run in runs if id(run) not in reasons]
    return kept, list(reasons.values())


# -------------------------------------------- Methods ---------------------------------------------


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
        """The environment."""
        return self.runs[0].env

    @property
    def args(self) -> dict:
        """The script and the arguments that tell the method from others."""
        return self.runs[0].method

    @property
    def returns(self) -> np.ndarray:
        """Returns [N, T]."""
        return self.curves["returns"]

    @property
    def algorithm(self) -> str:
        """The base algorithm, for example Dueling DDQN."""
        name = self.args["script"].removeprefix("scorer_").removesuffix("_atari").upper()
        name = name.replace("BOOTSTRAPPED_", "Bootstrapped ")
        if self.args.get("double"):
            name = name.replace("DQN", "DDQN")
        return f"Dueling {name}" if self.args.get("dueling") else name

    @property
    def variant(self) -> str:
        """The method within its algorithm, for example SCORER (MSBE follower)."""
        name = "SCORER" if self.args["scorer"] else "Baseline"
        return f"{name}{self._suffix}"

    @property
    def label(self) -> str:
        """The method's full name, for example SCORER DQN (MSBE follower)."""
        name = f"SCORER {self.algorithm}" if self.args["scorer"] else self.algorithm
        return f"{name}{self._suffix}"

    @property
    def _suffix(self) -> str:
        """The details in brackets."""
        return f" ({', '.join(self.details)})" if self.details else ""


def pool(runs: list[Run], details: list[str]) -> Method:
    """Returns runs of one method on one environment as one; any other mixture ends the program."""
    first = runs[0]
    names = set(first.curves)
    for run in runs[1:]:
        if run.method_key != first.method_key:
            fail(f"{run.path} and {first.path} differ in environment or method: no common curve")
        names &= set(run.curves)
    curves = {name: np.concatenate([run.curves[name] for run in runs]) for name in sorted(names)}
    seeds = np.concatenate([run.seeds for run in runs])
    return Method(runs, first.timesteps, seeds, curves, details)


def load(
    paths: Iterable[Path],
    misfit: Callable[[Run], str | None] | None = None,
    incomplete: bool = False,
) -> list[Method]:
    """Returns the methods in these run folders, on each environment; plain ones come first."""
    runs = read_runs(paths, misfit, incomplete)
    usual = usual_values(runs)
    groups = {}
    for run in runs:
        groups.setdefault(run.method_key, []).append(run)
    methods = [pool(group, name_details(group[0], usual)) for group in groups.values()]
    varied = sorted({name for _, _, name in usual})
    return sorted(methods, key=lambda method: order_of(method, varied))


def usual_values(runs: list[Run]) -> dict:
    """Returns the usual value of each argument that varies, by (environment, script, argument).

    Usual is the most frequent one on the environment, and of equally frequent ones the most
    frequent on all of them; None where that decides nothing, so that all are named.
    """
    values = {}
    everywhere = {}
    for run in runs:
        script = run.method["script"]
        for name, value in run.method.items():
            values.setdefault((run.env, script, name), []).append(value)
            everywhere.setdefault((script, name), []).append(value)
    usual = {}
    for (env, script, name), seen in values.items():
        counts = {v: (seen.count(v), everywhere[script, name].count(v)) for v in set(seen)}
        if len(counts) > 1 and name not in NAMED:
            most = [value for value, count in counts.items() if count == max(counts.values())]
            usual[env, script, name] = most[0] if len(most) == 1 else None
    return usual


def name_details(run: Run, usual: dict) -> list[str]:
    """Returns the words that a method's name has in brackets."""
    args = run.method
    words = []
    if args.get("follower_loss") == "msbe":
        words.append("MSBE follower")
    if args.get("ablation"):
        words.append(args["ablation"].replace("-", " "))
    for name, value in sorted(args.items()):
        if value != usual.get((run.env, args["script"], name), value):
            words.append(describe_argument(name.replace("_", " "), value))
    return words


def describe_argument(name: str, value) -> str:
    """Returns an argument in words: batch size 128, no bootstrap at timeout."""
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


def order_of(method: Method, varied: list[str]) -> tuple:
    """Returns what methods are sorted by: plain ones first, then by the arguments that vary."""
    args = method.args
    values = [(kind_of(args[name]), args[name]) if name in args else () for name in varied]
    return (
        method.env,
        args["script"],
        args.get("dueling", False),
        args.get("double", False),
        args["scorer"],
        len(method.details),
        values,
        method.details,
    )


def by_env(methods: list[Method]) -> dict[str, list[Method]]:
    """Returns the methods on each environment, order kept."""
    groups = {}
    for method in methods:
        groups.setdefault(method.env, []).append(method)
    return groups


def by_algorithm(methods: list[Method]) -> dict[str, list[Method]]:
    """Returns the methods of each base algorithm, order kept."""
    groups = {}
    for method in methods:
        groups.setdefault(method.algorithm, []).append(method)
    return groups

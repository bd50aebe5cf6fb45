"""Baird's counterexample: Bellman error and value error of every method in one run.

python plots/baird.py runs/baird__Baird__sampled-balanced__s0__... --out baird.png
"""

from pathlib import Path

import command
import numpy as np
import stats
import style
from command import fail
from records import RecordError
from records import check_values
from records import find_runs
from records import read_arrays
from records import read_axes
from records import read_meta
from tyro.conf import Positional

SHOWN = 1e-8, 1e6  # a run that leaves upwards has diverged
# Methods that look as in the other figures.
SAME_AS = {
    "linear TD": "Baseline",
    "SCORER, MSBE follower": "SCORER (MSBE follower)",
    "inverted roles": "SCORER (inverted roles)",
}
TITLES = {"loss": "Bellman error", "value_error": "Value error"}


def main(
    runs: Positional[list[Path]],
    out: Path = Path("baird.png"),
    width: float | None = None,
):
    """Baird's counterexample: Bellman error and value error of every method in one run.

    Args:
        runs: run folder of baird.py, or a folder that holds one; with several seeds, lines are
            medians with 95 % bootstrap intervals.
        out: picture to write; its ending names the format.
        width: inches; 6.5, a page, unless given.
    """
    style.check_options(out)
    methods, timesteps, errors = choose_run([runs] if isinstance(runs, Path) else runs)
    names = [SAME_AS.get(method, method) for method in methods]
    looks = style.choose_looks(names)
    figure, axes = style.make_panels(2, width)
    for ax, (name, title) in zip(axes, TITLES.items()):
        shown = np.clip(errors[name], SHOWN[0] / 10, SHOWN[1] * 10)
        for method, same_as, curves in zip(methods, names, shown):
            estimate = stats.bootstrap(np.median, curves)
            look = looks[same_as] | {"label": style.plain(method)}
            style.draw_band(ax, timesteps, *estimate, **look)
        ax.set(title=title, xscale="log", yscale="log", xlim=(1, timesteps[-1]), ylim=SHOWN)
    style.label_axes(axes, "Updates", "Root mean square")
    seeds = len(errors["loss"][0])
    several = f"median of {seeds} seeds; shaded: 95 % bootstrap interval"
    style.save(figure, out, several if seeds > 1 else "one run")


def choose_run(paths: list[Path]):
    """Returns what `read` does of the only run of baird.py in these folders; else ends the program."""
    found = {}
    reasons = []
    for folder in find_runs(paths):
        try:
            found[folder] = read(folder)
        except RecordError as error:
            reasons.append(str(error))
    if len(found) > 1:
        fail(f"{' and '.join(str(folder) for folder in found)} have curves: give one run")
    if not found:
        fail(reasons[0] if reasons else "no run folder was given")
    return next(iter(found.values()))


def read(folder: Path):
    """Returns methods' names, updates [T] and errors by name [methods, seeds, T] of a run.

    Raises RecordError where it is not a whole run of baird.py with curves.
    """
    path = folder / "results.npz"
    arrays = read_arrays(path)
    meta = read_meta(path, arrays)
    if meta["script"] != "baird":
        raise RecordError(f"{path} is of {meta['script']}.py; needed: a run of baird.py")
    check_values(path, meta, {"args": "a group of arguments", "complete": "true or false"})
    methods = meta.get("methods")
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise RecordError(f"{path} does not name its methods")
    if len(set(methods)) < len(methods):
        raise RecordError(f"{path} names a method twice")
    if meta["args"].get("table") or not meta["complete"]:
        raise RecordError(f"{path} has no curves: it is of --table, or did not finish")
    timesteps, seeds = read_axes(path, arrays)
    errors = {name: arrays[name] for name in TITLES if name in arrays}
    shape = (len(methods), len(seeds), len(timesteps))
    for name in TITLES:
        if name not in errors:
            raise RecordError(f"{path} cannot be read: it has no {name}")
        curves = errors[name]
        if curves.shape != shape or curves.dtype.kind != "f" or not (curves >= 0).all():
            raise RecordError(
                f"{path} has {name} of shape {curves.shape}; needed: {shape}, methods, seeds and "
                "points, numbers of 0 or more"
            )
    return methods, timesteps, errors


if __name__ == "__main__":
    command.run(main)

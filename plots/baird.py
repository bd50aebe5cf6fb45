"""Baird's counterexample: Bellman error and value error of every method in one run, both axes logarithmic.

    python plots/baird.py runs/baird__Baird__sampled-balanced__s0__... --out baird.png
"""

import json
from pathlib import Path

import numpy as np
import stats
import style
import tyro
from records import SCHEMA, UNREADABLE, fail, read_arrays
from tyro.conf import Positional

SHOWN = 1e-8, 1e6  # a run that leaves upwards has diverged
LOOKS = {"linear TD": (style.BASELINE, "-"), "SCORER": (style.SCORER, "-")}


def read(run: Path):
    """Methods' names, updates [T] and both errors [2, methods, seeds, T] of a run of baird.py; or one sentence."""
    path = run / "results.npz"
    arrays = read_arrays(path)
    try:
        meta = json.loads(str(arrays["meta"]))
        if (found := [meta["script"], meta["schema"]]) != ["baird", SCHEMA]:
            fail(f"{path} is of {found[0]} with schema {found[1]}; needed: baird with schema {SCHEMA}")
        methods, curves = meta["methods"], meta["complete"] and not meta["args"]["table"]
        timesteps, seeds, loss, value_error = (arrays[name] for name in ("timesteps", "seeds", "loss", "value_error"))
        shape = len(methods), len(seeds), len(timesteps)
        rise = (np.diff(timesteps) > 0).all()
    except UNREADABLE as error:
        fail(f"{path} cannot be read: {error}")
    if not curves:
        fail(f"{path} has no curves: it is of --table, or of a run that did not finish")
    for name, curve in dict(loss=loss, value_error=value_error).items():
        if curve.shape != shape or curve.dtype.kind != "f" or not (curve >= 0).all():
            fail(f"{path} has {name} of shape {curve.shape}; needed: {shape}, methods, seeds and points, 0 or more")
    if not rise or len(set(methods)) < len(methods):
        fail(f"{path} names a method twice, or its timesteps do not rise")
    return methods, timesteps, np.stack([loss, value_error])


def main(run: Positional[Path], out: Path = Path("baird.png")):
    """Baird's counterexample: Bellman error and value error of every method in one run, both axes logarithmic.

    Args:
        run: run folder of baird.py; with several seeds, lines are medians with 95 % bootstrap intervals.
        out: picture to write; its ending names the format.
    """
    methods, timesteps, errors = read(run)
    figure, axes = style.panels(1, 2, out, smooth=1)
    others = iter(style.OTHERS * len(methods))
    looks = {name: LOOKS.get(name) or next(others) for name in methods}
    titles = "Root mean squared Bellman error", "Root mean squared value error"
    for ax, title, panel in zip(axes[0], titles, np.clip(errors, SHOWN[0] / 10, SHOWN[1] * 10)):
        for (name, (color, dashes)), curves in zip(looks.items(), panel):
            estimate = stats.bootstrap(np.median, curves)
            style.draw_band(ax, timesteps, *estimate, color=color, linestyle=dashes, label=name)
        ax.set(title=title, xlabel="Updates", xscale="log", yscale="log", xlim=(1, timesteps[-1]), ylim=SHOWN)
    style.save(figure, out)


if __name__ == "__main__":
    tyro.cli(main)

"""Representation over training: return, norm of all parameters, and effective rank of the penultimate features.

    python plots/representation.py runs/* --out representation.png
"""

from pathlib import Path

import numpy as np
import stats
import style
import tyro
from records import fail, load
from tyro.conf import Positional


def main(runs: Positional[list[Path]], out: Path = Path("representation.png"), smooth: int = 50):
    """Representation over training: return, norm of all parameters, effective rank of the penultimate features.

    Args:
        runs: run folders of one environment, made with --diagnostics.
        out: picture to write; its ending names the format.
        smooth: recorded points in the rolling mean of the return.
    """
    methods = load(runs)
    for method in methods:
        if method.env != methods[0].env:
            fail(f"{method.runs[0].path} is of {method.env} and others are of {methods[0].env}: give one environment")
        if "srank" not in method.curves:
            fail(f"{method.runs[0].path} or a run pooled with it has no srank: it was made without --diagnostics")
    look = style.looks(methods)
    figure, axes = style.panels(1, 3, out, smooth)
    for method in methods:
        norm = np.hypot(method.curves["perception_norm"], method.curves["control_norm"])
        style.draw_curve(axes[0, 0], method.timesteps, stats.bootstrap(stats.iqm, method.returns), smooth,
                         **look[method.label])
        for ax, curve in zip(axes[0, 1:], (norm, method.curves["srank"])):
            seen = np.isfinite(curve).all(axis=0)  # the scripts take these only now and then
            estimate = stats.bootstrap(stats.iqm, curve[:, seen])
            style.draw_curve(ax, method.timesteps[seen], estimate, 1, **look[method.label])
    for ax, name in zip(axes[0], ("IQM return", "Parameter norm", "Srank")):
        ax.set(title=name, xlabel="Steps (millions)")
    axes[0, 0].set_ylabel(methods[0].env)
    style.save(figure, out)


if __name__ == "__main__":
    tyro.cli(main)

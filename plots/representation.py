"""Representation over training: return, norm of all parameters, and effective rank of the features.

python plots/representation.py runs/*Breakout* --out representation.png
"""

from pathlib import Path

import command
import numpy as np
import style
from command import fail
from records import Method
from records import Run
from records import load
from tyro.conf import Positional

CURVES = ("srank", "perception_norm", "control_norm")  # as --diagnostics records them


def main(
    runs: Positional[list[Path]],
    out: Path = Path("representation.png"),
    smooth: float = 0.05,
    width: float | None = None,
):
    """Representation over training: return, norm of all parameters, effective rank of the features.

    Args:
        runs: run folders of one environment, made with --diagnostics, or folders that hold them.
        out: picture to write; its ending names the format.
        smooth: share of the steps over which a point of the return's curve is the mean.
        width: inches; 6.5, a page, unless given.
    """
    style.check_options(out, smooth)
    methods = load(runs, misfit=lacks_diagnostics)
    check_same(methods)
    looks, note = style.label_methods(methods)
    figure, axes = style.make_panels(3, width)
    style.draw_returns(axes[0], methods, looks, smooth)
    for method in methods:
        norm = np.hypot(method.curves["perception_norm"], method.curves["control_norm"])
        look = looks[method.variant]
        style.draw_known(axes[1], method.timesteps, norm, **look)
        style.draw_known(axes[2], method.timesteps, method.curves["srank"], **look)
    for ax in axes:
        ax.set_xlabel("Steps (millions)")
    axes[0].set_ylabel(style.return_label(methods, smooth))
    axes[1].set_ylabel(style.return_label(methods, 0, of="parameter norm"))
    axes[2].set_ylabel(style.return_label(methods, 0, of="srank"))
    axes[2].set_ylim(0, 1.05 * max(np.nanmax(method.curves["srank"]) for method in methods))
    figure.suptitle(style.env_title(methods[0].env))
    style.save(figure, out, f"{methods[0].algorithm}; {note}")


def lacks_diagnostics(run: Run) -> str | None:
    """Returns why a run has no place here, or None."""
    missing = [name for name in CURVES if name not in run.curves]
    return f"has no {missing[0]}: it was made without --diagnostics" if missing else None


def check_same(methods: list[Method]):
    """Ends in one sentence where methods are of several environments or algorithms."""
    first = methods[0]
    for method in methods:
        mine = method.env, method.algorithm
        if mine != (first.env, first.algorithm):
            fail(
                f"{method.runs[0].path} is of {' and '.join(mine)}, {first.runs[0].path} of "
                f"{first.env} and {first.algorithm}: give one environment and one algorithm, as "
                f"runs/scorer_dqn__{first.env}__*"
            )


if __name__ == "__main__":
    command.run(main)

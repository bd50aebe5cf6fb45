"""Ablations: normalised IQM return over all environments, then the return on each.

python plots/ablations.py runs/*Asterix* runs/*Breakout* --out ablations.png
"""

from pathlib import Path

import command
import numpy as np
import stats
import style
from command import fail
from records import Method
from records import by_env
from records import load
from tyro.conf import Positional


def main(
    runs: Positional[list[Path]],
    out: Path = Path("ablations.png"),
    smooth: float = 0.05,
    width: float | None = None,
):
    """Ablations: normalised IQM return over all environments (of several), then the return on each.

    Args:
        runs: run folders, or folders that hold them, of every method on every environment.
        out: picture to write; its ending names the format.
        smooth: share of the steps over which a point of a curve is the mean.
        width: inches; 3.25, a column, for one panel and 6.5, a page, for several.
    """
    style.check_options(out, smooth)
    methods = load(runs)
    check_algorithm(methods)
    looks, note = style.label_methods(methods)
    envs = by_env(methods)
    several = len(envs) > 1  # the aggregate of one environment would be that environment again
    figure, axes = style.make_panels(len(envs) + (1 if several else 0), width)
    label = style.return_label(methods, smooth)
    if several:
        draw_aggregate(axes[0], envs, looks, smooth)
        label = f"{label}\n(first panel: normalised)"
    for ax, (env, group) in zip(axes[-len(envs) :], envs.items()):
        style.draw_returns(ax, group, looks, smooth)
        ax.set_title(style.env_title(env))
    style.label_axes(axes, "Steps (millions)", label)
    style.save(figure, out, f"{methods[0].algorithm}; {note}")


def check_algorithm(methods: list[Method]):
    """Ends in one sentence where the methods are of several algorithms."""
    for method in methods:
        if method.algorithm != methods[0].algorithm:
            fail(
                f"{method.runs[0].path} is of {method.algorithm} and {methods[0].runs[0].path} of "
                f"{methods[0].algorithm}: give the runs of one algorithm, as runs/scorer_dqn__*"
            )


def draw_aggregate(ax, envs: dict[str, list[Method]], looks: dict, smooth: float):
    """Draws the mean over environments of each method's IQM, divided by each one's best."""
    first = next(iter(envs.values()))[0]
    scales = [stats.scale([method.returns for method in group]) for group in envs.values()]
    for env, scale in zip(envs, scales):
        if scale <= 0:
            fail(f"the best return on {env} is {scale:.2f}; only positive ones can be normalised")
    methods = [method for group in envs.values() for method in group]
    for method in methods:
        if not np.array_equal(method.timesteps, first.timesteps):
            fail(
                f"{method.runs[0].path} and {first.runs[0].path} have different timesteps, so there "
                "is no aggregate: give runs of one length"
            )
    for name, look in looks.items():
        own = [method for method in methods if method.variant == name]
        if len(own) < len(envs):
            fail(
                f"{own[0].label} has runs on {len(own)} of {len(envs)} environments, so there is no "
                "aggregate: give every method's runs on every environment, or those on one"
            )
        estimate = stats.aggregate([method.returns for method in own], scales)
        style.draw_curve(ax, first.timesteps, estimate, smooth, **look)
    ax.set_title("All environments")


if __name__ == "__main__":
    command.run(main)

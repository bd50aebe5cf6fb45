"""Learning curves: IQM return of SCORER and baseline, in rows of four environments, for each algorithm.

    python plots/learning_curves.py runs/* --out learning_curves.png
"""

from pathlib import Path

import stats
import style
import tyro
from records import by_algorithm, by_env, load
from tyro.conf import Positional


def main(runs: Positional[list[Path]], out: Path = Path("learning_curves.png"), smooth: int = 50):
    """Learning curves: IQM return of SCORER and baseline, in rows of four environments, for each algorithm.

    Args:
        runs: run folders.
        out: picture to write; its ending names the format.
        smooth: recorded points in the rolling mean.
    """
    methods = load(runs)
    look = style.looks(methods, name="variant")
    rows = []  # of one algorithm each: its name, and up to four environments with their methods
    for algorithm, family in by_algorithm(methods).items():
        envs = list(by_env(family).items())
        rows += [(algorithm, envs[first : first + 4]) for first in range(0, len(envs), 4)]
    figure, axes = style.panels(len(rows), max(len(envs) for _, envs in rows), out, smooth)
    for (algorithm, envs), row in zip(rows, axes):
        for ax, (env, group) in zip(row, envs):
            for method in group:
                estimate = stats.bootstrap(stats.iqm, method.returns)
                style.draw_curve(ax, method.timesteps, estimate, smooth, **look[method.variant])
            ax.set(title=env, xlabel="Steps (millions)")
        row[0].set_ylabel(f"{algorithm}\nIQM return")
        for ax in row[len(envs):]:
            ax.remove()
    style.save(figure, out)


if __name__ == "__main__":
    tyro.cli(main)

"""Learning curves: IQM return of SCORER and baseline, a row per algorithm and a column per environment.

    python plots/learning_curves.py runs/* --out learning_curves.png
"""

from pathlib import Path

import stats
import style
import tyro
from records import by_algorithm, by_env, load
from tyro.conf import Positional


def main(runs: Positional[list[Path]], out: Path = Path("learning_curves.png"), smooth: int = 50):
    """Learning curves: IQM return of SCORER and baseline, a row per algorithm and a column per environment.

    Args:
        runs: run folders.
        out: picture to write; its ending names the format.
        smooth: recorded points in the rolling mean.
    """
    methods = load(runs)
    algorithms, envs = by_algorithm(methods), by_env(methods)
    look = style.looks(methods, name="variant")
    figure, axes = style.panels(len(algorithms), len(envs), out, smooth)
    for row, algorithm in enumerate(algorithms):
        for column, env in enumerate(envs):
            ax = axes[row, column]
            for method in (method for method in envs[env] if method.algorithm == algorithm):
                estimate = stats.bootstrap(stats.iqm, method.returns)
                style.draw_curve(ax, method.timesteps, estimate, smooth, **look[method.variant])
            ax.set_title(env if row == 0 else "")
        axes[row, 0].set_ylabel(f"{algorithm}\nIQM return")
    for ax in axes[-1]:
        ax.set_xlabel("Steps (millions)")
    style.save(figure, out)


if __name__ == "__main__":
    tyro.cli(main)

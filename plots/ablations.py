"""Ablations: normalised IQM return over all environments, then the IQM return on each.

    python plots/ablations.py runs/* --out ablations.png
"""

from pathlib import Path

import numpy as np
import stats
import style
import tyro
from records import by_env, fail, load
from tyro.conf import Positional


def main(runs: Positional[list[Path]], out: Path = Path("ablations.png"), smooth: int = 50):
    """Ablations: normalised IQM return over all environments (of several), then the IQM return on each.

    Args:
        runs: run folders, of every method on every environment.
        out: picture to write; its ending names the format.
        smooth: recorded points in the rolling mean.
    """
    methods = load(runs)
    envs, look = by_env(methods), style.looks(methods)
    timesteps = methods[0].timesteps
    several = len(envs) > 1  # the aggregate of one environment would be that environment again
    panels = len(envs) + several
    columns = min(3, panels)
    figure, axes = style.panels(-(-panels // columns), columns, out, smooth)
    each = list(axes.flat)
    if several:
        whole = each.pop(0)
        scales = [stats.scale([method.returns for method in group]) for group in envs.values()]
        for env, scale in zip(envs, scales):
            if scale <= 0:
                fail(f"the best return on {env} is {scale:.2f}, and only positive ones can be normalised")
        for method in methods:
            if not np.array_equal(method.timesteps, timesteps):
                fail(f"{method.runs[0].path} and {methods[0].runs[0].path} have different timesteps: no aggregate")
        for label in look:
            curves = [method.returns for method in methods if method.label == label]
            if len(curves) < len(envs):
                fail(f"{label} has runs on {len(curves)} of {len(envs)} environments: no aggregate")
            style.draw_curve(whole, timesteps, stats.aggregate(curves, scales), smooth, **look[label])
        whole.set(title="All environments", xlabel="Steps (millions)", ylabel="Normalised IQM return")
    for ax, (env, group) in zip(each, envs.items()):
        for method in group:
            style.draw_curve(ax, timesteps, stats.bootstrap(stats.iqm, method.returns), smooth, **look[method.label])
        ax.set(title=env, xlabel="Steps (millions)", ylabel="IQM return")
    for ax in each[len(envs):]:
        ax.remove()
    style.save(figure, out)


if __name__ == "__main__":
    tyro.cli(main)

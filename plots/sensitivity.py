"""Sensitivity to the follower's learning rate: final IQM return against the rate, and the learning curves.

    python plots/sensitivity.py runs/* --out sensitivity.png
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import stats
import style
import tyro
from records import by_env, fail, load
from tyro.conf import Positional


def rate_text(rate: float) -> str:
    """For example 2e-4."""
    return np.format_float_scientific(rate, trim="-", exp_digits=1)


def main(runs: Positional[list[Path]], out: Path = Path("sensitivity.png"), smooth: int = 50):
    """Sensitivity to the follower's learning rate: final IQM return against the rate, and the learning curves.

    Args:
        runs: run folders that differ in --follower-learning-rate; a baseline may be among them.
        out: picture to write; its ending names the format.
        smooth: recorded points in the rolling mean.
    """
    envs = by_env(load(runs))
    rates = sorted({m.args["follower_learning_rate"] for group in envs.values() for m in group if m.args["scorer"]})
    colors = dict(zip(rates, plt.get_cmap("viridis")([0.85 * i / max(1, len(rates) - 1) for i in range(len(rates))])))
    baselines = list(dict.fromkeys(m.variant for group in envs.values() for m in group if not m.args["scorer"]))
    figure, axes = style.panels(2, len(envs), out, smooth)
    for (top, bottom), (env, group) in zip(axes.T, envs.items()):
        points = {}
        for method in group:
            final = stats.bootstrap(stats.iqm, stats.final_scores(method.timesteps, method.returns))
            rate = method.args["follower_learning_rate"]
            if rate in points and rate is not None:
                fail(f"{method.runs[0].path} and another method on {env} have the same follower's rate, {rate}")
            points[rate] = final
            if method.args["scorer"]:
                look = dict(label=f"Follower's rate {rate_text(rate)}", color=colors[rate])
            else:
                color, dashes = [(style.BASELINE, "--"), *style.OTHERS][baselines.index(method.variant)]
                look = dict(label=method.variant, color=color, linestyle=dashes)
                top.axhline(final.value, **look)
                top.axhspan(final.low, final.high, color=color, alpha=0.2, linewidth=0)
            estimate = stats.bootstrap(stats.iqm, method.returns)
            style.draw_curve(bottom, method.timesteps, estimate, smooth, **look)
        points = {rate: final for rate, final in points.items() if rate is not None}
        if not points:
            fail(f"{group[0].runs[0].path} and the other runs on {env} are baselines, which have no follower's rate")
        value, low, high = zip(*points.values())
        top.plot(list(points), value, color=style.SCORER, marker="o", markersize=4)
        top.vlines(list(points), low, high, color=style.SCORER)
        top.set_xscale("log")
        top.set_xticks(list(points), [rate_text(rate) for rate in points])
        top.set_xticks([], minor=True)
        top.set(title=env, xlabel="Follower's learning rate")
        bottom.set_xlabel("Steps (millions)")
    axes[0, 0].set_ylabel("Final IQM return")
    axes[1, 0].set_ylabel("IQM return")
    style.save(figure, out)


if __name__ == "__main__":
    tyro.cli(main)

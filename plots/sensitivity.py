"""Sensitivity to the learning rates: final IQM return against the follower's or baseline's, and SCORER's curves.

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
    """Sensitivity to the learning rates: final IQM return against the follower's or baseline's, and SCORER's curves.

    Args:
        runs: run folders that differ in --follower-learning-rate, and baselines that differ in --learning-rate.
        out: picture to write; its ending names the format.
        smooth: recorded points in the rolling mean.
    """
    envs = by_env(load(runs))

    def varied(method):
        """The rate that was varied: SCORER's follower's, or the baseline's own."""
        return method.args["follower_learning_rate" if method.args["scorer"] else "learning_rate"]

    methods = [method for group in envs.values() for method in group]
    for method in methods:
        if method.args["ablation"] or method.args["script"] != methods[0].args["script"]:
            fail(f"{method.runs[0].path} is an ablation or of another script: give one script's plain runs")
    rates = sorted(set(map(varied, methods)))
    colors = dict(zip(rates, plt.get_cmap("viridis")([0.85 * i / max(1, len(rates) - 1) for i in range(len(rates))])))
    figure, axes = style.panels(len(envs), 2, out, smooth)
    for (left, right), (env, group) in zip(axes, envs.items()):
        final = {True: {}, False: {}}  # SCORER's and the baseline's estimates, by rate
        for method in group:
            kind, rate = method.args["scorer"], varied(method)
            if rate in final[kind]:
                fail(f"{method.runs[0].path} and another method on {env} have the same rate, {rate}")
            final[kind][rate] = stats.bootstrap(stats.iqm, stats.final_scores(method.timesteps, method.returns))
            if kind:
                style.draw_curve(right, method.timesteps, stats.bootstrap(stats.iqm, method.returns), smooth,
                                 label=f"Follower at {rate_text(rate)}", color=colors[rate])
        if not final[True]:
            fail(f"{group[0].runs[0].path} and the other runs on {env} are baselines, which have no follower's rate")
        for kind, look in {True: dict(label="SCORER, follower's rate", color=style.SCORER, linestyle="-"),
                           False: dict(label="Baseline, its rate", color=style.BASELINE, linestyle="--")}.items():
            if final[kind]:
                x, value, low, high = zip(*sorted((rate, *estimate) for rate, estimate in final[kind].items()))
                left.plot(x, value, marker="o", markersize=4, **look)
                left.vlines(x, low, high, color=look["color"])
        left.set_xscale("log")
        left.set_xticks(rates, [rate_text(rate) for rate in rates], rotation=45, ha="right")
        left.set_xticks([], minor=True)
        left.set(title=env, xlabel="Learning rate", ylabel="Final IQM return")
        right.set(title=env, xlabel="Steps (millions)", ylabel="IQM return")
    style.save(figure, out)


if __name__ == "__main__":
    tyro.cli(main)

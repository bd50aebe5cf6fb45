"""Sensitivity to the learning rates: final return against the rate, and the curves of SCORER's.

python plots/sensitivity.py runs/*Breakout* --out sensitivity.png
"""

from pathlib import Path

import command
import numpy as np
import stats
import style
from command import fail
from records import Method
from records import Run
from records import by_env
from records import load
from tyro.conf import Positional


def main(
    runs: Positional[list[Path]],
    out: Path = Path("sensitivity.png"),
    smooth: float = 0.05,
    width: float | None = None,
):
    """Sensitivity to the learning rates: final return against the rate, and the curves of SCORER's.

    Args:
        runs: run folders that differ in --follower-learning-rate, and baselines that differ in
            --learning-rate, or folders that hold them.
        out: picture to write; its ending names the format.
        smooth: share of the steps over which a point of a curve is the mean.
        width: inches; 6.5, a page, unless given.
    """
    style.check_options(out, smooth)
    methods = load(runs, misfit=is_ablation)
    check_script(methods)
    envs = by_env(methods)
    looks, note = style.label_methods(methods)
    figure, axes = style.make_panels(2 * len(envs), width, columns=2 if len(envs) % 2 else 4)
    for left, right, (env, group) in zip(axes[::2], axes[1::2], envs.items()):
        check_rates(env, group)
        draw_final(left, group)
        scorers = [method for method in group if method.args["scorer"]]
        style.draw_returns(right, scorers, looks, smooth)
        left.set_ylabel(f"Final {style.return_label(group, 0)}")
        left.set_xlabel("Learning rate")
        right.set_ylabel(style.return_label(group, smooth))
        right.set_xlabel("Steps (millions)")
        for ax in (left, right):
            ax.set_title(style.env_title(env))
    style.save(figure, out, f"{methods[0].algorithm}; {note}")


def is_ablation(run: Run) -> str | None:
    """Returns why a run has no place here, or None."""
    return "is an ablation, not a plain run" if run.method.get("ablation") else None


def check_script(methods: list[Method]):
    """Ends in one sentence where methods are of several algorithms."""
    for method in methods:
        if method.algorithm != methods[0].algorithm:
            fail(
                f"{method.runs[0].path} is of {method.algorithm} and {methods[0].runs[0].path} of "
                f"{methods[0].algorithm}: give one algorithm's runs, as runs/scorer_dqn__*"
            )


def varied_rate(method: Method) -> float:
    """Returns the rate that was varied: SCORER's follower's, or the baseline's own."""
    return method.args["follower_learning_rate" if method.args["scorer"] else "learning_rate"]


def check_rates(env: str, methods: list[Method]):
    """Ends in one sentence where two methods share a rate, or none has a follower's."""
    seen = {}
    for method in methods:
        key = method.args["scorer"], varied_rate(method)
        if key in seen:
            fail(
                f"{method.runs[0].path} and {seen[key]} have the same rate, {key[1]}, on {env}, and "
                "differ in something else: give runs that differ in their rates alone"
            )
        seen[key] = method.runs[0].path
    if not any(method.args["scorer"] for method in methods):
        fail(
            f"{methods[0].runs[0].path} and the other runs on {env} are baselines, which have no "
            "follower's rate: give SCORER's runs too"
        )


def draw_final(ax, methods: list[Method]):
    """Draws the final return against the rate, a line for SCORER and one for the baseline."""
    kinds = {True: ("SCORER, by follower's rate", style.SCORER)}
    kinds[False] = ("Baseline, by its rate", style.BASELINE)
    for is_scorer, (label, look) in kinds.items():
        own = [method for method in methods if method.args["scorer"] == is_scorer]
        scores = {varied_rate(m): stats.final_scores(m.timesteps, m.returns) for m in own}
        draw_by_rate(ax, scores, label, look)
    rates = sorted({varied_rate(method) for method in methods})
    ax.set_xticks(rates, [rate_text(rate) for rate in rates], rotation=90)
    ax.set_xticks([], minor=True)


def draw_by_rate(ax, scores: dict, label: str, look: tuple):
    """Draws a line through the IQMs of final scores [seeds] by rate, with their 95 % intervals."""
    ax.set_xscale("log")
    if not scores:
        return
    color, _, marker = look
    rates = sorted(scores)
    estimates = [stats.bootstrap(stats.iqm, scores[rate]) for rate in rates]
    ax.plot(rates, [e.value for e in estimates], color=color, marker=marker, label=label)
    ax.vlines(rates, [e.low for e in estimates], [e.high for e in estimates], color=color)


def rate_text(rate: float) -> str:
    """Returns a rate as one types it, for example 2e-4."""
    return np.format_float_scientific(rate, trim="-", exp_digits=1)


if __name__ == "__main__":
    command.run(main)

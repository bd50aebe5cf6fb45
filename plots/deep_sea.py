"""Deep Sea: the fraction of seeds that have solved it, along training, and a table of the first solved episodes.

    python plots/deep_sea.py runs/* --out deep_sea.png
"""

from pathlib import Path

import numpy as np
import stats
import style
import tyro
from records import Method, by_env, fail, load
from tables import Cell, Table
from tyro.conf import Positional

RULES = "solved_episode", "strictly_solved_episode"  # bsuite's, and what a person means by solved


def first_solved(method: Method, rule: str):
    """Each seed's first solved episode [seeds], inf where there was none; or one sentence if this is not Deep Sea."""
    if rule not in method.curves:
        fail(f"{method.runs[0].path} has no {rule}: it is not a run of scorer_bootstrapped_dqn.py")
    last = method.curves[rule][:, -1]
    return np.where(last < 0, np.inf, last)


def solved_by(first, episodes):
    """Whether each seed has solved it by each of these episodes, [seeds, len(episodes)] of 0 and 1."""
    return (first[:, None] <= episodes).astype(float)


def text(first, end: int) -> str:
    """Median with interval of first solved episodes, end + 1 standing for never, and how many of how many seeds."""
    numbers = [f"{x:,.0f}" if x <= end else f"> {end:,}" for x in stats.bootstrap(np.median, first) if np.isfinite(x)]
    interval = f" [{', '.join(numbers[1:])}]" if len(first) > 1 else ""
    return f"{numbers[0]}{interval} ({(first <= end).sum()}/{len(first)})"


def table(methods: list[Method]) -> Table:
    """First solved episodes by both rules, and the difference test for bsuite's."""
    rows = []
    for env, group in by_env(methods).items():
        end = int(group[0].curves["episodes"][:, -1].min())  # episodes of a run
        firsts, stricts = ([np.minimum(first_solved(method, rule), end + 1) for method in group] for rule in RULES)
        best = min(firsts, key=stats.iqm)
        for method, first, strict in zip(group, firsts, stricts):
            p = "fastest" if first is best else f"{stats.difference_test(-best, -first):.3f}"  # there, more is better
            rows.append([Cell(x) for x in (env, f"{end:,}", method.variant, text(first, end), text(strict, end), p)])
    note = ("Median over seeds of the first solved episode with its 95 % bootstrap interval, and how many of how many "
            "seeds solved it. Solved, as in bsuite 0.3.6: less than 90 % bad episodes so far (stochastic: 80 %, from "
            "episode 100). Strictly: less than 10 % of the last 100. p: one-sided bootstrap difference test of the IQM "
            "of the first solved episodes against the fastest method's, where a seed that never solved it counts as "
            "one that did just after the end; below 0.05, significantly slower.")
    return Table("Deep Sea", ["Environment", "Episodes", "Method", "Solved", "Solved strictly", "p"], rows, note)


def main(runs: Positional[list[Path]], out: Path = Path("deep_sea.png"), strict: bool = False, latex: bool = False):
    """Deep Sea: the fraction of seeds that have solved it, along training, and a table of the first solved episodes.

    Args:
        runs: run folders of scorer_bootstrapped_dqn.py.
        out: picture to write; its ending names the format.
        strict: draw the stricter rule, less than 10 % bad episodes of the last 100.
        latex: print the table as LaTeX (with booktabs) in place of Markdown.
    """
    methods = load(runs)
    firsts = {id(method): first_solved(method, RULES[strict]) for method in methods}
    sizes = sorted({method.args["size"] for method in methods})
    kinds = sorted({method.args["stochastic"] for method in methods})
    figure, axes = style.panels(len(kinds), len(sizes), out, smooth=1)
    look = style.looks(methods, name="variant")
    for row, stochastic in enumerate(kinds):
        for column, size in enumerate(sizes):
            ax = axes[row, column]
            for method in (m for m in methods if (m.args["size"], m.args["stochastic"]) == (size, stochastic)):
                episodes = np.linspace(0, method.timesteps[-1] // size, 400).astype(int)
                solved = stats.bootstrap(np.mean, solved_by(firsts[id(method)], episodes))
                style.draw_band(ax, episodes, *solved, **look[method.variant])
            ax.set(title=f"Depth {size}, {'stochastic' if stochastic else 'deterministic'}", ylim=(-0.03, 1.03))
    for ax in axes[:, 0]:
        ax.set_ylabel("Seeds solved strictly" if strict else "Seeds solved")
    for ax in axes[-1]:
        ax.set_xlabel("Episodes")
    style.save(figure, out)
    print(getattr(table(methods), "latex" if latex else "markdown")())


if __name__ == "__main__":
    tyro.cli(main)

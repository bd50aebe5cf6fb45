"""Deep Sea: the fraction of seeds that have solved it, and a table of the first solved episodes.

python plots/deep_sea.py runs/*DeepSea* --out deep_sea.png
"""

from pathlib import Path

import command
import numpy as np
import stats
import style
from records import Method
from records import Run
from records import by_env
from records import load
from tables import Cell
from tables import Table
from tyro.conf import Positional

BSUITE, STRICT = "solved_episode", "strictly_solved_episode"  # what a person means by solved
NOTE = (
    "Median over seeds of the first solved episode with its 95 % bootstrap interval, and how many "
    "of how many seeds solved it. Solved, as in bsuite 0.3.6: less than 90 % bad episodes so far "
    "(stochastic: 80 %, from episode 100). Strictly: less than 10 % of the last 100. p: one-sided "
    "bootstrap difference test of the IQM of the first solved episodes against the fastest "
    "method's, where a seed that never solved it counts as one that did just after the end; below "
    f"0.05, significantly slower. {stats.TEST_RESAMPLES:,} resamples."
)


def main(
    runs: Positional[list[Path]],
    out: Path = Path("deep_sea.png"),
    strict: bool = False,
    latex: bool = False,
    width: float | None = None,
):
    """Deep Sea: the fraction of seeds that have solved it, and a table of the first solved episodes.

    Args:
        runs: run folders of scorer_bootstrapped_dqn.py, or folders that hold them.
        out: picture to write; its ending names the format.
        strict: draw the stricter rule, less than 10 % bad episodes of the last 100.
        latex: print the table as LaTeX (with booktabs) in place of Markdown.
        width: inches; 3.25, a column, for one panel and 6.5, a page, for several.
    """
    style.check_options(out)
    methods = load(runs, misfit=is_no_deep_sea)
    looks, note = style.label_methods(methods)
    seas = by_env(sorted(methods, key=lambda method: sea_of(method)))
    figure, axes = style.make_panels(len(seas), width)
    for ax, group in zip(axes, seas.values()):
        draw_solved(ax, group, STRICT if strict else BSUITE, looks)
    label = (
        "Fraction of seeds that\nhave strictly solved it"
        if strict
        else "Fraction of seeds\nthat have solved it"
    )
    style.label_axes(axes, "Episodes", label)
    style.save(figure, out, note)
    solved = make_table(methods)
    print(solved.latex() if latex else solved.markdown())


def is_no_deep_sea(run: Run) -> str | None:
    """Returns why a run has no place here, or None."""
    if (
        BSUITE in run.curves
        and STRICT in run.curves
        and {"size", "stochastic"} <= run.method.keys()
    ):
        return None
    return f"has no {BSUITE}: it is no run of scorer_bootstrapped_dqn.py"


def sea_of(method: Method) -> tuple:
    """Returns which Deep Sea a method was trained on: stochastic or not, and how deep."""
    return method.args["stochastic"], method.args["size"]


def draw_solved(ax, methods: list[Method], rule: str, looks: dict):
    """Draws the fraction of seeds that have solved one Deep Sea, over episodes."""
    stochastic, size = sea_of(methods[0])
    for method in methods:
        episodes = np.linspace(0, method.timesteps[-1] // size, 400).astype(int)
        solved = solved_by(first_solved(method, rule), episodes)
        style.draw_band(ax, episodes, *stats.bootstrap(np.mean, solved), **looks[method.variant])
    kind = "stochastic" if stochastic else "deterministic"
    ax.set(title=f"Depth {size}, {kind}", ylim=(-0.03, 1.03))


def first_solved(method: Method, rule: str):
    """Returns each seed's first solved episode [seeds], inf where there was none."""
    last = method.curves[rule][:, -1]
    return np.where(last < 0, np.inf, last)


def solved_by(first, episodes):
    """Returns whether each seed has solved it by each of these episodes, [seeds, episodes], 0 or 1."""
    return (first[:, None] <= episodes).astype(float)


def describe_first(first, end: int) -> str:
    """Returns the median first solved episode with its interval, and how many of how many seeds.

    end + 1 stands for never.
    """
    estimate = [x for x in stats.bootstrap(np.median, first) if np.isfinite(x)]
    numbers = [f"{x:,.0f}" if x <= end else f"> {end:,}" for x in estimate]
    interval = f" [{', '.join(numbers[1:])}]" if len(first) > 1 else ""
    return f"{numbers[0]}{interval} ({(first <= end).sum()}/{len(first)})"


def make_table(methods: list[Method]) -> Table:
    """Returns the first solved episodes by both rules, and the difference test for bsuite's."""
    rows = []
    for env, group in by_env(methods).items():
        end = int(group[0].curves["episodes"][:, -1].min())  # episodes of a run
        firsts = [np.minimum(first_solved(method, BSUITE), end + 1) for method in group]
        stricts = [np.minimum(first_solved(method, STRICT), end + 1) for method in group]
        best = min(firsts, key=stats.iqm)
        for method, first, strict in zip(group, firsts, stricts):
            p = stats.difference_test(-best, -first)  # there, more is better
            texts = [
                env,
                f"{end:,}",
                method.variant,
                describe_first(first, end),
                describe_first(strict, end),
                "fastest" if first is best else f"{p:.3f}",
            ]
            rows.append([Cell(text) for text in texts])
    header = ["Environment", "Episodes", "Method", "Solved", "Solved strictly", "p"]
    return Table("Deep Sea", header, rows, NOTE)


if __name__ == "__main__":
    command.run(main)

"""Tables: final return, time to threshold, sample efficiency and speed; or the paper's numbers, or p values.

    python plots/tables.py runs/*                      # Markdown
    python plots/tables.py runs/* --latex --out tables.tex
    python plots/tables.py runs/* --paper
    python plots/tables.py runs/* --p-values
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import stats
import tyro
from paper import ENVS, FINAL, SETTINGS, THRESHOLDS, TIMES
from records import Method, by_algorithm, by_env, fail, load, write
from tyro.conf import Positional

SURVIVORS = ("Mean over the seeds that reached the threshold, ± half the 95 % bootstrap interval's width; in brackets "
             "how many of how many did. A mean over survivors only can fall as the threshold rises.")


class Cell(NamedTuple):
    text: str
    mark: str = ""  # "best", or "level": not significantly worse than the best


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[Cell]]
    note: str

    def markdown(self) -> str:
        marks = {"": "", "best": "**", "level": "*"}
        lines = [self.header, ["---"] * len(self.header)]
        lines += [[marks[cell.mark] + cell.text + marks[cell.mark] for cell in row] for row in self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), "", self.note, ""])

    def latex(self) -> str:
        marks = {"": "{}", "best": r"\textbf{{{}}}", "level": r"\textit{{{}}}"}

        def escape(text: str) -> str:
            return text.replace("%", r"\%").replace("_", r"\_").replace("±", r"$\pm$")

        lines = [[escape(name) for name in self.header]]
        lines += [[marks[cell.mark].format(escape(cell.text)) for cell in row] for row in self.rows]
        head, *body = [" & ".join(line) + r" \\" for line in lines]
        return "\n".join([r"\begin{table}", r"\centering", rf"\caption{{{escape(f'{self.title}. {self.note}')}}}",
                          rf"\begin{{tabular}}{{{'l' * len(self.header)}}}", r"\toprule", head, r"\midrule", *body,
                          r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def plus_minus(estimate: stats.Estimate, digits: int) -> str:
    """For example 63.93 ± 1.86; one seed has no interval and nothing after the number."""
    half = f" ± {estimate.half_width:.{digits}f}" if np.isfinite(estimate.half_width) else ""
    return f"{estimate.value:.{digits}f}{half}"


def scores(method: Method):
    """Final scores [seeds]."""
    return stats.final_scores(method.timesteps, method.returns)


def compared(methods: list[Method]) -> list[list[Method]]:
    """The methods of one algorithm on one environment together, order kept."""
    return [group for family in by_algorithm(methods).values() for group in by_env(family).values()]


def final_return(methods: list[Method]) -> Table:
    """Final IQM return, marked within each algorithm and environment as in the paper's table."""
    cells = {}
    for group in compared(methods):
        best = max(group, key=lambda method: stats.iqm(scores(method)))
        for method in group:
            level = stats.difference_test(scores(best), scores(method)) >= 0.05  # False where one seed shows nothing
            mark = "best" if method is best else "level" if level else ""
            text = plus_minus(stats.bootstrap(stats.iqm, scores(method)), 2)
            cells[method.algorithm, method.variant, method.env] = Cell(text, mark)
    envs = list(by_env(methods))
    names = dict.fromkeys((m.algorithm, m.variant) for family in by_algorithm(methods).values() for m in family)
    rows = [[Cell(algorithm), Cell(variant)] + [cells.get((algorithm, variant, env), Cell("-")) for env in envs]
            for algorithm, variant in names]
    seeds = sorted({len(method.seeds) for method in methods})
    note = (f"IQM over {' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])} of the mean return over the last 10 % "
            "of training, ± half the 95 % bootstrap interval's width. Bold: best of its algorithm. Italic: not "
            "significantly worse than the best (one-sided bootstrap difference test, 5 %).")
    return Table("Final return", ["Algorithm", "Variant", *envs], rows, note)


def difference_tests(methods: list[Method]) -> Table:
    """p of the one-sided bootstrap difference test for all pairs of one algorithm's variants on one environment."""
    def p(row, column):
        return "-" if row is column else f"{stats.difference_test(scores(row), scores(column)):.3f}"

    rows = [[Cell(row.variant), *(Cell(p(row, column)) for column in methods)] for row in methods]
    note = ("Share of resamples in which the column's final IQM return matches or exceeds the row's: below 0.05, the "
            "row is significantly better. nan: one seed shows nothing.")
    header = ["p: is the row better?", *(method.variant for method in methods)]
    return Table(f"Difference tests, {methods[0].algorithm} on {methods[0].env}", header, rows, note)


def times_text(method: Method, reached: tuple[stats.Estimate, int]) -> str:
    """Millions of steps, and the number of seeds that reached the threshold."""
    time, successes = reached
    in_millions = stats.Estimate(*(np.array(time) / 1e6))
    digits = 1 if method.timesteps[-1] > 1e7 else 3
    return f"{plus_minus(in_millions, digits) if successes else '-'} ({successes}/{len(method.seeds)})"


def fastest(times: list[float]) -> list[str]:
    """Marks for mean times, the smallest as best; NaN was never reached."""
    shortest = min((time for time in times if np.isfinite(time)), default=None)
    return ["best" if time == shortest else "" for time in times]


def time_to_threshold(methods: list[Method]) -> Table:
    """Time to 99 % of the best run's final score on each environment (appendix "Time-to-Threshold"), and the paper's
    where it prints one (table "minigrid")."""
    rows, printed = [], False
    for env, group in by_env(methods).items():
        threshold = stats.shared_threshold([scores(method) for method in group])
        for family in by_algorithm(group).values():
            reached = [stats.mean_time(stats.time_to_threshold(m.timesteps, m.returns, threshold)) for m in family]
            for method, result, mark in zip(family, reached, fastest([time.value for time, _ in reached])):
                paper = TIMES.get(env, {}).get(method.variant) if method.algorithm == "R2D2" else None
                printed |= paper is not None
                time, half, rate = paper or (None, None, None)
                text = f"{time} ± {half} ({rate} %)" if time else f"- ({rate} %)" if paper else ""
                rows.append([Cell(env), Cell(f"{threshold:.2f}"), Cell(method.algorithm), Cell(method.variant),
                             Cell(times_text(method, result), mark), Cell(text)])
    note = "The threshold is 1 % below the best run's final score on that environment. " + SURVIVORS
    header = ["Environment", "Threshold", "Algorithm", "Variant", "Steps (millions)", "Paper"]
    columns = len(header) - (not printed)
    return Table("Time to threshold", header[:columns], [row[:columns] for row in rows], note)


def sample_efficiency(env: str, methods: list[Method], thresholds: tuple[float, ...]) -> Table:
    """Time to given returns on one environment (appendix "Sample Efficiency Results")."""
    rows = []
    for family in by_algorithm(methods).values():
        columns = []
        for threshold in thresholds:
            reached = [stats.sample_efficiency(m.timesteps, m.returns, threshold) for m in family]
            marks = fastest([np.nan if result is None else result[0].value for result in reached])
            texts = ["N/A" if result is None else times_text(m, result) for m, result in zip(family, reached)]
            columns.append([Cell(text, mark) for text, mark in zip(texts, marks)])
        rows += [[Cell(m.algorithm), Cell(m.variant), *row] for m, row in zip(family, zip(*columns))]
    header = ["Algorithm", "Variant", *(f"Threshold {threshold:g}" for threshold in thresholds)]
    note = "Millions of steps. N/A: the IQM of the seeds never reached the threshold. " + SURVIVORS
    return Table(f"Sample efficiency on {env}", header, rows, note)


def speed(methods: list[Method]) -> Table:
    """Wall-clock time without compilation, and its ratio to the plain baseline's (appendix "Speed Comparison")."""
    rows = []
    for group in compared(methods):
        plain = next((method for method in group if not method.args["scorer"]), None)
        for method in group:
            seconds = [run.meta["seconds"] for run in method.runs]
            machines = {(run.meta["device"], run.meta["num_devices"], len(run.seeds), "srank" in run.curves)
                        for run in method.runs + (plain.runs if plain else [])}
            ratio = "N/A"
            if plain and len(machines) == 1:
                ratio = f"{stats.speed_ratio(seconds, [run.meta['seconds'] for run in plain.runs]):.2f}x"
            first = method.runs[0]
            where = f"{len(first.seeds)} seeds on {first.meta['num_devices']} x {first.meta['device']}"
            texts = method.algorithm, method.variant, method.env, f"{np.mean(seconds):,.1f}", where, ratio
            rows.append([Cell(text) for text in texts])
    note = ("Wall-clock seconds of one run without compilation; below 1.00x, faster than the baseline. N/A: no "
            "baseline, or other devices, another number of seeds at a time, or only one of the two with diagnostics.")
    return Table("Speed", ["Algorithm", "Variant", "Environment", "Seconds", "Run", "Ratio"], rows, note)


def paper_against_here(methods: list[Method]) -> Table:
    """The paper's final IQM return beside these runs', with both 95 % intervals."""
    alike = [method for method in methods if all(method.args.get(name) in accepted for name, accepted in SETTINGS[
        "PQN" if method.algorithm == "PQN" else "DQN"].items())]
    rows = []
    for (algorithm, variant, place), numbers in FINAL.items():
        for method in alike:
            plain = "SCORER" if method.args["scorer"] else "Baseline"
            if (algorithm, variant) != (method.algorithm, plain) or method.env not in ENVS:
                continue
            value, half = numbers[ENVS.index(method.env)]
            ours = stats.bootstrap(stats.iqm, scores(method))
            overlap = "yes" if ours.low <= value + half and ours.high >= value - half else "no"
            texts = (method.env, algorithm if place == 1 else f"{algorithm}, second row", variant,
                     "bootstrapped" if method.args["bootstrap_at_timeout"] else "as in the paper",
                     f"{value:.2f} [{value - half:.2f}, {value + half:.2f}]",
                     f"{ours.value:.2f} [{ours.low:.2f}, {ours.high:.2f}]", overlap)
            rows.append([Cell(text) for text in texts])
    if not rows:
        fail(f"{methods[0].runs[0].path} and the other runs have no method, environment and settings of the paper")
    note = ("Final IQM return with 95 % bootstrap intervals, 30 seeds in the paper, whose interval is its printed "
            "number ± half width. The paper prints two pairs of rows named DQN. SpaceInvaders differs between the "
            "gymnax versions (28 aliens in the paper's 0.0.9, 24 in 1.0.1): compare its ratios, not its returns.")
    header = ["Environment", "Algorithm", "Variant", "Time-outs", "Paper", "Here", "Intervals overlap"]
    return Table("Paper against here", header, rows, note)


def main(runs: Positional[list[Path]], out: Path | None = None, latex: bool = False, paper: bool = False,
         p_values: bool = False, thresholds: tuple[float, ...] = ()):
    """Tables: final return, time to threshold, sample efficiency and speed; or the paper's numbers, or p values.

    Args:
        runs: run folders.
        out: file to write in place of standard output.
        latex: LaTeX (with booktabs) in place of Markdown.
        paper: only the table of the paper's final returns beside these runs'.
        p_values: only the difference tests between all variants of an algorithm on an environment.
        thresholds: returns for the sample efficiency on every environment, in place of the paper's.
    """
    if paper and p_values:
        fail("give one of --paper and --p-values")
    if not np.isfinite(thresholds).all():
        fail(f"--thresholds {' '.join(map(str, thresholds))} must be finite numbers")
    methods = load(runs)
    if paper:
        tables = [paper_against_here(methods)]
    elif p_values:
        tables = [difference_tests(group) for group in compared(methods) if len(group) > 1]
        if not tables:
            fail(f"--p-values needs two variants of one algorithm on one environment, not only {runs[0]}")
    else:
        tables = [final_return(methods), time_to_threshold(methods), speed(methods)]
        for env, group in by_env(methods).items():
            if chosen := thresholds or THRESHOLDS.get(env):
                tables.insert(-1, sample_efficiency(env, group, chosen))
    text = "\n".join(table.latex() if latex else table.markdown() for table in tables)
    if out is None:
        print(text)
    else:
        write(out, lambda out: out.write_text(text))


if __name__ == "__main__":
    tyro.cli(main)

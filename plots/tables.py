"""Tables: final return, time to threshold, sample efficiency and speed; or the paper's, or p values.

python plots/tables.py runs                      # Markdown
python plots/tables.py runs --latex --out tables.tex
python plots/tables.py runs --paper
python plots/tables.py runs --p-values
"""

from datetime import datetime
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import command
import numpy as np
import stats
from command import fail
from command import write
from paper import ENVS
from paper import FINAL
from paper import SETTINGS
from paper import THRESHOLDS
from paper import TIMES
from records import GAME
from records import Method
from records import Run
from records import by_algorithm
from records import by_env
from records import load
from tyro.conf import Positional

SURVIVORS = (
    "Mean over the seeds that reached the threshold, ± half the 95 % bootstrap interval's width; in "
    "brackets how many of how many did. A mean over survivors only can fall as the threshold rises."
)
PRECISION = (
    f"{stats.TEST_RESAMPLES:,} resamples: near 0.05 p is known to 0.0014, and what only more of them "
    "could settle counts as not significant."
)


def main(
    runs: Positional[list[Path]],
    out: Path | None = None,
    latex: bool = False,
    paper: bool = False,
    p_values: bool = False,
    thresholds: tuple[float, ...] = (),
):
    """Tables: final return, time to threshold, sample efficiency and speed; or the paper's, or p values.

    Args:
        runs: run folders, or folders that hold them.
        out: file to write in place of standard output; it must not exist.
        latex: LaTeX (with booktabs) in place of Markdown.
        paper: only the table of the paper's final returns beside these runs'.
        p_values: only the difference tests between all variants of an algorithm on an environment.
        thresholds: returns for the sample efficiency on every environment, in place of the paper's.
    """
    if paper and p_values:
        fail("give one of --paper and --p-values")
    if thresholds and (paper or p_values):
        given = "--paper" if paper else "--p-values"
        fail(f"--thresholds has no meaning beside {given}: it is of the sample efficiency")
    if not np.isfinite(thresholds).all():
        fail(f"--thresholds {' '.join(str(x) for x in thresholds)} must be finite numbers")
    command.refuse_to_overwrite("--out", out)
    methods = load(runs)
    if paper:
        tables = [paper_against_here(methods)]
    elif p_values:
        tables = [difference_tests(group) for group in compared(methods) if len(group) > 1]
    else:
        tables = all_tables(methods, thresholds)
    if not tables:
        fail(
            f"--p-values needs two variants of one algorithm on one environment, not only {runs[0]}"
        )
    text = "\n".join(table.latex() if latex else table.markdown() for table in tables)
    if out is None:
        print(text)
    else:
        write(out, lambda out: out.write_text(text))


# ------------------------------------------ Table and cell ----------------------------------------

# What LaTeX takes for something else than the letter.
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
    }
)


class Cell(NamedTuple):
    """A text and how it is set off."""

    text: str
    mark: str = ""  # "best", or "level": not significantly worse than the best


class Table(NamedTuple):
    """A table that prints itself as Markdown or LaTeX."""

    title: str
    header: list[str]
    rows: list[list[Cell]]
    note: str

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        marks = {"": "", "best": "**", "level": "*"}
        lines = [[escape_markdown(name) for name in self.header], ["---"] * len(self.header)]
        for row in self.rows:
            texts = [escape_markdown(cell.text) for cell in row]
            lines.append([f"{marks[c.mark]}{text}{marks[c.mark]}" for c, text in zip(row, texts)])
        body = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([f"### {self.title}", "", *body, "", self.note, ""])

    def latex(self) -> str:
        """Returns the table as LaTeX, for the package booktabs."""
        marks = {"": "{}", "best": r"\textbf{{{}}}", "level": r"\textit{{{}}}"}
        lines = [[escape_latex(name) for name in self.header]]
        for row in self.rows:
            lines.append([marks[cell.mark].format(escape_latex(cell.text)) for cell in row])
        head, *body = [" & ".join(line) + r" \\" for line in lines]
        caption = escape_latex(f"{self.title}. {self.note}")
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{caption}}}",
                rf"\begin{{tabular}}{{{'l' * len(self.header)}}}",
                r"\toprule",
                head,
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def escape_latex(text: str) -> str:
    """Returns text that LaTeX sets as it stands."""
    return text.translate(LATEX)


def escape_markdown(text: str) -> str:
    """Returns text that does not end a cell of a Markdown table."""
    return text.replace("|", r"\|")


def plus_minus(estimate: stats.Estimate, digits: int) -> str:
    """Returns for example 63.93 ± 1.86; one seed has no interval and nothing after the number."""
    value = f"{estimate.value:.{digits}f}"
    if not np.isfinite(estimate.half_width):
        return value
    return f"{value} ± {estimate.half_width:.{digits}f}"


def scores(method: Method):
    """Returns final scores [seeds]."""
    return stats.final_scores(method.timesteps, method.returns)


def compared(methods: list[Method]) -> list[list[Method]]:
    """Returns the methods of one algorithm on one environment together, order kept."""
    families = by_algorithm(methods).values()
    return [group for family in families for group in by_env(family).values()]


# --------------------------------------- Returns and p values -------------------------------------


def all_tables(methods: list[Method], thresholds: tuple[float, ...]) -> list[Table]:
    """Returns every table that needs no flag."""
    tables = [final_return(methods), time_to_threshold(methods)]
    for env, group in by_env(methods).items():
        chosen = thresholds or THRESHOLDS.get(env)
        if chosen:
            tables.append(sample_efficiency(env, group, chosen))
    return [*tables, speed(methods)]


def final_return(methods: list[Method]) -> Table:
    """Returns the final IQM returns, marked within each algorithm and environment as in the paper."""
    cells = {}
    for group in compared(methods):
        best = max(group, key=lambda method: stats.iqm(scores(method)))
        for method in group:
            text = plus_minus(stats.bootstrap(stats.iqm, scores(method)), 2)
            mark = mark_against(best, method)
            cells[method.algorithm, method.variant, method.env] = Cell(text, mark)
    envs = list(by_env(methods))
    in_order = [method for family in by_algorithm(methods).values() for method in family]
    rows = []
    for algorithm, variant in dict.fromkeys((m.algorithm, m.variant) for m in in_order):
        own = [cells.get((algorithm, variant, env), Cell("-")) for env in envs]
        rows.append([Cell(algorithm), Cell(variant), *own])
    numbers = sorted({len(method.seeds) for method in methods})
    seeds = "1 seed" if numbers == [1] else f"{' or '.join(str(n) for n in numbers)} seeds"
    note = (
        f"IQM over {seeds} of the mean return over the last 10 % of training, ± half the 95 % "
        "bootstrap interval's width. Bold: best of its algorithm. Italic: not significantly worse "
        f"than the best (one-sided bootstrap difference test, 5 %; {PRECISION})"
    )
    return Table("Final return", ["Algorithm", "Variant", *envs], rows, note)


def mark_against(best: Method, method: Method) -> str:
    """Returns the mark of a method's final return, nothing where one seed shows nothing."""
    if method is best:
        return "best"
    p = stats.difference_test(scores(best), scores(method))
    return "level" if stats.is_level(p) else ""


def difference_tests(methods: list[Method]) -> Table:
    """Returns p of the difference test for all pairs of an algorithm's variants on an environment."""
    rows = []
    for row in methods:
        cells = [Cell(row.variant)]
        for column in methods:
            p = stats.difference_test(scores(row), scores(column))
            cells.append(Cell("-" if row is column else f"{p:.3f}"))
        rows.append(cells)
    note = (
        "Share of resamples in which the column's final IQM return matches or exceeds the row's: "
        "below 0.05, the row is significantly better. nan: one seed shows nothing. "
        f"{PRECISION}"
    )
    header = ["p: is the row better?", *(method.variant for method in methods)]
    title = f"Difference tests, {methods[0].algorithm} on {methods[0].env}"
    return Table(title, header, rows, note)


# --------------------------------------------- Times ----------------------------------------------


def times_text(method: Method, reached: tuple[stats.Estimate, int]) -> str:
    """Returns millions of steps, and the number of seeds that reached the threshold."""
    time, successes = reached
    in_millions = stats.Estimate(*(np.array(time) / 1e6))
    digits = 1 if method.timesteps[-1] > 1e7 else 3
    text = plus_minus(in_millions, digits) if successes else "-"
    return f"{text} ({successes}/{len(method.seeds)})"


def mark_fastest(times: list[float]) -> list[str]:
    """Returns marks for mean times, the smallest as best; NaN was never reached."""
    shortest = min((time for time in times if np.isfinite(time)), default=None)
    return ["best" if time == shortest else "" for time in times]


def time_to_threshold(methods: list[Method]) -> Table:
    """Returns the time to 99 % of the best run's final score (appendix "Time-to-Threshold").

    Where the paper prints a time (table "minigrid"), it stands in a last column.
    """
    rows = []
    for env, group in by_env(methods).items():
        threshold = stats.shared_threshold([scores(method) for method in group])
        for family in by_algorithm(group).values():
            reached = [
                stats.mean_time(stats.time_to_threshold(m.timesteps, m.returns, threshold))
                for m in family
            ]
            marks = mark_fastest([time.value for time, _ in reached])
            for method, result, mark in zip(family, reached, marks):
                rows.append(
                    [
                        Cell(env),
                        Cell(f"{threshold:.2f}"),
                        Cell(method.algorithm),
                        Cell(method.variant),
                        Cell(times_text(method, result), mark),
                        Cell(paper_time(method)),
                    ]
                )
    note = f"The threshold is 1 % below the best run's final score on that environment. {SURVIVORS}"
    header = ["Environment", "Threshold", "Algorithm", "Variant", "Steps (millions)", "Paper"]
    if not any(row[-1].text for row in rows):
        header = header[:-1]
        rows = [row[:-1] for row in rows]
    return Table("Time to threshold", header, rows, note)


def paper_time(method: Method) -> str:
    """Returns the paper's time to threshold and success rate, or nothing where it prints none."""
    printed = TIMES.get(method.env, {}).get(method.variant)
    if method.algorithm != "R2D2" or printed is None:
        return ""
    time, half, rate = printed
    return f"- ({rate} %)" if time is None else f"{time} ± {half} ({rate} %)"


def sample_efficiency(env: str, methods: list[Method], thresholds: tuple[float, ...]) -> Table:
    """Returns the time to given returns on an environment (appendix "Sample Efficiency Results")."""
    rows = []
    for family in by_algorithm(methods).values():
        own = [[Cell(method.algorithm), Cell(method.variant)] for method in family]
        for threshold in thresholds:
            reached = [stats.sample_efficiency(m.timesteps, m.returns, threshold) for m in family]
            marks = mark_fastest([result[0].value if result else np.nan for result in reached])
            for row, method, result, mark in zip(own, family, reached, marks):
                row.append(Cell(times_text(method, result) if result else "N/A", mark))
        rows += own
    header = ["Algorithm", "Variant", *(f"Threshold {threshold:g}" for threshold in thresholds)]
    note = f"Millions of steps. N/A: the IQM of the seeds never reached the threshold. {SURVIVORS}"
    return Table(f"Sample efficiency on {env}", header, rows, note)


# --------------------------------------------- Speed ----------------------------------------------


class Machine(NamedTuple):
    """What the seconds of a run depend on beside the method."""

    device: str
    num_devices: int
    num_seeds: int
    diagnostics: bool


def speed(methods: list[Method]) -> Table:
    """Returns wall-clock seconds, and their ratio to the baseline's (appendix "Speed Comparison").

    Runs of a method on different machines, or with and without diagnostics, stand in rows of
    their own.
    """
    all_runs = [run for method in methods for run in method.runs]
    rows = []
    for group in compared(methods):
        for method in group:
            machines = {}
            for run in method.runs:
                machines.setdefault(machine_of(run), []).append(run)
            for machine, runs in machines.items():
                seconds = np.mean([run.meta["seconds"] for run in runs])
                seeds = "1 seed" if machine.num_seeds == 1 else f"{machine.num_seeds} seeds"
                where = f"{seeds} on {machine.num_devices} x {machine.device}"
                texts = [
                    method.algorithm,
                    method.variant,
                    method.env,
                    f"{seconds:,.1f}",
                    f"{where}, with diagnostics" if machine.diagnostics else where,
                    ratio_text(runs, plain_runs(method, group, machine), all_runs),
                ]
                rows.append([Cell(text) for text in texts])
    note = (
        "Wall-clock seconds of one run without compilation, and as a multiple of the baseline's; "
        "below 1.00x, faster. Only like is compared: the same device, number of seeds, diagnostics "
        "and arguments, but for those of the game. N/A: there is no such baseline, or the seconds "
        "are not the run's own: of a sweep, of a resumed run, of two of these runs at one time on one kind of device, "
        "or of a record that does not say what was trained in them."
    )
    header = ["Algorithm", "Variant", "Environment", "Seconds", "Run", "Ratio"]
    return Table("Speed", header, rows, note)


def machine_of(run: Run) -> Machine:
    """Returns what the seconds of this run depend on beside the method."""
    return Machine(
        device=run.meta["device"],
        num_devices=run.meta["num_devices"],
        num_seeds=len(run.seeds),
        diagnostics="srank" in run.curves or "bellman_error_mean" in run.curves,
    )


def plain_runs(method: Method, group: list[Method], machine: Machine) -> list[Run]:
    """Returns the baseline's runs on a machine that differ from the method in the game alone."""

    def outside_game(args):
        return {name: value for name, value in args.items() if name not in GAME}

    for other in group:
        is_plain = not other.args["scorer"] and "ablation" not in other.args
        if is_plain and outside_game(other.args) == outside_game(method.args):
            return [run for run in other.runs if machine_of(run) == machine]
    return []


def ratio_text(runs: list[Run], plain: list[Run], all_runs: list[Run]) -> str:
    """Returns the ratio of two methods' seconds, N/A unless they are of like with like."""
    if not plain or not all(owns_its_seconds(run, all_runs) for run in [*runs, *plain]):
        return "N/A"
    seconds, baseline = ([run.meta["seconds"] for run in each] for each in (runs, plain))
    return f"{stats.speed_ratio(seconds, baseline):.2f}x"


def owns_its_seconds(run: Run, all_runs: list[Run]) -> bool:
    """Returns whether a record's seconds are known to be of its seeds alone.

    `lanes` is the number of seeds that were trained in them, also at other rates of a sweep.
    Records without it do not say. Of another run at the same time on such a device, nobody knows
    whether it shared the card. A resumed run may have changed the machine.
    """
    if run.meta.get("lanes") != len(run.seeds) or run.meta.get("continues"):
        return False
    return not any(overlap(run, other) for other in all_runs if other is not run)


def overlap(run: Run, other: Run) -> bool:
    """Returns whether two runs trained at the same time on the same kind of device."""
    if run.meta["device"] != other.meta["device"]:
        return False
    mine, its = training_time(run), training_time(other)
    if mine is None or its is None:
        return False
    return mine[0] < its[1] and its[0] < mine[1]


def training_time(run: Run) -> tuple[datetime, datetime] | None:
    """Returns when a run began and ended, from its folder's name; None where that has no time."""
    if not run.when:
        return None
    began = datetime.strptime(run.when[:15], "%Y%m%d-%H%M%S")
    compiling = run.meta.get("compile_seconds") or 0
    return began, began + timedelta(seconds=compiling + run.meta["seconds"])


# --------------------------------------------- Paper ----------------------------------------------


def paper_against_here(methods: list[Method]) -> Table:
    """Returns the paper's final IQM return beside these runs', with both 95 % intervals."""
    alike = [method for method in methods if has_papers_settings(method)]
    rows = []
    for (algorithm, variant, place), numbers in FINAL.items():
        for method in alike:
            plain = "SCORER" if method.args["scorer"] else "Baseline"
            if (algorithm, variant) != (method.algorithm, plain) or method.env not in ENVS:
                continue
            value, half = numbers[ENVS.index(method.env)]
            ours = stats.bootstrap(stats.iqm, scores(method))
            overlaps = ours.low <= value + half and ours.high >= value - half
            texts = [
                method.env,
                algorithm if place == 1 else f"{algorithm}, second row",
                variant,
                "bootstrapped" if method.args["bootstrap_at_timeout"] else "as in the paper",
                f"{value:.2f} [{value - half:.2f}, {value + half:.2f}]",
                f"{ours.value:.2f} [{ours.low:.2f}, {ours.high:.2f}]",
                "yes" if overlaps else "no",
            ]
            rows.append([Cell(text) for text in texts])
    if not rows:
        first = methods[0].runs[0].path
        fail(f"{first} and the other runs have no method, environment and settings of the paper")
    note = (
        "Final IQM return with 95 % bootstrap intervals, 30 seeds in the paper, whose interval is "
        "its printed number ± half width. The paper prints two pairs of rows named DQN. "
        "SpaceInvaders differs between the gymnax versions (28 aliens in the paper's 0.0.9, 24 in "
        "1.0.1): compare its ratios, not its returns."
    )
    header = [
        "Environment",
        "Algorithm",
        "Variant",
        "Time-outs",
        "Paper",
        "Here",
        "Intervals overlap",
    ]
    return Table("Paper against here", header, rows, note)


def has_papers_settings(method: Method) -> bool:
    """Returns whether a method's arguments are those behind the paper's final returns."""
    accepted = SETTINGS["PQN" if method.algorithm == "PQN" else "DQN"]
    return all(method.args.get(name) in values for name, values in accepted.items())


if __name__ == "__main__":
    command.run(main)

"""Writes docs/results.md and the tables in README.md and docs/speed.md from the records in docs/results.

python plots/results.py            # writes all three
python plots/results.py --check    # exit code 1 where they are not what the records give
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import command
import numpy as np
import speed
import stats
from paper import EFFICIENCY
from paper import ENVS
from paper import FINAL
from paper import LEVEL
from paper import THRESHOLDS
from paper import TIMES
from records import read_run
from reproduce import ATARI
from reproduce import DQN_KINDS
from reproduce import GAMES
from reproduce import LONG_SEAS
from reproduce import MINIGRID
from reproduce import MINIGRID_DIFFERENT
from reproduce import ROOT
from reproduce import Experiment
from reproduce import find
from reproduce import find_with_repeats
from reproduce import is_missing
from reproduce import read_index

PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
CLAIMS = ROOT / "docs" / "claims.md"
SPEED = ROOT / "docs" / "speed.md"
SPEED_RECORDS = ROOT / "docs" / "results" / "speed"
H200 = SPEED_RECORDS / "h200"
RELEASED = H200 / "released.json"
WITH_BASELINE = (
    H200 / "dqn.json",
    H200 / "beside_released.json",
    H200 / "r2d2.json",
    H200 / "bootstrapped.json",
    SPEED_RECORDS / "cpu.json",
)
RELEASED_ASTERIX = ROOT / "docs" / "results" / "released" / "asterix.json"
SEEDS = 30  # of a cell that does not say another number
START, END = "<!-- results: begin, written by plots/results.py -->", "<!-- results: end -->"
ALGORITHMS = {
    "": "DQN",
    "--double": "DDQN",
    "--dueling": "Dueling DQN",
    "--double --dueling": "Dueling DDQN",
}
RATES = {
    "SCORER": "--scorer",
    "Baseline, per-layer rates": "--ablation per-layer-lr",
    "Baseline, fast rate": "--learning-rate 5e-4",
    "Baseline": "",
    "SCORER, MSBE follower": "--scorer --follower-loss msbe",
}
LAYERED = "Baseline, per-layer rates"
LAYERED_128 = "Baseline, per-layer rates, batches of 128"
PQN_RATES = {name: RATES[name] for name in ("SCORER", LAYERED, "Baseline")}
FOLLOWER_RATES = ("2e-4", "3e-4", "5e-4", "7.5e-4", "1e-3")
RATES_ON_BREAKOUT = ("1e-4", *FOLLOWER_RATES)  # of baselines
SINGLE_RATES = ("1e-4", "2e-4", "5e-4", "1e-3")  # of baselines that are run on all four games
ATARI_STEPS = {"Pong": "5e6", "DoubleDunk": "4e6"}  # of the other games 1e6
ABLATIONS = {
    "SCORER": "--scorer",
    "MSBE follower": "--scorer --follower-loss msbe",
    "Inverted roles": "--scorer --ablation inverted-roles",
    "Synchronous": "--scorer --ablation synchronous",
    "Baseline, per-layer rates": "--ablation per-layer-lr",
    "Baseline": "",
    "Baseline, batches of 128": "--batch-size 128",
    "Baseline, per-layer rates, batches of 128": "--ablation per-layer-lr --batch-size 128",
}
METHODS = RATES | ABLATIONS  # flags by name


class Sample(NamedTuple):
    """All seeds of one method on one environment."""

    timesteps: np.ndarray  # [T]
    returns: np.ndarray  # [seeds, T]
    curves: dict  # by name, [seeds, T]; diagnostics only of the seeds that have them

    @property
    def scores(self):
        """Returns each seed's mean return over the last 10 % of training, [seeds]."""
        return stats.final_scores(self.timesteps, self.returns)

    @property
    def mean_returns(self):
        """Returns each seed's mean return over the whole of training, [seeds]."""
        return self.returns.mean(axis=1)

    def final(self, name: str):
        """Returns each seed's mean of a curve over the last 10 %, where it was measured, [seeds]."""
        curve = self.curves[name]
        return stats.final_scores(self.timesteps, curve)


class Records:
    """The records in docs/results, each read once."""

    def __init__(self):
        self.index = read_index([ROOT / "docs" / "results"])
        self.samples = {}

    def sample(self, script: str, env: str, flags: str, seeds=30) -> Sample | None:
        """Returns the sample of an experiment, or None where a seed has no record."""
        key = (script, env, flags, seeds)
        if key not in self.samples:
            self.samples[key] = self.read(Experiment("", script, env, flags, seeds))
        return self.samples[key]

    def folder(self, name: str) -> Sample:
        """Returns the pooled records of a folder of docs/results that answers a question of its own."""
        timesteps, curves = read_curves(sorted((ROOT / "docs" / "results" / name).iterdir()))
        return Sample(timesteps, curves["returns"], curves)

    def read(self, experiment: Experiment) -> Sample | None:
        """Reads the records of an experiment, each seed once."""
        found = find(experiment._replace(needs="best_returns"), self.index)
        if is_missing(experiment, found):
            found = find(experiment, self.index)
        if is_missing(experiment, found):
            return None
        timesteps, curves = read_curves([record.path.parent for record in found])
        if "srank" not in curves:  # another record of the same seeds may have the diagnostics
            diagnosed = find(experiment._replace(needs="srank"), self.index)
            folders = [record.path.parent for record in diagnosed]
            curves = (read_curves(folders)[1] if folders else {}) | curves
        return Sample(timesteps, curves["returns"], curves)

    def all_scores(self, script: str, env: str, flags: str) -> np.ndarray:
        """Returns the final scores of every run of an experiment, [runs]: a seed may stand twice."""
        found = find_with_repeats(Experiment("", script, env, flags), self.index)
        timesteps, curves = read_curves([record.path.parent for record in found])
        return stats.final_scores(timesteps, curves["returns"])


def read_curves(folders: list[Path]) -> tuple[np.ndarray, dict]:
    """Returns the timesteps [points] of an experiment's runs, and their curves [seeds, points]."""
    runs = [read_run(folder) for folder in folders]
    curves = {}
    for name in sorted(set.union(*(set(run.curves) for run in runs))):
        curves[name] = np.concatenate([run.curves[name] for run in runs if name in run.curves])
    return runs[0].timesteps, curves


# ------------------------------------------- Words ------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(estimate: stats.Estimate, digits: int) -> str:
    """Returns 51.28 [50.97, 51.53]."""
    value, low, high = (f"{x:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def final_return(sample: Sample | None, digits=1) -> str:
    """Returns the final IQM return with its interval, or a dash."""
    if sample is None:
        return "-"
    number = len(sample.scores)
    text = interval(stats.bootstrap(stats.iqm, sample.scores), digits)
    return text if number == SEEDS else f"{text} ({number})"


def join_words(words: list[str]) -> str:
    """Returns Asterix, Breakout and Freeway, or none."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part) or "none"


def p_text(p: float) -> str:
    """Returns a p value as text."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def compare(sample: Sample, other: Sample) -> str:
    """Returns which of two samples has the higher final IQM return: above, below or level."""
    return compare_scores(sample.scores, other.scores)


def compare_scores(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Returns which of two methods' scores, [seeds] each, have the higher IQM: above, below or level."""
    if not stats.is_level(stats.difference_test(ours, theirs)):
        return "above"
    return "below" if not stats.is_level(stats.difference_test(theirs, ours)) else "level"


def p_of_the_better(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Returns the p value of the method that is ahead; of the first where they are level."""
    pair = (theirs, ours) if compare_scores(ours, theirs) == "below" else (ours, theirs)
    return p_text(stats.difference_test(*pair))


def relation_and_p(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Returns above, level or below, and the p value of the method that is ahead."""
    return f"{compare_scores(ours, theirs)}, {p_of_the_better(ours, theirs)}"


def with_p(sample: Sample | None, other: Sample | None, digits: int) -> str:
    """Returns a sample's final return, and the p value that it is no better than another's."""
    text = final_return(sample, digits)
    if sample is None or other is None:
        return text
    return f"{text}, {p_text(stats.difference_test(sample.scores, other.scores))}"


def digits_of(env: str) -> int:
    """Returns how many digits a return on an environment is printed with."""
    return 2 if "Freeway" in env or "Navix" in env else 1


# ------------------------------------------- MinAtar ----------------------------------------------


class PaperCell(NamedTuple):
    """One cell of the paper's table, and this project's."""

    algorithm: str
    variant: str
    env: str
    paper: tuple  # each printed value and its half width: DQN has two
    sample: Sample | None
    baseline: Sample | None  # of SCORER's cells

    def is_comparable(self) -> bool:
        """Returns whether there is a number here, and of the same game as the paper's."""
        return self.sample is not None and not self.env.startswith("SpaceInvaders")

    def agrees(self) -> bool:
        """Returns whether the intervals overlap, with one of the paper's where it prints two."""
        ours = stats.bootstrap(stats.iqm, self.sample.scores)
        return any(ours.low <= v + half and ours.high >= v - half for v, half in self.paper)


def paper_cells(records: Records) -> list[PaperCell]:
    """Returns the paper's table "Final IQM return", cell by cell."""
    cells = []
    kinds = {name: ("scorer_dqn.py", kind) for kind, name in ALGORITHMS.items()}
    kinds["PQN"] = ("scorer_pqn.py", "")
    for algorithm, (script, kind) in kinds.items():
        for variant, player in (("Baseline", ""), ("SCORER", "--scorer")):
            for column, env in enumerate(ENVS):
                printed = tuple(
                    FINAL[key][column] for key in FINAL if key[:2] == (algorithm, variant)
                )
                sample = records.sample(script, env, f"{kind} {player}".strip())
                baseline = records.sample(script, env, kind) if player else None
                cells.append(PaperCell(algorithm, variant, env, printed, sample, baseline))
    return cells


def paper_section(records: Records) -> str:
    """Returns the section on the paper's main table."""
    cells = paper_cells(records)
    rows = []
    for start in range(0, len(cells), len(ENVS)):
        group = cells[start : start + len(ENVS)]
        rows.append([group[0].algorithm, group[0].variant, *map(cell_text, group)])
        printed = [" or ".join(f"{v} ± {half}" for v, half in cell.paper) for cell in group]
        rows.append(["", "paper", *printed])
    lines = [
        "## The paper's table: five algorithms, four games",
        "",
        "`python plots/reproduce.py minatar pqn` makes the records of 1e8 steps; below each the paper's "
        "number (DQN is printed twice); p: SCORER beside its baseline. "
        "SpaceInvaders has 24 aliens here, as in MinAtar, and 28 in the paper's version of gymnax, so its "
        "returns are not compared. Time-outs are bootstrapped here.",
        "",
        table(["Algorithm", "", *(env.removesuffix("-MinAtar") for env in ENVS)], rows),
        "",
        agreement(cells),
        "",
        "![Learning curves on Breakout](images/breakout.png)",
    ]
    return "\n".join(lines)


def cell_text(cell: PaperCell) -> str:
    """Returns a cell: this project's number, and whether it agrees with the paper's."""
    text = with_p(cell.sample, cell.baseline, digits_of(cell.env))
    return f"{text} ✓" if cell.is_comparable() and cell.agrees() else text


def agreement(cells: list[PaperCell]) -> str:
    """Returns in how many cells the number agrees, and in how many pairs the order does."""
    comparable = [cell for cell in cells if cell.is_comparable()]
    agreeing = sum(cell.agrees() for cell in comparable)
    pairs = [cell for cell in cells if cell.sample is not None and cell.baseline is not None]
    relations = [compare(cell.sample, cell.baseline) for cell in pairs]
    above, level, below = (relations.count(word) for word in ("above", "level", "below"))
    same_order = sum(
        relation == paper_order(cell.algorithm, cell.env)
        for relation, cell in zip(relations, pairs)
    )
    return (
        f"✓: the intervals overlap. They do in {agreeing} of {len(comparable)} cells that can be "
        f"compared (SpaceInvaders apart). SCORER is above its baseline in {above} of {len(pairs)} pairs, "
        f"level in {level}, below in {below}; that is the paper's order, by the marks of its own test, in "
        f"{same_order} of {len(pairs)}."
    )


def paper_order(algorithm: str, env: str) -> str:
    """Returns whether the paper's table marks SCORER above its baseline, or the two as level."""
    return "level" if (algorithm, env) in LEVEL else "above"


def rates_section(records: Records) -> str:
    """Returns the section on the question whether the game or the two rates do it."""
    faster = {
        name: f"{RATES[name]} --follower-learning-rate 1e-3".strip()
        for name in ("SCORER", LAYERED, "SCORER, MSBE follower")
    }
    with_large = RATES | {LAYERED_128: METHODS[LAYERED_128]}
    lines = [
        "## The game, or the two rates?",
        "",
        "SCORER trains perception at 5e-4 and control at 1e-4. The baselines have one loss: at 1e-4, at "
        "5e-4 (fast rate), or at SCORER's two rates (per-layer rates). Each of SCORER's players draws a batch "
        "of 64, a baseline one of 64 in all, or of 128. The MSBE follower plays the game with the mean "
        "square in place of the variance. DQN; srank is the effective rank ([defined "
        "below](#representation)) at the end; p: SCORER beside the row's method.",
        "",
        table(["", *GAMES], rates_rows(records, "scorer_dqn.py", with_large)),
        "",
        verdict(records),
        "",
        repeats_text(records),
        "",
        "With perception at 1e-3:",
        "",
        table(["", *GAMES[:2]], rates_rows(records, "scorer_dqn.py", faster, GAMES[:2])),
        "",
        "The same for PQN, where SCORER's rates are 5e-4 and 2.5e-4:",
        "",
        table(["PQN", *GAMES], rates_rows(records, "scorer_pqn.py", PQN_RATES)),
    ]
    return "\n".join(lines)


def rates_rows(
    records: Records, script: str, methods: dict[str, str], games=GAMES
) -> list[list[str]]:
    """Returns a row for each method, of flags by name: its cells on the games."""
    rows = []
    for name, flags in methods.items():
        row = [name]
        for game in games:
            env = f"{game}-MinAtar"
            sample = records.sample(script, env, flags)
            scorer = None if name == "SCORER" else records.sample(script, env, methods["SCORER"])
            row.append(rates_cell(sample, scorer, digits_of(game)))
        rows.append(row)
    return rows


def rates_cell(sample: Sample | None, scorer: Sample | None, digits: int) -> str:
    """Returns return, srank and the p value that SCORER is no better."""
    text = final_return(sample, digits)
    if sample is not None and "srank" in sample.curves:
        text += f", srank {stats.iqm(sample.final('srank')):.0f}"
    if sample is not None and scorer is not None:
        text += f", {p_text(stats.difference_test(scorer.scores, sample.scores))}"
    return text


def normalised(records: Records, flags: str) -> stats.Estimate | None:
    """Returns the mean over the games of the final IQM, each over that of the best of RATES."""
    scores = []
    for game in GAMES:
        sample = records.sample("scorer_dqn.py", f"{game}-MinAtar", flags)
        if sample is None:
            return None
        others = [
            records.sample("scorer_dqn.py", f"{game}-MinAtar", other) for other in RATES.values()
        ]
        best = max(stats.iqm(other.scores) for other in others if other)
        scores.append(sample.scores / best)
    return stats.bootstrap(stats.mean_of_iqms, *scores)


def verdict(records: Records) -> str:
    """Returns whether it is the game or the two rates: two sentences for DQN, and what is beside them."""
    singles = [normalised(records, f"--learning-rate {rate}") for rate in SINGLE_RATES]
    names = ("SCORER", LAYERED, "SCORER, MSBE follower")
    means = [normalised(records, RATES[name]) for name in names]
    if None in (*means, *singles):
        return ""
    ours, layered, msbe, *single = (f"{mean.value:.2f}" for mean in (*means, *singles))
    return (
        "For DQN the two rates make most of SCORER's gain, and as much data per update the rest where it was "
        "run: beside a baseline with the same two rates (per layer) SCORER is "
        f"{relations(records, 'scorer_dqn.py', 'SCORER', LAYERED, with_p=True)}; beside that baseline with a "
        "batch of 128, as large as the two that SCORER's players draw, it is "
        f"{relations(records, 'scorer_dqn.py', 'SCORER', LAYERED_128, with_p=True)}, and the other games are "
        "not run. The mean over the games of the final IQM, each divided by that of the best of "
        f"{len(RATES)} methods with batches of 64, is {ours} for SCORER, {layered} for the per-layer baseline, "
        f"{msbe} for the game with a mean-square follower, and {', '.join(single)} for baselines with one rate "
        f"of {', '.join(SINGLE_RATES)}.\n\n"
        "Each layer of the baseline with 128 sees all 128 transitions, each of SCORER's players 64; SCORER "
        "with larger batches is not run. "
        "Beside the game with a mean-square follower SCORER is "
        f"{relations(records, 'scorer_dqn.py', 'SCORER', 'SCORER, MSBE follower')}. PQN's two players share "
        "one minibatch, so that its per-layer baseline has the same rates and the same data: SCORER is "
        f"{relations(records, 'scorer_pqn.py', 'SCORER', LAYERED)}."
    )


def relations(records: Records, script: str, name: str, other: str, with_p=False) -> str:
    """Returns on which games one of METHODS is above, level with and below another."""
    found = []
    for game in GAMES:
        ours, theirs = (
            records.sample(script, f"{game}-MinAtar", METHODS[which]) for which in (name, other)
        )
        if ours is None or theirs is None:
            continue
        p = p_of_the_better(ours.scores, theirs.scores)
        found.append((f"{game} ({p})" if with_p else game, compare(ours, theirs)))
    return group_by_relation(found)


def group_by_relation(found: list[tuple[str, str]]) -> str:
    """Returns pairs of name and relation as words: above on the one, level on the other."""
    parts = []
    for relation in ("above", "level", "below"):
        names = [name for name, its_relation in found if its_relation == relation]
        if names:
            parts.append(f"{relation} on {join_words(names)}")
    return ", ".join(parts)


def repeats_text(records: Records) -> str:
    """Returns what is left of the text above when every run counts, and the MSBE row beside the second."""
    ours, layered = (
        records.all_scores("scorer_dqn.py", "Breakout-MinAtar", RATES[name])
        for name in ("SCORER", LAYERED)
    )
    p = p_text(stats.difference_test(ours, layered))
    msbe = relations(records, "scorer_dqn.py", "SCORER, MSBE follower", LAYERED, with_p=True)
    return (
        "On Breakout 30 of SCORER's seeds and the per-layer baseline's 30 were trained twice; with all "
        f"{len(ours)} and {len(layered)} runs pooled {p}, so whether SCORER is above it there hangs on how "
        f"repeats are counted. The game with a mean-square follower is, beside the per-layer baseline, "
        f"{msbe}."
    )


def ablations_section(records: Records) -> str:
    """Returns the section on the paper's ablations."""
    rows = []
    for name, flags in ABLATIONS.items():
        samples = [records.sample("scorer_dqn.py", f"{game}-MinAtar", flags) for game in GAMES]
        row = [name, *(final_return(s, digits_of(g)) for s, g in zip(samples, GAMES))]
        mean = normalised(records, flags)
        rows.append([*row, interval(mean, 2) if mean else "-"])
    lines = [
        "## Ablations",
        "",
        "`python plots/reproduce.py ablations rates`. DQN, final IQM return; right the mean over the "
        "four games, each divided by that of the best of the first five methods above. Synchronous players both "
        "have the leader's rate.",
        "",
        table(["", *GAMES, "Mean"], rows),
        "",
        "Synchronous players are, beside the baseline, "
        f"{relations(records, 'scorer_dqn.py', 'Synchronous', 'Baseline', with_p=True)}.",
        "",
        "![Ablations on Breakout over the steps of training](images/ablations.png)",
    ]
    return "\n".join(lines)


def efficiency_section(records: Records) -> str:
    """Returns the section on how soon given returns are reached."""
    lines = [
        "## Sample efficiency",
        "",
        "Millions of steps until a seed's curve first reaches a return: mean over the seeds that do ± half "
        "the width of the 95 % interval, and how many do (those that never do would have taken longest); "
        "N/A: the IQM never does. Behind it the paper's number; SpaceInvaders is another game there.",
    ]
    for env in ENVS:
        rows = []
        for kind, algorithm in ALGORITHMS.items():
            for variant, player in (("Baseline", ""), ("SCORER", "--scorer")):
                sample = records.sample("scorer_dqn.py", env, f"{kind} {player}".strip())
                printed = EFFICIENCY[env][algorithm, variant]
                texts = [
                    f"{time_text(sample, threshold)}; {printed_time(paper)}"
                    for threshold, paper in zip(THRESHOLDS[env], printed)
                ]
                rows.append([algorithm, variant, *texts])
        header = ["Algorithm", "", *(f"Return {threshold}" for threshold in THRESHOLDS[env])]
        lines += ["", f"### {env.removesuffix('-MinAtar')}", "", table(header, rows)]
        if env == "Asterix-MinAtar":
            lines += ["", released_asterix(records)]
    return "\n".join(lines)


def released_asterix(records: Records) -> str:
    """Returns what the released script has where the paper's number says it is done."""
    saved = json.loads(RELEASED_ASTERIX.read_text())
    sample = records.sample("scorer_dqn.py", "Asterix-MinAtar", "--scorer")
    point = np.argmin(np.abs(sample.timesteps - saved["timesteps"]))
    returns = sample.returns[:, point]
    return (
        f"After {saved['timesteps'] / 1e6:.0f} million steps SCORER has {returns.mean():.1f} here (DQN, "
        f"standard deviation over {len(returns)} seeds {returns.std(ddof=1):.1f}); the released script, "
        f"run on a CPU, has {' and '.join(map(str, saved['returns']))} in two seeds. So the printed times "
        "probably come from settings that neither the paper's tables nor its code has."
    )


def time_text(sample: Sample | None, threshold: float) -> str:
    """Returns the mean time to a return, and how many seeds reach it."""
    if sample is None:
        return "-"
    reached = stats.sample_efficiency(sample.timesteps, sample.returns, threshold)
    if reached is None:
        return "N/A"
    time, number = reached
    return f"{time.value / 1e6:.1f} ± {time.half_width / 1e6:.1f} ({number})"


def printed_time(paper: tuple | None) -> str:
    """Returns the paper's time to a return."""
    return "paper N/A" if paper is None else f"paper {paper[0]} ± {paper[1]}"


def sensitivity_section(records: Records) -> str:
    """Returns the section on the learning rates."""
    rows = []
    for rate in FOLLOWER_RATES:
        flags = f"--scorer --follower-learning-rate {rate}"
        rows.append([f"SCORER, follower's rate {rate}", *sensitivity_row(records, flags)])
    for rate in RATES_ON_BREAKOUT:
        rows.append(
            [f"Baseline, rate {rate}", *sensitivity_row(records, f"--learning-rate {rate}")]
        )
    lines = [
        "## Learning rates",
        "",
        "`python plots/reproduce.py sensitivity rates`. DQN, final IQM return; SCORER's leader stays at "
        "1e-4, a baseline's rate is that of all its layers. In the picture the returns' axes do not begin at 0.",
        "",
        table(["", *GAMES], rows),
        "",
        "![Final return by learning rate](images/rates.png)",
    ]
    return "\n".join(lines)


def sensitivity_row(records: Records, flags: str) -> list[str]:
    """Returns a method's final return on each game."""
    samples = [records.sample("scorer_dqn.py", f"{game}-MinAtar", flags) for game in GAMES]
    return [final_return(sample, digits_of(game)) for sample, game in zip(samples, GAMES)]


def representation_section(records: Records) -> str:
    """Returns the section on effective rank and parameter norms."""
    methods = [("DQN", name, flags) for name, flags in RATES.items()]
    for kind, algorithm in ALGORITHMS.items():
        if algorithm == "DQN":
            continue
        methods += [(algorithm, "SCORER", f"{kind} --scorer"), (algorithm, "Baseline", kind)]
    rows = []
    for algorithm, name, flags in methods:
        samples = [records.sample("scorer_dqn.py", env, flags) for env in ENVS]
        rows.append([algorithm, name, *(representation_text(sample) for sample in samples)])
    lines = [
        "## Representation",
        "",
        "At the end of training: srank (singular values that make up 99 % of their sum) of control's 128 "
        "hidden features on 2,048 transitions of the replay, and the norm of all parameters.",
        "",
        table(["Algorithm", "", *GAMES], rows),
        "",
        "![Effective rank and norm over training on four games](images/rank_and_norm.png)",
    ]
    return "\n".join(lines)


def representation_text(sample: Sample | None) -> str:
    """Returns final srank and norm."""
    if sample is None or "srank" not in sample.curves:
        return "-"
    norm = np.hypot(sample.final("perception_norm"), sample.final("control_norm"))
    return f"srank {stats.iqm(sample.final('srank')):.0f}, norm {stats.iqm(norm):.0f}"


# ---------------------------------- The other environments ----------------------------------------


def minigrid_section(records: Records) -> str:
    """Returns the section on MiniGrid."""
    rows = []
    for place in MINIGRID:
        env = f"Navix-{place}-v0"
        scorer = records.sample("scorer_r2d2.py", env, "--scorer")
        baseline = records.sample("scorer_r2d2.py", env, "")
        fast = None
        if place in MINIGRID_DIFFERENT:
            fast = records.sample("scorer_r2d2.py", env, "--learning-rate 3e-4")
        threshold = stats.shared_threshold([scorer.scores, baseline.scores])
        row = [place, *(final_return(sample, 2) for sample in (scorer, baseline, fast))]
        p = stats.difference_test(scorer.scores, baseline.scores)
        row += [f"{compare(scorer, baseline)}, {p_text(p)}", f"{threshold:.2f}"]
        row += [touch_text(sample, threshold) for sample in (scorer, baseline, fast)]
        row += [minigrid_paper(env, variant) for variant in ("SCORER", "Baseline")]
        rows.append(row)
    header = ["Environment", "SCORER", "Baseline", "Baseline, 3e-4", "SCORER is", "Threshold"]
    header += ["Steps: SCORER", "Baseline", "Baseline, 3e-4", "Paper: SCORER", "Baseline"]
    lines = [
        "## MiniGrid",
        "",
        "`python plots/reproduce.py minigrid`. R2D2, 1e6 steps. Left the final IQM return; right millions of "
        "steps until the mean return of ten environments first touches 99 % of the best run's final score: "
        "mean over the seeds that touch it ± half the width of the 95 % interval, and how many do. A "
        "touched threshold is not a learned task. SCORER counts as faster where the intervals lie apart, or "
        "where fewer than half of the baseline's seeds touch the threshold; the paper's count compares its "
        "printed means.",
        "",
        table(header, rows),
        "",
        "Beside the baseline at the follower's rate, 3e-4; the mean over training is of a seed's whole curve, "
        "since three of the five end at the ceiling:",
        "",
        fast_r2d2_table(records),
        "",
        "![Learning curves on MiniGrid](images/minigrid.png)",
    ]
    return "\n".join(lines)


def fast_r2d2_pairs(records: Records) -> list[tuple[str, Sample, Sample]]:
    """Returns environment, SCORER and the baseline at the follower's rate, where R2D2 has both."""
    pairs = []
    for place in MINIGRID_DIFFERENT:
        ours, fast = (
            records.sample("scorer_r2d2.py", f"Navix-{place}-v0", flags)
            for flags in ("--scorer", "--learning-rate 3e-4")
        )
        if ours is not None and fast is not None:
            pairs.append((place, ours, fast))
    return pairs


def fast_r2d2_table(records: Records) -> str:
    """Returns the table of R2D2's SCORER beside the baseline at the follower's rate."""
    header = ["Environment", "SCORER is at the end", "Mean over training: SCORER"]
    header += ["Baseline, 3e-4", "SCORER is"]
    rows = []
    for place, ours, fast in fast_r2d2_pairs(records):
        row = [place, relation_and_p(ours.scores, fast.scores)]
        row += [interval(stats.bootstrap(stats.iqm, s.mean_returns), 2) for s in (ours, fast)]
        rows.append([*row, relation_and_p(ours.mean_returns, fast.mean_returns)])
    return table(header, rows)


def touch_text(sample: Sample | None, threshold: float) -> str:
    """Returns the time to a threshold, and how many seeds touch it, as text."""
    if sample is None:
        return "-"
    mean, number = touch_time(sample, threshold)
    if number == 0:
        return "- (0)"
    if number == 1:
        return f"{mean.value / 1e6:.2f} (1)"
    return f"{mean.value / 1e6:.2f} ± {mean.half_width / 1e6:.2f} ({number})"


def touch_time(sample: Sample, threshold: float) -> tuple[stats.Estimate, int]:
    """Returns the mean time to a threshold over the seeds that touch it, and how many do.

    Where it is recorded, the highest value within each point decides.
    """
    curve = sample.curves.get("best_returns", sample.returns)
    return stats.mean_time(stats.time_to_threshold(sample.timesteps, curve, threshold))


def minigrid_paper(env: str, variant: str) -> str:
    """Returns the paper's time to threshold and success rate."""
    time, half, success = TIMES[env][variant]
    return f"- ({success} %)" if time is None else f"{time} ± {half} ({success} %)"


def control_section(records: Records) -> str:
    """Returns the section on classic control."""
    rows = []
    for kind in DQN_KINDS:
        baseline, scorer = [ALGORITHMS[kind], "Baseline"], [ALGORITHMS[kind], "SCORER"]
        for env in ("CartPole-v1", "Acrobot-v1"):
            theirs = records.sample("scorer_dqn.py", env, kind)
            ours = records.sample("scorer_dqn.py", env, f"{kind} --scorer".strip())
            baseline.append(final_return(theirs))
            scorer.append(with_p(ours, theirs, 1))
        rows += [baseline, scorer]
    lines = [
        "## Classic control",
        "",
        "`python plots/reproduce.py control`. 1e6 steps, final IQM return; p: SCORER beside its baseline.",
        "",
        table(["Algorithm", "", "CartPole-v1", "Acrobot-v1"], rows),
        "",
        "![Learning curves on classic control](images/control.png)",
    ]
    return "\n".join(lines)


def deep_sea_section(records: Records) -> str:
    """Returns the section on Deep Sea."""
    rows = []
    for size in (10, 20, 30):
        for kind in ("", "--stochastic"):
            row = [f"depth {size}{', stochastic' if kind else ''}"]
            for player in ("", "--scorer", "--scorer --follower-loss msbe"):
                row.append(deep_sea_text(records, f"--size {size} {kind} {player}", 100 * size))
            rows.append(row)
    long = []
    for name, kind in LONG_SEAS.items():
        flags = f"--size 10 {kind} --total-timesteps 50000"
        row = [name]
        for player in ("", "--scorer", "--scorer --follower-learning-rate 5e-3"):
            row.append(deep_sea_text(records, f"{flags} {player}", 5_000))
        long.append(row)
    lines = [
        "## Deep Sea",
        "",
        "`python plots/reproduce.py deep-sea`. Bootstrapped DQN with random priors, 100 episodes per row of "
        "the sea, both players at 1e-3: median first episode that is solved by bsuite's rule, and how many "
        "seeds solve it.",
        "",
        table(["Sea", "Baseline", "SCORER", "SCORER, MSBE follower"], rows),
        "",
        "Other runs, at depth 10 for 5,000 episodes, as in the paper, which does not say whether its agents "
        "have priors:",
        "",
        table(["Sea", "Baseline", "SCORER", "SCORER, follower's rate 5e-3"], long),
        "",
        "![How many seeds have solved Deep Sea](images/deep_sea.png)",
        "",
        "![The same over 5,000 episodes](images/deep_sea_long.png)",
    ]
    return "\n".join(lines)


def deep_sea_text(records: Records, flags: str, episodes: int) -> str:
    """Returns the median first solved episode, and how many seeds solved the sea."""
    sample = records.sample("scorer_bootstrapped_dqn.py", "", " ".join(flags.split()))
    if sample is None:
        return "-"
    last = sample.curves["solved_episode"][:, -1]
    solved = last >= 0
    median = np.median(np.where(solved, last, np.inf))
    first = f"{median:,.0f}" if np.isfinite(median) else f"> {episodes:,}"
    return f"{first} ({solved.sum()} of {len(solved)})"


def atari_section(records: Records) -> str:
    """Returns the section on Atari."""
    rows = []
    for game in ("Pong", *ATARI):
        steps = ATARI_STEPS.get(game, "1e6")
        row = [game, steps]
        for player in ("--scorer", ""):
            flags = f"{player} --total-timesteps {steps}".strip()
            sample = records.sample("scorer_pqn_atari.py", f"{game}-v5", flags, seeds=1)
            row.append(mean_and_seeds(sample))
        rows.append(row)
    lines = [
        "## Atari",
        "",
        "PQN, one or two seeds (in brackets), so no claim: mean return over the last 10 % of training, whole "
        "games, rewards as the game gives them. The paper trains five seeds for 5e7 steps.",
        "",
        table(["Game", "Steps", "SCORER", "Baseline"], rows),
        "",
        "![Learning curves on Atari](images/atari.png)",
    ]
    return "\n".join(lines)


def mean_and_seeds(sample: Sample | None) -> str:
    """Returns the mean of the final returns, and of how many seeds."""
    return "-" if sample is None else f"{sample.scores.mean():,.0f} ({len(sample.scores)})"


# ------------------------------------------ Readings ----------------------------------------------


class Reading(NamedTuple):
    """What paper and code leave open, and where the records of the preset and of the other are."""

    text: str
    script: str
    env: str
    preset: str  # flags
    other: str = ""  # flags, or
    folder: str = ""  # the folder of docs/results that has the other's records
    preset_seeds: int = 30
    other_seeds: int = 30


AT_TIMEOUT = dict(
    text="time-outs bootstrap, or end the value", script="scorer_dqn.py", env="Breakout-MinAtar"
)
L1_NORM = dict(text="no L1 norm, or one", script="scorer_dqn.py", env="CartPole-v1", other_seeds=5)
PQN_SHORT = "--scorer --total-timesteps 5e5"
READINGS = (
    Reading(**AT_TIMEOUT, preset="--scorer", other="--scorer --no-bootstrap-at-timeout"),
    Reading(**AT_TIMEOUT, preset="", other="--no-bootstrap-at-timeout"),
    Reading(
        text="the leader's rate falls linearly, or to the power 1.5",
        script="scorer_dqn.py",
        env="Breakout-MinAtar",
        preset="--scorer",
        other="--scorer --leader-decay-power 1.5",
    ),
    Reading(**L1_NORM, preset="--scorer", other="--scorer --l1-norm True"),
    Reading(**L1_NORM, preset="", other="--l1-norm True"),
    Reading(
        text="an update every 80 steps, or every 20",
        script="scorer_r2d2.py",
        env="Navix-FourRooms-v0",
        preset="--scorer",
        other="--scorer --update-interval 20",
        other_seeds=10,
    ),
    Reading(
        text="rates, epochs and minibatches on control: this project's, or the released script's",
        script="scorer_pqn.py",
        env="CartPole-v1",
        preset=PQN_SHORT,
        other=f"{PQN_SHORT} --learning-rate 1e-4 --follower-learning-rate 5e-4 --num-epochs 2 "
        "--num-minibatches 4",
        preset_seeds=5,
        other_seeds=5,
    ),
    Reading(
        text="batches are drawn a step ahead, or in the step",
        script="scorer_dqn.py",
        env="Breakout-MinAtar",
        preset="--scorer",
        folder="plain_loop",
    ),
)


def readings_section(records: Records) -> str:
    """Returns the section on what the readings change that paper and code leave open."""
    lines = [
        "## Readings",
        "",
        "Where paper and released code leave a choice ([differences.md](differences.md)): final IQM return "
        "with the first reading, which is the preset, and with the second.",
        "",
        table(
            ["Reading", "Script", "Environment", "Method", "First", "Second"],
            [reading_row(records, reading) for reading in READINGS],
        ),
    ]
    return "\n".join(lines)


def reading_row(records: Records, reading: Reading) -> list[str]:
    """Returns the row of a reading."""
    script, env = reading.script, reading.env
    preset = records.sample(script, env, reading.preset, reading.preset_seeds)
    if reading.folder:
        other = records.folder(reading.folder)
    else:
        other = records.sample(script, env, reading.other, reading.other_seeds)
    method = "SCORER" if "--scorer" in reading.preset else "Baseline"
    texts = [final_return(sample, digits_of(env)) for sample in (preset, other)]
    return [reading.text, f"`{script}`", env, method, *texts]


# --------------------------------------- The pages ------------------------------------------------


def page(records: Records) -> str:
    """Returns docs/results.md."""
    sections = [
        "# Results",
        "Every table is written by `python plots/results.py` from the records in `docs/results`; which "
        "claims of the paper they bear out stands in [claims.md](claims.md). A dash: no record; "
        "`python plots/reproduce.py --dry-run` names those that are still to be made.",
        f"Unless a table says otherwise, a cell has the IQM (the mean of the middle half) over {SEEDS} seeds "
        "of each seed's mean return over the last 10 % of training, with its 95 % bootstrap interval; "
        "another number of seeds stands behind it. A seed that was trained twice counts once, with its "
        "first run.",
        "p is the paper's one-sided bootstrap test of the difference of two IQMs: the share of "
        f"{stats.TEST_RESAMPLES:,} resamples in which the method is not ahead of the other. It is above the "
        f"other where p < {stats.LEVEL}, below where the other is above it, else level, which does not say "
        "that they are equal. Of two equal methods one comparison in ten is not level, and no p is corrected "
        "for the number of tests.",
        paper_section(records),
        rates_section(records),
        "![Final return and rank of SCORER and its baselines](images/game_or_rates.png)",
        ablations_section(records),
        efficiency_section(records),
        sensitivity_section(records),
        representation_section(records),
        minigrid_section(records),
        deep_sea_section(records),
        control_section(records),
        atari_section(records),
        readings_section(records),
    ]
    return "\n\n".join(sections) + "\n"


def glance(records: Records) -> str:
    """Returns README's block: one row per experiment, how many claims hold, and the verdict."""
    rows = []
    cells = paper_cells(records)
    for algorithm in (*ALGORITHMS.values(), "PQN"):
        group = [cell for cell in cells if cell.algorithm == algorithm and cell.variant == "SCORER"]
        here = [compare(cell.sample, cell.baseline) for cell in group]
        paper = [paper_order(algorithm, cell.env) for cell in group]
        counts = [count_relations(here), count_relations(paper), count_same(here, paper)]
        rows.append([f"{algorithm}, MinAtar", *counts])
    rows += glance_minigrid(records)
    header = ["", "SCORER above, level, below its baseline", "in the paper", "same outcome on"]
    parts = [verdict(records), fast_r2d2_text(records), table(header, rows), claims_text()]
    return "\n\n".join(parts)


def fast_r2d2_text(records: Records) -> str:
    """Returns how R2D2's SCORER stands to a baseline at the follower's rate, and what the table is."""
    pairs = fast_r2d2_pairs(records)
    at_end = group_by_relation([(place, compare(*samples)) for place, *samples in pairs])
    over_all = group_by_relation(
        [
            (place, compare_scores(ours.mean_returns, fast.mean_returns))
            for place, ours, fast in pairs
        ]
    )
    return (
        "R2D2, beside a baseline at the follower's rate, where SCORER is ahead of the one at the leader's: at "
        f"the end SCORER is {at_end}; in the mean over all of training it is {over_all}. That baseline has "
        "one rate and half of SCORER's data; both rates, or equal data, are not run with R2D2. The table below "
        "compares as the paper does, with a baseline at the leader's slow rate, so it does not tell the game "
        "from the rates; for DDQN, the Dueling agents and classic control nothing else is run."
    )


def glance_minigrid(records: Records) -> list[list[str]]:
    """Returns R2D2's rows: final return, which the paper does not print, and time to threshold."""
    relations, here, paper = [], [], []
    for place in MINIGRID:
        env = f"Navix-{place}-v0"
        scorer, baseline = (
            records.sample("scorer_r2d2.py", env, flags) for flags in ("--scorer", "")
        )
        relations.append(compare(scorer, baseline))
        here.append(is_faster(scorer, baseline))
        ours, theirs = (TIMES[env][variant][0] for variant in ("SCORER", "Baseline"))
        paper.append(theirs is None or ours < theirs)
    faster = [f"faster on {sum(words)} of {len(words)}" for words in (here, paper)]
    return [
        ["R2D2, MiniGrid", count_relations(relations), "not printed", "-"],
        ["R2D2, steps to a threshold", *faster, count_same(here, paper)],
    ]


def count_same(here: list, paper: list) -> str:
    """Returns on how many environments two lists say the same, as 3 of 4."""
    return f"{sum(a == b for a, b in zip(here, paper))} of {len(here)}"


def claims_text() -> str:
    """Returns how many of the paper's claims hold, counted on the page that judges them."""
    verdicts = re.findall(r"(?m)\| (holds|partly|fails|open) \|$", CLAIMS.read_text())
    counts = [verdicts.count(word) for word in ("holds", "partly", "fails", "open")]
    return (
        f"Of {len(verdicts)} claims of the paper {counts[0]} hold, {counts[1]} hold in part, {counts[2]} "
        f"fail and {counts[3]} are open: [docs/claims.md](docs/claims.md) has each with its figures."
    )


def is_faster(one: Sample, other: Sample) -> bool:
    """Returns whether one's time to the shared threshold is below the other's, intervals apart.

    A method of which most seeds never touch the threshold is the slower.
    """
    threshold = stats.shared_threshold([one.scores, other.scores])
    (ours, _), (theirs, number) = (touch_time(s, threshold) for s in (one, other))
    if number < len(other.scores) / 2:
        return True
    return ours.value + ours.half_width < theirs.value - theirs.half_width


def count_relations(relations: list[str]) -> str:
    """Returns 3, 1, 0 of 4."""
    counts = [str(relations.count(relation)) for relation in ("above", "level", "below")]
    return f"{', '.join(counts)} of {len(relations)}"


def speed_table() -> str:
    """Returns docs/speed.md's block: what a step costs beside the released code and PureJaxQL."""
    saved = json.loads(RELEASED.read_text())
    rows = []
    for row in saved["rows"]:
        other, here = np.mean(row["microseconds_other"]), np.mean(row["microseconds_here"])
        numbers = [f"{other:.0f}", f"{here:.0f}", f"{other / here:.1f}"]
        rows.append([row["algorithm"], str(row["num_seeds"]), row["other"], *numbers])
    header = ["", "Seeds", "Beside", "There", "Here", "Times as fast"]
    lines = [f"{saved['title']}.", "", table(header, rows)]
    lines += [
        "",
        "SCORER beside its own baseline, each pair in one call on one H200, below on two CPU cores:",
        "",
        cost_table(),
    ]
    return "\n".join(lines)


def cost_table() -> str:
    """Returns what SCORER costs over its baseline, and how long its starts take."""
    rows = []
    for path in WITH_BASELINE:
        device = "H200" if path.parent == H200 else "CPU"
        groups = speed.group_repeats(json.loads(path.read_text())["runs"])
        for config, runs in groups.items():
            baseline = groups.get(config._replace(scorer=False))
            if config.scorer and baseline:
                numbers = cost_cells(config.num_seeds, runs, baseline)
                rows.append([f"`{config.script}`", device, *numbers])
    header = ["", "", "Seeds", "SCORER", "Baseline", "Ratio", "First start, s", "Second start, s"]
    return table(header, rows)


def cost_cells(num_seeds: int, runs: list[dict], baseline: list[dict]) -> list[str]:
    """Returns both players' median step, their ratio, and SCORER's first and second start."""
    us, its_us = (np.median(speed.step_us(repeats)) for repeats in (runs, baseline))
    first = start_text([run for run in runs if run["round"] == 0])
    second = start_text([run for run in runs if run["round"] > 0])
    return [str(num_seeds), f"{us:.0f}", f"{its_us:.0f}", f"{us / its_us:.2f}", first, second]


def start_text(runs: list[dict]) -> str:
    """Returns the median of a process's seconds less its training, or a dash."""
    if not runs:
        return "-"
    return f"{np.median([run['wall_seconds'] - run['seconds'] for run in runs]):.0f}"


def with_block(text: str, block: str) -> str:
    """Returns a page's text with the block between its two marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{block}\n\n{END}{after}"


def main(check: bool = False):
    """Writes docs/results.md and the tables in README.md and docs/speed.md from the records.

    Args:
        check: write nothing, and end with exit code 1 where one of them is stale.
    """
    records = Records()
    wanted = {PAGE: page(records)}
    wanted[README] = with_block(README.read_text(), glance(records))
    wanted[SPEED] = with_block(SPEED.read_text(), speed_table())
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} {'is stale: run plots/results.py' if check else 'written'}"
        )
        if not check:
            path.write_text(wanted[path])
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    command.run(main)

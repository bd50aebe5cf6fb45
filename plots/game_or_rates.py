"""The game or the two rates: SCORER and its baselines on four games, from the records in docs/results.

python plots/game_or_rates.py --out docs/images/game_or_rates.png
python plots/game_or_rates.py --show steps --out docs/images/rank_and_norm.png
python plots/game_or_rates.py --show rates --out docs/images/rates.png
"""

from pathlib import Path
from typing import Literal

import command
import numpy as np
import stats
import style
from reproduce import GAMES
from results import FOLLOWER_RATES
from results import RATES_ON_BREAKOUT
from results import Records
from sensitivity import draw_by_rate

BOTH_RATES = "--ablation per-layer-lr"
METHODS = {
    "Baseline, 1e-4": ("", "Baseline"),
    "Baseline, 5e-4": ("--learning-rate 5e-4", "Baseline (learning rate 0.0005)"),
    "Baseline, 5e-4 and 1e-4": (BOTH_RATES, "Baseline (per layer lr)"),
    "SCORER, 5e-4 and 1e-4": ("--scorer", "SCORER"),
}
# Drawn where it is run: one batch as large as the two that SCORER's players draw.
LARGE_BATCH = {
    "Baseline, 5e-4 and 1e-4, batch of 128": (
        f"{BOTH_RATES} --batch-size 128",
        "Baseline (batch size 128)",
    ),
}
NOTE = dict(textcoords="offset points", ha="center", fontsize=6, rotation=90)


def draw_game(top, bottom, records: Records, game: str):
    """Draws one game: return above, srank below, a bar for each method with its 95 % interval."""
    methods = METHODS | LARGE_BATCH
    for place, (flags, name) in enumerate(methods.values()):
        sample = records.sample("scorer_dqn.py", f"{game}-MinAtar", flags)
        if sample is None:
            for ax in (top, bottom):
                ax.annotate("not run", (place, 0), (0, 4), **NOTE)
            continue
        color = style.LOOKS[name][0]
        draw_bar(top, place, stats.bootstrap(stats.iqm, sample.scores), color)
        if "srank" in sample.curves:
            draw_bar(bottom, place, stats.bootstrap(stats.iqm, sample.final("srank")), color)
        else:
            bottom.annotate("not measured", (place, 0), (0, 4), **NOTE)
    for label, (_, name) in methods.items():  # the legend, in this order whatever is missing
        top.bar(np.nan, np.nan, color=style.LOOKS[name][0], label=label)
    top.set(title=game, xticks=[], xlim=(-0.6, len(methods) - 0.4))
    top.margins(y=0.12)
    bottom.set(xticks=[], xlim=(-0.6, len(methods) - 0.4), ylim=(0, 140))


def draw_bar(ax, place: int, estimate: stats.Estimate, color: str):
    """Draws a bar with its interval and its value."""
    low, high = estimate.value - estimate.low, estimate.high - estimate.value
    ax.bar(place, estimate.value, color=color, width=0.8, zorder=2)
    ax.errorbar(
        place, estimate.value, [[low], [high]], color="black", linewidth=0.8, capsize=1.5, zorder=3
    )
    end = (place, estimate.high)
    ax.annotate(f"{estimate.value:.0f}", end, (0, 1), textcoords="offset points", ha="center")


def draw_game_over_steps(top, bottom, records: Records, game: str):
    """Draws one game: srank above, norm of all parameters below, over the steps of training."""
    looks = style.choose_looks([name for _, name in METHODS.values()])
    for label, (flags, name) in METHODS.items():
        sample = records.sample("scorer_dqn.py", f"{game}-MinAtar", flags)
        if sample is None or "srank" not in sample.curves:
            continue
        look = looks[name] | dict(label=label)
        norm = np.hypot(sample.curves["perception_norm"], sample.curves["control_norm"])
        style.draw_known(top, sample.timesteps, sample.curves["srank"], **look)
        style.draw_known(bottom, sample.timesteps, norm, **look)
    top.set(title=game, ylim=(0, 140))
    bottom.set(xlabel="Steps (millions)", ylim=(0, None))


def draw_game_by_rate(ax, records: Records, game: str):
    """Draws one game: final return against the rate, a line for each player."""
    env = f"{game}-MinAtar"
    lines = {
        ("SCORER, by follower's rate", style.SCORER): ("--scorer --follower-", FOLLOWER_RATES),
        ("Baseline, by its rate", style.BASELINE): ("--", RATES_ON_BREAKOUT),
    }
    for (label, look), (flag, rates) in lines.items():
        samples = [records.sample("scorer_dqn.py", env, f"{flag}learning-rate {r}") for r in rates]
        known = [(float(rate), s.scores) for rate, s in zip(rates, samples) if s is not None]
        draw_by_rate(ax, dict(known), label, look)
    rates = [float(rate) for rate in RATES_ON_BREAKOUT]
    ax.set_xticks(rates, RATES_ON_BREAKOUT, rotation=90)
    ax.set_xticks([], minor=True)
    ax.set(title=game, xlabel="Learning rate")


def main(
    out: Path = Path("game_or_rates.png"), show: Literal["return", "steps", "rates"] = "return"
):
    """Draws SCORER and its baselines on four games, from the records in docs/results.

    Args:
        out: picture to write; its ending names the format.
        show: final return and effective rank of SCORER and its baselines; or rank and norm over
            the steps of training; or final return by learning rate.
    """
    style.check_options(out)
    records = Records()
    if show == "rates":
        figure, axes = style.make_panels(4, columns=4)
        for ax, game in zip(axes, GAMES):
            draw_game_by_rate(ax, records, game)
        axes[0].set_ylabel("Final IQM return")
    else:
        figure, axes = style.make_panels(8, columns=4)
        draw = draw_game if show == "return" else draw_game_over_steps
        for column, game in enumerate(GAMES):
            draw(axes[column], axes[4 + column], records, game)
        axes[0].set_ylabel("IQM return" if show == "return" else "srank of 128")
        axes[4].set_ylabel("srank of 128" if show == "return" else "parameter norm")
    numbers = [len(sample.scores) for sample in records.samples.values() if sample is not None]
    note = f"DQN, {style.seeds_text(numbers)}"
    if show != "rates":
        note += "; behind a method the rates of perception and of control"
    style.save(figure, out, note)


if __name__ == "__main__":
    command.run(main)

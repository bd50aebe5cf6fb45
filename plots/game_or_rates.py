"""The game or the two rates: final return and effective rank of SCORER and three baselines.

python plots/game_or_rates.py --out docs/images/game_or_rates.png
python plots/game_or_rates.py --over-steps --out docs/images/rank_and_norm.png
"""

from pathlib import Path

import command
import numpy as np
import stats
import style
from reproduce import GAMES
from results import Records

METHODS = {
    "Baseline, 1e-4": ("", "Baseline"),
    "Baseline, 5e-4": ("--learning-rate 5e-4", "Baseline (learning rate 0.0005)"),
    "Baseline, 5e-4 and 1e-4": ("--ablation per-layer-lr", "Baseline (per layer lr)"),
    "SCORER, 5e-4 and 1e-4": ("--scorer", "SCORER"),
}


def draw_game(top, bottom, records: Records, game: str):
    """Draws one game: return above, srank below, a bar for each method with its 95 % interval."""
    for place, (flags, name) in enumerate(METHODS.values()):
        sample = records.sample("scorer_dqn.py", f"{game}-MinAtar", flags)
        if sample is None:
            continue
        color = style.LOOKS[name][0]
        draw_bar(top, place, stats.bootstrap(stats.iqm, sample.scores), color)
        if "srank" in sample.curves:
            draw_bar(bottom, place, stats.bootstrap(stats.iqm, sample.final("srank")), color)
        else:
            bottom.annotate("not measured", (place, 4), ha="center", fontsize=6, rotation=90)
    for label, (_, name) in METHODS.items():  # the legend, in this order whatever is missing
        top.bar(np.nan, np.nan, color=style.LOOKS[name][0], label=label)
    top.set(title=game, xticks=[], xlim=(-0.6, len(METHODS) - 0.4))
    top.margins(y=0.12)
    bottom.set(xticks=[], xlim=(-0.6, len(METHODS) - 0.4), ylim=(0, 140))


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


def main(out: Path = Path("game_or_rates.png"), over_steps: bool = False):
    """Draws final return and effective rank of SCORER and three baselines on four games.

    Args:
        out: picture to write; its ending names the format.
        over_steps: draw effective rank and norm over the steps of training instead.
    """
    style.check_options(out)
    records = Records()
    figure, axes = style.make_panels(8, columns=4)
    if over_steps:
        draw, labels = draw_game_over_steps, ("srank of 128", "parameter norm")
    else:
        draw, labels = draw_game, ("IQM return", "srank of 128")
    for column, game in enumerate(GAMES):
        draw(axes[column], axes[4 + column], records, game)
    axes[0].set_ylabel(labels[0])
    axes[4].set_ylabel(labels[1])
    numbers = [len(sample.scores) for sample in records.samples.values() if sample is not None]
    seeds = style.seeds_text(numbers)
    style.save(figure, out, f"DQN, {seeds}, rates of perception and control")


if __name__ == "__main__":
    command.run(main)

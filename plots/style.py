"""The look that all figures share: sizes for print, and one name and one look for each method.

Figures are drawn in the size at which they are shown, 3.25 inches (a column) or 6.5 (a page), with
letters of 7 and 8 points.
"""

import textwrap
import zlib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
import numpy as np
from command import fail
from command import write
from matplotlib.backend_bases import FigureCanvasBase
from records import Method
from stats import Estimate
from stats import bootstrap
from stats import iqm
from stats import rolling_mean

COLUMN = 3.25  # inches
PAGE = 6.5
LEAST_PANEL = 1.55  # inches, with its labels

# Colours that stay apart with any colour vision, from dark to light; in grey, dashes and markers do.
PURPLE, BROWN, GREY, RED = "#44229A", "#8A5A00", "#666666", "#D55E00"
GREEN, PINK, ORANGE, SKY = "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
SCORER = (PURPLE, "-", "o")
BASELINE = (ORANGE, "-", "s")
DASHED, DOTTED, DASH_DOT = (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1))
LONG, DASH_DOT_DOT = (0, (8, 2)), (0, (5, 1, 1, 1, 1, 1))

# Colour, line and marker of each method that the results compare, by its name in all figures.
LOOKS = {
    "SCORER": SCORER,
    "Baseline": BASELINE,
    "SCORER (MSBE follower)": (GREEN, DASHED, "D"),
    "SCORER (inverted roles)": (PINK, DASH_DOT, "v"),
    "SCORER (synchronous)": (SKY, DASH_DOT_DOT, "^"),
    "Baseline (per layer lr)": (BROWN, DASHED, "P"),
    "Baseline (learning rate 0.0002)": (GREY, DASH_DOT, "<"),
    "Baseline (learning rate 0.0005)": (RED, LONG, "X"),
    "Baseline (learning rate 0.001)": (GREY, DOTTED, ">"),
    "Baseline (batch size 128)": (PINK, DOTTED, "p"),
    "SCORER (follower learning rate 0.0002)": (SKY, DOTTED, "v"),
    "SCORER (follower learning rate 0.0003)": (GREEN, DASH_DOT, "^"),
    "SCORER (follower learning rate 0.00075)": (PINK, DASHED, "d"),
    "SCORER (follower learning rate 0.001)": (GREEN, LONG, "*"),
    "SCORER (leader decay power 1.5)": (BROWN, DASH_DOT_DOT, "h"),
    "SCORER (follower learning rate 0.016)": (RED, LONG, ">"),
    "SCORER (MSBE follower, follower learning rate 0.032)": (GREY, DOTTED, "8"),
    # The plain methods of MinAtar, where a figure of rates names them all.
    "SCORER (follower learning rate 0.0005)": SCORER,
    "Baseline (learning rate 0.0001)": BASELINE,
}
# Looks for all other names: none of the table above, nor the colours of SCORER and the baseline.
OTHERS = [
    (color, line, marker)
    for line, marker in zip((DASHED, DOTTED, LONG, DASH_DOT), "<hp>")
    for color in (SKY, RED, BROWN, GREEN)
]

plt.rcParams.update(
    {
        "font.size": 7,
        "axes.titlesize": 8,
        "axes.labelsize": 7.5,
        "figure.titlesize": 8,
        "figure.labelsize": 7.5,
        "legend.fontsize": 7.5,
        "legend.title_fontsize": 7,
        "legend.frameon": False,
        "legend.handlelength": 3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.linewidth": 0.6,
        "grid.color": "#E5E5E5",
        "grid.linewidth": 0.5,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "lines.linewidth": 1.2,
        "lines.markersize": 3,
        "savefig.dpi": 200,
        "pdf.fonttype": 42,
    }
)


# --------------------------------------------- Looks ----------------------------------------------


def choose_looks(names) -> dict[str, dict]:
    """Returns colour, line and marker by name: the same for a name in all figures.

    A name that is not in LOOKS gets one of OTHERS by its letters, or, where another name of this
    figure has that one already, the next.
    """
    names = list(dict.fromkeys(names))
    known = [LOOKS[name] for name in names if name in LOOKS]
    taken = []
    looks = {}
    for name in names:
        look = LOOKS.get(name)
        if look is None or look in taken:
            first = zlib.crc32(name.encode()) % len(OTHERS)
            in_turn = OTHERS[first:] + OTHERS[:first]
            free = [other for other in in_turn if other not in taken + known]
            look = (free or in_turn)[0]
        taken.append(look)
        color, line, marker = look
        looks[name] = dict(color=color, linestyle=line, marker=marker)
    return looks


def label_methods(methods: list[Method]) -> tuple[dict[str, dict], str]:
    """Returns each method's look and label, by its name, and what the legend says of all of them.

    The number of seeds stands once where all have the same, otherwise with each method.
    """
    looks = choose_looks([method.variant for method in methods])
    numbers = {name: [] for name in looks}
    for method in methods:
        numbers[method.variant].append(len(method.seeds))
    shared = seeds_text([number for each in numbers.values() for number in each])
    same = len({number for each in numbers.values() for number in each}) == 1
    for name, look in looks.items():
        look["label"] = plain(name if same else f"{name}, {seeds_text(numbers[name])}")
    notes = [shared] if same else []
    if shared != "1 seed":
        notes.append("shaded: 95 % bootstrap interval")
    return looks, "; ".join(notes)


def seeds_text(numbers: list[int]) -> str:
    """Returns how many seeds there are, in words: 1 seed, 30 seeds, 30 to 60 seeds."""
    least, most = min(numbers), max(numbers)
    if least < most:
        return f"{least} to {most} seeds"
    return "1 seed" if most == 1 else f"{most} seeds"


def return_label(methods: list[Method], smooth: float, of="return") -> str:
    """Returns the label of an axis of returns: one seed has no IQM."""
    has_iqm = any(len(method.seeds) > 1 for method in methods)
    name = f"IQM {of}" if has_iqm else of.capitalize()
    return f"{name},\nmean of {100 * smooth:g} % of steps" if smooth else name


def plain(text: str) -> str:
    """Returns text of which matplotlib takes nothing for a formula."""
    return text.replace("$", r"\$")


def env_title(env: str) -> str:
    """Returns an environment's name for a narrow panel: DoorKey-6x6, not Navix-DoorKey-6x6-v0."""
    if env.startswith("Navix-"):
        env = env.removeprefix("Navix-").removesuffix("-v0")
    return plain(env)


# --------------------------------------------- Panels ---------------------------------------------


def check_format(flag: str, out: Path):
    """Ends in one sentence if `out`, the value of `flag`, is not the name of a picture."""
    if out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        fail(f"{flag} {out} must end in a format such as .png, .pdf or .svg")


def check_options(out: Path, smooth: float = 0.0):
    """Ends in one sentence where --out or --smooth cannot be used."""
    if not 0 <= smooth < 1:
        fail(f"--smooth {smooth} must be a share of the curve, from 0 to below 1")
    check_format("--out", out)


def make_panels(number: int, width: float | None = None, columns: int | None = None):
    """Returns a figure and `number` axes, in as many rows as the width needs.

    One panel fills a column of a page, several the page, unless a width is given.
    """
    if width is None:
        width = COLUMN if number == 1 else PAGE
    if not 1 <= width <= 40:
        fail(f"--width {width} must be from 1 to 40 inches")
    most = max(1, int(width / LEAST_PANEL))
    if columns is None:
        rows = ceil_divide(number, min(most, 4))
        columns = ceil_divide(number, rows)
    columns = min(columns, most)
    rows = ceil_divide(number, columns)
    height = min(2.3, 0.7 + 0.65 * width / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height * rows), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[number:]:
        ax.remove()
    return figure, list(axes.flat[:number])


def ceil_divide(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def draw_band(ax, x, value, low, high, **look):
    """Draws a line over x with a few markers, and shades what lies between low and high."""
    if np.isfinite(low).any():
        ax.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
    offset = zlib.crc32(look["label"].encode()) % 100 / 1000  # markers of two curves lie apart
    markevery = (offset, 0.2) if len(x) > 10 else 1
    ax.plot(x, value, markevery=markevery, **look)


def draw_returns(ax, methods: list[Method], looks: dict, smooth: float):
    """Draws the IQM return of each method over millions of steps."""
    for method in methods:
        estimate = bootstrap(iqm, method.returns)
        draw_curve(ax, method.timesteps, estimate, smooth, **looks[method.variant])


def draw_curve(ax, timesteps, estimate: Estimate, smooth: float, **look):
    """Draws a curve [T] with its interval over millions of steps, smoothed over a share of them."""
    draw_band(ax, timesteps / 1e6, *(rolling_mean(x, smooth) for x in estimate), **look)


def draw_known(ax, timesteps, curves, **look):
    """Draws the IQM of curves [seeds, T] that the scripts measure only now and then."""
    known = np.isfinite(curves).all(axis=0)
    draw_curve(ax, timesteps[known], bootstrap(iqm, curves[:, known]), 0, **look)


def label_axes(axes, x: str, y: str):
    """Labels x below the lowest panel of each column, and y left of the first of each row."""
    for ax in axes:
        spec = ax.get_subplotspec()
        grid = spec.get_gridspec()
        number_below = spec.num1 + grid.ncols
        if number_below >= len(axes):
            ax.set_xlabel(x)
        if spec.is_first_col():
            ax.set_ylabel(y)


# ------------------------------------------ The picture -------------------------------------------


def save(figure, out: Path, note: str = ""):
    """Writes the figure with one legend below all panels, and `note` as the legend's heading."""
    handles = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    legend = place_legend(figure, sort_labels(handles), note)
    height = legend.get_window_extent(figure.canvas.get_renderer()).height / figure.dpi
    figure.set_figheight(figure.get_figheight() + height)
    write(out, figure.savefig)
    plt.close(figure)
    print(out)


def sort_labels(handles: dict) -> dict:
    """Returns the legend's handles by label, sorted: a plain method before its variants."""

    def order(label):
        return label.split()[0].rstrip(","), "(" in label, label

    return {label: handles[label] for label in sorted(handles, key=order)}


def place_legend(figure, handles: dict, note: str):
    """Puts the legend below the panels, in as many columns as its width allows."""
    letters = int(figure.get_figwidth() * 72 / 3.9) - 12  # of 7.5 points, beside a handle
    labels = [textwrap.fill(label, max(10, letters)) for label in handles]
    for columns in range(min(4, len(labels)), 0, -1):
        legend = figure.legend(
            handles.values(),
            labels,
            title=plain(note) or None,
            loc="outside lower center",
            ncols=columns,
            columnspacing=1.2,
        )
        width = legend.get_window_extent(figure.canvas.get_renderer()).width
        if width <= figure.get_figwidth() * figure.dpi or columns == 1:
            return legend
        legend.remove()

"""The look that all figures share."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from matplotlib.backend_bases import FigureCanvasBase
from records import Method, fail, write
from stats import Estimate, rolling_mean

SCORER, BASELINE = "#44229A", "#E69F00"  # dark and light, so told apart in grey and with any colour vision
COLORS = "#009E73", "#56B4E9", "#CC79A7", "#8A5A00", "#D55E00", "#666666"
DASHES = "--", "-.", (0, (5, 1, 1, 1, 1, 1)), ":", (0, (8, 2))
OTHERS = [(COLORS[i % 6], DASHES[i % 5]) for i in range(30)]  # all different
PANEL = 3.3, 2.5  # inches, one column of a two-column page wide

plt.rcParams.update({
    "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 9, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E5E5E5",
    "lines.linewidth": 1.6, "savefig.dpi": 200, "pdf.fonttype": 42})


def check_format(flag: str, out: Path):
    """One sentence and exit code 2 if `out`, the value of `flag`, is not the name of a picture."""
    if out.suffix[1:] not in FigureCanvasBase.get_supported_filetypes():
        fail(f"{flag} {out} must end in a format such as .png, .pdf or .svg")


def panels(rows: int, columns: int, out: Path, smooth: int):
    """Figure and axes [rows, columns] for the command line's --out and --smooth, which it checks."""
    if smooth < 1:
        fail(f"--smooth {smooth} must be at least 1")
    check_format("--out", out)
    return plt.subplots(rows, columns, figsize=(PANEL[0] * columns, PANEL[1] * rows), squeeze=False,
                        layout="constrained")


def looks(methods: list[Method], name="label") -> dict[str, dict]:
    """Colour and dashes by name: SCORER and baseline have their own, also next to further variants."""
    names = {getattr(method, name): method.args["scorer"] for method in methods}
    scorer, baseline = ([n for n, is_scorer in names.items() if is_scorer == kind] for kind in (True, False))
    fixed = [(group[0], (color, "-")) for group, color in ((scorer, SCORER), (baseline, BASELINE)) if group]
    others = zip(scorer[1:] + baseline[1:], OTHERS * len(names))
    return {n: dict(label=n, color=color, linestyle=dashes) for n, (color, dashes) in [*fixed, *others]}


def draw_band(ax, x, value, low, high, **look):
    """A line over x, and shaded around it what lies between low and high."""
    ax.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
    ax.plot(x, value, **look)


def draw_curve(ax, timesteps, estimate: Estimate, smooth: int, **look):
    """A curve [T] with its shaded interval over millions of steps, each a rolling mean over `smooth` points."""
    draw_band(ax, timesteps / 1e6, *(rolling_mean(x, smooth) for x in estimate), **look)


def save(figure, out: Path):
    """Writes the figure with one legend for all panels above them."""
    handles = {}
    for ax in figure.axes:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    width = 0.6 + 0.07 * max(map(len, handles))  # inches of an entry
    columns = max(1, int(figure.get_figwidth() / width))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(handles) // columns))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)
    write(out, figure.savefig)
    print(out)

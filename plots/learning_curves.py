"""Learning curves: return of SCORER and baseline, a panel for each algorithm and environment.

python plots/learning_curves.py runs --out learning_curves.png
python plots/learning_curves.py runs --incomplete      # also of runs that still go on
"""

from pathlib import Path

import command
import style
from records import by_algorithm
from records import by_env
from records import load
from tyro.conf import Positional


def main(
    runs: Positional[list[Path]],
    out: Path = Path("learning_curves.png"),
    smooth: float = 0.05,
    width: float | None = None,
    incomplete: bool = False,
):
    """Learning curves: return of SCORER and baseline, a panel for each algorithm and environment.

    Args:
        runs: run folders, or folders that hold them.
        out: picture to write; its ending names the format.
        smooth: share of the steps over which a point of a curve is the mean.
        width: inches; 3.25, a column, for one panel and 6.5, a page, for several.
        incomplete: take runs that did not finish, or that still go on.
    """
    style.check_options(out, smooth)
    methods = load(runs, incomplete=incomplete)
    looks, note = style.label_methods(methods)
    families = by_algorithm(methods)
    panels = [
        (algorithm, env, group)
        for algorithm, family in families.items()
        for env, group in by_env(family).items()
    ]
    figure, axes = style.make_panels(len(panels), width)
    for ax, (algorithm, env, group) in zip(axes, panels):
        style.draw_returns(ax, group, looks, smooth)
        title = style.env_title(env)
        ax.set_title(f"{title}\n{algorithm}" if len(families) > 1 else title)
    style.label_axes(axes, "Steps (millions)", style.return_label(methods, smooth))
    style.save(figure, out, f"{', '.join(families)}; {note}")


if __name__ == "__main__":
    command.run(main)

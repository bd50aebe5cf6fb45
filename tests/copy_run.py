"""Copies what stands below the heading "The run" of scorer_dqn.py into the other scripts.

    python tests/copy_run.py

Edit that part in scorer_dqn.py, run this, and a test (tests/test_project.py) is content again.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = f"# {'=' * 98}\n# The run\n"
SOURCE = ROOT / "scorer_dqn.py"
COPIES = [ROOT / name for name in ("scorer_pqn.py", "scorer_r2d2.py", "scorer_bootstrapped_dqn.py")]


def split(path: Path) -> tuple[str, str]:
    """Returns what stands above the heading of the run and what stands from it on."""
    above, heading, below = path.read_text().partition(HEADING)
    assert heading, f"{path} has no heading of the run"
    return above, heading + below


def main():
    run = split(SOURCE)[1]
    for path in COPIES:
        path.write_text(split(path)[0] + run)


if __name__ == "__main__":
    main()

"""The commands that README and docs show, how long they take and what return they end with.

python tests/commands.py    # runs those of which that is stated, writes docs/results/speed/commands.json
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORD = ROOT / "docs" / "results" / "speed" / "commands.json"

COMMAND = re.compile(r"(?:python|uv run) ((?:plots/|tests/)?\w+\.py[^`\n#&;]*)")


def list_commands() -> list[tuple[str, str]]:
    """Returns each command once, without its `python`, and a page that shows it."""
    found = {}
    for page in PAGES:
        for command in COMMAND.findall(page.read_text()):
            found.setdefault(command.strip(), page.name)
    return list(found.items())


def list_stated_times() -> dict[str, float]:
    """Returns the seconds that README states for its first command and in its table, by command."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"    python (.+)\n\nOn two CPU cores that takes (\d+) seconds", text)
    rows += re.findall(r"`python ([^`]+)`: (\d+) s", text)
    return {command: float(seconds) for command, seconds in rows}


def list_stated_returns() -> dict[str, float]:
    """Returns the final returns that README states for its first command, and the tour for its own."""
    readme, tour = ((ROOT / page).read_text() for page in ("README.md", "docs/tour.md"))
    (first,) = re.findall(r"    python (scorer_dqn.+ --save-model)\n\n.* to about (\d+)\.", readme)
    scorer, baseline = re.findall(r"    python (scorer_dqn.+CartPole.+)\n", tour)
    ((scorer_end, baseline_end),) = re.findall(
        r"about (\d+) for SCORER and (\d+) for the baseline", tour
    )
    stated = [first, (scorer, scorer_end), (baseline, baseline_end)]
    return {command: float(number) for command, number in stated}


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs a command of the repository in a folder, as a first start: nothing is compiled yet."""
    script, *flags = command.split()
    environment = os.environ | dict(JAX_PLATFORMS="cpu", XDG_CACHE_HOME=str(folder / "cache"))
    return subprocess.run(
        [sys.executable, str(ROOT / script), *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def final_return(stdout: str) -> float | None:
    """Returns the mean return that a training script's last line says, or None without a number."""
    found = re.search(r"mean return over the last 10 %: (-?[\d.]+)", stdout)
    return round(float(found[1]), 1) if found else None


def main(*chosen: str):
    """Runs the chosen commands, or all of which something is stated, and writes the record.

    Other work on the machine only makes a command slower, so the record keeps its fastest run.
    """
    machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}"
    seconds, returns = {}, {}
    if RECORD.exists() and json.loads(RECORD.read_text())["machine"] == machine:
        saved = json.loads(RECORD.read_text())
        seconds, returns = saved["seconds"], saved["returns"]
    for command in chosen or list_stated_times() | list_stated_returns():
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            done = run(command, Path(folder))
            took = round(time.time() - began, 1)
        assert done.returncode == 0, done.stderr
        end = final_return(done.stdout)
        print(f"{took:6.1f} s, final return {end}: {command}", flush=True)
        seconds[command] = min(took, seconds.get(command, took))
        returns[command] = end
        record = dict(machine=machine, seconds=seconds, returns=returns)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

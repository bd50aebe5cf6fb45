"""The commands that README and docs show, and how long they take.

python tests/commands.py    # runs those with a stated time, and writes docs/results/speed/commands.json
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


def main(*chosen: str):
    """Times the chosen commands, or all whose seconds README states, and writes the record.

    Other work on the machine only makes a command slower, so the record keeps its fastest run.
    """
    machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}"
    seconds = {}
    if RECORD.exists() and json.loads(RECORD.read_text())["machine"] == machine:
        seconds = json.loads(RECORD.read_text())["seconds"]
    for command in chosen or list_stated_times():
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            done = run(command, Path(folder))
            took = round(time.time() - began, 1)
        assert done.returncode == 0, done.stderr
        print(f"{took:6.1f} s  {command}", flush=True)
        seconds[command] = min(took, seconds.get(command, took))
        RECORD.write_text(json.dumps(dict(machine=machine, seconds=seconds), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

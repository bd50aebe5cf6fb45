"""README and docs: the code they show is the scripts', runs and learns; links and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPT = (ROOT / "scorer_dqn.py").read_text()


def blocks(page: Path) -> list[str]:
    """Returns the Python code on a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def function(name: str) -> str:
    """Returns the text of a function of scorer_dqn.py."""
    start = SCRIPT.index(f"def {name}(")
    return SCRIPT[start : SCRIPT.index("\n\n\n", start)].strip()


def test_readme_shows_the_round_as_it_is():
    """README's scorer_update is scorer_dqn.py's to the letter."""
    assert function("scorer_update") in [block.strip() for block in blocks(ROOT / "README.md")]


def test_pasted_agent_learns():
    """The agent of docs/paste.md, with the game pasted in, learns the corridor's action values."""
    (code,) = blocks(ROOT / "docs" / "paste.md")
    game = SCRIPT[SCRIPT.index("class Players(NamedTuple)") :]
    game = game[: game.index("\n# =====")]
    names = {}
    exec(code.replace("# here: the section", game + "\n# the section"), names)
    values = np.asarray(names["train"]())
    expected = 0.9 ** np.arange(7, -1, -1)
    np.testing.assert_allclose(values[:, 1], expected, atol=0.1)
    assert np.all(values[1:, 1] > values[1:, 0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    """Every relative link leads to a file."""
    for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_scripts_exist(page):
    """Every script that a command names is there."""
    for name in re.findall(r"python ((?:plots/|tests/)?\w+\.py)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_in_code_marks_exist(page):
    """Every `name` that looks like a function or flag is one of some script's."""
    sources = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    for name in re.findall(r"`--([a-z][a-z0-9-]+)", page.read_text()):
        words = {name, name.removeprefix("no-")}
        tools = "".join(path.read_text() for path in sorted((ROOT / "plots").glob("*.py")))
        known = any(word.replace("-", "_") in sources + tools for word in words)
        assert known, f"{page.name} names --{name}"


def test_tables_are_what_the_records_give():
    """docs/results.md and README's table are not stale."""
    command = [sys.executable, str(ROOT / "plots" / "results.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

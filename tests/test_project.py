"""The scripts as a set: what they declare to need, their size, and that what has one name is one text."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
LINES = {"scorer_dqn.py": 522, "scorer_pqn.py": 480, "scorer_bootstrapped_dqn.py": 480, "scorer_r2d2.py": 520,
         "baird.py": 300, "scorer_pqn_atari.py": 450}  # at most


def script_block(source: str) -> dict:
    """The PEP 723 block of a script, by the regular expression that PEP 723 gives."""
    found = re.findall(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source)
    assert len(found) == 1, "exactly one block"
    return tomllib.loads("".join(line.removeprefix("#").removeprefix(" ") for line in found[0][0].splitlines(True)))


def test_scripts_are_found():
    """The tests below look at something."""
    assert "scorer_dqn.py" in [path.name for path in SCRIPTS]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_dependencies_are_those_of_requirements(path):
    """Each dependency of the script's block stands in requirements.txt, pin included, to the letter."""
    block = script_block(path.read_text())
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = {line.split("#")[0].strip() for line in lines} - {""}
    assert block["requires-python"] == ">=3.11"
    assert block["dependencies"] and set(block["dependencies"]) <= required


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_dependencies_are_the_imports(path):
    """Every third-party import of the script, also inside functions, is declared, and nothing else is."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {module.split(".")[0] for module in modules}
    imported -= sys.stdlib_module_names
    declared = {re.split(r"[<>=~! ]", line)[0] for line in script_block(path.read_text())["dependencies"]}
    assert imported - {"numpy"} == declared - {"numpy", "six"}  # numpy comes with JAX; gymnax forgets to declare six


def test_one_name_is_one_text():
    """Functions that several scripts define under one name are the same to the letter."""
    texts = {}
    for path in SCRIPTS:
        source = path.read_text()
        for node in ast.parse(source).body:
            own = "make_train", "resolve"  # the algorithm, and what it accepts
            own += ("main",) * (path.name in ("baird.py", "scorer_pqn_atari.py"))  # no seeds side by side
            if isinstance(node, ast.FunctionDef) and node.name not in own:
                texts.setdefault(node.name, {})[path.name] = ast.get_source_segment(source, node)
    assert not {name: list(found) for name, found in texts.items() if len(set(found.values())) > 1}


@pytest.mark.parametrize("name", LINES)
def test_scripts_stay_short(name):
    """A script does not grow."""
    assert len((ROOT / name).read_text().splitlines()) <= LINES[name]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_nothing_runs_at_import(path):
    """At top level a script only imports, defines and assigns; its last statement is the guarded call of main."""
    *body, last = ast.parse(path.read_text()).body
    assert ast.unparse(last.test) == "__name__ == '__main__'" and ast.unparse(last.body) == "main()"
    allowed = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign
    assert all(isinstance(node, allowed) for node in body[1:]) and ast.get_docstring(ast.parse(path.read_text()))

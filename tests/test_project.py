"""The scripts as a set: what they need, what they share, and how their code is built."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import copy_run
import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
TOOLS = sorted((ROOT / "plots").glob("*.py"))
MOST_LINES = 60  # of a function's own
MOST_LINES_OF_MAIN = 45

# The names that one role has in every script that trains.
ROLES = set(
    "Args Players Perception Control q_values select bellman_error follower_loss leader_loss "
    "scorer_update baseline_update make_env make_train complete main".split()
)
# Roles that a script plays in another way, each with its reason.
WITHOUT = {
    # Linear value functions of seven states, without actions.
    "baird.py": "Perception Control q_values select make_env".split(),
}

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


def parse(path: Path) -> ast.Module:
    """Returns a file's syntax tree."""
    return ast.parse(path.read_text())


def script_block(source: str) -> dict:
    """Returns the PEP 723 block of a script, by the regular expression that PEP 723 gives."""
    found = re.findall(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source)
    assert len(found) == 1, "exactly one block"
    lines = found[0][0].splitlines(keepends=True)
    return tomllib.loads("".join(line.removeprefix("#").removeprefix(" ") for line in lines))


def test_scripts_are_found():
    """The tests below look at something."""
    assert "scorer_dqn.py" in [path.name for path in SCRIPTS]
    assert "records.py" in [path.name for path in TOOLS]


# ------------------------------------- What a script needs ----------------------------------------


@each_script
def test_dependencies_are_those_of_requirements(path):
    """Each dependency of the block stands in requirements.txt, pin included, to the letter."""
    block = script_block(path.read_text())
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = {line.split("#")[0].strip() for line in lines} - {""}
    assert block["requires-python"] == ">=3.11"
    assert block["dependencies"] and set(block["dependencies"]) <= required


@each_script
def test_dependencies_are_the_imports(path):
    """Every third-party import, also inside functions, is declared, and nothing else is."""
    modules = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module)
    imported = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    dependencies = script_block(path.read_text())["dependencies"]
    declared = {re.split(r"[<>=~! ]", line)[0] for line in dependencies}
    # numpy comes with JAX; gymnax forgets to declare six.
    assert imported - {"numpy"} == declared - {"numpy", "six"}


# ------------------------------------- What scripts share -----------------------------------------


@pytest.mark.parametrize("path", copy_run.COPIES, ids=lambda path: path.name)
def test_the_run_is_one_text(path):
    """What stands below the heading of the run is scorer_dqn.py's (python tests/copy_run.py)."""
    assert copy_run.split(path)[1] == copy_run.split(copy_run.SOURCE)[1]


def test_the_run_knows_no_algorithm():
    """Below its heading no name of the game, the networks or the environments appears."""
    above, below = copy_run.split(copy_run.SOURCE)
    needed = {"Args", "PRESETS", "SHOWN", "Output", "family", "complete", "make_env", "make_train"}
    used = {node.id for node in ast.walk(ast.parse(below)) if isinstance(node, ast.Name)}
    body = ast.parse(above).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert used & defined == needed


@each_script
def test_roles_have_their_names(path):
    """One role has one name in every script, whatever its text."""
    body = parse(path).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert ROLES - set(WITHOUT.get(path.name, ())) <= defined


# ------------------------------------ How the code is built ---------------------------------------


def list_functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """Returns all functions of a file: also methods, and those inside others."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def count_own_lines(function: ast.FunctionDef) -> int:
    """Returns a function's lines, docstring and blank lines included, functions inside it not."""
    lines = set(range(function.lineno, function.end_lineno + 1))
    for inner in list_functions(function):
        if inner is not function:
            lines -= set(range(inner.lineno, inner.end_lineno + 1))
    return len(lines)


def test_counting_own_lines():
    """Two lines of the outer function, one of the inner one, and the blank line between them."""
    outer, inner = list_functions(ast.parse("def f():\n    '''Doc.'''\n\n    def g(): pass"))
    assert (count_own_lines(outer), count_own_lines(inner)) == (3, 1)


@pytest.mark.parametrize("path", [*SCRIPTS, *TOOLS], ids=lambda path: path.name)
def test_functions_are_short(path):
    """No function has more lines of its own than a reader takes in at once."""
    tree = parse(path)
    too_long = {}
    for function in list_functions(tree):
        most = MOST_LINES_OF_MAIN if function.name == "main" else MOST_LINES
        if count_own_lines(function) > most:
            too_long[function.name] = count_own_lines(function)
    assert not too_long


@each_script
def test_docstrings(path):
    """The script, each of its classes and each outermost function has a docstring."""
    tree = parse(path)
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert ast.get_docstring(node), node.name


def is_guard(node: ast.stmt) -> bool:
    """Returns whether a statement is `if __name__ == "__main__":`, without an else."""
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) == "__name__ == '__main__'"
        and not node.orelse
    )


@each_script
def test_nothing_runs_at_import(path):
    """A script only imports, defines and assigns; its last statement is the guarded call of main.

    At its head it may listen to Ctrl-C, guarded as well, before the slow imports.
    """
    docstring, *body, last = parse(path).body
    assert is_guard(last) and ast.unparse(last.body) == "main()"
    allowed = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign
    others = [node for node in body if not isinstance(node, allowed)]
    for node in others:
        assert is_guard(node)
        assert ast.unparse(node.body) == "signal.signal(signal.SIGINT, signal.SIG_DFL)"
        assert ast.unparse(body[: body.index(node)]) == "import signal"
    assert len(others) <= 1


@each_script
def test_help_begins_with_what_fits(path):
    """A script's title and its commands, with which --help begins, fit into 80 columns."""
    title, _, commands, *_ = ast.get_docstring(parse(path)).split("\n\n")
    assert f"    python {path.name}" in commands
    assert max(len(line) for line in (title, *commands.splitlines())) <= 80

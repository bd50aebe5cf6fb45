"""README and docs: the code they show is the scripts', runs and learns; links and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import PAGES
from commands import ROOT
from flax.training.train_state import TrainState

SCRIPT = (ROOT / "scorer_dqn.py").read_text()
GAME = SCRIPT[SCRIPT.index("class Players(NamedTuple)") :]
GAME = GAME[: GAME.index("\n# =====")]  # what one pastes


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
    names = {}
    exec(code.replace("# here: the section", GAME + "\n# the section"), names)
    values = np.asarray(names["train"]())
    expected = 0.9 ** np.arange(7, -1, -1)
    np.testing.assert_allclose(values[:, 1], expected, atol=0.1)
    assert np.all(values[1:, 1] > values[1:, 0])


def toy():
    """Returns what README's agent has: two linear layers, a batch, and the game pasted in."""
    imports = "import jax, jax.numpy as jnp, optax\nfrom typing import Any, NamedTuple\n"
    names = {}
    exec(imports + GAME, names)
    players, batch = names["Players"], names["Batch"]
    networks = players(nn.Dense(8), nn.Dense(2))
    obs = jax.random.normal(jax.random.key(0), (32, 4))
    phi = networks.perception.init(jax.random.key(1), obs)["params"]
    theta = networks.control.init(jax.random.key(2), jnp.zeros((1, 8)))["params"]
    drawn = batch(obs, (obs[:, 0] > 0).astype(jnp.int32), obs[:, 1] + 3.0)
    return names | dict(
        networks=networks,
        params=players(phi, theta),
        optimizers=players(optax.adam(1e-1), optax.adam(3e-2)),
        TrainState=TrainState,
        batch=drawn,
        follower_batch=drawn,
        leader_batch=drawn,
    )


def test_readme_before_and_after():
    """README's two updates of a common agent, exactly as they stand there, both learn a toy."""
    before, once, after = (
        next(block for block in blocks(ROOT / "README.md") if words in block)
        for words in ("apply_gradients", "tx=None", "state.replace")
    )
    names = toy()

    def mean_square_of_delta(params, batch):
        return names["leader_loss"](names["bellman_error"](names["networks"], params, batch))

    names["mean_square_of_delta"] = mean_square_of_delta
    first = mean_square_of_delta(names["params"], names["batch"])
    names["state"] = TrainState.create(
        apply_fn=None, params=names["params"], tx=names["optimizers"].control
    )
    for start, update in (("", before), (once, after)):
        exec(start, names)
        for _ in range(100):
            exec(update, names)
        assert names["state"].step == 100
        assert mean_square_of_delta(names["state"].params, names["batch"]) < 0.1 * first


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    """Every relative link leads to a file."""
    for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_pictures_are_shown():
    """Every picture that docs/figures.sh makes stands on some page."""
    shown = {name for page in PAGES for name in re.findall(r"images/([\w.]+)\)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def anchor_of(heading: str) -> str:
    """Returns the anchor that a heading gets on GitHub."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page):
    """Every link to a heading finds one."""
    for name, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / name if name else page).read_text()
        headings = re.findall(r"(?m)^#+ (.+)$", text)
        assert anchor in map(anchor_of, headings), f"{page.name} links to {name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    """Every file of the repository that a page names is there."""
    for name in re.findall(
        r"(?<![\w/.*])((?:plots/|tests/|docs/)?\w+\.(?:py|md))\b", page.read_text()
    ):
        found = [ROOT / name, page.parent / name]
        assert any(path.exists() for path in found), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_names_exist(page):
    """Every flag is in some script, and every name in code marks like bellman_error."""
    sources = [*ROOT.glob("*.py"), *(ROOT / "plots").glob("*.py"), *(ROOT / "tests").glob("*.py")]
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in sources)))
    text = page.read_text()
    for name in re.findall(r"`--([a-z][a-z0-9-]+)", text):
        name = name.replace("-", "_")
        assert {name, name.removeprefix("no_")} & words, f"{page.name} names --{name}"
    for name in re.findall(r"`([a-z]\w*_\w+)`", text):
        assert name in words, f"{page.name} names {name}"


def test_tables_are_what_the_records_give():
    """docs/results.md and README's table are not stale."""
    command = [sys.executable, str(ROOT / "plots" / "results.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_figures_in_words_are_in_a_table():
    """Decimal numbers of claims, and of the effects in differences, stand in a table of records."""
    docs = ROOT / "docs"
    tables = "".join((docs / name).read_text() for name in ("results.md", "speed.md"))
    known = set(re.findall(r"\d+\.\d+", tables))
    effects = re.findall(r"(?m)^\|.*\|([^|]*)\|$", (docs / "differences.md").read_text())
    assert len(effects) > 15
    (cost,) = re.findall(r"A step of SCORER takes .* times", (ROOT / "README.md").read_text())
    for text in [(docs / "claims.md").read_text(), cost, *effects]:
        for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", re.sub(r"`[^`]*`", "", text)):
            assert number in known, f"{number} in {text}"

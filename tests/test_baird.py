"""baird.py: the star, the game on it, what diverges and why, verdicts, runs, record and figure."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location(
    "baird_script", ROOT / "baird.py"
)  # plots/ has a baird.py too
baird = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(baird)

INITS = "balanced", "identity"
SHORT = dict(num_updates=40, expected=True, target_update_interval=2)  # compiled once
ALL = baird.transitions(jnp.arange(49))
ONES, TO_SEVEN = (
    np.ones(7),
    np.outer(np.ones(7), np.eye(7)[6]),
)  # TO_SEVEN @ V is V(7) in every state
MEAN = np.outer(ONES, ONES) / 7
FEATURES = np.asarray(baird.FEATURES, float)
K = FEATURES @ FEATURES.T / 7
pytestmark = pytest.mark.usefixtures("quick_compilation")


def rms(x):
    return np.sqrt(np.mean(np.square(x), axis=-1))


@cache
def compiled(**args):
    """Returns the program of a run, for lanes that differ in their seed, and its timesteps."""
    args = baird.Args(**args)
    lanes = baird.Lane(seed=0, start=None, rates=None)
    program = jax.jit(jax.vmap(baird.make_train(args), in_axes=(lanes,)))
    return program, baird.choose_timesteps(args.num_updates)


def train(num_updates, seeds=(0,), init="balanced", rate=0.01, ratio=5.0, **args):
    """Returns errors [2, methods, seeds, T], peaks [2, methods, seeds] and timesteps of a run."""
    program, timesteps = compiled(num_updates=num_updates, **args)
    rates = baird.Rates(follower=rate * ratio, leader=rate)
    errors, peak = program(baird.Lane(jnp.array(seeds), baird.start(init), rates))
    return np.asarray(errors).transpose(2, 3, 0, 1), np.asarray(peak).transpose(1, 2, 0), timesteps


def loss_of(loss, params, batch, target_values):
    """Returns a loss of the Bellman errors of a batch."""
    return loss(baird.bellman_error(params, batch, target_values), batch.rho)


def td_step(params, batch, rate):
    """Returns linear TD's parameters after an update."""
    return baird.linear_td_update(params, batch, rate, baird.state_values(params))


def run(folder, script, *flags):
    """Standard output of a script, which must end well and print no warning."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, flags)],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def figure():
    """plots/baird.py as a module."""
    sys.path.insert(0, str(ROOT / "plots"))
    spec = importlib.util.spec_from_file_location("baird_figure", ROOT / "plots" / "baird.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "plots"))
    return module


# ------------------------------ The star ------------------------------------------------------------------------------
def test_the_star():
    """Transitions, features and weights as Baird's star has them, each number written out."""
    np.testing.assert_allclose(baird.DASHED, [[1 / 6] * 6 + [0]] * 7)
    np.testing.assert_allclose(baird.SOLID, [[0, 0, 0, 0, 0, 0, 1]] * 7)
    np.testing.assert_allclose(baird.BEHAVIOR, np.full((7, 7), 1 / 7))
    assert baird.FEATURES.tolist() == [
        [2, 0, 0, 0, 0, 0, 0, 1],
        [0, 2, 0, 0, 0, 0, 0, 1],
        [0, 0, 2, 0, 0, 0, 0, 1],
        [0, 0, 0, 2, 0, 0, 0, 1],
        [0, 0, 0, 0, 2, 0, 0, 1],
        [0, 0, 0, 0, 0, 2, 0, 1],
        [0, 0, 0, 0, 0, 0, 1, 2],
    ]
    assert baird.START.tolist() == [1, 1, 1, 1, 1, 1, 10, 1]
    assert (FEATURES @ baird.START).tolist() == [3, 3, 3, 3, 3, 3, 12] and baird.GAMMA == 0.99


def test_transitions_are_those_of_behavior():
    """Each pair of states once; its ratio is the target policy's over behaviour's probability of the pair."""
    pairs = list(zip(ALL.state.tolist(), ALL.next_state.tolist()))
    assert len(pairs) == len(set(pairs)) == 49
    for (state, following), rho in zip(pairs, ALL.rho.tolist()):
        assert rho == pytest.approx(
            baird.SOLID[state, following] / baird.BEHAVIOR[state, following]
        )


@pytest.mark.parametrize("init", INITS)
def test_all_methods_start_from_one_value_function(init):
    """3 in states 1 to 6 and 12 in state 7; balanced has both layers move V equally."""
    players = baird.start(init)
    np.testing.assert_allclose(baird.state_values(players), [3, 3, 3, 3, 3, 3, 12], rtol=1e-6)
    if init == "balanced":
        np.testing.assert_allclose(
            players.perception @ players.perception.T,
            np.sum(np.square(players.control)) * np.eye(8),
            rtol=1e-5,
        )
    errors, _, timesteps = train(**SHORT, init=init)
    assert timesteps[0] == 0 and errors.shape[:2] == (2, 7)
    # (6 * 8.88^2 + 0.12^2) / 7 = 67.59 and (6 * 9 + 144) / 7 = 28.29: Bellman errors 0.99 * 12 - 3 and 0.99 * 12 - 12
    np.testing.assert_allclose(errors[0, :, :, 0], np.sqrt(67.592229), rtol=1e-5)
    np.testing.assert_allclose(errors[1, :, :, 0], np.sqrt(198 / 7), rtol=1e-5)


# ------------------------------ Linear TD -----------------------------------------------------------------------------
def test_first_td_updates_by_hand():
    """Solid from state 1: delta = 0.99 * 12 - 3 = 8.88, rho = 7, so 0.01 * 7 * 8.88 = 0.6216 times features (2, .., 1).
    Dashed changes nothing. In expectation: 0.01 / 7 * 8.88 * 2 = 0.025371 for the first six weights,
    0.01 / 7 * -0.12 = -0.00017143 for the seventh and 0.01 / 7 * (6 * 8.88 - 2 * 0.12) = 0.0757714 for the eighth."""
    players = baird.start("identity")

    def change(batch):
        return np.asarray(td_step(players, batch, 0.01).control) - baird.START

    solid, dashed = baird.transitions(jnp.array([6])), baird.transitions(jnp.array([3]))
    np.testing.assert_allclose(change(solid), [1.2432, 0, 0, 0, 0, 0, 0, 0.6216], atol=1e-5)
    assert not change(dashed).any()
    np.testing.assert_allclose(change(ALL), [0.0253714] * 6 + [-0.00017143, 0.0757714], atol=2e-6)


def test_expected_td_diverges_by_its_iteration_matrix():
    """The update is linear; its matrix has spectral radius 1.00239 at rate 0.01, and values grow by just that."""

    def step(w):
        return td_step(baird.Players(jnp.eye(8), w), ALL, 0.01).control

    matrix = np.asarray(jax.jacobian(step)(jnp.zeros(8)), np.float64)
    by_hand = np.eye(8) + 0.01 * FEATURES.T @ (0.99 * TO_SEVEN - np.eye(7)) @ baird.FEATURES / 7
    np.testing.assert_allclose(matrix, by_hand, atol=1e-6)
    radius = np.abs(np.linalg.eigvals(by_hand)).max()
    assert radius == pytest.approx(1.00239, abs=5e-6)
    later = jax.jit(lambda w, n: jax.lax.fori_loop(0, n, lambda _, w: step(w), w))
    w = later(jnp.array(baird.START, jnp.float32), 3000)
    growth = np.log(rms(FEATURES @ later(w, 1000)) / rms(FEATURES @ w)) / 1000
    assert growth == pytest.approx(np.log(radius), rel=1e-3)


def test_target_network_keeps_its_target_for_an_interval():
    """Two updates between target updates: the second aims at the first's old values, the third at new ones."""
    errors = train(**SHORT, rate=0.1)[0]
    w = old = baird.START
    for t in range(3):
        old = w if t in (0, 2) else old
        w = w + 0.1 * FEATURES.T @ (0.99 * TO_SEVEN @ FEATURES @ old - FEATURES @ w) / 7
        assert errors[1, 1, 0, t + 1] == pytest.approx(rms(FEATURES @ w), rel=1e-4)
    assert errors[1, 1, 0, 2] != pytest.approx(
        errors[1, 0, 0, 2], rel=1e-3
    )  # plain TD is elsewhere


# ------------------------------ The game ------------------------------------------------------------------------------
def test_weighted_variance_by_hand():
    """States 1, 1 and 7 go solid, 2 goes dashed: delta = 8.88, 8.88, -0.12 count, so 18 in variance; and the literal
    Var[rho delta] of (62.16, 62.16, -0.84, 0) is 7730.0976 / 4 - (123.48 / 4)^2 = 979.584."""
    players = baird.start("identity")
    batch = baird.transitions(jnp.array([6, 6, 6 * 7 + 6, 7 + 3]))
    target = baird.state_values(players)
    assert batch.rho.tolist() == [7, 7, 7, 0]
    delta = baird.bellman_error(players, batch, target)
    assert baird.follower_loss(delta, batch.rho) == pytest.approx(18, rel=1e-5)  # 2/3 * 1/3 * 9^2
    mean_square = 7 * (2 * 8.88**2 + 0.12**2) / 4
    assert baird.leader_loss(delta, batch.rho) == pytest.approx(mean_square, rel=1e-5)
    literal = np.var([62.16, 62.16, -0.84, 0])
    assert baird.literal_follower_loss(delta, batch.rho) == pytest.approx(literal, rel=1e-5)
    exact = loss_of(baird.follower_loss, players, ALL, target)
    assert exact == pytest.approx(np.var([3, 3, 3, 3, 3, 3, 12]), rel=1e-5)


def test_without_a_solid_action_nothing_is_learned():
    """Variance and gradient are exactly zero, not NaN; one solid action has no variance either, but two have."""
    players, target = baird.start("balanced"), jnp.arange(7.0)
    for numbers, none in (([0, 8, 16, 47], True), ([0, 8, 13, 47], True), ([0, 8, 13, 48], False)):
        batch = baird.transitions(jnp.array(numbers))
        objective = partial(loss_of, baird.follower_loss)
        loss, gradient = jax.value_and_grad(objective)(players, batch, target)
        parts = [loss, *gradient]
        assert all(np.isfinite(part).all() for part in parts)
        assert all(not part.any() for part in parts) if none else all(part.any() for part in parts)


def test_baseline_follows_the_semi_gradient():
    """Its step is the rate times the finite differences of the MSBE, the target held."""
    players, rate = (
        jax.tree.map(
            lambda x, key: x + 0.3 * jax.random.normal(jax.random.key(key), x.shape),
            baird.start("balanced"),
            baird.Players(1, 2),
        ),
        0.01,
    )
    old = np.asarray(baird.state_values(players), np.float64)
    moved = baird.baseline_update(players, ALL, rate)

    def loss(perception, control):
        return np.mean((0.99 * old[6] - FEATURES @ perception @ control) ** 2)

    parts = [np.asarray(part, np.float64) for part in players]
    for which in (0, 1):
        for index in np.ndindex(parts[which].shape):
            up, down = [[part.copy() for part in parts] for _ in range(2)]
            up[which][index] += 1e-4
            down[which][index] -= 1e-4
            slope = (loss(*up) - loss(*down)) / 2e-4
            assert parts[which][index] - moved[which][index] == pytest.approx(
                rate * slope, rel=1e-3, abs=2e-4 * rate
            )


def moved_by(method, players, follower_batch, leader_batch, rates):
    """Returns a method's parameters after an update from these."""
    params = {name: players for name in baird.METHODS}
    return baird.update_all(params, follower_batch, leader_batch, rates, jnp.zeros(7))[method]


GAMES = {
    baird.SCORER: ("perception", baird.follower_loss, "control"),
    baird.INVERTED_ROLES: ("control", baird.follower_loss, "perception"),
    baird.MSBE_FOLLOWER: ("perception", baird.leader_loss, "control"),
    baird.LITERAL_FOLLOWER: ("perception", baird.literal_follower_loss, "control"),
}


@pytest.mark.parametrize("method", GAMES)
def test_a_round_of_the_game(method):
    """The follower steps fast on its batch; the leader slowly on the other, from the answer."""
    first, loss, second = GAMES[method]
    players = baird.start("balanced")
    follower_batch = baird.transitions(jnp.array([6, 48, 13]))
    leader_batch = baird.transitions(jnp.array([13, 27, 20, 1]))

    def gradient(loss, part, players, batch):
        objective = partial(loss_of, loss)
        return getattr(jax.grad(objective)(players, batch, baird.state_values(players)), part)

    after = getattr(players, first) - 0.02 * gradient(loss, first, players, follower_batch)
    middle = players._replace(**{first: after})
    slope = gradient(baird.leader_loss, second, middle, leader_batch)
    last = getattr(middle, second) - 0.001 * slope
    rates = baird.Rates(follower=0.02, leader=0.001)
    moved = moved_by(method, players, follower_batch, leader_batch, rates)
    np.testing.assert_allclose(getattr(moved, first), after, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(getattr(moved, second), last, rtol=1e-5, atol=1e-6)
    assert not np.allclose(after, getattr(players, first))
    assert not np.allclose(last, getattr(players, second))


@pytest.mark.parametrize("expected, last", [(False, 17), (True, 12)])
def test_players_draw_their_own_batches(expected, last, monkeypatch):
    """A method that counts in V(7) the updates in which the batches differ: all, unless exact."""

    def count(params, follower_batch, leader_batch, rates, target_values):
        differ = jnp.any(follower_batch.state != leader_batch.state).astype(jnp.float32)
        players = params[baird.TARGET_NETWORK]
        counted = players._replace(control=players.control.at[6].add(differ))
        return params | {baird.TARGET_NETWORK: counted}

    monkeypatch.setattr(baird, "update_all", count)
    function = jax.jit(baird.make_train(baird.Args(num_updates=5, expected=expected)))
    rates = baird.Rates(follower=0.1, leader=0.1)
    errors, _ = function(baird.Lane(jnp.uint32(0), baird.start("identity"), rates))
    index = baird.METHODS.index(baird.TARGET_NETWORK)
    assert errors[-1, 1, index] == pytest.approx(np.sqrt((6 * 9 + last**2) / 7), rel=1e-5)


def test_sampled_updates_average_to_the_expected_ones():
    """Linear TD: the mean step of 40,000 batches is the expected step. The variance's gradient is smaller by the mean
    of 1 - 1 / k over the number k of solid actions in a batch, as any sample variance's is, and by nothing else."""
    players, size = baird.start("balanced"), 16
    linear = baird.start("identity")
    batches = baird.transitions(jax.random.randint(jax.random.key(0), (40_000, size), 0, 49))

    def td(batch):
        return td_step(linear, batch, 1.0).control - linear.control

    def follower(batch):
        objective = partial(loss_of, baird.follower_loss)
        return jax.grad(objective)(players, batch, baird.state_values(players)).perception

    def mean(function):
        return jax.jit(lambda batches: jax.vmap(function)(batches).mean(axis=0))(batches)

    scale = np.abs(td(ALL)).max()
    np.testing.assert_allclose(mean(td), td(ALL), atol=0.02 * scale)
    draws = np.random.default_rng(0).binomial(size, 1 / 7, 10**6)
    share = np.where(draws > 0, 1 - 1 / np.maximum(draws, 1), 0).mean()
    assert 0.4 < share < 0.6
    np.testing.assert_allclose(
        mean(follower), share * follower(ALL), atol=0.02 * share * np.abs(follower(ALL)).max()
    )


def test_what_the_docs_derive():
    """K raises V(7) by 17/7 and the others by 12/7; the variance's player must be 0.8 times as fast as the other; and
    these matrices are what the code does to V in a small step."""
    np.testing.assert_allclose(7 * K @ ONES, [12] * 6 + [17])

    def growth(r):
        return np.linalg.eigvals(
            K @ (0.99 * TO_SEVEN - np.eye(7) + r * (MEAN - np.eye(7)))
        ).real.max()

    assert growth(0) == pytest.approx(0.239250, abs=1e-6) and growth(0.79) > 0 > growth(0.81)
    assert max(growth(r) for r in np.geomspace(0.81, 1e4, 50)) < 0
    players = baird.start("balanced")
    v, speed = (
        np.asarray(baird.state_values(players)),
        2 * np.linalg.norm(baird.START),
    )  # 2 c^2 = 2 |w / c|^2
    for ratio in (1.0, 5.0):
        rates = baird.Rates(follower=1e-5 * ratio, leader=1e-5)
        for method in (baird.SCORER, baird.INVERTED_ROLES):
            moved = baird.state_values(moved_by(method, players, ALL, ALL, rates))
            expected = speed * K @ (0.99 * TO_SEVEN @ v - v + ratio * (MEAN @ v - v))
            np.testing.assert_allclose(
                (moved - v) / 1e-5, expected, rtol=0.02, atol=0.02 * np.abs(expected).max()
            )


# ------------------------------ Verdicts and runs ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "bellman, value, peak, said",
    [
        ([8, 9, 0.08], [5, 9, 0.05], 9, "converged"),
        ([8, 1, 0.081], [5, 1, 0.01], 8, "stable"),
        ([8, 1, 0.01], [5, 9, 4.9], 9, "stable"),
        ([8, 1, 0.01], [5, 1, 5], 8, "grown"),
        ([8, 1, 8.1], [5, 1, 0.01], 8.1, "grown"),
        ([8, 1, 0.01], [5, 1, 0.01], 1e6, "converged"),
        ([8, 1, 0.01], [5, 1, 0.01], 1.1e6, "diverged"),
        ([8, np.inf, np.inf], [5, np.inf, np.inf], np.inf, "diverged"),
    ],
)
def test_verdicts(bellman, value, peak, said):
    """Both errors must be small to have converged; what was ever above 1e6, also between points, has diverged."""
    curves = np.array([bellman, value], float)
    assert baird.VERDICTS[baird.verdict(curves, np.array([8.0, peak]))] == said
    many = baird.verdict(np.stack([curves] * 3, axis=1), np.array([[8.0] * 3, [peak] * 3]))
    assert many.tolist() == [baird.VERDICTS.index(said)] * 3


def test_seeds_differ_and_do_not_depend_on_each_other():
    """A seed's curves are the same wherever and beside whatever it stands; two seeds draw different batches."""
    first, second = train(30, seeds=(0, 1))[0], train(30, seeds=(7, 0))[0]
    np.testing.assert_allclose(first[:, 3, 0], second[:, 3, 1], rtol=1e-4)
    assert not np.allclose(first[:, 3, 0, -1], first[:, 3, 1, -1], rtol=1e-2)


def test_largest_errors():
    """Where every update is a point, they are the points' largest; what overflowed is infinite, not NaN."""
    errors, peak, timesteps = train(**SHORT)
    assert timesteps.tolist() == list(range(41))
    np.testing.assert_array_equal(peak, errors.max(axis=-1))
    assert np.isinf(peak[:, 2]).all() and not np.isnan(errors).any()


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """Folder and standard output of `python baird.py`."""
    folder = tmp_path_factory.mktemp("default")
    out = run(folder, "baird.py")
    return next((folder / "runs").iterdir()), out


def test_the_default_run_keeps_its_promises(default_run):
    """Linear TD above 1e6, SCORER below its start in both errors, for every seed; and the table says so."""
    path, out = default_run
    with np.load(path / "results.npz") as file:
        meta, loss, value_error = json.loads(str(file["meta"])), file["loss"], file["value_error"]
        timesteps, peak = file["timesteps"], file["peak_value_error"]
        assert file["seeds"].tolist() == list(range(10)) and file["verdict"].shape == (7, 10)
        said = {
            name: {baird.VERDICTS[v] for v in row}
            for name, row in zip(meta["methods"], file["verdict"])
        }
    assert re.fullmatch(r"baird__Baird__sampled-balanced__s0__\d{8}-\d{6}-\d{6}", path.name)
    assert loss.shape == value_error.shape == (7, 10, len(timesteps)) and timesteps[-1] == 20_000
    assert (
        json.loads((path / "args.json").read_text()) == meta["args"]
        and meta["args"]["learning_rate"] == 0.01
    )
    curves = {name: np.stack(pair) for name, *pair in zip(meta["methods"], loss, value_error)}
    assert (curves["linear TD"].max(axis=(0, 2)) > 1e6).all()
    assert (peak >= value_error.max(axis=-1)).all() and (
        peak > value_error.max(axis=-1)
    ).any()  # also between points
    for name in ("SCORER", "inverted roles", "linear TD, target network"):
        assert (curves[name][..., -1] < curves[name][..., 0]).all()
    assert said["SCORER"] == said["inverted roles"] == {"converged"}
    for name in (
        "linear TD",
        "two layers, one optimiser",
        "SCORER, MSBE follower",
        "SCORER, Var[rho delta] follower",
    ):
        assert said[name] == {"diverged"}
    for name, words in said.items():
        assert re.search(rf"(?m)^{re.escape(name)} +\S+ +\S+ +\S+   {words.pop()} \(10\)$", out)


def test_the_table(tmp_path, capsys, monkeypatch):
    """A short one: every cell of every method, its ends, and the counts that are printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", "baird.py --table --expected --num-updates 300".split())
    baird.main()
    out = capsys.readouterr().out
    path = next((tmp_path / "runs").iterdir())
    with np.load(path / "results.npz") as file:
        verdicts = file["verdict"]
        assert verdicts.shape == (7, 2, 5, 5, 1) and file["loss"].shape == (7, 2, 5, 5, 1, 2)
        assert file["timesteps"].tolist() == [0, 300]
    rows = [line for line in out.splitlines() if line.startswith("SCORER  ")]
    for row, cells in zip(rows, verdicts[3], strict=True):
        assert row.split()[1:6] == ["".join(baird.LETTERS[v] for v in rate[:, 0]) for rate in cells]
        assert list(map(int, row.split()[6:])) == [(cells == v).sum() for v in (3, 2, 1, 0)]
    assert len(set(verdicts[3].ravel().tolist())) > 1
    np.testing.assert_array_equal(
        verdicts[0, 0], verdicts[0, 1]
    )  # nothing of linear TD is factored
    with pytest.raises(SystemExit):
        figure().main(path, tmp_path / "baird.png")
    assert "has no curves" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--learning-rate 0", "--learning-rate 0.0 must be from 1e-09 to 10"),
        ("--ratio nan", "--ratio nan must be from"),
        ("--num-updates 0", "--num-updates 0 must be from 1"),
        ("--batch-size -1", "--batch-size -1 must be from 1"),
        ("--num-seeds 0", "--num-seeds 0 must be from 1"),
        ("--seed -1", "--seed -1 must be from 0"),
        ("--target-update-interval 0", "--target-update-interval 0 must be from 1"),
        ("--expected --num-seeds 3", "--num-seeds 3 cannot go with --expected"),
        ("--table --init identity", "--init identity cannot go with --table"),
        ("--table --ratio 3", "--ratio 3.0 cannot go with --table"),
    ],
)
def test_bad_input_is_refused(flags, words, tmp_path, capsys, monkeypatch):
    """One sentence that names flag, value and what is accepted, exit code 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["baird.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        baird.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and words in err and err.count("\n") == 1 and not out
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capsys, monkeypatch):
    """--runs-dir below a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["baird.py", "--runs-dir", str(tmp_path / "file" / "runs")])
    with pytest.raises(SystemExit) as stop:
        baird.main()
    out, err = capsys.readouterr()
    assert (
        stop.value.code == 2
        and "file/runs cannot take a new run" in err
        and err.count("\n") == 1
        and not out
    )


def test_a_closed_output_ends_nothing(tmp_path):
    """A reader that leaves, or a full disk behind standard output: no traceback, and the record."""
    command = f"{sys.executable} {ROOT / 'baird.py'} --num-updates 20 --num-seeds 1 --runs-dir"
    said = {
        f"{command} closed | true": "",
        f"{command} full > /dev/full": "No space left on device",
    }
    for line, words in said.items():
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert (
            done.returncode == 0 and words in done.stderr and done.stderr.count("\n") == bool(words)
        )
    for folder in ("closed", "full"):
        (made,) = (tmp_path / folder).iterdir()
        assert sorted(path.name for path in made.iterdir()) == ["args.json", "results.npz"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch, capsys):
    """No .partial, no empty folder; a sentence and exit code 1. What stood there before stays."""

    def fail(file, **arrays):
        file.write(b"some")
        raise OSError(28, "No space left on device")

    (tmp_path / "whole").write_bytes(b"before")
    with pytest.raises(OSError):
        baird.save(tmp_path / "whole", fail)
    assert (tmp_path / "whole").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1
    baird.save(tmp_path / "whole", lambda file: file.write(b"after"))
    assert (tmp_path / "whole").read_bytes() == b"after"
    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(SystemExit) as stop:
        baird.write_record(tmp_path / "run", {}, dict(args={}))
    assert stop.value.code == 1 and not (tmp_path / "run").exists()
    assert "run cannot be written: No space left on device" in capsys.readouterr().err


# ------------------------------ The figure ----------------------------------------------------------------------------
def test_the_figure(default_run, tmp_path):
    """From the default run's record, where curves leave upwards; without a warning."""
    run(tmp_path, "plots/baird.py", default_run[0], "--out", "baird.png")
    assert (tmp_path / "baird.png").stat().st_size > 20_000


def damaged(default_run, folder, change):
    """A copy of the record with some arrays or parts of meta changed."""
    with np.load(default_run[0] / "results.npz") as file:
        arrays = dict(file)
    meta = json.loads(str(arrays["meta"]))
    change(arrays, meta)
    np.savez(
        folder / "results.npz", **arrays | ({"meta": json.dumps(meta)} if "meta" in arrays else {})
    )
    return folder


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda arrays, meta: arrays.pop("loss"), "cannot be read"),
        (lambda arrays, meta: arrays.pop("meta"), "cannot be read"),
        (lambda arrays, meta: meta.update(schema=2), "with schema 2"),
        (lambda arrays, meta: meta.update(complete=False), "no curves"),
        (
            lambda arrays, meta: (arrays.pop("loss"), meta.update(script="scorer_dqn")),
            "is of scorer_dqn",
        ),
        (lambda arrays, meta: meta.update(methods=["SCORER"]), "loss of shape (7, 10"),
        (lambda arrays, meta: meta.update(methods=["SCORER"] * 7), "names a method twice"),
        (
            lambda arrays, meta: arrays.update(value_error=arrays["value_error"][:, :, :-1]),
            "value_error of shape (7, 10",
        ),
        (lambda arrays, meta: arrays.update(loss=arrays["loss"] * np.nan), "0 or more"),
        (lambda arrays, meta: arrays.update(timesteps=arrays["timesteps"][::-1]), "do not rise"),
    ],
)
def test_records_that_do_not_fit_are_refused(change, words, default_run, tmp_path, capsys):
    """One sentence that names the file, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        figure().main(damaged(default_run, tmp_path, change), tmp_path / "baird.png")
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "results.npz" in err and words in err and err.count("\n") == 1
    assert not (tmp_path / "baird.png").exists()

"""scorer_dqn.py from the inside: game, targets, schedules, replay, and environments with known Q."""

import importlib.util
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any
from typing import NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from environments import KNOWN
from environments import Counter
from environments import Limit
from environments import Probe
from environments import ProbeParams
from gymnax.environments.minatar import asterix
from helpers import tree_equal

import scorer_dqn as dqn
import scorer_pqn as pqn

# Beside the preset of control: tanh, no norm, a clip at 0.3.
SMALL = dict(
    env="CartPole-v1",
    num_envs=4,
    buffer_size=400,
    batch_size=8,
    learning_starts=16,
    total_timesteps=160,
    hidden_dim=8,
    target_update_interval=40,
)
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def optimized():
    """Compiles programs as a run does."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def setup(env=None, env_params=None, **options):
    """Returns arguments and an environment for make_train: this gymnax environment, or CartPole."""
    args = dqn.complete(dqn.Args(**SMALL | options))
    if env is None and env_params is None:
        return args, dqn.make_env(args)
    env = env or gymnax.make("CartPole-v1")[0]
    return args, dqn.vectorize(env, env_params or env.default_params, jnp.float32)


def first_state(training, args, seed=0):
    """Returns a seed's first state, at the follower's rate that args have."""
    rate = args.follower_learning_rate or 0.0
    return jax.jit(training.init)(jnp.uint32(seed), jnp.float32(rate))


def train(training, args):
    """Trains seed 0 to the end; returns the last state."""
    state = first_state(training, args)
    train_chunk = jax.jit(training.train_chunk)
    for chunk in range(len(training.timesteps)):
        state, _ = train_chunk(state, chunk)
    return state


def abstract_state(training):
    """Returns the shapes of a seed's state; nothing is computed."""
    seed, rate = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    return jax.eval_shape(training.init, seed, rate)


class Played(NamedTuple):
    """Which update a program makes, and with what."""

    name: str
    follower_loss: Any  # None where the update takes none
    num_batches: int
    networks: dqn.Players
    optimizers: Any
    num_updates: int


def trace_update(monkeypatch, **options) -> Played:
    """Returns what the program that these flags ask for hands to its update."""
    args, env = setup(**options)
    seen = {}

    def watch(name):
        def update(networks, optimizers, params, opt_state, *batches, objective=None):
            seen.update(name=name, networks=networks, follower_loss=objective)
            seen.update(num_batches=len(batches))
            return params, opt_state

        return update

    def make_optimizers(args, num_updates, follower_rate):
        seen.update(num_updates=num_updates)
        return own_make_optimizers(args, num_updates, follower_rate)

    own_make_optimizers = dqn.make_optimizers
    updates = "scorer_update baseline_update inverted_roles_update synchronous_update"
    with monkeypatch.context() as patch:
        patch.setattr(dqn, "make_optimizers", make_optimizers)
        for name in updates.split():
            patch.setattr(dqn, name, watch(name))
        training = dqn.make_train(args, env)
        jax.eval_shape(training.train_chunk, abstract_state(training), 0)
    steps = training.timesteps[-1] - training.first_timestep
    assert seen["num_updates"] * args.num_envs == steps
    rate = args.follower_learning_rate or 0.0
    return Played(optimizers=own_make_optimizers(args, seen["num_updates"], rate), **seen)


def example_game(networks, num_actions=2, features=4, size=8):
    """Returns random parameters and a batch of its own for each player."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(2, size, features)).astype(np.float32)
    action = rng.integers(num_actions, size=(2, size))
    td_target = rng.normal(size=(2, size)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0))
    phi = networks.perception.init(keys[0], obs)["params"]
    z = networks.perception.apply({"params": phi}, obs)
    theta = networks.control.init(keys[1], z)["params"]
    batches = [dqn.Batch(obs[player], action[player], td_target[player]) for player in (0, 1)]
    return dqn.Players(phi, theta), *batches


def largest_difference(a, b) -> float:
    """Returns the largest absolute difference between two trees' numbers."""
    differences = jax.tree.map(lambda x, y: abs(x - y).max(), a, b)
    return max(jax.tree.leaves(differences))


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    """Compares two trees, number by number."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


# ----------------------------------------- The game -----------------------------------------------

NETWORKS = dqn.Players(
    perception=dqn.Perception(8, num_layers=1, activation=jnp.tanh, use_l1_norm=False),
    control=dqn.Control(2, 8, activation=jnp.tanh),
)
STILL, STEP = optax.sgd(0.0), optax.sgd(1.0)


def play(follower, leader, params, follower_batch, leader_batch):
    """Returns the parameters after one round with these optimisers."""
    opt_state = dqn.Players(follower.init(params.perception), leader.init(params.control))
    update = jax.jit(partial(dqn.scorer_update, NETWORKS, dqn.Players(follower, leader)))
    return update(params, opt_state, follower_batch, leader_batch)[0]


def error(params, batch):
    """Returns the Bellman errors of NETWORKS."""
    return dqn.bellman_error(NETWORKS, params, batch)


def test_each_player_moves_only_itself():
    """A follower's step changes no bit of theta, a leader's none of phi."""
    params, *batches = example_game(NETWORKS)
    after = play(STEP, STILL, params, *batches)
    assert tree_equal(after.control, params.control)
    assert not tree_equal(after.perception, params.perception)
    after = play(STILL, STEP, params, *batches)
    assert tree_equal(after.perception, params.perception)
    assert not tree_equal(after.control, params.control)


def test_each_player_reads_only_its_batch():
    """The follower steps on its batch alone; so does the leader, while the follower stands still."""
    params, follower_batch, leader_batch = example_game(NETWORKS)

    def change(batch):
        obs, td_target = batch.obs.copy(), batch.td_target.copy()
        obs[:] = td_target[:] = 3.0
        return batch._replace(obs=obs, td_target=td_target)

    usual = play(STEP, STEP, params, follower_batch, leader_batch)
    changed = play(STEP, STEP, params, follower_batch, change(leader_batch))
    assert tree_equal(usual.perception, changed.perception)
    assert not tree_equal(usual.perception, params.perception)
    assert not tree_equal(usual.control, changed.control)

    usual = play(STILL, STEP, params, follower_batch, leader_batch)
    changed = play(STILL, STEP, params, change(follower_batch), leader_batch)
    assert tree_equal(usual.control, changed.control)
    assert not tree_equal(usual.control, params.control)


def test_leader_answers_the_new_phi():
    """The leader's gradient is taken at the follower's new phi, not at the old one."""
    params, follower_batch, leader_batch = example_game(NETWORKS)
    after = play(STEP, STEP, params, follower_batch, leader_batch)

    def gap(phi):
        def loss(theta):
            return dqn.leader_loss(error(dqn.Players(phi, theta), leader_batch))

        stepped = jax.tree.map(lambda p, g: p - g, params.control, jax.grad(loss)(params.control))
        return largest_difference(after.control, stepped)

    assert gap(after.perception) < 1e-6 < 1e-3 < gap(params.perception)


def test_losses_are_numpys():
    """The follower's loss is the errors' population variance, the leader's their mean square."""
    params, batch, _ = example_game(NETWORKS)
    q = np.asarray(dqn.q_values(NETWORKS, params, batch.obs))
    expected = batch.td_target - q[np.arange(len(q)), batch.action]
    delta = error(params, batch)
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dqn.follower_loss(delta), np.var(expected), rtol=1e-5)
    np.testing.assert_allclose(dqn.leader_loss(delta), np.mean(expected**2), rtol=1e-5)


def test_variance_ignores_a_constant():
    """A constant added to every target moves the mean square, and neither variance nor gradient."""
    params, batch, _ = example_game(NETWORKS)

    def stays(loss):
        def value_and_gradient(shift):
            shifted = batch._replace(td_target=batch.td_target + shift)
            return jax.value_and_grad(lambda params: loss(error(params, shifted)))(params)

        leaves = [jax.tree.leaves(value_and_gradient(shift)) for shift in (0.0, 2.0)]
        return all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*leaves))

    assert stays(dqn.follower_loss)
    assert not stays(dqn.leader_loss)


@pytest.mark.parametrize("loss", [dqn.follower_loss, dqn.leader_loss])
def test_no_gradient_through_the_target(loss):
    """Neither loss pulls on the target."""
    params, batch, _ = example_game(NETWORKS)

    def objective(td_target):
        return loss(error(params, batch._replace(td_target=td_target)))

    assert not np.any(jax.grad(objective)(batch.td_target))


def test_a_silent_broadcast_is_refused():
    """Targets [batch, 1] would train on [batch, batch] errors."""
    params, batch, _ = example_game(NETWORKS)
    with pytest.raises(AssertionError):
        error(params, batch._replace(td_target=batch.td_target[:, None]))


# ----------------------------------------- Ablations ----------------------------------------------


def step_perception(loss, params, batch):
    """Returns phi after a gradient step of size 1, theta held fixed."""

    def objective(phi):
        return loss(error(dqn.Players(phi, params.control), batch))

    return jax.tree.map(
        lambda p, g: p - g, params.perception, jax.grad(objective)(params.perception)
    )


def step_control(loss, params, batch):
    """Returns theta after a gradient step of size 1, phi held fixed."""

    def objective(theta):
        return loss(error(dqn.Players(params.perception, theta), batch))

    return jax.tree.map(lambda p, g: p - g, params.control, jax.grad(objective)(params.control))


@pytest.mark.parametrize("loss", [dqn.follower_loss, dqn.leader_loss])
def test_inverted_roles(loss):
    """Control moves first, on the follower's loss; then perception, on the MSBE at the new theta."""
    params, first, second = example_game(NETWORKS)
    optimizers = dqn.Players(STEP, STEP)
    opt_state = dqn.init_optimizers(optimizers, params)
    after, _ = dqn.inverted_roles_update(
        NETWORKS, optimizers, params, opt_state, first, second, objective=loss
    )
    theta = step_control(loss, params, first)
    phi = step_perception(dqn.leader_loss, dqn.Players(params.perception, theta), second)
    assert_close(after, dqn.Players(phi, theta))
    stale = step_perception(dqn.leader_loss, params, second)
    assert largest_difference(stale, phi) > 1e-3


def test_synchronous():
    """Both players step on the MSBE from the old parameters, each on its own batch."""
    params, first, second = example_game(NETWORKS)
    optimizers = dqn.Players(STEP, STEP)
    opt_state = dqn.init_optimizers(optimizers, params)
    after, _ = dqn.synchronous_update(NETWORKS, optimizers, params, opt_state, first, second)
    phi = step_perception(dqn.leader_loss, params, first)
    theta = step_control(dqn.leader_loss, params, second)
    assert_close(after, dqn.Players(phi, theta))


def test_synchronous_on_one_batch_is_the_baseline(monkeypatch):
    """With both batches alike and no clip, three synchronous updates are three of the baseline."""
    usual = dict(max_grad_norm=1e9, learning_rate=0.01)
    synchronous = trace_update(monkeypatch, scorer=True, ablation="synchronous", **usual)
    baseline = trace_update(monkeypatch, **usual)
    networks = baseline.networks
    params, batch, _ = example_game(networks)
    both = single = params
    both_state = dqn.init_optimizers(synchronous.optimizers, params)
    single_state = dqn.init_optimizers(baseline.optimizers, params)
    for _ in range(3):
        both, both_state = dqn.synchronous_update(
            networks, synchronous.optimizers, both, both_state, batch, batch
        )
        single, single_state = dqn.baseline_update(
            networks, baseline.optimizers, single, single_state, batch
        )
    assert_close(both, single)
    assert not tree_equal(both.perception, params.perception)


@pytest.mark.parametrize(
    "ablation, name, follower_loss, rates",
    [
        (None, "scorer_update", dqn.follower_loss, (0.03, 0.01)),
        ("inverted-roles", "inverted_roles_update", dqn.follower_loss, (0.01, 0.03)),
        ("synchronous", "synchronous_update", None, (0.01, 0.01)),
        ("per-layer-lr", "baseline_update", None, (0.03, 0.01)),
    ],
)
def test_rates_and_update_of_each_ablation(ablation, name, follower_loss, rates, monkeypatch):
    """Which update is played, and how far Adam's first step, which is its rate, moves each player."""
    options = dict(scorer=ablation != "per-layer-lr", ablation=ablation, learning_rate=0.01)
    if ablation != "synchronous":
        options.update(follower_learning_rate=0.03)
    played = trace_update(monkeypatch, **options)
    assert (played.name, played.follower_loss) == (name, follower_loss)
    assert played.num_batches == (1 if name == "baseline_update" else 2)
    params = dqn.Players(jnp.ones(3), jnp.ones(2))
    opt_state = dqn.init_optimizers(played.optimizers, params)
    if name == "baseline_update":
        change, _ = played.optimizers.update(params, opt_state)
    else:
        each = zip(played.optimizers, params, opt_state)
        change = [optimizer.update(p, state)[0] for optimizer, p, state in each]
    for moved, rate in zip(change, rates):
        np.testing.assert_allclose(moved, -rate, rtol=1e-4)


@pytest.mark.parametrize("ablation, name", [(None, "scorer"), ("inverted-roles", "inverted_roles")])
def test_msbe_follower(ablation, name, monkeypatch):
    """--follower-loss msbe hands the leader's loss to the follower."""
    played = trace_update(monkeypatch, scorer=True, ablation=ablation, follower_loss="msbe")
    assert (played.name, played.follower_loss) == (f"{name}_update", dqn.leader_loss)


def test_the_follower_moves_at_its_lanes_rate():
    """The rate that init was given counts, not the one in args: at 0 perception stands still."""
    args, env = setup(scorer=True, follower_learning_rate=0.5)
    training = dqn.make_train(args, env)
    train_chunk = jax.jit(training.train_chunk)
    for rate in 0.0, 0.01:
        before = jax.jit(training.init)(jnp.uint32(0), jnp.float32(rate))
        after, _ = train_chunk(before, 0)
        assert tree_equal(after.params.perception, before.params.perception) == (rate == 0)
        assert not tree_equal(after.params.control, before.params.control)


class Adam:
    """Adam behind a global-norm clip, its rate falling as (1 - updates / total)^power, by hand."""

    def __init__(self, params, rates, clip, total, power=1.0):
        self.rates, self.clip, self.total, self.power = rates, clip, total, power
        self.count = 0
        self.first = self.second = jax.tree.map(np.zeros_like, params)

    def step(self, params, gradient):
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g * min(1.0, self.clip / norm), gradient)
        self.first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.first, gradient)
        self.second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, self.second, gradient)
        left = (1 - self.count / self.total) ** self.power
        self.count += 1

        def move(p, m, v, rate):
            mean = m / (1 - 0.9**self.count)
            deviation = np.sqrt(v / (1 - 0.999**self.count))
            return p - rate * left * mean / (deviation + 1e-8)

        return jax.tree.map(move, params, self.first, self.second, self.rates)


def same_rate(params, rate):
    """Returns this rate for every array of params."""
    return jax.tree.map(lambda _: rate, params)


def reference_delta(phi, theta, batch):
    """Returns Bellman errors of the control preset's networks: tanh layer, tanh layer, linear."""

    def layer(x, p):
        return x @ p["kernel"] + p["bias"]

    z = jnp.tanh(layer(batch.obs, phi["Dense_0"]))
    q = layer(jnp.tanh(layer(z, theta["Dense_0"])), theta["Dense_1"])
    return batch.td_target - jnp.where(batch.action == 1, q[:, 1], q[:, 0])


def reference_msbe(phi, theta, batch):
    """Returns the mean square of the Bellman errors."""
    return jnp.mean(reference_delta(phi, theta, batch) ** 2)


def reference_variance(phi, theta, batch):
    """Returns the population variance of the Bellman errors."""
    return reference_msbe(phi, theta, batch) - jnp.mean(reference_delta(phi, theta, batch)) ** 2


def strong_game(networks):
    """Returns a game whose gradients are so large that the clip cuts them."""
    params, *batches = example_game(networks)
    return params, *(
        batch._replace(obs=3 * batch.obs, td_target=3 * batch.td_target) for batch in batches
    )


@pytest.mark.parametrize("ablation, fast", [(None, 0.01), ("per-layer-lr", 0.03)])
def test_three_baseline_updates_against_a_reference(ablation, fast, monkeypatch):
    """One clip for both networks; with per-layer-lr, perception has a rate of its own."""
    options = dict(ablation=ablation, learning_rate=0.01)
    if ablation:
        options.update(follower_learning_rate=fast)
    played = trace_update(monkeypatch, **options)
    params, batch, _ = strong_game(played.networks)
    expected = jax.tree.map(np.asarray, params)
    rates = dqn.Players(same_rate(params.perception, fast), same_rate(params.control, 0.01))
    adam = Adam(expected, rates, 0.3, played.num_updates)
    opt_state = dqn.init_optimizers(played.optimizers, params)
    with_leading_axis = jax.tree.map(lambda x: x[None], batch)  # as in training: [1, batch, ...]
    for _ in range(3):
        params, opt_state = dqn.baseline_update(
            played.networks, played.optimizers, params, opt_state, with_leading_axis
        )
        gradient = jax.grad(lambda params: reference_msbe(*params, batch))(expected)
        expected = adam.step(expected, gradient)
        assert_close(params, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("follower_loss, power", [("variance", 1.5), ("msbe", None)])
def test_three_rounds_against_a_reference(follower_loss, power, monkeypatch):
    """Three rounds with the script's optimisers equal those of an Adam and losses written out here."""
    played = trace_update(
        monkeypatch,
        scorer=True,
        learning_rate=0.01,
        follower_learning_rate=0.03,
        follower_loss=follower_loss,
        leader_decay_power=power,
    )
    objective = dict(variance=reference_variance, msbe=reference_msbe)[follower_loss]
    params, follower_batch, leader_batch = strong_game(played.networks)
    phi, theta = jax.tree.map(np.asarray, params)
    followers = Adam(phi, same_rate(phi, 0.03), 0.3, played.num_updates)
    leaders = Adam(theta, same_rate(theta, 0.01), 0.3, played.num_updates, power or 1.0)
    opt_state = dqn.init_optimizers(played.optimizers, params)
    for _ in range(3):
        params, opt_state = dqn.scorer_update(
            played.networks,
            played.optimizers,
            params,
            opt_state,
            follower_batch,
            leader_batch,
            objective=played.follower_loss,
        )
        phi = followers.step(phi, jax.grad(objective)(phi, theta, follower_batch))
        theta = leaders.step(theta, jax.grad(reference_msbe, argnums=1)(phi, theta, leader_batch))
        assert_close(params, dqn.Players(phi, theta), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dueling, num_params", [(False, 130), (True, 139)])
def test_parity_of_baseline_and_scorer(dueling, num_params):
    """The same seed gives both the same parameters and the same experience before learning.

    Parameters: 4 x 8 + 8, 8 x 8 + 8, 8 x 2 + 2, and with dueling 8 x 1 + 1.
    """
    states = []
    for scorer in False, True:
        args, env = setup(scorer=scorer, dueling=dueling)
        states.append(first_state(dqn.make_train(args, env), args, seed=3))
    for state in states:
        assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == num_params
    assert tree_equal(states[0].params, states[1].params)
    assert tree_equal(states[0].replay, states[1].replay)


def test_dueling_is_value_plus_centred_advantage():
    """V + A - mean(A), worked out from the parameters."""
    control = dqn.Control(3, 8, activation=jnp.tanh, dueling=True)
    z = jax.random.normal(jax.random.key(0), (5, 8))
    params = control.init(jax.random.key(1), z)["params"]
    hidden = np.tanh(z @ params["Dense_0"]["kernel"])
    advantage = hidden @ params["Dense_1"]["kernel"]
    value = hidden @ params["Dense_2"]["kernel"]
    q = control.apply({"params": params}, z)
    expected = value + advantage - advantage.mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(q, expected, atol=1e-6)
    np.testing.assert_allclose(q.mean(axis=-1), value[:, 0], atol=1e-6)


def test_networks_are_those_of_the_flags():
    """Widths, layers, activation, norm and heads come from the flags."""
    args = setup(hidden_dim=8, perception_layers=2, activation="relu", dueling=True)[0]
    networks = dqn.make_networks(args, 3)
    assert networks.perception == dqn.Perception(8, 2, jax.nn.relu, False)
    assert networks.control == dqn.Control(3, 8, jax.nn.relu, True)
    minatar = dqn.complete(dqn.Args(env="Breakout-MinAtar", scorer=True))
    networks = dqn.make_networks(minatar, 3)
    assert networks.perception == dqn.Perception(128, 2, jax.nn.relu, True)


def test_l1_norm_divides_by_the_mean():
    """(1, -3, 0, 0) has mean absolute value 1 and stays; nothing is divided by zero."""
    x = jnp.array([[1.0, -3, 0, 0], [2, -6, 0, 0], [0, 0, 0, 0]])
    expected = [[1, -3, 0, 0], [1, -3, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(dqn.l1_norm(x), expected)


# ------------------------------------------ Targets -----------------------------------------------


def linear_networks():
    """Returns networks with z = params . s, elementwise, and Q = z @ params."""
    return dqn.Players(
        SimpleNamespace(apply=lambda variables, x: x * variables["params"]),
        SimpleNamespace(apply=lambda variables, z: z @ variables["params"]),
    )


@pytest.mark.parametrize(
    "double, expected", [(False, [1.5 + 0.9 * 8, 1.5]), (True, [1.5 + 0.9 * 4, 1.5])]
)
def test_target_by_hand(double, expected):
    """Target features (1, 2) * 2 = (2, 4), target values (2, 4) @ ((1, 0), (0.5, 2)) = (4, 8).

    So the target takes action 1. The online head on those features says (2, 4) @ ((3, 0), (0, 1)) =
    (6, 4): Double takes action 0, target value 4. Were the online features (1, 2) * (0, 1) used,
    Double would take action 1.
    """
    params = dqn.Players(jnp.array([0.0, 1]), jnp.array([[3.0, 0], [0, 1]]))
    target = dqn.Players(jnp.array(2.0), jnp.array([[1.0, 0], [0.5, 2]]))
    transition = dqn.Transition(
        obs=None,
        action=None,
        reward=jnp.full(2, 1.5),
        next_obs=jnp.array([[1.0, 2], [1, 2]]),
        terminated=jnp.array([False, True]),
    )
    y = dqn.compute_td_target(linear_networks(), params, target, transition, 0.9, double)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def play_only(steps, env, env_params, **options):
    """Returns the state after acting, before any update, when `steps` steps are in the replay."""
    usual = dict(num_envs=2, buffer_size=2 * steps, batch_size=1, learning_starts=2 * steps)
    usual.update(total_timesteps=2 * steps + 1000)
    args, env = setup(env, env_params, **usual | options)
    return first_state(dqn.make_train(args, env), args)


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize(
    "limit, terminates", [(Limit(3), False), (Limit(terminate_at=3), True), (Limit(3, 3), True)]
)
def test_three_kinds_of_transition(limit, terminates, bootstrap):
    """Episodes of 3 steps, cut by time, ended by the environment, or both at once.

    Steps pay 1, 2, 3 and lead to observations 2, 3, 4. With Q_target(s) = s and gamma 0.5: 1 + 2 / 2
    and 2 + 3 / 2 in the middle; at the end 3 + 4 / 2 through a time-out and 3 after a termination,
    or at a time-out without bootstrapping. The observation after a reset would give 3.5.
    """
    replay = play_only(7, Counter(), limit, bootstrap_at_timeout=bootstrap).replay
    params = dqn.Players(jnp.array(1.0), jnp.array([[1.0, 0.0]]))
    y = dqn.compute_td_target(linear_networks(), params, params, replay, 0.5)
    last = 5.0 if bootstrap and not terminates else 3.0
    of_one_environment = [2, 3.5, last, 2, 3.5, last, 2]
    np.testing.assert_allclose(y, np.repeat([of_one_environment], 2, axis=0).T)
    np.testing.assert_array_equal(replay.obs[:, 0, 0], [1, 2, 3, 1, 2, 3, 1])


def test_final_observation_is_stored_at_a_timeout():
    """CartPole cut after 5 steps, in which no pole falls: the next observation obeys the physics."""
    env, params = gymnax.make("CartPole-v1")
    state = play_only(11, None, params.replace(max_steps_in_episode=5))
    replay = jax.tree.map(lambda x: x[:, 0], state.replay)  # of one environment
    for t in range(11):
        start = jax.tree.map(jnp.asarray, env.reset(jax.random.key(0), params)[1])
        x, x_dot, theta, theta_dot = replay.obs[t]
        before = start.replace(x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot)
        after = env.step_env(jax.random.key(0), before, replay.action[t], params)[0]
        np.testing.assert_allclose(replay.next_obs[t], after, rtol=1e-5, atol=1e-7)
    same = [np.array_equal(replay.next_obs[t], replay.obs[t + 1]) for t in range(10)]
    assert same == [True, True, True, True, False] * 2
    assert not replay.terminated.any()
    assert state.episodes == 2 * 2


@pytest.mark.parametrize("script", [dqn, pqn], ids=["dqn", "pqn"])
def test_asterix_keeps_its_dynamics(script):
    """For all fillings of its eight slots and 20 keys: the slot of gymnax's own loop, free or not."""
    spec = importlib.util.find_spec(asterix.__name__)
    own = importlib.util.module_from_spec(spec)  # in which no script has changed anything
    spec.loader.exec_module(own)
    keys = jax.random.split(jax.random.key(0), 20)
    filled = jnp.array([*itertools.product((0, 1), repeat=8)])

    def slots(function):
        of_keys = jax.vmap(function, in_axes=(0, None))
        return jax.jit(jax.vmap(of_keys, in_axes=(None, 0)))(keys, filled)

    found = slots(script.free_slot)
    assert tree_equal(found, slots(own.while_sample_slots))
    free = found[1]  # [fillings, keys]
    assert free[0].all() and not free[255].any()
    assert 0 < free[127].mean() < 1  # one of the eight is never tried
    script.make_env(script.complete(script.Args(env="Asterix-MinAtar")))
    assert asterix.while_sample_slots is script.free_slot


# ------------------------------------------- Replay -----------------------------------------------


def test_ring_buffer_wraps():
    """16 steps into 6 rows: the last six remain, the oldest next to be overwritten."""
    state = play_only(16, Counter(), Limit(), buffer_size=13)  # of 2 environments: 6 rows
    # Counter's observations count from 1.
    np.testing.assert_array_equal(state.replay.obs[:, 0, 0], [13, 14, 15, 16, 11, 12])
    np.testing.assert_array_equal(state.replay.next_obs, state.replay.obs + 1)


def test_samples_are_held_and_independent(monkeypatch):
    """What is drawn is held, the newest is drawn at times, and the players draw different batches."""
    drawn = []

    def update(networks, optimizers, params, opt_state, follower_batch, leader_batch, objective):
        obs = jnp.stack([follower_batch.obs, leader_batch.obs])
        jax.debug.callback(lambda obs: drawn.append(np.array(obs)), obs, ordered=True)
        return params, opt_state

    monkeypatch.setattr(dqn, "scorer_update", update)
    args, env = setup(
        Counter(),
        Limit(),
        scorer=True,
        num_envs=2,
        learning_starts=6,
        buffer_size=30,
        batch_size=16,
        total_timesteps=60,
        target_update_interval=54,
    )
    train(dqn.make_train(args, env), args)
    jax.effects_barrier()
    drawn = np.array(drawn)[..., 0]  # [updates, players, batch]
    assert drawn.shape == (27, 2, 16)
    # 3 steps are stored before the first update; the fourth is made beside it.
    newest = 3 + np.arange(27)[:, None, None]
    assert np.all(drawn >= np.maximum(1, newest - 14)) and np.all(drawn <= newest)
    assert np.any((drawn == newest)[:12])  # also before the ring is full, from when all is held
    assert np.any(drawn[-1] == newest[-1] - 14)
    for follower, leader in drawn:
        assert not np.array_equal(follower, leader)
    assert len(np.unique(drawn, axis=0)) == 27


def test_diagnostics_are_of_held_transitions(monkeypatch):
    """3 steps before learning and 8 beside it are in a ring of 30; Counter counts from 1."""
    seen = []
    own_bellman_error = dqn.bellman_error

    def watch(networks, params, batch):
        jax.debug.callback(lambda obs: seen.append(np.array(obs)), batch.obs)
        return own_bellman_error(networks, params, batch)

    args, env = setup(
        Counter(),
        Limit(),
        scorer=True,
        num_envs=2,
        learning_starts=6,
        buffer_size=60,
        total_timesteps=22,
        target_update_interval=16,
    )
    training = dqn.make_train(args, env)
    state = train(training, args)
    monkeypatch.setattr(dqn, "bellman_error", watch)
    metrics = jax.jit(training.diagnose)(state, 0)
    jax.effects_barrier()
    assert len(training.timesteps) == 1 and seen
    for obs in seen:
        assert obs.shape == (2048, 1)
        assert set(obs.ravel()) == {*range(1, 12)}
    assert all(np.isfinite(value) for value in metrics.values())


def in_chunks_of_one_update(monkeypatch, warmup_steps, num_updates, target_period):
    """Lets the host see the state after each update."""
    counts = dqn.Counts(
        warmup_steps=warmup_steps,
        target_period=target_period,
        stretch_updates=1,
        chunk_updates=1,
        num_chunks=num_updates,
        chunks_per_point=1,
    )
    monkeypatch.setattr(dqn, "count_steps", lambda *_: counts)


def test_a_step_learns_and_acts_with_the_same_parameters(monkeypatch):
    """Targets are of the batch drawn before, and of the parameters and targets from before.

    The actions stored are the greedy ones of the parameters before the update.
    """
    seen = []
    own_compute_td_target = dqn.compute_td_target

    def watch(networks, params, target, transition, gamma, double):
        jax.debug.callback(lambda *values: seen.append(values), params, target, transition)
        return own_compute_td_target(networks, params, target, transition, gamma, double)

    monkeypatch.setattr(dqn, "compute_td_target", watch)
    in_chunks_of_one_update(monkeypatch, warmup_steps=4, num_updates=36, target_period=1)
    args, env = setup(
        scorer=True,
        double=True,
        tau=0.5,
        learning_rate=1.0,
        follower_learning_rate=1.0,
        epsilon_start=0.0,
        epsilon_end=0.0,
    )
    networks = dqn.make_networks(args, 2)
    training = dqn.make_train(args, env)
    state = first_state(training, args)
    train_chunk = jax.jit(training.train_chunk)
    changed = 0
    for chunk in range(36):
        before = state
        state, _ = train_chunk(state, chunk)
        jax.effects_barrier()
        assert tree_equal(seen[-1], (before.params, before.target, before.drawn))
        old = dqn.q_values(networks, before.params, before.obs).argmax(axis=-1)
        new = dqn.q_values(networks, state.params, before.obs).argmax(axis=-1)
        np.testing.assert_array_equal(state.replay.action[4 + chunk], old)
        changed += not np.array_equal(old, new)
    assert changed > 2
    assert not tree_equal(state.params, state.target)


@pytest.mark.parametrize("name, features, gib", [("Breakout", 400, 2.5), ("Seaquest", 1000, 6.0)])
def test_replay_memory(name, features, gib):
    """30 seeds, binary observations as bool: 30 x 1e5 x (2 x features + 9) bytes."""
    args = dqn.complete(dqn.Args(env=f"{name}-MinAtar", scorer=True))
    init = jax.vmap(dqn.make_train(args, dqn.make_env(args)).init)
    lanes = jax.ShapeDtypeStruct((30,), jnp.uint32), jax.ShapeDtypeStruct((30,), jnp.float32)
    replay = jax.eval_shape(init, *lanes).replay
    assert replay.obs.dtype == replay.next_obs.dtype == bool
    assert replay.obs.shape == (30, 781, 128, features)  # 1e5 // 128 rows
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(replay))
    assert 30 * 781 * 128 * 2 * features < size < gib * 2**30


# ------------------------------------------ Schedules ---------------------------------------------


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_learning_rates_end_at_zero(power, monkeypatch, optimized):
    """At update k a rate is (1 - k / N)^power of the first, and after N updates exactly 0.

    Adam under a constant gradient moves by its rate.
    """
    options = dict(leader_decay_power=power, learning_rate=0.1, follower_learning_rate=0.5)
    played = trace_update(monkeypatch, scorer=True, **options)
    num_updates = played.num_updates
    assert num_updates == 40  # (160 - 16) / 4 = 36, rounded up to whole stretches of 10
    for optimizer, rate, exponent in zip(played.optimizers, (0.5, 0.1), (1.0, power)):

        def step(opt_state, _, optimizer=optimizer):
            change, opt_state = optimizer.update(jnp.ones(1), opt_state)
            return opt_state, change[0]

        first = optimizer.init(jnp.zeros(1))
        moved = -jax.lax.scan(step, first, None, num_updates + 3)[1]
        left = 1 - np.arange(num_updates) / num_updates
        np.testing.assert_allclose(moved[:num_updates], rate * left**exponent, rtol=1e-3)
        assert moved[num_updates - 1] > 0
        assert not moved[num_updates:].any()


def trace_targets(monkeypatch, **options):
    """Returns parameters and target parameters before each update and after the last; the chunks."""
    seen = []

    def watch(networks, params, target, transition, gamma, double):
        jax.debug.callback(
            lambda *pair: seen.append(jax.tree.map(np.array, pair)), params, target, ordered=True
        )
        return own_compute_td_target(networks, params, target, transition, gamma, double)

    own_compute_td_target = dqn.compute_td_target
    monkeypatch.setattr(dqn, "compute_td_target", watch)
    args, env = setup(learning_rate=0.01, **options)
    training = dqn.make_train(args, env)
    last = train(training, args)
    jax.effects_barrier()
    return [*seen, (last.params, last.target)], len(training.timesteps)


@pytest.mark.parametrize(
    "options, period, num_updates, num_chunks",
    [
        (dict(target_update_interval=1, total_timesteps=40), 1, 6, 1),  # less than a step
        (dict(target_update_interval=4, total_timesteps=816, tau=0.005), 1, 200, 2),
        (dict(target_update_interval=12, total_timesteps=52, scorer=True), 3, 9, 1),
        (dict(target_update_interval=24, total_timesteps=36, tau=0.25), 6, 6, 1),  # 5 asked for
        (dict(target_update_interval=28, total_timesteps=616, tau=0.25, double=True), 7, 154, 2),
        (dict(target_update_interval=148, total_timesteps=460, scorer=True), 37, 111, 3),
        (dict(target_update_interval=1052, total_timesteps=2120), 263, 526, 2),  # a prime above 256
        (dict(target_update_interval=1000, total_timesteps=912, num_envs=3), 333, 333, 3),
        (dict(target_update_interval=1000, total_timesteps=1320, num_envs=13), 77, 154, 2),
        (dict(target_update_interval=100, total_timesteps=544, num_envs=17), 6, 36, 1),
        (dict(target_update_interval=4000, total_timesteps=8016, scorer=True), 1000, 2000, 8),
        (dict(target_update_interval=10**12, total_timesteps=36), 10**9, 8, 1),  # never
    ],
)
def test_targets_at_every_update(options, period, num_updates, num_chunks, monkeypatch):
    """Bit for bit the old ones until the period is over; then the online ones, or tau of the way."""
    states, chunks = trace_targets(monkeypatch, **options)
    assert (len(states) - 1, chunks) == (num_updates, num_chunks)
    tau = options.get("tau", 1.0)
    assert tree_equal(*states[0])
    for updates in range(1, num_updates + 1):
        params, target = states[updates]
        old_params, old_target = states[updates - 1]
        if updates < num_updates:  # the last update's rate is next to nothing
            assert not tree_equal(params, old_params)
        if updates % period != 0:
            assert tree_equal(target, old_target)
        elif tau == 1:
            assert tree_equal(target, params)
        else:
            mixed = jax.tree.map(
                lambda new, old: tau * new + (1 - tau) * old,
                params,
                old_target,
            )
            assert_close(target, mixed, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_envs", range(1, 65))
@pytest.mark.parametrize("interval", [1, 1_000, 16_000])
def test_chunks_have_a_sensible_length(interval, num_envs):
    """Any number of environments gives loops that XLA keeps, targets on time, and 1,000 points."""
    period = max(1, round(interval / num_envs))
    counts = dqn.count_steps(10**7, 10_000, period * num_envs, num_envs)
    assert counts.target_period % counts.stretch_updates == 0
    assert counts.chunk_updates % counts.stretch_updates == 0
    assert 16 <= counts.chunk_updates <= max(256, period)
    asked = -(-(10**7 - 10_000) // num_envs)
    assert asked - 1 <= counts.num_updates < 1.01 * asked
    points, rest = divmod(counts.num_chunks, counts.chunks_per_point)
    assert rest == 0
    assert min(1000, asked // counts.chunk_updates) <= points <= 2001


@pytest.mark.parametrize("updates", [1, 2, 5, 15, 16, 100, 130, 257, 1000, 5000, 300_000])
@pytest.mark.parametrize("period", [1, 2, 3, 17, 97, 128, 257, 514, 1009, 9973, 100_003, 2**30])
def test_counts_of_any_period(period, updates):
    """Every target update falls on a stretch's end, and little is added to what was asked for."""
    counts = dqn.count_steps(10 * (updates + 1), 10, 10 * period, 10)
    assert (counts.warmup_steps, counts.target_period) == (1, period)
    assert period % counts.stretch_updates == 0
    assert counts.chunk_updates <= min(10_000, max(256, updates))
    assert updates <= counts.num_updates < updates + counts.chunk_updates * counts.chunks_per_point
    if counts.stretch_updates < 16:
        stretches = -(-updates // counts.stretch_updates)
        assert counts.num_updates - updates < counts.stretch_updates * max(16, stretches // 6)


def test_epsilon_at_its_steps():
    """Of 1,000 environments with 10 actions, 0.9 epsilon leave the greedy action.

    Epsilon falls from 0.8 to 0 over 20 steps, of which the 10 before learning are a part.
    """
    args, env = setup(
        Counter(10),  # observes 1, always
        Limit(1),
        num_envs=1000,
        learning_starts=10_000,
        total_timesteps=30_000,
        buffer_size=30_000,
        epsilon_start=0.8,
        epsilon_end=0.0,
        epsilon_steps=20_000,
        learning_rate=1e-30,
        target_update_interval=20_000,
    )
    state = train(dqn.make_train(args, env), args)
    action = np.asarray(state.replay.action)  # [step, environments]
    greedy = action[-1, 0]
    others = (action != greedy).mean(axis=1)
    expected = 0.9 * 0.8 * np.maximum(0, 1 - np.arange(30) / 20)
    np.testing.assert_allclose(others, expected, atol=4 * np.sqrt(0.25 / 1000))
    assert np.all(action[20:] == greedy) and others[19] > 0
    explored = np.bincount(action[:5].ravel(), minlength=10)
    assert np.all(explored > 5000 * 0.05)  # all actions


# ------------------------------------------- Metrics ----------------------------------------------


def test_mean_where():
    """The mean over the true ones, and 0 rather than a NaN where there is none."""
    values = jnp.array([1.0, 2.0, 6.0, jnp.nan])
    assert dqn.mean_where(jnp.array([True, False, True, False]), values) == 3.5
    assert dqn.mean_where(jnp.zeros(4, bool), values) == 0.0


def test_points_of_the_curves():
    """2,100 chunks make 1,050 points; a point holds what the second of its chunks measured."""
    args, env = setup(target_update_interval=64, total_timesteps=16 + 64 * 2100)
    training = dqn.make_train(args, env)
    assert (len(training.timesteps), training.chunks_per_point) == (2100, 2)
    assert (training.first_timestep, training.timesteps[0]) == (16, 16 + 64)
    assert training.timesteps[-1] == args.total_timesteps
    lanes = dqn.place_lanes(args)
    records = dqn.Records(args, training, ["one"], lanes)
    state, programs = dqn.compile_programs(args, training, lanes, None)
    found = []
    for chunk in range(60):
        state, metrics = programs.train_chunk(state, np.int32(chunk))
        records.add(chunk, metrics)
        found.append((metrics["returns"][0], metrics["finished"][0], state.episodes[0]))
    returns, finished, episodes = np.array(found, np.float32)[1::2].T
    curves = records.curves()
    assert curves.keys() == {"returns", "episodes"}
    expected = np.where(finished == 1, returns, np.nan)
    np.testing.assert_array_equal(curves["returns"], expected[None])
    np.testing.assert_array_equal(curves["episodes"], episodes[None])
    np.testing.assert_array_equal(records.point_timesteps(), training.timesteps[1:60:2])
    assert np.isfinite(returns[-1]) and episodes[-1] > episodes[0]


# -------------------------------------------- Seeds -----------------------------------------------


def test_two_seeds_differ():
    """In initial weights, in exploration and in the environment; one seed twice does not."""
    training = dqn.make_train(*setup())
    seeds = jnp.array([0, 1, 0], jnp.uint32)
    state = jax.jit(jax.vmap(training.init))(seeds, jnp.zeros(3))
    parts = dict(
        perception=state.params.perception["Dense_0"]["kernel"],
        control=state.params.control["Dense_0"]["kernel"],
        action=state.replay.action,
        environment=state.replay.obs[:, 0],
    )
    for name, values in parts.items():
        assert not np.array_equal(values[0], values[1]), name
        assert np.array_equal(values[0], values[2]), name
    first = np.asarray(state.replay.obs[0, 0])  # environments of one seed differ as well
    assert len(np.unique(first, axis=0)) == len(first)


# -------------------------- Environments whose Q-values are known ---------------------------------

# The inverted roles are left out: where all targets are alike, the variance gives control no
# gradient, and through its small initial weights perception gets next to none.
VARIANTS = dict(
    baseline=dict(),
    double=dict(double=True),
    dueling=dict(dueling=True),
    scorer=dict(scorer=True, follower_learning_rate=0.01),
    msbe=dict(scorer=True, follower_learning_rate=0.01, follower_loss="msbe"),
    synchronous=dict(scorer=True, ablation="synchronous"),
    per_layer=dict(ablation="per-layer-lr", follower_learning_rate=0.01),
    everything=dict(
        scorer=True,
        follower_learning_rate=0.01,
        double=True,
        dueling=True,
        leader_decay_power=1.5,
    ),
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes(variant):
    """Every variant finds the Q-values of all probes within 0.05, trained side by side."""
    usual = dict(
        num_envs=4,
        buffer_size=2000,
        batch_size=32,
        learning_starts=100,
        total_timesteps=8000,
        hidden_dim=16,
        target_update_interval=80,
        learning_rate=0.005,
        gamma=0.5,
        epsilon_end=1.0,
        max_grad_norm=10.0,
    )
    args, _ = setup(Probe(), **usual | VARIANTS[variant])
    networks = dqn.make_networks(args, 2)
    rate = jnp.float32(args.follower_learning_rate or 0.0)

    def train_probe(kind):
        limit = jnp.where(kind == 4, 3, 1_000_000)
        env = dqn.vectorize(Probe(), ProbeParams(kind, limit), jnp.float32)
        training = dqn.make_train(args, env)
        return jax.lax.fori_loop(
            0,
            len(training.timesteps),
            lambda chunk, state: training.train_chunk(state, chunk)[0],
            training.init(jnp.uint32(7), rate),
        )

    params = jax.jit(jax.vmap(train_probe))(jnp.arange(5)).params
    for kind, place, expected in KNOWN:
        params_of_kind = jax.tree.map(lambda x, kind=kind: x[kind], params)
        q = dqn.q_values(networks, params_of_kind, jnp.array([place]))
        np.testing.assert_allclose(q, expected, atol=0.05, err_msg=f"probe {kind} at {place}")

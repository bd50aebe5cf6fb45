"""scorer_dqn.py from the inside: the game, targets, schedules, replay, and environments whose Q-values are known."""

import importlib.util
import itertools
from functools import partial
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.environments.minatar import asterix
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper

import scorer_dqn as dqn
import scorer_pqn as pqn
from environments import KNOWN, Counter, Limit, Probe, ProbeParams
from helpers import tree_equal

SMALL = dict(env="CartPole-v1", num_envs=4, buffer_size=400, batch_size=8, learning_starts=16, total_timesteps=160,
             hidden_dim=8, target_update_interval=40)  # control preset: tanh, no norm, clip at 0.3
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def optimized():
    """Programs as a run compiles them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def setup(env=None, env_params=None, **args):
    """Arguments, environment and its parameters for make_train, the environment wrapped as the script does it."""
    args, usual, usual_params = dqn.resolve(dqn.Args(**SMALL | args))
    wrapped = LogWrapper(FlattenObservationWrapper(env)) if env else usual
    return args, wrapped, env_params or (env.default_params if env else usual_params)


def make_train(args, env, env_params):
    """The script's make_train, with the follower's rate that args has in init."""
    init, *others = dqn.make_train(args, env, env_params)
    return lambda seed: init(seed, jnp.float32(args.follower_learning_rate or 0.0)), *others


def trace(monkeypatch, **args):
    """What one block hands to its update, which does nothing: networks, optimisers, the game's further arguments."""
    seen = {}

    def watch(*arguments):
        *first, networks, optimizers, params, opt_state, batch, target = arguments
        seen.update(first=first, networks=networks, optimizers=optimizers)
        return params, opt_state

    with monkeypatch.context() as patch:
        for name in ("scorer_update", "baseline_update", "ablated_update"):
            patch.setattr(dqn, name, partial(lambda name, *rest: (seen.update(name=name), watch(*rest))[1], name))
        init, block, *_, timesteps, _ = make_train(*setup(**args))
        block(jax.jit(init)(jnp.uint32(0)), 0)
    args = setup(**args)[0]
    seen["num_updates"] = (timesteps[-1] - (timesteps[0] - (timesteps[1] - timesteps[0]))) // args.num_envs
    return SimpleNamespace(**seen, args=args)


def game(networks, num_actions=2, features=4, batch=8):
    """Random parameters and two players' batches [2, batch, ...] with their targets."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(2, batch, features)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0))
    phi = networks.perception.init(keys[0], obs)["params"]
    theta = networks.control.init(keys[1], networks.perception.apply({"params": phi}, obs))["params"]
    action = rng.integers(num_actions, size=(2, batch))
    batch = dqn.Transition(obs, action, *rng.normal(size=(3, 2, batch)).astype(np.float32))
    return dqn.Players(phi, theta), batch, rng.normal(size=(2, *batch.reward.shape[1:])).astype(np.float32)


# -------------------- The game

PLAYERS = dqn.Players(*(cls(dqn.Args(hidden_dim=8, perception_layers=1, activation="tanh", l1_norm=False), *extra)
                        for cls, extra in ((dqn.Perception, ()), (dqn.Control, (2,)))))
STILL, STEP = optax.sgd(0.0), optax.sgd(1.0)


def play(follower, leader, params, batch, target, objective=dqn.follower_loss):
    """The parameters after one round with these optimisers."""
    opt_state = dqn.Players(follower.init(params.perception), leader.init(params.control))
    update = jax.jit(partial(dqn.scorer_update, objective, PLAYERS, dqn.Players(follower, leader)))
    return update(params, opt_state, batch, target)[0]


def test_each_player_moves_only_itself():
    """A follower's step changes no bit of theta, a leader's none of phi."""
    params, batch, target = game(PLAYERS)
    after = play(STEP, STILL, params, batch, target)
    assert tree_equal(after.control, params.control) and not tree_equal(after.perception, params.perception)
    after = play(STILL, STEP, params, batch, target)
    assert tree_equal(after.perception, params.perception) and not tree_equal(after.control, params.control)


def test_each_player_reads_only_its_batch():
    """The follower's step depends on sample 0 alone; the leader's, while the follower stands still, on sample 1."""
    params, batch, target = game(PLAYERS)
    for other, follower in ((1, STEP), (0, STILL)):
        changed, changed_target = batch._replace(obs=batch.obs.copy()), target.copy()
        changed.obs[other], changed_target[other] = 3.0, 3.0
        mine, same = (play(follower, STEP, params, *sample) for sample in ((batch, target), (changed, changed_target)))
        assert tree_equal(mine[1 - other], same[1 - other]) and not tree_equal(mine, params)


def test_leader_answers_the_new_phi():
    """The leader's gradient is taken at the follower's new phi, not at the old one."""
    params, batch, target = game(PLAYERS)
    after = play(STEP, STEP, params, batch, target)
    sample = dqn.Transition(*(x[1] for x in batch))

    def gap(phi):
        gradient = jax.grad(dqn.leader_loss, argnums=1)(phi, params.control, PLAYERS, sample, target[1])
        gaps = jax.tree.map(lambda new, old, g: abs(new - old + g).max(), after.control, params.control, gradient)
        return max(jax.tree.leaves(gaps))

    assert gap(after.perception) < 1e-6 < 1e-3 < gap(params.perception)


def test_losses_are_numpys():
    """The follower's loss is the population variance of the Bellman errors, the leader's their mean square."""
    params, batch, target = game(PLAYERS)
    sample, target = dqn.Transition(*(x[0] for x in batch)), target[0]
    q = np.asarray(dqn.q_values(PLAYERS, *params, sample.obs))
    delta = target - q[np.arange(len(q)), sample.action]
    np.testing.assert_allclose(dqn.follower_loss(*params, PLAYERS, sample, target), np.var(delta), rtol=1e-5)
    np.testing.assert_allclose(dqn.leader_loss(*params, PLAYERS, sample, target), np.mean(delta**2), rtol=1e-5)


def test_variance_ignores_a_constant():
    """A constant added to every target moves neither the variance nor its gradient; the mean square, it does."""
    params, batch, target = game(PLAYERS)
    sample = dqn.Transition(*(x[0] for x in batch))

    def near(loss):
        both = (jax.value_and_grad(loss)(*params, PLAYERS, sample, target[0] + shift) for shift in (0.0, 2.0))
        return all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*map(jax.tree.leaves, both)))

    assert near(dqn.follower_loss) and not near(dqn.leader_loss)


def test_no_gradient_through_the_target():
    """Neither loss pulls on the target."""
    params, batch, target = game(PLAYERS)
    sample = dqn.Transition(*(x[0] for x in batch))
    for loss in dqn.follower_loss, dqn.leader_loss:
        assert not np.any(jax.grad(loss, argnums=4)(*params, PLAYERS, sample, target[0]))


def test_a_silent_broadcast_is_refused():
    """Targets [batch, 1] would train on [batch, batch] errors."""
    params, batch, target = game(PLAYERS)
    with pytest.raises(AssertionError):
        dqn.leader_loss(*params, PLAYERS, dqn.Transition(*(x[0] for x in batch)), target[0][:, None])


# -------------------- Ablations

def plain_step(loss, player, params, sample, target):
    """Parameters of one player after a gradient step of size 1."""
    gradient = jax.grad(loss, argnums=player)(*params, PLAYERS, sample, target)
    return jax.tree.map(lambda p, g: p - g, params[player], gradient)


def assert_close(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("objective", [dqn.follower_loss, dqn.leader_loss])
def test_inverted_roles(objective):
    """Control moves first, on the loss of sample 0; then perception, on the MSBE of sample 1 at the new theta."""
    params, batch, target = game(PLAYERS)
    opt_state = dqn.Players(*map(STEP.init, params))
    after, _ = dqn.ablated_update(True, objective, PLAYERS, (STEP, STEP), params, opt_state, batch, target)
    first, second = (dqn.Transition(*(x[i] for x in batch)) for i in (0, 1))
    theta = plain_step(objective, 1, params, first, target[0])
    phi = plain_step(dqn.leader_loss, 0, dqn.Players(params.perception, theta), second, target[1])
    assert_close(tuple(after), (phi, theta))
    stale = plain_step(dqn.leader_loss, 0, params, second, target[1])
    assert max(abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (stale, phi)))) > 1e-3


def test_synchronous():
    """Both players step on the MSBE from the old parameters, each on its own sample, whatever the objective."""
    params, batch, target = game(PLAYERS)
    opt_state = dqn.Players(*map(STEP.init, params))
    after, _ = dqn.ablated_update(False, dqn.follower_loss, PLAYERS, (STEP, STEP), params, opt_state, batch, target)
    first, second = (dqn.Transition(*(x[i] for x in batch)) for i in (0, 1))
    assert_close(tuple(after), tuple(plain_step(dqn.leader_loss, player, params, sample, target[player])
                                     for player, sample in ((0, first), (1, second))))


def test_synchronous_on_one_batch_is_the_baseline(monkeypatch):
    """With the two samples alike and no clip, three synchronous updates are three of the baseline."""
    runs = [trace(monkeypatch, max_grad_norm=1e9, learning_rate=0.01, **options)
            for options in (dict(scorer=True, ablation="synchronous"), {})]
    params, batch, target = game(runs[0].networks)
    batch, target = jax.tree.map(lambda x: np.stack([x[0], x[0]]), (batch, target))
    both, single = params, params
    opt_state = dqn.Players(*(o.init(p) for o, p in zip(runs[0].optimizers, params)))
    single_state = runs[1].optimizers.init(params)
    for _ in range(3):
        both, opt_state = dqn.ablated_update(
            *runs[0].first, runs[0].networks, runs[0].optimizers, both, opt_state, batch, target)
        single, single_state = dqn.baseline_update(
            runs[1].networks, runs[1].optimizers, single, single_state, *jax.tree.map(lambda x: x[:1], (batch, target)))
    assert_close(tuple(both), tuple(single))
    assert not tree_equal(both.perception, params.perception)


@pytest.mark.parametrize("ablation, name, first, rates", [
    (None, "scorer_update", [dqn.follower_loss], (0.03, 0.01)),
    ("inverted-roles", "ablated_update", [True, dqn.follower_loss], (0.01, 0.03)),
    ("synchronous", "ablated_update", [False, dqn.follower_loss], (0.01, 0.01)),
    ("per-layer-lr", "baseline_update", [], (0.03, 0.01))])
def test_rates_and_update_of_each_ablation(ablation, name, first, rates, monkeypatch):
    """Which update is played, and at which rates perception and control move: Adam's first step is its rate."""
    rate = {} if ablation == "synchronous" else dict(follower_learning_rate=0.03)
    run = trace(monkeypatch, scorer=ablation != "per-layer-lr", ablation=ablation, learning_rate=0.01, **rate)
    assert (run.name, run.first) == (name, first)
    params = dqn.Players(jnp.ones(3), jnp.ones(2))
    if name == "baseline_update":
        change, _ = run.optimizers.update(params, run.optimizers.init(params))
    else:
        change = [o.update(p, o.init(p))[0] for o, p in zip(run.optimizers, params)]
    for moved, rate in zip(change, rates):
        np.testing.assert_allclose(moved, -rate, rtol=1e-4)


class Adam:
    """Adam behind a global-norm clip, its rate falling as (1 - updates / total)^power, written out."""

    def __init__(self, params, rate, clip, total, power=1.0):
        self.rate, self.clip, self.total, self.power, self.count = rate, clip, total, power, 0
        self.first = self.second = jax.tree.map(np.zeros_like, params)

    def step(self, params, gradient):
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g * min(1.0, self.clip / norm), gradient)
        self.first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.first, gradient)
        self.second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, self.second, gradient)
        left = (1 - self.count / self.total) ** self.power
        self.count += 1
        rate = jax.tree.map(lambda p: self.rate, params) if isinstance(self.rate, float) else self.rate
        return jax.tree.map(lambda p, m, v, rate: p - rate * left * (m / (1 - 0.9**self.count)) / (
            np.sqrt(v / (1 - 0.999**self.count)) + 1e-8), params, self.first, self.second, rate)


def reference_delta(phi, theta, batch, target):
    """Bellman errors of the control preset's networks: tanh layer, tanh layer, linear."""
    def layer(x, p):
        return x @ p["kernel"] + p["bias"]

    z = jnp.tanh(layer(batch.obs, phi["Dense_0"]))
    q = layer(jnp.tanh(layer(z, theta["Dense_0"])), theta["Dense_1"])
    return target - jnp.where(batch.action == 1, q[:, 1], q[:, 0])


@pytest.mark.parametrize("kind", ["baseline", "scorer", "msbe", "per_layer"])
def test_three_updates_against_a_reference(kind, monkeypatch):
    """Three updates with the script's own optimisers equal those of an Adam and losses written out here."""
    variants = dict(baseline={}, scorer=dict(scorer=True, follower_learning_rate=0.03, leader_decay_power=1.5),
                    msbe=dict(scorer=True, follower_learning_rate=0.03, follower_loss="msbe"),
                    per_layer=dict(ablation="per-layer-lr", follower_learning_rate=0.03))
    run = trace(monkeypatch, learning_rate=0.01, **variants[kind])
    params, batch, target = game(run.networks)
    batch, target = batch._replace(obs=3 * batch.obs), 3 * target  # gradients that the clip cuts
    phi, theta = expected = jax.tree.map(np.asarray, params)
    alone = kind in ("baseline", "per_layer")
    if alone:
        rates = (0.03 if kind == "per_layer" else 0.01, 0.01)  # one clip for both
        adam = Adam(expected, dqn.Players(*(jax.tree.map(lambda _: rate, p) for rate, p in zip(rates, expected))),
                    0.3, run.num_updates)
        opt_state = run.optimizers.init(params)
    else:
        followers = Adam(phi, 0.03, 0.3, run.num_updates)
        leaders = Adam(theta, 0.01, 0.3, run.num_updates, run.args.leader_decay_power)
        opt_state = dqn.Players(*(o.init(p) for o, p in zip(run.optimizers, params)))
    follower, leader = (dqn.Transition(*(x[i] for x in batch)) for i in (0, 1))

    def follower_objective(phi, theta):
        delta = reference_delta(phi, theta, follower, target[0])
        return jnp.mean(delta**2) - (jnp.mean(delta) ** 2 if kind == "scorer" else 0.0)

    def leader_objective(theta, phi):
        return jnp.mean(reference_delta(phi, theta, leader, target[1]) ** 2)

    def baseline_objective(params):
        return jnp.mean(reference_delta(*params, follower, target[0]) ** 2)

    for _ in range(3):
        if alone:
            only = jax.tree.map(lambda x: x[:1], batch)
            params, opt_state = dqn.baseline_update(run.networks, run.optimizers, params, opt_state, only, target[:1])
            phi, theta = expected = adam.step(expected, jax.grad(baseline_objective)(expected))
        else:
            params, opt_state = dqn.scorer_update(
                *run.first, run.networks, run.optimizers, params, opt_state, batch, target)
            phi = followers.step(phi, jax.grad(follower_objective)(phi, theta))
            theta = leaders.step(theta, jax.grad(leader_objective)(theta, phi))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6), tuple(params), (phi, theta))


def test_parity_of_baseline_and_scorer():
    """The same seed gives both the same parameters, hence Q-values, and the same experience before learning."""
    for options in {}, dict(dueling=True):
        inits = [make_train(*setup(scorer=scorer, **options))[0] for scorer in (False, True)]
        states = [jax.jit(init)(jnp.uint32(3)) for init in inits]
        count = [sum(leaf.size for leaf in jax.tree.leaves(state.params)) for state in states]
        # 4 x 8 + 8, 8 x 8 + 8, 8 x 2 + 2, and with dueling 8 x 1 + 1
        assert count == [130 + 9 * bool(options)] * 2
        assert tree_equal(states[0].params, states[1].params) and tree_equal(states[0].replay, states[1].replay)


def test_dueling_is_value_plus_centred_advantage():
    """V + A - mean(A), worked out from the parameters."""
    args = setup(dueling=True)[0]
    control = dqn.Control(args, 3)
    z = jax.random.normal(jax.random.key(0), (5, 8))
    params = control.init(jax.random.key(1), z)["params"]
    hidden = np.tanh(z @ params["Dense_0"]["kernel"])
    advantage, value = (hidden @ params[name]["kernel"] for name in ("Dense_1", "Dense_2"))
    q = control.apply({"params": params}, z)
    np.testing.assert_allclose(q, value + advantage - advantage.mean(axis=-1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(q.mean(axis=-1), value[:, 0], atol=1e-6)


def test_l1_norm_divides_by_the_mean():
    """(1, -3, 0, 0) has mean absolute value 1 and stays; nothing is divided by zero."""
    np.testing.assert_array_equal(dqn.l1_norm(jnp.array([[1.0, -3, 0, 0], [2, -6, 0, 0], [0, 0, 0, 0]])),
                                  [[1, -3, 0, 0], [1, -3, 0, 0], [0, 0, 0, 0]])


# -------------------- Targets

def linear_networks():
    """z = params . s, elementwise; Q = z @ params."""
    return dqn.Players(SimpleNamespace(apply=lambda variables, x: x * variables["params"]),
                       SimpleNamespace(apply=lambda variables, z: z @ variables["params"]))


@pytest.mark.parametrize("double, expected", [(False, [1.5 + 0.9 * 8, 1.5]), (True, [1.5 + 0.9 * 4, 1.5])])
def test_target_by_hand(double, expected):
    """Target features (1, 2) * 2 = (2, 4). Target values (2, 4) @ ((1, 0), (0.5, 2)) = (4, 8): it takes action 1.
    The online head on those features says (2, 4) @ ((3, 0), (0, 1)) = (6, 4): Double takes action 0, target value 4.
    Were the online features (1, 2) * (0, 1) used, Double would take action 1."""
    params = dqn.Players(jnp.array([0.0, 1]), jnp.array([[3.0, 0], [0, 1]]))
    target = dqn.Players(jnp.array(2.0), jnp.array([[1.0, 0], [0.5, 2]]))
    next_obs, terminated = jnp.array([[1.0, 2], [1, 2]]), jnp.array([False, True])
    batch = dqn.Transition(None, None, jnp.full(2, 1.5), next_obs, terminated)
    y = dqn.bellman_target(linear_networks(), params, target, batch, 0.9, double)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def play_only(steps, env, env_params, **args):
    """The state after acting, before any update, when `steps` steps are in the replay."""
    args = dict(num_envs=2, buffer_size=2 * steps, batch_size=1, learning_starts=2 * steps) | args
    args["total_timesteps"] = args["learning_starts"] + 1000
    return jax.jit(make_train(*setup(env, env_params, **args))[0])(jnp.uint32(0))


@pytest.mark.parametrize("bootstrap", [True, False])
def test_three_kinds_of_transition(bootstrap):
    """Episodes of 3 steps, cut by time or ended by the environment: steps pay 1, 2, 3 and lead to observations 2, 3, 4.
    With Q_target(s) = s and gamma 0.5: 1 + 2 / 2 and 2 + 3 / 2 in the middle; at the end 3 + 4 / 2 through a time-out
    and 3 after a termination, or at a time-out without bootstrapping. The observation after a reset would give 3.5."""
    for limit, ends in (Limit(max_steps_in_episode=3), False), (Limit(terminate_at=3), True), (Limit(3, 3), True):
        replay = play_only(7, Counter(), limit, bootstrap_at_timeout=bootstrap).replay
        params = dqn.Players(jnp.array(1.0), jnp.array([[1.0, 0.0]]))
        y = dqn.bellman_target(linear_networks(), params, params, replay, 0.5, False)
        last = 5.0 if bootstrap and not ends else 3.0
        np.testing.assert_allclose(y, np.repeat([[2, 3.5, last, 2, 3.5, last, 2]], 2, axis=0).T)
        np.testing.assert_array_equal(replay.obs[:, 0, 0], [1, 2, 3, 1, 2, 3, 1])


def test_final_observation_is_stored_at_a_timeout():
    """CartPole cut after 5 steps, in which no pole falls: the stored next observation follows from the physics."""
    env, params = gymnax.make("CartPole-v1")
    state = play_only(11, None, params.replace(max_steps_in_episode=5))
    replay, steps = jax.tree.map(lambda x: x[:, 0], state.replay), range(11)
    for t in steps:
        before = jax.tree.map(jnp.asarray, env.reset(jax.random.key(0), params)[1]).replace(
            **dict(zip(("x", "x_dot", "theta", "theta_dot"), replay.obs[t])))
        after = env.step_env(jax.random.key(0), before, replay.action[t], params)[0]
        np.testing.assert_allclose(replay.next_obs[t], after, rtol=1e-5, atol=1e-7)
    same = [np.array_equal(replay.next_obs[t], replay.obs[t + 1]) for t in steps[:-1]]
    assert same == [True, True, True, True, False] * 2 and not replay.terminated.any() and state.episodes == 2 * 2


@pytest.mark.parametrize("script", [dqn, pqn], ids=["dqn", "pqn"])
def test_asterix_keeps_its_dynamics(script):
    """For all fillings of its eight slots and 20 keys: the same slot as by gymnax's own loop, free or not."""
    spec = importlib.util.find_spec(asterix.__name__)
    spec.loader.exec_module(own := importlib.util.module_from_spec(spec))  # in which no script has changed anything
    keys, filled = jax.random.split(jax.random.key(0), 20), jnp.array([*itertools.product((0, 1), repeat=8)])
    found, expected = (jax.jit(jax.vmap(jax.vmap(slot, (0, None)), (None, 0)))(keys, filled)
                       for slot in (script.free_slot, own.while_sample_slots))
    assert tree_equal(found, expected)
    free = found[1]  # [fillings, keys]
    assert free[0].all() and not free[255].any() and 0 < free[127].mean() < 1  # one of the eight is never tried
    script.resolve(script.Args(env="Asterix-MinAtar"))
    assert asterix.while_sample_slots is script.free_slot


# -------------------- Replay

def test_ring_buffer_wraps():
    """16 steps into 6 rows: the last six remain, the oldest next to be overwritten. Observations count from 1."""
    state = play_only(16, Counter(), Limit(), buffer_size=13)  # 13 transitions of 2 environments: 6 rows
    np.testing.assert_array_equal(state.replay.obs[:, 0, 0], [13, 14, 15, 16, 11, 12])
    np.testing.assert_array_equal(state.replay.next_obs, state.replay.obs + 1)


def test_samples_are_held_and_independent(monkeypatch):
    """No sample is drawn before it is stored, the newest is drawn at times, and the players draw different ones."""
    samples = []

    def update(objective, networks, optimizers, params, opt_state, batch, target):
        jax.debug.callback(lambda obs: samples.append(np.array(obs)), batch.obs, ordered=True)
        return params, opt_state

    monkeypatch.setattr(dqn, "scorer_update", update)
    init, block, *_, timesteps, _ = make_train(*setup(
        Counter(), Limit(), scorer=True, num_envs=2, learning_starts=6, buffer_size=30, batch_size=16,
        total_timesteps=60, target_update_interval=54))
    state, block = jax.jit(init)(jnp.uint32(0)), jax.jit(block)
    for index in range(len(timesteps)):
        state, _ = block(state, index)
    jax.effects_barrier()
    samples = np.array(samples)[..., 0]  # [updates, players, batch]
    newest = 3 + np.arange(len(samples))  # 3 steps are stored before the first update; the fourth is made beside it
    assert len(samples) == 27 and samples.shape[1:] == (2, 16)
    assert np.all(samples >= np.maximum(1, newest - 14)[:, None, None]) and np.all(samples <= newest[:, None, None])
    assert np.any((samples == newest[:, None, None])[:12])  # also before the ring is full, from when all is held
    assert np.any(samples[-1] == newest[-1] - 14)
    assert not any(np.array_equal(follower, leader) for follower, leader in samples)
    assert len(np.unique(samples, axis=0)) == 27


def test_diagnostics_are_of_held_transitions(monkeypatch):
    """3 steps before learning and 8 beside it are in a ring of 30; Counter's observations count from 1."""
    seen, own = [], dqn.bellman_error

    def watch(phi, theta, networks, batch, target):
        jax.debug.callback(lambda obs: seen.append(np.array(obs)), batch.obs)
        return own(phi, theta, networks, batch, target)

    run = setup(Counter(), Limit(), scorer=True, diagnostics=True, num_envs=2, learning_starts=6, buffer_size=60,
                total_timesteps=60, target_update_interval=16)
    init, block, measure, *_ = make_train(*run)
    state, _ = jax.jit(block)(jax.jit(init)(jnp.uint32(0)), 0)
    monkeypatch.setattr(dqn, "bellman_error", watch)
    state = jax.jit(measure)(state, 0)
    jax.effects_barrier()
    assert seen and all(obs.shape == (2048, 1) and set(obs.ravel()) == {*range(1, 12)} for obs in seen)
    assert np.isfinite(state.curves["bellman_error_mean"][0])


def test_a_step_learns_and_acts_with_the_same_parameters(monkeypatch):
    """In blocks of one update: the targets are of the batch drawn before, the online and the target parameters; the
    actions stored are the greedy ones of the parameters before the update."""
    seen, own = [], dqn.bellman_target

    def watch(networks, params, target, batch, **options):
        jax.debug.callback(lambda *values: seen.append(values), params, target, batch)
        return own(networks, params, target, batch, **options)

    monkeypatch.setattr(dqn, "bellman_target", watch)
    args, env, env_params = setup(scorer=True, double=True, tau=0.5, target_update_interval=4, learning_rate=1.0,
                                  follower_learning_rate=(1.0,), epsilon_start=0.0, epsilon_end=0.0)
    networks = dqn.Players(dqn.Perception(args), dqn.Control(args, 2))
    init, block, *_, timesteps, _ = make_train(args, env, env_params)
    state, block, changed = jax.jit(init)(jnp.uint32(0)), jax.jit(block), 0
    for index, timestep in enumerate(timesteps):
        before = state
        state, _ = block(state, index)
        jax.effects_barrier()
        assert tree_equal(seen[-1], (before.params, before.target, before.batch))
        old, new = (dqn.q_values(networks, *params, before.obs).argmax(axis=-1)
                    for params in (before.params, state.params))
        stored = (timestep // args.num_envs - 1) % len(state.replay.action)
        np.testing.assert_array_equal(state.replay.action[stored], old)
        changed += not np.array_equal(old, new)
    assert len(timesteps) == 36 and changed > 2 and not tree_equal(state.params, state.target)


@pytest.mark.parametrize("name, features, gib", [("Breakout", 400, 2.5), ("Seaquest", 1000, 6.0)])
def test_replay_memory(name, features, gib):
    """The replay of 30 seeds, binary observations as bool: 30 x 1e5 x (2 x features + 9) bytes."""
    init = make_train(*dqn.resolve(dqn.Args(env=f"{name}-MinAtar", scorer=True)))[0]
    replay = jax.eval_shape(jax.vmap(init), jax.ShapeDtypeStruct((30,), jnp.uint32)).replay
    assert replay.obs.dtype == replay.next_obs.dtype == bool
    assert replay.obs.shape == (30, 781, 128, features)  # 1e5 // 128 rows
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(replay))
    assert 30 * 781 * 128 * 2 * features < size < gib * 2**30


# -------------------- Schedules

@pytest.mark.parametrize("power", [1.0, 1.5])
def test_learning_rates_end_at_zero(power, monkeypatch, optimized):
    """Adam under a constant gradient moves by its rate: rate (1 - k / N)^power at update k, and exactly 0 after N."""
    run = trace(monkeypatch, scorer=True, leader_decay_power=power, learning_rate=0.1, follower_learning_rate=0.5)
    for optimizer, rate, exponent in zip(run.optimizers, (0.5, 0.1), (1.0, power)):
        def step(opt_state, _):
            change, opt_state = optimizer.update(jnp.ones(1), opt_state)
            return opt_state, change[0]
        moved = -jax.lax.scan(step, optimizer.init(jnp.zeros(1)), None, run.num_updates + 3)[1]
        k = np.arange(run.num_updates)
        np.testing.assert_allclose(moved[: run.num_updates], rate * (1 - k / run.num_updates) ** exponent, rtol=1e-3)
        assert moved[run.num_updates - 1] > 0 and not moved[run.num_updates :].any()
    assert run.num_updates == 40  # (160 - 16) / 4 = 36, rounded up to whole blocks of 10


@pytest.mark.parametrize("options, kinds", [
    (dict(target_update_interval=1, total_timesteps=40), {True}),  # less than a step: after every update
    (dict(target_update_interval=12, scorer=True, total_timesteps=52), {True}),  # a block is one period of 3 updates
    (dict(target_update_interval=24, total_timesteps=36, tau=0.25), {False, True}),  # 6, of 5 updates asked for
    (dict(target_update_interval=4000, scorer=True, total_timesteps=8016), {False, True}),  # 1,000: several blocks
    (dict(target_update_interval=10**12, total_timesteps=36), {False}),  # never
])
def test_target_networks_change_on_schedule(options, kinds):
    """Bit for bit the old ones until the period is over, then the online ones (or tau of the way to them)."""
    args, *env = setup(learning_rate=0.01, **options)
    init, block, *_, timesteps, _ = make_train(args, *env)
    state, block = jax.jit(init)(jnp.uint32(0)), jax.jit(block)
    assert tree_equal(state.target, state.params)
    period, found = max(1, options["target_update_interval"] // 4), set()
    for index, updates in enumerate((timesteps - args.learning_starts) // args.num_envs):
        before = state
        state, _ = block(state, index)
        found.add(bool(updates % period == 0))
        assert not tree_equal(state.params, before.params)
        if updates % period:
            assert tree_equal(state.target, before.target)
        elif args.tau == 1:
            assert tree_equal(state.target, state.params)
        else:
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), state.target, jax.tree.map(
                lambda new, old: 0.25 * new + 0.75 * old, state.params, before.target))
    assert found == kinds


def test_epsilon_at_its_steps():
    """Of 1,000 environments with 10 actions, 0.9 epsilon leave the greedy action: epsilon falls from 0.8 to 0 over
    20 steps, of which the 10 before learning are a part."""
    args = dict(num_envs=1000, learning_starts=10_000, total_timesteps=30_000, buffer_size=30_000, epsilon_start=0.8,
                epsilon_end=0.0, epsilon_steps=20_000, learning_rate=1e-30, target_update_interval=20_000)
    init, block, *_, timesteps, _ = make_train(*setup(Counter(10), Limit(1), **args))  # observes 1, always
    state, block = jax.jit(init)(jnp.uint32(0)), jax.jit(block)
    for index in range(len(timesteps)):
        state, _ = block(state, index)
    action = np.asarray(state.replay.action)  # [step, environments]
    greedy = action[-1, 0]
    others = (action != greedy).mean(axis=1)
    expected = 0.9 * 0.8 * np.maximum(0, 1 - np.arange(30) / 20)
    np.testing.assert_allclose(others, expected, atol=4 * np.sqrt(0.25 / 1000))
    assert np.all(action[20:] == greedy) and others[19] > 0
    assert np.all(np.bincount(action[:5].ravel(), minlength=10) > 5000 * 0.05)  # all actions are explored


def test_points_of_the_curves():
    """2,100 updates in blocks of one make 1,050 points of two blocks each; a point holds what its last block found."""
    run = setup(target_update_interval=4, total_timesteps=8416)
    init, block, *_, timesteps, blocks_per_point = make_train(*run)
    assert (len(timesteps), blocks_per_point, timesteps[0], timesteps[-1]) == (2100, 2, 20, 8416)
    state, block, found = jax.jit(init)(jnp.uint32(0)), jax.jit(block), []
    assert state.curves["returns"].shape == (1050,) and np.isnan(state.curves["episodes"]).all()
    for index in range(60):
        state, mean = block(state, index)
        found.append((mean, state.episodes))
    returns, episodes = np.array(found, np.float32)[1::2].T
    np.testing.assert_array_equal(state.curves["returns"][:30], returns)
    np.testing.assert_array_equal(state.curves["episodes"][:30], episodes)
    assert np.isnan(state.curves["episodes"][30:]).all() and np.isfinite(returns[-1]) and episodes[-1] > episodes[0]


# -------------------- Seeds

def test_two_seeds_differ():
    """In initial weights, in exploration and in the environment; one seed twice does not."""
    state = jax.jit(jax.vmap(make_train(*setup())[0]))(jnp.array([0, 1, 0], jnp.uint32))
    phi, theta = state.params
    parts = dict(perception=phi["Dense_0"]["kernel"], control=theta["Dense_0"]["kernel"],
                 action=state.replay.action, environment=state.replay.obs[:, 0])
    for values in parts.values():
        assert not np.array_equal(values[0], values[1]) and np.array_equal(values[0], values[2])
    first = np.asarray(state.replay.obs[0, 0])  # environments of one seed differ as well
    assert len(np.unique(first, axis=0)) == len(first)


# -------------------- Environments whose Q-values are known

# The inverted roles are left out: where all targets are alike, the variance gives control no gradient, and through its
# small initial weights perception gets next to none.
VARIANTS = dict(baseline={}, double=dict(double=True), dueling=dict(dueling=True), scorer=dict(scorer=True),
                msbe=dict(scorer=True, follower_loss="msbe"),
                synchronous=dict(scorer=True, ablation="synchronous"),
                per_layer=dict(ablation="per-layer-lr", follower_learning_rate=0.01),
                everything=dict(scorer=True, double=True, dueling=True, leader_decay_power=1.5))


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes(variant):
    """Every variant finds the Q-values of all probes within 0.05, one seed each, trained side by side."""
    game = VARIANTS[variant].get("scorer") and variant != "synchronous"
    options = VARIANTS[variant] | (dict(follower_learning_rate=0.01) if game else {})
    options |= dict(num_envs=4, buffer_size=2000, batch_size=32, learning_starts=100, total_timesteps=8000,
                    hidden_dim=16, target_update_interval=80, learning_rate=0.005, gamma=0.5, epsilon_end=1.0,
                    max_grad_norm=10.0)
    args, env, _ = setup(Probe(), **options)
    networks = dqn.Players(dqn.Perception(args), dqn.Control(args, 2))
    timesteps = make_train(args, env, ProbeParams())[-2]

    @jax.jit
    @jax.vmap
    def train(kind):
        init, block, *_ = make_train(args, env, ProbeParams(kind, jnp.where(kind == 4, 3, 1_000_000)))
        return jax.lax.fori_loop(0, len(timesteps), lambda index, state: block(state, index)[0], init(jnp.uint32(7)))

    params = train(jnp.arange(5)).params
    for kind, place, expected in KNOWN:
        q = dqn.q_values(networks, *jax.tree.map(lambda x: x[kind], params), jnp.array([place]))
        np.testing.assert_allclose(q, expected, atol=0.05, err_msg=f"probe {kind} at {place}")

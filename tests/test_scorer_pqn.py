"""scorer_pqn.py: lambda-returns, rollouts, minibatches, rates, known Q, and the script from outside."""

import json
import signal
import sys
from pathlib import Path

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
from helpers import finish
from helpers import make_start
from helpers import refusal
from helpers import results
from helpers import tree_equal

import scorer_pqn as pqn

ROOT = Path(__file__).parents[1]
SMALL = dict(
    env="CartPole-v1",
    num_envs=4,
    num_steps=8,
    num_minibatches=4,
    num_epochs=2,
    total_timesteps=320,
    latent_dim=8,
    hidden_dim=8,
)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def setup(env=None, env_params=None, **options):
    """Returns arguments and an environment for make_train: this gymnax environment, or CartPole."""
    args = pqn.complete(pqn.Args(**SMALL | options))
    if env is None and env_params is None:
        return args, pqn.make_env(args)
    env = env or gymnax.make("CartPole-v1")[0]
    return args, pqn.vectorize(env, env_params or env.default_params, jnp.float32)


def first_state(training, args, seed=0):
    """Returns a seed's first state, at the follower's rate that args have."""
    rate = args.follower_learning_rate or 0.0
    return jax.jit(training.init)(jnp.uint32(seed), jnp.float32(rate))


def take(tree, index):
    """Returns a tree's arrays at this index of their first axis."""
    return jax.tree.map(lambda x: x[index], tree)


# -------------------------------------- Lambda-returns --------------------------------------------


def plain_returns(reward, terminated, done, value, gamma, td_lambda):
    """Returns the specified recursion as a double loop over environments and steps, backwards."""
    returns = np.zeros_like(reward)
    for env in range(reward.shape[1]):
        for t in reversed(range(len(reward))):
            bootstrap = gamma * (1 - terminated[t, env]) * value[t, env]
            if done[t, env] or t == len(reward) - 1:
                returns[t, env] = reward[t, env] + bootstrap
            else:
                mixed = (1 - td_lambda) * value[t, env] + td_lambda * returns[t + 1, env]
                returns[t, env] = reward[t, env] + gamma * mixed
    return returns


def script_returns(reward, terminated, done, value, gamma, td_lambda):
    """Returns what the script makes of the same arrays."""
    rollout = pqn.Transition(
        obs=None,
        action=None,
        reward=jnp.array(reward),
        next_obs=None,
        terminated=jnp.array(terminated),
        done=jnp.array(done),
    )
    return pqn.compute_lambda_returns(rollout, jnp.array(value), gamma, td_lambda)


@pytest.mark.parametrize("td_lambda", [0.0, 0.65, 1.0])
def test_returns_against_a_double_loop(td_lambda):
    """Random rewards, values and ends, some of them at the last and the second-to-last step."""
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(2, 32, 50)).astype(np.float32)
    terminated = rng.random((32, 50)) < 0.1
    done = terminated | (rng.random((32, 50)) < 0.1)
    assert (done & ~terminated)[-2:].any() and terminated[-2:].any() and not done[-2:].all()
    given = reward, terminated, done, value, 0.9, td_lambda
    np.testing.assert_allclose(script_returns(*given), plain_returns(*given), rtol=1e-5, atol=1e-5)


def test_second_to_last_step():
    """By hand, gamma 0.5, lambda 0.5: G_1 = 2 + 0.5 x 10 = 7, G_0 = 1 + 0.5 (0.5 x 6 + 0.5 x 7).

    That is 4.25. Were G_0 bootstrapped from the last state in place of its own next one, it would be
    1 + 0.5 (0.5 x 10 + 0.5 x 7) = 5.25.
    """
    no = np.zeros((2, 1), bool)
    returns = script_returns(np.array([[1.0], [2]]), no, no, np.array([[6.0], [10]]), 0.5, 0.5)
    np.testing.assert_allclose(returns[:, 0], [4.25, 7])


def test_returns_are_cut_at_an_episode_end():
    """What follows an end changes nothing before it.

    A termination has no value, a time-out that of its own last observation: 1 + 0.5 x 6 = 4.
    """
    value = np.array([[6.0, 6], [10, 10]])
    terminated = np.array([[True, False], [False, False]])
    done = np.array([[True, True], [False, False]])
    for later_reward in 2.0, 200.0:
        reward = np.array([[1.0, 1], [later_reward, later_reward]])
        returns = script_returns(reward, terminated, done, value, 0.5, 0.5)
        np.testing.assert_allclose(returns[0], [1, 4])


def test_values_of_another_shape_are_refused():
    """Values [steps] would broadcast over the environments."""
    no = np.zeros((2, 2), bool)
    with pytest.raises(AssertionError):
        script_returns(np.zeros((2, 2)), no, no, np.zeros(2), 0.5, 0.5)


# ---------------------------------------- Rollouts ------------------------------------------------


def watch_rollouts(monkeypatch) -> list:
    """Returns a list that gets each rollout and its targets, [steps, num_envs, ...]."""
    seen = []
    own_compute_lambda_returns = pqn.compute_lambda_returns

    def watch(rollout, next_value, gamma, td_lambda):
        td_target = own_compute_lambda_returns(rollout, next_value, gamma, td_lambda)

        def keep(rollout, td_target):
            seen.append(jax.tree.map(np.array, (rollout, td_target)))

        jax.debug.callback(keep, rollout, td_target)
        return td_target

    monkeypatch.setattr(pqn, "compute_lambda_returns", watch)
    return seen


@pytest.mark.parametrize("bootstrap", [True, False])
def test_targets_of_a_rollout(bootstrap, monkeypatch):
    """A chunk's targets, recomputed from its transitions and the parameters that acted.

    CartPole's episodes end by falling and, cut after 6 steps, by time.
    """
    env, params = gymnax.make("CartPole-v1")
    args, limited = setup(
        None,
        params.replace(max_steps_in_episode=6),
        num_envs=8,
        num_steps=16,
        learning_rate=1e-3,
        bootstrap_at_timeout=bootstrap,
        total_timesteps=640,
    )
    seen = watch_rollouts(monkeypatch)
    training = pqn.make_train(args, limited)
    before = first_state(training, args, seed=1)
    state, _ = jax.jit(training.train_chunk)(before, 0)
    jax.effects_barrier()
    ((rollout, td_target),) = seen
    assert not tree_equal(state.params, before.params)

    networks = pqn.make_networks(args, 2)
    value = np.asarray(pqn.q_values(networks, before.params, rollout.next_obs).max(axis=-1))
    steps = rollout.reward, rollout.terminated, rollout.done, value
    expected = plain_returns(*steps, args.gamma, args.td_lambda)
    np.testing.assert_allclose(td_target, expected, rtol=1e-5, atol=1e-5)
    flat = pqn.Batch(rollout.obs, rollout.action, td_target)
    flat = jax.tree.map(lambda x: x.reshape(16 * 8, *x.shape[2:]), flat)
    assert tree_equal(state.rollout, flat)  # what is learned from

    assert rollout.done.sum() == state.episodes > 8
    assert np.array_equal(rollout.terminated, rollout.done) != bootstrap
    follows = np.all(rollout.next_obs[:-1] == rollout.obs[1:], axis=-1)
    np.testing.assert_array_equal(follows, ~rollout.done[:-1])  # at an end not the reset's
    start = jax.tree.map(jnp.asarray, env.reset(jax.random.key(0), params)[1])
    for t, number in np.argwhere(rollout.done)[:5]:  # by the physics
        x, x_dot, theta, theta_dot = rollout.obs[t, number]
        now = start.replace(x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot)
        after = env.step_env(jax.random.key(0), now, rollout.action[t, number], params)[0]
        np.testing.assert_allclose(rollout.next_obs[t, number], after, rtol=1e-5, atol=1e-6)


def watch_minibatches(monkeypatch, **options):
    """Returns what a chunk's updates are given, and the rollout that it comes from.

    Observations and targets are [updates, batches, ..., minibatch].
    """
    seen = []

    def update(networks, optimizers, params, opt_state, *batches, objective=None):
        def keep(*batches):
            obs = np.array([batch.obs[..., 0] for batch in batches])
            seen.append((obs, np.array([batch.td_target for batch in batches])))

        jax.debug.callback(keep, *batches, ordered=True)
        return params, opt_state

    monkeypatch.setattr(pqn, "scorer_update", update)
    monkeypatch.setattr(pqn, "baseline_update", update)
    args, env = setup(Counter(), Limit(), **options)
    training = pqn.make_train(args, env)
    state, _ = jax.jit(training.train_chunk)(first_state(training, args), 0)
    jax.effects_barrier()
    obs, td_target = (np.array(x) for x in zip(*seen))
    return obs, td_target, state.rollout


def test_minibatches(monkeypatch):
    """Each epoch goes once through the rollout, in another order; both players get the same."""
    obs, td_target, rollout = watch_minibatches(monkeypatch, scorer=True)
    # 2 epochs x 4 minibatches, players, 32 / 4 transitions
    assert obs.shape == td_target.shape == (8, 2, 8)
    np.testing.assert_array_equal(obs[:, 0], obs[:, 1])
    np.testing.assert_array_equal(td_target[:, 0], td_target[:, 1])
    target_of = dict(zip(np.asarray(rollout.obs)[:, 0], np.asarray(rollout.td_target)))
    for epoch in obs[:4, 0], obs[4:, 0]:
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.sort(rollout.obs[:, 0]))
    assert not np.array_equal(obs[:4], obs[4:])
    np.testing.assert_allclose(td_target[:, 0], np.vectorize(target_of.get)(obs[:, 0]))


def test_minibatches_of_the_baseline(monkeypatch):
    """One batch [1, minibatch] for each update."""
    obs, td_target, _ = watch_minibatches(monkeypatch)
    assert obs.shape == td_target.shape == (8, 1, 1, 8)


def test_no_key_is_used_twice(monkeypatch):
    """Every key that init and two chunks draw from or split is another one."""
    used = []

    def watch(name):
        own = getattr(jax.random, name)

        def watched(key, *rest, **options):
            data = key if jnp.issubdtype(key.dtype, jnp.uint32) else jax.random.key_data(key)
            jax.debug.callback(lambda data: used.append(bytes(np.asarray(data))), data)
            return own(key, *rest, **options)

        return watched

    for name in ("split", "uniform", "randint", "permutation"):
        monkeypatch.setattr(jax.random, name, watch(name))
    args, env = setup(Counter(), Limit())  # an environment that draws nothing itself
    training = pqn.make_train(args, env)
    state = first_state(training, args)
    train_chunk = jax.jit(training.train_chunk)
    for chunk in range(2):
        state, _ = train_chunk(state, chunk)
    jax.effects_barrier()
    assert len(used) > 10
    assert len(set(used)) == len(used)


def test_chunks_and_seeds_differ():
    """Exploration, environments and parameters differ; the same seed and chunk repeat."""
    training = pqn.make_train(*setup(num_steps=32))
    seeds = jnp.array([0, 1, 0], jnp.uint32)
    state = jax.jit(jax.vmap(training.init))(seeds, jnp.zeros(3))
    train_chunk = jax.jit(jax.vmap(training.train_chunk, in_axes=(0, None)))
    first, _ = train_chunk(state, 0)
    second, _ = train_chunk(first, 1)
    for after in first, second:
        assert not np.array_equal(after.rollout.obs[0], after.rollout.obs[1])
        assert tree_equal(take(after.rollout, 0), take(after.rollout, 2))
    assert not np.array_equal(first.rollout.action[0], second.rollout.action[0])
    assert not tree_equal(take(first.params, 0), take(first.params, 1))


# ------------------------------------- Networks and rates -----------------------------------------


def layer_norm(x, scale, bias):
    """Returns x [..., features], centred and divided by its deviation, in NumPy."""
    x = np.asarray(x)
    deviation = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return (x - x.mean(axis=-1, keepdims=True)) / deviation * scale + bias


def test_networks_by_hand():
    """Dense, LayerNorm, relu, LayerNorm is z; Dense, LayerNorm, relu, Dense the values.

    Observations stay 0 and 1. The norms are told apart by name.
    """
    args, _ = setup()
    networks = pqn.make_networks(args, 2)
    obs = np.random.default_rng(0).random((5, 4)) < 0.5
    phi = networks.perception.init(jax.random.key(0), obs)["params"]
    rng = np.random.default_rng(1)
    phi = {
        layer: {name: values + rng.normal(size=values.shape) for name, values in of_layer.items()}
        for layer, of_layer in phi.items()
    }
    z = networks.perception.apply({"params": phi}, obs)
    theta = networks.control.init(jax.random.key(1), z)["params"]

    expected = obs.astype(np.float32) @ phi["Dense_0"]["kernel"] + phi["Dense_0"]["bias"]
    expected = np.maximum(layer_norm(expected, **phi["norm_hidden"]), 0)
    expected = layer_norm(expected, **phi["norm_features"])
    np.testing.assert_allclose(z, expected, rtol=1e-3, atol=1e-4)
    hidden = np.maximum(layer_norm(z @ theta["Dense_0"]["kernel"], 1, 0), 0)
    q = pqn.q_values(networks, pqn.Players(phi, theta), obs)
    np.testing.assert_allclose(q, hidden @ theta["Dense_1"]["kernel"], atol=1e-3)
    sizes = [sum(x.size for x in jax.tree.leaves(params)) for params in (phi, theta)]
    assert sizes == [4 * 8 + 8 + 2 * 8 + 2 * 8, 8 * 8 + 8 + 2 * 8 + 8 * 2 + 2]


def test_parity_of_baseline_and_scorer():
    """The same seed gives both the same parameters and environments before learning."""
    states = []
    for scorer in False, True:
        args, env = setup(scorer=scorer)
        states.append(first_state(pqn.make_train(args, env), args, seed=3))
    assert tree_equal(states[0].params, states[1].params)
    assert tree_equal(states[0].obs, states[1].obs)


def trace_update(monkeypatch, **options) -> dict:
    """Returns what the program that these flags ask for hands to its update."""
    args, env = setup(**options)
    seen = {}

    def watch(name):
        def update(networks, optimizers, params, opt_state, *batches, objective=None):
            rate = jnp.float32(args.follower_learning_rate or 0.0)  # of which state has a tracer
            own = pqn.make_optimizers(args, pqn.count_steps(args).decay_updates, rate)
            seen.update(name=name, optimizers=own, objective=objective)
            return params, opt_state

        return update

    for name in "scorer_update", "baseline_update":
        monkeypatch.setattr(pqn, name, watch(name))
    training = pqn.make_train(args, env)
    seed, rate = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(training.init, seed, rate)
    jax.eval_shape(training.train_chunk, state, 0)
    return seen


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rates(share, monkeypatch):
    """RAdam behind a clip of its own for each player, at its rate: 0 from `share` of training on."""
    seen = trace_update(
        monkeypatch,
        scorer=True,
        learning_rate=0.1,
        follower_learning_rate=0.5,
        leader_decay_power=1.5,
        max_grad_norm=1.0,
        decay_share=share,
    )
    assert (seen["name"], seen["objective"]) == ("scorer_update", pqn.follower_loss)
    total = round(share * 10 * 2 * 4)  # 10 rollouts of 2 epochs of 4 minibatches
    for optimizer, rate, power in zip(seen["optimizers"], (0.5, 0.1), (1.0, 1.5)):

        def schedule(count, rate=rate, power=power):
            return rate * (1 - jnp.minimum(count, total) / total) ** power

        reference = optax.radam(schedule)
        params = jnp.zeros(2)
        state, expected_state = optimizer.init(params), reference.init(params)
        for count in range(total + 3):
            gradient = jnp.array([3.0, 4.0]) * (1 + count % 3)  # norm 5 and more
            clipped = jnp.array([0.6, 0.8])
            change, state = optimizer.update(gradient, state, params)
            expected, expected_state = reference.update(clipped, expected_state, params)
            np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-7)
            assert bool(np.any(change)) == (count < total)


def test_rates_per_layer(monkeypatch):
    """The baseline with the follower's rate for perception, the leader's for control, one clip."""
    rates = dict(follower_learning_rate=0.5, learning_rate=0.1, leader_decay_power=1.5)
    seen = trace_update(monkeypatch, ablation="per-layer-lr", max_grad_norm=1.0, **rates)
    assert seen["name"] == "baseline_update"
    total = 10 * 2 * 4
    fast = optax.radam(lambda count: 0.5 * (1 - count / total))
    slow = optax.radam(lambda count: 0.1 * (1 - count / total) ** 1.5)
    params = pqn.Players(jnp.zeros(1), jnp.zeros(1))
    optimizer = seen["optimizers"]
    state = pqn.init_optimizers(optimizer, params)
    fast_state, slow_state = fast.init(params.perception), slow.init(params.control)
    for count in range(20):
        gradient = pqn.Players(jnp.array([3.0]), jnp.array([4.0 * (1 + count % 3)]))
        norm = np.hypot(3.0, 4.0 * (1 + count % 3))  # of both together, which the clip cuts to 1
        change, state = optimizer.update(gradient, state, params)
        expected, fast_state = fast.update(gradient.perception / norm, fast_state)
        np.testing.assert_allclose(change.perception, expected, rtol=1e-4)
        expected, slow_state = slow.update(gradient.control / norm, slow_state)
        np.testing.assert_allclose(change.control, expected, rtol=1e-4)
    assert (change.perception / change.control) > 0


def test_msbe_follower(monkeypatch):
    """--follower-loss msbe hands the leader's loss to the follower."""
    seen = trace_update(monkeypatch, scorer=True, follower_loss="msbe")
    assert (seen["name"], seen["objective"]) == ("scorer_update", pqn.leader_loss)


def test_the_follower_moves_at_its_lanes_rate():
    """The rate that init was given counts, not the one in args: at 0 perception stands still."""
    args, env = setup(scorer=True, follower_learning_rate=0.5)
    training = pqn.make_train(args, env)
    train_chunk = jax.jit(training.train_chunk)
    for rate in 0.0, 0.01:
        before = jax.jit(training.init)(jnp.uint32(0), jnp.float32(rate))
        after, _ = train_chunk(before, 0)
        assert tree_equal(after.params.perception, before.params.perception) == (rate == 0)
        assert not tree_equal(after.params.control, before.params.control)


def test_epsilon_at_its_steps(monkeypatch):
    """Of 1,000 environments with 10 actions, 0.9 epsilon leave the greedy action.

    Epsilon falls from 0.8 to 0 over half of 20 steps.
    """
    args, env = setup(
        Counter(10),
        Limit(1),  # observes 1, always
        num_envs=1000,
        num_steps=4,
        num_minibatches=1,
        total_timesteps=20_000,
        epsilon_start=0.8,
        epsilon_end=0.0,
        epsilon_share=0.5,
        learning_rate=1e-30,
    )
    training = pqn.make_train(args, env)
    state = first_state(training, args)
    train_chunk = jax.jit(training.train_chunk)
    actions = []
    for chunk in range(5):
        state, _ = train_chunk(state, chunk)
        actions += list(np.asarray(state.rollout.action).reshape(4, 1000))
    others = (np.array(actions) != actions[-1][0]).mean(axis=1)
    expected = 0.9 * 0.8 * np.maximum(0, 1 - np.arange(20) / 10)
    np.testing.assert_allclose(others, expected, atol=0.065)
    assert not others[10:].any() and others[9] > 0


# -------------------------- Environments whose Q-values are known ---------------------------------

VARIANTS = dict(
    baseline=dict(),
    scorer=dict(scorer=True, follower_learning_rate=0.02),
    msbe=dict(scorer=True, follower_learning_rate=0.02, follower_loss="msbe"),
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes(variant):
    """Every variant finds the Q-values of all probes within 0.1, trained side by side."""
    usual = dict(
        num_envs=4,
        num_steps=16,
        num_minibatches=2,
        latent_dim=16,
        hidden_dim=16,
        learning_rate=0.01,
        gamma=0.5,
        epsilon_end=1.0,
        total_timesteps=38_400,
        max_grad_norm=10.0,
        td_lambda=0.5,
    )
    args, _ = setup(Probe(), **usual | VARIANTS[variant])
    networks = pqn.make_networks(args, 2)
    rate = jnp.float32(args.follower_learning_rate or 0.0)

    def train_probe(kind):
        limit = jnp.where(kind == 4, 3, 1_000_000)
        env = pqn.vectorize(Probe(), ProbeParams(kind, limit), jnp.float32)
        training = pqn.make_train(args, env)
        return jax.lax.fori_loop(
            0,
            len(training.timesteps),
            lambda chunk, state: training.train_chunk(state, chunk)[0],
            training.init(jnp.uint32(7), rate),
        )

    params = jax.jit(jax.vmap(train_probe))(jnp.arange(5)).params
    for kind, place, expected in KNOWN:
        q = pqn.q_values(networks, take(params, kind), jnp.array([place]))
        np.testing.assert_allclose(q, expected, atol=0.1, err_msg=f"probe {kind} at {place}")


# -------------------------------------- From the outside ------------------------------------------

TINY = (
    "--env CartPole-v1 --num-envs 4 --num-steps 16 --num-minibatches 4 --total-timesteps 2e4 "
    "--diagnostics --num-seeds 2 --scorer"
).split()
DIAGNOSTICS = {
    "follower_loss",
    "leader_loss",
    "bellman_error_mean",
    "bellman_error_variance",
    "srank",
    "perception_norm",
    "control_norm",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the script with these flags; a second start finds its programs compiled."""
    return make_start(ROOT / "scorer_pqn.py", tmp_path_factory.mktemp("pqn"))


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Returns what a run that nobody disturbed printed, and its folder."""
    return finish(start(*TINY, "--save-model", "--runs-dir", tmp_path_factory.mktemp("whole")))


def test_record(whole):
    """The record is scorer_dqn.py's, with this script's arguments."""
    out, run = whole
    record = results(run)
    meta = json.loads(str(record["meta"]))
    assert meta["script"] == "scorer_pqn" and meta["complete"]
    assert meta["args"]["td_lambda"] == 0.95
    assert record["timesteps"].tolist() == [64 * k for k in range(1, 314)]
    assert record["seeds"].tolist() == [0, 1]
    usual = {"timesteps", "seeds", "meta", "returns", "episodes"}
    assert record.keys() == usual | DIAGNOSTICS
    known = ~np.isnan(record["srank"])
    assert 40 <= known[0].sum() <= 60
    assert np.nanmin(record["srank"]) >= 1 and np.nanmax(record["srank"]) <= 32
    mean_square = record["bellman_error_mean"] ** 2 + record["bellman_error_variance"]
    np.testing.assert_allclose(record["leader_loss"][known], mean_square[known], rtol=1e-3)
    assert "num steps 16, num minibatches 4" in out and "2 seeds on 2 x cpu" in out
    sys.path.insert(0, str(ROOT / "plots"))
    import records

    assert run.name.startswith("scorer_pqn__") and str(run) == out.split("saved in ")[1].strip()
    assert records.load([run])[0].algorithm == "PQN"


def test_resume(whole, start, tmp_path):
    """Stopped by Ctrl-C and continued, it gives bit for bit the curves of the undisturbed run."""
    flags = ["--checkpoint-every-minutes", 60, "--runs-dir", tmp_path / "stopped"]
    process = start(*TINY, *flags)
    run, _, _, bar = [process.stdout.readline().strip() for _ in range(4)]
    assert "10%" in bar
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    _, resumed = finish(start("--resume", run, "--runs-dir", tmp_path / "resumed"))
    resumed = results(resumed)
    for name, curve in results(whole[1]).items():
        if name != "meta":
            np.testing.assert_array_equal(resumed[name], curve, err_msg=name)


@pytest.mark.parametrize("variable", ["JAX_ENABLE_X64", "JAX_DEBUG_NANS"])
def test_settings_for_looking_for_faults(variable, start, tmp_path):
    """A run with double precision allowed, or which stops at a NaN, ends as any other."""
    flags = [*TINY, "--total-timesteps", 256, "--runs-dir", tmp_path]
    _, run = finish(start(*flags, **{variable: "1"}))
    assert results(run)["returns"].dtype == np.float32


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-minibatches 3", ["--num-minibatches", "divide"]),
        ("--td-lambda 1.5", ["--td-lambda"]),
        ("--epsilon-share 0", ["--epsilon-share"]),
        ("--decay-share 2", ["--decay-share"]),
        ("--num-steps 0", ["--num-steps"]),
        ("--num-envs 0", ["--num-envs"]),
        ("--num-epochs -1", ["--num-epochs"]),
        ("--follower-loss msbe", ["--scorer"]),
        ("--scorer --ablation per-layer-lr", ["--ablation per-layer-lr", "--scorer"]),
        ("--ablation per-layer-lr --follower-loss msbe", ["--follower-loss", "no meaning"]),
        ("--env Brekout-MinAtar", ["Breakout-MinAtar"]),
        ("--num-seeds 0", ["--num-seeds"]),
    ],
)
def test_bad_input(flags, words, tmp_path, monkeypatch, capsys):
    """One sentence on standard error that names the flag, exit code 2, and nothing written."""
    env = [] if "--env" in flags else ["--env", "CartPole-v1"]
    flags = [*env, *flags.split(), "--runs-dir", tmp_path / "new"]
    err = refusal(pqn.main, flags, monkeypatch, capsys)
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", [[], ["--scorer"]], ids=["baseline", "scorer"])
def test_learns_cartpole(variant, start, tmp_path):
    """Two seeds, three fifths of the preset's steps: mean return above 300 at the end (random: 22).

    With fewer steps, seeds differ too much to tell.
    """
    flags = "--env CartPole-v1 --num-seeds 2 --total-timesteps 3e5".split()
    _, run = finish(start(*flags, *variant, "--runs-dir", tmp_path), timeout=600)
    returns = results(run)["returns"]
    assert returns[:, -returns.shape[1] // 10 :].mean() > 300

"""scorer_pqn.py: lambda-returns, rollouts, minibatches, schedules, known Q-values, and the script from the outside."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper

import scorer_pqn as pqn
from environments import KNOWN, Counter, Limit, Probe, ProbeParams
from helpers import finish, refusal, results, tree_equal

ROOT = Path(__file__).parents[1]
SMALL = dict(env="CartPole-v1", num_envs=4, num_steps=8, num_minibatches=4, num_epochs=2, total_timesteps=320,
             latent_dim=8, hidden_dim=8)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def setup(env=None, env_params=None, **args):
    """Arguments, environment and its parameters for make_train, the environment wrapped as the script does it."""
    args, usual, usual_params = pqn.resolve(pqn.Args(**SMALL | args))
    wrapped = LogWrapper(FlattenObservationWrapper(env)) if env else usual
    return args, wrapped, env_params or (env.default_params if env else usual_params)


def make_train(args, env, env_params):
    """The script's make_train, with the follower's rate that args has in init."""
    init, *others = pqn.make_train(args, env, env_params)
    return lambda seed: init(seed, jnp.float32(args.follower_learning_rate or 0.0)), *others


# -------------------- Lambda-returns

def plain_returns(reward, terminated, done, value, gamma, td_lambda):
    """SPEC's recursion as a double loop over environments and steps, backwards."""
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
    rollout = pqn.Transition(None, None, jnp.array(reward), None, jnp.array(terminated), jnp.array(done))
    return pqn.lambda_returns(rollout, jnp.array(value), gamma, td_lambda)


@pytest.mark.parametrize("td_lambda", [0.0, 0.65, 1.0])
def test_returns_against_a_double_loop(td_lambda):
    """Random rewards, values, terminations and time-outs, some of them at the last and the second-to-last step."""
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(2, 32, 50)).astype(np.float32)
    terminated = rng.random((32, 50)) < 0.1
    done = terminated | (rng.random((32, 50)) < 0.1)
    assert (done & ~terminated)[-2:].any() and terminated[-2:].any() and not done[-2:].all()
    np.testing.assert_allclose(script_returns(reward, terminated, done, value, 0.9, td_lambda),
                               plain_returns(reward, terminated, done, value, 0.9, td_lambda), rtol=1e-5, atol=1e-5)


def test_second_to_last_step():
    """By hand, gamma 0.5 and lambda 0.5: G_1 = 2 + 0.5 x 10 = 7; G_0 = 1 + 0.5 (0.5 x 6 + 0.5 x 7) = 4.25. Bootstrapped
    from the last state in place of its own next one, G_0 would be 1 + 0.5 (0.5 x 10 + 0.5 x 7) = 5.25."""
    no = np.zeros((2, 1), bool)
    returns = script_returns(np.array([[1.0], [2]]), no, no, np.array([[6.0], [10]]), 0.5, 0.5)
    np.testing.assert_allclose(returns[:, 0], [4.25, 7])


def test_returns_are_cut_at_an_episode_end():
    """What follows an end changes nothing before it; a termination has no value, a time-out that of its own last
    observation: with gamma 0.5, 1 + 0.5 x 6 = 4."""
    value = np.array([[6.0, 6], [10, 10]])
    terminated, done = np.array([[True, False], [False, False]]), np.array([[True, True], [False, False]])
    for reward in 2.0, 200.0:
        returns = script_returns(np.array([[1.0, 1], [reward, reward]]), terminated, done, value, 0.5, 0.5)
        np.testing.assert_allclose(returns[0], [1, 4])


# -------------------- Rollouts

@pytest.mark.parametrize("bootstrap", [True, False])
def test_targets_of_a_rollout(bootstrap):
    """A block's targets, recomputed by the double loop from what it stored and the parameters that acted; CartPole's
    episodes end by falling and, cut after 6 steps, by time."""
    env, params = gymnax.make("CartPole-v1")
    options = dict(num_envs=8, num_steps=16, learning_rate=1e-3, bootstrap_at_timeout=bootstrap, total_timesteps=640)
    args, wrapped, _ = setup(**options)
    init, block, *_ = make_train(args, wrapped, params.replace(max_steps_in_episode=6))
    before = jax.jit(init)(jnp.uint32(1))
    acted = jax.tree.map(jnp.copy, before.params)
    state, _ = jax.jit(block)(before, 0)
    assert not tree_equal(state.params, acted)
    rollout, target = jax.tree.map(lambda x: np.asarray(x).reshape(16, 8, *x.shape[1:]), state.rollout)
    networks = pqn.Players(pqn.Perception(args), pqn.Control(args, 2))
    value = np.asarray(pqn.q_values(networks, *acted, rollout.next_obs).max(axis=-1))
    expected = plain_returns(rollout.reward, rollout.terminated, rollout.done, value, args.gamma, args.td_lambda)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-5)
    assert rollout.done.sum() == state.episodes > 8
    assert np.array_equal(rollout.terminated, rollout.done) != bootstrap
    follows = np.all(rollout.next_obs[:-1] == rollout.obs[1:], axis=-1)
    np.testing.assert_array_equal(follows, ~rollout.done[:-1])  # at an end the last observation, not the reset's
    state_of = jax.tree.map(jnp.asarray, env.reset(jax.random.key(0), params)[1])
    for t, e in np.argwhere(rollout.done)[:5]:  # by the physics
        now = state_of.replace(**dict(zip(("x", "x_dot", "theta", "theta_dot"), rollout.obs[t, e])))
        after = env.step_env(jax.random.key(0), now, rollout.action[t, e], params)[0]
        np.testing.assert_allclose(rollout.next_obs[t, e], after, rtol=1e-5, atol=1e-6)


def watched_block(monkeypatch, **args):
    """Observations and targets [updates, players, batch] that a block's updates are given; and its rollout."""
    seen = []

    def update(*arguments):
        *_, params, opt_state, batch, target = arguments
        jax.debug.callback(lambda obs, y: seen.append((np.array(obs)[..., 0], np.array(y))), batch.obs, target,
                           ordered=True)
        return params, opt_state

    monkeypatch.setattr(pqn, "scorer_update", update)
    monkeypatch.setattr(pqn, "baseline_update", update)
    init, block, *_ = make_train(*setup(Counter(), Limit(), **args))
    state, _ = jax.jit(block)(jax.jit(init)(jnp.uint32(0)), 0)
    jax.effects_barrier()
    return [np.array(x) for x in zip(*seen)], state.rollout


def test_minibatches(monkeypatch):
    """Each epoch goes once through the rollout, in another order; both players get the same minibatch."""
    (obs, target), (rollout, returns) = watched_block(monkeypatch, scorer=True)
    assert obs.shape == target.shape == (8, 2, 8)  # 2 epochs x 4 minibatches, players, 32 / 4 transitions
    np.testing.assert_array_equal(obs[:, 0], obs[:, 1])
    np.testing.assert_array_equal(target[:, 0], target[:, 1])
    by_obs = dict(zip(np.asarray(rollout.obs)[:, 0], np.asarray(returns)))
    for epoch in obs[:4, 0], obs[4:, 0]:
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.sort(np.asarray(rollout.obs)[:, 0]))
    assert not np.array_equal(obs[:4], obs[4:])
    np.testing.assert_allclose(target[:, 0], np.vectorize(by_obs.get)(obs[:, 0]))
    assert watched_block(monkeypatch)[0][0].shape == (8, 1, 8)


def test_no_key_is_used_twice(monkeypatch):
    """Every key that init and two blocks draw from or split is another one."""
    used = []

    def watch(name):
        function = getattr(jax.random, name)

        def watched(key, *rest, **options):
            data = key if jnp.issubdtype(key.dtype, jnp.uint32) else jax.random.key_data(key)
            jax.debug.callback(lambda data: used.append(bytes(np.asarray(data))), data)
            return function(key, *rest, **options)
        return watched

    for name in ("split", "uniform", "randint", "permutation"):
        monkeypatch.setattr(jax.random, name, watch(name))
    init, block, *_ = make_train(*setup(Counter(), Limit()))  # an environment that draws nothing itself
    state, block = jax.jit(init)(jnp.uint32(0)), jax.jit(block)
    for index in range(2):
        state, _ = block(state, index)
    jax.effects_barrier()
    assert len(used) > 10 and len(set(used)) == len(used)


def test_blocks_and_seeds_differ():
    """Two blocks, two seeds: exploration, environments and parameters differ; the same seed and block repeat."""
    init, block, *_ = make_train(*setup(num_steps=32))
    state, block = jax.jit(jax.vmap(init))(jnp.array([0, 1, 0], jnp.uint32)), jax.jit(jax.vmap(block, (0, None)))
    first = block(state, 0)[0]
    again = block(first, 1)[0]
    for a in first, again:
        assert not np.array_equal(a.rollout[0].obs[0], a.rollout[0].obs[1])
        assert tree_equal(*(jax.tree.map(lambda x: x[i], a.rollout) for i in (0, 2)))
    assert not np.array_equal(first.rollout[0].action[0], again.rollout[0].action[0])
    assert not tree_equal(*(jax.tree.map(lambda x: x[i], first.params) for i in (0, 1)))


# -------------------- Networks, rates

def test_networks_by_hand():
    """Dense, LayerNorm, relu, LayerNorm is z; Dense, LayerNorm, relu, Dense the values; observations stay 0 and 1."""
    args = setup()[0]
    networks = pqn.Players(pqn.Perception(args), pqn.Control(args, 2))
    obs = np.random.default_rng(0).random((5, 4)) < 0.5
    phi = networks.perception.init(jax.random.key(0), obs)["params"]
    z = networks.perception.apply({"params": phi}, obs)
    theta = networks.control.init(jax.random.key(1), z)["params"]

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    expected = norm(np.maximum(norm(obs.astype(np.float32) @ phi["Dense_0"]["kernel"]), 0))
    np.testing.assert_allclose(z, expected, rtol=1e-3, atol=1e-4)
    hidden = np.maximum(norm(np.asarray(z) @ theta["Dense_0"]["kernel"]), 0)
    np.testing.assert_allclose(pqn.q_values(networks, phi, theta, obs), hidden @ theta["Dense_1"]["kernel"], atol=1e-3)
    sizes = [sum(x.size for x in jax.tree.leaves(p)) for p in (phi, theta)]
    assert sizes == [4 * 8 + 8 + 2 * 8 + 2 * 8, 8 * 8 + 8 + 2 * 8 + 8 * 2 + 2]


def test_parity_of_baseline_and_scorer():
    """The same seed gives both the same parameters and environments before learning."""
    states = [jax.jit(make_train(*setup(scorer=scorer))[0])(jnp.uint32(3)) for scorer in (False, True)]
    assert tree_equal(states[0].params, states[1].params) and tree_equal(states[0].obs, states[1].obs)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rates(share, monkeypatch):
    """RAdam behind a clip of its own for each player, at its rate, which is exactly 0 from `share` of training on."""
    seen = {}

    def update(objective, networks, optimizers, params, opt_state, batch, target):
        seen.update(optimizers=optimizers, objective=objective)
        return params, opt_state

    monkeypatch.setattr(pqn, "scorer_update", update)
    run = setup(scorer=True, learning_rate=0.1, follower_learning_rate=0.5, leader_decay_power=1.5, max_grad_norm=1.0,
                decay_share=share)
    init, block, *_ = make_train(*run)
    block(jax.jit(init)(jnp.uint32(0)), 0)
    assert seen["objective"] is pqn.follower_loss
    total = round(share * 10 * 2 * 4)  # 10 rollouts of 2 epochs of 4 minibatches
    for optimizer, rate, power in zip(seen["optimizers"], (0.5, 0.1), (1.0, 1.5)):
        reference = optax.radam(lambda k: rate * (1 - jnp.minimum(k, total) / total) ** power)  # noqa: B023
        state, expected, params = optimizer.init(jnp.zeros(2)), reference.init(jnp.zeros(2)), jnp.zeros(2)
        for k in range(total + 3):
            gradient = jnp.array([3.0, 4.0]) * (1 + k % 3)  # norm 5 and more: clipped to (0.6, 0.8)
            change, state = optimizer.update(gradient, state, params)
            wanted, expected = reference.update(jnp.array([0.6, 0.8]), expected, params)
            np.testing.assert_allclose(change, wanted, rtol=1e-4, atol=1e-7)
            assert bool(np.any(change)) == (k < total)


def test_epsilon_at_its_steps():
    """Of 1,000 environments with 10 actions, 0.9 epsilon leave the greedy action: 0.8 to 0 over half of 20 steps."""
    args = dict(num_envs=1000, num_steps=4, num_minibatches=1, total_timesteps=20_000, epsilon_start=0.8,
                epsilon_end=0.0, epsilon_share=0.5, learning_rate=1e-30)
    init, block, *_ = make_train(*setup(Counter(10), Limit(1), **args))  # observes 1, always
    state, block, actions = jax.jit(init)(jnp.uint32(0)), jax.jit(block), []
    for index in range(5):
        state, _ = block(state, index)
        actions += list(np.asarray(state.rollout[0].action).reshape(4, 1000))
    others = (np.array(actions) != actions[-1][0]).mean(axis=1)
    np.testing.assert_allclose(others, 0.9 * 0.8 * np.maximum(0, 1 - np.arange(20) / 10), atol=0.065)
    assert not others[10:].any() and others[9] > 0


# -------------------- Environments whose Q-values are known

@pytest.mark.parametrize("variant", [{}, dict(scorer=True), dict(scorer=True, follower_loss="msbe")],
                         ids=["baseline", "scorer", "msbe"])
def test_probes(variant):
    """Every variant finds the Q-values of all probes within 0.1, one seed each, trained side by side."""
    rates = dict(follower_learning_rate=0.02) if variant.get("scorer") else {}
    args, env, _ = setup(Probe(), **variant, **rates, num_envs=4, num_steps=16, num_minibatches=2, latent_dim=16,
                         hidden_dim=16, learning_rate=0.01, gamma=0.5, epsilon_end=1.0, total_timesteps=38_400,
                         max_grad_norm=10.0, td_lambda=0.5)
    networks = pqn.Players(pqn.Perception(args), pqn.Control(args, 2))
    timesteps = make_train(args, env, ProbeParams())[-2]

    @jax.jit
    @jax.vmap
    def train(kind):
        init, block, *_ = make_train(args, env, ProbeParams(kind, jnp.where(kind == 4, 3, 1_000_000)))
        return jax.lax.fori_loop(0, len(timesteps), lambda index, state: block(state, index)[0], init(jnp.uint32(7)))

    params = train(jnp.arange(5)).params
    for kind, place, expected in KNOWN:
        q = pqn.q_values(networks, *jax.tree.map(lambda x: x[kind], params), jnp.array([place]))
        np.testing.assert_allclose(q, expected, atol=0.1, err_msg=f"probe {kind} at {place}")


# -------------------- From the outside

TINY = ("--env CartPole-v1 --num-envs 4 --num-steps 16 --num-minibatches 4 --total-timesteps 2e4 --diagnostics "
        "--num-seeds 2 --scorer").split()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the script with these flags; a second start finds its programs compiled."""
    folder = tmp_path_factory.mktemp("pqn")

    def start(*flags):
        return subprocess.Popen([sys.executable, str(ROOT / "scorer_pqn.py"), *map(str, flags)], text=True, cwd=folder,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Standard output and folder of a run that nobody disturbed."""
    return finish(start(*TINY, "--save-model", "--runs-dir", tmp_path_factory.mktemp("whole")))


def test_record(whole):
    """The record is scorer_dqn.py's, with this script's arguments."""
    out, run = whole
    record = results(run)
    meta = json.loads(str(record["meta"]))
    assert meta["script"] == "scorer_pqn" and meta["complete"] and meta["args"]["td_lambda"] == 0.95
    assert record["timesteps"].tolist() == [64 * k for k in range(1, 314)] and record["seeds"].tolist() == [0, 1]
    diagnostics = {"follower_loss", "leader_loss", "bellman_error_mean", "bellman_error_variance", "srank",
                   "perception_norm", "control_norm"}
    assert record.keys() == {"timesteps", "seeds", "meta", "returns", "episodes"} | diagnostics
    known = ~np.isnan(record["srank"])
    assert 40 <= known[0].sum() <= 60 and np.nanmin(record["srank"]) >= 1 and np.nanmax(record["srank"]) <= 32
    np.testing.assert_allclose(record["leader_loss"][known], rtol=1e-3, desired=(
        record["bellman_error_mean"] ** 2 + record["bellman_error_variance"])[known])
    assert "num steps 16, num minibatches 4" in out and "2 seeds on 2 x cpu" in out
    sys.path.insert(0, str(ROOT / "plots"))
    import records
    assert run.name.startswith("scorer_pqn__") and str(run) == out.split("saved in ")[1].strip()
    assert records.load([run])[0].label == "SCORER PQN"


def test_resume(whole, start, tmp_path):
    """Stopped by Ctrl-C and continued, it gives bit for bit the curves of the run that nobody disturbed."""
    process = start(*TINY, "--checkpoint-every-minutes", 60, "--runs-dir", tmp_path / "stopped")
    head = [process.stdout.readline() for _ in range(3)]
    assert "10%" in head[-1]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    resumed = results(finish(start("--resume", head[0].strip(), "--runs-dir", tmp_path / "resumed"))[1])
    for name, curve in results(whole[1]).items():
        if name != "meta":
            np.testing.assert_array_equal(resumed[name], curve, err_msg=name)


@pytest.mark.parametrize("flags, words", [
    ("--num-minibatches 3", ["--num-minibatches", "divide"]), ("--td-lambda 1.5", ["--td-lambda"]),
    ("--epsilon-share 0", ["--epsilon-share"]), ("--decay-share 2", ["--decay-share"]),
    ("--num-steps 0", ["--num-steps"]), ("--num-envs 0", ["--num-envs"]), ("--num-epochs -1", ["--num-epochs"]),
    ("--follower-loss msbe", ["--scorer"]), ("--env Brekout-MinAtar", ["Breakout-MinAtar"]),
    ("--num-seeds 0", ["--num-seeds"])])
def test_bad_input(flags, words, tmp_path, monkeypatch, capsys):
    """One sentence on standard error that names the flag, exit code 2, and nothing written."""
    env = [] if "--env" in flags else ["--env", "CartPole-v1"]
    err = refusal(pqn.main, [*env, *flags.split(), "--runs-dir", tmp_path / "new"], monkeypatch, capsys)
    assert all(word in err for word in words) and not list(tmp_path.iterdir()), err


@pytest.mark.parametrize("variant", [[], ["--scorer"]], ids=["baseline", "scorer"])
def test_learns_cartpole(variant, start, tmp_path):
    """Two seeds, three fifths of the preset's steps: mean return above 300 over the last 10 % (random: 22). With fewer
    steps, seeds differ too much to tell."""
    run = finish(start("--env", "CartPole-v1", "--num-seeds", 2, "--total-timesteps", 3e5, "--runs-dir", tmp_path,
                       *variant))[1]
    returns = results(run)["returns"]
    assert returns[:, -returns.shape[1] // 10 :].mean() > 300

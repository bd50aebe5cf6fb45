"""scorer_bootstrapped_dqn.py: the rules for solved, priors, masks, action maps, one update by hand, runs and resume."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm
from safetensors.numpy import load_file

import scorer_bootstrapped_dqn as boot
from helpers import results, tree_equal

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scorer_bootstrapped_dqn.py"
sys.path.insert(0, str(ROOT / "plots"))
SMALL = dict(size=4, num_members=3, hidden_dim=8, batch_size=8, buffer_size=400, learning_starts=16,
             total_timesteps=216)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def make_train(**args):
    """Arguments, and the script's make_train with the follower's rate that they have in init."""
    args, env, env_params = boot.resolve(boot.Args(**SMALL | args))
    init, *others = boot.make_train(args, env, env_params)
    return args, lambda seed: init(seed, jnp.float32(args.follower_learning_rate or 0.0)), *others


def play_only(seeds, steps, **args):
    """States of these seeds after `steps` steps without learning, in a replay which keeps all."""
    args = dict(learning_starts=steps, total_timesteps=steps + 1, buffer_size=steps, batch_size=1) | args
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(make_train(**args)[1]))(jnp.asarray(seeds, jnp.uint32)))


@pytest.fixture(scope="module")
def played():
    """Seeds 0, 1 and 2 after 40 greedy episodes of depth 8 without learning."""
    return play_only([0, 1, 2], 320, size=8, epsilon_scale=0.0)


@pytest.fixture(scope="module")
def stochastic():
    """Seeds 0 and 1 after 600 stochastic steps of depth 4, mostly explored, in a ring of 590."""
    return play_only([0, 1], 600, stochastic=True, mask_probability=0.9, prior_scale=0.0, buffer_size=590)


def experience(state):
    """The transitions of one seed, oldest first, from a replay that has kept all of them."""
    steps = int(state.env_state.env_state.time) + int(state.progress["episodes"]) * len(state.action_map)
    return jax.tree.map(lambda ring: np.asarray(ring[:steps, 0]), state.replay)


def one(states, index):
    return jax.tree.map(lambda x: x[index], states)


# -------------------- Solved

def judged(bad, stochastic):
    """The first episode at which each rule holds for these episodes, in exact arithmetic; -1: never."""
    first, last = dict(solved_episode=-1, strictly_solved_episode=-1), deque(maxlen=100)
    for episode in range(1, len(bad) + 1):
        last.append(bad[episode - 1])
        total = int(np.sum(bad[:episode]))
        rules = dict(solved_episode=10 * total < (8 if stochastic else 9) * episode and (
            episode >= 100 or not stochastic), strictly_solved_episode=episode >= 100 and sum(last) < 10)
        for name, now in rules.items():
            first[name] = episode if now and first[name] < 0 else first[name]
    return first


def follow(bad, stochastic):
    """The same with the script's rules."""
    first, last = dict(solved_episode=-1, strictly_solved_episode=-1), np.zeros(100, bool)
    for episode in range(1, len(bad) + 1):
        last[episode % 100] = bad[episode - 1]
        for name, now in boot.solved(int(np.sum(bad[:episode])), last, episode, stochastic).items():
            first[name] = episode if now and first[name] < 0 else first[name]
    return first


@pytest.mark.parametrize("bad, stochastic, expected", [
    ([1] * 9 + [0], False, (-1, -1)),  # 9 of 10 is not below 90 %
    ([1] * 9 + [0, 0], False, (11, -1)),
    ([0], False, (1, -1)),
    ([0] * 100, False, (1, 100)),
    ([0] * 100, True, (100, 100)),
    ([1] * 80 + [0] * 20, True, (-1, -1)),  # 80 of 100 is not below 80 %
    ([1] * 80 + [0] * 21, True, (101, -1)),
    ([1] * 79 + [0] * 21, True, (100, -1)),
    ([1] * 100 + [0] * 12, False, (112, -1)),  # 100 of 111 is 90.1 %, of 112 89.3 %
    ([1] * 100 + [0] * 91, False, (112, 191)),  # 10 of the last 100 is not below 10 %, 9 is
    ([0] * 90 + [1] * 10 + [0] * 90, False, (1, -1)),
    ([0] * 90 + [1] * 9 + [0], False, (1, 100)),
])
def test_solved_rules(bad, stochastic, expected):
    """By hand, from both sides of each threshold."""
    assert tuple(follow(bad, stochastic).values()) == expected
    assert judged(bad, stochastic) == follow(bad, stochastic)


def bad_episodes(state):
    """Which episodes chose to go left on the diagonal, from the seed's experience and its action map."""
    past, size = experience(state), len(state.action_map)
    row, column = np.divmod(past.obs, size)
    left = past.action != np.asarray(state.action_map)[row, column]
    episodes = int(state.progress["episodes"])
    return (left & (row == column))[: episodes * size].reshape(episodes, size).any(axis=1)


# -------------------- Environment

def assert_gymnaxs(states):
    """Each seed's map is what gymnax draws from its key, and every step is what gymnax does with that map."""
    size = states.action_map.shape[-1]
    for seed in range(3):
        state, past = one(states, seed), experience(one(states, seed))
        key = jax.random.split(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), 0), 5)[-1]
        env, params = gymnax.make("DeepSea-bsuite", size=size, action_mapping_key=key)
        np.testing.assert_array_equal(state.action_map, env.action_mapping)

        def replay(sea, action):
            obs, new, reward, terminated, _, info = env.step(key, sea, action, params)
            return new, (sea.row * size + sea.column, reward, info["final_observation"].argmax(), terminated)

        sea, found = jax.jit(partial(jax.lax.scan, replay))(env.reset(key, params)[1], past.action)
        jax.tree.map(np.testing.assert_array_equal, found, (past.obs, past.reward, past.next_obs, past.terminated))
        assert np.all(past.terminated == (np.arange(1, len(past.obs) + 1) % size == 0))
        assert state.progress["bad_episodes"] == sea.total_bad_episodes == bad_episodes(state).sum()


def test_action_maps_are_gymnaxs(played):
    """They differ between seeds, and each seed's steps are those of gymnax with that map; below, with exploration."""
    assert len(np.unique(played.action_map.reshape(3, -1), axis=0)) == 3 and set(played.action_map.ravel()) == {0, 1}
    assert_gymnaxs(played)


def test_remapped_actions_are_gymnaxs_own_map():
    """In lockstep, with the same keys, stochastic: the environment of resolve fed with `action is right`, and gymnax's
    with a map of its own."""
    _, env, params = boot.resolve(boot.Args(size=5, stochastic=True))
    own, own_params = gymnax.make("DeepSea-bsuite", size=5, action_mapping_key=jax.random.key(7))
    own_params = own_params.replace(deterministic=False)
    assert params.max_steps_in_episode == own_params.max_steps_in_episode == 5 and not params.deterministic

    def lockstep(states, key):
        action = jax.random.randint(key, (), 0, 2)
        right = action == own.action_mapping[states[1].row, states[1].column]
        obs, state, reward, *_ = env.step(key, states[0], right.astype(int), params)
        own_obs, own_state, own_reward, *_ = own.step(key, states[1], action, own_params)
        bad = state.env_state.total_bad_episodes, own_state.total_bad_episodes
        return (state, own_state), ((obs, reward, bad[0]), (own_obs, own_reward, bad[1]))

    start = env.reset(jax.random.key(0), params)[1], own.reset(jax.random.key(0), own_params)[1]
    steps = jax.jit(lambda: jax.lax.scan(lockstep, start, jax.random.split(jax.random.key(1), 300))[1])()
    assert tree_equal(*steps)
    assert len(np.unique(steps[0][2])) > 10 and steps[0][1].std() > 0.1  # bad episodes are counted, rewards are noisy


def test_stochastic_moves(stochastic):
    """Of the moves to the right, 1 in `size` fails; the reward is noisy only at the two ends of the last row."""
    past = [jax.tree.map(lambda ring: ring[seed, :, 0], stochastic.replay) for seed in (0, 1)]
    fails = moves = 0
    for seed, p in enumerate(past):
        row, column = np.divmod(p.obs, 4)
        right = (p.action == stochastic.action_map[seed][row, column]) & ~p.terminated & (column < 3)
        fails, moves = fails + (p.next_obs % 4 == column)[right].sum(), moves + right.sum()
        noisy = (row == 3) & np.isin(column, (0, 3))
        assert p.reward[noisy].std() > 0.5 and set(np.round(p.reward[~noisy], 6)) <= {0, np.float32(-0.0025)}
    assert fails / moves == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / moves))
    # and of the two other arguments
    assert past[0].mask.mean() == pytest.approx(0.9, abs=4 * 0.3 / np.sqrt(1770)) and not past[0].priors.any()


# -------------------- Networks, priors and masks

def plain_values(phi, theta, cells):
    """A member's network, written out: the two hidden layers of its MLP on one-hot cells."""
    hidden = np.maximum(np.eye(len(phi["kernel"]))[cells] @ phi["kernel"] + phi["bias"], 0)
    hidden = np.maximum(hidden @ theta["Dense_0"]["kernel"] + theta["Dense_0"]["bias"], 0)
    return hidden @ theta["Dense_1"]["kernel"] + theta["Dense_1"]["bias"]


def test_initial_weights_are_sonnets():
    """Normal with standard deviation 1 / sqrt(inputs) cut off at two of these, so that 0.88 of it remains; biases 0."""
    args = boot.resolve(boot.Args())[0]
    phi = boot.Perception(args).init(jax.random.key(0), jnp.arange(3))["params"]
    theta = boot.Control(args).init(jax.random.key(1), jnp.ones(50))["params"]
    for layer, shape in ((phi, (100, 50)), (theta["Dense_0"], (50, 50)), (theta["Dense_1"], (50, 2))):
        weights = np.asarray(layer["kernel"]) * np.sqrt(shape[0])
        assert weights.shape == shape and not layer["bias"].any() and 1.6 < abs(weights).max() <= 2
        assert weights.std() == pytest.approx(0.8796, rel=4 / np.sqrt(2 * weights.size))


def test_members_differ(played):
    """Their networks, their priors, their networks from their priors, and their masks, half of which are 1; so do
    seeds."""
    own, prior = played.params[:2], (played.params.prior["perception"], played.params.prior["control"])
    for both in zip(jax.tree.leaves(own), jax.tree.leaves(prior), strict=True):
        if np.any(both[0]):  # biases are 0
            assert len(np.unique(np.concatenate(both).reshape(18, -1), axis=0)) == 18
    masks = np.concatenate([experience(one(played, seed)).mask for seed in range(3)], axis=1)  # [steps, 3 x 3]
    assert len(np.unique(masks, axis=1).T) == 9
    np.testing.assert_allclose(masks.mean(axis=0), 0.5, atol=4 * 0.5 / np.sqrt(320))


def test_one_member_acts_through_an_episode(played):
    """Without exploration every episode is what one member's values, prior included, do greedily; all get their turn,
    and what they would do without their priors is something else."""
    state = one(played, 0)
    past, action_map = experience(state), state.action_map

    def rollout(member, scale):
        phi, theta, prior = one(state.params, member)
        column, actions = 0, []
        for row in range(8):
            cell = 8 * row + column
            q = plain_values(phi, theta, cell) + scale * plain_values(prior["perception"], prior["control"], cell)
            actions.append(int(np.argmax(q)))
            column = np.clip(column + (1 if actions[-1] == action_map[row, column] else -1), 0, 7)
        return tuple(actions)

    greedy = [rollout(member, 3.0) for member in range(3)]
    episodes = [tuple(actions) for actions in past.action.reshape(40, 8)]
    turns = [episodes.count(actions) for actions in greedy]
    assert len(set(greedy)) == 3 and sum(turns) == 40 and min(turns) >= 5
    assert {rollout(member, 0.0) for member in range(3)} != set(greedy)


def test_stored_priors(played):
    """They are 3 times the priors' values of both observations, for all members."""
    state = one(played, 0)
    past = experience(state)
    for member in range(3):
        prior = one(state.params.prior, member)
        for place, cells in enumerate((past.obs, past.next_obs)):
            expected = 3 * plain_values(prior["perception"], prior["control"], cells)
            np.testing.assert_allclose(past.priors[:, member, place], expected, rtol=1e-4, atol=1e-5)


def linear_networks():
    """z = params . s, elementwise; Q = z @ params."""
    return boot.Players(SimpleNamespace(apply=lambda variables, x: x * variables["params"]),
                        SimpleNamespace(apply=lambda variables, z: z @ variables["params"]))


def by_hand(mask):
    """phi = 1, theta = ((1, 0), (0, 2)), observations (s, 1): Q = (s, 2); actions 0, 0, 1, 1; errors 1, 2, 6, 100."""
    obs = jnp.stack([jnp.array([4.0, 5, 0, 0]), jnp.ones(4)], axis=1)
    batch = boot.Transition(obs, jnp.array([0, 0, 1, 1]), None, None, None, jnp.array(mask, bool), None)
    return (jnp.array(1.0), jnp.array([[1.0, 0], [0, 2]])), batch, jnp.array([5.0, 7, 8, 102])


def test_masked_losses_by_hand():
    """Of errors 1, 2, 6: mean 3, variance (4 + 1 + 9) / 3, mean square (1 + 4 + 36) / 3; the masked 100 is not seen."""
    params, batch, target = by_hand([1, 1, 1, 0])
    arguments = *params, linear_networks(), batch, target
    np.testing.assert_allclose(boot.bellman_error(*arguments), [1, 2, 6, 100])
    np.testing.assert_allclose(boot.masked_variance(*arguments), 14 / 3, rtol=1e-6)
    np.testing.assert_allclose(boot.masked_msbe(*arguments), 41 / 3, rtol=1e-6)
    assert boot.leader_loss is boot.masked_msbe


@pytest.mark.parametrize("loss", [boot.masked_variance, boot.masked_msbe])
def test_zero_mask_gives_zero_gradient(loss):
    """Exactly 0, loss and gradient; one transition more, and the gradient is there (of the variance: two)."""
    for mask, zero in (([0, 0, 0, 0], True), ([1, 0, 0, 1], False)):
        params, batch, target = by_hand(mask)
        value, gradient = jax.value_and_grad(loss, argnums=(0, 1))(*params, linear_networks(), batch, target)
        assert all(not leaf.any() if zero else leaf.any() for leaf in [value, *gradient])


def test_a_silent_broadcast_is_refused():
    """Targets [batch, 1], or masks of all members, would train on [batch, batch] numbers."""
    params, batch, target = by_hand([1, 1, 1, 1])
    for wrong in ((batch, target[:, None]), (batch._replace(mask=jnp.ones((4, 3))), target)):
        with pytest.raises(AssertionError):
            boot.masked_msbe(*params, linear_networks(), *wrong)


def test_target_by_hand():
    """Target values (1, 2) * 2 @ ((1, 0), (0.5, 2)) = (4, 8), with priors (6, 1) of the next observation (10, 9): the
    best is 10. Y - p(s, 1) = 1.5 + 0.9 x 10 - 0.25, and 1.5 - 0.25 where the episode has ended."""
    target = boot.Players(jnp.array(2.0), jnp.array([[1.0, 0], [0.5, 2]]))
    priors = jnp.broadcast_to(jnp.array([[50.0, 0.25], [6, 1]]), (2, 2, 2))
    batch = boot.Transition(None, jnp.array([1, 1]), jnp.full(2, 1.5), jnp.array([[1.0, 2]] * 2),
                            jnp.array([False, True]), None, priors)
    y = boot.target_without_prior(linear_networks(), target, batch, 0.9)
    np.testing.assert_allclose(y, [1.5 + 9 - 0.25, 1.5 - 0.25], rtol=1e-6)


def test_priors_get_no_gradient():
    """Also where the target is computed from them inside the loss; the network beside them gets some."""
    params, batch, _ = by_hand([1, 1, 1, 1])
    batch = batch._replace(reward=jnp.arange(4.0), next_obs=batch.obs, terminated=jnp.zeros(4, bool))
    target = boot.Players(*params)

    def loss(kind, params, priors):
        seen = batch._replace(priors=priors)
        return kind(*params, linear_networks(), seen, boot.target_without_prior(linear_networks(), target, seen, 0.9))

    for kind in (boot.masked_variance, boot.masked_msbe):
        own, priors = jax.grad(partial(loss, kind), argnums=(0, 1))(params, jnp.ones((4, 2, 2)))
        assert not priors.any() and all(leaf.any() for leaf in own)


# -------------------- Updates

class Adam:
    """Adam, written out."""

    def __init__(self, params, rate):
        self.rate, self.count = rate, 0
        self.first = self.second = jax.tree.map(np.zeros_like, params)

    def step(self, params, gradient):
        self.count += 1
        self.first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.first, gradient)
        self.second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, self.second, gradient)
        return jax.tree.map(lambda p, m, v: p - self.rate * (m / (1 - 0.9**self.count)) / (
            np.sqrt(v / (1 - 0.999**self.count)) + 1e-8), params, self.first, self.second)


START = {}  # the first variant's


@pytest.mark.parametrize("variant", [{}, dict(scorer=True), dict(scorer=True, follower_loss="msbe")],
                         ids=["baseline", "scorer", "msbe"])
def test_block_of_updates_against_a_reference(variant, monkeypatch):
    """Eight updates of one block, targets copied every two, equal for each member those of a plain loop: values with
    priors inside, its own mask, its own Adam. No prior has moved, and all variants have started alike."""
    if variant:
        variant = variant | dict(follower_learning_rate=0.02)
    args, init, block, _, timesteps, _ = make_train(target_update_interval=2, learning_rate=0.005, batch_size=6,
                                                    total_timesteps=16 + 2000, buffer_size=24, **variant)
    assert timesteps[0] == 16 + 8
    drawn, randint = [], jax.random.randint

    def watch(key, shape, low, high, *rest):
        result = randint(key, shape, low, high, *rest)
        if len(shape) == 3:
            drawn.append(np.asarray(result))
        return result

    monkeypatch.setattr(jax.random, "randint", watch)
    before = init(jnp.uint32(5))
    alike = {name: getattr(before, name) for name in ("params", "action_map", "replay", "active")}
    assert tree_equal(START.setdefault("alike", alike), alike)
    after, _ = block(before, 0)
    drawn = np.concatenate([drawn[0][-1:], drawn[1][:-1]])  # [updates, players, batch], each drawn a step before
    assert drawn.shape == (8, 1 + bool(variant), 6)
    assert len(np.unique(drawn.reshape(-1, 6), axis=0)) == drawn[..., 0].size  # no sample is drawn twice
    assert all(sample.max() < 16 + t for t, sample in enumerate(drawn))
    assert any(sample.max() == 15 + t for t, sample in enumerate(drawn))  # the newest is drawn at times
    past = experience(after)
    for member in range(3):
        phi, theta, prior = jax.tree.map(lambda x: np.asarray(x[member]), before.params)
        target = phi, theta
        adams = Adam(phi, args.follower_learning_rate or 0.005), Adam(theta, 0.005)

        def values(phi, theta, cells):
            def value(phi, theta):
                hidden = jax.nn.relu(jax.nn.one_hot(cells, 16) @ phi["kernel"] + phi["bias"])
                hidden = jax.nn.relu(hidden @ theta["Dense_0"]["kernel"] + theta["Dense_0"]["bias"])
                return hidden @ theta["Dense_1"]["kernel"] + theta["Dense_1"]["bias"]
            return value(phi, theta) + 3.0 * value(prior["perception"], prior["control"])

        def loss(kind, phi, theta, rows, target):
            p, m = jax.tree.map(lambda x: x[rows], past), past.mask[rows, member].astype(float)
            y = p.reward + 0.99 * np.where(p.terminated, 0, values(*target, p.next_obs).max(axis=1))
            d = y - values(phi, theta, p.obs)[np.arange(6), p.action]
            mean_square = (m * d**2).sum() / max(m.sum(), 1)
            return mean_square - ((m * d).sum() / max(m.sum(), 1)) ** 2 if kind == "variance" else mean_square

        for t, rows in enumerate(drawn):
            if variant:
                kind = args.follower_loss
                phi = adams[0].step(phi, jax.grad(partial(loss, kind))(phi, theta, rows[0], target))
                theta = adams[1].step(theta, jax.grad(partial(loss, "msbe"), argnums=1)(phi, theta, rows[1], target))
            else:
                gradient = jax.grad(partial(loss, "msbe"), argnums=(0, 1))(phi, theta, rows[0], target)
                phi, theta = (adam.step(p, g) for adam, p, g in zip(adams, (phi, theta), gradient))
            if t % 2:
                target = phi, theta
        found = jax.tree.map(lambda x: np.asarray(x[member]), tuple(after.params[:2]))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5), found, (phi, theta))
    assert tree_equal(after.target, boot.Players(*after.params[:2])) and not tree_equal(after.target, before.target)
    assert tree_equal(after.params.prior, before.params.prior)


def test_acts_with_the_parameters_before_the_update():
    """In blocks of one update, without exploration: the action stored is the active member's greedy one."""
    args, init, block, _, timesteps, _ = make_train(scorer=True, follower_learning_rate=0.3, learning_rate=0.3,
                                                    target_update_interval=1, epsilon_scale=0.0)
    state, block, changed = jax.jit(init)(jnp.uint32(0)), jax.jit(block), 0
    for index, timestep in enumerate(timesteps[:60]):
        before = state
        state, _ = block(state, index)
        greedy = []
        for params in before.params, state.params:
            phi, theta, prior = one(params, before.active)
            own, fixed = (plain_values(*both, before.obs) for both in (
                (phi, theta), (prior["perception"], prior["control"])))
            greedy.append((own + 3.0 * fixed).argmax())
        assert state.replay.action[(timestep - 1) % args.buffer_size, 0] == greedy[0]
        changed += greedy[0] != greedy[1]
    assert set(np.diff(timesteps)) == {1} and changed > 2


@pytest.mark.parametrize("period, block_steps", [(1, 4), (3, 3), (4, 4), (300, 300)])
def test_blocks_are_whole_target_periods(period, block_steps):
    """1,016 steps of which 16 without learning make 250 blocks of 4, or as many steps as the targets need."""
    _, _, _, _, timesteps, blocks_per_point = make_train(target_update_interval=period, total_timesteps=1016)
    assert blocks_per_point == 1 and timesteps[0] == 16 + block_steps and set(np.diff(timesteps)) == {block_steps}
    assert timesteps[-2] < 1016 <= timesteps[-1]
    assert make_train(target_update_interval=10**9, total_timesteps=1016)[-2].tolist() == [16 + 1016]  # never within


def test_epsilon():
    """10 / 11 before learning, then 10 / (10 + t), t = 1 + updates: half of the random actions differ from the greedy
    one. 300 seeds of one member that hardly learns; the steps of each ten are taken together."""
    args, init, block, _, timesteps, _ = make_train(num_members=1, size=2, learning_rate=1e-30, batch_size=1,
                                                    learning_starts=10, total_timesteps=10_010, buffer_size=100)
    assert timesteps[0] == 50
    states = jax.jit(jax.vmap(lambda seed: block(init(seed), 0)[0]))(jnp.arange(300, dtype=jnp.uint32))
    states, others = jax.tree.map(np.asarray, states), np.zeros((300, 50))
    for seed in range(300):
        past, params = experience(one(states, seed)), one(one(states, seed).params, 0)
        q, p = (plain_values(phi, theta, past.obs) for phi, theta in (
            params[:2], (params.prior["perception"], params.prior["control"])))
        others[seed] = past.action != (q + 3 * p).argmax(axis=1)
    expected = 0.5 * 10 / (10 + np.maximum(1, np.arange(50) - 10 + 2))
    np.testing.assert_allclose(others.mean(axis=0).reshape(5, 10).mean(axis=1), expected.reshape(5, 10).mean(axis=1),
                               atol=4 * 0.5 / np.sqrt(3000))


def test_ring_wraps(stochastic):
    """Of the 600 steps stored in a ring of 590, the latest 590 are there, where they belong: one leads to the next."""
    obs, next_obs = stochastic.replay.obs[0, :, 0], stochastic.replay.next_obs[0, :, 0]
    for t in range(10, 599):
        assert obs[t % 590] // 4 == t % 4  # the row of the cell
        assert next_obs[t % 590] == (0 if t % 4 == 3 else obs[(t + 1) % 590])


# -------------------- Learning

@pytest.mark.parametrize("variant", [dict(), dict(scorer=True)], ids=["baseline", "scorer"])
def test_solves_depth_4(variant):
    """Three seeds of ten members solve it by both rules within 250 episodes, and strictly not before episode 100. What
    is recorded on the way is what their experience says."""
    args, init, block, _, timesteps, _ = make_train(num_members=10, hidden_dim=20, batch_size=32, buffer_size=1100,
                                                    total_timesteps=1000, learning_starts=32, **variant)
    train = jax.jit(jax.vmap(lambda seed: jax.lax.fori_loop(
        0, len(timesteps), lambda index, state: block(state, index)[0], init(seed))))
    states = jax.tree.map(np.asarray, train(jnp.arange(3, dtype=jnp.uint32)))
    assert_gymnaxs(states)
    for seed in range(3):
        state = one(states, seed)
        bad, progress = bad_episodes(state), {name: int(value) for name, value in state.progress.items()}
        expected = judged(bad, False)
        assert progress == expected | dict(returns=0, episodes=len(bad), bad_episodes=bad.sum())
        assert 1 <= progress["solved_episode"] <= 60 and 100 <= progress["strictly_solved_episode"] <= 200
        assert float(state.progress["returns"]) == pytest.approx(0.99, abs=1e-5)
        curves = {name: np.asarray(curve) for name, curve in state.curves.items()}
        for name in expected:
            at = timesteps // 4 >= expected[name]  # whole episodes by each point
            np.testing.assert_array_equal(curves[name], np.where(at, expected[name], -1))
        np.testing.assert_array_equal(curves["episodes"], timesteps // 4)
        np.testing.assert_array_equal(curves["bad_episodes"], np.cumsum(bad)[timesteps // 4 - 1])


# -------------------- Runs

TINY = "--size 4 --num-members 3 --hidden-dim 8 --batch-size 8 --buffer-size 400 --learning-starts 16".split()
RUN = [*TINY, "--scorer", "--total-timesteps", "416", "--num-seeds", "2"]


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs main with these flags, interrupted after so many blocks; its exit code and what it printed."""
    handler = signal.getsignal(signal.SIGINT)

    def main(*flags, interrupt=None):
        class Bar(tqdm.tqdm):
            def set_postfix_str(self, *_):
                nonlocal interrupt
                interrupt = interrupt and interrupt - 1
                if interrupt == 0:
                    signal.raise_signal(signal.SIGINT)

        capsys.readouterr()
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        monkeypatch.setattr(boot, "tqdm", Bar)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            boot.main()
        return end.value.code, *capsys.readouterr()

    yield main
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def only(folder: Path) -> Path:
    run, = folder.iterdir()
    return run


def test_record_model_and_resume(main, folder):
    """The record and the model are what the readers expect; a run stopped by Ctrl-C and resumed is bit for bit it."""
    assert main(*RUN, "--save-model", "--runs-dir", folder / "whole")[0] == 0
    run = only(folder / "whole")
    assert re.fullmatch(r"scorer_bootstrapped_dqn__DeepSea-4__scorer__s0__\d{8}-\d{6}-\d+", run.name)
    record = results(run)
    meta = json.loads(str(record["meta"]))
    assert record.keys() == {"timesteps", "seeds", "meta", "returns", "episodes", "bad_episodes", "solved_episode",
                             "strictly_solved_episode"}
    assert record["solved_episode"].shape == (2, 100) and record["timesteps"].tolist() == list(range(20, 417, 4))
    assert meta["args"].keys() == {field.name for field in fields(boot.Args)} and meta["complete"]
    assert meta["args"]["env"] == "DeepSea-4" and meta["args"]["follower_loss"] == "variance"
    assert meta["args"]["follower_learning_rate"] == boot.GAME["follower_learning_rate"]
    names = [f"{part}/{layer}/{leaf}" for part in ("control", "prior/control") for layer in ("Dense_0", "Dense_1")
             for leaf in ("kernel", "bias")]
    names += [f"{part}/{leaf}" for part in ("perception", "prior/perception") for leaf in ("kernel", "bias")]
    model = load_file(run / "model.safetensors")
    assert model.keys() == {*names} and model["prior/perception/kernel"].shape == (2, 3, 16, 8)
    code, out, _ = main(*RUN, "--checkpoint-every-minutes", 60, "--runs-dir", folder / "stopped", interrupt=40)
    stopped = only(folder / "stopped")
    assert code == 130 and not json.loads(str(results(stopped)["meta"]))["complete"]
    assert 30 < results(stopped)["returns"].shape[1] < 60
    assert main("--resume", stopped, "--save-model", "--runs-dir", folder / "resumed")[0] == 0
    again = results(only(folder / "resumed"))
    for name in record.keys() - {"meta"}:
        np.testing.assert_array_equal(again[name], record[name], err_msg=name, strict=True)
    resumed = load_file(only(folder / "resumed") / "model.safetensors")
    assert all(np.array_equal(resumed[name], model[name]) for name in model)


def test_sweep_and_figure(main, folder, capsys):
    """Two follower rates as one program beside another run: records that the figure's tool reads."""
    import deep_sea
    import records
    assert main(*RUN, "--num-seeds", 1, "--follower-learning-rate", 2e-3, 1e-2, "--runs-dir", folder / "sweep")[0] == 0
    runs = sorted(folder.glob("sweep/*")) + sorted(folder.glob("whole/*"))
    shapes = [records.read_run(run).curves["returns"].shape for run in runs]
    assert shapes == [(1, 100), (1, 100), (2, 100)] and ["follower0.002", "follower0.01"] == [
        run.name.split("__")[2].removeprefix("scorer-") for run in runs[:2]]
    capsys.readouterr()
    for strict in (False, True):
        deep_sea.main(runs, out=folder / f"figure{strict}.png", strict=strict)
        assert (folder / f"figure{strict}.png").stat().st_size > 10_000
    assert "follower learning rate 0.01" in capsys.readouterr().out


def test_table_by_hand(tmp_path, capsys):
    """Medians, seeds solved, and the test's direction: fewer episodes are better; a foreign record is refused."""
    import deep_sea
    names = "solved_episode", "strictly_solved_episode", "returns", "episodes"
    firsts = dict(baseline=[30, 40, 50, -1, 60], scorer=[3, 4, 5, 6, 7])

    def write(name, curves=names, **meta):
        args = dict(env="DeepSea-4", size=4, stochastic=False, scorer=name == "scorer", total_timesteps=400)
        values = dict(solved_episode=firsts[name], strictly_solved_episode=[-1, -1, -1, 100, -1], returns=[0] * 5,
                      episodes=[100] * 5)
        arrays = {n: np.array([[-1, x] for x in values[n]], float) for n in curves}
        meta = dict(schema=1, script="scorer_bootstrapped_dqn", args=args, complete=True) | meta
        (tmp_path / name).mkdir(exist_ok=True)
        np.savez(tmp_path / name / "results.npz", timesteps=[200, 400], seeds=range(5), meta=json.dumps(meta), **arrays)
        return tmp_path / name

    runs = [write("baseline"), write("scorer")]
    deep_sea.main(runs, out=tmp_path / "figure.png")
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| DeepSea-4")]
    assert [line[2] for line in lines] == ["Baseline", "SCORER"] and lines[0][1] == "100"
    assert re.fullmatch(r"50 \[\d+, (60|> 100)\] \(4/5\)", lines[0][3]) and lines[1][3].startswith("5 [3, 7] (5/5)")
    assert re.fullmatch(r"> 100 \[100, > 100\] \(1/5\)", lines[0][4])
    assert lines[1][5] == "fastest |" and float(lines[0][5].split()[0]) < 0.05
    np.testing.assert_array_equal(
        deep_sea.solved_by(np.array([3, np.inf]), np.array([2, 3, 400])), [[0, 1, 1], [0, 0, 0]])
    with pytest.raises(SystemExit) as end:
        deep_sea.main([write("scorer", names[2:])], out=tmp_path / "figure.png")
    assert end.value.code == 2 and "has no solved_episode" in capsys.readouterr().err


BAD = [
    ("--size 1", ["--size 1"]), ("--size 0", ["--size"]), ("--num-members 0", ["--num-members"]),
    ("--prior-scale -1", ["--prior-scale"]), ("--mask-probability 0", ["--mask-probability"]),
    ("--mask-probability 1.5", ["--mask-probability"]), ("--buffer-size 127", ["--buffer-size", "128"]),
    ("--learning-starts 0", ["--learning-starts"]), ("--total-timesteps 100", ["--learning-starts"]),
    ("--follower-loss msbe", ["--follower-loss", "--scorer"]),
    ("--follower-learning-rate 1e-3", ["--follower-learning-rate", "--scorer"]),
    ("--scorer --follower-learning-rate 1e-3 1e-3", ["--follower-learning-rate", "different"]),
    ("--scorer --follower-learning-rate nan", ["--follower-learning-rate"]), ("--gamma 2", ["--gamma"]),
    ("--target-update-interval 0", ["--target-update-interval"]), ("--seed -1", ["--seed"]),
    ("--epsilon-scale -1", ["--epsilon-scale"]), ("--num-seeds 0", ["--num-seeds"]), ("--size -3", ["--size"]),
    ("--scorer --follower-learning-rate", ["--follower-learning-rate needs a value"]),
    ("--learning-rate inf", ["--learning-rate"]),
]


@pytest.mark.parametrize("flags, words", BAD, ids=[flags for flags, _ in BAD])
def test_bad_input(flags, words, main, tmp_path):
    """One sentence on standard error that names the flag, exit code 2, before any compile, and nothing written."""
    code, out, err = main(*flags.split(), "--runs-dir", tmp_path / "new")
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: [^\n]+\n", err) and all(word in err for word in words), err


def test_help_and_flags_that_are_none():
    """--help, run as a program, has every field's words; the environment's name is no flag."""
    env = os.environ | dict(COLUMNS="1000", JAX_PLATFORMS="cpu")
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, env=env, timeout=60)
    out, source = re.sub(r"[\s│]+", " ", done.stdout), SCRIPT.read_text()
    for field in fields(boot.Args):
        comment = re.search(rf"(?m)^    {field.name}: .*  # (.+)$", source)
        shown = f"--{field.name.replace('_', '-')}" in out and comment[1] in out
        assert shown == (field.name != "env"), field.name

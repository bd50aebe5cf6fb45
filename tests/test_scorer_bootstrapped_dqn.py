"""scorer_bootstrapped_dqn.py: rules for solved, priors, masks, maps, an update by hand, runs."""

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
from helpers import results
from helpers import tree_equal
from safetensors.numpy import load_file

import scorer_bootstrapped_dqn as boot

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scorer_bootstrapped_dqn.py"
sys.path.insert(0, str(ROOT / "plots"))
SMALL = dict(
    size=4,
    num_members=3,
    hidden_dim=8,
    batch_size=8,
    buffer_size=400,
    learning_starts=16,
    total_timesteps=216,
)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def make_train(**args):
    """Returns arguments, and what the script's make_train gives; init takes the seed alone."""
    args = boot.complete(boot.Args(**SMALL | args))
    training = boot.make_train(args, boot.make_env(args))
    rate = jnp.float32(args.follower_learning_rate or 0.0)
    return args, training._replace(init=lambda seed: training.init(seed, rate))


def play_only(seeds, steps, **args):
    """Returns states of these seeds after `steps` steps without learning, all in the replay."""
    alone = dict(learning_starts=steps, total_timesteps=steps + 1, buffer_size=steps, batch_size=1)
    _, training = make_train(**alone | args)
    states = jax.jit(jax.vmap(training.init))(jnp.asarray(seeds, jnp.uint32))
    return jax.tree.map(np.asarray, states)


@pytest.fixture(scope="module")
def played():
    """Seeds 0, 1 and 2 after 40 greedy episodes of depth 8 without learning."""
    return play_only([0, 1, 2], 320, size=8, epsilon_scale=0.0)


@pytest.fixture(scope="module")
def stochastic():
    """Seeds 0 and 1 after 600 stochastic steps of depth 4, mostly explored, in a ring of 590."""
    return play_only(
        [0, 1], 600, stochastic=True, mask_probability=0.9, prior_scale=0.0, buffer_size=590
    )


def experience(state):
    """Returns the transitions of one seed, oldest first, from a replay that has kept them all."""
    in_this_episode = int(state.env_state.sea.env_state.time)
    size = len(state.env_state.action_map)
    steps = in_this_episode + int(state.episodes.completed) * size
    return jax.tree.map(lambda ring: np.asarray(ring[:steps, 0]), state.replay)


def one(tree, index):
    """Returns one seed's, or one member's, part of a tree."""
    return jax.tree.map(lambda x: x[index], tree)


def players(member):
    """Returns the two networks that a member's own values and its prior's are of."""
    return (member.perception, member.control), (
        member.prior["perception"],
        member.prior["control"],
    )


# -------------------- Solved


def judged(bad, stochastic):
    """Returns the first episode at which each rule holds, in exact arithmetic; -1: never."""
    solved, strictly_solved = -1, -1
    last = deque(maxlen=100)
    for episode in range(1, len(bad) + 1):
        last.append(bad[episode - 1])
        total = int(np.sum(bad[:episode]))
        if stochastic:
            is_solved = 10 * total < 8 * episode and episode >= 100
        else:
            is_solved = 10 * total < 9 * episode
        if is_solved and solved < 0:
            solved = episode
        if episode >= 100 and sum(last) < 10 and strictly_solved < 0:
            strictly_solved = episode
    return solved, strictly_solved


def follow(bad, stochastic):
    """Returns the same as the script counts it."""

    def count(episodes, is_bad):
        return boot.count_episode(episodes, is_bad, stochastic), None

    episodes, _ = jax.lax.scan(count, boot.no_episodes(), jnp.array(bad, bool))
    assert (episodes.completed, episodes.bad) == (len(bad), sum(bad))
    return int(episodes.solved_at), int(episodes.strictly_solved_at)


@pytest.mark.parametrize(
    "bad, stochastic, expected",
    [
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
    ],
)
def test_solved_rules(bad, stochastic, expected):
    """By hand, from both sides of each threshold."""
    assert follow(bad, stochastic) == expected
    assert judged(bad, stochastic) == follow(bad, stochastic)


def bad_episodes(state):
    """Which episodes chose to go left on the diagonal, from the seed's experience and its action map."""
    past, action_map = experience(state), np.asarray(state.env_state.action_map)
    size = len(action_map)
    row, column = np.divmod(past.obs, size)
    left = past.action != action_map[row, column]
    episodes = int(state.episodes.completed)
    return (left & (row == column))[: episodes * size].reshape(episodes, size).any(axis=1)


# -------------------- Environment


def assert_gymnaxs(states):
    """Checks each seed's map and steps against gymnax."""
    for seed in range(3):
        assert_seed_is_gymnaxs(seed, one(states, seed))


def assert_seed_is_gymnaxs(seed, state):
    """The map is what gymnax draws from the seed's key; all steps are what gymnax does with it."""
    past = experience(state)
    size = len(state.env_state.action_map)
    map_key = jax.random.split(boot.random_key(seed, 0), 5)[-1]
    env, params = gymnax.make("DeepSea-bsuite", size=size, action_mapping_key=map_key)
    np.testing.assert_array_equal(state.env_state.action_map, env.action_mapping)

    def replay(sea, action):
        _, new, reward, terminated, _, info = env.step(map_key, sea, action, params)
        cell = sea.row * size + sea.column
        return new, (cell, reward, info["final_observation"].argmax(), terminated)

    first = env.reset(map_key, params)[1]
    sea, found = jax.jit(partial(jax.lax.scan, replay))(first, past.action)
    expected = past.obs, past.reward, past.next_obs, past.terminated
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.all(past.terminated == (np.arange(1, len(past.obs) + 1) % size == 0))
    assert state.episodes.bad == sea.total_bad_episodes == bad_episodes(state).sum()


def test_action_maps_are_gymnaxs(played):
    """They differ between seeds, and each seed's steps are those of gymnax with that map; below, with exploration."""
    maps = played.env_state.action_map
    assert len(np.unique(maps.reshape(3, -1), axis=0)) == 3 and set(maps.ravel()) == {0, 1}
    assert_gymnaxs(played)


def test_remapped_actions_are_gymnaxs_own_map():
    """In lockstep, with the same keys, stochastic: make_env with a map, and gymnax with that map."""
    args = boot.complete(boot.Args(size=5, stochastic=True))
    env = boot.make_env(args)
    map_key = jax.random.key(7)
    own, params = gymnax.make("DeepSea-bsuite", size=5, action_mapping_key=map_key)
    params = params.replace(deterministic=False)
    assert params.max_steps_in_episode == 5

    def lockstep(states, key):
        state, own_state = states
        action = jax.random.randint(key, (), 0, 2)
        stepped = env.step(key, state, action)
        one_hot, own_state, reward, terminated, truncated, info = own.step(
            key, own_state, action, params
        )
        seen = dict(
            obs=stepped.obs,
            next_obs=stepped.next_obs,
            reward=stepped.reward,
            terminated=stepped.terminated,
            ended=stepped.terminated,
            bad=stepped.env_state.sea.env_state.total_bad_episodes,
        )
        expected = dict(
            obs=one_hot.argmax(),
            next_obs=info["final_observation"].argmax(),
            reward=reward,
            terminated=terminated,
            ended=terminated | truncated,
            bad=own_state.total_bad_episodes,
        )
        return (stepped.env_state, own_state), (seen, expected, stepped.is_bad)

    _, first = env.reset(jax.random.key(0), map_key)
    np.testing.assert_array_equal(first.action_map, own.action_mapping)
    start = first, own.reset(jax.random.key(0), params)[1]
    keys = jax.random.split(jax.random.key(1), 300)
    seen, expected, is_bad = jax.jit(lambda: jax.lax.scan(lockstep, start, keys)[1])()
    assert tree_equal(seen, expected)
    np.testing.assert_array_equal(np.cumsum(is_bad), seen["bad"])
    assert len(np.unique(seen["bad"])) > 10  # bad episodes are counted,
    assert seen["reward"].std() > 0.1  # and rewards are noisy


def test_stochastic_moves(stochastic):
    """Of the moves to the right, 1 in `size` fails; the reward is noisy only at the two ends of the last row."""
    past = [one(one(stochastic.replay, seed), (slice(None), 0)) for seed in (0, 1)]
    fails = moves = 0
    for seed, p in enumerate(past):
        row, column = np.divmod(p.obs, 4)
        goes_right = stochastic.env_state.action_map[seed][row, column]
        right = (p.action == goes_right) & ~p.terminated & (column < 3)
        fails, moves = fails + (p.next_obs % 4 == column)[right].sum(), moves + right.sum()
        noisy = (row == 3) & np.isin(column, (0, 3))
        assert p.reward[noisy].std() > 0.5
        assert set(np.round(p.reward[~noisy], 6)) <= {0, np.float32(-0.0025)}
    assert fails / moves == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / moves))
    # and of the two other arguments
    assert past[0].mask.mean() == pytest.approx(0.9, abs=4 * 0.3 / np.sqrt(1770))
    assert not past[0].prior.any() and not past[0].next_prior.any()


# -------------------- Networks, priors and masks


def plain_values(phi, theta, cells):
    """A member's network, written out: the two hidden layers of its MLP on one-hot cells."""
    hidden = np.maximum(np.eye(len(phi["kernel"]))[cells] @ phi["kernel"] + phi["bias"], 0)
    hidden = np.maximum(hidden @ theta["Dense_0"]["kernel"] + theta["Dense_0"]["bias"], 0)
    return hidden @ theta["Dense_1"]["kernel"] + theta["Dense_1"]["bias"]


def test_initial_weights_are_sonnets():
    """Normal with standard deviation 1 / sqrt(inputs) cut off at two of these, so that 0.88 of it remains; biases 0."""
    phi = boot.Perception(num_cells=100).init(jax.random.key(0), jnp.arange(3))["params"]
    theta = boot.Control(num_actions=2).init(jax.random.key(1), jnp.ones(50))["params"]
    for layer, shape in (
        (phi, (100, 50)),
        (theta["Dense_0"], (50, 50)),
        (theta["Dense_1"], (50, 2)),
    ):
        weights = np.asarray(layer["kernel"]) * np.sqrt(shape[0])
        assert weights.shape == shape and not layer["bias"].any() and 1.6 < abs(weights).max() <= 2
        assert weights.std() == pytest.approx(0.8796, rel=4 / np.sqrt(2 * weights.size))


def test_members_differ(played):
    """Their networks, their priors, their networks from their priors, and their masks, half of which are 1; so do
    seeds."""
    own, prior = players(played.params)
    for both in zip(jax.tree.leaves(own), jax.tree.leaves(prior), strict=True):
        if np.any(both[0]):  # biases are 0
            assert len(np.unique(np.concatenate(both).reshape(18, -1), axis=0)) == 18
    masks = np.concatenate(
        [experience(one(played, seed)).mask for seed in range(3)], axis=1
    )  # [steps, 3 x 3]
    assert len(np.unique(masks, axis=1).T) == 9
    np.testing.assert_allclose(masks.mean(axis=0), 0.5, atol=4 * 0.5 / np.sqrt(320))


def test_one_member_acts_through_an_episode(played):
    """Without exploration every episode is what one member's values, prior included, do greedily; all get their turn,
    and what they would do without their priors is something else."""
    state = one(played, 0)
    past, action_map = experience(state), state.env_state.action_map

    def rollout(member, scale):
        own, prior = players(one(state.params, member))
        column, actions = 0, []
        for row in range(8):
            cell = 8 * row + column
            q = plain_values(*own, cell) + scale * plain_values(*prior, cell)
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
        _, prior = players(one(state.params, member))
        for found, cells in ((past.prior, past.obs), (past.next_prior, past.next_obs)):
            expected = 3 * plain_values(*prior, cells)
            np.testing.assert_allclose(found[:, member], expected, rtol=1e-4, atol=1e-5)


def linear_networks():
    """z = params . s, elementwise; Q = z @ params."""
    return boot.Players(
        SimpleNamespace(apply=lambda variables, x: x * variables["params"]),
        SimpleNamespace(apply=lambda variables, z: z @ variables["params"]),
    )


def by_hand(mask):
    """Returns params and a batch: errors 1, 2, 6, 100.

    phi = 1, theta = ((1, 0), (0, 2)), observations (s, 1), so that the network says (s, 2); priors
    (1, -1); actions 0, 0, 1, 1; targets 6, 8, 7, 101.
    """
    batch = boot.Batch(
        obs=jnp.array([[4.0, 1], [5, 1], [0, 1], [0, 1]]),
        prior=jnp.array([[1.0, -1]] * 4),
        action=jnp.array([0, 0, 1, 1]),
        td_target=jnp.array([6.0, 8, 7, 101]),
        mask=jnp.array(mask, bool),
    )
    return boot.Players(jnp.array(1.0), jnp.array([[1.0, 0], [0, 2]])), batch


def loss_of(loss, params, batch):
    """Returns a loss of the Bellman errors of a batch."""
    return loss(boot.bellman_error(linear_networks(), params, batch), batch.mask)


def test_masked_losses_by_hand():
    """Of errors 1, 2, 6 the mean is 3; the masked 100 is not seen."""
    params, batch = by_hand([1, 1, 1, 0])
    delta = boot.bellman_error(linear_networks(), params, batch)
    np.testing.assert_allclose(delta, [1, 2, 6, 100])
    variance = (4 + 1 + 9) / 3
    np.testing.assert_allclose(boot.follower_loss(delta, batch.mask), variance, rtol=1e-6)
    mean_square = (1 + 4 + 36) / 3
    np.testing.assert_allclose(boot.leader_loss(delta, batch.mask), mean_square, rtol=1e-6)


@pytest.mark.parametrize("loss", [boot.follower_loss, boot.leader_loss])
def test_zero_mask_gives_zero_gradient(loss):
    """Exactly 0, loss and gradient; one transition more, and they are there (of the variance: two)."""
    for mask, is_zero in (([0, 0, 0, 0], True), ([1, 0, 0, 1], False)):
        params, batch = by_hand(mask)
        value, gradient = jax.value_and_grad(partial(loss_of, loss))(params, batch)
        for leaf in (value, *gradient):
            assert np.any(leaf) != is_zero


def test_a_silent_broadcast_is_refused():
    """Targets [batch, 1], or masks of all members, would train on [batch, batch] numbers."""
    params, batch = by_hand([1, 1, 1, 1])
    wrong_target = batch._replace(td_target=batch.td_target[:, None])
    wrong_mask = batch._replace(mask=jnp.ones((4, 3)))
    for wrong in (wrong_target, wrong_mask):
        with pytest.raises(AssertionError):
            loss_of(boot.leader_loss, params, wrong)


def test_target_by_hand():
    """Target values (1, 2) * 2 @ ((1, 0), (0.5, 2)) = (4, 8) and priors (6, 1): the best is 10.

    Y = 1.5 + 0.9 x 10, and 1.5 where the episode has ended; with a prior of 0.25 and a network that
    says 2 the Bellman errors are 2.25 less.
    """
    target = boot.Players(jnp.array(2.0), jnp.array([[1.0, 0], [0.5, 2]]))
    transition = boot.Transition(
        obs=jnp.array([[0.0, 1]] * 2),
        action=jnp.array([1, 1]),
        reward=jnp.full(2, 1.5),
        next_obs=jnp.array([[1.0, 2]] * 2),
        terminated=jnp.array([False, True]),
        prior=jnp.array([[50.0, 0.25]] * 2),
        next_prior=jnp.array([[6.0, 1]] * 2),
        mask=None,
    )
    td_target = boot.compute_td_target(linear_networks(), target, transition, 0.9)
    np.testing.assert_allclose(td_target, [1.5 + 9, 1.5], rtol=1e-6)
    params, batch = by_hand([1, 1])
    batch = boot.Batch(transition.obs, transition.prior, transition.action, td_target, batch.mask)
    delta = boot.bellman_error(linear_networks(), params, batch)
    np.testing.assert_allclose(delta, [1.5 + 9 - 2.25, 1.5 - 2.25], rtol=1e-6)


def test_priors_get_no_gradient():
    """Also where the target is computed from them inside the loss; the network beside gets some."""
    params, batch = by_hand([1, 1, 1, 1])

    def objective(loss, params, prior, next_prior):
        transition = boot.Transition(
            obs=batch.obs,
            action=batch.action,
            reward=jnp.arange(4.0),
            next_obs=batch.obs,
            terminated=jnp.zeros(4, bool),
            prior=prior,
            next_prior=next_prior,
            mask=batch.mask,
        )
        target = by_hand(batch.mask)[0]
        td_target = boot.compute_td_target(linear_networks(), target, transition, 0.9)
        return loss_of(loss, params, batch._replace(prior=prior, td_target=td_target))

    for loss in (boot.follower_loss, boot.leader_loss):
        gradient = jax.grad(partial(objective, loss), argnums=(0, 1, 2))
        own, prior, next_prior = gradient(params, jnp.ones((4, 2)), jnp.ones((4, 2)))
        assert not prior.any() and not next_prior.any()
        assert all(leaf.any() for leaf in own)


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
        return jax.tree.map(
            lambda p, m, v: (
                p
                - self.rate
                * (m / (1 - 0.9**self.count))
                / (np.sqrt(v / (1 - 0.999**self.count)) + 1e-8)
            ),
            params,
            self.first,
            self.second,
        )


def reference_value(network, cells):
    """Returns what a network of two hidden layers says of cells of a sea of depth 4."""
    phi, theta = network
    hidden = jax.nn.relu(jax.nn.one_hot(cells, 16) @ phi["kernel"] + phi["bias"])
    hidden = jax.nn.relu(hidden @ theta["Dense_0"]["kernel"] + theta["Dense_0"]["bias"])
    return hidden @ theta["Dense_1"]["kernel"] + theta["Dense_1"]["bias"]


def reference_loss(phi, theta, kind, target, prior, past, mask, rows):
    """Returns the loss of these rows of the past for a member, its values with the prior inside."""

    def values(network, cells):
        return reference_value(network, cells) + 3.0 * reference_value(prior, cells)

    p = one(past, rows)
    m = mask[rows].astype(float)
    y = p.reward + 0.99 * np.where(p.terminated, 0, values(target, p.next_obs).max(axis=1))
    d = y - values((phi, theta), p.obs)[np.arange(len(rows)), p.action]
    mean_square = (m * d**2).sum() / max(m.sum(), 1)
    if kind == "msbe":
        return mean_square
    return mean_square - ((m * d).sum() / max(m.sum(), 1)) ** 2


def reference_member(args, member, past, mask, drawn):
    """Returns a member's phi and theta after these updates by a plain loop with its own Adams."""
    (phi, theta), prior = players(member)
    target = phi, theta
    follower = Adam(phi, args.follower_learning_rate or 0.005)
    leader = Adam(theta, 0.005)
    slope_of_phi = jax.grad(reference_loss, argnums=0)
    slope_of_theta = jax.grad(reference_loss, argnums=1)
    for t, rows in enumerate(drawn):
        rest = target, prior, past, mask
        if args.scorer:
            phi = follower.step(phi, slope_of_phi(phi, theta, args.follower_loss, *rest, rows[0]))
            theta = leader.step(theta, slope_of_theta(phi, theta, "msbe", *rest, rows[1]))
        else:
            slopes = [
                slope(phi, theta, "msbe", *rest, rows[0])
                for slope in (slope_of_phi, slope_of_theta)
            ]
            phi = follower.step(phi, slopes[0])
            theta = leader.step(theta, slopes[1])
        if t % 2:
            target = phi, theta
    return phi, theta


START = {}  # the first variant's


@pytest.mark.parametrize(
    "variant",
    [{}, dict(scorer=True), dict(scorer=True, follower_loss="msbe")],
    ids=["baseline", "scorer", "msbe"],
)
def test_chunk_of_updates_against_a_reference(variant, monkeypatch):
    """Eight updates of one chunk, targets copied every two, are for each member a plain loop's.

    Each has its prior, its mask and its Adam. No prior has moved, and all variants start alike.
    """
    if variant:
        variant = variant | dict(follower_learning_rate=0.02)
    args, training = make_train(
        target_update_interval=2,
        learning_rate=0.005,
        batch_size=6,
        total_timesteps=16 + 2000,
        buffer_size=24,
        **variant,
    )
    assert training.timesteps[0] == 16 + 8
    drawn, randint = [], jax.random.randint

    def watch(key, shape, low, high, *rest, **options):
        result = randint(key, shape, low, high, *rest, **options)
        if len(shape) == 3:
            drawn.append(np.asarray(result))
        return result

    monkeypatch.setattr(jax.random, "randint", watch)
    before = training.init(jnp.uint32(5))
    alike = {name: getattr(before, name) for name in ("params", "env_state", "replay", "active")}
    assert tree_equal(START.setdefault("alike", alike), alike)
    after, _ = training.train_chunk(before, 0)
    # [updates, batches, batch], each drawn a step before
    drawn = np.concatenate([drawn[0][-1:], drawn[1][:-1]])
    assert drawn.shape == (8, 2 if variant else 1, 6)
    assert len(np.unique(drawn.reshape(-1, 6), axis=0)) == drawn[..., 0].size  # none drawn twice
    newest = drawn.max(axis=(1, 2))
    assert all(newest < 16 + np.arange(8)) and any(newest == 15 + np.arange(8))
    past = experience(after)
    for index in range(3):
        member = jax.tree.map(np.asarray, one(before.params, index))
        expected = reference_member(args, member, past, past.mask[:, index], drawn)
        found = tuple(one(boot.learned(after.params), index))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5), found, expected)
    assert tree_equal(after.target, boot.learned(after.params))
    assert not tree_equal(after.target, before.target)
    assert tree_equal(after.params.prior, before.params.prior)


def test_acts_with_the_parameters_before_the_update():
    """In chunks of one update, without exploration: the stored action is the active's greedy one."""
    args, training = make_train(
        scorer=True,
        follower_learning_rate=0.3,
        learning_rate=0.3,
        target_update_interval=1,
        epsilon_scale=0.0,
    )
    state = jax.jit(training.init)(jnp.uint32(0))
    train_chunk, changed = jax.jit(training.train_chunk), 0
    for chunk, timestep in enumerate(training.timesteps[:60]):
        before = state
        state, _ = train_chunk(state, chunk)
        greedy = []
        for params in (before.params, state.params):
            own, prior = players(one(params, before.active))
            q = plain_values(*own, before.obs) + 3.0 * plain_values(*prior, before.obs)
            greedy.append(q.argmax())
        assert state.replay.action[(timestep - 1) % args.buffer_size, 0] == greedy[0]
        changed += greedy[0] != greedy[1]
    assert set(np.diff(training.timesteps)) == {1} and changed > 2


@pytest.mark.parametrize("period, chunk_steps", [(1, 4), (3, 3), (4, 4), (300, 300)])
def test_chunks_are_whole_target_periods(period, chunk_steps):
    """1,016 steps of which 16 without learning make 250 chunks of 4, or as the targets need."""
    _, training = make_train(target_update_interval=period, total_timesteps=1016)
    timesteps = training.timesteps
    assert training.chunks_per_point == 1 and training.first_timestep == 16
    assert timesteps[0] == 16 + chunk_steps and set(np.diff(timesteps)) == {chunk_steps}
    assert timesteps[-2] < 1016 <= timesteps[-1]
    _, never = make_train(target_update_interval=10**9, total_timesteps=1016)
    assert never.timesteps.tolist() == [16 + 1016]


def test_epsilon():
    """10 / 11 before learning, then 10 / (10 + t), t = 1 + updates: half of the random actions differ from the greedy
    one. 300 seeds of one member that hardly learns; the steps of each ten are taken together."""
    _, training = make_train(
        num_members=1,
        size=2,
        learning_rate=1e-30,
        batch_size=1,
        learning_starts=10,
        total_timesteps=10_010,
        buffer_size=100,
    )
    assert training.timesteps[0] == 50

    def play(seed):
        return training.train_chunk(training.init(seed), 0)[0]

    states = jax.jit(jax.vmap(play))(jnp.arange(300, dtype=jnp.uint32))
    states, others = jax.tree.map(np.asarray, states), np.zeros((300, 50))
    for seed in range(300):
        past = experience(one(states, seed))
        own, prior = players(one(one(states, seed).params, 0))
        q = plain_values(*own, past.obs) + 3 * plain_values(*prior, past.obs)
        others[seed] = past.action != q.argmax(axis=1)
    expected = 0.5 * 10 / (10 + np.maximum(1, np.arange(50) - 10 + 2))
    np.testing.assert_allclose(
        others.mean(axis=0).reshape(5, 10).mean(axis=1),
        expected.reshape(5, 10).mean(axis=1),
        atol=4 * 0.5 / np.sqrt(3000),
    )


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
    _, training = make_train(
        num_members=10,
        hidden_dim=20,
        batch_size=32,
        buffer_size=1100,
        total_timesteps=1000,
        learning_starts=32,
        **variant,
    )
    timesteps = training.timesteps

    def train(seed):
        return jax.lax.scan(training.train_chunk, training.init(seed), jnp.arange(len(timesteps)))

    states, curves = jax.jit(jax.vmap(train))(jnp.arange(3, dtype=jnp.uint32))
    states, curves = jax.tree.map(np.asarray, (states, curves))
    assert_gymnaxs(states)
    for seed in range(3):
        state, curve = one(states, seed), one(curves, seed)
        bad = bad_episodes(state)
        solved, strictly_solved = judged(bad, False)
        assert (state.episodes.completed, state.episodes.bad) == (len(bad), bad.sum())
        assert (state.episodes.solved_at, state.episodes.strictly_solved_at) == (
            solved,
            strictly_solved,
        )
        assert 1 <= solved <= 60 and 100 <= strictly_solved <= 200
        assert curve["returns"][-1] == pytest.approx(0.99, abs=1e-5)
        assert set(curve["finished"]) == {1}
        completed = timesteps // 4  # whole episodes by each point
        expected = dict(
            solved_episode=np.where(completed >= solved, solved, -1),
            strictly_solved_episode=np.where(completed >= strictly_solved, strictly_solved, -1),
            episodes=completed,
            bad_episodes=np.cumsum(bad)[completed - 1],
        )
        assert curve.keys() == expected.keys() | {"returns", "finished"}
        for name in expected:
            np.testing.assert_array_equal(curve[name], expected[name], err_msg=name)


# -------------------- Runs

TINY = "--size 4 --num-members 3 --hidden-dim 8 --batch-size 8 --buffer-size 400 --learning-starts 16".split()
RUN = [*TINY, "--scorer", "--total-timesteps", "416", "--num-seeds", "2"]


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs main with these flags, interrupted after so many chunks; its exit code and what it printed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def main(*flags, interrupt=None):
        class Bar(tqdm.tqdm):
            def set_postfix_str(self, *_, **options):
                nonlocal interrupt
                if interrupt is None:
                    return
                interrupt -= 1
                if interrupt == 0:  # to the main thread, which waits for the one that trains
                    os.kill(os.getpid(), signal.SIGINT)

        capsys.readouterr()
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        monkeypatch.setattr(boot, "tqdm", Bar)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            boot.main()
        return end.value.code, *capsys.readouterr()

    yield main
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def only(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def test_record_model_and_resume(main, folder):
    """The record and the model are what the readers expect; a run stopped by Ctrl-C and resumed is bit for bit it."""
    assert main(*RUN, "--save-model", "--runs-dir", folder / "whole")[0] == 0
    run = only(folder / "whole")
    variant = "scorer-num-members-3-buffer-size-400-batch-size-8-learning-starts-16-hidden-dim-8"
    name = rf"scorer_bootstrapped_dqn__DeepSea-4__{variant}__s0__\d{{8}}-\d{{6}}-\d+"
    assert re.fullmatch(name, run.name)
    record = results(run)
    meta = json.loads(str(record["meta"]))
    assert record.keys() == {
        "timesteps",
        "seeds",
        "meta",
        "returns",
        "episodes",
        "bad_episodes",
        "solved_episode",
        "strictly_solved_episode",
    }
    assert record["solved_episode"].shape == (2, 100) and record["timesteps"].tolist() == list(
        range(20, 417, 4)
    )
    assert meta["args"].keys() == {field.name for field in fields(boot.Args)} and meta["complete"]
    assert meta["args"]["env"] == "DeepSea-4" and meta["args"]["follower_loss"] == "variance"
    assert meta["args"]["follower_learning_rate"] == 1e-3
    names = [
        f"{part}/{layer}/{leaf}"
        for part in ("control", "prior/control")
        for layer in ("Dense_0", "Dense_1")
        for leaf in ("kernel", "bias")
    ]
    names += [
        f"{part}/{leaf}"
        for part in ("perception", "prior/perception")
        for leaf in ("kernel", "bias")
    ]
    model = load_file(run / "model.safetensors")
    assert model.keys() == {*names} and model["prior/perception/kernel"].shape == (2, 3, 16, 8)
    code, out, _ = main(
        *RUN, "--checkpoint-every-minutes", 60, "--runs-dir", folder / "stopped", interrupt=40
    )
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

    assert (
        main(
            *RUN,
            "--num-seeds",
            1,
            "--follower-learning-rate",
            2e-3,
            1e-2,
            "--runs-dir",
            folder / "sweep",
        )[0]
        == 0
    )
    runs = sorted(folder.glob("sweep/*")) + sorted(folder.glob("whole/*"))
    shapes = [records.read_run(run).curves["returns"].shape for run in runs]
    assert shapes == [(1, 100), (1, 100), (2, 100)]
    for run, rate in zip(runs[:2], ("0.002", "0.01"), strict=True):
        assert run.name.split("__")[2].endswith(f"-follower-learning-rate-{rate}")
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
        args = dict(
            env="DeepSea-4", size=4, stochastic=False, scorer=name == "scorer", total_timesteps=400
        )
        values = dict(
            solved_episode=firsts[name],
            strictly_solved_episode=[-1, -1, -1, 100, -1],
            returns=[0] * 5,
            episodes=[100] * 5,
        )
        arrays = {n: np.array([[-1, x] for x in values[n]], float) for n in curves}
        known = dict(
            schema=1,
            script="scorer_bootstrapped_dqn",
            args=args,
            complete=True,
            device="cpu",
            num_devices=1,
            seconds=1.0,
        )
        meta = known | meta
        (tmp_path / name).mkdir(exist_ok=True)
        np.savez(
            tmp_path / name / "results.npz",
            timesteps=[200, 400],
            seeds=range(5),
            meta=json.dumps(meta),
            **arrays,
        )
        return tmp_path / name

    runs = [write("baseline"), write("scorer")]
    deep_sea.main(runs, out=tmp_path / "figure.png")
    lines = [
        line.split(" | ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| DeepSea-4")
    ]
    assert [line[2] for line in lines] == ["Baseline", "SCORER"] and lines[0][1] == "100"
    assert re.fullmatch(r"50 \[\d+, (60|> 100)\] \(4/5\)", lines[0][3]) and lines[1][3].startswith(
        "5 [3, 7] (5/5)"
    )
    assert re.fullmatch(r"> 100 \[100, > 100\] \(1/5\)", lines[0][4])
    assert lines[1][5] == "fastest |" and float(lines[0][5].split()[0]) < 0.05
    np.testing.assert_array_equal(
        deep_sea.solved_by(np.array([3, np.inf]), np.array([2, 3, 400])), [[0, 1, 1], [0, 0, 0]]
    )
    with pytest.raises(SystemExit) as end:
        deep_sea.main([write("scorer", names[2:])], out=tmp_path / "figure.png")
    assert end.value.code == 2 and "has no solved_episode" in capsys.readouterr().err


BAD = [
    ("--size 1", ["--size 1"]),
    ("--size 0", ["--size"]),
    ("--num-members 0", ["--num-members"]),
    ("--prior-scale -1", ["--prior-scale"]),
    ("--mask-probability 0", ["--mask-probability"]),
    ("--mask-probability 1.5", ["--mask-probability"]),
    ("--buffer-size 127", ["--buffer-size", "128"]),
    ("--learning-starts 0", ["--learning-starts"]),
    ("--total-timesteps 100", ["--learning-starts"]),
    ("--follower-loss msbe", ["--follower-loss", "--scorer"]),
    ("--follower-learning-rate 1e-3", ["--follower-learning-rate", "--scorer"]),
    ("--scorer --follower-learning-rate 1e-3 1e-3", ["--follower-learning-rate", "different"]),
    ("--scorer --follower-learning-rate nan", ["--follower-learning-rate"]),
    ("--gamma 2", ["--gamma"]),
    ("--target-update-interval 0", ["--target-update-interval"]),
    ("--seed -1", ["--seed"]),
    ("--epsilon-scale -1", ["--epsilon-scale"]),
    ("--num-seeds 0", ["--num-seeds"]),
    ("--size -3", ["--size"]),
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
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, env=env, timeout=60
    )
    out, source = re.sub(r"[\s│]+", " ", done.stdout), SCRIPT.read_text()
    for field in fields(boot.Args):
        comment = re.search(rf"(?m)^    {field.name}: .*  # (.+)$", source)
        shown = f"--{field.name.replace('_', '-')}" in out and comment[1] in out
        assert shown == (field.name != "env"), field.name

"""scorer_r2d2.py: the recurrent function, burn-in, targets, masks, priorities, navix's episodes, memory, and a run."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scorer_r2d2 as r2d2
from helpers import tree_equal

SCRIPT = Path(r2d2.__file__)
SMALL = dict(num_envs=4, buffer_size=800, batch_size=4, sequence_length=8, burn_in=3, n_step=3, learning_starts=80,
             hidden_dim=8, update_interval=8, total_timesteps=640, target_update_interval=536)  # 67 blocks of 1 update
pytestmark = pytest.mark.usefixtures("quick_compilation")


@flax.struct.dataclass
class Timestep:
    """The fields of navix's timestep that the script uses, and a cue."""
    t: jax.Array
    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    step_type: jax.Array
    key: jax.Array
    cue: jax.Array
    info: dict


class Cue:
    """navix's interface: a cue, 1 or 2, is shown at the first of `length` steps only, and the right action at the last
    (the cue less 1) pays 1. With `timeouts`, episodes with cue 1 end by time. Seen are the cue as one-hot, and t."""

    action_space = SimpleNamespace(maximum=1)

    def __init__(self, length=4, timeouts=True):
        self.length, self.timeouts = length, timeouts

    def reset(self, key):
        key, drawn = jax.random.split(key)
        cue = jax.random.randint(drawn, (), 1, 3)
        obs = jnp.stack([cue == 1, cue == 2, False]).astype(jnp.uint8)
        return Timestep(jnp.int32(0), obs, jnp.int32(0), jnp.float32(0), jnp.int32(0), key, cue,
                        {"return": jnp.float32(0)})

    def step(self, now, action):
        t = now.t + 1
        done = t == self.length
        reward = jnp.where(done & (action == now.cue - 1), 1.0, 0.0)
        kind = jnp.where(done, jnp.where(self.timeouts & (now.cue == 1), 1, 2), 0).astype(jnp.int32)
        new = now.replace(t=t, observation=jnp.stack([0, 0, t]).astype(jnp.uint8), action=action.astype(jnp.int32),
                          reward=reward, step_type=kind, info={"return": now.info["return"] + reward})
        return jax.tree.map(lambda a, b: jnp.where(now.step_type > 0, a, b), self.reset(now.key), new)


def resolved(**args):
    """Arguments as make_train gets them."""
    return r2d2.resolve(r2d2.Args(**SMALL | args))[0]


def make_train(env=None, **args):
    """The script's make_train on the stand-in, with the follower's rate that args has in init."""
    args = resolved(**args)
    init, *others = r2d2.make_train(args, env or Cue(), None)
    return lambda seed: init(seed, jnp.float32(args.follower_learning_rate or 0.0)), *others


@pytest.fixture(scope="module")
def usual():
    """SCORER's and the baseline's init, compiled once for all: the state before learning, of seed 0 or another."""
    inits = {scorer: jax.jit(make_train(scorer=scorer)[0]) for scorer in (True, False)}
    return lambda scorer=True, seed=0: inits[scorer](jnp.uint32(seed))


def time_major(replay, steps):
    """The first steps in the replay [steps, num_envs, ...]."""
    return jax.tree.map(lambda x: np.swapaxes(x[:, :steps], 0, 1), replay.experience)


def networks_of(num_actions=2, **args):
    args = resolved(**args)
    return r2d2.Players(r2d2.Perception(args), r2d2.Control(args, num_actions))


def game(networks, time=8, batch=5, players=2, seed=0):
    """Random parameters and a batch [players, time, batch, ...] with targets; dummy steps here and there."""
    rng = np.random.default_rng(seed)
    shape = (players, time, batch)
    obs = rng.normal(size=(*shape, 3)).astype(np.float32)
    last = rng.random(shape) < 0.2
    mask = ~last
    mask[:, : networks.perception.args.burn_in] = mask[:, -1] = False
    carry = r2d2.l2_norm(rng.normal(size=(*shape, networks.perception.args.hidden_dim)).astype(np.float32))
    action, reward = rng.integers(2, size=shape), rng.normal(size=shape).astype(np.float32)
    batch = r2d2.Step(obs, action, reward, np.zeros(shape, bool), last, np.asarray(carry), mask,
                      rng.uniform(0.3, 1, (players, batch)).astype(np.float32))
    keys = jax.random.split(jax.random.key(seed))
    phi = networks.perception.init(keys[0], batch.carry[0, 0], obs[0], last[0])["params"]
    theta = networks.control.init(keys[1], batch.carry[0, 0])["params"]
    theta["Dense_1"]["kernel"] *= 100.0  # so that both players have something to gain
    return r2d2.Players(phi, theta), batch, rng.normal(size=shape).astype(np.float32)


def one(tree, player=0):
    return jax.tree.map(lambda x: x[player], tree)


# -------------------- The recurrent function

def test_acting_and_learning_agree_across_episode_ends():
    """One step at a time and a whole sequence give the same latents and hidden states; after a `last` observation,
    which still sees the old hidden state, nothing is left of it."""
    networks = networks_of()
    params, batch, _ = game(networks, time=12)
    batch = one(batch)
    batch.last[:] = False
    batch.last[5, :3] = batch.last[8, 1] = True
    apply = jax.jit(partial(networks.perception.apply, {"params": params.perception}))
    end, z = apply(batch.carry[0], batch.obs, batch.last)
    carry = batch.carry[0]
    for t in range(12):
        carry, now = apply(carry, batch.obs[t : t + 1], batch.last[t : t + 1])
        np.testing.assert_allclose(now[0], z[t], atol=1e-6)
        np.testing.assert_allclose(carry, np.where(batch.last[t][:, None], 0, z[t]), atol=1e-6)
    np.testing.assert_allclose(carry, end, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(z, axis=-1), 1, atol=1e-5)
    other = apply(-batch.carry[0], batch.obs, batch.last)[1]
    changed = np.abs(other - z).max(axis=-1) > 1e-7  # [time, batch]
    assert changed[:6].all() and not changed[6:, :3].any() and changed[6:, 3:].all()


def test_replay_holds_the_hidden_states_of_acting(usual):
    """From the hidden state stored with a step, the learner's pass over the replay finds the ones stored later on."""
    state = usual()
    rows = time_major(state.replay, 20)
    z = r2d2.latents(networks_of(), state.params.perception, rows)
    stored = np.concatenate([rows.carry[1:], state.carry[None]])
    np.testing.assert_allclose(stored, np.where(rows.last[..., None], 0, z), atol=1e-6)
    assert rows.last.sum() == 16 and not rows.carry[0].any() and rows.obs.dtype == np.uint8  # 4 + 1 steps per episode


def test_gru_is_flaxs():
    """With the weights put together, flax's GRUCell gives the same output, before it is normalised."""
    networks = networks_of()
    params, batch, _ = game(networks)
    phi, carry, obs = params.perception, batch.carry[0, 0], batch.obs[0, :1]
    phi["recurrent_bias"] = jnp.linspace(-1, 1, 8)
    cut = partial(np.split, indices_or_sections=3, axis=-1)
    cell = {f"i{gate}": dict(kernel=kernel, bias=bias) for gate, kernel, bias in zip(
        "rzn", cut(phi["inputs"]["kernel"]), cut(phi["inputs"]["bias"]))}
    cell |= {f"h{gate}": dict(kernel=kernel) for gate, kernel in zip("rzn", cut(phi["recurrent"]))}
    cell["hn"]["bias"] = phi["recurrent_bias"]
    x = obs[0] / np.linalg.norm(obs[0], axis=-1, keepdims=True)
    x = np.tanh(x @ phi["Dense_0"]["kernel"] + phi["Dense_0"]["bias"])
    expected, _ = nn.GRUCell(8).apply({"params": cell}, carry, x)
    z = networks.perception.apply({"params": phi}, carry, obs, np.zeros((1, 5), bool))[1][0]
    np.testing.assert_allclose(z, expected / np.linalg.norm(expected, axis=-1, keepdims=True), atol=1e-5)
    for matrix in cut(phi["recurrent"]):
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(8), atol=1e-5)


def test_l2_norm():
    """(3, 4) becomes (0.6, 0.8); zeros stay, and have a gradient that is no NaN."""
    np.testing.assert_allclose(r2d2.l2_norm(jnp.array([[3.0, 4], [0, 0]])), [[0.6, 0.8], [0, 0]], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: r2d2.l2_norm(x).sum())(jnp.zeros(2))).all()


def test_no_gradient_through_burn_in():
    """The last latents depend on observations in the burn-in and on the stored hidden state, but no gradient does; and
    the parameters' gradient is that of the window alone, from the hidden state that the burn-in leaves."""
    networks = networks_of()
    params, batch, target = game(networks)
    batch, target, phi = one(batch), target[0], params.perception
    batch.last[:3] = False

    def loss(phi, obs, carry, networks=networks, start=0):
        sample = jax.tree.map(lambda x: x[start:], batch._replace(obs=obs, weight=None))
        sample = sample._replace(carry=carry[None], weight=batch.weight)
        return r2d2.recurrent_follower_loss(phi, params.control, networks, sample, target[start:])[0]

    by_phi, by_obs, by_carry = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(phi, batch.obs, batch.carry[0])
    assert not by_obs[:3].any() and not by_carry.any() and by_obs[3:7].any(axis=(1, 2)).all()
    usual, other = batch.obs, batch.obs.copy()
    other[0] = 1.0
    value = jax.jit(loss)
    values = [value(phi, usual, batch.carry[0]), value(phi, other, batch.carry[0]), value(phi, usual, -batch.carry[0])]
    assert abs(np.diff(values)).min() > 1e-6
    carry, _ = networks.perception.apply({"params": phi}, batch.carry[0], batch.obs[:3], batch.last[:3])
    free = networks_of(burn_in=0)
    alone = jax.jit(jax.grad(partial(loss, networks=free, start=3)))(phi, batch.obs, carry)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), by_phi, alone)
    through = jax.jit(jax.grad(partial(loss, networks=free)))(phi, batch.obs, batch.carry[0])
    assert max(abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (by_phi, through)))) > 1e-4


# -------------------- Targets

def linear_networks():
    """z = parameter * s elementwise; Q = z @ parameter. The hidden state has no effect."""
    return r2d2.Players(SimpleNamespace(apply=lambda variables, carry, obs, last: (carry, obs * variables["params"])),
                        SimpleNamespace(apply=lambda variables, z: z @ variables["params"]))


@pytest.mark.parametrize("n", [1, 3, 10])
def test_n_step_targets_against_a_loop(n):
    """Random rewards, values and episodes of both ends, also at the window's edges: the definition, step by step."""
    rng = np.random.default_rng(n)
    time, batch, gamma, ends = 40, 30, 0.9, []
    last = rng.random((time, batch)) < 0.15
    last[1:] &= ~last[:-1]  # after a dummy step comes a first step
    terminated = np.zeros_like(last)
    terminated[:-1] = last[1:] & (rng.random((time - 1, batch)) < 0.5)
    obs, reward = rng.normal(size=(time, batch, 2)), rng.normal(size=(time, batch))
    params, target = (r2d2.Players(rng.normal(size=2), rng.normal(size=(2, 3))) for _ in range(2))
    steps = r2d2.Step(obs, None, reward, terminated, last, np.zeros((time, batch, 1)))
    found = r2d2.n_step_target(linear_networks(), params, target, steps, gamma, n)
    z = obs * target.perception
    for b in range(batch):
        for t in range(time - 1):
            if last[t, b]:
                continue
            expected, discount = 0.0, 1.0
            for m in range(1, n + 1):
                expected, discount = expected + discount * reward[t + m - 1, b], discount * gamma
                if last[t + m, b] or t + m == time - 1:
                    break
            if not terminated[t + m - 1, b]:
                best = np.argmax(z[t + m, b] @ params.control)  # the online head's choice
                expected += discount * (z[t + m, b] @ target.control)[best]
            ends.append((m == n, bool(last[t + m, b]), bool(terminated[t + m - 1, b])))
            assert found[t, b] == pytest.approx(expected, abs=1e-4), (t, b, m)
    assert len(set(ends)) >= 3 + 2 * (n > 1), "every kind of end occurs"


@pytest.mark.parametrize("bootstrap", [True, False])
def test_timeout_bootstraps_from_its_final_observation(bootstrap, usual):
    """Through acting and replay: the target of an episode's first step is the last one's reward, discounted, and after
    a time-out also Q_target at the dummy step, whose latent stems from the old hidden state; unless it is off."""
    state = usual() if bootstrap else jax.jit(make_train(bootstrap_at_timeout=False)[0])(jnp.uint32(0))
    networks, rows = networks_of(burn_in=0), time_major(state.replay, 8)
    theta = jax.tree.map(lambda x: 100 * x, state.params.control)
    params = r2d2.Players(state.params.perception, theta)
    carry = rows.carry[4]
    z = networks.perception.apply({"params": params.perception}, carry, rows.obs[4:5], np.zeros((1, 4), bool))[1]
    value = networks.control.apply({"params": theta}, z[0]).max(axis=-1)
    found = r2d2.n_step_target(networks, params, params, rows, 0.5, 6)
    timeout = rows.obs[0, :, 0] == 1  # by the cue
    assert 0 < timeout.sum() < 4 and rows.last[4].all() and carry.any() and np.abs(value).min() > 1e-3
    through = np.where(timeout & bootstrap, 0.5**4 * value, 0.0)
    np.testing.assert_allclose(found[0], 0.5**3 * rows.reward[3] + through, atol=1e-5)
    assert rows.reward[3].any()


# -------------------- Masks, weights, priorities

PLAYERS = networks_of()
LOSSES = dict(follower=r2d2.recurrent_follower_loss, leader=r2d2.recurrent_leader_loss)


def test_losses_are_numpys():
    """Population variance and weighted mean square over the steps that the mask keeps."""
    params, batch, target = game(PLAYERS)
    sample, target = one(batch), target[0]
    z = r2d2.latents(PLAYERS, params.perception, sample)
    q = np.asarray(PLAYERS.control.apply({"params": params.control}, z))
    delta = target - np.take_along_axis(q, sample.action[..., None], axis=-1)[..., 0]
    weight = np.broadcast_to(sample.weight, delta.shape)[sample.mask]
    variance, found = r2d2.recurrent_follower_loss(*params, PLAYERS, sample, target)
    np.testing.assert_allclose(found, delta, atol=1e-5)
    np.testing.assert_allclose(variance, np.var(delta[sample.mask]), rtol=1e-4)
    square = r2d2.recurrent_leader_loss(*params, PLAYERS, sample, target)[0]
    np.testing.assert_allclose(square, np.sum(weight * delta[sample.mask] ** 2) / sample.mask.sum(), rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_learn_from(loss):
    """Without a valid step both losses and all their gradients are exactly zero."""
    params, batch, target = game(PLAYERS)
    sample = one(batch)._replace(mask=np.zeros_like(batch.mask[0]))
    (value, _), gradient = jax.jit(jax.value_and_grad(
        lambda params: LOSSES[loss](*params, PLAYERS, sample, target[0]), has_aux=True))(params)
    assert value == 0 and not any(map(np.any, jax.tree.leaves(gradient)))


def test_dummy_steps_change_nothing():
    """Whatever action and reward a dummy step has: the same targets elsewhere, losses, gradients and priorities. At a
    valid step either changes all of them."""
    params, batch, _ = game(PLAYERS, batch=40)
    sample = one(batch)
    sample.last[1:] &= ~sample.last[:-1]

    @jax.jit
    def outcome(sample):
        sample = sample._replace(mask=~sample.last & (np.arange(8) > 2)[:, None] & (np.arange(8) < 7)[:, None])
        target = r2d2.n_step_target(PLAYERS, params, params, sample, 0.9, 3)
        results = [jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*params, PLAYERS, sample, target)
                   for loss in LOSSES.values()]
        priority = r2d2.sequence_priority(results[1][0][1], sample.mask)
        return [[value[0], gradient] for value, gradient in results], priority

    usual, dummies, steps = outcome(sample), np.argwhere(sample.last[3:-1]) + [3, 0], np.argwhere(~sample.last[3:-1])
    assert len(dummies) > 10
    for field, value in dict(action=1 - sample.action, reward=sample.reward + 7).items():
        changed = getattr(sample, field).copy()
        changed[sample.last] = value[sample.last]
        assert tree_equal(outcome(sample._replace(**{field: changed})), usual)
        t, b = steps[0] + [3, 0]
        changed[t, b] = value[t, b]
        losses, priority = outcome(sample._replace(**{field: changed}))
        assert losses[0][0] != usual[0][0][0] and losses[1][0] != usual[0][1][0] and priority[b] != usual[1][b]


def test_no_gradient_through_the_target():
    params, batch, target = game(PLAYERS)
    for loss in LOSSES.values():
        assert not np.any(jax.grad(loss, argnums=4, has_aux=True)(*params, PLAYERS, one(batch), target[0])[0])


def test_a_silent_broadcast_is_refused():
    params, batch, target = game(PLAYERS)
    with pytest.raises(AssertionError):
        r2d2.recurrent_leader_loss(*params, PLAYERS, one(batch), target[0][:, :1])


def test_priority_and_weights_by_hand():
    """|delta| of 1, 3 and 2 makes 0.9 x 3 + 0.1 x 2 = 2.9; with the 3 masked 0.9 x 2 + 0.1 x 1.5; with nothing left 0.
    P of 0.1, 0.4 and 0.2 with beta 0.5: sqrt(0.1 / P); what is drawn at P = 0 has no weight and sets no scale."""
    delta = jnp.array([[1.0, 1, 1], [-3, -3, -3], [2, 2, 2]])
    mask = jnp.array([[True, True, False], [True, False, False], [True, True, False]])
    np.testing.assert_allclose(r2d2.sequence_priority(delta, mask), [2.9, 1.95, 0.0], rtol=1e-6)
    probability = jnp.array([0.1, 0.4, 0.2, 0.0])
    np.testing.assert_allclose(r2d2.importance_weights(probability, 0.5), [1, 0.5, 0.5**0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(r2d2.importance_weights(probability, 1.0), [1, 0.25, 0.5, 0], rtol=1e-6)


@pytest.fixture(scope="module")
def watched(usual):
    """Six rounds whose update only takes note, and says that sequence n of a batch has |delta| = n + 1 throughout: the
    states in between, and the batches and targets that the updates got."""
    seen = []

    def update(*arguments):
        *_, params, opt_state, batch, target = arguments
        jax.debug.callback(lambda *x: seen.append(jax.tree.map(np.array, x)), batch, target, ordered=True)
        return params, opt_state, jnp.broadcast_to(jnp.arange(1.0, 5), (8, 4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(r2d2, "recurrent_scorer_update", update)
        block, states = jax.jit(make_train(scorer=True)[1]), [usual()]
        for index in range(6):
            states.append(block(states[-1], index)[0])
        jax.effects_barrier()
    return states, seen


def test_the_replays_priorities(watched):
    """The leader's batch sets the priorities of its sequences and of no others, by 0.9 max + 0.1 mean to the power of
    alpha once; its weights go by the priorities it was drawn with, and by beta, linear from 0.4."""
    states, seen = watched
    before, after = (np.array(state.replay.sum_tree_state.nodes[255:]) for state in states[-2:])  # items of 4 x 50
    batch, stored = one(seen[-1][0], 1), states[-1].replay.experience
    found = set()
    for place in np.flatnonzero((after != before) & (before > 0)):
        env, start = divmod(place, 50)
        piece = jax.tree.map(lambda x: x[env, 4 * start : 4 * start + 8], stored)
        same = [n for n in range(4) if tree_equal(piece, jax.tree.map(lambda x: x[:, n], batch._replace(
            mask=None, weight=None)))]
        assert any(np.isclose(after[place], (n + 1) ** 0.6) for n in same)
        found |= set(same)
    assert found and after.max() == pytest.approx(4**0.6)
    levels = 1.0, 2**0.6, 3**0.6, 4**0.6, 2.0  # the last: flashbax cuts the priority of new sequences to an integer
    for number, (batch, _) in enumerate(seen):
        weight = one(batch, 1).weight
        ratio = (1 / weight) ** (1 / (0.4 + 0.6 * number / 70))
        assert weight.max() == 1 and (number > 0 or np.all(weight == 1))
        assert all(np.isclose(ratio[:, None], [[b / a for a in levels for b in levels]], rtol=1e-4).any(axis=1))
    assert sum((one(batch, 1).weight < 1).sum() for batch, _ in seen) > 6


def test_what_is_no_sequence_stays_so(usual):
    """The sum tree's root has drifted upwards, so that a third of what is drawn are leaves beyond its 200 items: their
    priority stays 0."""
    state, block = usual(), jax.jit(make_train(scorer=True)[1])
    nodes = state.replay.sum_tree_state.nodes
    for index in range(4):
        tree = state.replay.sum_tree_state.replace(nodes=nodes.at[0].multiply(1.5))
        state = block(state._replace(replay=state.replay.replace(sum_tree_state=tree)), index)[0]
        nodes = state.replay.sum_tree_state.nodes
        assert nodes[255:455].any() and not nodes[455:].any()


def test_players_draw_batches_of_their_own(watched, monkeypatch):
    """Valid sequences all: consecutive steps of episodes of 4 + 1; the two batches differ, also from update to update;
    the mask leaves out burn-in, dummy steps and the last step. The baseline draws one."""
    for batch, target in watched[1]:
        assert batch.obs.shape == (2, 8, 4, 3) and target.shape == (2, 8, 4)
        assert not np.array_equal(batch.action[0], batch.action[1])
        t = batch.obs[..., 2].astype(int)  # steps in the episode
        assert np.all((t[:, 1:] - t[:, :-1]) % 5 == 1) and np.array_equal(batch.last, t == 4)
        expected = ~batch.last
        expected[:, :3] = expected[:, -1] = False
        np.testing.assert_array_equal(batch.mask, expected)
    assert len({batch.action.tobytes() for batch, _ in watched[1]}) == 6
    shapes = []
    monkeypatch.setattr(r2d2, "recurrent_baseline_update", lambda *x: (
        shapes.append(x[-1].shape), (*x[-4:-2], jnp.zeros((8, 4))))[1])
    init, block, *_ = make_train()
    jax.eval_shape(lambda: block(init(jnp.uint32(0)), 0))
    assert set(shapes) == {(1, 8, 4)}


# -------------------- The game

@pytest.fixture(scope="module")
def play():
    """One round with plain gradient steps: play(rates of both, params, batch, target, objective) -> parameters after it
    and the errors that come back."""
    @partial(jax.jit, static_argnums=4)
    def play(rates, params, batch, target, objective="follower"):
        optimizers = r2d2.Players(*map(optax.sgd, rates))
        opt_state = r2d2.Players(*(o.init(p) for o, p in zip(optimizers, params)))
        after, _, delta = r2d2.recurrent_scorer_update(
            LOSSES[objective], PLAYERS, optimizers, params, opt_state, batch, target)
        return after, delta
    return play


def test_each_player_moves_only_itself(play):
    """A follower's step changes no bit of theta, a leader's none of phi."""
    params, batch, target = game(PLAYERS)
    for rates, still in (((1.0, 0.0), 1), ((0.0, 1.0), 0)):
        after, _ = play(rates, params, batch, target)
        assert tree_equal(after[still], params[still]) and not tree_equal(after[1 - still], params[1 - still])


def test_each_player_reads_only_its_batch(play):
    """The follower's step depends on sample 0 alone; the leader's, while the follower stands still, on sample 1."""
    params, batch, target = game(PLAYERS)
    for other, rates in ((1, (1.0, 1.0)), (0, (0.0, 1.0))):
        changed, changed_target = batch._replace(obs=batch.obs.copy()), target.copy()
        changed.obs[other], changed_target[other] = 3.0, 3.0
        (mine, _), (same, _) = (play(rates, params, *sample) for sample in ((batch, target), (changed, changed_target)))
        assert tree_equal(mine[1 - other], same[1 - other]) and not tree_equal(mine, params)


@pytest.mark.parametrize("objective", LOSSES)
def test_leader_answers_the_new_phi(objective, play):
    """Each player's step is its loss's gradient, the follower's without importance weights; the leader's and its errors
    are those at the new phi."""
    params, batch, target = game(PLAYERS)
    after, delta = play((1.0, 1.0), params, batch, target, objective)

    @partial(jax.jit, static_argnums=(0, 1))
    def gap(player, loss, phi):
        mine = one(batch, player) if player else one(batch)._replace(weight=jnp.ones(5))
        gradient, errors = jax.grad(LOSSES[loss], argnums=player, has_aux=True)(
            phi, params.control, PLAYERS, mine, target[player])
        gaps = jax.tree.map(lambda new, old, g: abs(new - old + g).max(), after[player], params[player], gradient)
        return jnp.array([jnp.stack(jax.tree.leaves(gaps)).max(), abs(errors - delta).max()])

    assert gap(0, objective, params.perception)[0] < 1e-5
    assert gap(1, "leader", after.perception).max() < 1e-5 and gap(1, "leader", params.perception).min() > 1e-4


def test_baseline_steps_on_one_loss():
    """Both parts move by the gradient of the weighted MSBE of the only sample, from the old parameters."""
    params, batch, target = game(PLAYERS, players=1)
    step = optax.sgd(1.0)
    after, _, delta = jax.jit(partial(r2d2.recurrent_baseline_update, PLAYERS, step))(
        params, step.init(params), batch, target)
    gradient, errors = jax.jit(jax.grad(lambda params: r2d2.recurrent_leader_loss(
        *params, PLAYERS, one(batch), target[0]), has_aux=True))(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), after, jax.tree.map(
        lambda p, g: p - g, params, gradient))
    np.testing.assert_allclose(delta, errors, atol=1e-5)
    assert optax.tree.norm(gradient.perception) > 0.01 < optax.tree.norm(gradient.control)


@pytest.mark.parametrize("args, rates", [(dict(scorer=True), (3e-4, 1e-4)), ({}, (1e-4, 1e-4)),
                                         (dict(scorer=True, leader_decay_power=1.5), (3e-4, 1e-4))])
def test_learning_rates(args, rates, monkeypatch):
    """Adam under a constant gradient moves by its rate: rate (1 - k / N)^power at update k, and exactly 0 after N."""
    seen, names = [], ("recurrent_scorer_update", "recurrent_baseline_update")
    for name in names:
        monkeypatch.setattr(r2d2, name, lambda *x: (seen.append(x), (*x[-4:-2], jnp.zeros((8, 4))))[1])
    init, block, _, timesteps, _ = make_train(**args)
    jax.eval_shape(lambda: block(init(jnp.uint32(0)), 0))
    *_, optimizers, _, _, _, _ = seen[0]
    updates = (timesteps[-1] - 80) // 8
    assert updates == 70
    for number, rate in enumerate(rates):
        optimizer = optimizers[number] if args else optimizers

        def step(opt_state, _):
            change, opt_state = optimizer.update(jnp.full(1, 0.1), opt_state)
            return opt_state, -change[0]

        moved = jax.lax.scan(step, optimizer.init(jnp.zeros(1)), None, updates + 2)[1]
        power = args.get("leader_decay_power", 1.0) if number else 1.0
        np.testing.assert_allclose(moved[:updates], rate * (1 - np.arange(updates) / updates) ** power, rtol=1e-3)
        assert moved[updates - 1] > 0 and not moved[updates:].any()


def test_parity_of_baseline_and_scorer(usual):
    """The same seed gives both the same parameters and the same experience before learning; another seed, others."""
    states = [usual(scorer, seed) for scorer, seed in ((False, 3), (True, 3), (True, 4))]
    kernels = [state.params.control["Dense_0"]["kernel"] for state in states]
    assert tree_equal(*(state.params for state in states[:2])) and tree_equal(*(state.replay for state in states[:2]))
    assert not np.array_equal(*kernels[1:]) and not np.array_equal(*(x.replay.experience.action for x in states[1:]))
    # 3 x 8 + 8; 8 x 24 + 24, 8 x 24 and 8; 8 x 8 + 8; 8 x 2 + 2
    assert sum(leaf.size for leaf in jax.tree.leaves(states[0].params)) == 32 + 216 + 192 + 8 + 72 + 18


def test_blocks(usual):
    """Here a block is one update, and targets change after the 67th, until then no bit of them. A point of the curves
    holds the mean over environments of their last returns."""
    _, block, *_, timesteps, blocks_per_point = make_train(scorer=True, learning_rate=0.01)
    np.testing.assert_array_equal(timesteps, 80 + 8 * np.arange(1, 71))
    state, block = usual(), jax.jit(block)
    first, means = state.params, []
    for index in range(68):
        assert tree_equal(state.target, first)
        state, mean = block(state, index)
        means.append(mean)
        cycles, steps = divmod(20 + 2 * (index + 1), 5)  # an episode of 4 steps and its dummy step
        assert state.episodes == 4 * (cycles + (steps == 4)) and mean == state.last_returns.mean()
        if steps == 4:  # episodes have just ended
            assert tree_equal(state.last_returns, state.env_state.info["return"])
        if index == 66:
            assert tree_equal(state.target, state.params) and not tree_equal(state.target, first)
            first = state.target
    assert not tree_equal(state.params, first) and blocks_per_point == 1
    np.testing.assert_array_equal(state.curves["returns"], means + [np.nan, np.nan])
    assert state.curves["episodes"][67] == state.episodes and len({*np.array(means).tolist()} & {0.25, 0.5, 0.75}) > 1


def test_intervals_are_whole_steps():
    """16 environment steps are 2 steps of 10 environments, 80 are 8; targets change at whole updates."""
    for interval, period, expected in ((16, 5000, (20, 5000)), (80, 5000, (80, 4960)), (1, 1, (10, 10))):
        args = resolved(num_envs=10, update_interval=interval, target_update_interval=period, buffer_size=10_000)
        assert (args.update_interval, args.target_update_interval) == expected
    for starts, first_update in ((100, 160), (159, 160), (160, 240)):  # Algorithm 1: at the first interval's end after
        timesteps = make_train(num_envs=10, update_interval=80, learning_starts=starts, buffer_size=10_000,
                               total_timesteps=10_000)[3]
        assert 2 * timesteps[0] - timesteps[1] == first_update - 80 and (timesteps % 80 == 0).all()
    init, block, *_ = make_train(target_update_interval=10**12)  # never
    jax.eval_shape(lambda: block(init(jnp.uint32(0)), 0))


def test_epsilon():
    """Of 1,000 environments half the random actions are the other one: epsilon falls from 1 to 0 in 20 steps. No
    environment completes an episode meanwhile: there is no return yet, nor is 0 one."""
    sizes = dict(num_envs=1000, learning_starts=30_000, total_timesteps=40_000, buffer_size=40_000)
    init, *_ = make_train(Cue(length=99), epsilon_end=0.0, epsilon_steps=20_000, update_interval=10_000, **sizes)
    state = jax.jit(init)(jnp.uint32(0))
    rows, networks = time_major(state.replay, 30), networks_of(**sizes)
    z = r2d2.latents(networks, state.params.perception, rows)
    greedy = networks.control.apply({"params": state.params.control}, z).argmax(axis=-1)
    others = (rows.action != greedy).mean(axis=1)
    np.testing.assert_allclose(others, 0.5 * np.maximum(0, 1 - np.arange(30) / 20), atol=0.065)
    assert not others[20:].any() and others[19] > 0
    assert np.isnan(state.last_returns).all() and state.episodes == 0


def test_no_copy_of_the_replay():
    """A compiled block needs far less memory of its own than the replay has: nothing copies it."""
    init, block, *_ = make_train(scorer=True, buffer_size=400_000)
    state = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    memory = jax.jit(block, donate_argnums=0).lower(state, 0).compile().memory_analysis()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.replay.experience))
    assert size > 16e6 and memory.temp_size_in_bytes < size / 8 and memory.alias_size_in_bytes > size


# -------------------- navix

@pytest.mark.parametrize("env", ["Navix-Empty-Random-5x5-v0"])
def test_navix_episodes_against_a_loop(env):
    """One real environment, its actions played again in a plain loop: the same steps are stored, and the script's
    return and number of episodes are those of a loop that knows where navix resets."""
    args, env, _ = r2d2.resolve(r2d2.Args(**SMALL | dict(
        env=env, num_envs=1, learning_starts=400, total_timesteps=500, update_interval=2, target_update_interval=6)))
    init, *_ = r2d2.make_train(args, env, None)
    state = jax.jit(init)(jnp.uint32(5), 0.0)
    stored = jax.tree.map(lambda x: np.array(x[0, :400]), state.replay.experience)
    reset_key = jax.random.split(jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 0), 0), 4)[0]
    now, step = jax.jit(env.reset)(jax.random.key_data(jax.random.split(reset_key, 1))[0]), jax.jit(env.step)
    returns, kinds, total, length = [], [], 0.0, 0
    for t in range(400):
        new = step(now, stored.action[t])
        assert np.array_equal(stored.obs[t], now.observation) and stored.obs.dtype == np.uint8
        if now.step_type > 0:  # a dummy step: the episode ended with the step before
            assert stored.last[t] and stored.reward[t] == 0 and not stored.terminated[t] and new.t == 0
            total, length = 0.0, 0
        else:
            total, length = total + float(new.reward), length + 1
            assert not stored.last[t] and stored.reward[t] == new.reward
            assert stored.terminated[t] == (new.step_type == 2)
            if new.step_type > 0:
                assert length == new.t <= 100
                returns.append(total)
                kinds.append(int(new.step_type))
        now = new
    assert state.episodes == len(returns) and state.last_returns.tolist() == returns[-1:]
    assert {1, 2} <= set(kinds) and set(returns) == {0.0, 1.0} and stored.last.sum() in (len(kinds), len(kinds) - 1)
    assert tree_equal(now.observation, state.env_state.observation[0])


# -------------------- Memory

PERCEPTION = r2d2.Perception


class Forgetful(PERCEPTION):
    """Cuts the hidden state after every step."""
    @nn.compact
    def __call__(self, carry, obs, last):
        return PERCEPTION.__call__(self, carry, obs, jnp.ones_like(last))


@pytest.mark.parametrize("perception", [PERCEPTION, Forgetful])
def test_memory_probe(perception, monkeypatch):
    """The cue of the first step decides the right action at the last: who remembers gets 1, who cannot gets 1/2."""
    monkeypatch.setattr(r2d2, "Perception", perception)
    init, block, *_, timesteps, _ = make_train(
        Cue(timeouts=False), scorer=True, num_envs=8, hidden_dim=32, sequence_length=12, burn_in=2, batch_size=16,
        buffer_size=8000, learning_starts=800, total_timesteps=6000, update_interval=16, target_update_interval=320,
        learning_rate=3e-3, follower_learning_rate=6e-3, gamma=0.9, epsilon_steps=2000, epsilon_end=0.0)
    state, block = jax.jit(init)(jnp.uint32(0)), jax.jit(block, donate_argnums=0)
    for index in range(len(timesteps)):
        state, _ = block(state, index)
    last = state.curves["returns"][-len(timesteps) // 5 :].mean()
    assert last > 0.95 if perception is not Forgetful else 0.2 < last < 0.8, last


# -------------------- The command line

def refused(capsys, **args):
    """What resolve says on standard error while it ends the program."""
    with pytest.raises(SystemExit) as end:
        r2d2.resolve(r2d2.Args(**args))
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and re.fullmatch(r"error: [^\n]+\n", err), err
    return err


@pytest.mark.parametrize("args, words", [
    (dict(env="Navix-FourRoom-v0"), ["--env", "Navix-FourRooms-v0"]), (dict(env="Breakout-MinAtar"), ["--env"]),
    (dict(num_envs=0), ["--num-envs 0"]), (dict(num_seeds=0), ["--num-seeds"]), (dict(seed=-1), ["--seed"]),
    (dict(burn_in=99), ["--burn-in 99", "98"]), (dict(burn_in=-1), ["--burn-in"]), (dict(n_step=0), ["--n-step"]),
    (dict(n_step=101), ["--n-step"]), (dict(sequence_length=1), ["--sequence-length"]),
    (dict(buffer_size=2000), ["--buffer-size", "2080"]), (dict(learning_starts=999), ["--learning-starts", "1000"]),
    (dict(total_timesteps=25_000), ["--learning-starts 25000"]), (dict(per_alpha=1.1), ["--per-alpha"]),
    (dict(per_beta=-0.1), ["--per-beta"]), (dict(update_interval=0), ["--update-interval"]),
    (dict(gamma=1.5), ["--gamma"]), (dict(learning_rate=float("nan")), ["--learning-rate"]),
    (dict(follower_loss="msbe"), ["--follower-loss", "--scorer"]), (dict(leader_decay_power=1.5), ["--scorer"]),
    (dict(follower_learning_rate=(1e-3,)), ["--follower-learning-rate", "--scorer"]),
    (dict(scorer=True, follower_learning_rate=()), ["--follower-learning-rate", "value"]),
    (dict(scorer=True, follower_learning_rate=(1e-3, 0.0)), ["--follower-learning-rate 0.0"])])
def test_bad_input(args, words, capsys):
    """One sentence that names the flag, exit code 2."""
    assert all(word in refused(capsys, **args) for word in words)


def test_the_papers_environments():
    """All eight are accepted, with navix's limit of 100 steps, and seen in the first person."""
    for name in ("DoorKey-6x6", "SimpleCrossingS9N2", "DistShift2", "LavaGapS6", "GoToDoor-8x8", "Empty-Random-8x8",
                 "Dynamic-Obstacles-6x6", "FourRooms"):
        _, env, _ = r2d2.resolve(r2d2.Args(env=f"Navix-{name}-v0"))
        assert env.max_steps == 100 and env.observation_space.shape == (7, 7, 3) and env.action_space.maximum == 6


def test_run_and_resume(tmp_path):
    """A run of two seeds with its record, stopped by Ctrl-C, and one that goes on from there; both begin alike."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
               JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    flags = ("--env Navix-Empty-Random-5x5-v0 --scorer --diagnostics --num-seeds 2 --num-envs 2 --hidden-dim 8 "
             "--batch-size 4 --sequence-length 8 --burn-in 3 --n-step 3 --buffer-size 400 --learning-starts 100 "
             "--update-interval 4 --target-update-interval 20 --total-timesteps 4100").split()

    def start(*flags):
        command = [sys.executable, str(SCRIPT), *map(str, flags), "--runs-dir", str(tmp_path / "runs")]
        return subprocess.Popen(command, env=env, cwd=tmp_path, text=True, stdout=-1, stderr=-1)

    process = start(*flags, "--checkpoint-every-minutes", 60)
    head = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "update interval 4, target update interval 20" in head[1], err
    stopped = Path(head[0].strip())
    process = start("--resume", stopped, "--save-model")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    run = Path(out.splitlines()[0])
    assert re.fullmatch(r"scorer_r2d2__Navix-Empty-Random-5x5-v0__scorer__s0__\d{8}-\d{6}-\d{6}", run.name)
    assert sorted(path.name for path in run.iterdir()) == ["args.json", "model.safetensors", "results.npz"]
    (part, some), (record, all_) = ((file, json.loads(str(file["meta"]))) for file in (
        dict(np.load(path / "results.npz")) for path in (stopped, run)))
    assert not some["complete"] and all_["complete"] and all_["script"] == "scorer_r2d2"
    points = len(part["timesteps"])
    assert 15 < points < 200 == len(record["timesteps"]) and record["timesteps"][-1] == 4100
    curves = {"returns", "episodes", "follower_loss", "leader_loss", "bellman_error_mean", "bellman_error_variance",
              "perception_norm", "control_norm"}
    assert record.keys() == curves | {"timesteps", "seeds", "meta"}
    for name in curves:
        assert record[name].shape == (2, 200)
        np.testing.assert_array_equal(record[name][:, :points], part[name], err_msg=name)
    assert not np.array_equal(*record["control_norm"]) and np.nanmax(record["returns"]) <= 1
    assert np.all(np.diff(record["episodes"]) >= 0) and np.all(record["episodes"][:, -1] > 40)

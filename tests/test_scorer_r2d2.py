"""scorer_r2d2.py: recurrence, targets, masks, priorities, navix's episodes, memory, and a run."""

import json
import re
import signal
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
from helpers import UNOPTIMIZED
from helpers import make_start
from helpers import tree_equal

import scorer_r2d2 as r2d2

SCRIPT = Path(r2d2.__file__)
SMALL = dict(
    num_envs=4,
    buffer_size=800,
    batch_size=4,
    sequence_length=8,
    burn_in=3,
    n_step=3,
    learning_starts=80,
    hidden_dim=8,
    update_interval=8,
    total_timesteps=640,
    target_update_interval=280,  # 35 updates, and 70 in all
)
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
    """Has navix's interface: shows a cue, 1 or 2, at the first of `length` steps only.

    The right action at the last step, the cue less 1, pays 1. With `timeouts`, episodes with cue 1
    end by time. Seen are the cue as one-hot, and t.
    """

    action_space = SimpleNamespace(maximum=1)

    def __init__(self, length=4, timeouts=True):
        self.length = length
        self.timeouts = timeouts

    def reset(self, key):
        key, drawn = jax.random.split(key)
        cue = jax.random.randint(drawn, (), 1, 3)
        return Timestep(
            t=jnp.int32(0),
            observation=jnp.stack([cue == 1, cue == 2, False]).astype(jnp.uint8),
            action=jnp.int32(0),
            reward=jnp.float32(0),
            step_type=jnp.int32(0),
            key=key,
            cue=cue,
            info={"return": jnp.float32(0)},
        )

    def step(self, now, action):
        t = now.t + 1
        done = t == self.length
        reward = jnp.where(done & (action == now.cue - 1), 1.0, 0.0)
        kind = jnp.where(self.timeouts & (now.cue == 1), 1, 2)
        new = now.replace(
            t=t,
            observation=jnp.stack([0, 0, t]).astype(jnp.uint8),
            action=action.astype(jnp.int32),
            reward=reward,
            step_type=jnp.where(done, kind, 0).astype(jnp.int32),
            info={"return": now.info["return"] + reward},
        )
        first = self.reset(now.key)
        return jax.tree.map(lambda a, b: jnp.where(now.step_type > 0, a, b), first, new)


def complete(**options):
    """Returns arguments as make_train gets them."""
    return r2d2.complete(r2d2.Args(**SMALL | options))


def make_train(env=None, **options):
    """Returns the script's Training on the stand-in, or on another environment with its interface."""
    return r2d2.make_train(complete(**options), r2d2.vectorize(env or Cue()))


def first_state(training, seed=0):
    """Returns a seed's first state, at the follower's usual rate."""
    return jax.jit(training.init)(jnp.uint32(seed), jnp.float32(3e-4))


def abstract_state(training):
    """Returns the shapes of a seed's state; nothing is computed."""
    seed, rate = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    return jax.eval_shape(training.init, seed, rate)


def in_chunks_of_one_update(monkeypatch):
    """Lets the host see the state after each of 70 updates; targets change after the 67th."""
    counts = r2d2.Counts(
        interval_steps=2,
        warmup_intervals=10,
        target_period=67,
        stretch_updates=1,
        chunk_updates=1,
        num_chunks=70,
    )
    monkeypatch.setattr(r2d2, "count_steps", lambda *_: counts)


@pytest.fixture(scope="module")
def usual():
    """Returns a function for the state before learning, compiled once for all tests."""
    inits = {}
    for scorer in (True, False):
        inits[scorer] = jax.jit(make_train(scorer=scorer).init)

    def state(scorer=True, seed=0):
        return inits[scorer](jnp.uint32(seed), jnp.float32(3e-4))

    return state


def time_major(replay, steps):
    """Returns the first steps in the replay, [steps, num_envs, ...]."""
    return jax.tree.map(lambda x: np.swapaxes(x[:, :steps], 0, 1), replay.experience)


def make_networks(**options):
    """Returns networks for two actions."""
    return r2d2.make_networks(complete(**options), 2)


NETWORKS = make_networks()


def example_game(networks=NETWORKS, time=8, size=5):
    """Returns random parameters and a batch of its own for each player; dummy steps here and there."""
    rng = np.random.default_rng(0)
    shape = (2, time, size)
    dim = networks.perception.hidden_dim
    obs = rng.normal(size=(*shape, 3)).astype(np.float32)
    is_last = rng.random(shape) < 0.2
    mask = ~is_last
    mask[:, : networks.perception.burn_in] = False
    mask[:, -1] = False
    stacked = r2d2.Batch(
        carry=np.asarray(r2d2.l2_norm(rng.normal(size=(2, size, dim)).astype(np.float32))),
        obs=obs,
        is_last=is_last,
        action=rng.integers(2, size=shape),
        td_target=rng.normal(size=shape).astype(np.float32),
        mask=mask,
        weight=rng.uniform(0.3, 1, (2, size)).astype(np.float32),
    )
    keys = jax.random.split(jax.random.key(0))
    phi = networks.perception.init(keys[0], stacked.carry[0], obs[0], is_last[0])["params"]
    theta = networks.control.init(keys[1], stacked.carry[0])["params"]
    theta["Dense_1"]["kernel"] *= 100.0  # so that both players have something to gain
    return r2d2.Players(phi, theta), *r2d2.unstack(stacked)


def error(params, batch):
    """Returns the batch's Bellman errors."""
    return r2d2.bellman_error(NETWORKS, params, batch)


def loss_of(loss, params, batch, networks=NETWORKS):
    """Returns follower_loss or leader_loss of a batch."""
    delta = r2d2.bellman_error(networks, params, batch)
    return loss(delta, batch.mask, batch.weight)


LOSSES = [r2d2.follower_loss, r2d2.leader_loss]


def assert_close(a, b, rtol=1e-4, atol=1e-5):
    """Compares two trees, number by number."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


def largest_difference(a, b) -> float:
    """Returns the largest absolute difference between two trees' numbers."""
    differences = jax.tree.map(lambda x, y: abs(x - y).max(), a, b)
    return max(jax.tree.leaves(differences))


# ------------------------------------- The recurrent function -------------------------------------


def test_acting_and_learning_agree_across_episode_ends():
    """One step at a time and a whole sequence give the same features and hidden states.

    After an episode's last observation, which still sees the old hidden state, nothing is left of it.
    """
    params, batch, _ = example_game(time=12)
    is_last = np.zeros((12, 5), bool)
    is_last[5, :3] = True
    is_last[8, 1] = True
    apply = jax.jit(partial(NETWORKS.perception.apply, {"params": params.perception}))
    end, z = apply(batch.carry, batch.obs, is_last)
    carry = batch.carry
    for t in range(12):
        carry, now = apply(carry, batch.obs[t : t + 1], is_last[t : t + 1])
        np.testing.assert_allclose(now[0], z[t], atol=1e-6)
        np.testing.assert_allclose(carry, np.where(is_last[t][:, None], 0, z[t]), atol=1e-6)
    np.testing.assert_allclose(carry, end, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(z, axis=-1), 1, atol=1e-5)
    other = apply(-batch.carry, batch.obs, is_last)[1]
    changed = np.abs(other - z).max(axis=-1) > 1e-7  # [time, batch]
    assert changed[:6].all()
    assert not changed[6:, :3].any() and changed[6:, 3:].all()


def test_replay_holds_the_hidden_states_of_acting(usual):
    """From a stored hidden state, the learner's pass over the replay finds those stored later on."""
    state = usual()
    rows = time_major(state.replay, 20)
    _, z = NETWORKS.perception.apply(
        {"params": state.params.perception}, rows.carry[0], rows.obs, rows.is_last
    )
    stored = np.concatenate([rows.carry[1:], state.carry[None]])
    np.testing.assert_allclose(stored, np.where(rows.is_last[..., None], 0, z), atol=1e-6)
    assert rows.is_last.sum() == 16  # episodes have 4 + 1 steps
    assert not rows.carry[0].any()
    assert rows.obs.dtype == np.uint8


def test_gru_is_flaxs():
    """With the weights put together, flax's GRUCell gives the same output before its norm is 1."""
    params, batch, _ = example_game()
    phi, carry, obs = params.perception, batch.carry, batch.obs[:1]
    phi["recurrent_bias"] = jnp.linspace(-1, 1, 8)
    cut = partial(np.split, indices_or_sections=3, axis=-1)
    cell = {}
    for gate, kernel, bias, recurrent in zip(
        "rzn",
        cut(phi["inputs"]["kernel"]),
        cut(phi["inputs"]["bias"]),
        cut(phi["recurrent"]),
        strict=True,
    ):
        cell[f"i{gate}"] = dict(kernel=kernel, bias=bias)
        cell[f"h{gate}"] = dict(kernel=recurrent)
        np.testing.assert_allclose(recurrent.T @ recurrent, np.eye(8), atol=1e-5)
    cell["hn"]["bias"] = phi["recurrent_bias"]
    x = obs[0] / np.linalg.norm(obs[0], axis=-1, keepdims=True)
    x = np.tanh(x @ phi["Dense_0"]["kernel"] + phi["Dense_0"]["bias"])
    expected, _ = nn.GRUCell(8).apply({"params": cell}, carry, x)
    _, z = NETWORKS.perception.apply({"params": phi}, carry, obs, np.zeros((1, 5), bool))
    norm = np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(z[0], expected / norm, atol=1e-5)


def test_l2_norm():
    """(3, 4) becomes (0.6, 0.8); zeros stay, and have a gradient that is no NaN."""
    x = jnp.array([[3.0, 4], [0, 0]])
    np.testing.assert_allclose(r2d2.l2_norm(x), [[0.6, 0.8], [0, 0]], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: r2d2.l2_norm(x).sum())(jnp.zeros(2))).all()


def test_no_gradient_through_burn_in():
    """The burn-in and the stored hidden state have an effect on the last features, but no gradient.

    The parameters' gradient is that of the window alone, from the hidden state that the burn-in leaves.
    """
    params, batch, _ = example_game()
    batch.is_last[:3] = False
    phi = params.perception

    def loss(phi, obs, carry, networks=NETWORKS, start=0):
        window = batch._replace(
            carry=carry,
            obs=obs[start:],
            is_last=batch.is_last[start:],
            action=batch.action[start:],
            td_target=batch.td_target[start:],
            mask=batch.mask[start:],
        )
        players = r2d2.Players(phi, params.control)
        return loss_of(r2d2.follower_loss, players, window, networks)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    by_phi, by_obs, by_carry = gradient(phi, batch.obs, batch.carry)
    assert not by_obs[:3].any() and not by_carry.any()
    assert by_obs[3:7].any(axis=(1, 2)).all()

    other = batch.obs.copy()
    other[0] = 1.0
    value = jax.jit(loss)
    values = [
        value(phi, batch.obs, batch.carry),
        value(phi, other, batch.carry),
        value(phi, batch.obs, -batch.carry),
    ]
    assert abs(np.diff(values)).min() > 1e-6

    carry, _ = NETWORKS.perception.apply(
        {"params": phi}, batch.carry, batch.obs[:3], batch.is_last[:3]
    )
    free = make_networks(burn_in=0)
    alone = jax.jit(jax.grad(partial(loss, networks=free, start=3)))(phi, batch.obs, carry)
    assert_close(by_phi, alone, atol=1e-6)
    through = jax.jit(jax.grad(partial(loss, networks=free)))(phi, batch.obs, batch.carry)
    assert largest_difference(by_phi, through) > 1e-4


# -------------------------------------------- Targets ---------------------------------------------


class LinearPerception:
    """z = parameter * s elementwise; the hidden state has no effect."""

    @staticmethod
    def apply(variables, carry, obs, is_last):
        return carry, obs * variables["params"]


class LinearControl:
    """Q = z @ parameter."""

    @staticmethod
    def apply(variables, z):
        return z @ variables["params"]


def random_episodes(rng, time, size):
    """Returns is_last and terminated [time, size] of episodes of both ends."""
    is_last = rng.random((time, size)) < 0.15
    is_last[1:] &= ~is_last[:-1]  # after a dummy step comes a first step
    terminated = np.zeros_like(is_last)
    terminated[:-1] = is_last[1:] & (rng.random((time - 1, size)) < 0.5)
    return is_last, terminated


@pytest.mark.parametrize("n", [1, 3, 10])
def test_n_step_targets_against_a_loop(n):
    """Random rewards, values and episodes, also at the window's edges: the definition, step by step."""
    rng = np.random.default_rng(n)
    time, size, gamma = 40, 30, 0.9
    is_last, terminated = random_episodes(rng, time, size)
    obs, reward = rng.normal(size=(time, size, 2)), rng.normal(size=(time, size))
    params = r2d2.Players(rng.normal(size=2), rng.normal(size=(2, 3)))
    target = r2d2.Players(rng.normal(size=2), rng.normal(size=(2, 3)))
    steps = r2d2.Transition(obs, None, reward, terminated, is_last, np.zeros((time, size, 1)))
    networks = r2d2.Players(LinearPerception, LinearControl)
    found = r2d2.compute_td_target(networks, params, target, steps, gamma, n)
    z = obs * target.perception
    ends = set()
    for b in range(size):
        for t in range(time - 1):
            if is_last[t, b]:
                continue
            expected, discount = 0.0, 1.0
            for m in range(1, n + 1):
                expected += discount * reward[t + m - 1, b]
                discount *= gamma
                if is_last[t + m, b] or t + m == time - 1:
                    break
            if not terminated[t + m - 1, b]:
                best = np.argmax(z[t + m, b] @ params.control)  # the online head's choice
                expected += discount * (z[t + m, b] @ target.control)[best]
            ends.add((m == n, bool(is_last[t + m, b]), bool(terminated[t + m - 1, b])))
            assert found[t, b] == pytest.approx(expected, abs=1e-4), (t, b, m)
    assert len(ends) >= (3 if n == 1 else 5), "every kind of end occurs"


@pytest.mark.parametrize("bootstrap", [True, False])
def test_timeout_bootstraps_from_its_final_observation(bootstrap, usual):
    """Through acting and replay: the target of an episode's first step is its last reward, discounted.

    After a time-out also Q_target at the dummy step, whose features stem from the old hidden state;
    unless that is off.
    """
    state = usual() if bootstrap else first_state(make_train(bootstrap_at_timeout=False))
    networks = make_networks(burn_in=0)
    rows = time_major(state.replay, 8)
    theta = jax.tree.map(lambda x: 100 * x, state.params.control)
    params = r2d2.Players(state.params.perception, theta)
    carry = rows.carry[4]
    _, q = r2d2.q_values(networks, params, carry, rows.obs[4:5], np.zeros((1, 4), bool))
    value = q[0].max(axis=-1)
    found = r2d2.compute_td_target(networks, params, params, rows, 0.5, 6)
    timeout = rows.obs[0, :, 0] == 1  # by the cue
    assert 0 < timeout.sum() < 4 and rows.is_last[4].all()
    assert carry.any() and np.abs(value).min() > 1e-3 and rows.reward[3].any()
    through = np.where(timeout & bootstrap, 0.5**4 * value, 0.0)
    np.testing.assert_allclose(found[0], 0.5**3 * rows.reward[3] + through, atol=1e-5)


# ---------------------------------- Masks, weights, priorities ------------------------------------


def test_losses_are_numpys():
    """Population variance, with weights or without, and weighted mean square, over the mask."""
    params, batch, _ = example_game()
    _, q = r2d2.q_values(NETWORKS, params, batch.carry, batch.obs, batch.is_last)
    chosen = np.take_along_axis(np.asarray(q), batch.action[..., None], axis=-1)[..., 0]
    delta = batch.td_target - chosen
    np.testing.assert_allclose(error(params, batch), delta, atol=1e-5)

    weight = np.broadcast_to(batch.weight, delta.shape)[batch.mask]
    kept = delta[batch.mask]
    alike = batch._replace(weight=np.ones_like(batch.weight))
    variance = loss_of(r2d2.follower_loss, params, alike)
    np.testing.assert_allclose(variance, np.var(kept), rtol=1e-4)
    square = loss_of(r2d2.leader_loss, params, batch)
    np.testing.assert_allclose(square, np.sum(weight * kept**2) / len(kept), rtol=1e-4)
    centre = np.average(kept, weights=weight)
    weighted = loss_of(r2d2.follower_loss, params, batch)
    expected = np.sum(weight * (kept - centre) ** 2) / len(kept)
    np.testing.assert_allclose(weighted, expected, rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_learn_from(loss):
    """Without a valid step both losses and all their gradients are exactly zero."""
    params, batch, _ = example_game()
    batch = batch._replace(mask=np.zeros_like(batch.mask))
    value, gradient = jax.jit(jax.value_and_grad(partial(loss_of, loss)))(params, batch=batch)
    assert value == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


def test_dummy_steps_change_nothing():
    """Whatever action and reward a dummy step has: the same losses, gradients and priorities.

    At a valid step either changes all of them.
    """
    params, batch, _ = example_game(size=40)
    is_last = batch.is_last.copy()
    is_last[1:] &= ~is_last[:-1]
    rng = np.random.default_rng(1)
    sequences = r2d2.Transition(
        obs=batch.obs,
        action=batch.action,
        reward=rng.normal(size=is_last.shape).astype(np.float32),
        terminated=np.zeros_like(is_last),
        is_last=is_last,
        carry=np.broadcast_to(batch.carry, (8, *batch.carry.shape)),
    )

    @jax.jit
    def outcome(sequences):
        td_target = r2d2.compute_td_target(NETWORKS, params, params, sequences, 0.9, 3)
        mask = r2d2.mask_of(r2d2.Drawn(sequences, jnp.ones(40), None), 3)
        whole = batch._replace(
            is_last=sequences.is_last, action=sequences.action, td_target=td_target, mask=mask
        )
        losses = [
            jax.value_and_grad(partial(loss_of, loss, batch=whole))(params) for loss in LOSSES
        ]
        return losses, r2d2.sequence_priority(error(params, whole), mask)

    usual = outcome(sequences)
    assert is_last[3:-1].sum() > 10
    t, b = np.argwhere(~is_last[3:-1])[0] + [3, 0]
    others = dict(action=1 - sequences.action, reward=sequences.reward + 7)
    for name, value in others.items():
        changed = getattr(sequences, name).copy()
        changed[is_last] = value[is_last]
        assert tree_equal(outcome(sequences._replace(**{name: changed})), usual)
        changed[t, b] = value[t, b]
        losses, priority = outcome(sequences._replace(**{name: changed}))
        assert losses[0][0] != usual[0][0][0] and losses[1][0] != usual[0][1][0]
        assert priority[b] != usual[1][b]


@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_through_the_target(loss):
    """Neither loss pulls on the target."""
    params, batch, _ = example_game()

    def value(td_target):
        return loss_of(loss, params, batch._replace(td_target=td_target))

    assert not np.any(jax.grad(value)(batch.td_target))


def test_a_silent_broadcast_is_refused():
    """Targets [time, 1] would be compared with every sequence's values."""
    params, batch, _ = example_game()
    with pytest.raises(AssertionError):
        error(params, batch._replace(td_target=batch.td_target[:, :1]))
    with pytest.raises(AssertionError):
        error(params, batch._replace(mask=batch.mask[:, :1]))


def test_priority_and_weights_by_hand():
    """|delta| of 1, 3 and 2 makes 0.9 x 3 + 0.1 x 2 = 2.9; with the 3 masked 0.9 x 2 + 0.1 x 1.5.

    With nothing left it is 0. P of 0.1, 0.4 and 0.2 with beta 0.5: sqrt(0.1 / P); what is drawn at
    P = 0 has no weight and sets no scale.
    """
    delta = jnp.array([[1.0, 1, 1], [-3, -3, -3], [2, 2, 2]])
    mask = jnp.array([[True, True, False], [True, False, False], [True, True, False]])
    np.testing.assert_allclose(r2d2.sequence_priority(delta, mask), [2.9, 1.95, 0.0], rtol=1e-6)
    probability = jnp.array([0.1, 0.4, 0.2, 0.0])
    half, one = (r2d2.importance_weights(probability, beta) for beta in (0.5, 1.0))
    np.testing.assert_allclose(half, [1, 0.5, 0.5**0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(one, [1, 0.25, 0.5, 0], rtol=1e-6)


@pytest.fixture(scope="module")
def watched(usual):
    """Returns the states around six updates which only take note, and what they got.

    Each says that sequence n of the leader's batch has |delta| = n + 1 throughout.
    """
    seen = []

    def update(networks, optimizers, params, opt_state, *batches, objective):
        jax.debug.callback(lambda *x: seen.append(x), *batches, ordered=True)
        return params, opt_state, jnp.broadcast_to(jnp.arange(1.0, 5), (8, 4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(r2d2, "scorer_update", update)
        in_chunks_of_one_update(patch)
        train_chunk = jax.jit(make_train(scorer=True).train_chunk)
        states = [usual()]
        for chunk in range(6):
            states.append(train_chunk(states[-1], chunk)[0])
        jax.effects_barrier()
    return states, jax.tree.map(np.array, seen)


def priorities(state):
    """Returns the replay's priorities: of 4 x 50 sequences, and zeros up to 256."""
    return np.array(state.replay.sum_tree_state.nodes[255:])


def is_sequence(batch, number, piece):
    """Returns whether a batch's sequence is this piece of the replay [time, ...]."""
    return (
        np.array_equal(batch.obs[:, number], piece.obs)
        and np.array_equal(batch.action[:, number], piece.action)
        and np.array_equal(batch.is_last[:, number], piece.is_last)
        and np.array_equal(batch.carry[number], piece.carry[0])
    )


def test_the_replays_priorities(watched):
    """The leader's batch sets the priorities of its sequences and of no others.

    They are 0.9 max + 0.1 mean to the power of alpha, once. Weights go by the priorities that the
    batch was drawn with, and by beta, linear from 0.4.
    """
    states, seen = watched
    found = set()
    for number, (_, leader_batch) in enumerate(seen):
        before, after = priorities(states[number]), priorities(states[number + 1])
        for place in np.flatnonzero((after != before) & (before > 0)):
            env, start = divmod(place, 50)
            span = slice(4 * start, 4 * start + 8)
            experience = states[number + 1].replay.experience
            piece = jax.tree.map(lambda x, e=env, s=span: x[e, s], experience)
            same = [n for n in range(4) if is_sequence(leader_batch, n, piece)]
            assert any(np.isclose(after[place], (n + 1) ** 0.6) for n in same)
            found |= set(same)
    assert len(found) > 1 and after.max() == pytest.approx(4**0.6)

    levels = np.arange(1.0, 5) ** 0.6
    ratios = levels / levels[:, None]
    for number, (_, leader_batch) in enumerate(seen):
        weight = leader_batch.weight
        ratio = (1 / weight) ** (1 / (0.4 + 0.6 * number / 70))
        assert weight.max() == 1
        assert number > 0 or np.all(weight == 1)
        assert np.isclose(ratio[:, None], ratios.ravel(), rtol=1e-4).any(axis=1).all()
    assert sum((leader_batch.weight < 1).sum() for _, leader_batch in seen) > 6


def test_new_sequences_get_the_largest_priority():
    """Not the largest cut to an integer, as flashbax does it: 1.93 would become 1."""
    args = complete()
    buffer = r2d2.make_replay(args)
    step = r2d2.Transition(*jnp.zeros(6))

    def steps(number):
        return jax.tree.map(lambda x: jnp.zeros((number, args.num_envs)), step)

    replay = r2d2.store(buffer, buffer.init(step), steps(8))
    assert replay.sum_tree_state.max_recorded_priority == 1
    replay = buffer.set_priorities(replay, jnp.array([0]), jnp.array([1.93 ** (1 / 0.6)]))
    replay = r2d2.store(buffer, replay, steps(4))
    found = np.array(replay.sum_tree_state.nodes[255:455]).reshape(4, 50)
    np.testing.assert_allclose(found[:, 0], [1.93, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], 1.93, rtol=1e-6)
    assert not found[:, 2:].any()
    np.testing.assert_allclose(replay.sum_tree_state.nodes[0], 3 + 5 * 1.93, rtol=1e-6)


def test_overwritten_sequences_lose_their_priority():
    """When the ring of 200 steps is full, what reaches beyond the newest step is no sequence."""
    args = complete()
    buffer = r2d2.make_replay(args)
    step = r2d2.Transition(*jnp.zeros(6))
    steps = jax.tree.map(lambda x: jnp.zeros((4, args.num_envs)), step)
    add = jax.jit(partial(r2d2.store, buffer))
    replay = buffer.init(step)
    for _ in range(52):
        replay = add(replay, steps)
    found = np.array(replay.sum_tree_state.nodes[255:455]).reshape(4, 50)
    # 208 steps: the ring's first 8 are new, and 4 to 11 are no longer one sequence.
    assert (found == 1).sum(axis=1).tolist() == [49] * 4 and not found[:, 1].any()
    assert not np.any(replay.sum_tree_state.nodes[455:])


def test_what_is_no_sequence_stays_so(usual, monkeypatch):
    """The sum tree's root has drifted upwards, so that a third of what is drawn lies beyond the items.

    The priority of those leaves stays 0.
    """
    in_chunks_of_one_update(monkeypatch)
    state = usual()
    train_chunk = jax.jit(make_train(scorer=True).train_chunk)
    for chunk in range(4):
        nodes = state.replay.sum_tree_state.nodes
        tree = state.replay.sum_tree_state.replace(nodes=nodes.at[0].multiply(1.5))
        drifted = state._replace(replay=state.replay.replace(sum_tree_state=tree))
        state, _ = train_chunk(drifted, chunk)
        found = priorities(state)
        assert found[:200].any() and not found[200:].any()


def test_players_draw_batches_of_their_own(watched):
    """All are sequences: consecutive steps of episodes of 4 + 1.

    The two batches differ, also from update to update; the follower's has no weights, and the mask
    leaves out burn-in, dummy steps and the last step.
    """
    _, seen = watched
    for follower_batch, leader_batch in seen:
        assert not np.array_equal(follower_batch.action, leader_batch.action)
        assert np.all(follower_batch.weight == 1)
        for batch in (follower_batch, leader_batch):
            assert batch.obs.shape == (8, 4, 3) and batch.td_target.shape == (8, 4)
            t = batch.obs[..., 2].astype(int)  # steps in the episode
            assert np.all((t[1:] - t[:-1]) % 5 == 1)
            np.testing.assert_array_equal(batch.is_last, t == 4)
            expected = ~batch.is_last
            expected[:3] = False
            expected[-1] = False
            np.testing.assert_array_equal(batch.mask, expected)
    assert len({follower_batch.action.tobytes() for follower_batch, _ in seen}) == 6


def trace_update(monkeypatch, **options):
    """Returns the batches of the program for these flags, abstract, and its number of updates."""
    seen = {}

    def update(networks, optimizers, params, opt_state, *batches, objective=None):
        seen.update(batches=batches, objective=objective)
        return params, opt_state, jnp.zeros((8, 4))

    def make_optimizers(args, num_updates, follower_rate):
        seen.update(num_updates=num_updates)
        return own_make_optimizers(args, num_updates, follower_rate)

    own_make_optimizers = r2d2.make_optimizers
    with monkeypatch.context() as patch:
        patch.setattr(r2d2, "make_optimizers", make_optimizers)
        patch.setattr(r2d2, "scorer_update", update)
        patch.setattr(r2d2, "baseline_update", update)
        training = make_train(**options)
        jax.eval_shape(training.train_chunk, abstract_state(training), 0)
    assert seen["num_updates"] * 8 == training.timesteps[-1] - training.first_timestep
    return SimpleNamespace(**seen)


def test_the_baseline_draws_one_batch(monkeypatch):
    """[time, batch], as each of SCORER's two is."""
    for options, number in (({}, 1), (dict(scorer=True), 2)):
        batches = trace_update(monkeypatch, **options).batches
        assert [batch.td_target.shape for batch in batches] == [(8, 4)] * number


@pytest.mark.parametrize("flags, loss", [({}, 0), (dict(follower_loss="msbe"), 1)])
def test_the_followers_objective(flags, loss, monkeypatch):
    """The variance, or what the flag asks for."""
    assert trace_update(monkeypatch, scorer=True, **flags).objective is LOSSES[loss]


def test_weights_of_the_follower(monkeypatch):
    """With the flag, the follower's batch has weights as the leader's has."""
    seen = []

    def update(networks, optimizers, params, opt_state, follower_batch, leader_batch, objective):
        weights = follower_batch.weight, leader_batch.weight
        jax.debug.callback(lambda *x: seen.append(np.array(x)), *weights, ordered=True)
        return params, opt_state, jnp.broadcast_to(jnp.arange(1.0, 5), (8, 4))

    monkeypatch.setattr(r2d2, "scorer_update", update)
    training = make_train(scorer=True, follower_importance_weights=True)
    jax.jit(training.train_chunk)(first_state(training), 0)
    jax.effects_barrier()
    weights = np.array(seen[1:])  # [updates, players, batch]
    assert np.all(weights.max(axis=2) == 1)
    assert np.all((weights < 1).any(axis=2).mean(axis=0) > 0.5)


# -------------------------------------------- The game --------------------------------------------


@partial(jax.jit, static_argnums=4)
def play(rates, params, follower_batch, leader_batch, objective=r2d2.follower_loss):
    """Returns the parameters after one round of plain gradient steps, and the errors that come back."""
    optimizers = r2d2.Players(optax.sgd(rates[0]), optax.sgd(rates[1]))
    opt_state = r2d2.init_optimizers(optimizers, params)
    after, _, delta = r2d2.scorer_update(
        NETWORKS, optimizers, params, opt_state, follower_batch, leader_batch, objective
    )
    return after, delta


def test_each_player_moves_only_itself():
    """A follower's step changes no bit of theta, a leader's none of phi."""
    params, *batches = example_game()
    after, _ = play((1.0, 0.0), params, *batches)
    assert tree_equal(after.control, params.control)
    assert not tree_equal(after.perception, params.perception)
    after, _ = play((0.0, 1.0), params, *batches)
    assert tree_equal(after.perception, params.perception)
    assert not tree_equal(after.control, params.control)


def test_each_player_reads_only_its_batch():
    """The follower's step depends on its batch alone; so does the leader's, while the follower rests."""
    params, follower_batch, leader_batch = example_game()
    other = follower_batch._replace(
        obs=np.full_like(follower_batch.obs, 3.0),
        td_target=np.full_like(follower_batch.td_target, 3.0),
    )
    mine, _ = play((1.0, 1.0), params, follower_batch, leader_batch)
    same, _ = play((1.0, 1.0), params, follower_batch, other)
    assert tree_equal(mine.perception, same.perception) and not tree_equal(mine, params)
    assert not tree_equal(mine.control, same.control)
    mine, _ = play((0.0, 1.0), params, follower_batch, leader_batch)
    same, _ = play((0.0, 1.0), params, other, leader_batch)
    assert tree_equal(mine.control, same.control) and not tree_equal(mine, params)


@pytest.mark.parametrize("objective", LOSSES)
def test_leader_answers_the_new_phi(objective):
    """Each player's step is its loss's gradient; the leader's and its errors are at the new phi."""
    params, follower_batch, leader_batch = example_game()
    after, delta = play((1.0, 1.0), params, follower_batch, leader_batch, objective)

    @jax.jit
    def perception_step(phi):
        def value(phi):
            return loss_of(objective, r2d2.Players(phi, params.control), follower_batch)

        return jax.tree.map(jnp.subtract, phi, jax.grad(value)(phi))

    @jax.jit
    def control_step(phi):
        def value(theta):
            return loss_of(r2d2.leader_loss, r2d2.Players(phi, theta), leader_batch)

        step = jax.tree.map(jnp.subtract, params.control, jax.grad(value)(params.control))
        return step, error(r2d2.Players(phi, params.control), leader_batch)

    assert largest_difference(perception_step(params.perception), after.perception) < 1e-5
    theta, errors = control_step(after.perception)
    assert largest_difference(theta, after.control) < 1e-5
    assert largest_difference(errors, delta) < 1e-5
    theta, errors = control_step(params.perception)
    assert largest_difference(theta, after.control) > 1e-4
    assert largest_difference(errors, delta) > 1e-4


def test_baseline_steps_on_one_loss():
    """Both parts move by the gradient of the weighted MSBE, from the old parameters."""
    params, batch, _ = example_game()
    step = optax.sgd(1.0)
    after, _, delta = jax.jit(partial(r2d2.baseline_update, NETWORKS, step))(
        params, step.init(params), batch
    )
    gradient = jax.jit(jax.grad(partial(loss_of, r2d2.leader_loss)))(params, batch=batch)
    assert_close(after, jax.tree.map(jnp.subtract, params, gradient))
    np.testing.assert_allclose(delta, error(params, batch), atol=1e-5)
    assert optax.tree.norm(gradient.perception) > 0.01 < optax.tree.norm(gradient.control)


@pytest.mark.parametrize(
    "options, rates",
    [
        (dict(scorer=True), (3e-4, 1e-4)),
        ({}, (1e-4, 1e-4)),
        (dict(scorer=True, leader_decay_power=1.5), (3e-4, 1e-4)),
    ],
)
def test_learning_rates(options, rates, monkeypatch):
    """Adam under a constant gradient moves by its rate.

    That is rate (1 - k / N)^power at update k, and exactly 0 after N.
    """
    updates = trace_update(monkeypatch, **options).num_updates
    assert updates == 70
    optimizers = r2d2.make_optimizers(complete(**options), updates, 3e-4)
    if not options:
        optimizers = (optimizers, optimizers)
    powers = (1.0, options.get("leader_decay_power", 1.0))
    for optimizer, rate, power in zip(optimizers, rates, powers, strict=True):
        opt_state = optimizer.init(jnp.zeros(1))
        moved = []
        step = jax.jit(partial(optimizer.update, jnp.full(1, 0.1)))
        for _ in range(updates + 2):
            change, opt_state = step(opt_state)
            moved.append(-change[0])
        moved = np.array(moved)
        left = 1 - np.arange(updates) / updates
        np.testing.assert_allclose(moved[:updates], rate * left**power, rtol=1e-3)
        assert moved[updates - 1] > 0 and not moved[updates:].any()


def test_parity_of_baseline_and_scorer(usual):
    """One seed gives both the same parameters and experience before learning; another seed, others."""
    baseline, scorer, other = usual(False, 3), usual(True, 3), usual(True, 4)
    assert tree_equal(baseline.params, scorer.params)
    assert tree_equal(baseline.replay, scorer.replay)
    mine, others = (state.params.control["Dense_0"]["kernel"] for state in (scorer, other))
    assert not np.array_equal(mine, others)
    mine, others = (state.replay.experience.action for state in (scorer, other))
    assert not np.array_equal(mine, others)
    # 3 x 8 + 8; 8 x 24 + 24, 8 x 24 and 8; 8 x 8 + 8; 8 x 2 + 2
    num_params = sum(leaf.size for leaf in jax.tree.leaves(baseline.params))
    assert num_params == 32 + 216 + 192 + 8 + 72 + 18


# -------------------------------------------- The loop --------------------------------------------


def test_update_by_update(usual, monkeypatch):
    """Targets change after the 67th update, and no bit of them before.

    A point of the curves shows the mean over environments of their last returns.
    """
    in_chunks_of_one_update(monkeypatch)
    training = make_train(scorer=True, learning_rate=0.01)
    np.testing.assert_array_equal(training.timesteps, 80 + 8 * np.arange(1, 71))
    assert (training.first_timestep, training.chunks_per_point) == (80, 1)
    state, train_chunk = usual(), jax.jit(training.train_chunk)
    first = state.params
    found = set()
    for chunk in range(68):
        assert tree_equal(state.target, first)
        state, metrics = train_chunk(state, chunk)
        cycles, steps = divmod(20 + 2 * (chunk + 1), 5)  # an episode of 4 steps and its dummy step
        assert metrics["episodes"] == state.episodes == 4 * (cycles + (steps == 4))
        assert metrics["returns"] == state.last_returns.mean() and metrics["finished"] == 1
        assert metrics["best_returns"] >= metrics["returns"]
        found.add(float(metrics["returns"]))
        if steps == 4:  # episodes have just ended
            assert tree_equal(state.last_returns, state.env_state.info["return"])
        if chunk == 66:
            assert tree_equal(state.target, state.params) and not tree_equal(state.target, first)
            first = state.target
    assert not tree_equal(state.params, first)
    assert len(found & {0.25, 0.5, 0.75}) > 1


def test_targets_change_within_chunks():
    """With a period of 4 updates, 32 of them are a chunk of 8 stretches; with 35, one."""
    for interval, counts in ((32, (4, 4, 24, 3)), (280, (35, 35, 35, 2))):
        args = complete(target_update_interval=interval)
        found = r2d2.count_steps(
            args.total_timesteps,
            args.learning_starts,
            args.update_interval,
            args.target_update_interval,
            args.num_envs,
        )
        assert found[:2] == (2, 10) and found[2:] == counts
    training = make_train(target_update_interval=32, learning_rate=0.01)
    state, _ = jax.jit(training.train_chunk)(first_state(training), 0)
    assert tree_equal(state.params, state.target)  # 24 updates are whole periods


@pytest.mark.parametrize("updates", [1, 2, 5, 7, 8, 20, 31, 33, 1000, 12_188, 48_750, 300_000])
@pytest.mark.parametrize("period", [1, 2, 5, 8, 13, 31, 37, 62, 67, 74, 250, 997, 1009, 2**30])
def test_counts_of_any_period(period, updates):
    """Chunks are of a sensible length, of whole stretches, and little is added to what was asked for."""
    counts = r2d2.count_steps(800 + 80 * updates, 800, 80, 80 * period, 10)
    assert (counts.interval_steps, counts.warmup_intervals, counts.target_period) == (8, 10, period)
    assert period % counts.stretch_updates == 0
    assert counts.chunk_updates % counts.stretch_updates == 0
    assert updates <= counts.num_updates < updates + counts.chunk_updates
    assert counts.num_chunks <= 2_000
    assert counts.chunk_updates >= min(8, updates)
    if updates < 60_000 and period < 900:
        assert counts.chunk_updates <= max(32, period)


def test_counts_of_the_papers_runs():
    """Both update intervals, 1e6 steps: points of 31 and 25 updates."""
    for interval, period, chunk, points in ((80, 4960, 31, 394), (20, 5000, 25, 1950)):
        counts = r2d2.count_steps(1_000_000, 25_000, interval, period, 10)
        assert (counts.stretch_updates, counts.chunk_updates) == (chunk, chunk)
        assert counts.num_chunks == points


def test_best_mean():
    """Steps count from that on by which both environments have finished an episode; before it is 0."""
    last_returns = jnp.array([[9.0, 0], [1, 2], [3, -5], [-1, -1]])
    finished = jnp.array([[True, False], [True, True], [True, True], [True, True]])
    assert r2d2.best_mean(finished, last_returns) == 1.5
    assert r2d2.best_mean(finished[3:], last_returns[3:]) == -1
    assert r2d2.best_mean(finished[:1], last_returns[:1]) == 0


def test_best_returns_look_at_every_step(usual):
    """Of a chunk's 70 steps, those at which episodes end show the mean reward there till the next."""
    training = make_train(scorer=True)
    state, metrics = jax.jit(training.train_chunk)(usual(), 0)
    rows = time_major(state.replay, 90)  # 20 steps before learning, 70 of the chunk
    ends = np.flatnonzero(rows.is_last.all(axis=1)) - 1  # the steps before the dummy steps
    means = rows.reward[ends].mean(axis=1)
    standing = means[ends >= 20].max()
    assert ends[0] == 3 and len(ends) == 18 and np.all(np.diff(ends) == 5)
    best = max(standing, means[ends < 20][-1])  # an episode's end before the chunk shows at first
    assert metrics["best_returns"] == pytest.approx(best) and best > means.min()
    assert metrics["returns"] == pytest.approx(state.last_returns.mean())


def test_intervals_are_whole_steps():
    """16 environment steps are 2 steps of 10 environments, 80 are 8; targets change at whole updates."""
    for interval, period, expected in (
        (16, 5000, (20, 5000)),
        (80, 5000, (80, 4960)),
        (1, 1, (10, 10)),
    ):
        args = complete(
            num_envs=10,
            update_interval=interval,
            target_update_interval=period,
            buffer_size=10_000,
        )
        assert (args.update_interval, args.target_update_interval) == expected
    # Algorithm 1: an update at the first interval's end after T_start.
    for starts, first_update in ((100, 160), (159, 160), (160, 240)):
        training = make_train(
            num_envs=10,
            update_interval=80,
            learning_starts=starts,
            buffer_size=10_000,
            total_timesteps=10_000,
        )
        assert training.first_timestep == first_update - 80
        assert (training.timesteps % 80 == 0).all()
    training = make_train(target_update_interval=10**12)  # never
    jax.eval_shape(training.train_chunk, abstract_state(training), 0)


def test_epsilon():
    """Of 1,000 environments half the random actions are the other one: epsilon falls in 20 steps.

    No environment completes an episode meanwhile: there is no return yet, nor is 0 one.
    """
    options = dict(
        num_envs=1000,
        learning_starts=30_000,
        total_timesteps=40_000,
        buffer_size=40_000,
        epsilon_end=0.0,
        epsilon_steps=20_000,
        update_interval=10_000,
    )
    training = make_train(Cue(length=99), **options)
    state = first_state(training)
    rows = time_major(state.replay, 30)
    _, q = r2d2.q_values(NETWORKS, state.params, rows.carry[0], rows.obs, rows.is_last)
    others = (rows.action != q.argmax(axis=-1)).mean(axis=1)
    expected = 0.5 * np.maximum(0, 1 - np.arange(30) / 20)
    np.testing.assert_allclose(others, expected, atol=0.065)
    assert not others[20:].any() and others[19] > 0
    assert not state.finished.any() and state.episodes == 0
    _, metrics = jax.jit(training.train_chunk)(state, 0)
    assert (metrics["returns"], metrics["best_returns"], metrics["finished"]) == (0, 0, 0)


def test_no_copy_of_the_replay():
    """A compiled chunk needs far less memory of its own than the replay has: nothing copies it."""
    training = make_train(scorer=True, buffer_size=400_000)
    state = abstract_state(training)
    program = jax.jit(training.train_chunk, donate_argnums=0).lower(state, 0).compile()
    memory = program.memory_analysis()
    leaves = jax.tree.leaves(state.replay.experience)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert size > 16e6
    assert memory.temp_size_in_bytes < size / 8
    assert memory.alias_size_in_bytes > size


# --------------------------------------------- navix ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Navix-Empty-Random-5x5-v0"])
def test_navix_episodes_against_a_loop(name):
    """One real environment, its actions played again in a plain loop that knows where navix resets.

    The same steps are stored, and the script's return and number of episodes are the loop's.
    """
    import navix

    args = complete(
        env=name,
        num_envs=1,
        learning_starts=400,
        total_timesteps=500,
        update_interval=2,
        target_update_interval=6,
    )
    state = jax.jit(r2d2.make_train(args, r2d2.make_env(args)).init)(jnp.uint32(5), 0.0)
    stored = jax.tree.map(lambda x: np.array(x[0, :400]), state.replay.experience)
    env = navix.make(name, observation_fn=navix.observations.symbolic_first_person)
    reset_key = jax.random.split(r2d2.random_key(5, r2d2.INITIALIZING), 4)[0]
    now = jax.jit(env.reset)(jax.random.key_data(jax.random.split(reset_key, 1))[0])
    step = jax.jit(env.step)
    returns, kinds, total, length = [], [], 0.0, 0
    for t in range(400):
        new = step(now, stored.action[t])
        assert np.array_equal(stored.obs[t], now.observation.ravel())
        if now.step_type > 0:  # a dummy step: the episode ended with the step before
            assert stored.is_last[t] and stored.reward[t] == 0
            assert not stored.terminated[t] and new.t == 0
            total, length = 0.0, 0
        else:
            total, length = total + float(new.reward), length + 1
            assert not stored.is_last[t] and stored.reward[t] == new.reward
            assert stored.terminated[t] == (new.step_type == 2)
            if new.step_type > 0:
                assert length == new.t <= 100
                returns.append(total)
                kinds.append(int(new.step_type))
        now = new
    assert stored.obs.dtype == np.uint8
    assert state.episodes == len(returns) and state.last_returns.tolist() == returns[-1:]
    assert {1, 2} <= set(kinds) and set(returns) == {0.0, 1.0}
    assert stored.is_last.sum() in (len(kinds), len(kinds) - 1)
    assert tree_equal(now.observation.ravel(), state.obs[0])


@pytest.mark.slow
def test_dynamic_obstacles_ends_where_a_ball_moves_into_the_player():
    """In navix 0.7.4 that ends the episode with 0; walking into a ball does nothing (differences.md)."""
    import navix

    env = navix.make(
        "Navix-Dynamic-Obstacles-6x6-v0", observation_fn=navix.observations.symbolic_first_person
    )
    turn, forward = 0, 2
    step = jax.jit(jax.vmap(env.step, in_axes=(0, None)))
    timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 64))
    right_down_left_up = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])
    walks, hits = 0, 0
    for _ in range(40):
        player = timestep.state.entities["player"]
        position = np.asarray(player.position).reshape(64, 2)
        ahead = position + right_down_left_up[np.asarray(player.direction).reshape(64)]
        balls = np.asarray(timestep.state.entities["ball"].position)
        faces_ball = (balls == ahead[:, None]).all(axis=-1).any(axis=-1)
        faces_ball &= np.asarray(timestep.step_type) == 0  # the others start a new episode now

        turned, walked = step(timestep, turn), step(timestep, forward)
        after = np.asarray(walked.state.entities["player"].position).reshape(64, 2)
        assert (after == position)[faces_ball].all()
        assert (turned.step_type == walked.step_type)[faces_ball].all()
        walks += faces_ball.sum()

        ended = np.asarray(turned.step_type) == 2  # a player that only turns reaches nothing
        assert (np.asarray(turned.reward)[ended] == 0).all()
        hits += ended.sum()
        timestep = turned
    assert walks > 20 and hits > 20


# --------------------------------------------- Memory ---------------------------------------------

PERCEPTION = r2d2.Perception


class Forgetful(PERCEPTION):
    """Cuts the hidden state after every step."""

    @nn.compact
    def __call__(self, carry, obs, is_last):
        return PERCEPTION.__call__(self, carry, obs, jnp.ones_like(is_last))


@pytest.mark.slow
@pytest.mark.parametrize("perception", [PERCEPTION, Forgetful])
def test_memory_probe(perception, monkeypatch):
    """The first step's cue decides the right action at the last: with memory 1, without it 1/2."""
    monkeypatch.setattr(r2d2, "Perception", perception)
    training = make_train(
        Cue(timeouts=False),
        scorer=True,
        num_envs=8,
        hidden_dim=32,
        sequence_length=12,
        burn_in=2,
        batch_size=16,
        buffer_size=8000,
        learning_starts=800,
        total_timesteps=6000,
        update_interval=16,
        target_update_interval=320,
        learning_rate=3e-3,
        gamma=0.9,
        epsilon_steps=2000,
        epsilon_end=0.0,
    )
    state = jax.jit(training.init)(jnp.uint32(0), jnp.float32(6e-3))
    train_chunk = jax.jit(training.train_chunk, donate_argnums=0)
    returns = []
    for chunk in range(len(training.timesteps)):
        state, metrics = train_chunk(state, chunk)
        returns.append(metrics["returns"])
    last = np.mean(returns[-len(returns) // 5 :])
    if perception is Forgetful:
        assert 0.2 < last < 0.8
    else:
        assert last > 0.95


# ---------------------------------------- The command line ----------------------------------------


def refusal(capsys, **options):
    """Returns what the checks say on standard error while they end the program."""
    with pytest.raises(SystemExit) as end:
        r2d2.make_env(r2d2.complete(r2d2.Args(**options)))
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    return err


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(env="Navix-FourRoom-v0"), ["--env", "Navix-FourRooms-v0"]),
        (dict(env="Breakout-MinAtar"), ["--env"]),
        (dict(num_envs=0), ["--num-envs 0"]),
        (dict(num_seeds=0), ["--num-seeds"]),
        (dict(seed=-1), ["--seed"]),
        (dict(burn_in=99), ["--burn-in 99", "98"]),
        (dict(burn_in=-1), ["--burn-in"]),
        (dict(n_step=0), ["--n-step"]),
        (dict(n_step=101), ["--n-step"]),
        (dict(sequence_length=1), ["--sequence-length"]),
        (dict(buffer_size=2000), ["--buffer-size", "2080"]),
        (dict(learning_starts=999), ["--learning-starts", "1000"]),
        (dict(total_timesteps=25_000), ["--total-timesteps 25000", "--learning-starts 25000"]),
        (dict(per_alpha=1.1), ["--per-alpha"]),
        (dict(per_beta=-0.1), ["--per-beta"]),
        (dict(update_interval=0), ["--update-interval"]),
        (dict(gamma=1.5), ["--gamma"]),
        (dict(learning_rate=float("nan")), ["--learning-rate"]),
        (dict(follower_loss="msbe"), ["--follower-loss", "--scorer"]),
        (dict(leader_decay_power=1.5), ["--leader-decay-power", "--scorer"]),
        (dict(follower_learning_rate=(1e-3,)), ["--follower-learning-rate", "--scorer"]),
        (dict(follower_importance_weights=True), ["--follower-importance-weights", "--scorer"]),
        (dict(scorer=True, follower_learning_rate=()), ["--follower-learning-rate", "value"]),
        (
            dict(scorer=True, follower_learning_rate=(1e-3, 0.0)),
            ["--follower-learning-rate 0.0"],
        ),
    ],
)
def test_bad_input(options, words, capsys):
    """One sentence that names the flag, exit code 2."""
    sentence = refusal(capsys, **options)
    assert all(word in sentence for word in words), sentence


def test_the_papers_environments(monkeypatch):
    """All eight are accepted, with navix's limit of 100 steps, and seen in the first person."""
    made = []
    monkeypatch.setattr(r2d2, "vectorize", made.append)
    names = (
        "DoorKey-6x6 SimpleCrossingS9N2 DistShift2 LavaGapS6 GoToDoor-8x8 Empty-Random-8x8 "
        "Dynamic-Obstacles-6x6 FourRooms"
    ).split()
    for name in names:
        r2d2.make_env(r2d2.complete(r2d2.Args(env=f"Navix-{name}-v0")))
    assert len(made) == 8
    for env in made:
        assert env.max_steps == 100
        assert env.observation_space.shape == (7, 7, 3) and env.action_space.maximum == 6


def read_record(run: Path):
    """Returns the arrays of a run's results.npz, and what it says of itself."""
    with np.load(run / "results.npz") as file:
        record = {name: file[name] for name in file.files}
    return record, json.loads(str(record.pop("meta")))


@pytest.mark.slow
def test_run_and_resume(tmp_path):
    """A run of two seeds, stopped by Ctrl-C, and one that goes on from there; both begin alike."""
    start = make_start(SCRIPT, tmp_path, **UNOPTIMIZED)
    flags = (
        "--env Navix-Empty-Random-5x5-v0 --scorer --diagnostics --num-seeds 2 --num-envs 2 "
        "--hidden-dim 8 --batch-size 4 --sequence-length 8 --burn-in 3 --n-step 3 "
        "--buffer-size 400 --learning-starts 100 --update-interval 4 "
        "--target-update-interval 32 --total-timesteps 4100"
    ).split()
    process = start(*flags, "--checkpoint-every-minutes", 60)
    head = [process.stdout.readline() for _ in range(4)]  # the last is the first tenth's
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "update interval 4, target update interval 32" in head[1]
    stopped = tmp_path / head[0].strip()
    process = start("--resume", stopped, "--save-model")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    run = tmp_path / out.splitlines()[0]
    time_and_date = r"\d{8}-\d{6}-\d{6}"
    name = rf"scorer_r2d2__Navix-Empty-Random-5x5-v0__scorer-num-envs-2-\S+__s0__{time_and_date}"
    assert re.fullmatch(name, run.name)
    files = sorted(path.name for path in run.iterdir())
    assert files == ["args.json", "model.safetensors", "results.npz"]

    part, some = read_record(stopped)
    record, all_ = read_record(run)
    assert not some["complete"] and all_["complete"] and all_["script"] == "scorer_r2d2"
    points = len(part["timesteps"])
    assert 10 < points < 125 == len(record["timesteps"]) and record["timesteps"][-1] == 4100
    curves = set(
        "returns best_returns episodes follower_loss leader_loss bellman_error_mean "
        "bellman_error_variance perception_norm control_norm".split()
    )
    assert record.keys() == curves | {"timesteps", "seeds"}
    for name in curves:
        assert record[name].shape == (2, 125)
        np.testing.assert_array_equal(record[name][:, :points], part[name], err_msg=name)
    assert not np.array_equal(*record["control_norm"]) and np.nanmax(record["returns"]) <= 1
    known = np.isfinite(record["returns"])
    assert np.array_equal(known, np.isfinite(record["best_returns"])) and known.any()
    assert np.all(record["best_returns"][known] >= record["returns"][known])
    assert np.all(np.diff(record["episodes"]) >= 0) and np.all(record["episodes"][:, -1] > 40)

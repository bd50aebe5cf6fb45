"""scorer_pqn_atari.py on the real envpool: ends, masks, targets, scores, evaluation, the run."""

import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from typing import NamedTuple

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import finish
from helpers import make_start
from helpers import refusal
from helpers import results

import scorer_pqn
import scorer_pqn_atari as pqn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))
from paper import HUMAN  # noqa: E402

SMALL = dict(
    env="Breakout-v5",
    num_envs=4,
    num_steps=64,
    num_minibatches=4,
    total_timesteps=10_000,
    latent_dim=8,
    hidden_dim=8,
    epsilon_end=1.0,
)
ROLLOUTS = 4  # 256 steps of random play, in which all environments lose lives and some the game
pytestmark = pytest.mark.usefixtures("quick_compilation")


def setup(**options):
    """Returns arguments, the environment, the parts of training, and a seed's first state."""
    args = pqn.complete(pqn.Args(**SMALL | options))
    env = pqn.make_env(args)
    training = pqn.make_train(args, env)
    return args, env, training, jax.jit(training.init)(np.uint32(0))


def start_games(pool, args):
    """Returns games of a pool, none of which is finished yet."""
    zeros = jnp.zeros(args.num_envs, jnp.float32)
    return pqn.start_games(pool, zeros, zeros > 0)


def make_twin(args, num_envs, *key):
    """Returns the envpool object that make_pool makes of this key, to be stepped outside XLA."""
    made = []

    def watch(*names, **options):
        made.append(envpool_make(*names, **options))
        return made[-1]

    envpool_make = envpool.make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envpool, "make", watch)
        pqn.make_pool(args, num_envs, *key)
    return made[0]


class Recorded(NamedTuple):
    """Rollouts of random play, [steps, envs, ...], beside what envpool says outside XLA."""

    args: Any
    rollout: Any  # what acting stored
    td_target: Any
    mask: Any
    raw: dict  # what envpool said to the same actions on the same seeds
    state: Any  # the learner's, afterwards
    metrics: list  # of each rollout


def record_play(**options) -> Recorded:
    """Plays ROLLOUTS rollouts, and repeats their actions outside XLA."""
    args, env, training, state = setup(**options)
    pool = env.make_pool(args.num_envs, 7)
    games = start_games(pool, args)
    stored = []
    metrics = []
    own_compute_lambda_returns = pqn.compute_lambda_returns

    def watch(rollout, next_value, gamma, td_lambda):
        jax.debug.callback(lambda *seen: stored.append(jax.tree.map(np.array, seen)), rollout)
        return own_compute_lambda_returns(rollout, next_value, gamma, td_lambda)

    targets = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pqn, "compute_lambda_returns", watch)
        play = jax.jit(partial(training.play, pool.step))
        for chunk in range(ROLLOUTS):
            state, games, (batch, _), of_chunk = play(state, games, np.int32(chunk))
            targets.append(
                [
                    np.asarray(x).reshape(args.num_steps, args.num_envs)
                    for x in (batch.td_target, batch.mask)
                ]
            )
            metrics.append(jax.device_get(of_chunk))
        jax.effects_barrier()
    rollout = jax.tree.map(lambda *x: np.concatenate(x), *[rollout for (rollout,) in stored])
    td_target, mask = (np.concatenate(x) for x in zip(*targets))

    twin = make_twin(args, args.num_envs, 7)
    twin.reset()
    raw = []
    for action in rollout.action:
        obs, reward, terminated, truncated, info = twin.step(action)
        raw.append(
            dict(
                obs=obs,
                terminated=terminated,
                truncated=truncated,
                points=info["reward"],
                lives=info["lives"],
                elapsed=info["elapsed_step"],
                over=info["terminated"] > 0,
            )
        )
    raw = {name: np.array([step[name] for step in raw]) for name in raw[0]}
    return Recorded(args, rollout, td_target, mask, raw, state, metrics)


@pytest.fixture(
    scope="module",
    params=[
        dict(),
        dict(max_episode_steps=60, env="Qbert-v5"),
        dict(episodic_life=False, clip_rewards=False),
        dict(bootstrap_at_timeout=False, max_episode_steps=60),
    ],
    ids=["lives", "timeouts", "whole games", "timeouts end"],
)
def record(request):
    """Returns play under several protocols."""
    return record_play(**request.param)


# --------------------------------------- Bookkeeping ----------------------------------------------


def test_bookkeeping_on_recorded_steps(record):
    """By the counters alone: what is a dummy, and where episodes, values and games end.

    A step that the game did not count is a dummy; a life fewer ends an episode if episodic; before
    a counter at 0 a game has ended, by its last life or, at the limit, by time.
    """
    args, rollout, raw = record.args, record.rollout, record.raw
    counted = np.diff(raw["elapsed"], axis=0, prepend=0) == 1
    np.testing.assert_array_equal(record.mask, counted)
    np.testing.assert_array_equal(rollout.is_dummy, ~counted)
    first_lives = dict(Breakout=5, Qbert=4)[args.env.removesuffix("-v5")]
    fewer = np.diff(raw["lives"], axis=0, prepend=first_lives) < 0
    last_life = fewer & (raw["lives"] == 0)
    timeout = raw["elapsed"] == args.max_episode_steps
    life_ends = fewer if args.episodic_life else last_life
    np.testing.assert_array_equal(rollout.done, life_ends | timeout)
    np.testing.assert_array_equal(rollout.done[:-1], rollout.is_dummy[1:])
    restarts = raw["elapsed"][1:] == 0
    np.testing.assert_array_equal(restarts, (timeout | (raw["lives"] == 0))[:-1])
    expected = life_ends if args.bootstrap_at_timeout else life_ends | timeout
    np.testing.assert_array_equal(rollout.terminated, expected)
    assert record.state.dummies == rollout.is_dummy.sum() > 0

    np.testing.assert_array_equal(rollout.obs[1:], raw["obs"][:-1])
    assert rollout.obs.dtype == np.uint8
    points = np.sign(raw["points"]) if args.clip_rewards else raw["points"]
    np.testing.assert_array_equal(rollout.reward, points)
    assert not rollout.reward[rollout.is_dummy].any()

    # All of this was there to be seen.
    lost_lives = fewer & (raw["lives"] > 0)
    assert lost_lives.any()
    assert (rollout.done & lost_lives).any() == (args.episodic_life or timeout.any())
    if args.max_episode_steps == 60:
        assert timeout.any()
    else:
        assert (raw["over"] & rollout.terminated).any()


def test_game_over_at_the_time_limit():
    """The same games cut where one is over anyway: envpool says truncated, yet no value follows."""
    raw = record_play().raw
    t, e = np.argwhere(raw["over"])[0]
    _, rollout, _, _, raw, *_ = record_play(max_episode_steps=int(raw["elapsed"][t, e]))
    assert raw["truncated"][t, e] and raw["over"][t, e] and not raw["terminated"][t, e]
    assert rollout.terminated[t, e] and rollout.done[t, e] and rollout.is_dummy[t + 1, e]


def state_before(ended, lives):
    """Returns what tell_ends looks at of the step before."""
    return pqn.EnvState(handle=None, ended=np.array(ended), lives=np.array(lives))


def test_a_game_that_ends_in_idle_frames_is_over():
    """At the dummy step after a lost life more lives than before are a new game; as many are not."""
    no = np.zeros(4, bool)
    # A life lost, then more lives; the same, then fewer; the game over; no dummy.
    before = state_before([True, True, True, False], [2, 2, pqn.MOST_LIVES, 2])
    over, no_value = pqn.tell_ends(before, no, no, no, np.array([3, 1, 3, 3]), True)
    np.testing.assert_array_equal(over, [True, False, False, False])
    assert not no_value.any()


@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_life_lost_at_the_time_limit(episodic_life):
    """It ends the episode's value where lives are episodes; a time-out with all lives does not."""
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    before = state_before([False, False], [3, 3])
    over, no_value = pqn.tell_ends(before, no, yes, no, np.array([2, 3]), episodic_life)
    assert over.all()
    np.testing.assert_array_equal(no_value, [episodic_life, False])


def scripted_step(terminated, truncated, over, lives, points):
    """Returns a pool's step that answers from these lists [steps] or [steps, envs], in turn.

    And the games before its first step, of which the handle counts.
    """
    lists = [np.atleast_2d(np.array(x).T).T for x in (terminated, truncated, over, lives, points)]
    lists = [jnp.array(np.broadcast_to(x, lists[3].shape)) for x in lists]
    num_envs = lists[3].shape[1]
    obs = jnp.zeros((num_envs, 4, 84, 84), jnp.uint8)

    def step(env_state, action):
        now = [x[env_state.handle] for x in lists]
        info = dict(terminated=now[2], lives=now[3], reward=now[4].astype(jnp.float32))
        answer = obs, info["reward"], now[0] > 0, now[1] > 0, info
        return pqn.read_answer(env_state.handle + 1, env_state, answer, True)

    env_state = pqn.EnvState(jnp.int32(0), jnp.zeros(num_envs, bool), lists[3][0])
    zeros = jnp.zeros(num_envs, jnp.float32)
    return step, pqn.Games(env_state, obs, zeros, zeros, zeros > 0)


def test_scores_around_a_silent_restart():
    """A game of 1 + 2 points ends in idle frames; the next, of 4 + 8, by its last life.

    Its dummy, with all lives back, is no third game; 16 points are of one that goes on.
    """
    step, games = scripted_step(
        terminated=[0, 1, 0, 0, 1, 0, 0, 0],
        truncated=[0] * 8,
        over=[0, 0, 0, 0, 1, 0, 0, 0],
        lives=[2, 1, 3, 3, 0, 3, 3, 3],
        points=[1, 2, 0, 4, 8, 0, 16, 0],
    )
    _, _, training, state = setup(num_envs=1, num_steps=8)
    state, games, (batch, _), metrics = jax.jit(partial(training.play, step))(state, games, 0)
    assert (state.episodes, state.dummies) == (2, 2)
    assert (games.scores, games.score, metrics["returns"]) == (12, 16, 12)
    np.testing.assert_array_equal(np.flatnonzero(~batch.mask), [2, 5])


def test_scores_are_those_of_envpool(record):
    """Points between two restarts of envpool's counter; the mean needs a game from everyone."""
    args, raw, state = record.args, record.raw, record.state
    scores = [[] for _ in range(args.num_envs)]
    running = np.zeros(args.num_envs)
    for points, elapsed, over in zip(raw["points"], raw["elapsed"], raw["over"]):
        running = np.where(elapsed == 0, 0, running) + points
        for e in np.flatnonzero(over | (elapsed == args.max_episode_steps)):
            scores[e].append(running[e])
    assert state.episodes == sum(map(len, scores)) > 0
    # Clipped ones would sum to less.
    assert raw["points"].max() > (1 if args.env == "Qbert-v5" else 0)
    finished = np.array([len(found) > 0 for found in scores])
    np.testing.assert_array_equal(state.finished, finished)
    last = [found[-1] for found in scores if found]
    np.testing.assert_array_equal(state.scores[finished], last)
    metrics = record.metrics[-1]
    assert metrics["finished"] == finished.mean()
    assert metrics["returns"] == pytest.approx(np.mean(last), rel=1e-6)
    assert metrics["episodes"] == state.episodes
    if args.max_episode_steps == 60:
        assert state.episodes >= 16 and finished.all()


# ------------------------------------ Targets and losses ------------------------------------------


def test_targets_never_see_a_dummy(record):
    """Per environment, the real steps alone.

    Each ends in its own value, or mixes with the next real step's return.
    """
    args, rollout, raw = record.args, record.rollout, record.raw
    networks = pqn.make_networks(args, envpool.make_spec(args.env).action_space.n)
    following = raw["obs"].reshape(-1, 4, 84, 84)  # the true next observations
    value = pqn.q_values(networks, record.state.params, following).max(axis=-1)
    value = np.asarray(value).reshape(rollout.reward.shape)
    for e in range(args.num_envs):
        later = None
        for t in reversed(np.flatnonzero(record.mask[:, e])):
            bootstrap = value[t, e] * (not rollout.terminated[t, e])
            if not rollout.done[t, e] and t % args.num_steps != args.num_steps - 1:
                bootstrap = (1 - args.td_lambda) * value[t, e] + args.td_lambda * later
            later = rollout.reward[t, e] + args.gamma * bootstrap
            assert record.td_target[t, e] == pytest.approx(later, rel=1e-3, abs=1e-4), (t, e)


def example_batch(size=32):
    """Returns networks, the players' parameters, and a minibatch of noise, some of it dummies."""
    args, _, _, state = setup()
    rng = np.random.default_rng(0)
    batch = pqn.Batch(
        obs=jnp.array(rng.integers(0, 256, (size, 4, 84, 84)), jnp.uint8),
        action=jnp.array(rng.integers(0, 4, size)),
        td_target=jnp.array(rng.normal(size=size), jnp.float32),
        mask=jnp.array(rng.random(size) < 0.7),
    )
    return pqn.make_networks(args, 4), state.params, batch


@pytest.mark.parametrize("name", ["follower_loss", "leader_loss"])
def test_losses_are_those_of_the_real_steps(name):
    """Loss and gradients are scorer_pqn.py's on the real steps, whatever the dummies hold."""
    networks, params, batch = example_batch()

    @jax.jit
    def masked(batch):
        def loss(params):
            delta = pqn.bellman_error(networks, params, batch)
            return getattr(pqn, name)(delta, batch.mask)

        return jax.value_and_grad(loss)(params)

    @jax.jit
    def plain(batch):
        def loss(params):
            return getattr(scorer_pqn, name)(scorer_pqn.bellman_error(networks, params, batch))

        return jax.value_and_grad(loss)(params)

    real = np.flatnonzero(batch.mask)
    expected = plain(jax.tree.map(lambda x: x[real], batch))
    changed = batch._replace(
        obs=jnp.where(batch.mask[:, None, None, None], batch.obs, 0),
        td_target=batch.td_target + 1e3 * ~batch.mask,
    )
    for given in batch, changed:
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), masked(given), expected
        )
    none = masked(batch._replace(mask=jnp.zeros(32, bool)))
    assert not any(np.any(x) for x in jax.tree.leaves(none))


@pytest.mark.parametrize(
    "variant",
    [dict(), dict(scorer=True), dict(scorer=True, follower_loss="msbe")],
    ids=["baseline", "scorer", "msbe"],
)
def test_updates_learn_the_targets(variant):
    """Forty updates on one rollout take a third of its error.

    Minibatches go once through the rollout in each epoch, in another order.
    """
    rates = dict(learning_rate=3e-3)
    if variant:
        rates.update(follower_learning_rate=3e-3)
    sizes = dict(num_steps=16, latent_dim=64, hidden_dim=64)
    args, env, training, state = setup(**variant, **rates, **sizes)
    pool = env.make_pool(args.num_envs, 0)
    play = jax.jit(partial(training.play, pool.step))
    state, _, (batch, minibatches), _ = play(state, start_games(pool, args), np.int32(0))
    assert training.num_updates == 8 and minibatches.shape == (8, 16)
    for epoch in minibatches.reshape(2, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(64))
    assert not np.array_equal(minibatches[:4], minibatches[4:])

    networks = pqn.make_networks(args, 4)

    @jax.jit
    def loss(params):
        return pqn.leader_loss(pqn.bellman_error(networks, params, batch), batch.mask)

    before = loss(state.params)
    players = state.params, state.opt_state
    learn = jax.jit(training.learn)
    for update in range(40):
        players = learn(players, batch, minibatches, update % 8)
    assert loss(players[0]) < before * 2 / 3


# ------------------------- Environments, networks, evaluation -------------------------------------


def test_seeds_share_no_environment():
    """Those of a seed, of its neighbour, of a resumed run and of evaluations have their own."""
    args, *_ = setup()
    keys = (0, 0), (1, 0), (0, 5), (0, 0, 1)
    seeds = [make_twin(args, 4, *key).spec.config.env_seed for key in keys]
    assert len({seed for of_pool in seeds for seed in of_pool}) == 16
    assert list(make_twin(args, 4, 0, 0).spec.config.env_seed) == list(seeds[0])


def test_options_reach_envpool():
    """Each flag of the protocol is envpool's option."""
    protocol = dict(
        sticky_actions=0.25,
        episodic_life=False,
        clip_rewards=False,
        frame_skip=3,
        noop_max=7,
        max_episode_steps=99,
    )
    config = make_twin(setup(**protocol)[0], 2, 0).spec.config
    assert config.repeat_action_probability == 0.25
    assert not config.episodic_life and not config.reward_clip
    assert (config.frame_skip, config.noop_max, config.max_episode_steps) == (3, 7, 99)
    usual = make_twin(setup()[0], 2, 0).spec.config
    assert usual.repeat_action_probability == 0
    assert usual.episodic_life and usual.reward_clip
    assert (usual.frame_skip, usual.noop_max, usual.max_episode_steps) == (4, 30, 27_000)


def test_networks():
    """The paper's sizes; bytes are divided by 255 inside: floats in [0, 255] give the same."""
    networks = pqn.make_networks(pqn.complete(pqn.Args()), 6)
    obs = np.random.default_rng(0).integers(0, 256, (2, 4, 84, 84)).astype(np.uint8)
    z, phi = networks.perception.init_with_output(jax.random.key(0), obs)
    theta = networks.control.init(jax.random.key(1), z)["params"]
    assert z.shape == (2, 256) and z.min() == 0
    shapes = {
        name: layer["kernel"].shape for name, layer in phi["params"].items() if "kernel" in layer
    }
    assert shapes == {
        "Conv_0": (8, 8, 4, 32),
        "Conv_1": (4, 4, 32, 64),
        "Conv_2": (3, 3, 64, 64),
        "Dense_0": (7 * 7 * 64, 256),
    }
    norms = {name: phi["params"][name]["scale"].shape for name in phi["params"] if "Norm" in name}
    widths = zip(range(4), (32, 64, 64, 256))  # numbered in the order of computation
    assert norms == {f"LayerNorm_{number}": (width,) for number, width in widths}
    assert theta["Dense_0"]["kernel"].shape == (256, 256)
    assert theta["Dense_1"]["kernel"].shape == (256, 6)
    of_floats = networks.perception.apply(phi, obs.astype(np.float32))
    np.testing.assert_allclose(of_floats, z, rtol=1e-4, atol=1e-4)


def test_evaluation():
    """The mean score of each environment's first whole game, as greedy play outside XLA gets it."""
    args, env, training, state = setup(max_episode_steps=150)
    pool = env.make_pool(4, 3, 1)
    evaluate = jax.jit(partial(training.evaluate, pool.step))
    networks = pqn.make_networks(args, 4)
    greedy = jax.jit(lambda obs: pqn.q_values(networks, state.params, obs).argmax(axis=-1))
    twin = make_twin(args, 4, 3, 1)
    for _ in range(2):  # games that the first does not finish do not go on in the second
        score = evaluate(state.params, start_games(pool, args))
        obs, _ = twin.reset()
        scores, first = np.zeros(4), np.full(4, np.nan)
        while np.isnan(first).any():
            obs, _, _, truncated, info = twin.step(np.asarray(greedy(obs)))
            scores += info["reward"]
            over = truncated | (info["terminated"] > 0)
            first = np.where(np.isnan(first) & over, scores, first)
        assert score == first.mean()


def test_evaluation_counts_first_games():
    """Games of 2 and 7 steps that pay 1, 2, 3, ...: 1 + 2 and 1 + ... + 7, no later ones."""
    steps = np.arange(1, 30)[:, None]
    step, games = scripted_step(
        terminated=[[0, 0]] * 29,
        truncated=steps % [2, 7] == 0,
        over=[[0, 0]] * 29,
        lives=[[3, 3]] * 29,
        points=np.broadcast_to(steps, (29, 2)),
    )
    _, _, training, state = setup()
    assert jax.jit(partial(training.evaluate, step))(state.params, games) == (3 + 28) / 2


def test_human_scores():
    """Atari-57, all of it known to envpool, with some values by hand."""
    specs = envpool.registration.registry.specs
    assert len(HUMAN) == 57 and all(specs[name][0] == "envpool.atari" for name in HUMAN)
    assert all(low < high for low, high in HUMAN.values())
    assert HUMAN["Pong-v5"] == (-20.7, 14.6) and HUMAN["Zaxxon-v5"] == (32.5, 9173.3)
    assert HUMAN["Alien-v5"] == (227.8, 7127.7) and HUMAN["Skiing-v5"] == (-17098.1, -4336.9)


# --------------------------------------- From the outside -----------------------------------------

TINY = (
    "--env Breakout-v5 --num-envs 4 --num-steps 8 --num-minibatches 2 --total-timesteps 960 "
    "--latent-dim 8 --hidden-dim 8 --max-episode-steps 40 --num-seeds 2 --scorer --eval-every 320 "
    "--eval-envs 2"
).split()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the script with these flags, with a folder of its own for compiled programs."""
    folder = tmp_path_factory.mktemp("atari")
    start = make_start(ROOT / "scorer_pqn_atari.py", folder)
    start.folder = folder
    return start


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Returns what a run that nobody disturbed printed, its folder, and its results."""
    runs = tmp_path_factory.mktemp("whole")
    out, run = finish(start(*TINY, "--save-model", "--runs-dir", runs), timeout=300)
    return out, run, results(run)


def test_record(whole, start):
    """The record of the other scripts, and what is Atari's."""
    out, run, record = whole
    meta = json.loads(str(record["meta"]))
    assert run.name.startswith(
        "scorer_pqn_atari__Breakout-v5__scorer-max-episode-steps-40-num-envs-4"
    )
    assert meta["script"] == "scorer_pqn_atari" and meta["complete"]
    assert meta["args"]["follower_learning_rate"] == 5e-4
    assert meta["lanes"] == 2 and meta["continues"] is None and "commit" in meta
    assert meta["seconds"] > 0 and meta["compile_seconds"] > 0
    assert record["timesteps"].tolist() == [32 * k for k in range(1, 31)]
    assert record["seeds"].tolist() == [0, 1]
    curves = {"returns", "episodes", "dummies", "eval_returns"}
    assert record.keys() == {"timesteps", "seeds", "meta"} | curves
    assert all(record[name].shape == (2, 30) for name in curves)
    known = ~np.isnan(record["eval_returns"])
    assert [np.flatnonzero(row).tolist() for row in known] == [[9, 19, 29]] * 2
    assert not np.isnan(record["returns"][:, -1]).any()
    assert (record["episodes"][:, -1] > 8).all()
    assert (np.diff(record["episodes"]) >= 0).all()
    assert (record["dummies"] >= record["episodes"] - 4).all()
    files = sorted(path.name for path in run.iterdir())
    assert files == ["args.json", "model.safetensors", "results.npz"]
    import records

    method = records.load([run])[0]
    assert method.algorithm == "PQN"


def test_what_a_run_prints(whole):
    """Where results go, how long it is, on what, its tenths, and its outcome."""
    out, run, _ = whole
    lines = out.splitlines()
    assert lines[:3] == [
        str(run),
        "960 environment steps, 32 per rollout, whose frames take 1 MB",
        "2 seeds one by one on cpu; compiling",
    ]
    assert all("%|" in line for line in lines[3:13]) and "100%|" in lines[12]
    assert re.fullmatch(r"mean return over the last 10 %: \d+\.\d\d; saved in .+", lines[13])


def test_acting_is_never_cached(whole, start):
    """It holds the address of its pool; an update is kept for the next run."""
    stored = [path.name for path in (start.folder / "cache").iterdir()]
    assert any("learn" in name for name in stored), stored
    assert not [name for name in stored if re.search("play|evaluate|unnamed|lambda", name)], stored


def test_the_bar_tells_how_many_have_finished():
    """Until all have finished a game: the mean of those that have, and how many they are."""
    assert pqn.describe_returns(np.float32(0), np.float32(0)) == ""
    partly = pqn.describe_returns(np.float32(2.5), np.float32(0.25))
    assert partly == "return 2.50 of the 25% of environments that ended a game"
    assert pqn.describe_returns(np.float32(2.5), np.float32(1)) == "return 2.50"


def test_tools(whole, tmp_path, capsys):
    """Curves, tables and watch.py take the record."""
    import learning_curves
    import tables
    import watch

    learning_curves.main([whole[1]], out=tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    tables.main([whole[1]])
    assert "Breakout-v5" in capsys.readouterr().out
    watch.main((whole[1],), out=tmp_path / "episode.gif", episodes=1, max_frames=20)
    assert (tmp_path / "episode.gif").read_bytes().startswith(b"GIF")


@pytest.fixture(scope="module")
def stopped(start, whole, tmp_path_factory):
    """Returns the folder of the same run, stopped by Ctrl-C within its first seed."""
    runs = tmp_path_factory.mktemp("stopped")
    process = start(*TINY, "--checkpoint-every-minutes", 60, "--runs-dir", runs)
    run, _, _, bar = [process.stdout.readline().strip() for _ in range(4)]
    assert "10%" in bar
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "stopping after this chunk and saving; again to end without saving\n"
    assert "last 10 %, stopped: " in out
    return Path(run)


def test_checkpoint(stopped):
    """It holds both seeds' learners: the first as far as the curve is, the second untouched."""
    record = results(stopped)
    points = len(record["timesteps"])
    assert 0 < points < 30
    assert not json.loads(str(record["meta"]))["complete"]
    saved = json.loads((stopped / "args.json").read_text())
    args = pqn.Args(**saved | dict(resume=stopped, runs_dir=stopped.parent))
    training = pqn.make_train(args, pqn.make_env(args))
    records = pqn.Records(args, training, "new")
    states = records.restore()
    assert records.chunks == points == len(records.points)
    assert [int(state.seed) for state in states] == [0, 1]
    untouched = jax.jit(training.init)(np.uint32(1))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # another compiler's bits
    jax.tree.map(close, states[1], untouched)
    assert np.array_equal(records.curves()["returns"][0], record["returns"][0], equal_nan=True)


@pytest.mark.slow
def test_resume(stopped, whole, start, tmp_path):
    """Its learner goes on, its games start anew, and that is said.

    Bit for bit the undisturbed run's are the points before and, as it comes from the checkpoint but
    has no games yet, the other seed's.
    """
    process = start("--resume", stopped, "--runs-dir", tmp_path)
    out, run = finish(process, timeout=300)
    assert "learner goes on exactly" in out and "games start anew" in out
    before, after, undisturbed = results(stopped), results(run), whole[2]
    points = len(before["timesteps"])
    meta = json.loads(str(after["meta"]))
    assert meta["continues"] == stopped.name and meta["complete"]
    for name in undisturbed.keys() - {"meta", "timesteps", "seeds"}:
        if name in before:  # there may have been no evaluation yet
            expected = undisturbed[name][0, :points]
            np.testing.assert_array_equal(before[name][0], expected, err_msg=name)
            np.testing.assert_array_equal(after[name][0, :points], expected, err_msg=name)
        np.testing.assert_array_equal(after[name][1], undisturbed[name][1], err_msg=name)
    for name in "timesteps", "seeds":
        np.testing.assert_array_equal(after[name], undisturbed[name])


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["JAX_ENABLE_X64", "JAX_DEBUG_NANS"])
def test_settings_for_looking_for_faults(variable, start, tmp_path):
    """A run with double precision allowed, or which stops at a NaN, ends as any other."""
    flags = [*TINY, "--num-seeds", 1, "--total-timesteps", 64, "--eval-every", 64]
    _, run = finish(start(*flags, "--runs-dir", tmp_path, **{variable: "1"}), timeout=300)
    record = results(run)
    assert record["returns"].dtype == np.float32
    assert not np.isnan(record["eval_returns"][0, -1])


@pytest.fixture
def main_here(tmp_path, monkeypatch, capsys):
    """Runs main in this process; returns exit code, what it printed, and the record.

    Signals and settings are as before afterwards.
    """

    def run(*flags):
        argv = ["scorer_pqn_atari.py", *TINY, "--runs-dir", str(tmp_path), *flags]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            pqn.main()
        captured = capsys.readouterr()
        (folder,) = tmp_path.iterdir()
        record = results(folder) if (folder / "results.npz").exists() else None
        return end.value.code, captured.out + captured.err, record

    name = "jax_persistent_cache_min_compile_time_secs"
    seconds = getattr(jax.config, name)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    jax.config.update(name, seconds)


@pytest.mark.slow
def test_evaluations_are_made_where_a_curve_has_a_point(main_here):
    """2,000 rollouts of a step are 1,000 points of two: every hundredth step ends one of them."""
    flags = (
        "--num-envs 1 --num-steps 1 --num-minibatches 1 --num-seeds 1 --total-timesteps 2000 "
        "--eval-every 100 --max-episode-steps 5 --eval-envs 1"
    )
    code, _, record = main_here(*flags.split())
    assert code == 0 and len(record["timesteps"]) == 1000
    evaluated = record["timesteps"][~np.isnan(record["eval_returns"][0])]
    assert evaluated.tolist() == list(range(100, 2001, 100))


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_in_the_second_seed(number, code, main_here, monkeypatch):
    """What is printed is the mean of the seeds that are whole, here the first."""

    class Bar(pqn.tqdm):
        def update(self, n):
            super().update(n)
            if self.n == 40 * 32:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(pqn, "tqdm", Bar)
    exit_code, out, record = main_here()
    assert exit_code == code and "stopping after this chunk and saving" in out
    returns, ends = record["returns"], record["timesteps"]
    assert returns.shape == (2, 30)
    assert np.isnan(returns[1, -1]) and not np.isnan(returns[0, -1])
    printed = re.search(r"over the last 10 %, stopped: (\S+);", out)[1]
    assert float(printed) == pytest.approx(returns[0, ends > 0.9 * ends[-1]].mean(), abs=0.005)


def test_results_so_far(main_here, monkeypatch):
    """While a run goes on, its curves are on disk, marked as incomplete."""
    seen = []
    own_write_results = pqn.Records.write_results

    def watch(records):
        succeeded = own_write_results(records)
        seen.append(results(records.folder))
        return succeeded

    monkeypatch.setattr(pqn.Records, "write_results", watch)
    monkeypatch.setattr(pqn, "SECONDS_BETWEEN_RESULTS", 0)
    code, _, record = main_here("--num-seeds", "1")
    assert code == 0
    assert [len(one["timesteps"]) for one in seen] == [*range(1, 31), 30]
    for one in seen[:29]:
        assert not json.loads(str(one["meta"]))["complete"]
    assert json.loads(str(record["meta"]))["complete"]


def test_a_checkpoint_that_cannot_be_written_is_said_once(main_here, monkeypatch):
    """Training goes on, and what can be written at the end is."""
    own_save = pqn.save

    def save(path, write):
        if path.name == "checkpoint.npz":
            raise OSError(28, "No space left on device")
        own_save(path, write)

    monkeypatch.setattr(pqn, "save", save)
    flags = "--num-seeds 1 --checkpoint-every-minutes 1e-9"
    code, out, record = main_here(*flags.split())
    assert code == 0 and json.loads(str(record["meta"]))["complete"]
    assert out.count("checkpoint.npz cannot be written: No space left on device") == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env Pongg-v5", ["--env Pongg-v5", "Pong-v5"]),
        ("--env Breakout", ["Breakout-v5"]),
        ("--env Ant-v5", ["no Atari game"]),
        ("--num-minibatches 3", ["--num-minibatches", "divide"]),
        ("--td-lambda 1.5", ["--td-lambda"]),
        ("--sticky-actions 2", ["--sticky-actions"]),
        ("--frame-skip 0", ["--frame-skip"]),
        ("--noop-max 0", ["--noop-max"]),
        ("--eval-every 0", ["--eval-every"]),
        ("--eval-envs 0", ["--eval-envs"]),
        ("--eval-envs 1e10", ["--eval-envs"]),
        ("--max-episode-steps 0", ["--max-episode-steps"]),
        ("--num-envs 0", ["--num-envs"]),
        ("--num-steps 0", ["--num-steps"]),
        ("--num-epochs -1", ["--num-epochs"]),
        ("--follower-loss msbe", ["--follower-loss", "--scorer"]),
        ("--scorer --follower-learning-rate 0", ["0.0"]),
        ("--learning-rate nan", ["--learning-rate"]),
        ("--num-seeds 0", ["--num-seeds"]),
        ("--total-timesteps 1e12", ["--total-timesteps"]),
        ("--resume absent", ["--resume absent"]),
    ],
)
def test_bad_input(flags, words, tmp_path, monkeypatch, capsys):
    """One sentence on standard error that names the flag, exit code 2, and nothing written."""
    err = refusal(pqn.main, [*flags.split(), "--runs-dir", tmp_path / "new"], monkeypatch, capsys)
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_unwritable_runs_dir(tmp_path, monkeypatch, capsys):
    """A folder below a regular file cannot be made; the file stays."""
    (tmp_path / "file").write_text("precious")
    err = refusal(pqn.main, ["--runs-dir", tmp_path / "file" / "runs"], monkeypatch, capsys)
    assert err.startswith("error: --runs-dir ")
    assert (tmp_path / "file").read_text() == "precious"

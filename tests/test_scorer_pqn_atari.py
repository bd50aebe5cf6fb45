"""scorer_pqn_atari.py on the real envpool: bookkeeping, masks, targets, scores, evaluation, and from the outside."""

import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import finish
from helpers import refusal
from helpers import results

import scorer_pqn
import scorer_pqn_atari as pqn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))
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
ROLLOUTS = 4  # 256 steps of random play, in which every environment loses lives and some the game
pytestmark = pytest.mark.usefixtures("quick_compilation")


def setup(**args):
    """Arguments, make_pool, the parts of make_train by name, and a learner."""
    args, make_pool, num_actions = pqn.resolve(pqn.Args(**SMALL | args))
    parts = dict(
        zip(
            "init play learn evaluate timesteps blocks_per_point".split(),
            pqn.make_train(args, num_actions),
        )
    )
    return args, make_pool, parts, jax.jit(parts["init"])(np.uint32(0))


def recorded(**changes):
    """What play stored in ROLLOUTS rollouts [steps, envs, ...], what envpool said to the same actions on the same seeds
    outside XLA, as arrays of the same shape, and the learner and games afterwards."""
    args, make_pool, parts, state = setup(**changes)
    _, pool_step, start = make_pool(args.num_envs, 7)
    games, play, stored = start(state.scores), jax.jit(partial(parts["play"], pool_step)), []
    for index in range(ROLLOUTS):
        state, games, (flat, _), _ = play(state, games, np.int32(index))
        stored.append(
            jax.tree.map(
                lambda x: np.asarray(x).reshape(args.num_steps, args.num_envs, *x.shape[1:]), flat
            )
        )
    rollout, target = jax.tree.map(lambda *x: np.concatenate(x), *stored)
    twin, raw = make_pool(args.num_envs, 7)[0], []
    twin.reset()
    for action in rollout.action:
        obs, reward, terminated, truncated, info = twin.step(action)
        raw.append(
            dict(
                obs=obs,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                points=info["reward"],
                lives=info["lives"],
                elapsed=info["elapsed_step"],
                over=info["terminated"],
            )
        )
    return (
        args,
        rollout,
        target,
        {name: np.array([step[name] for step in raw]) for name in raw[0]},
        state,
        games,
    )


@pytest.fixture(
    scope="module",
    params=[
        {},
        dict(max_episode_steps=60, env="Qbert-v5"),
        dict(episodic_life=False, clip_rewards=False),
        dict(bootstrap_at_timeout=False, max_episode_steps=60),
    ],
    ids=["lives", "timeouts", "whole games", "timeouts end"],
)
def record(request):
    return recorded(**request.param)


# -------------------- Bookkeeping


def test_bookkeeping_on_recorded_steps(record):
    """By the counters alone: a step that the game did not count is a dummy; a life fewer ends an episode if episodic;
    before a counter at 0 a game has ended, by its last life or, at the limit, by time."""
    args, rollout, _, raw, state, games = record
    counted = np.diff(raw["elapsed"], axis=0, prepend=0) == 1
    np.testing.assert_array_equal(rollout.mask, counted)
    restarts = raw["elapsed"][1:] == 0
    fewer = np.diff(raw["lives"], axis=0, prepend=dict(Breakout=5, Qbert=4)[args.env[:-3]]) < 0
    timeout = raw["elapsed"] == args.max_episode_steps
    ended = fewer | timeout if args.episodic_life else timeout | (fewer & (raw["lives"] == 0))
    np.testing.assert_array_equal(rollout.done, ended)
    np.testing.assert_array_equal(rollout.done[:-1], ~rollout.mask[1:])
    np.testing.assert_array_equal(restarts, (timeout | (raw["lives"] == 0))[:-1])
    life_ends = fewer if args.episodic_life else fewer & (raw["lives"] == 0)
    expected = life_ends if args.bootstrap_at_timeout else ended
    np.testing.assert_array_equal(rollout.terminated, expected)
    np.testing.assert_array_equal(rollout.obs[1:], raw["obs"][:-1])
    np.testing.assert_array_equal(
        rollout.reward, np.sign(raw["points"]) if args.clip_rewards else raw["points"]
    )
    assert not rollout.reward[~rollout.mask].any() and rollout.obs.dtype == np.uint8
    lost_lives = fewer & (raw["lives"] > 0)
    assert lost_lives.any() and (rollout.done & lost_lives).any() == (
        args.episodic_life or timeout.any()
    )
    assert (
        timeout.any() if args.max_episode_steps == 60 else (raw["over"] & rollout.terminated).any()
    )
    assert state.dummies == (~rollout.mask).sum() > 0


def test_game_over_at_the_time_limit():
    """The same games cut where one is over anyway: envpool says truncated, yet no value follows."""
    *_, raw, _, _ = recorded()
    t, e = np.argwhere(raw["over"])[0]
    _, rollout, _, raw, *_ = recorded(max_episode_steps=int(raw["elapsed"][t, e]))
    assert raw["truncated"][t, e] and raw["over"][t, e] and not raw["terminated"][t, e]
    assert rollout.terminated[t, e] and rollout.done[t, e] and not rollout.mask[t + 1, e]


def games_before(ended, lives):
    """Games of which only what tell_ends looks at is known."""
    return pqn.Games(None, None, np.array(ended), np.array(lives), None, None)


def test_a_game_that_ends_in_idle_frames_is_over():
    """At the dummy step after a lost life more lives than before are a new game; as many are not."""
    no = np.zeros(4, bool)
    # a life lost and three left; the same, and one more lost in idle frames; the game over; no dummy
    games = games_before([True, True, True, False], [2, 2, pqn.MOST_LIVES, 2])
    over, no_value = pqn.tell_ends(games, no, no, no, np.array([3, 1, 3, 3]), True)
    np.testing.assert_array_equal(over, [True, False, False, False])
    assert not no_value.any()


@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_life_lost_at_the_time_limit(episodic_life):
    """It ends the episode's value where lives are episodes; a time-out with all lives does not."""
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    games = games_before([False, False], [3, 3])
    over, no_value = pqn.tell_ends(games, no, yes, no, np.array([2, 3]), episodic_life)
    assert over.all()
    np.testing.assert_array_equal(no_value, [episodic_life, False])


def test_scores_are_those_of_envpool(record):
    """Points between two restarts of envpool's counter, over all lives; the mean needs a game from everyone."""
    args, rollout, _, raw, state, games = record
    scores, running = [[] for _ in range(args.num_envs)], np.zeros(args.num_envs)
    for points, elapsed, over in zip(raw["points"], raw["elapsed"], raw["over"]):
        running = np.where(elapsed == 0, 0, running) + points
        for e in np.flatnonzero((over > 0) | (elapsed == args.max_episode_steps)):
            scores[e].append(running[e])
    assert state.episodes == sum(map(len, scores)) > 0
    assert raw["points"].max() > (
        1 if args.env == "Qbert-v5" else 0
    )  # clipped ones would sum to less
    last = [found[-1] if found else np.nan for found in scores]
    np.testing.assert_array_equal(state.scores, last)
    curve = state.curves["returns"][:ROLLOUTS]
    assert np.array_equal(curve[-1], np.mean(last), equal_nan=True)
    assert curve.shape == (4,) and np.isnan(state.curves["returns"][ROLLOUTS:]).all()
    assert state.curves["episodes"][ROLLOUTS - 1] == state.episodes
    assert args.max_episode_steps > 60 or state.episodes >= 16 and not np.isnan(last).any()


# -------------------- Targets and losses


def test_targets_never_see_a_dummy(record):
    """Per environment, the real steps alone: each ends in its own value, or mixes with the next real step's return."""
    args, rollout, target, raw, state, _ = record
    networks = pqn.Players(
        pqn.Perception(args), pqn.Control(args, pqn.envpool.make_spec(args.env).action_space.n)
    )
    following = raw["obs"].reshape(
        -1, *raw["obs"].shape[2:]
    )  # what envpool returned: the true next observation
    value = np.asarray(pqn.q_values(networks, *state.params, following).max(axis=-1)).reshape(
        rollout.reward.shape
    )
    for e in range(args.num_envs):
        later = None
        for t in reversed(np.flatnonzero(rollout.mask[:, e])):
            timeout = raw["truncated"][t, e] and not raw["over"][t, e] and args.bootstrap_at_timeout
            bootstrap = value[t, e] * (timeout or not rollout.done[t, e])
            if not rollout.done[t, e] and t % args.num_steps != args.num_steps - 1:
                bootstrap = (1 - args.td_lambda) * value[t, e] + args.td_lambda * later
            later = rollout.reward[t, e] + args.gamma * bootstrap
            assert target[t, e] == pytest.approx(later, rel=1e-3, abs=1e-4), (t, e)


def batch_of(seed=0, share=0.7, size=32):
    """A minibatch of noise, some of it dummies, with targets; networks and players' parameters."""
    args, *_ = setup()
    rng = np.random.default_rng(seed)
    obs, action = rng.integers(0, 256, (size, 4, 84, 84)).astype(np.uint8), rng.integers(0, 4, size)
    batch = pqn.Transition(
        *map(jnp.array, (obs, action, *[np.zeros(size)] * 3, rng.random(size) < share))
    )
    networks = pqn.Players(pqn.Perception(args), pqn.Control(args, 4))
    return networks, setup()[-1].params, batch, jnp.array(rng.normal(size=size), jnp.float32)


def of_errors(loss):
    """Returns scorer_pqn.py's loss of Bellman errors with the arguments of this script's losses."""

    def plain(phi, theta, networks, batch, target):
        params = scorer_pqn.Players(phi, theta)
        real = scorer_pqn.Batch(batch.obs, batch.action, target)
        return loss(scorer_pqn.bellman_error(networks, params, real))

    return plain


def test_losses_are_those_of_the_real_steps():
    """The masked losses and their gradients are scorer_pqn.py's on the real steps alone, whatever the dummies hold."""
    networks, params, batch, target = batch_of()
    real = np.flatnonzero(batch.mask)
    kept = jax.tree.map(lambda x: x[real], (batch, target))
    changed = (
        batch._replace(obs=jnp.where(batch.mask[:, None, None, None], batch.obs, 0)),
        target + 1e3 * ~batch.mask,
    )
    none = batch._replace(mask=jnp.zeros(32, bool)), target
    for masked, plain in (
        (pqn.masked_variance, of_errors(scorer_pqn.follower_loss)),
        (pqn.leader_loss, of_errors(scorer_pqn.leader_loss)),
    ):
        plain, masked = (
            jax.jit(
                partial(
                    lambda loss, sample: jax.value_and_grad(loss, argnums=(0, 1))(
                        *params, networks, *sample
                    ),
                    loss,
                )
            )
            for loss in (plain, masked)
        )
        for sample in (batch, target), changed:
            jax.tree.map(
                partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5),
                masked(sample),
                plain(kept),
            )
        assert not any(np.any(x) for x in jax.tree.leaves(masked(none)))


@pytest.mark.parametrize(
    "variant",
    [{}, dict(scorer=True), dict(scorer=True, follower_loss="msbe")],
    ids=["baseline", "scorer", "msbe"],
)
def test_updates_learn_the_targets(variant):
    """Forty updates on one rollout take a third of its error; minibatches go once through the rollout per epoch, in
    another order."""
    rates = dict(learning_rate=3e-3) | (dict(follower_learning_rate=3e-3) if variant else {})
    args, make_pool, parts, state = setup(
        **variant, **rates, num_steps=16, latent_dim=64, hidden_dim=64
    )
    _, pool_step, start = make_pool(args.num_envs, 0)
    play = jax.jit(partial(parts["play"], pool_step))
    state, _, (flat, minibatches), _ = play(state, start(state.scores), np.int32(0))
    assert minibatches.shape == (2 * 4, 16)
    for epoch in minibatches.reshape(2, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(64))
    assert not np.array_equal(minibatches[:4], minibatches[4:])
    networks = pqn.Players(pqn.Perception(args), pqn.Control(args, 4))
    loss = jax.jit(lambda params: pqn.leader_loss(*params, networks, *flat))
    players, learn, before = state[1:3], jax.jit(parts["learn"]), loss(state.params)
    for number in range(40):
        players = learn(players, flat, minibatches, number % 8)
    assert loss(players[0]) < before * 2 / 3


# -------------------- Environments, networks, evaluation


def test_seeds_share_no_environment():
    """Environments of a seed, of its neighbour, of a resumed run and of evaluations all have seeds of their own."""
    make_pool = setup()[1]
    pools = [make_pool(4, *key)[0] for key in ((0, 0), (1, 0), (0, 5), (0, 0, 1))]
    seeds = [seed for pool in pools for seed in pool.spec.config.env_seed]
    assert len(seeds) == len(set(seeds)) == 16
    same = make_pool(4, 0, 0)[0].spec.config.env_seed
    assert list(same) == list(pools[0].spec.config.env_seed)


def test_options_reach_envpool():
    """Each flag of the protocol is envpool's option."""
    config = setup(
        sticky_actions=0.25,
        episodic_life=False,
        clip_rewards=False,
        frame_skip=3,
        noop_max=7,
        max_episode_steps=99,
    )[1](2, 0)[0].spec.config
    assert (
        config.repeat_action_probability == 0.25
        and not config.episodic_life
        and not config.reward_clip
    )
    assert (config.frame_skip, config.noop_max, config.max_episode_steps) == (3, 7, 99)
    usual = setup()[1](2, 0)[0].spec.config
    assert usual.repeat_action_probability == 0 and usual.episodic_life and usual.reward_clip
    assert (usual.frame_skip, usual.noop_max, usual.max_episode_steps) == (4, 30, 27_000)


def test_networks():
    """The paper's sizes; bytes are divided by 255 inside, so that floats in [0, 255] give the same."""
    args = pqn.resolve(pqn.Args())[0]
    networks = pqn.Players(pqn.Perception(args), pqn.Control(args, 6))
    obs = np.random.default_rng(0).integers(0, 256, (2, 4, 84, 84)).astype(np.uint8)
    z, phi = networks.perception.init_with_output(jax.random.key(0), obs)
    theta = networks.control.init(jax.random.key(1), z)["params"]
    assert z.shape == (2, 256) and z.min() == 0
    shapes = {
        name: phi["params"][name]["kernel"].shape for name in phi["params"] if "Norm" not in name
    }
    assert shapes == {
        "Conv_0": (8, 8, 4, 32),
        "Conv_1": (4, 4, 32, 64),
        "Conv_2": (3, 3, 64, 64),
        "Dense_0": (7 * 7 * 64, 256),
    }
    assert theta["Dense_0"]["kernel"].shape == (256, 256) and theta["Dense_1"]["kernel"].shape == (
        256,
        6,
    )
    np.testing.assert_allclose(
        networks.perception.apply(phi, obs.astype(np.float32)), z, rtol=1e-4, atol=1e-4
    )


def test_evaluation():
    """The mean of the first whole game's score of each environment, as greedy play outside XLA gets it, twice."""
    args, make_pool, parts, state = setup(max_episode_steps=150)
    _, pool_step, start = make_pool(4, 3, 1)
    evaluate = jax.jit(partial(parts["evaluate"], pool_step))
    networks = pqn.Players(pqn.Perception(args), pqn.Control(args, 4))
    greedy = jax.jit(lambda obs: pqn.q_values(networks, *state.params, obs).argmax(axis=-1))
    pool = make_pool(4, 3, 1)[0]
    for point in (
        2,
        5,
    ):  # games that the first evaluation did not finish are not gone on with in the second
        state = evaluate(state, start(jnp.full(4, jnp.nan)), np.int32(point))
        (obs, _), scores, first = pool.reset(), np.zeros(4), np.full(4, np.nan)
        while np.isnan(first).any():
            obs, _, _, truncated, info = pool.step(np.asarray(greedy(obs)))
            scores += info["reward"]
            first = np.where(
                np.isnan(first) & (truncated | (info["terminated"] > 0)), scores, first
            )
        assert state.curves["eval_returns"][point] == first.mean()
    assert np.isnan(np.delete(state.curves["eval_returns"], [2, 5])).all()


def test_evaluation_counts_first_games():
    """Games of 2 and 7 steps that pay 1, 2, 3, ...: 1 + 2 and 1 + ... + 7, not the later ones of the fast one."""

    def pool_step(steps, action):
        cut, no = (steps + 1) % jnp.array([2, 7]) == 0, jnp.zeros(2, bool)
        lives = jnp.zeros(2, jnp.int32)
        info = dict(reward=jnp.full(2, steps + 1.0), terminated=lives, lives=lives)
        return steps + 1, (jnp.zeros((2, 4, 84, 84), jnp.uint8), jnp.zeros(2), no, cut, info)

    _, _, parts, state = setup()
    games = pqn.Games(
        handle=jnp.int32(0),
        obs=jnp.zeros((2, 4, 84, 84), jnp.uint8),
        ended=jnp.zeros(2, bool),
        lives=jnp.zeros(2, jnp.int32),
        score=jnp.zeros(2),
        scores=jnp.full(2, jnp.nan),
    )
    assert parts["evaluate"](pool_step, state, games, 0).curves["eval_returns"][0] == (3 + 28) / 2


def test_human_scores():
    """Atari-57, all of it known to envpool, with some values by hand."""
    specs = pqn.envpool.registration.registry.specs
    assert len(pqn.HUMAN) == 57 and all(specs[name][0] == "envpool.atari" for name in pqn.HUMAN)
    assert all(low < high for low, high in pqn.HUMAN.values())
    assert pqn.HUMAN["Pong-v5"] == (-20.7, 14.6) and pqn.HUMAN["Zaxxon-v5"] == (32.5, 9173.3)
    assert pqn.HUMAN["Alien-v5"] == (227.8, 7127.7) and pqn.HUMAN["Skiing-v5"] == (
        -17098.1,
        -4336.9,
    )


# -------------------- From the outside

TINY = (
    "--env Breakout-v5 --num-envs 4 --num-steps 8 --num-minibatches 2 --total-timesteps 960 --latent-dim 8 "
    "--hidden-dim 8 --max-episode-steps 40 --num-seeds 2 --scorer --eval-every 320 --eval-envs 2"
).split()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the script with these flags, with a folder of its own for compiled programs."""
    folder = tmp_path_factory.mktemp("atari")

    def start(*flags):
        environment = pqn.os.environ | dict(JAX_COMPILATION_CACHE_DIR=str(folder / "cache"))
        return subprocess.Popen(
            [sys.executable, str(ROOT / "scorer_pqn_atari.py"), *map(str, flags)],
            text=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    start.folder = folder
    return start


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Standard output, folder and results of a run that nobody disturbed."""
    out, run = finish(
        start(*TINY, "--save-model", "--runs-dir", tmp_path_factory.mktemp("whole")), timeout=300
    )
    return out, run, results(run)


def test_record(whole, start):
    """The record of the other scripts, and what is Atari's; acting is compiled for one pool and never stored."""
    out, run, record = whole
    meta = json.loads(str(record["meta"]))
    assert run.name.startswith("scorer_pqn_atari__Breakout-v5__scorer__s0__")
    assert (
        meta["script"] == "scorer_pqn_atari"
        and meta["complete"]
        and meta["args"]["follower_learning_rate"] == 5e-4
    )
    assert record["timesteps"].tolist() == [32 * k for k in range(1, 31)] and record[
        "seeds"
    ].tolist() == [0, 1]
    curves = {"returns", "human_normalized", "episodes", "dummies", "eval_returns"}
    assert record.keys() == {"timesteps", "seeds", "meta"} | curves
    assert all(record[name].shape == (2, 30) for name in curves)
    known = ~np.isnan(record["eval_returns"])
    assert [np.flatnonzero(row).tolist() for row in known] == [[9, 19, 29]] * 2
    np.testing.assert_allclose(
        record["human_normalized"], (record["returns"] - 1.7) / 28.8, rtol=1e-5
    )
    assert not np.isnan(record["returns"][:, -1]).any() and (record["episodes"][:, -1] > 8).all()
    assert (np.diff(record["episodes"]) >= 0).all() and (
        record["dummies"] >= record["episodes"] - 4
    ).all()
    rates = re.search(
        r"([\d,]+) environment steps/s, (\d+)% of what envpool alone .*\(([\d,]+)/s\)", out
    )
    speed, percent, best = (int(number.replace(",", "")) for number in rates.groups())
    assert percent == pytest.approx(100 * speed / best, abs=1 + 50 / best)
    assert (
        meta["steps_per_second"] == pytest.approx(speed, abs=1)
        and meta["acting_steps_per_second"] > 0
    )
    assert (
        "32 per rollout, frames: 1 MB; 2 seeds one by one on cpu" in out and out.count("%|") == 10
    )
    assert sorted(path.name for path in run.iterdir()) == [
        "args.json",
        "model.safetensors",
        "results.npz",
    ]
    stored = [path.name for path in (start.folder / "cache").iterdir()]
    assert any("learn" in name for name in stored), stored
    assert not [name for name in stored if re.search("play|evaluate|unnamed|lambda", name)], stored
    import records

    method = records.load([run])[0]
    assert (method.label, method.algorithm, method.details) == ("SCORER PQN", "PQN", [])


def test_tools(whole, tmp_path, capsys):
    """Curves and tables take the record; watch.py plays a game of its model."""
    import learning_curves
    import tables
    import watch

    learning_curves.main([whole[1]], out=tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    tables.main([whole[1]])
    assert "Breakout-v5" in capsys.readouterr().out
    watch.main(whole[1], out=tmp_path / "episode.gif", episodes=1, max_frames=5)
    assert (tmp_path / "episode.gif").stat().st_size > 1_000
    assert "Breakout-v5" in capsys.readouterr().out


def test_resume(whole, start, tmp_path):
    """Stopped within the first seed: its learner goes on, its games start anew, and that is said. Bit for bit the
    undisturbed run's are the points before and, as it comes from the checkpoint but has no games yet, the other seed's.
    """
    process = start(*TINY, "--checkpoint-every-minutes", 60, "--runs-dir", tmp_path / "stopped")
    head = [process.stdout.readline() for _ in range(3)]
    assert "10%" in head[-1]
    process.send_signal(signal.SIGINT)
    run = Path(head[0].strip())
    assert process.wait(timeout=60) == 130, process.stderr.read()
    stopped = results(run)
    points = len(stopped["timesteps"])
    assert 0 < points < 30 and not json.loads(str(stopped["meta"]))["complete"]
    args = pqn.Args(**json.loads((run / "args.json").read_text()) | dict(runs_dir=tmp_path))
    init = pqn.make_train(args, 4)[0]
    states, done, _ = pqn.restore(run / "checkpoint.npz", [jax.eval_shape(init, np.uint32(0))] * 2)
    assert done == points and [int(state.seed) for state in states] == [0, 1]
    same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # another compiler's bits
    jax.tree.map(same, states[1], jax.device_get(jax.jit(init)(np.uint32(1))))
    assert np.array_equal(
        states[0].curves["returns"][:points], stopped["returns"][0], equal_nan=True
    )
    out, run = finish(start("--resume", run, "--runs-dir", tmp_path / "resumed"), timeout=300)
    resumed = results(run)
    assert "learner continues exactly" in out and "games start anew" in re.sub(r"\s+", " ", out)
    for name in whole[2].keys() - {"meta"}:
        curve, before = resumed[name], whole[2][name]
        if name not in ("timesteps", "seeds"):
            np.testing.assert_array_equal(stopped[name][0], before[0, :points], err_msg=name)
            np.testing.assert_array_equal(curve[0, :points], before[0, :points], err_msg=name)
            curve, before = curve[1], before[1]
        np.testing.assert_array_equal(curve, before, err_msg=name)


@pytest.fixture
def main_here(tmp_path, monkeypatch, capsys):
    """Runs main in this process: exit code, standard output and record. Signals and settings stay as before."""

    def run(*flags):
        argv = [
            "scorer_pqn_atari.py",
            *TINY,
            "--no-compilation-cache",
            "--runs-dir",
            str(tmp_path),
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            pqn.main()
        return end.value.code, capsys.readouterr().out, results(next(tmp_path.iterdir()))

    name = "jax_persistent_cache_min_compile_time_secs"
    handler, seconds = signal.getsignal(signal.SIGINT), getattr(jax.config, name)
    yield run
    signal.signal(signal.SIGINT, handler)
    jax.config.update(name, seconds)


def test_saved_before_speeds_are_measured(main_here, monkeypatch):
    """A process that ends while it measures speeds has saved its whole run."""
    monkeypatch.setattr(pqn, "rate", lambda *_: sys.exit(99))
    code, out, record = main_here()
    meta = json.loads(str(record["meta"]))
    assert code == 99 and "saved in" in out and meta["complete"] and "steps_per_second" not in meta
    assert not np.isnan(record["returns"][:, -1]).any()


def test_evaluations_are_made_where_a_curve_has_a_point(main_here):
    """2,000 rollouts of a step are 1,000 points of two steps: every hundredth step is the end of one."""
    flags = "--num-envs 1 --num-steps 1 --num-minibatches 1 --num-seeds 1 --total-timesteps 2000 --eval-every 100"
    code, _, record = main_here(*flags.split(), *"--max-episode-steps 5 --eval-envs 1".split())
    assert code == 0 and len(record["timesteps"]) == 1000
    assert record["timesteps"][~np.isnan(record["eval_returns"][0])].tolist() == list(
        range(100, 2001, 100)
    )


def test_stopped_in_the_second_seed(main_here, monkeypatch):
    """What is printed is the mean of the seeds that are whole, here the first."""

    class Bar(pqn.tqdm):
        def update(self, n):
            super().update(n)
            if self.n == 40 * 32:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pqn, "tqdm", Bar)
    code, out, record = main_here()
    returns, ends = record["returns"], record["timesteps"]
    assert (
        code == 130
        and np.isnan(returns[1, -1])
        and not np.isnan(returns[0, -1])
        and returns.shape == (2, 30)
    )
    printed = re.search(r"over the last 10 %, stopped: (\S+);", out)[1]
    assert float(printed) == pytest.approx(returns[0, ends > 0.9 * ends[-1]].mean(), abs=0.005)


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
    assert all(word in err for word in words) and not list(tmp_path.iterdir()), err


def test_unwritable_runs_dir(tmp_path, monkeypatch, capsys):
    """A folder below a regular file cannot be made; the file stays."""
    (tmp_path / "file").write_text("precious")
    err = refusal(pqn.main, ["--runs-dir", tmp_path / "file" / "runs"], monkeypatch, capsys)
    assert err.startswith("error: --runs-dir ")
    assert (tmp_path / "file").read_text() == "precious"

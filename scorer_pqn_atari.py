"""SCORER PQN on Atari: the game between perception and control on frames, through envpool, and the PQN to compare.

As scorer_pqn.py, with emulators on the CPU in the rollout, seeds one by one, and a dummy step after an episode's end.
With --scorer perception f_phi (follower) minimises the errors' variance, control Q_theta (leader) their mean square.
Paper: Martinez et al., "Stackelberg Coupling of Online Representation Learning and RL", ICLR 2026, section 4.

    python scorer_pqn_atari.py --env Pong-v5 --scorer --total-timesteps 2e4   # minutes on a laptop, to see it run
    python scorer_pqn_atari.py --env Phoenix-v5 --scorer --num-seeds 5        # the paper's run, for a GPU
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "chex>=0.1.92", "envpool>=1.2.5",
#   "tyro>=1.0.17", "tqdm>=4.68", "safetensors>=0.8", "wandb>=0.31"]
# ///
import difflib
import io
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated
from typing import Any
from typing import Literal
from typing import NamedTuple

import chex
import envpool
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.traverse_util import flatten_dict
from safetensors.flax import save as to_safetensors
from tqdm import tqdm

# ------------------------------ Arguments -----------------------------------------------------------------------------
Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(  # a whole number, also when written as 1e6
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: int(repr(float(words[0])).removesuffix(".0")),
        is_instance=lambda x: isinstance(x, int),
        str_from_instance=lambda x: [str(x)],
    ),
]


@dataclass
class Args:
    # Experiment: seeds and environment
    env: str = "Pong-v5"  # Atari game of envpool
    seed: Count = 0  # first seed
    num_seeds: Count = 1  # seeds trained one after another: seed, seed + 1, ...
    total_timesteps: Count = (
        50_000_000  # environment steps per seed, dummies included, rounded up; four frames each
    )
    episodic_life: bool = True  # a lost life ends the episode, but the score counts the whole game (Machado et al.: no)
    clip_rewards: bool = True  # learn from the rewards' signs, but count the points
    sticky_actions: float = (
        0.0  # probability of repeating the last action instead (Machado et al.: 0.25)
    )
    frame_skip: Count = 4  # frames that an action lasts
    noop_max: Count = 30  # random number of idle frames at an episode's start, at most; envpool also presses FIRE there
    max_episode_steps: Count = (
        27_000  # steps after which a game is cut: of four frames each, half an hour
    )
    # The game
    scorer: bool = (
        False  # play the game; without it, the baseline: same layers, one loss, one optimiser
    )
    follower_loss: Literal["variance", "msbe"] | None = None  # the follower's objective (variance)
    follower_learning_rate: float | None = None  # initial rate of the follower (5e-4)
    learning_rate: float = 2.5e-4  # initial rate of the leader, or of the baseline
    leader_decay_power: float | None = None  # the leader's rate falls as (1 - progress)^power (1)
    # Algorithm
    num_envs: Count = 128  # environments per seed
    num_steps: Count = 32  # steps of each environment in a rollout
    num_epochs: Count = 2  # passes over a rollout
    num_minibatches: Count = 32  # per epoch; one update each
    gamma: float = 0.99  # discount per step
    td_lambda: float = 0.65  # of the lambda-returns: 0 is one step, 1 the rollout
    decay_share: float = 1.0  # of training, after which the learning rates are 0
    epsilon_start: float = 1.0  # initial probability of a random action
    epsilon_end: float = 0.001  # final probability of a random action
    epsilon_share: float = 0.1  # of training, over which it falls linearly
    max_grad_norm: float = 10.0  # global-norm clip, for each player alone
    bootstrap_at_timeout: bool = True  # off: a time-out counts as a termination
    latent_dim: Count = 256  # width of perception's last layer
    hidden_dim: Count = 256  # width of control's hidden layer
    eval_every: Count | None = (
        None  # environment steps between evaluations by greedy games; their time counts as well
    )
    eval_envs: Count = 8  # games of an evaluation, side by side and with training's options
    # Output, and how to run
    runs_dir: Path = Path("runs")  # the folder that gets one folder per run
    save_model: bool = (
        False  # write model.safetensors, all seeds, names perception/... and control/...
    )
    checkpoint_every_minutes: float | None = (
        None  # keep the newest training state, written so often and at Ctrl-C
    )
    resume: Path | None = (
        None  # continue the run in this folder, with its arguments, as a new run; its games restart
    )
    compilation_cache: bool = (
        True  # keep compiled programs in the user's cache folder: a second start is quicker
    )
    track: bool = False  # log to Weights & Biases
    wandb_mode: Literal["online", "offline"] = (
        "online"  # offline needs no account; WANDB_PROJECT names the project
    )


OUTPUT = (
    "runs_dir save_model checkpoint_every_minutes resume compilation_cache track wandb_mode".split()
)
GAME = dict(
    follower_loss="variance", follower_learning_rate=5e-4, leader_decay_power=1.0
)  # the baseline has none
SCORES = """Alien 227.8 7127.7 Amidar 5.8 1719.5 Assault 222.4 742 Asterix 210 8503.3 Asteroids 719.1 47388.7 Atlantis
12850 29028.1 BankHeist 14.2 753.1 BattleZone 2360 37187.5 BeamRider 363.9 16926.5 Berzerk 123.7 2630.4 Bowling 23.1
160.7 Boxing 0.1 12.1 Breakout 1.7 30.5 Centipede 2090.9 12017 ChopperCommand 811 7387.8 CrazyClimber 10780.5 35829.4
Defender 2874.5 18688.9 DemonAttack 152.1 1971 DoubleDunk -18.6 -16.4 Enduro 0 860.5 FishingDerby -91.7 -38.7 Freeway 0
29.6 Frostbite 65.2 4334.7 Gopher 257.6 2412.5 Gravitar 173 3351.4 Hero 1027 30826.4 IceHockey -11.2 0.9 Jamesbond 29
302.8 Kangaroo 52 3035 Krull 1598 2665.5 KungFuMaster 258.5 22736.3 MontezumaRevenge 0 4753.3 MsPacman 307.3 6951.6
NameThisGame 2292.3 8049 Phoenix 761.4 7242.6 Pitfall -229.4 6463.7 Pong -20.7 14.6 PrivateEye 24.9 69571.3 Qbert 163.9
13455 Riverraid 1338.5 17118 RoadRunner 11.5 7845 Robotank 2.2 11.9 Seaquest 68.4 42054.7 Skiing -17098.1 -4336.9
Solaris 1236.3 12326.7 SpaceInvaders 148 1668.7 StarGunner 664 10250 Surround -10 6.5 Tennis -23.8 -8.3 TimePilot 3568
5229.2 Tutankham 11.4 167.6 UpNDown 533.4 11693.2 Venture 0 1187.5 VideoPinball 16256.9 17667.9 WizardOfWor 563.5 4756.5
YarsRevenge 3092.9 54576.9 Zaxxon 32.5 9173.3""".split()
HUMAN = {
    f"{game}-v5": (float(low), float(high)) for game, low, high in zip(*[iter(SCORES)] * 3)
}  # Wang et al., 2016


def fail(message: str):
    """Ends the program with one sentence on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_numbers(args, limits: dict):
    """Ends in one sentence where a number of args is outside its limits, or, without any, not positive or too large."""
    for name, value in vars(args).items():
        flag, (low, high) = (
            f"--{name.replace('_', '-')}",
            limits.get(name, (1e-37, 1e37)),
        )  # within float32
        accepted = f"from {low} to {high}" if name in limits else "positive and below 1e37"
        if value == ():
            fail(f"{flag} needs a value")
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) in (int, float) and not low <= number <= high:
                fail(f"{flag} {number} must be {accepted}")


def resolve(args: Args):
    """args with the game's values where unset; make_pool(size, *key) -> an envpool with seeds drawn from the key, its
    step function, start(scores) -> Games from their start, with these last scores; the number of actions."""
    for name, value in GAME.items():
        if getattr(args, name) is not None and not args.scorer:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)} needs --scorer")
        args = (
            replace(args, **{name: value}) if args.scorer and getattr(args, name) is None else args
        )
    limits = dict.fromkeys(
        "gamma td_lambda epsilon_start epsilon_end sticky_actions".split(), (0, 1)
    )
    limits |= dict.fromkeys("frame_skip noop_max max_episode_steps eval_envs".split(), (1, 10**6))
    check_numbers(
        args,
        limits
        | dict(
            total_timesteps=(1, 2**30 // max(1, args.num_epochs)),
            epsilon_share=(1e-9, 1),
            decay_share=(1e-9, 1),
            num_seeds=(1, 2**31),
            seed=(0, max(0, 2**32 - args.num_seeds)),
        ),
    )
    if (size := args.num_envs * args.num_steps) % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} must divide the {size} steps of a rollout")
    known = [
        name
        for name, (module, *_) in envpool.registration.registry.specs.items()
        if module == "envpool.atari"
    ]
    if args.env not in known:
        near = difflib.get_close_matches(args.env, known, cutoff=0.4) or known
        fail(f"--env {args.env} is no Atari game of envpool; near names: {', '.join(near)}")
    options = {
        n: getattr(args, n) for n in "episodic_life frame_skip noop_max max_episode_steps".split()
    }
    options |= dict(reward_clip=args.clip_rewards, repeat_action_probability=args.sticky_actions)

    def make_pool(
        size, *key
    ):  # a seed for each environment: from one s, envpool gives environment i s + i
        seeds, new = (
            np.random.default_rng(key).choice(2**31 - 1, size, replace=False),
            jnp.zeros(size),
        )
        pool = envpool.make(args.env, "gymnasium", num_envs=size, seed=seeds.tolist(), **options)
        handle, _, _, step = pool.xla()
        return (
            pool,
            step,
            lambda last: Games(
                handle=jnp.array(handle),
                obs=jnp.array(pool.reset()[0]),
                ended=new > 0,
                lives=jnp.zeros(size, jnp.int32),
                score=new,
                scores=last,
            ),
        )

    return args, make_pool, envpool.make_spec(args.env).action_space.n


# ------------------------------ Networks ------------------------------------------------------------------------------
class Players(NamedTuple):
    perception: Any  # f_phi, the follower's: network, parameters, optimiser or its state
    control: Any  # Q_theta, the leader's


class Perception(nn.Module):
    """f_phi: frames [..., 4, 84, 84] -> latent z [..., latent_dim] (table "SCORER PQN", option B)."""

    args: Args

    @nn.compact
    def __call__(self, obs):
        x = jnp.moveaxis(obs, -3, -1).astype(jnp.float32) / 255.0  # bytes until here
        for features, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
            x = nn.Conv(
                features, (size, size), stride, "VALID", kernel_init=nn.initializers.he_normal()
            )(x)
            x = nn.relu(nn.LayerNorm()(x))
        return nn.relu(nn.LayerNorm()(nn.Dense(self.args.latent_dim)(x.reshape(*x.shape[:-3], -1))))


class Control(nn.Module):
    """Q_theta: latent z [..., latent_dim] -> action values [..., num_actions] (table "SCORER PQN")."""

    args: Args
    num_actions: int

    @nn.compact
    def __call__(self, z):
        hidden = nn.relu(nn.LayerNorm()(nn.Dense(self.args.hidden_dim)(z)))
        return nn.Dense(self.num_actions)(hidden)


# ------------------------------ The game ------------------------------------------------------------------------------
class Transition(NamedTuple):
    obs: (
        jax.Array
    )  # [..., 4, 84, 84] bytes; the true next observation is always the next step's, see `act`
    action: jax.Array
    reward: jax.Array
    terminated: (
        jax.Array
    )  # no value follows; a time-out is not a termination (see --bootstrap-at-timeout)
    done: (
        jax.Array
    )  # the episode ends here, by game over, lost life (see --episodic-life) or time-out
    mask: jax.Array  # False: a dummy, the step after an end; its action had no effect


def q_values(networks: Players, phi, theta, obs):
    """Q_theta(f_phi(s), .) [..., actions] of obs [..., features]."""
    return networks.control.apply(
        {"params": theta}, networks.perception.apply({"params": phi}, obs)
    )


def lambda_returns(rollout: Transition, next_value, gamma, td_lambda):
    """Targets [steps, envs] of a rollout [steps, envs, ...] from next_value = max_a Q(s', a) at the true next
    observation. Backwards, G = r + gamma ((1 - lambda) next_value + lambda G'), and where an episode or the rollout
    ends, r + gamma (1 - terminated) next_value."""
    chex.assert_equal_shape([rollout.reward, rollout.terminated, rollout.done, next_value])

    def backward(later, step):
        reward, terminated, done, value = step
        future = jnp.where(
            done, (1.0 - terminated) * value, (1.0 - td_lambda) * value + td_lambda * later
        )
        return (reward + gamma * future,) * 2

    steps = rollout.reward, rollout.terminated, rollout.done, next_value
    return jax.lax.scan(backward, next_value[-1], steps, reverse=True)[1]


def bellman_error(phi, theta, networks, batch: Transition, target):
    """delta_j = Y_j - Q_theta(f_phi(s_j), a_j), [batch]; the target Y carries no gradient."""
    q = q_values(networks, phi, theta, batch.obs)
    q = jnp.sum(
        q * jax.nn.one_hot(batch.action, q.shape[-1]), axis=-1
    )  # a GPU does this faster than a look-up
    chex.assert_equal_shape([q, target])
    return jax.lax.stop_gradient(target) - q


def masked_mean(x, mask):
    """sum(mask x) / sum(mask), and 0 where the mask is 0."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(mask * x) / jnp.maximum(jnp.sum(mask), 1.0)


def masked_variance(phi, theta, networks, batch, target):
    """Var_j[delta_j], the population variance over the batch's mask: what perception minimises over phi."""
    delta = bellman_error(phi, theta, networks, batch, target)
    return masked_mean(jnp.square(delta - masked_mean(delta, batch.mask)), batch.mask)


def masked_msbe(phi, theta, networks, batch, target):
    """mean_j[delta_j^2] over the batch's mask: what control minimises over theta, and the baseline over both."""
    return masked_mean(jnp.square(bellman_error(phi, theta, networks, batch, target)), batch.mask)


leader_loss = masked_msbe  # so that a round of the game is, to the letter, that of scorer_pqn.py


def step(player, loss, networks, optimizers: Players, params: Players, opt_state: Players, sample):
    """One player (0: perception, 1: control) steps on its loss of (batch, target) while the other stands still."""
    gradient = jax.grad(loss, argnums=player)(*params, networks, *sample)
    change, new_opt_state = optimizers[player].update(gradient, opt_state[player])
    return optax.apply_updates(params[player], change), new_opt_state


def scorer_update(objective, networks, optimizers, params: Players, opt_state, batch, target):
    """One round of the game (Algorithm 1, lines 10 to 15): the follower's response, then the leader's step on it.
    Leaves of `batch` and `target` are [2, batch, ...], one for each player; `objective` is the follower's loss."""
    follower, leader = (jax.tree.map(lambda x: x[player], (batch, target)) for player in (0, 1))
    phi, phi_opt = step(0, objective, networks, optimizers, params, opt_state, follower)
    params = Players(phi, params.control)
    theta, theta_opt = step(1, leader_loss, networks, optimizers, params, opt_state, leader)
    return Players(phi, theta), Players(phi_opt, theta_opt)


def baseline_update(networks, optimizer, params: Players, opt_state, batch, target):
    """The same composed network, one batch [1, batch, ...], one loss, one optimiser at the leader's rate."""
    gradient = Players(*jax.grad(leader_loss, argnums=(0, 1))(*params, networks, batch, target))
    change, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, change), opt_state


# ------------------------------ Training ------------------------------------------------------------------------------
class State(NamedTuple):
    """One seed's learner, saved whole in a checkpoint; random keys are derived from seed and step."""

    seed: jax.Array
    params: Players
    opt_state: Any
    scores: jax.Array  # [num_envs], each environment's last completed game's, NaN before
    episodes: jax.Array  # games completed so far, by all environments together
    dummies: jax.Array  # steps so far that only reset an environment
    curves: dict  # each [points], NaN ahead of training


class Games(NamedTuple):
    """What is being played. The emulators' own states cannot be read, so no checkpoint holds any of this."""

    handle: jax.Array  # envpool's; passed on from step to step, it keeps them in order
    obs: jax.Array  # [num_envs, 4, 84, 84] bytes
    ended: (
        jax.Array
    )  # [num_envs], whether the last step ended the episode: then the next one is a dummy
    lives: jax.Array  # [num_envs], left after the last step; MOST_LIVES where a game ended there
    score: jax.Array  # [num_envs], of the game so far: unclipped, over all lives
    scores: jax.Array  # [num_envs], of the last completed game, NaN before


def make_networks(args: Args, num_actions: int) -> Players:
    """Returns the two networks that the flags describe."""
    return Players(Perception(args), Control(args, num_actions))


MOST_LIVES = 127  # more than any game gives


def tell_ends(games, terminated, truncated, lost, lives, episodic_life):
    """Returns where a game is over after a step, and where no value follows, [num_envs] each.

    `terminated` and `truncated` are envpool's, the first also for a lost life if lives are episodes;
    `lost` says that the game is over by its last life, `lives` how many are left.

    Two things envpool does not say. After a lost life it plays idle frames, in which a game can lose
    its last lives; then it restarts in the dummy step that follows, where there are more lives than
    before. And at the time limit it says `truncated` alone, also where a life is lost.
    """
    restarted = games.ended & (lives > games.lives)
    life_lost = ~games.ended & (lives < games.lives)
    over = lost | truncated | restarted
    no_value = terminated | lost
    if episodic_life:
        no_value = no_value | (truncated & life_lost)
    return over, no_value


def make_train(args: Args, num_actions: int):
    """One seed's training: init(seed) -> State; play(pool_step, state, games, index) acts for rollout `index`; learn(
    players, flat, minibatches, number) is one update on it; evaluate(pool_step, state, games, index) -> State with the
    score of greedy games; the environment steps at each rollout's end, and rollouts per point of a curve."""
    networks = make_networks(args, num_actions)
    objective = masked_msbe if args.follower_loss == "msbe" else masked_variance
    shape, size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs  # of a rollout
    blocks_per_point = max(1, args.total_timesteps // size // 1000)  # about 1,000 points on a curve
    num_blocks = blocks_per_point * -(-args.total_timesteps // (size * blocks_per_point))
    timesteps = size * np.arange(1, num_blocks + 1)
    num_updates = max(
        1, round(args.decay_share * num_blocks * args.num_epochs * args.num_minibatches)
    )
    num_steps = num_blocks * args.num_steps
    epsilon = optax.linear_schedule(
        args.epsilon_start, args.epsilon_end, args.epsilon_share * num_steps
    )

    def radam(
        rate, power=1.0
    ):  # clipped; the rate falls to exactly 0 over --decay-share of the updates made
        scheduled = optax.radam(
            lambda count: rate * (jnp.maximum(num_updates - count, 0) / num_updates) ** power
        )
        return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), scheduled)

    leader = radam(args.learning_rate, args.leader_decay_power or 1.0)  # the baseline's only one
    optimizer = Players(radam(args.follower_learning_rate), leader) if args.scorer else leader
    update = partial(scorer_update, objective) if args.scorer else baseline_update

    def note(
        state: State, index, values: dict
    ) -> State:  # with values of block `index` in its curves
        point = index // blocks_per_point
        return state._replace(
            curves=state.curves | {n: state.curves[n].at[point].set(v) for n, v in values.items()}
        )

    def init(seed) -> State:
        phi_key, theta_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), 0))
        z, phi = networks.perception.init_with_output(phi_key, jnp.zeros((1, 4, 84, 84), jnp.uint8))
        params = Players(phi["params"], networks.control.init(theta_key, z)["params"])
        opt_state = (
            Players(*map(lambda o, p: o.init(p), optimizer, params))
            if args.scorer
            else optimizer.init(params)
        )
        names = "returns", "episodes", "dummies", "eval_returns"
        curves = {name: jnp.full(num_blocks // blocks_per_point, jnp.nan) for name in names}
        return State(
            seed,
            params,
            opt_state,
            jnp.full(args.num_envs, jnp.nan),
            jnp.int32(0),
            jnp.int32(0),
            curves,
        )

    def act(pool_step, params: Players, games: Games, step_and_noise):
        """One epsilon-greedy step in every environment: its transitions [num_envs, ...], their max_a Q(s, a), and where
        a game is over. envpool returns an episode's true last observation at its end and the next episode's first one a
        step later, from a dummy step that ignores its action: s' is the obs of the next step, whatever happens."""
        step, chance, random_action = step_and_noise
        q = q_values(networks, *params, games.obs)  # [num_envs, actions]
        action = jnp.where(chance < epsilon(step), random_action, q.argmax(axis=-1))
        handle, (obs, reward, terminated, truncated, info) = pool_step(games.handle, action)
        done, score = terminated | truncated, games.score + info["reward"]
        over, ends = tell_ends(
            games, terminated, truncated, info["terminated"] > 0, info["lives"], args.episodic_life
        )
        ends = ends if args.bootstrap_at_timeout else done
        later = Games(
            handle=handle,
            obs=obs,
            ended=done,
            lives=jnp.where(over & done, MOST_LIVES, info["lives"]),
            score=jnp.where(over, 0.0, score),
            scores=jnp.where(over, score, games.scores),
        )
        return later, (
            Transition(games.obs, action, reward, ends, done, ~games.ended),
            q.max(axis=-1),
            over,
        )

    def play(pool_step, state: State, games: Games, index):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(state.seed), 1 + index), 3)
        noise = (
            jax.random.uniform(keys[0], shape),
            jax.random.randint(keys[1], shape, 0, num_actions),
        )
        steps_and_noise = index * args.num_steps + jnp.arange(args.num_steps), *noise
        games, (rollout, value, over) = jax.lax.scan(
            partial(act, pool_step, state.params), games, steps_and_noise
        )
        next_value = jnp.concatenate(
            [value[1:], q_values(networks, *state.params, games.obs).max(axis=-1)[None]]
        )
        target = lambda_returns(rollout, next_value, args.gamma, args.td_lambda)
        flat = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), (rollout, target))
        order = jax.vmap(lambda key: jax.random.permutation(key, size))(
            jax.random.split(keys[2], args.num_epochs)
        )
        minibatches = order.reshape(args.num_epochs * args.num_minibatches, -1)
        new = dict(
            episodes=state.episodes + over.sum(), dummies=state.dummies + (~rollout.mask).sum()
        )
        state, mean = state._replace(scores=games.scores, **new), games.scores.mean()
        return note(state, index, dict(returns=mean, **new)), games, (flat, minibatches), mean

    def learn(players, flat, minibatches, number):
        chosen = minibatches[number]
        sample = jax.tree.map(
            lambda x: jnp.broadcast_to(x[chosen], (1 + args.scorer, *x[chosen].shape)), flat
        )
        return update(
            networks, optimizer, *players, *sample
        )  # both players learn from one minibatch

    def evaluate(
        pool_step, state: State, games: Games, index
    ) -> State:  # the mean score of everyone's first game
        def greedily(games):
            later, _ = act(pool_step, state.params, games, (0, 1.0, 0))  # 1 is below no epsilon
            return later._replace(
                scores=jnp.where(jnp.isnan(games.scores), later.scores, games.scores)
            )

        games = jax.lax.while_loop(lambda games: jnp.isnan(games.scores).any(), greedily, games)
        return note(state, index, dict(eval_returns=games.scores.mean()))

    return init, play, learn, evaluate, timesteps, blocks_per_point


# ------------------------------ The run ------------------------------------------------------------------------------
def save(path: Path, write):
    """`write(file)` under a temporary name, then moved: what stands at `path` is whole."""
    with open(partial_path := path.with_name(path.name + ".partial"), "wb") as file:
        write(file)
    partial_path.rename(path)


def restore(path: Path, like):
    """State (shaped as `like`), blocks done and seconds of a checkpoint, or one sentence. NumPy checks its CRC-32s."""
    try:
        with np.load(path) as file:
            *leaves, done, seconds = (file[name] for name in file.files)
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, like)
        return state, int(done), float(seconds)
    except Exception as error:  # a damaged file may raise anything
        fail(
            f"--resume {path} is no usable checkpoint of this script: "
            + str(error).strip().partition("\n")[0]
        )


def rate(advance, carry, steps):
    """Environment steps per second of carry = advance(carry), `steps` of them each time, over some two seconds."""
    carry, count, began = jax.block_until_ready(advance(carry)), 0, time.time()
    while time.time() < began + 2:
        carry, count = jax.block_until_ready(advance(carry)), count + steps
    return count / (time.time() - began)


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.resume:
        given = {
            word[2:].split("=")[0].removeprefix("no-").replace("-", "_")
            for word in sys.argv
            if word[:2] == "--"
        }
        if given - {*OUTPUT}:
            fail(
                f"--resume {args.resume} continues that run with its own arguments; give only output flags beside it"
            )
        try:
            args = Args(
                **json.loads((args.resume / "args.json").read_text())
                | {n: getattr(args, n) for n in OUTPUT}
            )
        except (OSError, ValueError, TypeError) as error:
            fail(f"--resume {args.resume} is not a run of this script: {error}")
    if args.compilation_cache and not jax.config.jax_compilation_cache_dir:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(caches, "scorer")))
    args, make_pool, num_actions = resolve(args)
    init, play, learn, evaluate, timesteps, blocks_per_point = make_train(args, num_actions)
    seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.uint32)
    blocks, size, done, seconds = len(timesteps), int(timesteps[0]), 0, 0.0
    total, minutes = blocks * len(seeds), args.checkpoint_every_minutes or np.inf
    if args.resume:
        states, done, seconds = restore(
            args.resume / "checkpoint.npz", [jax.eval_shape(init, seed) for seed in seeds]
        )
    stem, name = (
        Path(__file__).stem,
        dict(variance="scorer", msbe="scorer-msbe").get(args.follower_loss, "baseline"),
    )
    run = (
        args.runs_dir
        / f"{stem}__{args.env}__{name}__s{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    )
    its_args, device = json.loads(json.dumps(vars(args), default=str)), jax.devices()[0].device_kind
    try:
        run.mkdir(parents=True)
        save(run / "args.json", lambda file: file.write(json.dumps(its_args, indent=2).encode()))
    except OSError as error:
        fail(f"--runs-dir {args.runs_dir} cannot take a new run: {error}")
    print(
        run,
        f"{timesteps[-1]:,} environment steps, {size:,} per rollout, frames: {size * 4 * 84**2 / 1e6:.0f} MB; "
        f"{len(seeds)} seeds one by one on {device}; compiling",
        *["The learner continues exactly, its games start anew: envpool cannot save them."]
        * bool(args.resume),
        sep="\n",
        flush=True,
    )
    if args.track:
        import wandb  # slow to import

        wandb.init(mode=args.wandb_mode, name=run.name, config=its_args)
    stop, starting, first, games, terminal = [], time.time(), done, None, sys.stdout.isatty()
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if stop else stop.append(True))
    states, saved = (
        jax.device_put(states) if args.resume else [jax.jit(init)(seed) for seed in seeds],
        time.time(),
    )
    began, compile_seconds = saved - seconds, saved - starting
    bar = tqdm(
        total=total * size,
        initial=done * size,
        unit="step",
        unit_scale=True,
        file=sys.stdout if terminal else io.StringIO(),
    )
    while done < total and not stop:
        number, index = np.divmod(np.int32(done), np.int32(blocks))
        state, starting = states[number], time.time()
        if games is None or index == 0:
            _, pool_step, start = make_pool(args.num_envs, seeds[number], index)
            games = start(
                jnp.copy(state.scores)
            )  # acting takes over the state's and the games' own
            if args.eval_every:
                _, arena_step, match = make_pool(args.eval_envs, seeds[number], index, 1)
                judge = jax.jit(partial(evaluate, arena_step))
            if done == first:  # alike for all seeds
                like = jax.eval_shape(partial(play, pool_step), state, games, index)[2]
                update = (
                    jax.jit(learn, donate_argnums=0)
                    .lower((state.params, state.opt_state), *like, index)
                    .compile()
                )
                jax.config.update(
                    "jax_persistent_cache_min_compile_time_secs", 1e9
                )  # the rest holds a pool's address
            actor = (
                jax.jit(partial(play, pool_step), donate_argnums=(0, 1))
                .lower(state, games, index)
                .compile()
            )
            compile_seconds, began = (
                compile_seconds + time.time() - starting,
                began + time.time() - starting,
            )
        state, games, rollout, mean = actor(state, games, index)
        players, done = (state.params, state.opt_state), done + 1
        for minibatch in range(
            args.num_epochs * args.num_minibatches
        ):  # no scan: within one, a CPU's gradients of
            players = update(
                players, *rollout, np.int32(minibatch)
            )  # convolutions are ten times slower
        state, point = (
            state._replace(params=players[0], opt_state=players[1]),
            done % blocks_per_point == 0,
        )
        if (
            args.eval_every
            and point
            and timesteps[index] % args.eval_every < size * blocks_per_point
        ):
            state = jax.block_until_ready(
                judge(state, match(jnp.full(args.eval_envs, jnp.nan)), index)
            )
        states[number] = state
        bar.set_postfix_str(
            f"return {float(mean):.2f}"
        )  # waits for acting alone: a GPU still has updates to make
        bar.update(size)
        if not terminal and 10 * bar.n // bar.total > 10 * (bar.n - size) // bar.total:
            print(bar, flush=True)
        if args.track and point:
            wandb.log(
                {n: float(curve[index // blocks_per_point]) for n, curve in state.curves.items()},
                step=bar.n,
            )
        if time.time() - saved > 60 * minutes or stop and minutes < np.inf:
            leaves, saved = (
                jax.tree.leaves((jax.device_get(states), done, time.time() - began)),
                time.time(),
            )
            save(run / "checkpoint.npz", lambda file: np.savez(file, *leaves))
    bar.close()
    ends, states = (
        timesteps[blocks_per_point - 1 : min(done, blocks) : blocks_per_point],
        jax.device_get(states),
    )
    record = {
        name: np.stack([state.curves[name][: len(ends)] for state in states])
        for name in states[0].curves
    }
    low, high = HUMAN.get(args.env, (np.nan, np.nan))
    record |= dict(
        human_normalized=(record["returns"] - low) / (high - low), timesteps=ends, seeds=seeds
    )
    meta = dict(
        schema=1,
        script=stem,
        args=its_args,
        device=device,
        num_devices=1,
        seconds=time.time() - began,
        compile_seconds=compile_seconds,
        complete=done == total,
        versions={name: version(name) for name in "jax jaxlib flax optax envpool".split()},
    )

    def write(meta):
        save(
            run / "results.npz",
            lambda file: np.savez_compressed(file, **record, meta=json.dumps(meta)),
        )

    if args.save_model:
        model = jax.tree.map(
            lambda *seeds: np.stack(seeds), *[seed.params._asdict() for seed in states]
        )
        save(
            run / "model.safetensors",
            lambda file: file.write(to_safetensors(flatten_dict(model, sep="/"))),
        )
    if len(ends):
        write(meta)
        last = record["returns"][
            : max(1, done // blocks), ends > 0.9 * ends[-1]
        ].mean()  # of whole seeds
        print(
            f"mean return over the last 10 %{'' if meta['complete'] else ', stopped'}: {last:.2f}; saved in {run}"
        )
    else:
        print(f"stopped before the first point of the curves; {run} holds no results", flush=True)
    if done == total > first:
        actions = jax.random.randint(
            jax.random.key(0), (args.num_steps, args.num_envs), 0, num_actions
        )
        alone = jax.jit(
            lambda handle: jax.lax.scan(lambda x, a: (pool_step(x, a)[0], None), handle, actions)[0]
        )
        speed, best = (
            size * (done - first) / (meta["seconds"] - seconds),
            rate(alone, jnp.copy(games.handle), size),
        )
        acting = rate(lambda carry: actor(*carry, index)[:2], (state, games), size)
        write(
            meta
            | dict(
                steps_per_second=speed,
                acting_steps_per_second=acting,
                envpool_steps_per_second=best,
            )
        )
        print(
            f"{speed:,.0f} environment steps/s, {speed / best:.0%} of what envpool alone gives with random actions "
            f"({best:,.0f}/s); while only acting, {acting / best:.0%}",
            flush=True,
        )
    sys.exit(0 if done == total else 130)


if __name__ == "__main__":
    main()

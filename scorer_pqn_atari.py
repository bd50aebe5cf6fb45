"""SCORER PQN on Atari: Q-learning as a Stackelberg game on frames.

As scorer_pqn.py, with emulators on the CPU in the rollout. Perception f_phi, the follower, minimises
the variance of the Bellman errors and control Q_theta, the leader, their mean square. Each takes one
step per minibatch: the follower first, and quickly, as its learning rate is higher; then the leader,
on what the follower made of it. Without --scorer the same layers have one loss and one optimiser:
PQN, the baseline.

    # minutes on a laptop; then the paper's run, a day on a GPU
    python scorer_pqn_atari.py --env Pong-v5 --scorer --total-timesteps 2e4
    python scorer_pqn_atari.py --env Phoenix-v5 --scorer --num-seeds 5

What stands where, from top to bottom:

    Arguments     every flag; look up what you need
    Environment   make_env, the only place that knows envpool; skip it, but for EnvStep's fields
    Networks      f_phi and Q_theta, two flax modules
    The game      the method: lambda-returns, losses and one round of the game; jax and optax alone
    Training      act for a rollout, compute its targets, learn from it; games of evaluation
    Counts        how a run is divided into loops; skip it
    The checks    what the flags may be; skip them
    The run       seeds one by one, progress, checkpoints, records; skip it

To understand the method read scorer_pqn.py first: "The game" and "Training" have the same functions
there. What Atari adds: a dummy step after each episode's end, so that losses take a mask of the
steps that count; emulators, which cannot be batched over seeds, so that these follow one another;
and scores of whole games beside episodes of one life. The paper: Martinez et al., "Stackelberg
Coupling of Online Representation Learning and Reinforcement Learning", ICLR 2026.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "envpool>=1.2.5",
#   "tyro>=1.0.17", "tqdm>=4.68", "safetensors>=0.8", "wandb>=0.31"]
# ///

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the slow imports without a traceback

import difflib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import make_dataclass
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated
from typing import Any
from typing import Literal
from typing import NamedTuple

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

# ==================================================================================================
# Arguments
# ==================================================================================================

# What a flag of a player is where it is not given: the baseline has none of them.
PRESETS = {
    "Atari": dict(follower_loss="variance", follower_learning_rate=5e-4, leader_decay_power=1.0),
}


@dataclass
class Experiment:
    """What is trained, and for how long."""

    env: str = "Pong-v5"  # Atari game of envpool
    seed: int = 0  # first seed
    num_seeds: int = 1  # seeds trained one after another: seed, seed + 1, ...
    total_timesteps: int = 50_000_000  # environment steps per seed, dummies included, rounded up
    eval_every: int | None = None  # environment steps between evaluations by greedy games
    eval_envs: int = 8  # games of an evaluation, side by side and with training's options


@dataclass
class Emulator:
    """How the game is played: as PQN has it; in brackets, what Machado et al. recommend."""

    episodic_life: bool = True  # a lost life ends the episode, but the score is the game's (off)
    clip_rewards: bool = True  # learn from the rewards' signs, but count the points
    sticky_actions: float = 0.0  # probability of repeating the last action instead (0.25)
    frame_skip: int = 4  # frames that an action lasts
    noop_max: int = 30  # at most so many idle frames, at random, at an episode's start
    max_episode_steps: int = 27_000  # steps after which a game is cut: half an hour


@dataclass
class Game:
    """SCORER or the baseline."""

    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss
    follower_loss: Literal["variance", "msbe"] | None = None  # what perception minimises
    follower_learning_rate: float | None = None  # initial rate of the follower
    learning_rate: float = 2.5e-4  # initial rate of the leader, or of the baseline
    leader_decay_power: float | None = None  # the leader's rate falls as (1 - progress)^power


@dataclass
class Algorithm:
    """The PQN underneath, alike for SCORER and the baseline."""

    num_envs: int = 128  # environments per seed
    num_steps: int = 32  # steps of each environment in a rollout
    num_epochs: int = 2  # passes over a rollout
    num_minibatches: int = 32  # per pass; one update each
    gamma: float = 0.99  # discount per step
    td_lambda: float = 0.65  # of the lambda-returns: 0 is one step, 1 is the whole rollout
    decay_share: float = 1.0  # of training, after which the learning rates are 0
    epsilon_start: float = 1.0  # initial probability of a random action
    epsilon_end: float = 0.001  # final probability of a random action
    epsilon_share: float = 0.1  # of training, over which it falls linearly
    max_grad_norm: float = 10.0  # global-norm clip, for each player alone
    bootstrap_at_timeout: bool = True  # off: a time-out counts as a termination


@dataclass
class Network:
    """The layers."""

    latent_dim: int = 256  # width of perception's last layer, and so of its features z
    hidden_dim: int = 256  # width of control's hidden layer


@dataclass
class Output:
    """What is kept, and how to run."""

    runs_dir: Path = Path("runs")  # the folder that gets one folder per run
    save_model: bool = False  # write model.safetensors: all seeds, perception/... and control/...
    checkpoint_every_minutes: float | None = None  # keep the newest training state, for --resume
    resume: Path | None = None  # continue the run in this folder, as a new run; its games restart
    track: bool = False  # log to Weights & Biases; its WANDB_... variables say where and how


@dataclass
class Args(Experiment, Emulator, Game, Algorithm, Network, Output):
    """All flags in one flat namespace; --help shows the groups."""


def family(env: str) -> str:
    """Returns the family of an environment, a key of PRESETS."""
    return "Atari"


# ==================================================================================================
# Environment
# ==================================================================================================


class EnvState(NamedTuple):
    """What is known of the emulators. They cannot be read, so no checkpoint holds any of this."""

    handle: jax.Array  # envpool's; passed on from step to step, it keeps them in order
    ended: jax.Array  # [num_envs], the last step ended the episode: the next one is a dummy
    lives: jax.Array  # [num_envs], left after the last step; MOST_LIVES where a game ended there


class EnvStep(NamedTuple):
    """What a step of all environments gives, arrays [num_envs, ...].

    The observation is always what the action led to. After an episode's end the next step is a
    dummy: it ignores its action, and its observation is the next episode's first.
    """

    env_state: EnvState
    obs: jax.Array  # [num_envs, 4, 84, 84] bytes
    reward: jax.Array  # clipped, unless --no-clip-rewards; 0 at a dummy
    points: jax.Array  # what the step adds to the game's score
    terminated: jax.Array  # the episode ended, and no reward can follow
    done: jax.Array  # the episode ended, by game over, lost life (--episodic-life) or time
    game_over: jax.Array  # the game ended; at a dummy, in the idle frames since the step before
    is_dummy: jax.Array


class Pool(NamedTuple):
    """Emulators that are stepped together; a program that steps them is for this pool alone."""

    reset: Callable  # () -> obs [num_envs, 4, 84, 84], env_state, on the host; all games start
    step: Callable  # (env_state, action [num_envs]) -> EnvStep


class Environment(NamedTuple):
    """An Atari game."""

    num_actions: int
    make_pool: Callable  # (num_envs, *integers) -> Pool, whose emulators' seeds come from these


def make_env(args: Args) -> Environment:
    """Makes an Atari game of envpool. A new family of environments starts here, and in PRESETS."""
    specs = envpool.registration.registry.specs
    games = [name for name, (module, *_) in specs.items() if module == "envpool.atari"]
    if args.env not in games:
        near = difflib.get_close_matches(args.env, games, cutoff=0.4) or games
        fail(f"--env {args.env} is no Atari game of envpool; near names: {', '.join(near)}")
    return Environment(
        num_actions=envpool.make_spec(args.env).action_space.n,
        make_pool=partial(make_pool, args),
    )


def make_pool(args: Args, num_envs: int, *key) -> Pool:
    """Starts emulators, each with a seed of its own: from one s, envpool gives s i + i."""
    seeds = np.random.default_rng(key).choice(2**31 - 1, num_envs, replace=False)
    emulators = envpool.make(
        args.env,
        "gymnasium",
        num_envs=num_envs,
        seed=seeds.tolist(),
        episodic_life=args.episodic_life,
        frame_skip=args.frame_skip,
        noop_max=args.noop_max,
        max_episode_steps=args.max_episode_steps,
        reward_clip=args.clip_rewards,
        repeat_action_probability=args.sticky_actions,
    )
    handle, _, _, envpool_step = emulators.xla()

    def reset():
        obs, info = emulators.reset()
        env_state = EnvState(
            handle=jnp.array(handle),
            ended=jnp.zeros(num_envs, bool),
            lives=jnp.array(info["lives"], jnp.int32),
        )
        return jnp.array(obs), env_state

    def step(env_state, action):
        handle, answer = envpool_step(env_state.handle, action)
        return read_answer(handle, env_state, answer, args.episodic_life)

    return Pool(reset, step)


MOST_LIVES = 127  # more than any game gives


def read_answer(handle, env_state: EnvState, answer, episodic_life: bool) -> EnvStep:
    """Returns what envpool's answer to a step says."""
    obs, reward, terminated, truncated, info = answer
    lives = info["lives"]
    done = terminated | truncated
    game_over, no_value = tell_ends(
        env_state, terminated, truncated, info["terminated"] > 0, lives, episodic_life
    )
    return EnvStep(
        env_state=EnvState(
            handle=handle,
            ended=done,
            lives=jnp.where(game_over & done, MOST_LIVES, lives),
        ),
        obs=obs,
        reward=reward,
        points=info["reward"],
        terminated=no_value,
        done=done,
        game_over=game_over,
        is_dummy=env_state.ended,
    )


def tell_ends(env_state, terminated, truncated, lost, lives, episodic_life):
    """Returns where a game is over after a step, and where no value follows, [num_envs] each.

    `terminated` and `truncated` are envpool's, the first also for a lost life if lives are episodes;
    `lost` says that the game is over by its last life, `lives` how many are left.

    Two things envpool does not say. After a lost life it plays idle frames, in which a game can lose
    its last lives; then it restarts in the dummy step that follows, where there are more lives than
    before. And at the time limit it says `truncated` alone, also where a life is lost.
    """
    restarted = env_state.ended & (lives > env_state.lives)
    life_lost = ~env_state.ended & (lives < env_state.lives)
    over = lost | truncated | restarted
    no_value = terminated | lost
    if episodic_life:
        no_value = no_value | (truncated & life_lost)
    return over, no_value


# ==================================================================================================
# Networks
# ==================================================================================================


class Perception(nn.Module):
    """f_phi: frames [..., 4, 84, 84] -> features z [..., latent_dim] (table "SCORER PQN", B)."""

    latent_dim: int = 256

    @nn.compact
    def __call__(self, obs):
        z = jnp.moveaxis(obs, -3, -1).astype(jnp.float32) / 255.0  # bytes until here
        for features, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
            he_normal = nn.initializers.he_normal()
            z = nn.Conv(features, (size, size), stride, "VALID", kernel_init=he_normal)(z)
            z = nn.LayerNorm()(z)
            z = nn.relu(z)
        z = z.reshape(*z.shape[:-3], -1)
        z = nn.Dense(self.latent_dim)(z)
        z = nn.LayerNorm()(z)
        return nn.relu(z)


class Control(nn.Module):
    """Q_theta: features z [..., z_dim] -> action values [..., num_actions] (table "SCORER PQN")."""

    num_actions: int
    hidden_dim: int = 256

    @nn.compact
    def __call__(self, z):
        hidden = nn.Dense(self.hidden_dim)(z)
        hidden = nn.LayerNorm()(hidden)
        hidden = nn.relu(hidden)
        return nn.Dense(self.num_actions)(hidden)


# ==================================================================================================
# The game
#
# E[delta^2] = Var[delta] + E[delta]^2: perception takes on the variance, the part that no constant
# could correct; control, which sees the same errors, takes the whole.
#
# To use it elsewhere, copy from here to the next heading, with `import jax`, `jax.numpy as jnp`,
# `optax`, and `Any`, `NamedTuple` of typing. Only `q_values` knows flax. As in scorer_pqn.py, whose
# heading shows how to call it, networks, parameters, optimisers and their states are pairs (Players),
# the baseline has one optimiser, and a batch comes with its targets; its mask, too.
# ==================================================================================================


class Players(NamedTuple):
    """A pair: of networks, of their parameters, of optimisers, or of the optimisers' states."""

    perception: Any  # f_phi, the follower's
    control: Any  # Q_theta, the leader's


class Batch(NamedTuple):
    """What one player learns from in one update."""

    obs: jax.Array  # [batch, ...]
    action: jax.Array  # [batch], integers
    td_target: jax.Array  # [batch], Y of each transition
    mask: jax.Array  # [batch], the transitions that count: not the dummies


def q_values(networks: Players, params: Players, obs):
    """Returns Q_theta(f_phi(s), .) for obs [..., features], [..., actions]."""
    z = networks.perception.apply({"params": params.perception}, obs)
    return networks.control.apply({"params": params.control}, z)


def select(values, action):
    """Returns the entry of values [..., actions] at action [...]: a look-up, but quicker on a GPU."""
    assert action.shape == values.shape[:-1], (action.shape, values.shape)  # else they broadcast
    return jnp.sum(values * jax.nn.one_hot(action, values.shape[-1]), axis=-1)


def compute_lambda_returns(rollout, next_value, gamma, td_lambda):
    """Returns the targets G [steps, envs] of a rollout's transitions [steps, envs, ...].

    next_value [steps, envs] is V(s') = max_a Q(s', a) at the true next observation. Backwards,

        G = r + gamma (1 - terminated) V(s')                  where an episode or the rollout ends
        G = r + gamma ((1 - lambda) V(s') + lambda G')        elsewhere; G' is the next step's

    There are no target networks: V comes from the parameters that acted.
    """
    assert next_value.shape == rollout.reward.shape, (next_value.shape, rollout.reward.shape)

    def step_back(next_return, step):
        reward, terminated, done, value = step
        at_end = (1.0 - terminated) * value
        elsewhere = (1.0 - td_lambda) * value + td_lambda * next_return
        td_target = reward + gamma * jnp.where(done, at_end, elsewhere)
        return td_target, td_target

    # With V(s') in place of G' the second line gives the rollout's last step what the first says.
    steps = (rollout.reward, rollout.terminated, rollout.done, next_value)
    _, td_target = jax.lax.scan(step_back, next_value[-1], steps, reverse=True)
    return td_target


def bellman_error(networks, params, batch):
    """Returns delta = Y - Q_theta(f_phi(s), a), [batch]; Y is data and carries no gradient."""
    q = select(q_values(networks, params, batch.obs), batch.action)
    assert q.shape == batch.td_target.shape, (q.shape, batch.td_target.shape)  # else they broadcast
    assert q.shape == batch.mask.shape, (q.shape, batch.mask.shape)
    return jax.lax.stop_gradient(batch.td_target) - q  # a safeguard: Y comes from outside


def masked_mean(x, mask):
    """Returns sum(mask x) / sum(mask), and 0 where the mask is 0."""
    return jnp.sum(mask * x) / jnp.maximum(jnp.sum(mask), 1.0)


def follower_loss(delta, mask):
    """Returns Var[delta], the population variance over the mask: what perception minimises."""
    return masked_mean(jnp.square(delta - masked_mean(delta, mask)), mask)


def leader_loss(delta, mask):
    """Returns E[delta^2] over the mask, what control minimises; the baseline, over both."""
    return masked_mean(jnp.square(delta), mask)


def scorer_update(
    networks,
    optimizers,
    params,
    opt_state,
    follower_batch,
    leader_batch,
    objective=follower_loss,
):
    """Plays one round of the game, lines 12 and 15 of Algorithm 1; returns params and opt_state.

    With a replay the batches are two independent draws; PQN's are one minibatch of a rollout, given
    twice. objective is the follower's loss: follower_loss, or leader_loss for the ablation "MSBE".
    """

    # The follower responds: perception steps on the variance while control stands still.
    def perception_objective(phi):
        delta = bellman_error(networks, Players(phi, params.control), follower_batch)
        return objective(delta, follower_batch.mask)

    gradient = jax.grad(perception_objective)(params.perception)
    updates, perception_state = optimizers.perception.update(
        gradient, opt_state.perception, params.perception
    )
    new_phi = optax.apply_updates(params.perception, updates)

    # The leader steps on that response, the new phi, while perception stands still.
    def control_objective(theta):
        delta = bellman_error(networks, Players(new_phi, theta), leader_batch)
        return leader_loss(delta, leader_batch.mask)

    gradient = jax.grad(control_objective)(params.control)
    updates, control_state = optimizers.control.update(gradient, opt_state.control, params.control)
    new_theta = optax.apply_updates(params.control, updates)

    return Players(new_phi, new_theta), Players(perception_state, control_state)


def baseline_update(networks, optimizer, params, opt_state, batch):
    """Steps both networks on the leader's loss with one optimiser: what SCORER is compared with."""

    def objective(params):
        return leader_loss(bellman_error(networks, params, batch), batch.mask)

    gradient = jax.grad(objective)(params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


# ==================================================================================================
# Training
#
# Algorithm 1 has a replay and target networks; what stands in place of its lines here:
#   1, 2      initialise, reset          init, start_games
#   3         while t < T                train_chunk, and `train` in "The run"
#   4 to 7    act                        act, which play calls
#   10, 13    sample a minibatch         play draws them, learn takes one, for both players
#   11, 14    compute targets Y          play, which calls compute_lambda_returns: once
#   12, 15    the players' two steps     learn, which calls scorer_update
# ==================================================================================================


def make_networks(args: Args, num_actions: int) -> Players:
    """Makes the two networks that the flags describe."""
    return Players(
        perception=Perception(args.latent_dim),
        control=Control(num_actions, args.hidden_dim),
    )


def make_optimizers(args: Args, decay_updates: int):
    """Makes a clipped RAdam for each player, or the one that the baseline has.

    All rates fall to exactly 0 over `decay_updates` updates, by default linearly, as in the paper's
    experiments, so the leader's is a constant share of the follower's. The paper's theory (section
    4) wants that share to vanish, which --leader-decay-power 1.5 does.
    """

    def radam(initial_rate, power=1.0):
        def rate(count):
            return initial_rate * (jnp.maximum(decay_updates - count, 0) / decay_updates) ** power

        return optax.radam(rate)

    clip = optax.clip_by_global_norm(args.max_grad_norm)
    slow = radam(args.learning_rate, args.leader_decay_power or 1.0)
    if not args.scorer:
        return optax.chain(clip, slow)
    fast = radam(args.follower_learning_rate)
    return Players(perception=optax.chain(clip, fast), control=optax.chain(clip, slow))


def init_optimizers(optimizers, params: Players):
    """Returns the first state of the players' optimisers, or of the baseline's."""
    if not isinstance(optimizers, Players):
        return optimizers.init(params)
    return Players(
        perception=optimizers.perception.init(params.perception),
        control=optimizers.control.init(params.control),
    )


class Transition(NamedTuple):
    """One step of one environment. The true next observation is the next step's, also at an end."""

    obs: jax.Array  # [..., 4, 84, 84] bytes
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array  # no reward can follow; a time-out counts only if the flags say so
    done: jax.Array  # the episode ends here
    is_dummy: jax.Array  # the step after an end, whose action had no effect


def share_of(mask):
    """Returns the share of true ones in mask [n], exactly 1 for all: 41 times 1/41 is not."""
    return jnp.where(mask.all(), 1.0, mask.mean())


def mean_where(mask, values):
    """Returns the mean of those values [n] at which mask [n] is true, and 0 where it nowhere is."""
    return jnp.where(mask, values, 0.0).mean() / jnp.maximum(share_of(mask), 1.0 / len(mask))


class State(NamedTuple):
    """One seed's learner: what a checkpoint holds. Random keys come from seed and chunk."""

    seed: jax.Array
    params: Players  # phi, theta
    opt_state: Any
    scores: jax.Array  # [num_envs], of each environment's last finished game
    finished: jax.Array  # [num_envs], whether there is one
    episodes: jax.Array  # games finished so far, by all environments together
    dummies: jax.Array  # steps so far that only reset an environment


class Games(NamedTuple):
    """What is being played."""

    env_state: EnvState
    obs: jax.Array  # [num_envs, 4, 84, 84] bytes
    score: jax.Array  # [num_envs], of the game so far: unclipped, over all lives
    scores: jax.Array  # [num_envs], of the last finished game
    finished: jax.Array  # [num_envs], whether there is one


def start_games(pool: Pool, scores, finished) -> Games:
    """Starts all games of a pool, with these scores of the games before [num_envs]."""
    obs, env_state = pool.reset()
    return Games(
        env_state=env_state,
        obs=obs,
        score=jnp.zeros(len(scores), jnp.float32),
        scores=jnp.copy(scores),  # a program takes over its arguments' memory
        finished=jnp.copy(finished),
    )


class Now(NamedTuple):
    """The number of a step and its random numbers, which a chunk draws for all of its steps."""

    step: jax.Array
    chance: jax.Array  # [num_envs], uniform in [0, 1): below epsilon, the action is random
    random_action: jax.Array  # [num_envs]


def random_key(seed, index):
    """Returns a random key of its own for each seed and index: 0 to initialise, 1 + chunk."""
    return jax.random.fold_in(jax.random.key(seed), index)


def make_train(args: Args, env: Environment) -> "Training":
    """Makes the functions that train one seed, in the order in which data flows."""
    counts = count_steps(args)
    networks = make_networks(args, env.num_actions)
    optimizers = make_optimizers(args, counts.decay_updates)
    chosen_loss = leader_loss if args.follower_loss == "msbe" else follower_loss
    epsilon = optax.linear_schedule(args.epsilon_start, args.epsilon_end, counts.epsilon_steps)

    def init(seed) -> State:
        """Initialises a seed (lines 1 and 2)."""
        keys = jax.random.split(random_key(seed, 0))
        obs = jnp.zeros((1, 4, 84, 84), jnp.uint8)
        z, perception = networks.perception.init_with_output(keys[0], obs)
        control = networks.control.init(keys[1], z)
        params = Players(perception["params"], control["params"])
        return State(
            seed=seed,
            params=params,
            opt_state=init_optimizers(optimizers, params),
            scores=jnp.zeros(args.num_envs, jnp.float32),
            finished=jnp.zeros(args.num_envs, bool),
            episodes=jnp.zeros((), jnp.int32),
            dummies=jnp.zeros((), jnp.int32),
        )

    def draw_steps(keys, chunk) -> Now:
        """Draws what a rollout's steps need: at once, as many small random kernels are slow."""
        shape = (args.num_steps, args.num_envs)
        return Now(
            step=chunk * args.num_steps + jnp.arange(args.num_steps, dtype=jnp.int32),
            chance=jax.random.uniform(keys[0], shape, jnp.float32),
            random_action=jax.random.randint(keys[1], shape, 0, env.num_actions, jnp.int32),
        )

    def draw_minibatches(key):
        """Draws each epoch's order of the transitions; returns indices [updates, minibatch]."""

        def draw_order(key):
            return jax.random.permutation(key, jnp.arange(counts.rollout_size, dtype=jnp.int32))

        orders = jax.vmap(draw_order)(jax.random.split(key, args.num_epochs))
        return orders.reshape(args.num_epochs * args.num_minibatches, -1)

    def act(env_step, params, games, now):
        """Takes an epsilon-greedy step in all environments (lines 4 to 7).

        Returns the games, the transitions, V(s) = max_a Q(s, a), and where a game is over.
        """
        q = q_values(networks, params, games.obs)  # [num_envs, actions]
        explore = now.chance < epsilon(now.step)
        action = jnp.where(explore, now.random_action, q.argmax(axis=-1).astype(jnp.int32))
        stepped = env_step(games.env_state, action)
        transition = Transition(
            obs=games.obs,
            action=action,
            reward=stepped.reward,
            terminated=stepped.terminated if args.bootstrap_at_timeout else stepped.done,
            done=stepped.done,
            is_dummy=stepped.is_dummy,
        )
        score = games.score + stepped.points
        games = Games(
            env_state=stepped.env_state,
            obs=stepped.obs,
            score=jnp.where(stepped.game_over, 0.0, score),
            scores=jnp.where(stepped.game_over, score, games.scores),
            finished=games.finished | stepped.game_over,
        )
        return games, (transition, q.max(axis=-1), stepped.game_over)

    def with_td_target(params, rollout, value, last_obs) -> Batch:
        """Returns a rollout [steps, num_envs, ...] flat and with its targets: computed once.

        value [steps, num_envs] is that of its observations; last_obs is the one after them.
        """
        last_value = q_values(networks, params, last_obs).max(axis=-1)
        next_value = jnp.concatenate([value[1:], last_value[None]])
        td_target = compute_lambda_returns(rollout, next_value, args.gamma, args.td_lambda)
        batch = Batch(rollout.obs, rollout.action, td_target, ~rollout.is_dummy)
        return jax.tree.map(lambda x: x.reshape(counts.rollout_size, *x.shape[2:]), batch)

    def play(env_step, state, games, chunk):
        """Acts for a rollout; returns state, games, what to learn from, and what the curves show.

        What to learn from is the rollout with its targets, and indices [updates, minibatch] into it.
        """
        keys = jax.random.split(random_key(state.seed, 1 + chunk), 3)
        games, (rollout, value, game_over) = jax.lax.scan(
            partial(act, env_step, state.params), games, draw_steps(keys[:2], chunk)
        )
        batch = with_td_target(state.params, rollout, value, games.obs)
        state = state._replace(
            scores=games.scores,
            finished=games.finished,
            episodes=state.episodes + jnp.sum(game_over, dtype=jnp.int32),
            dummies=state.dummies + jnp.sum(rollout.is_dummy, dtype=jnp.int32),
        )
        metrics = dict(
            returns=mean_where(games.finished, games.scores),
            finished=share_of(games.finished),
            episodes=state.episodes,
            dummies=state.dummies,
        )
        return state, games, (batch, draw_minibatches(keys[2])), metrics

    def learn(players, rollout, minibatches, update):
        """Makes the update with this number of (params, opt_state) (lines 10 to 15)."""
        params, opt_state = players
        game = networks, optimizers, params, opt_state
        batch = jax.tree.map(lambda x: x[minibatches[update]], rollout)
        if args.scorer:
            # Both players learn from the same minibatch.
            return scorer_update(*game, batch, batch, objective=chosen_loss)
        # An axis of 1 more, as in scorer_dqn.py: without it XLA rounds gradients differently.
        stack = jax.tree.map(lambda x: x[None], batch)  # [1, minibatch, ...]
        return baseline_update(*game, stack)

    def evaluate(env_step, params, games):
        """Returns the mean score of each environment's first game, played greedily."""
        greedily = Now(step=jnp.int32(0), chance=jnp.float32(1), random_action=jnp.int32(0))

        def play_on(games):
            after, _ = act(env_step, params, games, greedily)
            return after._replace(scores=jnp.where(games.finished, games.scores, after.scores))

        games = jax.lax.while_loop(lambda games: ~games.finished.all(), play_on, games)
        return games.scores.mean()

    return Training(
        init=init,
        play=play,
        learn=learn,
        evaluate=evaluate,
        num_updates=args.num_epochs * args.num_minibatches,
        timesteps=counts.rollout_size * np.arange(1, counts.num_chunks + 1),
        chunks_per_point=counts.chunks_per_point,
    )


def train_chunk(training: "Training", programs: "Programs", state: State, games: Games, chunk):
    """Acts for a rollout and learns from it; returns state, games, and what the curves show.

    The host starts each update, as within a scan a CPU takes ten times as long for the gradients of
    convolutions.
    """
    state, games, rollout, metrics = programs.play(state, games, np.int32(chunk))
    players = state.params, state.opt_state
    for update in range(training.num_updates):
        players = programs.learn(players, *rollout, np.int32(update))
    params, opt_state = players
    return state._replace(params=params, opt_state=opt_state), games, metrics


# ==================================================================================================
# Counts
# ==================================================================================================


class Counts(NamedTuple):
    """How a run is divided. A step moves all environments once; an update is a round of the game."""

    rollout_size: int  # transitions, of all environments
    num_chunks: int  # what the host starts at once: one rollout with its updates
    chunks_per_point: int  # so many chunks are one point of the recorded curves
    decay_updates: int  # updates over which the learning rates fall to 0
    epsilon_steps: float  # steps over which the probability of a random action falls


def count_steps(args: Args) -> Counts:
    """Divides a run."""
    rollout_size = args.num_steps * args.num_envs
    chunks_per_point = max(1, args.total_timesteps // rollout_size // 1000)  # about 1,000 points
    num_points = ceil_divide(args.total_timesteps, rollout_size * chunks_per_point)
    num_chunks = num_points * chunks_per_point
    num_updates = num_chunks * args.num_epochs * args.num_minibatches
    return Counts(
        rollout_size=rollout_size,
        num_chunks=num_chunks,
        chunks_per_point=chunks_per_point,
        decay_updates=max(1, round(args.decay_share * num_updates)),
        epsilon_steps=args.epsilon_share * (num_chunks * args.num_steps),
    )


def ceil_divide(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


# ==================================================================================================
# The checks
# ==================================================================================================

# Flags that only a player has.
PLAYER_FLAGS = ("follower_loss", "follower_learning_rate", "leader_decay_power")


def complete(args: Args) -> Args:
    """Returns args with the presets where unset; bad input ends in one sentence."""
    if args.scorer:
        args = with_presets(args, PRESETS[family(args.env)])
    else:
        for name in PLAYER_FLAGS:
            if getattr(args, name) is not None:
                fail(f"{flag(name)} {getattr(args, name)} needs --scorer")
    check_numbers(
        args,
        gamma=(0, 1),
        td_lambda=(0, 1),
        epsilon_start=(0, 1),
        epsilon_end=(0, 1),
        epsilon_share=(1e-9, 1),
        decay_share=(1e-9, 1),
        sticky_actions=(0, 1),
        frame_skip=(1, 10**6),
        noop_max=(1, 10**6),
        max_episode_steps=(1, 10**6),
        eval_envs=(1, 10**6),
        total_timesteps=(1, 2**30 // max(1, args.num_epochs)),  # counts are int32
    )
    rollout_size = args.num_envs * args.num_steps
    if rollout_size % args.num_minibatches:
        fail(
            f"--num-minibatches {args.num_minibatches} must divide the {rollout_size} steps of a "
            "rollout, --num-envs times --num-steps"
        )
    return args


# ==================================================================================================
# The run
#
# As in the scripts that train seeds side by side, but one seed after another: emulators cannot be
# batched over seeds. It knows of its algorithm only the names above: Args and its groups, PRESETS,
# family, complete, make_env, start_games, train_chunk, and make_train, which returns this:
# ==================================================================================================


class Training(NamedTuple):
    """What a run needs of an algorithm: functions of one seed, to be compiled, and counts.

    env_step is a pool's. The metrics are scalars by name: `returns`, the mean over the environments
    that have finished a game; `finished`, the share of these environments, until which is 1 the
    recorded returns are NaN; and whatever else is to be recorded.
    """

    init: Callable  # seed -> state, with a field `params`
    play: Callable  # (env_step, state, games, chunk) -> state, games, rollout, metrics
    learn: Callable  # ((params, opt_state), *rollout, update) -> (params, opt_state)
    evaluate: Callable  # (env_step, params, games) -> mean score of each environment's first game
    num_updates: int  # in a chunk
    timesteps: np.ndarray  # [chunks], environment steps at each chunk's end
    chunks_per_point: int  # so many chunks are one point of the recorded curves


class Programs(NamedTuple):
    """Compiled functions of one seed and its pool."""

    play: Callable  # (state, games, chunk) -> state, games, rollout, metrics
    learn: Callable  # as in Training


def main():
    """Trains all seeds and writes their record."""
    given = parse_args()
    set_up_jax()
    args = complete(given)
    env = make_env(args)
    training = make_train(args, env)
    records = Records(args, training, run_name(given, args))
    states = records.restore() if args.resume else None
    if args.track:
        start_tracking(records)
    stop = StopSignal(records)
    records.make_folder()
    try:
        print_plan(args, training, records)
        states = in_background(lambda: train(args, env, training, states, records, stop))
        whole = records.finish(states)
    finally:
        records.remove_empty_folder()
    sys.exit(stop.exit_code or (0 if whole else 1))


# ------------------------------------ Flags and their checks --------------------------------------


def fail(message: str):
    """Ends the program with one sentence on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def flag(name: str) -> str:
    """Returns an argument's name as one types it."""
    return f"--{name.replace('_', '-')}"


def field_names(group) -> list[str]:
    """Returns the names of a dataclass' fields."""
    return [one.name for one in fields(group)]


def parse_args() -> Args:
    """Reads the command line; with --resume, all but the output flags are the earlier run's."""
    groups = [(group.__name__, group, field(default_factory=group)) for group in Args.__bases__]
    for group in Args.__bases__:
        show_presets(group)
    cli = tyro.conf.OmitArgPrefixes[make_dataclass("CommandLine", groups)]
    title, _, commands, *_ = __doc__.split("\n\n")  # the rest is for readers of this file
    try:
        parsed = tyro.cli(cli, description=f"{title}\n\n{commands}", registry=whole_numbers())
    except SystemExit:  # of --help
        flush_output()
        raise
    except OSError:
        discard_output()
        sys.exit()
    args = Args(
        **{name: value for group in vars(parsed).values() for name, value in vars(group).items()}
    )
    return args_to_resume(args) if args.resume else args


def whole_numbers():
    """Returns tyro's rule for int flags, which may also be written as 1e6."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def whole_number(info):
        if info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda words: int(repr(float(words[0])).removesuffix(".0")),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def show_presets(group):
    """Makes --help show each family's value as the default of the group's flags in PRESETS."""
    for name in field_names(group):
        values = {family: preset[name] for family, preset in PRESETS.items() if name in preset}
        if not values:
            continue
        shown = {family: format_value(value) for family, value in values.items()}
        if len(shown) == 1:
            hint = f"(default: {shown.popitem()[1]})"
        else:
            hint = f"(default: {', '.join(f'{family} {value}' for family, value in shown.items())})"
        kind = type(next(iter(values.values())))
        metavar = {int: "INT", float: "FLOAT", bool: "{True,False}"}.get(kind)
        shown_as = dict(metavar=metavar) if metavar else {}
        hinted = tyro.conf.arg(help_behavior_hint=hint, **shown_as)
        group.__annotations__[name] = Annotated[group.__annotations__[name], hinted]


def format_value(value) -> str:
    """Returns a value as one would type it: 1e8 for 100000000."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}".replace("e+0", "e").replace("e-0", "e-") if is_number else str(value)


def args_to_resume(args: Args) -> Args:
    """Returns the arguments of the run to resume, with the output flags that were given now."""
    folder = args.resume
    words = [word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    given = {word.removeprefix("no-").replace("-", "_") for word in words}
    if given - set(field_names(Output)):
        fail(f"--resume {folder} continues that run as it was; give only output flags beside it")
    try:
        earlier = json.loads((folder / "args.json").read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fail(f"--resume {folder} is not the folder of a run: args.json: {reason}")
    if not isinstance(earlier, dict) or set(earlier) != set(field_names(Args)):
        fail(f"--resume {folder} is of another script, or of another version of this one")
    if not (folder / "checkpoint.npz").exists():
        fail(
            f"--resume {folder} has no checkpoint.npz: a run keeps one only with "
            "--checkpoint-every-minutes"
        )
    return Args(**earlier | {name: getattr(args, name) for name in field_names(Output)})


def with_presets(args: Args, presets: dict) -> Args:
    """Returns args with these values where nothing was given."""
    for name in presets:
        assert getattr(Args, name) is None, f"{name} is in PRESETS, so its default must be None"
    unset = {name: value for name, value in presets.items() if getattr(args, name) is None}
    return replace(args, **unset)


def check_numbers(args: Args, **limits):
    """Ends in one sentence where a number is outside its limits, or has none and is not positive."""
    limits["num_seeds"] = (1, 2**31)
    limits["seed"] = (0, max(0, 2**32 - args.num_seeds))
    for name, value in vars(args).items():
        if value == ():
            fail(f"{flag(name)} needs a value")
        low, high = limits.get(name, (1e-37, 1e37))  # what float32 can hold
        accepted = f"from {low} to {high}" if name in limits else "positive and below 1e37"
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if is_number and not low <= number <= high:
                fail(f"{flag(name)} {number} must be {accepted}")


def run_name(given: Args, args: Args) -> str:
    """Returns the run's name: script, environment, what is not preset, seed, time."""
    words = ["scorer" if args.scorer else "baseline"]
    for group in Args.__bases__[1:-1]:  # not what is trained, nor the output
        for name in field_names(group):
            default = PRESETS[family(args.env)].get(name, getattr(Args, name))
            value = getattr(given, name)
            if name != "scorer" and value not in (None, default):
                words.append(name_value(name, value))
    variant = "-".join(words)[:120].rstrip("-")
    if args.resume:
        parts = args.resume.resolve().name.split("__")
        variant = parts[2] if len(parts) == 5 else "resumed"
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    return f"{Path(__file__).stem}__{args.env}__{variant}__s{args.seed}__{now}"


def name_value(name: str, value) -> str:
    """Returns what an argument adds to a run's name: msbe, no-episodic-life, td-lambda-0.9."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return value if isinstance(value, str) else f"{name}-{value:g}"


# ------------------------------------------- Compiling --------------------------------------------


def set_up_jax():
    """Sets JAX's cache of compiled programs."""
    if not jax.config.jax_compilation_cache_dir:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(caches, "scorer")))


def compile_learn(training: Training, env_step, state, games):
    """Compiles an update, the same for all seeds. No program after it is kept in the cache.

    The others hold the address of their pool, which no later process has.
    """
    _, _, rollout, _ = jax.eval_shape(partial(training.play, env_step), state, games, np.int32(0))
    players = state.params, state.opt_state
    learn = jax.jit(training.learn, donate_argnums=0)
    compiled = learn.lower(players, *rollout, np.int32(0)).compile()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    return compiled


def compile_play(training: Training, env_step, state, games):
    """Compiles acting for a rollout, which takes over the memory of state and games."""
    play = jax.jit(partial(training.play, env_step), donate_argnums=(0, 1))
    return play.lower(state, games, np.int32(0)).compile()


def in_background(function):
    """Returns function(), from a thread of its own: while JAX works, a thread hears no Ctrl-C."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()


# ------------------------------------------- The loop ---------------------------------------------


gather = jax.device_get  # arrays, also in trees, from the device: numpy


class StopSignal:
    """Ctrl-C or SIGTERM: the first stops training after its chunk, the second ends the program."""

    def __init__(self, records: "Records"):
        self.records = records
        self.training_has_begun = False
        self.exit_code = 0  # of a stopped run, as a shell gives it
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.hear)

    def hear(self, number, frame):
        """Handles a signal."""
        if self.training_has_begun and not self.exit_code:
            self.exit_code = 128 + number
            say("stopping after this chunk and saving; again to end without saving")
            return
        say(f"ended without saving; {self.records.describe_saved()}")
        self.records.remove_empty_folder()
        os._exit(128 + number)

    def is_requested(self) -> bool:
        """Returns whether training is to stop."""
        return self.exit_code != 0


def say(message: str):
    """Prints a line on standard error, below a progress bar if there is one."""
    try:
        tqdm.write(message, file=sys.stderr)
        sys.stderr.flush()
    except OSError:  # closed or full: nobody can be told
        pass


def show(*lines):
    """Prints lines at once; a run goes on without standard output where that is closed or full."""
    try:
        print(*lines, sep="\n")
    except OSError:
        discard_output()
    flush_output()


def flush_output():
    """Writes out what was printed, if standard output still takes it."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def discard_output():
    """Sends all further output nowhere, what waits to be written included."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_plan(args: Args, training: Training, records: "Records"):
    """Prints where results go and what is going to be trained."""
    show(records.folder)
    timesteps = f"{training.timesteps[-1]:,} environment steps"
    if training.timesteps[-1] != args.total_timesteps:
        timesteps += f" ({args.total_timesteps:,} rounded up to whole points of the curves)"
    rollout = int(training.timesteps[0])
    megabytes = rollout * 4 * 84**2 / 1e6
    show(f"{timesteps}, {rollout:,} per rollout, whose frames take {megabytes:.0f} MB")
    if args.resume:
        show(f"continues {args.resume} after {records.timestep:,} steps of all seeds")
        show("the learner goes on exactly, its games start anew: envpool cannot save them")
    number = "1 seed" if args.num_seeds == 1 else f"{args.num_seeds} seeds one by one"
    show(f"{number} on {records.device}; compiling")


class Progress:
    """A bar on a terminal; elsewhere a line for each tenth of the run."""

    def __init__(self, first: int, last: int):
        self.is_terminal = sys.stdout.isatty()
        self.bar = tqdm(
            total=last,
            initial=first,
            unit="step",
            unit_scale=True,
            file=sys.stdout if self.is_terminal else io.StringIO(),
        )

    def show(self, timestep: int, metrics: dict):
        """Moves the bar. It waits for acting alone: a GPU still has updates to make."""
        returns = describe_returns(*gather((metrics["returns"], metrics["finished"])))
        self.bar.set_postfix_str(returns, refresh=False)
        tenths = 10 * self.bar.n // self.bar.total
        self.bar.update(timestep - self.bar.n)
        if not self.is_terminal and 10 * self.bar.n // self.bar.total > tenths:
            show(self.bar)


def describe_returns(returns, finished) -> str:
    """Returns in words the mean return of those environments that have finished a game."""
    if finished == 0:
        return ""
    if have_all(finished):
        return f"return {returns:.2f}"
    return f"return {returns:.2f} of the {finished:.0%} of environments that ended a game"


def have_all(finished):
    """Returns whether shares are 1, but for what float32 may lose in computing them."""
    return finished > 1 - 1e-6


def train(args: Args, env: Environment, training: Training, states, records: "Records", stop):
    """Trains the seeds that are left, one after another; returns the states of all."""
    began = time.time()
    if states is None:
        states = [jax.jit(training.init)(seed) for seed in records.seeds]
    records.compile_seconds += time.time() - began
    num_chunks = len(training.timesteps)
    progress = Progress(records.timestep, args.num_seeds * int(training.timesteps[-1]))
    learn = None
    for number in range(records.chunks // num_chunks, args.num_seeds):
        learn = train_seed(args, env, training, learn, states, number, progress, records, stop)
        if stop.is_requested():
            break
    progress.bar.close()
    records.stop_clock(states)
    return states


def train_seed(args, env, training, learn, states, number, progress, records, stop):
    """Runs the chunks of a seed that are left, and keeps what they measure in records and states.

    Returns the compiled update, which the next seed uses again: there is none before the first.
    """
    num_chunks = len(training.timesteps)
    first = records.chunks % num_chunks
    began = time.time()
    pool = env.make_pool(args.num_envs, records.seeds[number], first)
    state = states[number]
    games = start_games(pool, state.scores, state.finished)
    evaluate = make_evaluate(args, env, training, records.seeds[number], first)
    if learn is None:
        learn = compile_learn(training, pool.step, state, games)
    programs = Programs(compile_play(training, pool.step, state, games), learn)
    records.compile_seconds += time.time() - began
    stop.training_has_begun = True
    for chunk in range(first, num_chunks):
        state, games, metrics = train_chunk(training, programs, state, games, chunk)
        states[number] = state
        if is_evaluated(args, training, chunk):
            metrics["eval_returns"] = evaluate(state.params)
        records.add(metrics)
        progress.show(records.timestep, metrics)
        if args.track and records.is_point():
            track(records.timestep, metrics)
        if records.save_what_is_due(states, stop.is_requested()):
            break
    return learn


def make_evaluate(args: Args, env: Environment, training: Training, seed, chunk):
    """Returns a function of params: the mean score of greedy games, in a pool of their own."""
    if not args.eval_every:
        return None
    pool = env.make_pool(args.eval_envs, seed, chunk, 1)
    compiled = jax.jit(partial(training.evaluate, pool.step))
    scores = jnp.zeros(args.eval_envs, jnp.float32)
    finished = jnp.zeros(args.eval_envs, bool)

    def evaluate(params):
        return gather(compiled(params, start_games(pool, scores, finished)))

    return evaluate


def is_evaluated(args: Args, training: Training, chunk: int) -> bool:
    """Returns whether a chunk ends in an evaluation: at the first point of each interval."""
    if not args.eval_every or (chunk + 1) % training.chunks_per_point:
        return False
    steps_per_point = int(training.timesteps[training.chunks_per_point - 1])
    return int(training.timesteps[chunk]) % args.eval_every < steps_per_point


def start_tracking(records: "Records"):
    """Starts a Weights & Biases run; its own variables, such as WANDB_MODE, are respected."""
    import wandb  # slow to import

    try:
        wandb.init(name=records.folder.name, config=records.args_as_json)
    except Exception as error:  # wandb's own kinds
        reason = str(error).strip().partition("\n")[0]
        fail(f"--track cannot start (WANDB_MODE=offline needs no account): {reason}")


def track(timestep: int, metrics: dict):
    """Logs the metrics; returns once all environments have finished a game."""
    import wandb

    metrics = gather(metrics)
    if not have_all(metrics.pop("finished")):
        del metrics["returns"]
    wandb.log(metrics, step=timestep)


# ------------------------------------- What a run leaves behind -----------------------------------

SECONDS_BETWEEN_RESULTS = 60  # a running or killed run has its curves up to then on disk


def save(path: Path, write: Callable):
    """Calls write(file) under a temporary name, then moves it: what stands at `path` is whole."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as file:
            write(file)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_commit() -> str | None:
    """Returns the commit that this script stands in, "-dirty" where it was changed, or None."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


class Records:
    """The folder of a run, and what is written into it."""

    def __init__(self, args: Args, training: Training, name: str):
        self.args = args
        self.training = training
        self.commit = read_commit()  # of what runs, whatever is committed meanwhile
        self.folder = args.runs_dir / name
        self.args_as_json = json.loads(json.dumps(vars(args), default=str))
        self.seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.uint32)
        self.device = jax.devices()[0].device_kind
        self.points = []  # metrics of each point of the curves, seed after seed
        self.fetched_points = 0  # of these are on the host; the others are on the device
        self.chunks = 0  # done, of all seeds
        self.compile_seconds = 0.0
        self.seconds_before = 0.0  # of the run that this one resumes
        self.until = None  # when training ended
        self.since = self.results_written = self.checkpoint_written = time.time()
        self.saved_timestep = None
        self.complained = set()

    # ---- The folder

    def make_folder(self):
        """Makes the folder, and writes args.json into it."""
        text = json.dumps(self.args_as_json, indent=2).encode()
        try:
            self.folder.mkdir(parents=True)
            save(self.folder / "args.json", lambda file: file.write(text))
        except OSError as error:
            self.remove_empty_folder()
            fail(f"--runs-dir {self.args.runs_dir} cannot take a new run: {error}")

    def remove_empty_folder(self):
        """Removes the folder where it holds nothing but its args.json."""
        if self.folder.exists() and not (set(os.listdir(self.folder)) - {"args.json"}):
            (self.folder / "args.json").unlink(missing_ok=True)
            self.folder.rmdir()

    def describe_saved(self) -> str:
        """Returns in words what the folder holds."""
        if self.saved_timestep is None:
            return "nothing was saved"
        return f"{self.folder} holds what was saved at {self.saved_timestep:,} steps"

    def try_to_save(self, path: Path, write: Callable) -> bool:
        """Saves and returns True; where that fails, says so once and returns False."""
        try:
            save(path, write)
        except OSError as error:
            if path.name not in self.complained:
                say(f"{path} cannot be written: {error.strerror or error}")
            self.complained.add(path.name)
            return False
        self.saved_timestep = self.timestep
        return True

    # ---- Curves

    @property
    def timestep(self) -> int:
        """Environment steps of all seeds so far."""
        return self.chunks * int(self.training.timesteps[0])

    @property
    def points_per_seed(self) -> int:
        """How many points a whole curve has."""
        return len(self.training.timesteps) // self.training.chunks_per_point

    @property
    def is_complete(self) -> bool:
        """Whether all seeds are trained to their end."""
        return self.chunks == len(self.training.timesteps) * len(self.seeds)

    @property
    def seconds(self) -> float:
        """Of training so far, without compilation, with what an earlier run took."""
        elapsed = (self.until or time.time()) - self.since
        return self.seconds_before + elapsed - self.compile_seconds

    def stop_clock(self, states):
        """Ends the time that counts as training, once the device is done."""
        jax.block_until_ready(states)
        self.until = time.time()

    def add(self, metrics: dict):
        """Keeps the metrics of the next chunk, if it ends a point of the curves."""
        self.chunks += 1
        if self.is_point():
            self.points.append(metrics)

    def is_point(self) -> bool:
        """Returns whether the last chunk ended a point of the curves."""
        return self.chunks % self.training.chunks_per_point == 0

    def fetch_points(self):
        """Brings the newest points from the device to the host."""
        self.points[self.fetched_points :] = gather(self.points[self.fetched_points :])
        self.fetched_points = len(self.points)

    def curves(self) -> dict:
        """Returns the curves by name, [seeds, points]: NaN where nothing was measured."""
        self.fetch_points()
        names = dict.fromkeys(name for point in self.points for name in point)
        curves = {}
        for name in names:
            curve = np.full(len(self.seeds) * self.points_per_seed, np.nan, np.float32)
            curve[: len(self.points)] = [point.get(name, np.nan) for point in self.points]
            by_seed = curve.reshape(len(self.seeds), self.points_per_seed)
            curves[name] = by_seed[:, : len(self.point_timesteps())]
        finished = curves.pop("finished")
        curves["returns"] = np.where(have_all(finished), curves["returns"], np.nan)
        return curves

    def point_timesteps(self):
        """Returns the environment steps at each point, [points], as far as the first seed is."""
        step = self.training.chunks_per_point
        return self.training.timesteps[step - 1 :: step][: len(self.points)]

    # ---- Files

    def save_what_is_due(self, states, stopping: bool) -> bool:
        """Writes a checkpoint and results so far, when it is time; returns whether to stop."""
        minutes = self.args.checkpoint_every_minutes
        now = time.time()
        checkpoint_due = minutes and now - self.checkpoint_written > 60 * minutes
        results_due = now - self.results_written > SECONDS_BETWEEN_RESULTS
        if minutes and (checkpoint_due or stopping):
            self.write_checkpoint(states)
            self.checkpoint_written = time.time()
        if results_due or checkpoint_due:
            self.write_results()
            self.results_written = time.time()
        return stopping

    def write_results(self) -> bool:
        """Writes results.npz; returns whether that succeeded."""
        if not self.points:
            return True
        record = self.curves() | dict(timesteps=self.point_timesteps(), seeds=self.seeds)
        record["meta"] = json.dumps(self.meta())
        return self.try_to_save(
            self.folder / "results.npz", lambda file: np.savez_compressed(file, **record)
        )

    def meta(self) -> dict:
        """Returns what results.npz says of the run, beside its curves."""
        return dict(
            schema=1,
            script=Path(__file__).stem,
            commit=self.commit,
            args=self.args_as_json,
            device=self.device,
            num_devices=1,
            lanes=len(self.seeds),  # trained in these seconds
            seconds=self.seconds,
            compile_seconds=self.compile_seconds,
            complete=self.is_complete,
            continues=self.args.resume.resolve().name if self.args.resume else None,
            versions={name: version(name) for name in "jax jaxlib flax optax envpool".split()},
        )

    def write_model(self, states) -> bool:
        """Writes model.safetensors; returns whether that succeeded."""
        params = [flatten_dict(state.params._asdict(), sep="/") for state in gather(states)]
        stacked = {name: np.stack([one[name] for one in params]) for name in params[0]}
        model = to_safetensors(stacked)
        return self.try_to_save(self.folder / "model.safetensors", lambda file: file.write(model))

    def write_checkpoint(self, states):
        """Writes checkpoint.npz: the states' leaves, the curves so far, and where training is."""
        leaves = jax.tree.leaves(gather(states))
        self.fetch_points()
        arrays = {f"state/{number}": leaf for number, leaf in enumerate(leaves)}
        for number, point in enumerate(self.points):
            arrays |= {f"points/{number}/{name}": value for name, value in point.items()}
        arrays |= dict(chunks=self.chunks, num_points=len(self.points), seconds=self.seconds)
        self.try_to_save(self.folder / "checkpoint.npz", lambda file: np.savez(file, **arrays))

    def restore(self):
        """Returns the states of --resume's checkpoint; anything else ends in one sentence."""
        path = self.args.resume / "checkpoint.npz"
        like = [jax.eval_shape(self.training.init, seed) for seed in self.seeds]
        try:
            with np.load(path) as file:  # which checks each array's CRC-32
                arrays = {name: file[name] for name in file.files}
            leaves = [arrays[f"state/{number}"] for number in range(len(jax.tree.leaves(like)))]
            for leaf, expected in zip(leaves, jax.tree.leaves(like), strict=True):
                if (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
                    raise ValueError(f"an array {leaf.shape} of the state must be {expected.shape}")
            points = [{} for _ in range(int(arrays["num_points"]))]
            for name in arrays:
                if name.startswith("points/"):
                    _, number, metric = name.split("/")
                    points[int(number)][metric] = arrays[name]
            chunks, seconds = int(arrays["chunks"]), float(arrays["seconds"])
        except Exception as error:  # a damaged file may raise anything
            reason = str(error).strip().partition("\n")[0]
            fail(f"--resume {path} is no usable checkpoint of this script: {reason}")
        self.points, self.fetched_points = points, len(points)
        self.chunks, self.seconds_before = chunks, seconds
        states = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return jax.device_put(states)

    def finish(self, states) -> bool:
        """Writes and prints the results; returns whether all could be written."""
        if not self.points:
            show("stopped before the first point of the curves: no results")
            return True
        succeeded = self.write_results()
        if self.args.save_model:
            succeeded &= self.write_model(states)
        whole_seeds = max(1, self.chunks // len(self.training.timesteps))
        timesteps = self.point_timesteps()
        last = self.curves()["returns"][:whole_seeds, timesteps > 0.9 * timesteps[-1]]
        stopped = "" if self.is_complete else ", stopped"
        where = f"saved in {self.folder}" if succeeded else "not everything could be saved"
        show(f"mean return over the last 10 %{stopped}: {describe_mean(last)}; {where}")
        return succeeded


def describe_mean(returns) -> str:
    """Returns the mean of returns [seeds, points] in words, also where some or all are missing."""
    known = np.isfinite(returns)
    if not known.any():
        return "none, as not every environment has finished a game"
    missing = "" if known.all() else f" (of the {known.mean():.0%} of points that have one)"
    return f"{returns[known].mean():.2f}{missing}"


if __name__ == "__main__":
    main()

"""SCORER PQN: Q-learning as a Stackelberg game, without replay or target networks.

The parallelised Q-network (Gallici et al., ICLR 2025) acts for a rollout in many environments,
computes lambda-returns once, and learns from minibatches of that rollout; layer normalisation keeps
it stable. With --scorer each minibatch is one round of the game: perception f_phi, the follower,
minimises the variance of the Bellman errors and control Q_theta, the leader, their mean square. Each
takes one step: the follower first, and quickly, as its learning rate is higher; then the leader, on
what the follower made of it. Without --scorer the same layers have one loss and one optimiser: PQN,
the baseline.

    # a minute on a laptop; then the paper's run, for a GPU
    python scorer_pqn.py --env Breakout-MinAtar --scorer --total-timesteps 1e6
    python scorer_pqn.py --env Breakout-MinAtar --scorer --num-seeds 30

What stands where, from top to bottom:

    Arguments     every flag, with its values by environment family; look up what you need
    Environment   make_env, the only place that knows gymnax; skip it, but for EnvStep's fields
    Networks      f_phi and Q_theta, two flax modules
    The game      the method: lambda-returns, losses and one round of the game; jax and optax alone
    Training      act for a rollout, compute its targets, learn from it, and the loop around them
    Counts        how a run is divided into loops; skip it
    The checks    what the flags may be; skip them
    The run       seeds side by side, progress, checkpoints, records; the same in every script; skip it

To understand the method read "The game" and "Training", in this order. Whoever knows scorer_dqn.py
finds new there compute_lambda_returns, and train_chunk with what it calls. The paper: Martinez et
al., "Stackelberg Coupling of Online Representation Learning and Reinforcement Learning", ICLR 2026.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "gymnax==1.0.1", "six>=1.17",
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

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.traverse_util import flatten_dict
from jax.experimental.multihost_utils import process_allgather
from safetensors.flax import save as to_safetensors
from tqdm import tqdm

# ==================================================================================================
# Arguments
# ==================================================================================================

# What a flag is where it is not given, by family of environments. MinAtar: the paper's tables
# (appendix "Hyperparameters"). Control, for which it has none: the values of its authors' script,
# but for the rates and the number of updates.
PRESETS = {
    "MinAtar": dict(
        total_timesteps=100_000_000,
        follower_loss="variance",
        follower_learning_rate=5e-4,
        learning_rate=2.5e-4,
        leader_decay_power=1.0,
        num_envs=128,
        num_steps=32,
        num_epochs=2,
        num_minibatches=32,
        td_lambda=0.65,
        decay_share=0.5,
        epsilon_end=0.01,
        epsilon_share=0.4,
        max_grad_norm=5.0,
        latent_dim=128,
        hidden_dim=64,
    ),
    "control": dict(
        total_timesteps=500_000,
        follower_loss="variance",
        follower_learning_rate=2e-3,
        learning_rate=1e-3,
        leader_decay_power=1.0,
        num_envs=10,
        num_steps=128,
        num_epochs=4,
        num_minibatches=16,
        td_lambda=0.95,
        decay_share=1.0,
        epsilon_end=0.05,
        epsilon_share=0.5,
        max_grad_norm=0.5,
        latent_dim=64,
        hidden_dim=32,
    ),
}


@dataclass
class Experiment:
    """What is trained, and for how long."""

    env: str = "Breakout-MinAtar"  # gymnax environment with a box observation and discrete actions
    seed: int = 0  # first seed
    num_seeds: int = 1  # seeds trained side by side in one program: seed, seed + 1, ...
    total_timesteps: int | None = None  # environment steps per seed, rounded up
    diagnostics: bool = False  # also record losses, Bellman errors, srank and parameter norms


@dataclass
class Game:
    """SCORER or the baseline, and an ablation of the game."""

    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss
    follower_loss: Literal["variance", "msbe"] | None = None  # what perception minimises
    follower_learning_rate: tuple[float, ...] | None = None  # initial rate; several: a sweep
    learning_rate: float | None = None  # initial rate of the leader, or of the baseline
    leader_decay_power: float | None = None  # the leader's rate falls as (1 - progress)^power
    ablation: Literal["per-layer-lr"] | None = None  # the baseline with the players' two rates


@dataclass
class Algorithm:
    """The PQN underneath, alike for SCORER and the baseline."""

    num_envs: int | None = None  # environments per seed
    num_steps: int | None = None  # steps of each environment in a rollout
    num_epochs: int | None = None  # passes over a rollout
    num_minibatches: int | None = None  # per pass; one update each
    gamma: float = 0.99  # discount per step
    td_lambda: float | None = None  # of the lambda-returns: 0 is one step, 1 is the whole rollout
    decay_share: float | None = None  # of training, after which the learning rates are 0
    epsilon_start: float = 1.0  # initial probability of a random action
    epsilon_end: float | None = None  # final probability of a random action
    epsilon_share: float | None = None  # of training, over which it falls linearly
    max_grad_norm: float | None = None  # global-norm clip, for each player alone
    bootstrap_at_timeout: bool = True  # off: a time-out counts as a termination


@dataclass
class Network:
    """The layers."""

    latent_dim: int | None = None  # width of perception's layer, and so of its features z
    hidden_dim: int | None = None  # width of control's hidden layer


@dataclass
class Output:
    """What is kept, and how to run."""

    runs_dir: Path = Path("runs")  # the folder that gets one folder per run
    save_model: bool = False  # write model.safetensors: all seeds, perception/... and control/...
    checkpoint_every_minutes: float | None = None  # keep the newest training state, for --resume
    resume: Path | None = None  # continue the run in this folder, with its arguments, as a new run
    distributed: bool = False  # share the seeds among the processes of a cluster's job
    track: bool = False  # log to Weights & Biases; its WANDB_... variables say where and how


@dataclass
class Args(Experiment, Game, Algorithm, Network, Output):
    """All flags in one flat namespace; --help shows the groups."""


def family(env: str) -> str:
    """Returns the family of an environment, a key of PRESETS."""
    return "MinAtar" if env.endswith("-MinAtar") else "control"


# ==================================================================================================
# Environment
# ==================================================================================================


class EnvStep(NamedTuple):
    """What a step of all environments gives, arrays [num_envs, ...].

    obs is what the next action is chosen at, next_obs what this action led to: they differ at an
    episode's end, where obs is a new episode's first and next_obs the old one's last. terminated: no
    reward can follow; truncated: the time limit has cut the episode, and rewards would have followed.
    """

    env_state: Any
    obs: jax.Array
    next_obs: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


class Environment(NamedTuple):
    """Many copies of an environment, which are stepped together and reset themselves.

    env_state holds plain arrays, whose types no step may change; last_returns keeps its values until
    the next episode's end.
    """

    num_actions: int
    reset: Callable  # keys [num_envs] -> obs [num_envs, features], env_state
    step: Callable  # (keys [num_envs], env_state, action [num_envs]) -> EnvStep
    last_returns: Callable  # env_state -> last episode's return, whether there is one; [num_envs]


def make_env(args: Args) -> Environment:
    """Makes a gymnax environment. A new family: here, in PRESETS and in `family`."""
    gymnax = import_gymnax()
    name = args.env
    try:
        env, env_params = gymnax.make(name)
    except (ValueError, OSError) as error:  # unknown, or one that downloads its data
        names = gymnax.registered_envs
        near = difflib.get_close_matches(name, names, cutoff=0.4) or names
        fail(f"--env {name} cannot be made ({error}); near names: {', '.join(near)}")
    spaces = env.observation_space(env_params), env.action_space(env_params)
    kinds = [type(space).__name__ for space in spaces]
    if kinds != ["Box", "Discrete"]:
        fail(f"--env {name} has spaces {' and '.join(kinds)}; needed: Box and Discrete")
    binary = family(name) == "MinAtar"  # channels of 0 and 1, which fill a quarter as bool
    return vectorize(env, env_params, jnp.bool_ if binary else jnp.float32)


def vectorize(env, env_params, obs_dtype) -> Environment:
    """Turns a gymnax environment into one of many copies, with flat observations of obs_dtype."""
    from gymnax.wrappers import FlattenObservationWrapper
    from gymnax.wrappers import LogWrapper

    env = LogWrapper(FlattenObservationWrapper(env))

    def reset(keys):
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(keys, env_params)
        return obs.astype(obs_dtype), env_state

    def step(keys, env_state, action):
        step_all = jax.vmap(env.step, in_axes=(0, 0, 0, None))
        obs, new_state, reward, terminated, truncated, info = step_all(
            keys, env_state, action, env_params
        )
        return EnvStep(
            env_state=jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, env_state),
            obs=obs.astype(obs_dtype),
            next_obs=info["final_observation"].astype(obs_dtype),
            reward=reward.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
        )

    def last_returns(env_state):
        return env_state.returned_episode_returns, env_state.returned_episode_valid

    return Environment(env.action_space(env_params).n, reset, step, last_returns)


def import_gymnax():
    """Returns gymnax, mended. Importing it starts JAX's devices, so not before they are set up."""
    os.environ.pop(
        "MPLBACKEND", None
    )  # gymnax imports matplotlib, which may lack a notebook's backend
    import gymnax

    gymnax.environments.minatar.asterix.while_sample_slots = free_slot
    return gymnax


def free_slot(key, filled):
    """Replaces the loop with which gymnax's Asterix looks for a free row, drawing the same rows.

    A loop of unknown length inside a step does not get through a GPU's command buffer.
    """
    order = jax.random.permutation(key, jnp.arange(8))
    free = filled[order[1:]] == 0  # gymnax does not try the first either
    return order[jnp.where(free.any(), 1 + free.argmax(), 7)], free.any().astype(int)


# ==================================================================================================
# Networks
#
# Perception's two norms have names, as they have one shape: under flax's automatic names, LayerNorm_0
# and LayerNorm_1, whoever loads a saved model could take one for the other.
# ==================================================================================================


class Perception(nn.Module):
    """f_phi: observation [..., obs_dim] -> features z [..., latent_dim] (table "SCORER PQN")."""

    latent_dim: int = 128

    @nn.compact
    def __call__(self, obs):
        z = obs.astype(jnp.float32)
        z = nn.Dense(self.latent_dim)(z)
        z = nn.LayerNorm(name="norm_hidden")(z)
        z = nn.relu(z)
        return nn.LayerNorm(name="norm_features")(z)


class Control(nn.Module):
    """Q_theta: features z [..., z_dim] -> action values [..., num_actions] (table "SCORER PQN")."""

    num_actions: int
    hidden_dim: int = 64

    @nn.compact
    def __call__(self, z):
        hidden = nn.Dense(self.hidden_dim)(z)
        hidden = nn.LayerNorm()(hidden)
        hidden = nn.relu(hidden)
        self.sow("intermediates", "penultimate", hidden)  # for the diagnostics
        return nn.Dense(self.num_actions)(hidden)


# ==================================================================================================
# The game
#
# E[delta^2] = Var[delta] + E[delta]^2: perception takes on the variance, the part that no constant
# could correct; control, which learns from the same minibatch, takes the whole.
#
# To use it elsewhere, copy from here to the next heading, with `import jax`, `jax.numpy as jnp`,
# `optax`, and `Any`, `NamedTuple` of typing. What you bring, here with flax:
#
#     networks = Players(Perception(), Control(num_actions))  # cut your network where features end
#     z, phi = networks.perception.init_with_output(key, obs)
#     theta = networks.control.init(other_key, z)
#     params = Players(phi["params"], theta["params"])
#     optimizers = Players(optax.radam(5e-4), optax.radam(2.5e-4))  # a clip of the norm each, if any
#     opt_state = Players(*(o.init(p) for o, p in zip(optimizers, params)))
#     ... for each rollout [steps, envs, ...], with the params that acted:
#     next_value = q_values(networks, params, rollout.next_obs).max(axis=-1)
#     td_target = compute_lambda_returns(rollout, next_value, gamma, td_lambda)
#     ... for each of its minibatches, with networks and optimizers closed over:
#     batch = Batch(obs, action, td_target)  # all [batch]
#     params, opt_state = scorer_update(networks, optimizers, params, opt_state, batch, batch)
#
# The leader's rate is the one with which your agent learns, the follower's 2 to 5 times that; compare
# with `baseline_update` at both rates: it has one batch and one optimiser, of the pair of parameters.
# Acting and the order of the minibatches stay yours. Only `q_values` knows flax: for Haiku, Equinox
# or nnx write it anew.
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

    # The scan begins at the last step, with V(s') as next_return: (1 - lambda) V + lambda V = V.
    steps = (rollout.reward, rollout.terminated, rollout.done, next_value)
    _, td_target = jax.lax.scan(step_back, next_value[-1], steps, reverse=True)
    return td_target


def bellman_error(networks, params, batch):
    """Returns delta = Y - Q_theta(f_phi(s), a), [batch]; Y is data and carries no gradient."""
    q = select(q_values(networks, params, batch.obs), batch.action)
    assert q.shape == batch.td_target.shape, (q.shape, batch.td_target.shape)  # else they broadcast
    return jax.lax.stop_gradient(batch.td_target) - q  # a safeguard: Y comes from outside


def follower_loss(delta):
    """Returns Var[delta], the population variance: what perception minimises over phi."""
    return jnp.var(delta)


def leader_loss(delta):
    """Returns E[delta^2], what control minimises over theta, and the baseline over both."""
    return jnp.mean(jnp.square(delta))


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
        return objective(bellman_error(networks, Players(phi, params.control), follower_batch))

    gradient = jax.grad(perception_objective)(params.perception)
    updates, perception_state = optimizers.perception.update(
        gradient, opt_state.perception, params.perception
    )
    new_phi = optax.apply_updates(params.perception, updates)

    # The leader steps on that response, the new phi, while perception stands still.
    def control_objective(theta):
        return leader_loss(bellman_error(networks, Players(new_phi, theta), leader_batch))

    gradient = jax.grad(control_objective)(params.control)
    updates, control_state = optimizers.control.update(gradient, opt_state.control, params.control)
    new_theta = optax.apply_updates(params.control, updates)

    return Players(new_phi, new_theta), Players(perception_state, control_state)


def baseline_update(networks, optimizer, params, opt_state, batch):
    """Steps both networks on the leader's loss with one optimiser: what SCORER is compared with."""

    def objective(params):
        return leader_loss(bellman_error(networks, params, batch))

    gradient = jax.grad(objective)(params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


# ==================================================================================================
# Training
#
# Algorithm 1 has a replay and target networks, of which PQN has neither: lines 8, 9, 17 and 18 are not
# there. A chunk, what the host starts at once, is one rollout with its updates. The other lines:
#   1, 2      initialise, reset          init
#   3         while t < T                train_chunk, and `train` in "The run"
#   4 to 7    act                        act
#   10, 13    sample a minibatch         draw_minibatches and learn: one for both players, as without a
#                                        replay there is no second draw
#   11, 14    compute targets Y          with_td_target, which calls compute_lambda_returns: once
#   12, 15    the players' two steps     learn, which calls scorer_update
# ==================================================================================================


def make_networks(args: Args, num_actions: int) -> Players:
    """Makes the two networks that the flags describe."""
    return Players(
        perception=Perception(args.latent_dim),
        control=Control(num_actions, args.hidden_dim),
    )


def make_optimizers(args: Args, decay_updates: int, follower_rate):
    """Makes a clipped RAdam for each player, or the one that the baseline has.

    All rates fall to exactly 0 over `decay_updates` updates, by default linearly, as in the paper's
    experiments, so the leader's is a constant share of the follower's. In the paper's table for MinAtar
    these are the first half of the updates: nothing is learned after it. The paper's theory (section
    4) wants that share to vanish, which --leader-decay-power 1.5 does.
    """

    def radam(initial_rate, power=1.0):
        def rate(count):
            return initial_rate * (jnp.maximum(decay_updates - count, 0) / decay_updates) ** power

        return optax.radam(rate)

    clip = optax.clip_by_global_norm(args.max_grad_norm)
    fast = radam(follower_rate)
    slow = radam(args.learning_rate, args.leader_decay_power or 1.0)
    if args.ablation == "per-layer-lr":
        both = optax.partition({"fast": fast, "slow": slow}, Players("fast", "slow"))
        return optax.chain(clip, both)
    if not args.scorer:
        return optax.chain(clip, slow)
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
    """One step of one environment."""

    obs: jax.Array  # [..., features]
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # the true next observation, also where the environment has reset itself
    terminated: jax.Array  # no reward can follow; a time-out counts only if the flags say so
    done: jax.Array  # the episode ends here, by termination or time-out


def share_of(mask):
    """Returns the share of true entries in mask [n]: exactly 1, where all are true.

    A curve begins where this share is 1, and a mean in float32 may miss it by rounding: of 41 ones it
    is 0.99999994.
    """
    return jnp.where(mask.all(), 1.0, mask.mean())


def mean_where(mask, values):
    """Returns the mean of those values [n] at which mask [n] is true, and 0 where it nowhere is."""
    return jnp.where(mask, values, 0.0).mean() / jnp.maximum(share_of(mask), 1.0 / len(mask))


def effective_rank(features):
    """Returns srank of features [batch, dim]: singular values that make up 99 % of their sum."""
    singular = jnp.linalg.svd(features, compute_uv=False)
    return 1.0 + jnp.sum(jnp.cumsum(singular) < 0.99 * singular.sum())


class State(NamedTuple):
    """All of one seed's training: what a checkpoint holds. Random keys come from seed and chunk."""

    seed: jax.Array
    follower_rate: jax.Array  # the follower's initial learning rate
    params: Players  # phi, theta
    opt_state: Any
    rollout: Batch  # the newest with its targets, for learn and diagnose, [steps x num_envs, ...]
    env_state: Any
    obs: jax.Array  # [num_envs, features]
    episodes: jax.Array  # completed so far, by all environments together


class Now(NamedTuple):
    """The number of a step and its random numbers, which a chunk draws for all of its steps."""

    step: jax.Array
    chance: jax.Array  # [num_envs], uniform in [0, 1): below epsilon, the action is random
    random_action: jax.Array  # [num_envs]
    env_keys: jax.Array  # [num_envs]


# What a seed's random keys are for.
INITIALIZING, STEPPING, DIAGNOSING = 0, 1, 2


def random_key(seed, purpose, index=0):
    """Returns a random key of its own for each seed, purpose and index."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), index)


def make_train(args: Args, env: Environment) -> "Training":
    """Makes the functions that train one seed, in the order in which data flows."""
    counts = count_steps(args)
    networks = make_networks(args, env.num_actions)
    chosen_loss = leader_loss if args.follower_loss == "msbe" else follower_loss
    epsilon = optax.linear_schedule(args.epsilon_start, args.epsilon_end, counts.epsilon_steps)
    # A GPU waits at each turn of a loop: four updates a turn take 9 % off a step (30 seeds on an
    # H200). A CPU does not wait.
    unroll = 4 if jax.default_backend() == "gpu" else 1

    def init(seed, follower_rate) -> State:
        """Initialises a seed (lines 1 and 2)."""
        keys = jax.random.split(random_key(seed, INITIALIZING), 3)
        obs, env_state = env.reset(jax.random.split(keys[0], args.num_envs))
        z, perception = networks.perception.init_with_output(keys[1], obs)
        control = networks.control.init(keys[2], z)
        params = Players(perception["params"], control["params"])
        optimizers = make_optimizers(args, counts.decay_updates, follower_rate)
        return State(
            seed=seed,
            follower_rate=follower_rate,
            params=params,
            opt_state=init_optimizers(optimizers, params),
            rollout=Batch(
                obs=jnp.zeros((counts.rollout_size, *obs.shape[1:]), obs.dtype),
                action=jnp.zeros(counts.rollout_size, jnp.int32),
                td_target=jnp.zeros(counts.rollout_size, jnp.float32),
            ),
            env_state=env_state,
            obs=obs,
            episodes=jnp.zeros((), jnp.int32),
        )

    def draw_steps(keys, chunk) -> Now:
        """Draws what a rollout's steps need: at once, as many small random kernels are slow."""
        shape = (args.num_steps, args.num_envs)
        return Now(
            step=chunk * args.num_steps + jnp.arange(args.num_steps, dtype=jnp.int32),
            chance=jax.random.uniform(keys[0], shape, jnp.float32),
            random_action=jax.random.randint(keys[1], shape, 0, env.num_actions, jnp.int32),
            env_keys=jax.random.split(keys[2], shape),
        )

    def draw_minibatches(key):
        """Draws each epoch's order of the transitions; returns indices [updates, minibatch]."""

        def draw_order(key):
            return jax.random.permutation(key, jnp.arange(counts.rollout_size, dtype=jnp.int32))

        orders = jax.vmap(draw_order)(jax.random.split(key, args.num_epochs))
        return orders.reshape(args.num_epochs * args.num_minibatches, -1)

    def act(state, now):
        """Takes an epsilon-greedy step in all environments (lines 4 to 7)."""
        q = q_values(networks, state.params, state.obs)  # [num_envs, actions]
        explore = now.chance < epsilon(now.step)
        action = jnp.where(explore, now.random_action, q.argmax(axis=-1).astype(jnp.int32))
        stepped = env.step(now.env_keys, state.env_state, action)
        done = stepped.terminated | stepped.truncated
        transition = Transition(
            obs=state.obs,
            action=action,
            reward=stepped.reward,
            next_obs=stepped.next_obs,
            terminated=stepped.terminated if args.bootstrap_at_timeout else done,
            done=done,
        )
        state = state._replace(
            env_state=stepped.env_state,
            obs=stepped.obs,
            episodes=state.episodes + jnp.sum(done, dtype=jnp.int32),
        )
        return state, transition

    def with_td_target(params, rollout) -> Batch:
        """Returns a rollout [steps, num_envs, ...] flat and with its targets: computed once."""
        next_value = q_values(networks, params, rollout.next_obs).max(axis=-1)
        td_target = compute_lambda_returns(rollout, next_value, args.gamma, args.td_lambda)
        batch = Batch(rollout.obs, rollout.action, td_target)
        return jax.tree.map(lambda x: x.reshape(counts.rollout_size, *x.shape[2:]), batch)

    def learn(state, indices):
        """Makes one update from the rollout's transitions at indices [minibatch] (lines 10 to 15).

        The targets, lines 11 and 14, are the rollout's.
        """
        # Optimisers are functions, made here anew, as each seed's lane may have a rate of its own.
        optimizers = make_optimizers(args, counts.decay_updates, state.follower_rate)
        game = networks, optimizers, state.params, state.opt_state
        batch = jax.tree.map(lambda x: x[indices], state.rollout)
        if args.scorer:
            # Both players learn from the same minibatch.
            params, opt_state = scorer_update(*game, batch, batch, objective=chosen_loss)
        else:
            # To the losses an axis of 1 is nothing, but without it XLA would round the gradient
            # differently than in the records in docs/results.
            stack = jax.tree.map(lambda x: x[None], batch)  # [1, minibatch, ...]
            params, opt_state = baseline_update(*game, stack)
        return state._replace(params=params, opt_state=opt_state), None

    def train_chunk(state, chunk):
        """Acts for a rollout, computes its targets, and learns from each of its minibatches."""
        keys = jax.random.split(random_key(state.seed, STEPPING, chunk), 4)
        state, rollout = jax.lax.scan(act, state, draw_steps(keys[:3], chunk))
        state = state._replace(rollout=with_td_target(state.params, rollout))
        state, _ = jax.lax.scan(learn, state, draw_minibatches(keys[3]), unroll=unroll)
        returns, finished = env.last_returns(state.env_state)
        return state, dict(
            returns=mean_where(finished, returns),
            finished=share_of(finished),
            episodes=state.episodes,
        )

    def diagnose(state, chunk):
        """Returns losses, Bellman errors, srank and norms, from 2,048 transitions of the rollout."""
        key = random_key(state.seed, DIAGNOSING, chunk)
        indices = jax.random.randint(key, (2048,), 0, counts.rollout_size, dtype=jnp.int32)
        batch = jax.tree.map(lambda x: x[indices], state.rollout)
        delta = bellman_error(networks, state.params, batch)
        z = networks.perception.apply({"params": state.params.perception}, batch.obs)
        _, sown = networks.control.apply(
            {"params": state.params.control}, z, mutable="intermediates"
        )
        return dict(
            follower_loss=chosen_loss(delta),
            leader_loss=leader_loss(delta),
            bellman_error_mean=delta.mean(),
            bellman_error_variance=delta.var(),
            srank=effective_rank(sown["intermediates"]["penultimate"][0]),
            perception_norm=optax.tree.norm(state.params.perception),
            control_norm=optax.tree.norm(state.params.control),
        )

    return Training(
        init=init,
        train_chunk=train_chunk,
        diagnose=diagnose,
        first_timestep=0,
        timesteps=counts.rollout_size * np.arange(1, counts.num_chunks + 1),
        chunks_per_point=counts.chunks_per_point,
    )


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

# Flags that only a player has: with --scorer, all; without, none, but for two with per-layer-lr.
PLAYER_FLAGS = ("follower_loss", "follower_learning_rate", "leader_decay_power")
SHOWN = ("num_steps", "num_minibatches")  # printed at the start of a run


def complete(args: Args) -> Args:
    """Returns args with the presets where unset; bad input ends in one sentence."""
    presets = dict(PRESETS[family(args.env)])
    if args.ablation and args.scorer:
        fail(f"--ablation {args.ablation} excludes --scorer")
    if args.ablation:
        without_meaning = ("follower_loss",)
        reason = f"has no meaning with --ablation {args.ablation}"
    else:
        without_meaning = () if args.scorer else PLAYER_FLAGS
        reason = "needs --scorer"
    for name in without_meaning:
        if getattr(args, name) is not None:
            fail(f"{flag(name)} {getattr(args, name)} {reason}")
        del presets[name]
    args = with_presets(args, presets)
    num_envs = max(1, args.num_envs)
    num_steps = max(1, args.num_steps)
    most_per_rollout = max(num_steps, args.num_epochs * args.num_minibatches)
    check_numbers(
        args,
        gamma=(0, 1),
        td_lambda=(0, 1),
        epsilon_start=(0, 1),
        epsilon_end=(0, 1),
        epsilon_share=(1e-9, 1),
        decay_share=(1e-9, 1),
        total_timesteps=(1, num_envs * num_steps * 2**30 // most_per_rollout),  # counts are int32
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
# From here on, every script that trains seeds side by side is the same to the letter. It knows of its
# algorithm only the names above: Args and its groups, PRESETS, SHOWN, family, complete, make_env and
# make_train, which returns this:
# ==================================================================================================


class Training(NamedTuple):
    """What a run needs of an algorithm: functions of one seed, to be compiled, and counts.

    The metrics are scalars by name: `returns`, the mean over the environments that have finished
    an episode; `finished`, the share of these environments, until which is 1 the recorded returns
    are NaN; and whatever else is to be recorded.
    """

    init: Callable  # (seed, follower_rate) -> state, with a field `params`
    train_chunk: Callable  # (state, chunk) -> state, metrics
    diagnose: Callable | None  # (state, chunk) -> more metrics, with --diagnostics
    first_timestep: int  # environment steps that init makes
    timesteps: np.ndarray  # [chunks], environment steps at each chunk's end
    chunks_per_point: int  # so many chunks are one point of the recorded curves


class Lanes(NamedTuple):
    """What is trained side by side: every seed, in a sweep at each of the follower's rates."""

    seeds: Any  # [lanes]
    follower_rates: Any  # [lanes]


class Programs(NamedTuple):
    """Compiled functions of all lanes."""

    train_chunk: Callable
    diagnose: Callable | None


def main():
    """Trains all lanes and writes a record for each of the follower's rates."""
    given = parse_args()
    set_up_jax(given)
    args = complete(given)
    training = make_train(args, make_env(args))
    lanes = place_lanes(args)
    records = Records(args, training, run_names(given, args), lanes)
    state = records.restore(training, lanes) if args.resume else None
    if args.track:
        start_tracking(records)
    stop = StopSignal(records)
    records.make_folders()
    try:
        print_plan(args, training, lanes, records)
        state, programs = in_background(lambda: compile_programs(args, training, lanes, state))
        stop.training_has_begun = True
        state = in_background(lambda: train(args, training, programs, state, records, stop))
        whole = records.finish(state)
    finally:
        records.remove_empty_folders()
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


def list_follower_rates(args: Args) -> list:
    """Returns the follower's rates: several in a sweep, and [None] where there is no follower."""
    rates = args.follower_learning_rate
    rates = list(rates) if isinstance(rates, tuple | list) else [rates]
    if len(rates) > 1:
        if len({f"{rate:g}" for rate in rates}) < len(rates):
            fail("--follower-learning-rate needs different values")
        if args.checkpoint_every_minutes or args.track:
            fail(
                "--follower-learning-rate with several values goes with neither "
                "--checkpoint-every-minutes nor --track"
            )
    return rates


def run_names(given: Args, args: Args) -> list[str]:
    """Returns the name of each rate's run: script, environment, what is not preset, seed, time."""
    rates = list_follower_rates(args)
    words = ["scorer" if args.scorer else "baseline"]
    for group in Args.__bases__[1:-1]:  # not what is trained, nor the output
        for name in field_names(group):
            default = PRESETS[family(args.env)].get(name, getattr(Args, name))
            is_swept = name == "follower_learning_rate" and len(rates) > 1
            value = getattr(given, name)
            if name != "scorer" and not is_swept and value not in (None, default, (default,)):
                words.append(name_value(name, value))
    variant = "-".join(words)[:120].rstrip("-")
    if args.resume:
        parts = args.resume.resolve().name.split("__")
        variant = parts[2] if len(parts) == 5 else "resumed"
    variants = [variant]
    if len(rates) > 1:
        variants = [f"{variant}-follower-learning-rate-{rate:g}" for rate in rates]
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    script = Path(__file__).stem
    return [f"{script}__{args.env}__{variant}__s{args.seed}__{now}" for variant in variants]


def name_value(name: str, value) -> str:
    """Returns what an argument adds to a run's name: dueling, no-l1-norm, msbe, tau-0.005."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, tuple | list):
        (value,) = value
    return value if isinstance(value, str) else f"{name}-{value:g}"


# --------------------------------------- Devices and lanes ----------------------------------------

# A step is some 100 small GPU kernels: let the GPU run the whole loop by itself, and independent
# kernels side by side. That takes 11 % off a step of DQN with 30 seeds on an H200, 26 % with one.
GPU_FLAGS = (
    "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
)


def set_up_jax(args: Args):
    """Sets JAX's flags and its cache of compiled programs, and joins a cluster's other processes."""
    os.environ["XLA_FLAGS"] = f"{GPU_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    if "device_count" not in os.environ["XLA_FLAGS"]:  # without a GPU, a thread per lane
        num_lanes = args.num_seeds * np.size(args.follower_learning_rate)
        jax.config.update("jax_num_cpu_devices", min(max(1, num_lanes), 64))
    if not jax.config.jax_compilation_cache_dir:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(caches, "scorer")))
    if args.distributed:
        join_processes()


def join_processes():
    """Connects the processes of a job: a cluster's, or those that the JAX_... variables describe."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    needed = (
        "JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
    )
    if given and len(given) < len(names):
        missing = [name for name in names if name not in given]
        fail(f"--distributed needs {needed}; not set: {', '.join(missing)}")
    try:
        if given:
            jax.distributed.initialize(
                coordinator_address=given["JAX_COORDINATOR_ADDRESS"],
                num_processes=int(given["JAX_NUM_PROCESSES"]),
                process_id=int(given["JAX_PROCESS_ID"]),
            )
        else:
            jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        fail(f"--distributed finds no cluster (Slurm, MPI, Kubernetes) and no {needed}: {reason}")


def is_main_process() -> bool:
    """Returns whether this process is the one that prints and writes."""
    return jax.process_index() == 0


# Collects arrays [lanes, ...], also in trees, from all processes, which must all call it: numpy.
gather = partial(process_allgather, tiled=True)


def place_lanes(args: Args) -> Lanes:
    """Spreads the lanes over the devices: over as many of each process as divide its share."""
    seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.uint32)
    rates = np.array([rate or 0.0 for rate in list_follower_rates(args)], np.float32)
    processes = jax.process_count()
    share, rest = divmod(len(seeds) * len(rates), processes)
    if rest:
        fail(
            f"--num-seeds {args.num_seeds}, times the follower's rates, must be a multiple of the "
            f"number of processes, {processes}"
        )
    used = max(n for n in range(1, jax.local_device_count() + 1) if share % n == 0)
    devices = np.array(jax.devices()).reshape(processes, -1)[:, :used].ravel()
    mesh = jax.sharding.Mesh(devices, "lanes")
    lanes = Lanes(np.tile(seeds, len(rates)), np.repeat(rates, len(seeds)))
    return jax.device_put(lanes, jax.NamedSharding(mesh, jax.P("lanes")))


def compile_over_lanes(function, per_lane, *same, donate=False):
    """Compiles function(lane, *same) for all lanes; the devices share them and never communicate.

    jax.lax.map with a batch size makes one batch of a device's lanes, as jax.vmap does. A CPU
    steps a batch of environments badly, so there a device's lanes follow one another.
    """
    mesh = jax.tree.leaves(per_lane)[0].sharding.mesh
    lanes_per_device = len(jax.tree.leaves(per_lane)[0]) // mesh.size
    is_cpu = mesh.devices.flat[0].platform == "cpu"

    def on_device(per_lane, *same):
        batch_size = None if is_cpu else lanes_per_device
        return jax.lax.map(lambda lane: function(lane, *same), per_lane, batch_size=batch_size)

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(jax.P("lanes"),) + (jax.P(),) * len(same),
        out_specs=jax.P("lanes"),
        check_vma=False,
    )
    donated = (0,) if donate else ()
    return jax.jit(mapped, donate_argnums=donated).lower(per_lane, *same).compile()


def compile_programs(args: Args, training: Training, lanes: Lanes, state):
    """Returns the lanes' first state, unless one is given, and the programs that go on from it."""
    if state is None:
        init = compile_over_lanes(lambda lane: training.init(*lane), lanes)
        state = init(lanes)
    chunk = np.int32(0)
    train_chunk = compile_over_lanes(training.train_chunk, state, chunk, donate=True)
    diagnose = None
    if training.diagnose and args.diagnostics:
        diagnose = compile_over_lanes(training.diagnose, state, chunk)
    return state, Programs(train_chunk, diagnose)


def in_background(function):
    """Returns function(), from a thread of its own: while JAX works, a thread hears no Ctrl-C."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()


# ------------------------------------------- The loop ---------------------------------------------


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
        self.records.remove_empty_folders()
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


def print_plan(args: Args, training: Training, lanes: Lanes, records: "Records"):
    """Prints where results go and what is going to be trained."""
    if not is_main_process():
        return
    show(*records.folders)
    timesteps = f"{training.timesteps[-1]:,} environment steps"
    if training.timesteps[-1] != args.total_timesteps:
        timesteps += f" ({args.total_timesteps:,} rounded up to whole points of the curves)"
    shown = [f"{name.replace('_', ' ')} {getattr(args, name):,}" for name in SHOWN]
    show(", ".join([timesteps, *shown]))
    if args.resume:
        show(f"continues {args.resume} after {records.timestep:,} steps")
    devices = lanes.seeds.sharding.mesh.devices.ravel()
    where = devices[0].device_kind
    if len(devices) > 1:
        where = f"{len(devices)} x {where}"
    number = "1 seed" if len(lanes.seeds) == 1 else f"{len(lanes.seeds)} seeds"
    show(f"{number} on {where}; compiling")


class Progress:
    """A bar on a terminal; elsewhere a line for each tenth of the run."""

    def __init__(self, first: int, last: int):
        self.is_terminal = sys.stdout.isatty()
        self.bar = tqdm(
            total=last,
            initial=first,
            unit="step",
            unit_scale=True,
            disable=not is_main_process(),
            file=sys.stdout if self.is_terminal else io.StringIO(),
        )

    def show(self, timestep: int, metrics: dict | None):
        """Moves the bar; the metrics may be an earlier chunk's, so that no device waits for it."""
        if metrics is not None:
            returns = describe_returns(*gather((metrics["returns"], metrics["finished"])))
            self.bar.set_postfix_str(returns, refresh=False)
        if self.bar.disable:
            return
        tenths = 10 * self.bar.n // self.bar.total
        self.bar.update(timestep - self.bar.n)
        if not self.is_terminal and 10 * self.bar.n // self.bar.total > tenths:
            show(self.bar)


def describe_returns(returns, finished) -> str:
    """Returns in words the mean return of those environments that have finished an episode.

    Each lane's mean over its own and their share are given, [lanes].
    """
    if not finished.any():
        return ""
    mean = np.average(returns, weights=finished)
    if have_all(finished).all():
        return f"return {mean:.2f}"
    return f"return {mean:.2f} of the {finished.mean():.0%} of environments that ended an episode"


def have_all(finished):
    """Returns whether shares are 1, but for what float32 may lose in computing them."""
    return finished > 1 - 1e-6


def train(
    args, training: Training, programs: Programs, state, records: "Records", stop: StopSignal
):
    """Runs the chunks that are left, and keeps what they measure; returns the last state."""
    num_points = len(training.timesteps) // training.chunks_per_point
    chunks_per_diagnosis = training.chunks_per_point * max(1, num_points // 50)
    progress = Progress(records.timestep, int(training.timesteps[-1]))
    records.start_clock()
    previous = None
    for chunk in range(records.chunks, len(training.timesteps)):
        state, metrics = programs.train_chunk(state, np.int32(chunk))
        if programs.diagnose and (chunk + 1) % chunks_per_diagnosis == 0:
            metrics |= programs.diagnose(state, np.int32(chunk))
        records.add(chunk, metrics)
        is_point = (chunk + 1) % training.chunks_per_point == 0
        if jax.process_count() > 1 and not is_point:
            continue  # processes look up from training only together
        progress.show(int(training.timesteps[chunk]), previous)
        previous = metrics
        if args.track and is_point:
            track(records.timestep, metrics)
        if records.save_what_is_due(state, stop.is_requested()):
            break
    progress.bar.close()
    records.stop_clock(state)
    return state


def start_tracking(records: "Records"):
    """Starts a Weights & Biases run; its own variables, such as WANDB_MODE, are respected."""
    if not is_main_process():
        return
    import wandb  # slow to import

    try:
        wandb.init(name=records.folders[0].name, config=records.args_of[0])
    except Exception as error:  # wandb's own kinds
        reason = str(error).strip().partition("\n")[0]
        fail(f"--track cannot start (WANDB_MODE=offline needs no account): {reason}")


def track(timestep: int, metrics: dict):
    """Logs the means over seeds; of returns once all environments have finished an episode."""
    metrics = gather(metrics)
    all_finished = have_all(metrics.pop("finished")).all()
    means = {
        name: values.mean()
        for name, values in metrics.items()
        if all_finished or not name.endswith("returns")
    }
    if is_main_process():
        import wandb

        wandb.log(means, step=timestep)


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
    """The folders of a run, one for each of the follower's rates, and what is written into them.

    In a job of several processes all must call the methods, which gather arrays from all; only the
    main process writes.
    """

    def __init__(self, args: Args, training: Training, names: list[str], lanes: Lanes):
        self.args = args
        self.training = training
        self.commit = read_commit()  # of what runs, whatever is committed meanwhile
        self.folders = [args.runs_dir / name for name in names]
        self.args_of = [
            json.loads(json.dumps(vars(args) | dict(follower_learning_rate=rate), default=str))
            for rate in list_follower_rates(args)
        ]
        self.devices = lanes.seeds.sharding.mesh.devices.ravel()
        self.num_lanes = len(lanes.seeds)
        self.points = []  # metrics [lanes] of each point of the curves
        self.fetched_points = 0  # of these are on the host; the others are on the devices
        self.chunks = 0  # done
        self.compiling_since = time.time()
        self.compile_seconds = 0.0
        self.seconds_before = 0.0  # of the run that this one resumes
        self.until = None  # when training ended
        self.since = self.results_written = self.checkpoint_written = time.time()
        self.saved_timestep = None
        self.complained = set()

    # ---- Folders

    def make_folders(self):
        """Makes the folders, and writes args.json into each."""
        if not is_main_process():
            return
        try:
            for folder, args in zip(self.folders, self.args_of, strict=True):
                folder.mkdir(parents=True)
                text = json.dumps(args, indent=2).encode()
                save(folder / "args.json", lambda file, text=text: file.write(text))
        except OSError as error:
            self.remove_empty_folders()
            fail(f"--runs-dir {self.args.runs_dir} cannot take a new run: {error}")

    def remove_empty_folders(self):
        """Removes folders that hold nothing but their args.json."""
        for folder in self.folders:
            if (
                is_main_process()
                and folder.exists()
                and not (set(os.listdir(folder)) - {"args.json"})
            ):
                (folder / "args.json").unlink(missing_ok=True)
                folder.rmdir()

    def describe_saved(self) -> str:
        """Returns in words what the folders hold."""
        if self.saved_timestep is None:
            return "nothing was saved"
        return f"{self.folders[0]} holds what was saved at {self.saved_timestep:,} steps"

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
        """Environment steps of each seed so far."""
        if self.chunks == 0:
            return self.training.first_timestep
        return int(self.training.timesteps[self.chunks - 1])

    @property
    def seconds(self) -> float:
        """Of training so far, without compilation, with what an earlier run took."""
        return self.seconds_before + (self.until or time.time()) - self.since

    def start_clock(self):
        """Ends the time that counts as compilation, and begins that of training."""
        self.since = self.results_written = self.checkpoint_written = time.time()
        self.compile_seconds = self.since - self.compiling_since

    def stop_clock(self, state):
        """Ends the time that counts as training, once the devices are done."""
        jax.block_until_ready(state)
        self.until = time.time()

    def add(self, chunk: int, metrics: dict):
        """Keeps the metrics of a chunk that ends a point of the curves, as yet on the devices."""
        self.chunks = chunk + 1
        if self.chunks % self.training.chunks_per_point == 0:
            self.points.append(metrics)

    def fetch_points(self):
        """Brings the newest points from the devices to the host."""
        self.points[self.fetched_points :] = gather(self.points[self.fetched_points :])
        self.fetched_points = len(self.points)

    def curves(self) -> dict:
        """Returns the curves by name, [lanes, points]: NaN where nothing was measured."""
        self.fetch_points()
        names = dict.fromkeys(name for point in self.points for name in point)
        nothing = np.full(self.num_lanes, np.nan)
        curves = {
            name: np.stack([point.get(name, nothing) for point in self.points], axis=1)
            for name in names
        }
        finished = curves.pop("finished")
        for name in curves:
            if name.endswith("returns"):
                curves[name] = np.where(have_all(finished), curves[name], np.nan)
        return {name: curve.astype(np.float32) for name, curve in curves.items()}

    def point_timesteps(self):
        """Returns the environment steps at each point, [points]."""
        step = self.training.chunks_per_point
        return self.training.timesteps[step - 1 :: step][: len(self.points)]

    # ---- Files

    def save_what_is_due(self, state, stopping: bool) -> bool:
        """Writes a checkpoint and results so far, when it is time; returns whether to stop."""
        minutes = self.args.checkpoint_every_minutes
        now = time.time()
        checkpoint_due = minutes and now - self.checkpoint_written > 60 * minutes
        results_due = now - self.results_written > SECONDS_BETWEEN_RESULTS
        mine = np.array([[stopping, bool(checkpoint_due), results_due]])
        stopping, checkpoint_due, results_due = gather(mine).any(axis=0)  # any process may ask
        if minutes and (checkpoint_due or stopping):
            self.write_checkpoint(state)
            self.checkpoint_written = time.time()
        if results_due or checkpoint_due:
            self.write_results()
            self.results_written = time.time()
        return bool(stopping)

    def write_results(self) -> bool:
        """Writes each run's results.npz; returns whether that succeeded."""
        if not self.points:
            return True
        curves = self.curves()
        if not is_main_process():
            return True
        seeds = np.arange(self.args.seed, self.args.seed + self.args.num_seeds, dtype=np.uint32)
        succeeded = True
        for number, folder in enumerate(self.folders):
            mine = slice(number * len(seeds), (number + 1) * len(seeds))
            record = {name: curve[mine] for name, curve in curves.items()}
            record |= dict(timesteps=self.point_timesteps(), seeds=seeds)
            record["meta"] = json.dumps(self.meta(number))
            succeeded &= self.try_to_save(
                folder / "results.npz",
                lambda file, record=record: np.savez_compressed(file, **record),
            )
        return succeeded

    def meta(self, number: int) -> dict:
        """Returns what results.npz says of the run with this number, beside its curves."""
        packages = "jax jaxlib flax optax gymnax navix flashbax".split()
        return dict(
            schema=1,
            script=Path(__file__).stem,
            commit=self.commit,
            args=self.args_of[number],
            device=self.devices[0].device_kind,
            num_devices=len(self.devices),
            lanes=self.num_lanes,  # trained in these seconds, by this and other records of a sweep
            seconds=self.seconds,
            compile_seconds=self.compile_seconds,
            complete=self.chunks == len(self.training.timesteps),
            continues=self.args.resume.resolve().name if self.args.resume else None,
            versions={name: version(name) for name in packages if name in sys.modules},
        )

    def write_model(self, state) -> bool:
        """Writes each run's model.safetensors; returns whether that succeeded."""
        params = gather(flatten_dict(state.params._asdict(), sep="/"))
        if not is_main_process():
            return True
        succeeded = True
        for number, folder in enumerate(self.folders):
            mine = slice(number * self.args.num_seeds, (number + 1) * self.args.num_seeds)
            model = to_safetensors({name: values[mine] for name, values in params.items()})
            succeeded &= self.try_to_save(
                folder / "model.safetensors", lambda file, model=model: file.write(model)
            )
        return succeeded

    def write_checkpoint(self, state):
        """Writes checkpoint.npz: the state's leaves, the curves so far, and where training is."""
        leaves = jax.tree.leaves(gather(state))
        self.fetch_points()
        if not is_main_process():
            return
        arrays = {f"state/{number}": leaf for number, leaf in enumerate(leaves)}
        for number, point in enumerate(self.points):
            arrays |= {f"points/{number}/{name}": values for name, values in point.items()}
        arrays |= dict(chunks=self.chunks, num_points=len(self.points), seconds=self.seconds)
        self.try_to_save(self.folders[0] / "checkpoint.npz", lambda file: np.savez(file, **arrays))

    def restore(self, training: Training, lanes: Lanes):
        """Returns the state of --resume's checkpoint; anything else ends in one sentence."""
        path = self.args.resume / "checkpoint.npz"
        like = jax.eval_shape(jax.vmap(training.init), *lanes)
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
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return jax.device_put(state, lanes.seeds.sharding)

    def finish(self, state) -> bool:
        """Writes and prints the results; returns whether all could be written."""
        if not self.points:
            if is_main_process():
                show("stopped before the first point of the curves: no results")
            return True
        succeeded = self.write_results()
        if self.args.save_model:
            succeeded &= self.write_model(state)
        returns = self.curves()["returns"]
        if not is_main_process():
            return True
        timesteps = self.point_timesteps()
        last = returns[:, timesteps > 0.9 * timesteps[-1]]
        stopped = "" if self.chunks == len(self.training.timesteps) else ", stopped"
        for number, folder in enumerate(self.folders):
            mine = last[number * self.args.num_seeds : (number + 1) * self.args.num_seeds]
            where = f"saved in {folder}" if succeeded else "not everything could be saved"
            show(f"mean return over the last 10 %{stopped}: {describe_mean(mine)}; {where}")
        return succeeded


def describe_mean(returns) -> str:
    """Returns the mean of returns [seeds, points] in words, also where some or all are missing."""
    known = np.isfinite(returns)
    if not known.any():
        return "none, as not every environment has finished an episode"
    missing = "" if known.all() else f" (of the {known.mean():.0%} of points that have one)"
    return f"{returns[known].mean():.2f}{missing}"


if __name__ == "__main__":
    main()

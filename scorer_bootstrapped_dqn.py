"""SCORER Bootstrapped DQN on Deep Sea: each member of an ensemble plays the game.

The agent is bsuite's (Osband et al., 2016 and 2018; without reward noise, clip or decay of the
rates), as the paper states none: 20 members, each a small network plus a fixed random prior, learn
from one replay, each under random masks of its own, and one of them acts through an episode. SCORER
splits a member after its first hidden layer: what stands before is its perception f_phi, the
follower, which minimises the variance of the member's Bellman errors; the rest is its control
Q_theta, the leader, which minimises their mean square. Without --scorer the same layers have one
loss and one optimiser: the baseline.

    # a minute and a half on a laptop; then 30 seeds, for a GPU
    python scorer_bootstrapped_dqn.py --size 10 --scorer
    python scorer_bootstrapped_dqn.py --size 30 --scorer --num-seeds 30

What stands where, from top to bottom:

    Arguments     every flag; look up what you need
    Environment   make_env, the only place that knows gymnax: Deep Sea and its maps of actions
    Networks      f_phi and Q_theta of a member, two flax modules
    The game      one member's losses, targets and round of the game; needs jax and optax alone
    Training      act, store, sample, let all members learn, and the loop around them
    The checks    what the flags may be; skip it
    The run       seeds side by side, progress, checkpoints, records; the same in every script; skip it

Read scorer_dqn.py first: here are its game with a mask and a prior, and its loop with an ensemble.
Paper: Martinez et al., "Stackelberg Coupling of Online Representation Learning and Reinforcement
Learning", ICLR 2026, section 5.4 and appendix "Deep Sea Results".
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "gymnax==1.0.1", "six>=1.17",
#   "tyro>=1.0.17", "tqdm>=4.68", "safetensors>=0.8", "wandb>=0.31"]
# ///

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the slow imports without a traceback

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

# What a flag is where it is not given. The paper has no figures; the follower's rate is the
# leader's, as faster followers did worse at depths 20 and 30.
PRESETS = {"DeepSea": dict(follower_loss="variance", follower_learning_rate=1e-3)}

# A number of steps for which --help shows how it follows from the depth.
Timesteps = Annotated[
    int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 100 size^2)")
]


@dataclass
class Experiment:
    """What is trained, and for how long."""

    size: int = 10  # Deep Sea's depth: steps of an episode, of which one sequence is rewarded
    stochastic: bool = False  # moves to the right fail at times, the last row's ends are noisy
    env: tyro.conf.Suppress[str] = ""  # no flag: the record's name for the two above
    seed: int = 0  # first seed
    num_seeds: int = 1  # seeds trained side by side in one program: seed, seed + 1, ...
    total_timesteps: Timesteps = None  # environment steps per seed, rounded up


@dataclass
class Game:
    """SCORER or the baseline."""

    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss
    follower_loss: Literal["variance", "msbe"] | None = None  # what perception minimises
    follower_learning_rate: tuple[float, ...] | None = None  # constant rate; several: a sweep
    learning_rate: float = 1e-3  # constant rate of the leader, or of the baseline


@dataclass
class Algorithm:
    """The Bootstrapped DQN underneath, alike for SCORER and the baseline."""

    num_members: int = 20  # networks of the ensemble; one acts in each episode, and all learn
    mask_probability: float = 0.5  # that a member learns from a transition, drawn when it is stored
    buffer_size: int = 10_000  # replay per seed in transitions
    batch_size: int = 128  # transitions per batch, alike for all members; SCORER draws two batches
    learning_starts: int = 128  # environment steps before the first update; then one per step
    target_update_interval: int = 4  # environment steps, that is updates
    gamma: float = 0.99  # discount per step
    epsilon_scale: float = 10.0  # an action is random with probability scale / (scale + updates)


@dataclass
class Network:
    """The layers of each member."""

    hidden_dim: int = 50  # width of both hidden layers, of members and priors
    prior_scale: float = 3.0  # of the prior's values within a member's; 0: no priors


@dataclass
class Output:
    """What is kept, and how to run."""

    runs_dir: Path = Path("runs")  # the folder that gets one folder per run
    save_model: bool = False  # write model.safetensors: all seeds and members, with their priors
    checkpoint_every_minutes: float | None = None  # keep the newest training state, for --resume
    resume: Path | None = None  # continue the run in this folder, with its arguments, as a new run
    distributed: bool = False  # share the seeds among the processes of a cluster's job
    track: bool = False  # log to Weights & Biases; its WANDB_... variables say where and how


@dataclass
class Args(Experiment, Game, Algorithm, Network, Output):
    """All flags in one flat namespace; --help shows the groups."""


def family(env: str) -> str:
    """Returns the family of an environment, a key of PRESETS: there is one."""
    return "DeepSea"


# ==================================================================================================
# Environment
# ==================================================================================================


class EnvState(NamedTuple):
    """Deep Sea as a seed has it."""

    sea: Any  # gymnax's own state
    action_map: jax.Array  # [size, size], the action that goes to the right in each cell


class EnvStep(NamedTuple):
    """What a step gives."""

    env_state: EnvState
    obs: jax.Array  # the cell at which the next action is chosen: after an episode's end, the first
    next_obs: jax.Array  # the cell that this action led to; 0 below the last row
    reward: jax.Array
    terminated: jax.Array  # the last row was left, and with it the episode; none ends otherwise
    is_bad: jax.Array  # an episode ended in which some action chose to leave the diagonal


class Environment(NamedTuple):
    """One Deep Sea, which resets itself. An observation is a cell's number, row * size + column."""

    num_actions: int
    reset: Callable  # (key, map_key) -> obs, env_state
    step: Callable  # (key, env_state, action) -> EnvStep
    last_return: Callable  # env_state -> last episode's return, and whether there is one


def make_env(args: Args) -> Environment:
    """Makes Deep Sea. Which action goes to the right in a cell is drawn for each seed.

    gymnax has one such map in all environments of a program. So its own map here says that action
    1 goes to the right everywhere, and a step translates the action by the seed's map.
    """
    os.environ.pop("MPLBACKEND", None)  # gymnax imports matplotlib, which may lack a notebook's
    import gymnax  # which starts JAX's devices, so not before they are set up
    from gymnax.wrappers import LogWrapper

    env, env_params = gymnax.make("DeepSea-bsuite", size=args.size)
    env_params = env_params.replace(deterministic=not args.stochastic, randomize_actions=False)
    env = LogWrapper(env)

    def to_cell(one_hot):
        return one_hot.argmax().astype(jnp.int32)

    def reset(key, map_key):
        one_hot, sea = env.reset(key, env_params)
        sea = jax.tree.map(jnp.asarray, sea)
        action_map = jax.random.bernoulli(map_key, 0.5, (args.size, args.size))
        return to_cell(one_hot), EnvState(sea, action_map.astype(jnp.int32))

    def step(key, env_state, action):
        old = env_state.sea
        position = old.env_state.row, old.env_state.column
        goes_right = (action == env_state.action_map[position]).astype(jnp.int32)
        one_hot, sea, reward, terminated, _, info = env.step(key, old, goes_right, env_params)
        sea = jax.tree.map(lambda new, old: new.astype(old.dtype), sea, old)
        return EnvStep(
            env_state=EnvState(sea, env_state.action_map),
            obs=to_cell(one_hot),
            next_obs=to_cell(info["final_observation"]),
            reward=reward.astype(jnp.float32),
            terminated=terminated,
            is_bad=sea.env_state.total_bad_episodes > old.env_state.total_bad_episodes,
        )

    def last_return(env_state):
        return env_state.sea.returned_episode_returns, env_state.sea.returned_episode_valid

    return Environment(env.action_space(env_params).n, reset, step, last_return)


# ==================================================================================================
# Networks
# ==================================================================================================

# bsuite's first weights: normal with standard deviation 1 / sqrt(inputs), cut off at two of these,
# which leaves 0.88 of it. Biases are 0.
TRUNCATED_NORMAL = nn.initializers.variance_scaling(0.87962566**2, "fan_in", "truncated_normal")


class Perception(nn.Module):
    """f_phi of a member: cell [...] -> features z [..., hidden_dim].

    A dense layer on a one-hot observation, of which only the one row of the weights is read.
    """

    num_cells: int
    hidden_dim: int = 50

    @nn.compact
    def __call__(self, cell):
        shape = self.num_cells, self.hidden_dim
        kernel = self.param("kernel", TRUNCATED_NORMAL, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.hidden_dim,), jnp.float32)
        return nn.relu(kernel[cell] + bias)


class Control(nn.Module):
    """Q_theta of a member: features z [..., z_dim] -> action values [..., num_actions]."""

    num_actions: int
    hidden_dim: int = 50

    @nn.compact
    def __call__(self, z):
        hidden = nn.relu(nn.Dense(self.hidden_dim, kernel_init=TRUNCATED_NORMAL)(z))
        return nn.Dense(self.num_actions, kernel_init=TRUNCATED_NORMAL)(hidden)


# ==================================================================================================
# The game
#
# All of it is of one member; the training below maps it over the ensemble. To use it elsewhere,
# copy from here to the next heading, with `import optax`, `jax`, `jax.numpy as jnp` and
# `NamedTuple`, `Any` of typing. `q_values` is the only function that knows flax.
# ==================================================================================================


class Players(NamedTuple):
    """A pair: of networks, of their parameters, of optimisers, or of the optimisers' states."""

    perception: Any  # f_phi, the follower's
    control: Any  # Q_theta, the leader's


class Batch(NamedTuple):
    """What one player of a member learns from in one update."""

    obs: jax.Array  # [batch, ...]
    prior: jax.Array  # [batch, actions], p(s, .), the values of the member's prior
    action: jax.Array  # [batch], integers
    td_target: jax.Array  # [batch], Y of each transition, from `compute_td_target`
    mask: jax.Array  # [batch], whether the member learns from the transition


def q_values(networks: Players, params: Players, obs):
    """Returns Q_theta(f_phi(s), .) for obs [...], [..., actions]: a member's values but for its prior."""
    z = networks.perception.apply({"params": params.perception}, obs)
    return networks.control.apply({"params": params.control}, z)


def select(values, action):
    """Returns the entry of values [..., actions] at action [...]: a look-up, but quicker on a GPU."""
    assert action.shape == values.shape[:-1], (action.shape, values.shape)  # else they broadcast
    return jnp.sum(values * jax.nn.one_hot(action, values.shape[-1]), axis=-1)


def compute_td_target(networks, target, transition, gamma):
    """Returns Y = r + gamma (1 - terminated) max_a Q_target(s', a), [batch].

    A member's value is Q(s, .) = Q_theta(f_phi(s), .) + p(s, .), where p is its prior: a second
    network, random and never changed. Y depends on neither player's new parameters, so both
    batches' Y may be computed before the follower steps.
    """
    next_q = q_values(networks, target, transition.next_obs) + transition.next_prior
    next_value = jnp.max(next_q, axis=-1)
    return transition.reward + gamma * (1.0 - transition.terminated) * next_value


def bellman_error(networks, params, batch):
    """Returns delta = Y - Q(s, a) = Y - p(s, a) - Q_theta(f_phi(s), a), [batch].

    Y and the prior p are data and carry no gradient: the networks learn what the prior is wrong by.
    """
    q = select(q_values(networks, params, batch.obs), batch.action)
    prior = select(batch.prior, batch.action)
    assert q.shape == batch.td_target.shape, (q.shape, batch.td_target.shape)  # else they broadcast
    return jax.lax.stop_gradient(batch.td_target - prior) - q


def masked_mean(x, mask):
    """Returns the mean of x [batch] over the mask [batch], and 0 where that is 0 everywhere."""
    assert x.shape == mask.shape, (x.shape, mask.shape)  # else they broadcast
    return jnp.sum(mask * x) / jnp.maximum(jnp.sum(mask), 1.0)


def follower_loss(delta, mask):
    """Returns Var[delta], the population variance: what perception minimises over phi."""
    return masked_mean(jnp.square(delta - masked_mean(delta, mask)), mask)


def leader_loss(delta, mask):
    """Returns E[delta^2], what control minimises over theta, and the baseline over both."""
    return masked_mean(jnp.square(delta), mask)


def scorer_update(
    networks,
    optimizers,
    params,
    opt_state,
    follower_batch,
    leader_batch,
    follower_loss=follower_loss,
):
    """Plays one round of the game (Algorithm 1, lines 10 to 15); returns params and opt_state.

    networks, optimizers, params and opt_state are Players; the batches are two independent draws.
    """

    # The follower responds: perception steps on the variance while control stands still (line 12).
    def perception_objective(phi):
        fixed_control = Players(phi, params.control)
        delta = bellman_error(networks, fixed_control, follower_batch)
        return follower_loss(delta, follower_batch.mask)

    gradient = jax.grad(perception_objective)(params.perception)
    updates, perception_state = optimizers.perception.update(gradient, opt_state.perception)
    phi = optax.apply_updates(params.perception, updates)

    # The leader steps on that response, on a batch of its own (line 15).
    def control_objective(theta):
        fixed_perception = Players(phi, theta)
        delta = bellman_error(networks, fixed_perception, leader_batch)
        return leader_loss(delta, leader_batch.mask)

    gradient = jax.grad(control_objective)(params.control)
    updates, control_state = optimizers.control.update(gradient, opt_state.control)
    theta = optax.apply_updates(params.control, updates)

    return Players(phi, theta), Players(perception_state, control_state)


def baseline_update(networks, optimizer, params, opt_state, batch):
    """Steps both networks on the leader's loss with one optimiser: what SCORER is compared with."""

    def objective(params):
        return leader_loss(bellman_error(networks, params, batch), batch.mask)

    gradient = jax.grad(objective)(params)
    updates, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state


# ==================================================================================================
# Training
# ==================================================================================================


class Counts(NamedTuple):
    """How a run is divided. A step moves the environment once; an update is one of learning."""

    warmup_steps: int  # without learning, to fill the replay; from then on each step has an update
    target_period: int  # updates from one target update to the next
    chunk_updates: int  # updates that the host starts at once: whole periods; a point of the curves
    num_chunks: int


def count_steps(total_timesteps, learning_starts, target_update_interval) -> Counts:
    """Divides a run into some 250 chunks or more; the arguments are environment steps."""
    updates = total_timesteps - learning_starts
    target_period = min(target_update_interval, total_timesteps)  # which means never
    most = min(256, updates // 250)
    chunk = target_period * max(1, most // target_period)
    return Counts(
        warmup_steps=learning_starts,
        target_period=target_period,
        chunk_updates=chunk,
        num_chunks=ceil_divide(updates, chunk),
    )


def ceil_divide(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


class Ensemble(NamedTuple):
    """All members' parameters, leaves [members, ...]; of one member, without that axis."""

    perception: Any  # phi
    control: Any  # theta
    prior: dict  # "perception" and "control" of a second network, random and never changed


def learned(params: Ensemble) -> Players:
    """Returns the parameters that learn."""
    return Players(params.perception, params.control)


def make_optimizers(args: Args, follower_rate):
    """Makes an Adam of constant rate for each player, or the one that the baseline has."""
    slow = optax.adam(args.learning_rate)
    if not args.scorer:
        return slow
    return Players(perception=optax.adam(follower_rate), control=slow)


def init_optimizers(optimizers, params: Players):
    """Returns the first state of the players' optimisers, or of the baseline's."""
    if not isinstance(optimizers, Players):
        return optimizers.init(params)
    return Players(
        perception=optimizers.perception.init(params.perception),
        control=optimizers.control.init(params.control),
    )


def choose_update(args: Args):
    """Returns the update that the flags ask for: of networks, optimizers, params, ... batches."""
    if not args.scorer:
        return baseline_update
    chosen_loss = leader_loss if args.follower_loss == "msbe" else follower_loss
    return partial(scorer_update, follower_loss=chosen_loss)


class Transition(NamedTuple):
    """One step, as the replay keeps it."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array
    terminated: jax.Array
    prior: jax.Array  # [..., members, actions], the values of the members' priors at obs, and
    next_prior: jax.Array  # at next_obs: as priors never change, they are computed once
    mask: jax.Array  # [..., members], whether the member learns from the step


# Which axis of a batch of transitions [..., batch] is the members', who share the rest of it.
MEMBERS = Transition(
    obs=None,
    action=None,
    reward=None,
    next_obs=None,
    terminated=None,
    prior=-2,
    next_prior=-2,
    mask=-1,
)


def store(replay: Transition, transition: Transition, step):
    """Writes a transition over the oldest row of the replay [rows, 1, ...]."""

    def write(ring, row):
        return jax.lax.dynamic_update_index_in_dim(ring, row[None], step % len(ring), axis=0)

    return jax.tree.map(write, replay, transition)


def sample(replay: Transition, indices) -> Transition:
    """Returns the transitions at indices [...] into the replay, flat over rows and environments."""
    return jax.tree.map(lambda ring: ring.reshape(-1, *ring.shape[2:])[indices], replay)


def unstack(batches: Batch) -> list[Batch]:
    """Returns the batches [batch, ...] of which `batches` [number, batch, ...] is a stack."""

    def batch(number):
        return jax.tree.map(lambda x: x[number], batches)

    return [batch(number) for number in range(len(batches.action))]


class Episodes(NamedTuple):
    """What a seed's episodes came to. A bad one chose at some point to leave the diagonal."""

    completed: jax.Array
    bad: jax.Array  # of them
    recent: jax.Array  # [100], whether each of the last 100 was bad
    solved_at: jax.Array  # the first episode after which `is_solved`; -1: none so far
    strictly_solved_at: jax.Array  # the first after which `is_strictly_solved`; -1: none so far


def is_solved(completed, bad, stochastic: bool):
    """Returns whether Deep Sea is solved by bsuite 0.3.6's rule: below 90 % bad so far.

    Stochastic, where luck makes some good: below 80 %, and not before episode 100.
    """
    if stochastic:
        return (5 * bad < 4 * completed) & (completed >= 100)
    return 10 * bad < 9 * completed


def is_strictly_solved(completed, recent):
    """Returns whether below 10 % of the last 100 episodes were bad; never before episode 100."""
    return (10 * recent.sum() < 100) & (completed >= 100)


def no_episodes() -> Episodes:
    """Returns what stands before the first episode's end."""
    return Episodes(
        completed=jnp.zeros((), jnp.int32),
        bad=jnp.zeros((), jnp.int32),
        recent=jnp.zeros(100, bool),
        solved_at=-jnp.ones((), jnp.int32),
        strictly_solved_at=-jnp.ones((), jnp.int32),
    )


def count_episode(episodes: Episodes, is_bad, stochastic: bool) -> Episodes:
    """Returns what the episodes come to with one more."""
    completed = episodes.completed + 1
    bad = episodes.bad + is_bad.astype(jnp.int32)
    recent = episodes.recent.at[completed % 100].set(is_bad)

    def first(earlier, holds_now):
        return jnp.where(holds_now & (earlier < 0), completed, earlier)

    return Episodes(
        completed=completed,
        bad=bad,
        recent=recent,
        solved_at=first(episodes.solved_at, is_solved(completed, bad, stochastic)),
        strictly_solved_at=first(
            episodes.strictly_solved_at, is_strictly_solved(completed, recent)
        ),
    )


class State(NamedTuple):
    """All of one seed's training: what a checkpoint holds. Random keys come from seed and step."""

    seed: jax.Array
    follower_rate: jax.Array  # the follower's learning rate
    params: Ensemble
    target: Players  # target parameters, leaves [members, ...]
    opt_state: Any  # of all members, leaves [members, ...]
    replay: Transition  # ring buffer [rows, 1, ...]: without the axis of 1, XLA copies whole rings
    drawn: Transition  # the next update's [batches, batch, ...], drawn ahead: see train_step
    env_state: EnvState
    obs: jax.Array
    active: jax.Array  # the member that acts in this episode
    episodes: Episodes


class Now(NamedTuple):
    """The number of a step and its random numbers, which a chunk draws for all of its steps."""

    step: jax.Array
    chance: jax.Array  # uniform in [0, 1): below epsilon, the action is random
    random_action: jax.Array
    env_key: jax.Array
    next_active: jax.Array  # the member that acts from the next step on, if the episode ends here
    mask: jax.Array  # [members]
    indices: jax.Array  # into the replay [batches, batch]


# What a seed's random keys are for.
INITIALIZING, STEPPING = 0, 1


def random_key(seed, purpose, index=0):
    """Returns a random key of its own for each seed, purpose and index."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), index)


def make_train(args: Args, env: Environment) -> "Training":
    """Makes the functions that train one seed, in the order in which data flows."""
    counts = count_steps(args.total_timesteps, args.learning_starts, args.target_update_interval)
    networks = Players(
        perception=Perception(args.size**2, args.hidden_dim),
        control=Control(env.num_actions, args.hidden_dim),
    )
    update = choose_update(args)
    rows = args.buffer_size
    num_batches = 2 if args.scorer else 1

    def draw(key, steps):
        """Draws what `steps` [n] need: at once, as many small random kernels are slow."""
        keys = jax.random.split(key, 6)
        shape = steps.shape
        stored = jnp.minimum(steps + 1, rows)  # transitions in the replay by then
        indices = jax.random.randint(
            keys[5],
            (*shape, num_batches, args.batch_size),
            0,
            stored[:, None, None],
            dtype=jnp.int32,
        )
        probability = jnp.float32(args.mask_probability)
        return Now(
            step=steps,
            chance=jax.random.uniform(keys[0], shape, jnp.float32),
            random_action=jax.random.randint(keys[1], shape, 0, env.num_actions, jnp.int32),
            env_key=jax.random.split(keys[2], shape),
            next_active=jax.random.randint(keys[3], shape, 0, args.num_members, jnp.int32),
            mask=jax.random.bernoulli(keys[4], probability, (*shape, args.num_members)),
            indices=indices,
        )

    def init_member(key, obs) -> Players:
        """Draws the parameters of a member, or of a prior."""
        perception_key, control_key = jax.random.split(key)
        z, perception = networks.perception.init_with_output(perception_key, obs)
        control = networks.control.init(control_key, z)
        return Players(perception["params"], control["params"])

    def init_replay(obs) -> Transition:
        """Returns a replay of zeros; obs is a cell."""
        values = jnp.zeros((args.num_members, env.num_actions), jnp.float32)
        transition = Transition(
            obs=obs,
            action=jnp.zeros((), jnp.int32),
            reward=jnp.zeros((), jnp.float32),
            next_obs=obs,
            terminated=jnp.zeros((), bool),
            prior=values,
            next_prior=values,
            mask=jnp.zeros(args.num_members, bool),
        )
        return jax.tree.map(lambda x: jnp.zeros((rows, 1, *x.shape), x.dtype), transition)

    def init(seed, follower_rate) -> State:
        """Initialises a seed, and fills its replay as far as learning needs it."""
        keys = jax.random.split(random_key(seed, INITIALIZING), 5)
        obs, env_state = env.reset(keys[0], map_key=keys[4])
        member_keys, prior_keys = jax.random.split(keys[1], (2, args.num_members))
        params = jax.vmap(init_member, in_axes=(0, None))(member_keys, obs)
        prior = jax.vmap(init_member, in_axes=(0, None))(prior_keys, obs)
        init_opt_state = partial(init_optimizers, make_optimizers(args, 0.0))
        replay = init_replay(obs)
        state = State(
            seed=seed,
            follower_rate=follower_rate,
            params=Ensemble(params.perception, params.control, prior._asdict()),
            target=params,
            opt_state=jax.vmap(init_opt_state)(params),
            replay=replay,
            drawn=sample(replay, jnp.zeros((num_batches, args.batch_size), jnp.int32)),
            env_state=env_state,
            obs=obs,
            active=jax.random.randint(keys[3], (), 0, args.num_members, jnp.int32),
            episodes=no_episodes(),
        )
        steps = draw(keys[2], jnp.arange(counts.warmup_steps, dtype=jnp.int32))
        state, _ = jax.lax.scan(warm_up_step, state, steps)
        return state

    def prior_values(prior, obs):
        """Returns p(s, .) of one member for obs [...], [..., actions]."""
        return args.prior_scale * q_values(networks, Players(**prior), obs)

    def epsilon(step):
        """Returns the probability of a random action: scale / (scale + t), t = 1 + updates made."""
        t = jnp.maximum(1, step - counts.warmup_steps + 2).astype(jnp.float32)
        return args.epsilon_scale / (args.epsilon_scale + t)

    def act(state, now):
        """Takes an epsilon-greedy step: the active member's, by its values with the prior."""
        member = jax.tree.map(lambda x: x[state.active], state.params)
        q = q_values(networks, learned(member), state.obs)  # [actions]
        q = q + prior_values(member.prior, state.obs)
        explore = now.chance < epsilon(now.step)
        action = jnp.where(explore, now.random_action, q.argmax().astype(jnp.int32))
        stepped = env.step(now.env_key, state.env_state, action)
        both_obs = jnp.stack([state.obs, stepped.next_obs])
        # [members, 2, actions], of obs and next_obs
        priors = jax.vmap(prior_values, in_axes=(0, None))(state.params.prior, both_obs)
        transition = Transition(
            obs=state.obs,
            action=action,
            reward=stepped.reward,
            next_obs=stepped.next_obs,
            terminated=stepped.terminated,
            prior=priors[:, 0],
            next_prior=priors[:, 1],
            mask=now.mask,
        )
        return transition, stepped

    def act_and_store(state, now):
        """Acts, stores the step, and draws the next update's batches."""
        transition, stepped = act(state, now)
        replay = store(state.replay, transition, now.step)
        ended = stepped.terminated
        one_more = count_episode(state.episodes, stepped.is_bad, args.stochastic)
        return state._replace(
            replay=replay,
            drawn=sample(replay, now.indices),
            env_state=stepped.env_state,
            obs=stepped.obs,
            active=jnp.where(ended, now.next_active, state.active),
            episodes=jax.tree.map(partial(jnp.where, ended), one_more, state.episodes),
        )

    def warm_up_step(state, now):
        """Acts without learning, while the replay fills."""
        return act_and_store(state, now), None

    def learn(state):
        """Makes one update of every member, all from the same transitions."""
        optimizers = make_optimizers(args, state.follower_rate)

        def learn_member(params, target, opt_state, transition):
            batches = Batch(
                obs=transition.obs,
                prior=transition.prior,
                action=transition.action,
                td_target=compute_td_target(networks, target, transition, args.gamma),
                mask=transition.mask,
            )
            each = unstack(batches) if args.scorer else [batches]  # the baseline's is [1, batch]
            return update(networks, optimizers, params, opt_state, *each)

        learn_members = jax.vmap(learn_member, in_axes=(0, 0, 0, MEMBERS))
        return learn_members(learned(state.params), state.target, state.opt_state, state.drawn)

    def train_step(state, now):
        """Learns and acts side by side: neither needs what the other makes in this step.

        So the batches were drawn at the end of the step before, and acting uses the parameters from
        before the update; see train_step of scorer_dqn.py.
        """
        params, opt_state = learn(state)
        state = act_and_store(state, now)
        params = state.params._replace(perception=params.perception, control=params.control)
        return state._replace(params=params, opt_state=opt_state), None

    def train_period(state, steps):
        """Trains up to the next target update, and makes it."""
        state, _ = jax.lax.scan(train_step, state, steps)
        return state._replace(target=learned(state.params)), None

    def train_chunk(state, chunk):
        """Trains for one chunk; returns the new state and what its point of the curves shows."""
        first = counts.warmup_steps + chunk * counts.chunk_updates
        steps = draw(
            random_key(state.seed, STEPPING, chunk),
            first + jnp.arange(counts.chunk_updates, dtype=jnp.int32),
        )
        periods = jax.tree.map(lambda x: x.reshape(-1, counts.target_period, *x.shape[1:]), steps)
        state, _ = jax.lax.scan(train_period, state, periods)
        last_return, finished = env.last_return(state.env_state)
        return state, dict(
            returns=jnp.where(finished, last_return, 0.0),
            finished=finished.astype(jnp.float32),
            episodes=state.episodes.completed,
            bad_episodes=state.episodes.bad,
            solved_episode=state.episodes.solved_at,
            strictly_solved_episode=state.episodes.strictly_solved_at,
        )

    return Training(
        init=init,
        train_chunk=train_chunk,
        diagnose=None,
        first_timestep=counts.warmup_steps,
        timesteps=counts.warmup_steps + counts.chunk_updates * np.arange(1, counts.num_chunks + 1),
        chunks_per_point=1,
    )


# ==================================================================================================
# The checks
# ==================================================================================================

SHOWN = ("num_members", "target_update_interval")  # printed at the start of a run


def complete(args: Args) -> Args:
    """Returns args with the presets where unset; bad input ends in one sentence."""
    presets = PRESETS["DeepSea"] if args.scorer else {}
    if not args.scorer:
        for name in PRESETS["DeepSea"]:
            if getattr(args, name) is not None:
                fail(f"{flag(name)} {getattr(args, name)} needs --scorer")
    args = with_presets(args, presets | dict(total_timesteps=100 * args.size**2))
    check_numbers(
        args,
        size=(2, 1000),
        gamma=(0, 1),
        prior_scale=(0, 1e9),
        mask_probability=(1e-9, 1),
        epsilon_scale=(0, 1e9),
        learning_starts=(1, 2**30),
        buffer_size=(1, 2**31 - 1),
        total_timesteps=(1, 2**30),
    )
    if args.learning_starts >= args.total_timesteps:
        fail(
            f"--total-timesteps {args.total_timesteps} must be more than --learning-starts "
            f"{args.learning_starts}, before which nothing is learned"
        )
    if args.buffer_size < args.batch_size:
        fail(
            f"--buffer-size {args.buffer_size} must be at least {args.batch_size}, "
            "to hold a batch of --batch-size"
        )
    kind = "-stochastic" if args.stochastic else ""
    return replace(args, env=f"DeepSea-{args.size}{kind}")


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

"""SCORER R2D2: recurrent Q-learning as a game between perception and control.

The Q-network is split in two. Perception f_phi, the follower, is a GRU that turns observations into
features and minimises the variance of the Bellman errors; control Q_theta, the leader, turns
features into action values and minimises their mean square. Each takes one step per update: the
follower first, and quickly, as its learning rate is higher; then the leader, on what the follower
made of it. Without --scorer the same layers have one loss and one optimiser: R2D2, the baseline.
The environments are navix's MiniGrid, where one sees only what is ahead and so needs a memory.

    # Empty-Random, three minutes on a laptop; then the paper's run, for a GPU
    python scorer_r2d2.py --scorer --total-timesteps 1e5
    python scorer_r2d2.py --env Navix-FourRooms-v0 --scorer --num-seeds 30

What stands where, from top to bottom:

    Arguments     every flag; look up what you need
    Environment   make_env, the only place that knows navix; skip it, but for the dummy steps
    Networks      f_phi and Q_theta, two flax modules
    The game      the method: losses, n-step targets and one round of the game; needs jax and optax
    Training      Algorithm 1: act, store, sample, learn; its heading says where each line is
    Counts        how a run is divided into loops; look up its fields, skip the rest
    The checks    what the flags may be; skip them
    The run       seeds side by side, progress, checkpoints, records; the same in every script; skip it

To understand the method read scorer_dqn.py first: "The game" and "Training" have the same roles
there. What R2D2 adds: sequences in place of transitions, so that losses take a mask of the steps
that count; a hidden state, stored with each step and brought up to date by a burn-in; targets with
several rewards; and priorities, so that the leader's loss takes importance weights. A step acts and
then learns, in the order of Algorithm 1. R2D2's rescaling of values is left out, as in SCORER's
paper. The paper:
Martinez et al., "Stackelberg Coupling of Online Representation Learning and Reinforcement
Learning", ICLR 2026. R2D2: Kapturowski et al., "Recurrent Experience Replay in Distributed
Reinforcement Learning", ICLR 2019.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "flashbax>=0.1.3",
#   "navix==0.7.4", "tyro>=1.0.17", "tqdm>=4.68", "safetensors>=0.8", "wandb>=0.31"]
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

import flashbax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flashbax.buffers import prioritised_trajectory_buffer
from flax.traverse_util import flatten_dict
from jax.experimental.multihost_utils import process_allgather
from safetensors.flax import save as to_safetensors
from tqdm import tqdm

# ==================================================================================================
# Arguments
# ==================================================================================================

# What a flag is where it is not given, by family of environments: here, what only a player has.
PRESETS = {
    "navix": dict(
        follower_loss="variance",
        follower_learning_rate=3e-4,
        leader_decay_power=1.0,
    ),
}


@dataclass
class Experiment:
    """What is trained, and for how long."""

    env: str = "Navix-Empty-Random-8x8-v0"  # navix environment; seen as symbols, in first person
    seed: int = 0  # first seed
    num_seeds: int = 1  # seeds trained side by side in one program: seed, seed + 1, ...
    total_timesteps: int = 1_000_000  # environment steps per seed with dummy steps, rounded up
    diagnostics: bool = False  # also record losses, Bellman errors and parameter norms


@dataclass
class Game:
    """SCORER or the baseline."""

    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss
    follower_loss: Literal["variance", "msbe"] | None = None  # what perception minimises
    follower_learning_rate: tuple[float, ...] | None = None  # initial rate; several: a sweep
    learning_rate: float = 1e-4  # initial rate of the leader, or of the baseline
    leader_decay_power: float | None = None  # the leader's rate falls as (1 - progress)^power
    follower_importance_weights: bool = False  # weigh the follower's errors as the leader's are


@dataclass
class Algorithm:
    """The R2D2 underneath, alike for SCORER and the baseline."""

    num_envs: int = 10  # environments per seed
    buffer_size: int = 100_000  # replay per seed in environment steps
    batch_size: int = 32  # sequences per batch; SCORER draws two batches per update
    sequence_length: int = 100  # steps of a sequence, one of which starts at every fourth step
    burn_in: int = 50  # its first steps, which only warm up the hidden state
    n_step: int = 10  # rewards in a target, fewer before an episode's or the sequence's end
    per_alpha: float = 0.6  # exponent of the priorities; 0 draws uniformly
    per_beta: float = 0.4  # initial exponent of the importance weights; rises linearly to 1
    learning_starts: int = 25_000  # environment steps before the first update
    update_interval: int = 80  # environment steps per update (paper's table: 16; its code: 80)
    target_update_interval: int = 5_000  # environment steps, rounded to updates
    gamma: float = 0.99  # discount per step
    epsilon_start: float = 1.0  # initial probability of a random action
    epsilon_end: float = 0.01  # final probability of a random action
    epsilon_steps: int = 500_000  # environment steps over which it falls linearly
    max_grad_norm: float = 0.5  # global-norm clip, for each player alone
    bootstrap_at_timeout: bool = True  # off: a time-out counts as a termination


@dataclass
class Network:
    """The layers."""

    hidden_dim: int = 128  # width of every layer


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
    return "navix"


# ==================================================================================================
# Environment
# ==================================================================================================


class EnvStep(NamedTuple):
    """What a step of all environments gives, arrays [num_envs, ...]."""

    env_state: Any
    obs: jax.Array  # what this action led to; after an episode's end, that episode's last
    reward: jax.Array
    terminated: jax.Array  # the episode ended, and no reward can follow
    truncated: jax.Array  # the episode was cut by its time limit, and rewards would have followed
    episode_return: jax.Array  # sum of the episode's rewards so far


class Environment(NamedTuple):
    """Many copies of an environment, which are stepped together and reset themselves.

    They do so one step late: the step after an episode's last observation ignores its action, pays
    nothing and leads to a new episode's first observation. Such dummy steps are acted and stored as
    all others are, because the last observation is needed: its value is what a time-out bootstraps
    from. No loss counts them.
    """

    num_actions: int
    reset: Callable  # keys [num_envs] -> obs [num_envs, features], env_state
    step: Callable  # (env_state, action [num_envs]) -> EnvStep


def make_env(args: Args) -> Environment:
    """Makes a navix environment. A new family: here, in PRESETS and in `family`."""
    with jax.enable_x64(False):  # as in vectorize
        import navix  # starts JAX's devices, so not before they are set up

    names = navix.registry()
    if args.env not in names:
        near = difflib.get_close_matches(args.env, names, cutoff=0.4) or names
        fail(f"--env {args.env} is unknown to navix; near names: {', '.join(near)}")
    view = navix.observations.symbolic_first_person  # 7 x 7 cells of 3 symbols, uint8
    return vectorize(navix.make(args.env, observation_fn=view))


def vectorize(env) -> Environment:
    """Turns a navix environment into one of many copies, with flat observations.

    Its state is navix's whole timestep, which has a cache of 7 to 72 kB for drawing pictures: the
    state goes from step to step, but never into the replay.
    """

    def flat(obs):
        return obs.reshape(len(obs), -1)

    def reset(keys):
        raw_keys = jax.random.key_data(keys)  # navix keeps them: plain arrays, for checkpoints
        with jax.enable_x64(False):  # with JAX_ENABLE_X64, navix would mix both kinds of numbers
            timestep = jax.vmap(env.reset)(raw_keys)
        return flat(timestep.observation), timestep

    def step(timestep, action):
        with jax.enable_x64(False):
            new = jax.vmap(env.step)(timestep, action)
        return EnvStep(
            env_state=jax.tree.map(lambda new, old: new.astype(old.dtype), new, timestep),
            obs=flat(new.observation),
            reward=new.reward.astype(jnp.float32),
            terminated=new.step_type == 2,
            truncated=new.step_type == 1,
            episode_return=new.info["return"].astype(jnp.float32),
        )

    return Environment(int(env.action_space.maximum) + 1, reset, step)


# ==================================================================================================
# Networks
# ==================================================================================================


def dense(features: int, gain: float = np.sqrt(2)) -> nn.Dense:
    """Makes a linear layer with orthogonal weights and biases of 0."""
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(gain))


def l2_norm(x):
    """Divides x [..., features] by its Euclidean norm; zeros stay zeros, with gradients of zero."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-16))


def scan_over_time(step, carry, inputs):
    """Runs jax.lax.scan over inputs [time, ...], ten steps in each turn of the loop.

    A turn has a cost of its own on a GPU: with one step each, an update takes a quarter longer.
    """
    return jax.lax.scan(step, carry, inputs, unroll=10)


class Perception(nn.Module):
    """f_phi: a sequence of observations -> features z (table "SCORER R2D2").

    A step's features, of norm 1, are also the hidden state that the next step starts from; only after
    an episode's last observation it starts from 0. The cell is flax's GRUCell, made quick: what does
    not depend on the hidden state, the products with the inputs, is one product for all steps.
    """

    hidden_dim: int = 128
    burn_in: int = 0  # through a sequence's first steps no gradient flows

    @nn.compact
    def __call__(self, carry, obs, is_last):
        """Returns the hidden state after the sequence [batch, dim], and z [time, batch, dim].

        carry [batch, dim] is the hidden state before the sequence, obs is [time, batch, features],
        and is_last [time, batch] says which observations end their episode.
        """
        embed = dense(self.hidden_dim)
        inputs = nn.Dense(3 * self.hidden_dim, name="inputs")  # of the reset, update and new gates
        kernel = self.param("recurrent", orthogonal_gates, self.hidden_dim)
        bias_shape = (self.hidden_dim,)
        bias = self.param("recurrent_bias", nn.initializers.zeros, bias_shape, jnp.float32)

        def step(carry, now):
            x, is_last = now
            z = l2_norm(gru(kernel, bias, carry, x))
            return jnp.where(is_last[:, None], 0.0, z), z

        def run(carry, obs, is_last):
            x = inputs(jnp.tanh(embed(l2_norm(obs.astype(jnp.float32)))))
            return scan_over_time(step, carry, (x, is_last))

        # Two runs of the same layers, the first without a gradient. Acting passes a single step: the
        # first run takes it, and the second gets no steps and does nothing.
        start = self.burn_in
        burnt_in = run(carry, obs[:start], is_last[:start])
        carry, past = jax.lax.stop_gradient(burnt_in)
        carry, z = run(carry, obs[start:], is_last[start:])
        return carry, jnp.concatenate([past, z])


def orthogonal_gates(key, size: int):
    """Draws an orthogonal matrix for each of a GRU's three gates, side by side [size, 3 size]."""
    orthogonal = nn.initializers.orthogonal()
    keys = jax.random.split(key, 3)
    return jnp.hstack([orthogonal(key, (size, size), jnp.float32) for key in keys])


def gru(kernel, bias, carry, x):
    """Returns a GRU's next hidden state [batch, dim]; x [batch, 3 dim] are the inputs' products."""
    size = carry.shape[-1]
    h = carry @ kernel
    reset, update = jnp.split(nn.sigmoid(x[:, : 2 * size] + h[:, : 2 * size]), 2, axis=-1)
    new = jnp.tanh(x[:, 2 * size :] + reset * (h[:, 2 * size :] + bias))
    return (1.0 - update) * new + update * carry


class Control(nn.Module):
    """Q_theta: features z [..., z_dim] -> action values [..., actions] (table "SCORER R2D2")."""

    num_actions: int
    hidden_dim: int = 128

    @nn.compact
    def __call__(self, z):
        hidden = jnp.tanh(dense(self.hidden_dim)(z))
        return dense(self.num_actions, gain=0.01)(hidden)


# ==================================================================================================
# The game
#
# E[delta^2] = Var[delta] + E[delta]^2: perception takes on the variance, the part that no constant
# could correct; control, which sees the same kind of errors, takes the whole.
#
# To use it elsewhere, copy from here to the next heading, with `import jax`, `jax.numpy as jnp`,
# `optax`, and `Any`, `NamedTuple` of typing. Only `q_values` and `compute_td_target` know flax. As
# in scorer_dqn.py networks, parameters, optimisers and their states are pairs (Players), the baseline
# has one optimiser, and a batch comes with its targets; its mask, weights and hidden states, too.
# ==================================================================================================


class Players(NamedTuple):
    """A pair: of networks, of their parameters, of optimisers, or of the optimisers' states."""

    perception: Any  # f_phi, the follower's
    control: Any  # Q_theta, the leader's


class Batch(NamedTuple):
    """What one player learns from in one update: sequences."""

    carry: jax.Array  # [batch, dim], hidden states before the sequences, as acting stored them
    obs: jax.Array  # [time, batch, ...]
    is_last: jax.Array  # [time, batch], whether obs ends its episode
    action: jax.Array  # [time, batch], integers
    td_target: jax.Array  # [time, batch], Y of each step, from `compute_td_target`
    mask: jax.Array  # [time, batch], the steps that count
    weight: jax.Array  # [batch], importance weights of the sequences


def q_values(networks: Players, params: Players, carry, obs, is_last):
    """Returns the next hidden states, and Q_theta(f_phi(s_0 ... s_t), .) [time, batch, actions]."""
    carry, z = networks.perception.apply({"params": params.perception}, carry, obs, is_last)
    return carry, networks.control.apply({"params": params.control}, z)


def select(values, action):
    """Returns the entry of values [..., actions] at action [...]: a look-up, but quicker on a GPU."""
    assert action.shape == values.shape[:-1], (action.shape, values.shape)  # else they broadcast
    return jnp.sum(values * jax.nn.one_hot(action, values.shape[-1]), axis=-1)


def compute_td_target(networks, params, target, sequences, gamma, n_step):
    """Returns Y [time, batch] of sequences, with up to n_step rewards in each:

        Y_t = sum_{k<m} gamma^k r_{t+k} + gamma^m (1 - terminated_{t+m-1}) Q_target(s_{t+m}, a*)

    sequences has of each step, [time, batch, ...]: obs, action, reward and terminated, which are of
    what the action led to; is_last, whether obs ended its episode, which makes it a dummy step; and
    carry, the hidden state before obs. m is n_step, or less where the episode's or the sequence's last
    observation comes sooner. After a time-out s_{t+m} is that last observation, at the dummy step. a*
    is the online control network's choice on target features, as with scorer_dqn.py's --double. The
    last step's Y is only the value there: nothing to learn from.

    Y of both players' batches may be computed before either steps: the follower's step changes neither
    the target networks nor the theta that chooses a*.
    """
    carry = sequences.carry[0]  # [batch, dim], as acting stored it: burn-in brings it up to date
    _, z = networks.perception.apply(
        {"params": target.perception}, carry, sequences.obs, sequences.is_last
    )
    target_q = networks.control.apply({"params": target.control}, z)  # [time, batch, actions]
    online_q = networks.control.apply({"params": params.control}, z)
    value = select(target_q, online_q.argmax(axis=-1))  # [time, batch]
    assert value.shape == sequences.reward.shape, (value.shape, sequences.reward.shape)

    reward = sequences.reward[:-1]
    at_the_end = (1.0 - sequences.terminated[:-1]) * value[1:]
    td_target = value
    # From targets of at most k rewards to those of k + 1: r_t, and then gamma times the next step's
    # target; where step t is its episode's last, gamma times the value at the end instead. A dummy
    # step's are meaningless, and masked.
    for _ in range(n_step):
        what_follows = jnp.where(sequences.is_last[1:], at_the_end, td_target[1:])
        td_target = jnp.concatenate([reward + gamma * what_follows, value[-1:]])
    return td_target


def bellman_error(networks, params, batch):
    """Returns delta = Y - Q_theta(f_phi(s), a), [time, batch]; Y is data and has no gradient."""
    _, q = q_values(networks, params, batch.carry, batch.obs, batch.is_last)
    q = select(q, batch.action)
    assert q.shape == batch.td_target.shape, (q.shape, batch.td_target.shape)  # else they broadcast
    assert q.shape == batch.mask.shape, (q.shape, batch.mask.shape)
    return jax.lax.stop_gradient(batch.td_target) - q  # a safeguard: Y comes from outside


def masked_mean(x, mask):
    """Returns sum(mask x) / sum(mask), and 0 where the mask is 0. A mask may also hold weights."""
    return jnp.sum(mask * x) / jnp.maximum(jnp.sum(mask), 1e-8)


def follower_loss(delta, mask, weight):
    """Returns Var[delta], the population variance over the mask: what perception minimises.

    weight holds ones, as only the leader's errors have importance weights in the released code. With
    --follower-importance-weights it holds those weights: they make the mean, and weigh the squares
    around it as they weigh the leader's.
    """
    mean = masked_mean(delta, mask * weight)
    return masked_mean(weight * jnp.square(delta - mean), mask)


def leader_loss(delta, mask, weight):
    """Returns E[weight delta^2] over the mask, what control minimises; the baseline, over both."""
    return masked_mean(weight * jnp.square(delta), mask)


def scorer_update(
    networks,
    optimizers,
    params,
    opt_state,
    follower_batch,
    leader_batch,
    objective=follower_loss,
):
    """Plays one round of the game, lines 12 and 15 of Algorithm 1.

    The batches are two independent draws, with their targets (lines 10, 11, 13 and 14). objective
    is the follower's loss: follower_loss, or leader_loss for the paper's ablation "MSBE". Returns
    params, opt_state, and the leader's delta [time, batch], of which its sequences' priorities are
    made.
    """

    # The follower responds: perception steps on the variance while control stands still.
    def perception_objective(phi):
        delta = bellman_error(networks, Players(phi, params.control), follower_batch)
        return objective(delta, follower_batch.mask, follower_batch.weight)

    gradient = jax.grad(perception_objective)(params.perception)
    updates, perception_state = optimizers.perception.update(
        gradient, opt_state.perception, params.perception
    )
    new_phi = optax.apply_updates(params.perception, updates)

    # The leader steps on that response, on a batch of its own, while perception stands still.
    def control_objective(theta):
        delta = bellman_error(networks, Players(new_phi, theta), leader_batch)
        return leader_loss(delta, leader_batch.mask, leader_batch.weight), delta

    gradient, delta = jax.grad(control_objective, has_aux=True)(params.control)
    updates, control_state = optimizers.control.update(gradient, opt_state.control, params.control)
    new_theta = optax.apply_updates(params.control, updates)

    return Players(new_phi, new_theta), Players(perception_state, control_state), delta


def baseline_update(networks, optimizer, params, opt_state, batch):
    """Steps both networks on the leader's loss with one optimiser: what SCORER is compared with.

    Returns params, opt_state, and delta [time, batch], of which the sequences' priorities are made.
    """

    def objective(params):
        delta = bellman_error(networks, params, batch)
        return leader_loss(delta, batch.mask, batch.weight), delta

    gradient, delta = jax.grad(objective, has_aux=True)(params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, delta


# ==================================================================================================
# Training
#
# Where the lines of Algorithm 1 are (an end of a block counts as a line, a requirement does not):
#   1, 2      initialise, reset          init
#   3         while t < T                train_stretch and train_chunk, and `train` in "The run"
#   4 to 7    act, store                 act_for_interval, which calls act and store
#   8         if t > T_start             warm_up_interval before, train_step from then on
#   9         every T_Update             train_step: one update per interval of steps
#   10, 13    sample two minibatches     learn, which calls sample
#   11, 14    compute targets Y          learn, which calls compute_td_target by make_batch
#   12, 15    the players' two steps     learn, which calls scorer_update
#   17, 18    update target networks     train_stretch: tau is 1, a copy
# ==================================================================================================


def make_networks(args: Args, num_actions: int) -> Players:
    """Makes the two networks that the flags describe."""
    return Players(
        perception=Perception(args.hidden_dim, args.burn_in),
        control=Control(num_actions, args.hidden_dim),
    )


def make_optimizers(args: Args, num_updates: int, follower_rate):
    """Makes a clipped Adam for each player, or the one that the baseline has.

    All rates fall to exactly 0 over the updates of the run, by default linearly, as in the paper's
    experiments, so the leader's is a constant share of the follower's. The paper's theory (section
    4) wants that share to vanish, which --leader-decay-power 1.5 does.
    """

    def adam(initial_rate, power=1.0):
        def rate(count):
            return initial_rate * (jnp.maximum(num_updates - count, 0) / num_updates) ** power

        return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(rate))

    slow = adam(args.learning_rate, args.leader_decay_power or 1.0)
    if not args.scorer:
        return slow
    return Players(perception=adam(follower_rate), control=slow)


def init_optimizers(optimizers, params: Players):
    """Returns the first state of the players' optimisers, or of the baseline's."""
    if not isinstance(optimizers, Players):
        return optimizers.init(params)
    return Players(
        perception=optimizers.perception.init(params.perception),
        control=optimizers.control.init(params.control),
    )


def choose_follower_loss(args: Args):
    """Returns the loss that the flags ask perception to minimise."""
    return leader_loss if args.follower_loss == "msbe" else follower_loss


def choose_update(args: Args):
    """Returns the update that the flags ask for: of the networks, optimizers, params, ... batches."""
    if not args.scorer:
        return baseline_update
    return partial(scorer_update, objective=choose_follower_loss(args))


class Transition(NamedTuple):
    """One step of one environment, as the replay keeps it; or sequences [time, batch, ...]."""

    obs: jax.Array  # [..., features]
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array  # no reward can follow; a time-out counts only if the flags say so
    is_last: jax.Array  # obs ends its episode, and this is a dummy step: see Environment
    carry: jax.Array  # [..., hidden_dim], hidden state before obs


class Drawn(NamedTuple):
    """Sequences from the replay."""

    sequences: Transition  # [time, batch, ...]
    probability: jax.Array  # [batch], with which each of all sequences was drawn
    place: jax.Array  # [batch], in the replay


PERIOD = 4  # steps from the beginning of one sequence in the replay to that of the next

# flashbax 0.1.3 gives new sequences the largest priority so far as an integer, 1.93 as 1. This is
# its function, which also tells whether a sequence is new: then it returns 1 or more, else 0.
flashbax_priorities = prioritised_trajectory_buffer._calculate_new_item_priorities


def largest_priority(sum_tree, *places):
    """Gives new sequences the largest priority so far, not rounded, in place of flashbax's function.

    That is 1 at first and never falls, so flashbax's integer is 0 only where nothing is new. Returned
    are these priorities, and those of the sequences that the new ones overwrite: 0.
    """
    rounded, overwritten = flashbax_priorities(sum_tree, *places)
    return jnp.where(rounded > 0, sum_tree.max_recorded_priority, 0.0), overwritten


def make_replay(args: Args):
    """Makes the functions of flashbax's prioritised replay; every PERIOD steps a sequence starts."""
    prioritised_trajectory_buffer._calculate_new_item_priorities = largest_priority
    return flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=args.num_envs,
        sample_batch_size=args.batch_size,
        sample_sequence_length=args.sequence_length,
        period=PERIOD,
        min_length_time_axis=args.sequence_length,
        max_length_time_axis=args.buffer_size // args.num_envs // PERIOD * PERIOD,  # whole periods
        priority_exponent=args.per_alpha,
        device=jax.default_backend(),
    )


def swap_axes(tree):
    """Swaps the first two axes of a tree's arrays: flashbax has [batch, time, ...]."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)


def store(buffer, replay, transitions: Transition):
    """Writes transitions [steps, num_envs, ...] over the oldest steps of the replay.

    Sequences that become whole get the largest priority so far.
    """
    return buffer.add(replay, swap_axes(transitions))


def sample(buffer, replay, key) -> Drawn:
    """Draws a batch of sequences by their priorities."""
    drawn = buffer.sample(replay, key)
    return Drawn(swap_axes(drawn.experience), drawn.probabilities, drawn.indices)


def mask_of(drawn: Drawn, burn_in: int):
    """Returns which steps of drawn sequences count, [time, batch].

    Not the burn-in, no dummy steps, nor the last step, with which the targets end. Nothing, either,
    of a place in the replay whose priority is 0, as no sequence begins there: by rounding, flashbax's
    sums can still lead to one.
    """
    mask = ~drawn.sequences.is_last & (drawn.probability > 0)
    return mask.at[:burn_in].set(False).at[-1].set(False)


def importance_weights(probability, beta):
    """Returns (N P)^-beta over its maximum in the batch, where N cancels; [batch], 0 where P is 0."""
    least = jnp.min(jnp.where(probability > 0, probability, jnp.inf))
    return jnp.where(probability > 0, (least / probability) ** beta, 0.0)


def sequence_priority(delta, mask):
    """Returns 0.9 max + 0.1 mean of |delta| over the mask, [time, batch] -> [batch] (R2D2)."""
    error = jnp.abs(delta)
    mean = jax.vmap(masked_mean, in_axes=1)(error, mask)
    return 0.9 * (mask * error).max(axis=0) + 0.1 * mean


def unstack(batches: Batch) -> list[Batch]:
    """Returns the batches of which `batches` [number, ...] is a stack."""

    def batch(number):
        return jax.tree.map(lambda x: x[number], batches)

    return [batch(number) for number in range(len(batches.action))]


def share_of(mask):
    """Returns the share of true entries in mask [n]: exactly 1, where all are true.

    A curve begins where this share is 1, and a mean in float32 may miss it by rounding: of 41 ones it
    is 0.99999994.
    """
    return jnp.where(mask.all(), 1.0, mask.mean())


def mean_where(mask, values):
    """Returns the mean of those values [n] at which mask [n] is true, and 0 where it nowhere is."""
    return jnp.where(mask, values, 0.0).mean() / jnp.maximum(share_of(mask), 1.0 / len(mask))


def best_mean(finished, last_returns):
    """Returns the highest mean over environments of last_returns [..., num_envs].

    Only where all have finished an episode; 0 where they nowhere have. The paper's time to a threshold
    looks at every step, of which a point of the curves covers many.
    """
    all_finished = finished.all(axis=-1)
    best = jnp.max(last_returns.mean(axis=-1), where=all_finished, initial=-jnp.inf)
    return jnp.where(all_finished.any(), best, 0.0)


class State(NamedTuple):
    """All of one seed's training: what a checkpoint holds. Random keys come from seed and chunk."""

    seed: jax.Array
    follower_rate: jax.Array  # the follower's initial learning rate
    params: Players  # phi, theta
    target: Players  # phi_target, theta_target
    opt_state: Any
    replay: Any  # flashbax's: Transitions [num_envs, rows, ...] and priorities
    env_state: Any
    obs: jax.Array  # [num_envs, features]
    is_last: jax.Array  # [num_envs], obs ends its episode: the next step is a dummy step
    carry: jax.Array  # [num_envs, hidden_dim], hidden state before obs
    last_returns: jax.Array  # [num_envs], of the last completed episodes
    finished: jax.Array  # [num_envs], whether there is one; else last_returns is 0
    episodes: jax.Array  # completed so far, by all environments together


class Now(NamedTuple):
    """The number of a step and its random numbers, which a chunk draws for all of its steps."""

    step: jax.Array
    chance: jax.Array  # [num_envs], uniform in [0, 1): below epsilon, the action is random
    random_action: jax.Array  # [num_envs]


class Interval(NamedTuple):
    """From one update to the next: its number, its steps, and the random keys of its update."""

    number: jax.Array
    steps: Now  # [interval_steps, ...]
    sample_keys: jax.Array  # [batches]


# What a seed's random keys are for.
INITIALIZING, STEPPING, DIAGNOSING = 0, 1, 2


def random_key(seed, purpose, index=0):
    """Returns a random key of its own for each seed, purpose and index."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), index)


def make_train(args: Args, env: Environment) -> "Training":
    """Makes the functions that train one seed, in the order in which data flows."""
    counts = count_steps(
        args.total_timesteps,
        args.learning_starts,
        args.update_interval,
        args.target_update_interval,
        args.num_envs,
    )
    networks = make_networks(args, env.num_actions)
    update = choose_update(args)
    buffer = make_replay(args)
    num_batches = 2 if args.scorer else 1
    epsilon = optax.linear_schedule(
        args.epsilon_start, args.epsilon_end, args.epsilon_steps / args.num_envs
    )

    def draw(key, intervals) -> Interval:
        """Draws all random numbers of `intervals` [n] at once: many small random kernels are slow."""
        keys = jax.random.split(key, 3)
        shape = (len(intervals), counts.interval_steps, args.num_envs)
        steps = jnp.arange(counts.interval_steps, dtype=jnp.int32)
        return Interval(
            number=intervals,
            steps=Now(
                step=intervals[:, None] * counts.interval_steps + steps,
                chance=jax.random.uniform(keys[0], shape, jnp.float32),
                random_action=jax.random.randint(keys[1], shape, 0, env.num_actions, jnp.int32),
            ),
            sample_keys=jax.random.split(keys[2], (len(intervals), num_batches)),
        )

    def init(seed, follower_rate) -> State:
        """Initialises a seed (lines 1 and 2), and acts without learning up to T_start (line 8)."""
        keys = jax.random.split(random_key(seed, INITIALIZING), 4)
        obs, env_state = env.reset(jax.random.split(keys[0], args.num_envs))
        is_last = jnp.zeros(args.num_envs, bool)
        carry = jnp.zeros((args.num_envs, args.hidden_dim), jnp.float32)
        (_, z), perception = networks.perception.init_with_output(
            keys[1], carry, obs[None], is_last[None]
        )
        control = networks.control.init(keys[2], z)
        params = Players(perception["params"], control["params"])
        transition = Transition(
            obs=obs,
            action=jnp.zeros(args.num_envs, jnp.int32),
            reward=jnp.zeros(args.num_envs, jnp.float32),
            terminated=jnp.zeros(args.num_envs, bool),
            is_last=is_last,
            carry=carry,
        )
        optimizers = make_optimizers(args, counts.num_updates, follower_rate)
        state = State(
            seed=seed,
            follower_rate=follower_rate,
            params=params,
            target=params,
            opt_state=init_optimizers(optimizers, params),
            replay=buffer.init(jax.tree.map(lambda x: x[0], transition)),
            env_state=env_state,
            obs=obs,
            is_last=is_last,
            carry=carry,
            last_returns=jnp.zeros(args.num_envs, jnp.float32),
            finished=jnp.zeros(args.num_envs, bool),
            episodes=jnp.zeros((), jnp.int32),
        )
        inputs = draw(keys[3], jnp.arange(counts.warmup_intervals, dtype=jnp.int32))
        state, _ = jax.lax.scan(warm_up_interval, state, inputs)
        return state

    def act(state, now):
        """Takes an epsilon-greedy step in all environments (lines 4 and 5, most of 6, and 7)."""
        carry, q = q_values(
            networks, state.params, state.carry, state.obs[None], state.is_last[None]
        )
        explore = now.chance < epsilon(now.step)
        action = jnp.where(explore, now.random_action, q[0].argmax(axis=-1).astype(jnp.int32))
        stepped = env.step(state.env_state, action)
        done = stepped.terminated | stepped.truncated
        no_value_follows = stepped.terminated if args.bootstrap_at_timeout else done
        transition = Transition(
            obs=state.obs,
            action=action,
            reward=stepped.reward,
            terminated=no_value_follows,
            is_last=state.is_last,
            carry=state.carry,
        )
        state = state._replace(
            env_state=stepped.env_state,
            obs=stepped.obs,
            is_last=done,
            carry=carry,
            last_returns=jnp.where(done, stepped.episode_return, state.last_returns),
            finished=state.finished | done,
            episodes=state.episodes + jnp.sum(done, dtype=jnp.int32),
        )
        return state, (transition, (state.finished, state.last_returns))

    def act_for_interval(state, interval):
        """Takes an interval's steps and stores them (lines 4 to 7); returns each step's returns, too."""
        state, (transitions, returns) = jax.lax.scan(act, state, interval.steps)
        replay = store(buffer, state.replay, transitions)
        return state._replace(replay=replay), returns

    def warm_up_interval(state, interval):
        """Plays without learning, while the replay fills (line 8)."""
        state, _ = act_for_interval(state, interval)
        return state, None

    def make_batch(state, progress, drawn) -> Batch:
        """Adds targets (lines 11 and 14), mask and weights; progress in training is in [0, 1]."""
        sequences = drawn.sequences
        td_target = compute_td_target(
            networks, state.params, state.target, sequences, args.gamma, args.n_step
        )
        beta = args.per_beta + progress * (1.0 - args.per_beta)
        return Batch(
            carry=sequences.carry[0],
            obs=sequences.obs,
            is_last=sequences.is_last,
            action=sequences.action,
            td_target=td_target,
            mask=mask_of(drawn, args.burn_in),
            weight=importance_weights(drawn.probability, beta),
        )

    def follower_weight(weight):
        """Returns what the follower's errors weigh: all the same, unless the flags say not."""
        return weight if args.follower_importance_weights else jnp.ones_like(weight)

    def learn(state, interval):
        """Draws batches, makes one update (lines 10 to 15), and sets the priorities it finds."""
        updates_before = (interval.number - counts.warmup_intervals).astype(jnp.float32)
        progress = updates_before / counts.num_updates
        drawn = jax.vmap(partial(sample, buffer, state.replay))(interval.sample_keys)
        stacked = jax.vmap(partial(make_batch, state, progress))(drawn)  # [batches, ...]
        batches = unstack(stacked)  # the follower's and the leader's, or the baseline's one
        leader_batch = batches[-1]
        if args.scorer:
            batches[0] = batches[0]._replace(weight=follower_weight(batches[0].weight))
        # Optimisers are functions, made here anew, as each seed's lane may have a rate of its own.
        optimizers = make_optimizers(args, counts.num_updates, state.follower_rate)
        params, opt_state, delta = update(
            networks, optimizers, state.params, state.opt_state, *batches
        )
        # Sequences that the leader learned from get new priorities, as in the released code. Only a
        # place where no sequence begins has priority 0, and keeps it: see mask_of.
        priority = jnp.maximum(sequence_priority(delta, leader_batch.mask), 1e-6)
        priority = jnp.where(leader_batch.weight > 0, priority, 0.0)
        replay = buffer.set_priorities(state.replay, drawn.place[-1], priority)
        return params, opt_state, replay

    def train_step(state, interval):
        """Plays an interval of steps, then learns from what the replay holds."""
        state, returns = act_for_interval(state, interval)
        params, opt_state, replay = learn(state, interval)
        return state._replace(params=params, opt_state=opt_state, replay=replay), returns

    def train_stretch(state, inputs):
        """Trains for one stretch, then updates the target networks if it is time (lines 17 and 18)."""
        state, returns = jax.lax.scan(train_step, state, inputs)
        updates = inputs.number[-1] + 1 - counts.warmup_intervals  # since learning began
        is_due = updates % counts.target_period == 0
        target = jax.tree.map(partial(jnp.where, is_due), state.params, state.target)
        return state._replace(target=target), returns

    def train_chunk(state, chunk):
        """Trains for the chunk with this number; returns the state and what the curves show of it."""
        first = counts.warmup_intervals + chunk * counts.chunk_updates
        intervals = first + jnp.arange(counts.chunk_updates, dtype=jnp.int32)
        inputs = draw(random_key(state.seed, STEPPING, chunk), intervals)
        stretches = jax.tree.map(
            lambda x: x.reshape(-1, counts.stretch_updates, *x.shape[1:]), inputs
        )  # [stretches, stretch, ...]
        state, (finished, last_returns) = jax.lax.scan(train_stretch, state, stretches)
        return state, dict(
            returns=mean_where(state.finished, state.last_returns),
            best_returns=best_mean(finished, last_returns),
            finished=share_of(state.finished),
            episodes=state.episodes,
        )

    def diagnose(state, chunk):
        """Returns losses and Bellman errors of a batch drawn by priorities, and norms."""
        drawn = sample(buffer, state.replay, random_key(state.seed, DIAGNOSING, chunk))
        progress = chunk.astype(jnp.float32) / counts.num_chunks
        batch = make_batch(state, progress, drawn)
        delta = bellman_error(networks, state.params, batch)
        mean = masked_mean(delta, batch.mask)
        chosen_loss = choose_follower_loss(args)
        return dict(
            follower_loss=chosen_loss(delta, batch.mask, follower_weight(batch.weight)),
            leader_loss=leader_loss(delta, batch.mask, batch.weight),
            bellman_error_mean=mean,
            bellman_error_variance=masked_mean(jnp.square(delta - mean), batch.mask),
            perception_norm=optax.tree.norm(state.params.perception),
            control_norm=optax.tree.norm(state.params.control),
        )

    intervals = counts.warmup_intervals + counts.chunk_updates * np.arange(1, counts.num_chunks + 1)
    return Training(
        init=init,
        train_chunk=train_chunk,
        diagnose=diagnose,
        first_timestep=counts.warmup_intervals * args.update_interval,
        timesteps=intervals * args.update_interval,
        chunks_per_point=1,
    )


# ==================================================================================================
# Counts
# ==================================================================================================


class Counts(NamedTuple):
    """How a run is divided into loops.

    A step moves all environments once; an interval is the steps from one update to the next. With the
    default flags 10 environments make 80 environment steps in an interval of 8 steps, and 62 intervals
    are the target period; a stretch and a chunk are half of that. They differ where it is short.
    """

    interval_steps: int
    warmup_intervals: int  # without learning, to fill the replay; each later interval has an update
    target_period: int  # updates from one target update to the next
    stretch_updates: int  # updates of one inner loop; a target update is due after whole stretches
    chunk_updates: int  # updates that the host starts at once: whole stretches
    num_chunks: int  # each of them is a point of the curves, as best_returns looks at every step

    @property
    def num_updates(self):
        return self.num_chunks * self.chunk_updates


def count_steps(
    total_timesteps, learning_starts, update_interval, target_update_interval, num_envs
) -> Counts:
    """Divides a run. All but num_envs count environment steps, of which a step makes num_envs."""
    warmup_intervals = learning_starts // update_interval
    updates = max(1, ceil_divide(total_timesteps, update_interval) - warmup_intervals)
    target_period = min(target_update_interval // update_interval, 2**30)  # beyond int32: never
    stretch = divide_period(target_period, updates)
    chunk = choose_chunk(stretch, updates)
    return Counts(
        interval_steps=update_interval // num_envs,
        warmup_intervals=warmup_intervals,
        target_period=target_period,
        stretch_updates=stretch,
        chunk_updates=chunk,
        num_chunks=ceil_divide(updates, chunk),
    )


def divide_period(period: int, updates: int) -> int:
    """Returns a whole fraction of the target period for one loop of updates to cover.

    The longest up to 32, so that the host is asked often enough; or the whole period where those
    are too short for a loop, as for a prime, unless the host would then hardly be asked at all.
    """
    lengths = range(1, min(32, updates) + 1)
    longest = max(length for length in lengths if period % length == 0)
    if longest < min(8, period) and period <= min(updates, 1_000):
        return period
    return longest


def choose_chunk(stretch: int, updates: int) -> int:
    """Returns how many updates the host starts at once: a stretch, or up to 32 of short ones.

    More only where a run would otherwise have above 2,000 chunks, each of which is a point.
    """
    stretches = ceil_divide(updates, stretch)
    chunks = stretches
    if stretch < 8:
        chunks = ceil_divide(stretches, 32 // stretch)
    chunks = min(chunks, 2_000)
    return stretch * ceil_divide(stretches, chunks)  # so that little is added to what was asked for


def ceil_divide(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


# ==================================================================================================
# The checks
# ==================================================================================================

SHOWN = ("update_interval", "target_update_interval")  # as rounded, printed at a run's start


def complete(args: Args) -> Args:
    """Returns args with the presets where unset; bad input ends in one sentence."""
    presets = PRESETS[family(args.env)]
    if args.scorer:
        args = with_presets(args, presets)
    else:
        for name in presets:
            if getattr(args, name) is not None:
                fail(f"{flag(name)} {getattr(args, name)} needs --scorer")
        if args.follower_importance_weights:
            fail("--follower-importance-weights needs --scorer")
    check_numbers(
        args,
        gamma=(0, 1),
        epsilon_start=(0, 1),
        epsilon_end=(0, 1),
        per_alpha=(0, 1),
        per_beta=(0, 1),
        total_timesteps=(1, max(1, args.num_envs) * 2**30),
        sequence_length=(2, 10_000),
        burn_in=(0, args.sequence_length - 2),
        n_step=(1, args.sequence_length),
        learning_starts=(args.sequence_length * args.num_envs, 2**62),
        buffer_size=(1, 2**31 - 1),
    )
    if args.learning_starts >= args.total_timesteps:
        fail(
            f"--total-timesteps {args.total_timesteps} must be more than --learning-starts "
            f"{args.learning_starts}, before which nothing is learned"
        )
    interval = max(1, round(args.update_interval / args.num_envs)) * args.num_envs
    period = max(1, round(args.target_update_interval / interval)) * interval
    least = 2 * args.sequence_length * args.num_envs + interval
    if args.buffer_size < least:
        fail(
            f"--buffer-size {args.buffer_size} must be at least {least}, to hold two sequences of "
            f"--sequence-length {args.sequence_length} per environment and what an update adds"
        )
    return replace(args, update_interval=interval, target_update_interval=period)


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

"""SCORER DQN: Q-learning as a Stackelberg game between perception and control, and the DQN it is compared with.

Perception f_phi (follower, fast) minimises the variance of the Bellman errors, control Q_theta (leader, slow) their
mean square: "The game" below is the whole method. Without --scorer, the same layers have one loss and one optimiser.
Paper: Martinez et al., "Stackelberg Coupling of Online Representation Learning and RL", ICLR 2026, section 4.

    python scorer_dqn.py --env Breakout-MinAtar --scorer --total-timesteps 1e6     # a minute on a laptop
    python scorer_dqn.py --env Breakout-MinAtar --scorer --num-seeds 30            # the paper's run, for a GPU
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "chex>=0.1.92", "gymnax==1.0.1", "six>=1.17",
#   "tyro>=1.0.17", "tqdm>=4.68", "safetensors>=0.8", "wandb>=0.31"]
# ///
import difflib, io, json, os, signal, sys, time
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
import chex
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

# ------------------------------ Arguments -----------------------------------------------------------------------------
Count = Annotated[int, tyro.constructors.PrimitiveConstructorSpec(  # a whole number, also when written as 1e6
    nargs=1, metavar="INT", instance_from_str=lambda words: int(repr(float(words[0])).removesuffix(".0")),
    is_instance=lambda x: isinstance(x, int), str_from_instance=lambda x: [str(x)])]

@dataclass
class Args:
    # Experiment
    env: str = "Breakout-MinAtar"  # gymnax environment with a box observation and discrete actions
    seed: Count = 0  # first seed
    num_seeds: Count = 1  # seeds trained side by side in one program: seed, seed + 1, ...
    total_timesteps: Count | None = None  # environment steps per seed, rounded up (MinAtar 1e8, else 1e6)
    # The game
    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss, one optimiser
    follower_loss: Literal["variance", "msbe"] | None = None  # the follower's objective (variance)
    follower_learning_rate: tuple[float, ...] | None = None  # initial (MinAtar 5e-4, else 3e-4); several: a sweep
    learning_rate: float = 1e-4  # initial rate of the leader, or of the baseline
    leader_decay_power: float | None = None  # the leader's rate falls as (1 - progress)^power (1)
    ablation: Literal["inverted-roles", "synchronous", "per-layer-lr"] | None = None  # see "Ablations"
    # Algorithm
    double: bool = False  # the online control network chooses the target's action
    dueling: bool = False  # state-value and advantage heads
    num_envs: Count | None = None  # environments per seed; one update per step of all (MinAtar 128, else 10)
    buffer_size: Count | None = None  # replay per seed in transitions, whole --num-envs (MinAtar 1e5, else 5e4)
    batch_size: Count = 64  # transitions per batch; SCORER draws two batches per update
    learning_starts: Count | None = None  # environment steps before the first update (MinAtar 1e4, else 1e3)
    target_update_interval: Count | None = None  # environment steps, rounded to updates (MinAtar 16000, else 1000)
    tau: float = 1.0  # share of the online parameters in a target update
    gamma: float = 0.99  # discount per step
    epsilon_start: float = 1.0  # initial probability of a random action
    epsilon_end: float = 0.01  # final probability of a random action
    epsilon_steps: Count = 250_000  # environment steps over which it falls linearly
    max_grad_norm: float | None = None  # global-norm clip, for each player alone (MinAtar 0.5, else 0.3)
    bootstrap_at_timeout: bool = True  # off: a time-out counts as a termination, as in the paper's experiments
    # Networks
    hidden_dim: Count | None = None  # width of every hidden layer (MinAtar 128, else 64)
    perception_layers: Count | None = None  # hidden layers of the perception network (MinAtar 2, else 1)
    activation: Literal["relu", "tanh"] | None = None  # of every hidden layer (MinAtar relu, else tanh)
    l1_norm: bool | None = None  # divide observation and latent by their mean absolute value (MinAtar True, else False)
    diagnostics: bool = False  # also record losses, Bellman-error mean and variance, srank and parameter norms
    # Output, and how to run
    runs_dir: Path = Path("runs")  # the folder that gets one folder per run
    save_model: bool = False  # write model.safetensors, all seeds, names perception/... and control/...
    checkpoint_every_minutes: float | None = None  # keep the newest training state, written so often and at Ctrl-C
    resume: Path | None = None  # continue the run in this folder, with its arguments, as a new run
    compilation_cache: bool = True  # keep compiled programs in the user's cache folder: a second start is quick
    distributed: bool = False  # share the seeds among a job's processes (Slurm, MPI, Kubernetes, or JAX_... variables)
    track: bool = False  # log to Weights & Biases
    wandb_mode: Literal["online", "offline"] = "online"  # offline needs no account; WANDB_PROJECT names the project

OUTPUT = "runs_dir save_model checkpoint_every_minutes resume compilation_cache distributed track wandb_mode".split()
NAMED, SHOWN = ("double", "dueling", "scorer", "ablation"), ("target_update_interval",)  # in a run's name; at its start
GAME = ("follower_loss", "follower_learning_rate", "leader_decay_power")  # arguments that the baseline lacks
PRESETS = {  # by environment family, from the paper's tables
    "MinAtar": dict(total_timesteps=100_000_000, num_envs=128, buffer_size=100_000, learning_starts=10_000,
                    target_update_interval=16_000, max_grad_norm=0.5, l1_norm=True, hidden_dim=128, perception_layers=2,
                    activation="relu", follower_loss="variance", follower_learning_rate=5e-4, leader_decay_power=1.0),
    "control": dict(total_timesteps=1_000_000, num_envs=10, buffer_size=50_000, learning_starts=1_000,
                    target_update_interval=1_000, max_grad_norm=0.3, l1_norm=False, hidden_dim=64, perception_layers=1,
                    activation="tanh", follower_loss="variance", follower_learning_rate=3e-4, leader_decay_power=1.0),
}

def fail(message: str):
    """Ends the program with one sentence on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)

def check_numbers(args, limits: dict):
    """Ends in one sentence where a number of args is outside its limits, or, without any, not positive or too large."""
    for name, value in vars(args).items():
        flag, (low, high) = f"--{name.replace('_', '-')}", limits.get(name, (1e-37, 1e37))  # within float32
        accepted = f"from {low} to {high}" if name in limits else "positive and below 1e37"
        if value == ():
            fail(f"{flag} needs a value")
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) in (int, float) and not low <= number <= high:
                fail(f"{flag} {number} must be {accepted}")

def free_slot(key, filled):
    """gymnax's while_sample_slots (Asterix) without its loop of unknown length, on which a GPU's own loop hangs."""
    order = jax.random.permutation(key, jnp.arange(8))
    free = filled[order[1:]] == 0  # gymnax does not try the first either
    return order[jnp.where(free.any(), 1 + free.argmax(), 7)], free.any().astype(int)

def resolve(args: Args):
    """args with the environment family's preset where unset, env, env_params; bad input ends in one sentence."""
    import gymnax.wrappers  # starts JAX's devices, so not before main has set them up
    gymnax.environments.minatar.asterix.while_sample_slots = free_slot
    preset = dict(PRESETS["MinAtar" if args.env.endswith("-MinAtar") else "control"])
    if args.ablation and args.scorer == (args.ablation == "per-layer-lr"):
        fail(f"--ablation {args.ablation} {'excludes' if args.scorer else 'needs'} --scorer")
    lacking = {"inverted-roles": (), "synchronous": GAME[:2], "per-layer-lr": GAME[:1]}
    for name in lacking.get(args.ablation, () if args.scorer else GAME):
        if getattr(args, name) is not None:
            why = f"has no meaning with --ablation {args.ablation}" if args.ablation else "needs --scorer"
            fail(f"--{name.replace('_', '-')} {getattr(args, name)} {why}")
        del preset[name]
    args = replace(args, **{name: value for name, value in preset.items() if getattr(args, name) is None})
    check_numbers(args, dict(
        gamma=(0, 1), epsilon_start=(0, 1), epsilon_end=(0, 1), tau=(1e-9, 1), num_seeds=(1, 2**31),
        seed=(0, max(0, 2**32 - args.num_seeds)), learning_starts=(0, args.total_timesteps - 1),
        total_timesteps=(1, max(1, args.num_envs) * 2**30),
        buffer_size=(-(-args.batch_size // max(1, args.num_envs)) * args.num_envs, 2**31 - 1)))
    args.target_update_interval = max(1, round(args.target_update_interval / args.num_envs)) * args.num_envs
    try:
        env, env_params = gymnax.make(args.env)
    except (ValueError, OSError) as error:  # unknown, or one that downloads its data
        near = difflib.get_close_matches(args.env, gymnax.registered_envs, cutoff=0.4) or gymnax.registered_envs
        fail(f"--env {args.env} cannot be made ({error}); near names: {', '.join(near)}")
    kinds = [type(space(env_params)).__name__ for space in (env.observation_space, env.action_space)]
    if kinds != ["Box", "Discrete"]:
        fail(f"--env {args.env} has {' and '.join(kinds)} as observation and action space; needed: Box and Discrete")
    return args, gymnax.wrappers.LogWrapper(gymnax.wrappers.FlattenObservationWrapper(env)), env_params

# ------------------------------ Networks ------------------------------------------------------------------------------
class Players(NamedTuple):
    perception: Any  # f_phi, the follower's: network, parameters, optimiser or its state
    control: Any  # Q_theta, the leader's

def dense(features, gain=np.sqrt(2)):
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(gain))

def l1_norm(x):
    """x [..., features] over its mean absolute value; the paper says unit L1 norm, but its results need the mean."""
    return x / jnp.maximum(jnp.abs(x).mean(axis=-1, keepdims=True), 1e-8)

class Perception(nn.Module):
    """f_phi: observation [..., features] -> latent z [..., hidden_dim] (table "SCORER DQN")."""
    args: Args
    @nn.compact
    def __call__(self, obs):
        normalize = l1_norm if self.args.l1_norm else lambda x: x
        z = normalize(obs.astype(jnp.float32))
        for _ in range(self.args.perception_layers):
            z = getattr(nn, self.args.activation)(dense(self.args.hidden_dim)(z))
        return normalize(z)

class Control(nn.Module):
    """Q_theta: latent z [..., hidden_dim] -> action values [..., num_actions] (table "SCORER DQN")."""
    args: Args
    num_actions: int
    @nn.compact
    def __call__(self, z):
        hidden = getattr(nn, self.args.activation)(dense(self.args.hidden_dim)(z))
        self.sow("intermediates", "penultimate", hidden)
        advantage = dense(self.num_actions, gain=0.01)(hidden)
        value = dense(1, gain=0.01)(hidden) - advantage.mean(axis=-1, keepdims=True) if self.args.dueling else 0.0
        return value + advantage

# ------------------------------ The game ------------------------------------------------------------------------------
class Transition(NamedTuple):
    obs: jax.Array  # [..., features]
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # the true next observation, also where the environment has reset itself
    terminated: jax.Array  # no value follows; a time-out is not a termination (see --bootstrap-at-timeout)

def q_values(networks: Players, phi, theta, obs):
    """Q_theta(f_phi(s), .) [..., actions] of obs [..., features]."""
    return networks.control.apply({"params": theta}, networks.perception.apply({"params": phi}, obs))

def bellman_target(networks, params: Players, target: Players, batch: Transition, gamma, double):
    """Y = r + gamma (1 - terminated) Q_target(f_target(s'), a*), [batch]; a* is the target's own best action, or with
    Double the online control network's on target features (Algorithm 1, lines 11 and 14)."""
    z = networks.perception.apply({"params": target.perception}, batch.next_obs)
    values = networks.control.apply({"params": target.control}, z)
    selector = networks.control.apply({"params": params.control}, z) if double else values
    best = jnp.sum(values * jax.nn.one_hot(selector.argmax(axis=-1), values.shape[-1]), axis=-1)
    chex.assert_equal_shape([best, batch.reward, batch.terminated])
    return batch.reward + gamma * (1.0 - batch.terminated) * best

def bellman_error(phi, theta, networks, batch: Transition, target):
    """delta_j = Y_j - Q_theta(f_phi(s_j), a_j), [batch]; the target Y carries no gradient."""
    q = q_values(networks, phi, theta, batch.obs)
    q = jnp.sum(q * jax.nn.one_hot(batch.action, q.shape[-1]), axis=-1)  # a GPU does this faster than a look-up
    chex.assert_equal_shape([q, target])
    return jax.lax.stop_gradient(target) - q

def follower_loss(phi, theta, networks, batch, target):
    """Var_j[delta_j], the population variance over the batch: what perception minimises over phi."""
    return jnp.var(bellman_error(phi, theta, networks, batch, target))

def leader_loss(phi, theta, networks, batch, target):
    """mean_j[delta_j^2], the MSBE over the batch: what control minimises over theta, and the baseline over both."""
    return jnp.mean(jnp.square(bellman_error(phi, theta, networks, batch, target)))

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

# ------------------------------ Ablations -----------------------------------------------------------------------------
def ablated_update(inverted, objective, networks, optimizers, params: Players, opt_state, batch, target):
    """inverted-roles: control responds first, on the follower's loss, then perception leads on the MSBE.
    synchronous: both step on the MSBE from the same old parameters, each on its own sample."""
    new, new_opt_state = list(params), list(opt_state)
    for turn, player in enumerate((1, 0) if inverted else (0, 1)):
        sample = jax.tree.map(lambda x: x[turn], (batch, target))
        loss, held = (objective if turn == 0 else leader_loss, new) if inverted else (leader_loss, params)
        new[player], new_opt_state[player] = step(player, loss, networks, optimizers, held, opt_state, sample)
    return Players(*new), Players(*new_opt_state)

# ------------------------------ Training ------------------------------------------------------------------------------
class State(NamedTuple):
    """All of one seed's training, saved whole in a checkpoint; random keys are derived from seed and step."""
    seed: jax.Array
    follower_rate: jax.Array  # the follower's initial learning rate
    params: Players
    target: Players
    opt_state: Any
    replay: Transition  # ring buffer [rows, num_envs, ...]
    batch: Transition  # of the next update [players, batch, ...], drawn before it: so a GPU acts and learns at once
    env_state: Any  # [num_envs, ...]
    obs: jax.Array  # [num_envs, features]
    episodes: jax.Array  # completed so far, by all environments together
    curves: dict  # each [points], NaN ahead of training

def make_train(args: Args, env, env_params):
    """One seed's training: init(seed, follower_rate) -> State, block(state, index) -> State after that block and its
    mean return, measure(state, index) -> State with that block's diagnostics, the environment steps at each block's
    end, and blocks per point of the curves. A step is one step of all environments beside one update."""
    num_actions = env.action_space(env_params).n
    networks = Players(Perception(args), Control(args, num_actions))
    objective = leader_loss if args.follower_loss == "msbe" else follower_loss
    epsilon = optax.linear_schedule(args.epsilon_start, args.epsilon_end, args.epsilon_steps / args.num_envs)
    rows = args.buffer_size // args.num_envs
    obs_dtype = bool if args.env.endswith("-MinAtar") else None  # binary channels: a quarter of the memory
    period = min(args.target_update_interval // args.num_envs, 2**30)  # updates between target updates
    first_step = max(1, -(-args.learning_starts // args.num_envs))
    steps_left = max(1, -(-args.total_timesteps // args.num_envs) - first_step)
    block_steps = max(n for n in range(1, min(256, steps_left) + 1) if period % n == 0)  # targets change between blocks
    blocks_per_point = max(1, steps_left // block_steps // 1000)  # about 1,000 points on a curve
    num_points = -(-steps_left // (block_steps * blocks_per_point))
    num_updates = num_points * blocks_per_point * block_steps
    timesteps = np.arange(first_step + block_steps, first_step + num_updates + 1, block_steps) * args.num_envs
    clip = optax.clip_by_global_norm(args.max_grad_norm)
    def adam(learning_rate, power=1.0):
        """Adam whose rate falls to exactly 0 over the updates made."""
        return optax.adam(lambda count: learning_rate * (jnp.maximum(num_updates - count, 0) / num_updates) ** power)
    def optimizers(follower_rate):
        """Each player's optimiser, with a clip of its own, or the baseline's only one."""
        fast, slow = adam(follower_rate), adam(args.learning_rate, args.leader_decay_power or 1.0)
        if args.ablation == "per-layer-lr":
            slow = optax.partition({"fast": fast, "slow": slow}, Players("fast", "slow"))
        order = {"inverted-roles": (slow, fast), "synchronous": (slow, slow)}.get(args.ablation, (fast, slow))
        return Players(*(optax.chain(clip, one) for one in order)) if args.scorer else optax.chain(clip, slow)
    targets = partial(bellman_target, networks, gamma=args.gamma, double=args.double)
    game = partial(ablated_update, args.ablation == "inverted-roles") if args.ablation else scorer_update
    update = partial(game, objective) if args.scorer else baseline_update
    def random(seed, stream, index=0):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), index)
    def draw(key, steps):
        """All randomness of `steps` at once (many small random kernels are slow), each leaf [steps, ...]."""
        keys, shape = jax.random.split(key, 4), (len(steps), args.num_envs)
        held = (jnp.minimum(steps + 1, rows) * args.num_envs)[:, None, None]  # transitions in the replay by then
        return dict(explore=jax.random.uniform(keys[0], shape),
                    action=jax.random.randint(keys[1], shape, 0, num_actions),
                    env=jax.random.split(keys[2], shape),
                    sample=jax.random.randint(keys[3], (len(steps), 1 + args.scorer, args.batch_size), 0, held))
    def act(state: State, step_and_noise):
        """One epsilon-greedy step in every environment, stored in the replay, and the next update's batch out of it."""
        step, noise = step_and_noise
        params = jax.lax.optimization_barrier(state.params)  # or XLA merges their products with learning's
        q = q_values(networks, *params, state.obs)  # [num_envs, actions]
        action = jnp.where(noise["explore"] < epsilon(step), noise["action"], q.argmax(axis=-1))
        obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            noise["env"], state.env_state, action, env_params)
        done = terminated | truncated
        row = Transition(state.obs, action, reward.astype(jnp.float32), info["final_observation"].astype(obs_dtype),
                         terminated if args.bootstrap_at_timeout else done)
        replay = jax.tree.map(lambda ring, x: jax.lax.dynamic_update_index_in_dim(ring, x, step % rows, axis=0),
                              state.replay, row)
        return state._replace(replay=replay, batch=sample(replay, noise["sample"]), env_state=env_state,
                              obs=obs.astype(obs_dtype), episodes=state.episodes + done.sum()), None
    def sample(replay: Transition, index):
        """Transitions at `index` into the replay, flat over rows and environments."""
        return jax.tree.map(lambda ring: ring.reshape(-1, *ring.shape[2:])[index], replay)
    def act_and_learn(optimizer, state: State, step_and_noise):
        target = targets(state.params, state.target, state.batch)
        params, opt_state = update(networks, optimizer, state.params, state.opt_state, state.batch, target)
        return act(state, step_and_noise)[0]._replace(params=params, opt_state=opt_state), None
    def diagnose(params: Players, batch, target) -> dict:
        """Losses and representation on transitions of the replay, [2048]."""
        delta = bellman_error(*params, networks, batch, target)
        z = networks.perception.apply({"params": params.perception}, batch.obs)
        _, kept = networks.control.apply({"params": params.control}, z, mutable="intermediates")
        singular = jnp.linalg.svd(kept["intermediates"]["penultimate"][0], compute_uv=False)
        return dict(follower_loss=objective(*params, networks, batch, target), bellman_error_mean=delta.mean(),
                    leader_loss=leader_loss(*params, networks, batch, target), bellman_error_variance=delta.var(),
                    srank=1.0 + jnp.sum(jnp.cumsum(singular) < 0.99 * singular.sum()),  # of 99 % of the sum
                    perception_norm=optax.tree.norm(params.perception), control_norm=optax.tree.norm(params.control))
    def note(state: State, index, values: dict) -> State:
        """State with values of block `index` in its curves."""
        point = index // blocks_per_point
        return state._replace(curves=state.curves | {n: state.curves[n].at[point].set(v) for n, v in values.items()})
    def measure(state: State, index) -> State:
        held = jnp.minimum(first_step + (index + 1) * block_steps, rows) * args.num_envs
        batch = sample(state.replay, jax.random.randint(random(state.seed, 2, index), (2048,), 0, held))
        return note(state, index, diagnose(state.params, batch, targets(state.params, state.target, batch)))
    def init(seed, follower_rate) -> State:
        reset_key, phi_key, theta_key, noise_key = jax.random.split(random(seed, 0), 4)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(reset_key, args.num_envs), env_params)
        obs, steps, zeros = obs.astype(obs_dtype), jnp.arange(first_step), jnp.zeros(args.num_envs)
        z, phi = networks.perception.init_with_output(phi_key, obs)
        params = Players(phi["params"], networks.control.init(theta_key, z)["params"])
        optimizer = optimizers(follower_rate)
        opt_state = Players(*map(lambda o, p: o.init(p), optimizer, params)) if args.scorer else optimizer.init(params)
        row = Transition(obs, zeros.astype(int), zeros, obs, zeros.astype(bool))
        replay = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), row)
        batch = sample(replay, jnp.zeros((1 + args.scorer, args.batch_size), int))  # of zeros yet
        state = State(seed, follower_rate, params, params, opt_state, replay, batch, env_state, obs, jnp.int32(0), {})
        extra = jax.eval_shape(diagnose, params, row, zeros) if args.diagnostics else ()
        curves = {name: jnp.full(num_points, jnp.nan) for name in ("returns", "episodes", *extra)}
        return jax.lax.scan(act, state._replace(curves=curves), (steps, draw(noise_key, steps)))[0]
    def block(state: State, index):
        steps = first_step + index * block_steps + jnp.arange(block_steps)
        learn = partial(act_and_learn, optimizers(state.follower_rate))
        state, _ = jax.lax.scan(learn, state, (steps, draw(random(state.seed, 1, index), steps)))
        due = (index + 1) * block_steps % period == 0
        state = state._replace(target=optax.incremental_update(state.params, state.target, due * args.tau))
        log = state.env_state
        mean = jnp.where(log.returned_episode_valid, log.returned_episode_returns, jnp.nan).mean()
        return note(state, index, dict(returns=mean, episodes=state.episodes)), mean
    return init, block, measure, timesteps, blocks_per_point

# ------------------------------ The run ------------------------------------------------------------------------------
# A step is some 100 small GPU kernels: let the GPU run the whole loop by itself, and independent kernels side by side.
GPU_FLAGS = "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_command_buffer_scheduling_mode=CONCURRENT "
gather = partial(process_allgather, tiled=True)  # arrays [seeds, ...], also in trees, of all processes -> numpy

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
        fail(f"--resume {path} is no usable checkpoint of this script: " + str(error).strip().partition("\n")[0])

def main():
    args = tyro.cli(Args, description=__doc__)
    if args.resume:
        given = {word[2:].split("=")[0].removeprefix("no-").replace("-", "_") for word in sys.argv if word[:2] == "--"}
        if given - {*OUTPUT}:
            fail(f"--resume {args.resume} continues that run with its own arguments; give only output flags beside it")
        try:
            args = Args(**json.loads((args.resume / "args.json").read_text()) | {n: getattr(args, n) for n in OUTPUT})
        except (OSError, ValueError, TypeError) as error:
            fail(f"--resume {args.resume} is not a run of this script: {error}")
    os.environ["XLA_FLAGS"] = GPU_FLAGS + os.environ.get("XLA_FLAGS", "")
    if "device_count" not in os.environ["XLA_FLAGS"]:  # without a GPU, a thread per seed
        jax.config.update("jax_num_cpu_devices", min(max(1, args.num_seeds * np.size(args.follower_learning_rate)), 64))
    if args.compilation_cache and not jax.config.jax_compilation_cache_dir:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(caches, "scorer")))
    if args.distributed:
        given = {name: os.environ.get(f"JAX_{name.upper()}") for name in ("num_processes", "process_id")}
        try:
            jax.distributed.initialize(**{name: int(value) for name, value in given.items() if value})
        except (ValueError, RuntimeError) as error:
            fail(f"--distributed finds no cluster and no JAX_COORDINATOR_ADDRESS and so on: {error}")
    args, env, env_params = resolve(args)
    init, block, measure, timesteps, blocks_per_point = make_train(args, env, env_params)
    rates = np.atleast_1d(args.follower_learning_rate or 0.0)  # several: a sweep, every rate's seeds side by side
    parts = [name if value is True else value for name in NAMED if (value := getattr(args, name))]
    parts += ["baseline"] * (not args.scorer) + ["msbe"] * (args.follower_loss == "msbe")
    names = ["-".join(parts + [f"follower{rate:g}"] * (len(rates) > 1)) for rate in rates]
    if len(rates) > 1 and (len({*names}) < len(names) or args.checkpoint_every_minutes or args.track):
        fail("--follower-learning-rate with several values needs different ones, no checkpoints and no --track")
    seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.uint32)
    processes, lead = jax.process_count(), jax.process_index() == 0
    share, rest = divmod(len(seeds) * len(rates), processes)
    if rest:
        fail(f"--num-seeds {args.num_seeds}, times rates, must be a multiple of the number of processes, {processes}")
    width = max(n for n in range(1, jax.local_device_count() + 1) if share % n == 0)
    devices = np.array(jax.devices()).reshape(processes, -1)[:, :width].ravel()
    mesh, split, same = jax.sharding.Mesh(devices, "seeds"), jax.P("seeds"), jax.P()
    together = None if devices[0].platform == "cpu" else share // width  # CPUs batch environments badly
    def all_seeds(function, *values, specs, **options):  # devices split the seeds and never communicate
        def part(seeds, *index):
            return jax.lax.map(lambda seed: function(seed, *index), seeds, batch_size=together)
        mapped = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
        return jax.jit(mapped, **options).lower(*values).compile()
    members = np.tile(seeds, len(rates)), np.repeat(rates.astype(np.float32), len(seeds))
    members = jax.device_put(members, jax.NamedSharding(mesh, split))
    done, seconds = 0, 0.0
    if args.resume:
        state, done, seconds = restore(args.resume / "checkpoint.npz", jax.eval_shape(jax.vmap(init), *members))
        state = jax.device_put(state, members[0].sharding)
    args_of = [json.loads(json.dumps(vars(args) | dict(follower_learning_rate=rate or None), default=str))
               for rate in rates.tolist()]  # each run's
    stem, now = Path(__file__).stem, f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    runs = [args.runs_dir / f"{stem}__{args.env}__{name}__s{args.seed}__{now}" for name in names]
    if lead:
        try:
            for run, its_args in zip(runs, args_of):
                run.mkdir(parents=True)
                save(run / "args.json", lambda file: file.write(json.dumps(its_args, indent=2).encode()))
        except OSError as error:
            fail(f"--runs-dir {args.runs_dir} cannot take a new run: {error}")
        shown = ", ".join(f"{name.replace('_', ' ')} {getattr(args, name):,}" for name in SHOWN)
        print(*runs, f"{timesteps[-1]:,} environment steps, {shown}; {len(members[0])} seeds on {len(devices)} x "
              f"{devices[0].device_kind}; compiling", sep="\n", flush=True)
    if lead and args.track:
        import wandb  # slow to import
        wandb.init(mode=args.wandb_mode, name=runs[0].name, config=args_of[0])
    stop = []
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if stop else stop.append(True))
    began = time.time()
    if not args.resume:
        state = all_seeds(lambda member: init(*member), members, specs=split)(members)
    block = all_seeds(block, state, np.int32(0), specs=(split, same), donate_argnums=0)
    if args.diagnostics:  # 50 times, as a singular value decomposition costs as much as hundreds of steps
        measure = all_seeds(measure, state, np.int32(0), specs=(split, same), donate_argnums=0)
        blocks_per_measure = blocks_per_point * max(1, len(timesteps) // blocks_per_point // 50)
    compile_seconds = time.time() - began
    terminal, previous, saved = sys.stdout.isatty(), None, time.time()
    began = saved - seconds
    bar = tqdm(total=int(timesteps[-1]), initial=int([0, *timesteps][done]), unit="step", unit_scale=True,
               disable=not lead, file=sys.stdout if terminal else io.StringIO())
    for index in range(done, len(timesteps)):
        state, mean = block(state, np.int32(index))
        point = (done := index + 1) % blocks_per_point == 0
        if args.diagnostics and done % blocks_per_measure == 0:
            state = measure(state, np.int32(index))
        if processes > 1 and not point:
            continue  # processes look up from training only together
        bar.set_postfix_str(f"return {gather(previous).mean():.2f}" if previous is not None else "")
        previous = mean  # shown one block later, so that the device never waits for the host
        tenths = 10 * bar.n // bar.total
        bar.update(int(timesteps[index]) - bar.n)
        if lead and not terminal and 10 * bar.n // bar.total > tenths:
            print(bar, flush=True)
        if args.track and point:
            means = {name: gather(curve)[:, index // blocks_per_point].mean() for name, curve in state.curves.items()}
            wandb.log(means, step=int(timesteps[index])) if lead else None
        due = args.checkpoint_every_minutes and time.time() - saved > 60 * args.checkpoint_every_minutes
        stopped, due = gather(np.array([[bool(stop), bool(due)]])).any(axis=0)
        if due or stopped and args.checkpoint_every_minutes:
            leaves = jax.tree.leaves((gather(state), done, time.time() - began))
            save(runs[0] / "checkpoint.npz", lambda file: np.savez(file, *leaves)) if lead else None
            saved = time.time()
        if stopped:
            break
    bar.close()
    ends = timesteps[blocks_per_point - 1 : done : blocks_per_point]  # of whole points
    curves, params = gather((state.curves, flatten_dict(state.params._asdict(), sep="/") if args.save_model else {}))
    meta = dict(schema=1, script=stem, device=devices[0].device_kind, num_devices=len(devices),
                seconds=time.time() - began, compile_seconds=compile_seconds, complete=done == len(timesteps),
                versions={n: version(n) for n in "jax jaxlib flax optax gymnax navix".split() if n in sys.modules})
    for number, run in enumerate(runs if lead and len(ends) else []):
        mine = slice(number * len(seeds), (number + 1) * len(seeds))
        record = {name: curve[mine, : len(ends)] for name, curve in curves.items()} | dict(timesteps=ends, seeds=seeds)
        record["meta"] = json.dumps(meta | dict(args=args_of[number]))
        save(run / "results.npz", lambda file: np.savez_compressed(file, **record))
        if model := {name: value[mine] for name, value in params.items()}:
            save(run / "model.safetensors", lambda file: file.write(to_safetensors(model)))
        last = record["returns"][:, ends > 0.9 * ends[-1]].mean()
        print(f"mean return over the last 10 %{'' if meta['complete'] else ', stopped'}: {last:.2f}; saved in {run}")
    if lead and not len(ends):
        print(f"stopped before the first point of the curves; {runs[0]} holds no results", flush=True)
    sys.exit(0 if done == len(timesteps) else 130)

if __name__ == "__main__":
    main()

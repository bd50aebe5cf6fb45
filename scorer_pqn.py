"""SCORER PQN: the game between perception and control without a replay or a target network, and the PQN to compare.

The parallelised Q-network (Gallici et al., ICLR 2025) acts for a rollout in many environments, computes lambda-returns
once, and learns from minibatches of that rollout; LayerNorm keeps it stable. With --scorer each minibatch is one round:
perception f_phi (follower, fast) steps on the variance of the errors, then control Q_theta (leader, slow) on their mean
square. Paper: Martinez et al., "Stackelberg Coupling of Online Representation Learning and RL", ICLR 2026, section 4.

    python scorer_pqn.py --env Breakout-MinAtar --scorer --total-timesteps 1e6     # a minute on a laptop
    python scorer_pqn.py --env Breakout-MinAtar --scorer --num-seeds 30            # the paper's run, for a GPU
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
    total_timesteps: Count | None = None  # environment steps per seed, rounded up (MinAtar 1e8, else 5e5)
    # The game
    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss, one optimiser
    follower_loss: Literal["variance", "msbe"] | None = None  # the follower's objective (variance)
    follower_learning_rate: tuple[float, ...] | None = None  # initial (MinAtar 5e-4, else 2e-3); several: a sweep
    learning_rate: float | None = None  # initial rate of the leader, or of the baseline (MinAtar 2.5e-4, else 1e-3)
    leader_decay_power: float | None = None  # the leader's rate falls as (1 - progress)^power (1)
    # Algorithm
    num_envs: Count | None = None  # environments per seed (MinAtar 128, else 10)
    num_steps: Count | None = None  # steps of each environment in a rollout (MinAtar 32, else 128)
    num_epochs: Count | None = None  # passes over a rollout (MinAtar 2, else 4)
    num_minibatches: Count | None = None  # per epoch; one update each (MinAtar 32, else 16)
    gamma: float = 0.99  # discount per step
    td_lambda: float | None = None  # of the lambda-returns: 0 is one step, 1 the rollout (MinAtar 0.65, else 0.95)
    decay_share: float | None = None  # of training, after which the learning rates are 0 (MinAtar 0.5, else 1)
    epsilon_start: float = 1.0  # initial probability of a random action
    epsilon_end: float | None = None  # final probability of a random action (MinAtar 0.01, else 0.05)
    epsilon_share: float | None = None  # of training, over which it falls linearly (MinAtar 0.4, else 0.5)
    max_grad_norm: float | None = None  # global-norm clip, for each player alone (MinAtar 5, else 0.5)
    bootstrap_at_timeout: bool = True  # off: a time-out counts as a termination
    # Networks
    latent_dim: Count | None = None  # width of perception (MinAtar 128, else 64)
    hidden_dim: Count | None = None  # width of control's hidden layer (MinAtar 64, else 32)
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
NAMED, SHOWN = ("scorer",), ("num_steps", "num_minibatches")  # in a run's name; at its start
GAME = ("follower_loss", "follower_learning_rate", "leader_decay_power")  # arguments that the baseline lacks
PRESETS = {  # by environment family. MinAtar: the paper's tables; control: its script's, but for rates and updates
    "MinAtar": dict(total_timesteps=100_000_000, num_envs=128, num_steps=32, num_epochs=2, num_minibatches=32,
                    td_lambda=0.65, learning_rate=2.5e-4, decay_share=0.5, epsilon_end=0.01, epsilon_share=0.4,
                    max_grad_norm=5.0, latent_dim=128, hidden_dim=64,
                    follower_loss="variance", follower_learning_rate=5e-4, leader_decay_power=1.0),
    "control": dict(total_timesteps=500_000, num_envs=10, num_steps=128, num_epochs=4, num_minibatches=16,
                    td_lambda=0.95, learning_rate=1e-3, decay_share=1.0, epsilon_end=0.05, epsilon_share=0.5,
                    max_grad_norm=0.5, latent_dim=64, hidden_dim=32,
                    follower_loss="variance", follower_learning_rate=2e-3, leader_decay_power=1.0),
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
    for name in () if args.scorer else GAME:
        if getattr(args, name) is not None:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)} needs --scorer")
        del preset[name]
    args = replace(args, **{name: value for name, value in preset.items() if getattr(args, name) is None})
    check_numbers(args, dict(
        gamma=(0, 1), td_lambda=(0, 1), epsilon_start=(0, 1), epsilon_end=(0, 1), epsilon_share=(1e-9, 1),
        decay_share=(1e-9, 1), seed=(0, max(0, 2**32 - args.num_seeds)), num_seeds=(1, 2**31),
        total_timesteps=(1, max(1, args.num_envs) * max(1, args.num_steps) * 2**30 // max(
            1, args.num_steps, args.num_epochs * args.num_minibatches))))
    size = args.num_envs * args.num_steps
    if size % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} must divide the {size} steps of a rollout")
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

class Perception(nn.Module):
    """f_phi: observation [..., features] -> latent z [..., latent_dim] (table "SCORER PQN", option A)."""
    args: Args
    @nn.compact
    def __call__(self, obs):
        z = nn.Dense(self.args.latent_dim)(obs.astype(jnp.float32))
        return nn.LayerNorm()(nn.relu(nn.LayerNorm()(z)))

class Control(nn.Module):
    """Q_theta: latent z [..., latent_dim] -> action values [..., num_actions] (table "SCORER PQN")."""
    args: Args
    num_actions: int
    @nn.compact
    def __call__(self, z):
        hidden = nn.relu(nn.LayerNorm()(nn.Dense(self.args.hidden_dim)(z)))
        self.sow("intermediates", "penultimate", hidden)
        return nn.Dense(self.num_actions)(hidden)

# ------------------------------ The game ------------------------------------------------------------------------------
class Transition(NamedTuple):
    obs: jax.Array  # [..., features]
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # the true next observation, also where the environment has reset itself
    terminated: jax.Array  # no value follows; a time-out is not a termination (see --bootstrap-at-timeout)
    done: jax.Array  # the episode ends here, by termination or time-out

def q_values(networks: Players, phi, theta, obs):
    """Q_theta(f_phi(s), .) [..., actions] of obs [..., features]."""
    return networks.control.apply({"params": theta}, networks.perception.apply({"params": phi}, obs))

def lambda_returns(rollout: Transition, next_value, gamma, td_lambda):
    """Targets [steps, envs] of a rollout [steps, envs, ...] from next_value = max_a Q(s', a) at the true next
    observation. Backwards, G = r + gamma ((1 - lambda) next_value + lambda G'), and where an episode or the rollout
    ends, r + gamma (1 - terminated) next_value."""
    chex.assert_equal_shape([rollout.reward, rollout.terminated, rollout.done, next_value])
    def backward(later, step):
        reward, terminated, done, value = step
        future = jnp.where(done, (1.0 - terminated) * value, (1.0 - td_lambda) * value + td_lambda * later)
        return (reward + gamma * future,) * 2
    steps = rollout.reward, rollout.terminated, rollout.done, next_value
    return jax.lax.scan(backward, next_value[-1], steps, reverse=True)[1]

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

# ------------------------------ Training ------------------------------------------------------------------------------
class State(NamedTuple):
    """All of one seed's training, saved whole in a checkpoint; random keys are derived from seed and step."""
    seed: jax.Array
    follower_rate: jax.Array  # the follower's initial learning rate
    params: Players
    opt_state: Any
    rollout: tuple  # the last one's Transition and targets, flat over steps and environments: what `measure` looks at
    env_state: Any  # [num_envs, ...]
    obs: jax.Array  # [num_envs, features]
    episodes: jax.Array  # completed so far, by all environments together
    curves: dict  # each [points], NaN ahead of training

def make_train(args: Args, env, env_params):
    """One seed's training: init(seed, follower_rate) -> State, block(state, index) -> State after that block and its
    mean return, measure(state, index) -> State with that block's diagnostics, the environment steps at each block's
    end, and blocks per point of the curves. A block is one rollout and the updates on it."""
    num_actions = env.action_space(env_params).n
    networks = Players(Perception(args), Control(args, num_actions))
    objective = leader_loss if args.follower_loss == "msbe" else follower_loss
    obs_dtype = bool if args.env.endswith("-MinAtar") else None  # binary channels: a quarter of the memory
    size = args.num_steps * args.num_envs  # transitions in a rollout
    blocks_per_point = max(1, args.total_timesteps // size // 1000)  # about 1,000 points on a curve
    num_points = -(-args.total_timesteps // (size * blocks_per_point))
    num_blocks = num_points * blocks_per_point
    timesteps = size * np.arange(1, num_blocks + 1)
    num_updates = max(1, round(args.decay_share * num_blocks * args.num_epochs * args.num_minibatches))
    num_steps = num_blocks * args.num_steps
    epsilon = optax.linear_schedule(args.epsilon_start, args.epsilon_end, args.epsilon_share * num_steps)
    clip = optax.clip_by_global_norm(args.max_grad_norm)
    def radam(learning_rate, power=1.0):
        """RAdam whose rate falls to exactly 0 over --decay-share of the updates made."""
        return optax.radam(lambda count: learning_rate * (jnp.maximum(num_updates - count, 0) / num_updates) ** power)
    def optimizers(follower_rate):
        """Each player's optimiser, with a clip of its own, or the baseline's only one."""
        leader = optax.chain(clip, radam(args.learning_rate, args.leader_decay_power or 1.0))
        return Players(optax.chain(clip, radam(follower_rate)), leader) if args.scorer else leader
    update = partial(scorer_update, objective) if args.scorer else baseline_update
    def random(seed, stream, index=0):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), index)
    def act(params: Players, state: State, step_and_noise):
        """One epsilon-greedy step in every environment, and its transitions [num_envs, ...]."""
        step, noise = step_and_noise
        q = q_values(networks, *params, state.obs)  # [num_envs, actions]
        action = jnp.where(noise["explore"] < epsilon(step), noise["action"], q.argmax(axis=-1))
        obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            noise["env"], state.env_state, action, env_params)
        done = terminated | truncated
        next_obs, ends = info["final_observation"].astype(obs_dtype), terminated if args.bootstrap_at_timeout else done
        transition = Transition(state.obs, action, reward.astype(jnp.float32), next_obs, ends, done)
        episodes = state.episodes + done.sum()
        return state._replace(env_state=env_state, obs=obs.astype(obs_dtype), episodes=episodes), transition
    def diagnose(params: Players, batch, target) -> dict:
        """Losses and representation on transitions of the last rollout, [2048]."""
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
        chosen = jax.random.randint(random(state.seed, 2, index), (2048,), 0, size)
        return note(state, index, diagnose(state.params, *jax.tree.map(lambda x: x[chosen], state.rollout)))
    def init(seed, follower_rate) -> State:
        reset_key, phi_key, theta_key = jax.random.split(random(seed, 0), 3)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(reset_key, args.num_envs), env_params)
        obs, zeros = obs.astype(obs_dtype), jnp.zeros(size)
        z, phi = networks.perception.init_with_output(phi_key, obs)
        params = Players(phi["params"], networks.control.init(theta_key, z)["params"])
        optimizer = optimizers(follower_rate)
        opt_state = Players(*map(lambda o, p: o.init(p), optimizer, params)) if args.scorer else optimizer.init(params)
        many = jnp.zeros((size, obs.shape[-1]), obs.dtype)
        rollout = Transition(many, zeros.astype(int), zeros, many, zeros.astype(bool), zeros.astype(bool)), zeros
        extra = jax.eval_shape(diagnose, params, *rollout) if args.diagnostics else ()
        curves = {name: jnp.full(num_points, jnp.nan) for name in ("returns", "episodes", *extra)}
        return State(seed, follower_rate, params, opt_state, rollout, env_state, obs, jnp.int32(0), curves)
    def block(state: State, index):
        keys, shape = jax.random.split(random(state.seed, 1, index), 4), (args.num_steps, args.num_envs)
        noise = dict(explore=jax.random.uniform(keys[0], shape), env=jax.random.split(keys[2], shape),
                     action=jax.random.randint(keys[1], shape, 0, num_actions))  # at once: small kernels are slow
        steps = index * args.num_steps + jnp.arange(args.num_steps)
        state, rollout = jax.lax.scan(partial(act, state.params), state, (steps, noise))  # [steps, envs, ...]
        next_value = q_values(networks, *state.params, rollout.next_obs).max(axis=-1)
        target = lambda_returns(rollout, next_value, args.gamma, args.td_lambda)
        flat = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), (rollout, target))
        optimizer = optimizers(state.follower_rate)
        def learn(players, chosen):
            sample = jax.tree.map(lambda x: jnp.broadcast_to(x[chosen], (1 + args.scorer, *x[chosen].shape)), flat)
            return update(networks, optimizer, *players, *sample), None  # both players learn from one minibatch
        order = jax.vmap(lambda key: jax.random.permutation(key, size))(jax.random.split(keys[3], args.num_epochs))
        minibatches = order.reshape(args.num_epochs * args.num_minibatches, -1)
        (params, opt_state), _ = jax.lax.scan(learn, (state.params, state.opt_state), minibatches)
        state = state._replace(params=params, opt_state=opt_state, rollout=flat)
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

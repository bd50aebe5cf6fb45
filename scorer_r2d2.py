"""SCORER R2D2: recurrent Q-learning as a Stackelberg game, and the R2D2 it is compared with, on MiniGrid (navix).

Perception f_phi (follower, fast) is a GRU and minimises the variance of the Bellman errors, control Q_theta (leader,
slow) their mean square: "The game" below. Without --scorer, the same layers have one loss and one optimiser.
Paper: Martinez et al., "Stackelberg Coupling of Online Representation Learning and RL", ICLR 2026, section 5.

    python scorer_r2d2.py --env Navix-Empty-Random-8x8-v0 --scorer --total-timesteps 1e5  # minutes on a laptop
    python scorer_r2d2.py --env Navix-FourRooms-v0 --scorer --num-seeds 30                # the paper's run, for a GPU
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "chex>=0.1.92", "flashbax>=0.1.3",
#   "navix==0.7.4", "tyro>=1.0.17", "tqdm>=4.68", "safetensors>=0.8", "wandb>=0.31"]
# ///
import difflib, io, json, os, signal, sys, time
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
import chex
import flashbax
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
    env: str = "Navix-Empty-Random-8x8-v0"  # navix environment; the agent sees symbols, in the first person
    seed: Count = 0  # first seed
    num_seeds: Count = 1  # seeds trained side by side in one program: seed, seed + 1, ...
    total_timesteps: Count = 1_000_000  # environment steps per seed, dummy steps included, rounded up
    # The game
    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss, one optimiser
    follower_loss: Literal["variance", "msbe"] | None = None  # the follower's objective (variance)
    follower_learning_rate: tuple[float, ...] | None = None  # initial (3e-4); several: a sweep
    learning_rate: float = 1e-4  # initial rate of the leader, or of the baseline; all rates fall to 0 linearly
    leader_decay_power: float | None = None  # the leader's rate falls as (1 - progress)^power (1)
    # Algorithm
    num_envs: Count = 10  # environments per seed
    buffer_size: Count = 100_000  # replay per seed in environment steps
    batch_size: Count = 32  # sequences per batch; SCORER draws two batches per update
    sequence_length: Count = 100  # steps of a sequence, one of which starts at every fourth step
    burn_in: Count = 50  # its first steps, which only warm up the hidden state; from the others it learns
    n_step: Count = 10  # rewards in a target, fewer before an episode's or the sequence's end
    per_alpha: float = 0.6  # exponent of the priorities; 0 draws uniformly
    per_beta: float = 0.4  # initial exponent of the importance weights; rises linearly to 1 over the updates
    learning_starts: Count = 25_000  # environment steps before the first update
    update_interval: Count = 80  # environment steps per update, rounded to steps of all (table: 16; released code: 80)
    target_update_interval: Count = 5_000  # environment steps, rounded to updates
    gamma: float = 0.99  # discount per step
    epsilon_start: float = 1.0  # initial probability of a random action
    epsilon_end: float = 0.01  # final probability of a random action
    epsilon_steps: Count = 500_000  # environment steps over which it falls linearly
    max_grad_norm: float = 0.5  # global-norm clip, for each player alone
    bootstrap_at_timeout: bool = True  # off: a time-out counts as a termination
    hidden_dim: Count = 128  # width of every layer
    diagnostics: bool = False  # also record losses, Bellman-error mean and variance, and parameter norms
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
NAMED, SHOWN = ("scorer",), ("update_interval", "target_update_interval")  # in a run's name; at its start
GAME = dict(follower_loss="variance", follower_learning_rate=3e-4, leader_decay_power=1.0)  # what the baseline lacks

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

def resolve(args: Args):
    """args with the game's values where unset and intervals rounded, env, None; bad input ends in one sentence."""
    import navix  # starts JAX's devices, so not before main has set them up
    for name, value in GAME.items():
        if getattr(args, name) is not None and not args.scorer:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)} needs --scorer")
        args = replace(args, **{name: value}) if args.scorer and getattr(args, name) is None else args
    interval = max(1, round(args.update_interval / max(1, args.num_envs))) * args.num_envs
    check_numbers(args, dict(
        gamma=(0, 1), epsilon_start=(0, 1), epsilon_end=(0, 1), per_alpha=(0, 1), per_beta=(0, 1), num_seeds=(1, 2**31),
        seed=(0, max(0, 2**32 - args.num_seeds)), total_timesteps=(1, max(1, args.num_envs) * 2**30),
        sequence_length=(2, 10_000), burn_in=(0, args.sequence_length - 2), n_step=(1, args.sequence_length),
        learning_starts=(args.sequence_length * args.num_envs, args.total_timesteps - 1),
        buffer_size=(2 * args.sequence_length * args.num_envs + interval, 2**31 - 1)))
    period = max(1, round(args.target_update_interval / interval)) * interval
    args = replace(args, update_interval=interval, target_update_interval=period)
    if args.env not in navix.registry():
        near = difflib.get_close_matches(args.env, navix.registry(), cutoff=0.4) or navix.registry()
        fail(f"--env {args.env} is unknown to navix; near names: {', '.join(near)}")
    return args, navix.make(args.env, observation_fn=navix.observations.symbolic_first_person), None

# ------------------------------ Networks ------------------------------------------------------------------------------
class Players(NamedTuple):
    perception: Any  # f_phi, the follower's: network, parameters, optimiser or its state
    control: Any  # Q_theta, the leader's

def dense(features, gain=np.sqrt(2)):
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(gain))

def l2_norm(x):
    """x [..., features] over its Euclidean norm; zeros stay zeros, with gradients of zero."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-16))

class Perception(nn.Module):
    """f_phi: hidden state [batch, hidden_dim], obs [time, batch, ...], last [time, batch] -> hidden state after them,
    latents z [time, batch, hidden_dim] (table "SCORER R2D2"). z is the next hidden state too, both of norm 1; but an
    observation that is its episode's `last` (navix's dummy step) leaves zeros. No gradient flows through the first
    burn_in steps. This is flax's GRUCell, but with the inputs' products outside of the loop, one for all steps."""
    args: Args
    @nn.compact
    def __call__(self, carry, obs, last):
        size, start, orthogonal = self.args.hidden_dim, self.args.burn_in, nn.initializers.orthogonal()
        embed, inputs = dense(size), nn.Dense(3 * size, name="inputs")
        kernel = self.param("recurrent", lambda key: jnp.hstack(
            [orthogonal(key, (size, size)) for key in jax.random.split(key, 3)]))
        bias = self.param("recurrent_bias", nn.initializers.zeros, (size,))
        def step(carry, now):
            x, last = now
            h = carry @ kernel
            reset, update = jnp.split(nn.sigmoid(x[:, : 2 * size] + h[:, : 2 * size]), 2, axis=-1)
            new = jnp.tanh(x[:, 2 * size :] + reset * (h[:, 2 * size :] + bias))
            z = l2_norm((1.0 - update) * new + update * carry)
            return jnp.where(last[:, None], 0.0, z), z
        def run(carry, obs, last):
            x = inputs(jnp.tanh(embed(l2_norm(obs.astype(jnp.float32)))))
            return jax.lax.scan(step, carry, (x, last), unroll=10)  # one by one takes a GPU a quarter longer
        obs = obs.reshape(*last.shape, -1)
        carry, past = jax.lax.stop_gradient(run(carry, obs[:start], last[:start]))
        carry, z = run(carry, obs[start:], last[start:])
        return carry, jnp.concatenate([past, z])

class Control(nn.Module):
    """Q_theta: latent z [..., hidden_dim] -> action values [..., num_actions] (table "SCORER R2D2")."""
    args: Args
    num_actions: int
    @nn.compact
    def __call__(self, z):
        hidden = jnp.tanh(dense(self.args.hidden_dim)(z))
        return dense(self.num_actions, gain=0.01)(hidden)

# ------------------------------ The game ------------------------------------------------------------------------------
class Step(NamedTuple):
    """What the replay keeps of a step (navix's own timestep has a large cache); or a batch of sequences of steps."""
    obs: jax.Array  # [time, batch, ...], like the others
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array  # no value follows; a time-out is not a termination (see --bootstrap-at-timeout)
    last: jax.Array  # a dummy step: obs ends its episode, and navix resets whatever the action
    carry: jax.Array  # hidden state before obs
    mask: Any = None  # steps to learn from: not the burn-in, no dummy steps, nor the last, with which the targets end
    weight: Any = None  # [batch] importance weights

def latents(networks: Players, phi, batch: Step):
    """z [time, batch, hidden_dim] from the stored hidden state on."""
    return networks.perception.apply({"params": phi}, batch.carry[0], batch.obs, batch.last)[1]

def n_step_target(networks, params: Players, target: Players, batch: Step, gamma, n):
    """G_t = sum_{k<m} gamma^k r_{t+k} + gamma^m (1 - terminated_{t+m-1}) Q_target(s_{t+m}, a*), [time, batch], with
    m = min(n, steps to the episode's end, steps to the last observation) and a* the online control network's choice on
    target features. A time-out's s_{t+m} is at its dummy step. The last G is but the value there."""
    z = latents(networks, target.perception, batch)
    values = networks.control.apply({"params": target.control}, z)
    chosen = networks.control.apply({"params": params.control}, z).argmax(axis=-1)
    best = jnp.sum(values * jax.nn.one_hot(chosen, values.shape[-1]), axis=-1)
    chex.assert_equal_shape([best, batch.reward, batch.terminated, batch.last])
    reward, final, returns = batch.reward[:-1], (1.0 - batch.terminated[:-1]) * best[1:], best
    for _ in range(n):  # after k rounds, the targets of at most k rewards
        returns = jnp.concatenate([reward + gamma * jnp.where(batch.last[1:], final, returns[1:]), best[-1:]])
    return returns

def recurrent_error(phi, theta, networks, batch: Step, target):
    """delta = G - Q_theta(f_phi(s), a), [time, batch]; the target G carries no gradient."""
    q = networks.control.apply({"params": theta}, latents(networks, phi, batch))
    q = jnp.sum(q * jax.nn.one_hot(batch.action, q.shape[-1]), axis=-1)
    chex.assert_equal_shape([q, target, batch.mask])
    return jax.lax.stop_gradient(target) - q

def masked_mean(x, mask):
    """sum(mask x) / sum(mask), and 0 where the mask is 0."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(mask * x) / jnp.maximum(jnp.sum(mask), 1.0)

def recurrent_follower_loss(phi, theta, networks, batch, target):
    """Var[delta], the population variance over the mask: what perception minimises over phi; and delta."""
    delta = recurrent_error(phi, theta, networks, batch, target)
    return masked_mean(jnp.square(delta - masked_mean(delta, batch.mask)), batch.mask), delta

def recurrent_leader_loss(phi, theta, networks, batch, target):
    """mean[weight delta^2] over the mask, what control minimises over theta, and the baseline over both; and delta."""
    delta = recurrent_error(phi, theta, networks, batch, target)
    return masked_mean(batch.weight * jnp.square(delta), batch.mask), delta

def recurrent_scorer_update(objective, networks, optimizers, params: Players, opt_state, batch, target):
    """One round of the game (Algorithm 1, lines 10 to 15): the follower's response, then the leader's step on it.
    `batch` and `target` hold a sample for each [2, ...]; the leader's delta is returned too, to set priorities."""
    (follower, returns), leader = (jax.tree.map(lambda x: x[player], (batch, target)) for player in (0, 1))
    follower = follower._replace(weight=1.0)  # only the leader's errors have importance weights
    gradient, _ = jax.grad(objective, argnums=0, has_aux=True)(*params, networks, follower, returns)
    change, phi_opt = optimizers.perception.update(gradient, opt_state.perception)
    phi = optax.apply_updates(params.perception, change)
    gradient, delta = jax.grad(recurrent_leader_loss, argnums=1, has_aux=True)(phi, params.control, networks, *leader)
    change, theta_opt = optimizers.control.update(gradient, opt_state.control)
    return Players(phi, optax.apply_updates(params.control, change)), Players(phi_opt, theta_opt), delta

def recurrent_baseline_update(networks, optimizer, params: Players, opt_state, batch, target):
    """R2D2: the same composed network, one batch [1, ...], one loss, one optimiser at the leader's rate."""
    sample = jax.tree.map(lambda x: x[0], (batch, target))
    gradient, delta = jax.grad(recurrent_leader_loss, argnums=(0, 1), has_aux=True)(*params, networks, *sample)
    change, opt_state = optimizer.update(Players(*gradient), opt_state)
    return optax.apply_updates(params, change), opt_state, delta

# ------------------------------ Training ------------------------------------------------------------------------------
def importance_weights(probability, beta):
    """(N P)^-beta over its maximum in the batch, [batch]; 0 where P is 0, which rounding in the sum tree can draw."""
    least = jnp.min(jnp.where(probability > 0, probability, jnp.inf))
    return jnp.where(probability > 0, (least / probability) ** beta, 0.0)

def sequence_priority(delta, mask):
    """0.9 max + 0.1 mean of |delta| over the mask, [time, batch] -> [batch], before the exponent (R2D2)."""
    return 0.9 * (mask * jnp.abs(delta)).max(axis=0) + 0.1 * jax.vmap(masked_mean, 1)(jnp.abs(delta), mask)

class State(NamedTuple):
    """All of one seed's training, saved whole in a checkpoint; random keys are derived from seed and round."""
    seed: jax.Array
    follower_rate: jax.Array  # the follower's initial learning rate
    params: Players
    target: Players
    opt_state: Any
    replay: Any  # flashbax's, of Steps [num_envs, rows, ...]
    env_state: Any  # navix's timestep [num_envs, ...]
    carry: jax.Array  # hidden state before its observation [num_envs, hidden_dim]
    last_returns: jax.Array  # of each environment's last completed episode [num_envs], NaN before
    episodes: jax.Array  # completed so far, by all environments together
    curves: dict  # each [points], NaN ahead of training

def make_train(args: Args, env, env_params):
    """One seed's training: init(seed, follower_rate) -> State, block(state, index) -> State after that block and its
    mean return, measure(state, index) -> State with that block's diagnostics, the environment steps at each block's
    end, and blocks per point of the curves. A round is some steps of all environments and then one update."""
    num_actions = int(env.action_space.maximum) + 1
    networks = Players(Perception(args), Control(args, num_actions))
    epsilon = optax.linear_schedule(args.epsilon_start, args.epsilon_end, args.epsilon_steps / args.num_envs)
    round_steps = args.update_interval // args.num_envs  # of all environments
    period = min(args.target_update_interval // args.update_interval, 2**30)  # updates between target updates
    first_round = args.learning_starts // args.update_interval
    rounds_left = max(1, -(-args.total_timesteps // args.update_interval) - first_round)
    block_rounds = max(n for n in range(1, min(32, rounds_left) + 1) if period % n == 0)  # targets change between
    num_blocks = -(-rounds_left // block_rounds)  # a point of the curves each
    num_updates = num_blocks * block_rounds
    timesteps = (first_round + block_rounds * np.arange(1, num_blocks + 1)) * args.update_interval
    replay = flashbax.make_prioritised_trajectory_buffer(
        args.num_envs, args.batch_size, args.sequence_length, 4, args.sequence_length, device=jax.default_backend(),
        max_length_time_axis=args.buffer_size // args.num_envs // 4 * 4, priority_exponent=args.per_alpha)
    def adam(learning_rate, power=1.0):
        return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(
            lambda count: learning_rate * (jnp.maximum(num_updates - count, 0) / num_updates) ** power))
    def optimizers(follower_rate):
        slow = adam(args.learning_rate, args.leader_decay_power or 1.0)
        return Players(adam(follower_rate), slow) if args.scorer else slow
    objective = recurrent_leader_loss if args.follower_loss == "msbe" else recurrent_follower_loss
    update = partial(recurrent_scorer_update, objective) if args.scorer else recurrent_baseline_update
    def random(seed, stream, index=0):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), index)
    def draw(key, rounds):
        """The steps of `rounds` with all their randomness at once (many small random kernels are slow)."""
        keys, shape = jax.random.split(key, 3), (len(rounds), round_steps, args.num_envs)
        noise = dict(explore=jax.random.uniform(keys[0], shape),
                     action=jax.random.randint(keys[1], shape, 0, num_actions),
                     step=rounds[:, None] * round_steps + jnp.arange(round_steps))
        return rounds, noise, jax.random.split(keys[2], (len(rounds), 1 + args.scorer))
    def act(state: State, noise):
        """One epsilon-greedy step of every environment, and what the replay is to keep of it."""
        now, last, (phi, theta) = state.env_state, state.env_state.step_type > 0, state.params
        carry, z = networks.perception.apply({"params": phi}, state.carry, now.observation[None], last[None])
        q = networks.control.apply({"params": theta}, z[0])  # [num_envs, actions]
        action = jnp.where(noise["explore"] < epsilon(noise["step"]), noise["action"], q.argmax(axis=-1))
        new = jax.vmap(env.step)(now, action)
        done, ended = new.step_type > 0, new.step_type > (1 if args.bootstrap_at_timeout else 0)
        step = Step(now.observation, action, new.reward, ended, last, state.carry)
        return state._replace(env_state=new, carry=carry, episodes=state.episodes + done.sum(),
                              last_returns=jnp.where(done, new.info["return"], state.last_returns)), step
    def play(state: State, noise):
        state, steps = jax.lax.scan(act, state, noise)
        return state._replace(replay=replay.add(state.replay, jax.tree.map(lambda x: x.swapaxes(0, 1), steps))), None
    def sample(state: State, key, progress):
        """Prioritised sequences, their targets and their places in the replay."""
        drawn = replay.sample(state.replay, key)
        batch = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn.experience)  # [time, batch, ...]
        mask = (~batch.last & (drawn.probabilities > 0)).at[: args.burn_in].set(False).at[-1].set(False)
        weight = importance_weights(drawn.probabilities, args.per_beta + progress * (1.0 - args.per_beta))
        batch = batch._replace(mask=mask, weight=weight)
        return batch, n_step_target(networks, state.params, state.target, batch, args.gamma, args.n_step), drawn.indices
    def play_and_learn(optimizer, state: State, round_noise_keys):
        number, noise, keys = round_noise_keys
        state, _ = play(state, noise)
        batch, target, places = jax.vmap(partial(sample, state), (0, None))(keys, (number - first_round) / num_updates)
        params, opt_state, delta = update(networks, optimizer, state.params, state.opt_state, batch, target)
        priority = (batch.weight[-1] > 0) * jnp.maximum(sequence_priority(delta, batch.mask[-1]), 1e-6)
        new_replay = replay.set_priorities(state.replay, places[-1], priority)  # 0 only for what is no sequence
        return state._replace(params=params, opt_state=opt_state, replay=new_replay), None
    def diagnose(state: State, index) -> dict:
        """Losses on a prioritised batch, and norms."""
        batch, target, _ = sample(state, random(state.seed, 2, index), index / len(timesteps))
        follower, delta = objective(*state.params, networks, batch._replace(weight=1.0), target)
        leader, mean = recurrent_leader_loss(*state.params, networks, batch, target)[0], masked_mean(delta, batch.mask)
        return dict(follower_loss=follower, leader_loss=leader, bellman_error_mean=mean,
                    bellman_error_variance=masked_mean(jnp.square(delta - mean), batch.mask),
                    **{f"{name}_norm": optax.tree.norm(x) for name, x in state.params._asdict().items()})
    def note(state: State, index, values: dict) -> State:
        return state._replace(curves=state.curves | {n: state.curves[n].at[index].set(v) for n, v in values.items()})
    def measure(state: State, index) -> State:
        return note(state, index, diagnose(state, index))
    def init(seed, follower_rate) -> State:
        reset_key, phi_key, theta_key, noise_key = jax.random.split(random(seed, 0), 4)
        keys = jax.random.key_data(jax.random.split(reset_key, args.num_envs))  # raw: a checkpoint holds navix's keys
        now, carry = jax.vmap(env.reset)(keys), jnp.zeros((args.num_envs, args.hidden_dim))
        step = Step(now.observation, now.action, now.reward, now.step_type > 0, now.step_type > 0, carry)
        (_, z), phi = networks.perception.init_with_output(phi_key, carry, step.obs[None], step.last[None])
        params = Players(phi["params"], networks.control.init(theta_key, z)["params"])
        optimizer = optimizers(follower_rate)
        opt_state = Players(*map(lambda o, p: o.init(p), optimizer, params)) if args.scorer else optimizer.init(params)
        state = State(seed, follower_rate, params, params, opt_state, replay.init(jax.tree.map(lambda x: x[0], step)),
                      now, carry, jnp.full(args.num_envs, jnp.nan), jnp.int32(0), {})
        extra = jax.eval_shape(diagnose, state, 0) if args.diagnostics else ()
        curves = {name: jnp.full(num_blocks, jnp.nan) for name in ("returns", "episodes", *extra)}
        return jax.lax.scan(play, state._replace(curves=curves), draw(noise_key, jnp.arange(first_round))[1])[0]
    def block(state: State, index):
        noise = draw(random(state.seed, 1, index), first_round + index * block_rounds + jnp.arange(block_rounds))
        state, _ = jax.lax.scan(partial(play_and_learn, optimizers(state.follower_rate)), state, noise)
        due, mean = (index + 1) * block_rounds % period == 0, state.last_returns.mean()
        target = jax.tree.map(lambda new, old: jnp.where(due, new, old), state.params, state.target)
        return note(state._replace(target=target), index, dict(returns=mean, episodes=state.episodes)), mean
    return init, block, measure, timesteps, 1

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

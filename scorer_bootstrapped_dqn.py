"""SCORER Bootstrapped DQN on Deep Sea: an ensemble that explores, each member's update played as a Stackelberg game.

The agent is bsuite's (Osband et al., 2016, 2018; no reward noise, clip or decay), as the paper states none: 20 members,
each a network of 50-50 units plus a fixed random prior, learn from one replay under random masks of their own; one of
them acts through an episode. --scorer splits a member after its first hidden layer: that (follower) minimises the
variance of the member's Bellman errors, the rest (leader) their mean square. Paper: Martinez et al., "Stackelberg
Coupling of Online Representation Learning and RL", ICLR 2026, section 5.4 and appendix "Deep Sea Results".

    python scorer_bootstrapped_dqn.py --size 10 --scorer                              # a minute on a laptop
    python scorer_bootstrapped_dqn.py --size 30 --stochastic --scorer --num-seeds 30  # for a GPU
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "flax>=0.12.8", "optax>=0.2.8", "chex>=0.1.92", "gymnax==1.0.1", "six>=1.17",
#   "tyro>=1.0.17", "tqdm>=4.68", "safetensors>=0.8", "wandb>=0.31"]
# ///
import io, json, os, signal, sys, time
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
    size: Count = 10  # Deep Sea's depth: steps of an episode, of which only one sequence of actions is rewarded
    stochastic: bool = False  # a move to the right fails with probability 1 / size, and the last row's ends are noisy
    env: tyro.conf.Suppress[str] = ""  # no flag: the two above make the environment's name in the record
    seed: Count = 0  # first seed
    num_seeds: Count = 1  # seeds trained side by side in one program: seed, seed + 1, ...
    total_timesteps: Count | None = None  # environment steps per seed, rounded up to target updates (100 size^2)
    # The game
    scorer: bool = False  # play the game; without it, the baseline: same layers, one loss, one optimiser
    follower_loss: Literal["variance", "msbe"] | None = None  # the follower's objective (variance)
    follower_learning_rate: tuple[float, ...] | None = None  # constant (1e-3); several: a sweep
    learning_rate: float = 1e-3  # constant rate of the leader, or of the baseline
    # Algorithm
    num_members: Count = 20  # networks of the ensemble; one acts, changing with the episode, and all learn
    prior_scale: float = 3.0  # of the fixed random network that each member's values include; 0: no priors
    mask_probability: float = 0.5  # that a member learns from a transition, drawn once when it is stored
    buffer_size: Count = 10_000  # replay per seed in transitions
    batch_size: Count = 128  # transitions per batch, the same for all members; SCORER draws two batches per update
    learning_starts: Count = 128  # environment steps before the first update; from then on one update per step
    target_update_interval: Count = 4  # environment steps, that is updates, between copies to the target networks
    gamma: float = 0.99  # discount per step
    epsilon_scale: float = 10.0  # a random action has probability scale / (scale + t), t counting updates from 1
    hidden_dim: Count = 50  # width of both hidden layers, of members and priors
    diagnostics = False  # main knows it from scorer_dqn.py; no flag here
    # Output, and how to run
    runs_dir: Path = Path("runs")  # the folder that gets one folder per run
    save_model: bool = False  # write model.safetensors: all seeds and members, with their priors
    checkpoint_every_minutes: float | None = None  # keep the newest training state, written so often and at Ctrl-C
    resume: Path | None = None  # continue the run in this folder, with its arguments, as a new run
    compilation_cache: bool = True  # keep compiled programs in the user's cache folder: a second start is quick
    distributed: bool = False  # share the seeds among a job's processes (Slurm, MPI, Kubernetes, or JAX_... variables)
    track: bool = False  # log to Weights & Biases
    wandb_mode: Literal["online", "offline"] = "online"  # offline needs no account; WANDB_PROJECT names the project

OUTPUT = "runs_dir save_model checkpoint_every_minutes resume compilation_cache distributed track wandb_mode".split()
NAMED, SHOWN = ("scorer",), ("num_members", "target_update_interval")  # in a run's name, and at its start
GAME = dict(follower_loss="variance", follower_learning_rate=1e-3)  # the baseline has none; faster ones did worse

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
    """args with the presets where unset, env, env_params; bad input ends in one sentence."""
    import gymnax.wrappers  # starts JAX's devices, so not before main has set them up
    preset = dict(total_timesteps=100 * args.size**2) | (GAME if args.scorer else {})
    for name in () if args.scorer else GAME:
        if getattr(args, name) is not None:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)} needs --scorer")
    args.env = f"DeepSea-{args.size}{'-stochastic' * args.stochastic}"
    args = replace(args, **{name: value for name, value in preset.items() if getattr(args, name) is None})
    check_numbers(args, dict(
        size=(2, 1000), num_seeds=(1, 2**31), seed=(0, max(0, 2**32 - args.num_seeds)), gamma=(0, 1),
        prior_scale=(0, 1e9), mask_probability=(1e-9, 1), epsilon_scale=(0, 1e9), total_timesteps=(1, 2**30),
        learning_starts=(1, args.total_timesteps - 1), buffer_size=(args.batch_size, 2**31 - 1)))
    env, env_params = gymnax.make("DeepSea-bsuite", size=args.size)
    # every seed has a map of actions of its own, kept in State, so the environment's says that action 1 is right
    env_params = env_params.replace(deterministic=not args.stochastic, randomize_actions=False)
    return args, gymnax.wrappers.LogWrapper(env), env_params

# ------------------------------ Networks ------------------------------------------------------------------------------
class Players(NamedTuple):
    perception: Any  # f_phi, the follower's: network, parameters, optimiser or its state
    control: Any  # Q_theta, the leader's

class Ensemble(NamedTuple):
    """All members' parameters, leaves [members, ...]; of one member, without that axis."""
    perception: Any
    control: Any
    prior: dict  # perception and control of a second network, random and never changed

class Perception(nn.Module):
    """f_phi of a member: cell [...] -> latent z [..., hidden_dim]; a dense layer, whose one-hot input picks a row."""
    args: Args
    @nn.compact
    def __call__(self, cell):
        kernel = self.param("kernel", SONNET, (self.args.size**2, self.args.hidden_dim))
        return nn.relu(kernel[cell] + self.param("bias", nn.initializers.zeros, self.args.hidden_dim))

class Control(nn.Module):
    """Q_theta of a member: latent z [..., hidden_dim] -> action values [..., 2]."""
    args: Args
    @nn.compact
    def __call__(self, z):
        layers = nn.Dense(self.args.hidden_dim, kernel_init=SONNET), nn.relu, nn.Dense(2, kernel_init=SONNET)
        return nn.Sequential(layers)(z)

# bsuite's initial weights: normal with standard deviation 1 / sqrt(inputs), cut off at two of these; biases are 0
SONNET = nn.initializers.variance_scaling(0.87962566**2, "fan_in", "truncated_normal")

# ------------------------------ The game ------------------------------------------------------------------------------
class Transition(NamedTuple):
    obs: jax.Array  # the cell, row * size + column
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # 0 after the last row, from which no value follows
    terminated: jax.Array
    mask: jax.Array  # [..., members], whether the member learns from it
    priors: jax.Array  # [..., members, 2, actions], the priors' values of obs and next_obs: these never change

def q_values(networks: Players, phi, theta, obs):
    """Q_theta(f_phi(s), .) [..., actions] of obs [..., features]."""
    return networks.control.apply({"params": theta}, networks.perception.apply({"params": phi}, obs))

def target_without_prior(networks, target: Players, batch: Transition, gamma):
    """Y - p(s, a), [batch], for one member. Its values are Q = Q_theta(f_phi(s), .) + p(s) with the fixed prior p, its
    target is Y = r + gamma (1 - terminated) max_a [Q_target + p](s'). The Bellman error Y - Q is then this minus what
    the member's own network says: it learns what its prior is wrong by, and no gradient can reach the prior."""
    best = jnp.max(q_values(networks, *target, batch.next_obs) + batch.priors[..., 1, :], axis=-1)
    prior = jnp.sum(batch.priors[..., 0, :] * jax.nn.one_hot(batch.action, batch.priors.shape[-1]), axis=-1)
    chex.assert_equal_shape([best, prior, batch.reward, batch.terminated])
    return batch.reward + gamma * (1.0 - batch.terminated) * best - prior

def bellman_error(phi, theta, networks, batch: Transition, target):
    """delta_j = Y_j - Q_theta(f_phi(s_j), a_j), [batch]; the target Y carries no gradient."""
    q = q_values(networks, phi, theta, batch.obs)
    q = jnp.sum(q * jax.nn.one_hot(batch.action, q.shape[-1]), axis=-1)  # a GPU does this faster than a look-up
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

leader_loss = masked_msbe  # so that a round of the game is, to the letter, that of scorer_dqn.py

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
def solved(bad, recent, episodes, stochastic) -> dict:
    """Whether a seed has solved Deep Sea after so many episodes, in `bad` of which it chose to leave the diagonal.
    solved_episode is bsuite 0.3.6's rule: below 90 % bad so far; stochastic, where luck makes some good, below 80 % and
    not before episode 100. strictly_solved_episode: below 10 % bad of the last 100 [100], not before episode 100."""
    bsuite = (5 * bad < 4 * episodes) & (episodes >= 100) if stochastic else 10 * bad < 9 * episodes
    return dict(solved_episode=bsuite, strictly_solved_episode=(10 * recent.sum() < 100) & (episodes >= 100))

class State(NamedTuple):
    """All of one seed's training, saved whole in a checkpoint; random keys are derived from seed and step."""
    seed: jax.Array
    follower_rate: jax.Array
    params: Ensemble
    target: Players  # as params, [members, ...]
    opt_state: Any
    replay: Transition  # ring buffer [rows, 1, ...]; without the 1, XLA copies whole rings
    batch: Transition  # of the next update [players, batch, ...], drawn before it: so a GPU acts and learns at once
    env_state: Any
    obs: jax.Array
    active: jax.Array  # the member that acts in this episode
    action_map: jax.Array  # [size, size], the action that is right in each cell
    recent: jax.Array  # [100], which of the last episodes were bad
    progress: dict  # last episode's return, episodes, bad ones, the first solved one by either rule (-1: none)
    curves: dict  # the same, each [blocks], NaN ahead of training

def make_train(args: Args, env, env_params):
    """One seed's training: init(seed, follower_rate) -> State, block(state, index) -> State after that block and the
    last return, no diagnostics, the environment steps at each block's end, and blocks per point of the curves (1)."""
    networks = Players(Perception(args), Control(args))
    rows, members, first_step = args.buffer_size, args.num_members, args.learning_starts
    period, steps_left = min(args.target_update_interval, args.total_timesteps), args.total_timesteps - first_step
    block_steps = period * max(1, min(256, steps_left // 250) // period)  # whole periods; some 250 blocks or more
    timesteps = np.arange(first_step + block_steps, first_step + steps_left + block_steps, block_steps)
    def optimizers(follower_rate):
        slow = optax.adam(args.learning_rate)
        return Players(optax.adam(follower_rate), slow) if args.scorer else slow
    objective = masked_msbe if args.follower_loss == "msbe" else masked_variance
    update = partial(scorer_update, objective) if args.scorer else baseline_update
    own = Transition(*[None] * 5, mask=-1, priors=-3)  # a batch's axes of members, who share the rest of it
    def random(seed, stream, index=0):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), index)
    def draw(key, steps):
        """All randomness of `steps` at once (many small random kernels are slow), each leaf [steps, ...]."""
        keys, shape = jax.random.split(key, 6), (len(steps),)
        held = jnp.minimum(steps + 1, rows)[:, None, None]  # transitions in the replay by then
        return dict(explore=jax.random.uniform(keys[0], shape), action=jax.random.randint(keys[1], shape, 0, 2),
                    env=jax.random.split(keys[2], shape), active=jax.random.randint(keys[3], shape, 0, members),
                    mask=jax.random.bernoulli(keys[4], args.mask_probability, (*shape, members)),
                    sample=jax.random.randint(keys[5], (*shape, 1 + args.scorer, args.batch_size), 0, held))
    def prior_values(member: Ensemble, obs):
        return args.prior_scale * q_values(networks, member.prior["perception"], member.prior["control"], obs)
    def act(state: State, step_and_noise):
        """One epsilon-greedy step of the active member, stored in the replay, and the next update's batch out of it."""
        step, noise = step_and_noise
        member = jax.tree.map(lambda x: x[state.active], state.params)
        q = q_values(networks, *member[:2], state.obs) + prior_values(member, state.obs)  # [actions]
        explore = noise["explore"] < args.epsilon_scale / (args.epsilon_scale + jnp.maximum(1, step - first_step + 2))
        action = jnp.where(explore, noise["action"], q.argmax())
        sea = state.env_state.env_state
        right = (action == state.action_map[sea.row, sea.column]).astype(int)
        obs, env_state, reward, terminated, truncated, info = env.step(noise["env"], state.env_state, right, env_params)
        done, next_obs = terminated | truncated, info["final_observation"].argmax()  # an episode's last step is both
        priors = jax.vmap(prior_values, in_axes=(0, None))(state.params, jnp.stack([state.obs, next_obs]))
        row = Transition(state.obs, action, reward.astype(jnp.float32), next_obs, terminated, noise["mask"], priors)
        replay = jax.tree.map(lambda ring, x: jax.lax.dynamic_update_index_in_dim(
            ring, x[None], step % rows, axis=0), state.replay, row)
        episodes, bad = state.progress["episodes"] + done, env_state.env_state.total_bad_episodes
        recent = state.recent.at[jnp.where(done, episodes % 100, 100)].set(bad > sea.total_bad_episodes, mode="drop")
        latest = jnp.where(episodes > 0, env_state.returned_episode_returns, jnp.nan)
        progress = state.progress | dict(returns=latest, episodes=episodes, bad_episodes=bad)
        for name, now in solved(bad, recent, episodes, args.stochastic).items():
            progress[name] = jnp.where(done & now & (progress[name] < 0), episodes, progress[name])
        active = jnp.where(done, noise["active"], state.active)
        return state._replace(replay=replay, batch=sample(replay, noise["sample"]), env_state=env_state,
                              obs=obs.argmax(), active=active, recent=recent, progress=progress), None
    def sample(replay: Transition, index):
        """Transitions at `index` into the replay, flat over rows and environments."""
        return jax.tree.map(lambda ring: ring.reshape(-1, *ring.shape[2:])[index], replay)
    def act_and_learn(optimizer, state: State, step_and_noise):
        def member_update(params, target, opt_state, batch):
            y = target_without_prior(networks, target, batch, args.gamma)
            return update(networks, optimizer, params, opt_state, batch, y)
        players, opt_state = jax.vmap(member_update, in_axes=(0, 0, 0, own))(
            Players(*state.params[:2]), state.target, state.opt_state, state.batch)
        params = state.params._replace(**players._asdict())
        return act(state, step_and_noise)[0]._replace(params=params, opt_state=opt_state), None
    def init(seed, follower_rate) -> State:
        reset_key, member_key, noise_key, active_key, map_key = jax.random.split(random(seed, 0), 5)
        obs, env_state = env.reset(reset_key, env_params)
        obs, steps, optimizer = obs.argmax(), jnp.arange(first_step), optimizers(follower_rate)
        def network(key):
            phi_key, theta_key = jax.random.split(key)
            z, phi = networks.perception.init_with_output(phi_key, obs)
            return Players(phi["params"], networks.control.init(theta_key, z)["params"])
        both = jax.vmap(jax.vmap(network))(jax.random.split(member_key, (2, members)))
        players, prior = (jax.tree.map(lambda x: x[i], both) for i in (0, 1))
        start = (lambda p: Players(*map(lambda o, p: o.init(p), optimizer, p))) if args.scorer else optimizer.init
        row = Transition(*map(jnp.asarray, (obs, 0, 0.0, obs, False, [False] * members, [[[0.0, 0.0]] * 2] * members)))
        replay = jax.tree.map(lambda x: jnp.zeros((rows, 1, *x.shape), x.dtype), row)
        progress = dict(returns=jnp.nan, episodes=0, bad_episodes=0, solved_episode=-1, strictly_solved_episode=-1)
        state = State(
            seed, follower_rate, Ensemble(*players, prior._asdict()), players, jax.vmap(start)(players), replay,
            sample(replay, jnp.zeros((1 + args.scorer, args.batch_size), int)), env_state, obs,
            active=jax.random.randint(active_key, (), 0, members),
            action_map=jax.random.bernoulli(map_key, 0.5, (args.size, args.size)).astype(int),  # as gymnax's own is
            recent=jnp.zeros(100, bool), progress=jax.tree.map(jnp.asarray, progress),
            curves={name: jnp.full(len(timesteps), jnp.nan) for name in progress})
        return jax.lax.scan(act, state, (steps, draw(noise_key, steps)))[0]
    def block(state: State, index):
        steps = first_step + index * block_steps + jnp.arange(block_steps)
        def until_targets_change(state, steps_and_noise):
            state, _ = jax.lax.scan(partial(act_and_learn, optimizers(state.follower_rate)), state, steps_and_noise)
            return state._replace(target=Players(*state.params[:2])), None
        noise = draw(random(state.seed, 1, index), steps)
        periods = jax.tree.map(lambda x: x.reshape(-1, period, *x.shape[1:]), (steps, noise))
        state, _ = jax.lax.scan(until_targets_change, state, periods)
        curves = {name: curve.at[index].set(state.progress[name]) for name, curve in state.curves.items()}
        return state._replace(curves=curves), state.progress["returns"]
    return init, block, None, timesteps, 1

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

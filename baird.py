"""SCORER on Baird's counterexample, where linear TD diverges.

Seven states, eight features, no reward. The behaviour policy mostly takes the dashed action, to one
of states 1 to 6; the target policy always takes the solid one, to state 7; the true values are 0.
V = X phi theta: perception phi, the follower, is a matrix between the features and their latents,
and control theta, the leader, a vector of weights. Seven methods start from one value function and
learn from the same batches. Why some diverge and some do not stands in docs/baird.md.

    # all methods from samples, 10 seeds, a quarter of a minute on a laptop
    python baird.py
    # all methods, exactly, over learning rates, ratios and starts
    python baird.py --table --expected

What stands where, from top to bottom:

    Arguments     every flag; look up what you need
    The star      states, features, transitions, and the value function that all start from
    The game      losses and updates, under the names that they have in scorer_dqn.py
    Training      all methods side by side, and what is measured
    The run       lanes, tables in words, records; skip it

Paper: Martinez et al., "Stackelberg Coupling of Online Representation Learning and Reinforcement
Learning", ICLR 2026, section 5.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "tyro>=1.0.17"]
# ///

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import make_dataclass
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

# ==================================================================================================
# Arguments
# ==================================================================================================

# What a flag is where it is not given. The rates are as far apart as the paper's on MinAtar.
DEFAULTS = dict(init="balanced", learning_rate=0.01, ratio=5.0)

# What --table goes through.
TABLE = dict(
    init=["balanced", "identity"],
    learning_rate=[0.001, 0.003, 0.01, 0.03, 0.1],
    ratio=[1, 2, 5, 10, 20],
)


def shown_default(kind, value):
    """Returns the type of a flag that is None unless given, for which --help shows this default."""
    metavar = {int: "INT", float: "FLOAT"}.get(kind)
    shown_as = dict(metavar=metavar) if metavar else {}
    hint = tyro.conf.arg(help_behavior_hint=f"(default: {value})", **shown_as)
    return Annotated[kind | None, hint]


@dataclass
class Experiment:
    """What is run, and for how long."""

    expected: bool = False  # exact expectations in place of sampled batches
    table: bool = False  # all settings in TABLE in place of one: verdicts, and no curves
    seed: int = 0  # first seed
    num_seeds: shown_default(int, "10; --table 3") = None  # seeds of the samples
    num_updates: int = 20_000  # updates of each method


@dataclass
class Algorithm:
    """How the methods learn."""

    init: shown_default(Literal["balanced", "identity"], "balanced") = None  # see `start`
    learning_rate: shown_default(float, 0.01) = None  # of the leader, and of methods with one rate
    ratio: shown_default(float, 5) = None  # the follower's rate is so many times the leader's
    batch_size: int = 64  # transitions per sampled batch; each player draws its own
    target_update_interval: int = 100  # updates, for linear TD with a target network


@dataclass
class Output:
    """What is kept."""

    runs_dir: Path = Path("runs")  # the folder that gets one folder per run


@dataclass
class Args(Experiment, Algorithm, Output):
    """All flags in one flat namespace; --help shows the groups."""


# ==================================================================================================
# The star
# ==================================================================================================

GAMMA = 0.99
DASHED = np.tile(np.array([1, 1, 1, 1, 1, 1, 0]) / 6, (7, 1))  # [state, next state], probabilities
SOLID = np.tile(np.array([0, 0, 0, 0, 0, 0, 1]), (7, 1))
BEHAVIOR = 6 / 7 * DASHED + 1 / 7 * SOLID  # uniform, and so is its stationary distribution
RHO = 7.0  # target over behaviour probability of a solid action; that of a dashed one is 0

# X [state, feature]: 2 e_s + e_8 in states 1 to 6, and e_7 + 2 e_8 in state 7.
FEATURES = np.array(
    [
        [2, 0, 0, 0, 0, 0, 0, 1],
        [0, 2, 0, 0, 0, 0, 0, 1],
        [0, 0, 2, 0, 0, 0, 0, 1],
        [0, 0, 0, 2, 0, 0, 0, 1],
        [0, 0, 0, 0, 2, 0, 0, 1],
        [0, 0, 0, 0, 0, 2, 0, 1],
        [0, 0, 0, 0, 0, 0, 1, 2],
    ],
    np.float32,
)
START = np.array([1, 1, 1, 1, 1, 1, 10, 1], float)  # w: all methods start from the values X w


class Batch(NamedTuple):
    """Transitions under the behaviour policy."""

    state: jax.Array  # [batch], 0 to 6
    next_state: jax.Array  # [batch]
    rho: jax.Array  # [batch], target policy's over behaviour policy's probability of the action


def transitions(numbers) -> Batch:
    """Returns the transitions with these numbers [batch], 0 to 48: one for each pair of states.

    Under the behaviour policy all 49 are equally likely, and what leads to state 7 is solid. So
    each of them once is the exact expectation, and random ones are independent samples.
    """
    state = numbers // 7
    next_state = numbers % 7
    rho = jnp.where(next_state == 6, jnp.float32(RHO), jnp.float32(0.0))
    return Batch(state, next_state, rho)


class Players(NamedTuple):
    """A pair of parameters."""

    perception: jax.Array  # phi [feature, latent], the follower's
    control: jax.Array  # theta [latent], the leader's


def start(init: str) -> Players:
    """Returns phi = c I and theta = w / c: balanced c = sqrt |w|, identity c = 1.

    Balanced, a step of either layer at one rate moves the values equally far, as c^2 = |w / c|^2.
    """
    c = np.sqrt(np.linalg.norm(START)) if init == "balanced" else 1.0
    return Players(
        perception=jnp.asarray(c * np.eye(8), jnp.float32),
        control=jnp.asarray(START / c, jnp.float32),
    )


# ==================================================================================================
# The game
# ==================================================================================================


class Rates(NamedTuple):
    """The players' learning rates."""

    follower: jax.Array  # fast
    leader: jax.Array  # slow, and that of the methods with one rate


def state_values(params: Players):
    """Returns V = X phi theta, [state]."""
    return FEATURES @ params.perception @ params.control


def bellman_error(params: Players, batch: Batch, target_values):
    """Returns delta = gamma V_target(s') - V(s), [batch].

    target_values [state] are numbers and no parameters, so the target carries no gradient.
    """
    return GAMMA * target_values[batch.next_state] - state_values(params)[batch.state]


def follower_loss(delta, rho):
    """Returns the variance of delta under the target policy: what perception minimises over phi.

    It is sum(rho delta^2) / sum(rho) - (sum(rho delta) / sum(rho))^2, computed without the
    cancellation of that form; 0 for a batch without a solid action.
    """
    share = rho / jnp.maximum(rho.sum(), 1.0)
    return jnp.sum(share * (delta - jnp.sum(share * delta)) ** 2)


def leader_loss(delta, rho):
    """Returns E[rho delta^2], the MSBE under the target policy: what control minimises over theta."""
    return jnp.mean(rho * delta**2)


def literal_follower_loss(delta, rho):
    """Returns Var[rho delta], with the ratio inside the variance: mostly the MSBE."""
    return jnp.var(rho * delta)


def scorer_update(params, follower_batch, leader_batch, rates, follower_loss=follower_loss):
    """Plays one round of the game by plain gradient descent; returns params.

    Each player's target is the value function that it finds.
    """

    # The follower responds, fast, while control stands still.
    def perception_objective(perception):
        fixed_control = Players(perception, params.control)
        delta = bellman_error(fixed_control, follower_batch, state_values(params))
        return follower_loss(delta, follower_batch.rho)

    gradient = jax.grad(perception_objective)(params.perception)
    response = Players(params.perception - rates.follower * gradient, params.control)

    # The leader steps, slowly, on that response, on a batch of its own.
    def control_objective(control):
        fixed_perception = Players(response.perception, control)
        delta = bellman_error(fixed_perception, leader_batch, state_values(response))
        return leader_loss(delta, leader_batch.rho)

    gradient = jax.grad(control_objective)(params.control)
    return Players(response.perception, params.control - rates.leader * gradient)


def inverted_roles_update(params, follower_batch, leader_batch, rates):
    """Plays a round with the roles exchanged: control follows, fast, on the variance."""

    def control_objective(control):
        fixed_perception = Players(params.perception, control)
        delta = bellman_error(fixed_perception, follower_batch, state_values(params))
        return follower_loss(delta, follower_batch.rho)

    gradient = jax.grad(control_objective)(params.control)
    response = Players(params.perception, params.control - rates.follower * gradient)

    def perception_objective(perception):
        fixed_control = Players(perception, response.control)
        delta = bellman_error(fixed_control, leader_batch, state_values(response))
        return leader_loss(delta, leader_batch.rho)

    gradient = jax.grad(perception_objective)(params.perception)
    return Players(params.perception - rates.leader * gradient, response.control)


def baseline_update(params, batch, rate):
    """Steps both layers on the MSBE at one rate: what SCORER is compared with."""

    def objective(both_layers):
        delta = bellman_error(both_layers, batch, state_values(params))
        return leader_loss(delta, batch.rho)

    gradient = jax.grad(objective)(params)
    return jax.tree.map(lambda layer, slope: layer - rate * slope, params, gradient)


def linear_td_update(params, batch, rate, target_values):
    """Steps w <- w + alpha E[rho delta x(s)]: w is control, and perception stays the identity.

    That is, as usual for TD, half the gradient of the MSBE.
    """
    delta = bellman_error(params, batch, target_values)
    features = jnp.asarray(FEATURES)[batch.state]  # [batch, feature]
    step = jnp.mean((batch.rho * delta)[:, None] * features, axis=0)
    return params._replace(control=params.control + rate * step)


# ==================================================================================================
# Training
# ==================================================================================================

LINEAR_TD = "linear TD"
TARGET_NETWORK = "linear TD, target network"  # the control: no game, and yet it survives
ONE_OPTIMIZER = "two layers, one optimiser"
SCORER = "SCORER"
MSBE_FOLLOWER = "SCORER, MSBE follower"
LITERAL_FOLLOWER = "SCORER, Var[rho delta] follower"
INVERTED_ROLES = "inverted roles"
METHODS = (
    LINEAR_TD,
    TARGET_NETWORK,
    ONE_OPTIMIZER,
    SCORER,
    MSBE_FOLLOWER,
    LITERAL_FOLLOWER,
    INVERTED_ROLES,
)


def update_all(params, follower_batch, leader_batch, rates, target_values):
    """Makes one update of each method, all from the same batches; params are by method.

    target_values [state] are those of the target network, for the one method that has one.
    """
    linear_td = params[LINEAR_TD]
    target_network = params[TARGET_NETWORK]
    follower_and_leader = follower_batch, leader_batch, rates
    return {
        LINEAR_TD: linear_td_update(linear_td, leader_batch, rates.leader, state_values(linear_td)),
        TARGET_NETWORK: linear_td_update(target_network, leader_batch, rates.leader, target_values),
        ONE_OPTIMIZER: baseline_update(params[ONE_OPTIMIZER], leader_batch, rates.leader),
        SCORER: scorer_update(params[SCORER], *follower_and_leader),
        MSBE_FOLLOWER: scorer_update(
            params[MSBE_FOLLOWER], *follower_and_leader, follower_loss=leader_loss
        ),
        LITERAL_FOLLOWER: scorer_update(
            params[LITERAL_FOLLOWER], *follower_and_leader, follower_loss=literal_follower_loss
        ),
        INVERTED_ROLES: inverted_roles_update(params[INVERTED_ROLES], *follower_and_leader),
    }


def measure(params):
    """Returns the root mean squares over states of Bellman error and value error, [2, methods].

    Where a method's values have overflowed, both are infinite.
    """
    values = jnp.stack([state_values(params[method]) for method in METHODS])  # [methods, state]
    bellman_errors = GAMMA * values[:, 6:] - values  # of the target policy, which leads to state 7
    rms = jnp.sqrt(jnp.mean(jnp.stack([bellman_errors, values]) ** 2, axis=-1))
    return jnp.where(jnp.isnan(rms), jnp.inf, rms)


class Lane(NamedTuple):
    """A setting and a seed, in which all methods are trained."""

    seed: jax.Array
    start: Players  # of the methods with two layers; linear TD starts from the identity
    rates: Rates


def choose_timesteps(num_updates: int):
    """Returns the updates after which errors are recorded, [T], evenly on a logarithmic axis."""
    return np.unique([0, *np.geomspace(1, num_updates, 200).round().astype(int)])


def make_train(args: Args) -> Callable:
    """Makes the function that trains one lane.

    It returns both errors at the recorded updates, [T, 2, methods], and their largest at any
    update, [2, methods].
    """
    timesteps = choose_timesteps(args.num_updates).astype(np.int32)

    def draw_batches(seed, t):
        """Returns the two players' batches of update t: independent draws, or all transitions."""
        if args.expected:
            everything = transitions(jnp.arange(49, dtype=jnp.int32))
            return everything, everything
        key = jax.random.fold_in(jax.random.key(seed), t)
        numbers = jax.random.randint(key, (2, args.batch_size), 0, 49, jnp.int32)
        return transitions(numbers[0]), transitions(numbers[1])

    def train(lane: Lane):
        def update(t, state):
            params, target_values, peak = state
            is_due = t % args.target_update_interval == 0
            target_values = jnp.where(is_due, state_values(params[TARGET_NETWORK]), target_values)
            follower_batch, leader_batch = draw_batches(lane.seed, t)
            params = update_all(params, follower_batch, leader_batch, lane.rates, target_values)
            return params, target_values, jnp.maximum(peak, measure(params))

        def train_to_next_point(state, span):
            first, end = span
            state = jax.lax.fori_loop(first, end, update, state)
            return state, measure(state[0])

        params = {method: lane.start for method in METHODS}
        params[LINEAR_TD] = params[TARGET_NETWORK] = start("identity")
        first_errors = measure(params)
        state = params, jnp.zeros(7, jnp.float32), first_errors
        spans = timesteps[:-1], timesteps[1:]
        (_, _, peak), errors = jax.lax.scan(train_to_next_point, state, spans)
        return jnp.concatenate([first_errors[None], errors]), peak

    return train


VERDICTS = ("diverged", "grown", "stable", "converged")  # worst first
LETTERS = ("D", "g", "s", "c")  # of each in a table


def verdict(curves, peak):
    """Returns the index into VERDICTS, [...], of both errors' curves [2, ..., T] and peak [2, ...].

    Diverged if an error was above 1e6 at any update; converged if both end at 1 % of their start or
    less; stable if both end below their start; else grown.
    """
    share = (curves[..., -1] / curves[..., 0]).max(axis=0)
    diverged = peak.max(axis=0) > 1e6
    return np.select(
        [diverged, share <= 0.01, share < 1],
        [VERDICTS.index("diverged"), VERDICTS.index("converged"), VERDICTS.index("stable")],
        VERDICTS.index("grown"),
    )


# ==================================================================================================
# The run
# ==================================================================================================


def main():
    """Trains all methods in all lanes, prints what came of them, and writes the record."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a compiled program would not hear Ctrl-C
    args = complete(parse_args())
    jax.config.update("jax_platforms", "cpu")  # seven states: an accelerator has nothing to do
    settings = TABLE if args.table else {name: [getattr(args, name)] for name in TABLE}
    seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.uint32)
    lanes = make_lanes(settings, seeds)
    folder = args.runs_dir / run_name(args)
    make_runs_dir(args.runs_dir)
    say(
        f"{folder}\n{args.num_updates:,} updates of {len(METHODS)} methods, "
        f"{len(lanes.seed)} times each; compiling"
    )

    errors, peak, seconds, compile_seconds = train_lanes(args, lanes)
    curves, peak = by_setting(errors, peak, settings, seeds)
    verdicts = verdict(curves, peak)
    timesteps = choose_timesteps(args.num_updates)
    if args.table:  # the ends alone: the curves of all settings would be megabytes
        timesteps, curves = timesteps[[0, -1]], curves[..., [0, -1]]
        say(describe_table(verdicts))
    else:  # one setting
        curves, peak, verdicts = curves[:, :, 0, 0, 0], peak[:, :, 0, 0, 0], verdicts[:, 0, 0, 0]
        say(describe_run(curves, peak, verdicts))

    arrays = dict(
        timesteps=timesteps,
        seeds=seeds,
        loss=curves[0],
        value_error=curves[1],
        peak_loss=peak[0],
        peak_value_error=peak[1],
        verdict=verdicts,
    )
    write_record(folder, arrays, make_meta(args, settings, seconds, compile_seconds))
    say(f"\n{seconds:.0f} s, and {compile_seconds:.0f} s to compile; saved in {folder}")


def make_lanes(settings: dict, seeds) -> Lane:
    """Returns a lane for each setting and seed, leaves [lanes, ...], the seed changing fastest."""
    lanes = []
    for init in settings["init"]:
        for learning_rate in settings["learning_rate"]:
            for ratio in settings["ratio"]:
                leader = np.float32(learning_rate)
                rates = Rates(follower=leader * np.float32(ratio), leader=leader)
                lanes += [Lane(seed, start(init), rates) for seed in seeds]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)


def train_lanes(args: Args, lanes: Lane):
    """Trains all lanes; returns their errors and peaks, and the seconds of training and compiling."""
    before = time.time()
    train = jax.jit(jax.vmap(make_train(args))).lower(lanes).compile()
    compiled = time.time()
    errors, peak = jax.tree.map(np.asarray, train(lanes))
    return errors, peak, time.time() - compiled, compiled - before


def by_setting(errors, peak, settings: dict, seeds):
    """Returns errors [lanes, T, 2, methods] and peak [lanes, 2, methods] in the order of settings.

    They are then [2, methods, inits, rates, ratios, seeds, T], and the same without T.
    """
    shape = (2, len(METHODS), *(len(values) for values in settings.values()), len(seeds))
    curves = errors.transpose(2, 3, 0, 1).reshape(*shape, -1)
    return curves, peak.transpose(1, 2, 0).reshape(shape)


# --------------------------------------------- Flags ----------------------------------------------


def fail(message: str):
    """Ends the program with one sentence on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def flag(name: str) -> str:
    """Returns an argument's name as one types it."""
    return f"--{name.replace('_', '-')}"


def parse_args() -> Args:
    """Reads the command line."""
    groups = [(group.__name__, group, field(default_factory=group)) for group in Args.__bases__]
    cli = tyro.conf.OmitArgPrefixes[make_dataclass("CommandLine", groups)]
    title, _, commands, *_ = __doc__.split("\n\n")  # the rest is for readers of this file
    try:
        parsed = tyro.cli(cli, description=f"{title}\n\n{commands}", registry=whole_numbers())
    except OSError as error:  # of --help
        give_up_output(error)
        sys.exit()
    except SystemExit:  # after --help, which may not have got through yet
        say("", end="")
        raise
    return Args(
        **{name: value for group in vars(parsed).values() for name, value in vars(group).items()}
    )


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


def complete(args: Args) -> Args:
    """Returns args with defaults where unset; bad input ends in one sentence."""
    if args.table:
        for name, values in TABLE.items():
            if getattr(args, name) is not None:
                fail(
                    f"{flag(name)} {getattr(args, name)} cannot go with --table, "
                    f"which goes through {values}"
                )
    if args.expected and args.num_seeds is not None:
        fail(
            f"--num-seeds {args.num_seeds} cannot go with --expected: exact expectations are the "
            "same for every seed"
        )
    defaults = {} if args.table else dict(DEFAULTS)
    defaults["num_seeds"] = 3 if args.table else 10
    if args.expected:
        defaults["num_seeds"] = 1
    unset = {name: value for name, value in defaults.items() if getattr(args, name) is None}
    args = replace(args, **unset)
    check_numbers(args)
    return args


def check_numbers(args: Args):
    """Ends in one sentence where a number is outside its limits."""
    limits = dict(
        seed=(0, 2**32 - args.num_seeds),
        num_seeds=(1, 1000),
        num_updates=(1, 10**8),
        batch_size=(1, 10**4),
        target_update_interval=(1, 10**8),
        learning_rate=(1e-9, 10),
        ratio=(1e-3, 1e3),
    )
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            fail(f"{flag(name)} {value} must be from {low} to {high}")


# ------------------------------------------ In words ----------------------------------------------


def say(text: str, end: str = "\n"):
    """Prints text; where standard output takes no more, the run goes on without it."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        give_up_output(error)


def give_up_output(error: OSError):
    """Sends all further output nowhere.

    A reader such as `head` may have left, which is no fault; that a disk is full is said.
    """
    if not isinstance(error, BrokenPipeError):
        print(f"standard output cannot be written: {error.strerror}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe_run(curves, peak, verdicts) -> str:
    """Returns a line for each method: medians over seeds, and verdicts.

    curves are [2, methods, seeds, T], peak [2, methods, seeds], verdicts [methods, seeds].
    """
    titles = f"{'Bellman error':>13}{'value error':>13}{'its largest':>13}"
    bellman_error, value_error = curves[:, 0, 0, 0]
    lines = [f"\n{'':33}{titles}   verdict (seeds)"]
    lines.append(f"{'start':33}{bellman_error:13.3g}{value_error:13.3g}")
    for index, method in enumerate(METHODS):
        bellman_error, value_error = np.median(curves[:, index, :, -1], axis=-1)
        largest = np.median(peak[1, index])
        counts = Counter(VERDICTS[number] for number in verdicts[index])
        words = ", ".join(f"{word} ({count})" for word, count in counts.most_common())
        lines.append(
            f"{method:33}{bellman_error:13.3g}{value_error:13.3g}{largest:13.3g}   {words}"
        )
    return "\n".join(lines)


def describe_table(verdicts) -> str:
    """Returns a table for each start: a letter for the worst seed's verdict at each setting.

    verdicts are [methods, inits, rates, ratios, seeds].
    """
    worst = verdicts.min(axis=-1)
    lines = [
        f"\nA letter for each ratio, {TABLE['ratio']}: c converged, s stable, g grown, D diverged"
    ]
    rates = "".join(f"{rate:<7}" for rate in TABLE["learning_rate"])
    words = "".join(f"{word:>11}" for word in reversed(VERDICTS))
    for init_index, init in enumerate(TABLE["init"]):
        lines.append(f"\n{init + ', at the rate of':33}{rates}{words}")
        for method_index, method in enumerate(METHODS):
            cells = worst[method_index, init_index]  # [rates, ratios]
            letters = ""
            for row in cells:
                letters += f"{''.join(LETTERS[number] for number in row):7}"
            counts = ""
            for number in reversed(range(len(VERDICTS))):
                counts += f"{np.sum(cells == number):11}"
            lines.append(f"{method:33}{letters}{counts}")
    return "\n".join(lines)


# ------------------------------------------ The record --------------------------------------------


def run_name(args: Args) -> str:
    """Returns the name of a run's folder: script, environment, variant, seed, time."""
    kind = "expected" if args.expected else "sampled"
    what = "table" if args.table else args.init
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    return f"{Path(__file__).stem}__Baird__{kind}-{what}__s{args.seed}__{now}"


def make_runs_dir(runs_dir: Path):
    """Makes the folder of runs, or ends in one sentence where it cannot take a new run."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--runs-dir {runs_dir} cannot take a new run: {error}")
    if not os.access(runs_dir, os.W_OK):
        fail(f"--runs-dir {runs_dir} cannot take a new run: it is not writable")


def make_meta(args: Args, settings: dict, seconds: float, compile_seconds: float) -> dict:
    """Returns what results.npz says of the run beside its curves."""
    return dict(
        schema=1,
        script=Path(__file__).stem,
        args=json.loads(json.dumps(vars(args), default=str)),
        methods=METHODS,
        verdicts=VERDICTS,
        axes=settings,
        device=jax.devices()[0].device_kind,
        versions={name: version(name) for name in ("jax", "jaxlib")},
        seconds=seconds,
        compile_seconds=compile_seconds,
        complete=True,
    )


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


def write_record(folder: Path, arrays: dict, meta: dict):
    """Writes results.npz and args.json; where that fails, says so and ends with exit code 1."""
    arrays = arrays | dict(meta=json.dumps(meta))
    args_text = json.dumps(meta["args"], indent=2).encode()
    try:
        folder.mkdir()
        save(folder / "results.npz", lambda file: np.savez_compressed(file, **arrays))
        save(folder / "args.json", lambda file: file.write(args_text))
    except OSError as error:
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
        print(f"error: {folder} cannot be written: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

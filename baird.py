"""Baird's counterexample: SCORER's game where linear TD diverges, in exact expectation or from samples.

Seven states, eight features, reward 0. Behaviour is dashed (6/7: to any of states 1 to 6) or solid (1/7: to state 7);
the target policy is always solid, so each target is gamma V(7), rho is 7 (solid) or 0 (dashed), and V = 0 is true.
Why TD diverges: in expectation V <- V + alpha K (gamma V(7) 1 - V), with K = X X' / 7 of the features X. If all errors
are e, V(7) rises by 17/7 alpha e and the others by 12/7: as 0.99 * 17 > 12, their errors grow. Two layers with one
loss, also with a follower that minimises the mean square (MSBE), start with the same step, only longer.
What the variance does: all targets are one number, so Var[delta] = Var[V]. The follower's objective bootstraps from
nothing, and small enough steps of it flatten V; on a flat V = m the leader's errors all are (gamma - 1) m: its steps
shrink m. While the layers' sizes hold, V <- V + alpha K ((gamma V(7) 1 - V) + r (mean(V) 1 - V)), which contracts where
r, how much faster the variance's player moves V than the other, is above 0.8. It does not matter which layer that is.
All this is owed to the star: where targets differ, the variance bootstraps too. The literal Var[rho delta] is
7 E[delta^2] - E[delta]^2, mostly MSBE. Paper: Martinez et al., "Stackelberg Coupling of Online Representation Learning
and RL", ICLR 2026, section 5.

    python baird.py                        # all methods from samples, 10 seeds: a quarter of a minute on a laptop
    python baird.py --table --expected     # all methods, exactly, over learning rates, ratios and factorisations
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,<0.12", "tyro>=1.0.17"]
# ///
import itertools, json, signal, sys, time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
import jax
import jax.numpy as jnp
import numpy as np
import tyro

# ------------------------------ Arguments -----------------------------------------------------------------------------
Count = Annotated[int, tyro.constructors.PrimitiveConstructorSpec(  # a whole number, also when written as 1e6
    nargs=1, metavar="INT", instance_from_str=lambda words: int(repr(float(words[0])).removesuffix(".0")),
    is_instance=lambda x: isinstance(x, int), str_from_instance=lambda x: [str(x)])]

@dataclass
class Args:
    # Experiment
    expected: bool = False  # exact expectations in place of sampled batches
    table: bool = False  # all combinations of --init, --learning-rate and --ratio in TABLE: verdicts, no curves
    seed: Count = 0  # first seed
    num_seeds: Count | None = None  # seeds of the samples: seed, seed + 1, ... (10; --table 3; --expected has none)
    num_updates: Count = 20_000  # updates per run
    # Algorithm
    init: Literal["balanced", "identity"] | None = None  # perception c I, control w / c: c = sqrt|w| (balanced), else 1
    learning_rate: float | None = None  # of the leader, of linear TD and of the one optimiser (0.01)
    ratio: float | None = None  # the follower's rate is so many times the leader's (5)
    batch_size: Count = 64  # transitions per sampled batch; each player draws its own
    target_update_interval: Count = 100  # updates between target updates; only linear TD with a target network has them
    # Output
    runs_dir: Path = Path("runs")  # the folder that gets one folder per run

DEFAULTS = dict(init="balanced", learning_rate=0.01, ratio=5.0)  # rates as far apart as the paper's on MinAtar
TABLE = dict(init=["balanced", "identity"], learning_rate=[0.001, 0.003, 0.01, 0.03, 0.1], ratio=[1, 2, 5, 10, 20])

def fail(message: str):
    """Ends the program with one sentence on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)

def check(args: Args) -> Args:
    """args with defaults where unset; bad input ends in one sentence."""
    for name, value in vars(args).items():
        if args.table and name in TABLE and value is not None:
            fail(f"--{name.replace('_', '-')} {value} cannot go with --table, which goes through {TABLE[name]}")
    if args.expected and args.num_seeds is not None:
        fail(f"--num-seeds {args.num_seeds} cannot go with --expected: exact expectations are the same for every seed")
    unset = dict(num_seeds=1 if args.expected else 3 if args.table else 10) | ({} if args.table else DEFAULTS)
    args = replace(args, **{name: value for name, value in unset.items() if getattr(args, name) is None})
    limits = dict(seed=(0, 2**32 - args.num_seeds), num_seeds=(1, 1000), num_updates=(1, 10**8), batch_size=(1, 10**4),
                  target_update_interval=(1, 10**8), learning_rate=(1e-9, 10), ratio=(1e-3, 1e3))
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            fail(f"--{name.replace('_', '-')} {value} must be from {low} to {high}")
    return args

# ------------------------------ The star ------------------------------------------------------------------------------
GAMMA = 0.99
DASHED = np.tile(np.array([1, 1, 1, 1, 1, 1, 0]) / 6, (7, 1))  # [state, next state], probabilities
SOLID = np.tile(np.eye(7)[6], (7, 1))
BEHAVIOR = 6 / 7 * DASHED + 1 / 7 * SOLID  # uniform, and so is its stationary distribution
FEATURES = np.block([[2 * np.eye(6), np.zeros((6, 1)), np.ones((6, 1))], [np.zeros((1, 6)), 1, 2]])  # X [state, 8]
START = np.array([1.0, 1, 1, 1, 1, 1, 10, 1])  # w: the value function X w that every method starts from

class Batch(NamedTuple):
    state: jax.Array  # [batch]
    next_state: jax.Array
    rho: jax.Array  # target over behaviour probability of the action: 7 where solid, 0 where dashed

def transitions(number) -> Batch:
    """Transitions 0 to 48, one for each pair of state and next state: under BEHAVIOR all are equally likely, and solid
    is what leads to state 7. So each once is the exact expectation, and random ones are independent samples."""
    return Batch(number // 7, number % 7, 7.0 * (number % 7 == 6))

class Players(NamedTuple):
    perception: jax.Array  # phi [feature, latent], the follower's
    control: jax.Array  # theta [latent], the leader's

def values(params: Players):
    """V [state] = X phi theta."""
    return FEATURES @ params.perception @ params.control

def start(init: str) -> Players:
    """A factorisation of w. Balanced: at one rate, a step of either layer moves V equally far, as c^2 = |w / c|^2."""
    c = np.sqrt(np.linalg.norm(START)) if init == "balanced" else 1.0
    return Players(c * jnp.eye(8), jnp.array(START / c))

# ------------------------------ The game ------------------------------------------------------------------------------
def errors(params: Players, batch: Batch, target):
    """delta = gamma V_target(s') - V(s), [batch]; `target` holds values [state], not parameters: it has no gradient."""
    return GAMMA * target[batch.next_state] - values(params)[batch.state]

def mean_square(params: Players, batch: Batch, target):
    """E[rho delta^2], the MSBE under the target policy's actions: the leader's loss, without a factor 1/2."""
    return jnp.mean(batch.rho * errors(params, batch, target) ** 2)

def variance(params: Players, batch: Batch, target):
    """sum(rho d^2) / sum(rho) - (sum(rho d) / sum(rho))^2, the follower's; 0 for a batch without a solid action."""
    delta, share = errors(params, batch, target), batch.rho / jnp.maximum(batch.rho.sum(), 1.0)
    return jnp.sum(share * (delta - jnp.sum(share * delta)) ** 2)  # the same, without cancellation

def literal_variance(params: Players, batch: Batch, target):
    """Var[rho delta] over the batch: the ratio inside the variance."""
    return jnp.var(batch.rho * errors(params, batch, target))

def descend(objective, player: str, params: Players, batch: Batch, rate) -> Players:
    """One step of plain gradient descent by one player; the target is the present value function."""
    def loss(part):
        return objective(params._replace(**{player: part}), batch, values(params))
    part = getattr(params, player)
    return params._replace(**{player: part - rate * jax.grad(loss)(part)})

def scorer(objective, params: Players, follower: Batch, leader: Batch, slow, fast, target) -> Players:
    """Perception responds fast on its objective; then control steps slowly on the MSBE, on a batch of its own."""
    params = descend(objective, "perception", params, follower, fast)
    return descend(mean_square, "control", params, leader, slow)

def inverted_roles(params: Players, follower: Batch, leader: Batch, slow, fast, target) -> Players:
    """Control follows, fast and on the variance; perception leads, slowly and on the MSBE."""
    params = descend(variance, "control", params, follower, fast)
    return descend(mean_square, "perception", params, leader, slow)

def one_optimizer(params: Players, follower: Batch, leader: Batch, slow, fast, target) -> Players:
    """Both layers descend the MSBE together, at the leader's rate."""
    gradient = jax.grad(mean_square)(params, leader, values(params))
    return jax.tree.map(lambda part, g: part - slow * g, params, gradient)

def linear_td(params: Players, follower: Batch, leader: Batch, slow, fast, target) -> Players:
    """w <- w + alpha E[rho delta x(s)], as usual half the MSBE's gradient; w is control, and perception stays I."""
    delta = errors(params, leader, values(params) if target is None else target)
    step = jnp.mean((leader.rho * delta)[:, None] * jnp.take(FEATURES, leader.state, axis=0), axis=0)
    return params._replace(control=params.control + slow * step)

TARGET_NETWORK = "linear TD, target network"  # the control: no game, and yet it survives
METHODS = {"linear TD": linear_td, TARGET_NETWORK: linear_td, "two layers, one optimiser": one_optimizer,
           "SCORER": partial(scorer, variance), "SCORER, MSBE follower": partial(scorer, mean_square),
           "SCORER, Var[rho delta] follower": partial(scorer, literal_variance), "inverted roles": inverted_roles}

# ------------------------------ Training ------------------------------------------------------------------------------
def measure(params) -> jax.Array:
    """Roots of the mean squares over states of Bellman error and value error, [2, methods]; where lost, infinite."""
    v = jnp.stack([values(p) for p in params])  # [methods, state]
    rms = jnp.sqrt(jnp.mean(jnp.stack([GAMMA * v[:, 6:] - v, v]) ** 2, axis=-1))
    return jnp.where(jnp.isnan(rms), jnp.inf, rms)

def make_train(args: Args):
    """train(seed, init, slow, fast): all methods side by side on the same batches, from the same value function ->
    both errors at `timesteps`, [T, 2, methods], and their largest at any update, [2, methods]; and timesteps, [T]."""
    timesteps = np.unique([0, *np.geomspace(1, args.num_updates, 200).round().astype(int)])  # for a logarithmic axis
    def train(seed, init: Players, slow, fast):
        def update(t, state):
            params, target, peak = state
            number = jax.random.randint(jax.random.fold_in(jax.random.key(seed), t), (2, args.batch_size), 0, 49)
            follower, leader = [transitions(jnp.arange(49) if args.expected else n) for n in number]
            old = values(params[list(METHODS).index(TARGET_NETWORK)])
            target = jnp.where(t % args.target_update_interval == 0, old, target)
            params = [method(p, follower, leader, slow, fast, target if name == TARGET_NETWORK else None)
                      for (name, method), p in zip(METHODS.items(), params)]
            return params, target, jnp.maximum(peak, measure(params))
        def point(state, span):
            state = jax.lax.fori_loop(*span, update, state)
            return state, measure(state[0])
        params = [start("identity") if method is linear_td else init for method in METHODS.values()]
        first = measure(params)
        state, rest = jax.lax.scan(point, (params, jnp.zeros(7), first), (timesteps[:-1], timesteps[1:]))
        return jnp.concatenate([first[None], rest]), state[2]
    return train, timesteps

VERDICTS = "diverged", "grown", "stable", "converged"  # worst first

def verdict(curves, peak):
    """Index into VERDICTS, [...], of both errors' curves [2, ..., T] and largest values [2, ...]: diverged if one was
    above 1e6 at any update, converged if both end at 1 % of their start or less, stable if below it, else grown."""
    share = (curves[..., -1] / curves[..., 0]).max(axis=0)
    return np.where(peak.max(axis=0) > 1e6, 0, np.where(share <= 0.01, 3, np.where(share < 1, 2, 1)))

# ------------------------------ The run ------------------------------------------------------------------------------
def save(path: Path, write):
    """`write(file)` under a temporary name, then moved: what stands at `path` is whole."""
    with open(partial_path := path.with_name(path.name + ".partial"), "wb") as file:
        write(file)
    partial_path.rename(path)

def print_run(curves, peak, verdicts):
    """Medians over seeds of curves [2, methods, seeds, T] and peak [2, methods, seeds], verdicts [methods, seeds]."""
    print(f"\n{'':33}{'Bellman error':>13}{'value error':>13}{'its largest':>13}   verdict (seeds)")
    rows = [("start", *curves[:, 0, 0, 0], "")]
    ends, most = np.median(curves[..., -1], axis=-1), np.median(peak[1], axis=-1)
    for index, name in enumerate(METHODS):
        counts = Counter(VERDICTS[v] for v in verdicts[index])
        said = ", ".join(f"{word} ({count})" for word, count in counts.most_common())
        rows.append((name, *ends[:, index], f"{most[index]:13.3g}   {said}"))
    for name, bellman, value, more in rows:
        print(f"{name:33}{bellman:13.3g}{value:13.3g}{more}".rstrip())

def print_table(verdicts):
    """The worst seed's verdict, of verdicts [methods, inits, rates, ratios, seeds], a letter for each ratio."""
    worst = verdicts.min(axis=-1)
    print(f"\nA letter for each ratio, {TABLE['ratio']}: c converged, s stable, g grown, D diverged")
    for column, init in enumerate(TABLE["init"]):
        print(f"\n{init + ', at the rate of':33}" + "".join(f"{rate:<7}" for rate in TABLE["learning_rate"])
              + "".join(f"{word:>11}" for word in VERDICTS[::-1]))
        for row, name in enumerate(METHODS):
            cells = worst[row, column]  # [rates, ratios]
            letters = ["".join("Dgsc"[v] for v in rate) for rate in cells]
            print(f"{name:33}" + "".join(f"{word:7}" for word in letters)
                  + "".join(f"{(cells == v).sum():11}" for v in (3, 2, 1, 0)))

def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a compiled program does not look up: Ctrl-C ends it at once
    args = check(tyro.cli(Args, description=__doc__))
    jax.config.update("jax_platforms", "cpu")  # seven states: an accelerator would do nothing but start kernels
    axes = TABLE if args.table else {name: [getattr(args, name)] for name in TABLE}
    seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.uint32)
    inits, slow, ratio, lane_seeds = zip(*itertools.product(*axes.values(), seeds))  # a lane for each combination
    lanes = (np.array(lane_seeds), jax.tree.map(lambda *x: jnp.stack(x), *map(start, inits)), np.float32(slow),
             np.float32(slow) * np.float32(ratio))
    variant = "-".join(["expected" if args.expected else "sampled", "table" if args.table else args.init])
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 10**6:06d}"
    run = args.runs_dir / f"{Path(__file__).stem}__Baird__{variant}__s{args.seed}__{stamp}"
    meta = dict(schema=1, script=Path(__file__).stem, args=json.loads(json.dumps(vars(args), default=str)),
                methods=list(METHODS), verdicts=VERDICTS, axes=axes, device=jax.devices()[0].device_kind,
                versions={name: version(name) for name in ("jax", "jaxlib")})
    try:
        run.mkdir(parents=True)
        save(run / "args.json", lambda file: file.write(json.dumps(meta["args"], indent=2).encode()))
    except OSError as error:
        fail(f"--runs-dir {args.runs_dir} cannot take a new run: {error}")
    print(f"{run}\n{args.num_updates:,} updates of {len(METHODS)} methods in {len(slow)} lanes; compiling", flush=True)
    train, timesteps = make_train(args)
    began = time.time()
    train = jax.jit(jax.vmap(train)).lower(*lanes).compile()
    meta["compile_seconds"], began = time.time() - began, time.time()
    errors, peak = map(np.asarray, train(*lanes))  # [lanes, T, 2, methods], [lanes, 2, methods]
    meta |= dict(seconds=time.time() - began, complete=True)
    shape = (*map(len, axes.values()), len(seeds))
    curves = errors.transpose(2, 3, 0, 1).reshape(2, len(METHODS), *shape, -1)
    peak = peak.transpose(1, 2, 0).reshape(2, len(METHODS), *shape)
    verdicts = verdict(curves, peak)
    if args.table:  # the ends alone: the curves of every cell would be megabytes
        timesteps, curves = timesteps[[0, -1]], curves[..., [0, -1]]
        print_table(verdicts)
    else:  # axes of one value go
        curves, peak, verdicts = curves[:, :, 0, 0, 0], peak[:, :, 0, 0, 0], verdicts[:, 0, 0, 0]
        print_run(curves, peak, verdicts)
    arrays = dict(timesteps=timesteps, seeds=seeds, loss=curves[0], value_error=curves[1], peak_loss=peak[0],
                  peak_value_error=peak[1], verdict=verdicts, meta=json.dumps(meta))
    save(run / "results.npz", lambda file: np.savez_compressed(file, **arrays))
    print(f"\n{meta['seconds']:.0f} s, and {meta['compile_seconds']:.0f} s to compile; saved in {run}", flush=True)

if __name__ == "__main__":
    main()

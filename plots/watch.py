"""Watches a trained agent: plays greedy episodes of a saved model and writes an animation.

    python plots/watch.py docs/models/*Breakout*               # a small model that is here already
    python plots/watch.py runs/scorer_r2d2__... --out door.gif # of a run made with --save-model

Classic control is drawn by gymnax, which needs `pip install "gymnax[visualize]"`.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
import stats
from command import fail
from command import write
from flax.traverse_util import unflatten_dict
from PIL import Image
from safetensors import SafetensorError
from safetensors.flax import load_file
from tyro.conf import Positional

SCRIPTS = (
    "scorer_dqn",
    "scorer_pqn",
    "scorer_r2d2",
    "scorer_bootstrapped_dqn",
    "scorer_pqn_atari",
)
REMOVED_FLAGS = ("compilation_cache", "wandb_mode", "wandb_project")  # of older runs
MOST_STEPS = 30_000  # of an episode

# Colours of MinAtar's channels; of several the first is seen. 0 is the player, 2 mostly a trail.
CHANNELS = (
    "#FFFFFF",
    "#FF5A5F",
    "#565E6E",
    "#F2C14E",
    "#6FD6FF",
    "#FF9F1C",
    "#4A7C59",
    "#3D5A98",
    "#9B72CF",
    "#2EC4B6",
)
BACKGROUND = "#14161C"


class Model(NamedTuple):
    """A saved model, and the script that trained it."""

    path: Path
    script: Any  # the module
    args: Any  # its Args
    seed: int  # the training seed
    params: Any  # of this seed


class Player(NamedTuple):
    """Environments that are stepped together, and the agent that acts in them."""

    reset: Callable  # keys [episodes] -> obs, env_state, memory
    act: Callable  # (obs, memory) -> greedy action [episodes], memory
    step: Callable  # (keys, env_state, action) -> env_state, obs, reward, ended
    draw: Callable  # (obs, env_state), leaves [steps, ...] -> pictures


class Episodes(NamedTuple):
    """What was played."""

    returns: np.ndarray  # [episodes]
    lengths: np.ndarray  # [episodes]
    shown: int  # the episode whose return is the median
    frames: list[Image.Image]  # of the shown one


def main(
    runs: Positional[tuple[Path, ...]],
    out: Path = Path("episode.gif"),
    episodes: int = 30,
    which_seed: int | None = None,
    max_frames: int = 300,
    zoom: int = 16,
):
    """Watches a trained agent: plays greedy episodes of a saved model and writes an animation.

    Args:
        runs: one run folder, made with --save-model.
        out: GIF to write, of the episode whose return is the median.
        episodes: episodes to play.
        which_seed: the training seed to play; by default the run's first.
        max_frames: pictures after which the animation ends.
        zoom: pixels of a cell's side, in MinAtar and Deep Sea.
    """
    if len(runs) != 1:
        fail(f"one run folder is played at a time; {name_newest(runs)}")
    if min(episodes, max_frames, zoom) < 1:
        fail("--episodes, --max-frames and --zoom must be at least 1")
    if out.suffix.lower() != ".gif":
        fail(f"--out {out} must end in .gif")
    model = load_model(runs[0], which_seed)
    if model.script.__name__ == "scorer_pqn_atari":
        played = play_atari(model, episodes, max_frames)
    else:
        player = PLAYERS[model.script.__name__](model, zoom)
        played = play(player, episodes, max_frames)
    mean = stats.bootstrap(np.mean, played.returns)
    interval = f" [{mean.low:.2f}, {mean.high:.2f}]" if episodes > 1 else ""
    print(
        f"{model.args.env}, seed {model.seed}: mean return {mean.value:.2f}{interval} over "
        f"{episodes} greedy episode{'s' if episodes > 1 else ''}"
    )
    first, *others = played.frames
    options = dict(format="GIF", save_all=True, append_images=others, duration=60, loop=0)
    write(out, lambda out: first.save(out, **options))
    shown, length = len(played.frames), played.lengths[played.shown]
    part = "all" if shown >= length else f"the first {shown}"
    print(
        f"{out}: the episode of the median return, {played.returns[played.shown]:.2f}; {part} of its "
        f"{length} steps, {out.stat().st_size / 1000:.0f} kB"
    )


def name_newest(runs: tuple[Path, ...]) -> str:
    """Returns in words which saved model of these is the newest: a run's name ends with its time."""
    found = [run for run in runs if (run / "model.safetensors").exists()]
    if not found:
        return f"of these {len(runs)} none has a model.safetensors"
    last = max(found, key=lambda run: run.name.rpartition("__")[2])
    return f"of these {len(runs)} the newest with a model is {last}"


# ------------------------------------------ Saved models ------------------------------------------


def load_model(folder: Path, which_seed: int | None) -> Model:
    """Returns the model of one seed that a run saved; ends in one sentence where there is none."""
    given = read_args(folder)
    path = folder / "model.safetensors"
    if not path.exists():
        fail(f"{path} does not exist: the run was made without --save-model")
    script = import_script(folder)
    if script.__name__ == "scorer_pqn" and "compilation_cache" in given:
        fail(f"{path} numbers its LayerNorms otherwise than scorer_pqn.py does: train it again")
    args = {name: value for name, value in given.items() if name not in REMOVED_FLAGS}
    try:
        args = script.Args(**args)
    except TypeError:
        fail(f"{folder} is of another version of {script.__name__}.py: its flags are others")
    seeds = range(args.seed, args.seed + args.num_seeds)
    seed = args.seed if which_seed is None else which_seed
    if seed not in seeds:
        known = ", ".join(str(number) for number in seeds)
        fail(f"--which-seed {seed} is not in {path}: it has seeds {known}")
    try:
        leaves = load_file(path)
    except (OSError, SafetensorError) as error:
        fail(f"{path} cannot be read: {error}")
    params = {name: values[seeds.index(seed)] for name, values in leaves.items()}
    return Model(path, script, args, seed, unflatten_dict(params, sep="/"))


def read_args(folder: Path) -> dict:
    """Returns a run's arguments; ends in one sentence where the folder is no run's."""
    if not (folder / "args.json").exists():
        fail(f"{folder} is not the folder of a run: it has no args.json")
    try:
        args = json.loads((folder / "args.json").read_text())
    except (OSError, ValueError):
        args = None
    if not isinstance(args, dict) or "env" not in args:
        fail(f"{folder / 'args.json'} does not hold the arguments of a run")
    return args


def import_script(folder: Path):
    """Returns the script that made a run, as a module; its name begins the folder's."""
    name = folder.resolve().name.split("__")[0]
    if name not in SCRIPTS:
        fail(f"{folder} does not begin with the name of one of {', '.join(SCRIPTS)}")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    return importlib.import_module(name)


def call(model: Model, network, part: str, *inputs):
    """Returns what the player `part` of the saved model makes of these inputs."""
    return network.apply({"params": model.params[part]}, *inputs)


def check_params(model: Model, networks, *inputs):
    """Ends in one sentence unless the saved arrays are those of the networks, given perception's inputs."""
    key = jax.random.key(0)

    def init():
        out, perception = networks.perception.init_with_output(key, *inputs)
        z = out[1] if isinstance(out, tuple) else out
        return dict(
            perception=perception["params"], control=networks.control.init(key, z)["params"]
        )

    expected = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(init))
    saved = {part: model.params.get(part, {}) for part in expected}
    if jax.tree.map(lambda leaf: leaf.shape, saved) != expected:
        script = model.script.__name__
        fail(f"{model.path} holds other networks than this version of {script}.py: train it again")


# --------------------------------------------- Players --------------------------------------------


def make_gymnax_player(model: Model, zoom: int) -> Player:
    """Returns the player of a model of scorer_dqn.py or scorer_pqn.py."""
    env = model.script.make_env(model.args)
    networks = model.script.make_networks(model.args, env.num_actions)
    is_minatar = model.args.env.endswith("-MinAtar")
    if not is_minatar:
        check_drawable(model.args.env)

    def reset(keys):
        obs, env_state = env.reset(keys)
        check_params(model, networks, obs)
        return obs, env_state, ()

    def act(obs, memory):
        z = call(model, networks.perception, "perception", obs)
        return call(model, networks.control, "control", z).argmax(axis=-1), memory

    def step(keys, env_state, action):
        new = env.step(keys, env_state, action)
        return new.env_state, new.obs, new.reward, new.terminated | new.truncated

    def draw(obs, env_state):
        if is_minatar:
            return draw_minatar(obs.reshape(len(obs), 10, 10, -1), zoom)
        return draw_control(model.args.env, env_state.env_state)

    return Player(reset, act, step, draw)


def make_navix_player(model: Model, zoom: int) -> Player:
    """Returns the player of a model of scorer_r2d2.py, which remembers with its hidden state."""
    env = model.script.make_env(model.args)
    networks = model.script.make_networks(model.args, env.num_actions)
    # Nothing is burnt in, and no episode goes on after its last observation.
    perception = networks.perception.clone(burn_in=0)

    def reset(keys):
        obs, env_state = env.reset(keys)
        memory = jnp.zeros((len(keys), model.args.hidden_dim), jnp.float32)
        is_last = jnp.zeros((1, len(keys)), bool)
        check_params(model, networks._replace(perception=perception), memory, obs[None], is_last)
        return obs, env_state, memory

    def act(obs, memory):
        is_last = jnp.zeros((1, len(obs)), bool)
        memory, z = call(model, perception, "perception", memory, obs[None], is_last)
        return call(model, networks.control, "control", z[0]).argmax(axis=-1), memory

    def step(keys, env_state, action):
        new = env.step(env_state, action)
        return new.env_state, new.obs, new.reward, new.terminated | new.truncated

    def draw(obs, env_state):
        from navix.observations import rgb

        pictures = np.asarray(jax.lax.map(rgb, env_state.state))  # [steps, height, width, 3]
        larger = max(1, 256 // pictures.shape[2])
        pictures = pictures.repeat(larger, axis=1).repeat(larger, axis=2)
        return [Image.fromarray(picture).quantize(64) for picture in pictures]

    return Player(reset, act, step, draw)


def make_deep_sea_player(model: Model, zoom: int) -> Player:
    """Returns the player of a model of scorer_bootstrapped_dqn.py: the members play in turn.

    The action that goes right in each cell is that of the seed's training.
    """
    script, args = model.script, model.args
    env = script.make_env(args)
    perception = script.Perception(args.size**2, args.hidden_dim)
    control = script.Control(env.num_actions, args.hidden_dim)

    def values(params, cell):
        z = perception.apply({"params": params["perception"]}, cell)
        return control.apply({"params": params["control"]}, z)

    def reset(keys):
        seed_key = script.random_key(np.uint32(model.seed), script.INITIALIZING)
        map_key = jax.random.split(seed_key, 5)[4]
        cell, env_state = jax.vmap(env.reset, in_axes=(0, None))(keys, map_key)
        return cell, env_state, jnp.arange(len(keys)) % args.num_members

    def act_alone(cell, member):
        params = jax.tree.map(lambda leaf: leaf[member], model.params)
        q = values(params, cell) + args.prior_scale * values(params["prior"], cell)
        return q.argmax()

    def act(cell, member):
        return jax.vmap(act_alone)(cell, member), member

    def step(keys, env_state, action):
        new = jax.vmap(env.step)(keys, env_state, action)
        return new.env_state, new.obs, new.reward, new.terminated

    def draw(cell, env_state):
        return draw_deep_sea(cell, args.size, zoom)

    return Player(reset, act, step, draw)


PLAYERS = {
    "scorer_dqn": make_gymnax_player,
    "scorer_pqn": make_gymnax_player,
    "scorer_r2d2": make_navix_player,
    "scorer_bootstrapped_dqn": make_deep_sea_player,
}


# --------------------------------------------- Playing --------------------------------------------


def play(player: Player, episodes: int, max_frames: int) -> Episodes:
    """Plays episodes side by side, then once more to look at the one whose return is the median."""
    keys = jax.random.split(jax.random.key(0), episodes)

    def advance(number, obs, env_state, memory):
        action, memory = player.act(obs, memory)
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
        env_state, obs, reward, ended = player.step(step_keys, env_state, action)
        return (obs, env_state, memory), reward, ended

    def some_go_on(carry):
        number, _, _, _, ended = carry
        return (number < MOST_STEPS) & ~ended.all()

    def count(carry):
        number, state, returns, lengths, ended = carry
        state, reward, now_ended = advance(number, *state)
        returns = returns + jnp.where(ended, 0.0, reward)
        lengths = lengths + jnp.where(ended, 0, 1)
        return number + 1, state, returns, lengths, ended | now_ended

    @jax.jit
    def play_all():
        zeros = jnp.zeros(episodes, jnp.float32)
        begin = (
            jnp.int32(0),
            player.reset(keys),
            zeros,
            zeros.astype(jnp.int32),
            zeros.astype(bool),
        )
        _, _, returns, lengths, _ = jax.lax.while_loop(some_go_on, count, begin)
        return returns, lengths

    returns, lengths = (np.asarray(x) for x in play_all())
    shown = int(np.argsort(returns, kind="stable")[episodes // 2])

    def look(state, number):
        obs, env_state, _ = state
        seen = jax.tree.map(lambda leaf: leaf[shown], (obs, env_state))
        state, _, _ = advance(number, *state)
        return state, seen

    @jax.jit
    def film():
        steps = jnp.arange(min(int(lengths[shown]), max_frames), dtype=jnp.int32)
        return jax.lax.scan(look, player.reset(keys), steps)[1]

    obs, env_state = film()
    return Episodes(returns, lengths, shown, player.draw(np.asarray(obs), env_state))


def play_atari(model: Model, episodes: int, max_frames: int) -> Episodes:
    """Plays whole games of envpool with the options of training, but all lives in one episode."""
    import envpool

    names = ("frame_skip", "noop_max", "max_episode_steps")
    options = {name: getattr(model.args, name) for name in names}
    pool = envpool.make(
        model.args.env,
        "gymnasium",
        num_envs=episodes,
        repeat_action_probability=model.args.sticky_actions,
        **options,
    )
    networks = model.script.make_networks(model.args, pool.action_space.n)

    @jax.jit
    def act(obs):
        z = call(model, networks.perception, "perception", obs)
        return call(model, networks.control, "control", z).argmax(axis=-1).astype(jnp.int32)

    obs, _ = pool.reset()
    check_params(model, networks, obs)
    returns = np.zeros(episodes)
    lengths = np.zeros(episodes, int)
    ended = np.zeros(episodes, bool)
    seen = []
    while not ended.all() and lengths.max() < MOST_STEPS:
        if len(seen) < max_frames:
            seen.append(obs[:, -1].copy())
        obs, reward, terminated, truncated, _ = pool.step(np.asarray(act(obs)))
        returns += np.where(ended, 0.0, reward)
        lengths += np.where(ended, 0, 1)
        ended |= terminated | truncated
    shown = int(np.argsort(returns, kind="stable")[episodes // 2])
    pictures = [frame[shown] for frame in seen[: lengths[shown]]]
    frames = [Image.fromarray(picture).resize((252, 252)) for picture in pictures]
    return Episodes(returns, lengths, shown, frames)


# --------------------------------------------- Drawing --------------------------------------------


def draw_cells(colors, zoom: int, palette: tuple[str, ...]) -> Image.Image:
    """Returns a picture of cells [height, width], numbers into the palette."""
    cells = colors.astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)
    frame = Image.fromarray(cells)
    frame.putpalette([int(color[i : i + 2], 16) for color in palette for i in (1, 3, 5)])
    return frame


def draw_minatar(obs, zoom: int) -> list[Image.Image]:
    """Returns a picture of each observation [steps, height, width, channels]."""
    top = np.where(obs.any(axis=-1), 1 + obs.argmax(axis=-1), 0)
    return [draw_cells(cells, zoom, (BACKGROUND, *CHANNELS)) for cells in top]


def draw_deep_sea(cell, size: int, zoom: int) -> list[Image.Image]:
    """Returns a picture of each cell [steps] in which the diver is, with the diagonal and the treasure."""
    sea = np.zeros((size, size), int)
    np.fill_diagonal(sea, 3)
    sea[-1, -1] = 4
    frames = []
    for number in cell:
        now = sea.copy()
        now.flat[number] = 1
        frames.append(draw_cells(now, zoom, (BACKGROUND, *CHANNELS)))
    return frames


def check_drawable(name: str):
    """Ends in one sentence if gymnax cannot draw this environment of classic control."""
    from gymnax.visualize import vis_gym

    if name not in vis_gym.SUPPORTED_GYM_ENVS:
        drawn = ", ".join(vis_gym.SUPPORTED_GYM_ENVS)
        fail(f"{name} cannot be drawn: gymnax draws only {drawn} and MinAtar")
    if find_spec("pygame") is None:
        fail(f"{name} is drawn by gymnax, which needs: pip install 'gymnax[visualize]'")


def draw_control(name: str, states, width=300) -> list[Image.Image]:
    """Returns a picture, drawn by gymnax, of each state in the leaves [steps, ...]."""
    import gymnax
    from gymnax.visualize import vis_gym

    os.environ |= dict(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")  # no screen, no sound
    _, env_params = gymnax.make(name)
    leaves, structure = jax.tree.flatten(states)
    frames = []
    for values in zip(*leaves):  # of one step
        state = jax.tree.unflatten(structure, values)
        frame = Image.fromarray(vis_gym.render_gym_frame(name, state, env_params))
        frames.append(frame.resize((width, width * frame.height // frame.width)).quantize(16))
    return frames


if __name__ == "__main__":
    command.run(main)

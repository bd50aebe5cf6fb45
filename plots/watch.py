"""Watches a trained agent: plays greedy episodes of a saved model, prints their return and writes an animation.

    python plots/watch.py runs/scorer_dqn__Breakout-MinAtar__scorer__s0__20260101-120000 --out breakout.gif

The run needs --save-model. Classic control is drawn by gymnax, which needs `pip install "gymnax[visualize]"`.
"""

import importlib
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import stats
import tyro
from flax.traverse_util import unflatten_dict
from gymnax.visualize import vis_gym
from PIL import Image
from records import fail, read_run, write
from safetensors.flax import load_file
from tyro.conf import Positional

# Colours of MinAtar's channels; where several are on, the first is seen. 0 is the player, 2 mostly a trail.
CHANNELS = ["#FFFFFF", "#FF5A5F", "#565E6E", "#F2C14E", "#6FD6FF",
            "#FF9F1C", "#4A7C59", "#3D5A98", "#9B72CF", "#2EC4B6"]
BACKGROUND = "#14161C"


def player(run, index):
    """The environment, its parameters, and act(obs) -> greedy action of the run's seed at `index`."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    path = run.path.with_name("model.safetensors")
    if run.meta["script"] not in ("scorer_dqn", "scorer_pqn"):
        fail(f"{run.path} is of {run.env}: only runs of scorer_dqn.py and scorer_pqn.py can be watched here")
    if not path.exists():
        fail(f"{path} does not exist: the run was made without --save-model")
    script = importlib.import_module(run.meta["script"])
    try:
        args = script.Args(**run.meta["args"])
    except TypeError as error:
        fail(f"{run.path} is of another version of {run.meta['script']}.py: {error}")
    env, env_params = gymnax.make(args.env)
    perception, control = script.Perception(args), script.Control(args, env.action_space(env_params).n)
    params = unflatten_dict({name: leaf[index] for name, leaf in load_file(path).items()}, sep="/")

    def act(obs):
        z = perception.apply({"params": params["perception"]}, obs.reshape(-1))
        return control.apply({"params": params["control"]}, z).argmax()

    return env, env_params, act


def play(env, env_params, act, episodes: int):
    """Returns [episodes], lengths [episodes], and the observations and states [episodes, steps, ...] that were seen."""
    def episode(key):
        reset_key, *keys = jax.random.split(key, env_params.max_steps_in_episode + 1)
        obs, state = env.reset(reset_key, env_params)

        def step(carry, key):
            obs, state = carry
            new_obs, new_state, reward, terminated, truncated, _ = env.step(key, state, act(obs), env_params)
            return (new_obs, new_state), (obs, state, reward, terminated | truncated)

        _, (obs, states, rewards, done) = jax.lax.scan(step, (obs, state), jnp.stack(keys))
        length = 1 + jnp.argmax(done)
        return jnp.sum(rewards, where=jnp.arange(len(done)) < length), length, obs, states

    return jax.jit(lambda keys: jax.lax.map(episode, keys))(jax.random.split(jax.random.key(0), episodes))


def minatar_frames(obs, zoom: int) -> list[Image.Image]:
    """One picture with a palette for each observation [steps, height, width, channels]."""
    top = np.where(obs.any(axis=-1), 1 + obs.argmax(axis=-1), 0).astype(np.uint8)
    palette = [int(color[i : i + 2], 16) for color in [BACKGROUND, *CHANNELS] for i in (1, 3, 5)]
    frames = []
    for cells in top:
        frame = Image.fromarray(cells.repeat(zoom, axis=0).repeat(zoom, axis=1), mode="P")
        frame.putpalette(palette)
        frames.append(frame)
    return frames


def check_drawable(env):
    """One sentence and exit code 2 if gymnax cannot draw this environment of classic control."""
    if env.name not in vis_gym.SUPPORTED_GYM_ENVS:
        fail(f"{env.name} cannot be drawn: gymnax draws only {', '.join(vis_gym.SUPPORTED_GYM_ENVS)} and MinAtar")
    if find_spec("pygame") is None:
        fail(f"{env.name} is drawn by gymnax, which needs: pip install 'gymnax[visualize]'")


def control_frames(env, env_params, states, width=300) -> list[Image.Image]:
    """One picture, drawn by gymnax, for each state in the leaves [steps, ...]."""
    os.environ |= dict(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")  # pictures need no screen and no sound card
    frames = []
    for step in range(len(states.time)):
        state = jax.tree.map(lambda leaf: leaf[step], states)
        frame = Image.fromarray(vis_gym.render_gym_frame(env.name, state, env_params))
        frames.append(frame.resize((width, width * frame.height // frame.width)).quantize(16))
    return frames


def main(run: Positional[Path], out: Path = Path("episode.gif"), episodes: int = 30, which_seed: int | None = None,
         max_frames: int = 300, zoom: int = 16):
    """Watches a trained agent: plays greedy episodes of a saved model, prints their return and writes an animation.

    Args:
        run: run folder, made with --save-model.
        out: GIF to write, of the episode whose return is the median.
        episodes: episodes to play.
        which_seed: the training seed to play; by default the run's first.
        max_frames: pictures after which the animation ends.
        zoom: pixels of a MinAtar cell's side.
    """
    if min(episodes, max_frames, zoom) < 1:
        fail("--episodes, --max-frames and --zoom must be at least 1")
    if out.suffix != ".gif":
        fail(f"--out {out} must end in .gif")
    record = read_run(run)
    seed = int(record.seeds[0]) if which_seed is None else which_seed
    if seed not in record.seeds:
        fail(f"--which-seed {seed} is not in {record.path}: it has seeds {', '.join(map(str, record.seeds))}")
    env, env_params, act = player(record, list(record.seeds).index(seed))
    if not (minatar := env.name.endswith("-MinAtar")):
        check_drawable(env)
    returns, lengths, obs, states = jax.tree.map(np.asarray, play(env, env_params, act, episodes))
    mean = stats.bootstrap(np.mean, returns)
    interval = f"[{mean.low:.2f}, {mean.high:.2f}]"
    print(f"{env.name}, seed {seed}: mean return {mean.value:.2f} {interval} over {episodes} greedy episodes")
    shown = np.argsort(returns)[episodes // 2]
    obs, states = jax.tree.map(lambda leaf: leaf[shown, : min(lengths[shown], max_frames)], (obs, states))
    frames = minatar_frames(obs, zoom) if minatar else control_frames(env, env_params, states)
    write(out, partial(frames[0].save, format="GIF", save_all=True, append_images=frames[1:],
                       duration=80 if minatar else 40, loop=0))
    size = out.stat().st_size / 1000
    print(f"{out}: return {returns[shown]:.2f}, {len(frames)} of {lengths[shown]} steps, {size:.0f} kB")


if __name__ == "__main__":
    tyro.cli(main)

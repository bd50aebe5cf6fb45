"""Speed: what the scripts cost on this machine, how cost grows, and that devices do not talk.

    python plots/speed.py --out speed.json                # some 10 minutes on a GPU
    python plots/speed.py --grow --figure growth.png      # 1 to 480 seeds, 32 to 2,048 environments
    python plots/speed.py --saved speed.json --grow       # table and figure of what was measured
    python plots/speed.py --check-communication           # collective operations in the training
    python plots/speed.py --envpool Pong-v5               # what Atari's emulators give by themselves

Scripts are measured by starting them as one would.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from typing import NamedTuple

import command
import numpy as np
import style
import tyro
from command import fail
from command import write

ROOT = Path(__file__).parents[1]
# Prints the platform, its description and the number of devices; a process of its own lets go of them.
PROBE = """
import jax, json, os
devices = jax.devices()
kind = f"{devices[0].device_kind}, JAX {jax.__version__}"
if devices[0].platform == "cpu":
    kind = f"{os.cpu_count()} cores of a {kind}"
print(json.dumps([devices[0].platform, kind, len(devices)]))
"""
NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|MemoryError", re.IGNORECASE)
COLLECTIVE = re.compile(
    r"\b(?:all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter)"
    r"(?:-start)?\("
)
MEASURED = ("seconds", "compile_seconds", "wall_seconds", "timesteps")


class Config(NamedTuple):
    """What is measured; runs alike in this are repeats."""

    script: Path | str
    num_seeds: int
    scorer: bool = True
    diagnostics: bool = False
    num_envs: int | None = None  # None: the script's preset
    devices: int = 1


Compared = Literal["baseline", "diagnostics", "devices"]


@dataclass
class Options:
    """What is measured, and where it goes."""

    scripts: tuple[Path, ...] = (Path("scorer_dqn.py"), Path("scorer_pqn.py"))
    """Scripts to measure, as paths from the repository's root."""
    env: str | None = "Breakout-MinAtar"
    """Their environment; None: each one's own."""
    seeds: tuple[int, ...] = (1, 30)
    """Numbers of seeds in one program."""
    compare: tuple[Compared, ...] = ("baseline", "diagnostics", "devices")
    """What to measure beside SCORER on one device; devices: all GPUs with the most of --seeds on
    each."""
    steps: float | None = None
    """Environment steps per seed of a measured run (5e6 on a GPU, 2 to 15 seconds; else 1e5)."""
    repeats: int = 3
    """Runs of everything; with one there is no second start."""
    grow: bool = False
    """Measure and draw how SCORER's cost grows, in place of --seeds and --compare."""
    grow_seeds: tuple[int, ...] = (1, 10, 30, 120, 480)
    """Numbers of seeds, with the preset's environments."""
    grow_envs: tuple[int, ...] = (32, 128, 512, 2048)
    """Numbers of environments, with one seed and as many steps of all of them as in the preset."""
    figure: Path = Path("growth.png")
    """Picture of --grow; its ending names the format."""
    out: Path | None = None
    """JSON file to write with every run; it must not exist."""
    saved: tuple[Path, ...] = ()
    """Files of --out, all of one machine, to show in place of measuring."""
    check_communication: bool = False
    """Count the collective operations in SCORER's compiled training on all GPUs (with fewer than
    two, on four CPU devices) in place of measuring; exit code 1 if there are any."""
    envpool: str | None = None
    """Atari game whose emulators are stepped by themselves, in place of measuring."""


def main(options: tyro.conf.OmitArgPrefixes[Options]):
    """Speed: what the scripts cost on this machine, how cost grows, and that devices do not talk."""
    check(options)
    stopped = False
    if options.envpool:
        print(
            f"envpool, {options.envpool}: {envpool_steps(options.envpool):,.0f} steps/s by itself"
        )
        return
    if options.saved:
        title, runs = read_saved(options)
    else:
        platform, device, count = probe()
        gpus = count if platform == "gpu" else 0
        if options.check_communication:
            sys.exit(1 if check_communication(options, gpus) else 0)
        title = f"{device}, {options.env or 'each script with its own environment'}"
        runs = []
        try:
            measure(options, list_configs(options, gpus), gpus, runs)
        except KeyboardInterrupt:
            stopped = True
            print("stopped; this is what was measured:", file=sys.stderr)
    print(table(runs, title), end="")
    if options.out:
        write(options.out, lambda out: write_new(out, dict(title=title, runs=runs)))
    if options.grow and step_us(runs):
        draw(runs, options.figure)
    sys.exit(130 if stopped else 0)


def write_new(out: Path, content: dict):
    """Writes JSON to a file that must not exist, also if another made it meanwhile."""
    with open(out, "x") as file:
        json.dump(content, file, indent=1)


# --------------------------------------------- Checks ---------------------------------------------


def check(options: Options):
    """Ends in one sentence where the options cannot be used."""
    for script in options.scripts:
        if not (ROOT / script).is_file():
            fail(f"--scripts {ROOT / script} does not exist")
    numbers = [*options.seeds, *options.grow_seeds, *options.grow_envs, options.repeats]
    if options.steps is not None:
        numbers.append(options.steps)
    given = options.scripts and options.seeds and options.grow_seeds
    if not given or not all(1 <= number <= 2**40 for number in numbers):
        fail(
            "--scripts, --seeds and --grow-seeds need values, and all numbers must be from 1 to "
            f"{2**40:,}"
        )
    if options.out and options.out.exists():
        fail(f"--out {options.out} exists and is never overwritten")
    if options.out and not options.out.parent.is_dir():
        fail(f"--out {options.out} needs an existing folder, {options.out.parent}")
    style.check_format("--figure", options.figure)


def read_saved(options: Options) -> tuple[str, list[dict]]:
    """Returns title and runs of the files of --saved; ends in one sentence where they do not fit."""
    names = " ".join(str(path) for path in options.saved)
    files = [read(path) for path in options.saved]
    titles = sorted({file["title"] for file in files})
    if len(titles) > 1:
        fail(f"--saved has files of different machines or environments: {', '.join(titles)}")
    runs = [run for file in files for run in file["runs"]]
    measurements = {(run["session"], run["round"], config_of(run)) for run in runs}
    if len(measurements) < len(runs):
        fail(f"--saved {names} has a measurement twice")
    if options.grow and len({(run["num_seeds"], run["num_envs"]) for run in runs}) < 2:
        fail(f"--saved {names} has one number of seeds and environments, so no growth")
    return titles[0], runs


def read(path: Path) -> dict:
    """Returns what --out wrote, title and runs; ends in one sentence where it is something else."""
    try:
        saved = json.loads(path.read_text())
    except OSError as error:
        fail(f"--saved {path} cannot be read: {error.strerror or error}")
    except ValueError:
        fail(f"--saved {path} was not written by --out: it is no JSON")
    is_whole = isinstance(saved, dict) and isinstance(saved.get("title"), str)
    if not is_whole or not isinstance(saved.get("runs"), list):
        fail(f"--saved {path} was not written by --out: it has no title and runs")
    for number, run in enumerate(saved["runs"]):
        fault = fault_of(run)
        if fault:
            fail(f"--saved {path} was not written by --out: run {number} {fault}")
    return saved


def fault_of(run) -> str | None:
    """Returns what is wrong with a run as --out writes it, or None."""
    if not isinstance(run, dict):
        return "is no object"
    numbers = ["session", "round", "num_seeds", "devices"]
    if run.get("seconds", 0) is not None:
        numbers += [*MEASURED, "num_envs"]  # None: there was no memory
    for name in numbers:
        value = run.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least = 0 if name in ("session", "round", "compile_seconds") else 1e-9
        if not is_number or not least <= value < np.inf:
            return f"has no number {name}"
    for name in ("scorer", "diagnostics"):
        if not isinstance(run.get(name), bool):
            return f"does not say {name}"
    if "seconds" not in run or "num_envs" not in run or not isinstance(run.get("script"), str):
        return "does not say seconds, num_envs and script"
    return None


# -------------------------------------------- Measuring -------------------------------------------


def probe() -> tuple[str, str, int]:
    """Returns the platform of JAX's devices, their description and their number."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        fail(f"JAX finds no device: {last_line(done.stderr)}")
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def last_line(text: str) -> str:
    """Returns the last line of a text that has something on it, or nothing."""
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")


def list_configs(options: Options, gpus: int) -> list[Config]:
    """Returns what is to be measured, in the order of a round."""
    configs = []
    for script in [ROOT / script for script in options.scripts]:
        if options.grow:
            configs += [Config(script, number) for number in options.grow_seeds]
            configs += [Config(script, 1, num_envs=number) for number in options.grow_envs]
            continue
        for number in options.seeds:
            configs.append(Config(script, number))
            if "baseline" in options.compare:
                configs.append(Config(script, number, scorer=False))
            if "diagnostics" in options.compare:
                configs.append(Config(script, number, diagnostics=True))
            if "devices" in options.compare and gpus > 1 and number == max(options.seeds):
                configs.append(Config(script, number * gpus, devices=gpus))
    return configs


def measure(options: Options, configs: list[Config], gpus: int, runs: list[dict]):
    """Appends to `runs`, in rounds of one run of every configuration: drift hits all alike.

    Each configuration has a cache of compiled programs of its own, empty in round 0.
    """
    steps = int(options.steps or (5e6 if gpus else 1e5))
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    preset = {}  # number of environments by script
    session = time.time()  # tells measurements from each other
    with tempfile.TemporaryDirectory(prefix="speed") as temporary:
        for number in range(options.repeats):
            for place, config in enumerate(configs):
                usual = preset.get(config.script)
                same = config._replace(num_envs=None)
                if config.num_envs == usual and same in configs[:place]:
                    continue  # has just been run
                flags = list_flags(config, options.env, steps, usual)
                variables = dict(XDG_CACHE_HOME=f"{temporary}/cache{place}")
                if config.devices == 1:
                    variables["CUDA_VISIBLE_DEVICES"] = first_gpu
                meta = start(
                    config.script, flags, Path(temporary, f"{number}-{place}"), **variables
                )
                if meta:
                    preset.setdefault(config.script, meta["args"].get("num_envs", 1))
                run = describe_run(config, preset.get(config.script), meta)
                runs.append(run | dict(session=session, round=number))
                words = " ".join(str(word) for word in (config.script.name, *flags))
                where = f"round {number + 1}, {place + 1} of {len(configs)}"
                us = spread(step_us([run]), ",.1f")
                print(f"{where}: {words}: {us} us a vector step", file=sys.stderr)


def list_flags(config: Config, env: str | None, steps: int, usual_envs: int | None) -> list:
    """Returns a script's flags; with other environments than usual, as many steps of all of them."""
    total = steps
    if config.num_envs and usual_envs:
        total = round(steps * config.num_envs / usual_envs)
    flags = ["--num-seeds", config.num_seeds, "--total-timesteps", total]
    if env:
        flags += ["--env", env]
    if config.scorer:
        flags.append("--scorer")
    if config.diagnostics:
        flags.append("--diagnostics")
    if config.num_envs:
        flags += ["--num-envs", config.num_envs]
    return flags


def describe_run(config: Config, usual_envs: int | None, meta: dict | None) -> dict:
    """Returns what --out keeps of a run; without meta, memory did not suffice."""
    run = config._asdict() | dict(script=config.script.name, seconds=None)
    run["num_envs"] = config.num_envs or usual_envs
    if meta:
        run |= {name: meta[name] for name in MEASURED}
        run["num_envs"] = meta["args"].get("num_envs", 1)
    return run


def start(script: Path, flags: list, folder: Path, **environment) -> dict | None:
    """Runs a script and returns the meta of its record, or None where memory did not suffice.

    With `timesteps`, the environment steps per seed in its `seconds`, and `wall_seconds`, of the
    whole process. Other failures end in one sentence.
    """
    words = [str(word) for word in (sys.executable, script, *flags, "--runs-dir", folder)]
    inherited = dict(os.environ)
    inherited.pop("JAX_COMPILATION_CACHE_DIR", None)
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, env=inherited | environment)
    wall_seconds = time.monotonic() - began
    killed = done.returncode == -9  # Linux had no memory left
    if killed or (done.returncode and NO_MEMORY.search(done.stderr)):
        return None
    if done.returncode:
        started = " ".join(words[1:-2])
        fail(f"{started} ended with exit code {done.returncode}: {reason_of(done.stderr)}")
    with np.load(next(folder.glob("*/results.npz"))) as file:
        meta = json.loads(str(file["meta"]))
        ends = file["timesteps"]  # evenly spaced; the first update's steps before it are not timed
    interval = ends[1] - ends[0] if len(ends) > 1 else ends[0]
    return meta | dict(timesteps=int(ends[-1] - ends[0] + interval), wall_seconds=wall_seconds)


def reason_of(stderr: str) -> str:
    """Returns why a script ended: the sentence in the box that tyro draws, or the last line."""
    lines = [line.strip(" │╭╮╰╯─") for line in stderr.splitlines()]
    lines = [line for line in lines if line]
    if stderr.startswith("╭") and len(lines) > 1:
        return lines[1]
    return last_line(stderr)


def envpool_steps(game: str, num_envs: int = 128, seconds: float = 5.0) -> float:
    """Returns the steps per second of all environments that envpool makes by itself, actions given."""
    try:
        import envpool

        pool = envpool.make(game, "gymnasium", num_envs=num_envs)
    except Exception as error:  # envpool's own kinds
        fail(f"--envpool {game} cannot be made: {last_line(str(error))}")
    pool.reset()
    action = np.zeros(num_envs, np.int32)
    steps = 0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        pool.step(action)
        steps += num_envs
    return steps / (time.monotonic() - began)


# ------------------------------------------- The table --------------------------------------------


def config_of(run: dict) -> Config:
    """Returns what was measured in a run."""
    return Config(**{name: run[name] for name in Config._fields})


def group_repeats(runs: list[dict]) -> dict[Config, list[dict]]:
    """Returns the runs by what was measured, order kept."""
    groups = {}
    for run in runs:
        groups.setdefault(config_of(run), []).append(run)
    return groups


def step_us(runs: list[dict]) -> list[float]:
    """Returns microseconds of each run's vector step, in which all environments of all seeds step.

    Runs without memory are left out.
    """
    done = [run for run in runs if run["seconds"]]
    return [1e6 * run["seconds"] / (run["timesteps"] / run["num_envs"]) for run in done]


def spread(values: list[float], form: str) -> str:
    """Returns the median and, of several values, least and greatest: 2.0 (1.0 to 4.0)."""
    if not values:
        return "-"
    median = format(np.median(values), form)
    if len(values) == 1:
        return median
    return f"{median} ({min(values):{form}} to {max(values):{form}})"


def against(config: Config, groups: dict) -> str:
    """Returns a step's time over that of what differs in one thing: by rounds, so drift cancels."""
    if config.diagnostics:
        other, unit = config._replace(diagnostics=False), "% for diagnostics"
    elif config.devices > 1:
        seeds = config.num_seeds // config.devices
        other, unit = config._replace(devices=1, num_seeds=seeds), "x one device"
    else:
        other, unit = config._replace(scorer=False), "x baseline"
    mine = step_us_by_round(groups[config])
    its = step_us_by_round(groups.get(other, []))
    ratios = [mine[when] / its[when] for when in mine if when in its]
    if not ratios or not config.scorer:
        return "-"
    if config.diagnostics:
        return f"{spread([100 * ratio - 100 for ratio in ratios], '+.1f')} {unit}"
    return f"{spread(ratios, '.3f')} {unit}"


def step_us_by_round(runs: list[dict]) -> dict:
    """Returns microseconds of a vector step by the round of a measurement."""
    return {(run["session"], run["round"]): step_us([run])[0] for run in runs if run["seconds"]}


def table(runs: list[dict], title: str) -> str:
    """Returns Markdown: a line per configuration, medians with their spread."""
    groups = group_repeats(runs)
    header = [
        "Command",
        "Seeds",
        "Environments",
        "Devices",
        "us per vector step",
        "Million steps/s",
        "Against",
        "Compilation, s",
        "First start, s",
        "Second start, s",
    ]
    lines = [header, ["---"] * len(header)]
    lines += [table_line(config, group, groups) for config, group in groups.items()]
    rows = [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]
    seconds = spread([run["seconds"] for run in runs if run["seconds"]], ".1f")
    note = (
        f"Medians, with least and greatest. A run trains for {seconds} s, compilation apart. In a "
        "vector step all environments of every seed step once; steps/s are environment steps of all "
        "seeds. A start is a process's wall-clock time less its training: the first compiles, the "
        "second finds its programs in the cache."
    )
    return "\n".join([f"### {title}", "", *rows, "", note, ""])


def table_line(config: Config, group: list[dict], groups: dict) -> list:
    """Returns the cells of one configuration."""
    done = [run for run in group if run["seconds"]]
    cold = [run for run in done if run["round"] == 0]
    warm = [run for run in done if run["round"] > 0]
    words = [str(config.script)]
    if config.scorer:
        words.append("--scorer")
    if config.diagnostics:
        words.append("--diagnostics")
    rates = [run["timesteps"] * run["num_seeds"] / run["seconds"] / 1e6 for run in done]
    return [
        " ".join(words),
        config.num_seeds,
        config.num_envs or "preset",
        config.devices,
        spread(step_us(done), ",.1f") if done else "out of memory",
        spread(rates, ".3g"),
        against(config, groups),
        spread([run["compile_seconds"] for run in cold], ".1f"),
        spread([run["wall_seconds"] - run["seconds"] for run in cold], ".1f"),
        spread([run["wall_seconds"] - run["seconds"] for run in warm], ".1f"),
    ]


# ------------------------------------------- The figure -------------------------------------------


def draw(runs: list[dict], out: Path):
    """Draws the time of SCORER's vector step against seeds, and against environments."""
    figure, axes = style.make_panels(2)
    axes[1].sharey(axes[0])  # before anything is drawn, so that the range fits both
    groups = {}
    for config, group in group_repeats(runs).items():
        is_plain = config.scorer and not config.diagnostics and config.devices == 1
        if is_plain and step_us(group):
            groups[config] = step_us(group)
    looks = [style.SCORER, style.BASELINE, *style.OTHERS]
    for look, script in zip(looks, dict.fromkeys(config.script for config in groups)):
        own = {config: us for config, us in groups.items() if config.script == script}
        preset = next(iter(own)).num_envs  # other numbers of environments are run later
        by_seeds = {c.num_seeds: us for c, us in own.items() if c.num_envs == preset}
        by_envs = {c.num_envs: us for c, us in own.items() if c.num_seeds == 1}
        for ax, points in zip(axes, (by_seeds, by_envs)):
            draw_points(ax, points, f"{script} --scorer", look)
    for ax, title in zip(axes, ("Seeds", "Environments of one seed")):
        ticks = sorted({x for line in ax.lines for x in line.get_xdata().tolist()})
        ax.set(xscale="log", yscale="log", xlabel=title)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_formatter("{x:,g}")
    axes[0].set_ylabel("Microseconds per step\nof all environments")
    style.save(figure, out, "shaded: least to greatest of the repeats")


def draw_points(ax, points: dict[int, list[float]], label: str, look: tuple):
    """Draws medians, and shades from the least to the greatest, of the times [repeats] at each x."""
    if not points:
        return  # stopped early
    x = np.array(sorted(points))
    low, middle, high = ([f(points[at]) for at in sorted(points)] for f in (min, np.median, max))
    color, line, marker = look
    style.draw_band(
        ax, x, middle, low, high, color=color, linestyle=line, marker=marker, label=label
    )


# ----------------------------------------- Communication ------------------------------------------


def check_communication(options: Options, gpus: int) -> int:
    """Prints and returns the number of collective operations in all scripts' training."""
    where = dict(devices=gpus) if gpus > 1 else dict(devices=4, JAX_PLATFORMS="cpu")
    steps = int(options.steps or 1e5)
    scripts = [ROOT / script for script in options.scripts]
    return sum(communication(script, options.env, steps, **where) for script in scripts)


def communication(script: Path, env: str | None, steps: int, devices: int, **environment) -> int:
    """Prints and returns the collective operations in a script's training on several devices."""
    flags = ["--scorer", "--num-seeds", devices, "--total-timesteps", steps]
    if env:
        flags += ["--env", env]
    with tempfile.TemporaryDirectory(prefix="speed") as temporary:
        dump = Path(temporary, "dump")
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # a program from the cache is not dumped
        environment["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text "
            f"--xla_force_host_platform_device_count={devices}"
        )
        meta = start(script, flags, Path(temporary, "runs"), **environment)
        found = collectives(dump, devices)
    if not found:  # also without memory
        fail(f"{script} compiled no loop for {devices} devices: there is no training to check")
    number = sum(found.values())
    programs = ", ".join(f"{name}: {count}" for name, count in found.items())
    print(
        f"{script.name} on {devices} x {meta['device']}: {number} collective operations in "
        f"{len(found)} training programs ({programs})"
    )
    return number


def collectives(dump: Path, devices: int) -> dict[str, int]:
    """Returns the collective operations in each training program of XLA's dump, by file name.

    Training programs are those for all devices together that loop over steps: a chunk's, and that
    which fills a replay. What gathers curves and results has no loop, and may communicate.
    """
    found = {}
    for path in sorted(dump.glob("*after_optimizations.txt")):
        text = path.read_text()
        is_shared = re.search(rf"\bnum_partitions={devices}\b", text.partition("\n")[0])
        if is_shared and " while(" in text:
            found[path.name] = len(COLLECTIVE.findall(text))
    return found


if __name__ == "__main__":
    command.run(main)

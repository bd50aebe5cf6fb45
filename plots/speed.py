"""Speed: what the scripts cost on this machine, measured by starting them; how cost grows; and that devices don't talk.

    python plots/speed.py --out speed.json                        # some 10 minutes on a GPU
    python plots/speed.py --grow --figure growth.png              # 1 to 480 seeds, 32 to 2,048 environments
    python plots/speed.py --saved speed.json --grow               # table and figure of what was measured earlier
    python plots/speed.py --check-communication                   # collective operations in the compiled training
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Literal

import numpy as np
import style
import tyro
from records import fail, write

ROOT = Path(__file__).parents[1]
PROBE = ("import jax, json, os; d = jax.devices(); cores = f'{os.cpu_count()} cores of a ' * (d[0].platform == 'cpu');"
         "print(json.dumps([d[0].platform, f'{cores}{d[0].device_kind}, JAX {jax.__version__}', len(d)]))")
NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|MemoryError", re.IGNORECASE)
COLLECTIVE = re.compile(r"\b(?:all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter)"
                        r"(?:-start)?\(")
KEY = ("script", "num_seeds", "scorer", "diagnostics", "num_envs", "devices")  # runs alike in these are repeats
Config = namedtuple("Config", KEY, defaults=(True, False, None, 1))  # num_envs None: the script's preset


def start(script: Path, flags: list, folder: Path, **environment) -> dict | None:
    """The meta of the record that the script writes, with `timesteps` (environment steps per seed in its `seconds`) and
    `wall_seconds` (of the whole process); None where memory did not suffice. Other failures end in one sentence."""
    command = [str(word) for word in (sys.executable, script, *flags, "--runs-dir", folder)]
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | environment)
    wall_seconds = time.monotonic() - began
    if done.returncode == -9 or done.returncode and NO_MEMORY.search(done.stderr):  # -9: Linux had no memory left
        return None
    if done.returncode:
        lines = [words for line in done.stderr.splitlines() if (words := line.strip(" │╭╮╰╯─"))]
        message = lines[1] if done.stderr.startswith("╭") else lines[-1] if lines else ""  # tyro draws a box
        fail(f"{' '.join(command[1:-2])} ended with exit code {done.returncode}: {message}")
    with np.load(next(folder.glob("*/results.npz"))) as file:
        ends = file["timesteps"]  # evenly spaced, from the end of what is made before the first update, not timed
        timesteps = ends[-1] - ends[0] + (ends[1] - ends[0] if len(ends) > 1 else ends[0])
        return json.loads(str(file["meta"])) | dict(timesteps=int(timesteps), wall_seconds=wall_seconds)


def measure(configs: list[Config], env: str | None, steps: int, repeats: int, one: dict, runs: list[dict]):
    """Appends to `runs`, in rounds of one run of every configuration, so that a drift of the machine hits all alike.
    Each configuration has a compilation cache of its own, empty in round 0; `one` is the environment of one device."""
    preset, session = {}, time.time()  # number of environments by script; tells measurements from each other
    with tempfile.TemporaryDirectory(prefix="speed") as temporary:
        for number, (place, config) in ((number, c) for number in range(repeats) for c in enumerate(configs)):
            script, usual = config.script, preset.get(config.script)
            if config.num_envs == usual and config._replace(num_envs=None) in configs[:place]:
                continue  # has just been run
            # With other environments than the preset's, as many steps of all of them together.
            total = round(steps * config.num_envs / usual) if config.num_envs and usual else steps
            flags = ["--num-seeds", config.num_seeds, "--total-timesteps", total, *(["--env", env] if env else [])]
            flags += ["--scorer"] * config.scorer + ["--diagnostics"] * config.diagnostics
            flags += ["--num-envs", config.num_envs] if config.num_envs else []
            variables = dict(XDG_CACHE_HOME=f"{temporary}/cache{place}") | (one if config.devices == 1 else {})
            meta = start(script, flags, Path(temporary, f"{number}-{place}"), **variables)
            run = config._asdict() | dict(script=script.name, num_envs=config.num_envs or usual, session=session)
            run |= dict(round=number, seconds=None)
            if meta:
                run |= {name: meta[name] for name in ("seconds", "compile_seconds", "wall_seconds", "timesteps")}
                run["num_envs"] = meta["args"].get("num_envs", 1)
                preset.setdefault(script, run["num_envs"])
            runs.append(run)
            words, us = " ".join(map(str, (script.name, *flags))), spread(step_us([run]), ",.1f")
            print(f"round {number + 1}, {place + 1} of {len(configs)}: {words}: {us} us a vector step", file=sys.stderr)


def step_us(runs: list[dict]) -> list[float]:
    """Microseconds of each vector step, in which all environments of every seed step once; none without memory."""
    return [1e6 * run["seconds"] / (run["timesteps"] / run["num_envs"]) for run in runs if run["seconds"]]


def spread(values: list[float], form: str) -> str:
    """Median and, of several values, least and greatest: 2.0 (1.0 to 4.0)."""
    median, *ends = [format(f(values), form) for f in (np.median, min, max)] if values else "-"
    return f"{median} ({' to '.join(ends)})" if len(values) > 1 else median


def grouped(runs: list[dict]) -> dict[Config, list[dict]]:
    """Repeats, order kept."""
    groups = {}
    for run in runs:
        groups.setdefault(Config(*(run[name] for name in KEY)), []).append(run)
    return groups


def against(config: Config, groups: dict) -> str:
    """Time of a step over that of what differs in one thing, round by round, so that drift cancels."""
    if config.diagnostics:
        other, unit = config._replace(diagnostics=False), "% for diagnostics"
    elif config.devices > 1:
        other, unit = config._replace(devices=1, num_seeds=config.num_seeds // config.devices), "x one device"
    else:
        other, unit = config._replace(scorer=False), "x baseline"
    mine, its = ({(run["session"], run["round"]): step_us([run])[0] for run in group if run["seconds"]}
                 for group in (groups[config], groups.get(other, [])))
    ratios = [mine[when] / its[when] for when in mine if when in its]
    if not ratios or not config.scorer:
        return "-"
    return f"{spread([100 * x - 100 for x in ratios], '+.1f') if config.diagnostics else spread(ratios, '.3f')} {unit}"


def table(runs: list[dict], title: str) -> str:
    """Markdown: a line per configuration, medians with their spread."""
    lines = [["Command", "Seeds", "Environments", "Devices", "us per vector step", "Million steps/s", "Against",
              "Compilation, s", "First start, s", "Second start, s"]]
    lines += [["---"] * len(lines[0])]
    groups = grouped(runs)
    for config, group in groups.items():
        done = [run for run in group if run["seconds"]]
        cold, warm = ([run for run in done if (run["round"] == 0) == first] for first in (True, False))
        starts = [spread([run["wall_seconds"] - run["seconds"] for run in some], ".1f") for some in (cold, warm)]
        rates = [run["timesteps"] * run["num_seeds"] / run["seconds"] / 1e6 for run in done]
        command = config.script + " --scorer" * config.scorer + " --diagnostics" * config.diagnostics
        lines.append([command, config.num_seeds, config.num_envs or "preset", config.devices,
                      spread(step_us(done), ",.1f") if done else "out of memory", spread(rates, ".3g"),
                      against(config, groups), spread([run["compile_seconds"] for run in cold], ".1f"), *starts])
    seconds = spread([run["seconds"] for run in runs if run["seconds"]], ".1f")
    note = (f"Medians, with least and greatest. A run trains for {seconds} s, compilation apart. In a vector step all "
            "environments of every seed step once; steps/s are environment steps of all seeds. A start is a process's "
            "wall-clock time less its training: the first compiles, the second finds its programs in the cache.")
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(map(str, line))} |" for line in lines), "", note, ""])


def draw(runs: list[dict], out: Path):
    """Time of SCORER's vector step against seeds, with the preset's environments, and against environments."""
    figure, axes = style.panels(1, 2, out, smooth=1)
    axes[0, 1].sharey(axes[0, 0])  # before anything is drawn, so that the range fits both
    groups = {config: step_us(group) for config, group in grouped(runs).items() if step_us(group) and
              (config.scorer, config.diagnostics, config.devices) == (True, False, 1)}
    looks = dict(zip(dict.fromkeys(config.script for config in groups), [(style.SCORER, "-"), *style.OTHERS]))
    for ax, axis, label in zip(axes[0], ("num_seeds", "num_envs"), ("Seeds", "Environments, one seed")):
        ticks = set()
        for script, (color, dashes) in looks.items():
            own = {config: us for config, us in groups.items() if config.script == script}
            preset = next(iter(own)).num_envs  # other numbers of environments are run later
            points = sorted((getattr(config, axis), us) for config, us in own.items()
                            if (config.num_envs == preset if axis == "num_seeds" else config.num_seeds == 1))
            if not points:
                continue  # stopped early
            x, low, middle, high = zip(*((x, min(us), np.median(us), max(us)) for x, us in points))
            style.draw_band(ax, x, middle, low, high, color=color, linestyle=dashes, marker="o", markersize=3,
                            label=f"{script} --scorer")
            ticks |= {*x}
        ax.set(xscale="log", yscale="log", xlabel=label, ylabel="us per vector step")
        ax.set_xticks(sorted(ticks), sorted(ticks))
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_formatter("{x:,g}")
    style.save(figure, out)


def collectives(dump: Path, devices: int) -> dict[str, int]:
    """Number of collective operations in each compiled training program in XLA's dump, by file name.

    Training programs are those compiled for all devices together that loop over steps: `block`, and `init`, which fills
    a replay. What gathers curves and results at the end of a run is in programs without a loop, and may communicate."""
    texts = {path.name: path.read_text() for path in dump.glob("*after_optimizations.txt")}
    return {name: len(COLLECTIVE.findall(text)) for name, text in sorted(texts.items())
            if " while(" in text and re.search(rf"\bnum_partitions={devices}\b", text.partition("\n")[0])}


def communication(script: Path, env: str | None, steps: int, devices: int, **environment) -> int:
    """Prints and returns the number of collective operations in the script's training on several devices."""
    with tempfile.TemporaryDirectory(prefix="speed") as temporary:
        dump = Path(temporary, "dump")
        environment["XLA_FLAGS"] = (f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text "
                                    f"--xla_force_host_platform_device_count={devices}")
        flags = ["--scorer", "--num-seeds", devices, "--total-timesteps", steps, *(["--env", env] if env else [])]
        meta = start(script, [*flags, "--no-compilation-cache"], Path(temporary, "runs"), **environment)
        found = collectives(dump, devices)
    if not found:  # also without memory
        fail(f"{script} compiled no loop for {devices} devices, so there is no training program to check")
    print(f"{script.name} on {devices} x {meta['device']}: {sum(found.values())} collective operations in {len(found)} "
          f"training programs ({', '.join(f'{name}: {count}' for name, count in found.items())})")
    return sum(found.values())


def read(path: Path) -> dict:
    """What --out wrote: title and runs."""
    try:
        saved = json.loads(path.read_text())
        return dict(title=saved["title"], runs=[run for run in saved["runs"] if grouped([run]) and "seconds" in run])
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--saved {path} was not written by --out: {error!r}")


def main(scripts: tuple[Path, ...] = (Path("scorer_dqn.py"), Path("scorer_pqn.py")),
         env: str | None = "Breakout-MinAtar", seeds: tuple[int, ...] = (1, 30),
         compare: tuple[Literal["baseline", "diagnostics", "devices"], ...] = ("baseline", "diagnostics", "devices"),
         steps: float | None = None, repeats: int = 3, grow: bool = False,
         grow_seeds: tuple[int, ...] = (1, 10, 30, 120, 480), grow_envs: tuple[int, ...] = (32, 128, 512, 2048),
         figure: Path = Path("growth.png"), out: Path | None = None, saved: tuple[Path, ...] = (),
         check_communication: bool = False):
    """Speed: what the scripts cost on this machine, measured by starting them; how cost grows; if devices communicate.

    Args:
        scripts: scripts to measure, as paths from the repository's root.
        env: their environment; None: each one's own.
        seeds: numbers of seeds in one program.
        compare: what to measure beside SCORER on one device; devices: all GPUs with the most of --seeds on each.
        steps: environment steps per seed of a measured run (5e6 on a GPU, 2 to 15 seconds; else 1e5).
        repeats: runs of everything; with one there is no second start.
        grow: measure and draw how SCORER's cost grows, in place of --seeds and --compare.
        grow_seeds: numbers of seeds, with the preset's environments.
        grow_envs: numbers of environments, with one seed and as many steps of all of them together as in the preset.
        figure: picture of --grow; its ending names the format.
        out: JSON file to write with every run; it must not exist.
        saved: files of --out, all of one machine, to show in place of measuring.
        check_communication: count the collective operations in SCORER's compiled training on all GPUs (with fewer than
            two, on four CPU devices) in place of measuring; exit code 1 if there are any.
    """
    scripts = [ROOT / script for script in scripts]
    for script in scripts:
        if not script.is_file():
            fail(f"--scripts {script} does not exist")
    numbers = [*seeds, *grow_seeds, *grow_envs, repeats, 1 if steps is None else steps]
    if not (scripts and seeds and grow_seeds) or not all(1 <= number <= 2**40 for number in numbers):
        fail(f"--scripts, --seeds and --grow-seeds need values, and all numbers must be from 1 to {2**40:,}")
    if out and out.exists():
        fail(f"--out {out} exists and is never overwritten")
    if out and not out.parent.is_dir():
        fail(f"--out {out} needs an existing folder, {out.parent}")
    style.check_format("--figure", figure)
    files, stopped = [read(path) for path in saved], False
    if len({file["title"] for file in files}) > 1:
        fail(f"--saved has files of different machines or environments: {', '.join(file['title'] for file in files)}")
    runs = [run for file in files for run in file["runs"]]
    if len({(run["session"], run["round"], *(run[name] for name in KEY)) for run in runs}) < len(runs):
        fail(f"--saved {' '.join(map(str, saved))} has a measurement twice")
    if saved and grow and len({(run["num_seeds"], run["num_envs"]) for run in runs}) < 2:
        fail(f"--saved {' '.join(map(str, saved))} has one number of seeds and environments, so no growth")
    if not saved:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)  # lets go of the device
        if probe.returncode:
            fail(f"JAX finds no device: {probe.stderr.strip().rpartition(chr(10))[-1]}")
        platform, device, count = json.loads(probe.stdout.splitlines()[-1])
        gpus = count if platform == "gpu" else 0
        if check_communication:
            where = dict(devices=gpus) if gpus > 1 else dict(devices=4, JAX_PLATFORMS="cpu")
            sys.exit(any([communication(script, env, int(steps or 1e5), **where) for script in scripts]))
        configs = []
        for script in scripts:
            for n in grow_seeds if grow else seeds:
                configs += [Config(script, n)]
                configs += [Config(script, n, scorer=False)] * ("baseline" in compare and not grow)
                configs += [Config(script, n, diagnostics=True)] * ("diagnostics" in compare and not grow)
                several = gpus > 1 and "devices" in compare and n == max(seeds) and not grow
                configs += [Config(script, n * gpus, devices=gpus)] * several
            configs += [Config(script, 1, num_envs=n) for n in grow_envs if grow]
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        title = f"{device}, {env or 'each script with its own environment'}"
        try:
            measure(configs, env, int(steps or (5e6 if gpus else 1e5)), repeats, dict(CUDA_VISIBLE_DEVICES=first), runs)
        except KeyboardInterrupt:
            stopped = True
            print("stopped; this is what was measured:", file=sys.stderr)
    else:
        title = files[0]["title"]
    print(table(runs, title), end="")
    if out:
        def dump(out: Path):
            with open(out, "x") as file:  # also if another made it meanwhile
                json.dump(dict(title=title, runs=runs), file, indent=1)
        write(out, dump)
    if grow and step_us(runs):
        draw(runs, figure)
    sys.exit(130 if stopped else 0)


if __name__ == "__main__":
    tyro.cli(main)

"""plots/speed.py: its arithmetic by hand, whole measurements of a stand-in script, and of a real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plots"))

import speed  # noqa: E402

# Like a script of this project, but quick: what a vector step costs depends on the flags, and compiling on the cache.
STAND_IN = """
import argparse, json, os, sys
from pathlib import Path
import numpy as np
parser = argparse.ArgumentParser()
for name, usual in (("--num-seeds", 1), ("--total-timesteps", 0), ("--num-envs", 128)):
    parser.add_argument(name, type=int, default=usual)
for name in ("--scorer", "--diagnostics"):
    parser.add_argument(name, action="store_true")
parser.add_argument("--env", default="Own-v0")
parser.add_argument("--runs-dir", type=Path)
args = parser.parse_args()
variables = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "JAX_COMPILATION_CACHE_DIR")}
with open(__file__ + ".log", "a") as log:
    log.write(json.dumps(dict(vars(args), runs_dir=str(args.runs_dir), **variables)) + chr(10))
if args.env == "None-v0":
    sys.exit("error: --env None-v0 cannot be made")
if args.num_seeds == 480:
    sys.exit("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
cache = Path(os.environ["XDG_CACHE_HOME"])
cold = not cache.exists()
cache.mkdir(exist_ok=True)
us = 100 * (1.1 if args.scorer else 1) * (1.02 if args.diagnostics else 1) * args.num_seeds
meta = dict(device="stub", seconds=us / 1e6 * args.total_timesteps / args.num_envs,
            compile_seconds=9.0 if cold else 1.0, args=dict(num_envs=args.num_envs, env=args.env))
run = args.runs_dir / "run"
run.mkdir(parents=True)
np.savez(run / "results.npz", timesteps=[args.total_timesteps // 2, args.total_timesteps], meta=json.dumps(meta))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The stand-in script, on a machine without a GPU whose temporary folder is tmp_path/temporary."""
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(speed.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(speed, "PROBE", """print('["cpu", "stub", 1]')""")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    return path


def commands(stand_in: Path) -> list[dict]:
    """The arguments of every start of the stand-in, in order."""
    return [json.loads(line) for line in Path(f"{stand_in}.log").read_text().splitlines()]


def run_main(**arguments) -> int:
    """Exit code of the tool."""
    with pytest.raises(SystemExit) as exit:
        speed.main(speed.Options(**arguments))
    return exit.value.code or 0


def rows(text: str) -> list[dict]:
    """The lines of a Markdown table."""
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(header, line, strict=True)) for line in lines]


def crafted(seconds, number=0, **changes) -> dict:
    """A measured run of 10,000 vector steps of 100 environments."""
    return (
        speed.Config("a.py", 3, num_envs=100)._asdict()
        | dict(
            session=0,
            round=number,
            seconds=seconds,
            compile_seconds=20.0 - number,
            timesteps=1_000_000,
            wall_seconds=(seconds or 0) + 25.0 - 10 * number,
        )
        | changes
    )


# -------------------- Arithmetic by hand


def test_microseconds_of_a_vector_step():
    assert speed.step_us([crafted(2.0), crafted(None), crafted(3.0, num_envs=50)]) == pytest.approx(
        [200.0, 150.0]
    )


@pytest.mark.parametrize(
    "values, text",
    [
        ([], "-"),
        ([1.25], "1.2"),
        ([3.0, 1.0, 1500.0], "3.0 (1.0 to 1,500.0)"),
        ([4.0, 1.0], "2.5 (1.0 to 4.0)"),
    ],
)
def test_spread_is_the_median_with_least_and_greatest(values, text):
    assert speed.spread(values, ",.1f") == text


def test_table_of_crafted_runs():
    runs = [
        crafted(s, n) for n, s in enumerate((2.0, 4.0, 3.0))
    ]  # the machine slows down and recovers
    runs += [crafted(s, n, scorer=False) for n, s in enumerate((1.0, 2.0, 2.0))]
    runs += [crafted(s, n, diagnostics=True) for n, s in enumerate((2.02, 4.08, 3.03))]
    runs += [crafted(s, n, devices=4, num_seeds=12) for n, s in enumerate((2.2, 4.0, 3.3))]
    runs += [crafted(None, num_seeds=480)]
    runs += [crafted(3.0, 1, session=1)]  # of another measurement: not against this one's baseline
    scorer, baseline, diagnostics, devices, large = rows(speed.table(runs, "H100"))
    assert scorer == {
        "Command": "a.py --scorer",
        "Seeds": "3",
        "Environments": "100",
        "Devices": "1",
        "us per vector step": "300.0 (200.0 to 400.0)",
        "Million steps/s": "1 (0.75 to 1.5)",
        "Against": "2.000 (1.500 to 2.000) x baseline",  # of rounds: 2, 2 and 1.5; of medians, 1.5
        "Compilation, s": "20.0",
        "First start, s": "25.0",
        "Second start, s": "15.0 (5.0 to 15.0)",
    }
    assert (baseline["Command"], baseline["Against"]) == ("a.py", "-")
    assert diagnostics["Command"] == "a.py --scorer --diagnostics"
    assert diagnostics["Against"] == "+1.0 (+1.0 to +2.0) % for diagnostics"
    assert (devices["Seeds"], devices["Devices"], devices["Million steps/s"]) == (
        "12",
        "4",
        "3.64 (3 to 5.45)",
    )
    assert devices["Against"] == "1.100 (1.000 to 1.100) x one device"
    assert (
        large["us per vector step"] == "out of memory"
        and large["Million steps/s"] == large["Against"] == "-"
    )
    assert speed.table(runs, "H100").startswith("### H100\n")


# -------------------- Whole measurements


def test_measurement_in_rounds(stand_in, tmp_path, capsys):
    out = tmp_path / "speed.json"
    assert (
        run_main(scripts=(stand_in,), env="A-v0", seeds=(1, 3), steps=128e3, repeats=2, out=out)
        == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("### stub, A-v0\n")
    assert [
        (row["Command"], row["Seeds"], row["us per vector step"], row["Against"])
        for row in rows(text)
    ] == [
        (
            "stand_in.py --scorer",
            "1",
            "110.0 (110.0 to 110.0)",
            "1.100 (1.100 to 1.100) x baseline",
        ),
        ("stand_in.py", "1", "100.0 (100.0 to 100.0)", "-"),
        (
            "stand_in.py --scorer --diagnostics",
            "1",
            "112.2 (112.2 to 112.2)",
            "+2.0 (+2.0 to +2.0) % for diagnostics",
        ),
        (
            "stand_in.py --scorer",
            "3",
            "330.0 (330.0 to 330.0)",
            "1.100 (1.100 to 1.100) x baseline",
        ),
        ("stand_in.py", "3", "300.0 (300.0 to 300.0)", "-"),
        (
            "stand_in.py --scorer --diagnostics",
            "3",
            "336.6 (336.6 to 336.6)",
            "+2.0 (+2.0 to +2.0) % for diagnostics",
        ),
    ]
    assert {row["Compilation, s"] for row in rows(text)} == {
        "9.0"
    }  # every command began with an empty cache
    assert {
        run["compile_seconds"] for run in json.loads(out.read_text())["runs"] if run["round"]
    } == {1.0}
    started = [(run["num_seeds"], run["scorer"], run["diagnostics"]) for run in commands(stand_in)]
    once = [(n, *kind) for n in (1, 3) for kind in ((True, False), (False, False), (True, True))]
    assert started == once + once  # A B A B
    assert {run["JAX_COMPILATION_CACHE_DIR"] for run in commands(stand_in)} == {None}
    assert not list((tmp_path / "temporary").iterdir())
    assert run_main(saved=(out,)) == 0 and capsys.readouterr().out == text
    assert len(commands(stand_in)) == 12  # --saved starts nothing


def test_several_devices_against_one(stand_in, monkeypatch, capsys):
    monkeypatch.setattr(speed, "PROBE", """print('["gpu", "H100", 4]')""")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,1,0")
    assert (
        run_main(
            scripts=(stand_in,),
            env=None,
            seeds=(1, 2),
            steps=128e3,
            repeats=1,
            compare=("devices",),
        )
        == 0
    )
    started = [
        (run["num_seeds"], run["CUDA_VISIBLE_DEVICES"], run["env"]) for run in commands(stand_in)
    ]
    assert started == [(1, "3", "Own-v0"), (2, "3", "Own-v0"), (8, "3,2,1,0", "Own-v0")]
    assert [row["Against"] for row in rows(capsys.readouterr().out)] == [
        "-",
        "-",
        "4.000 x one device",
    ]


def test_growth(stand_in, tmp_path, monkeypatch, capsys):
    figures, save = [], speed.style.save
    monkeypatch.setattr(
        speed.style, "save", lambda figure, *words: figures.append(figure) or save(figure, *words)
    )
    assert (
        run_main(
            scripts=(stand_in,),
            steps=128e3,
            repeats=1,
            grow=True,
            grow_seeds=(1, 10, 480),
            grow_envs=(32, 128, 512),
            figure=tmp_path / "new/growth.png",
        )
        == 0
    )
    assert [
        (run["num_seeds"], run["num_envs"], run["total_timesteps"]) for run in commands(stand_in)
    ] == [
        (1, 128, 128_000),
        (10, 128, 128_000),
        (480, 128, 128_000),
        (1, 32, 32_000),
        (1, 512, 512_000),
    ]
    cells = [row["us per vector step"] for row in rows(capsys.readouterr().out)]
    assert cells == ["110.0", "1,100.0", "out of memory", "110.0", "110.0"]
    assert (tmp_path / "new/growth.png").stat().st_size > 10_000
    seeds, environments = figures[0].axes
    assert [list(map(float, x)) for x in seeds.lines[0].get_data()] == [
        [1, 10],
        pytest.approx([110, 1100]),
    ]
    assert [list(map(float, x)) for x in environments.lines[0].get_data()] == [
        [32, 128, 512],
        pytest.approx([110, 110, 110]),
    ]
    assert (seeds.get_xscale(), seeds.get_yscale()) == ("log", "log")
    assert (
        run_main(
            scripts=(stand_in,),
            steps=128e3,
            repeats=1,
            grow=True,
            grow_seeds=(10,),
            grow_envs=(),
            figure=tmp_path / "half.png",
        )
        == 0
    )  # nothing to draw on the right
    assert [len(ax.lines) for ax in figures[1].axes] == [1, 0]
    assert (
        run_main(
            scripts=(stand_in,),
            steps=128e3,
            repeats=1,
            grow=True,
            grow_seeds=(10, 20),
            grow_envs=(32, 512),
            figure=tmp_path / "range.png",
        )
        == 0
    )  # 1,100 and 2,200 us on the left, 110 on the right
    (low, high), (right_low, right_high) = (ax.get_ylim() for ax in figures[2].axes)
    assert (low, high) == (right_low, right_high) and low < 110 and high > 2200


def test_ctrl_c_keeps_what_was_measured(stand_in, monkeypatch, tmp_path, capsys):
    begin, started = speed.start, []

    def start(*args, **variables):
        started.append(args)
        if len(started) == 3:
            raise KeyboardInterrupt
        return begin(*args, **variables)

    monkeypatch.setattr(speed, "start", start)
    out = tmp_path / "speed.json"
    assert run_main(scripts=(stand_in,), steps=128e3, out=out) == 130
    assert len(rows(capsys.readouterr().out)) == len(json.loads(out.read_text())["runs"]) == 2
    assert not list((tmp_path / "temporary").iterdir())


def test_a_file_made_meanwhile_is_kept(stand_in, monkeypatch, tmp_path, capsys):
    """What was measured is printed, what stands at --out stays, and one sentence says so."""
    measure, out = speed.measure, tmp_path / "speed.json"
    monkeypatch.setattr(
        speed, "measure", lambda *words: [measure(*words), out.write_text("precious")]
    )
    assert (
        run_main(scripts=(stand_in,), steps=128e3, seeds=(1,), compare=(), repeats=1, out=out) == 2
    )
    printed = capsys.readouterr()
    assert len(rows(printed.out)) == 1 and printed.err.endswith(
        f"error: {out} cannot be written: File exists\n"
    )
    assert out.read_text() == "precious"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(scripts=(Path("none.py"),)), "none.py does not exist"),
        (dict(env="None-v0"), "exit code 1: error: --env None-v0 cannot be made"),
        (
            dict(scripts=(ROOT / "plots/tables.py",)),
            "exit code 2: Unrecognized options: --num-seeds",
        ),
        (dict(repeats=0), "from 1 to"),
        (dict(steps=0.0), "from 1 to"),
        (dict(seeds=()), "need values"),
        (dict(out=Path("taken.json")), "taken.json exists and is never overwritten"),
        (dict(out=Path("none/speed.json")), "needs an existing folder"),
        (dict(grow=True, figure=Path("growth.jpegs")), "growth.jpegs must end in"),
        (dict(saved=(Path("taken.json"),)), "was not written by --out"),
        (dict(saved=(Path("sessionless.json"),)), "run 0 has no number session"),
        (dict(saved=(Path("words.json"),)), "run 0 has no number seconds"),
        (dict(saved=(Path("a.json"), Path("a.json"))), "a.json a.json has a measurement twice"),
        (dict(saved=(Path("a.json"),), grow=True), "no growth"),
        (dict(saved=(Path("a.json"), Path("b.json"))), "different machines"),
    ],
)
def test_refused_in_one_sentence(stand_in, monkeypatch, tmp_path, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("taken.json").write_text("{}")
    sessionless = {name: value for name, value in crafted(1.0).items() if name != "session"}
    for name, run in (("sessionless", sessionless), ("words", crafted(1.0) | dict(seconds="1"))):
        Path(f"{name}.json").write_text(json.dumps(dict(title="a", runs=[run])))
    for name in "ab":
        Path(f"{name}.json").write_text(json.dumps(dict(title=name, runs=[crafted(1.0)])))
    assert run_main(**dict(scripts=(stand_in,), steps=128e3) | arguments) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1 and message.startswith("error: ")
    assert Path("taken.json").read_text() == "{}"


# -------------------- Communication

TRAINING = """HloModule jit_part, is_scheduled=true, num_partitions=4
  %while.1 = (s32[], f32[8]) while(%tuple.1), condition=%cond, body=%body, metadata={op_name="jit(part)/all_reduce"}
"""


@pytest.mark.parametrize(
    "line, count",
    [
        ("", 0),
        ("%all-reduce.2 = f32[8] all-reduce(%x), channel_id=1", 1),
        ("%y = f32[8] add(%all-reduce.2, %x)", 0),
        ("%s = f32[8] all-gather-start(%x)\n  %d = f32[8] all-gather-done(%s)", 1),
        ("%p = f32[8] all-to-all(%x)", 1),
        ("%p = f32[8] collective-permute(%x)", 1),
        ("%p = f32[2] reduce-scatter(%x)", 1),
        ("%p = f32[2] gather(%x)", 0),
    ],
)
def test_collective_operations_are_counted(tmp_path, line, count):
    (tmp_path / "module_0006.jit_part.sm_9.0_gpu_after_optimizations.txt").write_text(
        TRAINING + line
    )
    outside = {
        "module_1.jit_gather.after_optimizations.txt": TRAINING.replace(
            " while(", " call("
        ),  # at a run's end
        "module_2.jit_one.after_optimizations.txt": TRAINING.replace("=4", "=1"),  # on one device
        "module_0006.jit_part.before_optimizations.txt": TRAINING,
    }
    for name, text in outside.items():
        (tmp_path / name).write_text(text + "%all-reduce.2 = f32[8] all-reduce(%x)")
    found = speed.collectives(tmp_path, devices=4)
    assert found == {"module_0006.jit_part.sm_9.0_gpu_after_optimizations.txt": count}


@pytest.mark.parametrize("gpus, platform", [(1, "cpu"), (4, None)])
def test_communication_is_exit_code_one_and_no_program_is_refused(
    stand_in, monkeypatch, capsys, gpus, platform
):
    monkeypatch.setattr(speed, "PROBE", f"""print('["gpu", "H100", {gpus}]')""")
    arguments = dict(scripts=(stand_in,), steps=1.0, check_communication=True)

    def start(script, flags, folder, **variables):
        assert variables["JAX_ENABLE_COMPILATION_CACHE"] == "0"  # a cached program is not dumped
        assert (
            "device_count=4" in variables["XLA_FLAGS"]
            and variables.get("JAX_PLATFORMS") == platform
        )
        return dict(device="stub")

    monkeypatch.setattr(speed, "start", start)
    assert run_main(**arguments) == 2 and "no loop for 4 devices" in capsys.readouterr().err
    counts = iter([0, 0, 0, 2])
    monkeypatch.setattr(
        speed, "collectives", lambda dump, devices: dict(a=next(counts), b=next(counts))
    )
    assert run_main(**arguments | dict(scripts=(stand_in, stand_in))) == 1
    assert "2 collective operations in 2 training programs (a: 0, b: 2)" in capsys.readouterr().out


# -------------------- A real script


def run_tool(*words) -> subprocess.CompletedProcess:
    """The tool as a reader starts it, on CartPole; programs compiled without optimisation, which is quicker."""
    command = [
        sys.executable,
        "plots/speed.py",
        "--scripts",
        "scorer_dqn.py",
        "--env",
        "CartPole-v1",
        *map(str, words),
    ]
    environment = os.environ | dict(XLA_FLAGS="--xla_backend_optimization_level=0")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_real_run(tmp_path):
    out = tmp_path / "speed.json"
    text = run_tool("--seeds", 2, "--steps", 3000, "--repeats", 1, "--compare", "--out", out).stdout
    (row,), (run,) = rows(text), json.loads(out.read_text())["runs"]
    assert "cores of a cpu, JAX" in text.splitlines()[0]
    assert (row["Command"], row["Seeds"], row["Environments"]) == (
        "scorer_dqn.py --scorer",
        "2",
        "10",
    )
    # The 1,000 steps before the first update are made while compiling.
    assert (
        run["timesteps"] == 2000
        and run["wall_seconds"] > run["seconds"] + run["compile_seconds"] > 0
    )
    assert float(row["us per vector step"].replace(",", "")) == pytest.approx(
        run["seconds"] / 200 * 1e6, abs=0.1
    )
    assert float(row["Compilation, s"]) == pytest.approx(run["compile_seconds"], abs=0.1)
    assert row["Second start, s"] == "-"  # of one repeat


def test_training_does_not_communicate():
    text = run_tool("--check-communication", "--steps", 2000).stdout
    assert text.startswith(
        "scorer_dqn.py on 4 x cpu: 0 collective operations in 2 training programs (module_"
    )

"""scorer_dqn.py from the outside: command line, record, checkpoints, Ctrl-C, devices and processes, learning."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import scorer_dqn as dqn
from helpers import finish, results

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scorer_dqn.py"
# 100 steps without learning, then 4,980 updates in blocks of 10: 498 points
TINY = ("--env CartPole-v1 --scorer --num-envs 4 --hidden-dim 16 --batch-size 8 --buffer-size 400 "
        "--learning-starts 100 --target-update-interval 40 --total-timesteps 2e4 --learning-rate 1e-3 "
        "--diagnostics").split()
PAIR = [*TINY, "--num-seeds", "2"]
DIAGNOSTICS = {"follower_loss", "leader_loss", "bellman_error_mean", "bellman_error_variance", "srank",
               "perception_norm", "control_norm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where these tests write: runs, and the programs compiled for them."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def start(folder):
    """Starts the script with these flags and environment variables, and ends it when the tests are over."""
    processes = []

    def start(*flags, **env):
        usual = dict(JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(folder / "cache"),
                     JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS="0")
        kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        processes.append(subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, flags)], env=kept | usual | env, text=True, cwd=folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def assert_same_curves(a: dict, b: dict):
    """Bit for bit, NaN included."""
    assert a.keys() == b.keys()
    for name in a.keys() - {"meta"}:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name, strict=True)


def tree_bytes(path: Path) -> dict:
    return {file: file.is_file() and file.read_bytes() for file in sorted(path.rglob("*"))}


@pytest.fixture(scope="module")
def pair(start, folder):
    """A run of seeds 0 and 1 that nobody disturbed."""
    return finish(start(*PAIR, "--save-model", "--runs-dir", folder / "pair"))


@pytest.fixture(scope="module")
def stopped(start, folder, pair):
    """The same run, stopped by Ctrl-C after its first tenth, with a checkpoint."""
    process = start(*PAIR, "--runs-dir", folder / "stopped", "--checkpoint-every-minutes", "60")
    head = [process.stdout.readline() for _ in range(3)]
    assert "10%" in head[-1]
    process.send_signal(signal.SIGINT)
    assert "last 10 %, stopped: " in finish(process, 130)[0]
    return Path(head[0].strip())


# -------------------- The record

def test_record(pair):
    """results.npz, args.json and the folder's name are what STYLE's readers expect."""
    out, run = pair
    assert re.fullmatch(r"scorer_dqn__CartPole-v1__scorer__s0__\d{8}-\d{6}(-\d+)?", run.name)
    assert sorted(path.name for path in run.iterdir()) == ["args.json", "model.safetensors", "results.npz"]
    record = results(run)
    meta, points = json.loads(str(record.pop("meta"))), 498
    assert record["timesteps"].shape == (points,) and record["seeds"].tolist() == [0, 1]
    assert record["timesteps"][0] == 100 + 10 * 4 and set(np.diff(record["timesteps"])) == {10 * 4}
    assert record["timesteps"][-1] == 100 + 4980 * 4 >= 20_000
    curves = {name: curve for name, curve in record.items() if name not in ("timesteps", "seeds")}
    assert curves.keys() == {"returns", "episodes"} | DIAGNOSTICS
    assert all(curve.shape == (2, points) for curve in curves.values())
    assert json.loads((run / "args.json").read_text()) == meta["args"]
    assert meta["args"].keys() == {field.name for field in fields(dqn.Args)}
    assert meta["args"]["env"] == "CartPole-v1" and meta["args"]["total_timesteps"] == 20_000
    assert meta["args"]["follower_learning_rate"] == 3e-4  # presets are filled in
    assert meta["schema"] == 1 and meta["script"] == "scorer_dqn" and meta["complete"] is True
    assert meta["seconds"] > 0 and meta["compile_seconds"] > 0 and meta["device"] and meta["num_devices"] == 2
    assert {"jax", "flax", "optax", "gymnax"} <= meta["versions"].keys()
    assert "2 seeds on 2 x cpu" in out and out.count("%|") == 10 and str(run) in out.splitlines()[-1]


def test_returns_are_means_of_last_episodes(pair):
    """Of 4 environments with whole returns, so multiples of 1/4; missing only until each has finished an episode."""
    record = results(pair[1])
    for returns, episodes in zip(record["returns"], record["episodes"]):
        known = ~np.isnan(returns)
        first = known.argmax()
        assert known[first:].all() and np.all(returns[known] >= 8) and np.all(returns[known] * 4 % 1 == 0)
        assert np.all(np.diff(episodes) >= 0) and np.all(episodes[known] >= 4)
        # a return changes only when an episode ends
        assert not np.any((np.diff(returns[first:]) != 0) & (np.diff(episodes[first:]) == 0))
        # 20,020 steps in all, in episodes about as long as their returns
        assert episodes[-1] * np.nanmean(returns) == pytest.approx(20_020, rel=0.25)


def test_diagnostics(pair):
    """At about 50 points, srank between 1 and hidden_dim, losses that fit each other."""
    record = results(pair[1])
    known = ~np.isnan(record["srank"])
    assert 40 <= known.sum(axis=1).min() <= known.sum(axis=1).max() <= 60
    values = {name: record[name][known] for name in DIAGNOSTICS}
    assert all(np.isfinite(curve).all() for curve in values.values())
    assert np.all(values["srank"] >= 1) and np.all(values["srank"] <= 16) and np.all(values["srank"] % 1 == 0)
    np.testing.assert_allclose(values["follower_loss"], values["bellman_error_variance"], rtol=1e-4)
    mean_square = values["bellman_error_mean"] ** 2 + values["bellman_error_variance"]
    np.testing.assert_allclose(values["leader_loss"], mean_square, rtol=1e-3)
    assert np.all(values["perception_norm"] > 0) and np.all(values["control_norm"] > 0)


def test_saved_model(pair):
    """All seeds' parameters under the players' names; their norms are the last ones recorded."""
    model = load_file(pair[1] / "model.safetensors")
    assert {name: array.shape for name, array in model.items()} == {
        "perception/Dense_0/kernel": (2, 4, 16), "perception/Dense_0/bias": (2, 16),
        "control/Dense_0/kernel": (2, 16, 16), "control/Dense_0/bias": (2, 16),
        "control/Dense_1/kernel": (2, 16, 2), "control/Dense_1/bias": (2, 2)}
    assert not np.array_equal(*model["control/Dense_0/kernel"])
    norm = np.sqrt(sum((array**2).reshape(2, -1).sum(1) for name, array in model.items() if name.startswith("control")))
    record = results(pair[1])["control_norm"]
    last = [curve[~np.isnan(curve)][-1] for curve in record]
    np.testing.assert_allclose(norm, last, rtol=0.02)  # the last of 50 points is a little before the end


def test_reader_accepts_the_record(pair):
    """The tools in plots/ read it."""
    sys.path.insert(0, str(ROOT / "plots"))
    import records
    run = records.read_run(pair[1])
    assert run.curves["returns"].shape == (2, 498)


# -------------------- Seeds, devices and processes

def test_seeds_beside_others_and_devices(start, folder, pair):
    """Six seeds on four devices use three, say so, and seeds 0 and 1 are bit for bit those of the run of two."""
    out, run = finish(start(*TINY, "--num-seeds", 6, "--runs-dir", folder / "six",
                            XLA_FLAGS="--xla_force_host_platform_device_count=4"))
    assert "6 seeds on 3 x cpu" in out
    six, two = results(run), results(pair[1])
    assert json.loads(str(six["meta"]))["num_devices"] == 3 and six["seeds"].tolist() == [0, 1, 2, 3, 4, 5]
    first = {name: array if name in ("meta", "timesteps") else array[:2] for name, array in six.items()}
    assert_same_curves(first, two)
    final = six["control_norm"][:, ~np.isnan(six["control_norm"][0])][:, -1]
    assert len(set(final)) == 6


def test_two_processes(start, folder, pair):
    """Two processes on loopback with one seed each write one result, bit for bit the single process's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [start(*PAIR, "--distributed", "--save-model", "--runs-dir", folder / "distributed",
                       JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(i)) for i in (0, 1)]
    (out, run), other = finish(processes[0]), processes[1].communicate(timeout=60)[0]
    assert processes[1].returncode == 0 and "2 seeds on 2 x cpu" in out and "%|" not in other
    assert list((folder / "distributed").iterdir()) == [run]
    assert_same_curves(results(run), results(pair[1]))
    model, single = (load_file(path / "model.safetensors") for path in (run, pair[1]))
    assert model.keys() == single.keys() and all(np.array_equal(model[name], single[name]) for name in model)


def test_sweep(start, folder, pair):
    """Three follower rates as one program: a record per rate, and the member with the single run's rate is that run."""
    out, run = finish(start(*PAIR, "--follower-learning-rate", 1e-3, 3e-4, 1e-5, "--save-model", "--runs-dir",
                            folder / "sweep"))
    runs = sorted((folder / "sweep").iterdir())
    assert len(runs) == 3 and all(str(run) in out for run in runs) and "6 seeds on 6 x cpu" in out
    records = {json.loads((run / "args.json").read_text())["follower_learning_rate"]: results(run) for run in runs}
    assert records.keys() == {1e-3, 3e-4, 1e-5}
    assert_same_curves(records[3e-4], results(pair[1]))
    metas = {rate: json.loads(str(record["meta"])) for rate, record in records.items()}
    assert all(meta["args"]["follower_learning_rate"] == rate and meta["complete"] for rate, meta in metas.items())
    norms = [np.nanmax(record["perception_norm"], axis=1) for record in records.values()]
    assert len(np.unique(norms)) == 6
    model, single = (load_file(path / "model.safetensors") for path in (
        next(run for run in runs if "follower0.0003" in run.name), pair[1]))
    assert all(np.array_equal(model[name], single[name]) for name in single)


def test_second_start_is_quick(start, folder):
    """Compiled programs are kept in the user's cache folder, unless the user says otherwise."""
    flags = "--env CartPole-v1 --num-envs 2 --learning-starts 2 --batch-size 4 --total-timesteps 400".split()
    usual = dict(XDG_CACHE_HOME=str(folder / "user"), JAX_COMPILATION_CACHE_DIR="")
    seconds = []
    for more in (["--no-compilation-cache"], [], []):
        files = list((folder / "user").glob("scorer/*"))
        run = finish(start(*flags, *more, "--runs-dir", folder / "cached", **usual))[1]
        seconds.append(json.loads(str(results(run)["meta"]))["compile_seconds"])
        assert bool(files) == (len(seconds) == 3)
    assert seconds[2] < seconds[1] / 2


# -------------------- Ctrl-C, kill, resume

def test_ctrl_c_saves(stopped, pair):
    """What there is, marked as incomplete, is the beginning of the whole."""
    record, whole = results(stopped), results(pair[1])
    meta, points = json.loads(str(record["meta"])), len(record["timesteps"])
    assert meta["complete"] is False and 40 < points < 498
    cut = {name: array if name in ("meta", "seeds") else array[..., :points] for name, array in whole.items()}
    assert_same_curves(record, cut)


def test_resume_after_ctrl_c_and_kill(start, folder, stopped, pair):
    """Stopped, continued, killed while it writes checkpoints, continued: bit for bit the undisturbed run's curves."""
    before = tree_bytes(stopped)
    process = start("--resume", stopped, "--checkpoint-every-minutes", 0.001, "--runs-dir", folder / "killed")
    killed = Path(process.stdout.readline().strip())
    deadline = time.time() + 60
    while not (killed / "checkpoint.npz").exists() and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # so that it is more likely to die while writing a later one
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (killed / "results.npz").exists()
    with np.load(killed / "checkpoint.npz") as file:
        block = int(file[file.files[-2]])
    assert len(results(stopped)["timesteps"]) < block < 498
    out, run = finish(start("--resume", killed, "--runs-dir", folder / "resumed", "--save-model"))
    assert_same_curves(results(run), results(pair[1]))
    assert all(np.array_equal(a, b) for a, b in zip(*(
        load_file(path / "model.safetensors").values() for path in (run, pair[1]))))
    assert json.loads(str(results(run)["meta"]))["seconds"] > json.loads(str(results(stopped)["meta"]))["seconds"]
    assert tree_bytes(stopped) == before  # a resumed run is a new one


# -------------------- In this process: checkpoints and input that are refused

@pytest.fixture
def main(monkeypatch, capsys, folder):
    """Runs main with these flags; its exit code and what it printed on standard output and error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time

    def main(*flags):
        capsys.readouterr()
        # JAX runs already, so main must leave it its devices
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            dqn.main()
        return end.value.code, *capsys.readouterr()

    yield main
    for number, handler in handlers.items():
        signal.signal(number, handler)
    jax.config.update("jax_disable_most_optimizations", False)


def state_like(**changes):
    """A state of zeros of the shape of `pair`'s, or as these arguments have it."""
    args = dict(env="CartPole-v1", scorer=True, num_envs=4, hidden_dim=16, batch_size=8, buffer_size=400,
                learning_starts=100, target_update_interval=40, total_timesteps=20_000, learning_rate=1e-3,
                diagnostics=True)
    init = dqn.make_train(*dqn.resolve(dqn.Args(**args | changes)))[0]
    members = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((2,), jnp.float32)
    shapes = jax.eval_shape(jax.vmap(init), *members)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def refused(call, capsys) -> bool:
    """Whether it ends with exit code 2 and one sentence that names --resume; anything else it may not do but return."""
    capsys.readouterr()
    try:
        call()
    except SystemExit as end:
        lines = capsys.readouterr().err.strip().splitlines()
        assert end.code == 2 and len([line for line in lines if line.startswith("error: --resume")]) == 1
        assert "Traceback" not in "".join(lines)
        return True
    return False


def test_damaged_checkpoints(stopped, tmp_path, capsys):
    """A bit flipped at any of 100 places, or a file cut short: refused, or harmless: the same state is read."""
    like, content = state_like(), (stopped / "checkpoint.npz").read_bytes()
    whole, block, _ = dqn.restore(stopped / "checkpoint.npz", like)
    assert whole.seed.tolist() == [0, 1] and block == len(results(stopped)["timesteps"])
    places = np.linspace(0, len(content) - 1, 100).astype(int)
    damaged = [content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :] for at in places]
    outcome = []
    for data in [*damaged, content[: len(content) // 2], content[:-1], b""]:
        (tmp_path / "checkpoint.npz").write_bytes(data)
        read = []
        outcome.append(refused(lambda: read.append(dqn.restore(tmp_path / "checkpoint.npz", like)), capsys))
        assert (tmp_path / "checkpoint.npz").read_bytes() == data
        for state, found, _ in read:
            assert found == block
            jax.tree.map(np.testing.assert_array_equal, state, whole)
    assert sum(outcome[:100]) > 50 and all(outcome[100:])


@pytest.mark.parametrize("changes", [dict(hidden_dim=8), dict(scorer=False), dict(dueling=True), dict(buffer_size=404),
                                     dict(diagnostics=False)])
def test_foreign_checkpoint(changes, stopped, capsys):
    """A checkpoint of a run with other shapes is refused and left alone."""
    before = tree_bytes(stopped)
    assert refused(lambda: dqn.restore(stopped / "checkpoint.npz", state_like(**changes)), capsys)
    assert tree_bytes(stopped) == before


def test_no_checkpoint(pair, capsys):
    """A run that kept none is refused, and stays without a folder for it."""
    before = tree_bytes(pair[1])
    assert refused(lambda: dqn.restore(pair[1] / "checkpoint.npz", state_like()), capsys)
    assert tree_bytes(pair[1]) == before


def test_resume_refusals(main, stopped, tmp_path):
    """From the command line: a damaged checkpoint, no run, a foreign args.json, other flags: one sentence, code 2."""
    damaged = shutil.copytree(stopped, tmp_path / "damaged")
    content = bytearray((damaged / "checkpoint.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "checkpoint.npz").write_bytes(content)
    foreign = shutil.copytree(stopped, tmp_path / "foreign")
    (foreign / "args.json").write_text('{"size": 20}')
    for run, flags in ((damaged, ()), (tmp_path / "absent", ()), (foreign, ()), (stopped, ("--gamma", 0.9)), (
            stopped, ("--env", "Breakout-MinAtar"))):  # the last is a default, but not this run's
        before = tree_bytes(run)
        code, out, err = main("--resume", run, "--runs-dir", tmp_path / "new", *flags)
        assert code == 2 and tree_bytes(run) == before
        assert re.fullmatch(r"error: --resume [^\n]+\n", err), err
        assert not list(tmp_path.glob("new/*")), "nothing is written"


BAD = [
    ("--env Brekout-MinAtar", ["--env", "Breakout-MinAtar"]),
    ("--env breakout", ["--env", "Breakout-MinAtar"]),
    ("--env Pendulum-v1", ["--env", "Discrete"]),
    ("--num-seeds 0", ["--num-seeds"]),
    ("--num-seeds -3", ["--num-seeds"]),
    ("--learning-rate -1e-4", ["--learning-rate"]),
    ("--learning-rate 0", ["--learning-rate"]),
    ("--learning-rate nan", ["--learning-rate"]),
    ("--scorer --follower-learning-rate -1", ["--follower-learning-rate"]),
    ("--scorer --follower-learning-rate inf", ["--follower-learning-rate"]),
    ("--follower-loss msbe", ["--follower-loss", "--scorer"]),
    ("--follower-learning-rate 1e-3", ["--follower-learning-rate", "--scorer"]),
    ("--leader-decay-power 1.5", ["--leader-decay-power", "--scorer"]),
    ("--scorer --leader-decay-power 0", ["--leader-decay-power"]),
    ("--ablation synchronous", ["--ablation", "--scorer"]),
    ("--ablation inverted-roles", ["--ablation", "--scorer"]),
    ("--scorer --ablation per-layer-lr", ["--ablation", "--scorer"]),
    ("--scorer --ablation synchronous --follower-loss msbe", ["--follower-loss", "synchronous"]),
    ("--scorer --ablation synchronous --follower-learning-rate 1e-3", ["--follower-learning-rate", "synchronous"]),
    ("--ablation per-layer-lr --follower-loss variance", ["--follower-loss", "per-layer-lr"]),
    ("--scorer --follower-learning-rate 1e-4 0 2e-4", ["--follower-learning-rate", "0.0"]),
    ("--scorer --follower-learning-rate 1e-4 1e-4", ["--follower-learning-rate", "different"]),
    ("--scorer --follower-learning-rate 1e-4 2e-4 --track", ["--follower-learning-rate", "--track"]),
    ("--scorer --follower-learning-rate 1e-4 2e-4 --checkpoint-every-minutes 1", ["--follower-learning-rate"]),
    ("--scorer --follower-learning-rate", ["--follower-learning-rate", "value"]),
    ("--scorer --follower-learning-rate 1e-4 1.0000001e-4", ["--follower-learning-rate", "different"]),
    ("--learning-rate 1e39", ["--learning-rate"]),
    ("--max-grad-norm 1e-60", ["--max-grad-norm"]),
    ("--num-seeds 5e9", ["--num-seeds", "5000000000"]),
    ("--num-envs 1 --buffer-size 2147483648", ["--buffer-size"]),
    ("--buffer-size 63", ["--buffer-size", "63", "64"]),
    ("--buffer-size 100 --num-envs 128", ["--buffer-size", "128"]),
    ("--batch-size 0", ["--batch-size"]),
    ("--num-envs 0", ["--num-envs"]),
    ("--total-timesteps 0", ["--"]),
    ("--total-timesteps 500", ["--learning-starts"]),
    ("--gamma 1.5", ["--gamma"]),
    ("--gamma -0.1", ["--gamma"]),
    ("--epsilon-start 2", ["--epsilon-start"]),
    ("--tau 0", ["--tau"]),
    ("--seed -1", ["--seed"]),
    ("--seed 4294967296", ["--seed"]),
    ("--max-grad-norm -1", ["--max-grad-norm"]),
    ("--checkpoint-every-minutes 0", ["--checkpoint-every-minutes"]),
]


@pytest.mark.parametrize("flags, words", BAD, ids=[flags for flags, _ in BAD])
def test_bad_input(flags, words, main, tmp_path):
    """One sentence on standard error that names the flag, exit code 2, before any compile, and nothing written."""
    control = [] if "--env" in flags else ["--env", "CartPole-v1"]
    code, out, err = main(*control, *flags.split(), "--runs-dir", tmp_path / "new")
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: [^\n]+\n", err) and all(word in err for word in words), err


@pytest.mark.parametrize("flags", ["--num-seeds 2.5", "--total-timesteps 1e-1", "--num-seeds many", "--num-seeds 1/0",
                                   "--learning-rate fast", "--follower-loss mse", "--no-such-flag"])
def test_words_that_are_no_values(flags, main, tmp_path):
    """The command line's parser names the flag: exit code 2, nothing written."""
    code, out, err = main("--env", "CartPole-v1", *flags.split(), "--runs-dir", tmp_path / "new")
    assert code == 2 and flags.split()[0] in out + err and not list(tmp_path.iterdir())


def test_unwritable_runs_dir(main, tmp_path):
    """A folder below a regular file cannot be made."""
    (tmp_path / "file").write_text("precious")
    code, out, err = main(*TINY, "--runs-dir", tmp_path / "file" / "runs")
    assert code == 2 and out == "" and re.fullmatch(r"error: --runs-dir [^\n]+\n", err), err
    assert (tmp_path / "file").read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


def test_runs_of_one_second(main, tmp_path, monkeypatch):
    """Runs that start a microsecond apart both survive; one at the same time is refused, and overwrites nothing."""
    now = datetime(2026, 1, 1)
    flags = ("--env CartPole-v1 --num-envs 2 --batch-size 4 --buffer-size 40 --learning-starts 2 "
             "--total-timesteps 400").split()
    codes = []
    for shift in (0, 0, 1):
        monkeypatch.setattr(dqn, "datetime", SimpleNamespace(now=lambda: now + timedelta(microseconds=shift)))
        before = tree_bytes(tmp_path)
        codes.append(main(*flags, "--runs-dir", tmp_path)[0])
        assert before.items() <= tree_bytes(tmp_path).items()
    assert codes == [0, 2, 0] and len(list(tmp_path.glob("*/results.npz"))) == 2


def test_numbers_may_be_written_as_floats(main, tmp_path):
    """1e6 is a whole number; the refusal shows how it was read."""
    err = main("--env", "CartPole-v1", "--buffer-size", "5e1", "--runs-dir", tmp_path)[2]
    assert "--buffer-size 50 " in err


# -------------------- The command line

def test_help(start):
    """--help says what every field is for, in the words beside it in the source."""
    out, _ = finish(start("--help", COLUMNS="1000"))
    out = re.sub(r"[\s│]+", " ", out)
    source = SCRIPT.read_text()
    for field in fields(dqn.Args):
        comment = re.search(rf"(?m)^    {field.name}: .*  # (.+)$", source)
        assert comment, f"{field.name} has no help"
        assert f"--{field.name.replace('_', '-')}" in out and comment[1] in out, field.name


def test_bad_input_as_a_program(start, folder):
    """The process itself exits with code 2 and one line on standard error."""
    process = start("--env", "Brekout-MinAtar", "--runs-dir", folder / "none")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and re.fullmatch(r"error: --env Brekout-MinAtar [^\n]+\n", err), err
    assert not (folder / "none").exists()


def test_track_offline(start, folder, tmp_path):
    """Weights & Biases without an account or a network; the curves go to its folder."""
    pytest.importorskip("wandb")
    flags = ("--env CartPole-v1 --num-envs 4 --batch-size 8 --buffer-size 400 --learning-starts 100 "
             "--total-timesteps 4000 --track --wandb-mode offline --runs-dir").split()
    finish(start(*flags, tmp_path / "runs", WANDB_DIR=str(tmp_path)))
    logs = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 1 and b"returns" in logs[0].read_bytes() and b"episodes" in logs[0].read_bytes()


# -------------------- Learning

@pytest.mark.parametrize("variant", ["", "--scorer --follower-learning-rate 2e-3"], ids=["baseline", "scorer"])
def test_learns_cartpole(variant, start, folder):
    """Three seeds, 200,000 steps, ten times the usual rates: mean return above 120 over the last 10 % (random: 22)."""
    out, run = finish(start("--env", "CartPole-v1", *variant.split(), "--num-seeds", 3, "--total-timesteps", 2e5,
                            "--learning-rate", 1e-3, "--epsilon-steps", 2e4, "--runs-dir", folder / "learning"))
    returns = results(run)["returns"]
    last = returns[:, -returns.shape[1] // 10 :].mean(axis=1)
    assert last.mean() > 120 and last.min() > 60
    assert last.mean() == pytest.approx(float(re.search(r"last 10 %: ([\d.]+)", out)[1]), rel=0.05)

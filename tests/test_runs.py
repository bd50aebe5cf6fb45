"""scorer_dqn.py from the outside: flags, record, checkpoints, signals, devices, processes, learning."""

import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPTIMIZED
from helpers import UNOPTIMIZED
from helpers import finish
from helpers import make_start
from helpers import results
from helpers import script_variables
from safetensors.numpy import load_file

import scorer_dqn as dqn

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scorer_dqn.py"
# 25 steps without learning, then 4,976 updates in chunks of 16: 311 points.
SIZES = dict(
    env="CartPole-v1",
    num_envs=4,
    hidden_dim=16,
    batch_size=8,
    buffer_size=400,
    learning_starts=100,
    target_update_interval=64,
    total_timesteps=20_000,
    learning_rate=1e-3,
)
POINTS = 311
CHUNK = 16 * 4  # environment steps


def to_flags(options: dict) -> list[str]:
    """Returns arguments as one types them."""
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


TINY = [*to_flags(SIZES), "--scorer", "--diagnostics"]
PAIR = [*TINY, "--num-seeds", "2"]
SHORT = to_flags(SIZES | dict(total_timesteps=4000))
DIAGNOSTICS = {
    "follower_loss",
    "leader_loss",
    "bellman_error_mean",
    "bellman_error_variance",
    "srank",
    "perception_norm",
    "control_norm",
}
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns where these tests write: runs, and the programs compiled for them."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def environment(folder):
    """Returns the environment variables of a script that these tests start."""
    return script_variables(folder, **UNOPTIMIZED)


@pytest.fixture(scope="module")
def start(folder):
    """Starts the script with flags and environment variables; ends it when the tests are over."""
    processes = []
    start_script = make_start(SCRIPT, folder, **UNOPTIMIZED)

    def start(*flags, **options):
        processes.append(start_script(*flags, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_lines(stream, number: int) -> list[str]:
    """Returns the next lines of a process' output."""
    return [stream.readline().strip() for _ in range(number)]


def read_meta(run: Path) -> dict:
    """Returns what a record says of its run."""
    return json.loads(str(results(run)["meta"]))


def assert_same_curves(a: dict, b: dict):
    """Compares two records bit for bit, NaN included."""
    assert a.keys() == b.keys()
    for name in a.keys() - {"meta"}:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name, strict=True)


def assert_same_models(a: Path, b: Path):
    """Compares two runs' saved parameters bit for bit."""
    models = [load_file(run / "model.safetensors") for run in (a, b)]
    assert models[0].keys() == models[1].keys()
    for name in models[0]:
        np.testing.assert_array_equal(models[0][name], models[1][name], err_msg=name)


def tree_bytes(path: Path) -> dict:
    """Returns everything in a folder, by path."""
    return {file: file.is_file() and file.read_bytes() for file in sorted(path.rglob("*"))}


@pytest.fixture(scope="module")
def pair(start, folder):
    """Returns what a run of seeds 0 and 1 that nobody disturbed printed, and its folder."""
    return finish(start(*PAIR, "--save-model", "--runs-dir", folder / "pair"))


@pytest.fixture(scope="module")
def stopped(start, folder, pair):
    """Returns the same run, stopped by Ctrl-C after its first tenth, with a checkpoint."""
    flags = ["--runs-dir", folder / "stopped", "--checkpoint-every-minutes", "60"]
    process = start(*PAIR, *flags)
    run, _, _, bar = read_lines(process.stdout, 4)
    assert "10%" in bar
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "stopping after this chunk and saving; again to end without saving\n"
    assert "last 10 %, stopped: " in out
    return Path(run)


# ---------------------------------------- The record ----------------------------------------------


def test_record(pair):
    """results.npz, args.json and the folder's name are what plots/ expects."""
    out, run = pair
    name = r"scorer_dqn__CartPole-v1__scorer-[\w.-]+__s0__\d{8}-\d{6}-\d{6}"
    assert re.fullmatch(name, run.name)
    files = sorted(path.name for path in run.iterdir())
    assert files == ["args.json", "model.safetensors", "results.npz"]
    record = results(run)
    meta = json.loads(str(record.pop("meta")))
    timesteps, seeds = record.pop("timesteps"), record.pop("seeds")
    assert timesteps.shape == (POINTS,) and seeds.tolist() == [0, 1]
    assert timesteps[0] == 100 + CHUNK and set(np.diff(timesteps)) == {CHUNK}
    assert timesteps[-1] == 100 + POINTS * CHUNK >= 20_000
    assert record.keys() == {"returns", "episodes"} | DIAGNOSTICS
    for curve in record.values():
        assert (curve.shape, curve.dtype) == ((2, POINTS), np.float32)
    assert json.loads((run / "args.json").read_text()) == meta["args"]
    assert meta["args"].keys() == {field.name for field in fields(dqn.Args)}
    assert meta["args"]["env"] == "CartPole-v1" and meta["args"]["total_timesteps"] == 20_000
    assert meta["args"]["follower_learning_rate"] == 3e-4  # presets are filled in
    assert (meta["schema"], meta["script"], meta["complete"]) == (1, "scorer_dqn", True)
    assert meta["seconds"] > 0 and meta["compile_seconds"] > 0
    assert meta["device"] and meta["num_devices"] == meta["lanes"] == 2
    assert meta["continues"] is None
    assert {"jax", "flax", "optax", "gymnax"} <= meta["versions"].keys()


def test_what_a_run_prints(pair):
    """Where results go, how long it is and why, on what, its tenths, and its outcome."""
    out, run = pair
    lines = out.splitlines()
    assert lines[0] == str(run)
    assert lines[1] == (
        "20,004 environment steps (20,000 rounded up to whole points of the curves), "
        "target update interval 64"
    )
    assert lines[2] == "2 seeds on 2 x cpu; compiling"
    assert all("%|" in line for line in lines[3:13]) and "100%|" in lines[12]
    assert len(lines) == 14
    assert re.fullmatch(r"mean return over the last 10 %: \d+\.\d\d; saved in .+", lines[13])
    assert lines[13].endswith(str(run))


def test_returns_are_means_of_last_episodes(pair):
    """Of 4 environments with whole returns; missing until each has finished an episode."""
    record = results(pair[1])
    for returns, episodes in zip(record["returns"], record["episodes"]):
        known = ~np.isnan(returns)
        first = known.argmax()
        assert known[first:].all()
        assert np.all(returns[known] >= 8) and np.all(returns[known] * 4 % 1 == 0)
        assert np.all(np.diff(episodes) >= 0) and np.all(episodes[known] >= 4)
        # A return changes only when an episode ends.
        return_changes = np.diff(returns[first:]) != 0
        no_episode_ends = np.diff(episodes[first:]) == 0
        assert not np.any(return_changes & no_episode_ends)
        # 20,004 steps in all, in episodes about as long as their returns.
        assert episodes[-1] * np.nanmean(returns) == pytest.approx(20_004, rel=0.25)


def test_diagnostics(pair):
    """At about 50 points, srank between 1 and hidden_dim, losses that fit each other."""
    record = results(pair[1])
    known = ~np.isnan(record["srank"])
    assert 40 <= known.sum(axis=1).min() <= known.sum(axis=1).max() <= 60
    values = {name: record[name][known] for name in DIAGNOSTICS}
    for curve in values.values():
        assert np.isfinite(curve).all()
    srank = values["srank"]
    assert np.all(srank >= 1) and np.all(srank <= 16) and np.all(srank % 1 == 0)
    mean, variance = values["bellman_error_mean"], values["bellman_error_variance"]
    np.testing.assert_allclose(values["follower_loss"], variance, rtol=1e-4)
    np.testing.assert_allclose(values["leader_loss"], mean**2 + variance, rtol=1e-3)
    assert np.all(values["perception_norm"] > 0) and np.all(values["control_norm"] > 0)


def test_saved_model(pair):
    """All seeds' parameters under the players' names; their norms are the last ones recorded."""
    model = load_file(pair[1] / "model.safetensors")
    assert {name: array.shape for name, array in model.items()} == {
        "perception/Dense_0/kernel": (2, 4, 16),
        "perception/Dense_0/bias": (2, 16),
        "control/Dense_0/kernel": (2, 16, 16),
        "control/Dense_0/bias": (2, 16),
        "control/Dense_1/kernel": (2, 16, 2),
        "control/Dense_1/bias": (2, 2),
    }
    assert not np.array_equal(*model["control/Dense_0/kernel"])
    control = [array.reshape(2, -1) for name, array in model.items() if name.startswith("control")]
    norm = np.linalg.norm(np.concatenate(control, axis=1), axis=1)
    recorded = results(pair[1])["control_norm"]
    last = [curve[~np.isnan(curve)][-1] for curve in recorded]
    np.testing.assert_allclose(norm, last, rtol=0.02)  # the last of 50 points is before the end


def test_reader_accepts_the_record(pair):
    """The tools in plots/ read it."""
    sys.path.insert(0, str(ROOT / "plots"))
    import records

    run = records.read_run(pair[1])
    assert run.curves["returns"].shape == (2, POINTS)


def name_of(**options) -> str:
    """Returns the variant in the name of a run with these arguments."""
    given = dqn.Args(**dict(env="CartPole-v1") | options)
    (name,) = dqn.run_names(given, dqn.complete(given))
    return name.split("__")[2]


def test_names_tell_runs_apart():
    """What differs from the preset is in the name; what is given as it is preset is not."""
    assert name_of() == name_of(learning_rate=1e-4, hidden_dim=64) == "baseline"
    assert name_of(learning_rate=5e-4) == "baseline-learning-rate-0.0005"
    assert name_of(seed=3, num_seeds=2, total_timesteps=5000, save_model=True) == "baseline"
    assert name_of(scorer=True) == name_of(scorer=True, follower_learning_rate=(3e-4,)) == "scorer"
    rate = name_of(scorer=True, follower_learning_rate=(1e-3,))
    assert rate == "scorer-follower-learning-rate-0.001"
    several = dict(scorer=True, follower_loss="msbe", double=True, bootstrap_at_timeout=False)
    assert name_of(**several) == "scorer-msbe-double-no-bootstrap-at-timeout"
    assert name_of(ablation="per-layer-lr", l1_norm=True) == "baseline-per-layer-lr-l1-norm"


def test_names_of_a_sweep():
    """Each rate's run has its rate in its name."""
    given = dqn.Args(env="CartPole-v1", scorer=True, follower_learning_rate=(1e-3, 3e-4))
    variants = [name.split("__")[2] for name in dqn.run_names(given, dqn.complete(given))]
    assert variants == [f"scorer-follower-learning-rate-{rate}" for rate in ("0.001", "0.0003")]


@pytest.mark.parametrize(
    "returns, words",
    [
        ([[1.0, 2.0], [3.0, 4.0]], "2.50"),
        ([[1.0, np.nan], [3.0, 5.0]], "3.00 (of the 75% of points that have one)"),
        ([[np.nan, np.nan]], "none, as not every environment has finished an episode"),
    ],
)
def test_mean_return_in_words(returns, words):
    """Points without a return are left out of the mean, and said to be."""
    assert dqn.describe_mean(np.array(returns)) == words


# ------------------------------------------- The bar ----------------------------------------------


def test_bar_shows_those_that_have_finished():
    """The mean over the environments that have ended an episode, of whichever seed, and how many."""
    half = np.array([8.0, 0.0]), np.array([0.5, 0.0])
    words = "of the 25% of environments that ended an episode"
    assert dqn.describe_returns(*half) == f"return 8.00 {words}"
    assert dqn.describe_returns(np.array([8.0, 4.0]), np.array([1.0, 1.0])) == "return 6.00"
    assert dqn.describe_returns(np.zeros(2), np.zeros(2)) == ""
    assert dqn.describe_returns(np.array([8.0, 4.0]), np.array([0.75, 0.25])).startswith("return 7")


@pytest.mark.parametrize("num_envs", [41, 47, 128])
def test_all_have_finished(num_envs):
    """The share of 41 of 41 is 1, though 41 times float32's 1 / 41 is not."""
    share = jax.jit(dqn.share_of)(jnp.ones(num_envs, bool))
    assert share == 1.0
    assert dqn.have_all(jax.jit(jnp.mean)(jnp.ones(num_envs, bool)))
    assert not dqn.have_all(np.float32(1 - 1 / 10_000))


def test_first_speed_leaves_out_the_warm_up(capsys):
    """100 steps in 10 seconds after a warm-up of a million are 10 a second."""
    progress = dqn.Progress(1_000_000, 1_000_100)
    progress.bar.start_t -= 10
    progress.show(1_000_100, dict(returns=np.array([20.0]), finished=np.array([1.0])))
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r"\b(9\.\d\d|10\.0)step/s", line) and "return 20.00" in line, line
    assert line.startswith("100%|")


# --------------------------------- Seeds, devices and processes -----------------------------------


@pytest.mark.slow
def test_seeds_beside_others_and_devices(start, folder, pair):
    """Six seeds on four devices use three, and seeds 0 and 1 are bit for bit those of the pair."""
    flags = [*TINY, "--num-seeds", 6, "--runs-dir", folder / "six"]
    out, run = finish(start(*flags, XLA_FLAGS="--xla_force_host_platform_device_count=4"))
    assert "6 seeds on 3 x cpu" in out
    six = results(run)
    assert read_meta(run)["num_devices"] == 3
    assert six["seeds"].tolist() == [0, 1, 2, 3, 4, 5]
    first_two = {
        name: array if name in ("meta", "timesteps") else array[:2] for name, array in six.items()
    }
    assert_same_curves(first_two, results(pair[1]))
    final = six["control_norm"][:, ~np.isnan(six["control_norm"][0])][:, -1]
    assert len(set(final)) == 6


def test_one_seed(start, folder):
    """Of one seed the plan speaks in the singular."""
    out, run = finish(start(*SHORT, "--runs-dir", folder / "one"))
    assert "1 seed on cpu; compiling" in out
    assert read_meta(run)["lanes"] == 1


@pytest.mark.slow
def test_two_processes(start, folder, pair):
    """Two processes with one seed each write one result, bit for bit the single process's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [*PAIR, "--distributed", "--save-model", "--runs-dir", folder / "distributed"]
    job = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2")
    main_process = start(*flags, **job, JAX_PROCESS_ID="0")
    other_process = start(*flags, **job, JAX_PROCESS_ID="1")
    out, run = finish(main_process)
    other, err = other_process.communicate(timeout=60)
    assert other_process.returncode == 0, err
    assert "2 seeds on 2 x cpu" in out and "%|" not in other
    assert list((folder / "distributed").iterdir()) == [run]
    assert_same_curves(results(run), results(pair[1]))
    assert_same_models(run, pair[1])


@pytest.mark.slow
def test_sweep(start, folder, pair):
    """Three rates as one program: a record per rate, and one of them is the single run's."""
    flags = ["--follower-learning-rate", 1e-3, 3e-4, 1e-5, "--save-model"]
    out, _ = finish(start(*PAIR, *flags, "--runs-dir", folder / "sweep"))
    runs = sorted((folder / "sweep").iterdir())
    assert len(runs) == 3 and "6 seeds on 6 x cpu" in out
    by_rate = {}
    for run in runs:
        assert str(run) in out
        rate = json.loads((run / "args.json").read_text())["follower_learning_rate"]
        assert f"follower-learning-rate-{rate:g}" in run.name
        meta = read_meta(run)
        assert meta["args"]["follower_learning_rate"] == rate
        assert meta["complete"] and meta["lanes"] == 6
        by_rate[rate] = run
    assert by_rate.keys() == {1e-3, 3e-4, 1e-5}
    assert_same_curves(results(by_rate[3e-4]), results(pair[1]))
    assert_same_models(by_rate[3e-4], pair[1])
    norms = [np.nanmax(results(run)["perception_norm"], axis=1) for run in runs]
    assert len(np.unique(norms)) == 6


@pytest.mark.slow
def test_second_start_is_quick(start, folder):
    """Compiled programs are kept in the user's cache folder, unless the user says otherwise."""
    usual = dict(XDG_CACHE_HOME=str(folder / "user"), JAX_COMPILATION_CACHE_DIR="") | OPTIMIZED

    def compile_seconds(**variables):
        run = finish(start(*SHORT, "--runs-dir", folder / "cached", **usual, **variables))[1]
        return read_meta(run)["compile_seconds"]

    def is_kept():
        return any((folder / "user").glob("scorer/*"))

    compile_seconds(JAX_ENABLE_COMPILATION_CACHE="false")
    assert not is_kept()
    first = compile_seconds()
    assert is_kept()
    assert compile_seconds() < first / 2


# ----------------------------------- Signals, kill, resume ----------------------------------------


def test_ctrl_c_saves(stopped, pair):
    """What there is, marked as incomplete, is the beginning of the whole."""
    record, whole = results(stopped), results(pair[1])
    points = len(record["timesteps"])
    assert read_meta(stopped)["complete"] is False and 25 < points < POINTS
    assert (stopped / "checkpoint.npz").exists()
    cut = {
        name: array if name in ("meta", "seeds") else array[..., :points]
        for name, array in whole.items()
    }
    assert_same_curves(record, cut)


def test_sigterm_saves(start, folder, stopped):
    """As a cluster stops a job: exit code 143, curves and checkpoint are there; what continues says so."""
    flags = ["--resume", stopped, "--checkpoint-every-minutes", 60]
    process = start(*flags, "--runs-dir", folder / "terminated")
    lines = read_lines(process.stdout, 5)
    assert lines[2].startswith(f"continues {stopped} after ")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.startswith("stopping after this chunk and saving")
    run = Path(lines[0])
    assert len(results(stopped)["timesteps"]) < len(results(run)["timesteps"]) < POINTS
    assert (run / "checkpoint.npz").exists()
    meta = read_meta(run)
    assert meta["complete"] is False and meta["continues"] == stopped.name
    assert run.name.split("__")[:4] == stopped.name.split("__")[:4]


def test_resume_after_ctrl_c_and_kill(start, folder, stopped, pair):
    """Stopped, continued, killed while it writes checkpoints, continued: the undisturbed run's curves."""
    before = tree_bytes(stopped)
    flags = ["--resume", stopped, "--checkpoint-every-minutes", 0.001]
    process = start(*flags, "--runs-dir", folder / "killed")
    killed = Path(process.stdout.readline().strip())
    deadline = time.time() + 60
    while not (killed / "results.npz").exists() and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # so that it is more likely to die while writing a later one
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with np.load(killed / "checkpoint.npz") as file:
        chunks = int(file["chunks"])
    assert len(results(stopped)["timesteps"]) < chunks < POINTS
    # What is on disk of a run that was killed can be plotted.
    assert read_meta(killed)["complete"] is False
    so_far = results(killed)["returns"]
    np.testing.assert_array_equal(so_far, results(pair[1])["returns"][:, : so_far.shape[1]])

    out, run = finish(start("--resume", killed, "--runs-dir", folder / "resumed", "--save-model"))
    assert_same_curves(results(run), results(pair[1]))
    assert_same_models(run, pair[1])
    assert read_meta(run)["seconds"] > read_meta(stopped)["seconds"]
    assert read_meta(run)["continues"] == killed.name
    assert tree_bytes(stopped) == before  # a resumed run is a new one


# One chunk of 9,973 updates, which is a prime, of a size that takes minutes.
LONG_CHUNK = to_flags(
    dict(
        env="CartPole-v1",
        num_envs=4,
        hidden_dim=512,
        batch_size=1024,
        buffer_size=2000,
        learning_starts=100,
        target_update_interval=9973 * 4,
        total_timesteps=1e6,
    )
)


def test_second_ctrl_c_ends_at_once(start, folder):
    """The first speaks while a chunk is under way; the second ends, says what was lost, leaves nothing."""
    process = start(*LONG_CHUNK, "--runs-dir", folder / "twice", JAX_LOG_COMPILES="1")
    run = Path(process.stdout.readline().strip())
    compiled = 0
    while compiled < 2:  # init and train_chunk
        line = process.stderr.readline()
        assert line, "it has ended"
        compiled += "Finished XLA compilation of jit(on_device)" in line
    time.sleep(1)
    assert run.exists()
    since = time.time()
    process.send_signal(signal.SIGINT)
    while "stopping after this chunk" not in process.stderr.readline():
        assert process.poll() is None
    assert time.time() - since < 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=2)
    assert process.returncode == 130
    assert err.endswith("ended without saving; nothing was saved\n") and "Traceback" not in err
    assert not run.exists()


def test_ctrl_c_while_compiling(start, folder):
    """It ends within 2 seconds, says so, and leaves no folder."""
    runs = folder / "compiling"
    process = start(*TINY, "--runs-dir", runs, JAX_ENABLE_COMPILATION_CACHE="false")
    assert read_lines(process.stdout, 3)[2].endswith("compiling")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=2)
    assert (process.returncode, err) == (130, "ended without saving; nothing was saved\n")
    assert not list(runs.iterdir())


def test_ctrl_c_during_imports(start, folder):
    """Nothing is printed, least of all a traceback."""
    process = start(*TINY, "--runs-dir", folder / "importing")
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=2)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")
    assert not (folder / "importing").exists()


# --------------------------------------- What a disk may do ---------------------------------------


@contextmanager
def full_disk(path: Path):
    """Makes `path` a disk of 1 MB, where this user may."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def ordinary_disk(path: Path):
    """Makes a folder."""
    path.mkdir()
    yield


def forbid_large_files():
    """Lets a process write files of up to 400 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))


@pytest.mark.slow
@pytest.mark.parametrize(
    "disk, limit, reason",
    [
        (full_disk, None, "No space left on device"),
        (ordinary_disk, forbid_large_files, "File too large"),
    ],
    ids=["full-disk", "file-too-large"],
)
def test_checkpoint_that_cannot_be_written(disk, limit, reason, start, tmp_path):
    """It is said once, what was partial removed; the run goes on and writes its results."""
    runs = tmp_path / "disk"
    flags = ["--checkpoint-every-minutes", 0.001, "--buffer-size", 40_000, "--runs-dir", runs]
    with disk(runs):
        process = start(*PAIR, *flags, preexec_fn=limit, JAX_ENABLE_COMPILATION_CACHE="false")
        out, err = process.communicate(timeout=120)
        (run,) = runs.iterdir()
        assert err == f"{run / 'checkpoint.npz'} cannot be written: {reason}\n"
        assert process.returncode == 0
        assert sorted(path.name for path in run.iterdir()) == ["args.json", "results.npz"]
        assert read_meta(run)["complete"] is True


def test_save_replaces(tmp_path, monkeypatch):
    """A file is written over an older one as a whole, without rename, which Windows refuses."""

    def refuse(*_):
        raise FileExistsError

    monkeypatch.setattr(Path, "rename", refuse)
    path = tmp_path / "file"
    for content in b"old", b"new":
        dqn.save(path, lambda file, content=content: file.write(content))
        assert path.read_bytes() == content

    def fail_halfway(file):
        file.write(b"ne")
        raise OSError("full")

    with pytest.raises(OSError):
        dqn.save(path, fail_halfway)
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


# ------------------------- In this process: what is refused, and what is not ----------------------


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs main with flags; returns its exit code and what it printed on output and error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def main(*flags):
        capsys.readouterr()
        # JAX runs already, so main must leave it its devices.
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            dqn.main()
        return end.value.code, *capsys.readouterr()

    yield main
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_results_so_far(main, tmp_path, monkeypatch):
    """While a run goes on its curves are on disk every minute (here: always), marked incomplete."""
    monkeypatch.setattr(dqn, "SECONDS_BETWEEN_RESULTS", 0)
    seen = []
    own_write_results = dqn.Records.write_results

    def watch(records):
        succeeded = own_write_results(records)
        record = results(records.folders[0])
        seen.append((len(record["timesteps"]), read_meta(records.folders[0])["complete"]))
        return succeeded

    monkeypatch.setattr(dqn.Records, "write_results", watch)
    assert main(*SHORT, "--runs-dir", tmp_path)[0] == 0
    lengths, complete = zip(*seen)
    assert len(seen) > 10 and list(lengths) == sorted(lengths)
    assert not any(complete[:-2]) and complete[-1]


def restorer(run: Path, **changes):
    """Returns a function that restores a run's checkpoint, as one of these arguments would."""
    options = SIZES | dict(scorer=True, num_seeds=2, resume=run) | changes
    args = dqn.complete(dqn.Args(**options))
    training = dqn.make_train(args, dqn.make_env(args))
    lanes = dqn.place_lanes(args)
    one_seed = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    shapes = jax.eval_shape(training.init, *one_seed)  # tracing init takes long: once is enough

    def init(seed, follower_rate):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    quick = training._replace(init=init)

    def restore():
        records = dqn.Records(args, quick, ["new"], lanes)
        return records.restore(quick, lanes), records

    return restore


def is_refused(call, capsys) -> bool:
    """Returns whether a call ends with exit code 2 and one sentence that names --resume."""
    capsys.readouterr()
    try:
        call()
    except SystemExit as end:
        err = capsys.readouterr().err
        assert end.code == 2 and re.fullmatch(r"error: --resume [^\n]+\n", err), err
        return True
    return False


def test_damaged_checkpoints(stopped, tmp_path, capsys):
    """A bit flipped at any of 100 places, or a file cut short: refused, or the same state is read."""
    content = (stopped / "checkpoint.npz").read_bytes()
    whole, records = restorer(stopped)()
    points = len(results(stopped)["timesteps"])
    assert whole.seed.tolist() == [0, 1] and records.chunks == len(records.points) == points
    flipped = []
    for place in np.linspace(0, len(content) - 1, 100).astype(int):
        changed = bytes([content[place] ^ 0x10])
        flipped.append(content[:place] + changed + content[place + 1 :])
    cut = [content[: len(content) // 2], content[:-1], b""]
    restore = restorer(tmp_path)
    refused = []
    for data in [*flipped, *cut]:
        (tmp_path / "checkpoint.npz").write_bytes(data)
        read = []
        refused.append(is_refused(lambda read=read: read.append(restore()), capsys))
        assert (tmp_path / "checkpoint.npz").read_bytes() == data
        for state, found in read:
            assert found.chunks == records.chunks
            jax.tree.map(np.testing.assert_array_equal, state, whole)
            jax.tree.map(np.testing.assert_array_equal, found.points, records.points)
    assert sum(refused[:100]) > 50 and all(refused[100:])


@pytest.mark.parametrize(
    "changes", [dict(hidden_dim=8), dict(scorer=False), dict(dueling=True), dict(buffer_size=404)]
)
def test_foreign_checkpoint(changes, stopped, capsys):
    """A checkpoint of a run with other shapes is refused and left alone."""
    before = tree_bytes(stopped)
    assert is_refused(restorer(stopped, **changes), capsys)
    assert tree_bytes(stopped) == before


def with_args(run: Path, copy: Path, text: str) -> Path:
    """Returns a copy of a run, with this as its args.json."""
    shutil.copytree(run, copy)
    (copy / "args.json").write_text(text)
    return copy


def test_resume_refusals(main, stopped, pair, tmp_path):
    """A damaged checkpoint, none, no run, another script's, other flags: one sentence, code 2."""
    damaged = shutil.copytree(stopped, tmp_path / "damaged")
    content = bytearray((damaged / "checkpoint.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "checkpoint.npz").write_bytes(content)
    args = json.loads((stopped / "args.json").read_text())
    other_script = with_args(stopped, tmp_path / "other", json.dumps(args | dict(num_steps=128)))
    foreign = with_args(stopped, tmp_path / "foreign", '{"size": 20}')
    a_list = with_args(stopped, tmp_path / "list", "[]")
    cases = [
        (damaged, [], "no usable checkpoint"),
        (tmp_path / "absent", [], "not the folder of a run"),
        (pair[1], [], "--checkpoint-every-minutes"),
        (other_script, [], "another script"),
        (foreign, [], "another script"),
        (a_list, [], "another script"),
        (stopped, ["--gamma", 0.9], "only output flags"),
        (stopped, ["--env", "Breakout-MinAtar"], "only output flags"),  # a default, not this run's
    ]
    for run, flags, words in cases:
        before = tree_bytes(run)
        code, out, err = main("--resume", run, "--runs-dir", tmp_path / "new", *flags)
        assert code == 2 and tree_bytes(run) == before
        assert re.fullmatch(r"error: --resume [^\n]+\n", err) and words in err, err
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
    (
        "--scorer --ablation synchronous --follower-learning-rate 1e-3",
        ["--follower-learning-rate", "synchronous"],
    ),
    ("--ablation per-layer-lr --follower-loss variance", ["--follower-loss", "per-layer-lr"]),
    ("--scorer --follower-learning-rate 1e-4 0 2e-4", ["--follower-learning-rate", "0.0"]),
    ("--scorer --follower-learning-rate 1e-4 1e-4", ["--follower-learning-rate", "different"]),
    (
        "--scorer --follower-learning-rate 1e-4 2e-4 --track",
        ["--follower-learning-rate", "--track"],
    ),
    (
        "--scorer --follower-learning-rate 1e-4 2e-4 --checkpoint-every-minutes 1",
        ["--follower-learning-rate"],
    ),
    ("--scorer --follower-learning-rate", ["--follower-learning-rate", "value"]),
    (
        "--scorer --follower-learning-rate 1e-4 1.0000001e-4",
        ["--follower-learning-rate", "different"],
    ),
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
    ("--total-timesteps 1000", ["error: --total-timesteps 1000 must be more", "--learning-starts"]),
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
    """One sentence that names the flag, exit code 2, before any compile, and nothing written."""
    control = [] if "--env" in flags else ["--env", "CartPole-v1"]
    code, out, err = main(*control, *flags.split(), "--runs-dir", tmp_path / "new")
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "flags",
    [
        "--num-seeds 2.5",
        "--total-timesteps 1e-1",
        "--num-seeds many",
        "--num-seeds 1/0",
        "--learning-rate fast",
        "--follower-loss mse",
        "--no-such-flag",
    ],
)
def test_words_that_are_no_values(flags, main, tmp_path):
    """The command line's parser names the flag: exit code 2, nothing written."""
    code, out, err = main("--env", "CartPole-v1", *flags.split(), "--runs-dir", tmp_path / "new")
    assert code == 2 and flags.split()[0] in out + err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, missing",
    [
        ({}, "JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and"),
        (dict(JAX_NUM_PROCESSES="2"), "not set: JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"),
        (
            dict(JAX_NUM_PROCESSES="two", JAX_PROCESS_ID="0", JAX_COORDINATOR_ADDRESS="here:1"),
            "JAX_NUM_PROCESSES",
        ),
    ],
)
def test_distributed_without_a_cluster(given, missing, main, tmp_path, monkeypatch):
    """One sentence names all three variables at once."""
    for name in "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID":
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, out, err = main(*SHORT, "--distributed", "--runs-dir", tmp_path / "new")
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: --distributed [^\n]+\n", err) and missing in err, err


def test_unwritable_runs_dir(main, tmp_path):
    """A folder below a regular file cannot be made."""
    (tmp_path / "file").write_text("precious")
    code, out, err = main(*TINY, "--runs-dir", tmp_path / "file" / "runs")
    assert code == 2 and out == "" and re.fullmatch(r"error: --runs-dir [^\n]+\n", err), err
    assert (tmp_path / "file").read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


def test_runs_of_one_moment(main, tmp_path, monkeypatch):
    """Runs a microsecond apart both survive; one at the same time is refused, overwriting nothing."""
    codes = []
    for microseconds in 0, 0, 1:
        now = datetime(2026, 1, 1) + timedelta(microseconds=microseconds)
        clock = SimpleNamespace(now=lambda now=now: now)
        monkeypatch.setattr(dqn, "datetime", clock)
        before = tree_bytes(tmp_path)
        codes.append(main(*SHORT, "--runs-dir", tmp_path)[0])
        assert before.items() <= tree_bytes(tmp_path).items()
    assert codes == [0, 2, 0] and len(list(tmp_path.glob("*/results.npz"))) == 2


def test_numbers_may_be_written_as_floats(main, tmp_path):
    """1e6 is a whole number; the refusal shows how it was read."""
    err = main("--env", "CartPole-v1", "--buffer-size", "5e1", "--runs-dir", tmp_path)[2]
    assert "--buffer-size 50 " in err


# -------------------------------------- The command line ------------------------------------------


def test_help(start):
    """--help has a group per class, each field's comment, and each family's preset."""
    out, _ = finish(start("--help", COLUMNS="1000"))
    out = re.sub(r"[\s│]+", " ", out)
    source = SCRIPT.read_text()
    for group in dqn.Args.__bases__:
        assert group.__doc__ in out
    for field in fields(dqn.Args):
        comment = re.search(rf"(?m)^    {field.name}: .*  # (.+)$", source)
        assert comment, f"{field.name} has no help"
        assert f"--{field.name.replace('_', '-')}" in out and comment[1] in out, field.name
    assert "(default: MinAtar 1e8, control 1e6)" in out
    assert "(default: None)" not in re.sub(r"--(checkpoint|resume|ablation).*?\)", "", out)


def test_bad_input_as_a_program(start, folder):
    """The process itself exits with code 2 and one line on standard error."""
    process = start("--env", "Brekout-MinAtar", "--runs-dir", folder / "none")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert re.fullmatch(r"error: --env Brekout-MinAtar [^\n]+\n", err), err
    assert not (folder / "none").exists()


@pytest.mark.parametrize("ending", ["| head -1; exit ${PIPESTATUS[0]}", "> /dev/full"])
@pytest.mark.parametrize("what", ["--help", "a run"])
def test_output_that_cannot_be_printed(what, ending, environment, folder, tmp_path):
    """No traceback where the reader closes early or the disk is full; a run goes on and is saved."""
    flags = "--help" if what == "--help" else " ".join([*SHORT, "--runs-dir", str(tmp_path)])
    command = ["bash", "-c", f"{sys.executable} -u {SCRIPT} {flags} {ending}"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if what == "a run":
        (run,) = tmp_path.iterdir()
        assert read_meta(run)["complete"] is True


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_track(mode, start, tmp_path):
    """WANDB_MODE says where the curves go: to a folder, without account or network, or nowhere."""
    pytest.importorskip("wandb")
    flags = [*SHORT, "--track", "--runs-dir", tmp_path / "runs"]
    finish(start(*flags, WANDB_MODE=mode, WANDB_DIR=str(tmp_path)))
    logs = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert len(logs) == (1 if mode == "offline" else 0)
    for log in logs:
        assert b"returns" in log and b"episodes" in log


def test_track_without_a_key(start, tmp_path):
    """One sentence, exit code 2, and no folder."""
    pytest.importorskip("wandb")
    nowhere = dict(HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"), WANDB_API_KEY="")
    flags = [*SHORT, "--track", "--runs-dir", tmp_path / "runs"]
    process = start(*flags, **nowhere, WANDB_MODE="online", WANDB_DIR=str(tmp_path))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "", (out, err)
    assert re.fullmatch(r"error: --track cannot start [^\n]+\n", err), err
    assert not (tmp_path / "runs").exists()


NOTEBOOK = dict(MPLBACKEND="module://matplotlib_inline.backend_inline")


@pytest.mark.parametrize(
    "variables",
    [dict(JAX_ENABLE_X64="1"), dict(JAX_DEBUG_NANS="1"), NOTEBOOK],
    ids=lambda variables: next(iter(variables)),
)
@pytest.mark.parametrize("env", ["CartPole-v1", "Breakout-MinAtar"])
def test_variables_that_people_set(env, variables, start, folder):
    """Double precision, the search for NaN, and a notebook's plotting do not stop a run."""
    if env == "Breakout-MinAtar" and variables is NOTEBOOK:
        pytest.skip("the same import")
    flags = to_flags(SIZES | dict(env=env, total_timesteps=4000))
    more = [
        "--scorer",
        "--double",
        "--dueling",
        "--diagnostics",
        "--runs-dir",
        folder / "variables",
    ]
    out, run = finish(start(*flags, *more, **variables))
    record = results(run)
    assert read_meta(run)["complete"] and np.isfinite(record["returns"][:, -1]).all()
    known = ~np.isnan(record["leader_loss"])
    assert known.any() and np.isfinite(record["leader_loss"][known]).all()


# ------------------------------------------ Learning ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["", "--scorer --follower-learning-rate 2e-3"], ids=["baseline", "scorer"]
)
def test_learns_cartpole(variant, start, folder):
    """Three seeds, 200,000 steps, ten times the usual rates: mean return above 120 (random: 22)."""
    options = dict(num_seeds=3, total_timesteps=2e5, learning_rate=1e-3, epsilon_steps=2e4)
    flags = ["--env", "CartPole-v1", *variant.split(), *to_flags(options)]
    out, run = finish(start(*flags, "--runs-dir", folder / "learning", **OPTIMIZED))
    returns = results(run)["returns"]
    last = returns[:, -returns.shape[1] // 10 :].mean(axis=1)
    assert last.mean() > 120 and last.min() > 60
    printed = float(re.search(r"last 10 %: ([\d.]+)", out)[1])
    assert last.mean() == pytest.approx(printed, rel=0.05)

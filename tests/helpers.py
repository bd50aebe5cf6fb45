"""What several tests ask of results, and of a script that runs or refuses to."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest


def tree_equal(a, b) -> bool:
    """Returns whether two trees of arrays are the same, bit for bit."""
    same = jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)
    return jax.tree.all(same)


def results(run: Path) -> dict:
    """Returns the arrays of a run's record."""
    with np.load(run / "results.npz") as file:
        return {name: file[name] for name in file.files}


# Variables of a script whose programs are compiled quickly and run slowly, and of one as a user has it.
UNOPTIMIZED = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="1")
OPTIMIZED = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="0")


def script_variables(folder: Path, **more) -> dict:
    """Returns a script's environment variables; a second start finds its programs in folder/cache."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | dict(
        JAX_PLATFORMS="cpu",
        JAX_COMPILATION_CACHE_DIR=str(folder / "cache"),
        JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS="0",
        **more,
    )


def make_start(script: Path, folder: Path, **usual):
    """Returns start(*flags, **variables), which starts a script in folder as a process.

    It has the usual environment variables, and those of this start.
    """

    def start(*flags, preexec_fn=None, **variables):
        return subprocess.Popen(
            [sys.executable, str(script), *map(str, flags)],
            env=script_variables(folder, **usual) | variables,
            text=True,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=preexec_fn,
        )

    return start


def finish(process, code=0, timeout=120):
    """Waits for a script, which must end with this exit code.

    Returns its standard output, and the run folder that it names.
    """
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err
    named = re.search(r"(?m)^\S*/scorer_\w+?__\S+$", out)  # one of several processes prints more
    return out, named and Path(named[0])


def refusal(main, flags, monkeypatch, capsys) -> str:
    """Returns the one sentence on standard error with which main refuses flags; exit code 2."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "", (end.value.code, out)
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    return err

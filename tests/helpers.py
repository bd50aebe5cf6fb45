"""What several tests ask of results and of a script that runs or refuses to."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest


def tree_equal(a, b) -> bool:
    """Bit for bit."""
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b))


def results(run: Path) -> dict:
    """The arrays of a run's record."""
    with np.load(run / "results.npz") as file:
        return {name: file[name] for name in file.files}


def finish(process, code=0, timeout=120):
    """Waits; the exit code must be this one. Standard output and the run folder that it names."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err
    named = re.search(r"(?m)^\S*/scorer_\w+?__\S+$", out)  # a process of several prints what joined it first
    return out, named and Path(named[0])


def refusal(main, flags, monkeypatch, capsys) -> str:
    """The one sentence on standard error with which a script's main refuses these flags; exit code 2."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and re.fullmatch(r"error: [^\n]+\n", err), err
    return err

"""What all tests share: the CPU, for results that repeat to the bit, and quick compilation."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test imports JAX
sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts

import jax
import pytest


def pytest_configure(config):
    """Declares what .ci/run leaves out."""
    config.addinivalue_line("markers", "slow: needs half a minute or more of CPU")


@pytest.fixture(scope="module")
def quick_compilation(tmp_path_factory):
    """Compiling dominates most tests: here it is done badly and, for one program, once."""
    usual = dict(
        jax_disable_most_optimizations=False,
        jax_persistent_cache_min_compile_time_secs=1.0,
        jax_compilation_cache_dir=None,
    )
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
    yield
    for name, value in usual.items():
        jax.config.update(name, value)

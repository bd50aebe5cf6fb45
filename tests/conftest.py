"""What all tests share: the CPU, for results that repeat to the bit, the scripts on the path, and quick compilation."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test imports JAX
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(scope="module")
def quick_compilation(tmp_path_factory):
    """Compiling dominates most tests: here it is done neither well nor, for one program, twice."""
    usual = dict(jax_disable_most_optimizations=False, jax_persistent_cache_min_compile_time_secs=1.0,
                 jax_compilation_cache_dir=None)
    cache = str(tmp_path_factory.mktemp("cache"))
    for name, value in zip(usual, (True, 0.1, cache)):
        jax.config.update(name, value)
    yield
    for name, value in usual.items():
        jax.config.update(name, value)

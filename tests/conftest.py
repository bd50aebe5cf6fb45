"""What all tests share: the CPU, for results that repeat to the bit, and the scripts on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test imports JAX
sys.path.insert(0, str(Path(__file__).parents[1]))

"""What every tool here does as a command: one sentence for what it refuses, no traceback where nobody reads on."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import tyro


def fail(message: str):
    """Ends the program with one sentence on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def write(out: Path, writer: Callable):
    """Calls writer(out) after making its folder; ends in one sentence where that cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writer(out)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror or error}")


def refuse_to_overwrite(flag: str, out: Path | None):
    """Ends the program in one sentence if a file stands at `out`, the value of `flag`."""
    if out is not None and out.is_file():
        fail(f"{flag} {out} exists and is never overwritten")


def run(main: Callable):
    """Runs main with the arguments of the command line.

    Where standard output takes no more (`| head`, a full disk), the program ends without a
    traceback, as it does at Ctrl-C.
    """
    try:
        try:
            tyro.cli(main)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        discard_output()
        sys.exit(141)  # as a shell gives SIGPIPE
    except OSError as error:
        if error.filename is not None:
            raise  # of another file
        discard_output()
        fail(f"standard output cannot be written: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(130)


def discard_output():
    """Points standard output at nothing, so that Python does not try again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The command line, `stele`. Imports nothing heavy until a command needs it, so that the shell answers at once.

Invariant: an error is one line on standard error and an exit code that tells its kind (see `errors.py`).
"""

from __future__ import annotations


def main() -> None:
    """Entry point of `stele`."""
    from stele.cli.app import run

    run()

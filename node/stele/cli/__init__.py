"""The command line, `stele`. Imports nothing heavy until a command needs it, so that the shell answers at once.

Invariant: an error is one line on standard error and an exit code that tells its kind (see `errors.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Spared(MetaPathFinder):
    """Keeps out what others import if it is installed, and no command uses.

    pyarrow imports pandas with its first array: half a second, and 40 MB of a node's memory. structlog imports rich, to
    colour tracebacks: an eighth of a second of processor time, and 5 MB; commands that show progress import it themselves.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas" or (fullname == "rich" and "stele.cli.progress" not in sys.modules):
            raise ModuleNotFoundError(f"{fullname} is not used by the command line")
        return None


def main() -> None:
    """Entry point of `stele`."""
    from stele.cli.app import run

    sys.meta_path.insert(0, _Spared())
    run()

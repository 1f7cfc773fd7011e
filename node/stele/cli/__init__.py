"""The command line, `stele`. Imports nothing heavy until a command needs it, so that the shell answers at
once.

Invariant: an error is one line on standard error, with an exit code for its kind (see `errors.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from stele.first_process import end_when_told


class _ImportBlocker(MetaPathFinder):
    """Blocks optional imports of our dependencies that no command needs.

    pyarrow imports pandas with its first array, which costs half a second and 40 MB. For coloured tracebacks
    structlog imports rich, which costs 0.13 s and 5 MB. Commands that show progress import rich themselves.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas" or (fullname == "rich" and "stele.cli.progress" not in sys.modules):
            raise ModuleNotFoundError(f"{fullname} is not used by the command line")
        return None


def main() -> None:
    """Entry point of `stele`."""
    end_when_told()
    from stele.cli.app import run

    keep_imports_few()
    run()


def keep_imports_few() -> None:
    """Block these imports in this process from here on."""
    if not any(isinstance(finder, _ImportBlocker) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportBlocker())

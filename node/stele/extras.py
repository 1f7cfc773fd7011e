"""Helps to import packages that only an extra of pyproject.toml installs. Called by the packages that need
one; imports nothing of ours.

Invariant: if an extra is missing, one line says which and how to install it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


@contextmanager
def extra(name: str, *, program: str = "", install: str = "") -> Iterator[None]:
    """Wrap imports that need the extra `name`, or the packages of `pip install` with `install`.

    A `program` without them ends with status 2, or with 130 after Ctrl-C.

    Raises:
        ImportError: it is not installed, and no program was named.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not program:
            raise
        sys.exit(_EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stele"):
            raise
        wanted = install or f"'.[{name}]'"
        what = f"the module {error.name} is missing; run `pip install {wanted}` in Stele's checkout"
        if not program:
            raise ImportError(what, name=error.name) from None
        print(f"{program}: {what}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)

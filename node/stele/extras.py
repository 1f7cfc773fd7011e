"""Helps to import third-party packages that only an extra of pyproject.toml installs. Called by the parts of
Stele that need an extra; imports nothing of ours.

Invariant: if a package is missing, one line says which, and how to install it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


@contextmanager
def extra(name: str, *, program: str = "", install: str = "") -> Iterator[None]:
    """Wrap imports that need the extra `name`. `install`: what to pass to `pip install` instead of the extra.

    If a `program` is named and the import fails, print why and exit with status 2. After Ctrl-C exit with 130.

    Raises:
        ImportError: a package is not installed, and no program is named.
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

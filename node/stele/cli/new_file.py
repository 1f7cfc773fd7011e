"""Files that commands write. Knows nothing of rows.

Invariant: the name holds either its old content or a complete new file. A file is replaced only if the user
asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stele.model.errors import Rejected


def check_new(path: str, *, otherwise: str) -> None:
    """Check that no file exists at `path`. Call it before any request is sent.

    Raises:
        Rejected: a file exists; `otherwise` says what the user can do.
    """
    if os.path.isfile(path):
        raise Rejected(f"{path} exists already; {otherwise}")


@contextmanager
def new_file(path: str, *, keep: Callable[[], bool] = lambda: False) -> Iterator[BinaryIO]:
    """A file that gets its name only when it is complete; an error leaves nothing. Pipes and devices are
    written directly. `keep`: whether what was written up to an error is complete by itself.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with open(path, "wb") as special:
            yield special
        return
    real = Path(os.path.realpath(path))  # keeps a symbolic link, and replaces its target
    partial = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            try:
                yield file
            except BaseException:
                if keep():
                    _name(file, partial, real)
                raise
            _name(file, partial, real)
    except BaseException as exc:
        with suppress(OSError):
            partial.unlink()
        if isinstance(exc, OSError) and exc.filename == str(partial):
            exc.filename = path  # the name that the caller knows
        raise


def _name(file: BinaryIO, partial: Path, real: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.replace(partial, real)

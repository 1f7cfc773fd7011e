"""Files that commands write: whole under their name, or not there. Knows nothing of rows.

Invariant: under the name stands either what was there before or all that was written; nothing is replaced unasked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stele.model.errors import Rejected


def check_new(path: str, *, otherwise: str) -> None:
    """Before anything is asked of anybody.

    Raises:
        Rejected: a file is there; `otherwise` says what to do about that.
    """
    if os.path.isfile(path):
        raise Rejected(f"{path} is there already; {otherwise}")


@contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """A file that gets its name once all of it is written: what ends by an error leaves nothing. Pipes and devices are written as
    they are.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with open(path, "wb") as special:
            yield special
        return
    real = Path(os.path.realpath(path))  # a link stays one
    aside = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, real)
    except BaseException as exc:
        with suppress(OSError):
            aside.unlink()
        if isinstance(exc, OSError) and exc.filename == str(aside):
            exc.filename = path  # the name that the caller knows
        raise

"""The folder of a cluster: its owner, its content, and how it is emptied. Used by `cluster` and by the
command.

Invariant: one process at a time owns a folder. It holds the folder's lock until it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import time
from pathlib import Path

STATE = "state.json"
_OURS = ("machines", "logs", STATE, "cluster.json", "kubeconfig", "hosts.json", "stele-local.log")
"""The names that a cluster makes in its folder, except its lock. `wipe` removes these, the lock, and nothing else."""


class FolderTaken(Exception):
    """Another cluster runs in the folder. It must not be started twice: the second start would kill the
    processes of the first as leftovers.
    """


def as_called(folder: Path) -> str:
    """The command `stele-local` with the options for this folder, as a person types it."""
    return f"stele-local --folder {shlex.quote(str(folder))}"


def own(folder: Path) -> int:
    """Take the folder's lock, and write this process's id into it. The lock holds until the returned
    descriptor is closed.

    Raises:
        FolderTaken: another process has the lock.
    """
    descriptor = _lock(folder, make=True)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _lock(folder: Path, *, make: bool = False) -> int:
    """Lock the folder. With `make`, create the lock file if there is none.

    Raises:
        FolderTaken: another process has the lock.
        FileNotFoundError: there is no lock file.
    """
    path = folder / "lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise FolderTaken(
                f"a cluster runs in {folder} already; `{as_called(folder)} down` stops it, or give another "
                f"--folder"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # `wipe` has removed it meanwhile


def owner_of(folder: Path) -> int | None:
    """Process id of the cluster that runs, starts or hangs in the folder.

    None means that there is no such process; 0 that there is one whose id is unknown.
    """
    with contextlib.suppress(FileNotFoundError):
        for _ in range(100):
            try:
                os.close(_lock(folder))
            except FolderTaken:
                if text := (folder / "lock").read_text():  # written a moment after it was locked
                    return int(text)
                time.sleep(0.01)
            else:
                return None
        return 0
    return None


def write_private(path: Path, text: str) -> None:
    """Replace the file as a whole. Only its owner may read it."""
    aside = path.with_suffix(".new")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(aside, path)


def kept(folder: Path) -> int | None:
    """Bytes on disk of the cluster that `up` would bring back; None if there is none."""
    if not (folder / STATE).exists() and not any((folder / "machines").glob("*/volumes/*")):
        return None
    used = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            used += path.lstat().st_blocks * 512
    return used


def wipe(folder: Path) -> None:
    """Remove everything that a cluster made here. Other files in the folder stay.

    Raises:
        FolderTaken: a cluster runs in the folder.
        OSError: a file cannot be removed.
    """
    try:
        descriptor = _lock(folder, make=True)
    except FileNotFoundError:  # there is no such folder
        return
    try:
        for name in _OURS:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (folder / "lock").unlink()
    finally:
        os.close(descriptor)

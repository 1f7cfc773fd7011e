"""What a disk holds after the power went, as weakly as POSIX promises. Pure; knows nothing of Stele.

Bytes are durable by a sync of their file, names by a sync of their directory. Of what is pending any part may be there: of a
file's writes none, some, or sectors of each; its length or not; of the names what each `Order` says.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = 1
"""The inode of the directory that all others are below."""
Name = tuple[int, str]
"""An inode of a directory, and a name in it."""
_SECTORS = (512, 4096)


class Names(NamedTuple):
    """`changes`: the inode that each name has from then on, together or not at all; None: the name is gone. `made`: a new
    inode, which is a directory or a file."""

    at_s: float
    changes: tuple[tuple[Name, int | None], ...]
    made: int = 0
    is_directory: bool = False

    @property
    def directories(self) -> set[int]:
        """Those that are changed."""
        return {directory for (directory, _), _ in self.changes}


class Write(NamedTuple):
    """Bytes of a file."""

    at_s: float
    inode: int
    offset: int
    data: bytes


class Resize(NamedTuple):
    """`size` of a file from then on; a larger one only if `shrinks` is not set."""

    at_s: float
    inode: int
    size: int
    shrinks: bool


class Sync(NamedTuple):
    """All that was written to a file, or the names in a directory, survive from then on."""

    at_s: float
    inode: int


Operation: TypeAlias = Names | Write | Resize | Sync


class Order(Enum):
    """Which of the pending changes of names are kept."""

    JOURNAL = "the first ones"
    DIRECTORIES = "of each directory the first ones"
    NONE = "any of them"


@dataclass(slots=True)
class Tree:
    """Names and files."""

    names: dict[int, dict[str, int]]
    files: dict[int, bytearray]

    @classmethod
    def empty(cls) -> Tree:
        """That of a disk that nothing was written to."""
        return cls({ROOT: {}}, {})

    def copy(self) -> Tree:
        """One that changes by itself."""
        names = {inode: dict(within) for inode, within in self.names.items()}
        return Tree(names, {inode: bytearray(data) for inode, data in self.files.items()})

    def apply(self, change: Names) -> None:
        """Change names."""
        for (directory, name), inode in change.changes:
            within = self.names[directory]
            if inode is None:
                within.pop(name, None)
            else:
                within[name] = inode

    def write_to(self, directory: Path, inode: int) -> None:
        """Make what is below the directory `inode` that of `directory`, which is made."""
        first: dict[int, Path] = {}

        def walk(at: int, path: Path) -> None:
            path.mkdir()
            for name, child in self.names[at].items():
                if child in self.names:
                    walk(child, path / name)
                elif child in first:
                    os.link(first[child], path / name)
                else:
                    first[child] = path / name
                    first[child].write_bytes(self.files[child])

        walk(inode, directory)


class Disk:
    """What is durable and what is pending, operation by operation. `tree`: what is durable at first."""

    def __init__(self, tree: Tree) -> None:
        self._durable = tree.copy()
        self._names: list[Names] = []
        self._bytes: dict[int, list[Write | Resize]] = {}

    def step(self, operation: Operation) -> None:
        """The next operation."""
        match operation:
            case Names():
                if operation.made and operation.is_directory:
                    self._durable.names[operation.made] = {}
                elif operation.made:
                    self._durable.files[operation.made] = bytearray()
                self._names.append(operation)
            case Write() | Resize():
                self._bytes.setdefault(operation.inode, []).append(operation)
            case Sync(inode=inode):
                for change in self._bytes.pop(inode, ()):
                    _change(self._durable.files[inode], change)
                for names in self._names:
                    if inode in names.directories:
                        self._durable.apply(names)
                self._names = [names for names in self._names if inode not in names.directories]

    def crash(self, rng: random.Random, order: Order) -> Tree:
        """What the next start may find."""
        tree = Tree({inode: dict(names) for inode, names in self._durable.names.items()}, {})
        for names in self._kept(rng, order):
            tree.apply(names)
        for inode, data in self._durable.files.items():
            tree.files[inode] = _torn(data, self._bytes[inode], rng) if inode in self._bytes else data
        return tree

    def _kept(self, rng: random.Random, order: Order) -> Iterator[Names]:
        total = rng.randint(0, len(self._names))
        left: dict[int, int] = {}
        for directory in sorted({d for names in self._names for d in names.directories}):
            left[directory] = rng.randint(0, sum(directory in names.directories for names in self._names))
        for at, names in enumerate(self._names):
            allowed = all(left[directory] > 0 for directory in names.directories)
            for directory in names.directories:
                left[directory] -= 1
            if (
                (order is Order.JOURNAL and at < total)
                or (order is Order.DIRECTORIES and allowed)
                or (order is Order.NONE and rng.random() < 0.5)
            ):
                yield names


def _change(data: bytearray, change: Write | Resize) -> None:
    if isinstance(change, Write):
        data.extend(bytes(max(0, change.offset - len(data))))
        data[change.offset : change.offset + len(change.data)] = change.data
    elif change.shrinks:
        del data[change.size :]
    else:
        data.extend(bytes(max(0, change.size - len(data))))


def _torn(durable: bytearray, pending: list[Write | Resize], rng: random.Random) -> bytearray:
    """A file of which some of what was not synced is there."""
    data, whole = bytearray(durable), bytearray(durable)
    for change in pending:
        _change(whole, change)
    how = rng.choice(("none", "all", "some", "last", "first", "sectors", "sectors", "sectors"))
    sector = rng.choice(_SECTORS)
    for at, change in enumerate(pending):
        if how == "sectors" and isinstance(change, Write):
            for piece in _sectors(change, sector):
                if rng.random() < 0.5:
                    _change(data, piece)
            continue
        lost = {
            "none": True,
            "some": rng.random() < 0.5,
            "last": at == len(pending) - 1,
            "first": at == 0,
        }.get(how, False)
        if not lost:
            _change(data, change)
    if rng.random() < 0.3:  # the length of later, zeros in between
        data.extend(bytes(max(0, len(whole) - len(data))))
    return data


def _sectors(write: Write, sector: int) -> Iterator[Write]:
    begin, end = write.offset, write.offset + len(write.data)
    while begin < end:
        until = min(end, begin - begin % sector + sector)
        piece = write.data[begin - write.offset : until - write.offset]
        yield Write(write.at_s, write.inode, begin, piece)
        begin = until

"""Column files: immutable, sorted, memory-mapped. Flush and the compaction worker write them; views read
them.

README.md beside this file describes the layout byte by byte. Invariant: no part is used before its own checksum
and that of the footer were compared. The map is touched only after a read of the same bytes succeeded. A failed
read is an error, while a failed map access ends the process.
"""

from __future__ import annotations

import bisect
import mmap
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.column import Column
from stele.model.errors import Corrupt
from stele.tablet import bloom, decoding, groupbounds
from stele.tablet.colformat import (
    KEY_SCHEMA,
    PART_BLOOM,
    PART_BOUNDS,
    PART_DELETED,
    PART_KEYS,
    PART_TIMES,
    PLAIN,
    TIME_SCHEMA,
    FileMeta,
    column_schema,
    damaged,
    padded,
    read_footer,
)
from stele.tablet.decoding import decode, is_compressed, one, some, whole
from stele.tablet.files import read_at, sum_at, translate
from stele.tablet.machine import WouldBlock
from stele.tablet.projection import read_defaults
from stele.tablet.sorted_runs import Mask, Positions, Run, SortedKeys, has_long

_FEW_KEYS = 8
"""Up to this many keys of a group are searched one by one."""
_LET_GO_BYTES = 8 << 20
_PARSED_MAX = 16_384
"""The most Arrow arrays, over all files, that are kept for the next point read. Each takes about 1 kB, because its
values stay in the map."""
_INFLATED_BYTES_MAX = 32 << 20
"""The most bytes of decompressed arrays, over all files, that are kept for the next point read."""


class _Kept:
    """The arrays that files keep in memory, oldest first. Bounded in number and in bytes. Any thread."""

    def __init__(self, number_max: int, bytes_max: int) -> None:
        self._number_max, self._bytes_max = number_max, bytes_max
        self._lock = threading.Lock()
        self._found: deque[tuple[weakref.ref[ColumnFile], tuple[int, int], int]] = deque()
        self.bytes = 0

    def add(self, file: ColumnFile, part: tuple[int, int], size: int) -> None:
        """Note that this file keeps an array of this part, which takes `size` bytes. Beyond the bounds, files let go
        of the oldest arrays."""
        with self._lock:
            self._found.append((file.itself, part, size))
            self.bytes += size
            while self.bytes > self._bytes_max or len(self._found) > self._number_max:
                owner, oldest, size = self._found.popleft()
                self.bytes -= size
                if (gone := owner()) is not None:
                    gone.let_go(oldest)


_parsed, _inflated = _Kept(_PARSED_MAX, 0), _Kept(_PARSED_MAX, _INFLATED_BYTES_MAX)


class ColumnFile:
    """One open column file. Any thread. It stays readable after it is unlinked."""

    def __init__(self, path: Path, expected: FileMeta | None = None) -> None:
        """Open and check header and footer.

        Raises:
            Corrupt: the file is missing, damaged, or not the one that the manifest lists.
            Rejected: UNSUPPORTED_VERSION.
        """
        self.path = path
        self.name = path.name
        try:
            with open(path, "rb") as file:
                fd = file.fileno()
                self.size = os.fstat(fd).st_size
                if expected is not None and self.size != expected.size:
                    raise self._damaged(f"it has {self.size} bytes; the manifest says {expected.size}")
                self.plain_bytes = self.size if expected is None else expected.plain_bytes
                footer = read_footer(
                    self.name,
                    self.size,
                    lambda offset, length: read_at(fd, offset, length),
                    None if expected is None else expected.footer_crc,
                )
                # Once made, the map keeps the file readable after it is unlinked.
                self._bytes = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
        except FileNotFoundError as exc:
            raise Corrupt(
                f"{self.name} is missing although the manifest lists it; copy the replica from a peer"
            ) from exc
        except OSError as exc:
            raise translate(exc, f"opening {self.name}") from exc
        self.schema, self.rows, self.deletes = footer.schema, footer.rows, footer.deletes
        self.unique, self.min_time, self.max_time = footer.unique, footer.min_time, footer.max_time
        self.groups = footer.groups
        self.first_keys, self.last_key = footer.first_keys, footer.last_key
        self._parts, self.forms = footer.parts, footer.forms
        self._verified: set[tuple[int, int]] = set()
        self._bloom_words: memoryview | None = None
        self._arrays: dict[tuple[int, int], decoding.Column] = {}
        self._searched: dict[int, SortedKeys] = {}  # by group
        self._long: dict[tuple[int, int], bool] = {}  # whether an array that was kept has long values
        self.itself = weakref.ref(self)

    def _damaged(self, what: str) -> Corrupt:
        return damaged(self.name, what)

    def _part(self, part: int, group: int, *, brief: bool = False) -> npt.NDArray[np.uint8] | None:
        found = self._parts.get((part, group))
        if found is None:
            return None
        offset, length, _ = found
        if (part, group) not in self._verified:
            if brief:
                raise WouldBlock  # it would have to be read whole
            self._check((part, group))
            self._verified.add((part, group))
        return self._bytes[offset : offset + length]

    def _check(self, part: tuple[int, int]) -> None:
        """Read a part from the file and compare its checksum. Blocks, without the interpreter lock."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                self._compare(part, lambda offset, length: sum_at(file.fileno(), offset, length))
        except FileNotFoundError:  # a merge replaced it, and read all of it before that
            self._compare(part, lambda at, length: int(google_crc32c.value(self._bytes[at : at + length])))
        except OSError as exc:
            raise translate(exc, f"reading {self.name}") from exc

    def _compare(self, part: tuple[int, int], sum_of: Callable[[int, int], int]) -> None:
        offset, length, crc = self._parts[part]
        if sum_of(offset, padded(length)) != crc:
            raise self._damaged(f"part {part[0]:#x} of group {part[1]} at byte {offset} is damaged")

    def verify(self, read: Callable[[int], None] = lambda size: None) -> None:
        """Read all parts from the file and compare every checksum, even if they were right before.

        Calls `read` with each part's number of bytes.

        Raises:
            Corrupt: a part is damaged or cannot be read.
        """
        kept = 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                fd = file.fileno()
                for part, (offset, length, _) in self._parts.items():
                    self._compare(part, lambda offset, length: sum_at(fd, offset, length))
                    read(length)
                    if offset + length - kept >= _LET_GO_BYTES:
                        # Read once, so that the next part reuses these pages and the page cache keeps useful
                        # ones.
                        os.posix_fadvise(fd, kept, offset + length - kept, os.POSIX_FADV_DONTNEED)
                        kept = offset + length
        except OSError as exc:
            raise translate(exc, f"reading {self.name}") from exc

    def keys(self, group: int, *, brief: bool = False) -> pa.BinaryArray:
        """Encoded keys of a group, ascending. With `brief`, raises WouldBlock if they were not read yet."""
        return whole(self._held(PART_KEYS, group, KEY_SCHEMA, brief=brief))

    def _sorted_keys(self, group: int, *, brief: bool = False) -> SortedKeys:
        """Return a group's keys in a form for searches. It is kept as long as the array of the keys."""
        kept = self._searched.get(group)
        if kept is None:
            kept = SortedKeys(self.keys(group, brief=brief))
            self._searched[group] = kept
            if (PART_KEYS, group) not in self._arrays:  # another thread has let it go meanwhile
                self._searched.pop(group, None)
        return kept

    def span(self, group: int) -> tuple[int, int]:
        """Hybrid times between which all versions of a group lie."""
        _, _, _, _, oldest, newest = self.groups[group]
        return oldest, newest

    def times(self, group: int, *, brief: bool = False) -> npt.NDArray[np.uint64]:
        """Hybrid times of a group's rows. With `brief`, raises WouldBlock if they were not read yet."""
        if (PART_TIMES, group) not in self.forms:
            data = self._part(PART_TIMES, group, brief=brief)
            if data is None:
                raise self._damaged(f"group {group} has no timestamps")
            return data.view("<u8")
        times: npt.NDArray[np.uint64] = whole(
            self._held(PART_TIMES, group, TIME_SCHEMA, brief=brief)
        ).to_numpy()
        return times

    def deleted(self, group: int, *, brief: bool = False) -> Mask | None:
        """Delete marks of a group; None if it has none. With `brief`, raises WouldBlock if they were not read
        yet."""
        data = self._part(PART_DELETED, group, brief=brief)
        if data is None:
            return None
        return np.unpackbits(data, count=self.groups[group][0], bitorder="little").astype(bool)

    def column(self, group: int, column: Column, *, brief: bool = False, keep: bool = False) -> pa.Array:
        """A column of a group. If the file is older than the column, its read default. With `brief`, raises WouldBlock
        if it was not read yet, or has long values. `keep`: cache a decompressed part, too."""
        if (int(column.id), group) not in self._parts:
            return read_defaults(column, self.groups[group][0])
        return whole(self._held_column(group, column, brief=brief, keep=keep))

    def _held_column(self, group: int, column: Column, *, brief: bool, keep: bool) -> decoding.Column:
        part = int(column.id)
        array = self._arrays.get((part, group))
        if array is None:  # a schema costs more to make than a row to read
            array = self._held(part, group, column_schema(column), brief=brief, keep=keep)
        if brief and self._has_long(part, group, array):
            raise WouldBlock
        return array

    def any_long(self, group: int, columns: tuple[Column, ...]) -> bool:
        """Whether a group has long values in these columns, which are better not copied before their size is known."""
        return any(
            self._has_long(int(c.id), group, self._held_column(group, c, brief=False, keep=True))
            for c in columns
            if (int(c.id), group) in self._parts
        )

    def _has_long(self, part: int, group: int, array: decoding.Column) -> bool:
        found = self._long.get((part, group))
        if found is None:
            found = self._long[part, group] = has_long(decoding.values_of(array))
        return found

    def _held(
        self, part: int, group: int, schema: pa.Schema, *, brief: bool = False, keep: bool = True
    ) -> decoding.Column:
        """A part as an array, which may have a dictionary. The array is cached; a decompressed one only with `keep`."""
        kept = self._arrays.get((part, group))
        if kept is not None:
            return kept
        form = self.forms.get((part, group), PLAIN)
        if brief and is_compressed(form):
            raise WouldBlock
        data = self._part(part, group, brief=brief)
        if data is None:
            raise self._damaged(f"group {group} has no part {part:#x}")
        try:
            array = decode(form, data, schema, self.groups[group][0])
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise self._damaged(f"part {part:#x} of group {group} cannot be decoded: {exc}") from exc
        if not is_compressed(form):
            self._arrays[part, group] = array
            _parsed.add(self, (part, group), 0)
        elif keep:
            self._arrays[part, group] = array
            _inflated.add(self, (part, group), array.nbytes)
        return array

    def let_go(self, part: tuple[int, int]) -> None:
        """Drop the array of this part from the cache."""
        self._arrays.pop(part, None)
        self._long.pop(part, None)
        if part[0] == PART_KEYS:
            self._searched.pop(part[1], None)

    def batch(
        self,
        group: int,
        columns: tuple[Column, ...],
        schema: pa.Schema,
        *,
        brief: bool = False,
        keep: bool = False,
    ) -> pa.RecordBatch:
        """The given columns of a group; memory-mapped, unless they are encoded. Other columns are not read. `brief`,
        `keep`: as for `column`."""
        arrays = [self.column(group, c, brief=brief, keep=keep) for c in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def row(
        self, group: int, row: int, columns: tuple[Column, ...], schema: pa.Schema, *, brief: bool = False
    ) -> pa.RecordBatch:
        """The given columns of one row of a group. `brief`: as for `column`."""
        return self._some(group, lambda column: one(column, row), 1, columns, schema, brief)

    def rows_at(
        self, group: int, rows: Positions, columns: tuple[Column, ...], schema: pa.Schema
    ) -> pa.RecordBatch:
        """A copy of the given columns of some rows of a group."""
        return self._some(group, lambda column: some(column, rows), len(rows), columns, schema, False)

    def _some(
        self,
        group: int,
        pick: Callable[[decoding.Column], pa.Array],
        rows: int,
        columns: tuple[Column, ...],
        schema: pa.Schema,
        brief: bool,
    ) -> pa.RecordBatch:
        """Return the given columns of a group, each as `pick` returns it, with `rows` rows."""
        arrays = [
            pick(self._held_column(group, c, brief=brief, keep=True))
            if (int(c.id), group) in self._parts
            else read_defaults(c, rows)
            for c in columns
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        """A group as a sorted run."""
        return Run(
            self.batch(group, columns, schema), self.keys(group), self.times(group), self.deleted(group)
        )

    def bounds(self, column: Column) -> groupbounds.Bounds | None:
        """Return the bounds and nulls of a column, group by group; None if the file does not have them."""
        rows = [group[0] for group in self.groups]
        if (int(column.id), 0) not in self._parts:
            return groupbounds.of_default(column.read_scalar(), rows)
        data = self._part(PART_BOUNDS, 0)
        try:
            return None if data is None else groupbounds.read(data, column, rows)
        except (ValueError, struct.error) as exc:
            raise self._damaged(f"the bounds of column {column.id} cannot be decoded: {exc}") from exc

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        """Groups that may hold keys in [lower, upper); b"" is unbounded."""
        start = max(0, bisect.bisect_right(self.first_keys, lower) - 1) if lower else 0
        if lower and lower > self.last_key:
            return range(0)
        end = bisect.bisect_left(self.first_keys, upper) if upper else len(self.groups)
        return range(start, end)

    def may_hold(self, hashes: npt.NDArray[np.uint64]) -> Mask:
        """Which of the key hashes the file may hold."""
        data = self._part(PART_BLOOM, 0)
        if data is None:
            raise self._damaged("it has no bloom filter")
        return bloom.may_hold(data, hashes)

    def find(
        self, keys: pa.BinaryArray, hashes: npt.NDArray[np.uint64] | None
    ) -> tuple[Positions, Positions]:
        """(group, row) of the newest version of each key; group -1 if the file does not have it. Without `hashes` the bloom
        filter is not asked: for keys that are probably there."""
        groups = np.full(len(keys), -1, np.int64)
        rows = np.zeros(len(keys), np.int64)
        candidates = np.arange(len(keys)) if hashes is None else np.flatnonzero(self.may_hold(hashes))
        if len(candidates) == 0:
            return groups, rows
        wanted = keys.take(pa.array(candidates)) if len(candidates) < len(keys) else keys
        values, by_group = wanted.to_pylist(), dict[int, list[int]]()
        for at, value in enumerate(values):
            group = bisect.bisect_right(self.first_keys, value) - 1
            if group >= 0 and value <= self.last_key:
                by_group.setdefault(group, []).append(at)
        for group, members in by_group.items():
            stored = self._sorted_keys(group)
            if len(members) <= _FEW_KEYS:
                places = np.array([stored.find(values[at]) for at in members])
            else:
                places = stored.find_all(wanted.take(pa.array(members)))
            there = candidates[members][places >= 0]
            groups[there], rows[there] = group, places[places >= 0]
        return groups, rows

    def find_one(self, key: bytes, hash_: int | None, *, brief: bool = False) -> tuple[int, int] | None:
        """(group, row) of the newest version of one key; None if the file does not have it. `hash_`: as for `find`.

        With `brief`, raises WouldBlock if the parts it needs were not read yet."""
        if not self.groups or key < self.first_keys[0] or key > self.last_key:
            return None
        if hash_ is not None and not bloom.may_hold_one(self._filter(brief=brief), hash_):
            return None
        group = bisect.bisect_right(self.first_keys, key) - 1
        row = self._sorted_keys(group, brief=brief).find(key)
        return (group, row) if row >= 0 else None

    def versions_at(self, group: int, rows: Positions, snapshot: int) -> Positions:
        """As `version_at`, for several rows of a group."""
        if self.span(group)[1] <= snapshot:
            return rows
        found = rows.copy()
        for at in np.flatnonzero(self.times(group)[rows] > snapshot).tolist():
            found[at] = self.version_at(group, int(rows[at]), snapshot)
        return found

    def _filter(self, *, brief: bool) -> memoryview:
        """The words of the bloom filter."""
        if self._bloom_words is None:
            data = self._part(PART_BLOOM, 0, brief=brief)
            if data is None:
                raise self._damaged("it has no bloom filter")
            self._bloom_words = data.view("<u4").data
        return self._bloom_words

    def version_at(self, group: int, row: int, snapshot: int, *, brief: bool = False) -> int:
        """Return the row of a key's newest version at or below `snapshot`; -1 if there is none.

        `row`: the row of the key's newest version of all. With `brief`, raises WouldBlock if that version is above
        `snapshot`, or if the times were not read yet."""
        _, newest = self.span(group)
        if newest <= snapshot:
            return row
        times = self.times(group, brief=brief)
        if int(times[row]) <= snapshot:
            return row
        if brief:
            raise WouldBlock
        keys = self.keys(group)
        key = keys[row]
        for older in range(row + 1, len(times)):
            if keys[older] != key:
                return -1
            if int(times[older]) <= snapshot:
                return older
        return -1

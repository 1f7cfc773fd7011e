"""Clients that do all that can be done to single rows, and scans, while faults happen. Called by __main__.

Several clients with time-outs of their own share one event loop, so one monotonic clock times them all. Few rows are hot
at a time, others after a few seconds: each history stays short enough to be judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa

from stele.client import AsyncClient, AsyncKeySpace, AsyncTable, Job, RowErrors, WriteResult
from stele.model.clock import from_physical_us
from stele.model.errors import Retryable, SteleError, error_for
from stele.model.partition import HashPartition, PartitionSchema
from tests.linear import calls
from tests.linear.cuts import Scan
from tests.linear.history import Kind, State, Told
from tests.linear.record import Record

T = TypeVar("T")
TABLE, KEYSPACE = "rows", "space"

HOT_ROWS = 5
HOT_FOR_S = 1.5
_TIMEOUTS_S = (1.0, 4.0, 12.0)
_LAST_TIMEOUT_S = 30.0
_SCAN_TIMEOUT_S = 8.0
_OLD_S = (0.0, 0.05, 0.3, 1.0)
"""How old rows of followers may be."""
_OLD_SCAN_S = 3.0
_CATALOG_TIMEOUT_S = 5.0
_INSTANT_S = 1e-6
_FILL_ROWS, _FILL_BYTES = 24, 64 << 10
_TABLE_KINDS = (*calls.WRITES, Kind.READ, Kind.READ, Kind.READ, Kind.READ, Kind.PUT, Kind.INSERT, Kind.DELETE)
_PART_KINDS = (Kind.PUT, Kind.PUT, Kind.INSERT, Kind.UPDATE, Kind.DELETE)
"""What a part of a job does. Ignoring ones are not here: a row that was skipped counts as written, and a later attempt may
write it."""
_SPACE_KINDS = (Kind.PUT, Kind.INSERT, Kind.DELETE_IGNORE, Kind.READ, Kind.READ)


@dataclass(slots=True)
class User:
    """One client of the cluster, with its open table and key space."""

    name: str
    client: AsyncClient
    table: AsyncTable
    space: AsyncKeySpace


async def _at_last(call: Callable[[], Awaitable[T]], within_s: float = 60.0) -> T:
    """What `call` gives, called again by a client that is less patient than this machine is slow."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(Retryable):
                return await call()


class Workload:
    """The clients: `prepare`, `run` while faults happen, `settle` when they are over, `close`."""

    def __init__(self, masters: list[str], seed: int) -> None:
        self.record = Record()
        self._masters = masters
        self._rng = random.Random(f"workload/{seed}")
        self._values = itertools.count(1)
        self._users: list[User] = []
        self._first_s = 0.0

    async def prepare(self, buckets: int) -> None:
        """Make the table and the key space, open them with each client."""
        hashed = PartitionSchema(hash=(HashPartition(column_ids=(0,), buckets=buckets),))
        async with AsyncClient(self._masters, timeout_s=_LAST_TIMEOUT_S) as patient:
            await patient.create_table(TABLE, calls.SCHEMA, hashed)
            await patient.create_keyspace(KEYSPACE)
        for n, timeout_s in enumerate((*_TIMEOUTS_S, _LAST_TIMEOUT_S)):
            client = AsyncClient(self._masters, timeout_s=timeout_s)
            table = await _at_last(partial(client.open_table, TABLE))
            space = await _at_last(partial(client.keyspace, KEYSPACE))
            self._users.append(User(f"client-{n}", client, table, space))
        self._first_s = self.record.now()

    @property
    def last(self) -> User:
        """The most patient client; it writes nothing while faults happen."""
        return self._users[-1]

    async def close(self) -> None:
        """End all clients."""
        await asyncio.gather(*(user.client.close() for user in self._users))

    async def run(self, seconds: float, *, filling: bool) -> None:
        """Read, write and scan for so long; then wait for what is under way."""
        until = self.record.now() + seconds
        tasks = []
        for user in self._users[:-1]:
            for work in (
                self._row,
                self._row,
                self._row,
                self._old,
                self._many,
                self._part,
                self._key,
                self._catalog,
            ):
                tasks.append(self._repeat(work, user, random.Random(self._rng.random()), until))
        tasks.append(self._repeat(self._scan, self.last, random.Random(self._rng.random()), until))
        if filling:
            tasks.append(self._repeat(self._fill, self._users[1], random.Random(0), until))
        await asyncio.gather(*tasks)

    async def settle(self) -> None:
        """Read every row once more, in both ways: nothing may fail now.

        Raises:
            SteleError: a read did not succeed.
        """
        for key in sorted({o.key for o in self.record.operations}):
            begun = self.record.now()
            found = await self._call(self.last, key, Kind.READ, (0, 0))
            self.record.ended(self.last.name, key, Kind.READ, found[1], begun)
        rng = random.Random(0)
        await self._read_at(*self._snapshot(rng), rng)

    async def write_behind_history(self) -> None:
        """Write to every tablet again and again, behind all that is judged: a follower knows how far it has applied only
        once it has applied something since its start."""
        names = [f"end-{n}" for n in range(256)]
        rows = pa.table({"key": names, "a": [0] * 256, "b": [0] * 256})
        while True:
            with contextlib.suppress(SteleError):
                await self.last.table.write_arrow(rows)
            await asyncio.sleep(1.0)

    async def _repeat(
        self,
        work: Callable[[User, random.Random], Awaitable[None]],
        user: User,
        rng: random.Random,
        until: float,
    ) -> None:
        while self.record.now() < until:
            await work(user, rng)
            await asyncio.sleep(rng.expovariate(1 / 0.01))

    def _hot(self, rng: random.Random, kind: str) -> str:
        return f"{self._hot_prefix(kind)}{rng.randrange(HOT_ROWS)}"

    def _hot_prefix(self, kind: str) -> str:
        era = int((self.record.now() - self._first_s) / HOT_FOR_S)
        return f"{kind}-{era:03}-"

    def _fresh(self) -> tuple[int, int]:
        value = next(self._values)
        return value, value

    # --- single rows

    async def _row(self, user: User, rng: random.Random) -> None:
        cancel_s = rng.uniform(0.0, 0.2) if rng.random() < 0.03 else None
        await self._one(user, self._hot(rng, "row"), rng.choice(_TABLE_KINDS), cancel_s)

    async def _old(self, user: User, rng: random.Random) -> None:
        """Rows that may be old: reads that may begin so much earlier, by what the answer says. Now and then a client reads its own
        write, which is never left out."""
        key, allowed_s = self._hot(rng, "row"), rng.choice(_OLD_S)
        begun = self.record.now()
        try:
            found = await user.table.get(key, calls.COLUMNS, max_staleness=allowed_s)
        except SteleError as exc:
            self.record.told(user.name, key, Kind.READ, exc)
            return
        if found.age_s > allowed_s + self.record.now() - begun:
            self.record.surprises.append(
                f"{key}: a row that is {found.age_s:.3f} s old, {allowed_s} s was allowed"
            )
        value = None if found.row is None else (found.row["a"], found.row["b"])
        since = begun - min(allowed_s, found.age_s)
        self.record.followed += bool(found.age_s)
        self.record.ended(
            user.name,
            key,
            Kind.READ,
            value,
            since,
            note=f"old by {found.age_s:.3f} s, at {found.node_id[:4]}",
        )

    async def _old_key(self, user: User, key: str, allowed_s: float) -> None:
        """As `_old`, of a key space."""
        begun = self.record.now()
        try:
            found = await user.space.snapshot(key, max_staleness=allowed_s)
        except SteleError as exc:
            self.record.told(user.name, key, Kind.READ, exc)
            return
        value = calls.from_bytes(found.keys[0].value if found.keys else None)
        since = begun - min(allowed_s, found.age_s)
        self.record.followed += bool(found.age_s)
        self.record.ended(user.name, key, Kind.READ, value, since, note=f"old by {found.age_s:.3f} s")

    async def _key(self, user: User, rng: random.Random) -> None:
        chance = rng.random()
        if chance < 0.1:
            await self._list(user)
        elif chance < 0.2:
            await self._elect(user, self._hot(rng, "space"))
        elif chance < 0.5:
            await self._swap(user, self._hot(rng, "space"), rng)
        elif chance < 0.6:
            await self._old_key(user, self._hot(rng, "space"), rng.choice(_OLD_S))
        else:
            await self._one(user, self._hot(rng, "space"), rng.choice(_SPACE_KINDS), None)

    async def _one(self, user: User, key: str, kind: Kind, cancel_s: float | None) -> None:
        """One operation on one row; its caller waits no longer than `cancel_s`."""
        begun, value = self.record.now(), self._fresh()
        timestamp, found = 0, None
        told: Told | None = Told.DONE
        try:
            async with asyncio.timeout(cancel_s):
                timestamp, found = await self._call(user, key, kind, value)
        except Exception as exc:  # noqa: BLE001 - the record judges it
            told = self.record.told(user.name, key, kind, exc)
        if told is not None:
            said = found if kind is Kind.READ else value
            self.record.ended(user.name, key, kind, said, begun, told, timestamp=timestamp)

    async def _call(self, user: User, key: str, kind: Kind, value: tuple[int, int]) -> tuple[int, State]:
        if key.startswith("row"):
            return await calls.of_table(user.table, key, kind, value)
        if key.startswith("made"):
            return 0, await calls.of_catalog(user.client, key, kind, _CATALOG_TIMEOUT_S)
        return 0, await calls.of_space(user.space, key, kind, value)

    async def _list(self, user: User) -> None:
        """All keys of the moment are read at once: a read of each."""
        begun, prefix = self.record.now(), self._hot_prefix("space")
        try:
            found = dict(await user.space.list(prefix))
        except SteleError as exc:
            self.record.told(user.name, prefix, Kind.READ, exc)
            return
        for n in range(HOT_ROWS):
            key = f"{prefix}{n}"
            value = calls.from_bytes(found.get(key.encode()))
            self.record.ended(user.name, key, Kind.READ, value, begun, note="of a list")

    async def _swap(self, user: User, key: str, rng: random.Random) -> None:
        """Read a key, and change it if nobody else has; now and then against a state that was never read."""
        begun = self.record.now()
        try:
            expected = calls.from_bytes(await user.space.read(key))
        except SteleError as exc:
            self.record.told(user.name, key, Kind.READ, exc)
            return
        self.record.ended(user.name, key, Kind.READ, expected, begun, note="before a swap")
        if rng.random() < 0.1:
            expected = None
        begun = self.record.now()
        value = self._fresh() if rng.random() < 0.8 else None
        told: Told | None = Told.DONE
        try:
            await calls.swap(user.space, key, expected, value)
        except SteleError as exc:
            told = self.record.told(user.name, key, Kind.SWAP, exc)
        if told is not None:
            self.record.ended(user.name, key, Kind.SWAP, value, begun, told, expected=expected)

    async def _elect(self, user: User, key: str) -> None:
        """Won: an insert. Lost: a read of the winner's value."""
        begun, value = self.record.now(), self._fresh()
        kind, said, told, note = Kind.INSERT, value, Told.DONE, "elected"
        try:
            holder = await user.space.elect(key, str(value[0]))
            if holder != str(value[0]):
                kind, said, note = Kind.READ, (int(holder), int(holder)), "not elected"
        except SteleError as exc:
            failed = self.record.told(user.name, key, kind, exc)
            if failed is None:
                return
            told = failed
        self.record.ended(user.name, key, kind, said, begun, told, note=note)

    async def _catalog(self, user: User, rng: random.Random) -> None:
        """Key spaces made, deleted, described and listed, by the name."""
        await asyncio.sleep(rng.uniform(0.0, 0.4))
        key, kind = self._hot(rng, "made"), rng.choice((Kind.INSERT, Kind.DELETE, Kind.READ))
        begun = self.record.now()
        if rng.random() < 0.2:
            await self._listed(user, begun)
            return
        told, found = Told.DONE, None
        try:
            found = await calls.of_catalog(user.client, key, kind, _CATALOG_TIMEOUT_S)
        except Retryable as exc:
            if kind is Kind.READ:
                self.record.told(user.name, key, kind, exc)
                return
            told = Told.UNKNOWN
        except SteleError as exc:
            refused = self.record.told(user.name, key, kind, exc)
            if refused is None:
                return
            told = refused
        if kind is Kind.DELETE and told is not Told.ABSENT:
            kind = (
                Kind.DELETE_IGNORE
            )  # two may delete the same one at once, and both are told that it is gone
        said = calls.THERE if kind is Kind.INSERT else found
        self.record.ended(user.name, key, kind, said, begun, told)

    async def _listed(self, user: User, begun: float) -> None:
        prefix = self._hot_prefix("made")
        try:
            names = {info.name for info in await user.client.list_tables()}
        except SteleError as exc:
            self.record.told(user.name, prefix, Kind.READ, exc)
            return
        for n in range(HOT_ROWS):
            key = f"{prefix}{n}"
            value = calls.THERE if key in names else None
            self.record.ended(user.name, key, Kind.READ, value, begun, note="of a list")

    # --- many rows at once

    async def _many(self, user: User, rng: random.Random) -> None:
        """Hot rows, each once; or, now and then, one row of its own again and again, which keeps its order."""
        prefix = self._hot_prefix("row")
        if rng.random() < 0.2:
            await self._in_order(user, rng, f"{prefix}of-{user.name}-{next(self._values)}")
            return
        keys = [f"{prefix}{n}" for n in rng.sample(range(HOT_ROWS), rng.randint(2, HOT_ROWS))]
        values = [self._fresh() for _ in keys]
        begun, note = self.record.now(), f"with {len(keys) - 1} others"
        if rng.random() < 0.3:
            kinds: Sequence[Kind] = [Kind.PUT] * len(keys)
            columns = {"key": keys, "a": [v[0] for v in values], "b": [v[1] for v in values]}
            told, timestamp = await self._outcomes(
                user, keys, kinds, user.table.write_arrow(pa.table(columns))
            )
        else:
            kinds = [rng.choice(calls.WRITES) for _ in keys]
            write = calls.of_session(user.table, keys, kinds, values)
            told, timestamp = await self._outcomes(user, keys, kinds, write)
        for key, kind, value, one in zip(keys, kinds, values, told):
            self.record.ended(
                user.name, key, kind, value, begun, one, timestamp=timestamp, one_of_many=True, note=note
            )

    async def _in_order(self, user: User, rng: random.Random, key: str) -> None:
        """Nobody else reads or writes this row meanwhile, so its operations may be put one after the other."""
        count = rng.randint(2, 8)
        kinds = [rng.choice(calls.WRITES) for _ in range(count)]
        values = [self._fresh() for _ in kinds]
        begun = self.record.now()
        write = calls.of_session(user.table, [key] * count, kinds, values)
        told, timestamp = await self._outcomes(user, [key] * count, kinds, write)
        for n, (kind, value, one) in enumerate(zip(kinds, values, told)):
            start = begun + 2 * n * _INSTANT_S
            self.record.ended(
                user.name,
                key,
                kind,
                value,
                start,
                one,
                ended=start + _INSTANT_S,
                timestamp=timestamp,
                one_of_many=True,
                note=f"{n + 1} of {count} in order",
            )
        await self._one(user, key, Kind.READ, None)

    async def _part(self, user: User, rng: random.Random) -> None:
        """A part of a job, which several clients try, one after the other or at once: each row takes effect once, by the
        first answer that says so. What is left of other attempts comes to nothing."""
        part = Job.new().part(rng.randrange(4))
        keys = [
            f"{self._hot_prefix('row')}{n}" for n in rng.sample(range(HOT_ROWS), rng.randint(1, HOT_ROWS))
        ]
        kind, values, begun = rng.choice(_PART_KINDS), [self._fresh() for _ in keys], self.record.now()
        rows = list(zip(keys, values))
        done: dict[str, tuple[float, int]] = {}

        async def attempt(by: User, after_s: float) -> None:
            await asyncio.sleep(after_s)
            those, since = rng.sample(rows, len(rows)), self.record.now()
            names = [key for key, _ in those]
            write = calls.of_part(by.table, kind, those, part)
            told, timestamp = await self._outcomes(by, names, [kind] * len(names), write)
            for (key, value), one in zip(those, told):
                if one is Told.DONE:
                    done.setdefault(key, (self.record.now(), timestamp))
                elif one is not Told.UNKNOWN:  # refused: it says what the row was
                    self.record.ended(by.name, key, kind, value, since, one, note="of a part")

        others = rng.choices(self._users[:-1], k=rng.randint(1, 2))
        if rng.random() < 0.5:
            await asyncio.gather(attempt(user, 0.0), *(attempt(o, rng.uniform(0.0, 0.3)) for o in others))
        else:
            for by in (user, *others):
                await attempt(by, rng.uniform(0.0, 0.3))
        for key, value in rows:
            ended, timestamp = done.get(key, (None, 0))
            self.record.ended(
                user.name,
                key,
                kind,
                value,
                begun,
                Told.UNKNOWN if ended is None else Told.DONE,
                ended=ended,
                timestamp=timestamp,
                one_of_many=True,
                note=f"a part, {1 + len(others)} attempts",
            )

    async def _outcomes(
        self, user: User, keys: Sequence[str], kinds: Sequence[Kind], write: Awaitable[WriteResult]
    ) -> tuple[list[Told], int]:
        """(what was told of each row, the highest time of them)."""
        told = [Told.DONE] * len(keys)
        try:
            return told, (await write).timestamp
        except RowErrors as exc:
            for refused in exc.errors:
                error = error_for(refused.code, refused.message)
                one = self.record.told(user.name, keys[refused.row], kinds[refused.row], error)
                told[refused.row] = Told.UNKNOWN if one is None else one
            return told, exc.result.timestamp
        except SteleError:  # a block was not written, or not known to be; others may be
            return [Told.UNKNOWN] * len(keys), 0

    async def _fill(self, user: User, rng: random.Random) -> None:
        """Some MB into rows that nobody reads."""
        raw = rng.randbytes(_FILL_BYTES)
        keys = [f"fill-{rng.randrange(1 << 30)}" for _ in range(_FILL_ROWS)]
        rows = {"key": keys, "a": [0] * len(keys), "b": [0] * len(keys), "filling": [raw] * len(keys)}
        with contextlib.suppress(SteleError):
            await user.table.write_arrow(pa.table(rows))
        await asyncio.sleep(0.3)

    # --- scans

    def _snapshot(self, rng: random.Random) -> tuple[int, float]:
        """(the present as a client chooses it that has seen nothing, or all that others have; when it was taken)."""
        taken = self.record.now()
        if rng.random() < 0.5:
            return from_physical_us(time.time_ns() // 1_000), taken
        for user in self._users:
            self.last.client.observe(user.client.now())
        return self.last.client.now(), taken

    async def _scan(self, user: User, rng: random.Random) -> None:
        """Twice at one snapshot, the second time a little later."""
        snapshot, taken = self._snapshot(rng)
        old = rng.random() < 0.3
        for _ in range(2):
            try:
                await self._read_at(snapshot, taken, rng, old=old)
            except SteleError as exc:
                self.record.told(user.name, "scan", Kind.READ, exc)
            await asyncio.sleep(rng.uniform(0.0, 0.5))

    async def _read_at(self, snapshot: int, taken: float, rng: random.Random, *, old: bool = False) -> None:
        """`old`: not at this snapshot, but at one that followers serve."""
        ordered = rng.random() < 0.5
        scanner = self.last.table.scan(
            calls.COLUMNS,
            lower="row",
            upper="rox",
            snapshot=None if old else snapshot,
            max_staleness=_OLD_SCAN_S if old else None,
            ordered=ordered,
            timeout_s=_SCAN_TIMEOUT_S,
        )
        if old:
            snapshot, taken = scanner.snapshot, self.record.now() - _OLD_SCAN_S
        if rng.random() < 0.5:
            found = (await scanner.to_table()).to_pylist()
        else:
            found = [row async for batch in scanner.batches() for row in batch.to_pylist()]
        keys = [row["key"] for row in found]
        if len(set(keys)) != len(keys) or (ordered and keys != sorted(keys)):
            self.record.surprises.append(f"a scan at {snapshot} shows rows twice or out of order")
        rows: dict[str, State] = {row["key"]: (row["a"], row["b"]) for row in found}
        self.record.scans.append(Scan(snapshot, taken, self.record.now(), rows, self.last.name))

"""Who runs the jobs of a backup: this process, or workers elsewhere such as Spark's executors.

A job is the work on one tablet: small, with a small result, and pickled on its way. Knows no files and no
formats. Invariant: workers neither claim a folder, nor hold history, nor publish anything. Their caller does
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from stele.backup.parallel import in_parallel
from stele.client.async_client import AsyncClient
from stele.client.table import AsyncTable
from stele.model.errors import Code, InvariantViolation, Rejected

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Did:
    """What a job has done since its last report. `ended`: it has a result."""

    rows: int = 0
    bytes: int = 0
    ended: bool = False


class Bench:
    """Where jobs run: a client, and the tables that were opened already. `client` None: only for jobs that ask no cluster."""

    def __init__(self, client: AsyncClient | None, tables: Iterable[AsyncTable] = ()) -> None:
        self._client = client
        self._tables = {table.info.table_id: table for table in tables}

    async def table(self, table_id: str, name: str) -> AsyncTable:
        """Open the table with this id, whatever its name is now. `name`: the name for messages.

        Raises:
            Rejected: TABLET_DELETED: it is gone.
        """
        if table_id not in self._tables:
            if self._client is None:
                raise InvariantViolation("this job was sent to workers without a client")
            names = {info.table_id: info.name for info in await self._client.list_tables()}
            if table_id not in names:
                raise Rejected(f"table {name} was deleted", code=Code.TABLET_DELETED)
            self._tables[table_id] = await self._client.open_table(names[table_id])
        return self._tables[table_id]


class Job(Protocol[R_co]):
    """The work on one tablet. It can be pickled, and so can its result.

    An attempt may be cut off anywhere, and another attempt may run at the same time. Neither does harm."""

    async def run(self, bench: Bench, tell: Callable[[Did], None]) -> R_co:
        """Do the work. `tell` may be called in any thread. Raises SteleError."""


Tell = Callable[[int, Did], None]
"""Called with the number of a job and what it did, in any thread."""


class Workers(Protocol):
    """Runs jobs."""

    @property
    def repeats(self) -> bool:
        """Whether a job may have several attempts at once. Then one may still run after another has succeeded."""

    async def run(self, jobs: Sequence[Job[R]], parallel: int, tell: Tell) -> list[R]:
        """Run all jobs, and return their results in the same order. One successful attempt at each job
        counts.

        `parallel`: how many run at once in this process; workers elsewhere have limits of their own. `tell` is called
        so that each row is counted once, at the latest when its job ends. The first error ends the other jobs, and is raised.
        """


class InProcess:
    """Runs jobs in this process, each once."""

    repeats = False

    def __init__(self, client: AsyncClient | None, tables: Iterable[AsyncTable] = ()) -> None:
        self._bench = Bench(client, tables)

    async def run(self, jobs: Sequence[Job[R]], parallel: int, tell: Tell) -> list[R]:
        """See `Workers.run`."""
        found: dict[int, R] = {}

        async def one(number: int) -> None:
            found[number] = await jobs[number].run(self._bench, partial(tell, number))
            tell(number, Did(ended=True))

        await in_parallel(range(len(jobs)), parallel, one)
        return [found[number] for number in range(len(jobs))]

"""Keeps the history of tables for as long as a backup reads them.

Each table has a hold named after the backup, renewed while this process lives. After a kill it lasts HOLD_S longer, so that the
next run can go on. Then it ends by itself.

Invariant: a backup that is complete, or was given up, leaves no hold of its own that lasts longer than HOLD_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType

from stele.client.holds import TableHold
from stele.client.table import AsyncTable
from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Rejected, Retryable, SteleError

HOLD_S = 1_800.0
RENEW_S = 300.0
_AGAIN_S = 15.0
"""Pause before the next try, if not all tablets were reached."""


def hold_of(backup_id: str) -> str:
    """Return the name of the hold that keeps the history while this backup is written."""
    return f"backup-{backup_id}"


async def release(tables: Iterable[AsyncTable], name: str) -> None:
    """End these holds, if the tables can be reached. Otherwise they end by themselves."""
    for table in tables:
        with suppress(SteleError):
            await table.release_hold(name)


class HistoryHeld:
    """Keeps the history of `tables` from `snapshot` on while it is open. `name`: of the hold.

    `chain`: the name of the previous backup's hold; "": none. If the hold exists, it is renewed for `chain_s`
    seconds.
    """

    def __init__(
        self,
        tables: Sequence[AsyncTable],
        name: str,
        snapshot: int,
        note: Callable[[str], None],
        chain: str = "",
        chain_s: float = HOLD_S,
    ) -> None:
        self._tables = tables
        self._name = name
        self._snapshot = snapshot
        self._note = note
        self._chain = chain
        self._chain_s = chain_s
        self._held: list[tuple[AsyncTable, TableHold]] = []
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HistoryHeld:
        """Take the holds. After an interrupted run its holds are taken again.

        Raises:
            Rejected: SNAPSHOT_TOO_OLD: rows of that moment are gone.
            Retryable: not all tablets can be reached.
        """
        for table in self._tables:
            try:
                self._held.append((table, await table.hold(self._name, self._snapshot, expires_in_s=HOLD_S)))
            except Rejected as exc:
                if exc.code is Code.CURSOR_LOST:
                    await release(self._tables, self._name)
                    raise Rejected(
                        f"table {table.name} does not keep all rows of {utc(physical_us(self._snapshot))} any more. Back up a "
                        "later moment, or the present; `stele table alter --history` keeps rows longer from now on",
                        code=Code.SNAPSHOT_TOO_OLD,
                    ) from exc
                if exc.code not in (Code.UNSUPPORTED_VERSION, Code.TOO_LARGE):
                    raise
                self._note(
                    f"table {table.name}: no hold could be taken, so old rows are kept only for the table's history: {exc.args[0]}"
                )
            if self._chain:
                there = [hold for hold in await table.holds() if hold.name == self._chain and not hold.broken]
                self._held += [(table, hold) for hold in there]
        await self._renew()
        self._renewing = asyncio.get_running_loop().create_task(self._go_on())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the holds, unless the same backup may be continued. The hold of the previous backup stays."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if kind is None or issubclass(kind, Rejected):
            await release(self._tables, self._name)

    async def _go_on(self) -> None:
        all_reached = True
        while self._held:
            await asyncio.sleep(RENEW_S if all_reached else _AGAIN_S)
            all_reached = await self._renew()

    async def _renew(self) -> bool:
        """Renew all holds, on the tablets that have them: a range that was added since has nothing to keep. Returns whether
        all tablets were reached."""
        all_reached = True
        for each in list(self._held):
            table, hold = each
            try:
                last_s = HOLD_S if hold.name == self._name else self._chain_s
                await table.renew_hold(hold, expires_in_s=last_s)
            except Retryable:
                all_reached = False
            except SteleError as exc:
                # Reading goes on. Nodes refuse what they can no longer give.
                self._held.remove(each)
                self._note(f"the history of table {table.name} is no longer held: {exc.args[0]}")
        return all_reached

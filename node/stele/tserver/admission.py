"""Decides whether this start of the volume may go on, by the masters' answers. The heartbeater passes the
answers in, and the startup waits for the decision.

An older copy of a volume may have forgotten votes and acknowledged rows. Each master compares what this start
reports with what it heard before. It refuses the start if it has heard of newer state.

Owns the masters' votes on this start (`AdmissionVotes`). Writes nothing, ends nothing. Invariant: a start
that was admitted is ended only by a majority's refusal. Any other start is also ended by one master's refusal
that still stands after DOUBT_S.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stele.model.errors import Code, SteleError
from stele.rpc.proto import master_pb2
from stele.tserver.admission_votes import AdmissionVotes

DOUBT_S = 3.0
"""How long a start waits for the other masters' votes after some master refused it. Not used for a start that
was admitted before.
"""
_GRACE_S = 1.0
"""How long a start with enough votes waits for masters that have not answered yet. One of them may be about
to refuse."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The masters' decision to end this start.

    `condemned`: a majority has evidence that the volume is an older copy. No later start of the volume may go
    on either.
    """

    error: SteleError
    condemned: bool


class Admission:
    """Decides from the masters' answers whether this process may start on its volume. Made on the node's event loop, and used
    there only."""

    def __init__(self, votes: AdmissionVotes) -> None:
        self._votes = votes
        self._masters: frozenset[str] = frozenset()
        self._asked: set[str] = set()
        self._heard = asyncio.Event()
        self._doubting: asyncio.TimerHandle | None = None
        self._admitted = False
        self.refusal: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()
        """Resolves once the masters end this start. It never raises."""

    # --- told by the heartbeater

    def expect(self, addresses: Iterable[str]) -> None:
        """Ask the masters at these addresses from now on."""
        self._masters = frozenset(addresses)
        self._asked &= self._masters

    def answered(self, address: str, response: master_pb2.TSHeartbeatResponse) -> None:
        """Count the answer of the master at `address`, which did not refuse this start."""
        self._votes.answered(address, response)
        self._note_asked(address)

    def no_answer(self, address: str) -> None:
        """Note that the master at `address` was asked and did not admit this start."""
        self._note_asked(address)

    def refused(self, address: str, error: SteleError) -> None:
        """Count the refusal of the master at `address`."""
        self._votes.refused(address, error)
        verdict = self._votes.verdict
        if verdict is not None:
            self._refuse(verdict, condemned=verdict.code is Code.VOLUME_OLD)
        elif self.doubted and self._doubting is None:
            self._doubting = asyncio.get_running_loop().call_later(DOUBT_S, self._still_doubted)

    def close(self) -> None:
        """Decide nothing more."""
        if self._doubting is not None:
            self._doubting.cancel()

    # --- asked by the startup

    @property
    def has_masters(self) -> bool:
        """Whether there is any master to ask."""
        return bool(self._masters)

    @property
    def doubted(self) -> bool:
        """Whether some master refuses this start, and no majority admits it."""
        return self._votes.doubt is not None and not self._votes.admitted

    async def wait_may_open(self) -> None:
        """Wait until enough masters have answered without a refusal, so that the replicas may open."""
        await self._until(lambda: self._votes.may_open)
        await self._all_asked()

    async def wait_admitted(self) -> None:
        """Wait until enough masters admit this start, so that all masters may rely on what it reports."""
        await self._until(lambda: self._votes.admitted)
        await self._all_asked()

    async def wait_undoubted(self) -> None:
        """Wait until no master refuses this start any more, or a majority admits it."""
        await self._until(lambda: not self.doubted)

    @property
    def admitted(self) -> bool:
        """Whether masters may rely on what this start reports. Heartbeats carry it."""
        return self._admitted

    def admit(self) -> None:
        """Let heartbeats report this start as admitted from now on, unless it was refused."""
        self._admitted = not self.refusal.done()

    # --- deciding

    def _note_asked(self, address: str) -> None:
        self._asked.add(address)
        self._heard.set()

    async def _all_asked(self) -> None:
        """Wait until every master has answered or failed once, at most for _GRACE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._until(lambda: self._masters <= self._asked)

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._heard.clear()
            await self._heard.wait()

    def _still_doubted(self) -> None:
        self._doubting = None
        doubt = self._votes.doubt
        if doubt is not None and self.doubted:
            self._refuse(doubt, condemned=False)

    def _refuse(self, error: SteleError, *, condemned: bool) -> None:
        if not self.refusal.done():
            self._admitted = False
            self.refusal.set_result(Refusal(error, condemned))

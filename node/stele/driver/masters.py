"""Calls to whichever master leads. Used by executor; owns the list of master addresses and a guess who leads.

Invariant: a call is sent to one master at a time, and again only after an answer that says it was not done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from stele.model.errors import Code, Retryable, SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub

_NOT_DONE = (Code.NOT_LEADER, Code.UNAVAILABLE, Code.NOT_READY, Code.NO_QUORUM)


class Masters:
    """The masters by address, the presumed leader first."""

    def __init__(self, pool: ChannelPool, addresses: Iterable[str]) -> None:
        self._pool = pool
        self._given = tuple(addresses)
        self._addresses = list(self._given)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All known addresses, the presumed leader first."""
        return tuple(self._addresses)

    def learn(self, addresses: Iterable[str]) -> None:
        """Take up the newest list of addresses; older ones go, those given at the start stay. No address: nothing."""
        newest = [a for a in addresses if a]
        if newest:
            wanted = dict.fromkeys([*newest, *self._given])
            kept = [a for a in self._addresses if a in wanted]
            self._addresses = list(dict.fromkeys([*kept, *wanted]))

    async def call(self, method: str, request: Any, *, timeout_s: float = 3.0, rounds: int = 2) -> Any:
        """Ask the leader master; look for it among all, `rounds` times.

        Raises:
            SteleError: the leader's own answer; UNAVAILABLE or NOT_LEADER when none of them leads.
        """
        error: SteleError = Retryable("no master address is known", code=Code.UNAVAILABLE)
        for attempt in range(rounds):
            for address in tuple(self._addresses):
                try:
                    answer = await self._pool.unary(
                        address, MasterServiceStub, method, request, timeout_s=timeout_s
                    )
                except SteleError as exc:
                    if exc.code not in _NOT_DONE:
                        raise
                    error = exc if error.code is not Code.NOT_READY else error
                    continue
                self._addresses = list(dict.fromkeys([address, *self._addresses]))
                return answer
            if attempt + 1 < rounds:
                await asyncio.sleep(0.3)
        raise error

"""Exactly-once state: what became of each client's recent writes. Part of both state machines: flushed, copied, in
the checksum. Opens no files and reads no clock: time is that of the entries.

A client id has outcomes for its sequences at or above its lowest unfinished one. An id that was idle for `idle_us`, or
is pushed out by newer ones, is forgotten, and the expiry mark rises to the time it was made; an id that is not known
and was made at or below the mark is TOO_OLD, for ever: its outcome is unknown, never new.

Invariant: the state depends on the applied entries alone.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from stele.model.block import RowError
from stele.model.clock import physical_us
from stele.model.errors import Code, Corrupt, unknown_here
from stele.model.writeop import NO_CLIENT, WriteHeader
from stele.tablet.machine import Outcome

IDLE_US = 15 * 60 * 1_000_000
AHEAD_US_MAX = IDLE_US // 3
"""How far ahead of a leader's clock an id may have been made: forgotten, it must not raise the mark above the present,
or all ids made since would be TOO_OLD. Leaders refuse what is further ahead; here it would be too late."""
CLIENTS_MAX = 10_000
OUTCOMES_MAX = 65_536
"""Unfinished sequences of one client; its owner has a window far below."""

_MASK = (1 << 64) - 1


class _Client:
    __slots__ = ("first_us", "last_us", "lowest", "outcomes")

    def __init__(
        self, first_us: int, last_us: int, lowest: int, outcomes: dict[int, tuple[int, Outcome]]
    ) -> None:
        self.first_us = first_us
        self.last_us = last_us
        self.lowest = lowest
        self.outcomes = outcomes


class ExactlyOnce:
    """The clients of one tablet, least recently active first."""

    def __init__(self, *, idle_us: int = IDLE_US, clients_max: int = CLIENTS_MAX) -> None:
        self._idle_us = idle_us
        self._clients_max = clients_max
        self._clients: dict[bytes, _Client] = {}
        self._mark_us = 0

    def earlier(self, header: WriteHeader, timestamp: int) -> Outcome | None:
        """What a write that was seen before, or cannot be told from one, is answered; None: it is new.

        Called once per WRITE entry, in order; `timestamp` is the entry's.
        """
        if header.client_id == NO_CLIENT:
            return None
        now_us = physical_us(timestamp)
        self._expire(now_us)
        client = self._clients.pop(header.client_id, None)
        if client is None:
            if header.first_attempt_us <= self._mark_us:
                return _refused(
                    Code.TOO_OLD,
                    f"client id made at {header.first_attempt_us} µs, the expiry mark is {self._mark_us}: "
                    "whether this write was done before is not known; read, then write under a new client id",
                )
            client = _Client(header.first_attempt_us, now_us, header.lowest_unfinished, {})
        self._clients[header.client_id] = client
        client.last_us = max(client.last_us, now_us)
        if header.lowest_unfinished > client.lowest:
            client.lowest = header.lowest_unfinished
            for sequence in [s for s in client.outcomes if s < client.lowest]:
                del client.outcomes[sequence]
        found = client.outcomes.get(header.sequence)
        if found is not None:
            digest, outcome = found
            if digest != header.digest:
                return _refused(
                    Code.DIGEST_MISMATCH,
                    f"sequence {header.sequence} was written before with digest {digest:016x}, now "
                    f"{header.digest:016x}; a sequence names one payload for ever",
                )
            return Outcome(
                outcome.timestamp,
                outcome.row_errors,
                outcome.value,
                outcome.code,
                outcome.message,
                duplicate=True,
            )
        if header.sequence < client.lowest:
            return _refused(
                Code.TOO_OLD,
                f"sequence {header.sequence} is below {client.lowest}, which the client said is its lowest unfinished",
            )
        if len(client.outcomes) >= OUTCOMES_MAX:
            return _refused(Code.TOO_LARGE, f"{OUTCOMES_MAX} sequences are unfinished; finish some first")
        return None

    def record(self, header: WriteHeader, outcome: Outcome) -> None:
        """Remember the outcome of a write that `earlier` called new."""
        client = self._clients.get(header.client_id)
        if client is not None:
            client.outcomes[header.sequence] = (header.digest, outcome)
            if len(self._clients) > self._clients_max:
                self._forget_oldest()

    def _expire(self, now_us: int) -> None:
        while self._clients:
            oldest = next(iter(self._clients.values()))
            if oldest.last_us + self._idle_us >= now_us:
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        client_id = next(iter(self._clients))
        client = self._clients.pop(client_id)
        self._mark_us = max(self._mark_us, client.first_us)

    @property
    def clients(self) -> int:
        """How many client ids are remembered."""
        return len(self._clients)

    def frozen(self) -> tuple[int, list[tuple[bytes, int, int, int, list[tuple[int, tuple[int, Outcome]]]]]]:
        """A copy that later entries do not change, for `encode` on another thread."""
        clients = [
            (client_id, c.first_us, c.last_us, c.lowest, list(c.outcomes.items()))
            for client_id, c in self._clients.items()
        ]
        return self._mark_us, clients

    def checksum(self) -> int:
        """64 bits over the whole state; equal on replicas that applied the same entries."""
        return xxhash.xxh3_64_intdigest(encode(self.frozen())) & _MASK

    @staticmethod
    def decode(data: bytes, *, idle_us: int = IDLE_US, clients_max: int = CLIENTS_MAX) -> ExactlyOnce:
        """The state that `encode` wrote.

        Raises:
            Corrupt: the bytes are no such state.
            Rejected: UNSUPPORTED_VERSION, an outcome has a code that this program does not know.
        """
        state = ExactlyOnce(idle_us=idle_us, clients_max=clients_max)
        try:
            mark_us, clients = json.loads(data)
            state._mark_us = int(mark_us)
            for client_id, first_us, last_us, lowest, outcomes in clients:
                kept = {int(s): (int(d), _outcome(raw)) for s, d, raw in outcomes}
                state._clients[bytes.fromhex(client_id)] = _Client(first_us, last_us, lowest, kept)
        except (ValueError, TypeError, KeyError) as exc:
            raise Corrupt(f"exactly-once state: {exc!r}; expected what encode wrote") from exc
        return state


def encode(frozen: Any) -> bytes:
    """Bytes of `ExactlyOnce.frozen()`; equal states have equal bytes."""
    mark_us, clients = frozen
    rows = [
        [client_id.hex(), first, last, lowest, [[s, d, _raw(o)] for s, (d, o) in outcomes]]
        for client_id, first, last, lowest, outcomes in clients
    ]
    return json.dumps([mark_us, rows], separators=(",", ":")).encode()


def _raw(outcome: Outcome) -> list[Any]:
    errors = [[e.row, int(e.code), e.message] for e in outcome.row_errors]
    value = None if outcome.value is None else outcome.value.hex()
    return [outcome.timestamp, errors, value, int(outcome.code), outcome.message]


def _outcome(raw: list[Any]) -> Outcome:
    timestamp, errors, value, code, message = raw
    row_errors = tuple(RowError(int(row), _code(c), m) for row, c, m in errors)
    return Outcome(
        timestamp, row_errors, None if value is None else bytes.fromhex(value), _code(code), message
    )


def _code(number: int) -> Code:
    try:
        return Code(number)
    except ValueError:
        raise unknown_here("exactly-once state: code", number) from None


def _refused(code: Code, message: str) -> Outcome:
    return Outcome(code=code, message=message)

"""Exactly-once state: the outcomes of each client's recent writes. Part of both state machines.

It is flushed, copied and part of the checksum. Opens no files and reads no clock: time is that of the
entries.

A client id has outcomes for its sequences at or above its lowest unfinished one. An id is forgotten if it was
idle for `idle_us` when a write or a ceiling is applied, or if newer ids need its place. Then the expiry mark
rises to the time that the id was made. An unknown id that was made at or below the mark is TOO_OLD for ever:
the outcome of its writes is unknown. Leaders refuse an id made in the future. Once forgotten, it would raise
the mark to that time, and until then all new ids would be TOO_OLD.

The rules of applying never change. So a leader limits what a client may add before it proposes the write
(`admit`).

Details of outcomes are refused rows with their errors, values and messages. They take at most
DETAILS_BYTES_MAX. Past that the oldest details are forgotten, and a retry of such a write is TOO_OLD. The tablet
still remembers that the write came, so it is not applied twice.

Invariant: the state depends on the applied entries alone.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from stele.model.block import RowError
from stele.model.clock import physical_us
from stele.model.errors import Code, Corrupt, Retryable, unknown_here
from stele.model.jsons import parse_next_json
from stele.model.writeop import NO_CLIENT, WriteHeader
from stele.tablet.expected import Expected
from stele.tablet.machine import Outcome

IDLE_US = 15 * 60 * 1_000_000
CLIENTS_MAX = 10_000
OUTCOMES_MAX = 65_536
"""The most unfinished sequences of one client when its writes are applied. Leaders admit fewer."""
UNFINISHED_MAX = 4_096
"""The most unfinished sequences of one client that a leader admits: 1 MiB at about 256 bytes each. Our
clients need far fewer."""
OUTCOMES_ALL_MAX = 65_536
"""The most outcomes of all clients: 16 MiB. At this number a leader admits an equal share for each client."""
DETAILS_BYTES_MAX = 2 << 20
"""The most bytes of details of all clients, about as encoded: four blocks of 8,192 refused rows each."""

_ROW_BYTES = 12
"""Bytes of a row error beside its message."""
_FORGOTTEN = (
    "this write came before; what became of its rows is no longer known, as many others were refused since: read, then write "
    "again"
)
_MASK = (1 << 64) - 1

_Grouped = tuple[tuple[Code, str, "array[int]"], ...]
"""Row errors: for each code and message the rows, ascending. A row has at most one error."""
_Kept = tuple[int, Outcome, _Grouped]
"""A write's digest, its outcome without row errors, and its row errors."""


class _Client:
    __slots__ = ("first_us", "last_us", "lowest", "outcomes")

    def __init__(self, first_us: int, last_us: int, lowest: int, outcomes: dict[int, _Kept]) -> None:
        self.first_us = first_us
        self.last_us = last_us
        self.lowest = lowest
        self.outcomes = outcomes


class ExactlyOnce:
    """The clients of one tablet, least recently active first."""

    def __init__(
        self,
        *,
        idle_us: int = IDLE_US,
        clients_max: int = CLIENTS_MAX,
        details_bytes_max: int = DETAILS_BYTES_MAX,
        outcomes_max: int = OUTCOMES_ALL_MAX,
    ) -> None:
        self._idle_us = idle_us
        self._clients_max = clients_max
        self._outcomes_max = outcomes_max
        self._details_bytes_max = details_bytes_max
        self._clients: dict[bytes, _Client] = {}
        self._newest: _Client | None = None  # the last one in the order
        self._none_idle_us = 0  # until this time no client is idle for too long
        self._mark_us = 0
        self.outcomes = 0
        """The number of remembered outcomes of all clients."""
        # (client id, sequence) of outcomes with details, in the order of their entries, and their bytes.
        self._details: dict[tuple[bytes, int], int] = {}
        self._details_bytes = 0
        self._expected = Expected()

    def admit(self, header: WriteHeader, wall_us: int, clock_error_us: int) -> None:
        """Check a write before the leader proposes it. `clock_error_us`: how far clocks may be apart.

        Only the client that asks for too much is refused. New ids push out no client that wrote within twice
        the clock error. So the expiry mark stays below the time of ids from a clock that is late by that
        error.

        Raises:
            Retryable: THROTTLED: the write may be admitted later, or with a higher `lowest_unfinished`.
        """
        client = self._clients.get(header.client_id)
        if client is not None:
            if len(client.outcomes) >= self._outcomes_each:
                self._admit_more(client, header)
        elif header.client_id != NO_CLIENT and header.client_id not in self._expected:
            self._admit_new(wall_us, 2 * clock_error_us)

    def _admit_new(self, wall_us: int, kept_us: int) -> None:
        wait_us = self._expected.wait_us(self._clients, self._clients_max, kept_us, wall_us)
        if wait_us > 0:
            raise Retryable(
                f"{self._clients_max} clients wrote to this tablet just now, and it takes no new client id "
                "for the moment; use one client id for many writes, or try again later",
                code=Code.THROTTLED,
                retry_after_ms=-(-wait_us // 1_000),
            )

    def expect(self, client_id: bytes) -> None:
        """As leader, note that a write of this client id is proposed. It may be a new one."""
        if client_id != NO_CLIENT and client_id not in self._clients:
            self._expected.add(client_id)

    def stop_expecting(self, client_id: bytes) -> None:
        """Note that this write was applied, or was lost."""
        self._expected.discard(client_id)

    @property
    def _outcomes_each(self) -> int:
        if self.outcomes < self._outcomes_max:
            return UNFINISHED_MAX
        return min(UNFINISHED_MAX, max(1, self._outcomes_max // len(self._clients)))

    def _admit_more(self, client: _Client, header: WriteHeader) -> None:
        if header.sequence in client.outcomes or header.sequence <= header.lowest_unfinished:
            return  # known, or the one that the client must finish before the others
        unfinished = sum(sequence >= header.lowest_unfinished for sequence in client.outcomes)
        if unfinished >= self._outcomes_each:
            raise Retryable(
                f"this client id has {unfinished} unfinished writes, from sequence {header.lowest_unfinished} on; "
                "raise its lowest unfinished sequence once you know outcomes",
                code=Code.THROTTLED,
            )

    def earlier(self, header: WriteHeader, timestamp: int) -> Outcome | None:
        """The outcome for a write that was seen before, or that may have been; None if it is new.

        Call once per WRITE entry, in order. `timestamp` is the entry's.
        """
        if header.client_id == NO_CLIENT:
            return None
        now_us = physical_us(timestamp)
        if now_us > self._none_idle_us:
            self.expire(timestamp)
        client = self._clients.get(header.client_id)
        if client is None:
            self._expected.discard(header.client_id)
            if header.first_attempt_us <= self._mark_us:
                return _refused(
                    Code.TOO_OLD,
                    "this write may have been done before: its client id is so old that its writes are forgotten "
                    f"(made at {header.first_attempt_us} µs, forgotten up to {self._mark_us} µs); read the row, then "
                    "write it under a new client id",
                )
            client = _Client(header.first_attempt_us, now_us, header.lowest_unfinished, {})
        if client is not self._newest:
            self._clients.pop(header.client_id, None)
            self._clients[header.client_id] = self._newest = client
        if now_us > client.last_us:
            client.last_us = now_us
        if header.lowest_unfinished > client.lowest:
            self._finish(header.client_id, client, header.lowest_unfinished)
        found = client.outcomes.get(header.sequence)
        if found is not None:
            digest, outcome, grouped = found
            if digest != header.digest:
                return _refused(
                    Code.DIGEST_MISMATCH,
                    f"sequence {header.sequence} was written before with digest {digest:016x}, now "
                    f"{header.digest:016x}; a sequence names one payload for ever",
                )
            return Outcome(
                outcome.timestamp,
                tuple(RowError(row, code, message) for row, code, message in _by_row(grouped)),
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

    def _finish(self, client_id: bytes, client: _Client, lowest: int) -> None:
        """Drop the outcomes below `lowest`: the client has received them."""
        client.lowest = lowest
        outcomes = client.outcomes
        for sequence in list(outcomes):
            if sequence < lowest:
                del outcomes[sequence]
                self.outcomes -= 1
                if self._details:
                    self._uncount(client_id, sequence)

    def knows_client(self, client_id: bytes) -> bool:
        """Whether this client id is remembered."""
        return client_id in self._clients

    def knows(self, header: WriteHeader) -> bool:
        """Whether the outcome of this write is remembered. Changes nothing."""
        client = self._clients.get(header.client_id)
        return client is not None and header.sequence in client.outcomes

    def surely_new(self, header: WriteHeader, timestamp: int) -> bool:
        """Whether `earlier` will call this write new, if only writes of other numbers are applied before. Changes nothing.

        False for a client that is unknown, because new clients in the log may raise the expiry mark above it."""
        if header.client_id == NO_CLIENT:
            return True
        client = self._clients.get(header.client_id)
        return (
            client is not None
            and header.sequence not in client.outcomes
            and header.sequence >= max(client.lowest, header.lowest_unfinished)
            and len(client.outcomes) < UNFINISHED_MAX
            and physical_us(timestamp) <= client.last_us + self._idle_us
            and len(self._clients) + len(self._expected) <= self._clients_max
        )

    def may_know(self, client_id: bytes, sequence: int, first_attempt_us: int) -> bool:
        """Whether this write may have been applied before. Changes nothing."""
        client = self._clients.get(client_id)
        if client is None:
            return client_id != NO_CLIENT and first_attempt_us <= self._mark_us
        return sequence in client.outcomes or sequence < client.lowest

    def record(self, header: WriteHeader, outcome: Outcome) -> None:
        """Remember the outcome of a write that `earlier` called new."""
        client = self._clients.get(header.client_id)
        if client is None:
            return
        self.outcomes += 1
        if outcome.row_errors or outcome.message or outcome.value is not None:
            self._record_details(client, header, outcome)
        else:
            client.outcomes[header.sequence] = (header.digest, outcome, ())
        if len(self._clients) > self._clients_max:
            self._forget_oldest()

    def _record_details(self, client: _Client, header: WriteHeader, outcome: Outcome) -> None:
        grouped: _Grouped = ()
        if outcome.row_errors:
            grouped = _grouped([(e.row, e.code, e.message) for e in outcome.row_errors])
            outcome = Outcome(outcome.timestamp, (), outcome.value, outcome.code, outcome.message)
        client.outcomes[header.sequence] = (header.digest, outcome, grouped)
        self._count(header.client_id, header.sequence, _details_bytes(outcome, grouped))
        self._forget_details()

    def _count(self, client_id: bytes, sequence: int, size: int) -> None:
        if size:
            self._details[client_id, sequence] = size
            self._details_bytes += size

    def _uncount(self, client_id: bytes, sequence: int) -> None:
        self._details_bytes -= self._details.pop((client_id, sequence), 0)

    def _forget_details(self) -> None:
        while self._details_bytes > self._details_bytes_max:
            client_id, sequence = next(iter(self._details))
            self._uncount(client_id, sequence)
            outcomes = self._clients[client_id].outcomes
            digest, outcome, _ = outcomes[sequence]
            outcomes[sequence] = (
                digest,
                Outcome(outcome.timestamp, code=Code.TOO_OLD, message=_FORGOTTEN),
                (),
            )

    def expire(self, timestamp: int) -> None:
        """Forget clients that were idle for too long at an entry's timestamp.

        Call only for an entry whose timestamp is below those of all later entries. Then this changes no outcome: the
        next write would forget the same clients before anything else."""
        now_us = physical_us(timestamp)
        while self._clients:
            oldest = next(iter(self._clients.values()))
            self._none_idle_us = oldest.last_us + self._idle_us
            if self._none_idle_us >= now_us:
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        client_id = next(iter(self._clients))
        client = self._clients.pop(client_id)
        if client is self._newest:
            self._newest = None
        self._mark_us = max(self._mark_us, client.first_us)
        self.outcomes -= len(client.outcomes)
        for sequence in client.outcomes:
            self._uncount(client_id, sequence)

    @property
    def idle_us(self) -> int | None:
        """The time, µs since 1970, after which an entry forgets all clients; None if there are none."""
        if not self._clients:
            return None
        return next(reversed(self._clients.values())).last_us + self._idle_us

    @property
    def clients(self) -> int:
        """The number of remembered client ids."""
        return len(self._clients)

    def frozen(self) -> tuple[int, list[tuple[bytes, int, int, int, list[tuple[int, _Kept]]]]]:
        """A copy that later entries do not change, for `encode` in another thread."""
        clients = [
            (client_id, c.first_us, c.last_us, c.lowest, list(c.outcomes.items()))
            for client_id, c in self._clients.items()
        ]
        return self._mark_us, clients

    def checksum(self) -> int:
        """64 bits over the whole state. Equal on replicas that applied the same entries."""
        return xxhash.xxh3_64_intdigest(encode(self.frozen())) & _MASK

    @staticmethod
    def decode(
        data: bytes,
        *,
        idle_us: int = IDLE_US,
        clients_max: int = CLIENTS_MAX,
        details_bytes_max: int = DETAILS_BYTES_MAX,
        outcomes_max: int = OUTCOMES_ALL_MAX,
    ) -> ExactlyOnce:
        """The state that `encode` wrote. An earlier program's state may have more details than are kept.

        Raises:
            Corrupt: the bytes are not such a state.
            Rejected: UNSUPPORTED_VERSION: this program does not know the code of an outcome.
        """
        state = ExactlyOnce(
            idle_us=idle_us,
            clients_max=clients_max,
            details_bytes_max=details_bytes_max,
            outcomes_max=outcomes_max,
        )
        sizes: list[tuple[int, bytes, int, int]] = []
        words: dict[str, str] = {}
        try:
            mark_us, clients = _parts(data.decode())
            state._mark_us = int(mark_us)
            for name, first_us, last_us, lowest, outcomes in clients:
                client_id = bytes.fromhex(name)
                kept: dict[int, _Kept] = {}
                for raw_sequence, digest, raw in outcomes:
                    sequence, (outcome, grouped) = int(raw_sequence), _outcome(raw, words)
                    kept[sequence] = (int(digest), outcome, grouped)
                    sizes.append((outcome.timestamp, client_id, sequence, _details_bytes(outcome, grouped)))
                state._clients[client_id] = _Client(first_us, last_us, lowest, kept)
                state.outcomes += len(kept)
        except (ValueError, TypeError, KeyError, OverflowError) as exc:
            raise Corrupt(
                f"exactly-once state: {exc!r}; the file is damaged; copy the replica from a peer"
            ) from exc
        for _, client_id, sequence, size in sorted(sizes, key=lambda found: found[0]):
            state._count(client_id, sequence, size)
        state._forget_details()
        return state


def encode(frozen: Any) -> bytes:
    """The bytes of `ExactlyOnce.frozen()`: JSON without spaces. Equal states have equal bytes."""
    mark_us, clients = frozen
    rows = []
    for client_id, first, last, lowest, outcomes in clients:
        told = ",".join(f"[{s},{d},{_raw(outcome, grouped)}]" for s, (d, outcome, grouped) in outcomes)
        rows.append(f'["{client_id.hex()}",{first},{last},{lowest},[{told}]]')
    return f"[{mark_us},[{','.join(rows)}]]".encode()


def _parts(text: str) -> tuple[int, Iterator[Any]]:
    """(expiry mark, clients) from what `encode` wrote. Yields clients one by one: an old state may have many
    row errors."""
    comma = text.find(",[")
    if text[:1] != "[" or comma < 0 or text[-2:] != "]]":
        raise ValueError(f"not a saved state: {len(text)} characters, from {text[:20]!r} to {text[-20:]!r}")
    return int(text[1:comma]), _clients(text, comma + 2, len(text) - 2)


def _clients(text: str, at: int, end: int) -> Iterator[Any]:
    while at < end:
        client, at = parse_next_json(text, at)
        yield client
        if at < end and text[at] != ",":
            raise ValueError(f"{text[at]!r} at {at}")
        at += 1


def _details_bytes(outcome: Outcome, grouped: _Grouped) -> int:
    """About how many bytes an outcome's details take when encoded; 0 if it has none."""
    if outcome.code is Code.TOO_OLD:
        return 0
    rows = sum(len(rows) * (len(message) + _ROW_BYTES) for _, message, rows in grouped)
    return rows + len(outcome.message) + (0 if outcome.value is None else 2 * len(outcome.value))


def _grouped(errors: Sequence[tuple[int, Code, str]]) -> _Grouped:
    found: dict[tuple[Code, str], list[int]] = {}
    for row, code, message in errors:
        found.setdefault((code, message), []).append(row)
    return tuple((code, message, array("I", sorted(rows))) for (code, message), rows in found.items())


def _by_row(grouped: _Grouped) -> Iterator[tuple[int, Code, str]]:
    """Each row with its error, ascending."""
    errors = ((row, code, message) for code, message, rows in grouped for row in rows)
    return errors if len(grouped) < 2 else iter(sorted(errors, key=lambda error: error[0]))


def _raw(outcome: Outcome, grouped: _Grouped) -> str:
    ends = [(f",{int(code)},{json.dumps(message)}]", rows) for code, message, rows in grouped]
    if len(ends) == 1:
        ((end, only),) = ends
        errors = "[" + f"{end},[".join(map(str, only)) + end
    else:
        each = sorted((row, end) for end, rows in ends for row in rows)
        errors = ",".join(f"[{row}{end}" for row, end in each)
    value = "null" if outcome.value is None else f'"{outcome.value.hex()}"'
    return f"[{outcome.timestamp},[{errors}],{value},{int(outcome.code)},{json.dumps(outcome.message)}]"


def _outcome(raw: list[Any], words: dict[str, str]) -> tuple[Outcome, _Grouped]:
    """An outcome from its JSON value. `words`: the messages so far, so that equal ones share memory."""
    timestamp, errors, value, code, message = raw
    codes = {c: _code(c) for c in {c for _, c, _ in errors}}
    grouped = _grouped([(int(row), codes[c], words.setdefault(m, m)) for row, c, m in errors])
    told = None if value is None else bytes.fromhex(value)
    return Outcome(timestamp, (), told, _code(code), words.setdefault(message, message)), grouped


def _code(number: int) -> Code:
    try:
        return Code(number)
    except ValueError:
        raise unknown_here("exactly-once state: code", number) from None


def _refused(code: Code, message: str) -> Outcome:
    return Outcome(code=code, message=message)

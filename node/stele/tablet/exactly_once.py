"""Exactly-once state: what became of each client's recent writes. Part of both state machines: flushed, copied, in
the checksum. Opens no files and reads no clock: time is that of the entries.

A client id has outcomes for its sequences at or above its lowest unfinished one. An id that was idle for `idle_us` when a
write or a ceiling is applied, or is pushed out by newer ones, is forgotten, and the expiry mark rises to the time it was
made; an id that is not known and was made at or below the mark is TOO_OLD, for ever: its outcome is unknown, never new.
So an id made in the future, once forgotten, would turn away all ids made before that time: leaders refuse those.

The rules of applying never change, so leaders bound what a client may add before they propose its write (`admit`).

What outcomes tell beyond "it was done" (which rows were refused and why, a value, a message) takes DETAILS_BYTES_MAX at most:
past it the oldest are forgotten, and a retry of such a write is TOO_OLD. That it came before is remembered all the same, so
what becomes of rows does not depend on this bound.

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
from stele.tablet.machine import Outcome

IDLE_US = 15 * 60 * 1_000_000
CLIENTS_MAX = 10_000
OUTCOMES_MAX = 65_536
"""Unfinished sequences of one client, when its writes are applied. Leaders admit fewer."""
UNFINISHED_MAX = 4_096
"""Unfinished sequences of one client that a leader admits: 1 MiB, at some 256 bytes each. Our clients have far fewer."""
OUTCOMES_ALL_MAX = 65_536
"""Outcomes of all clients, 16 MiB. At this number a leader admits an equal share to each."""
DETAILS_BYTES_MAX = 2 << 20
"""Of all clients, about as they are encoded: four blocks of 8,192 rows each of which was refused."""

_ROW_BYTES = 12
"""Of a row error, beside its message."""
_FORGOTTEN = (
    "this write came before; what became of its rows is no longer known, as many others were refused since: read, then write "
    "again"
)
_MASK = (1 << 64) - 1

_Runs = tuple[tuple[Code, str, "array[int]"], ...]
"""Row errors: the rows, ascending, of each code and message. A row has one error at most."""
_Kept = tuple[int, Outcome, _Runs]
"""The write's digest, and its outcome, the row errors of which stand in the runs."""


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
        self._newest: _Client | None = None  # the last of them
        self._none_idle_us = 0  # up to then nobody was idle for too long
        self._mark_us = 0
        self.outcomes = 0
        """How many outcomes are remembered, of all clients."""
        # (client id, sequence) of outcomes with details, in the order of their entries, and what they take.
        self._details: dict[tuple[bytes, int], int] = {}
        self._details_bytes = 0

    def admit(self, header: WriteHeader, wall_us: int, clock_error_us: int) -> None:
        """Called by a leader before it proposes a write. `clock_error_us`: how far clocks may be apart.

        A client that asks for too much is told alone. New ids push out nobody who wrote within twice the clock error: so
        the mark stays below what a clock that is behind by that error makes, however many ids come.

        Raises:
            Retryable: THROTTLED; later, or with a higher `lowest_unfinished`, it may be admitted.
        """
        client = self._clients.get(header.client_id)
        if client is not None:
            if len(client.outcomes) >= self._outcomes_each:
                self._admit_more(client, header)
        elif len(self._clients) >= self._clients_max and header.client_id != NO_CLIENT:
            oldest = next(iter(self._clients.values()))
            wait_us = oldest.last_us + 2 * clock_error_us - wall_us
            if wait_us > 0:
                raise Retryable(
                    f"{self._clients_max} client ids have just written to this tablet, and it takes no new client ids for "
                    "the moment; use one id for many writes",
                    code=Code.THROTTLED,
                    retry_after_ms=-(-wait_us // 1_000),
                )

    @property
    def _outcomes_each(self) -> int:
        if self.outcomes < self._outcomes_max:
            return UNFINISHED_MAX
        return min(UNFINISHED_MAX, max(1, self._outcomes_max // len(self._clients)))

    def _admit_more(self, client: _Client, header: WriteHeader) -> None:
        if header.sequence in client.outcomes or header.sequence <= header.lowest_unfinished:
            return  # nothing new; or what its client waits for before it lets go of those behind
        unfinished = sum(sequence >= header.lowest_unfinished for sequence in client.outcomes)
        if unfinished >= self._outcomes_each:
            raise Retryable(
                f"{unfinished} writes of this client id are unfinished, at or above its lowest unfinished sequence "
                f"{header.lowest_unfinished}: raise that once their outcomes are known",
                code=Code.THROTTLED,
            )

    def earlier(self, header: WriteHeader, timestamp: int) -> Outcome | None:
        """What a write that was seen before, or cannot be told from one, is answered; None: it is new.

        Called once per WRITE entry, in order; `timestamp` is the entry's.
        """
        if header.client_id == NO_CLIENT:
            return None
        now_us = physical_us(timestamp)
        if now_us > self._none_idle_us:
            self.expire(timestamp)
        client = self._clients.get(header.client_id)
        if client is None:
            if header.first_attempt_us <= self._mark_us:
                return _refused(
                    Code.TOO_OLD,
                    f"client id made at {header.first_attempt_us} µs, the expiry mark is {self._mark_us}: "
                    "whether this write was done before is not known; read, then write under a new client id",
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
            digest, outcome, runs = found
            if digest != header.digest:
                return _refused(
                    Code.DIGEST_MISMATCH,
                    f"sequence {header.sequence} was written before with digest {digest:016x}, now "
                    f"{header.digest:016x}; a sequence names one payload for ever",
                )
            return Outcome(
                outcome.timestamp,
                tuple(RowError(row, code, message) for row, code, message in _by_row(runs)),
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
        """Its client has taken all outcomes below `lowest`."""
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
        """Whether `earlier` would tell what became of this write, not whether it was one."""
        client = self._clients.get(header.client_id)
        return client is not None and header.sequence in client.outcomes

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
        runs: _Runs = ()
        if outcome.row_errors:
            runs = _runs([(e.row, e.code, e.message) for e in outcome.row_errors])
            outcome = Outcome(outcome.timestamp, (), outcome.value, outcome.code, outcome.message)
        client.outcomes[header.sequence] = (header.digest, outcome, runs)
        self._count(header.client_id, header.sequence, _details_bytes(outcome, runs))
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
        """Forget who was idle for too long at an entry's timestamp. For any entry above which all later ones are: the next
        write would forget the same clients first."""
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
        """The time, µs since 1970, past which an entry makes it forget all clients; None: there are none."""
        if not self._clients:
            return None
        return next(reversed(self._clients.values())).last_us + self._idle_us

    @property
    def clients(self) -> int:
        """How many client ids are remembered."""
        return len(self._clients)

    def frozen(self) -> tuple[int, list[tuple[bytes, int, int, int, list[tuple[int, _Kept]]]]]:
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
    def decode(
        data: bytes,
        *,
        idle_us: int = IDLE_US,
        clients_max: int = CLIENTS_MAX,
        details_bytes_max: int = DETAILS_BYTES_MAX,
        outcomes_max: int = OUTCOMES_ALL_MAX,
    ) -> ExactlyOnce:
        """The state that `encode` wrote. What an earlier program wrote may have more details than are kept.

        Raises:
            Corrupt: the bytes are no such state.
            Rejected: UNSUPPORTED_VERSION, an outcome has a code that this program does not know.
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
                    sequence, (outcome, runs) = int(raw_sequence), _outcome(raw, words)
                    kept[sequence] = (int(digest), outcome, runs)
                    sizes.append((outcome.timestamp, client_id, sequence, _details_bytes(outcome, runs)))
                state._clients[client_id] = _Client(first_us, last_us, lowest, kept)
                state.outcomes += len(kept)
        except (ValueError, TypeError, KeyError, OverflowError) as exc:
            raise Corrupt(f"exactly-once state: {exc!r}; expected what encode wrote") from exc
        for _, client_id, sequence, size in sorted(sizes, key=lambda found: found[0]):
            state._count(client_id, sequence, size)
        state._forget_details()
        return state


def encode(frozen: Any) -> bytes:
    """Bytes of `ExactlyOnce.frozen()`, JSON without spaces; equal states have equal bytes."""
    mark_us, clients = frozen
    rows = []
    for client_id, first, last, lowest, outcomes in clients:
        told = ",".join(f"[{s},{d},{_raw(outcome, runs)}]" for s, (d, outcome, runs) in outcomes)
        rows.append(f'["{client_id.hex()}",{first},{last},{lowest},[{told}]]')
    return f"[{mark_us},[{','.join(rows)}]]".encode()


def _parts(text: str) -> tuple[int, Iterator[Any]]:
    """(expiry mark, clients) of what `encode` wrote. A client at a time: an earlier program's may have many row errors."""
    comma = text.find(",[")
    if text[:1] != "[" or comma < 0 or text[-2:] != "]]":
        raise ValueError(f"{len(text)} characters from {text[:20]!r} to {text[-20:]!r}")
    return int(text[1:comma]), _clients(text, comma + 2, len(text) - 2)


def _clients(text: str, at: int, end: int) -> Iterator[Any]:
    while at < end:
        client, at = parse_next_json(text, at)
        yield client
        if at < end and text[at] != ",":
            raise ValueError(f"{text[at]!r} at {at}")
        at += 1


def _details_bytes(outcome: Outcome, runs: _Runs) -> int:
    """About what it takes, encoded, to tell more than that a write was done; nothing where that is forgotten."""
    if outcome.code is Code.TOO_OLD:
        return 0
    rows = sum(len(rows) * (len(message) + _ROW_BYTES) for _, message, rows in runs)
    return rows + len(outcome.message) + (0 if outcome.value is None else 2 * len(outcome.value))


def _runs(errors: Sequence[tuple[int, Code, str]]) -> _Runs:
    found: dict[tuple[Code, str], list[int]] = {}
    for row, code, message in errors:
        found.setdefault((code, message), []).append(row)
    return tuple((code, message, array("I", sorted(rows))) for (code, message), rows in found.items())


def _by_row(runs: _Runs) -> Iterator[tuple[int, Code, str]]:
    """Each row with its error, ascending."""
    errors = ((row, code, message) for code, message, rows in runs for row in rows)
    return errors if len(runs) < 2 else iter(sorted(errors, key=lambda error: error[0]))


def _raw(outcome: Outcome, runs: _Runs) -> str:
    ends = [(f",{int(code)},{json.dumps(message)}]", rows) for code, message, rows in runs]
    if len(ends) == 1:
        ((end, only),) = ends
        errors = "[" + f"{end},[".join(map(str, only)) + end
    else:
        each = sorted((row, end) for end, rows in ends for row in rows)
        errors = ",".join(f"[{row}{end}" for row, end in each)
    value = "null" if outcome.value is None else f'"{outcome.value.hex()}"'
    return f"[{outcome.timestamp},[{errors}],{value},{int(outcome.code)},{json.dumps(outcome.message)}]"


def _outcome(raw: list[Any], words: dict[str, str]) -> tuple[Outcome, _Runs]:
    """`words`: texts that were met before, each of which is kept once."""
    timestamp, errors, value, code, message = raw
    codes = {c: _code(c) for c in {c for _, c, _ in errors}}
    runs = _runs([(int(row), codes[c], words.setdefault(m, m)) for row, c, m in errors])
    told = None if value is None else bytes.fromhex(value)
    return Outcome(timestamp, (), told, _code(code), words.setdefault(message, message)), runs


def _code(number: int) -> Code:
    try:
        return Code(number)
    except ValueError:
        raise unknown_here("exactly-once state: code", number) from None


def _refused(code: Code, message: str) -> Outcome:
    return Outcome(code=code, message=message)

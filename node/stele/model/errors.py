"""Errors that cross package borders. Imported by every package; imports nothing of ours.

Four kinds say who is wrong: `Retryable` (nobody: try again), `Rejected` (the caller or a peer), `Corrupt` (a
disk), `InvariantViolation` (we are: stop). Each carries a `Code`. Three places map it: the rpc layer to a
gRPC status, the command line to an exit code, the operator to a condition.

A message says what happened, to what, what was expected, and what to do.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class Code(IntEnum):
    """What went wrong, as it travels on the wire. Numbers are never used again. It prints as its name.

    Example:
        >>> print(stele.Code.NOT_FOUND)
        NOT_FOUND
    """

    __format__ = Enum.__format__  # formats with __str__; IntEnum would print the number

    OK = 0
    # Retryable
    NOT_LEADER = 1
    NO_QUORUM = 2  # never proposed: safe to send again under any id
    THROTTLED = 3
    NOT_READY = 4  # bootstrapping, configuring, catalog loading
    TIMED_OUT = 5
    STEPPING_DOWN = 6
    UNAVAILABLE = 7  # no connection
    UNKNOWN_OUTCOME = 8  # proposed; retry only with the same client id and sequence
    SNAPSHOT_NOT_READY = 9
    DISK_FULL = 10
    # Rejected
    INVALID_ARGUMENT = 20
    NOT_FOUND = 21
    ALREADY_PRESENT = 22
    CAS_FAILED = 23
    WRONG_CLUSTER = 24
    WRONG_NODE = 25
    STALE_EPOCH = 26
    STALE_INCARNATION = 27
    TOO_LARGE = 28
    SCHEMA_MISMATCH = 29
    TOO_OLD = 30  # client sequence below the expiry mark: outcome unknown, never new
    DIGEST_MISMATCH = 31
    SNAPSHOT_TOO_OLD = 32
    CLOCK_AHEAD = 33
    UNSAFE_CHANGE = 34
    UNSUPPORTED_VERSION = 35
    TABLET_DELETED = 36
    PERMISSION_DENIED = 37
    CHANGE_IN_PROGRESS = 38
    VOLUME_OLD = 39  # the caller runs on an older copy of its volume and lost what it once reported
    CLOSED = 40  # never sent: the caller closed its client
    CLOCK_BEHIND = 41  # the caller's clock is late, so its client ids are too old
    CURSOR_LOST = 42  # changes were asked for that history no longer has
    JOB_TOO_OLD = 43  # a tablet no longer knows what earlier attempts of this job have written
    COMPACTED = 44  # a watch asks for changes that the key space no longer keeps
    LEASE_LOST = 45  # a lease of a key space has expired, or was revoked
    # Corrupt
    CORRUPT = 50
    IO_ERROR = 51
    # InvariantViolation
    INTERNAL = 60

    def __str__(self) -> str:
        return self.name


class Advice(Enum):
    """What to do next, where the words depend on the reader. These words are for users of the Python client.

    The command line has its own (stele.cli.errors). `{name}` stands for the thing that the error is about."""

    LIST_TABLES = "list_tables() shows the existing ones"
    LIST_DROPPED = "dropped_tables() shows those that can be recalled"
    CREATE_KEYSPACE = "create it with create_keyspace({name!r})"
    OPEN_TABLE = "open it with open_table({name!r})"
    OPEN_KEYSPACE = "open it with keyspace({name!r})"
    CHECK_MASTERS = "check the addresses of the masters"
    RESTORE_AS = "choose another name, with tables={{{name!r}: NEW}}, or rename what exists first"
    NAME_MASTERS = "pass the HOST:PORT of some of them"


class SteleError(Exception):
    """Base of all errors that Stele raises on purpose. `args[0]` is the message without the advice.

    The advice is not sent to other processes. `retry_after_ms`: a retry before that time cannot succeed; 0:
    unknown.

    Example:
        >>> try:
        ...     client.open_table("reading")
        ... except stele.SteleError as error:
        ...     error.code is stele.Code.NOT_FOUND
        True
    """

    default_code = Code.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        advice: Advice | None = None,
        name: str = "",
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = self.default_code if code is None else code
        self.retry_after_ms = retry_after_ms
        self.advice = advice
        self.name = name

    def __str__(self) -> str:
        next_step = f"; {self.advice.value.format(name=self.name)}" if self.advice else ""
        return f"{self.code.name}: {self.args[0]}{next_step}"


class Retryable(SteleError):
    """Nobody is wrong. The same request may succeed later or elsewhere.

    Example:
        >>> row = {"day": date(2024, 5, 7), "name": "roof", "value": 15.0}
        >>> while True:
        ...     try:
        ...         written_at = table.put(row)
        ...         break
        ...     except stele.Retryable:  # a put may be repeated, also after UNKNOWN_OUTCOME
        ...         time.sleep(0.1)
    """

    default_code = Code.UNAVAILABLE


class NotLeader(Retryable):
    """The replica that was asked is not the leader. `leader_hint`: the leader's node id; "" if unknown."""

    default_code = Code.NOT_LEADER

    def __init__(self, message: str, *, leader_hint: str = "") -> None:
        super().__init__(message)
        self.leader_hint = leader_hint


class Rejected(SteleError):
    """The caller or a peer is wrong. The same request will fail again.

    Example:
        >>> try:
        ...     table.put({"day": date(2024, 5, 1), "nam": "roof"})
        ... except stele.Rejected as error:
        ...     print(error.code)
        INVALID_ARGUMENT
    """

    default_code = Code.INVALID_ARGUMENT


class StartRefused(Rejected):
    """A master refuses a node's start: STALE_INCARNATION or VOLUME_OLD. `master` is the master's node id.

    `masters`: how many masters there are; 0 if the master does not know. `newest`: the newest incarnation of
    the node that the master knows."""

    def __init__(
        self, message: str, *, code: Code, master: str = "", masters: int = 0, newest: int = 0
    ) -> None:
        super().__init__(message, code=code)
        self.master = master
        self.masters = masters
        self.newest = newest


class Closed(Rejected):
    """The program closed this client. No call through it will succeed any more.

    Example:
        >>> other = stele.connect(masters)
        >>> other.close()
        >>> try:
        ...     other.open_table("readings")
        ... except stele.Closed:
        ...     print("closed")
        closed
    """

    default_code = Code.CLOSED

    def __init__(self, message: str = "this client was closed; create another one") -> None:
        super().__init__(message)


class Corrupt(SteleError):
    """Bytes on a disk, or received, differ from what was written.

    Example:
        >>> issubclass(stele.Corrupt, stele.SteleError)
        True
    """

    default_code = Code.CORRUPT


class InvariantViolation(SteleError):
    """Stele itself is wrong. The process or replica must stop.

    Example:
        >>> issubclass(stele.InvariantViolation, stele.SteleError)
        True
    """

    default_code = Code.INTERNAL


_RETRYABLE_BELOW = Code.INVALID_ARGUMENT
_REJECTED_BELOW = Code.CORRUPT
_CORRUPT_BELOW = Code.INTERNAL


def of_later_program(error: Exception) -> bool:
    """Whether a file or message is whole, but has a version that only a later release knows."""
    return isinstance(error, SteleError) and error.code is Code.UNSUPPORTED_VERSION


def unknown_here(what: str, number: object) -> SteleError:
    """A Rejected (UNSUPPORTED_VERSION) for a number or name that only a later release knows. The bytes are
    whole."""
    return Rejected(f"{what} {number} is unknown to this program; upgrade it", code=Code.UNSUPPORTED_VERSION)


def no_outcome(deadline_ms: int) -> SteleError:
    """Return the error for a submitted write whose caller stops waiting. The write may still be committed."""
    return Retryable(
        f"no outcome within {deadline_ms} ms; send it again with the same client id and sequence",
        code=Code.UNKNOWN_OUTCOME,
    )


def error_for(code: Code, message: str) -> SteleError:
    """The exception for a code received from the wire."""
    if code is Code.NOT_LEADER:
        return NotLeader(message)
    if code < _RETRYABLE_BELOW:
        return Retryable(message, code=code)
    if code < _REJECTED_BELOW:
        return Rejected(message, code=code)
    if code < _CORRUPT_BELOW:
        return Corrupt(message, code=code)
    return InvariantViolation(message, code=code)


def let_go(error: BaseException) -> None:
    """Drop the tracebacks of an error that is answered or passed on.

    A traceback's frames refer to large values, such as blocks. A frame, or a future that it waited for, often
    refers to the error in turn. Only the garbage collector frees such a cycle, and a node runs it seldom.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))


def ensure(condition: bool, why: str) -> None:
    """A cheap invariant that stays on in production.

    Raises:
        InvariantViolation: if `condition` is false.
    """
    if not condition:
        raise InvariantViolation(why)

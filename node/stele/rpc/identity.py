"""Who speaks to whom: checked on every unary call (metadata) and on the first message of every stream (Hello).

Owns the newest start and address of each node, by the masters' word and by what nodes say of themselves. Invariant: a
call that names another cluster, another node, an unknown protocol or an earlier start of its node is refused before its
body is looked at, and no caller can shut out a node that the masters hear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stele.model import bounds
from stele.model.errors import Code, Rejected
from stele.model.ids import ClusterId, NodeId
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import common_pb2

PROTOCOL_VERSION = 1
NO_CLUSTER = ClusterId("")
NO_NODE = NodeId("")

CLUSTER_KEY = "stele-cluster"
PROTOCOL_KEY = "stele-protocol"
FROM_NODE_KEY = "stele-from-node"
FORK_KEY = "stele-fork"
TO_NODE_KEY = "stele-to-node"
FROM_INCARNATION_KEY = "stele-from-incarnation"
TO_INCARNATION_KEY = "stele-to-incarnation"


@dataclass(frozen=True, slots=True)
class Caller:
    """What a caller says of itself and of whom it wants. Empty or 0: not said."""

    cluster_id: str
    protocol_version: int
    from_node: str
    to_node: str
    from_incarnation: int
    to_incarnation: int
    from_address: str = ""
    channel: str = ""
    fork_id: str | None = None
    """None: not said. A client may not know it yet; a node of a release without fork ids runs as formed, which is ""."""


@dataclass(slots=True)
class Identity:
    """This process. A client has no node id, and no cluster id until a server told it.

    `fork_id`: which copy of the cluster's volumes it belongs to; "" as the cluster was formed, None: a client that does not
    know it yet.
    """

    cluster_id: ClusterId = NO_CLUSTER
    node_id: NodeId = NO_NODE
    incarnation: int = 0
    address: str = ""
    fork_id: str | None = None

    def metadata(self, to_node: str = "", to_incarnation: int = 0) -> tuple[tuple[str, str], ...]:
        """Metadata for a unary call to `to_node` ("": whoever answers)."""
        pairs = [(PROTOCOL_KEY, str(PROTOCOL_VERSION))]
        if self.cluster_id:
            pairs.append((CLUSTER_KEY, self.cluster_id))
        if self.fork_id is not None:
            pairs.append((FORK_KEY, self.fork_id))
        if self.node_id:
            pairs.append((FROM_NODE_KEY, self.node_id))
            pairs.append((FROM_INCARNATION_KEY, str(self.incarnation)))
        if to_node:
            pairs.append((TO_NODE_KEY, to_node))
        if to_incarnation:
            pairs.append((TO_INCARNATION_KEY, str(to_incarnation)))
        return tuple(pairs)

    def hello(self, to_node: str = "", to_incarnation: int = 0, channel: str = "") -> common_pb2.Hello:
        """The first message of a stream to `to_node`, or the answer to one."""
        return common_pb2.Hello(
            cluster_id=id_to_pb(self.cluster_id),
            protocol_version=PROTOCOL_VERSION,
            from_node=id_to_pb(self.node_id),
            to_node=id_to_pb(to_node),
            from_incarnation=self.incarnation,
            to_incarnation=to_incarnation,
            from_address=self.address,
            channel=channel,
            fork_id=self.fork_id,
        )


def caller_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
    """What the metadata of a call say.

    Raises:
        Rejected: UNSUPPORTED_VERSION without a protocol version, INVALID_ARGUMENT for a number that is none.
    """
    fields = {key: value for key, value in metadata if isinstance(value, str)}
    if PROTOCOL_KEY not in fields:
        raise Rejected(
            f"call without the metadata {PROTOCOL_KEY}; expected {PROTOCOL_KEY}: {PROTOCOL_VERSION}",
            code=Code.UNSUPPORTED_VERSION,
        )

    def number(key: str) -> int:
        text = fields.get(key, "0")
        found = bounds.digits(text)
        if found is None:
            raise Rejected(
                f"metadata {key}: {text[:40]!r} is no number; expected 1 to {bounds.NUMBER_DIGITS_MAX} digits"
            )
        return found

    return Caller(
        cluster_id=fields.get(CLUSTER_KEY, ""),
        protocol_version=number(PROTOCOL_KEY),
        from_node=fields.get(FROM_NODE_KEY, ""),
        to_node=fields.get(TO_NODE_KEY, ""),
        from_incarnation=number(FROM_INCARNATION_KEY),
        to_incarnation=number(TO_INCARNATION_KEY),
        fork_id=fields.get(FORK_KEY),
    )


def caller_from_hello(hello: common_pb2.Hello) -> Caller:
    """What a Hello says. Raises `Rejected` for identifiers that are none."""
    return Caller(
        cluster_id=id_from_pb(hello.cluster_id),
        protocol_version=hello.protocol_version,
        from_node=id_from_pb(hello.from_node),
        to_node=id_from_pb(hello.to_node),
        from_incarnation=hello.from_incarnation,
        to_incarnation=hello.to_incarnation,
        from_address=hello.from_address,
        channel=hello.channel,
        fork_id=hello.fork_id if hello.HasField("fork_id") else None,
    )


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class PeerBook:
    """Where each node is, and which start of it is the newest. One per process.

    What a node says of itself proves little: anybody may say it in its name. So the masters' word, where there is one,
    decides which earlier starts are refused. A node's own word decides that only of nodes that no master has told of yet.
    A start that is later than the masters' newest is dialled where it says it is, for bounds.HEARD_ADDRESS_MS after it last
    said so: a true start tells the masters within a heartbeat, a forged one is forgotten.
    """

    __slots__ = ("_heard", "_now_ms", "_told")

    def __init__(self, now_ms: Callable[[], int] = wall_ms) -> None:
        self._now_ms = now_ms
        self._told: dict[str, tuple[int, str]] = {}
        self._heard: dict[str, tuple[int, str, int]] = {}  # incarnation, address, when in ms

    def told(self, node_id: str, incarnation: int, address: str) -> None:
        """Take note of what the masters say of a node; the newest word counts, also a lower incarnation."""
        self._told[node_id] = incarnation, address

    def observe(self, node_id: str, incarnation: int, address: str) -> None:
        """Take note of where a node says it is; a lower incarnation than one already heard changes nothing.

        Raises:
            Rejected: INVALID_ARGUMENT, an incarnation that no start of this node can have reached.
        """
        heard, known, _ = self._heard.get(node_id, (0, "", 0))
        highest = self._highest(node_id, heard)
        if incarnation > highest:
            raise Rejected(
                f"node {node_id} speaks as incarnation {incarnation}; {highest} is the most that it can have reached. "
                "Somebody else speaks in its name, or the clock was wrong when its volume was formatted"
            )
        if incarnation < heard:
            return
        if node_id not in self._heard and len(self._heard) >= bounds.PEERS_HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        self._heard[node_id] = incarnation, address or known, self._now_ms()

    def _highest(self, node_id: str, heard: int) -> int:
        """The highest incarnation that is believed of a node now."""
        known = self._told.get(node_id, (0, ""))[0] or heard
        if not known:
            return bounds.INCARNATION_MAX
        formatted_anew = self._now_ms() + bounds.INCARNATION_AHEAD_MAX_MS
        return max(known + bounds.INCARNATION_JUMP_MAX, formatted_anew)

    def incarnation(self, node_id: str) -> int:
        """The newest start of this node, earlier ones of which are refused; 0 if none is known."""
        return self._told.get(node_id, (0, ""))[0] or self._heard.get(node_id, (0, "", 0))[0]

    def address(self, node_id: str) -> str:
        """Where the newest start that anybody knows of is, "" if it never said. The masters' word counts once a later start has
        been silent for bounds.HEARD_ADDRESS_MS."""
        told_incarnation, told_address = self._told.get(node_id, (0, ""))
        incarnation, heard_address, heard_ms = self._heard.get(node_id, (0, "", 0))
        if incarnation > told_incarnation and self._now_ms() - heard_ms < bounds.HEARD_ADDRESS_MS:
            return heard_address or told_address
        return told_address or heard_address


def ensure_same_fork(identity: Identity, fork_id: str | None, *, of_node: bool) -> None:
    """Refuse who belongs to another copy of this cluster's volumes. None: not said, see `Caller.fork_id`.

    Raises:
        Rejected: WRONG_CLUSTER.
    """
    said = "" if fork_id is None and of_node else fork_id
    here = identity.fork_id or ""
    if said is not None and said != here:
        raise Rejected(
            f"this is {_copy(here)} of the volumes of cluster {identity.cluster_id}, the caller belongs to "
            f"{_copy(said)}; two copies of a cluster never speak to each other: check the address that was dialled, and "
            "--fork-id",
            code=Code.WRONG_CLUSTER,
        )


def _copy(fork_id: str) -> str:
    return f"copy {fork_id[:40]}" if fork_id else "the original"


def check(identity: Identity, book: PeerBook, caller: Caller, *, earlier_too: bool = False) -> None:
    """Refuse a caller that is not of this cluster, does not mean this node, or was replaced by a later start
    (`earlier_too`: whoever is called judges that).

    On return the caller's incarnation and address are in `book`.

    Raises:
        Rejected: UNSUPPORTED_VERSION, WRONG_CLUSTER, WRONG_NODE, STALE_INCARNATION, or INVALID_ARGUMENT for an
            incarnation that is not believed.
    """
    if caller.protocol_version != PROTOCOL_VERSION:
        raise Rejected(
            f"protocol version {caller.protocol_version} is unknown here, this program speaks {PROTOCOL_VERSION}; "
            "upgrade the older side",
            code=Code.UNSUPPORTED_VERSION,
        )
    known = caller.cluster_id or not caller.from_node
    if not known or (caller.cluster_id and caller.cluster_id != identity.cluster_id):
        raise Rejected(
            f"this is cluster {identity.cluster_id}, the caller belongs to {caller.cluster_id or 'none'}; "
            "check the address it dialled",
            code=Code.WRONG_CLUSTER,
        )
    ensure_same_fork(identity, caller.fork_id, of_node=bool(caller.from_node))
    if caller.to_node and caller.to_node != identity.node_id:
        raise Rejected(
            f"this is node {identity.node_id}, the caller wants {caller.to_node}; its address has changed owners",
            code=Code.WRONG_NODE,
        )
    if caller.to_incarnation > identity.incarnation:
        raise Rejected(
            f"the caller has met incarnation {caller.to_incarnation} of node {identity.node_id}, this is "
            f"{identity.incarnation}: an older copy of its volume is running; stop one of them",
            code=Code.STALE_INCARNATION,
        )
    if not caller.from_node:
        return
    seen = book.incarnation(caller.from_node)
    if caller.from_incarnation < seen and not earlier_too:
        raise Rejected(
            f"node {caller.from_node} speaks as incarnation {caller.from_incarnation}, {seen} was already seen; "
            "a later start of it is running",
            code=Code.STALE_INCARNATION,
        )
    book.observe(caller.from_node, caller.from_incarnation, caller.from_address)

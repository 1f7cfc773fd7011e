"""Checks caller and callee on every unary call (metadata) and on the first message of every stream (Hello).

Knows the newest start and address of each node, from the masters and from the nodes. Invariant: a call for
another cluster or node, of an unknown protocol, or of an earlier start of its node is refused. That happens
before its body is read. No caller can shut out a node that the masters hear.
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
    """What a caller reports of itself and of the node that it wants. Empty or 0: not given."""

    cluster_id: str
    protocol_version: int
    from_node: str
    to_node: str
    from_incarnation: int
    to_incarnation: int
    from_address: str = ""
    channel: str = ""
    fork_id: str | None = None
    """None: not said. A client may not know it yet. A node of a release without fork ids counts as "", the
    original."""


@dataclass(frozen=True, slots=True)
class Identity:
    """This process. A client has no node id, and no cluster id until a server told it (`ChannelPool.identity`).

    `fork_id`: the copy of the cluster's volumes that it belongs to; "" for the original; None: a client does
    not know it yet.
    """

    cluster_id: ClusterId = NO_CLUSTER
    node_id: NodeId = NO_NODE
    incarnation: int = 0
    fork_id: str | None = None

    def metadata(self, to_node: str = "", to_incarnation: int = 0) -> tuple[tuple[str, str], ...]:
        """Return the metadata for a unary call to `to_node`; "" for any node that answers."""
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

    def hello(
        self, to_node: str = "", to_incarnation: int = 0, channel: str = "", address: str = ""
    ) -> common_pb2.Hello:
        """Return the first message of a stream to `to_node`, or the answer to one. `address`: where this
        process listens."""
        return common_pb2.Hello(
            cluster_id=id_to_pb(self.cluster_id),
            protocol_version=PROTOCOL_VERSION,
            from_node=id_to_pb(self.node_id),
            to_node=id_to_pb(to_node),
            from_incarnation=self.incarnation,
            to_incarnation=to_incarnation,
            from_address=address,
            channel=channel,
            fork_id=self.fork_id,
        )


def caller_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
    """Parse the caller from a call's metadata.

    Raises:
        Rejected: UNSUPPORTED_VERSION without a protocol version; INVALID_ARGUMENT for an invalid number.
    """
    fields = {key: value for key, value in metadata if isinstance(value, str)}
    if PROTOCOL_KEY not in fields:
        raise Rejected(
            f"the call lacks the metadata {PROTOCOL_KEY}; expected {PROTOCOL_KEY}: {PROTOCOL_VERSION}",
            code=Code.UNSUPPORTED_VERSION,
        )

    def number(key: str) -> int:
        text = fields.get(key, "0")
        found = bounds.digits(text)
        if found is None:
            raise Rejected(
                f"metadata {key}: {text[:40]!r} is not a number; expected 1 to {bounds.NUMBER_DIGITS_MAX} "
                f"digits"
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
    """Parse the caller from a Hello. Raises `Rejected` for invalid identifiers."""
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
    """Return the wall clock in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class PeerBook:
    """Where each node is, and which start of it is the newest. One per process.

    Anybody can speak in a node's name, so what a node says of itself proves little. If the masters know a
    node, only their data decides which earlier starts are refused. Otherwise the node's own word decides. A
    start newer than the masters know is dialled at its own address, for bounds.HEARD_ADDRESS_MS after it last
    spoke. A true start reaches the masters within a heartbeat; a forged one is forgotten.
    """

    __slots__ = ("_heard", "_now_ms", "_told")

    def __init__(self, now_ms: Callable[[], int] = wall_ms) -> None:
        self._now_ms = now_ms
        self._told: dict[str, tuple[int, str]] = {}
        self._heard: dict[str, tuple[int, str, int]] = {}  # incarnation, address, when in ms

    def told(self, node_id: str, incarnation: int, address: str) -> None:
        """Record what the masters say of a node. Their latest answer counts, even if its incarnation is
        lower."""
        self._told[node_id] = incarnation, address

    def observe(self, node_id: str, incarnation: int, address: str) -> None:
        """Record where a node says it is. An incarnation lower than one already heard changes nothing.

        Raises:
            Rejected: INVALID_ARGUMENT: no start of this node can have this incarnation.
        """
        heard, known, _ = self._heard.get(node_id, (0, "", 0))
        highest = self._highest(node_id, heard)
        if incarnation > highest:
            raise Rejected(
                f"node {node_id[:8]} speaks as incarnation {incarnation}, but can have reached at most "
                f"{highest}; "
                "another process speaks in its name, or the clock was wrong when its volume was formatted"
            )
        if incarnation < heard:
            return
        self._heard.pop(node_id, None)  # the one heard longest ago comes first
        if len(self._heard) >= bounds.PEERS_HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        self._heard[node_id] = incarnation, address or known, self._now_ms()

    def _highest(self, node_id: str, heard: int) -> int:
        """The highest incarnation of a node that is plausible now."""
        known = self._told.get(node_id, (0, ""))[0] or heard
        if not known:
            return bounds.INCARNATION_MAX
        formatted_anew = self._now_ms() + bounds.INCARNATION_AHEAD_MAX_MS
        return max(known + bounds.INCARNATION_JUMP_MAX, formatted_anew)

    def incarnation(self, node_id: str) -> int:
        """The incarnation that a node is known to have; 0 if none is known. Calls of lower ones are refused.

        It is what the masters said last, or else the highest that was heard from the node."""
        return self._told.get(node_id, (0, ""))[0] or self._heard.get(node_id, (0, "", 0))[0]

    def address(self, node_id: str) -> str:
        """The address of the newest known start; "" if it is not known.

        The masters' address counts again once a later start was silent for bounds.HEARD_ADDRESS_MS."""
        told_incarnation, told_address = self._told.get(node_id, (0, ""))
        incarnation, heard_address, heard_ms = self._heard.get(node_id, (0, "", 0))
        if incarnation > told_incarnation and self._now_ms() - heard_ms < bounds.HEARD_ADDRESS_MS:
            return heard_address or told_address
        return told_address or heard_address


def ensure_same_fork(identity: Identity, fork_id: str | None, *, of_node: bool) -> None:
    """Refuse a caller of another copy of this cluster's volumes. `fork_id`: the caller's; None: it named none.

    `of_node`: the caller is a node or master. If it names none, it belongs to the original volumes.

    Raises:
        Rejected: WRONG_CLUSTER.
    """
    said = "" if fork_id is None and of_node else fork_id
    here = identity.fork_id or ""
    if said is not None and said != here:
        raise Rejected(
            f"this is {_copy(here)} of the volumes of cluster {identity.cluster_id[:8]}, but the caller belongs "
            f"to {_copy(said)}; two copies of a cluster never speak to each other: check the address that "
            "was dialled, and --fork-id",
            code=Code.WRONG_CLUSTER,
        )


def _copy(fork_id: str) -> str:
    return f"copy {fork_id[:8]}" if fork_id else "the original"


def check(identity: Identity, book: PeerBook, caller: Caller, *, earlier_too: bool = False) -> None:
    """Refuse a caller of another cluster, one that wants another node, or one that a later start has
    replaced.

    `earlier_too`: accept an earlier start, because the called method judges that.

    On return the caller's incarnation and address are in `book`.

    Raises:
        Rejected: UNSUPPORTED_VERSION, WRONG_CLUSTER, WRONG_NODE, STALE_INCARNATION, or INVALID_ARGUMENT for
            an implausible incarnation.
    """
    if caller.protocol_version != PROTOCOL_VERSION:
        raise Rejected(
            f"protocol version {caller.protocol_version} is unknown here; this program speaks "
            f"{PROTOCOL_VERSION}; upgrade the older side",
            code=Code.UNSUPPORTED_VERSION,
        )
    known = caller.cluster_id or not caller.from_node
    if not known or (caller.cluster_id and caller.cluster_id != identity.cluster_id):
        raise Rejected(
            f"this is cluster {identity.cluster_id[:8]}, but the caller belongs to "
            f"{caller.cluster_id[:8] or 'none'}; check the address that it dialled",
            code=Code.WRONG_CLUSTER,
        )
    ensure_same_fork(identity, caller.fork_id, of_node=bool(caller.from_node))
    if caller.to_node and caller.to_node != identity.node_id:
        raise Rejected(
            f"this is node {identity.node_id[:8]}, but the caller wants {caller.to_node[:8]}; "
            "the address now belongs to another node",
            code=Code.WRONG_NODE,
        )
    if caller.to_incarnation > identity.incarnation:
        raise Rejected(
            f"the caller has met incarnation {caller.to_incarnation} of node {identity.node_id[:8]}, but this is "
            f"{identity.incarnation}: an older copy of its volume is running; stop one of them",
            code=Code.STALE_INCARNATION,
        )
    if not caller.from_node:
        return
    seen = book.incarnation(caller.from_node)
    if caller.from_incarnation < seen and not earlier_too:
        raise Rejected(
            f"node {caller.from_node[:8]} speaks as incarnation {caller.from_incarnation}, but {seen} was "
            "already seen; a later start of it is running: stop the earlier one",
            code=Code.STALE_INCARNATION,
        )
    book.observe(caller.from_node, caller.from_incarnation, caller.from_address)

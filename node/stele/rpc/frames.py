"""Several messages in one, put together from messages that are encoded already: a message costs 55 to 250 µs in gRPC
whatever its size, and less over TCP, but more than its bytes. Called by both halves of both streams.

Invariant: what is built here is exactly what protobuf would write.
"""

from __future__ import annotations

from collections import deque

from stele.rpc.proto import consensus_pb2, tserver_pb2

LENGTH_BYTES = 4
"""How long the length before each frame is."""
FRAME_BYTES = 1 << 20
"""No message is added to a frame that has come to this; one larger message fills a frame of its own."""
REQUESTS_MAX = 4_096
"""So many requests of a client leave in one frame at most: each costs a node far more than the bytes it may consist of."""


def _tag(descriptor: object, field: str) -> bytes:
    number: int = descriptor.fields_by_name[field].number  # type: ignore[attr-defined]
    return bytes([number << 3 | 2])  # wire type 2: length-delimited


_PEER_MESSAGE = _tag(consensus_pb2.PeerFrame.DESCRIPTOR, "messages")
_REQUEST = _tag(tserver_pb2.ClientRequests.DESCRIPTOR, "requests")
_REQUESTS = _tag(tserver_pb2.ClientRequest.DESCRIPTOR, "many")
_RESPONSE = _tag(tserver_pb2.ClientResponses.DESCRIPTOR, "responses")
_RESPONSES = _tag(tserver_pb2.ClientResponse.DESCRIPTOR, "many")


def frame(body: bytes) -> bytes:
    """What carries `body` over TCP (see stele.rpc.connection)."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def peer_frame(messages: deque[bytes]) -> bytes:
    """A frame for TCP with a PeerFrame of as many encoded ConsensusMessages as fit, one at least; they leave the queue."""
    return _framed(_parts(messages, _PEER_MESSAGE, len(messages)))


def client_requests(requests: deque[bytes]) -> bytes:
    """A frame with one ClientRequest of as many encoded ones as fit, one at least; they leave the queue."""
    return _wrapped(requests, _REQUEST, _REQUESTS)


def client_responses(responses: deque[bytes]) -> bytes:
    """A frame with one ClientResponse of as many encoded ones as fit, one at least; they leave the queue."""
    return _wrapped(responses, _RESPONSE, _RESPONSES)


def _wrapped(queue: deque[bytes], inner: bytes, outer: bytes) -> bytes:
    if len(queue) == 1 or len(queue[0]) >= FRAME_BYTES:
        return frame(queue.popleft())
    parts = _parts(queue, inner, REQUESTS_MAX)
    return _framed([outer + _varint(_size(parts)), *parts])


def _framed(parts: list[bytes]) -> bytes:
    return b"".join((_size(parts).to_bytes(LENGTH_BYTES, "big"), *parts))


def _size(parts: list[bytes]) -> int:
    size = 0
    for part in parts:
        size += len(part)
    return size


def _parts(queue: deque[bytes], tag: bytes, at_most: int) -> list[bytes]:
    parts: list[bytes] = []
    size = 0
    while queue and (not parts or (size + len(queue[0]) < FRAME_BYTES and len(parts) < 2 * at_most)):
        raw = queue.popleft()
        head = tag + _varint(len(raw))
        parts.append(head)
        parts.append(raw)
        size += len(head) + len(raw)
    return parts


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

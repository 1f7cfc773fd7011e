"""Frames between peers, put together from messages that are encoded already. Called by peers.py.

Invariant: what `append_message` builds is exactly what protobuf would write for PeerFrame.messages.
"""

from __future__ import annotations

from stele.rpc.proto import consensus_pb2

FRAME_BYTES = 1 << 20
"""No message is added to a frame that has come to this; one larger message fills a frame of its own."""

_FIELD = consensus_pb2.PeerFrame.DESCRIPTOR.fields_by_name["messages"].number
_TAG = bytes([_FIELD << 3 | 2])  # wire type 2: length-delimited


def append_message(parts: list[bytes], raw: bytes) -> int:
    """Add an encoded ConsensusMessage to the parts of a frame. Returns the bytes it adds."""
    head = _TAG + _varint(len(raw))
    parts.append(head)
    parts.append(raw)
    return len(head) + len(raw)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

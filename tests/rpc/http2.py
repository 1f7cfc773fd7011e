"""HTTP/2 by hand, for senders that no library would be: a gRPC call whose message comes as the test likes."""

from __future__ import annotations

_DATA, _HEADERS, _SETTINGS, _END_HEADERS = 0, 1, 4, 4


def opening(path: str, message_bytes: int) -> bytes:
    """A connection's first bytes, and a call of `path` that promises a message of this size. Then `data` follows."""
    names = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in names.items())
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b"")
    promise = b"\0" + message_bytes.to_bytes(4, "big")
    return preface + _frame(_HEADERS, _END_HEADERS, 1, headers) + _frame(_DATA, 0, 1, promise)


def data(size_bytes: int) -> bytes:
    """More of the message; at most 16 KiB."""
    return _frame(_DATA, 0, 1, bytes(size_bytes))


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

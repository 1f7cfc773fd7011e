"""`python -m tests.rpc.senders PORT PATH COUNT BYTES [METADATA]`: so many unary calls with such a message at once, in a process
of its own. Prints one line of JSON: how often each status came.

It ends without closing a channel. gRPC's client breaks when one is closed under a message that is half sent: "Mutex corrupt",
or a segmentation fault, in a thread of its own (grpcio 1.85.1, seen in a process that had nothing of ours but this).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
Metadata = tuple[tuple[str, str], ...]


def _call(channel: grpc.Channel, path: str, body: bytes, metadata: Metadata) -> str:
    try:
        channel.unary_unary(path)(body, timeout=60, metadata=metadata)
    except grpc.RpcError as exc:
        return str(exc.code().name)  # type: ignore[attr-defined]
    return "OK"


def main(port: str, path: str, count: str, size_bytes: str, metadata: str = "[]") -> None:
    body, told = b"\x12" + bytes(int(size_bytes)), tuple((key, value) for key, value in json.loads(metadata))
    channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) for _ in range(int(count))]
    with ThreadPoolExecutor(len(channels)) as threads:
        ends = [threads.submit(_call, channel, path, body, told) for channel in channels]
        print(json.dumps(Counter(end.result() for end in ends)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

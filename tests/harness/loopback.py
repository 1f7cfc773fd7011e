"""Loopback networks for clusters, each in one use at a time. Called by whoever starts one.

Invariant: a /24 belongs to its owner for as long as that lives, or a process that was given its claim; also against other
test processes of this machine.
"""

from __future__ import annotations

import os
import random
import socket
import weakref

_SECONDS = range(1, 20)
"""127.1.0.0 to 127.19.255.0: stele-local and the benches use others."""
_TRIES = 1_000


class Loopback:
    """A /24 of loopback, held by an abstract socket, which the kernel lets go with its last descriptor.

    `prefix` is its first three numbers, "127.3.77"; `claim` the descriptor, for processes that outlive this one.

    Raises:
        OSError: all that were tried are taken.
    """

    def __init__(self, chosen: random.Random | None = None) -> None:
        chosen = chosen or random.SystemRandom()
        for _ in range(_TRIES):
            prefix = f"127.{chosen.choice(_SECONDS)}.{chosen.randrange(256)}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
                try:
                    holder.bind(name_of(prefix))
                except OSError:
                    continue
                self.prefix = prefix
                self.claim = holder.detach()
            self.free = weakref.finalize(self, os.close, self.claim)
            return
        raise OSError(f"{_TRIES} loopback networks were tried, and all are taken by other tests")


def name_of(prefix: str) -> str:
    """The abstract socket that stands for a network."""
    return f"\0stele-tests-{prefix}"

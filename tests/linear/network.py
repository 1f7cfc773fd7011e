"""Cuts between chosen members of a cluster, one way or both, by rules of the kernel's packet filter (nft).

All members share the loopback device, and a connection's source would be 127.0.0.1 whoever opened it. So each member
runs in a group of its own, and its connections are given its own address as their source. Then packets have two ends.

Owns one table of rules, named after the cluster's network. Invariant: the table goes when the `with` ends, and its rules
name no address outside of that network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from types import TracebackType

from tests.harness.processes import Cluster, Member

Cut = tuple[str, str]
"""(from host, to host): what the first sends to the second is dropped."""

CLIENTS = "127.0.0.1"


def unavailable() -> str:
    """Why networks cannot be cut here; "" if they can."""
    if os.geteuid() != 0:
        return "cutting the network needs root"
    if shutil.which("nft") is None:
        return "cutting the network needs nft (package nftables)"
    probe = f"stele_probe_{os.getpid()}"
    rules = (
        f"add table inet {probe}\nadd chain inet {probe} c {{ type nat hook postrouting priority srcnat; }}\n"
    )
    done = _nft(rules + f"delete table inet {probe}\n", check=False)
    return "" if done.returncode == 0 else f"nft is not permitted here: {done.stderr.strip()[:200]}"


class Network:
    """The network of a cluster whose members run in groups of their own: `with Network(cluster) as network:`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._table = f"stele_{cluster.network.replace('.', '_')}"
        self._cuts: dict[int, frozenset[Cut]] = {}
        self._next = 0

    def __enter__(self) -> Network:
        lines = [
            f"add table inet {self._table}",
            f"add chain inet {self._table} source {{ type nat hook postrouting priority srcnat; }}",
            f"add chain inet {self._table} cut {{ type filter hook output priority raw; }}",
        ]
        lines += [
            f"add rule inet {self._table} source meta skgid {member.group} "
            f"ip daddr {self._cluster.network}.0/24 snat ip to {member.host}"
            for member in self._cluster.members
        ]
        _nft("\n".join(lines) + "\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        _nft(f"delete table inet {self._table}\n")

    def cut(self, cuts: Iterable[Cut]) -> int:
        """Drop what these send; a number to mend it by."""
        self._next += 1
        self._cuts[self._next] = frozenset(cuts)
        self._write()
        return self._next

    def mend(self, number: int) -> None:
        """Take one cut back; others stay."""
        self._cuts.pop(number, None)
        self._write()

    def mend_all(self) -> None:
        """Take all cuts back."""
        self._cuts.clear()
        self._write()

    def _write(self) -> None:
        lines = [f"flush chain inet {self._table} cut"]
        hosts: dict[str, Member] = {member.host: member for member in self._cluster.members}
        for source, target in sorted(frozenset[Cut]().union(*self._cuts.values())):
            # Who was connected to sends from its address; who connected, from 127.0.0.1 at this hook.
            group = os.getegid() if source == CLIENTS else hosts[source].group
            lines.append(f"add rule inet {self._table} cut meta skgid {group} ip daddr {target} drop")
            if source != CLIENTS:
                lines.append(f"add rule inet {self._table} cut ip saddr {source} ip daddr {target} drop")
        _nft("\n".join(lines) + "\n")


def both_ways(one: str, other: str) -> frozenset[Cut]:
    """Neither hears the other."""
    return frozenset(((one, other), (other, one)))


def _nft(rules: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["nft", "-f", "-"], input=rules, capture_output=True, text=True, check=check)

"""The cluster version: which formats and features a cluster uses. Masters, nodes and clients share it.

Invariant: a program of an earlier version never meets data that it cannot read or would carry out wrongly. Such
data is written only after the masters have finalized the version (`stele.master.versions`).
"""

from __future__ import annotations

from typing import Final

FIRST_CLUSTER_VERSION: Final = 1
"""The cluster version of release 0.1.0, whose programs report none."""
CLUSTER_VERSION: Final = 2
"""The newest version that this program reads and writes. It reads all earlier ones, too. Raise it by one in the
first change of a release that earlier programs would misread (docs/releasing.md)."""
CHANGES: Final = {
    2: "altered tables; ranges with gaps; nodes that are drained, parked or fenced; replicas placed by hand; changed replication factors and numbers of masters; dropped tables that can be recalled; more tablets than one message holds; owners, comments and history retention of tables; holds on their history; parts of jobs; leases of key spaces; leases of leaders; smaller column files",
}
"""What each version after the first one allows."""
LEADER_LEASES_VERSION: Final = 2
"""From this version on, voters promise leases to leaders, and wait until these are over after a restart."""
RELEASES: Final = {"0.1": 1, "0.2": 2}
"""The cluster version of each release, newest last. The next release is named before it is made."""


def told(version: int) -> int:
    """Return the cluster version of the sender of a message with this `version` field. 0 means the first
    release, which does not send the field."""
    return version or FIRST_CLUSTER_VERSION

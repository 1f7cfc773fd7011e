"""Real clusters of processes on loopback addresses, for tests of whole nodes, for `bench` and for `tests/chaos`."""

from tests.harness.processes import Cluster, Member

__all__ = ["Cluster", "Member"]

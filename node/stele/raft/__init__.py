"""Raft as a pure state machine: events in, effects out.

No I/O, no clock, no randomness of its own, no asyncio. An owner (a node's replica, or the simulator) builds a
`RaftCore` from what its log holds. It feeds events to the core, and carries out the effects under the duties
that `effects` lists. The words are those of the Raft paper and dissertation (Ongaro, 2014).
"""

from stele.raft.core import RaftCore
from stele.raft.options import RaftOptions

__all__ = ["RaftCore", "RaftOptions"]

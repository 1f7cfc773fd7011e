"""The node's shared log: segments, group commit, recovery. Imports only stele.model.

Owns every file below the log's directory. Knows nothing of raft, of tablets or of the network; `README.md` tells the
format byte by byte. Invariant: what was acknowledged is found again, whole and in order, or its stream says that it
FAILED.
"""

from stele.wal.log import Log
from stele.wal.options import LogOptions, SyncMode
from stele.wal.report import Collected, RecoveryReport, StreamState
from stele.wal.stream import StreamLog

__all__ = ["Collected", "Log", "LogOptions", "RecoveryReport", "StreamLog", "StreamState", "SyncMode"]

"""The node's shared log: segments, group commit, recovery. Imports only stele.model.

Owns every file below the log's directory. Knows nothing of raft, of tablets or of the network. `README.md`
gives the format byte by byte. Invariant: after a restart each acknowledged record is there, whole and in
order; otherwise its stream is FAILED.
"""

from stele.wal.log import Log
from stele.wal.options import LogOptions, SyncMode
from stele.wal.report import Collected, RecoveryReport, StreamState
from stele.wal.stream import StreamLog

__all__ = ["Collected", "Log", "LogOptions", "RecoveryReport", "StreamLog", "StreamState", "SyncMode"]

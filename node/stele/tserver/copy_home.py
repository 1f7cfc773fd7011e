"""What a copy needs from the node that it fills (`CopyHome`): room, a directory, a stream in the log, and the
replica's start."""

from __future__ import annotations

from pathlib import Path

from stele.consensus.superblock import Superblock
from stele.model.config import Configuration
from stele.model.errors import Retryable
from stele.model.ids import OpId, StreamKey
from stele.tserver.replica_files import ReplicaFiles
from stele.tserver.replica_starter import ReplicaStarter
from stele.tserver.replicas import Replicas


class NodeCopyHome:
    """The CopyHome of all copies to this node."""

    def __init__(self, replicas: Replicas, files: ReplicaFiles, starter: ReplicaStarter) -> None:
        self._replicas = replicas
        self._files = files
        self._starter = starter

    def room_bytes(self) -> int:
        """See CopyHome."""
        return self._files.room_bytes()

    def replica_directory(self, key: StreamKey) -> Path:
        """See CopyHome."""
        return self._files.replica_directory(key)

    async def create_stream(self, key: StreamKey, start: OpId, config: Configuration) -> None:
        """See CopyHome."""
        await self._files.create_stream(key, start, config)

    async def start_replica(self, superblock: Superblock) -> None:
        """See CopyHome."""
        await self._starter.start(superblock)

    def log_reaches(self, key: StreamKey, opid: OpId) -> bool:
        """See CopyHome."""
        replica = self._replicas.by_key(key)
        if replica is None:
            raise Retryable("the witness was removed meanwhile")
        return replica.storage.log_reaches(opid)

    async def rows_arrived(self, superblock: Superblock) -> None:
        """See CopyHome."""
        replica = self._replicas.by_key(superblock.key)
        if replica is None:
            raise Retryable("the witness was removed meanwhile")
        await self._starter.rows_arrived(replica, superblock)

    def joined(self, key: StreamKey) -> bool:
        """See CopyHome."""
        replica = self._replicas.by_key(key)
        return replica is None or replica.committed_config.peer(key.replica_id) is not None

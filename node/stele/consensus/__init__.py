"""A replica: raft core, log, state machine and transport made into one running thing, and how it is copied.

Imports raft, wal, tablet and the messages of rpc; opens no sockets and serves no requests, that is stele.tserver.
"""

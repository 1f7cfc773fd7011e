"""A replica: raft core, log, state machine and transport made into one running thing, and how it is copied.

Imports raft, tablet and the messages of rpc; its stream of the log is handed in. Opens no sockets and serves no requests, that is
stele.tserver.
"""

"""A replica: Raft core, log, state machine and transport joined into one running thing; and how a replica is copied.

Imports raft, tablet and the messages of rpc. Its stream of the log is handed in. It opens no sockets and serves no
requests: that is stele.tserver. The README beside this file names the files in reading order.
"""

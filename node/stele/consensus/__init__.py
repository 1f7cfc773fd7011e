"""A replica: joins a Raft core, a stream of the log, a state machine and the transport. Also copies replicas.

Imports raft, tablet and the messages of rpc. The stream of the log is handed in. Sockets and requests are the
task of stele.tserver. The README beside this file names the files in reading order.
"""

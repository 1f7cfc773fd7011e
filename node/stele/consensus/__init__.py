"""A replica: joins a Raft core, a stream of the log, a state machine and the transport. Also copies replicas.

Imports raft, tablet and the messages of rpc. Its owner passes in the stream of the log. Sockets and requests
are the task of stele.tserver. The README beside this file names the files in reading order.
"""

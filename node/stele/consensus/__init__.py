"""A replica of a tablet: it joins a Raft core, a stream of the log, a state machine and the transport. Also
copies replicas.

Imports raft, tablet and the messages of rpc. The owner of a replica passes in its stream of the log. Sockets
and requests belong to stele.tserver. The README beside this file names the files in reading order.
"""

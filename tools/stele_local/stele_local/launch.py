"""Starts a container's program so that it dies with stele_local. Run as a script.

Usage: launch.py PARENT_PID PROGRAM ARGUMENT... It imports only light modules, to start fast.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"exec {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()

"""Errors to exit codes, in one place. Called by app.py and by the processes.

Exit codes: 0 done; 1 found unhealthy; 2 usage, or refused (Rejected); 5 Corrupt; 70 we are wrong; 75 try again later
(Retryable); 130 interrupted. `stele node run` and `stele master run` add 3 (VolumeEmpty), 4 (VolumeForeign), 5 (a disk
that cannot be used) and 6 (VolumeOld).
"""

from __future__ import annotations

from stele.model.errors import Corrupt, Rejected, Retryable, SteleError

OK, UNHEALTHY, REFUSED, DISK, BUG, TRY_AGAIN, INTERRUPTED = 0, 1, 2, 5, 70, 75, 130


def exit_code(error: SteleError) -> int:
    """The exit code that tells the kind of `error`."""
    if isinstance(error, Rejected):
        return REFUSED
    if isinstance(error, Retryable):
        return TRY_AGAIN
    if isinstance(error, Corrupt):
        return DISK
    return BUG

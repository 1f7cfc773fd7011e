"""Maps errors to exit codes and to the words of the command line. Called by app.py and by the processes.

Invariant: an exit code has one meaning for every command; `stele --help` and `stele node run --help` list
them from here.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from stele.model.errors import Advice, Corrupt, Rejected, Retryable, SteleError

OK, NO, REFUSED, DISK, BUG, TRY_AGAIN, INTERRUPTED = 0, 1, 2, 5, 70, 75, 130

EXIT_CODES = {
    OK: "done",
    NO: "the answer is no (ksck: not healthy; kv get: no such key; kv write: a condition does not hold; "
    "table verify, backup verify, backup drill, backup restore --verify: rows differ)",
    REFUSED: "refused: a wrong command line, an unknown table, a bad row",
    DISK: "corrupt",
    BUG: "a bug in Stele",
    TRY_AGAIN: "try again later",
    INTERRUPTED: "interrupted",
}
PROCESS_EXIT_CODES = {
    OK: "stopped",
    REFUSED: "a wrong setting",
    3: "the volume is empty (VolumeEmpty)",
    4: "the volume belongs to another node (VolumeForeign)",
    DISK: "a disk that cannot be used",
    6: "the volume is an outdated copy (VolumeOld)",
    BUG: EXIT_CODES[BUG],
    TRY_AGAIN: "nothing is damaged, start again later (the disk is full)",
}

_ADVICE = {
    Advice.LIST_TABLES: "`stele table list` shows the existing ones",
    Advice.LIST_DROPPED: "`stele table list --dropped` shows those that can be recalled",
    Advice.CREATE_KEYSPACE: "create it with `stele kv create {name}`",
    Advice.OPEN_TABLE: "read it with `stele table scan {name}`",
    Advice.OPEN_KEYSPACE: "read it with `stele kv list {name}`",
    Advice.CHECK_MASTERS: "check --masters; a cluster that hibernates has no masters (`kubectl get tc` shows it)",
    Advice.RESTORE_AS: (
        "choose another name with `--table {name}=NEW`, which restores only the tables that it names, or rename what exists "
        "with `stele table rename`"
    ),
    Advice.NAME_MASTERS: "name them with --masters HOST:PORT,... or in STELE_MASTERS",
}


class ManyFaults(Rejected):
    """What is wrong with a document, all together. `where`: its name; `faults`: each with its place."""

    def __init__(self, where: str, faults: Sequence[str]) -> None:
        super().__init__(f"{where}: {'; '.join(faults)}")
        self.where, self.faults = where, tuple(faults)


def error_lines(error: SteleError) -> list[str]:
    """The error as a command prints it: one line, or a line for each fault of a document."""
    if isinstance(error, ManyFaults) and len(error.faults) > 1:
        return [f"{error.code.name}: {error.where}:", *(f"  {fault}" for fault in error.faults)]
    return [error_line(error)]


def exit_codes_help(codes: dict[int, str]) -> str:
    """Exit codes as a help text lists them."""
    return "Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in codes.items()) + "."


def error_line(error: SteleError) -> str:
    """The error in one line, with the next step as a command or option."""
    what = f"{error.code.name}: {error.args[0]}"
    return f"{what}; {_ADVICE[error.advice].format(name=error.name)}" if error.advice else what


def exit_code(error: SteleError) -> int:
    """The exit code for the kind of `error`."""
    if isinstance(error, Rejected):
        return REFUSED
    if isinstance(error, Retryable):
        return TRY_AGAIN
    if isinstance(error, Corrupt):
        return DISK
    return BUG


def exit_code_of_system(error: OSError) -> int:
    """The exit code for a system call of the command itself that failed, such as a write to its output
    file."""
    return TRY_AGAIN if error.errno in (errno.ENOSPC, errno.EDQUOT) else REFUSED

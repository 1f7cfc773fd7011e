"""Checks what a copy source offers against bounds before it is used. Called by copy_target.py; touches no
files.

A source is another process. Its file names become paths here, its sizes take room on this disk, and its OpIds
become those of a replica that votes.

Invariant: an offer that passes has only file names that stores use, and only numbers that a sound group can
reach. Its files fit on the disk.
"""

from __future__ import annotations

from stele.consensus.copy_source import SessionInfo
from stele.consensus.message_bounds import configuration_fault
from stele.model.bounds import (
    COPY_FILES_MAX,
    INCARNATION_MAX,
    INDEX_MAX,
    TABLE_NAME_CHARS_MAX,
    TERM_JUMP_MAX,
    TERM_MAX,
    TIME_MAX,
    WORD_CHARS_MAX,
)
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OpId
from stele.tablet import keyfile, manifest
from stele.tablet.colformat import NAME as ROWS
from stele.tablet.colformat import file_name

_SHOWN = 40


def refuse_offer(session: SessionInfo, *, at_least: OpId, caller_term: int) -> None:
    """Refuse a session that only a faulty source would offer.

    `caller_term`: the tablet's term, as the caller of the copy knows it.

    Raises:
        Rejected: INVALID_ARGUMENT, with the first fault found.
    """
    fault = _fault(session, at_least, caller_term)
    if fault:
        raise Rejected(f"the copy's source offers {fault}; nothing is fetched from it")


def refuse_beyond(bytes_wanted: int, room_bytes: int) -> None:
    """Refuse files that do not fit on the disk, before any file is made.

    Raises:
        Retryable: DISK_FULL.
    """
    if bytes_wanted > room_bytes:
        raise Retryable(
            f"the copy takes {bytes_wanted} bytes, but this node's disk has room for {room_bytes}; add "
            f"space, or copy elsewhere",
            code=Code.DISK_FULL,
        )


def _fault(session: SessionInfo, at_least: OpId, caller_term: int) -> str:
    term_max = min(caller_term + TERM_JUMP_MAX, TERM_MAX)
    opid, block = session.checkpoint, session.superblock
    for what, number, most in (
        ("a term", session.term, term_max),
        ("a checkpoint of term", opid.term, term_max),
        ("a checkpoint of index", opid.index, INDEX_MAX),
        ("a ceiling of", session.max_ceiling, TIME_MAX),
        ("a tablet incarnation of", block.tablet_incarnation, INCARNATION_MAX),
        ("a session id whose length is", len(session.session_id), WORD_CHARS_MAX),
        ("a table name whose length is", len(block.table_name), TABLE_NAME_CHARS_MAX),
        ("a number of files of", len(session.files), COPY_FILES_MAX),
    ):
        if not 0 <= number <= most:
            return f"{what} {number}; expected 0 to {most}"
    if opid.index < at_least.index:
        return f"a checkpoint at {opid}; expected {at_least} or later"
    return _names_fault(session) or configuration_fault(session.config)


def _names_fault(session: SessionInfo) -> str:
    names = [file.name for file in session.files]
    for name in names:
        if not _is_name(name):
            return f"a file named {name[:_SHOWN]!r}, which no store uses"
    if not names:
        return "no files"
    if len(set(names)) < len(names):
        return f"{len(names)} files with {len(set(names))} different names"
    return ""


def _is_name(name: str) -> bool:
    if name in (manifest.NAME, keyfile.FILE_NAME):
        return True
    try:
        file_name(name, ROWS if name.startswith(ROWS) else manifest.ONCE)
    except ValueError:
        return False
    return True

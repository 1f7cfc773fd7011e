"""One writer per folder of backups: each has a file in `writers/` that it renews, and looks for others there.

No file system has locks that hold everywhere, so no backup relies on this. Files of two writers never share a name, and a
manifest names only its own. Invariant: of two living writers, at most one goes on once they have noticed each other. Of
those that begin at once, the one whose name is lowest goes on, and the others are refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stele.backup.folder import Folder
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import new_id
from stele.model.jsons import parse_json
from stele.model.texts import printable
from stele.rpc.threads import in_thread

WRITERS = "writers"
BEAT_S = 5.0
"""How often a writer renews its file."""
WATCH_S = 30.0
"""A writer that did not renew its file for this long counts as gone."""
_LOOK_S = 1.0


class Claim:
    """The right to write to a folder: `async with Claim(folder, "create", note) as claim:`.

    `note` is called with the reason why it waits. Entering raises Rejected CHANGE_IN_PROGRESS if somebody else writes there."""

    def __init__(self, folder: Folder, what: str, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._note = note
        self._name = f"{WRITERS}/{new_id()}.json"
        self._who = {"what": what, "since": datetime.now(UTC).isoformat(timespec="seconds"), **_myself()}
        self._beats = 0
        self._waits = True
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Claim:
        try:
            await in_thread(self._begin)
            # Others that begin now see by the renewals that this process lives.
            self._renewing = asyncio.create_task(self._renew())
            for other in await in_thread(self._others):
                await self._outlast(other)
        except BaseException:
            await self._end()
            raise
        self._waits = False  # the next renewal tells
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def check(self) -> None:
        """Raise Retryable if another process took the claim over, because this one stood still for too long."""
        if await in_thread(self._folder.size, self._name) is None:
            raise Retryable(
                f"{self._folder.shown}: another process took over, because this one stood still for more than "
                f"{WATCH_S:.0f} s; run it again once the other has ended",
                code=Code.TIMED_OUT,
            )

    def _begin(self) -> None:
        self._folder.make(WRITERS)
        self._write()

    def _write(self) -> None:
        told = {**self._who, "beat": self._beats, "waits": self._waits}
        self._folder.write(self._name, json.dumps(told).encode())

    def _others(self) -> list[str]:
        mine = self._name.rpartition("/")[2]
        names = self._folder.entries(WRITERS)
        return [f"{WRITERS}/{name}" for name in names if name.endswith(".json") and name != mine]

    async def _outlast(self, other: str) -> None:
        """Wait until the other writer is gone. Raises Rejected if it is alive and takes precedence."""
        last = await in_thread(self._read, other)
        if last is None:
            return
        if not _has_ended(_parsed(last)):
            who = _told(last)
            self._note(
                f"waiting up to {WATCH_S:.0f} s to see whether {who} still writes to {self._folder.shown}"
            )
            until = time.monotonic() + WATCH_S
            while time.monotonic() < until:
                await asyncio.sleep(_LOOK_S)
                now = await in_thread(self._read, other)
                if now is None:
                    return
                if now == last:
                    continue
                found = _parsed(now)
                # A part of a file that is written just now says only that its writer lives.
                if found and not (found.get("waits") and self._name < other):
                    raise Rejected(
                        f"{_told(now)} writes to {self._folder.shown}; wait until it has ended, or stop it",
                        code=Code.CHANGE_IN_PROGRESS,
                    )
                last, until = now, time.monotonic() + WATCH_S
        await in_thread(self._folder.delete, other)

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self._folder.read(name))
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:
                raise
            return None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with suppress(SteleError):  # the work itself meets a lasting fault of the file system
                if await in_thread(self._folder.size, self._name) is None:
                    return  # taken over: `check` tells
                self._beats += 1
                await in_thread(self._write)

    async def _end(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        with suppress(SteleError):
            await in_thread(self._folder.delete, self._name)


def _myself() -> dict[str, Any]:
    """Return what identifies this process: its machine, boot and process namespace, its pid, and when it
    started."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _started(pid), "machine": _machine()}


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process of this machine began, in ticks since the boot; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _has_ended(who: dict[str, Any]) -> bool:
    """Whether that process is known to have ended. False: not known."""
    machine, pid, started = who.get("machine"), who.get("pid"), who.get("started")
    if not machine or machine != _machine() or not isinstance(pid, int) or not started:
        return False
    return bool(_started(pid) != started)


def _parsed(raw: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = parse_json(raw)
        if isinstance(found, dict):
            return found
    return {}


def _told(raw: bytes) -> str:
    who = _parsed(raw)
    return printable(
        f"`stele backup {who.get('what', '')}` (process {who.get('pid', '?')} on {who.get('host', '?')}, since "
        f"{who.get('since', '?')})"
    )

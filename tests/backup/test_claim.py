"""One writer per folder: a living one is respected, a dead one is not waited for. No cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stele import backup
from stele.backup import claim as claims
from stele.backup.claim import WRITERS, Claim
from stele.backup.folder import Folder
from stele.model.errors import Code, Rejected, Retryable
from tests.backup.tables import made_by_hand

HOLDER = """
import asyncio, sys
from stele.backup.claim import Claim
from stele.backup.folder import Folder

async def hold():
    async with Claim(Folder.at(sys.argv[1]), "create", print):
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(hold())
"""

RIVAL = """
import asyncio, sys
from stele.backup import claim
from stele.backup.folder import Folder
from stele.model.errors import Rejected

claim.BEAT_S, claim.WATCH_S, claim._LOOK_S = 0.1, 20.0, 0.02

async def claim_one(folder):
    try:
        async with claim.Claim(Folder.at(folder), "create", lambda note: None) as held:
            print("held", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await held.check()
    except Rejected as exc:
        print(exc.code.name, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

for folder in iter(sys.stdin.readline, ""):
    asyncio.run(claim_one(folder.strip()))
    print("ended", flush=True)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats and waits of a tenth."""
    for name in ("BEAT_S", "WATCH_S", "_LOOK_S"):
        monkeypatch.setattr(claims, name, getattr(claims, name) / 10)


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def files(folder: Path) -> list[Path]:
    return list((folder / WRITERS).glob("*.json"))


async def test_two_at_once_are_refused(tmp_path: Path, quick: None) -> None:
    place, notes = Folder.at(tmp_path), list[str]()
    async with Claim(place, "create", notes.append):
        with pytest.raises(Rejected, match=r"`stele backup create` .* writes to") as refused:
            async with Claim(place, "prune", notes.append):
                pass
        assert refused.value.code is Code.CHANGE_IN_PROGRESS
        assert "waiting up to" in notes[0]
        assert len(files(tmp_path)) == 1
    assert files(tmp_path) == []


async def test_one_that_comes_later_waits_for_no_holder_whatever_its_name(
    tmp_path: Path, quick: None
) -> None:
    place = Folder.at(tmp_path)
    async with Claim(place, "create", print), asyncio.timeout(20):
        later = Claim(place, "prune", print)
        later._name = f"{WRITERS}/0.json"
        with pytest.raises(Rejected, match="writes to"):
            async with later:
                pass


def test_of_two_that_begin_at_once_one_goes_on(tmp_path: Path) -> None:
    """Each waited for the other, took it for gone and removed its claim: both went on, and both ended in vain."""
    command = [sys.executable, "-c", RIVAL]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    rivals = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]

    def tell(words: str) -> None:
        for rival in rivals:
            rival.stdin.write(words + "\n")
            rival.stdin.flush()

    def heard() -> list[str]:
        return sorted(rival.stdout.readline().strip() for rival in rivals)

    try:
        for number in range(8):
            tell(str(tmp_path / str(number)))
            assert heard() == ["CHANGE_IN_PROGRESS", "held"]
            tell("")
            assert heard() == ["ended", "ended"]
            assert files(tmp_path / str(number)) == []
    finally:
        for rival in rivals:
            rival.kill()
            rival.communicate()


def test_prune_waits_for_no_writer_and_removes_nothing_of_it(tmp_path: Path, quick: None) -> None:
    made_by_hand(tmp_path, snapshot=1 << 60), made_by_hand(tmp_path)
    process = holder(tmp_path)
    try:
        # The other process beats every 5 s.
        claims.WATCH_S = 20.0
        with pytest.raises(Rejected, match=f"process {process.pid} on"):
            backup.prune(tmp_path, keep=1)
        assert len(backup.list_backups(tmp_path)) == 2
    finally:
        process.kill()
        process.communicate()
    assert len(backup.prune(tmp_path, keep=1).removed) == 1


async def test_a_killed_one_is_not_waited_for(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(files(tmp_path)) == 1
    notes = list[str]()
    async with asyncio.timeout(20), Claim(Folder.at(tmp_path), "create", notes.append):
        assert len(files(tmp_path)) == 1
    assert notes == []


@pytest.mark.parametrize(
    "content", ["", "{", '{"host": "other", "pid": 1, "machine": "m", "started": "1"}', "[1]"]
)
async def test_one_of_another_machine_or_a_torn_one_is_watched(
    content: str, tmp_path: Path, quick: None
) -> None:
    (tmp_path / WRITERS).mkdir()
    (tmp_path / WRITERS / "other.json").write_text(content)
    notes = list[str]()
    async with Claim(Folder.at(tmp_path), "create", notes.append):
        assert [path.name for path in files(tmp_path)] != ["other.json"] and len(files(tmp_path)) == 1
    assert len(notes) == 1 and "waiting up to" in notes[0]


async def test_one_whose_file_is_seen_half_written_is_no_dead_one(tmp_path: Path, quick: None) -> None:
    """A renewal writes the file in place: a reader may find it empty."""
    (tmp_path / WRITERS).mkdir()
    path, who = tmp_path / WRITERS / "other.json", {"host": "h", "pid": 1, "machine": "m", "started": "1"}
    path.write_text(json.dumps({**who, "beat": 0}))
    waited = asyncio.Event()

    async def renew() -> None:
        await waited.wait()
        path.write_text("")
        await asyncio.sleep(0.5)
        path.write_text(json.dumps({**who, "beat": 1}))

    renewing = asyncio.create_task(renew())
    with pytest.raises(Rejected, match="process 1 on h"):
        async with Claim(Folder.at(tmp_path), "create", lambda note: waited.set()):
            pass
    await renewing
    assert files(tmp_path) == [path]


async def test_a_process_with_the_number_of_a_dead_one_is_another(tmp_path: Path) -> None:
    """As after a restart of a container: the number is this process's own."""
    (tmp_path / WRITERS).mkdir()
    who = {"pid": os.getpid(), "host": "h", "machine": claims._machine(), "started": "1"}
    (tmp_path / WRITERS / "other.json").write_text(json.dumps(who))
    notes = list[str]()
    async with asyncio.timeout(20), Claim(Folder.at(tmp_path), "create", notes.append):
        pass
    assert notes == []


async def test_one_that_stood_still_for_long_notices_that_it_was_replaced(
    tmp_path: Path, quick: None
) -> None:
    async with Claim(Folder.at(tmp_path), "create", print) as first:
        await first.check()
        (path,) = files(tmp_path)
        path.unlink()
        await asyncio.sleep(1.2)  # two of its beats: it does not write its file again
        with pytest.raises(Retryable, match="another process took over"):
            await first.check()
        assert files(tmp_path) == []

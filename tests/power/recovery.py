"""`python -m tests.power.recovery FD FOLDER STORY TOLD`: members start on what a power cut left, on recorded files.

Called by __main__, which serves FD. The story so far is in the file STORY; how it went on, and what was wrong, goes to TOLD.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
from pathlib import Path

from stele.rpc.logging import setup
from tests.power import checks
from tests.power.recorder import mount
from tests.power.story import Story


async def _recover(directory: Path, story: Story) -> list[str]:
    faults = []
    for name in story.ids:
        found = await checks.member(directory / name, name, story)
        faults += [f"{name}: {fault}" for fault in found]
    return faults


def main(fd: str, folder: str, earlier: str, told: str) -> None:
    """See above."""
    setup(level="critical")
    mount(int(fd), Path(folder))
    story: Story = pickle.loads(Path(earlier).read_bytes())
    story.ready_s = time.monotonic()
    faults = asyncio.run(_recover(Path(folder), story))
    Path(told).write_bytes(pickle.dumps((story, faults)))
    os._exit(0)  # what ends with the interpreter is not what members do


if __name__ == "__main__":
    main(*sys.argv[1:])

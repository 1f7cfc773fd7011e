"""The release before this one, unpacked beside this checkout. Its source is committed, so that each checkout can run it.

python -m tests.upgrade.release     packs it anew; needs the tag
"""

from __future__ import annotations

import io
import lzma
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TAG = "v0.1.0"
"""The release before this one."""
ARCHIVE = Path(__file__).with_name(f"stele-{TAG.removeprefix('v')}.tar.xz")
_PACKAGE = "node/stele"


def unpacked(directory: Path) -> Path:
    """The folder, below `directory`, with that release's package `stele`. Put it first on the path of a process."""
    directory.mkdir(parents=True)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory / Path(_PACKAGE).parent


def is_tagged() -> bool:
    """Whether this clone has the tag."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{TAG}^{{commit}}"]
    return subprocess.run(asked, capture_output=True).returncode == 0


def tagged() -> Iterator[tuple[str, bytes]]:
    """(path, content) of each Python file of the package, as the tag has them."""
    told = subprocess.run(
        ["git", "-C", str(ROOT), "archive", TAG, _PACKAGE], capture_output=True, check=True
    ).stdout
    yield from contents(told)


def contents(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """(path, content) of each Python file in a tar archive, compressed or not."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read()


def pack() -> None:
    """Write ARCHIVE from the tag."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, content in tagged():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    ARCHIVE.write_bytes(lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    pack()

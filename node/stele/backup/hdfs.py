"""HDFS as a file system of pyarrow, through the library hdfs-native. Used by folder.py.

Invariant: a rename replaces its target in one step, as on a disk.
"""

from __future__ import annotations

import errno
import re
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from stele.model.errors import Rejected

TYPE_NAME = "py::fsspec+hdfs"
"""What pyarrow calls this file system."""
_OPTIONS = {"dfs.client.failover.max.attempts": "4"}
"""By default the library makes 15 attempts. A user who mistyped an address would wait for minutes."""
_ERROR = re.compile(r'RPCError\("([\w.$]+)", "(.*?)(?:\\n|"\)$)', re.DOTALL)
_NUMBERS = {
    "AccessControlException": errno.EACCES,
    "DSQuotaExceededException": errno.EDQUOT,
    "FileAlreadyExistsException": errno.EEXIST,
    "NSQuotaExceededException": errno.EDQUOT,
    "ParentNotDirectoryException": errno.ENOTDIR,
    "QuotaExceededException": errno.EDQUOT,
}
"""The error numbers of Hadoop's classes of errors, for those that tell a user what to do."""


class _Handler(pafs.FSSpecHandler):  # type: ignore[misc]
    def move(self, src: str, dest: str) -> None:
        """Rename a file. It replaces a file of the new name."""
        self.fs.mv(src, dest, overwrite=True)


def connect(uri: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system and the path of a URI like hdfs://namenode:8020/stele. Sends no request.

    The host may be a name from the Hadoop configuration in HADOOP_CONF_DIR.

    Raises:
        Rejected: the library is missing.
        ValueError: it names no host.
    """
    try:
        from hdfs_native.fsspec import HdfsFileSystem
    except ImportError as exc:
        raise Rejected(
            "HDFS needs the package hdfs-native; in a checkout run: pip install '.[hdfs]'"
        ) from exc
    parts = urlsplit(uri)
    if not parts.hostname:
        raise ValueError("it names no host")
    fs = HdfsFileSystem(parts.hostname, parts.port, skip_instance_cache=True, **_OPTIONS)
    return pafs.PyFileSystem(_Handler(fs)), parts.path or "/"


def error_of(exc: RuntimeError) -> OSError | None:
    """Return an error of HDFS as an OSError, with an error number if _NUMBERS has its class. None if it is
    not an error of HDFS."""
    found = _ERROR.match(str(exc))
    if found is None:
        return None
    kind = found[1].rpartition(".")[2].rpartition("$")[2]
    number, why = _NUMBERS.get(kind), found[2].replace('\\"', '"')
    return OSError(why) if number is None else OSError(number, why)

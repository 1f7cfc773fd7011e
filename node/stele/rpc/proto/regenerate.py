"""Regenerates the protobuf and gRPC code beside the .proto files: `python node/stele/rpc/proto/regenerate.py [OUT]`.

With OUT, writes there instead. A test uses this to compare the files with those of the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

NODE_ROOT = Path(__file__).resolve().parents[3]


def regenerate(out: Path) -> None:
    """Write *_pb2.py, *_pb2.pyi, *_pb2_grpc.py and *_pb2_grpc.pyi below `out`.

    Raises:
        RuntimeError: if protoc refuses a file; its message went to stderr.
    """
    import grpc_tools  # type: ignore[import-untyped]
    from grpc_tools import protoc

    protos = sorted(str(p.relative_to(NODE_ROOT)) for p in Path(__file__).parent.glob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{NODE_ROOT}",
        f"-I{include}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")


if __name__ == "__main__":
    regenerate(Path(sys.argv[1]) if len(sys.argv) > 1 else NODE_ROOT)

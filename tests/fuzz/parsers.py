"""Every parser of ours, with valid inputs to spoil and the errors that it documents. texts.py has those of what people write."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import yaml
from google.protobuf.any_pb2 import Any as AnyPB
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import StringValue

from stele.cli.csv_rows import CsvFormat, Lines, read_csv
from stele.cli.schema_file import table_from_file
from stele.consensus.files import frame_record, parse_record
from stele.consensus.superblock import DataState, Superblock, decode_superblock, encode_superblock
from stele.consensus.timestamps import decode_ceiling
from stele.master import records, row_encoding
from stele.model import kvop, writeop
from stele.model.block import RowOp, decode_block, encode_block
from stele.model.config import Configuration, MemberType, Peer, decode_configuration, encode_configuration
from stele.model.foreign import read_batch
from stele.model.ids import ClusterId, NodeId, OpId, ReplicaId, TableId, TabletId, new_id
from stele.model.jsons import parse_json
from stele.model.keys import decode_key, encode_tuple
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema
from stele.model.where import parse_where
from stele.rpc.client_stream import request_ids_of
from stele.rpc.connection import FrameReader
from stele.rpc.convert_schema import (
    partition_from_pb,
    partitioning_from_pb,
    partitioning_to_pb,
    schema_from_pb,
    schema_to_pb,
)
from stele.rpc.errors import error_from_json
from stele.rpc.flight_sql import command_of_sql
from stele.rpc.frames import frame
from stele.rpc.identity import Identity, caller_from_metadata
from stele.rpc.proto import common_pb2, consensus_pb2, tserver_pb2
from stele.rpc.ticket import CopyTicket, ScanCommand, Ticket, decode_ticket
from stele.tablet import exactly_once, manifest
from stele.tablet.checked import open_sealed, seal
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.files import FILES
from stele.tserver.messages import message_from_pb
from stele.wal.format import (
    Kind,
    SegmentHeader,
    decode_footer,
    decode_records,
    decode_segment_header,
    encode_record,
    encode_segment_header,
)
from stele.wal.metadata import Metadata, Position, decode_metadata, encode_metadata
from stele_operator import observe
from tests.fuzz import column_files, texts
from tests.fuzz.hunt import Parse, Parser

ID = "5" * 32
"""Fixed, so that a seed gives the same inputs in each process."""
SCHEMA = Schema.make(
    [
        ("id", "int64"),
        ("name", "string", True),
        ("price", "decimal(12,2)", True),
        ("at", "timestamp", True),
        ("blob", "binary", True),
        ("ok", "bool", True),
        ("day", "date", True),
        ("x", "double", True, "1.5"),
    ],
    ["id"],
)
KEY_TYPES = (pa.int64(), pa.string(), pa.decimal128(12, 2))
# --- what the table below needs


def _config() -> Configuration:
    peers = [Peer(NodeId(new_id()), ReplicaId(n), "127.0.0.1:7050", MemberType.VOTER) for n in (1, 2, 3)]
    witness = Peer(NodeId(new_id()), ReplicaId(4), "h:1", MemberType.WITNESS, False, OpId(3, 9))
    return Configuration(7, (*peers, witness))


def _batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"id": 1, "name": "a"}, {"id": -5, "name": None, "x": 2.5, "blob": b"\0\1"}],
        schema=SCHEMA.to_arrow(),
    )


def _block() -> bytes:
    return encode_block(RowOp.UPSERT, [c.id for c in SCHEMA.columns], _batch(), SCHEMA.version)


def _sql(query: str) -> bytes:
    """A command of Flight SQL that holds this query."""
    kind = "type.googleapis.com/arrow.flight.protocol.sql.CommandStatementQuery"
    return AnyPB(type_url=kind, value=StringValue(value=query).SerializeToString()).SerializeToString()


def _scan_json() -> str:
    spec = ScanSpec(
        (0, 1), (Predicate(0, "in", [1, 2]), Predicate(1, "is_null")), b"\1", b"\2", 5, True, b"", 100
    )
    return spec.to_json(SCHEMA)


def _messages() -> list[bytes]:
    m = consensus_pb2.ConsensusMessage(tablet_id=bytes(16), from_replica=1, to_replica=2)
    update = consensus_pb2.ConsensusMessage()
    update.CopyFrom(m)
    update.update.term = 3
    update.update.preceding.index = 7
    update.update.lease_ms, update.update.lease_sent_ms = 300, 12
    update.update.early = True
    update.update.entries.add(term=3, index=8, kind=1, timestamp=9, payload=b"xyz")
    answer = consensus_pb2.ConsensusMessage()
    answer.CopyFrom(m)
    answer.update_response.term, answer.update_response.written_index = 3, 8
    vote = consensus_pb2.ConsensusMessage()
    vote.CopyFrom(m)
    vote.vote.term = 4
    vote.vote.candidate_node = bytes(16)
    vote.vote.released = 3
    return [update.SerializeToString(), answer.SerializeToString(), vote.SerializeToString()]


def _message(data: bytes) -> object:
    return message_from_pb(consensus_pb2.ConsensusMessage.FromString(data))


def _superblock() -> bytes:
    block = Superblock(
        TabletId(ID), ReplicaId(3), TableId(ID), "t", "table", DataState.READY, SCHEMA.to_json(), b"\1", b"\2"
    )
    return encode_superblock(block)


def _body(sealed: bytes, header_bytes: int) -> bytes:
    return sealed[header_bytes:]


def _metadata() -> bytes:
    return encode_metadata(Metadata(NodeId(ID), 1, 0, Position(1, 4096), ()))


def _write_payload() -> bytes:
    block = _block()
    return writeop.encode(writeop.WriteHeader(bytes(16), 1, 1, 5, writeop.digest(block)), block)


def _record_rows() -> list[tuple[type[Any], bytes]]:
    config = _config()
    rows: list[Any] = [
        records.NodeRecord(NodeId(ID), "node", "ACTIVE", True, "n-0", "127.0.0.1:1"),
        records.IntentRecord(TabletId(ID), ReplicaId(4), NodeId(ID), "replace", 3, config.opid_index, 99),
        records.ClaimRecord("me", 3, 9),
    ]
    return [(type(row), row_encoding.encode(row)) for row in rows]


def _feed(data: bytes) -> object:
    reader = FrameReader()
    return [reader.feed(data[at : at + 7]) for at in range(0, len(data), 7)]


def _metadata_of_call(data: bytes) -> object:
    text = data.decode("latin-1")
    pairs = [tuple(line.split("=", 1)) for line in text.split("\n") if "=" in line]
    return caller_from_metadata([(k, v) for k, v in pairs])


def _call_metadata() -> bytes:
    identity = Identity(ClusterId(ID), NodeId(ID), 12)
    return "\n".join(f"{k}={v}" for k, v in identity.metadata(ID, 7)).encode()


def _pb(kind: Any, convert: Callable[[Any], object]) -> Parse:
    return lambda data: convert(kind.FromString(data))


def _schema_pb() -> bytes:
    return schema_to_pb(SCHEMA).SerializeToString()


def _partitioning_pb() -> bytes:
    return partitioning_to_pb(PartitionSchema((HashPartition((0,), 4, 0),), None)).SerializeToString()


def _rows_of_others(data: bytes) -> object:
    return read_batch(data, SCHEMA.to_arrow(), "rows").to_pylist()


def _from_file(name: str, parse: Callable[[Path], object]) -> Parse:
    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="stele-fuzz-") as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            return parse(path)

    return run


def _read_manifest(path: Path) -> object:
    return manifest.read(path.parent)


def _manifest_body() -> bytes:
    with tempfile.TemporaryDirectory(prefix="stele-fuzz-") as folder:
        manifest.write(FILES, Path(folder), manifest.Manifest((SCHEMA,), OpId(1, 2), once="once-00000001"))
        return open_sealed((Path(folder) / manifest.NAME).read_bytes(), b"STLMANIF", 1, "manifest")


def _read_csv(path: Path) -> object:
    """Only text: of a line with too few values that is none, Arrow prints a traceback of its own before it refuses the file."""
    with contextlib.suppress(UnicodeDecodeError):
        path.read_text("utf-8")
        return list(read_csv(str(path), str(path), SCHEMA, CsvFormat(("", "NULL")), Lines()))
    return None


_DEFINITION = {
    "apiVersion": "stele.dev/v1alpha1",
    "kind": "TabletGroup",
    "metadata": {"name": "flights"},
    "spec": {
        "clusterRef": {"name": "flights"},
        "replicationFactor": 3,
        "columns": [{"name": "id", "type": "int64"}, {"name": "s", "type": "string", "nullable": True}],
        "primaryKey": ["id"],
        "partitioning": {"hash": [{"columns": ["id"], "buckets": 8}]},
    },
}
_META = {"name": "flights", "namespace": "data", "uid": "u-1", "resourceVersion": "7", "generation": 3}
_CLUSTER = {
    "metadata": _META,
    "spec": {
        "masters": {"replicas": 3, "storage": {"size": "1Gi"}},
        "nodes": {"replicas": 5, "storage": {"size": "2Gi"}},
    },
}


def _object(parse: Callable[[dict[str, Any]], object], whole: dict[str, Any]) -> Parse:
    """The API server vouches for metadata: only spec and status are anybody's."""

    def run(data: bytes) -> object:
        try:
            raw = json.loads(data)
        except RecursionError:
            return None
        if not isinstance(raw, dict) or not isinstance(raw.get("spec"), dict):
            return None
        return parse({**whole, "spec": raw["spec"]})

    return run


def table() -> list[Parser]:
    """All parsers."""
    config = encode_configuration(_config())
    key = encode_tuple((5, "a", Decimal("1.25")), KEY_TYPES)
    operations = kvop.encode_operations(
        [
            kvop.KeyOperation(kvop.KeyOp.REPLACE, b"k", b"v"),
            kvop.KeyOperation(kvop.KeyOp.CAS, b"c", b"v", b"before"),
        ]
    )
    ticket = Ticket(ID, ID, 1, 1, _scan_json()).encode()
    copy_ticket = CopyTicket(ID, "s", "data-00000001", 0, 10, ID, 1, ID, 1).encode()
    superblock = _superblock()
    head_bytes = len(superblock) - len(parse_record(superblock, b"STSB", 1, "x")[1])
    metadata = _metadata()
    once = ExactlyOnce()
    once_body = exactly_once.encode(once.frozen())
    many = tserver_pb2.ClientRequest(
        many=tserver_pb2.ClientRequests(
            requests=[
                tserver_pb2.ClientRequest(
                    request_id=n,
                    write=tserver_pb2.WriteRequest(tablet_id=bytes(16), durability=tserver_pb2.MEMORY),
                )
                for n in (5, 6)
            ]
        )
    ).SerializeToString()
    batch = _batch().serialize().to_pybytes()
    return [
        Parser("json", [b'{"a":[1,2.5,"x",null]}'], parse_json, (ValueError,), json_from=0),
        Parser(
            "schema",
            [SCHEMA.to_json().encode()],
            lambda d: Schema.from_json(d.decode()),
            (UnicodeDecodeError,),
            0,
        ),
        Parser(
            "partitioning",
            [PartitionSchema((HashPartition((0,), 4, 0),), None).to_json().encode()],
            lambda d: PartitionSchema.from_json(d.decode()),
            (UnicodeDecodeError,),
            0,
        ),
        Parser("scan", [_scan_json().encode()], lambda d: ScanSpec.from_json(d, SCHEMA), json_from=0),
        Parser("configuration", [config], decode_configuration, json_from=1),
        Parser("key operations", [operations], kvop.decode_operations),
        Parser(
            "a client's key operations", [kvop.encode_write({b"k": b"v"}, {b"c": None})], kvop.decode_write
        ),
        Parser("write payload", [_write_payload()], writeop.decode),
        Parser("block", [_block()], lambda d: decode_block(d, SCHEMA)),
        Parser("key", [key], lambda d: decode_key(d, KEY_TYPES)),
        *(
            Parser(f"catalog row {kind.__name__}", [data], partial(row_encoding.decode, kind), json_from=1)
            for kind, data in _record_rows()
        ),
        Parser(
            "superblock",
            [_body(superblock, head_bytes)],
            decode_superblock,
            (),
            0,
            partial(frame_record, b"STSB", 1),
        ),
        Parser("ceiling", [bytes(8)], decode_ceiling),
        Parser("log metadata", [metadata], lambda d: decode_metadata(d, "metadata")),
        Parser(
            "segment header",
            [encode_segment_header(SegmentHeader(NodeId(ID), 1, 2, 4096, False))[:-4]],
            lambda d: decode_segment_header(d, "segment"),
            reseal=lambda body: body + google_crc32c.value(body).to_bytes(4, "little"),
        ),
        Parser(
            "log records",
            [
                encode_record(Kind.ENTRY, 1, bytes(16), 1, 2, 3, 4, b"abc")
                + encode_record(Kind.VOTE, 0, bytes(16), 1, 2, 3, 4, b"")
            ],
            lambda d: list(decode_records(d, 2)),
        ),
        Parser("footer", [bytes(72 * 3)], decode_footer),
        Parser("ticket", [ticket, copy_ticket], decode_ticket, json_from=1),
        Parser("scan command", [ScanCommand("t").encode()], ScanCommand.decode, json_from=1),
        Parser(
            "query of Flight SQL",
            [_sql('SELECT a, "b c" FROM t WHERE a > 5 AND b IN (1, 2)')],
            command_of_sql,
        ),
        Parser("error", [b'{"code":3,"message":"x","leader":""}'], error_from_json, json_from=0),
        Parser("peer message", _messages(), _message, (DecodeError,)),
        Parser("request ids", [many], request_ids_of),
        Parser("frames", [frame(b"abc") + frame(bytes(200))], _feed),
        Parser("metadata of a call", [_call_metadata()], _metadata_of_call),
        Parser("schema message", [_schema_pb()], _pb(common_pb2.SchemaPB, schema_from_pb), (DecodeError,)),
        Parser(
            "partitioning message",
            [_partitioning_pb()],
            _pb(common_pb2.PartitioningPB, partitioning_from_pb),
            (DecodeError,),
        ),
        Parser(
            "partition message",
            [common_pb2.PartitionPB(hash_buckets=[1], range_end=b"x").SerializeToString()],
            _pb(common_pb2.PartitionPB, partition_from_pb),
            (DecodeError,),
        ),
        Parser("Arrow batch", [batch], _rows_of_others),
        Parser(
            "exactly-once state",
            [once_body, b'[7,[["' + b"0" * 32 + b'",1,2,1,[]]]]'],
            ExactlyOnce.decode,
            json_from=0,
        ),
        Parser(
            "manifest",
            [_manifest_body()],
            _from_file(manifest.NAME, _read_manifest),
            (),
            0,
            partial(seal, b"STLMANIF", 1),
        ),
        Parser(
            "where",
            [b"id >= 5 AND name IN ('a', 'b') AND x IS NULL"],
            lambda d: parse_where(d.decode(), SCHEMA),
            (UnicodeDecodeError,),
        ),
        Parser("csv", [b"id,name,x\n1,a,2.5\n2,,\n"], _from_file("rows.csv", _read_csv), (pa.ArrowInvalid,)),
        Parser(
            "table definition",
            [json.dumps(_DEFINITION).encode(), yaml.safe_dump(_DEFINITION).encode()],
            _from_file("table.yaml", lambda path: table_from_file(str(path))),
        ),
        Parser(
            "TabletCluster",
            [json.dumps(_CLUSTER).encode()],
            _object(observe.parse_cluster, _CLUSTER),
            (ValueError,),
            0,
        ),
        Parser(
            "TabletGroup",
            [json.dumps({**_DEFINITION, "metadata": _META}).encode()],
            _object(observe.parse_group, {"metadata": _META}),
            (ValueError,),
            0,
        ),
        *texts.table(),
        *column_files.table(),
    ]

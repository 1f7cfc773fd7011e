"""Bounds of what others may send: numbers that only grow, lengths of strings and lists. One table for the whole program.

Checked at the edge, where messages and calls are decoded. A call that breaks a bound is refused with the field, the
value's size and the bound. A message between replicas that breaks one is dropped, counted, and told once per peer and
cause. Neither fails a replica.

Invariant: no bound is reached by a legitimate node, however long it was away; each line says why. Opens nothing.
"""

from __future__ import annotations

# --- numbers that only grow

TERM_JUMP_MAX = 1 << 32
"""Terms above a replica's own, in one message. An election raises a term by one: ten a second take 13 years to come here.
A replica that lags by more is led up in steps of so many (`stele.consensus.message_bounds`), so none is locked out."""
TERM_MAX = 1 << 62
"""The highest term anybody may name. Two to the 30th messages, each of the largest jump, would be needed to come here."""
INDEX_MAX = 1 << 62
"""The highest log index. A million entries a second take 146,000 years."""
FENCE_STEP_MAX = 64
"""Catalog terms, or driver epochs, by which an order may exceed what this node has heard. Heartbeats tell it the newest each
second, in larger steps; an order that comes before them is taken when it is sent again."""
EPOCH_MAX = 1 << 62
"""The highest driver epoch; each take-over of the claim counts one."""
INCARNATION_JUMP_MAX = 1 << 32
"""Starts of a node between two words of it. A start each second takes 136 years."""
HEARD_ADDRESS_MS = 30_000
"""How long a node is dialled where a start of it that no master knows says it is; masters hear of a start within a heartbeat."""
INCARNATION_MAX = 1 << 62
"""The highest incarnation of a node or a tablet; each start, or recovery, counts one."""
INCARNATION_AHEAD_MAX_MS = 86_400_000
"""By how much an incarnation may exceed the wall clock, in ms. They count starts from the ms of the format, so that a node
that is formatted anew comes with the present; clocks differ by a day at most."""
REPLICA_ID_MAX = 1 << 53
"""The highest replica_id. The catalog counts them per tablet from 1; JSON readers hold whole numbers up to here."""
UNCOMMITTED_AHEAD_MAX_US = 24 * 3_600_000_000
"""By how much the time of an entry that is not committed may exceed what most clocks of the cluster say. An honest leader's
is within seconds, or it hands over; a machine in a wrong time zone is off by 14 hours at most. Committed entries are never
refused for this, and none is where nobody knows what most clocks say."""
CLAIM_TTL_MAX_MS = 30 * 86_400_000
"""How long a driver's claim lasts unrenewed: a month. Drivers renew theirs each few seconds."""
SCAN_WAIT_MAX_MS = 86_400_000
"""How long a scan may wait for its snapshot; longer waits are cut to it. Clients wait for seconds and ask again."""
ROWS_MAX = (1 << 63) - 1
"""A limit of rows. Arrow counts no further."""
BATCH_ROWS_MAX = 1 << 20
"""Rows of a batch that a scan asks for; ours ask for 32,768."""
WALL_US_MAX = 1 << 52
"""A wall clock's time, in µs since 1970: in the year 2112, as hybrid times end there."""
TIME_MAX = (1 << 64) - (1 << 58)
"""The highest hybrid time of an entry: in the year 2110. What follows it must fit into 64 bits, too."""

# --- numbers in text

NUMBER_DIGITS_MAX = 20
"""Digits of a whole number in text: 2 to the 64th has twenty. Python takes quadratic time for long ones, and refuses 4,301."""

# --- lengths of strings, in characters

TABLE_NAME_CHARS_MAX = 256
"""Of tables and key spaces. Clients, operator and masters refuse longer ones alike."""
NODE_NAME_CHARS_MAX = 253
"""What RegisterNode calls a node: a pod's name, which Kubernetes bounds so."""
PLACE_CHARS_MAX = 256
"""Names of machines and zones: Kubernetes allows 253 for a machine and 63 for a zone."""
ADDRESS_CHARS_MAX = 512
"""HOST:PORT. DNS bounds a host to 253 characters."""
VERSION_CHARS_MAX = 128
"""A program's version."""
WORD_CHARS_MAX = 64
"""A word of a fixed set (role, kind, state, channel), an identifier in text, a column's type."""
COLUMN_NAME_CHARS_MAX = 128
"""As `stele.model.schema` has always had it."""
HOLDER_CHARS_MAX = 512
"""Who holds the driver claim: a cluster's or host's name, a namespace, a process."""
TEXT_CHARS_MAX = 4_096
"""Reasons and error messages, for people. Ours are cut to it by whoever sends them (`cut`)."""
DEFAULT_BYTES_MAX = 4_096
"""JSON of a column's default. Each row that lacks the column takes as much memory, from a write that has none of it."""
KEY_BYTES_MAX = 8_192
"""An encoded key, or a part of one: what `stele.model.keys` makes at most."""

STATUS_BYTES_MAX = 65_536
"""One replica's status in a heartbeat: with three peers some 600 bytes. Every view of the cluster holds them all."""

# --- lengths of lists

PEERS_MAX = 1_000
"""Peers of a configuration. No two are on one machine, and replication factors are mostly single digits."""
PEERS_HEARD_MAX = 4_096
"""Nodes whose own word a process remembers beside the masters' word; of more, the one that was heard first is forgotten."""
NODES_HEARD_MAX = 16_384
"""Nodes that a master remembers until it leads, and knows all that are on record. Clusters have hundreds."""
NODES_UNFORMED_MAX = 1_000
"""Nodes on record that never came. An operator registers each just before its pod."""
MASTERS_MAX = 16
"""First masters of a cluster: 1, 3 or 5."""
COLUMNS_MAX = 1_000
"""Columns of a table, of a key, of a projection."""
PARTITIONS_MAX = 100_000
"""Parts of a table, and tablets named in one request."""

COPY_FILES_MAX = 65_536
"""Files of a tablet that is copied. Merges keep a store at a few files for each half gigabyte."""


def cut(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """The text, or its beginning with dots where it is longer."""
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def digits(text: str) -> int | None:
    """The whole number that ASCII digits say; None for anything else, and for more than NUMBER_DIGITS_MAX of them."""
    if 0 < len(text) <= NUMBER_DIGITS_MAX and text.isascii() and text.isdigit():
        return int(text)
    return None

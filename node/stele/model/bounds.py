"""Bounds of what others may send: numbers that only grow, lengths of strings and lists. One table for the
program.

They are checked where messages and calls are decoded. A call that breaks a bound is refused with the field,
the value's size and the bound. A message between replicas that breaks one is dropped and counted, and logged
once per peer and cause. In neither case does a replica become FAILED.

Invariant: no legitimate node reaches a bound, however long it was away; each line says why. Opens nothing.
"""

from __future__ import annotations

# --- numbers that only grow

TERM_JUMP_MAX = 1 << 32
"""How far a message's term may exceed the replica's own. An election raises a term by one, so ten elections a
second take 13 years. A replica that lags more is led up in steps of this size
(`stele.consensus.message_bounds`), so none is locked out."""
TERM_MAX = 1 << 62
"""The highest term that a message may have. Even with the largest allowed steps it takes 2^30 messages to
reach it."""
INDEX_MAX = 1 << 62
"""The highest log index. At a million entries a second, a log reaches it after 146,000 years."""
FENCE_STEP_MAX = 64
"""How far an order's catalog term or driver epoch may exceed the highest that this node has heard. Heartbeats
bring the newest numbers each second, and may rise further. An order that overtakes them is accepted when it
is sent again."""
EPOCH_MAX = 1 << 62
"""The highest driver epoch. Each take-over of the claim adds one."""
INCARNATION_JUMP_MAX = 1 << 32
"""How often a node may start between two messages from it. At one start a second, that many take 136 years."""
HEARD_ADDRESS_MS = 30_000
"""A node may tell others its address before the masters know its newest start. It is dialled at that address for
this long after it last spoke. The masters hear of each start within a heartbeat."""
INCARNATION_MAX = 1 << 62
"""The highest incarnation of a node or a tablet. Each start adds one; for recoveries see stele.model.incarnation."""
INCARNATION_AHEAD_MAX_MS = 86_400_000
"""By how many ms a node's incarnation may exceed the wall clock. An incarnation begins with the time of
formatting, in ms since 1970, and each start adds one. Clocks may therefore differ by up to a day."""
REPLICA_ID_MAX = 1 << 53
"""The highest replica_id. The catalog counts them per tablet from 1. JSON readers hold whole numbers exactly
up to this."""
UNCOMMITTED_AHEAD_MAX_US = 24 * 3_600_000_000
"""How far the time of an uncommitted entry may exceed the time on most clocks of the cluster. A correct leader
is within seconds of it, or hands over. A machine in a wrong time zone is off by 14 hours at most. Committed
entries are never refused for this. While most clocks disagree or are unknown, nothing is refused."""
CLAIM_TTL_MAX_MS = 30 * 86_400_000
"""How long an unrenewed driver's claim may last: a month. Drivers renew theirs every few seconds."""
WANTED_FOR_MAX_MS = 366 * 86_400_000
"""How long a node may be parked or drained at most: a year. Nobody plans an absence for longer."""
KEEP_DROPPED_MAX_MS = 366 * 86_400_000
"""How long a dropped table may be kept at most: a year. Until then it uses disk, and is healed."""
KEEP_DROPPED_MIN_MS = 1_000
"""How long a dropped table is kept at least. To remove a table at once, delete it."""
DROPPED_TABLES_MAX = 1_000
"""The most dropped tables that a cluster keeps. Each node keeps their ids, and gets the list when it changes."""
LOAD_MAX = 100_000_000
"""The highest load of a leader or a node, in requests a second. A node takes some tens of thousands."""
KEEP_LEADER_MAX_MS = 7 * 86_400_000
"""How long an administrator may keep drivers from moving a tablet's leader: a week."""
SCAN_WAIT_MAX_MS = 86_400_000
"""How long a scan may wait for its snapshot. A longer wait is cut to this. Clients wait for seconds and ask
again."""
ROWS_MAX = (1 << 63) - 1
"""The highest row limit of a scan. Arrow cannot count further."""
BATCH_ROWS_MAX = 1 << 20
"""The most rows of a batch that a scan may ask for. Our clients ask for 32,768."""
WALL_US_MAX = 1 << 52
"""The latest time of a wall clock, in µs since 1970: the year 2112, where hybrid times end."""
TIME_MAX = (1 << 64) - (1 << 58)
"""The highest hybrid time of an entry: the year 2110. Times that follow it must fit into 64 bits, too."""

# --- numbers in text

NUMBER_DIGITS_MAX = 20
"""Digits of a whole number in text; 2^64 has twenty. Python takes quadratic time for long numbers, and
refuses 4,301."""

# --- lengths of strings, in characters

TABLE_NAME_CHARS_MAX = 256
"""Names of tables and key spaces. Clients, operator and masters all refuse longer ones."""
NODE_NAME_CHARS_MAX = 253
"""Names of nodes. They are the names of pods, and Kubernetes allows no longer ones."""
PLACE_CHARS_MAX = 256
"""Names of machines and zones. Kubernetes allows 253 characters for a machine and 63 for a zone."""
ADDRESS_CHARS_MAX = 512
"""HOST:PORT. DNS bounds a host to 253 characters."""
VERSION_CHARS_MAX = 128
"""A program's version."""
WORD_CHARS_MAX = 64
"""A word of a fixed set (role, kind, state, channel), an identifier as text, or a column's type."""
COLUMN_NAME_CHARS_MAX = 128
"""Names of columns. `stele.model.schema` has always had this bound."""
HISTORY_DEFAULT_MS = 15 * 60_000
"""How long old versions of rows are kept for snapshots, unless a table says otherwise."""
HISTORY_MIN_MS, HISTORY_MAX_MS = 60_000, 3_650 * 86_400_000
"""The shortest and the longest history. A scan reads at one snapshot. With less than a minute of history, the
snapshot would often expire before the scan ends."""
HOLDER_CHARS_MAX = 512
"""The name of whoever holds the driver claim."""
TEXT_CHARS_MAX = 4_096
"""Reasons and error messages for people. Our programs cut theirs to this before they send them (`cut`)."""
DEFAULT_BYTES_MAX = 4_096
"""The most bytes of a column's default, as JSON. Each row that lacks the column takes this memory, although
its write did not bring it."""
KEY_BYTES_MAX = 8_192
"""An encoded key or a part of one: the most that `stele.model.keys` makes."""

STATUS_BYTES_MAX = 65_536
"""One replica's status in a heartbeat: about 600 bytes with three peers. Every view of the cluster holds all
of them."""

# --- lengths of lists

PEERS_MAX = 1_000
"""Peers of a configuration. No two are on one machine, and replication factors mostly have a single digit."""
PEERS_HEARD_MAX = 4_096
"""The most nodes for which a process remembers what each said of itself, such as its key and address. If there
are more, the node that was heard first is forgotten."""
NODES_HEARD_MAX = 16_384
"""The most unknown nodes that a master remembers until it leads and has read all registered nodes. Clusters
have hundreds of nodes."""
NODES_UNFORMED_MAX = 1_000
"""The most registered nodes that have never started. An operator registers each node just before it makes its
pod."""
MASTERS_MAX = 16
"""First masters of a cluster: 1, 3 or 5."""
COLUMNS_MAX = 1_000
"""Columns of a table, a key or a projection."""
PARTITIONS_MAX = 100_000
"""Partitions of a table, and tablets named in one request."""

COPY_FILES_MAX = 65_536
"""Files of a tablet that is copied. Merges keep a store at a few files per half gigabyte."""


def cut(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """The text; if it is longer than `chars_max`, its beginning and dots."""
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def digits(text: str) -> int | None:
    """The whole number in ASCII digits; None for any other text and for more than NUMBER_DIGITS_MAX
    digits."""
    if 0 < len(text) <= NUMBER_DIGITS_MAX and text.isascii() and text.isdigit():
        return int(text)
    return None

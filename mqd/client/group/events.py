"""Events and actions of a group membership core. Frozen, without clock, socket or thread; the same
for both protocols.

The shell (runner.py) sends the requests of Send over one connection, in order, and returns
ResponseReceived or ResponseMissing with the same number. Revoke, Assign and Lost are carried out by
the application's thread, in poll(), one after the other; each is ended by Done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Partition(NamedTuple):
    """`topic_id`: b"" where the protocol has only names (classic)."""

    topic: str
    index: int  # type: ignore[assignment]  # not tuple's method
    topic_id: bytes = b""


Partitions = tuple[Partition, ...]

# ---- events ----


class Subscribe(msgspec.Struct, frozen=True):
    """Join, or change the subscription. `regex`: RE2, matched against whole names by the
    coordinator; None: no expression.
    """

    topics: tuple[str, ...]
    regex: str | None = None


class Leave(msgspec.Struct, frozen=True):
    """Release all partitions and leave. Ends with Left."""


class ResponseReceived(msgspec.Struct, frozen=True):
    number: int
    message: Any


class ResponseMissing(msgspec.Struct, frozen=True):
    """The connection ended, or the response could not be read: the coordinator may have handled the
    request or not.
    """

    number: int


class Done(msgspec.Struct, frozen=True):
    """The application has carried out the last Revoke, Assign or Lost."""


class TopicsKnown(msgspec.Struct, frozen=True):
    """The topics of Resolve, and all others that are known. KIP-848: `names` of ids. Classic:
    `counts` of partitions by name, of all topics.
    """

    names: dict[bytes, str] = {}
    counts: dict[str, int] = {}


class Polled(msgspec.Struct, frozen=True):
    """The application has called poll()."""


class Tick(msgspec.Struct, frozen=True):
    """next_ms has come. `is_polling`: the application waits in poll() at this moment."""

    is_polling: bool = False


# ---- actions ----


class Send(msgspec.Struct, frozen=True):
    number: int
    api_key: int
    message: Any
    version_max: int = 1 << 15


class Assign(msgspec.Struct, frozen=True):
    """Adds `partitions` to the assignment; `is_incremental` False: they are the whole one (eager)."""

    partitions: Partitions
    is_incremental: bool = True


class Revoke(msgspec.Struct, frozen=True):
    """Commit, then stop: another member may get them as soon as this is Done."""

    partitions: Partitions
    is_incremental: bool = True


class Lost(msgspec.Struct, frozen=True):
    """Stop: they may have other owners already, and a commit would be refused."""

    partitions: Partitions
    is_incremental: bool = True


class Resolve(msgspec.Struct, frozen=True):
    """Answered by TopicsKnown, again until the ids are known. `topics`: the names whose partition
    counts are wanted; None: of all (an expression).
    """

    topic_ids: tuple[bytes, ...] = ()
    topics: tuple[str, ...] | None = ()


class Problem(msgspec.Struct, frozen=True):
    """For the application. `code`: Kafka's, or one of librdkafka's negative ones. Fatal: the member
    has given up; only a new consumer joins again.
    """

    code: int
    text: str
    is_fatal: bool = False


class Left(msgspec.Struct, frozen=True):
    """The member has left, as requested."""


Event = Subscribe | Leave | ResponseReceived | ResponseMissing | Done | TopicsKnown | Polled | Tick
Action = Send | Assign | Revoke | Lost | Resolve | Problem | Left

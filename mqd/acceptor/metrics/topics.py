"""The series of topics, as text: what clients wrote to and read from this host's replicas."""

from collections.abc import Callable

from mqd.acceptor.broker import Broker
from mqd.native import NativeError

FAMILIES = (
    ("mqd_topic_records_in_total", "Records appended for clients"),
    ("mqd_topic_bytes_in_total", "Bytes of records appended for clients"),
    ("mqd_topic_bytes_out_total", "Bytes of records sent to clients; not what local clients read from the files"),
)
_Counts = tuple[int, int, int]
_NONE: _Counts = (0, 0, 0)


def _sum(left: _Counts, right: _Counts) -> _Counts:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


class Topics:
    """Sums over partitions. A slot's counts restart from zero when another partition gets the slot, and
    a plain sum of them would fall when a replica moves away: Prometheus would take that for a restart
    and count the rest twice. So increases are summed here, from scrape to scrape.
    """

    def __init__(self) -> None:
        self._totals: dict[str, _Counts] = {}
        self._seen: dict[tuple[bytes, int], _Counts] = {}

    def text(self, broker: Broker, slot_traffic: Callable[[int], _Counts]) -> str:
        totals: dict[str, _Counts] = {}
        seen: dict[tuple[bytes, int], _Counts] = {}
        for topic in broker.metadata.topics_with_logs():
            total = self._totals.get(topic.name)
            for partition in topic.partitions:
                if partition.slot < 0:  # there is no replica here
                    continue
                key = (topic.topic_id, partition.index)
                before = self._seen.get(key, _NONE)
                try:
                    counts = slot_traffic(partition.slot)
                except NativeError:
                    counts = before
                if any(now < then for now, then in zip(counts, before, strict=True)):
                    before = _NONE  # the replica was away from this host in between
                grown = counts[0] - before[0], counts[1] - before[1], counts[2] - before[2]
                total = _sum(total or _NONE, grown)
                seen[key] = counts
            if total is not None:
                totals[topic.name] = total
        self._totals, self._seen = totals, seen
        lines = []
        for index, (name, about) in enumerate(FAMILIES):
            lines.append(f"# HELP {name} {about}\n# TYPE {name} counter\n")
            lines += [f'{name}{{topic="{topic}"}} {counts[index]}\n' for topic, counts in totals.items()]
        return "".join(lines)

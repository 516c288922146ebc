"""The metrics of each topic, as Prometheus text: what clients wrote to and read from this host's
replicas.
"""

from collections.abc import Callable

from mqd.acceptor.broker import Broker
from mqd.native import NativeError

FAMILIES = (
    ("mqd_topic_records_in_total", "Records appended for clients"),
    ("mqd_topic_bytes_in_total", "Bytes of records appended for clients"),
    (
        "mqd_topic_bytes_out_total",
        "Bytes of records sent to clients, excluding those that local clients read directly from the files",
    ),
)
_Counts = tuple[int, int, int]
_ZERO: _Counts = (0, 0, 0)


def _sum(left: _Counts, right: _Counts) -> _Counts:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


class TopicTraffic:
    """The traffic of each topic, summed over its partitions. A slot's counts restart from zero when
    another partition gets the slot, and a plain sum of them would fall when a replica moves away:
    Prometheus would take that for a restart and count the remaining sum twice. So increases are
    summed here, from scrape to scrape.
    """

    def __init__(self) -> None:
        self._totals: dict[str, _Counts] = {}
        self._last_counts: dict[tuple[bytes, int], _Counts] = {}

    def text(self, broker: Broker, slot_traffic: Callable[[int], _Counts]) -> str:
        totals: dict[str, _Counts] = {}
        last_counts: dict[tuple[bytes, int], _Counts] = {}
        for topic in broker.metadata.topics_with_logs():
            total = self._totals.get(topic.name)
            for partition in topic.partitions:
                if partition.slot < 0:  # there is no replica here
                    continue
                key = (topic.topic_id, partition.index)
                last = self._last_counts.get(key, _ZERO)
                try:
                    counts = slot_traffic(partition.slot)
                except NativeError:
                    counts = last
                if any(new < old for new, old in zip(counts, last, strict=True)):
                    last = _ZERO  # the replica was away from this host in between
                increase = counts[0] - last[0], counts[1] - last[1], counts[2] - last[2]
                total = _sum(total or _ZERO, increase)
                last_counts[key] = counts
            if total is not None:
                totals[topic.name] = total
        self._totals, self._last_counts = totals, last_counts
        lines = []
        for index, (name, help_text) in enumerate(FAMILIES):
            lines.append(f"# HELP {name} {help_text}\n# TYPE {name} counter\n")
            lines += [f'{name}{{topic="{topic}"}} {counts[index]}\n' for topic, counts in totals.items()]
        return "".join(lines)

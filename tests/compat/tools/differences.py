"""Where mqd's output may differ from Apache Kafka's, each with a reason. A difference that is not
listed here fails its story, and so does an entry that a story does not need.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable

from tests.compat.tools.sides import Step

# A client's message for an error code, and the message sent by the broker
MESSAGE = re.compile(r"(org\.apache\.kafka\.common\.errors\.\w+Exception):.*")
WORDS = "the text of an error message"


@dataclasses.dataclass(frozen=True)
class Allowed:
    """`stories`: a pattern of names. `part`: removed from both sides' lines before they are
    compared. `lines`: a pattern of lines that only one side has.
    """

    reason: str
    stories: str
    part: str = ""
    lines: str = ""


MIN_ISR = (
    "the default of a topic's `min.insync.replicas` depends on its number of replicas, and descriptions show the"
    " effective number;"
    " Kafka gives the cluster a default of 1"
)
SYNONYMS = (
    "mqd always lists the default of a setting as the last of its synonyms, which Kafka does not do for every setting;"
    " mqd converts `log.retention.hours` to `log.retention.ms`"
)
TEXTS = "the message is mqd's own, and also names the cause or the remedy"
STRICT = "an unknown setting of a broker is refused; Kafka stores it"

BETWEEN = "requests that are only sent between brokers are not advertised to clients"
SHARE_START = (
    "the start offset of a share-partition advances in the same write that marks records as finished, and is set at the"
    " first fetch; Kafka writes it later"
)
TIERED = (
    "not in mqd: tiered storage and its settings. `flush.on.ack`, `record.validation`, `replica.lag.max.messages`,"
    " `schedule.*`, `queue.delete.on.ack`, `queue.unflushed.bytes`, `share.priority`, `view.*`, `dedup.*`"
    " and `acks.replicas` are mqd's own;"
    " `errors.deadletterqueue.group.enable` exists in Kafka only from 4.4 on"
)
INTERNAL = "internal topics have explicit settings of mqd's own"
FORMATS = "values in internal topics: OffsetCommitValue is version 3, not 4; `previousProducerId` is always written"
INDEX = (
    "mqd's offset index has the first offset of a batch, Kafka's has the last one. Either broker reads either form;"
    " the tool reports a mismatch"
)
ELR = "with no leader and an empty ISR, Kafka lists the last leader under LastKnownElr too; mqd lists it under Elr only"
GROUP_CONFIGS = "when a group's last setting is deleted, its entry is removed; Kafka keeps an empty entry"
VOTERS = "a single broker has no directory id and no separate controller listener"
FEATURES = "mqd has a feature of its own, `mqd.version`, and its oldest metadata.version is that of Kafka 4.0"
ERROR = r"err (java\.util\.concurrent\.ExecutionException: |Caused by: |)org\.apache\.kafka\.common\.errors\."
FAILED = r"err Error while executing config command .*"
CODES = r"exit [01]"

ALLOWED = (
    Allowed(
        MIN_ISR,
        "(topics: (create|with conf|internal|three)|configs: a topic: all).*",
        part=r"\bmin\.insync\.replicas=-?\d+,?",
    ),
    Allowed(
        MIN_ISR,
        "(configs: a broker: set|configs: three|reassign-partitions: three brokers: thr).*",
        lines=r"out min\.insync\.replicas=.*",
    ),
    Allowed(
        SYNONYMS,
        "configs: a topic: all.*",
        part=r"[, ]*\b(DYNAMIC_DEFAULT_BROKER_CONFIG|DEFAULT_CONFIG):[\w.]*(=[\w.-]*)?",
    ),
    Allowed(
        SYNONYMS,
        "(configs: (a broker|groups|three)|reassign-partitions: three brokers: thr).*",
        part=r", (STATIC_BROKER_CONFIG|DEFAULT_CONFIG):[\w.=-]+",
    ),
    Allowed(
        TIERED,
        "configs: a topic: all.*",
        lines=r"out ((local|remote|schedule)\.[\w.]+|flush\.on\.ack|record\.validation|replica\.lag\.max\.messages"
        r"|queue\.(?:delete\.on\.ack|unflushed\.bytes)|share\.priority|view\.[a-z]+|dedup\.[a-z.]+|acks\.replicas"
        r"|errors\.deadletterqueue\.group\.enable)=.*",
    ),
    Allowed(TEXTS, "topics: names (and|that).*", lines=r"out Error while executing topic command : Topic .*"),
    Allowed(INTERNAL, "topics: internal.*", lines=r"out Topic: __consumer_offsets TopicId: ID PartitionCount: 4 .*"),
    Allowed(
        STRICT,
        "configs: a broker: set.*",
        lines=rf"{CODES}|{FAILED}|err Invalid config\(s\): no\.such\.config"
        rf"|out Completed updating config for broker 1\.|{ERROR}InvalidConfigurationException",
    ),
    Allowed(
        GROUP_CONFIGS,
        "configs: groups",
        lines=r"out (Dynamic configs for group tuned are:|The group 'tuned' doesn't exist.*)",
    ),
    Allowed(FEATURES, "features: .*", lines=r"out Feature: (mqd|metadata)\.version .*"),
    Allowed(TEXTS, "features: .*", lines=r"out (Can|Could) not .*"),
    Allowed(
        SHARE_START, "share-groups: a group.*", lines=r"out sharers of-sharers (0 (0 )?(0|10) 0|1 (0 0( 0)?|- -( -)?))"
    ),
    Allowed(TEXTS, "share-groups: a group.*", lines=r"out nowhere Error: .*"),
    Allowed(BETWEEN, "broker-api-versions: .*", lines=r"out \w*ShareGroupState\w*\(\d+\): .*"),
    Allowed(VOTERS, "metadata-quorum: status.*", lines=r"out CurrentVoters: .*"),
    Allowed(
        FORMATS, "(console-consumer: from|dump-log: seg).*", part=r'"version": ?"?[34]"?,|"previousProducerId":\d+,'
    ),
    Allowed(INDEX, "dump-log: seg.*", lines=r"out offset: \d+ position: \d+|err (Mismatches|Index offset).*"),
    Allowed(ELR, "topics: three.*", part=r"LastKnownElr:( 3)?"),
)


def differing(kafka: list[str], mqd: list[str]) -> list[str]:
    """`- ` for Kafka's lines, `+ ` for mqd's."""
    return [line for line in difflib.ndiff(kafka, mqd) if line[0] in "-+"]


class Verdict:
    """The comparison of one story: `unexplained` lines by step, the `reasons` that were needed, and
    `unused` entries of the table.
    """

    def __init__(self, name: str, kafka: list[Step], mqd: list[Step], table: Iterable[Allowed] = ALLOWED) -> None:
        told = [[(step.tool, step.words) for step in steps] for steps in (kafka, mqd)]
        assert told[0] == told[1], "a story does the same on both sides"
        self.unexplained: list[str] = []
        self._entries = [entry for entry in table if re.fullmatch(entry.stories, name)]
        self._used: set[Allowed] = set()
        self.words_differ = False
        for left, right in zip(kafka, mqd, strict=True):
            if left.lines() != right.lines():
                self._compare(left, right)
        self.unused = [entry for entry in self._entries if entry not in self._used]

    def _compare(self, left: Step, right: Step) -> None:
        kafka, mqd = left.lines(), right.lines()
        worded = [[MESSAGE.sub(r"\1", line) for line in lines] for lines in (kafka, mqd)]
        if differing(*worded) != differing(kafka, mqd):
            self.words_differ = True
        kafka, mqd = worded
        for entry in self._entries:
            if entry.part:
                cut = [[re.sub(entry.part, "", line).rstrip(" ,") for line in lines] for lines in (kafka, mqd)]
                if cut != [kafka, mqd]:
                    self._used.add(entry)
                kafka, mqd = cut
        left_over = []
        for line in differing(kafka, mqd):
            found = next(
                (entry for entry in self._entries if entry.lines and re.fullmatch(entry.lines, line[2:])), None
            )
            if found is None:
                left_over.append(line)
            else:
                self._used.add(found)
        if left_over:
            self.unexplained += [f"{left.tool} {left.words}", *(f"    {line}" for line in left_over)]


def reasons(name: str, table: Iterable[Allowed] = ALLOWED) -> list[str]:
    """The reasons of a story, in the order of the table, each once."""
    return list(dict.fromkeys(entry.reason for entry in table if re.fullmatch(entry.stories, name)))

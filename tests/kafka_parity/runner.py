"""Runs cases on both brokers in parallel and counts differences.

Cases run in rounds: their topics are created together before and deleted together after. A
difference counts when the case shows it again with another prefix; otherwise it is counted as
fleeting.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Iterable

from mqd.protocol import KNOWN, SUPPORTED
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode
from mqd.protocol.schema.language import Versions
from tests.kafka_parity.compare import ON_RESEND, Difference, Table, compared, learn
from tests.kafka_parity.journal import Case as Number
from tests.kafka_parity.journal import Journal
from tests.kafka_parity.model import NO_UUID, PREFIX, Batch, Case, Ref, Step, World
from tests.kafka_parity.sides import Outcome, Side
from tests.kafka_parity.stories import FEWER, KEYS, LEFT_OUT, generate
from tests.kafka_parity.values import LIBRARY
from tests.kafka_parity.witnesses import FIRST_NUMBER, directed

ROUND = 25
MADE = ("¤c", "¤d", "x" * 249)  # topics created by cases of CreateTopics
SETTLE_S = 3.0
AWAIT_S = 10.0
WITHIN_TRANSACTIONS = [
    KEYS[name]
    for name in ("Produce", "InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn", "EndTxn", "TxnOffsetCommit")
]
# Kafka ends the previous transaction; it reports this to producers as NOT_ENOUGH_REPLICAS.
CONCURRENT = re.compile(
    rf"error_code=({int(ErrorCode.CONCURRENT_TRANSACTIONS)}|{int(ErrorCode.NOT_ENOUGH_REPLICAS)})\b"
)


@dataclasses.dataclass
class Report:
    journal: Journal = dataclasses.field(default_factory=Journal)
    requests: int = 0

    @property
    def cases(self) -> dict[tuple[str, int], int]:
        """How many cases each API version has had."""
        return dict(collections.Counter((api, version) for api, version, _, _ in self.journal.found))

    @property
    def found(self) -> dict[Difference, list[Number]]:
        """Each difference with its cases."""
        return _by_difference(self.journal.found)

    def scarce(self, count: int) -> list[str]:
        """Versions with fewer distinct cases than required of any one seed, without a stated
        reason.
        """
        most: dict[tuple[str, int], int] = {}
        generated = [case[:3] for case in self.journal.found if case[3] < FIRST_NUMBER]
        for (api, version, _), found in collections.Counter(generated).items():
            most[api, version] = max(found, most.get((api, version), 0))
        return [
            f"{api} {version}: {found} cases"
            for (api, version), found in most.items()
            if found < count and not (api in FEWER and version in Versions.parse(FEWER[api][0]))
        ]

    def lines(self) -> Iterable[str]:
        for (api, version), count in self.cases.items():
            yield f"{api} {version}: {count} cases"
        fleeting = _listed("FLEETING", _by_difference(self.journal.fleeting))
        found = _listed("DIFFERENT", self.found)
        yield from [*fleeting, *found]
        yield (
            f"{sum(self.cases.values())} cases, {self.requests} requests, {len(found)} differences, "
            f"{len(fleeting)} fleeting"
        )


def _by_difference(cases: dict[Number, list[Difference]]) -> dict[Difference, list[Number]]:
    met = collections.defaultdict(list)
    for case, differences_ in cases.items():
        for difference in differences_:
            met[difference].append(case)
    return met


def _listed(word: str, met: dict[Difference, list[Number]]) -> list[str]:
    groups = collections.defaultdict(list)
    for difference, cases in met.items():
        groups[difference.api, difference.field, *_kinds(difference)].append((difference.version, cases))
    lines = []
    for (api, field, kafka, mqd), group in sorted(groups.items(), key=lambda item: item[0][:2]):
        versions = sorted({version for version, _ in group})
        count, first = sum(len(cases) for _, cases in group), group[0][1][0]
        lines.append(
            f"{word} {api} {versions} {field}: Kafka {kafka}, mqd {mqd} ({count} cases, {first[0]} {first[1]}"
            f" {first[3]})"
        )
    return lines


def _kinds(difference: Difference) -> tuple[str, str]:
    """Listed together: elements on one side only, and other orders, whatever their names."""
    if "[] " in difference.field:
        return ("", "")
    return _short(difference.kafka), _short(difference.mqd)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


class Comparison:
    def __init__(self, kafka: Side, mqd: Side, table: Table, journal: Journal | None = None) -> None:
        self.sides, self.table = (kafka, mqd), table
        self.shared = (World(""), World(""))
        for side, world in zip(self.sides, self.shared, strict=True):
            world.name(side.port, "<its port>")
        self.report = Report(journal or Journal())
        self._known: set[Difference] = set()  # found by this run: queries do not wait for it again
        self.trace: Callable[[str], None] | None = None
        self._repeats = [False, False]
        self.tag = ""  # precedes every prefix: for brokers that have been compared before

    # -- the prepared state ------------------------------------------------------------------------

    def prepare(self) -> None:
        """The shared topic and the coordinators, on both."""
        for side, world in zip(self.sides, self.shared, strict=True):
            for kind, key in ((0, "library-group"), (1, "library-done")):
                side.until(world, Step(KEYS["FindCoordinator"], 3, m.FindCoordinatorRequest(key, kind)), _is_ok)
            self._make_topics(side, world, [(LIBRARY, 2)])
        history = [
            Batch((b"a", b"b", b"c")),
            Batch((b"d",) * 4, compression="gzip"),
            Batch((b"e",), timestamp_ms=1_700_000_000_001),
        ]
        for side, world in zip(self.sides, self.shared, strict=True):
            for batch in history:
                partition = m.ProduceRequest.PartitionData(index=0, records=batch)
                data = m.ProduceRequest.TopicData(name=LIBRARY, partition_data=[partition])
                outcome = side.call(Step(0, 9, m.ProduceRequest(acks=-1, timeout_ms=10000, topic_data=[data])), world)
                assert outcome.body.responses[0].partition_responses[0].error_code == 0, outcome

            for transactional_id in ("library-done", "library-open"):
                side.until(world, Step(22, 4, m.InitProducerIdRequest(transactional_id, 600000)), _is_ok)

    def know_library(self) -> None:
        """The shared topic's id, for brokers that were prepared before."""
        for side, world in zip(self.sides, self.shared, strict=True):
            self._make_topics(side, world, [(LIBRARY, 2)])

    def _make_topics(self, side: Side, world: World, topics: list[tuple[str, int]]) -> None:
        made = [m.CreateTopicsRequest.Topic(name, partitions, 1) for name, partitions in topics]
        for start in range(0, len(made), 200):
            request = m.CreateTopicsRequest(made[start : start + 200], 30000)
            side.until(world, Step(KEYS["CreateTopics"], 7, request), _are_there)
        asked = m.MetadataRequest([m.MetadataRequest.Topic(NO_UUID, name) for name, _ in topics], False)
        outcome = side.until(world, Step(KEYS["Metadata"], 12, asked), _all_led)
        world.name(outcome.body.cluster_id, "<cluster id>")
        for topic in outcome.body.topics:
            world.save(Ref("topic_id", topic.name), topic.topic_id)
        # Kafka's partitions accept requests a moment after its metadata names their leader.
        latest = [
            m.ListOffsetsRequest.Topic(
                name, [m.ListOffsetsRequest.Partition(number, -1, -1) for number in range(count)]
            )
            for name, count in topics
        ]
        side.until(world, Step(KEYS["ListOffsets"], 7, m.ListOffsetsRequest(-1, 0, latest)), _all_answer)

    # -- cases -------------------------------------------------------------------------------------

    def versions(self) -> list[tuple[int, int]]:
        """Every API and version that both advertise, and that can be compared."""
        spoken = []
        for side in self.sides:
            body = side.call(Step(18, 0, m.ApiVersionsRequest()), World("")).body
            spoken.append({api.api_key: (api.min_version, api.max_version) for api in body.api_keys})
        pairs = []
        for key, spec in SUPPORTED.items():
            if spec.name not in LEFT_OUT and all(key in one for one in spoken):
                first, last = max(one[key][0] for one in spoken), min(one[key][1] for one in spoken)
                pairs += [(key, version) for version in range(first, last + 1)]
        return pairs

    def run(self, api_key: int, version: int, seed: int, count: int, only: int | None = None) -> None:
        """The cases of a seed, and then the directed ones."""
        api, journal, made = KNOWN[api_key].name, self.report.journal, directed(api_key, version)
        # without the cost of creating them again
        if only is not None or not all(journal.is_done((api, version, seed, number)) for number in range(count)):
            made = [*enumerate(generate(api_key, version, seed, count)), *made]
        numbered = [
            (number, case)
            for number, case in made
            if (not journal.is_done((api, version, seed, number)) if only is None else only == number)
        ]
        self._compare(api, version, seed, numbered)

    def _compare(self, api: str, version: int, seed: int, numbered: list[tuple[int, Case]]) -> None:
        journal = self.report.journal
        for start in range(0, len(numbered), ROUND):
            batch = numbered[start : start + ROUND]
            found = self._round(batch, "")
            again = [(number, case) for number, case in batch if found[number]]
            second = self._round(again, "r") if again else {}
            outcomes = {
                number: (found[number] & second.get(number, set()), found[number] - second.get(number, set()))
                for number, _ in batch
            }
            self._known.update(*(back for back, _ in outcomes.values()))
            journal.add({(api, version, seed, number): outcome for number, outcome in outcomes.items()}, self.table)

    def _round(self, numbered: list[tuple[int, Case]], mark: str) -> dict[int, set[Difference]]:
        names = {
            number: f"{self.tag}{KNOWN[case.api_key].name.lower()}.{case.version}.{number}{mark}-"
            for number, case in numbered
        }
        worlds = {}
        for side, shared in zip(self.sides, self.shared, strict=True):
            made = World("")
            topics = [
                (topic.name.replace(PREFIX, names[number]), topic.partitions)
                for number, case in numbered
                for topic in case.topics
            ]
            if topics:
                self._make_topics(side, made, topics)
            for number, case in numbered:
                worlds[side, number] = world = World(names[number], shared)
                for topic in case.topics:
                    found = made.values[Ref("topic_id", topic.name.replace(PREFIX, names[number]))]
                    world.save(Ref("topic_id", topic.name), found)
        found = {
            number: self._case(case, tuple(worlds[side, number] for side in self.sides)) for number, case in numbered
        }
        made = {name for number, case in numbered for name in [*(topic.name for topic in case.topics), *MADE]}
        self._delete_topics([name.replace(PREFIX, names[number]) for number, _ in numbered for name in sorted(made)])
        return found

    def _delete_topics(self, names: list[str]) -> None:
        for side in self.sides:
            side.call(
                Step(KEYS["DeleteTopics"], 5, m.DeleteTopicsRequest(topic_names=names, timeout_ms=30000)), World("")
            )

    def _case(self, case: Case, worlds: tuple[World, World]) -> set[Difference]:
        found: set[Difference] = set()
        for step in case.steps:
            deadline = time.monotonic() + SETTLE_S
            while True:
                outcomes = self._both(step, worlds)
                seen, allowed = compared(step.api_key, step.version, outcomes, worlds, self.table)
                seen = [_hashable(difference) for difference in seen]
                if not step.settles or time.monotonic() > deadline or self._known.issuperset(seen):
                    break
                time.sleep(0.05)  # polls other processes; there is no event to wait for
            found.update(seen)
            # Later steps are not compared with what Kafka had done before an exception; nor with
            # what only one of them has done, where that is allowed.
            code = getattr(outcomes[0].body, "error_code", 0)
            is_divided = any(map(divides, allowed)) or (code and self._repeats[0] != self._repeats[1])
            if code == ErrorCode.UNKNOWN_SERVER_ERROR or is_divided:
                break
        for side in self.sides:
            side.close_extra()
        return found

    def _both(self, step: Step, worlds: tuple[World, World]) -> tuple[Outcome, Outcome]:
        waiting = [side.send(step, world) for side, world in zip(self.sides, worlds, strict=True)]
        asked = [
            _asked_again(side, step, world, wait())
            for side, world, wait in zip(self.sides, worlds, waiting, strict=True)
        ]
        outcomes = tuple(outcome for outcome, _ in asked)
        # one may have ended a transaction before it refused
        self._repeats = [is_repeated and step.api_key in WITHIN_TRANSACTIONS for _, is_repeated in asked]
        if self.trace:
            self.trace(f"{step!r}\n    Kafka {outcomes[0]}\n    mqd   {outcomes[1]}")
        for outcome, world in zip(outcomes, worlds, strict=True):
            learn(step.api_key, outcome, world)
            if outcome.kind == "answered":
                for ref, field in step.saves:
                    if (given := getattr(outcome.body, field)) is not None:
                        world.save(ref, given)
        self.report.requests += 1
        return outcomes


def _asked_again(side: Side, step: Step, world: World, outcome: Outcome) -> tuple[Outcome, bool]:
    """As producers do while Kafka ends the previous transaction, and until the awaited value is
    there. The last outcome, and whether there was one before it.
    """
    is_repeated = False
    deadline = time.monotonic() + (AWAIT_S if step.awaits else SETTLE_S)
    while outcome.kind == "answered" and time.monotonic() < deadline:
        is_concurrent = step.api_key in WITHIN_TRANSACTIONS and CONCURRENT.search(repr(outcome.body))
        if not is_concurrent and not (step.awaits and is_missing(outcome.body, step.awaits)):
            break
        time.sleep(0.05)  # polls another process; there is no event to wait for
        outcome, is_repeated = side.call(step, world), True
    return outcome, is_repeated


def is_missing(body: object, path: str) -> bool:
    """Only the first element of lists is checked."""
    for name in path.split("."):
        body = getattr(body[0] if isinstance(body, list) and body else body, name, None)
    return not body


def divides(difference: Difference) -> bool:
    """Whether one of them has failed, or done nothing, where the other has done what was requested."""
    codes = (difference.kafka, difference.mqd)
    field = difference.field.removesuffix(ON_RESEND)
    return field.endswith("error_code") and (codes[0] == ErrorCode.UNKNOWN_SERVER_ERROR or 0 in codes)


def _hashable(difference: Difference) -> Difference:
    """Values as text: lists of records and names are compared as such."""
    return dataclasses.replace(
        difference,
        kafka=difference.kafka if isinstance(difference.kafka, int | str | None) else repr(difference.kafka),
        mqd=difference.mqd if isinstance(difference.mqd, int | str | None) else repr(difference.mqd),
    )


def _is_ok(body: object) -> bool:
    return body.error_code == 0


def _are_there(body: object) -> bool:
    return all(topic.error_code in (0, ErrorCode.TOPIC_ALREADY_EXISTS) for topic in body.topics)


def _all_led(body: object) -> bool:
    return all(
        topic.error_code == 0 and all(part.leader_id >= 0 and not part.error_code for part in topic.partitions)
        for topic in body.topics
    )


def _all_answer(body: object) -> bool:
    return not any(partition.error_code for topic in body.topics for partition in topic.partitions)

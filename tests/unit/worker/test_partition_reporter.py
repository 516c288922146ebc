"""A worker's reports to its controller about the replicated partitions that it leads."""

from types import SimpleNamespace

from mqd.cluster.host.messages import (
    BrokerImage,
    Image,
    InSyncResponse,
    PartitionEmptied,
    PartitionImage,
    PartitionsPut,
    ProposeInSync,
    TopicImage,
)
from mqd.native.reactor import Proposal
from mqd.worker.catalog import Catalog
from mqd.worker.partition_reporter import PartitionReporter

NODE, TOPIC = 2, b"t" * 16
GRACE_S = 10.0


class Bench:
    """`sent`: messages to the controller; `told`: the results passed to the reactor."""

    def __init__(self, **partition) -> None:
        brokers = [BrokerImage(node, "h", 9, None, 5, worker_count=1) for node in (1, 2, 3)]
        self.catalog = Catalog(0)
        self.catalog.on_image(
            Image(1, "c", 1, brokers, [TopicImage("t", TOPIC, [self.partition(**partition)], {})], {}, node_id=NODE)
        )
        owned = self.catalog.owned[TOPIC, 0]
        opened = SimpleNamespace(owned=owned, closing=False)
        self.opened = opened
        self.partitions = SimpleNamespace(open={owned.key: opened}, by_slot={owned.slot: opened})
        self.sent: list[object] = []
        self.reported: list[tuple] = []
        self.view = SimpleNamespace(log_start_offset=3, log_end_offset=9)
        reactor = SimpleNamespace(in_sync_response="in_sync_response")
        commands = SimpleNamespace(run=lambda *arguments: arguments)
        control = SimpleNamespace(slot_view=lambda _slot: self.view)
        self.now_s = 100.0
        self.reporter = PartitionReporter(
            control,
            reactor,
            commands,
            self.partitions,
            self.catalog,
            self.sent.append,
            self.reported.append,
            GRACE_S,
            lambda: self.now_s,
        )

    @staticmethod
    def partition(leader: int = NODE, leader_epoch: int = 4, **fields) -> PartitionImage:
        return PartitionImage(0, 5, 0, 0, leader, leader_epoch, [1, 2, 3], [2], 7, **fields)

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self.reporter.check()

    def propose(self, sequence: int = 1) -> None:
        self.reporter.on_proposal(SimpleNamespace(slot=5, proposal=Proposal(sequence, 5, 4, 7, ((2, 5), (3, 5)))))


def test_a_proposal_goes_to_the_controller_and_its_result_to_the_reactor() -> None:
    bench = Bench()
    bench.propose()
    assert bench.sent == [ProposeInSync(TOPIC, 0, 4, 7, [(2, 5), (3, 5)], 1)]
    bench.reporter.on_response(InSyncResponse(TOPIC, 0, 4, 1, 55))
    assert bench.reported == [("in_sync_response", 5, 1, 4, 55)]
    bench.reporter.check()
    assert len(bench.sent) == 1, "there is nothing else to report"


def test_closed_partitions_are_not_reported() -> None:
    bench = Bench(recovering=True, retiring=2)
    bench.partitions.open.clear(), bench.partitions.by_slot.clear()
    bench.propose()
    bench.reporter.on_response(InSyncResponse(TOPIC, 0, 4, 1, 0))
    bench.reporter.check()
    assert bench.sent == bench.reported == []


def test_an_unclean_leader_reports_its_recovery_until_acknowledged() -> None:
    bench = Bench(recovering=True)
    for _ in range(2):
        bench.reporter.check()
    assert bench.sent == [ProposeInSync(TOPIC, 0, 4, 7, [(2, 5)], 0, True)] * 2
    bench.reporter.on_response(InSyncResponse(TOPIC, 0, 4, 0, 0))
    assert bench.reported == [], "the reactor has not requested it"
    bench.propose()
    assert bench.sent[-1].recovered and bench.sent[-1].sequence == 1
    bench.reporter.check()
    assert len(bench.sent) == 3, "the reactor's own proposals say it from now on, and in order"
    bench.catalog.on_message(PartitionsPut(2, TOPIC, [bench.partition()]))
    bench.propose(2)
    assert not bench.sent[-1].recovered


def test_a_follower_does_not_report_recovery() -> None:
    bench = Bench(leader=1, recovering=True, retiring=2)
    bench.view = SimpleNamespace(log_start_offset=9, log_end_offset=9)
    bench.reporter.check()
    assert bench.sent == []


def test_a_retiring_partition_is_reported_when_it_is_empty() -> None:
    bench = Bench(retiring=2)
    bench.reporter.check()
    assert bench.sent == []
    bench.view = SimpleNamespace(log_start_offset=9, log_end_offset=9)
    bench.reporter.check()
    assert bench.sent == [PartitionEmptied(TOPIC, 0, 4)]


def hidden() -> Bench:
    bench = Bench(retiring=3)
    bench.view = SimpleNamespace(log_start_offset=9, log_end_offset=9)
    bench.pass_time(1)
    return bench


def test_a_hidden_partition_is_reported_after_the_grace_period_without_writes() -> None:
    bench = hidden()
    bench.pass_time(10)
    assert bench.sent == [], "a use may be reported a second late"
    bench.pass_time(2)
    assert bench.sent == [PartitionEmptied(TOPIC, 0, 4)] * 2, "as long as it is so"
    bench.reporter.on_used(SimpleNamespace(slot=77))
    bench.reporter.on_used(SimpleNamespace(slot=5))
    bench.pass_time(11)
    assert len(bench.sent) == 2
    bench.pass_time(1)
    assert len(bench.sent) == 3


def test_time_while_the_worker_is_stopped_does_not_count() -> None:
    bench = hidden()
    bench.pass_time(2)
    bench.now_s += 3_600
    bench.pass_time(2)
    assert bench.sent == []


def test_observations_of_another_host_do_not_count() -> None:
    bench = hidden()
    bench.pass_time(9)
    bench.catalog.on_message(PartitionsPut(2, TOPIC, [bench.partition(leader=1, retiring=3, leader_epoch=5)]))
    bench.pass_time(20)
    assert bench.sent == [], "another host leads it"
    bench.catalog.on_message(PartitionsPut(3, TOPIC, [bench.partition(retiring=3, leader_epoch=6)]))
    bench.pass_time(11)
    assert bench.sent == []
    bench.pass_time(1)
    assert bench.sent == [PartitionEmptied(TOPIC, 0, 6)]

"""The control plane of large clusters, by running its cores: the metadata of up to a million
partitions as a snapshot, its installation in a broker, the failover of thousands of leaders, the
heartbeats of a thousand hosts. CPU time of one core; it excludes the network, the disk's flush and
the workers' own work, as the page says.

The model: `hosts` brokers in racks, topics of TOPIC_PARTITIONS partitions with three replicas
placed in turn, min.insync.replicas 2, everything in sync. Ids are as long as real ones.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from statistics import median

import msgspec

from mqd.base.config import load_broker
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.cluster.host.core import HostCore
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.core import MetadataCore
from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.metadata.records import (
    BrokerRegistered,
    BrokerState,
    ClusterCreated,
    PartitionState,
    TopicCreated,
    TopicState,
    decode_record,
    encode_record,
)
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft.store import decode_state, encode_state

TOPIC_PARTITIONS = 100
WORKERS = 8
SLOTS = 1 << 20
REPETITIONS = 3
_encode = msgspec.msgpack.Encoder().encode
_from_controller = msgspec.msgpack.Decoder(messages.FromController)


def cluster(partitions: int, hosts: int, seed: int = 1) -> MetadataState:
    rng = random.Random(seed)
    state = MetadataState()
    state.apply(ClusterCreated("c" * 22, 1))
    directories = {}
    for node in range(1, hosts + 1):
        directories[node] = "%022x" % rng.getrandbits(88)
        state.apply(
            BrokerRegistered(
                BrokerState(
                    node,
                    f"broker-{node}.example.org",
                    9092,
                    f"rack-{node % 10}",
                    state.version,
                    rng.getrandbits(40),
                    {directories[node]: "/var/lib/mqd/data"},
                    False,
                    False,
                    False,
                    f"broker-{node}.example.org",
                    9093,
                    f"broker-{node}.example.org",
                    9094,
                    WORKERS,
                    "%022x" % rng.getrandbits(88),
                    {"metadata.version": (25, 29)},
                )
            )
        )
    for number in range(partitions // TOPIC_PARTITIONS):
        first = rng.randrange(hosts)
        made = []
        for index in range(TOPIC_PARTITIONS):
            replicas = tuple((first + index * 7 + step * (1 + number % 5)) % hosts + 1 for step in range(3))
            if len(set(replicas)) < 3:
                replicas = tuple((first + index + step) % hosts + 1 for step in range(3))
            made.append(
                PartitionState(
                    index,
                    replicas,
                    tuple(directories[node] for node in replicas),
                    replicas,
                    replicas[0],
                    rng.randrange(20),
                    rng.randrange(40),
                )
            )
        state.apply(
            TopicCreated(
                TopicState(
                    f"department-{number % 40}.topic-{number}",
                    rng.randbytes(16),
                    tuple(made),
                    {"min.insync.replicas": "2", "retention.ms": "604800000"},
                )
            )
        )
    return state


def seconds(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median CPU time of `work` in this process, in seconds. The garbage collector is off: it does not
    track a broker's values either.
    """
    spent = []
    for _ in range(repetitions):
        gc.collect()
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return median(spent)


def _core(state: MetadataState, node: int) -> MetadataCore:
    rules = ConfigRules(load_broker(None, {}, {"cluster.seeds": "127.0.0.1:9094"}))
    return MetadataCore(state, node, rules, lambda: b"x" * 16, SLOTS, active=False)


def catch_up(partitions: int, hosts: int) -> dict:
    """A new broker gets the whole metadata. Seconds of CPU for each step."""
    state = cluster(partitions, hosts)
    data = encode_state(state)
    node = 1
    steps = {
        "the leader encodes the snapshot": seconds(lambda: encode_state(state)),
        "the broker decodes it": seconds(lambda: decode_state(data, state.version)),
    }

    def install() -> None:
        _core(MetadataState(), node).handle(metadata_core.SnapshotInstalled(decode_state(data, state.version)), 0)

    steps["the snapshot becomes the committed state"] = max(0.0, seconds(install) - steps["the broker decodes it"])
    hosted = HostCore(node, 2, WORKERS, SLOTS, {directory: 0 for directory in state.brokers[node].directories})

    def start() -> None:
        nonlocal hosted
        hosted = HostCore(node, 2, WORKERS, SLOTS, {directory: 0 for directory in state.brokers[node].directories})
        hosted.handle(host_core.Started(state, (), (), {}), 0)

    steps["the broker's own replicas get their slots"] = seconds(start)
    (sent,) = [
        action
        for action in hosted.handle(host_core.SubscriberJoined("worker", messages.Subscribe("worker", 0, 1)), 0)
        if isinstance(action, host_core.Send)
    ]
    image = _encode(sent.message)
    steps[f"image to its {WORKERS + 1} processes"] = seconds(
        lambda: [_encode(sent.message) for _ in range(WORKERS + 1)]
    )
    steps["each of them decodes it"] = seconds(lambda: _from_controller.decode(image))
    return {
        "partitions": partitions,
        "hosts": hosts,
        "snapshot_bytes": len(data),
        "image_bytes": len(image),
        "steps": steps,
        "total_s": sum(steps.values()),
    }


def failover(partitions: int, hosts: int, leaders: int) -> dict:
    """Hosts that together lead `leaders` partitions are fenced at the same time: CPU seconds from the
    decision to the message that a worker decodes.
    """
    state = cluster(partitions, hosts)
    led: dict[int, int] = {}
    for topic in state.topics.values():
        for partition in topic.partitions:
            led[partition.leader] = led.get(partition.leader, 0) + 1
    nodes: list[int] = []
    while sum(led[node] for node in nodes) < leaders:  # far from each other, so that they share few partitions
        nodes.append(
            1 + len(nodes) * (hosts // 4) % hosts if len(nodes) < 4 else next(node for node in led if node not in nodes)
        )
    controller = ActiveController(1, state, ControllerOptions(), 0, clustered=True)
    steps: dict[str, float] = {}
    records = controller.fence(state, nodes, 0)
    steps["the controller decides"] = seconds(
        lambda: ActiveController(1, state, ControllerOptions(), 0, clustered=True).fence(state, nodes, 0)
    )
    values = [encode_record(record) for record in records]
    steps["it encodes the records"] = seconds(lambda: [encode_record(record) for record in records])
    steps["a broker decodes them"] = seconds(lambda: [decode_record(value) for value in values])
    node = next(node for node in state.brokers if node not in nodes)

    def apply_once() -> tuple[float, float, list]:
        copied = state.copy()
        hosted = HostCore(node, node, WORKERS, SLOTS, {directory: 0 for directory in state.brokers[node].directories})
        core = _core(copied, node)
        hosted.handle(host_core.Started(core.committed, (), (), {}), 0)
        hosted.handle(host_core.SubscriberJoined("worker", messages.Subscribe("worker", 0, 1)), 0)
        began = time.process_time()
        published = core.handle(metadata_core.Committed(tuple(records), copied.version + len(records)), 0)
        applied = time.process_time()
        actions = [
            action
            for event in published
            if isinstance(event, metadata_core.Publish)
            for action in hosted.handle(event, 0)
        ]
        return (
            applied - began,
            time.process_time() - applied,
            [action.message for action in actions if isinstance(action, host_core.Send)],
        )

    runs = [apply_once() for _ in range(REPETITIONS)]
    steps["it applies them"] = median(run[0] for run in runs)
    steps["the updates for its workers are computed"] = median(run[1] for run in runs)
    sent = runs[0][2]
    data = [_encode(message) for message in sent]
    steps["encoded and decoded for a worker"] = seconds(
        lambda: [_from_controller.decode(_encode(message)) for message in sent]
    )
    moved = sum(led[one] for one in nodes)
    return {
        "partitions": partitions,
        "hosts": hosts,
        "fenced": len(nodes),
        "leaders": moved,
        "record_bytes": sum(map(len, values)),
        "update_bytes": sum(map(len, data)),
        "steps": steps,
        "total_s": sum(steps.values()),
    }


def heartbeats(partitions: int, hosts: int) -> dict:
    """CPU time of the active controller for `hosts` brokers: heartbeats every second, and its own upkeep."""
    state = cluster(partitions, hosts)
    options = ControllerOptions()
    controller = ActiveController(1, state, options, 0, clustered=True)
    bodies = [
        _encode(broker_messages.Heartbeat(node, broker.epoch, 1_000, state.version))
        for node, broker in state.brokers.items()
    ]
    decoder = msgspec.msgpack.Decoder(broker_messages.ToActiveController)

    def round_of_all() -> None:
        for body in bodies:
            _, answer = controller.heartbeat(state, state, decoder.decode(body), 1_000, True)
            _encode(answer)

    each = seconds(round_of_all) / len(bodies)
    now = [2_000]

    def tick() -> None:
        now[0] += 1_000
        for node in state.brokers:
            controller.sessions.on_heartbeat(node, now[0])
        controller.tick(state, now[0], True)

    upkeep = seconds(tick, 7)
    return {
        "partitions": partitions,
        "hosts": hosts,
        "heartbeat_us": each * 1e6,
        "heartbeats_ms_per_s": each * hosts * 1e3 * 1000 / options.heartbeat_ms,
        "tick_ms": upkeep * 1e3,
    }

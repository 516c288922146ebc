"""Real worker processes under a real keeper and controller; this test plays the acceptor: it hands
over sockets and requests changes from the controller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mqd.shm.attach import KEEPER_LOST
from tests.ports import free_port

pytest.importorskip("mqd._native")

from mqd import native
from mqd.base.paths import layout
from mqd.cluster.host import messages
from mqd.log import checkpoints, lookup
from mqd.protocol.errors import ErrorCode
from mqd.shm import credits, segments
from mqd.shm.attach import KeeperClient
from tests.broker_files import bytes_of
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually
from tests.preloaded import PRELOADED, Forked
from tests.unit.log.log_files import encode_batch

WAIT_S = 20.0
STORAGE_ERROR = 56


def wait_for(condition: Callable[[], object], what: str) -> None:
    eventually(condition, what)


class Host:
    """Keeper, controller and workers as processes, without supervisord: dead processes are not
    restarted. The core reads the faults file when it is loaded: `with_faults` executes the
    processes.
    """

    def __init__(self, data_dir: Path, workers: int = 2, with_faults: bool = False, **config: str):
        self.with_faults = with_faults
        self.data_dir = data_dir
        self.workers = workers
        self.config = {"listeners": "PLAINTEXT://127.0.0.1:0", "log.retention.check.interval.ms": "200", **config}
        self.processes: dict[str, Forked | subprocess.Popen[bytes]] = {}
        self.requests = 0

    def __enter__(self) -> Host:
        self.places = layout(self.data_dir)
        self.data_dir.mkdir(exist_ok=True)
        properties = self.data_dir / "test.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in self.config.items()))
        self.faults = self.data_dir / "faults"
        self.environment = {
            **os.environ,
            "MQD_FILE_FAULTS": f"@{self.faults}",
            "MQD_DATA_DIR": str(self.data_dir),
            "MQD_CONFIG": str(properties),
            "MQD_WORKERS": str(self.workers),
        }
        try:
            self.start("keeper")
            self.start("controller")
            self.client = KeeperClient.connect(self.places.run_dir, "acceptor")
            for index in range(self.workers):
                self.start_worker(index)
            self.client.report_ready("metrics_port=-1")
            self._connect_controller()
            self.wait_until_ready()
            wait_for(
                lambda: self.client.control.endpoint_state(self.workers + 1) == native.ProcessState.RUNNING,
                "this host is in service: the controller places partitions here",
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AttributeError):
            credits.remove(self.client.welcome.control_name)
            self.controller.close()
        for name in sorted(self.processes, key=lambda name: name == "keeper"):
            # it would wait for its acceptor, this process, to end
            self.stop(name, signal.SIGKILL if name == "keeper" else signal.SIGTERM)
        with contextlib.suppress(AttributeError):
            self.client.close()  # not before: a keeper kills a process that disconnects without ending
        segments.clean(segments.prefix(self.data_dir))

    # -- processes ---------------------------------------------------------------------------------

    def start(self, name: str, *arguments: str, key: str | None = None) -> None:
        with open(self.data_dir / f"{key or name}.log", "a") as log:
            if self.with_faults:
                self.processes[key or name] = subprocess.Popen(
                    [sys.executable, "-m", f"mqd.{name}", *arguments], env=self.environment, stderr=log, stdout=log
                )
            else:
                self.processes[key or name] = PRELOADED.start(
                    arguments, log, log, environment=self.environment, program=f"mqd.{name}"
                )

    def wait_until_ready(self) -> None:
        states = self.client.control.endpoint_state
        wait_for(
            lambda: all(states(index) == native.ProcessState.RUNNING for index in range(self.workers)), "workers ready"
        )

    def start_worker(self, index: int) -> None:
        self.start("worker", "--index", str(index), key=f"worker-{index}")

    def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise AssertionError(f"{name} did not stop\n{self.log(name)}") from None

    def log(self, name: str) -> str:
        return (self.data_dir / f"{name}.log").read_text()

    # -- controller --------------------------------------------------------------------------------

    def _connect_controller(self) -> None:
        def connected() -> bool:
            self.controller = socket.socket(socket.AF_UNIX)
            self.controller.settimeout(WAIT_S)
            try:
                self.controller.connect(str(self.places.controller_socket))
            except OSError:
                self.controller.close()
                return False
            return True

        wait_for(connected, "controller listens")
        self._send(messages.Subscribe("acceptor", 0, self.client.generation))

    def _send(self, message: object) -> None:
        data = msgspec.msgpack.encode(message)
        self.controller.sendall(len(data).to_bytes(4, "big") + data)

    def _receive(self) -> messages.FromController:
        def exactly(size: int) -> bytes:
            data = b""
            while len(data) < size:
                part = self.controller.recv(size - len(data))
                assert part, "the controller closed the connection"
                data += part
            return data

        return msgspec.msgpack.decode(exactly(int.from_bytes(exactly(4), "big")), type=messages.FromController)

    def send_request(self, change: messages.Change) -> messages.Response:
        self.requests += 1
        self._send(messages.Request(self.requests, change))
        while not isinstance(response := self._receive(), messages.Response):
            pass
        return response

    def create(self, name: str, partitions: int = 1, **config: str) -> messages.TopicImage:
        response = self.send_request(
            messages.CreateTopic(
                name, partitions, 1, {}, {key.replace("_", "."): value for key, value in config.items()}
            )
        )
        assert response.error == 0 and response.topic is not None, f"{response}\n{self.log('controller')}"
        return response.topic

    # -- data --------------------------------------------------------------------------------------

    def connect(self, worker: int) -> KafkaConnection:
        """A connection served by `worker`."""
        with socket.create_server(("127.0.0.1", free_port())) as server:
            ours = KafkaConnection("127.0.0.1", server.getsockname()[1])
            theirs, _ = server.accept()
            note = struct.pack("<IHH16sHH16s20x", 0x31434E4F, 0, 0, b"", 0, 0, b"")
            channel = socket.socket(fileno=os.dup(self.client.handoff_fds[worker]))
            with channel, theirs:
                socket.send_fds(channel, [note], [theirs.fileno()])
        return ours

    def produce(self, topic: messages.TopicImage, partition: int, timestamps: list[int]) -> int:
        """Base offset; AssertionError with the broker's error."""
        error, base_offset = self.try_produce(topic, partition, timestamps)
        assert error == 0, f"produce: error {error}"
        return base_offset

    def produce_when_led(self, topic: messages.TopicImage, partition: int, timestamps: list[int]) -> int:
        """Base offset. Partitions that a worker did not serve may have lost their leader, which is
        elected again some heartbeats after they are served.
        """
        responses: list[tuple[int, int]] = []

        def is_led() -> bool:
            responses.append(self.try_produce(topic, partition, timestamps))
            return responses[-1][0] != ErrorCode.NOT_LEADER_OR_FOLLOWER

        wait_for(is_led, f"{topic.name}-{partition} has a leader")
        error, base_offset = responses[-1]
        assert error == 0, f"produce: error {error}"
        return base_offset

    def try_produce(self, topic: messages.TopicImage, partition: int, timestamps: list[int]) -> tuple[int, int]:
        """(Kafka error code, base offset), acks=all."""
        from mqd.protocol.messages import ProduceRequest

        rows = [ProduceRequest.PartitionData(index=partition, records=encode_batch(0, timestamps))]
        request = ProduceRequest(
            acks=-1, timeout_ms=10_000, topic_data=[ProduceRequest.TopicData(name=topic.name, partition_data=rows)]
        )
        with self.connect(topic.partitions[partition].owner) as kafka:
            kafka.send(0, 9, request)
            response = kafka.receive().body.responses[0].partition_responses[0]
        return response.error_code, response.base_offset

    def view(self, topic: messages.TopicImage, partition: int = 0) -> native.SlotView:
        return self.client.control.slot_view(topic.partitions[partition].slot)

    def directory(self, topic: messages.TopicImage, partition: int = 0) -> Path:
        return self.places.log_dir / f"{topic.name}-{partition}"

    def is_online(self, topic: messages.TopicImage) -> bool:
        return all(self.view(topic, partition.index).state == native.SlotState.ONLINE for partition in topic.partitions)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with Host(tmp_path / "data") as host:
        yield host


def test_a_new_topic_is_served_at_once(host: Host) -> None:
    topic = host.create("orders", 4, retention_ms="-1")  # the records are of 1970
    assert {partition.owner for partition in topic.partitions} == {0, 1}
    for partition in range(4):
        assert host.produce(topic, partition, [1000, 2000]) == 0
        assert host.produce(topic, partition, [3000]) == 2
        assert host.view(topic, partition).high_watermark == 3
        assert lookup.offset_for_timestamp(host.directory(topic, partition), 1500, 0, 3) == (1, 2000)


def scanned_bytes(host: Host, worker: int) -> int:
    """How many bytes the last start of a worker scanned before it served, from its log."""
    line = next(line for line in reversed(host.log(f"worker-{worker}").splitlines()) if " ready " in line)
    return int(line.split("scanned_bytes=")[1].split()[0])


def wait_until_settled(host: Host) -> None:
    """Worker 0 removes checkpoints of workers that are no more when every worker has written its
    own.
    """
    orphan = host.places.log_dir / f"{checkpoints.RECOVERY_POINT}.63"
    wait_for(lambda: not orphan.exists(), "checkpoints settled")


def leave_orphan(data_dir: Path) -> None:
    (data_dir / "log").mkdir(parents=True, exist_ok=True)
    (data_dir / "log" / f"{checkpoints.RECOVERY_POINT}.63").write_bytes(checkpoints.format_checkpoint([]))


def test_a_clean_shutdown_leaves_marker_and_checkpoints(tmp_path: Path) -> None:
    leave_orphan(tmp_path / "data")
    with Host(tmp_path / "data", workers=1) as host:
        topic = host.create("t", 1, retention_ms="-1")  # the records are of 1970
        for _ in range(5):
            host.produce(topic, 0, list(range(500)))
        wait_until_settled(host)
        assert host.stop("worker-0") == 0, host.log("worker-0")
        assert (host.places.log_dir / "clean-shutdown.0").exists(), host.log("worker-0")
        found = checkpoints.parse_checkpoint((host.places.log_dir / f"{checkpoints.RECOVERY_POINT}.0").read_bytes())
        assert [(entry.topic, entry.offset) for entry in found] == [("t", 2500)]
    with Host(tmp_path / "data", workers=1) as host:
        # the bytes after the last entry of the index
        log_bytes = sum(file.stat().st_size for file in (host.places.log_dir / "t-0").glob("*.log"))
        assert scanned_bytes(host, 0) < log_bytes
        assert not list(host.places.log_dir.glob("clean-shutdown.*"))
        assert host.produce(topic, 0, [4]) == 2500


def test_a_restarted_worker_gets_its_partitions_back(host: Host) -> None:
    topic = host.create("t", 2)
    for partition in (0, 1):
        host.produce(topic, partition, [1, 2, 3])
    owner = topic.partitions[0].owner
    before = host.view(topic)
    host.stop(f"worker-{owner}", signal.SIGKILL)
    wait_for(lambda: host.client.control.endpoint_state(owner) == native.ProcessState.DEAD, "the keeper has noticed")
    host.start_worker(owner)
    host.wait_until_ready()
    wait_for(
        lambda: host.view(topic).leader_epoch > before.leader_epoch and host.is_online(topic),
        f"online\n{host.log(f'worker-{owner}')}",
    )
    after = host.view(topic)
    assert (after.log_end_offset, after.high_watermark) == (3, 3)
    assert "cut" not in host.log(f"worker-{owner}")
    assert host.produce(topic, 0, [4]) == 3


def test_everything_killed_at_once_loses_nothing(tmp_path: Path) -> None:
    with Host(tmp_path / "data") as host:
        topic = host.create("t", 2)
        for partition in (0, 1):
            host.produce(topic, partition, [1, 2, 3])
        for name in list(host.processes):
            host.processes[name].send_signal(signal.SIGKILL)
        for name in list(host.processes):
            host.stop(name)
    with Host(tmp_path / "data", workers=3) as host:
        topic = next(
            image for image in [host.send_request(messages.AddPartitions("t", 3, None)).topic] if image is not None
        )
        wait_for(lambda: host.is_online(topic), "online with another number of workers")
        assert [host.view(topic, partition).log_end_offset for partition in range(3)] == [3, 3, 0]
        assert host.produce(topic, 1, [4]) == 3


def test_a_deleted_topic_leaves_no_files_and_its_name_can_be_reused(host: Host) -> None:
    old = host.create("t", 2)
    for partition in (0, 1):
        host.produce(old, partition, [1, 2, 3])
    assert host.send_request(messages.DeleteTopic("t", None)).error == 0
    assert not [path.name for path in host.places.log_dir.glob("t-*") if not path.name.endswith("-delete")]
    wait_for(lambda: not list(host.places.log_dir.glob("t-*")), "files deleted in the background")
    new = host.create("t", 2)
    assert new.topic_id != old.topic_id
    assert host.produce(new, 0, [5]) == 0


def test_delete_records_moves_the_start_permanently(host: Host) -> None:
    topic = host.create("t", 1)
    host.produce(topic, 0, [1, 2, 3])
    assert host.send_request(messages.DeleteRecords("t", 0, 4)).error == 1, "beyond the high watermark"
    response = host.send_request(messages.DeleteRecords("t", 0, 2))
    assert (response.error, response.offset) == (0, 2)
    owner = topic.partitions[0].owner
    host.stop(f"worker-{owner}", signal.SIGKILL)
    host.stop("keeper", signal.SIGKILL)  # and with it everything in shared memory
    found = checkpoints.parse_checkpoint((host.places.log_dir / f"{checkpoints.LOG_START}.{owner}").read_bytes())
    assert [(entry.topic, entry.offset) for entry in found] == [("t", 2)]


def test_retention_by_size_deletes_old_segments(host: Host) -> None:
    topic = host.create("t", 1, segment_bytes="4096", retention_bytes="8192")
    now = time.time_ns() // 1_000_000
    for _ in range(60):
        host.produce(topic, 0, [now] * 30)
    wait_for(lambda: host.view(topic).log_start_offset > 0, f"retention\n{host.log('worker-0')}{host.log('worker-1')}")
    wait_for(lambda: bytes_of(host.directory(topic).glob("*.log")) < 8192 + 2 * 4096, "old segments deleted")
    view = host.view(topic)
    assert (
        min(lookup.segments.base_offsets(host.directory(topic))) <= view.log_start_offset < view.high_watermark == 1800
    )


def test_old_records_are_deleted_even_from_the_active_segment(host: Host) -> None:
    topic = host.create("t", 1, retention_ms="1000")
    host.produce(topic, 0, [1000, 2000])  # 1970
    wait_for(
        lambda: host.view(topic).log_start_offset == 2,
        f"rolled, then deleted\n{host.log('worker-0')}{host.log('worker-1')}",
    )
    assert host.produce(topic, 0, [int(time.time() * 1000)]) == 2


def test_a_directory_of_another_topic_is_moved_aside(tmp_path: Path) -> None:
    with Host(tmp_path / "data", workers=1) as host:
        host.create("first", 1)
        foreign = host.places.log_dir / "second-0"
        foreign.mkdir()
        (foreign / "partition.metadata").write_bytes(b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw\n")
        (foreign / "00000000000000000000.log").write_bytes(b"not ours")
        topic = host.create("second", 1)
        assert host.produce(topic, 0, [1]) == 0
        stray = next(host.places.log_dir.glob("second-0.*-stray"))
        assert (stray / "00000000000000000000.log").read_bytes() == b"not ours"


def test_a_partition_that_cannot_be_opened_does_not_affect_others(tmp_path: Path) -> None:
    with Host(tmp_path / "data", workers=1) as host:
        topic = host.create("t", 3)
        for partition in range(3):
            host.produce(topic, partition, [1, 2])
    # the last segment: these records are old, so the upkeep may have rolled them by age; a sealed
    # one is only opened when it is read
    broken = max((tmp_path / "data" / "log" / "t-1").glob("*.log"))
    broken.unlink()
    broken.mkdir()
    with Host(tmp_path / "data", workers=1) as host:
        wait_for(lambda: "ready" in host.log("worker-0").split("stopped")[-1], "ready all the same")
        topic = msgspec.structs.replace(topic, partitions=[p for p in topic.partitions])
        assert host.produce(topic, 0, [3]) == 2 and host.produce(topic, 2, [3]) == 2
        assert host.view(topic, 1).state == native.SlotState.OFFLINE
        assert "partition cannot be opened; it is offline  partition=t-1" in host.log("worker-0")


def test_the_end_of_the_keeper_ends_workers_cleanly(tmp_path: Path) -> None:
    with Host(tmp_path / "data", workers=1) as host:
        topic = host.create("t", 1)
        host.produce(topic, 0, [1, 2])
        host.stop("keeper", signal.SIGKILL)
        assert host.processes["worker-0"].wait(WAIT_S) == KEEPER_LOST, host.log("worker-0")
        found = checkpoints.parse_checkpoint((host.places.log_dir / f"{checkpoints.RECOVERY_POINT}.0").read_bytes())
        assert [entry.offset for entry in found] == [2]


def test_a_restarted_controller_changes_nothing(host: Host) -> None:
    topic = host.create("t", 2)
    host.produce(topic, 0, [1])
    host.stop("controller")
    assert host.produce(topic, 0, [2]) == 1, "data flows without a controller"
    host.start("controller")
    host._connect_controller()
    wait_for(
        lambda: all("controller is back" in host.log(f"worker-{index}") for index in (0, 1)),
        "workers are subscribed again",
    )
    more = host.send_request(messages.AddPartitions("t", 4, None)).topic
    assert more is not None
    assert host.produce(more, 3, [1]) == 0 and host.produce(more, 0, [3]) == 2
    assert host.view(topic).leader_epoch == 0, "no partition changed its leader"


def test_a_full_disk_refuses_produce_and_recovers_by_itself(tmp_path: Path) -> None:
    with Host(tmp_path / "data", with_faults=True) as host:
        _is_full_and_recovers(host)


def _is_full_and_recovers(host: Host) -> None:
    topic, doomed = host.create("t", 1), host.create("doomed", 1)
    assert host.produce(topic, 0, [1]) == 0
    host.faults.write_text("write:ENOSPC:log/t-0/")
    assert host.try_produce(topic, 0, [2])[0] == STORAGE_ERROR
    wait_for(lambda: "log directory is full" in host.log(f"worker-{topic.partitions[0].owner}"), "it is logged")
    assert host.send_request(messages.DeleteRecords("t", 0, 1)).offset == 1, "what makes room still works"
    assert host.send_request(messages.DeleteTopic(doomed.name, None)).error == 0
    host.faults.write_text("")
    wait_for(lambda: host.try_produce(topic, 0, [2]) == (0, 1), "accepted again, and nothing of the refused is left")
    wait_for(lambda: "has space again" in host.log(f"worker-{topic.partitions[0].owner}"), "this is logged too")


def test_a_topic_created_on_a_full_disk_is_served_when_space_returns(tmp_path: Path) -> None:
    with Host(tmp_path / "data", workers=1, with_faults=True) as host:
        host.faults.write_text("any:ENOSPC:log/t-0")
        topic = host.create("t", 1)
        assert host.view(topic).state == native.SlotState.OFFLINE
        assert "partition cannot be opened; it is offline  partition=t-0" in host.log("worker-0")
        host.faults.write_text("")
        wait_for(lambda: host.is_online(topic), "tried again")
        assert host.produce(topic, 0, [1]) == 0


def test_the_reserve_of_free_space_moves_at_run_time(tmp_path: Path) -> None:
    with Host(tmp_path / "data", workers=1, **{"log.dirs.free.bytes.min": str(1 << 60)}) as host:
        topic = host.create("t", 1)
        wait_for(lambda: host.try_produce(topic, 0, [1])[0] == STORAGE_ERROR, "refused")
        operation = messages.ConfigOperation("log.dirs.free.bytes.min", "set", "0")
        assert host.send_request(messages.AlterConfig(4, "1", [operation], False)).error == 0
        wait_for(lambda: host.try_produce(topic, 0, [1])[0] == 0, "accepted")


def test_a_failed_flush_fences_its_directory_and_no_other(tmp_path: Path) -> None:
    first, second = tmp_path / "disk-a", tmp_path / "disk-b"
    with Host(tmp_path / "data", workers=1, with_faults=True, **{"log.dirs": f"{first},{second}"}) as host:
        topic = host.create("t", 4)
        by_dir = {log_dir: [p.index for p in topic.partitions if p.log_dir == log_dir] for log_dir in (0, 1)}
        assert all(by_dir.values()), "the controller spreads partitions over the directories"
        for partition in range(4):
            assert host.produce(topic, partition, [1]) == 0
        host.faults.write_text("sync:EIO:disk-a")
        assert host.try_produce(topic, by_dir[0][0], [2])[0] == STORAGE_ERROR
        wait_for(lambda: all(host.view(topic, p).state == native.SlotState.OFFLINE for p in by_dir[0]), "fenced")
        host.faults.write_text("")
        assert host.try_produce(topic, by_dir[0][-1], [2])[0] != 0, "a failed flush is never retried"
        assert [host.produce(topic, partition, [2]) for partition in by_dir[1]] == [1] * len(by_dir[1])
        wait_for(lambda: "log directory failed" in host.log("worker-0"), "it is logged")
        assert host.stop("worker-0") == 0
        assert not (first / "clean-shutdown.0").exists()


def test_a_directory_that_cannot_be_read_takes_down_only_its_own_partitions(tmp_path: Path) -> None:
    first, second = tmp_path / "disk-a", tmp_path / "disk-b"
    with Host(tmp_path / "data", workers=1, **{"log.dirs": f"{first},{second}"}) as host:
        topic = host.create("t", 4)
        for partition in range(4):
            host.produce(topic, partition, [1])
    (tmp_path / "data" / "faults").write_text("open:EIO:disk-a/t-")
    with Host(tmp_path / "data", workers=1, with_faults=True, **{"log.dirs": f"{first},{second}"}) as host:
        good = [p.index for p in topic.partitions if p.log_dir == 1]
        assert [host.produce(topic, partition, [2]) for partition in good] == [1] * len(good)
        bad = [p.index for p in topic.partitions if p.log_dir == 0]
        assert {host.view(topic, partition).state for partition in bad} == {native.SlotState.OFFLINE}
        host.faults.write_text("")
        host.stop("controller")
        host.start("controller")
        wait_for(lambda: host.is_online(topic), "the next image tries again")
        assert [host.produce_when_led(topic, partition, [2]) for partition in bad] == [1] * len(bad), (
            "and nothing was lost"
        )


def test_free_space_retention_deletes_the_oldest_closed_segments(tmp_path: Path) -> None:
    with Host(tmp_path / "data", workers=1) as host:
        topic = host.create("t", 1, segment_bytes="4096")
        for _ in range(40):
            host.produce(topic, 0, [int(time.time() * 1000)] * 30)
        operation = messages.ConfigOperation("retention.free.bytes", "set", str(1 << 60))
        assert host.send_request(messages.AlterConfig(4, "1", [operation], False)).error == 0
        wait_for(
            lambda: len(lookup.segments.base_offsets(host.directory(topic))) == 1,
            f"only the active segment is left\n{host.log('worker-0')}",
        )
        assert host.produce(topic, 0, [1]) == 1200

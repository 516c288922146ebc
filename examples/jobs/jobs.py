"""A small job queue, like Celery, on a share group: functions become jobs, immediate, delayed or urgent;
failed jobs are retried, slow jobs renew their locks, and results are returned.

    queue = Queue("images", "127.0.0.1:9092")       # in tasks.py

    @queue.task
    def resize(name, width): ...

    resize.delay("cat.png", width=80).get(timeout=10)                   # in any process
    resize.apply_async(["cat.png"], {"width": 80}, countdown=60)        # in a minute
    resize.apply_async(["cat.png"], {"width": 80}, urgent=True)         # before jobs that are not urgent

    python jobs.py tasks:queue                      # a worker; there can be several, killed at any time

A job is done at least once: if a worker dies between the work and the acknowledgement, another worker
does the job again. Its result is the last record with its id in the topic NAME-results. A worker
prints a line of JSON at the begin and end of each attempt.
"""

import importlib
import json
import os
import signal
import sys
import time
import uuid
from concurrent import futures

from mqd import AcknowledgeType, Consumer, Producer, ShareConsumer, TopicPartition
from mqd.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType


class JobFailed(Exception):
    """The exception of the last attempt, as text."""


class Queue:
    """Jobs are in the topics `name` and `name`-urgent, delayed jobs in `name`-later until they are due; the
    share group `name` works on them. `attempts` must be below the broker's
    group.share.delivery.count.limit, which also counts deliveries to workers that die. `renew_s`: a third
    of share.record.lock.duration.ms.
    """

    def __init__(self, name: str, bootstrap: str, attempts: int = 4, renew_s: float = 10.0, retry_s: float = 0.1):
        self.name, self.urgent, self.later, self.results = name, f"{name}-urgent", f"{name}-later", f"{name}-results"
        self.attempts, self.renew_s, self.retry_s = attempts, renew_s, retry_s
        self.servers, self.tasks, self.attempt = {"bootstrap.servers": bootstrap}, {}, 0
        self._producer, self._unwritten, self._reader, self._found = None, [], None, {}

    def create(self, partitions: int = 3, replicas: int = 1) -> None:
        """Creates the topics, and configures the group to get jobs sent before its first worker started."""
        admin = AdminClient(self.servers)
        for name, count, config in (
            (self.name, partitions, {}),
            (self.urgent, partitions, {"share.priority": "1"}),
            (self.later, partitions, {"schedule.to": self.name}),
            (self.results, 1, {"cleanup.policy": "compact"}),
        ):
            admin.create_topics([NewTopic(name, count, replicas, config=config)])[name].result()
        config = {
            "share.auto.offset.reset": "earliest",
            "share.isolation.level": "read_committed",  # so that a delayed job is delivered exactly once
            "share.retry.backoff.ms": str(int(1000 * self.retry_s)),
        }
        set_to = AlterConfigOpType.SET
        entries = [ConfigEntry(name, value, incremental_operation=set_to) for name, value in config.items()]
        group = ConfigResource(ResourceType.GROUP, self.name, incremental_configs=entries)
        admin.incremental_alter_configs([group])[group].result()

    def task(self, function):
        self.tasks[function.__name__] = function
        function.delay = lambda *args, **more: self.send(function.__name__, args, more)
        function.apply_async = lambda *args, **when: self.send(function.__name__, *args, **when)
        return function

    # -- the sender --------------------------------------------------------------------------------

    def send(self, task: str, args=(), more=None, countdown: float = 0.0, urgent: bool = False) -> "Result":
        """Sends a job. `countdown`: the delay in seconds."""
        if countdown and urgent:
            raise ValueError("an urgent job cannot have a countdown")
        job = {"id": uuid.uuid4().hex, "task": task, "args": list(args), "more": more or {}}
        self._open_reader()  # before the job is sent, because it reads from the end of the results
        topic = self.later if countdown else self.urgent if urgent else self.name
        self._produce(topic, job["id"], job, {"mqd-delay-ms": str(int(1000 * countdown))} if countdown else None)
        return Result(self, job["id"])

    def flush(self) -> None:
        if self._producer is not None and (self._producer.flush() or self._unwritten):
            raise JobFailed(f"not written: {self._unwritten or 'the broker does not respond'}")

    def _produce(self, topic: str, key: str, value: dict, headers: dict | None = None) -> None:
        self._open_producer()
        self._producer.produce(topic, json.dumps(value), key, headers=headers, on_delivery=self._written)
        self._producer.poll(0)

    def _written(self, error, _message) -> None:
        if error is not None:
            self._unwritten.append(str(error))

    def _open_producer(self) -> None:
        if self._producer is None:
            self._producer = Producer({**self.servers, "enable.idempotence": True, "linger.ms": 0})

    def _open_reader(self) -> None:
        if self._reader is None:
            self._reader = Consumer({**self.servers, "group.id": f"{self.name}-readers", "enable.auto.commit": False})
            _, end = self._reader.get_watermark_offsets(TopicPartition(self.results, 0))
            self._reader.assign([TopicPartition(self.results, 0, end)])

    def result_of(self, job_id: str, timeout: float) -> dict:
        self.flush()
        deadline = time.monotonic() + timeout
        while job_id not in self._found and time.monotonic() < deadline:
            for message in self._reader.consume(1000, timeout=0.1):
                if message.error() is None:
                    self._found[message.key().decode()] = json.loads(message.value())
        if job_id not in self._found:
            raise TimeoutError(f"job {job_id} has no result after {timeout} s")
        return self._found[job_id]

    # -- the worker --------------------------------------------------------------------------------

    def work(self, is_over=lambda: False) -> None:
        self._open_producer()
        mode = {"group.id": self.name, "share.acknowledgement.mode": "explicit"}
        with ShareConsumer({**self.servers, **mode}) as consumer, futures.ThreadPoolExecutor(1) as thread:
            consumer.subscribe([self.name, self.urgent])
            while not is_over():
                for message in consumer.consume(1, timeout=0.5):  # one job at a time
                    running = thread.submit(self._attempt, message)
                    while not futures.wait([running], timeout=self.renew_s).done:
                        consumer.renew([message])
                    consumer.acknowledge(message, running.result())
                consumer.commit_async()

    def _attempt(self, message) -> AcknowledgeType:
        """Runs the job once. Returns the acknowledgement of its record."""
        self.attempt, key = message.delivery_count(), (message.key() or b"").decode()
        fields = {"job": key, "attempt": self.attempt, "worker": os.getpid()}
        print(json.dumps({**fields, "event": "begin", "at": time.time()}), flush=True)
        try:
            job = json.loads(message.value())
            result = {"value": self.tasks[job["task"]](*job["args"], **job["more"])}
            kind = AcknowledgeType.ACCEPT
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
            kind = AcknowledgeType.REJECT if self.attempt >= self.attempts else AcknowledgeType.RELEASE
        if kind != AcknowledgeType.RELEASE:
            self._unwritten.clear()
            self._produce(self.results, key, {**result, "attempt": self.attempt})
            if self._producer.flush() or self._unwritten:  # a job is done only with its result
                kind = AcknowledgeType.RELEASE
        print(json.dumps({**fields, "event": kind.name.lower(), "at": time.time()}), flush=True)
        return kind


class Result:
    def __init__(self, queue: Queue, job_id: str):
        self.queue, self.id = queue, job_id

    def get(self, timeout: float = 60.0):
        """Returns the function's result. Raises JobFailed, TimeoutError."""
        found = self.queue.result_of(self.id, timeout)
        if "error" in found:
            raise JobFailed(f"{found['error']} (attempt {found['attempt']})")
        return found["value"]


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    sys.path.insert(0, os.getcwd())
    stops = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(True))
    getattr(importlib.import_module(module), name or "queue").work(lambda: bool(stops))

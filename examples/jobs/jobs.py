"""A small Celery over a share group: functions become jobs, failures are retried, slow jobs keep
their locks, and results come back.

    queue = Queue("images", "127.0.0.1:9092")       # in tasks.py

    @queue.task
    def resize(name, width): ...

    resize.delay("cat.png", width=80).get(timeout=10)     # anywhere

    python jobs.py tasks:queue                      # a worker; as many as you like, killed at any time

A job is done at least once: a worker that dies between the work and the acknowledgement leaves it
to another. Its result is the last record of its id in the topic NAME-results. Prints a line of
JSON for each attempt that begins or ends.
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
    """What the last attempt raised, as text."""


class Queue:
    """Jobs in the topic `name`, worked on by the share group `name`. `attempts`: at most the
    broker's group.share.delivery.count.limit. `renew_s`: a third of share.record.lock.duration.ms.
    """

    def __init__(self, name: str, bootstrap: str, attempts: int = 4, renew_s: float = 10.0):
        self.name, self.results, self.attempts, self.renew_s = name, f"{name}-results", attempts, renew_s
        self.servers = {"bootstrap.servers": bootstrap}
        self.tasks, self.attempt, self._producer, self._reader, self._found = {}, 0, None, None, {}

    def create(self, partitions: int = 3) -> None:
        """The topics, and a group that also gets what was sent before its first worker came."""
        admin = AdminClient(self.servers)
        topics = [NewTopic(self.name, partitions), NewTopic(self.results, 1, config={"cleanup.policy": "compact"})]
        for created in admin.create_topics(topics).values():
            created.result()
        entry = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
        group = ConfigResource(ResourceType.GROUP, self.name, incremental_configs=[entry])
        admin.incremental_alter_configs([group])[group].result()

    def task(self, function):
        self.tasks[function.__name__] = function
        function.delay = lambda *args, **more: self.send(function.__name__, args, more)
        return function

    # -- the sender --------------------------------------------------------------------------------

    def send(self, task: str, args=(), more=None) -> "Result":
        job = {"id": uuid.uuid4().hex, "task": task, "args": list(args), "more": more or {}}
        self._open_reader()  # before the job can be done: it reads from the end
        self._produce(self.name, job["id"], job)
        return Result(self, job["id"])

    def flush(self) -> None:
        if self._producer is not None and self._producer.flush():
            raise TimeoutError("jobs have not been written")

    def _produce(self, topic: str, key: str, value: dict) -> None:
        self._open_producer()
        self._producer.produce(topic, json.dumps(value), key)
        self._producer.poll(0)

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
            consumer.subscribe([self.name])
            while not is_over():
                for message in consumer.consume(1, timeout=0.5):  # the rest is for other workers
                    running = thread.submit(self._attempt, message)
                    while not futures.wait([running], timeout=self.renew_s).done:
                        consumer.renew([message])
                    consumer.acknowledge(message, running.result())
                consumer.commit_async()

    def _attempt(self, message) -> AcknowledgeType:
        """What the group is told of this attempt."""
        self.attempt, key = message.delivery_count(), (message.key() or b"").decode()
        says = {"job": key, "attempt": self.attempt, "worker": os.getpid()}
        print(json.dumps({**says, "event": "begin", "at": time.time()}), flush=True)
        try:
            job = json.loads(message.value())
            result = {"value": self.tasks[job["task"]](*job["args"], **job["more"])}
            kind = AcknowledgeType.ACCEPT
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
            kind = AcknowledgeType.REJECT if self.attempt >= self.attempts else AcknowledgeType.RELEASE
        if kind != AcknowledgeType.RELEASE:
            self._produce(self.results, key, {**result, "attempt": self.attempt})
            if self._producer.flush():  # without its result it is not done
                kind = AcknowledgeType.RELEASE
        print(json.dumps({**says, "event": kind.name.lower(), "at": time.time()}), flush=True)
        return kind


class Result:
    def __init__(self, queue: Queue, job_id: str):
        self.queue, self.id = queue, job_id

    def get(self, timeout: float = 60.0):
        """What the function returned. Raises JobFailed; TimeoutError."""
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

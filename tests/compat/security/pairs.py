"""A producer and a consumer in a group, of each client, behind one interface: lines are written one
after another; acknowledged and read lines can be inspected while the pair works.

Settings are librdkafka's; a pair of another client translates them. All producers are idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import ssl
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import aiokafka
import aiokafka.abc
import confluent_kafka
import kafka
from kafka.net.sasl.oauth import AbstractTokenProvider

import mqd
from mqd.cli.verbs.client_config import with_java_names
from mqd.security import client
from tests.compat.java_client import java_command
from tests.compat.kafka_tools import KafkaTools
from tests.compat.kcat import Kcat
from tests.polling import eventually

END_SECONDS = 60
DELIVERY_MS = 180_000
Token = Callable[[], tuple[str, float]]  # a token, and its expiry


class Way:
    """How a pair connects: `settings` with librdkafka's names, `token` and `token_file` for
    OAUTHBEARER. `is_delegated`: user and password are a delegation token's, which Java's clients
    must declare.
    """

    def __init__(
        self, settings: dict[str, str], token: Token, token_file: Path, folder: Path, is_delegated: bool = False
    ) -> None:
        self.settings, self.token, self.token_file, self.folder = settings, token, token_file, folder
        self._token_auth = {client.TOKEN_AUTH: "true"} if is_delegated else {}

    @property
    def is_oauth(self) -> bool:
        return self.settings.get("sasl.mechanisms") == "OAUTHBEARER"

    def librdkafka(self) -> dict[str, Any]:
        callback = {"oauth_cb": lambda _config: self.token()} if self.is_oauth else {}
        return {**self.settings, **callback, "log_level": 0}

    def java(self) -> Path:
        """A file of Java's properties."""
        settings = with_java_names(client.security_from_properties({**self.settings, **self._token_auth}).settings)
        if self.is_oauth:
            module = "org.apache.kafka.common.security.oauthbearer"
            settings |= {
                "sasl.jaas.config": f"{module}.OAuthBearerLoginModule required;",
                "sasl.login.callback.handler.class": f"{module}.OAuthBearerLoginCallbackHandler",
                "sasl.oauthbearer.jwt.retriever.class": f"{module}.FileJwtRetriever",
                "sasl.oauthbearer.token.endpoint.url": self.token_file.as_uri(),
                "sasl.login.refresh.min.period.seconds": "1",
                "sasl.login.refresh.buffer.seconds": "1",
            }
        # by default a producer gives a record up after a minute without metadata
        settings |= {name: str(DELIVERY_MS) for name in ("delivery.timeout.ms", "max.block.ms")}
        settings["bootstrap.servers"] = self.settings["bootstrap.servers"]
        file = self.folder / "java.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return file

    def java_flags(self) -> list[str]:
        """Java's clients read tokens only from places named here."""
        return [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.token_file.as_uri()}"]

    def python(self) -> dict[str, Any]:
        """For kafka-python and aiokafka, without their providers of tokens."""
        get = self.settings.get
        found: dict[str, Any] = {
            "bootstrap_servers": self.settings["bootstrap.servers"],
            "security_protocol": self.settings["security.protocol"],
        }
        if get("sasl.mechanisms"):
            found["sasl_mechanism"] = get("sasl.mechanisms")
        if get("sasl.username"):
            found |= {"sasl_plain_username": get("sasl.username"), "sasl_plain_password": get("sasl.password")}
        if get("ssl.ca.location"):
            context = ssl.create_default_context(cafile=get("ssl.ca.location"))
            if get("ssl.certificate.location"):
                context.load_cert_chain(self.settings["ssl.certificate.location"])
            found["ssl_context"] = context
        return found


class Pair(ABC):
    """`failures`: errors reported by the client; a record in them is not acknowledged."""

    def __init__(self, way: Way, topic: str) -> None:
        self.way, self.topic = way, topic
        self.acknowledged: set[str] = set()
        self.read: set[str] = set()
        self.failures: list[str] = []

    @abstractmethod
    def write(self, line: str) -> None: ...

    def flush(self) -> None:  # noqa: B027  # most clients have nothing to do
        """Called after some lines, for clients that do not send each at once."""

    @abstractmethod
    def finish(self) -> None:
        """All written lines are acknowledged, or in `failures`. Ends the pair."""

    def said(self) -> str:
        """The output of the programs."""
        return ""

    def check(self) -> None:  # noqa: B027  # most clients have nothing to do
        """Raises AssertionError if the client has failed."""


# -- programs --------------------------------------------------------------------------------------


class _Program:
    """A process whose lines of output go to `on_line`."""

    def __init__(
        self,
        command: list[str],
        errors: Path,
        on_line: Callable[[str], None],
        environment: dict[str, str] | None = None,
    ) -> None:
        self._errors = errors
        with open(errors, "w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                bufsize=1,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input: IO[str] = self.process.stdin
        self._thread = threading.Thread(target=self._take, args=(self.process.stdout, on_line), daemon=True)
        self._thread.start()

    @staticmethod
    def _take(output: IO[str], on_line: Callable[[str], None]) -> None:
        for line in output:
            on_line(line.rstrip("\n"))

    def said(self) -> str:
        return self._errors.read_text(errors="replace")[-3000:]

    def check(self) -> None:
        assert self.process.poll() is None, f"it ended with {self.process.returncode}\n{self.said()}"

    def end(self, *codes: int, number: signal.Signals | None = None) -> None:
        """Closes its input, or sends a signal, and waits."""
        with contextlib.suppress(OSError):
            self.input.close()
        if number is not None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it does not end\n{self.said()}") from None
        self._thread.join(END_SECONDS)
        assert code in (codes or (0,)), f"it ended with {code}\n{self.said()}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class LinesPair(Pair):
    """One program that prints "acked LINE" and "read LINE": Java's client, and Go's."""

    def __init__(self, way: Way, topic: str, command: list[str]) -> None:
        super().__init__(way, topic)
        self._program = _Program(command, way.folder / "errors", self._on_line)

    def _on_line(self, line: str) -> None:
        word, _, value = line.partition(" ")
        if word in ("acked", "read"):
            (self.acknowledged if word == "acked" else self.read).add(value)

    def write(self, line: str) -> None:
        self._program.input.write(line + "\n")

    def finish(self) -> None:
        self._program.end()

    def check(self) -> None:
        self._program.check()

    def said(self) -> str:
        return self._program.said()


class ToolsPair(Pair):
    """Kafka's tools: one with lines for input, one with lines for output."""

    def __init__(self, way: Way, topic: str, producer: list[str], consumer: list[str]) -> None:
        super().__init__(way, topic)
        self._written: list[str] = []
        self._consumer = _Program(consumer, way.folder / "consumer.errors", self.read.add)
        self._producer = _Program(producer, way.folder / "producer.errors", lambda _: None)

    def write(self, line: str) -> None:
        self._written.append(line)
        self._producer.input.write(line + "\n")

    def finish(self) -> None:
        try:
            self._producer.end()
            # it exits with 0 nevertheless
            said = self._producer.said()
            assert "Error when sending message" not in said, said
            self.acknowledged.update(self._written)
        finally:
            self._consumer.end(128 + signal.SIGTERM, number=signal.SIGTERM)

    def check(self) -> None:
        self._producer.check()
        self._consumer.check()

    def said(self) -> str:
        return f"{self._producer.said()}\n{self._consumer.said()}"


class KcatPair(Pair):
    """A consumer, and a producer process for each few lines: it reads its input by blocks, and
    exits with 0 when all of them are acknowledged.
    """

    def __init__(self, way: Way, topic: str, kcat: Kcat) -> None:
        super().__init__(way, topic)
        self._kcat, self._lines = kcat, list[str]()
        self._producers: list[tuple[_Program, list[str]]] = []
        words = ["-X", "auto.offset.reset=earliest", "-u", "-q", "-G", f"{topic}-group", topic]
        command = [*self._common(), *words]
        self._consumer = _Program(command, way.folder / "consumer.errors", self.read.add, kcat.environment)

    def _common(self) -> list[str]:
        settings = [word for name, value in self.way.settings.items() for word in ("-X", f"{name}={value}")]
        return [self._kcat.binary, "-E", *settings]

    def write(self, line: str) -> None:
        self._lines.append(line)

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        idempotent = ("-X", "enable.idempotence=true", "-X", f"message.timeout.ms={DELIVERY_MS}")
        command = [*self._common(), "-P", "-t", self.topic, *idempotent]
        errors = self.way.folder / f"producer-{len(self._producers)}.errors"
        producer = _Program(command, errors, lambda _: None, self._kcat.environment)
        producer.input.write("".join(line + "\n" for line in lines))
        producer.input.close()
        self._producers.append((producer, lines))

    def check(self) -> None:
        self._consumer.check()

    def finish(self) -> None:
        try:
            for producer, lines in self._producers:
                producer.end()
                self.acknowledged.update(lines)
            # a record that kcat has polled when it gets the signal is committed, but not printed
            eventually(lambda: self.acknowledged <= self.read, lambda: f"not read: {self.acknowledged - self.read}")
        finally:
            self._consumer.end(number=signal.SIGTERM)

    def said(self) -> str:
        return "\n".join(one.said() for one in (self._consumer, *(producer for producer, _ in self._producers)))


def java_pair(way: Way, topic: str, home: Path) -> Pair:
    command = java_command(home, str(way.java()), topic)
    at = command.index("mqd.compat.Main")
    command[at : at + 1] = [*way.java_flags(), "mqd.compat.Lines"]
    return LinesPair(way, topic, command)


def go_pair(way: Way, topic: str, program: Path) -> Pair:
    get = way.settings.get
    words = {
        "seeds": way.settings["bootstrap.servers"],
        "topic": topic,
        "ca": get("ssl.ca.location", ""),
        "cert": get("ssl.certificate.location", ""),
        "mechanism": get("sasl.mechanisms", ""),
        "user": get("sasl.username", ""),
        "password": get("sasl.password", ""),
        "token-file": str(way.token_file),
        "seconds": "300",
    }
    return LinesPair(way, topic, [str(program), "-lines", *(f"-{name}={value}" for name, value in words.items())])


def tools_pair(way: Way, topic: str, tools: KafkaTools) -> Pair:
    told = ("--bootstrap-server", way.settings["bootstrap.servers"], "--command-config", str(way.java()))
    # by default it gives a record up after three attempts, and after a minute without metadata
    patient = (
        *("--message-send-max-retries", "2147483647", "--request-timeout-ms", "30000"),
        *("--max-block-ms", str(DELIVERY_MS)),
    )
    commands = [
        tools.command(name, *told, "--topic", topic, *words, heap="128M")
        for name, *words in (
            ("org.apache.kafka.tools.ConsoleProducer", *patient),
            ("org.apache.kafka.tools.consumer.ConsoleConsumer", "--group", f"{topic}-group", "--from-beginning"),
        )
    ]
    for command in commands:
        command[1:1] = way.java_flags()
    return ToolsPair(way, topic, *commands)


# -- in this process -------------------------------------------------------------------------------


class _ThreadPair(Pair):
    """Its consumer polls in a thread."""

    def __init__(self, way: Way, topic: str) -> None:
        super().__init__(way, topic)
        self._ended = threading.Event()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._consume()
        except BaseException as error:
            self._broken = error

    @abstractmethod
    def _consume(self) -> None: ...

    def check(self) -> None:
        if self._broken is not None:
            raise AssertionError("the consumer failed") from self._broken

    def _end(self) -> None:
        self._ended.set()
        self._thread.join(END_SECONDS)
        assert not self._thread.is_alive(), f"the consumer does not end\n{self._waits_for()}"

    def _waits_for(self) -> str:
        """The stack of the thread."""
        return "".join(traceback.format_stack(sys._current_frames()[self._thread.ident or 0]))


class LibrdkafkaPair(_ThreadPair):
    """confluent_kafka's clients, or mqd's with the same interface."""

    def __init__(self, way: Way, topic: str, module: Any = confluent_kafka) -> None:
        self._module = module
        own = {"enable.idempotence": True, "linger.ms": 1, "delivery.timeout.ms": DELIVERY_MS}
        self._producer = module.Producer({**way.librdkafka(), **own})
        super().__init__(way, topic)

    def write(self, line: str) -> None:
        self._producer.produce(self.topic, line.encode(), on_delivery=self._on_delivery)
        self._producer.poll(0)

    def _on_delivery(self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        line = message.value().decode()
        if error is None:
            self.acknowledged.add(line)
        else:
            self.failures.append(f"{line}: {error}")

    def _consume(self) -> None:
        own = {"group.id": f"{self.topic}-group", "auto.offset.reset": "earliest"}
        consumer = self._module.Consumer({**self.way.librdkafka(), **own})
        try:
            consumer.subscribe([self.topic])
            while not self._ended.is_set():
                message = consumer.poll(0.05)
                if message is not None and message.error() is None:
                    self.read.add(message.value().decode())
        finally:
            consumer.close()

    def check(self) -> None:
        self._producer.poll(0)
        super().check()

    def finish(self) -> None:
        assert self._producer.flush(END_SECONDS) == 0
        self._end()


class KafkaPythonPair(_ThreadPair):
    def __init__(self, way: Way, topic: str) -> None:
        provider = {}
        if way.is_oauth:

            class Provider(AbstractTokenProvider):
                def token(self) -> str:
                    return way.token()[0]

            provider = {"sasl_oauth_token_provider": Provider()}
        self._settings = {**way.python(), **provider}
        self._producer = kafka.KafkaProducer(
            **self._settings, enable_idempotence=True, linger_ms=1, delivery_timeout_ms=DELIVERY_MS
        )
        super().__init__(way, topic)

    def write(self, line: str) -> None:
        sent = self._producer.send(self.topic, line.encode())
        sent.add_callback(lambda _: self.acknowledged.add(line))
        sent.add_errback(lambda error: self.failures.append(f"{line}: {error}"))

    def _consume(self) -> None:
        consumer = kafka.KafkaConsumer(**self._settings, auto_offset_reset="earliest", group_id=f"{self.topic}-group")
        # it may keep an empty assignment when it joins before it knows the partitions
        while not consumer.partitions_for_topic(self.topic) and not self._ended.is_set():
            pass
        consumer.subscribe([self.topic])
        try:
            while not self._ended.is_set():
                for records in consumer.poll(50).values():
                    self.read.update(record.value.decode() for record in records)
        finally:
            consumer.close()

    def finish(self) -> None:
        self._producer.flush(END_SECONDS)
        self._producer.close()
        self._end()


class AiokafkaPair(_ThreadPair):
    """Both run in the loop of the thread."""

    def __init__(self, way: Way, topic: str) -> None:
        self._started: Future[None] = Future()
        super().__init__(way, topic)
        self._started.result(END_SECONDS)

    def _settings(self) -> dict[str, Any]:
        if not self.way.is_oauth:
            return self.way.python()
        issue = self.way.token

        class Provider(aiokafka.abc.AbstractTokenProvider):
            async def token(self) -> str:
                return issue()[0]

        return {**self.way.python(), "sasl_oauth_token_provider": Provider()}

    def _consume(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sending: set[asyncio.Task[None]] = set()
        self._producer = aiokafka.AIOKafkaProducer(
            **self._settings(), enable_idempotence=True, request_timeout_ms=DELIVERY_MS
        )
        consumer = aiokafka.AIOKafkaConsumer(
            self.topic, **self._settings(), group_id=f"{self.topic}-group", auto_offset_reset="earliest"
        )
        async with self._producer, consumer:
            self._started.set_result(None)
            while not self._ended.is_set():
                for records in (await consumer.getmany(timeout_ms=50)).values():
                    self.read.update(record.value.decode() for record in records)
            # Looks up a coordinator that was lost meanwhile. The commit in stop() does not
            # (aiokafka 0.14: ensure_coordinator_known() returns at once while it closes), and is
            # retried forever.
            await consumer.commit()

    async def _send(self, line: str) -> None:
        try:
            await (await self._producer.send(self.topic, line.encode()))
            self.acknowledged.add(line)
        except Exception as error:
            self.failures.append(f"{line}: {error!r}")

    def _waits_for(self) -> str:
        """The stack of each task, down to its innermost await."""
        found = io.StringIO()
        for task in asyncio.all_tasks(self._loop):
            task.print_stack(file=found)
            awaited = task.get_coro()
            while (inner := getattr(awaited, "cr_await", None)) is not None:
                frame = getattr(inner, "cr_frame", None)
                print("  awaits", frame or inner, file=found)
                awaited = inner
        return found.getvalue()

    def write(self, line: str) -> None:
        def begin() -> None:
            task = self._loop.create_task(self._send(line))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

        self._loop.call_soon_threadsafe(begin)

    async def _sent(self) -> None:
        await asyncio.gather(*self._sending)

    def finish(self) -> None:
        asyncio.run_coroutine_threadsafe(self._sent(), self._loop).result(END_SECONDS)
        self._end()


def mqd_pair(way: Way, topic: str) -> Pair:
    pair = LibrdkafkaPair(way, topic, mqd)
    assert pair._producer.transport == "tcp", "its records go through shared memory, and no mechanism is tried"
    return pair

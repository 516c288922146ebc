"""Runs a chapter of docs/ about a cluster literally: bash runs every ```sh block, line by line; the
output must contain the ```text block after it.

    python -m tests.interaction.pages.operations_run DIRECTORY PAGE CHAPTER

in a network namespace, where the pages' addresses and ports are free. DIRECTORY is the user's home
directory.

A line that begins with one of READY stays in the foreground of its own terminal: it is started, and
the run waits until it prints that it is ready. `mqd up` with the address 10.0.0.2 is typed on
another host, which has another home directory; TOKEN in it stands for the token that an invitation
printed. Numbers, ids and spaces need not match; a page line `...` stands for any lines. After the
topic `flights` is created, an idempotent producer writes to it; where the page creates settings for
librdkafka, it switches to them, as a migrated client would. In the end every record must be
present, once and in order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

DOCS = Path(__file__).resolve().parents[3] / "docs"
BOOTSTRAP = "127.0.0.1:9092,127.0.0.2:9092,127.0.0.3:9092,127.0.0.4:9092"
TOPIC, PARTITIONS = "flights", 6
READY = {
    "make cluster": "Ctrl-C stops all of them",
    "mqd cluster local": "Ctrl-C stops all of them",
    "mqd up": "mqd ready on",
    "mqd cluster invite": "mqd up --join",
}
SECOND_HOST = "10.0.0.2"
SETTINGS = re.compile(r"mqd client-config librdkafka .* -o (\S+)$")
PATIENCE_S = 180.0


class Block(NamedTuple):
    section: str
    commands: tuple[str, ...]
    shown: tuple[str, ...]  # lines; empty = the page shows no output


def blocks(page: str, chapter_name: str) -> Iterator[Block]:
    """The ```sh blocks of a chapter, each with the ```text that follows it."""
    chapter = page[page.index(f"\n## {chapter_name}\n") :]
    chapter = chapter[: chapter.index("\n## ", 5)]
    for section in chapter.split("\n### "):
        name, _, text = section.lstrip().partition("\n")
        for match in re.finditer(r"```sh\n(.*?)```(?:\s*```text\n(.*?)```)?", text, re.DOTALL):
            yield Block(
                name, tuple(filter(None, match[1].split("\n"))), tuple(filter(None, (match[2] or "").split("\n")))
            )


def normal(line: str) -> str:
    line = re.sub(r"(cluster )?[\w-]{22}(?!\w)", "ID", line)
    return " ".join(re.sub(r"\d+", "N", line).split())


def holds(shown: tuple[str, ...], printed: str) -> str:
    """The first line of the page that is missing from the output, in order; "" = none."""
    lines = [normal(line) for line in printed.split("\n")]
    at = 0
    for line in shown:
        expected = normal(line)
        if expected == "...":
            continue
        while at < len(lines) and lines[at] != expected:
            at += 1
        if at == len(lines):
            return line
        at += 1
    return ""


def _properties(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


class Terminals:
    """The terminals in which commands are typed: one after the other, or each in its own."""

    def __init__(self, home: Path) -> None:
        self._environment = {**os.environ, "HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
        self.folder = self._home = home
        self._open: list[subprocess.Popen[str]] = []
        self._second, self._token = home / "2", ""
        for folder in (home / "bin", self._second):
            folder.mkdir(parents=True)
        self._script("mqd", f'exec {sys.executable} -m mqd.cli.main "$@"')
        # as in the Makefile, but without creating an environment first
        self._script("make", f'test "$1" = cluster && exec {sys.executable} -m mqd.cli.main cluster local')
        self._script("scp", f'exec cp -p "$2" "{self._second}/${{3#{SECOND_HOST}:}}"')

    @property
    def client_settings(self) -> dict[str, str]:
        """Of a client that reads what the page has exported."""
        file, bootstrap = map(self._environment.get, ("MQD_CLIENT_CONFIG", "MQD_BOOTSTRAP"))
        if file is None or bootstrap is None:
            return {}
        return {**_properties(Path(file)), "bootstrap.servers": bootstrap}

    def _script(self, name: str, text: str) -> None:
        path = self._home / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, command: str) -> str:
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environment[name] = value.replace("$HOME", self._environment["HOME"])
            return ""
        if command.startswith("cd "):
            self.folder = Path(command.removeprefix("cd ").replace("~", self._environment["HOME"]))
            return ""
        ready = next((line for prefix, line in READY.items() if command.startswith(prefix)), None)
        if ready is not None:
            return self._keep(command, ready)
        done = subprocess.run(
            ["bash", "-c", command],
            env=self._environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{command!r} ended with {done.returncode}: {done.stdout}"
        return done.stdout

    def _keep(self, command: str, ready: str) -> str:
        other = command.startswith("mqd up") and SECOND_HOST in command
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command.replace('TOKEN', self._token)}"],
            env={**self._environment, "HOME": str(self._second)} if other else self._environment,
            cwd=self._second if other else self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._open.append(process)
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if ready in line:
                self._token = line.partition(" --join ")[2].strip() or self._token
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return printed
        raise AssertionError(f"{command!r} ended with {process.wait()}: {printed}")

    def close(self) -> None:
        """Ctrl-C in each, the newest first."""
        for process in reversed(self._open):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self._open:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


class Load(threading.Thread):
    """Writes until it is stopped; every record is acknowledged in the end, or `failed` says why
    not. `settings`: of a client that has moved; `sent`: what it has written before.
    """

    def __init__(self, settings: dict[str, str] | None = None, sent: dict[int, list[bytes]] | None = None) -> None:
        super().__init__(daemon=True)
        self.settings = {"bootstrap.servers": BOOTSTRAP, "log_level": 0, **(settings or {})}
        self.sent: dict[int, list[bytes]] = sent or {index: [] for index in range(PARTITIONS)}
        self.failed: list[str] = []
        self._ending = threading.Event()
        self._producer = Producer(
            {**self.settings, "acks": "all", "enable.idempotence": True, "linger.ms": 1, "message.timeout.ms": 120_000}
        )

    def run(self) -> None:
        number = sum(map(len, self.sent.values()))
        while not self._ending.wait(0.002):
            index, value = number % PARTITIONS, b"%d" % number
            self._producer.produce(
                TOPIC,
                value,
                partition=index,
                on_delivery=lambda error, _: self.failed.append(error.str()) if error else None,
            )
            self.sent[index].append(value)
            self._producer.poll(0)
            number += 1
        if self._producer.flush(60):
            self.failed.append("some records were not answered")

    def end(self) -> None:
        self._ending.set()
        self.join(90)
        assert not self.is_alive() and not self.failed, self.failed[:3]

    def check(self) -> int:
        """How many records there are: each once, in order."""
        consumer = Consumer({**self.settings, "group.id": "check", "enable.auto.commit": False})
        found: dict[int, list[bytes]] = {index: [] for index in self.sent}
        consumer.assign([TopicPartition(TOPIC, index, OFFSET_BEGINNING) for index in self.sent])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and any(
            len(found[index]) < len(values) for index, values in self.sent.items()
        ):
            for message in consumer.consume(1000, 0.2):
                # words other than numbers are the page's own
                if message.error() is None and message.value().isdigit():
                    found[message.partition()].append(message.value())
        consumer.close()
        for index, values in self.sent.items():
            assert found[index] == values, (
                f"partition {index}: {len(values)} sent, {len(found[index])} found,"
                f" {len(set(values) - set(found[index]))} lost"
            )
        return sum(map(len, found.values()))


def main() -> None:
    home, page, chapter = Path(sys.argv[1]), DOCS / sys.argv[2], sys.argv[3]
    for words in ("link set lo up", "address add 10.0.0.1/32 dev lo", f"address add {SECOND_HOST}/32 dev lo"):
        subprocess.run(["ip", *words.split()], check=True)
    terminals, load = Terminals(home), None
    try:
        for block in blocks(page.read_text(), chapter):
            print(f"### {block.section}", flush=True)
            printed = ""
            for command in block.commands:
                print(f"$ {command}", flush=True)
                output = terminals.run(command)
                print(output, flush=True)
                printed += output
                if load is None and command.startswith(f"mqd topic create {TOPIC} "):
                    load = Load(terminals.client_settings)
                    load.start()
                if load is not None and (made := SETTINGS.match(command)):
                    load.end()
                    load = Load(_properties(terminals.folder / made[1]), load.sent)
                    load.start()
            missing = holds(block.shown, printed.replace(str(home), "~"))
            assert not missing, f"{block.section}: the page shows {missing!r}, printed was:\n{printed}"
        if load is not None:
            load.end()
            print(f"checked {load.check()} records", flush=True)
    finally:
        terminals.close()


if __name__ == "__main__":
    main()

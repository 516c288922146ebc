"""kcat (librdkafka 2.0.2 in Debian 12), found or unpacked, and run as a process.

kcat cannot write a chosen timestamp, an empty key or value beside an absent one, a header without a
value, nor a NUL or a delimiter. `writable` turns a message into the nearest possible one. Its
consumer prints headers joined, so headers are compared joined.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.messages import Headers, Message

DEADLINE_SECONDS = 60
_HEAD = re.compile(rb"(-?\d+) (-?\d+) (-?\d+) (-?\d+) (-?\d+)\n")  # partition, offset, timestamp, key size, value size
_KEY_END, _VALUE_END, _RECORD_END = b"\x1f", b"\x1e", b"\x02\x01\n"


class Kcat:
    name = "kcat"

    def __init__(self, binary: str, library_path: str = "") -> None:
        self.binary = binary
        self.environment = {**os.environ, "KCAT_CONFIG": os.devnull}
        if library_path:
            self.environment["LD_LIBRARY_PATH"] = library_path

    def run(self, *arguments: str, stdin: bytes = b"") -> bytes:
        done = subprocess.run(
            [self.binary, *arguments], input=stdin, capture_output=True, timeout=DEADLINE_SECONDS, env=self.environment
        )
        assert done.returncode == 0, (
            f"kcat {' '.join(arguments)} ended with {done.returncode}: {done.stderr.decode(errors='replace')}"
        )
        return done.stdout

    def produce(
        self, bootstrap: str, topic: str, messages: list[Message], compression: str = "none", **options: object
    ) -> None:
        """One run for adjacent messages with the same partition and headers: kcat takes those by
        option, keys and values from its input.
        """
        settings = [word for name, value in options.items() for word in ("-X", f"{name}={value}")]
        for (partition, headers), run in itertools.groupby(
            messages, lambda message: (message.partition, message.headers)
        ):
            words = [word for name, value in headers for word in ("-H", f"{name}={(value or b'').decode('ascii')}")]
            lines = [(message.key or b"") + _KEY_END + (message.value or b"") + _VALUE_END for message in run]
            delimiters = ("-K", "\\x1f", "-D", "\\x1e", "-Z")
            self.run(
                "-P",
                "-b",
                bootstrap,
                "-t",
                topic,
                "-p",
                str(partition),
                "-z",
                compression,
                *delimiters,
                *words,
                *settings,
                stdin=b"".join(lines),
            )

    @staticmethod
    def writable(message: Message) -> Message:
        def text(data: bytes) -> bytes:
            return bytes(byte % 90 + 33 for byte in data)  # no NUL in an argument, no delimiter in a value

        headers = tuple((name, text(value)) for name, value in message.headers if value)
        value = None if not message.value else text(message.value)
        return Message(message.partition, text(message.key) if message.key else None, value, headers, None)

    def consume(
        self, bootstrap: str, topic: str, *arguments: str
    ) -> list[tuple[int, int, int, bytes | None, bytes | None, bytes]]:
        """(partition, offset, timestamp, key, value, joined headers) of every record of all
        partitions to their ends, in order of arrival. `arguments` set the start.
        """
        # kcat exits when its last long poll has ended
        settings = ("-X", "check.crcs=true", "-X", "fetch.wait.max.ms=20")
        form = "%p %o %T %K %S\\n%k%s%h\\x02\\x01\\n"
        return list(
            _parse(
                self.run(
                    "-C",
                    "-q",
                    "-e",
                    "-b",
                    bootstrap,
                    "-t",
                    topic,
                    *(arguments or ("-o", "beginning")),
                    *settings,
                    "-f",
                    form,
                )
            )
        )


def _parse(text: bytes) -> Iterator[tuple[int, int, int, bytes | None, bytes | None, bytes]]:
    position = 0
    while position < len(text):
        head = _HEAD.match(text, position)
        assert head is not None, f"kcat printed {text[position : position + 60]!r} where a record should begin"
        partition, offset, timestamp, key_size, value_size = (int(number) for number in head.groups())
        position = head.end()
        key = text[position : position + key_size] if key_size >= 0 else None
        position += max(0, key_size)
        value = text[position : position + value_size] if value_size >= 0 else None
        position += max(0, value_size)
        end = text.index(_RECORD_END, position)
        yield partition, offset, timestamp, key, value, text[position:end]
        position = end + len(_RECORD_END)


def joined(headers: Headers) -> bytes:
    """Headers as kcat's %h prints them: a value ends at its first NUL."""
    return b",".join(
        name.encode() + b"=" + (b"NULL" if value is None else value.partition(b"\0")[0]) for name, value in headers
    )


# -- finding kcat ----------------------------------------------------------------------------


def find_kcat(cache: Path) -> Kcat:
    """The installed one, or one unpacked from Debian's package. Skips the test, with the reason,
    when it is not available.
    """
    installed = shutil.which("kcat") or shutil.which("kafkacat")
    if installed:
        return Kcat(installed)
    unpacked = cache / "root" / "usr" / "bin" / "kcat"
    try:
        if not unpacked.exists():
            _unpack(cache)
        libraries = ":".join(sorted({str(path.parent) for path in (cache / "root").rglob("*.so*")}))
        kcat = Kcat(str(unpacked), libraries)
        kcat.run("-V")
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        reason = f"kcat is not installed and could not be unpacked ({error}); apt-get install kcat"
        print(reason)
        pytest.skip(reason)
    return kcat


def _unpack(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    expected = subprocess.run(
        [
            "apt-cache",
            "depends",
            "--recurse",
            "--no-recommends",
            "--no-suggests",
            "--no-conflicts",
            "--no-breaks",
            "--no-replaces",
            "--no-enhances",
            "kcat",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_SECONDS,
    )
    # All linked libraries, except those that each system has and that must not be loaded twice.
    names = sorted(
        {
            line
            for line in expected.stdout.splitlines()
            if re.fullmatch(r"kcat|zlib1g|lib(?!c6|gcc|crypt1|stdc)[a-z0-9.+-]+", line)
        }
    )
    if "kcat" not in names:
        raise OSError("apt knows no package kcat")
    subprocess.run(
        ["apt-get", "download", *names], cwd=cache, check=True, capture_output=True, timeout=DEADLINE_SECONDS
    )
    for package in cache.glob("*.deb"):
        subprocess.run(
            ["dpkg", "-x", str(package), str(cache / "root")], check=True, capture_output=True, timeout=DEADLINE_SECONDS
        )

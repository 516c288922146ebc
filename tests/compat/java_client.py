"""The Java client (kafka-clients): a small program in java/, and others based on it, built with the
machine's Maven into the build tree, run with the machine's Java.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "java"
OUTPUT = Path(__file__).parents[2] / ".build"
BUILD_SECONDS = 300
RUN_SECONDS = 240
# a program that lives for seconds pays more for the JIT than it gains
FRUGAL = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def build_java_client() -> Path:
    return build_java(SOURCE, "compat-java")


def build_java(source: Path, name: str) -> Path:
    """A folder with classes and libraries of the program in `source`, cached in the build tree as
    `name` until the sources change. Skips the test where a tool or the libraries are not available.
    """
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            pytest.skip(f"the Java client: {tool} is not installed")
    digest = hashlib.sha256(
        b"".join(
            path.read_bytes()
            for path in [*sorted(source.rglob("*")), source.parent / "pom.xml"]
            if path.is_file() and path.suffix in (".xml", ".java")
        )
    ).hexdigest()
    home = OUTPUT / name / digest[:16]
    if (home / "complete").exists():
        return home
    shutil.rmtree(OUTPUT / name, ignore_errors=True)
    code, output = _maven(source, home, "dependency:copy-dependencies", "compiler:compile")  # a single start of Maven
    if code != 0:
        code, output = _maven(source, home, "dependency:copy-dependencies")
        if code != 0:
            pytest.skip(f"the libraries of {name} cannot be had: {output[-300:]}")
        code, output = _maven(source, home, "compiler:compile")
        if code != 0 and ("PluginResolutionException" in output or "could not be resolved" in output):
            pytest.skip(f"Maven's compiler plugin cannot be had: {output[-300:]}")
    assert code == 0, output[-4000:]
    (home / "complete").touch()
    return home


def _maven(source: Path, home: Path, *goals: str) -> tuple[int, str]:
    """Exit status and output."""
    command = ["mvn", "--batch-mode", "--quiet", "--file", str(source / "pom.xml"), f"-Dcompat.output={home}", *goals]
    environment = {"MAVEN_OPTS": " ".join(FRUGAL), **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_SECONDS, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired:
        return 1, f"{' '.join(goals)} took longer than {BUILD_SECONDS} s"
    return done.returncode, done.stdout + done.stderr


def java_program(home: Path, main: str, *arguments: str, heap: str = "256m") -> list[str]:
    return [
        "java",
        f"-Xmx{heap}",
        *FRUGAL,
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-cp",
        f"{home / 'classes'}:{home / 'libraries'}/*",
        main,
        *arguments,
    ]


def java_command(home: Path, bootstrap: str, *arguments: str) -> list[str]:
    return java_program(home, "mqd.compat.Main", bootstrap, *arguments)


def run_java_client(home: Path, bootstrap: str, command: str) -> list[str]:
    """Returns the parts that passed. AssertionError with the program's output when one failed."""
    try:
        done = subprocess.run(
            java_command(home, bootstrap, command),
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as late:
        output = b"".join(
            part if isinstance(part, bytes) else (part or "").encode() for part in (late.stdout, late.stderr)
        ).decode(errors="replace")
        raise AssertionError(f"{command} took longer than {RUN_SECONDS} s\n{output[-4000:]}") from None
    assert done.returncode == 0 and f"done {command}" in done.stdout, (
        f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    )
    return [line.removeprefix("held: ") for line in done.stdout.splitlines() if line.startswith("held: ")]

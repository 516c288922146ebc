"""The Java client (kafka-clients): one small program under java/, and others on top of it, built with
the machine's Maven into the build tree, run with the machine's Java.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "java"
OUTPUT = Path(__file__).parents[2] / ".build"
BUILD_SECONDS = 300
RUN_SECONDS = 240


def build_java_client() -> Path:
    return build_java(SOURCE, "compat-java")


def build_java(source: Path, name: str) -> Path:
    """A folder with classes and libraries of the program in `source`, kept in the build tree as `name`
    while the sources are the same. Skips the test where it cannot be built for want of a tool or of
    the libraries.
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
    _maven(source, home, "dependency:copy-dependencies", f"the libraries of {name} cannot be had")
    try:
        _maven(source, home, "compiler:compile", "")
    except AssertionError as failure:
        if "PluginResolutionException" in str(failure) or "could not be resolved" in str(failure):
            pytest.skip(f"Maven's compiler plugin cannot be had: {str(failure)[-300:]}")
        raise
    (home / "complete").touch()
    return home


def _maven(source: Path, home: Path, goal: str, skipped: str) -> None:
    command = ["mvn", "--batch-mode", "--quiet", "--file", str(source / "pom.xml"), f"-Dcompat.output={home}", goal]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, stdin=subprocess.DEVNULL)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        output, code = f"{goal} took longer than {BUILD_SECONDS} s", 1
    if code != 0 and skipped:
        pytest.skip(f"{skipped}: {output[-300:]}")
    assert code == 0, output[-4000:]


def java_program(home: Path, main: str, *arguments: str, heap: str = "256m") -> list[str]:
    return [
        "java",
        f"-Xmx{heap}",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-cp",
        f"{home / 'classes'}:{home / 'libraries'}/*",
        main,
        *arguments,
    ]


def java_command(home: Path, bootstrap: str, *arguments: str) -> list[str]:
    return java_program(home, "mqd.compat.Main", bootstrap, *arguments)


def run_java_client(home: Path, bootstrap: str, command: str) -> list[str]:
    """The parts that held. AssertionError with what the program said when one did not."""
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

"""Java peers' jars, through Maven and whatever registry it is configured for, copied into a cache
below .build.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

from perf.loading import ROOT
from perf.peers.peer import Unavailable

CACHE = ROOT / ".build" / "peers"
MAVEN_SECONDS = 300


def java() -> str:
    """The path of the java program. Raises Unavailable when there is none, or it is older than 17
    (Kafka 4's minimum).
    """
    program = shutil.which("java")
    if program is None:
        raise Unavailable("no java on the PATH")
    output = subprocess.run([program, "-version"], capture_output=True, text=True).stderr
    if java_major(output) < 17:
        raise Unavailable(f"needs Java 17; there is {output.splitlines()[0] if output else 'an unknown one'}")
    return program


def java_major(message: str) -> int:
    """The major version in the output of `java -version`; 0 when it cannot be read."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', message)
    if not found:
        return 0
    return int(found[2] or 0) if found[1] == "1" else int(found[1])


def jars(pom: Path) -> Path:
    """The directory with the jars of a pom's runtime dependencies, which are downloaded if it does not
    exist. Raises Unavailable.
    """
    content = pom.read_bytes()
    directory = CACHE / f"{pom.parent.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if (directory / "complete").exists():
        return directory
    maven = shutil.which("mvn")
    if maven is None:
        raise Unavailable("no mvn on the PATH, which is needed to download its jars")
    command = [
        maven,
        "--batch-mode",
        "--quiet",
        "--file",
        str(pom),
        "dependency:copy-dependencies",
        f"-DoutputDirectory={directory}",
        "-DincludeScope=runtime",
    ]
    try:
        # it runs for seconds: an optimising compiler costs more than it saves
        environment = {"MAVEN_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1", **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAVEN_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Maven did not get its jars within {MAVEN_SECONDS} s") from None
    if done.returncode:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), "no reason given")
        raise Unavailable(f"Maven could not get its jars: {reason[:200]}")
    (directory / "complete").touch()
    return directory


def built_on(jar: Path) -> str:
    """The day of a jar's manifest, as 2026-10-08."""
    with zipfile.ZipFile(jar) as archive:
        year, month, day, *_ = archive.getinfo("META-INF/MANIFEST.MF").date_time
    return f"{year}-{month:02}-{day:02}"

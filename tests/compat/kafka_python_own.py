"""kafka-python's own integration tests, from its source distribution, run in a separate pytest
against a running broker.

The distribution lacks three things of its repository: `test/__init__.py`, `test/service.py` (starts
and watches brokers) and the folder with Kafka's scripts. They are created here: a service that
represents an external broker, and an empty folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree
from collections.abc import Iterable
from pathlib import Path

import kafka
import pytest

from tests.broker import Broker

KAFKA_VERSION = "4.2.0"  # selects the client behaviours to test
DOWNLOAD_SECONDS = 120
RUN_SECONDS = 540
TEST_SECONDS = 120

SERVICE = '''"""Brokers as the fixtures see them: one that is there already, and none that could be started."""


class ExternalService:
    def __init__(self, host, port):
        self.host, self.port = host, port

    def open(self):
        pass

    def close(self):
        pass

    def is_alive(self):
        return True

    def dump_logs(self):
        pass


class SpawnedService:
    def __init__(self, *_args, **_options):
        raise RuntimeError("only a broker that runs already is tested")
'''

# Loaded into that pytest. kafka-python 3.0.12 has a race: a consumer that subscribes while the
# first metadata request is in flight never requests its topics, and the next request is due in five
# minutes, long after the tests have given up. With a refresh every two seconds the race costs two
# seconds.
DEFAULTS = """
import kafka

for client in (kafka.KafkaConsumer, kafka.KafkaProducer, kafka.KafkaAdminClient):
    client.DEFAULT_CONFIG["metadata_max_age_ms"] = 2000
"""


def find_own_tests(cache: Path) -> Path:
    """The unpacked distribution of the installed version. Skips the test, with the reason, where it
    is not available.
    """
    version = kafka.__version__
    home = cache / f"kafka_python-{version}"
    if (home / "complete").exists():
        return home
    archive = _download(version, cache)
    shutil.rmtree(home, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(cache, filter="data")
    if not (home / "test" / "integration").is_dir():
        pytest.skip(f"kafka-python {version}: its source distribution has no test/integration")
    (home / "test" / "__init__.py").touch()
    (home / "test" / "service.py").write_text(SERVICE)
    (home / "servers" / KAFKA_VERSION / "kafka-bin").mkdir(parents=True)
    (home / "complete").touch()
    return home


def _download(version: str, cache: Path) -> Path:
    """pip builds metadata from a source distribution: with the build tools of this environment, or,
    where it has none, with freshly downloaded ones.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-binary",
        ":all:",
        "--no-deps",
        "--dest",
        str(cache),
        f"kafka-python=={version}",
    ]
    failed = ""
    for options in (["--no-build-isolation"], []):
        try:
            done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            failed = str(error)
            continue
        archive = cache / f"kafka_python-{version}.tar.gz"
        if done.returncode == 0 and archive.exists():
            return archive
        failed = done.stderr.strip()
    pytest.skip(f"kafka-python {version}: its source distribution cannot be downloaded: {failed[-300:]}")


def broker_for_own_tests(data_dir: Path, **config: str) -> Broker:
    """Not yet started; configured like kafka-python's fixtures: number 0, four partitions, short
    sessions, listeners by name.
    """
    settings = {"node.id": "0", "num.partitions": "4", "group.min.session.timeout.ms": "1000", **config}
    broker = Broker(data_dir, config=settings)
    broker.config["advertised.listeners"] = f"PLAINTEXT://127.0.0.1:{broker.port}"
    return broker


def run_own_tests(
    home: Path, broker: Broker, results: Path, left_out: Iterable[str] = (), only: Iterable[str] = ()
) -> dict[str, tuple[str, str]]:
    """`left_out`: modules that are not collected; `only`: tests, by the names used here. Test name
    -> ("passed" | "failed" | "skipped", reason). Modules are given as files: test_x.py::test_name.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "KAFKA_URI": f"kafka://127.0.0.1:{broker.port}",
        "KAFKA_VERSION": KAFKA_VERSION,
        "PROJECT_ROOT": str(home),
    }
    (home / "mqd_defaults.py").write_text(DEFAULTS)
    targets = [f"test/integration/{name}" for name in only]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "mqd_defaults",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        "--show-capture=no",
        f"--timeout={TEST_SECONDS}",
        f"--junitxml={results}",
    ]
    command += targets or ["test/integration", *(f"--ignore=test/integration/{module}" for module in left_out)]
    with open(results.with_suffix(".log"), "w") as log:
        done = subprocess.run(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=RUN_SECONDS
        )
    output = results.with_suffix(".log").read_text(errors="replace")
    assert done.returncode in (0, 1), f"pytest ended with {done.returncode}\n{output[-3000:]}"
    found: dict[str, tuple[str, str]] = {}
    for case in xml.etree.ElementTree.parse(results).getroot().iter("testcase"):
        module = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
        outcome = ("passed", "")
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = ("failed", (child.get("message") or "") + "\n" + (child.text or "")[-1500:])
            elif child.tag == "skipped":
                outcome = ("skipped", child.get("message") or "")
        name = f"{module}.py::{case.get('name')}"
        if found.get(name, ("", ""))[0] != "failed":  # a test whose clean-up fails is reported twice
            found[name] = outcome
    return found

"""One Spark session for the whole run, and real brokers.

`spark` is a classic session of local[2] without a UI, small, in this test's own directories. The
tests are skipped, with the reason, where PySpark or Java 17 is missing: `pip install 'mqd[spark]'`,
and any JDK or JRE of 17 or later (JAVA_HOME, or `java` on the PATH).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.spark import connector

ROOT = Path(__file__).resolve().parents[2]
JAVA_LEAST = 17


def why_not() -> str | None:
    """Why Spark cannot run here."""
    try:
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed: pip install 'mqd[spark]'"
    return why_not_java()


def why_not_java() -> str | None:
    """Why the installed Java cannot be used."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        return "no java: install a JRE of 17 or later, or set JAVA_HOME"
    output = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    version = re.search(r'version "(\d+)', output)
    if version is None or int(version[1]) < JAVA_LEAST:
        return f"Spark 4 needs Java {JAVA_LEAST} or later, {java} is {output.splitlines()[0] if output else 'mute'}"
    return None


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The session. Workers import mqd and pyspark_mqd from this tree, whatever is installed."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"Spark cannot run here: {reason}")
    from pyspark.sql import SparkSession

    place = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    session = (
        SparkSession.builder.master("local[2]")
        .appName("mqd tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(place / "local"))
        .config("spark.sql.warehouse.dir", str(place / "warehouse"))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config(
            "spark.driver.extraJavaOptions", f"-Dderby.system.home={place} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
        )
        .config("spark.log.level", "ERROR")
        .config("spark.jars", ",".join(map(str, connector.jars()[0])))
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker of two workers for tests whose only state is their topics."""
    with Broker(tmp_path_factory.mktemp("spark-broker")) as running:
        yield running

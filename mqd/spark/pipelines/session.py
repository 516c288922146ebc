"""The Spark session of a pipeline."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mqd.spark.pipelines.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def defaults(master: str) -> dict[str, str]:
    """Configuration that a pipeline has unless it says else. Local: no web page, and as many
    shuffle partitions as cores (Spark's 200 would cost more than the work).
    """
    found = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.ui.showConsoleProgress": "false",
        # With a bound in bytes Spark 4.3 adds up its Arrow buffers at every row, ten times the work
        # of filling them; this value is "none". Fewer rows than its 10,000 bound a batch instead.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # Spark's INT96 is no type of Parquet's any more
    }
    local = _LOCAL.fullmatch(master)
    if local:
        cores = int(local[1]) if (local[1] or "*").isdigit() else (os.cpu_count() or 1) if local[1] else 1
        found |= {
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": str(cores),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        }
    return found


def log_level(master: str, configuration: Mapping[str, str]) -> str:
    """What Spark's log tells: `spark.log.level`, where that is set. Local: nothing, since what ends
    a query is raised, and each task's stack trace on top would bury it. On a cluster: errors.
    """
    return configuration.get("spark.log.level", "FATAL" if _LOCAL.fullmatch(master) else "ERROR")


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """What this process, and those that it starts meanwhile, say on stderr is held back, and told
    only if the block fails; what they say afterwards goes to stderr as ever.

    Java's and Spark's greetings are ten lines; they cannot be turned off before Spark is there.
    """
    reader, writer = os.pipe()
    held: list[bytes] = []
    lock = threading.Lock()
    holding = True

    def pass_on() -> None:
        while True:
            select.select([reader], [], [])
            with lock:  # read and handled at once: nothing earlier is reported later
                output = os.read(reader, 65536)
                if not output:
                    os.close(reader)
                    return
                held.append(output) if holding else _write_through(output)

    threading.Thread(target=pass_on, name="stderr of Spark", daemon=True).start()
    sys.stderr.flush()
    own = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    failed = True
    try:
        yield
        failed = False
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        os.close(own)
        with lock:
            holding = False
            if failed:
                _write_through(b"".join(held))


def _write_through(output: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(2, output)


def require_spark() -> None:
    """Raises SettingsError when PySpark or Java is missing; in no time, and before Spark's script says
    so in several lines. Java is looked for as that script does.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise SettingsError("PySpark is missing; install it with: pip install 'mqd[spark]'")
    home = os.environ.get("JAVA_HOME")
    if shutil.which(os.path.join(home, "bin", "java") if home else "java") is None:
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is no java on the PATH"
        raise SettingsError(
            f"Spark needs Java 17 or newer, and {where}; install it, on Debian and Ubuntu with:"
            " apt install openjdk-17-jre-headless"
        )


@contextlib.contextmanager
def _java_ends_when_interrupted() -> Iterator[None]:
    """An interruption of PySpark while it waits for Java takes away the file by which Java would
    say where it listens; Java then fails, and stays for ever.
    """
    from pyspark import java_gateway

    started: list[subprocess.Popen[bytes]] = []
    popen = java_gateway.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    java_gateway.Popen = noted
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for process in started:
            process.kill()
            process.wait()
        raise
    finally:
        java_gateway.Popen = popen


def session(name: str, master: str, configuration: Mapping[str, str] | None = None) -> SparkSession:
    """A session for `name`. Raises SettingsError when PySpark or Java is missing."""
    # pandas may be there for others; nothing of ours uses it
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    require_spark()
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    if _LOCAL.fullmatch(master):
        for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            # where mqd is; Spark would take the first python3 on the PATH
            os.environ.setdefault(variable, sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in {**defaults(master), **(configuration or {})}.items():
        builder = builder.config(key, value)
    _raise_only()
    try:
        with held_back(), _java_ends_when_interrupted():
            spark = builder.getOrCreate()
            spark.sparkContext.setLogLevel(log_level(master, configuration or {}))
            _register(spark)
    except (PySparkRuntimeError, FileNotFoundError) as error:
        raise SettingsError(
            f"Spark does not start ({error}): it needs Java 17 or newer on the PATH, or JAVA_HOME"
        ) from None
    return spark


def _raise_only() -> None:
    """PySpark tells an error of a query as JSON on stderr, and raises it as well."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")


def _register(spark: SparkSession) -> None:
    """An editable install is not found by Spark's own look-up."""
    from mqd.spark.source import MqdDataSource

    spark.dataSource.register(MqdDataSource)

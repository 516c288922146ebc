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


def default_configuration(master: str) -> dict[str, str]:
    """Default configuration of a pipeline. Local: no web UI, and as many shuffle partitions as
    cores (Spark's 200 would cost more than the work).
    """
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.ui.showConsoleProgress": "false",
        # no limit in bytes: with a limit, Spark 4.3 adds up the sizes of the Arrow buffers at every
        # row, which costs ten times as much as filling them. Batches are bounded by rows instead
        # (Spark's default: 10,000).
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # Spark's INT96 is no longer a Parquet type
    }
    local = _LOCAL.fullmatch(master)
    if local:
        cores = int(local[1]) if (local[1] or "*").isdigit() else (os.cpu_count() or 1) if local[1] else 1
        settings |= {
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": str(cores),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        }
    return settings


def log_level(master: str, configuration: Mapping[str, str]) -> str:
    """The level of Spark's log: `spark.log.level` if set; otherwise, on a cluster, errors. A local
    session logs fatal errors only, because the error that ends a query is raised anyway, and the
    stack traces of tasks would hide it.
    """
    return configuration.get("spark.log.level", "FATAL" if _LOCAL.fullmatch(master) else "ERROR")


@contextlib.contextmanager
def captured_stderr() -> Iterator[None]:
    """Captures the stderr of this process and its children during the block, and prints it only if
    the block fails; afterwards stderr works as usual.

    Java and Spark print ten lines at their start, which cannot be turned off before Spark runs.
    """
    read_fd, write_fd = os.pipe()
    captured: list[bytes] = []
    lock = threading.Lock()
    capturing = True

    def forward_output() -> None:
        while True:
            select.select([read_fd], [], [])
            with lock:  # held for both steps, so that the output stays in order
                output = os.read(read_fd, 65536)
                if not output:
                    os.close(read_fd)
                    return
                captured.append(output) if capturing else _write_through(output)

    threading.Thread(target=forward_output, name="stderr of Spark", daemon=True).start()
    sys.stderr.flush()
    original_fd = os.dup(2)
    os.dup2(write_fd, 2)
    os.close(write_fd)
    failed = True
    try:
        yield
        failed = False
    finally:
        sys.stderr.flush()
        os.dup2(original_fd, 2)
        os.close(original_fd)
        with lock:
            capturing = False
            if failed:
                _write_through(b"".join(captured))


def _write_through(output: bytes) -> None:
    with contextlib.suppress(OSError):  # stderr no longer has a reader
        os.write(2, output)


def require_spark() -> None:
    """Raises SettingsError when PySpark or Java is missing, before Spark's script would report it
    in several lines. Java is located as in that script.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise SettingsError("PySpark is missing; install it with: pip install 'mqd[spark]'")
    java_home = os.environ.get("JAVA_HOME")
    if shutil.which(os.path.join(java_home, "bin", "java") if java_home else "java") is None:
        problem = f"JAVA_HOME is {java_home}, which has no bin/java" if java_home else "there is no java on the PATH"
        raise SettingsError(
            f"Spark needs Java 17 or newer, and {problem}; install it, on Debian and Ubuntu with:"
            " apt install openjdk-17-jre-headless"
        )


@contextlib.contextmanager
def _kill_java_if_interrupted() -> Iterator[None]:
    """Kills Java if PySpark is interrupted while it waits for Java to start. An interrupted PySpark
    deletes the file in which Java would report its port; Java then fails, but never exits.
    """
    from pyspark import java_gateway

    started: list[subprocess.Popen[bytes]] = []
    popen = java_gateway.Popen

    def recording_popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    java_gateway.Popen = recording_popen
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
    """Starts Spark's session for the application `name`. Raises SettingsError when PySpark or Java
    is missing.
    """
    # pandas may be installed for other programs; mqd does not use it
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    require_spark()
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    if _LOCAL.fullmatch(master):
        for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            # the Python that has mqd; Spark would use the first python3 on the PATH
            os.environ.setdefault(variable, sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in {**default_configuration(master), **(configuration or {})}.items():
        builder = builder.config(key, value)
    _silence_query_errors()
    try:
        with captured_stderr(), _kill_java_if_interrupted():
            spark = builder.getOrCreate()
            spark.sparkContext.setLogLevel(log_level(master, configuration or {}))
            _register(spark)
    except (PySparkRuntimeError, FileNotFoundError) as error:
        raise SettingsError(
            f"Spark did not start ({error}): it needs Java 17 or newer, on the PATH or in JAVA_HOME"
        ) from None
    return spark


def _silence_query_errors() -> None:
    """Keeps PySpark from printing a query's error as JSON on stderr; it is raised as well."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")


def _register(spark: SparkSession) -> None:
    """Registers format("mqd"): Spark's own lookup does not find an editable install."""
    from mqd.spark.source import MqdDataSource

    spark.dataSource.register(MqdDataSource)

"""The Spark session of a pipeline."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mqd.spark.pipelines.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def defaults(master: str) -> dict[str, str]:
    """Configuration that a pipeline has unless it says else. Local: no web page, and as many shuffle partitions as cores (Spark's 200 would cost more than the work)."""
    found = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # Spark's INT96 is no type of Parquet's any more
    }
    local = _LOCAL.fullmatch(master)
    if local:
        cores = int(local[1]) if (local[1] or "*").isdigit() else (os.cpu_count() or 1) if local[1] else 1
        found |= {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": str(cores), "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    return found


def session(name: str, master: str, configuration: Mapping[str, str] | None = None) -> SparkSession:
    """A session for `name`. Raises SettingsError when PySpark or Java is missing."""
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError:
        raise SettingsError("PySpark is missing; install it with: pip install 'mqd[spark]'") from None
    if _LOCAL.fullmatch(master):
        for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            os.environ.setdefault(variable, sys.executable)  # where mqd is; Spark would take the first python3 on the PATH
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in {**defaults(master), **(configuration or {})}.items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except (PySparkRuntimeError, FileNotFoundError) as error:
        raise SettingsError(f"Spark does not start ({error}): it needs Java 17 or newer on the PATH, or JAVA_HOME") from None
    spark.sparkContext.setLogLevel("ERROR")
    from mqd.spark.source import MqdDataSource

    spark.dataSource.register(MqdDataSource)  # an editable install is not found by Spark's own look-up
    return spark

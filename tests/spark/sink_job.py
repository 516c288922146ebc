"""A streaming job in a separate process, to be killed: `python sink_job.py JSON`, with jobs.Job's
settings. From topic to topic, exactly once by default, endless; batches of a few records.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def main(reported: dict[str, Any]) -> None:
    builder = (
        SparkSession.builder.master(reported["master"])
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
    )
    builder = (
        builder.config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", reported["place"])
    )
    builder = builder.config("spark.driver.memory", "1g").config("spark.driver.extraJavaOptions", SMALL)
    builder = builder.config("spark.executor.memory", "512m").config("spark.executor.extraJavaOptions", SMALL)
    spark = builder.getOrCreate()
    rows = (
        spark.readStream.format("mqd")
        .option("kafka.bootstrap.servers", reported["bootstrap"])
        .option("subscribe", reported["source"])
        .option("startingOffsets", "earliest")
    )
    rows = rows.option("maxOffsetsPerTrigger", "500").load().selectExpr("key", "value")
    sink = (
        rows.writeStream.format(reported["format"])
        .outputMode("append")
        .option("kafka.bootstrap.servers", reported["bootstrap"])
        .option("topic", reported["target"])
    )
    if reported["script"]:
        from tests.spark.dying_sink import DyingDataSource

        spark.dataSource.register(DyingDataSource)
        sink = sink.option("script", reported["script"])
    sink.option("checkpointLocation", reported["checkpoint"]).option(
        "delivery", reported["delivery"]
    ).start().awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

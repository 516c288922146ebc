"""A declarative Spark pipeline: it copies the records of a topic to a Parquet table. From there, flights
that can be decoded go to a topic; the other records go unchanged to a dead-letter topic, with the reason.

This file declares the results. `spark-pipelines run` processes the new records and ends; the next run
continues from there. docs/spark.md, "Declarative", has the commands.
"""

import os

from pyspark import pipelines as dp
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
BOOTSTRAP = os.environ.get("MQD_BOOTSTRAP", "127.0.0.1:9092")

# `broken`: the text of a value that is not JSON of this schema
FLIGHT = "carrier STRING, origin STRING, dep_delay INT, broken STRING"


@dp.table(comment="The topic's records: key, value, partition, offset, timestamp and headers of each.")
def flight_records() -> DataFrame:
    reader = (
        spark.readStream.format("mqd")
        .option("kafka.bootstrap.servers", BOOTSTRAP)
        .option("groupId", "flights-declarative")
    )
    # leaves out records of failed attempts of a sink, whose transactions were aborted
    reader = reader.option("kafka.isolation.level", "read_committed")
    return (
        reader.option("subscribe", "flights")
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .load()
    )


def read_flights() -> DataFrame:
    """The table's records with their decoded values, in the column `flight`."""
    flight = f.from_json(
        f.col("value").cast("string"), FLIGHT, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "broken"}
    )
    return spark.readStream.table("flight_records").withColumn("flight", flight)


def header(name: str, text: Column) -> Column:
    return f.struct(f.lit(name).alias("key"), text.cast("binary").alias("value"))


# The decorators call the functions below immediately, so everything that they use is defined above.
dp.create_sink("good", "mqd", {"kafka.bootstrap.servers": BOOTSTRAP, "topic": "flights-good"})
dp.create_sink("dead", "mqd", {"kafka.bootstrap.servers": BOOTSTRAP, "topic": "flights-dead"})


@dp.append_flow(target="good")
def to_good() -> DataFrame:
    good = read_flights().where("flight.broken IS NULL AND flight.origin IS NOT NULL")
    return good.select(f.col("flight.origin").alias("key"), f.to_json(f.col("flight")).alias("value"), "timestamp")


@dp.append_flow(target="dead")
def to_dead() -> DataFrame:
    reason = f.when(f.col("flight.broken").isNotNull(), f.lit("the value is not JSON of a flight")).otherwise(
        f.lit("no origin")
    )
    place = f.concat_ws(
        "", "topic", f.lit("-"), f.col("partition").cast("string"), f.lit("@"), f.col("offset").cast("string")
    )
    headers = f.concat(
        f.coalesce("headers", f.array().cast("array<struct<key:string,value:binary>>")),
        f.array(header("mqd.reason", reason), header("mqd.from", place)),
    )
    return (
        read_flights()
        .where("flight.broken IS NOT NULL OR flight.origin IS NULL")
        .select("key", "value", "timestamp", headers.alias("headers"))
    )

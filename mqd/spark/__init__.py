"""mqd in Apache Spark, through PySpark: `spark.read.format("mqd")`, `readStream`, `write`,
`writeStream`.

    source.py    the data source that Spark calls     options.py   Kafka's option names, checked
    offsets.py   offsets as Spark's JSON              planning.py  offset ranges for tasks, rate limits
    driver.py    the driver's requests to brokers     wire.py      requests over TCP
    reading.py   an executor's records as Arrow       schema.py    columns

Only source.py and the sink's modules import PySpark; nothing native is imported before an executor
reads.
"""

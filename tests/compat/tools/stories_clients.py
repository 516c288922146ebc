"""Stories of records: console and verifiable clients, performance tools, kafka-transactions,
kafka-dump-log.
"""

from __future__ import annotations

import time

from confluent_kafka import Producer

from tests.compat.tools.sides import PATIENCE_S, Side
from tests.compat.tools.story import story

KEYED = ("--reader-property", "parse.key=true", "--reader-property", "key.separator=:")
SHOWN = ("key", "offset", "partition", "headers")


@story("console-producer", "lines, keys, headers, compression")
def console_producer(side: Side) -> None:
    side.topic("typed")
    side.run("console-producer", "--topic", "typed", stdin="one\ntwo\n\nfour\n")
    side.run("console-producer", "--topic", "typed", *KEYED, stdin="k1:v1\nk2:v2\n")
    side.run("console-producer", "--topic", "typed", *KEYED, stdin="no key\n")
    headers = ("--reader-property", "parse.headers=true")
    side.run("console-producer", "--topic", "typed", *headers, stdin="h1:v1,h2:v2\tvalue\n")
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        side.run("console-producer", "--topic", "typed", "--compression-codec", codec, stdin=f"by {codec}\n")
    side.run("console-producer", "--topic", "typed", "--compression-codec", "rar", stdin="x\n")
    for acks in ("0", "1", "all"):
        side.run(
            "console-producer",
            "--topic",
            "typed",
            "--command-property",
            f"acks={acks}",
            "--sync",
            stdin=f"acks {acks}\n",
        )
    side.run("console-producer", "--topic", "typed", *KEYED, "--reader-property", "null.marker=NIL", stdin="gone:NIL\n")
    side.run("console-producer", "--topic", "bad name", stdin="x\n", seconds=90)
    side.run("console-producer", stdin="x\n")
    read = ("--topic", "typed", "--from-beginning", "--timeout-ms", "4000")
    shown = [word for name in SHOWN for word in ("--formatter-property", f"print.{name}=true")]
    side.run("console-consumer", *read, *shown)


@story("console-consumer", "from the beginning, an offset, a group, a pattern")
def console_consumer(side: Side) -> None:
    side.topic("shown", "--partitions", "2")
    side.produce("shown", [f"v{n}" for n in range(6)], keys=True)
    side.produce("shown", ["other"], partition=1)
    quick = ("--timeout-ms", "3000")
    side.run("console-consumer", "--topic", "shown", "--from-beginning", *quick, unordered=True)
    one = ("--topic", "shown", "--partition", "0")
    side.run("console-consumer", *one, "--offset", "earliest", "--max-messages", "2", *quick)
    side.run("console-consumer", *one, "--offset", "4", *quick)
    side.run("console-consumer", *one, "--offset", "latest", *quick)
    side.run("console-consumer", *one, "--offset", "99", *quick)
    side.run("console-consumer", *one, "--offset", "-3", *quick)
    side.run("console-consumer", "--topic", "shown", "--offset", "1", *quick)
    side.run("console-consumer", "--topic", "shown", "--partition", "9", "--offset", "0", *quick)
    grouped = ("--topic", "shown", "--group", "shown-group", "--from-beginning", *quick)
    side.run("console-consumer", *grouped, "--max-messages", "7", unordered=True)
    side.run("console-consumer", *grouped)
    side.run("consumer-groups", "--describe", "--group", "shown-group", unordered=True)
    side.run(
        "console-consumer",
        "--topic",
        "shown",
        "--group",
        "shown-848",
        "--from-beginning",
        "--max-messages",
        "7",
        *quick,
        "--command-property",
        "group.protocol=consumer",
        unordered=True,
    )
    side.run("console-consumer", "--include", "sho.*", "--from-beginning", *quick, unordered=True)
    side.run("console-consumer", *one, "--offset", "earliest", "--isolation-level", "read_committed", *quick)
    side.run("console-consumer", *one, "--offset", "0", *quick, "--formatter-property", "print.timestamp=true")
    side.run("console-consumer", "--topic", "not-there-yet", *quick)
    side.run("console-consumer", *quick)
    offsets = ("--topic", "__consumer_offsets", "--from-beginning", "--timeout-ms", "5000")
    for name in ("OffsetsMessageFormatter", "GroupMetadataMessageFormatter"):
        words = ("--formatter", f"org.apache.kafka.tools.consumer.{name}")
        side.run("console-consumer", *offsets, *words, shown=last_of_group)


def last_of_group(text: str) -> str:
    """The last output of formatters, which end no line, for the group shown-group."""
    entries = [entry for entry in text.replace('}{"key"', '}\n{"key"').splitlines() if "shown-group" in entry]
    return entries[-1] if entries else ""


@story("verifiable-producer", "records, and verifiable-consumer that reads them")
def verifiable(side: Side) -> None:
    side.topic("verify")
    produce = ("verifiable-producer", "--topic", "verify", "--max-messages", "20")
    side.run(*produce, "--throughput", "-1", shape=True, unordered=True)
    side.run(*produce, "--acks", "1", "--value-prefix", "3", shape=True, unordered=True)
    side.run(*produce, "--acks", "9", shape=True)
    consume = ("verifiable-consumer", "--topic", "verify", "--max-messages", "40", "--reset-policy", "earliest")
    side.run(*consume, "--group-id", "verified", shape=True)
    side.run(*consume, "--group-id", "verified-848", "--group-protocol", "consumer", shape=True)


@story("producer-perf-test", "produce, then consumer-perf-test and end-to-end latency")
def performance(side: Side) -> None:
    side.topic("perf", "--partitions", "2")
    produce = ("producer-perf-test", "--topic", "perf", "--num-records", "2000", "--throughput", "-1")
    side.run(*produce, "--record-size", "100", shape=True)
    side.run(*produce, "--record-size", "100", "--command-property", "acks=1", "compression.type=lz4", shape=True)
    side.run(
        *produce, "--record-size", "100", "--transactional-id", "perf", "--transaction-duration-ms", "100", shape=True
    )
    side.run(*produce)
    consume = ("consumer-perf-test", "--topic", "perf", "--timeout", "20000", "--num-records", "4000")
    side.run(*consume, shape=True)
    side.run(*consume, "--show-detailed-stats", "--hide-header", "--reporting-interval", "60000", shape=True)
    side.topic("latency")
    words = ("--topic", "latency", "--num-records", "20", "--producer-acks", "all", "--record-size", "10")
    side.run("e2e-latency", *words, shape=True)


def begun(side: Side, name: str, topic: str) -> Producer:
    producer = side.producer(transactional_id=name, transaction_timeout_ms=60_000)
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(topic, "in doubt", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    return producer


@story("transactions", "list, describe, producers, abort, hanging ones")
def transactions(side: Side) -> None:
    side.topic("ledger", "--partitions", "2")
    producer = begun(side, "payments", "ledger")
    time.sleep(1.1)  # the tool counts whole seconds of duration
    listed = ("transactions", "list")
    side.run(*listed, unordered=True)
    side.run(*listed, "--duration-filter", "3600000")
    side.run(*listed, "--transactional-id-pattern", "pay.*")
    side.run(*listed, "--transactional-id-pattern", "nothing.*")
    side.run(*listed, "--transactional-id-pattern", "a(b")
    side.run("transactions", "describe", "--transactional-id", "payments", shape=True)
    side.run("transactions", "describe", "--transactional-id", "nobody")
    producers = ("transactions", "describe-producers", "--topic", "ledger", "--partition")
    side.run(*producers, "0", shape=True)
    side.run(*producers, "1")
    wrong = ("transactions", *side.impatient(), "describe-producers")
    side.run(*wrong, "--topic", "ledger", "--partition", "9")
    side.run(*wrong, "--topic", "nowhere", "--partition", "0")
    side.run("transactions", "find-hanging", "--broker-id", "1")
    side.run("transactions", "find-hanging", "--topic", "ledger", "--max-transaction-timeout", "0")
    side.run("transactions", "find-hanging")
    side.run("transactions", "abort", "--topic", "ledger", "--partition", "0", "--start-offset", "77")
    side.run("transactions", "abort", "--topic", "ledger", "--partition", "0")
    side.run("transactions", "forceTerminateTransaction", "--transactionalId", "payments")
    side.run("transactions", "forceTerminateTransaction", "--transactionalId", "nobody")
    side.run(*listed, until=lambda ran: "CompleteAbort" in ran.out, unordered=True)
    side.run("transactions", "describe", "--transactional-id", "payments", shape=True)
    side.run(*producers, "0", shape=True)
    side.topic("hung")
    hanging = begun(side, "hanging", "hung")
    side.run("transactions", "abort", "--topic", "hung", "--partition", "0", "--start-offset", "0")
    side.run("transactions", "describe-producers", "--topic", "hung", "--partition", "0", shape=True)
    side.run("transactions")
    del producer, hanging


def last_decoded(text: str) -> str:
    """The last record of dumped-group and of the transactional id decoded."""
    lines = text.splitlines()
    last = [[line for line in lines if name in line][-1:] for name in ("dumped-group", '"decoded"')]
    return "\n".join(line for found in last for line in found)


def segment(side: Side, topic: str, suffix: str = "log") -> str:
    return str(side.log_dir() / f"{topic}-0" / f"{'0' * 20}.{suffix}")


@story("dump-log", "segments, indexes, transactions, offsets")
def dump_log(side: Side) -> None:
    side.topic("dumped", "--config", "index.interval.bytes=64")
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        side.produce("dumped", [f"{codec} {n}" for n in range(3)], keys=True, **{"compression.type": codec})
    producer = begun(side, "dumping", "dumped")
    producer.commit_transaction(PATIENCE_S)
    producer.begin_transaction()
    producer.produce("dumped", "aborted", partition=0)
    producer.flush(PATIENCE_S)
    producer.abort_transaction(PATIENCE_S)
    side.topic("rolled", "--config", "segment.bytes=1048576")
    dump = ("dump-log", "--files")
    log = segment(side, "dumped")
    side.run(*dump, log, bootstrap=False)
    side.run(*dump, log, "--print-data-log", bootstrap=False)
    side.run(*dump, log, "--deep-iteration", bootstrap=False)
    side.run(*dump, log, "--skip-record-metadata", "--print-data-log", bootstrap=False)
    side.run(*dump, segment(side, "dumped", "index"), bootstrap=False)
    side.run(*dump, segment(side, "dumped", "index"), "--index-sanity-check", bootstrap=False)
    side.run(*dump, segment(side, "dumped", "timeindex"), bootstrap=False)
    side.run(*dump, segment(side, "dumped", "txnindex"), bootstrap=False)
    side.run(*dump, segment(side, "rolled"), bootstrap=False)
    side.run(*dump, str(side.directory / "nothing.log"), bootstrap=False)
    side.run("dump-log", bootstrap=False)
    producer = begun(side, "decoded", "dumped")
    producer.commit_transaction(PATIENCE_S)
    side.run(
        "consumer-groups",
        "--group",
        "dumped-group",
        "--topic",
        "dumped",
        "--reset-offsets",
        "--to-latest",
        "--execute",
        quiet=True,
    )
    for topic, decoder in (
        ("__consumer_offsets", "--offsets-decoder"),
        ("__transaction_state", "--transaction-log-decoder"),
    ):
        for partition in range(4):
            path = str(side.log_dir() / f"{topic}-{partition}" / f"{'0' * 20}.log")
            ran = side.run(*dump, path, decoder, bootstrap=False, quiet=True)
            if "dumped-group" in ran.out or "decoded" in ran.out:
                side.run(*dump, path, decoder, "--skip-record-metadata", bootstrap=False, shown=last_decoded)

"""`python -m tests.kafka_parity.rights`: runs the whole table against Apache Kafka, and records the
results.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.kafka_connection import KafkaConnection
from tests.kafka_parity.rights.recorded import record
from tests.kafka_parity.rights.sides import apache_kafka, plain
from tests.kafka_parity.rights.table import TOKEN_OWNER, advertised, asking, prepare, prepare_token, rows, run

with (
    tempfile.TemporaryDirectory() as directory,
    apache_kafka(Path(directory)) as (admin_port, port),
    asking(lambda: KafkaConnection("127.0.0.1", admin_port)) as admin,
    asking(lambda: plain(port)) as alice,
    asking(lambda: plain(port, TOKEN_OWNER)) as owner,
):
    prepare(admin)
    prepare_token(owner)
    found = run(admin, alice, rows(advertised(admin)))
    record(found)
    print(f"{len(found)} rows")

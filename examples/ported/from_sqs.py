"""Payments from a FIFO queue, written for boto3's SQS: in order for each account (MessageGroupId),
deduplicated by id (MessageDeduplicationId), ten at a time.

    mqd topic create payments -p 3 -c dedup.window.ms=300000 \
        -c message.timestamp.type=LogAppendTime -c compression.type=uncompressed
    mqd config set group/payments share.auto.offset.reset=earliest share.fifo=key

    python from_sqs.py 127.0.0.1:9092
"""

import collections
import json
import sys

from mqd import AcknowledgeType, Producer, ShareConsumer


def send(bootstrap: str, payments: list[dict]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True})
    failed = []
    for payment in payments:
        producer.produce(  # send_message_batch(Entries=[...])
            "payments",
            json.dumps(payment),  # MessageBody
            payment["account"],  # MessageGroupId
            headers={"dedup-id": payment["id"]},  # MessageDeduplicationId
            on_delivery=lambda error, _: error and failed.append(error),
        )
    if producer.flush() or failed:  # the response's Failed
        sys.exit(f"not sent: {failed}")


def book(bootstrap: str, count: int) -> dict[str, list[int]]:
    """Books `count` payments. Returns the booked amounts by account, in order."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "payments", "share.acknowledgement.mode": "explicit"}
    booked: dict[str, list[int]] = collections.defaultdict(list)
    with ShareConsumer(settings) as consumer:
        consumer.subscribe(["payments"])
        while sum(map(len, booked.values())) < count:
            # receive_message(MaxNumberOfMessages=10, WaitTimeSeconds=20)
            for message in consumer.consume(10, timeout=20.0):
                payment = json.loads(message.value())
                if payment["amount"] == 3 and message.delivery_count() == 1:  # ApproximateReceiveCount
                    # change_message_visibility(VisibilityTimeout=0): later payments of the account wait
                    consumer.acknowledge(message, AcknowledgeType.RELEASE)
                    continue
                booked[payment["account"]].append(payment["amount"])
                consumer.acknowledge(message)  # delete_message_batch(Entries=[...])
            for partition, error in consumer.commit_sync().items():
                if error is not None:
                    print(f"{partition}: {error}; these payments are delivered again")
    return booked


if __name__ == "__main__":
    payments = [
        {"id": f"{account}-{number}", "account": account, "amount": number}
        for number in range(6)
        for account in ("anna", "bert")
    ]
    send(sys.argv[1], payments)
    send(sys.argv[1], payments)  # sent again, as by a restarted sender: not written twice
    for account, amounts in sorted(book(sys.argv[1], len(payments)).items()):
        print(account, amounts)

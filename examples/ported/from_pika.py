"""A work queue that was written for pika: durable messages, publisher confirms, one job at a time; jobs
are requeued after a transient error and dead-lettered after a permanent error.

    mqd topic create images -p 3
    mqd topic create dlq.images -c errors.deadletterqueue.group.enable=true
    mqd config set group/images share.auto.offset.reset=earliest
    mqd config set group/images errors.deadletterqueue.topic.name=dlq.images
    mqd config set group/images errors.deadletterqueue.copy.record.enable=true

    python from_pika.py 127.0.0.1:9092
"""

import json
import sys

from mqd import AcknowledgeType, Producer, ShareConsumer


def resize(image: dict, attempt: int) -> None:
    if image["width"] <= 0:
        raise ValueError("a broken image")
    if image["name"] == "4.png" and attempt == 1:
        raise OSError("no space left on device")


def publish(bootstrap: str, images: list[dict]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})  # confirm_delivery(), delivery_mode=2
    unconfirmed = []
    for image in images:
        producer.produce(  # basic_publish(exchange="", routing_key="images")
            "images", json.dumps(image), on_delivery=lambda error, _: error and unconfirmed.append(error)
        )
    if producer.flush() or unconfirmed:  # UnroutableError, NackError
        sys.exit(f"not published: {unconfirmed}")


def work(bootstrap: str, count: int) -> None:
    """Works until `count` jobs are done or have failed."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "images", "share.acknowledgement.mode": "explicit"}
    ended = 0
    with ShareConsumer(settings) as consumer:
        consumer.subscribe(["images"])  # basic_consume("images", on_message)
        while ended < count:  # start_consuming()
            for message in consumer.consume(1, timeout=1.0):  # basic_qos(prefetch_count=1)
                image = json.loads(message.value())
                try:
                    resize(image, message.delivery_count())  # x-delivery-count
                    kind = AcknowledgeType.ACCEPT  # basic_ack
                except ValueError:
                    kind = AcknowledgeType.REJECT  # basic_nack(requeue=False): to dlq.images
                except OSError:
                    kind = AcknowledgeType.RELEASE  # basic_nack(requeue=True)
                consumer.acknowledge(message, kind)
                consumer.commit_async()
                print(image["name"], kind.name.lower())
                ended += kind != AcknowledgeType.RELEASE


if __name__ == "__main__":
    images = [{"name": f"{number}.png", "width": 80 if number != 7 else -1} for number in range(10)]
    publish(sys.argv[1], images)
    work(sys.argv[1], len(images))

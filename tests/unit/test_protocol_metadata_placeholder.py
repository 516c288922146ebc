"""librdkafka's MetadataRequest for all topics, as captured: three zero bytes more than the schema says. Kafka reads it, so mqd must."""

import pytest

from mqd.protocol.api import decode_request
from mqd.protocol.errors import ProtocolError

HEAD = "00 03 00 {version:02x} 00 00 00 03 00 07 72 64 6b 61 66 6b 61 00 "


def decode(version: int, body: str):
    return decode_request(bytes.fromhex(HEAD.format(version=version) + body))[1]


@pytest.mark.parametrize(("version", "rest"), [(9, "01 00 00 00"), (10, "01 00 00 00"), (11, "01 00 00"), (12, "01 00 00"), (13, "01 00 00")])
def test_all_topics_as_librdkafka_asks(version, rest):
    for placeholder in ("00", "00 00 00 00"):
        request = decode(version, placeholder + rest)
        assert request.topics is None and request.allow_auto_topic_creation is True


@pytest.mark.parametrize("body", ["00 00 00 01 01 00 00", "01 00 00 00 01 00 00", "00 00 00 00 01 00 00 00", "00 00 00 01 00 00", "00 00 00 00 00 00"])
def test_nothing_else_may_be_over(body):
    with pytest.raises(ProtocolError):
        decode(13, body)

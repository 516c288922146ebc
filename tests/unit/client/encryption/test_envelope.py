"""The format of sealed values, compared with its published vectors, and invalid values."""

from __future__ import annotations

import json
import re

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from mqd.client.columns import pack
from mqd.client.encryption import envelope
from mqd.client.encryption.envelope import PayloadError
from mqd.client.encryption.keys import InProcessKeys, new_key
from mqd.client.encryption.payload import Opener, Sealer
from mqd.client.encryption.settings import Encryption
from mqd.protocol.compression import CODECS, compress
from tests.tiers import examples
from tests.unit.client.encryption.vectors import FILE, KEYS, make, sealed

PUBLISHED = json.loads(FILE.read_text("utf-8"))
PROVIDER = InProcessKeys(KEYS, "the vectors")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _open(vector: dict, data: bytes | None = None) -> bytes:
    return Opener(Encryption(PROVIDER), PROVIDER).open(
        vector["topic"], _bytes(vector["record_key"]), bytes.fromhex(vector["envelope"]) if data is None else data
    )


def test_the_vectors_match_this_code() -> None:
    """The output of compressors may change with their versions; the rest may not."""
    made = make()
    assert {name: made[name] for name in ("version", "keys")} == {name: PUBLISHED[name] for name in ("version", "keys")}
    assert [one for one in made["vectors"] if one["codec"] == "none"] == [
        one for one in PUBLISHED["vectors"] if one["codec"] == "none"
    ]
    assert [one["name"] for one in made["broken"]] == [one["name"] for one in PUBLISHED["broken"]]


@pytest.mark.parametrize("vector", PUBLISHED["vectors"], ids=lambda vector: vector["name"])
def test_a_vector_is_opened_and_sealed(vector: dict) -> None:
    assert _open(vector) == bytes.fromhex(vector["value"])
    wrapped, data_key = bytes.fromhex(vector["wrapped_data_key"]), bytes.fromhex(vector["data_key"])
    assert PROVIDER.unwrap(vector["key_id"], wrapped) == data_key
    head = envelope.encode_head(CODECS.index(vector["codec"]), vector["key_id"], wrapped)
    found = envelope.seal(
        AESGCM(data_key),
        head,
        vector["topic"].encode(),
        _bytes(vector["record_key"]),
        bytes.fromhex(vector["enciphered"]),
        bytes.fromhex(vector["nonce"]),
    )
    assert found.hex() == vector["envelope"]


@pytest.mark.parametrize("vector", PUBLISHED["broken"], ids=lambda vector: vector["name"])
def test_broken_envelopes_are_refused_with_a_reason(vector: dict) -> None:
    with pytest.raises(PayloadError) as raised:
        _open(vector)
    assert re.search(vector["why"], str(raised.value)), raised.value


def test_a_change_of_any_bit_or_length_is_detected() -> None:
    vector = PUBLISHED["vectors"][0]
    data = bytes.fromhex(vector["envelope"])
    opener = Opener(Encryption(PROVIDER), PROVIDER)  # one that has the data key already
    key, topic = bytes.fromhex(vector["record_key"]), vector["topic"]
    assert opener.open(topic, key, data)
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(PayloadError):
                opener.open(topic, key, bytes(flipped))
        with pytest.raises(PayloadError):
            opener.open(topic, key, data[:place])
    assert opener.open(topic, key, data)


@pytest.mark.parametrize("codec", range(1, len(CODECS)), ids=CODECS[1:])
def test_oversized_decompression_is_stopped(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even from a holder of the keys: both the stated size and the actual bytes are checked."""
    monkeypatch.setattr(envelope, "VALUE_BYTES_MAX", 1 << 16)
    bomb = compress(codec, bytes(1 << 20))
    for message, why in ((1 << 20, "maximum of 65536"), (1 << 16, "more than 65536 bytes"), (1, "more than 1 bytes")):
        vector = sealed("bomb", codec=codec, text=message.to_bytes(4, "big") + bomb)
        with pytest.raises(PayloadError, match=why):
            _open(vector)


def test_a_value_that_compression_makes_larger_is_sealed_as_it_is() -> None:
    assert envelope.compress_value(CODECS.index("zstd"), b"short") is None
    sealer = Sealer(Encryption(PROVIDER, codec=CODECS.index("zstd")), PROVIDER)
    assert sealer.seal("t", None, b"short")[4] == 0 and sealer.seal("t", None, b"long" * 100)[4] == 4


_VALUES = st.one_of(st.binary(max_size=300), st.binary(min_size=1, max_size=4).map(lambda part: part * 200))


@given(
    topic=st.text(min_size=1, max_size=40).filter(lambda topic: not topic.startswith("__")),
    rows=st.lists(st.tuples(st.none() | st.binary(max_size=40), st.none() | _VALUES), max_size=6),
    codec=st.sampled_from(range(len(CODECS))),
    key_id=st.text(min_size=1, max_size=30),
)
@settings(max_examples=examples(20, 60))
def test_sealed_values_are_opened(topic: str, rows: list, codec: int, key_id: str) -> None:
    provider = InProcessKeys({key_id: new_key()}, "memory")
    reported = Encryption(provider, codec=codec)
    sealer, opener = Sealer(reported, provider), Opener(reported, provider)
    for key, value in rows:
        if value is not None:
            found = sealer.seal(topic, key, value)
            assert value not in found or len(value) < 8
            assert opener.open(topic, key, found) == value
    column = sealer.seal_column(
        topic, pack([value for _, value in rows], "values"), pack([key for key, _ in rows], "keys")
    )
    found = [
        None if data is None else opener.open(topic, key, data)
        for (key, _), data in zip(rows, column.items(), strict=True)
    ]
    assert found == [value for _, value in rows]


@given(data=st.binary(max_size=200), sealed_like=st.booleans())
@settings(max_examples=examples(60, 200))
def test_bytes_of_any_kind_are_refused(data: bytes, sealed_like: bool) -> None:
    with pytest.raises(PayloadError):
        Opener(Encryption(PROVIDER), PROVIDER).open("t", None, (envelope.MAGIC + b"\1" if sealed_like else b"") + data)

"""The test vectors of docs/payload-encryption.md: payload_vectors.json beside this file.

`python -m tests.unit.client.encryption.vectors` rewrites it. Envelopes of published versions never
change: readers of every version must open its values.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.keywrap import aes_key_wrap

from mqd.client.encryption import envelope
from mqd.protocol.compression import CODECS, compress

FILE = Path(__file__).parent / "payload_vectors.json"


def _bytes(name: str, count: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(count)


KEYS = {name: _bytes(f"key {name}", 32) for name in ("2026-a", "schlüssel", "k" * 255)}
_TEXT = b"the same words, the same words, the same words, and the same again"


def sealed(
    name: str,
    topic: str = "orders",
    key: bytes | None = b"customer-1",
    value: bytes = b"twenty coins",
    codec: int = 0,
    key_id: str = "2026-a",
    text: bytes | None = None,
) -> dict[str, Any]:
    """One vector; `text`: the plaintext, instead of the format's."""
    data_key, nonce = _bytes(f"data key {name}", 32), _bytes(f"nonce {name}", 12)
    head = envelope.encode_head(codec, key_id, wrapped := aes_key_wrap(KEYS[key_id], data_key))
    if text is None:
        text = value if not codec else len(value).to_bytes(4, "big") + compress(codec, value)
    found = envelope.seal(AESGCM(data_key), head, topic.encode(), key, text, nonce)
    known = head + envelope.key_digest(key) + topic.encode()
    fields = {
        "record_key": key,
        "value": value,
        "data_key": data_key,
        "wrapped_data_key": wrapped,
        "nonce": nonce,
        "associated_data": known,
        "enciphered": text,
        "envelope": found,
    }
    shown = {field: None if data is None else data.hex() for field, data in fields.items()}
    return {"name": name, "topic": topic, "key_id": key_id, "codec": CODECS[codec], **shown}


def make() -> dict[str, Any]:
    good = sealed("a record")
    whole = bytes.fromhex(good["envelope"])
    vectors = [
        good,
        sealed("no record key", key=None),
        sealed("an empty record key", key=b""),
        sealed("an empty value", value=b""),
        sealed("a long value", value=_bytes("value", 1000)),
        sealed("a topic in UTF-8", topic="bestellungen-für-köln", key=bytes(range(256))),
        sealed("a key id in UTF-8", key_id="schlüssel"),
        sealed("the longest key id", key_id="k" * 255),
        *(sealed(name, value=_TEXT, codec=codec) for codec, name in enumerate(CODECS) if codec),
    ]
    broken = [
        _broken(good, "nothing", b"", "it is not sealed"),
        _broken(good, "a value that is not sealed", b"twenty coins", "it is not sealed"),
        _broken(good, "version 2", whole[:3] + b"\2" + whole[4:], "version 2"),
        _broken(good, "an unknown codec", whole[:4] + b"\5" + whole[5:], "damaged"),
        _broken(good, "another codec", whole[:4] + b"\1" + whole[5:], "changed"),
        _broken(good, "no key id", whole[:5] + b"\0" + whole[6:], "damaged"),
        _broken(good, "a wrapped key of 65535 bytes", whole[:6] + b"\xff\xff" + whole[8:], "damaged"),
        _broken(good, "an unknown key", whole.replace(b"2026-a", b"2026-b"), "2026-b"),
        _broken(good, "a wrapped key of another key", whole.replace(b"2026-a", b"k" * 6), "kkkkkk"),
        _broken(good, "a wrapped key that was changed", whole[:20] + b"\0" + whole[21:], "2026-a"),
        _broken(good, "no tag", whole[:-16], "cut off|changed"),
        _broken(good, "one byte more", whole + b"\0", "changed"),
        _broken({**good, "topic": "refunds"}, "another topic", whole, "another topic"),
        _broken({**good, "record_key": b"customer-2".hex()}, "another record key", whole, "another record key"),
        _broken({**good, "record_key": None}, "the record key removed", whole, "another record key"),
    ]
    for name, codec, text, why in (
        ("compressed, without a size", 1, b"\0\0", "cut off"),
        ("compressed, a size of 4 GiB", 1, b"\xff\xff\xff\xff" + compress(1, _TEXT), "stated size"),
        ("compressed, larger than it says", 1, b"\0\0\0\1" + compress(1, _TEXT), "expands to"),
        ("compressed, smaller than it says", 1, b"\0\0\1\0" + compress(1, _TEXT), "stated size"),
        ("compressed, a mebibyte where one byte is said", 1, b"\0\0\0\1" + compress(1, bytes(1 << 20)), "expands to"),
        ("compressed, but it is not", 1, b"\0\0\0\4" + b"gzip", "cannot be decompressed"),
    ):
        wrong = sealed(name, codec=codec, text=text)
        broken.append(_broken(wrong, name, bytes.fromhex(wrong["envelope"]), why))
    return {"version": 1, "keys": {name: key.hex() for name, key in KEYS.items()}, "vectors": vectors, "broken": broken}


def _broken(good: dict[str, Any], name: str, data: bytes, why: str) -> dict[str, Any]:
    """`why`: a regular expression that matches a reader's error message."""
    return {"name": name, "topic": good["topic"], "record_key": good["record_key"], "envelope": data.hex(), "why": why}


if __name__ == "__main__":
    FILE.write_text(json.dumps(make(), indent=1, ensure_ascii=False) + "\n", "utf-8")

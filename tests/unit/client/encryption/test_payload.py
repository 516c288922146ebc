"""Sealing and opening: settings, key files and their rotation, data keys, providers that fail."""

from __future__ import annotations

import itertools
import os
import traceback
from pathlib import Path

import pytest

from mqd.base.property_values import ConfigError
from mqd.client.encryption import keys, payload
from mqd.client.encryption.envelope import PayloadError, parse_head, split_key_reference
from mqd.client.encryption.keys import InProcessKeys, KeyFile, new_key
from mqd.client.encryption.payload import Opener, Sealer
from mqd.client.encryption.settings import Encryption, take

FILE = {"encryption.key.provider": "file:/keys"}


class Provider(InProcessKeys):
    """Counts calls, and fails when requested."""

    def __init__(self, *key_ids: str) -> None:
        super().__init__({name: new_key() for name in key_ids}, "the provider")
        self.wrapped = self.unwrapped = 0
        self.problem: Exception | None = None

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        self.wrapped += 1
        if self.problem is not None:
            raise self.problem
        return super().wrap(data_key)

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        self.unwrapped += 1
        if self.problem is not None:
            raise self.problem
        return super().unwrap(key_id, wrapped)


def make_custom() -> Provider:
    return Provider("mine")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _data_key(data: bytes) -> tuple[str, bytes]:
    return split_key_reference(parse_head(data)[1])


# -- settings --------------------------------------------------------------------------------------


def test_settings() -> None:
    given = {
        "group.id": "g",
        **FILE,
        "encryption.topics": "orders, pay-*",
        "encryption.topic.names": "dc1.*=*, x=orders",
    }
    given |= {"encryption.compression": "ZSTD", "encryption.on.failure": "raw", "encryption.plaintext.allow": True}
    found = take(given)
    assert given == {"group.id": "g"} and found is not None
    assert found == Encryption("file:/keys", ("orders", "pay-*"), (("dc1.*", "*"), ("x", "orders")), 4, True, True)
    assert take({"group.id": "g"}) is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"encryption.topics": "*"}, "encryption.key.provider is needed for encryption"),
        ({"encryption.key.provder": "file:/keys"}, 'No such configuration property: "encryption.key.provder"'),
        ({**FILE, "encryption.compression": "brotli"}, "none, gzip, snappy, lz4, zstd"),
        ({**FILE, "encryption.on.failure": "ignore"}, "error, raw"),
        ({**FILE, "encryption.plaintext.allow": "maybe"}, "false, true"),
        ({**FILE, "encryption.topic.names": "copy.*=orders"}, "COPY=ORIGINAL"),
    ],
)
def test_invalid_settings_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        take(wrong)
    assert message in str(raised.value)


def test_topics_and_the_name_they_are_sealed_with() -> None:
    reported = Encryption("", ("orders", "*.orders"), (("dc1.*", "*"), ("old.orders", "orders")))
    names = {name: reported.name_to_bind(name) for name in ("orders", "dc1.orders", "old.orders", "dc2.orders", "pay")}
    assert names == {
        "orders": b"orders",
        "dc1.orders": b"orders",
        "old.orders": b"orders",
        "dc2.orders": b"dc2.orders",
        "pay": None,
    }
    assert Encryption("").name_to_bind("__consumer_offsets") is None


def test_a_copied_topic_is_opened_by_its_first_name() -> None:
    provider = Provider("a")
    data = Sealer(Encryption(provider), provider).seal("orders", b"k", b"v")
    with pytest.raises(PayloadError, match="another topic"):
        Opener(Encryption(provider), provider).open("dc1.orders", b"k", data)
    assert Opener(Encryption(provider, names=(("dc1.*", "*"),)), provider).open("dc1.orders", b"k", data) == b"v"


def test_values_that_are_passed_through() -> None:
    provider, other = Provider("a"), Provider("b")
    data = Sealer(Encryption(provider), provider).seal("t", None, b"v")
    with pytest.raises(PayloadError, match=r"its key 'a' cannot be obtained: the provider has no key 'a'; it has b"):
        Opener(Encryption(other), other).open("t", None, data)
    with pytest.raises(PayloadError, match="it is not sealed; encryption.plaintext.allow=true"):
        Opener(Encryption(provider), provider).open("t", None, b"v")
    assert Opener(Encryption(other, returns_raw=True), other).open("t", None, data) == data
    plain = Opener(Encryption(provider, accepts_plain=True), provider)
    assert plain.open("t", None, b"v") == b"v" and plain.open("t", None, data) == b"v"
    with pytest.raises(PayloadError):  # a value marked as sealed has to be valid
        plain.open("t", b"other key", data)


# -- data keys -------------------------------------------------------------------------------------


def test_a_data_key_ends_by_count_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "DATA_KEY_RECORDS", 3)
    provider, clock = Provider("a"), Clock()
    sealer = Sealer(Encryption(provider), provider, clock)
    found = [_data_key(sealer.seal("t", None, b"v")) for _ in range(7)]
    assert [len(list(same)) for _, same in itertools.groupby(found)] == [3, 3, 1] and provider.wrapped == 3
    clock.now += payload.DATA_KEY_S - 1
    assert _data_key(sealer.seal("t", None, b"v")) == found[-1]
    clock.now += 1
    assert _data_key(sealer.seal("t", None, b"v")) != found[-1] and provider.wrapped == 4


def test_every_value_has_its_own_nonce() -> None:
    """From the kernel, at each call: a forked process has no nonce in stock."""
    requests: list[int] = []
    provider = Provider("a")

    def random_bytes(count: int) -> bytes:
        requests.append(count)
        return os.urandom(count)

    sealer = Sealer(Encryption(provider), provider, random_bytes=random_bytes)
    found = {sealer.seal("t", None, b"v") for _ in range(100)}
    from mqd.client.columns import pack

    found |= set(sealer.seal_column("t", pack([b"v"] * 100, "values"), None).items())
    assert len({data[-29:-17] for data in found}) == 200
    assert sorted(requests) == [12] * 100 + [32] + [1200]


def test_a_provider_that_fails_when_sealing(caplog: pytest.LogCaptureFixture) -> None:
    provider, clock = Provider("a"), Clock()
    sealer = Sealer(Encryption(provider), provider, clock)
    provider.problem = OSError("the service is away")
    with pytest.raises(PayloadError, match="no key to seal values with: the service is away"):
        sealer.seal("t", None, b"v")
    provider.problem = None
    first = _data_key(sealer.seal("t", None, b"v"))
    provider.problem = OSError("the service is away")
    clock.now += payload.DATA_KEY_S
    requested = provider.wrapped
    assert {_data_key(sealer.seal("t", None, b"v")) for _ in range(9)} == {first}  # time is over, the count is not
    assert provider.wrapped == requested + 1 and "the next one cannot be obtained" in caplog.text
    provider.problem = None
    clock.now += payload.RETRY_S
    assert _data_key(sealer.seal("t", None, b"v")) != first


def test_a_provider_is_asked_once_for_a_data_key(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, clock = Provider("a"), Clock()
    sealers = [Sealer(Encryption(provider), provider) for _ in range(3)]
    data = [sealer.seal("t", None, b"v") for sealer in sealers for _ in range(5)]
    opener = Opener(Encryption(provider), provider, clock)
    assert [opener.open("t", None, one) for one in data] == [b"v"] * 15 and provider.unwrapped == 3
    monkeypatch.setattr(payload, "DATA_KEYS_MAX", 2)
    opener = Opener(Encryption(provider), provider, clock)
    assert [opener.open("t", None, one) for one in data] == [b"v"] * 15 and len(opener._ciphers) == 2


def test_errors_about_the_same_key_do_not_keep_each_others_values() -> None:
    """A raised exception keeps the frames that it has passed through, and so their values."""
    sealing, other = Provider("a"), Provider("b")
    data = Sealer(Encryption(sealing), sealing).seal("t", None, b"v")
    opener = Opener(Encryption(other), other)
    frames = []
    for _ in range(5):
        try:
            opener.open("t", None, data)
        except PayloadError as error:
            frames.append(len(list(traceback.walk_tb(error.__traceback__))))
    assert len(frames) == 5 and len(set(frames)) == 1


def test_a_key_that_cannot_be_obtained_is_requested_again_later() -> None:
    provider, clock = Provider("a"), Clock()
    data = Sealer(Encryption(provider), provider).seal("t", None, b"v")
    opener = Opener(Encryption(provider), provider, clock)
    provider.problem = OSError("the service is away")
    for _ in range(5):
        with pytest.raises(PayloadError, match="its key 'a' cannot be obtained: the service is away"):
            opener.open("t", None, data)
    assert provider.unwrapped == 1
    provider.problem = None
    clock.now += payload.FAILED_S
    assert opener.open("t", None, data) == b"v"


@pytest.mark.parametrize("made", [("", b"w"), ("k" * 256, b"w"), ("a", b""), ("a", bytes(4097))])
def test_a_provider_whose_keys_fit_no_envelope(made: tuple[str, bytes]) -> None:
    provider = Provider("a")
    provider.wrap = lambda _key: made  # type: ignore[method-assign]
    with pytest.raises(PayloadError, match="bytes, not"):
        Sealer(Encryption(provider), provider).seal("t", None, b"v")


# -- where keys are --------------------------------------------------------------------------------


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    first, second = new_key(), new_key()
    file.write_text(keys.format_keys({"one": first}))
    file.chmod(0o600)
    writer, reader = KeyFile(file), KeyFile(file)
    clock = Clock()
    sealer, opener = Sealer(Encryption(""), writer, clock), Opener(Encryption(""), reader, clock)
    old = sealer.seal("t", None, b"old")
    file.write_text(f"# rotated\n\n two:{keys.format_keys({'x': second})[2:]}" + keys.format_keys({"one": first}))
    assert _data_key(sealer.seal("t", None, b"v"))[0] == "one"
    clock.now += payload.DATA_KEY_S
    new = sealer.seal("t", None, b"new")
    assert _data_key(new)[0] == "two"
    assert (opener.open("t", None, old), opener.open("t", None, new)) == (b"old", b"new")
    file.write_text("nonsense, half written")
    assert reader.keys() == {"two": second, "one": first} and "using the keys" in caplog.text
    file.unlink()
    assert reader.keys() == {"two": second, "one": first}
    assert "every user" not in caplog.text
    file.write_text(keys.format_keys({"one": first}))
    file.chmod(0o644)
    KeyFile(file)
    assert "every user of this machine may read" in caplog.text


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no key"),
        ("# nothing", "has no key"),
        ("one", "line 1"),
        ("one:!!!!", "line 1"),
        ("one:c2hvcnQ=", "line 1"),
        (f":{keys.format_keys({'x': bytes(32)})[2:]}", "line 1"),
        (keys.format_keys({"one": bytes(32)}) * 2, "line 2: there are two keys 'one'"),
    ],
)
def test_invalid_key_files(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        keys.parse(text, "the file")
    assert message in str(raised.value) and "c2hv" not in str(raised.value)


def test_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQD_KEYS", ",".join(keys.format_keys({name: new_key()}).strip() for name in ("a", "b:c")))
    assert list(keys.create_provider("env:MQD_KEYS").keys()) == ["a", "b:c"]  # type: ignore[attr-defined]
    assert isinstance(keys.create_provider(f"{__name__}:make_custom"), Provider)
    assert keys.create_provider(own := Provider("x")) is own
    for reported, message in (
        ("env:MQD_NO_SUCH", "the environment variable MQD_NO_SUCH has no key"),
        (f"file:{tmp_path}/none", "cannot read the keys in"),
        ("/keys", "is not file:PATH, env:NAME, or"),
        ("no.such.module:name", "is not file:PATH"),
        ("os:getcwd", "str has no methods wrap and unwrap"),
        (7, "int has no methods wrap and unwrap"),
    ):
        with pytest.raises(ConfigError) as raised:
            keys.create_provider(reported)
        assert message in str(raised.value)

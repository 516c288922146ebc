"""TLS settings from properties and files: what is accepted, what is refused, with which message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mqd.base.listeners import Listener
from mqd.base.property_values import ConfigError
from mqd.native.tls import TLS_1_2, TLS_1_3, ClientAuth, TlsContext
from mqd.security import tls_files
from tests.certificates import Authority, Identity

SECURE = Listener("SSL", "127.0.0.1", 9093, "SSL")


@pytest.fixture(scope="module")
def ca() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def broker(ca: Authority) -> Identity:
    return ca.issue("broker")


def config(**settings: object) -> dict[str, str]:
    own = {name.replace("_", "."): str(value) for name, value in settings.items()}
    return {"listeners": "SSL://127.0.0.1:9093", "ssl.client.auth": "none", **own}


def refused(settings: dict[str, str], *parts: str, name: str | None = None) -> None:
    with pytest.raises(ConfigError) as caught:
        tls_files.context(settings, SECURE)
    for part in ("listener SSL", *parts):
        assert part in str(caught.value), str(caught.value)
    assert name is None or caught.value.name == name


def test_pem_pkcs12_and_text_are_understood(tmp_path: Path, broker: Identity) -> None:
    pem, encrypted = broker.write(tmp_path / "a.pem"), broker.write(tmp_path / "b.pem", "secret")
    pkcs12 = broker.write_pkcs12(tmp_path / "no-extension", "secret")
    good = [
        config(ssl_keystore_location=pem),
        config(ssl_keystore_location=pem, ssl_keystore_type="PEM"),
        config(ssl_keystore_location=encrypted, ssl_key_password="secret"),
        config(ssl_keystore_location=pkcs12, ssl_keystore_password="secret"),
        config(ssl_keystore_location=pkcs12, ssl_keystore_password="secret", ssl_keystore_type="PKCS12"),
        config(ssl_keystore_certificate_chain=broker.chain_pem().decode(), ssl_keystore_key=broker.key_pem().decode()),
        # on one line, as in a properties file
        config(
            ssl_keystore_certificate_chain=broker.chain_pem().decode().replace("\n", " "),
            ssl_keystore_key=broker.key_pem().decode().replace("\n", "\\n"),
        ),
    ]
    for settings in good:
        TlsContext(tls_files.read(settings, SECURE))


def test_invalid_tls_settings_are_named(tmp_path: Path, ca: Authority, broker: Identity) -> None:
    pem, other = broker.write(tmp_path / "a.pem"), ca.issue("other")
    encrypted, pkcs12 = broker.write(tmp_path / "b.pem", "x"), broker.write_pkcs12(tmp_path / "c.p12", "x")
    refused(config(), "SSL needs a certificate and its key", "ssl.keystore.location")
    refused(config(ssl_keystore_location=tmp_path / "none"), "cannot be read: No such file", str(tmp_path / "none"))
    (tmp_path / "jks").write_bytes(b"\xfe\xed\xfe\xed\0\0\0\2")
    refused(config(ssl_keystore_location=tmp_path / "jks"), "keytool -importkeystore -srckeystore", "PKCS12")
    (tmp_path / "text").write_text("hello")
    refused(config(ssl_keystore_location=tmp_path / "text"), "is neither PEM nor PKCS12")
    (tmp_path / "empty").write_text("")
    refused(config(ssl_keystore_location=tmp_path / "empty"), "is empty")
    refused(config(ssl_keystore_location=pem, ssl_keystore_type="PKCS12"), "is PEM, but ssl.keystore.type=PKCS12")
    refused(config(ssl_keystore_location=encrypted), str(encrypted), "without a password")
    refused(
        config(ssl_keystore_location=encrypted, ssl_key_password="y"), "no private key can be read with the password"
    )
    refused(config(ssl_keystore_location=pkcs12, ssl_keystore_password="y"), "cannot be opened with the password")
    refused(
        config(ssl_keystore_location=pkcs12, ssl_keystore_password="x", ssl_key_password="y"), "a PKCS12 file has one"
    )
    (tmp_path / "chain").write_bytes(broker.chain_pem())
    refused(config(ssl_keystore_location=tmp_path / "chain"), "needs a private key and its certificate chain")
    (tmp_path / "misfit").write_bytes(other.key_pem() + broker.chain_pem())
    refused(config(ssl_keystore_location=tmp_path / "misfit"), "does not belong to the first certificate")
    refused(config(ssl_keystore_key=broker.key_pem().decode()), "belong together")
    refused(
        config(ssl_keystore_location=pem, ssl_client_auth="required"),
        "ssl.client.auth=required needs the CAs",
        name="ssl.truststore.location",
    )
    refused(
        config(ssl_keystore_location=pem, ssl_client_auth="requested", ssl_truststore_location=tmp_path / "text"),
        "is neither PEM nor PKCS12",
    )


def test_secrets_are_not_shown(tmp_path: Path, broker: Identity) -> None:
    settings = tls_files.read(
        config(ssl_keystore_location=broker.write(tmp_path / "a.pem", "secret"), ssl_key_password="secret"), SECURE
    )
    assert "secret" not in repr(settings.identities) and "PRIVATE" not in repr(settings.identities)


def test_a_listener_has_settings_of_its_own(tmp_path: Path, ca: Authority, broker: Identity) -> None:
    settings = {
        **config(ssl_keystore_location=tmp_path / "none"),
        "listener.name.ssl.ssl.keystore.location": str(broker.write(tmp_path / "a.pem")),
        "listener.name.ssl.ssl.client.auth": "required",
        "listener.name.ssl.ssl.truststore.location": str(ca.write(tmp_path / "ca.pem")),
    }
    assert tls_files.read(settings, SECURE).client_auth == ClientAuth.REQUIRED
    assert tls_files.files(settings, SECURE) == [tmp_path / "a.pem", tmp_path / "ca.pem"]
    settings["listener.name.ssl.ssl.keystore.location"] = "elsewhere"
    refused(settings, "elsewhere", name="listener.name.ssl.ssl.keystore.location")
    assert tls_files.with_absolute_paths(settings)["listener.name.ssl.ssl.keystore.location"] == os.path.abspath(
        "elsewhere"
    )


def test_several_keys_in_one_file(tmp_path: Path, ca: Authority) -> None:
    one, two = ca.issue("one", "one.example"), ca.issue("two", "two.example")
    key_first = one.key_pem() + one.chain_pem() + two.key_pem() + two.chain_pem()
    chain_first = one.chain_pem() + one.key_pem() + two.chain_pem() + two.key_pem()
    expected = [(one.chain_pem(), one.key_pem()), (two.chain_pem(), two.key_pem())]
    assert list(tls_files.split_by_key(key_first)) == expected
    assert list(tls_files.split_by_key(chain_first)) == expected
    assert list(tls_files.split_by_key(b"# no PEM")) == []
    (tmp_path / "both.pem").write_bytes(chain_first)
    settings = tls_files.read(config(ssl_keystore_location=tmp_path / "both.pem"), SECURE)
    assert len(settings.identities) == 2
    TlsContext(settings)


def test_other_blocks_beside_key_and_certificate(tmp_path: Path, broker: Identity) -> None:
    """Such as `openssl ecparam -genkey` writes before the key."""
    parameters = b"-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
    key, chain = broker.key_pem(), broker.chain_pem()
    for content in (parameters + key + chain, chain + parameters + key, key + parameters + chain):
        assert list(tls_files.split_by_key(content)) == [(chain, key)]
    (tmp_path / "a.pem").write_bytes(parameters + key + chain)
    TlsContext(tls_files.read(config(ssl_keystore_location=tmp_path / "a.pem"), SECURE))


def test_versions_follow_the_named_suites(tmp_path: Path, broker: Identity) -> None:
    pem = broker.write(tmp_path / "a.pem")

    def read(**more: str) -> tuple[int, int, str, str]:
        found = tls_files.read(config(ssl_keystore_location=pem, **more), SECURE)
        return found.version_min, found.version_max, found.ciphers_12, found.ciphers_13

    every = read()
    assert every[:2] == (TLS_1_2, TLS_1_3) and every[2].count(":") == 5 and every[3].count(":") == 2
    assert read(ssl_enabled_protocols="TLSv1.3")[:2] == (TLS_1_3, TLS_1_3)
    assert read(ssl_cipher_suites="TLS_AES_256_GCM_SHA384")[:2] == (TLS_1_3, TLS_1_3)
    only = read(ssl_cipher_suites="TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256")
    assert only[:3] == (TLS_1_2, TLS_1_2, "ECDHE-RSA-AES128-GCM-SHA256")
    refused(
        config(ssl_keystore_location=pem, ssl_cipher_suites="TLS_AES_128_GCM_SHA256", ssl_enabled_protocols="TLSv1.2"),
        "ssl.cipher.suites has no suite for the versions",
    )


def test_ticket_keys_differ_where_a_ticket_must_not_be_valid() -> None:
    hour_s = 3600
    key = tls_files.ticket_key(b"s", SECURE, config(), 0)
    assert len(key) == 80 and key == tls_files.ticket_key(b"s", SECURE, config(), 11 * hour_s)
    others = [
        tls_files.ticket_key(b"t", SECURE, config(), 0),
        tls_files.ticket_key(b"s", SECURE, config(), 12 * hour_s),
        tls_files.ticket_key(b"s", Listener("OTHER", "", 1, "SSL"), config(), 0),
        tls_files.ticket_key(b"s", SECURE, config(ssl_client_auth="required"), 0),
        tls_files.ticket_key(b"s", SECURE, config(ssl_truststore_location="ca"), 0),
    ]
    assert len({key, *others}) == 6
    assert len({one[:16] for one in [key, *others]}) == 6  # the key's name, also the session id context


def test_without_openssl_the_error_names_a_remedy(tmp_path: Path, broker: Identity) -> None:
    """Everything that needs no TLS works: the extension is loaded."""
    program = (
        "from mqd import native\nfrom mqd.native.tls import tls_version\n"
        "try:\n    tls_version()\nexcept native.NativeError as error:\n    print(error.strerror)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MQD_TEST_LIBSSL": "libnone.so.9"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "libnone.so.9" in output and "TLS needs OpenSSL 3.0 or later" in output and "apt install libssl3" in output


def test_principal_rules_of_a_listener(tmp_path: Path, broker: Identity) -> None:
    from mqd.security.principal import map_name

    settings = {
        **config(ssl_keystore_location=broker.write(tmp_path / "a.pem")),
        "listener.name.ssl.ssl.principal.mapping.rules": r"RULE:^CN=([^,]+),.*$/$1/L",
    }
    assert map_name(tls_files.principal_rules(settings, SECURE), "CN=Alice,O=mqd") == "alice"
    assert map_name(tls_files.principal_rules(config(), SECURE), "CN=Alice,O=mqd") == "CN=Alice,O=mqd"
    settings["listener.name.ssl.ssl.principal.mapping.rules"] = "RULE:(/x/"
    with pytest.raises(ConfigError, match="listener SSL: ssl.principal.mapping.rules: .*not a regular expression"):
        tls_files.check(settings)

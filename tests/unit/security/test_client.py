from types import SimpleNamespace

import pytest

from mqd.base.property_values import ConfigError
from mqd.security import client


def test_javas_and_librdkafkas_property_names_are_equivalent():
    java = client.security_from_properties(
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required"
            ' username="alice" password="a\\"b\\\\c";',
            "ssl.truststore.location": "/ca.pem",
            "ssl.truststore.type": "PEM",
            "linger.ms": "5",
        }
    )
    librdkafka = client.security_from_properties(
        {
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": "alice",
            "sasl.password": 'a"b\\c',
            "ssl.ca.location": "/ca.pem",
        }
    )
    assert {**java.settings, "security.protocol": "sasl_ssl"} == librdkafka.settings
    assert java.has_tls and java.has_sasl and librdkafka.has_tls and librdkafka.protocol == "SASL_SSL"
    assert not client.security_from_properties({}).has_tls and not client.security_from_properties({}).has_sasl


@pytest.mark.parametrize(
    "properties",
    [
        {"security.protocol": "TLS"},
        {"sasl.jaas.config": "com.sun.security.auth.module.Krb5LoginModule required;"},
        {"ssl.truststore.location": "a.jks", "ssl.truststore.type": "JKS"},
        {"ssl.key.location": "key.pem"},
    ],
)
def test_unsupported_settings_are_refused(properties):
    with pytest.raises(ConfigError):
        client.security_from_properties(properties)


def test_a_file(tmp_path):
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.username=a\nlinger.ms=5\n")
    security, rest = client.read_properties(file)
    assert security.settings["sasl.mechanisms"] == "PLAIN" and rest == {"linger.ms": "5"}
    with pytest.raises(ConfigError, match="cannot read"):
        client.read_properties(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"ssl\.ca\.location=.*none: there is no such file"):
        client.security_from_properties({"security.protocol": "SSL", "ssl.ca.location": str(tmp_path / "none")}).secure(
            None, "a"
        )


def test_the_certificates_of_authorities_may_be_a_directory_or_the_systems(tmp_path):
    for location in (str(tmp_path), "probe"):
        client.security_from_properties({"security.protocol": "SSL", "ssl.ca.location": location}).check()


def test_an_unusable_certificate_is_an_error():
    settings = {"security.protocol": "SSL", "ssl.keystore.certificate.chain": "-----BEGIN", "ssl.keystore.key": "-----"}
    client.security_from_properties({**settings, "security.protocol": "PLAINTEXT"}).check()
    with pytest.raises(ConfigError, match="ssl.certificate.location"):
        client.security_from_properties(settings).secure(None, "a")


@pytest.mark.parametrize(
    ("handshake", "step", "reason"),
    [
        (33, 0, "does not support sasl.mechanism=PLAIN; it supports SCRAM-SHA-256"),
        (34, 0, "the SASL handshake failed: "),
        (0, 9999, "an error code newer than this table"),
    ],
)
def test_a_refused_authentication_says_why(handshake, step, reason):
    settings = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN", "sasl.username": "alice"}
    responses = [
        SimpleNamespace(error_code=handshake, mechanisms=["SCRAM-SHA-256"]),
        SimpleNamespace(error_code=step, error_message=None, auth_bytes=b""),
    ]
    with pytest.raises(client.NotAuthenticated, match=reason):
        client.security_from_properties(settings).authenticate(lambda *_: responses.pop(0))

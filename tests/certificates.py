"""Certificates for tests, made when a test needs them: a CA and the certificates it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "mqd"), x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class Identity:
    """A private key with its certificate and the certificates of its chain up to the CA."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, ca: x509.Certificate):
        self.key = key
        self.certificate = certificate
        self.ca = ca

    def chain_pem(self) -> bytes:
        return _pem(self.certificate) + _pem(self.ca)

    def key_pem(self, password: str | None = None) -> bytes:
        encryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

    def write(self, path: Path, password: str | None = None) -> Path:
        """Key and chain in one PEM file, the format of ssl.keystore.location."""
        path.write_bytes(self.key_pem(password) + self.chain_pem())
        return path

    def write_pkcs12(self, path: Path, password: str) -> Path:
        encryption = serialization.BestAvailableEncryption(password.encode())
        path.write_bytes(
            pkcs12.serialize_key_and_certificates(b"broker", self.key, self.certificate, [self.ca], encryption)
        )
        return path


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "Test CA"):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = (
            self._builder(_name(name), _name(name), self.key, 10)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    @staticmethod
    def _builder(
        subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * DAY)
            .not_valid_after(now + days * DAY)
        )

    def issue(self, common_name: str, *hosts: str, days: int = 5) -> Identity:
        """For a broker on `hosts` (by default localhost and 127.0.0.1), or for a client. Negative
        `days`: the certificate has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_host(host) for host in hosts or ("localhost", "127.0.0.1")]
        certificate = (
            self._builder(_name(common_name), self.certificate.subject, key, days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        return Identity(key, certificate, self.certificate)

    def write(self, path: Path) -> Path:
        path.write_bytes(_pem(self.certificate))
        return path

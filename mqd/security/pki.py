"""Issues certificates from the cluster's own CA, for brokers that have none from elsewhere. Keys are
ECDSA P-256: a handshake costs a third of one with RSA.
"""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 90
RENEW_DAYS = 30  # a certificate with fewer days left is renewed
NODE_URI = "mqd://node/"
_SKEW = datetime.timedelta(hours=1)  # clients' clocks may be behind
_DAY = datetime.timedelta(days=1)


class CertifiedKey(msgspec.Struct, frozen=True):
    """A certificate and its private key, both PEM; the key is PKCS 8, unencrypted."""

    certificate: bytes
    key: bytes


def make_authority(name: str, now: datetime.datetime) -> CertifiedKey:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    certificate = (
        _builder(subject, subject, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _certified_key(certificate, key)


def node_uri(node_id: int) -> str:
    """The subject alternative name by which a certificate identifies a host of a cluster."""
    return f"{NODE_URI}{node_id}"


def _names_of_host(node_id: int) -> tuple[str, list[x509.GeneralName]]:
    """The common name and the subject alternative names of a host's certificate."""
    return f"mqd host {node_id}", [x509.UniformResourceIdentifier(node_uri(node_id))]


def issue_host(authority: CertifiedKey, node_id: int, now: datetime.datetime) -> CertifiedKey:
    """A certificate by which a host proves its node id to the other hosts of its cluster. Raises
    ValueError.
    """
    return _issue(authority, *_names_of_host(node_id), now)


def issue(authority: CertifiedKey, name: str, hosts: Sequence[str], now: datetime.datetime) -> CertifiedKey:
    """A certificate for a broker or client with this common name. `hosts`: the names and addresses
    of a broker; empty for a client. They never become a node URI, so no host can prove its node id
    with the certificate. Raises ValueError if the authority's key does not match its certificate.
    """
    return _issue(authority, name, _alternative_names(hosts), now)


def make_signing_request() -> tuple[bytes, bytes]:
    """A certificate signing request for a new key, and the key; both PEM. The authority chooses the
    names.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def sign(authority: CertifiedKey, request: bytes, name: str, hosts: Sequence[str], now: datetime.datetime) -> bytes:
    """Like issue(), but signs the key of a certificate signing request. Returns the certificates as
    PEM. Raises ValueError.
    """
    return _sign(authority, _key_of_request(request), name, _alternative_names(hosts), now)


def sign_host(authority: CertifiedKey, request: bytes, node_id: int, now: datetime.datetime) -> bytes:
    """Like issue_host(), but signs the key of a certificate signing request. Returns the
    certificates as PEM. Raises ValueError.
    """
    return _sign(authority, _key_of_request(request), *_names_of_host(node_id), now)


def _key_of_request(request: bytes) -> ec.EllipticCurvePublicKey:
    csr = x509.load_pem_x509_csr(request)
    key = csr.public_key()
    if not csr.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("the request is not signed by its key")
    return key


def _issue(
    authority: CertifiedKey, name: str, names: Sequence[x509.GeneralName], now: datetime.datetime
) -> CertifiedKey:
    key = ec.generate_private_key(ec.SECP256R1())
    return CertifiedKey(_sign(authority, key.public_key(), name, names, now), _key_pem(key))


def _sign(
    authority: CertifiedKey,
    key: ec.EllipticCurvePublicKey,
    name: str,
    names: Sequence[x509.GeneralName],
    now: datetime.datetime,
) -> bytes:
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signer = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != issuer.public_key():
        raise ValueError("the authority's key does not match its certificate")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    builder = (
        _builder(subject, issuer.subject, key, now, CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                if names
                else [ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM) + authority.certificate


def renew(authority: CertifiedKey, certificate: bytes, now: datetime.datetime) -> CertifiedKey:
    """Issues a new key and certificate with the names of the first certificate in a PEM file. Raises
    ValueError.
    """
    old = x509.load_pem_x509_certificate(certificate)
    name = str(old.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    try:
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return issue(authority, name, (), now)
    return _issue(authority, name, list(names), now)


def expiry_time(certificate: bytes) -> datetime.datetime:
    """When the first certificate of a PEM file expires. Raises ValueError if the file has none."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def is_for_host(certificate: bytes, node_id: int) -> bool:
    """Whether the first certificate of a PEM file is for this host of a cluster. Raises
    ValueError.
    """
    try:
        names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return False
    return node_uri(node_id) in names.value.get_values_for_type(x509.UniformResourceIdentifier)


def covers(certificate: bytes, hosts: Iterable[str]) -> bool:
    """Whether the first certificate of a PEM file is for all of these names and addresses."""
    try:
        extension = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return not list(hosts)
    covered_names = set(extension.value)
    return all(name in covered_names for name in _alternative_names(hosts))


def _alternative_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + days * _DAY)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certified_key(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> CertifiedKey:
    return CertifiedKey(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

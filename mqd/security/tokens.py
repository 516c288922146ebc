"""Delegation tokens (KIP-48): a token's id is public; its password is the HMAC of the id with a
secret that all hosts of the cluster have. The metadata log has only the ids, which reveal no
password.
"""

import base64
import hmac
import secrets

ID_BYTES = 16


def new_id() -> str:
    """A random UUID in URL-safe base64, as in Kafka; it does not begin with "-"."""
    while (text := base64.urlsafe_b64encode(secrets.token_bytes(ID_BYTES)).decode().rstrip("=")).startswith("-"):
        pass
    return text


def hmac_of(secret: str, token_id: str) -> bytes:
    return hmac.digest(secret.encode(), token_id.encode(), "sha512")


def password_of(token_hmac: bytes) -> str:
    """The password with which the client authenticates by SCRAM."""
    return base64.b64encode(token_hmac).decode()

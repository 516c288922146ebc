"""Authentication by SASL (KIP-43, KIP-152, KIP-368)."""

from mqd.protocol.schema.language import Api

SASL_HANDSHAKE = Api(
    17,
    "SaslHandshake",
    "0-1",
    2,
    """
mechanism: string 0+
""",
    """
error_code: int16 0+
mechanisms: [string] 0+
""",
)

SASL_AUTHENTICATE = Api(
    36,
    "SaslAuthenticate",
    "0-2",
    2,
    """
auth_bytes: bytes 0+
""",
    """
error_code: int16 0+
error_message: string 0+ null=0+
auth_bytes: bytes 0+
session_lifetime_ms: int64 1+ = 0
""",
)

APIS = (SASL_HANDSHAKE, SASL_AUTHENTICATE)

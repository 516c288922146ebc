"""Authentication by SASL (KIP-43, KIP-152, KIP-368)."""

from mqd.protocol.schema.language import apis

APIS = apis("""
SaslHandshake 17: versions 0-1, flexible from 2
mechanism: string 0+
response
error_code: int16 0+
mechanisms: [string] 0+

SaslAuthenticate 36: versions 0-2, flexible from 2
auth_bytes: bytes 0+
response
error_code: int16 0+
error_message: string 0+ null=0+
auth_bytes: bytes 0+
session_lifetime_ms: int64 1+ = 0
""")

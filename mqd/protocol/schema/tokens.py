"""Delegation tokens (KIP-48, KIP-373): created, renewed, expired and described."""

from mqd.protocol.schema.language import Api

CREATE_DELEGATION_TOKEN = Api(
    38,
    "CreateDelegationToken",
    "1-3",
    2,
    """
owner_principal_type: string 3+ null=3+
owner_principal_name: string 3+ null=3+
renewers: [CreatableRenewers] 0+
    principal_type: string 0+
    principal_name: string 0+
max_lifetime_ms: int64 0+
""",
    """
error_code: int16 0+
principal_type: string 0+
principal_name: string 0+
token_requester_principal_type: string 3+
token_requester_principal_name: string 3+
issue_timestamp_ms: int64 0+
expiry_timestamp_ms: int64 0+
max_timestamp_ms: int64 0+
token_id: string 0+
hmac: bytes 0+
throttle_time_ms: int32 0+
""",
)

RENEW_DELEGATION_TOKEN = Api(
    39,
    "RenewDelegationToken",
    "1-2",
    2,
    """
hmac: bytes 0+
renew_period_ms: int64 0+
""",
    """
error_code: int16 0+
expiry_timestamp_ms: int64 0+
throttle_time_ms: int32 0+
""",
)

EXPIRE_DELEGATION_TOKEN = Api(
    40,
    "ExpireDelegationToken",
    "1-2",
    2,
    """
hmac: bytes 0+
expiry_time_period_ms: int64 0+
""",
    """
error_code: int16 0+
expiry_timestamp_ms: int64 0+
throttle_time_ms: int32 0+
""",
)

DESCRIBE_DELEGATION_TOKEN = Api(
    41,
    "DescribeDelegationToken",
    "1-3",
    2,
    """
owners: [DescribeDelegationTokenOwner] 0+ null=0+
    principal_type: string 0+
    principal_name: string 0+
""",
    """
error_code: int16 0+
tokens: [DescribedDelegationToken] 0+
    principal_type: string 0+
    principal_name: string 0+
    token_requester_principal_type: string 3+
    token_requester_principal_name: string 3+
    issue_timestamp: int64 0+
    expiry_timestamp: int64 0+
    max_timestamp: int64 0+
    token_id: string 0+
    hmac: bytes 0+
    renewers: [DescribedDelegationTokenRenewer] 0+
        principal_type: string 0+
        principal_name: string 0+
throttle_time_ms: int32 0+
""",
)

APIS = (CREATE_DELEGATION_TOKEN, RENEW_DELEGATION_TOKEN, EXPIRE_DELEGATION_TOKEN, DESCRIBE_DELEGATION_TOKEN)

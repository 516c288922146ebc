"""Creating, renewing, expiring and describing delegation tokens (KIP-48, KIP-373)."""

from mqd.protocol.schema.language import apis

APIS = apis("""
CreateDelegationToken 38: versions 1-3, flexible from 2
owner_principal_type: string 3+ null=3+
owner_principal_name: string 3+ null=3+
renewers: [CreatableRenewers] 0+
    principal_type: string 0+
    principal_name: string 0+
max_lifetime_ms: int64 0+
response
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

RenewDelegationToken 39: versions 1-2, flexible from 2
hmac: bytes 0+
renew_period_ms: int64 0+
response
error_code: int16 0+
expiry_timestamp_ms: int64 0+
throttle_time_ms: int32 0+

ExpireDelegationToken 40: versions 1-2, flexible from 2
hmac: bytes 0+
expiry_time_period_ms: int64 0+
response
error_code: int16 0+
expiry_timestamp_ms: int64 0+
throttle_time_ms: int32 0+

DescribeDelegationToken 41: versions 1-3, flexible from 2
owners: [DescribeDelegationTokenOwner] 0+ null=0+
    principal_type: string 0+
    principal_name: string 0+
response
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
""")

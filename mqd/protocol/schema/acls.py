"""Access control lists (KIP-140, KIP-290)."""

from mqd.protocol.schema.language import Api

_FILTER = """\
resource_type_filter: int8 0+
resource_name_filter: string 0+ null=0+
pattern_type_filter: int8 1+ = 3
principal_filter: string 0+ null=0+
host_filter: string 0+ null=0+
operation: int8 0+
permission_type: int8 0+
"""


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


DESCRIBE_ACLS = Api(
    29,
    "DescribeAcls",
    "1-3",
    2,
    _FILTER,
    """
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
resources: [Resource] 0+
    resource_type: int8 0+
    resource_name: string 0+
    pattern_type: int8 1+ = 3
    acls: [AclDescription] 0+
        principal: string 0+
        host: string 0+
        operation: int8 0+
        permission_type: int8 0+
""",
)

CREATE_ACLS = Api(
    30,
    "CreateAcls",
    "1-3",
    2,
    """
creations: [AclCreation] 0+
    resource_type: int8 0+
    resource_name: string 0+
    resource_pattern_type: int8 1+ = 3
    principal: string 0+
    host: string 0+
    operation: int8 0+
    permission_type: int8 0+
""",
    """
throttle_time_ms: int32 0+
results: [AclCreationResult] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
""",
)

DELETE_ACLS = Api(
    31,
    "DeleteAcls",
    "1-3",
    2,
    "\nfilters: [Filter] 0+\n" + _indented(_FILTER),
    """
throttle_time_ms: int32 0+
filter_results: [FilterResult] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    matching_acls: [MatchingAcl] 0+
        error_code: int16 0+
        error_message: string 0+ null=0+
        resource_type: int8 0+
        resource_name: string 0+
        pattern_type: int8 1+ = 3
        principal: string 0+
        host: string 0+
        operation: int8 0+
        permission_type: int8 0+
""",
)

APIS = (DESCRIBE_ACLS, CREATE_ACLS, DELETE_ACLS)

"""Access control lists (KIP-140, KIP-290)."""

from mqd.protocol.schema.language import apis

APIS = apis("""
DescribeAcls 29: versions 1-3, flexible from 2
resource_type_filter: int8 0+
resource_name_filter: string 0+ null=0+
pattern_type_filter: int8 1+ = 3
principal_filter: string 0+ null=0+
host_filter: string 0+ null=0+
operation: int8 0+
permission_type: int8 0+
response
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

CreateAcls 30: versions 1-3, flexible from 2
creations: [AclCreation] 0+
    resource_type: int8 0+
    resource_name: string 0+
    resource_pattern_type: int8 1+ = 3
    principal: string 0+
    host: string 0+
    operation: int8 0+
    permission_type: int8 0+
response
throttle_time_ms: int32 0+
results: [AclCreationResult] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+

DeleteAcls 31: versions 1-3, flexible from 2
filters: [Filter] 0+
    resource_type_filter: int8 0+
    resource_name_filter: string 0+ null=0+
    pattern_type_filter: int8 1+ = 3
    principal_filter: string 0+ null=0+
    host_filter: string 0+ null=0+
    operation: int8 0+
    permission_type: int8 0+
response
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
""")

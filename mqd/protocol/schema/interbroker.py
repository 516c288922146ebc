"""Messages between hosts of a cluster, which are handled only on the inter-broker listener: clients
may not send them. Envelope (KIP-590) carries a client's request, forwarded by the host that the
client is connected to. ShareStarts is mqd's own: its response has the lowest start offset of the
share groups of each partition, and the partitions of __share_group_state that the responding host
coordinates.
"""

from mqd.protocol.schema.language import apis

APIS = apis("""
Envelope 58: versions 0, flexible from 0
request_data: bytes 0+
request_principal: bytes 0+ null=0+
client_host_address: bytes 0+
response
response_data: bytes 0+ null=0+ = null
error_code: int16 0+

ShareStarts 20000: versions 0, flexible from 0
topic_ids: [uuid] 0+
response
state_partitions: [int32] 0+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        start_offset: int64 0+
""")

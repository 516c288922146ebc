"""Kafka messages between hosts of a cluster, which clients may not send: defined for the codec,
answered only on the inter-broker listener. Envelope (KIP-590) carries a client's request, forwarded
by the host that it is connected to.
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
""")

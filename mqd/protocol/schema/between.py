"""What hosts of a cluster say to each other in Kafka's words and no client may: written down for
the codec, answered on the listener between hosts alone. Envelope (KIP-590) carries a client's request,
sent on by the host that it is connected to.
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

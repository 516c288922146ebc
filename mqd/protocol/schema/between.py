"""What hosts of a cluster say to each other in Kafka's words and no client may: written down for
the codec, answered on the listener between hosts alone.
"""

from mqd.protocol.schema.language import Api

# KIP-590: a client's request, sent on by the host that it is connected to.
ENVELOPE = Api(
    58,
    "Envelope",
    "0",
    0,
    """
request_data: bytes 0+
request_principal: bytes 0+ null=0+
client_host_address: bytes 0+
""",
    """
response_data: bytes 0+ null=0+ = null
error_code: int16 0+
""",
)

APIS = (ENVELOPE,)

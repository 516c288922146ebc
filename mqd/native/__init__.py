"""The native core for Python: plain values in and out, one thin function or method per function of
the C headers.

All names are exported here (`from mqd import native; native.Control`); the modules correspond to
the folders of native/. Only core.py imports cffi's extension.

1. A buffer given to a class (a mapping, a bytearray) is held as long as the object lives: the C
   side keeps bare pointers into it.
2. A failing call raises NativeError with the cause and the remedy; a full queue or arena returns
   False or None where the caller is expected to retry (Endpoint.send, Arena.allocate).
3. This package makes no decisions. numpy is imported by the methods that need it.

Concurrency: calls release the GIL; each module states which thread owns its objects.
"""

from mqd.native.batches import BATCH_HEADER_BYTES as BATCH_HEADER_BYTES
from mqd.native.batches import BatchHeader as BatchHeader
from mqd.native.batches import RecordPositions as RecordPositions
from mqd.native.batches import ScanResult as ScanResult
from mqd.native.batches import WalkStop as WalkStop
from mqd.native.batches import batch_decode as batch_decode
from mqd.native.batches import batch_validate as batch_validate
from mqd.native.batches import crc32c as crc32c
from mqd.native.batches import segment_scan as segment_scan
from mqd.native.batches import validate_records as validate_records
from mqd.native.compacting import CompactFigures as CompactFigures
from mqd.native.compacting import CompactGroup as CompactGroup
from mqd.native.compacting import Compaction as Compaction
from mqd.native.compacting import CompactOptions as CompactOptions
from mqd.native.compacting import CompactState as CompactState
from mqd.native.compacting import compact_swap_finish as compact_swap_finish
from mqd.native.compacting import compact_swap_install as compact_swap_install
from mqd.native.compacting import compact_swap_prepare as compact_swap_prepare
from mqd.native.compacting import compact_swap_undo as compact_swap_undo
from mqd.native.control import HISTOGRAM_BUCKET_COUNT as HISTOGRAM_BUCKET_COUNT
from mqd.native.control import LOG_DIR_COUNT_MAX as LOG_DIR_COUNT_MAX
from mqd.native.control import OWNER_NONE as OWNER_NONE
from mqd.native.control import PARTITION_SLOT_COUNT as PARTITION_SLOT_COUNT
from mqd.native.control import TOPIC_NAME_BYTES_MAX as TOPIC_NAME_BYTES_MAX
from mqd.native.control import WORKER_COUNT_MAX as WORKER_COUNT_MAX
from mqd.native.control import Control as Control
from mqd.native.control import Counter as Counter
from mqd.native.control import Histogram as Histogram
from mqd.native.control import ProcessState as ProcessState
from mqd.native.control import QuotaKind as QuotaKind
from mqd.native.control import QuotaLevel as QuotaLevel
from mqd.native.control import QuotaRule as QuotaRule
from mqd.native.control import Quotas as Quotas
from mqd.native.control import SlotRole as SlotRole
from mqd.native.control import SlotState as SlotState
from mqd.native.control import SlotView as SlotView
from mqd.native.control import abi_hash as abi_hash
from mqd.native.control import control_size_bytes as control_size_bytes
from mqd.native.control import local_abi_hash as local_abi_hash
from mqd.native.core import E_CORRUPT as E_CORRUPT
from mqd.native.core import E_FULL as E_FULL
from mqd.native.core import E_INVALID as E_INVALID
from mqd.native.core import E_LAYOUT as E_LAYOUT
from mqd.native.core import E_STALE as E_STALE
from mqd.native.core import NativeError as NativeError
from mqd.native.core import ffi as ffi
from mqd.native.core import lib as lib
from mqd.native.files import file_append as file_append
from mqd.native.files import file_close as file_close
from mqd.native.files import file_flush as file_flush
from mqd.native.files import file_mkdir as file_mkdir
from mqd.native.files import file_open_append as file_open_append
from mqd.native.files import file_rename as file_rename
from mqd.native.files import file_replace as file_replace
from mqd.native.files import file_sync_directory as file_sync_directory
from mqd.native.files import file_unlink as file_unlink
from mqd.native.links import CHECK_PARSE as CHECK_PARSE
from mqd.native.links import CHECK_RECORDS as CHECK_RECORDS
from mqd.native.links import CHECK_SCHEDULES as CHECK_SCHEDULES
from mqd.native.links import CHECK_TRANSACTION as CHECK_TRANSACTION
from mqd.native.links import CHECKED_MORE as CHECKED_MORE
from mqd.native.links import ENDPOINT_COUNT_MAX as ENDPOINT_COUNT_MAX
from mqd.native.links import LINK_DESCRIPTOR_COUNT as LINK_DESCRIPTOR_COUNT
from mqd.native.links import PRINCIPAL_BYTES_MAX as PRINCIPAL_BYTES_MAX
from mqd.native.links import PRODUCE_ACKS_ALL as PRODUCE_ACKS_ALL
from mqd.native.links import PRODUCE_ACKS_NONE as PRODUCE_ACKS_NONE
from mqd.native.links import PRODUCE_CONTROL as PRODUCE_CONTROL
from mqd.native.links import PRODUCE_MARKER_BUMPED as PRODUCE_MARKER_BUMPED
from mqd.native.links import PRODUCED_REDIRECTED as PRODUCED_REDIRECTED
from mqd.native.links import RECORD_ERROR_COUNT_MAX as RECORD_ERROR_COUNT_MAX
from mqd.native.links import REQUEST_PRINCIPAL as REQUEST_PRINCIPAL
from mqd.native.links import REQUEST_RAW_TOKEN as REQUEST_RAW_TOKEN
from mqd.native.links import RESPONSE_AUTHENTICATED as RESPONSE_AUTHENTICATED
from mqd.native.links import RESPONSE_CACHEABLE as RESPONSE_CACHEABLE
from mqd.native.links import RESPONSE_DISCONNECT as RESPONSE_DISCONNECT
from mqd.native.links import RESPONSE_MORE as RESPONSE_MORE
from mqd.native.links import RESPONSE_NONE as RESPONSE_NONE
from mqd.native.links import Arena as Arena
from mqd.native.links import Descriptor as Descriptor
from mqd.native.links import DescriptorKind as DescriptorKind
from mqd.native.links import Endpoint as Endpoint
from mqd.native.links import PrincipalKind as PrincipalKind
from mqd.native.links import links_format as links_format
from mqd.native.links import links_size_bytes as links_size_bytes
from mqd.native.partitions import INT64_MAX as INT64_MAX
from mqd.native.partitions import TRUNCATED_PREFIX as TRUNCATED_PREFIX
from mqd.native.partitions import LogOptions as LogOptions
from mqd.native.partitions import Partition as Partition
from mqd.native.partitions import ProducerView as ProducerView
from mqd.native.partitions import Recovery as Recovery
from mqd.native.partitions import parse_producer_views as parse_producer_views
from mqd.native.reactor import SLOT_NONE as SLOT_NONE
from mqd.native.reactor import Backend as Backend
from mqd.native.reactor import Event as Event
from mqd.native.reactor import EventKind as EventKind
from mqd.native.reactor import FetcherOptions as FetcherOptions
from mqd.native.reactor import Reactor as Reactor
from mqd.native.reactor import ReactorOptions as ReactorOptions
from mqd.native.reactor import SlowRequest as SlowRequest
from mqd.native.reactor import Spent as Spent

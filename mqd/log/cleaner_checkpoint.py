"""The checkpoint files of compaction, next to the partitions in each log directory: they record the
offset up to which each compacted partition is clean.

    cleaner-offset-checkpoint.W      W = worker; Kafka's text format with a fourth column, like the
                                     other checkpoints (checkpoints.py)

Unlike with those, the highest value in all files is used: what was once clean stays clean,
whichever worker recorded it. Losing a file costs a compaction but no data, so unreadable contents
are ignored. Entries of partitions that moved to another worker are carried along; a file never has
more entries than this host has had partitions.

One writer per file. Blocking.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from mqd.log.checkpoints import CheckpointEntry, CheckpointError, format_checkpoint, parse_checkpoint
from mqd.log.files import Files

CLEANER_OFFSET = "cleaner-offset-checkpoint"
_NAME = re.compile(re.escape(CLEANER_OFFSET) + r"(?:\.([0-9]{1,2}))?")

PartitionKey = tuple[str, int, bytes]  # topic, partition, topic id


class CleanerCheckpoint:
    def __init__(self, directory: Path, worker: int, files: Files):
        self._path = directory / f"{CLEANER_OFFSET}.{worker}"
        self._directory = directory
        self._files = files
        self._offsets: dict[PartitionKey, int] = {}
        self.problems: list[str] = []

    def load(self) -> None:
        """Raises OSError if the directory cannot be listed."""
        for path in sorted(self._directory.iterdir()):
            if _NAME.fullmatch(path.name):
                try:
                    entries = parse_checkpoint(path.read_bytes(), str(path))
                except (OSError, CheckpointError) as error:
                    self.problems.append(str(error))
                    continue
                for entry in entries:
                    if entry.topic_id is not None:
                        self._advance(entry)

    def _advance(self, entry: CheckpointEntry) -> None:
        key = (entry.topic, entry.partition, entry.topic_id or b"")
        self._offsets[key] = max(entry.offset, self._offsets.get(key, 0))

    def get(self, topic: str, partition: int, topic_id: bytes) -> int | None:
        return self._offsets.get((topic, partition, topic_id))

    def put(
        self, topic: str, partition: int, topic_id: bytes, offset: int, existing: Iterable[PartitionKey] | None = None
    ) -> None:
        """Writes durably. `existing`: the partitions that still exist; entries of others are
        dropped. Raises OSError.
        """
        self._offsets[topic, partition, topic_id] = offset
        if existing is not None:
            existing_keys = {*existing, (topic, partition, topic_id)}
            self._offsets = {key: value for key, value in self._offsets.items() if key in existing_keys}
        entries = [
            CheckpointEntry(name, index, value, id_) for (name, index, id_), value in sorted(self._offsets.items())
        ]
        self._files.replace(self._path, format_checkpoint(entries))

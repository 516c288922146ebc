"""Possible disk contents after a power cut, from the journal of the file layer (byte table:
native/base/file_watch.h).

    disk = Disk()
    for operation in read_journals(directory, "journal"):
        disk.apply(operation)
    disk.power_cut(random.Random(seed)).write_to(target, root="/data")   # a random possible state
    disk.present().write_to(...)                                         # as a reader saw it last

Rules
    D1  bytes written to a file before the beginning of a successful flush of it (or of the file
        system) are on the disk
    D2  of every other write any set of 512-byte sectors may be there, in any order; a length may
        have grown without its data (zeros)
    D3  a name (creation, rename, removal) is durable when its directory was flushed; otherwise it
        may be there or not, however durable the file is. A rename within one directory is atomic;
        the changes of one name stay in order
    D4  data that a failed flush should have covered is on no disk, whatever flush succeeds later:
        the kernel considers its pages clean
    D5  a directory that the journal does not know (created before watching began) is durable; a
        write to an unknown file is an error: a change that bypasses the layer would make the model
        worthless

A file or directory keeps its identity (`_Node`) through renames, as an inode does.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

SECTOR_BYTES = 512
CREATE, WRITE, SYNC_BEGIN, SYNC_DONE, TRUNCATE, RENAME, UNLINK, MKDIR, FALLOCATE, SYNCFS_BEGIN, SYNCFS_DONE = range(
    1, 12
)
_HEAD = struct.Struct("<IHHQQqQQiI")
_MAGIC = 0x314A514D


class JournalError(AssertionError):
    """The journal is incomplete or damaged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    kind: int
    path: str
    time_ns: int
    process: int
    sequence: int
    offset: int = 0
    length: int = 0
    reference: int = 0
    result: int = 0
    data: bytes = b""


def parse_journal(data: bytes, process: int) -> Iterator[Operation]:
    """A torn last record is left out."""
    position = 0
    while position + _HEAD.size <= len(data):
        magic, kind, path_bytes, sequence, time_ns, offset, length, reference, result, data_bytes = _HEAD.unpack_from(
            data, position
        )
        if magic != _MAGIC or not CREATE <= kind <= SYNCFS_DONE:
            raise JournalError(f"journal of process {process}: no record at byte {position}")
        body = position + _HEAD.size
        end = body + path_bytes + data_bytes
        if end > len(data):
            return
        path = data[body : body + path_bytes].decode()
        yield Operation(
            kind, path, time_ns, process, sequence, offset, length, reference, result, data[body + path_bytes : end]
        )
        position = end


def read_journals(directory: Path, name: str) -> list[Operation]:
    """Of all processes, in order of effect."""
    found: list[Operation] = []
    for path in directory.glob(f"{name}.*"):
        found += parse_journal(path.read_bytes(), int(path.suffix[1:]))
    return sorted(found, key=lambda operation: (operation.time_ns, operation.process, operation.sequence))


class _Node:
    """`pending` has (serial, change) in order; a flush makes all below a serial durable, except
    those below `dropped` (D4).
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, object]] = []
        self.dropped = 0

    def make_durable(self, below: int) -> None:
        kept = [one for one in self.pending if one[0] >= below or one[0] < self.dropped]
        for serial, change in self.pending:
            if self.dropped <= serial < below:
                self.carry_out(change)
        self.pending = kept

    def drop(self, below: int) -> None:
        if any(serial < below for serial, _ in self.pending):
            self.dropped = max(self.dropped, below)

    def carry_out(self, change: object) -> None:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class _Write:
    offset: int
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Truncate:
    size_bytes: int


def _write_into(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, size_bytes: int) -> None:
    del content[size_bytes:]
    content.extend(bytes(size_bytes - len(content)))


def _carry_out(content: bytearray, change: object) -> None:
    if isinstance(change, _Write):
        _write_into(content, change.offset, change.data)
    elif isinstance(change, _Truncate):
        _resize(content, change.size_bytes)


class _File(_Node):
    def __init__(self) -> None:
        super().__init__()
        self.durable = bytearray()

    def carry_out(self, change: object) -> None:
        _carry_out(self.durable, change)

    def present(self) -> bytes:
        content = bytearray(self.durable)
        for _, change in self.pending:
            _carry_out(content, change)
        return bytes(content)

    def power_cut(self, chance: random.Random) -> bytes:
        """D2. How much survives differs from file to file: nothing, all, or a share of the sectors."""
        share = chance.choice((0.0, 0.0, 0.3, 0.7, 0.95, 1.0))
        content = bytearray(self.durable)
        if share == 0.0 or not self.pending:
            return bytes(content)
        for _, change in self.pending:
            if isinstance(change, _Write):
                self._write_sectors(content, change, share, chance)
            elif chance.random() < share:
                _carry_out(content, change)
        if chance.random() < 0.3:
            _resize(content, max(len(content), len(self.present())))  # the length is known, the data are not
        return bytes(content)

    @staticmethod
    def _write_sectors(content: bytearray, change: _Write, share: float, chance: random.Random) -> None:
        position, end = change.offset, change.offset + len(change.data)
        while position < end:
            stop = min(end, (position // SECTOR_BYTES + 1) * SECTOR_BYTES)
            if chance.random() < share:
                _write_into(content, position, change.data[position - change.offset : stop - change.offset])
            position = stop


_Names = dict[str, "_Node | None"]  # one atomic change: the node of each name afterwards


class _Directory(_Node):
    def __init__(self) -> None:
        super().__init__()
        self.durable: dict[str, _Node] = {}
        self.entries: dict[str, _Node] = {}  # as of now

    def carry_out(self, change: object) -> None:
        assert isinstance(change, dict)
        _rename_all(self.durable, change)

    def change(self, serial: int, names: _Names) -> None:
        _rename_all(self.entries, names)
        self.pending.append((serial, names))

    def power_cut(self, chance: random.Random) -> dict[str, _Node]:
        """D3."""
        entries = dict(self.durable)
        changes = [names for _, names in self.pending if isinstance(names, dict)]
        mode = chance.choice(("nothing", "nothing", "all", "prefix", "each"))
        if mode == "nothing":
            return entries
        if mode == "prefix":
            changes = changes[: chance.randrange(len(changes) + 1)]
        stopped: set[str] = set()
        for names in changes:
            if mode == "each" and (stopped.intersection(names) or chance.random() < 0.5):
                stopped.update(names)
            else:
                _rename_all(entries, names)
        return entries


def _rename_all(entries: dict[str, _Node], names: _Names) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


@dataclasses.dataclass(slots=True)
class Tree:
    """Directories and the files in them, by absolute path."""

    directories: list[str] = dataclasses.field(default_factory=list)
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def write_to(self, target: Path, root: str) -> None:
        """Writes the files below `root` to `target`. Files of zeros beyond their data stay sparse."""
        for path in self.directories:
            if path == root or path.startswith(root + "/"):
                (target / path[len(root) + 1 :]).mkdir(parents=True, exist_ok=True)
        for path, content in self.files.items():
            if path.startswith(root + "/"):
                (target / path[len(root) + 1 :]).write_bytes(content)


class Disk:
    """`ignore(operation)` True: the disk reported a flush that it did not do."""

    def __init__(self, ignore: Callable[[Operation], bool] = lambda operation: False) -> None:
        self._root = _Directory()
        self._serial = 0
        self._begun: dict[tuple[int, int], tuple[int, list[_Node]]] = {}
        self._gone: set[str] = set()
        self._ignore = ignore

    # -- the journal -------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        self._serial += 1
        _ACTIONS[operation.kind](self, operation)

    def _parent(self, path: str) -> tuple[_Directory, str]:
        """Its directory, registered if unknown (D5), and its name in it."""
        *directories, name = path.strip("/").split("/")
        node = self._root
        for part in directories:
            below = node.entries.get(part)
            if below is None:
                below = node.entries[part] = node.durable[part] = _Directory()
            if not isinstance(below, _Directory):
                raise JournalError(f"{path}: {part} is a file")
            node = below
        return node, name

    def _find(self, path: str) -> _Node | None:
        parent, name = self._parent(path)
        return parent.entries.get(name)

    def _file(self, operation: Operation) -> _File | None:
        """None: it was removed, but is still open in a process."""
        node = self._find(operation.path)
        if isinstance(node, _File):
            return node
        if operation.path in self._gone or any(str(parent) in self._gone for parent in Path(operation.path).parents):
            return None
        raise JournalError(f"{operation.path} is changed, and nothing is known of its creation")

    def _on_create(self, operation: Operation) -> None:
        parent, name = self._parent(operation.path)
        self._gone.discard(operation.path)
        if operation.reference:
            parent.change(self._serial, {name: _File()})
        elif name not in parent.entries:
            raise JournalError(f"{operation.path} is opened, was there before, and nothing is known of its creation")

    def _on_mkdir(self, operation: Operation) -> None:
        parent, name = self._parent(operation.path)
        self._gone.discard(operation.path)
        parent.change(self._serial, {name: _Directory()})

    def _on_write(self, operation: Operation) -> None:
        file = self._file(operation)
        if file is not None:
            file.pending.append((self._serial, _Write(operation.offset, operation.data)))

    def _on_truncate(self, operation: Operation) -> None:
        file = self._file(operation)
        if file is not None:
            file.pending.append((self._serial, _Truncate(operation.offset)))

    def _on_rename(self, operation: Operation) -> None:
        source, old_name = self._parent(operation.path)
        target, new_name = self._parent(operation.data.decode())
        node = source.entries.get(old_name)
        if node is None:
            raise JournalError(f"{operation.path} is renamed, and nothing is known of it")
        self._gone.add(operation.path)
        self._gone.discard(operation.data.decode())
        if source is target:
            source.change(self._serial, {old_name: None, new_name: node})
        else:
            target.change(self._serial, {new_name: node})
            source.change(self._serial, {old_name: None})

    def _on_unlink(self, operation: Operation) -> None:
        parent, name = self._parent(operation.path)
        self._gone.add(operation.path)
        parent.change(self._serial, {name: None})

    def _on_sync_begin(self, operation: Operation) -> None:
        node = self._find(operation.path)
        self._begun[operation.process, operation.sequence] = (self._serial, [] if node is None else [node])

    def _on_syncfs_begin(self, operation: Operation) -> None:
        root = self._find(operation.path)
        self._begun[operation.process, operation.sequence] = (
            self._serial,
            [] if root is None else list(_all_nodes(root)),
        )

    def _on_done(self, operation: Operation) -> None:
        serial, nodes = self._begun.pop((operation.process, operation.reference), (0, []))
        for node in nodes:
            if operation.result:
                node.drop(serial)
            elif not self._ignore(operation):
                node.make_durable(serial)

    def _on_nothing(self, operation: Operation) -> None:
        pass

    # -- what there is -----------------------------------------------------------------------------

    def present(self) -> Tree:
        return self._tree(lambda directory: directory.entries, _File.present)

    def power_cut(self, chance: random.Random) -> Tree:
        return self._tree(lambda directory: directory.power_cut(chance), lambda file: file.power_cut(chance))

    def harshest(self) -> Tree:
        """Without any unflushed data."""
        return self._tree(lambda directory: directory.durable, lambda file: bytes(file.durable))

    def _tree(self, entries_of: Callable[[_Directory], dict[str, _Node]], content_of: Callable[[_File], bytes]) -> Tree:
        tree = Tree()

        def walk(directory: _Directory, path: str) -> None:
            tree.directories.append(path)
            for name, node in sorted(entries_of(directory).items()):
                if isinstance(node, _Directory):
                    walk(node, f"{path}/{name}")
                elif isinstance(node, _File):
                    tree.files[f"{path}/{name}"] = content_of(node)

        walk(self._root, "")
        return tree


def _all_nodes(node: _Node) -> Iterator[_Node]:
    yield node
    if isinstance(node, _Directory):
        for below in node.entries.values():
            yield from _all_nodes(below)


_ACTIONS: dict[int, Callable[[Disk, Operation], None]] = {
    CREATE: Disk._on_create,
    MKDIR: Disk._on_mkdir,
    WRITE: Disk._on_write,
    TRUNCATE: Disk._on_truncate,
    RENAME: Disk._on_rename,
    UNLINK: Disk._on_unlink,
    SYNC_BEGIN: Disk._on_sync_begin,
    SYNC_DONE: Disk._on_done,
    SYNCFS_BEGIN: Disk._on_syncfs_begin,
    SYNCFS_DONE: Disk._on_done,
    FALLOCATE: Disk._on_nothing,
}

"""Power cuts during compactions: a child process compacts a log while the file layer's journal is
on; for any point in time possible disks are rebuilt and recovered, and must match the model.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

from mqd import native
from mqd.log import segments
from tests.crash.file_model import CREATE, SYNC_BEGIN, SYNC_DONE, WRITE, Disk, JournalError, Operation, read_journals
from tests.property.compaction_model import Log

CUTS = 60
_CHILD = """
import pickle, sys
from pathlib import Path
from tests.property.compaction_model import Log
log = pickle.loads(Path(sys.argv[1]).read_bytes())
for segment_bytes in (1500, 4000, 1 << 20):
    log.now_ms += 600
    log.clean_to = None
    log.compact(segment_bytes=segment_bytes)
"""


def made(directory: Path, seed: int) -> Log:
    log = Log(directory, seed, keys=30)
    for _ in range(80):
        log.produce()
        if log.random.random() < 0.2:
            log.end_transaction(log.random.choice((10, 11, 12)), log.random.random() < 0.5)
    for producer in list(log.ongoing):
        log.end_transaction(producer, True)
    log.roll()
    return log


def known_files(directory: Path) -> list[Operation]:
    """Files that existed before, as the journal would have recorded them."""
    reported: list[Operation] = []

    def report(kind: int, path: str, **fields) -> None:
        reported.append(Operation(kind, path, len(reported), 0, len(reported) + 1, **fields))

    def flush(path: str) -> None:
        report(SYNC_BEGIN, path)
        report(SYNC_DONE, path, reference=reported[-1].sequence)

    for path in sorted(directory.iterdir()):
        report(CREATE, str(path), reference=1)
        if path.stat().st_size:
            report(WRITE, str(path), data=path.read_bytes(), length=path.stat().st_size)
        flush(str(path))
    flush(str(directory))
    return reported


def recorded(tmp_path: Path, seed: int) -> tuple[Log, list[Operation], list[Operation]]:
    import pickle

    log = made(tmp_path / "t-0", seed)
    before = known_files(log.directory)
    (tmp_path / "model").write_bytes(pickle.dumps(log))
    command = [sys.executable, "-c", _CHILD, str(tmp_path / "model")]
    subprocess.run(
        command,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2]), "MQD_FILE_JOURNAL": str(tmp_path / "journal")},
    )
    return log, before, read_journals(tmp_path, "journal")


def copy_of(log: Log, directory: Path) -> Log:
    copy = Log(directory, 0)
    copy.__dict__.update({name: value for name, value in log.__dict__.items() if name not in ("directory", "random")})
    return copy


def test_a_power_cut_at_any_moment_of_a_compaction_loses_nothing(tmp_path: Path, rounds, seed: int):
    log, before, operations = recorded(tmp_path, seed)
    assert len(operations) > 100
    chance = random.Random(f"{seed} cuts")
    cuts = sorted(chance.randrange(len(operations) + 1) for _ in range(rounds(CUTS, 600)))
    disk, position = Disk(), 0
    for operation in before:
        disk.apply(operation)
    for number, cut in enumerate(cuts):
        while position < cut:
            disk.apply(operations[position])
            position += 1
        tree = disk.harshest() if number % 5 == 0 else disk.power_cut(random.Random(f"{seed} {number}"))
        target = tmp_path / "cut"
        target.mkdir()
        tree.write_to(target, str(log.directory))
        after = copy_of(log, target)
        try:
            after.recover()
            after.check()
            after.compact()
            after.check_compacted()
        except (AssertionError, native.NativeError, JournalError) as error:
            raise AssertionError(
                f"seed {seed}, cut {number} behind operation {cut} ({operations[cut - 1] if cut else None}): {error}"
            ) from error
        shutil.rmtree(target)


def test_a_disk_that_ignores_flushes_of_new_segments_is_detected(tmp_path: Path, seed: int):
    """Proves that the test above can fail."""
    log, before, operations = recorded(tmp_path, seed)
    disk = Disk(lambda operation: operation.path.endswith(".log.cleaned"))
    for operation in [*before, *operations]:
        disk.apply(operation)
    target = tmp_path / "cut"
    target.mkdir()
    disk.harshest().write_to(target, str(log.directory))
    assert any(segments.segment_path(target, base).stat().st_size == 0 for base in segments.base_offsets(target)[:-1])

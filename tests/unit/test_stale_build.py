import os
from pathlib import Path

import pytest

from tests.stale_build import LIBRARY, newer_source


def _write(path: Path, time_s: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time_s, time_s))
    return path


@pytest.mark.parametrize("name", ["native/log/log.c", "native/shm/layout.h", "native/build_ffi.py"])
def test_a_source_changed_after_the_build_is_found(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "native/build_ffi.py", 10)
    _write(tmp_path / LIBRARY, 20)
    assert newer_source(tmp_path) is None
    source = _write(tmp_path / name, 30)
    assert newer_source(tmp_path) == source


def test_native_tests_are_not_part_of_the_library(tmp_path: Path) -> None:
    _write(tmp_path / "native/build_ffi.py", 10)
    _write(tmp_path / LIBRARY, 20)
    _write(tmp_path / "native/tests/log/test_log.c", 30)
    assert newer_source(tmp_path) is None


def test_an_installed_library_is_not_judged(tmp_path: Path) -> None:
    _write(tmp_path / "native/build_ffi.py", 10)
    assert newer_source(tmp_path) is None

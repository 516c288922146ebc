"""The packages, built as by `make wheels`, once per run of the tests; and a PATH without a
compiler.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".build" / "packaging"  # a virtual environment: zig alone is 300 MB
LIMIT_S = 1500  # bounds a hang
COMPILERS = ("cc", "c++", "cpp", "gcc", "g++", "clang", "ld", "as", "zig", "make", "tcc", "icx")


@functools.cache
def dist() -> Path:
    """A directory with the sdist and the wheels. Skips the test where the tools are not available."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    python = TOOLS / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(TOOLS)], check=True, timeout=LIMIT_S)
    command = [str(python), "-m", "pip", "install", "--quiet", *extras["package"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        pytest.skip(f"pip install {' '.join(extras['package'])}: {done.stderr.strip()[-500:]}")
    output = Path(tempfile.mkdtemp(prefix="mqd-dist-"))
    command = [str(python), str(ROOT / "native" / "wheels.py"), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return output


def wheel(architecture: str) -> Path:
    (found,) = dist().glob(f"mqd-*-cp311-abi3-manylinux_2_28_{architecture}.whl")
    return found


def without_compilers(*folders: Path) -> dict[str, str]:
    """An environment whose path has only `folders`, without a compiler."""
    for folder in folders:
        assert not [name for name in COMPILERS if (folder / name).exists()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MQD_", "VIRTUAL_ENV"))}
    return kept | {
        "PATH": os.pathsep.join(map(str, folders)),
        "CC": "no-compiler",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }

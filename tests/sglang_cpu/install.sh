#!/usr/bin/env bash
# Makes an environment with the real SGLang on a machine without a GPU, for tests alone.
#   tests/sglang_cpu/install.sh DIR        3 GB, 3 to 9 minutes; nothing is done when DIR has it
#   MILES_TEST_SGLANG=DIR/bin/python pytest -m sglang
# Needs Python 3.11 or 3.12 (PYTHON chooses which) and pip's package index. SGLang itself is not
# changed: two packages that it imports and that need CUDA are stood in for, and fail when called.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
directory=${1:?usage: install.sh DIR}
stamp=$(cat "$here/install.sh" "$here/requirements.txt" "$here"/stand_ins/*/*.py "$here"/stand_ins/*.py | sha256sum)

[ "$(cat "$directory/stamp" 2>/dev/null)" != "$stamp" ] || exit 0
if [ -e "$directory" ] && [ ! -e "$directory/pyvenv.cfg" ] && [ -n "$(ls -A "$directory")" ]; then
    echo "install.sh: $directory is there and is no virtual environment; name another folder" >&2
    exit 1
fi
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
pip="$directory/bin/pip"
export PIP_DISABLE_PIP_VERSION_CHECK=1
$pip install -q torch==2.13.0 # first: what comes later must not choose another build
$pip install -q --no-deps sglang==0.5.23 apache-tvm-ffi==0.1.11 # their dependencies are for CUDA
$pip install -q torch==2.13.0 -r "$here/requirements.txt"
cp -r "$here"/stand_ins/. "$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
SGLANG_USE_CPU_ENGINE=1 "$directory/bin/python" -W ignore -c 'import sglang.srt.server_args'
echo "$stamp" >"$directory/stamp"

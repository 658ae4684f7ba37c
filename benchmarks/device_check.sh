#!/usr/bin/env bash
# Checks and measures the CUDA path on a machine with a GPU:
#
#   benchmarks/device_check.sh OUTPUT_FOLDER [--gib GIB] [--rounds N] [--device cpu] [--parts PART...]
#
# Takes the torch of $PYTHON (python3), builds into build/device-check, downloads nothing and is done in six minutes.
# OUTPUT_FOLDER gets device_check.json, the table and one log per part. The exit status is 0 only if all parts passed.
set -u

if [ $# -lt 1 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
case $1 in
  -*) output=$1 ;;
  /*) output=$1 ;;
  *) output=$PWD/$1 ;;
esac
shift

cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
command -v "$python" >/dev/null || {
  echo "device_check.sh: no $python; set PYTHON to an interpreter that has torch" >&2
  exit 2
}

# The run keeps its own time; this is for an interpreter that hangs.
guard=()
if command -v timeout >/dev/null; then
  guard=(timeout --signal=TERM --kill-after=5 360)
fi
exec ${guard[@]+"${guard[@]}"} "$python" -u -m benchmarks.device_check "$output" "$@"

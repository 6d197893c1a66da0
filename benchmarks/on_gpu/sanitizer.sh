#!/usr/bin/env bash
# The kernels under the tools of compute-sanitizer, some cases each, in so many seconds:
#
#   bash benchmarks/on_gpu/sanitizer.sh PYTHON SECONDS OUT
set -euo pipefail
python="$1"
seconds="$2"
out="$3"
if [ "$seconds" -lt 60 ]; then
  echo "compute-sanitizer: no time is left."
  exit 0
fi
if ! command -v compute-sanitizer > /dev/null; then
  echo "compute-sanitizer is not installed."
  exit 0
fi
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
found=""
for tool in memcheck racecheck synccheck; do
  echo "== compute-sanitizer, $tool"
  # Other kernels than ours are XLA's.
  timeout $((seconds / 3)) compute-sanitizer --tool "$tool" --kernel-regex kns=dafjax \
    "$python" -m benchmarks.on_gpu.same_bytes --every 40 --out "$log.json" \
    > "$log" 2>&1 && status=0 || status=$?
  errors="$(grep -oE 'ERROR SUMMARY: [0-9]+|RACECHECK SUMMARY: [0-9]+' "$log" \
    | grep -oE '[0-9]+' || true)"
  case "$errors" in
    0) outcome=clean ;;
    "") [ "$status" -eq 124 ] && outcome="not done in time" || outcome="did not run" ;;
    *) outcome="$errors errors"; tail -20 "$log" ;;
  esac
  echo "$outcome"
  found="$found${found:+, }\"$tool\": \"$outcome\""
done
rm -f "$log.json"
echo "{\"tools\": {$found}}" > "$out"

#!/usr/bin/env bash
# All that is to be known of dafjax on a GPU, in nine minutes at most, building left out:
#
#   bash benchmarks/gpu.sh                    writes benchmarks/results/gpu.json
#   bash benchmarks/gpu.sh --out FILE
#   bash benchmarks/gpu.sh --dry --out FILE   tiny sizes on the CPU, in a minute
#
# It needs Python with JAX for CUDA, nvcc, and dafjax: PYTHON=.../python where that is
# installed, else it is built from this checkout into build/gpu. What does not work, or
# finds no time any more, is said, and left out of the result; bytes that differ from the
# CPU's, or are not all there in time, end it with an error.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=false
out=benchmarks/results/gpu.json
while [ $# -gt 0 ]; do
  case "$1" in
    --dry) dry=true ;;
    --out) out="$2"; shift ;;
    *) echo "gpu.sh: unknown argument $1; --dry and --out FILE are known." >&2; exit 2 ;;
  esac
  shift
done
python="${PYTHON:-python3}"
parts="$(mktemp -d)"
trap 'rm -rf "$parts"' EXIT
# Benchmarks and models come out of the checkout, but not dafjax, which is not built there.
mkdir "$parts/modules"
ln -s "$PWD/benchmarks" "$PWD/models" "$parts/modules"
export PYTHONSAFEPATH=1
export PYTHONPATH="$parts/modules${PYTHONPATH:+:$PYTHONPATH}"
# As much as is needed, and no more: processes follow each other.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# Before Hopper XLA else turns images round for convolutions (docs/jetson.md).
export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_gpu_force_conv_nhwc=true"

# Without its CUDA library dafjax does the same in jax.numpy.
check='import dafjax._native._cpu; dafjax.remat_compress'
$dry || check="$check; assert dafjax._native._cuda.find()"
if ! "$python" -c "$check" 2> "$parts/import.log"; then
  echo "== building dafjax"
  # For this GPU alone; where nvidia-smi does not tell (Jetson), for all.
  capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null \
    | head -1 | tr -dc 0-9 || true)"
  "$python" -m pip install --quiet --no-build-isolation --no-deps --upgrade \
    --target build/gpu --config-settings=cmake.define.DAFJAX_CUDA=ON \
    ${capability:+--config-settings=cmake.define.DAFJAX_CUDA_ARCHITECTURES=$capability-real} .
  export PYTHONPATH="$PWD/build/gpu:$PYTHONPATH"
  "$python" -c "$check"
fi
"$python" -m dafjax doctor || true

end=$((SECONDS + 500))

# Prints how many of so many seconds are left for a part.
left() {
  local rest=$((end - SECONDS))
  echo $((rest < $1 ? rest : $1))
}

# Runs a part, at most so many seconds of it.
part() {
  local seconds name="$2" status=0
  seconds="$(left "$1")"
  shift 2
  echo "== $name"
  if [ "$seconds" -le 0 ]; then
    echo "$name: no time is left."
    return 0
  fi
  timeout "$seconds" "$python" -m "benchmarks.$name" "$@" || status=$?
  [ "$status" -ne 124 ] || echo "$name: not done after $seconds seconds."
  return "$status"
}

if $dry; then
  part 120 on_gpu.same_bytes --every 16 --out "$parts/same_bytes.json"
  part 60 on_gpu.throughput --megabytes 1 --at-once 2 --programs 2 \
    --rounds 2 --out "$parts/throughput.json"
  part 60 reductions --rounds 2 --num-rows 1 --most-log2-elements 15 \
    --out "$parts/reductions.json"
  part 180 on_gpu.steps --networks gpt2 --methods save_all compress --gpt2-layers 1 \
    --gpt2-width 32 --gpt2-heads 2 --gpt2-batch 2 --gpt2-length 64 --rounds 2 \
    --out "$parts/steps.json"
else
  part 120 on_gpu.same_bytes --out "$parts/same_bytes.json"
  part 100 on_gpu.throughput --out "$parts/throughput.json" || true
  part 240 on_gpu.steps --out "$parts/steps.json" || true
  part 60 reductions --out "$parts/reductions.json" || true
  if command -v nvcc > /dev/null && [ "$(left 60)" -eq 60 ]; then
    echo "== CUB"
    timeout 40 nvcc -O3 -std=c++17 -arch=native benchmarks/on_gpu/cub.cu \
      -o "$parts/cub" && timeout 20 "$parts/cub" > "$parts/cub.json" \
      || rm -f "$parts/cub.json"
  fi
  bash benchmarks/on_gpu/sanitizer.sh "$python" "$(left 120)" "$parts/sanitizer.json" \
    || true
fi
"$python" -m benchmarks.on_gpu.report "$parts" --out "$out"

#!/bin/sh
# Looks at the machine code of the CUDA library of a wheel, for each architecture: no
# kernel uses local memory, arithmetic flushes subnormals, loads and stores are of 16
# bytes, and packing has few enough instructions for the bandwidth of GPUs; a table of
# that goes to the file that is the argument. Fetches NVIDIA's disassembler into
# build/cuda-tools.
set -eu
cd "$(dirname "$0")/../.."
tools=build/cuda-tools
python=${PYTHON:-python3}
[ -d "$tools/nvidia" ] ||
  "$python" -m pip install -q --no-deps --target "$tools" \
    nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
PATH="$(echo "$PWD/$tools"/nvidia/*/bin):$PATH"
rm -rf "$tools/wheel"
"$python" -m pip wheel -q --no-deps --wheel-dir "$tools/wheel" .
"$python" -m zipfile -e "$tools"/wheel/*.whl "$tools/wheel"
library=$tools/wheel/dafjax/_native/libdafjax_cuda.so
if [ ! -e "$library" ]; then
  echo "the wheel was built without CUDA: there is no machine code to look at" >&2
  exit 1
fi

failed=
architectures=$(cuobjdump --list-elf "$library" | sed 's/.*\.\(sm_[0-9]*\)\.cubin/\1/' | sort -u)
for architecture in 75 80 87 90 110 120; do
  echo "$architectures" | grep -qx "sm_$architecture" || failed="$failed sm_$architecture-is-missing"
done
for architecture in $architectures; do
  code=$tools/$architecture.sass
  cuobjdump -sass -arch "$architecture" "$library" >"$code"
  count() { grep -cE "$1" "$code" || true; }
  kernels=$(count 'Function :')
  local_memory=$(count ' (LDL|STL)')
  not_flushing=$(count ' (FADD|FMUL) ')  # FFMA: IEEE divisions have some
  wide=$(count '(LDG|STG)\.E\.128')
  # What MinOrNan and MinOrNanOfTwoBFloat16 are since sm_80, which the simulator has other
  # code for.
  nan=$(count 'FMNMX3?\.FTZ\.NAN')
  nan_of_two=$(count 'V?HMNMX2?\.BF16_V2\.NAN')
  echo "$architecture: $kernels kernels, $local_memory accesses of local memory," \
    "$not_flushing operations that do not flush, $wide loads and stores of 16 bytes"
  [ "$kernels" -gt 20 ] && [ "$local_memory" = 0 ] && [ "$not_flushing" = 0 ] &&
    [ "$wide" -gt 100 ] && { [ "$architecture" = sm_75 ] ||
      { [ "$nan" -gt 100 ] && [ "$nan_of_two" -gt 100 ]; }; } ||
    failed="$failed $architecture"
done
if [ -n "$failed" ]; then
  echo "not as it should be:$failed" >&2
  exit 1
fi
"$python" -m benchmarks.machine_code --library "$library" --least 0.9 \
  --out "${1:-$tools/machine_code.json}"

#!/bin/sh
# Runs variants_test in every way that this machine can: natively, under ASan and UBSan,
# with the AVX-512 kernels emulated, and for aarch64 under qemu. All must print the same
# hash. Fetches what it needs into build/foreign; needs no root. For x86-64 Debian/Ubuntu.
set -eu
cd "$(dirname "$0")/../.."
tools=build/foreign
python=${PYTHON:-python3}
mkdir -p "$tools"

fetch_deb() {  # package, file that it brings
  [ -e "$tools/root/$2" ] && return
  (cd "$tools" && apt-get download -q "$1" >/dev/null && dpkg -x "$1"_*.deb root)
}
fetch_deb libsimde-dev usr/include/simde/x86/avx512.h
fetch_deb qemu-user-static usr/bin/qemu-aarch64-static
# Clang with everything that it needs to build static programs for aarch64.
[ -d "$tools/zig/ziglang" ] ||
  "$python" -m pip install -q --target "$tools/zig" ziglang
export ZIG_GLOBAL_CACHE_DIR="$PWD/$tools/zig-cache" ZIG_LOCAL_CACHE_DIR="$PWD/$tools/zig-cache"

flags="-std=c++17 -O2 -ffp-contract=off -fno-trapping-math -fno-math-errno -Ixla_ffi -pthread"
sources="tests/cpp/variants_test.cc xla_ffi/cpu/kernels.cc xla_ffi/cpu/batch.cc"
gxx="${CXX:-g++} $flags -Wno-uninitialized -Wno-maybe-uninitialized"

build_native() { $gxx -Wall -Wextra -Werror $sources -o "$tools/native"; }
# The rest of UBSan takes minutes to compile here, and its alignment check does not know
# that unaligned loads are meant.
build_sanitized() {
  $gxx -O1 -fno-sanitize-recover=all -fsanitize=address,shift,signed-integer-overflow \
    -fsanitize=integer-divide-by-zero,bounds,float-cast-overflow,bool,enum \
    $sources -o "$tools/sanitized"
}
build_avx512() {
  $gxx -w -DDAFJAX_TEST_SIMDE -isystem "$tools/root/usr/include" $sources \
    tests/cpp/emulated_avx512.cc -o "$tools/avx512"
}
# Threads get a stack of this size, instead of the 128 KiB of musl.
build_aarch64() {
  PYTHONPATH="$tools/zig" "$python" -m ziglang c++ -target aarch64-linux-musl -static \
    $flags -Wall -Wextra -Werror -Wl,-z,stack-size=1048576 $sources -o "$tools/aarch64"
}

failed=
expected=
check() {  # name, command
  name=$1
  shift
  if hash=$("$@" 2>"$tools/$name.log"); then
    echo "$name: $hash ($(cat "$tools/$name.log"))"
    [ "${expected:=$hash}" = "$hash" ] || failed="$failed $name"
  else
    cat "$tools/$name.log"
    failed="$failed $name"
  fi
}

build_sanitized &
sanitized=$!
build_aarch64
build_native
build_avx512
wait "$sanitized"
check native "$tools/native"
check sanitized "$tools/sanitized"
check avx512 "$tools/avx512"
check aarch64 "$tools/root/usr/bin/qemu-aarch64-static" "$tools/aarch64"
if [ -n "$failed" ]; then
  echo "failed or different:$failed" >&2
  exit 1
fi

#!/bin/sh
# Runs the test suite on other versions of JAX, each in a virtual environment of its own
# below build/versions. All of them are tried before a failure ends it.
#
#   sh tests/versions.sh                 the suite on every supported minor version
#   sh tests/versions.sh 0.9.2 0.11.2    on these
#   sh tests/versions.sh --part          what depends on JAX, on one version beside that
#                                        of `make test`: 0.12.0.1, or 0.9.2 if there is no
#                                        Python 3.12 to run it
#   sh tests/versions.sh --part 0.9.2    the same on this one
set -eu
cd "$(dirname "$0")/.."

# What `--part` leaves out: kernels, codecs and the page pool itself, to which JAX is a
# library of arrays, and whole programs and models of others, which are long.
left_out='models test_allocation.py test_benchmarks.py test_build.py
  test_codec_affine.py test_codec_bitmask.py test_codecs.py test_column_blocks.py
  test_cuda_simulator.py test_cuda_status.py test_importance.py test_lost_planes.py
  test_native_variants.py test_page_pool.py test_pool_cpp.py test_rounding_noise.py
  test_rounding_statistics.py test_third_party.py test_train.py'

find_python() {  # version
  for python in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
    # The first may be there and say only that it is not installed.
    if "$python" -c '' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  # Where there is no Python 3.11, jax 0.9.2 and 0.10.2 run on a newer one.
  if [ "$1" = 3.11 ]; then
    command -v python3 || true
  fi
}

python_for() {  # jax
  case $1 in 0.1[12].*) echo 3.12 ;; *) echo 3.11 ;; esac
}

ignore=
cuda=AUTO
if [ "${1-}" = --part ]; then
  shift
  cuda=OFF  # `make test` builds it and looks at it
  for name in $left_out; do
    ls "tests/$name" >/dev/null
    ignore="$ignore --ignore=tests/$name"
  done
  if [ $# = 0 ]; then
    set -- 0.12.0.1
    if [ -z "$(find_python "$(python_for 0.12.0.1)")" ]; then
      echo "WARNING: no Python 3.12 for jax 0.12.0.1: jax 0.9.2 is tested instead." >&2
      set -- 0.9.2
    fi
  fi
fi

failed=
for jax in ${*:-0.9.2 0.10.2 0.11.2 0.12.0.1}; do
  version=$(python_for "$jax")
  python=$(find_python "$version")
  if [ -z "$python" ]; then
    echo "jax $jax: Python $version is needed and was not found" >&2
    failed="$failed $jax"
    continue
  fi
  venv=build/versions/$jax
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --editable '.[models,dev]' \
    --config-settings=cmake.define.DAFJAX_CUDA=$cuda \
    "jax==$jax" "jaxlib==$jax" || { failed="$failed $jax"; continue; }
  echo "jax $jax${ignore:+, all tests but:$ignore}"
  # shellcheck disable=SC2086  # One option for each file.
  "$venv/bin/python" -m pytest --quiet --numprocesses 2 --dist loadfile $ignore \
    || failed="$failed $jax"
done
if [ -n "$failed" ]; then
  echo "failed on jax:$failed" >&2
  exit 1
fi

#!/bin/sh
# Runs the test suite on every supported minor version of JAX, each in a virtual
# environment of its own below build/versions. Arguments choose versions; the default is
# all that a Python is found for: jax 0.11 needs 3.12.
set -eu
cd "$(dirname "$0")/.."

find_python() {  # version
  command -v "python$1" || ls "$HOME"/.pyenv/versions/"$1".*/bin/python 2>/dev/null | head -1
}

failed=
for jax in ${*:-0.9.2 0.10.2 0.11.2}; do
  case $jax in 0.11.*) version=3.12 ;; *) version=3.11 ;; esac
  python=$(find_python "$version")
  if [ -z "$python" ]; then
    echo "jax $jax: Python $version is needed and was not found" >&2
    failed="$failed $jax"
    continue
  fi
  venv=build/versions/$jax
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --editable '.[models,dev]' "jax==$jax" "jaxlib==$jax"
  echo "jax $jax"
  "$venv/bin/python" -m pytest --quiet --numprocesses 2 || failed="$failed $jax"
done
if [ -n "$failed" ]; then
  echo "failed on jax:$failed" >&2
  exit 1
fi

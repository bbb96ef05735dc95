#!/usr/bin/env bash
# Runs what needs a CUDA device: tests/gpu and the device cases of the unit tests, with the python3 that is there.
#   tools/gpu_tests.sh [pytest arguments]
# GEMMCACHE_TEST_BUNDLE names a bundle to serve; without it one is built here from the shipped records.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m pytest -m gpu -o addopts="--strict-markers --import-mode=importlib -ra" "$@" tests

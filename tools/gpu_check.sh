#!/usr/bin/env bash
# The GPU tests on a machine with a GPU. Wheels of slime and its plugins are built here first:
#   tools/gpu_check.sh build DIR      python -m build of every package into DIR
#   tools/gpu_check.sh test [ARGS]    pytest of what needs a GPU, with the packages of PYTHONPATH
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
build)
    for package in . plugins/*/; do
        [ -e "$package/pyproject.toml" ] && python -m build --wheel --no-isolation --outdir "$2" "$package" >/dev/null
    done
    ls "$2"/slime*.whl ;;
test)
    shift
    python3 -m pytest -m gpu tests/contract tests/gpu -p no:cacheprovider -q "$@" ;;
*)
    sed -n 2,4p "$0"; exit 2 ;;
esac

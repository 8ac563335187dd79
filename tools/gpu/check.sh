#!/usr/bin/env bash
# The GPU tests on a machine with a GPU. Wheels of slime and its plugins are built here first:
#   tools/gpu/check.sh build DIR      python -m build of every package into DIR, in the place of older ones; then says
#                                     what the loads beside it (DIR/../../N/main) lack, and how large each is
#   tools/gpu/check.sh test [ARGS]    pytest of what needs a GPU, with the packages of PYTHONPATH
# Loads of wheels hold at most 55 MiB each: base, megatron-core and SGLang with tools/gpu/requirements.txt; DIR is
# LOADS/N/main of the smallest. On the GPU machine tools/gpu/all.py check looks whether everything arrived.
set -euo pipefail
cd "$(dirname "$0")/../.."
case "${1:-}" in
build)
    rm -f "${2:?build into which folder}"/slime*.whl
    for package in . plugins/*/; do
        [ -e "$package/pyproject.toml" ] && python -m build --wheel --no-isolation --outdir "$2" "$package" >/dev/null
    done
    ls "$2"/slime*.whl
    loads=$(cd "$2/../.." && pwd)
    for name in slime_rl slime_convert slime_kernelbench slime_models slime_rm_math slime_sandbox slime_service megatron_core xxhash pytest_timeout pydantic orjson; do
        ls "$loads"/[0-9]*/main/"$name"-*.whl >/dev/null 2>&1 || echo "missing in $loads/N/main: $name"
    done
    for load in "$loads"/[0-9]*/; do du -sm "$load"; done ;;
test)
    shift
    python3 -m pytest -m gpu tests/contract tests/gpu -p no:cacheprovider -q "$@" ;;
*)
    sed -n 2,8p "$0"; exit 2 ;;
esac

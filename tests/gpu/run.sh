#!/usr/bin/env bash
# The tests against a real vLLM server on an NVIDIA GPU, in bfloat16: some minutes, once the packages are there.
#
#   tests/gpu/run.sh [--vllm-python PY] [--python PY] [--model DIR] [--dry-run] [-- PYTEST ARGUMENTS]
#
#   --vllm-python  has vLLM's CUDA build; by default .venv-gpu, made from tests/gpu/requirements.txt where it is missing
#   --python       has Riacho and its test packages; by default .venv, made by `make setup` where it is missing
#   --model        instead of the shipped tiny model; what holds for the tiny model alone is left out
#   --dry-run      print the commands, and do nothing
#
# JUnit and a JSON summary go to $OUT (by default gpu-out). Without a network, set PIP_NO_INDEX=1 and
# PIP_FIND_LINKS=DIR with all wheels in DIR.
set -euo pipefail
cd "$(dirname "$0")/../.."

LIMIT_S=480
TINY_ONLY="tool_calls_arrive_whole or client_that_leaves or killed_server or test_moe"

out=${OUT:-gpu-out}
vllm_python=.venv-gpu/bin/python
python=.venv/bin/python
model=
dry_run=
while (($#)); do
    case $1 in
    --vllm-python) vllm_python=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    --model) model=$2 && shift 2 ;;
    --dry-run) dry_run=1 && shift ;;
    --) shift && break ;;
    *) echo "run.sh: unknown argument $1; its first lines say what it takes" >&2 && exit 64 ;;
    esac
done

run() {
    if [[ $dry_run ]]; then
        printf '%q ' "$@" && echo
    else
        "$@"
    fi
}

run nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
if ! command -v "$vllm_python" >/dev/null; then
    run python3 -m venv .venv-gpu
    run .venv-gpu/bin/pip install --quiet --requirement tests/gpu/requirements.txt
    vllm_python=.venv-gpu/bin/python
fi
if ! command -v "$python" >/dev/null; then
    run make setup
    python=.venv/bin/python
fi
run mkdir -p "$out"

tests=(tests/vllm/test_exact.py tests/vllm/test_swaps.py tests/vllm/test_refused.py)
tests+=(tests/vllm/test_lost.py tests/vllm/test_watched.py tests/vllm/test_moe.py)
variables=(RIACHO_TEST_VLLM_DEVICE=cuda RIACHO_TEST_VLLM_DTYPE=bfloat16 "RIACHO_TEST_VLLM_PYTHON=$(command -v "$vllm_python" || echo "$vllm_python")")
options=(-q -o junit_family=xunit1 "--junitxml=$out/junit.xml")
if [[ $model ]]; then
    variables+=("RIACHO_TEST_MODEL=$model")
    options+=(-k "not ($TINY_ONLY)")
fi
status=0
run timeout --kill-after=30 "$LIMIT_S" env "${variables[@]}" "$python" -m pytest "${tests[@]}" "${options[@]}" "$@" || status=$?
run "$python" tests/gpu/summary.py "$out/junit.xml" "$out/summary.json"
exit "$status"

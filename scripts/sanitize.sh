#!/usr/bin/env bash
# compute-sanitizer over tests/gpu/test_every_kernel.py, small launches of every kernel:
#
#     bash scripts/sanitize.sh FOLDER [memcheck racecheck initcheck]
#
# Needs a CUDA GPU that tools can attach to (under Firecracker they can, under gVisor they cannot), and compute-sanitizer
# in $COMPUTE_SANITIZER, on PATH or in $CUDA_HOME/bin.  May be given: PYTHON; SELECTION, an expression for `pytest -k`;
# LIMIT, seconds of each tool; FILTER, options that say which kernels are looked at, by default ours alone.  initcheck has
# to see the writes of all kernels, so it looks at all, and what it says of torch's is not counted: those read padding.
# Prints counts for each tool; fails if one finds anything.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?expected a folder for the output}
shift
mkdir -p "$folder"
python=${PYTHON:-python3}
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")}
if [ ! -x "$sanitizer" ]; then
    echo "expected compute-sanitizer (of the CUDA toolkit), got none at $sanitizer; set COMPUTE_SANITIZER"
    exit 2
fi
"$sanitizer" --version | tail -1
kernels=$(grep -rhA1 '^@triton.jit' kernels/tq_kernels --include='*.py' | grep -oE '\w+_kernel\b' | sort)
if [ -z "${FILTER+given}" ]; then
    FILTER=
    option=$("$sanitizer" --help | grep -oE -e '--kernel-(regex|name)\b' | sort -r | head -1)
    for kernel in $kernels; do FILTER+="${option:+ $option kns=$kernel}"; done
    echo "$(wc -w <<< "$kernels") kernels, filtered by ${option:-nothing: this version has no filter}"
fi
# torch hands out parts of large allocations: without its allocator every tensor has bounds of its own, and is new.
ours="(at|in) +($(paste -sd'|' <<< "$kernels"))"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=.:kernels:tests TRITON_INTERPRET=0 OMP_NUM_THREADS=1

status=0
for name in ${@:-memcheck racecheck initcheck}; do
    log=$folder/$name.txt
    filter=$FILTER empty=0
    [ "$name" = initcheck ] && filter="" empty=1 # what nobody wrote is left so, see `empty_is_nan`
    # shellcheck disable=SC2086
    TQ_LEAVE_EMPTY=$empty timeout "${LIMIT:-600}" "$sanitizer" --tool "$name" $filter --print-limit 1000 \
        "$python" -m pytest -p no:cacheprovider -m gpu tests/gpu/test_every_kernel.py ${SELECTION:+-k "$SELECTION"} \
        > "$log" 2>&1
    code=$?
    echo "== $name: exit $code in ${SECONDS} s, see $log"
    grep -E 'SUMMARY|[0-9]+ (passed|failed|error|deselected)|^FAILED' "$log"
    found=$(grep '^=========' "$log" | grep -oE "$ours" | sort | uniq -c)
    echo "in our kernels: ${found:-nothing}"
    grep -q 'SUMMARY' "$log" || { echo "$name did not attach; is this Firecracker?" && tail -3 "$log"; }
    grep -q 'SUMMARY' "$log" && [ $code -eq 0 ] && [ -z "$found" ] || status=1
    SECONDS=0
done
exit $status

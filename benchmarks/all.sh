#!/usr/bin/env bash
# Every test and benchmark that needs a CUDA GPU, or those named, into a folder and results.tar in it:
#
#     bash benchmarks/all.sh FOLDER [tests decode latent latent_step preallocated quantise prefill generate enable longest
#                                    offload saving parallel]
#
# The tests take 9 minutes on one H200 with 16 cores, decode 5, generate 15, enable 7, the others 1 to 3 each.  Parallel
# needs two GPUs, takes 10, and runs only where it is named.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
status=0
mkdir -p "$folder"
export PYTHONPATH=.:kernels:tests:benchmarks${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

run() { # name, command: its output and its JSON
    echo "== $(date +%T) $*"
    python3 "${@:2}" > "$folder/$1.txt" 2>&1 || { status=1 && echo "failed: $1, see $folder/$1.txt"; }
}

everything="tests decode latent latent_step preallocated quantise prefill generate enable longest offload saving"
for part in "${@:-$everything}"; do
    for name in $part; do
        case $name in
        tests) run tests -m pytest -n 14 -m gpu -p no:cacheprovider -rfE tests ;;
        decode) run decode benchmarks/decode.py --out "$folder/decode_h200.json" ;;
        latent) run latent benchmarks/latent.py --out "$folder/latent_h200.json" ;;
        latent_step) run latent_step benchmarks/latent_step.py --room --out "$folder/latent_step_h200.json" ;;
        preallocated) run preallocated benchmarks/preallocated.py ;;
        quantise) run quantise benchmarks/quantise.py --out "$folder/quantise_h200.json" ;;
        prefill) run prefill benchmarks/prefill.py --out "$folder/prefill_h200.json" ;;
        generate)
            for model in llama-8b llama-1b qwen3-0.6b; do
                run "generate_$model" benchmarks/generate.py --model $model --out "$folder/generate_$model.json"
            done
            run generate_prefill benchmarks/generate.py --shapes 1x32768 --steps 6 --prefill --compiled \
                --eager DynamicCache 4bit_nc tq3 fp8_e4m3 --out "$folder/generate_prefill.json"
            ;;
        enable) run enable benchmarks/enable.py --out "$folder/enable_h200.json" ;;
        longest) run longest benchmarks/longest_context.py --out "$folder/longest_context_h200.json" ;;
        offload) run offload benchmarks/offload.py --out "$folder/offload_h200.json" ;;
        saving) run saving benchmarks/saving.py --out "$folder/saving_h200.json" ;;
        parallel)
            run parallel_tests -m pytest -m gpu -p no:cacheprovider -rfE tests/gpu/test_parallel.py
            run parallel benchmarks/parallel.py --out "$folder/parallel_h200.json"
            ;;
        *)
            echo "expected $everything or parallel, got $name" && exit 2
            ;;
        esac
    done
done
tar -C "$folder" -cf "$folder/results.tar" --exclude results.tar .
exit $status

#!/usr/bin/env bash
# Every figure of benchmarks/report.py that whole steps and two devices are needed for, on two CUDA devices of one host.
#
#   benchmarks/h200.sh OUT [SECONDS [PART...]]
#
# PARTs: w1 trl w3_ahead w2 weight_sync w3_separate rollout; default: all, in that order.
# Results go to OUT as they come: step_time.jsonl, weight_sync.jsonl, times.txt, logs/. What no time is left for (SECONDS,
# default 2400) is said and left out; every part has its own limit. Model and limits stay in WORK (default: a new folder).
# BESIDE=1 runs TRL on the second device while W1 runs on the first, which takes 4 minutes less.
# Lines that are accepted are appended to the files in benchmarks/results, with machine, versions, command and commit.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=$(realpath -m "$1") limit=${2:-2400} begin=$SECONDS parts=" ${*:3} "
work=${WORK:-} python=${PYTHON:-python3}
if [ -z "$work" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$out/logs" "$work/w1" "$work/w2" "$work/trl"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
dense=scripts/models/qwen3-0.6b/config.json steps=$out/step_time.jsonl

wanted() { [ -z "${parts// /}" ] || [[ $parts == *" $1 "* ]]; }

# part NAME SECONDS COMMAND...: with what is left of the time as its limit, if SECONDS are left
part() {
    local name=$1 wanted=$2 left=$((limit - SECONDS + begin))
    shift 2
    wanted "$name" || return 0
    if [ $left -lt "$wanted" ]; then
        echo "$name left out: $left s are left, it takes $wanted" | tee -a "$out/times.txt"
        return
    fi
    timeout -s INT -k 45 $left "$@" > "$out/logs/$name.log" 2>&1
    echo "$name: exit code $? after $((SECONDS - begin)) s" | tee -a "$out/times.txt"
}

w1() {
    CUDA_VISIBLE_DEVICES=0 part w1 400 $python benchmarks/step_time.py $dense --work "$work/w1" --timeout 330 \
        --out "$steps" -- --offload-rollout --no-offload-train
}
trl() {
    wanted trl || return 0
    for _ in {1..180}; do # W1 makes the model
        [ -e "$work/w1/prepare.json" ] && break
        sleep 1
    done
    CUDA_VISIBLE_DEVICES=$1 part trl 300 $python benchmarks/peers/trl_step.py --model "$work/w1/model" \
        --work "$work/trl" --timeout 330 --out "$steps"
}

if [ -n "${BESIDE:-}" ]; then
    w1 &
    trl 1
    wait
else
    w1
    trl 0
fi
part w3_ahead 200 $python benchmarks/step_time.py $dense --work "$work/w1" --layout ahead --steps 5 --warm-up 2 \
    --timeout 280 --out "$steps"
part w2 350 $python benchmarks/step_time.py scripts/models/qwen3-30b-a3b/config.json --num-layers 6 --prompts 128 \
    --work "$work/w2" --utilization 0.25 --offline-device 1 --timeout 480 --out "$steps" -- --no-rollout-request-seeds
rm -rf "$work/w2/model"
part weight_sync 120 $python benchmarks/weight_sync.py scripts/models/qwen3-4b/config.json --engine-device 1 \
    --transports nccl --bucket-mib 512 2048 --out "$out/weight_sync.jsonl"
part w3_separate 200 $python benchmarks/step_time.py $dense --work "$work/w1" --layout separate --timeout 280 \
    --out "$steps"
part rollout 150 env CUDA_VISIBLE_DEVICES=0 $python benchmarks/rollout.py $dense --concurrency 16 64 \
    --out "$out/rollout.jsonl"
cp "$work"/*/run-*/metrics.jsonl "$out/logs/" 2> /dev/null
for run in "$work"/*/run-*; do
    [ -d "$run/logs" ] && cp -r "$run/logs" "$out/logs/$(basename "$(dirname "$run")")-$(basename "$run")"
done
exit 0

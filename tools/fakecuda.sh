#!/bin/sh
# Builds the CUDA driver for machines without a GPU and links it to the names that programs load, in target/fakecuda:
#   tools/fakecuda.sh && LD_LIBRARY_PATH=$PWD/target/fakecuda cargo test -p octavo-cuda --features kernels
# Links, not copies: the loader takes two copies for two libraries, and each would have a device of its own.
set -eu
cd "$(dirname "$0")/.."
cargo build --quiet --locked -p fakecuda
built=$(cd "${CARGO_TARGET_DIR:-target}/debug" && pwd)/libfakecuda.so
folder=${1:-target/fakecuda}
mkdir -p "$folder"
for name in libcuda.so libcuda.so.1 libcublasLt.so.12; do
    ln -sf "$built" "$folder/$name"
done

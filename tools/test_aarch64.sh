#!/usr/bin/env bash
# Builds the tests of octavo-backend and octavo-cpu for 64-bit ARM on an x86-64 machine and runs them in QEMU's emulation.
# Compiler, linker, libraries and emulator are Debian's (bookworm); they are unpacked into a folder, nothing is installed,
# and neither root nor another toolchain than the usual one is needed: only apt-get and dpkg.
# Usage: tools/test_aarch64.sh FOLDER
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1") root=$(realpath "$1")/root
lists=$folder/lists

# apt with lists of its own, of both architectures, beside those of the machine.
apt() {
    local command=$1
    shift
    "apt-$command" -qq -o "Dir::State=$lists" -o "Dir::State::status=$lists/status" -o "Dir::Cache=$lists/cache" \
        -o "Dir::Etc::SourceList=$lists/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o APT::Sandbox::User=root -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 "$@"
}

# What PACKAGE depends on, of the names that begin with PREFIX.
depends() {
    apt cache depends --important "$1" | sed --quiet "s/^ *Depends: \($2[^:]*\)$/\1/p"
}

fetch() {
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg standard compiler
    mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial" "$folder/packages"
    : > "$lists/status"
    printf "deb [signed-by=$keys] http://deb.debian.org/%s main\n" \
        "debian bookworm" "debian-security bookworm-security" > "$lists/sources.list"
    apt get update
    standard=$(depends libstd-rust-web-dev libstd-rust-web-)
    compiler=$(depends "$standard" libllvm)
    # Both architectures' standard libraries: build scripts and macros run here.
    (cd "$folder/packages" && apt get download rustc-web libstd-rust-web-dev libstd-rust-web-dev:arm64 \
        "$standard" "$compiler" gcc-12-aarch64-linux-gnu binutils-aarch64-linux-gnu libgcc-12-dev-arm64-cross \
        libgcc-s1-arm64-cross libc6-dev-arm64-cross libc6-arm64-cross qemu-user-static)
    local package
    for package in "$folder"/packages/*.deb; do
        dpkg --extract "$package" "$root"
    done
    rm -r "$folder/packages"
    touch "$folder/fetched"
}

[[ -e $folder/fetched ]] || fetch
export LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export RUSTC=$root/usr/bin/rustc
export CARGO_TARGET_DIR=$folder/target
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$root/usr/bin/aarch64-linux-gnu-gcc-12
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C link-arg=--sysroot=$root -D warnings"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$root/usr/bin/qemu-aarch64-static -cpu max -L $root/usr/aarch64-linux-gnu"
test=(cargo test --target aarch64-unknown-linux-gnu --locked)

# All units but two: a reference that conforms to itself has nothing of an instruction set and takes four minutes; and the
# emulator passes on no request to touch memory.
"${test[@]}" --package octavo-backend --package octavo-cpu --lib -- \
    --skip the_reference_conforms_to_itself --skip memory_is_touched_in_the_background

# Left out for the time that they take in emulation: plain Rust alone, one thread, and bfloat16 and 16-bit activations, whose
# kernels the units of `matmul` compare with plain Rust.
"${test[@]}" --package octavo-cpu --test conformance -- neon_conforms an_8_bit_cache_conforms
"${test[@]}" --package octavo-cpu --test invariance

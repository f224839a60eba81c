#!/bin/sh
# SPDX-License-Identifier: MIT
# The installed library as its users meet it: test_install.sh SOURCE BUILD CC. Installs into a folder of its own, builds the
# examples with pkg-config and with CMake, shared and static, and looks whether README and manual page agree with the build.
set -u
source=$1 build=$2 cc=$3
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
passed=0 failed=0 skipped=0

# expect WHAT COMMAND...: the command succeeds.
expect() {
    what=$1
    shift
    if "$@" >"$prefix/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $what: $*"
        cat "$prefix/log"
    fi
}
same() { # TEXT TEXT
    [ "$1" = "$2" ] || { printf 'got:\n%s\nexpected:\n%s\n' "$1" "$2"; return 1; }
}
minimal_prints() { # PROGRAM
    same "$("$1")" "pages 2 4 5 9"
}

expect "install" cmake --install "$build" --prefix "$prefix/usr"
lib=$(dirname "$(find "$prefix/usr" -name libmsa.a)")
library=$lib/libmsa.so
export PKG_CONFIG_PATH="$lib/pkgconfig" LD_LIBRARY_PATH="$lib"

# shellcheck disable=SC2046
{
    expect "pkg-config, shared" $cc "$source/examples/minimal.c" -o "$prefix/shared" $(pkg-config --cflags --libs msa)
    expect "minimal, shared" minimal_prints "$prefix/shared"
    mv "$library" "$prefix/libmsa.so.away" # so that -lmsa finds the archive
    expect "pkg-config, static" $cc "$source/examples/minimal.c" -o "$prefix/static" $(pkg-config --cflags --libs --static msa)
    mv "$prefix/libmsa.so.away" "$library"
    expect "minimal, static" minimal_prints "$prefix/static"
    expect "minimal, from Python" same "$(python3 "$source/examples/minimal.py")" "pages 2 4 5 9"
    expect "layer" $cc "$source/examples/layer.c" -o "$prefix/layer" $(pkg-config --cflags --libs msa)
    expect "layer runs" "$prefix/layer"
}

mkdir "$prefix/project"
cat >"$prefix/project/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.22)
project(user C)
find_package(msa 0.1 REQUIRED)
add_executable(shared $source/examples/minimal.c)
target_link_libraries(shared msa::msa)
add_executable(static $source/examples/minimal.c)
target_link_libraries(static msa::msa_static)
END
expect "find_package" cmake -S "$prefix/project" -B "$prefix/project/build" -G Ninja -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_PREFIX_PATH="$prefix/usr"
expect "CMake, build" cmake --build "$prefix/project/build"
expect "CMake, shared" minimal_prints "$prefix/project/build/shared"
expect "CMake, static" minimal_prints "$prefix/project/build/static"

if [ -x "$prefix/usr/bin/msa" ]; then
    expect "the tool runs" "$prefix/usr/bin/msa" info
    options=$(for command in run check make bench info; do "$prefix/usr/bin/msa" $command --help; done |
        grep -o '^ *\(-.,\)\? *--[a-z-]*' | grep -o -- '--.*' | sort -u)
    described=$(tr -d '\\' <"$prefix/usr/share/man/man1/msa.1" | grep -A 1 '^\.TP' | grep -o -- '--[a-z][a-z-]*' | sort -u)
    expect "the manual page has the options of --help" same "$(echo "$described")" \
        "$(echo "$options" | grep -vE -- '--(help|usage)$')"
else
    skipped=$((skipped + 1))
    echo "skip: tool: built without it"
fi
expect "README.md has the list of kernels" "$source/scripts/readme-matrix" --check
quoted=$(awk '/^```c$/ {inside = 1; next} /^```$/ {inside = 0} inside' "$source/README.md")
expect "README.md quotes examples/minimal.c" same "$quoted" "$(cat "$source/examples/minimal.c")"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]

#!/bin/sh
# SPDX-License-Identifier: MIT
# What the libraries show and need: test_symbols.sh SHARED STATIC HEADER. The exports of both are the functions that the
# header declares, neither more nor fewer; the shared one loads nothing but libc, libm and an OpenMP runtime, and its SONAME has
# the major version.
set -u
library=$1 archive=$2 header=$3
passed=0 failed=0

# same WHAT GOT EXPECTED
same() {
    if [ "$2" = "$3" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED: %s\ngot:\n%s\nexpected:\n%s\n' "$1" "$2" "$3"
    fi
}

exported=$(nm -D --defined-only "$library" | awk '{ sub(/@.*/, "", $3); print $3 }' | sort)
declared=$(grep '^MSA_API' "$header" | grep -o 'msa_[a-z0-9_]*(' | tr -d '(' | sort)
same "exports are the header's functions" "$exported" "$declared"
global=$(nm -g --defined-only "$archive" | awk 'NF == 3 { print $3 }' | sort)
same "the archive's global names are the header's functions" "$global" "$declared"

loaded=$(ldd "$library" | awk '{ print $1 }' | sed 's,.*/,,' |
    grep -vE '^(linux-vdso|libc|libm|libgomp|libomp|ld-linux[-a-z0-9_]*)\.so(\.[0-9]+)*$')
same "libraries other than libc, libm and OpenMP" "$loaded" ""

major=$(sed -n 's/^#define MSA_VERSION_MAJOR \([0-9]*\)$/\1/p' "$header")
same "SONAME" "$(readelf -d "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')" "libmsa.so.$major"

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]

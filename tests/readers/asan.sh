#!/bin/bash
# Run the tests of the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer, with and without AVX2.
# PYTHON names the interpreter (.venv/bin/python). The normal build is left alone: all happens in a temporary copy.
# That the sanitizers stop what is wrong, tests/tar/asan.sh shows.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
CC=${CC:-gcc}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tests"
cp -r tarshards "$work"
cp -r tests/readers tests/conftest.py "$work/tests"
cp pyproject.toml "$work"
rm -f "$work"/tarshards/{_rows,_pixels}*.so
cd "$work"

sanitized() {
    env LD_PRELOAD="$("$CC" -print-file-name=libasan.so)" ASAN_OPTIONS="detect_leaks=0:$log" \
        UBSAN_OPTIONS="print_stacktrace=1:$log" PYTHONMALLOC=malloc PYTHONPATH="$work" "$PYTHON" "$@"
}

include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
for option in -DAS_USUAL -DPORTABLE; do
    for room in _rows _pixels; do
        "$CC" -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra \
            -Werror -ffp-contract=off -shared -fPIC -DPy_LIMITED_API=0x030B0000 "$option" "-I$include" \
            "tarshards/$room.c" -o "tarshards/$room.abi3.so"
    done
    log=log_path=stderr
    sanitized - "$work" <<'EOF'
import sys
from tarshards import _pixels, _rows, kernels
assert kernels.resize is _pixels.resize
assert kernels.gather is _rows.gather
assert "libasan" in open("/proc/self/maps").read()
for room in _pixels, _rows:
    assert room.__file__.startswith(sys.argv[1]), room.__file__
    assert b"__asan_report_load" in open(room.__file__, "rb").read()
EOF
    # Workers of pytest hide what they write, so the sanitizer writes to files.
    log=log_path=$work/report
    sanitized -m pytest -q -n 2 -p no:cacheprovider -k native tests/readers || {
        cat "$work"/report.* >&2
        exit 1
    }
    test -z "$(compgen -G "$work/report.*")"
done

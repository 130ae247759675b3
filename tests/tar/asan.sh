#!/bin/bash
# Run the tests of the native tar parser under AddressSanitizer and UndefinedBehaviorSanitizer.
# PYTHON names the interpreter (.venv/bin/python). The normal build is left alone: all happens in a temporary copy.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
CC=${CC:-gcc}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tests"
cp -r tarshards "$work"
cp -r tests/tar "$work/tests"
cp pyproject.toml "$work"
rm -f "$work"/tarshards/_tar*.so
cd "$work"

compile() {
    "$CC" -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra \
        -shared -fPIC -DPy_LIMITED_API=0x030B0000 "-I$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
        "$1" -o "$2"
}

# Leaks are not looked for, as CPython keeps what it has until its process ends; a test counts those of the parser.
# With Python's own allocator off, every object has its memory, and its red zone, to itself.
log=log_path=stderr
sanitized() {
    env LD_PRELOAD="$("$CC" -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0:$log UBSAN_OPTIONS=print_stacktrace=1:$log \
        PYTHONMALLOC=malloc PYTHONPATH="$work" "$PYTHON" "$@"
}

compile tarshards/_tar.c tarshards/_tar.abi3.so

# The parser tested is the one just compiled, and the sanitizer is there.
sanitized - "$work" <<'EOF'
import sys
from tarshards import _tar, tar
assert _tar.__file__.startswith(sys.argv[1]), _tar.__file__
assert tar.scan is _tar.scan
assert "libasan" in open("/proc/self/maps").read()
assert b"__asan_report_load" in open(_tar.__file__, "rb").read()
assert b"__ubsan_handle" in open(_tar.__file__, "rb").read()
EOF

# It would see a byte read too far, and a sum too large: code that does either is stopped.
cat >wrong.c <<'EOF'
#include <Python.h>
int read_at(const char *text, long at) { return text[at]; }
int increment(int value) { return value + 1; }
EOF
compile wrong.c wrong.so
call='import ctypes, sys; wrong = ctypes.CDLL("./wrong.so"); print(eval(sys.argv[1]))'
text='ctypes.byref(ctypes.create_string_buffer(1000))'
test "$(sanitized -c "$call" "wrong.read_at($text, 999) + wrong.increment(41)")" = 42
is_stopped() {
    if sanitized -c "$call" "$1" >out 2>&1 || ! grep -q "$2" out; then
        echo "the sanitizer let pass: $1" >&2
        cat out >&2
        exit 1
    fi
}
is_stopped "wrong.read_at($text, 1000)" heap-buffer-overflow
is_stopped 'wrong.increment(2**31 - 1)' 'signed integer overflow'

# Workers of pytest hide what they write, so the sanitizer writes to files.
log=log_path=$work/report
sanitized -m pytest -q -n auto -p no:cacheprovider -k 'native or twins' tests/tar || {
    cat "$work"/report.* >&2
    exit 1
}
test -z "$(compgen -G "$work/report.*")"

#!/bin/bash
# Run the tests of the native tar parser and kernels under AddressSanitizer and UndefinedBehaviorSanitizer, those of the
# kernels with and without AVX2. PYTHON names the interpreter (.venv/bin/python). The normal build is left alone: all
# happens in a temporary copy.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
CC=${CC:-gcc}
include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tests"
cp -r tarshards pyproject.toml "$work"
mkdir "$work/tests/loaders"
cp -r tests/kernels tests/tar tests/*.py tests/fork_client.c "$work/tests"
rm "$work"/tests/test_*.py
cp -r tests/loaders/readers "$work/tests/loaders"
rm -f "$work"/tarshards/*/*.so
cd "$work"

compile() {
    "$CC" -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Werror \
        -ffp-contract=off -shared -fPIC -DPy_LIMITED_API=0x030B0000 "-I$include" "${@:3}" "$1" -o "$2"
}

# Leaks are not looked for, as CPython keeps what it has until its process ends; a test counts those of the parser.
# With Python's own allocator off, every object has its memory, and its red zone, to itself.
log=log_path=stderr
sanitized() {
    env LD_PRELOAD="$("$CC" -print-file-name=libasan.so)" ASAN_OPTIONS="detect_leaks=0:$log" \
        UBSAN_OPTIONS="print_stacktrace=1:$log" PYTHONMALLOC=malloc PYTHONPATH="$work" "$PYTHON" "$@"
}

# Workers of pytest hide what they write, so the sanitizers write to files.
passes() {
    local log=log_path=$work/report
    sanitized -m pytest -q -n auto -p no:cacheprovider "$@" || {
        cat "$work"/report.* >&2
        exit 1
    }
    test -z "$(compgen -G "$work/report.*")"
}

# They would see a byte read too far, and a sum too large: code that does either is stopped.
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

for kernel in _tar _mapped _sidecars _headers _wire; do
    compile "tarshards/kernels/$kernel.c" "tarshards/kernels/$kernel.abi3.so"
done
for option in -UPORTABLE -DPORTABLE; do
    for kernel in _rows _pixels _jpeg; do
        compile "tarshards/kernels/$kernel.c" "tarshards/kernels/$kernel.abi3.so" "$option"
    done
    # The kernels tested are those just compiled, and the sanitizers are there.
    sanitized - "$work" <<'EOF'
import sys
from tarshards import kernels
from tarshards.kernels import _headers, _jpeg, _mapped, _pixels, _rows, _sidecars, _tar, _wire
assert (kernels.tar, kernels.mapped, kernels.sidecars, kernels.wire) == (_tar, _mapped, _sidecars, _wire)
assert (kernels.headers, kernels.rows, kernels.pixels, kernels.jpeg) == (_headers, _rows, _pixels, _jpeg)
assert "libasan" in open("/proc/self/maps").read()
for kernel in _tar, _mapped, _sidecars, _headers, _rows, _pixels, _jpeg, _wire:
    assert kernel.__file__.startswith(sys.argv[1]), kernel.__file__
    code = open(kernel.__file__, "rb").read()
    assert b"__asan_report_load" in code
    assert b"__ubsan_handle" in code
EOF
    # The sanitizer does not use memory again that was just freed.
    passes tests/kernels/test_{jpeg,pixels,row_kernels}.py tests/loaders/readers/test_readers_{arrays,images,parsed}.py \
        -k "not takes_no_new_memory"
done
passes tests/kernels/test_{headers,receive,sidecars}.py tests/kernels/test_tar_*.py tests/tar/test_tar_{corpus,damage,ends,streams}.py

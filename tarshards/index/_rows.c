/* Gather, compare and parse a batch of payloads without the GIL: the native twin of _rows_py.py, where the contracts are written.
 *
 * Addresses are trusted: tarshards.index.memory.Payloads has checked that they lie within buffers that it holds.
 */
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 8 /* rows; about the number of loads that a core keeps in flight */
#define LINE 64 /* bytes of a cache line */
#define LINES 8 /* of a row; the processor itself prefetches the rest of a longer one */

/* Prefetch the first bytes of a row that is needed soon. */
static void fetch(uint64_t address, int64_t bytes) {
    for (int64_t at = 0; at < bytes && at < LINES * LINE; at += LINE)
        __builtin_prefetch((const char *)(uintptr_t)address + at);
}

static PyObject *gather(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer out, addresses, prefix;
    if (!PyArg_ParseTuple(args, "w*y*y*:gather", &out, &addresses, &prefix)) return NULL;
    const int64_t count = addresses.len / 8, bytes = count ? out.len / count : 0;
    const uint64_t *address = addresses.buf;
    const int fits = bytes * count == out.len;
    int64_t i = 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (; i < count; i++) {
            if (i + AHEAD < count) fetch(address[i + AHEAD], prefix.len + bytes);
            const char *row = (const char *)(uintptr_t)address[i];
            if (prefix.len && memcmp(row, prefix.buf, (size_t)prefix.len)) break;
            if (bytes) memcpy((char *)out.buf + i * bytes, row + prefix.len, (size_t)bytes);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&prefix);
    if (!fits) return PyErr_SetString(PyExc_ValueError, "out does not hold as many rows as there are addresses"), NULL;
    return PyLong_FromLongLong(i < count ? i : -1);
}

static PyObject *pack(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer out, addresses, sizes;
    if (!PyArg_ParseTuple(args, "w*y*y*:pack", &out, &addresses, &sizes)) return NULL;
    const int64_t count = addresses.len / 8;
    const uint64_t *address = addresses.buf;
    const int64_t *size = sizes.buf;
    int64_t left = out.len;
    int fits = sizes.len == 8 * count;
    for (int64_t i = 0; fits && i < count; left -= size[i++]) fits = size[i] >= 0 && size[i] <= left;
    fits = fits && left == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        char *to = out.buf;
        for (int64_t i = 0; i < count; to += size[i++]) {
            if (i + AHEAD < count) fetch(address[i + AHEAD], size[i + AHEAD]);
            if (size[i]) memcpy(to, (const char *)(uintptr_t)address[i], (size_t)size[i]);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    if (!fits) return PyErr_SetString(PyExc_ValueError, "out, addresses and sizes do not fit together"), NULL;
    Py_RETURN_NONE;
}

/* Return how many bytes of white space *text* begins with. */
static int64_t leading_space(const char *text, int64_t size) {
    int64_t i = 0;
    while (i < size && (text[i] == ' ' || (text[i] >= '\t' && text[i] <= '\r'))) i++;
    return i;
}

/* Read an ASCII decimal, which white space may surround; return 0 where it is not one or needs more than 64 bits. */
static int read_integer(const char *text, int64_t size, void *out) {
    int64_t i = leading_space(text, size);
    const int negative = i < size && text[i] == '-';
    uint64_t value = 0;
    if (i < size && (text[i] == '-' || text[i] == '+')) i++;
    const int64_t digits = i;
    for (; i < size && text[i] >= '0' && text[i] <= '9'; i++) {
        const uint64_t digit = (uint64_t)(text[i] - '0');
        if (value > ((uint64_t)INT64_MAX + (uint64_t)negative - digit) / 10) return 0;
        value = value * 10 + digit;
    }
    if (i == digits || i + leading_space(text + i, size - i) != size) return 0;
    value = negative ? 0 - value : value;
    memcpy(out, &value, 8);
    return 1;
}

/* Read a number as Python's float() does, except for underscores; return 0 where it is not one. Needs the GIL. */
static int read_float(const char *text, int64_t size, void *out) {
    char copy[320], *end;
    int64_t start = leading_space(text, size);
    while (size > start && leading_space(text + size - 1, 1)) size--;
    if (size == start || size - start >= (int64_t)sizeof copy) return 0;
    memcpy(copy, text + start, (size_t)(size - start));
    copy[size - start] = 0;
    double value = PyOS_string_to_double(copy, &end, NULL);
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
    if (end != copy + (size - start)) return 0;
    memcpy(out, &value, 8);
    return 1;
}

static PyObject *parse(PyObject *args, const char *format, int (*read)(const char *, int64_t, void *), int needs_gil) {
    Py_buffer out, addresses, sizes;
    if (!PyArg_ParseTuple(args, format, &out, &addresses, &sizes)) return NULL;
    const int64_t count = addresses.len / 8;
    const int fits = out.len == 8 * count && sizes.len == 8 * count;
    int64_t i = 0;
    if (fits) {
        PyThreadState *state = needs_gil ? NULL : PyEval_SaveThread();
        const uint64_t *address = addresses.buf;
        for (; i < count; i++) {
            if (i + AHEAD < count) fetch(address[i + AHEAD], 1);
            const char *text = (const char *)(uintptr_t)address[i];
            if (!read(text, ((const int64_t *)sizes.buf)[i], (int64_t *)out.buf + i)) break;
        }
        if (state) PyEval_RestoreThread(state);
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    if (!fits) return PyErr_SetString(PyExc_ValueError, "out, addresses and sizes do not fit together"), NULL;
    return PyLong_FromLongLong(i < count ? i : -1);
}

static PyObject *parse_integers(PyObject *self, PyObject *args) {
    (void)self;
    return parse(args, "w*y*y*:parse_integers", read_integer, 0);
}

static PyObject *parse_floats(PyObject *self, PyObject *args) {
    (void)self;
    return parse(args, "w*y*y*:parse_floats", read_float, 1);
}

static PyObject *find_other(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer addresses, prefix;
    if (!PyArg_ParseTuple(args, "y*y*:find_other", &addresses, &prefix)) return NULL;
    const uint64_t *address = addresses.buf;
    const int64_t count = prefix.len ? addresses.len / 8 : 0;
    int64_t i = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; i < count; i++) {
        if (i + AHEAD < count) fetch(address[i + AHEAD], prefix.len);
        if (memcmp((const void *)(uintptr_t)address[i], prefix.buf, (size_t)prefix.len)) break;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&prefix);
    return PyLong_FromLongLong(i < count ? i : -1);
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, "gather(out, addresses, prefix) -> index; see tarshards.index._rows_py"},
    {"pack", pack, METH_VARARGS, "pack(out, addresses, sizes); see tarshards.index._rows_py"},
    {"find_other", find_other, METH_VARARGS, "find_other(addresses, prefix) -> index; see tarshards.index._rows_py"},
    {"parse_integers", parse_integers, METH_VARARGS,
     "parse_integers(out, addresses, sizes) -> index; see tarshards.index._rows_py"},
    {"parse_floats", parse_floats, METH_VARARGS, "parse_floats(out, addresses, sizes) -> index; see tarshards.index._rows_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", "Payloads of a batch.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }

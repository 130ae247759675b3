/* Gather, compare and parse a batch of payloads without the GIL: the native twin of _rows_py.py, which documents the
 * functions.
 *
 * Addresses are trusted: tarshards.samples.payloads.Payloads has checked that they lie within buffers that it holds.
 */
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_guard.h"
#include "_jpeg_markers.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define UNCACHED (1 << 24)     /* bytes from which a batch is too large to stay in the caches until it is read, */
#define UNCACHED_ROW (1 << 12) /* and from which its rows are then copied past the caches */

#define AHEAD 8 /* rows that are prefetched; about as many as a core has loads in flight */
#define LINE 64 /* bytes of a cache line */
#define LINES 8 /* lines of a row that are prefetched; the processor itself prefetches the rest of a longer one */
#define NEAR (1 << 15) /* up to this many bytes between two ranges are read rather than skipped */
#define PIECE (1 << 17) /* bytes to request by one call; Linux reads no more per call than the device's read-ahead */

static const Guard *guard;

/* The rows that a function works on; *at* is the row at which it stopped, or *count*. */
typedef struct {
    const uint64_t *address;
    const int64_t *size;
    int64_t count, at;
    char *out;
    int64_t bytes; /* of a row of *out* */
    const void *prefix;
    int64_t prefix_length;
    int is_uncached; /* whether large rows are copied past the caches */
    int (*read)(const char *text, int64_t size, void *out);
} Rows;

static const char *row_of(const Rows *rows, int64_t i) { return (const char *)(uintptr_t)rows->address[i]; }

/* Prefetch the first bytes of a row that is needed soon. */
static void prefetch(uint64_t address, int64_t bytes) {
    for (int64_t at = 0; at < bytes && at < LINES * LINE; at += LINE)
        __builtin_prefetch((const char *)(uintptr_t)address + at);
}

/* Do the work under the guard; return 0 with an exception set if a mapped file has shrunk. */
static int run(void (*work)(void *), Rows *rows, int needs_gil) {
    PyThreadState *state = needs_gil ? NULL : PyEval_SaveThread();
    const int failure = guard->run(work, rows);
    if (state) PyEval_RestoreThread(state);
    if (failure) PyErr_SetString(PyExc_OSError, SHRUNK);
    return !failure;
}

/* Return the row at which the work stopped, or -1 if it finished. */
static PyObject *stopped(const Rows *rows) { return PyLong_FromLongLong(rows->at < rows->count ? rows->at : -1); }

static void gather_rows(void *argument) {
    Rows *rows = argument;
    int64_t i = 0;
    for (; i < rows->count; i++) {
        if (i + AHEAD < rows->count) prefetch(rows->address[i + AHEAD], rows->prefix_length + rows->bytes);
        const char *row = row_of(rows, i);
        if (rows->prefix_length && memcmp(row, rows->prefix, (size_t)rows->prefix_length)) break;
        if (rows->bytes) memcpy(rows->out + i * rows->bytes, row + rows->prefix_length, (size_t)rows->bytes);
    }
    rows->at = i;
}

static PyObject *gather(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer out, addresses, prefix;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*y*y*:gather", &out, &addresses, &prefix)) return NULL;
    const int64_t count = addresses.len / 8, bytes = count ? out.len / count : 0;
    Rows rows = {.address = addresses.buf, .count = count, .out = out.buf, .bytes = bytes,
                 .prefix = prefix.buf, .prefix_length = prefix.len};
    if (bytes * count != out.len)
        PyErr_SetString(PyExc_ValueError, "out does not hold as many rows as there are addresses");
    else if (run(gather_rows, &rows, 0)) result = stopped(&rows);
    PyBuffer_Release(&out);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&prefix);
    return result;
}

#ifdef __SSE2__
/* Copy past the caches: the target is not read into them first, and does not evict their content. */
static void copy_past_caches(char *to, const char *from, int64_t size) {
    int64_t i = -(int64_t)(uintptr_t)to & 15;
    if (i > size) i = size;
    memcpy(to, from, (size_t)i);
    for (; i + 64 <= size; i += 64) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(from + i)), b = _mm_loadu_si128((const __m128i *)(from + i + 16)),
                      c = _mm_loadu_si128((const __m128i *)(from + i + 32)),
                      d = _mm_loadu_si128((const __m128i *)(from + i + 48));
        _mm_stream_si128((__m128i *)(to + i), a);
        _mm_stream_si128((__m128i *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(to + i + 48), d);
    }
    memcpy(to + i, from + i, (size_t)(size - i));
    _mm_sfence();
}
#else
static void copy_past_caches(char *to, const char *from, int64_t size) { memcpy(to, from, (size_t)size); }
#endif

static void pack_rows(void *argument) {
    Rows *rows = argument;
    char *to = rows->out;
    for (int64_t i = 0; i < rows->count; to += rows->size[i++]) {
        if (i + AHEAD < rows->count) prefetch(rows->address[i + AHEAD], rows->size[i + AHEAD]);
        if (rows->is_uncached && rows->size[i] >= UNCACHED_ROW) copy_past_caches(to, row_of(rows, i), rows->size[i]);
        else if (rows->size[i]) memcpy(to, row_of(rows, i), (size_t)rows->size[i]);
    }
}

static PyObject *pack(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer out, addresses, sizes;
    if (!PyArg_ParseTuple(args, "w*y*y*:pack", &out, &addresses, &sizes)) return NULL;
    Rows rows = {.address = addresses.buf, .size = sizes.buf, .count = addresses.len / 8, .out = out.buf,
                 .is_uncached = out.len >= UNCACHED};
    int64_t left = out.len;
    int fits = sizes.len == 8 * rows.count;
    for (int64_t i = 0; fits && i < rows.count; left -= rows.size[i++]) fits = rows.size[i] >= 0 && rows.size[i] <= left;
    fits = fits && left == 0;
    if (!fits) PyErr_SetString(PyExc_ValueError, "out, addresses and sizes do not fit together");
    const int done = fits && run(pack_rows, &rows, 0);
    PyBuffer_Release(&out);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    if (!done) return NULL;
    Py_RETURN_NONE;
}

static void copy_row(void *argument) {
    Rows *rows = argument;
    memcpy(rows->out, row_of(rows, 0), (size_t)rows->bytes);
}

static PyObject *copy_bytes(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long given;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Kn:copy_bytes", &given, &size)) return NULL;
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    if (!data || !size) return data;
    const uint64_t address = given;
    Rows rows = {.address = &address, .count = 1, .out = PyBytes_AsString(data), .bytes = size};
    if (!run(copy_row, &rows, size < LARGE && !guard->waits())) Py_CLEAR(data);
    return data;
}

/* Return the number of bytes of white space at the beginning of *text*. */
static int64_t leading_space(const char *text, int64_t size) {
    int64_t i = 0;
    while (i < size && (text[i] == ' ' || (text[i] >= '\t' && text[i] <= '\r'))) i++;
    return i;
}

/* Read an ASCII decimal, which white space may surround, as int64; return 0 if it is not one or does not fit. */
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

/* Read a number as Python's float() does, except for underscores; return 0 if it is not one. Needs the GIL. */
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

static uint32_t big_endian(const unsigned char *at) { return (uint32_t)two_bytes(at) << 16 | (uint32_t)two_bytes(at + 2); }

/* Whether *data* has the bytes of *end* from *at* on; they are looked for from its end. */
static int has_end(const unsigned char *data, int64_t size, int64_t at, const char *end, int64_t length) {
    for (int64_t i = size - length; i >= at; i--)
        if (!memcmp(data + i, end, (size_t)length)) return 1;
    return 0;
}

/* Read height and width of a JPEG; return 0 if its header or its end is not whole. */
static int read_jpeg_size(const unsigned char *data, int64_t size, uint32_t *out) {
    Segment found = {0, 2, 2};
    out[0] = out[1] = 0;
    while (found.marker != START_OF_SCAN) {
        found = next_segment(data, size, found.end);
        if (found.marker < 0) return 0;
        if (IS_FRAME(found.marker) && found.at + 9 <= size) {
            out[0] = (uint32_t)two_bytes(data + found.at + 5);
            out[1] = (uint32_t)two_bytes(data + found.at + 7);
            if (!out[0] || !out[1]) return 0;
        }
    }
    return out[0] && has_end(data, size, found.end, "\xff\xd9", 2);
}

/* Read height and width of a JPEG or PNG as two uint32; return 0 for other formats, and if its end is missing. */
static int read_image_size(const char *bytes, int64_t size, void *out) {
    const unsigned char *data = (const unsigned char *)bytes;
    uint32_t sides[2];
    if (size >= 3 && !memcmp(bytes, "\xff\xd8\xff", 3)) {
        if (!read_jpeg_size(data, size, sides)) return 0;
    } else {
        if (size < 33 || memcmp(bytes, "\x89PNG\r\n\x1a\n", 8) || memcmp(bytes + 12, "IHDR", 4)) return 0;
        sides[0] = big_endian(data + 20);
        sides[1] = big_endian(data + 16);
        if (!sides[0] || !sides[1] || !has_end(data, size, 0, "\0\0\0\0IEND\xae\x42\x60\x82", 12)) return 0;
    }
    memcpy(out, sides, 8);
    return 1;
}

static void parse_rows(void *argument) {
    Rows *rows = argument;
    int64_t i = 0;
    for (; i < rows->count; i++) {
        if (i + AHEAD < rows->count) prefetch(rows->address[i + AHEAD], 1);
        if (!rows->read(row_of(rows, i), rows->size[i], rows->out + 8 * i)) break;
    }
    rows->at = i;
}

static PyObject *parse(PyObject *args, const char *format, int (*read)(const char *, int64_t, void *), int needs_gil) {
    Py_buffer out, addresses, sizes;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, format, &out, &addresses, &sizes)) return NULL;
    const int64_t count = addresses.len / 8;
    Rows rows = {.address = addresses.buf, .size = sizes.buf, .count = count, .out = out.buf, .read = read};
    if (out.len != 8 * count || sizes.len != 8 * count)
        PyErr_SetString(PyExc_ValueError, "out, addresses and sizes do not fit together");
    else if (run(parse_rows, &rows, needs_gil)) result = stopped(&rows);
    PyBuffer_Release(&out);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    return result;
}

static PyObject *parse_integers(PyObject *self, PyObject *args) {
    (void)self;
    return parse(args, "w*y*y*:parse_integers", read_integer, 0);
}

static PyObject *parse_floats(PyObject *self, PyObject *args) {
    (void)self;
    return parse(args, "w*y*y*:parse_floats", read_float, 1);
}

static PyObject *parse_image_sizes(PyObject *self, PyObject *args) {
    (void)self;
    return parse(args, "w*y*y*:parse_image_sizes", read_image_size, 0);
}

/* Let the system read ranges of mapped files ahead; a range that begins near the end of the previous ones is merged
 * with them. */
static PyObject *ask(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer addresses, sizes;
    if (!PyArg_ParseTuple(args, "y*y*:ask", &addresses, &sizes)) return NULL;
    const uint64_t *address = addresses.buf, page = (uint64_t)sysconf(_SC_PAGESIZE);
    const int64_t *size = sizes.buf, count = addresses.len / 8;
    const int fits = sizes.len == addresses.len;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; fits && i < count;) {
        uint64_t begin = address[i] / page * page;
        uint64_t end = address[i] + (uint64_t)size[i];
        for (i++; i < count && address[i] >= begin && address[i] <= end + NEAR; i++)
            if (address[i] + (uint64_t)size[i] > end) end = address[i] + (uint64_t)size[i];
        for (; begin < end; begin += PIECE) /* a hint: it may fail */
            (void)madvise((void *)(uintptr_t)begin, end - begin < PIECE ? end - begin : PIECE, MADV_WILLNEED);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    if (!fits) return PyErr_Format(PyExc_ValueError, "addresses and sizes do not fit together");
    Py_RETURN_NONE;
}

static void compare_rows(void *argument) {
    Rows *rows = argument;
    int64_t i = 0;
    for (; i < rows->count; i++) {
        if (i + AHEAD < rows->count) prefetch(rows->address[i + AHEAD], rows->prefix_length);
        if (memcmp(row_of(rows, i), rows->prefix, (size_t)rows->prefix_length)) break;
    }
    rows->at = i;
}

static PyObject *find_other(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer addresses, prefix;
    if (!PyArg_ParseTuple(args, "y*y*:find_other", &addresses, &prefix)) return NULL;
    Rows rows = {.address = addresses.buf, .count = prefix.len ? addresses.len / 8 : 0,
                 .prefix = prefix.buf, .prefix_length = prefix.len};
    PyObject *result = run(compare_rows, &rows, 0) ? stopped(&rows) : NULL;
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&prefix);
    return result;
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, "gather(out, addresses, prefix) -> index; see tarshards.kernels._rows_py"},
    {"pack", pack, METH_VARARGS, "pack(out, addresses, sizes); see tarshards.kernels._rows_py"},
    {"copy_bytes", copy_bytes, METH_VARARGS, "copy_bytes(address, size) -> bytes; see tarshards.kernels._rows_py"},
    {"find_other", find_other, METH_VARARGS, "find_other(addresses, prefix) -> index; see tarshards.kernels._rows_py"},
    {"ask", ask, METH_VARARGS, "ask(addresses, sizes); see tarshards.kernels._rows_py"},
    {"parse_integers", parse_integers, METH_VARARGS,
     "parse_integers(out, addresses, sizes) -> index; see tarshards.kernels._rows_py"},
    {"parse_floats", parse_floats, METH_VARARGS, "parse_floats(out, addresses, sizes) -> index; see tarshards.kernels._rows_py"},
    {"parse_image_sizes", parse_image_sizes, METH_VARARGS,
     "parse_image_sizes(out, addresses, sizes) -> index; see tarshards.kernels._rows_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", "Payloads of a batch.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) {
    if (!(guard = import_guard())) return NULL;
    return PyModule_Create(&module);
}

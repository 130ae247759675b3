/* Parse and create tar headers. _tar_py.py is the equivalent in Python, and documents the contracts of scan(), cut(),
 * walk() and plain_header().
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <unistd.h>

#include "_tar.h"

/* Append a found member to members. */
static int append_member(PyObject *members, const Found *found) {
    PyObject *member = PyTuple_New(5);
    if (!member) return -1;
    PyObject *items[5] = {PyUnicode_DecodeUTF8(found->name, found->name_length, "surrogateescape"),
                          PyLong_FromLongLong(found->header), PyLong_FromLongLong(found->start),
                          PyLong_FromLongLong(found->end), PyUnicode_InternFromString(found->kind)};
    int failed = 0;
    for (int i = 0; i < 5; i++) {
        if (!items[i]) failed = 1;
        PyTuple_SetItem(member, i, items[i]);
    }
    failed = failed || PyList_Append(members, member) < 0;
    Py_DECREF(member);
    return failed ? -1 : 0;
}

static PyObject *scan(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer view;
    long long position, zeros_before, limit;
    if (!PyArg_ParseTuple(args, "y*LLL:scan", &view, &position, &zeros_before, &limit)) return NULL;
    PyObject *members = PyList_New(0);
    Scan scan = {position, BLOCK, zeros_before, NULL, 0};
    Found found;
    int failed = !members;
    if (position < 0 || zeros_before < 0 || limit < 0) {
        PyErr_SetString(PyExc_ValueError, "position, zeros and limit must not be negative");
        failed = 1;
    }
    while (!failed && next_member(view.buf, view.len, limit, &scan, &found))
        failed = append_member(members, &found) < 0;
    PyBuffer_Release(&view);
    if (failed) {
        Py_XDECREF(members);
        return NULL;
    }
    return Py_BuildValue("NLLLz", members, (long long)scan.position, (long long)scan.need,
                         (long long)scan.zeros, scan.problem);
}

/* Read an offset of a scanned member; -1 with an exception set if there is none. */
static Py_ssize_t scanned_offset(PyObject *scanned, int item) {
    PyObject *offset = PyTuple_GetItem(scanned, item);
    return offset ? PyLong_AsSsize_t(offset) : -1;
}

/* Make one member; returns a new reference, NULL with an exception set. *arguments* is a tuple of one, for reuse. */
static PyObject *cut_member(const Py_buffer *view, PyObject *scanned, long long base, PyTypeObject *type,
                            PyObject *arguments) {
    PyObject *name = PyTuple_GetItem(scanned, 0);
    Py_ssize_t header = scanned_offset(scanned, 1);
    Py_ssize_t start = scanned_offset(scanned, 2), end = scanned_offset(scanned, 3);
    if (PyErr_Occurred()) return NULL;
    if (start < 0 || start > end || end > view->len) {
        PyErr_SetString(PyExc_ValueError, "a member that lies outside the buffer");
        return NULL;
    }
    PyObject *fields = PyTuple_New(3);
    if (!fields) return NULL;
    Py_INCREF(name);
    PyTuple_SetItem(fields, 0, name);
    PyTuple_SetItem(fields, 1, PyBytes_FromStringAndSize((const char *)view->buf + start, end - start));
    PyTuple_SetItem(fields, 2, PyLong_FromLongLong(base + header));
    PyTuple_SetItem(arguments, 0, fields);
    /* Call tuple.__new__ instead of allocating: since Python 3.14 only it initializes the cached hash. */
    newfunc make = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    return PyErr_Occurred() ? NULL : make(type, arguments, NULL);
}

static PyObject *cut(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer view;
    PyObject *scanned, *type;
    long long base;
    if (!PyArg_ParseTuple(args, "y*O!LO!:cut", &view, &PyList_Type, &scanned, &base, &PyType_Type, &type)) return NULL;
    PyObject *members = NULL, *arguments = PyTuple_New(1);
    if (!PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type))
        PyErr_SetString(PyExc_TypeError, "the type of a member must be a subclass of tuple");
    else if (arguments)
        members = PyList_New(0);
    for (Py_ssize_t i = 0; members && i < PyList_Size(scanned); i++) {
        PyObject *item = PyList_GetItem(scanned, i), *kind = PyTuple_GetItem(item, 4);
        if (kind && PyUnicode_GetLength(kind) > 0) continue;
        PyObject *member = kind ? cut_member(&view, item, base, (PyTypeObject *)type, arguments) : NULL;
        if (!member || PyList_Append(members, member) < 0) Py_CLEAR(members);
        Py_XDECREF(member);
    }
    Py_XDECREF(arguments);
    PyBuffer_Release(&view);
    return members;
}

/* A growing buffer to which little-endian numbers are appended. */
typedef struct {
    char *data;
    size_t used, capacity;
} Bytes;

static int reserve(Bytes *bytes, size_t more) {
    if (bytes->used + more <= bytes->capacity) return 0;
    size_t capacity = 2 * (bytes->used + more) + 4096;
    char *data = PyMem_Realloc(bytes->data, capacity);
    if (!data) {
        PyErr_NoMemory();
        return -1;
    }
    bytes->data = data;
    bytes->capacity = capacity;
    return 0;
}

static int put(Bytes *bytes, int64_t value, int width) {
    if (reserve(bytes, 8) < 0) return -1;
    for (int i = 0; i < 8; i++) bytes->data[bytes->used + (size_t)i] = (char)((uint64_t)value >> 8 * i);
    bytes->used += (size_t)width;
    return 0;
}

#define PLAIN 16 /* the number of fields that are recognized without calling split(), */
#define TEXT 32  /* and the maximum length of one, in bytes */

/* The state of walk(): what it has found, and how it reads. */
typedef struct {
    PyObject *source, *split;
    int descriptor; /* -1: the source is a function */
    Bytes window;   /* the bytes read last */
    PyObject *keys, *fields, *numbers; /* numbers: field -> its position in fields */
    Bytes sample, field, offset, size; /* one number per member */
    Bytes key;                         /* of the current sample */
    Bytes latest;                      /* for each field, the number of samples when it last occurred, 8 bytes */
    Bytes twice;                       /* the numbers of the members whose field occurred in their sample before */
    struct {
        char text[TEXT];
        int64_t length, number;
    } plain[PLAIN];
    int plains;
    int concatenated; /* whether archives may follow the first */
    int64_t archives;
} Walk;

/* Read bytes of the archive into the window; 1 if complete, 0 if the archive is shorter, -1 for an exception. */
static int read_window(Walk *walk, int64_t offset, int64_t size) {
    Bytes *window = &walk->window;
    window->used = 0;
    if (reserve(window, (size_t)size) < 0) return -1;
    if (walk->descriptor < 0) {
        PyObject *read = PyObject_CallFunction(walk->source, "LL", (long long)offset, (long long)size);
        char *data = NULL;
        Py_ssize_t length = 0;
        int failed = !read || PyBytes_AsStringAndSize(read, &data, &length) < 0;
        if (!failed && length == size) memcpy(window->data, data, (size_t)size);
        Py_XDECREF(read);
        window->used = (size_t)length;
        return failed ? -1 : length == size;
    }
    while (window->used < (size_t)size) {
        ssize_t count;
        Py_BEGIN_ALLOW_THREADS
        count = pread(walk->descriptor, window->data + window->used, (size_t)size - window->used,
                      (off_t)(offset + (int64_t)window->used));
        Py_END_ALLOW_THREADS
        if (count < 0 && errno != EINTR) PyErr_SetFromErrno(PyExc_OSError);
        if ((count < 0 && errno != EINTR) || PyErr_CheckSignals() < 0) return -1;
        if (count == 0) return 0;
        if (count > 0) window->used += (size_t)count;
    }
    return 1;
}

static int is_current_key(const Walk *walk, const char *key, int64_t length) {
    if (!PyList_Size(walk->keys) || (size_t)length != walk->key.used) return 0;
    return !length || !memcmp(key, walk->key.data, (size_t)length);
}

/* Append a member; a new key starts a sample. */
static int add_member(Walk *walk, const char *key, int64_t length, int64_t number, int64_t offset, int64_t size) {
    if (!is_current_key(walk, key, length)) {
        PyObject *text = PyUnicode_DecodeUTF8(key, length, "surrogateescape");
        int failed = !text || PyList_Append(walk->keys, text) < 0;
        Py_XDECREF(text);
        walk->key.used = 0;
        if (failed || reserve(&walk->key, (size_t)length) < 0) return -1;
        if (length) memcpy(walk->key.data, key, (size_t)length);
        walk->key.used = (size_t)length;
    }
    int64_t latest, count = PyList_Size(walk->keys);
    memcpy(&latest, walk->latest.data + 8 * number, 8);
    memcpy(walk->latest.data + 8 * number, &count, 8);
    int failed = latest == count && put(&walk->twice, (int64_t)walk->sample.used / 4, 4) < 0;
    failed = failed || put(&walk->sample, count - 1, 4) < 0 || put(&walk->field, number, 2) < 0;
    return failed || put(&walk->offset, offset, 8) < 0 || put(&walk->size, size, 8) < 0 ? -1 : 0;
}

/* Return the position of a field (a str); a new one is appended. */
static int64_t number_of(Walk *walk, PyObject *field) {
    PyObject *known = PyDict_GetItemWithError(walk->numbers, field);
    if (known || PyErr_Occurred()) return known ? PyLong_AsLongLong(known) : -1;
    int64_t number = PyList_Size(walk->fields);
    PyObject *value = PyLong_FromLongLong(number), *raw = PyUnicode_AsEncodedString(field, "utf-8", "surrogateescape");
    char *text;
    Py_ssize_t length;
    if (!value || !raw || PyBytes_AsStringAndSize(raw, &text, &length) < 0 || put(&walk->latest, 0, 8) < 0 ||
        PyDict_SetItem(walk->numbers, field, value) < 0 || PyList_Append(walk->fields, field) < 0)
        number = -1;
    else if (walk->plains < PLAIN && length && length <= TEXT && (length < 2 || memcmp(text + length - 2, "__", 2))) {
        memcpy(walk->plain[walk->plains].text, text, (size_t)length);
        walk->plain[walk->plains].length = length;
        walk->plain[walk->plains++].number = number;
    }
    Py_XDECREF(value);
    Py_XDECREF(raw);
    return number;
}

/* Split a name at the first dot of its last component and return the position of the field, if the field is plain and
   the key cannot be reserved. Otherwise return -1: split() must decide. */
static int64_t split_plain(const Walk *walk, const char *name, int64_t length, int64_t *key_length) {
    const char *end = name + length, *base = end;
    while (base > name && base[-1] != '/') base--;
    const char *dot = memchr(base, '.', (size_t)(end - base));
    if (!dot || dot == base) return -1;
    *key_length = dot - name;
    if (!is_current_key(walk, name, *key_length))
        for (const char *at = name; (at = memchr(at, '_', (size_t)(dot - at))); at++)
            if (at[1] == '_') return -1;
    int64_t left = end - dot - 1;
    for (int i = 0; i < walk->plains; i++)
        if (walk->plain[i].length == left && !memcmp(walk->plain[i].text, dot + 1, (size_t)left))
            return walk->plain[i].number;
    return -1;
}

/* Append a member whose name needs split(), if it has a key. */
static int add_split(Walk *walk, const Found *found, int64_t offset) {
    PyObject *name = PyUnicode_DecodeUTF8(found->name, found->name_length, "surrogateescape");
    PyObject *parts = name ? PyObject_CallFunctionObjArgs(walk->split, name, NULL) : NULL, *key = NULL, *field = NULL;
    int failed = !parts;
    if (parts && parts != Py_None) {
        PyObject *raw = NULL;
        char *text;
        Py_ssize_t length;
        int64_t number;
        if (!PyTuple_Check(parts)) PyErr_SetString(PyExc_TypeError, "split() must return a tuple or None");
        failed = PyErr_Occurred() || !PyArg_ParseTuple(parts, "UU:split", &key, &field) ||
                 (number = number_of(walk, field)) < 0 ||
                 !(raw = PyUnicode_AsEncodedString(key, "utf-8", "surrogateescape")) ||
                 PyBytes_AsStringAndSize(raw, &text, &length) < 0 ||
                 add_member(walk, text, length, number, offset, found->end - found->start) < 0;
        Py_XDECREF(raw);
    }
    Py_XDECREF(name);
    Py_XDECREF(parts);
    return failed ? -1 : 0;
}

/* Find the members; 1 if the archive is valid, 0 if it is not, -1 for an exception. */
static int walk_through(Walk *walk, int64_t size, int64_t limit, int64_t least, int64_t most, int64_t large) {
    int64_t position = 0, ahead = least, zeros_before = 0;
    int came;
    Found found;
    while (position < size) {
        if (ahead > size - position) ahead = size - position;
        if ((came = read_window(walk, position, ahead)) < 1) return came;
        Scan scan = {0, BLOCK, zeros_before, NULL, 0};
        int64_t count = 0, number, key_length;
        do {
            for (; next_member(walk->window.data, ahead, limit, &scan, &found); count++) {
                if (*found.kind) continue;
                int64_t offset = position + found.start;
                number = split_plain(walk, found.name, found.name_length, &key_length);
                if ((number < 0 ? add_split(walk, &found, offset)
                                : add_member(walk, found.name, key_length, number, offset, found.end - found.start)) < 0)
                    return -1;
            }
        } while (walk->concatenated && pass_end(&scan) && ++walk->archives);
        if (scan.problem) return 0;
        zeros_before = scan.zeros;
        position += scan.position;
        if (scan.position > large * count) {
            ahead = least;
            continue;
        }
        if (position + scan.need > size) break;
        ahead = 2 * ahead < most ? 2 * ahead : most;
        if (ahead < scan.need) ahead = scan.need;
    }
    if (position > size || !zeros_before) return 0;
    int64_t padding = zeros_before * BLOCK + size - position;
    if (padding == size ? size > EMPTY : padding > MAX_END && !walk->concatenated) return 0;
    if ((came = read_window(walk, position, size - position)) < 1) return came;
    for (size_t i = 0; i < walk->window.used; i++)
        if (walk->window.data[i]) return 0;
    return 1;
}

static PyObject *walk(PyObject *self, PyObject *args) {
    (void)self;
    Walk walk = {.descriptor = -1, .archives = 1};
    long long size, limit, least, most, large;
    if (!PyArg_ParseTuple(args, "OL(LLL)LO|p:walk", &walk.source, &size, &least, &most, &large, &limit, &walk.split,
                          &walk.concatenated))
        return NULL;
    if (PyLong_Check(walk.source) && (walk.descriptor = (int)PyLong_AsLong(walk.source)) < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a descriptor must not be negative");
        return NULL;
    }
    if (size < 0 || limit < 0 || least < 1 || large < 0 || large > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "sizes and limits must not be negative, and reads must not be empty");
        return NULL;
    }
    walk.keys = PyList_New(0);
    walk.fields = PyList_New(0);
    walk.numbers = PyDict_New();
    PyObject *result = NULL;
    Bytes *arrays[] = {&walk.sample, &walk.field,  &walk.offset, &walk.size,
                       &walk.key,    &walk.latest, &walk.twice,  &walk.window};
    int sound = walk.keys && walk.fields && walk.numbers ? walk_through(&walk, size, limit, least, most, large) : -1;
    if (sound > 0)
        result = Py_BuildValue("OO(NNNNN)L", walk.keys, walk.fields,
                               PyBytes_FromStringAndSize(walk.sample.data, (Py_ssize_t)walk.sample.used),
                               PyBytes_FromStringAndSize(walk.field.data, (Py_ssize_t)walk.field.used),
                               PyBytes_FromStringAndSize(walk.offset.data, (Py_ssize_t)walk.offset.used),
                               PyBytes_FromStringAndSize(walk.size.data, (Py_ssize_t)walk.size.used),
                               PyBytes_FromStringAndSize(walk.twice.data, (Py_ssize_t)walk.twice.used),
                               (long long)walk.archives);
    else if (!sound)
        result = Py_NewRef(Py_None);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) PyMem_Free(arrays[i]->data);
    Py_XDECREF(walk.keys);
    Py_XDECREF(walk.fields);
    Py_XDECREF(walk.numbers);
    return result;
}

/* Write a number in octal digits before *end*. */
static void put_octal(char *end, int64_t value, int digits) {
    for (; digits--; value >>= 3) *--end = (char)('0' + (value & 7));
}

static PyObject *plain_header(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2 || !PyUnicode_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "plain_header takes a name (str) and a size");
    long long size = PyLong_AsLongLong(args[1]);
    if (size < 0) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a size must not be negative");
    Py_ssize_t length = PyUnicode_GetLength(args[0]), bytes;
    if (length > 100 || size >> 33) return Py_NewRef(Py_None);
    const char *name = PyUnicode_AsUTF8AndSize(args[0], &bytes);
    if (!name && !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return NULL;
    PyErr_Clear();
    if (!name || bytes != length) return Py_NewRef(Py_None); /* not ASCII */
    PyObject *header = PyBytes_FromStringAndSize(NULL, BLOCK);
    if (!header) return NULL;
    char *block = PyBytes_AsString(header);
    memset(block, 0, BLOCK);
    memcpy(block, name, (size_t)length);
    memcpy(block + 100, "0000644\0" "0000000\0" "0000000\0", 24); /* mode, owner, group */
    put_octal(block + 135, size, 11);
    memcpy(block + 136, "00000000000\0" "        0", 21); /* time, no checksum yet, a regular file */
    memcpy(block + 257, "ustar\0" "00", 8);
    put_octal(block + 154, sum_bytes((const unsigned char *)block), 6);
    block[154] = 0;
    return header;
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_VARARGS,
     "scan(buffer, position, zeros, limit) -> (members, position, need, zeros, problem); see tarshards.tar._tar_py"},
    {"cut", cut, METH_VARARGS, "cut(buffer, scanned, base, type) -> members; see tarshards.tar._tar_py"},
    {"walk", walk, METH_VARARGS,
     "walk(source, size, reads, limit, split, concatenated=False) -> (keys, fields, arrays, archives) or None; see "
     "tarshards.tar._tar_py"},
    {"plain_header", (PyCFunction)(void (*)(void))plain_header, METH_FASTCALL,
     "plain_header(name, size) -> bytes or None; see tarshards.tar._tar_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tar", "Parse and create tar headers.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tar(void) { return PyModule_Create(&module); }

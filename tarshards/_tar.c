/* Parse tar headers out of a buffer: the native twin of _tar_py.py, where the contracts of scan() and cut() are written.
 *
 * Formats: POSIX.1-2017 pax "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
 */
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 512
#define MAX_EXTENDED (1 << 20) /* bytes of the long names and pax headers before one member */
#define MAX_SIZE (INT64_MAX / 4)

static const char zeros[BLOCK];
static const char continued[] = "continued members of multi-volume archives are not supported";

/* What the extended headers before a member say of it. */
typedef struct {
    const char *path;
    Py_ssize_t path_length; /* -1: nothing said */
    int64_t size;           /* -1: nothing said */
} Extended;

static int64_t round_up(int64_t size) { return (size + BLOCK - 1) & ~(int64_t)(BLOCK - 1); }

static Py_ssize_t bounded_length(const char *text, Py_ssize_t limit) {
    const char *end = memchr(text, 0, (size_t)limit);
    return end ? end - text : limit;
}

/* Read an octal field ended by a NUL, a space or the field's end; -1 where it is none. */
static int64_t parse_octal(const char *field, int width) {
    int i = 0;
    int64_t value = 0;
    while (i < width && field[i] == ' ') i++;
    if (i == width || field[i] < '0' || field[i] > '7') return -1;
    for (; i < width && field[i] >= '0' && field[i] <= '7'; i++) value = value * 8 + (field[i] - '0');
    return i == width || field[i] == 0 || field[i] == ' ' ? value : -1;
}

/* Read a size: octal, or base-256 where the first bit is set; -1 where it is none or too large. */
static int64_t parse_size(const char *field) {
    if (!((unsigned char)field[0] & 0x80)) return parse_octal(field, 12);
    if ((unsigned char)field[0] != 0x80) return -1;
    uint64_t value = 0;
    for (int i = 1; i < 12; i++) {
        if (value > (uint64_t)MAX_SIZE >> 8) return -1;
        value = value << 8 | (unsigned char)field[i];
    }
    return value <= (uint64_t)MAX_SIZE ? (int64_t)value : -1;
}

/* Sum the bytes of a block, eight at a time: 64 words of at most 2 x 255 a lane stay below 2^16. */
static int64_t sum_bytes(const unsigned char *block) {
    const uint64_t even = 0x00ff00ff00ff00ffULL;
    uint64_t lanes = 0, word;
    for (int i = 0; i < BLOCK; i += 8) {
        memcpy(&word, block + i, 8);
        lanes += (word & even) + (word >> 8 & even);
    }
    return (int64_t)((lanes & 0xffff) + (lanes >> 16 & 0xffff) + (lanes >> 32 & 0xffff) + (lanes >> 48));
}

/* Compare the stored checksum with the sum of the header, its own field counted as spaces; some old tars summed signed
   bytes, each of which from 128 up counts 256 less. */
static int checksum_is_right(const unsigned char *block) {
    int64_t stored = parse_octal((const char *)block + 148, 8);
    int64_t sum = sum_bytes(block), high = 0;
    if (stored < 0) return 0; /* else a signed sum of -1 would look right where there is no number */
    for (int i = 148; i < 156; i++) sum += ' ' - block[i];
    if (stored == sum) return 1;
    for (int i = 0; i < BLOCK; i++) high += i < 148 || i >= 156 ? block[i] >> 7 : 0;
    return stored == sum - 256 * high;
}

/* Read the records of a pax header; return what is wrong with them, or NULL. */
static const char *parse_pax(const char *data, Py_ssize_t length, int global, Extended *extended) {
    Py_ssize_t position = 0;
    while (position < length) {
        int64_t record = 0;
        Py_ssize_t i = position;
        for (; i < length && data[i] >= '0' && data[i] <= '9' && i - position < 7; i++)
            record = record * 10 + (data[i] - '0');
        if (i == position || i >= length || data[i] != ' ' || record <= i - position + 1 ||
            record > length - position || data[position + record - 1] != '\n')
            return "bad pax header";
        const char *key = data + i + 1;
        Py_ssize_t left = position + record - 1 - (i + 1);
        const char *equals = memchr(key, '=', (size_t)left);
        if (!equals) return "bad pax header";
        Py_ssize_t key_length = equals - key;
        const char *value = equals + 1;
        Py_ssize_t value_length = left - key_length - 1;
        int is_path = key_length == 4 && !memcmp(key, "path", 4);
        int is_size = key_length == 4 && !memcmp(key, "size", 4);
        if (key_length >= 10 && !memcmp(key, "GNU.sparse", 10)) return "sparse members are not supported";
        if (key_length == 17 && !memcmp(key, "GNU.volume.offset", 17)) return continued;
        if (global && (is_path || is_size)) return "a global pax header that sets path or size is not supported";
        if (is_path) {
            if (memchr(value, 0, (size_t)value_length)) return "bad pax header";
            extended->path = value;
            extended->path_length = value_length;
        }
        if (is_size) {
            int64_t size = 0;
            if (value_length == 0 || value_length > 18) return "bad pax header";
            for (Py_ssize_t j = 0; j < value_length; j++) {
                if (value[j] < '0' || value[j] > '9') return "bad pax header";
                size = size * 10 + (value[j] - '0');
            }
            extended->size = size;
        }
        position += record;
    }
    return NULL;
}

/* The word for a member that holds no sample's data; "" for a regular file, NULL for an unknown type. */
static const char *kind_of(char type, const char *name, Py_ssize_t length) {
    switch (type) {
    case 0: case '0': return length && name[length - 1] == '/' ? "directory" : "";
    case '7': return "";
    case '1': return "hard link";
    case '2': return "symbolic link";
    case '3': return "character device";
    case '4': return "block device";
    case '5': case 'D': return "directory";
    case '6': return "fifo";
    case 'V': return "volume label";
    default: return NULL;
    }
}

/* Append (name, header, start, end, kind) to members. */
static int append_member(PyObject *members, const char *name, Py_ssize_t name_length, int64_t header, int64_t start,
                         int64_t end, const char *kind) {
    PyObject *member = PyTuple_New(5);
    if (!member) return -1;
    PyObject *items[5] = {PyUnicode_DecodeUTF8(name, name_length, "surrogateescape"), PyLong_FromLongLong(header),
                          PyLong_FromLongLong(start), PyLong_FromLongLong(end), PyUnicode_InternFromString(kind)};
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
    long long position, limit;
    int ended;
    if (!PyArg_ParseTuple(args, "y*LpL:scan", &view, &position, &ended, &limit)) return NULL;
    PyObject *members = PyList_New(0);
    const char *data = view.buf;
    const int64_t length = view.len;
    const char *problem = NULL;
    int64_t need = BLOCK;     /* bytes from position that the next step must have */
    int64_t at = position;    /* the block in hand; beyond position inside a chain of extended headers */
    Extended extended = {NULL, -1, -1};
    if (!members) goto failed;
    if (position < 0 || limit < 0) {
        PyErr_SetString(PyExc_ValueError, "position and limit must not be negative");
        goto failed;
    }

    while (at <= length - BLOCK) {
        const char *block = data + at;
        if (block[0] == 0 && !memcmp(block, zeros, BLOCK)) {
            if (at != position) {
                problem = "an extended header without its member";
                break;
            }
            ended = 1;
            position = at += BLOCK;
            continue;
        }
        if (!checksum_is_right((const unsigned char *)block)) {
            problem = ended ? "junk after the end of the archive" : "bad header checksum";
            break;
        }
        char type = block[156];
        int64_t size = parse_size(block + 124);
        if (type == 'x' || type == 'X' || type == 'g' || type == 'L' || type == 'K') {
            if (size < 0 || size > MAX_EXTENDED - (at - position)) {
                problem = "an extended header of a bad size";
                break;
            }
            int64_t next = at + BLOCK + round_up(size);
            if (next > length) {
                need = next - position;
                break;
            }
            const char *body = block + BLOCK;
            if (type == 'L' && extended.path_length < 0) {
                extended.path = body;
                extended.path_length = bounded_length(body, (Py_ssize_t)size);
            } else if (type != 'L' && type != 'K') {
                problem = parse_pax(body, (Py_ssize_t)size, type == 'g', &extended);
                if (problem) break;
            }
            ended = 0;
            at = next;
            if (type == 'g' && extended.path_length < 0 && extended.size < 0) position = at;
            need = at - position + BLOCK;
            continue;
        }
        if (type == 'S') problem = "sparse members are not supported";
        if (type == 'M') problem = continued;
        if (problem) break;

        char joined[257];
        const char *name = block;
        Py_ssize_t name_length = bounded_length(block, 100);
        if (extended.path_length >= 0) {
            name = extended.path;
            name_length = extended.path_length;
        } else if (!memcmp(block + 257, "ustar", 6) && block[345]) {
            Py_ssize_t prefix_length = bounded_length(block + 345, 155);
            memcpy(joined, block + 345, (size_t)prefix_length);
            joined[prefix_length] = '/';
            memcpy(joined + prefix_length + 1, block, (size_t)name_length);
            name = joined;
            name_length += prefix_length + 1;
        }
        const char *kind = kind_of(type, name, name_length);
        int has_data = type == 0 || type == '0' || type == '7' || type == 'D';
        if (extended.size >= 0 && has_data) size = extended.size;
        if (!has_data) size = 0;
        if (!kind) problem = "a member of an unknown type";
        else if (name_length == 0) problem = "a member without a name";
        else if (size < 0) problem = "a size that is no number";
        else if (size > limit) problem = "a member larger than the limit";
        if (problem) break;
        int64_t start = at + BLOCK;
        if (append_member(members, name, name_length, position, start, start + size, kind) < 0) goto failed;
        ended = 0;
        extended = (Extended){NULL, -1, -1};
        position = at = start + round_up(size);
        need = BLOCK;
    }
    PyBuffer_Release(&view);
    if (problem) position = at; /* the block that is wrong, rather than the first of its chain */
    return Py_BuildValue("NLLiz", members, (long long)position, (long long)need, ended, problem);

failed:
    Py_XDECREF(members);
    PyBuffer_Release(&view);
    return NULL;
}

/* Read an offset out of a scanned member; -1 with an exception set where there is none. */
static Py_ssize_t scanned_offset(PyObject *scanned, int item) {
    PyObject *offset = PyTuple_GetItem(scanned, item);
    return offset ? PyLong_AsSsize_t(offset) : -1;
}

/* Make one member; returns a new reference, NULL with an exception set. *arguments* is a tuple of one, for reuse. */
static PyObject *cut_member(const Py_buffer *view, PyObject *scanned, long long base, PyTypeObject *type,
                            PyObject *arguments) {
    PyObject *name = PyTuple_GetItem(scanned, 0);
    Py_ssize_t header = scanned_offset(scanned, 1), start = scanned_offset(scanned, 2), end = scanned_offset(scanned, 3);
    if (PyErr_Occurred()) return NULL;
    if (start < 0 || start > end || end > view->len) {
        PyErr_SetString(PyExc_ValueError, "a member that does not lie in the buffer");
        return NULL;
    }
    PyObject *fields = PyTuple_New(3);
    if (!fields) return NULL;
    Py_INCREF(name);
    PyTuple_SetItem(fields, 0, name);
    PyTuple_SetItem(fields, 1, PyBytes_FromStringAndSize((const char *)view->buf + start, end - start));
    PyTuple_SetItem(fields, 2, PyLong_FromLongLong(base + header));
    PyTuple_SetItem(arguments, 0, fields);
    /* tuple.__new__ rather than an allocation of ours: since 3.14 only it sets up the hash that a tuple keeps. */
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
        PyErr_SetString(PyExc_TypeError, "the type of a member must be a tuple's");
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

static PyMethodDef methods[] = {
    {"scan", scan, METH_VARARGS,
     "scan(buffer, position, ended, limit) -> (members, position, need, ended, problem); see tarshards._tar_py"},
    {"cut", cut, METH_VARARGS, "cut(buffer, scanned, base, type) -> members; see tarshards._tar_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tar", "Tar headers out of a buffer.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tar(void) { return PyModule_Create(&module); }

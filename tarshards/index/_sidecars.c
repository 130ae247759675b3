/* What many sidecars say, and which there are, without the GIL: the native twin of _sidecars_py.py, where the contracts
 * are written.
 */
#include <Python.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEAD 256 /* bytes; what is read of them ends before 200 */
#define BLOCK 512

typedef struct {
    const unsigned char *at, *end;
} Cursor;

static int skip(Cursor *cursor, const char *text) {
    size_t length = strlen(text);
    if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, text, length)) return 0;
    cursor->at += length;
    return 1;
}

/* Read *bytes* of a big-endian number; 0 where they are not there, or too many for 63 bits. */
static int read_number(Cursor *cursor, int bytes, int64_t *number) {
    uint64_t value = 0;
    if (cursor->end - cursor->at < bytes) return 0;
    for (; bytes; bytes--) value = value << 8 | *cursor->at++;
    *number = (int64_t)value;
    return value >> 63 == 0;
}

static int read_unsigned(Cursor *cursor, int64_t *number) {
    if (cursor->at == cursor->end) return 0;
    int type = *cursor->at++;
    *number = type;
    return type < 0x80 || (type >= 0xcc && type <= 0xcf && read_number(cursor, 1 << (type - 0xcc), number));
}

static int read_count(Cursor *cursor, int few, int many, int64_t *number) {
    if (cursor->at == cursor->end) return 0;
    int type = *cursor->at++;
    *number = type & 15;
    return (type & 0xf0) == few || ((type & 0xfe) == many && read_number(cursor, type & 1 ? 4 : 2, number));
}

/* Read the number of samples, the size of the shard, and whether names were split at their last dot. */
static int parse(Cursor *cursor, int64_t *found) {
    int64_t entries, number, size = -1;
    found[2] = 0;
    if (!read_count(cursor, 0x80, 0xde, &entries) || !skip(cursor, "\xa6" "format\xaf" "tarshards-index\xa7version")) return 0;
    if (!skip(cursor, "\1") && !skip(cursor, "\2")) return 0;
    if (!skip(cursor, "\xa5shard") || !read_count(cursor, 0x80, 0xde, &entries)) return 0;
    for (; entries; entries--) {
        if (skip(cursor, "\xa4size")) {
            if (!read_unsigned(cursor, &size)) return 0;
        } else if (skip(cursor, "\xa6" "digest\xc4\x10")) {
            if (cursor->end - cursor->at < 16) return 0;
            cursor->at += 16;
        } else if (skip(cursor, "\xa5split\xa4last")) {
            found[2] = 1;
        } else if (skip(cursor, "\xab" "fingerprint") || skip(cursor, "\xa8" "archives") || skip(cursor, "\xa3" "end")) {
            if (!read_unsigned(cursor, &number)) return 0;
        } else {
            return 0;
        }
    }
    if (!skip(cursor, "\xa4keys") || !read_count(cursor, 0x90, 0xdc, &found[0])) return 0;
    found[1] = size;
    return size >= 0 && found[0] <= size / BLOCK;
}

/* Read what the index at *sidecar* says of *shard*, which must have the size that it says. */
static int read_head(const char *shard, const char *sidecar, int64_t *found) {
    unsigned char head[HEAD];
    struct stat status;
    int file = open(sidecar, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = pread(file, head, HEAD, 0);
    close(file);
    Cursor cursor = {head, head + (length < 0 ? 0 : length)};
    return parse(&cursor, found) && stat(shard, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == found[1];
}

/* Count names with NULs between them. */
static int64_t count_names(PyObject *names) {
    const char *at = PyBytes_AsString(names), *end = at + PyBytes_Size(names); /* where a NUL is, too */
    int64_t count = 1;
    for (; (at += strlen(at)) < end; at++) count++;
    return count;
}

static PyObject *read_heads(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *shards, *sidecars;
    if (!PyArg_ParseTuple(args, "SS:read_heads", &shards, &sidecars)) return NULL;
    int64_t count = count_names(sidecars);
    if (count_names(shards) != count) return PyErr_Format(PyExc_ValueError, "not as many shards as sidecars");
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * 24);
    if (!result) return NULL;
    int64_t *found = (int64_t *)(void *)PyBytes_AsString(result);
    const char *shard = PyBytes_AsString(shards), *sidecar = PyBytes_AsString(sidecars);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < count; i++, found += 3) {
        if (!read_head(shard, sidecar, found)) found[0] = found[1] = found[2] = -1;
        shard += strlen(shard) + 1;
        sidecar += strlen(sidecar) + 1;
    }
    Py_END_ALLOW_THREADS
    return result;
}

/* A hash table of names: in each slot 32 bits of a name's hash, and its number plus one. */
typedef struct {
    const char **name;
    uint32_t *same; /* the first with this name */
    uint64_t *slot, mask;
} Names;

static uint64_t *find(Names *names, const char *name, uint64_t *tag) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (const char *at = name; *at; at++) hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    *tag = hash >> 32 << 32;
    for (hash ^= hash >> 32;; hash++) {
        uint64_t *slot = &names->slot[hash & names->mask];
        if (!*slot || (*slot >> 32 << 32 == *tag && !strcmp(names->name[(uint32_t)*slot - 1], name))) return slot;
    }
}

static int mark_listed(DIR *folder, Names *names, const char *text, int64_t count, char *flags) {
    uint64_t tag;
    for (int64_t i = 0; i < count; i++, text += strlen(text) + 1) {
        names->name[i] = text;
        uint64_t *slot = find(names, text, &tag);
        if (!*slot) *slot = tag | (uint64_t)(i + 1);
        names->same[i] = (uint32_t)*slot - 1;
    }
    errno = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        uint64_t *slot = find(names, entry->d_name, &tag);
        if (*slot) flags[(uint32_t)*slot - 1] = 1;
    }
    for (int64_t i = 0; i < count; i++) flags[i] = flags[names->same[i]];
    return errno == 0;
}

static PyObject *are_listed(PyObject *self, PyObject *args) {
    (void)self;
    const char *path;
    PyObject *text;
    if (!PyArg_ParseTuple(args, "yS:are_listed", &path, &text)) return NULL;
    int64_t count = count_names(text), slots = 2;
    while (slots < 2 * count) slots *= 2;
    Names names = {.name = malloc((size_t)count * sizeof *names.name),
                   .same = malloc((size_t)count * sizeof *names.same),
                   .slot = calloc((size_t)slots, sizeof *names.slot),
                   .mask = (uint64_t)slots - 1};
    PyObject *result = PyBytes_FromStringAndSize(NULL, count);
    DIR *folder = NULL;
    int is_read = 0;
    if (!names.name || !names.same || !names.slot || count >= UINT32_MAX) {
        PyErr_NoMemory();
    } else if (result) {
        char *flags = PyBytes_AsString(result);
        memset(flags, 0, (size_t)count);
        Py_BEGIN_ALLOW_THREADS
        if ((folder = opendir(path))) {
            is_read = mark_listed(folder, &names, PyBytes_AsString(text), count, flags);
            closedir(folder);
        }
        Py_END_ALLOW_THREADS
        if (!is_read) PyErr_SetFromErrno(PyExc_OSError);
    }
    free(names.name);
    free(names.same);
    free(names.slot);
    if (!is_read) Py_CLEAR(result);
    return result;
}

static PyMethodDef methods[] = {
    {"read_heads", read_heads, METH_VARARGS, "read_heads(shards, sidecars) -> bytes; see tarshards.index._sidecars_py"},
    {"are_listed", are_listed, METH_VARARGS, "are_listed(folder, names) -> bytes; see tarshards.index._sidecars_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sidecars", "Sidecars of many shards.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sidecars(void) { return PyModule_Create(&module); }

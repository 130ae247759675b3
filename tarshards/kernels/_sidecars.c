/* The beginnings of many sidecars, and which of them exist, without the GIL: the native twin of _sidecars_py.py, which
 * documents the functions.
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

#define HEAD 256 /* bytes to read; the entries in them end before 200 */
#define BLOCK 512
#define INDEX ".index"
#define LONGEST 4096 /* the longest name with INDEX, in bytes */

#ifdef O_PATH
#define FOLDER (O_PATH | O_DIRECTORY | O_CLOEXEC) /* also one that may not be listed */
#else
#define FOLDER (O_RDONLY | O_DIRECTORY | O_CLOEXEC)
#endif

typedef struct {
    const unsigned char *at, *end;
} Cursor;

/* Advance past *text*; return 0 if it is not next. */
static int skip(Cursor *cursor, const char *text) {
    size_t length = strlen(text);
    if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, text, length)) return 0;
    cursor->at += length;
    return 1;
}

/* Read a big-endian number of *bytes* bytes; return 0 if they are missing, or the number needs more than 63 bits. */
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

/* Read three numbers: the samples, the size of the shard in bytes, and 1 if names were split at their last dot.
 * Return 0 if this is not the beginning of an index. */
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

/* Parse the index, in the folder *indexes*, of a shard in *folder*; return -1 if there is none, and 0 if reading it
 * fails, or the shard has another size than the index says. Names are relative to open folders, so the system need not
 * look up whole paths. */
static int read_head(int folder, int indexes, const char *name, size_t length, int64_t *found) {
    unsigned char head[HEAD];
    char sidecar[LONGEST];
    struct stat status;
    if (length + sizeof INDEX > LONGEST) return 0;
    memcpy(sidecar, name, length);
    memcpy(sidecar + length, INDEX, sizeof INDEX);
    int file;
    ssize_t size;
    while ((file = openat(indexes, sidecar, O_RDONLY | O_CLOEXEC)) < 0 && errno == EINTR);
    if (file < 0) return errno == ENOENT ? -1 : 0;
    while ((size = pread(file, head, HEAD, 0)) < 0 && errno == EINTR);
    close(file);
    Cursor cursor = {head, head + (size < 0 ? 0 : size)};
    if (!parse(&cursor, found) || fstatat(folder, name, &status, 0) != 0) return 0;
    return S_ISREG(status.st_mode) && status.st_size == found[1];
}

/* Count the names in a text with NULs between them. */
static int64_t count_names(PyObject *names) {
    const char *at = PyBytes_AsString(names), *end = at + PyBytes_Size(names); /* bytes objects also end in a NUL */
    int64_t count = 1;
    for (; (at += strlen(at)) < end; at++) count++;
    return count;
}

static PyObject *read_heads(PyObject *self, PyObject *args) {
    (void)self;
    const char *folder, *indexes;
    PyObject *paths;
    if (!PyArg_ParseTuple(args, "yyS:read_heads", &folder, &indexes, &paths)) return NULL;
    int64_t count = count_names(paths);
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * 24);
    if (!result) return NULL;
    int64_t *found = (int64_t *)(void *)PyBytes_AsString(result);
    const char *path = PyBytes_AsString(paths);
    Py_BEGIN_ALLOW_THREADS
    size_t before = strlen(folder);
    int shards, sidecars;
    while ((shards = open(*folder ? folder : ".", FOLDER)) < 0 && errno == EINTR);
    while ((sidecars = open(*indexes ? indexes : ".", FOLDER)) < 0 && errno == EINTR);
    int none = sidecars < 0 && errno == ENOENT;
    for (int64_t i = 0; i < count; i++, found += 3) {
        size_t length = strlen(path);
        size_t begin = length < before ? length : before;
        int outcome = none ? -1 : read_head(shards, sidecars, path + begin, length - begin, found);
        if (outcome <= 0) found[0] = outcome ? -1 : -2, found[1] = found[2] = -1;
        path += length + 1;
    }
    if (shards >= 0) close(shards);
    if (sidecars >= 0) close(sidecars);
    Py_END_ALLOW_THREADS
    return result;
}

/* A hash table of names: each slot has 32 bits of a name's hash, and the number of the name plus one; or 0. */
typedef struct {
    const char **name;
    uint32_t *same; /* for each name, the number of the first equal one */
    uint64_t *slot, mask;
} Names;

/* Return the slot of *name*, which is 0 if the table lacks it; set *tag* to the hash bits for the slot. */
static uint64_t *find(Names *names, const char *name, uint64_t *tag) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (const char *at = name; *at; at++) hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    *tag = hash >> 32 << 32;
    for (hash ^= hash >> 32;; hash++) {
        uint64_t *slot = &names->slot[hash & names->mask];
        if (!*slot || (*slot >> 32 << 32 == *tag && !strcmp(names->name[(uint32_t)*slot - 1], name))) return slot;
    }
}

/* Set the flag of each of *count* names in *text* that is in the folder; return 0 if reading the folder fails. */
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
    {"read_heads", read_heads, METH_VARARGS, "read_heads(folder, indexes, shards) -> bytes; see tarshards.kernels._sidecars_py"},
    {"are_listed", are_listed, METH_VARARGS, "are_listed(folder, names) -> bytes; see tarshards.kernels._sidecars_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sidecars", "Sidecars of many shards.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sidecars(void) { return PyModule_Create(&module); }

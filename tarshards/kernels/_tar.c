/* Parse and create tar headers, and group members. _tar_py.py is the equivalent in Python, and documents the contracts of
 * scan(), cut(), walk(), Grouper, plain_header() and plain_members().
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <unistd.h>

#include "_tar.h"

#define NAME 100  /* bytes of a name in a header */

/* Return a found member as a tuple. */
static PyObject *scanned_member(const Found *found) {
    PyObject *member = PyTuple_New(5);
    if (!member) return NULL;
    PyObject *items[5] = {PyUnicode_DecodeUTF8(found->name, found->name_length, "surrogateescape"),
                          PyLong_FromLongLong(found->header), PyLong_FromLongLong(found->start),
                          PyLong_FromLongLong(found->end), PyUnicode_InternFromString(found->kind)};
    int failed = 0;
    for (int i = 0; i < 5; i++) {
        if (!items[i]) failed = 1;
        PyTuple_SetItem(member, i, items[i]);
    }
    if (failed) Py_CLEAR(member);
    return member;
}

/* Append an item, a new reference or NULL, and release it. */
static int append(PyObject *list, PyObject *item) {
    int failed = !item || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

static PyObject *scan(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer view;
    long long position, zeros_before, limit;
    int stops = 0;
    if (!PyArg_ParseTuple(args, "y*LLL|p:scan", &view, &position, &zeros_before, &limit, &stops)) return NULL;
    PyObject *members = PyList_New(0);
    Scan scan = {position, BLOCK, zeros_before, NULL, 0};
    Found found = {.elsewhere = 0};
    int failed = !members;
    if (position < 0 || zeros_before < 0 || limit < 0) {
        PyErr_SetString(PyExc_ValueError, "position, zeros and limit must not be negative");
        failed = 1;
    }
    while (!failed && !(stops && found.elsewhere) && next_member(view.buf, view.len, limit, &scan, &found))
        failed = append(members, scanned_member(&found)) < 0;
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
        if (append(members, member) < 0) Py_CLEAR(members);
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

#define PLAIN 16 /* the number of fields recognized without calling split(), */
#define TEXT 32  /* and the maximum length of one, in bytes */

/* What earlier names have shown: it splits most names without calling split(). */
typedef struct {
    Bytes key; /* of the current sample, as written in the names */
    int is_known;
    struct {
        char text[TEXT];
        int64_t length, number;
    } plain[PLAIN]; /* fields, and the number of each */
    int plains;
} Names;

static int is_current_key(const Names *names, const char *key, int64_t length) {
    if (!names->is_known || (size_t)length != names->key.used) return 0;
    return !length || !memcmp(key, names->key.data, (size_t)length);
}

static int note_key(Names *names, const char *key, int64_t length) {
    names->key.used = 0;
    if (reserve(&names->key, (size_t)length) < 0) return -1;
    if (length) memcpy(names->key.data, key, (size_t)length);
    names->key.used = (size_t)length;
    names->is_known = 1;
    return 0;
}

/* Return the number of a plain field, -1 if it is unknown. */
static int64_t find_field(const Names *names, const char *text, int64_t length) {
    for (int i = 0; i < names->plains; i++)
        if (names->plain[i].length == length && !memcmp(names->plain[i].text, text, (size_t)length))
            return names->plain[i].number;
    return -1;
}

/* Record the number of a field if names ending with *text* need no call of split(); 0 if they do. */
static int note_field(Names *names, const char *text, int64_t length, int64_t number) {
    if (names->plains == PLAIN || !length || length > TEXT || find_field(names, text, length) >= 0) return 0;
    if (length >= 2 && !memcmp(text + length - 2, "__", 2)) return 0;
    memcpy(names->plain[names->plains].text, text, (size_t)length);
    names->plain[names->plains].length = length;
    names->plain[names->plains++].number = number;
    return 1;
}

/* Return the length of the key in a name: up to the first dot of its last component; -1 if there is none. */
static int64_t key_length_of(const char *name, int64_t length) {
    const char *end = name + length, *base = end;
    while (base > name && base[-1] != '/') base--;
    const char *dot = memchr(base, '.', (size_t)(end - base));
    return dot && dot != base ? dot - name : -1;
}

/* Split a name and return the number of the field, if the field is plain and the key cannot be reserved. Otherwise return
   -1: split() must decide. */
static int64_t split_plain(const Names *names, const char *name, int64_t length, int64_t *key_length) {
    if ((*key_length = key_length_of(name, length)) < 0) return -1;
    const char *dot = name + *key_length;
    if (!is_current_key(names, name, *key_length))
        for (const char *at = name; (at = memchr(at, '_', (size_t)(dot - at))); at++)
            if (at[1] == '_') return -1;
    return find_field(names, dot + 1, length - *key_length - 1);
}

static PyObject *key_entry, *url_entry; /* "__key__", "__url__": the entries of samples that are not fields */

/* The state of walk(): its results, and how it reads. */
typedef struct {
    PyObject *source, *split;
    int descriptor; /* -1: the source is a function */
    Bytes window;   /* the bytes read last */
    PyObject *keys, *fields, *numbers; /* numbers: field -> its position in fields */
    Bytes sample, field, offset, size; /* one number per member */
    Bytes latest; /* for each field, the number of samples when it last occurred, 8 bytes; -1 if all samples have it */
    Bytes twice;                       /* the numbers of the members whose field their sample has already */
    Bytes elsewhere;                   /* of links and sparse members: the number, 4 bytes, and the first header, 8 bytes */
    Names names;
    int concatenated; /* whether archives may follow the first */
    int64_t archives, end; /* end: the offset of the zeros at the end of the last archive */
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

/* Append a member; a new key starts a sample. */
static int add_member(Walk *walk, const char *key, int64_t length, int64_t number, int64_t offset, int64_t size) {
    if (!is_current_key(&walk->names, key, length)) {
        if (append(walk->keys, PyUnicode_DecodeUTF8(key, length, "surrogateescape")) < 0) return -1;
        if (note_key(&walk->names, key, length) < 0) return -1;
    }
    int64_t latest, count = PyList_Size(walk->keys);
    memcpy(&latest, walk->latest.data + 8 * number, 8);
    if (latest >= 0) memcpy(walk->latest.data + 8 * number, &count, 8);
    int failed = (latest == count || latest < 0) && put(&walk->twice, (int64_t)walk->sample.used / 4, 4) < 0;
    failed = failed || put(&walk->sample, count - 1, 4) < 0 || put(&walk->field, number, 2) < 0;
    return failed || put(&walk->offset, offset, 8) < 0 || put(&walk->size, size, 8) < 0 ? -1 : 0;
}

/* Return the position of a field (a str); a new one is appended. */
static int64_t number_of(Walk *walk, PyObject *field) {
    PyObject *known = PyDict_GetItemWithError(walk->numbers, field);
    if (known || PyErr_Occurred()) return known ? PyLong_AsLongLong(known) : -1;
    int is_key = PyObject_RichCompareBool(field, key_entry, Py_EQ), is_url = PyObject_RichCompareBool(field, url_entry, Py_EQ);
    if (is_key < 0 || is_url < 0) return -1;
    int64_t number = PyList_Size(walk->fields);
    PyObject *value = PyLong_FromLongLong(number), *raw = PyUnicode_AsEncodedString(field, "utf-8", "surrogateescape");
    char *text;
    Py_ssize_t length;
    if (!value || !raw || PyBytes_AsStringAndSize(raw, &text, &length) < 0 || put(&walk->latest, is_key || is_url ? -1 : 0, 8) < 0 ||
        PyDict_SetItem(walk->numbers, field, value) < 0 || PyList_Append(walk->fields, field) < 0)
        number = -1;
    else
        note_field(&walk->names, text, length, number);
    Py_XDECREF(value);
    Py_XDECREF(raw);
    return number;
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
    int64_t position = 0, ahead = least, zeros_before = 0, data_end = 0;
    int came;
    Found found;
    while (position < size) {
        if (ahead > size - position) ahead = size - position;
        if ((came = read_window(walk, position, ahead)) < 1) return came;
        Scan scan = {0, BLOCK, zeros_before, NULL, 0};
        int64_t count = 0, number, key_length;
        do {
            for (; next_member(walk->window.data, ahead, limit, &scan, &found); count++) {
                data_end = position + found.end;
                if (*found.kind && !found.elsewhere) continue;
                int64_t offset = position + found.start, before = (int64_t)walk->sample.used / 4;
                number = split_plain(&walk->names, found.name, found.name_length, &key_length);
                if ((number < 0 ? add_split(walk, &found, offset)
                                : add_member(walk, found.name, key_length, number, offset, found.end - found.start)) < 0)
                    return -1;
                if (found.elsewhere && (int64_t)walk->sample.used / 4 > before &&
                    (put(&walk->elsewhere, before, 4) < 0 || put(&walk->elsewhere, position + found.header, 8) < 0))
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
        ahead = 2 * ahead < most || !scan.position ? 2 * ahead : most; /* many extended headers before a member */
        if (ahead < scan.need) ahead = scan.need;
    }
    if (zeros_before ? position > size : position < size || data_end > size || !size) return 0;
    if (position > size) position = size; /* the padding is cut off */
    walk->end = position - zeros_before * BLOCK;
    int64_t padding = zeros_before * BLOCK + size - position, record = size & -size;
    int64_t most_end = record < MAX_END ? MAX_END : BLOCK + (record < MAX_RECORD ? record : MAX_RECORD);
    if (padding == size ? size > EMPTY && size != RECORD : padding > most_end && !walk->concatenated) return 0;
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
    Bytes *arrays[] = {&walk.sample,    &walk.field,  &walk.offset, &walk.size,     &walk.names.key,
                       &walk.latest, &walk.twice, &walk.elsewhere, &walk.window};
    int sound = walk.keys && walk.fields && walk.numbers ? walk_through(&walk, size, limit, least, most, large) : -1;
    if (sound > 0)
        result = Py_BuildValue("OO(NNNNNN)LL", walk.keys, walk.fields,
                               PyBytes_FromStringAndSize(walk.sample.data, (Py_ssize_t)walk.sample.used),
                               PyBytes_FromStringAndSize(walk.field.data, (Py_ssize_t)walk.field.used),
                               PyBytes_FromStringAndSize(walk.offset.data, (Py_ssize_t)walk.offset.used),
                               PyBytes_FromStringAndSize(walk.size.data, (Py_ssize_t)walk.size.used),
                               PyBytes_FromStringAndSize(walk.twice.data, (Py_ssize_t)walk.twice.used),
                               PyBytes_FromStringAndSize(walk.elsewhere.data, (Py_ssize_t)walk.elsewhere.used),
                               (long long)walk.archives, (long long)walk.end);
    else if (!sound)
        result = Py_NewRef(Py_None);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) PyMem_Free(arrays[i]->data);
    Py_XDECREF(walk.keys);
    Py_XDECREF(walk.fields);
    Py_XDECREF(walk.numbers);
    return result;
}

/* Groups members into samples; _tar_py.py documents it. */
typedef struct {
    PyObject_HEAD
    PyObject *split, *fields; /* fields: a list of those in Names */
    PyObject *first;          /* the first entries of each sample */
    PyObject *key, *sample;   /* the current ones; sample: NULL if none is open */
    int is_passed;            /* whether no sample is open because that of the key was passed over */
    PyObject *earlier;        /* keys: a list while they are sorted, which needs no look-up, then a set */
    int is_default;           /* whether Names may split names in place of split() */
    Names names;
    int packs;                /* whether samples whose members are as plain_members() makes them are passed over */
    int splits;               /* whether members of a key that are not adjacent form several samples */
} Grouper;

/* The results: lists, or NULL while they are empty. */
typedef struct {
    PyObject *samples, *events;
} Finds;

static int append_to(PyObject **list, PyObject *item) {
    if (!*list && !(*list = PyList_New(0))) {
        Py_XDECREF(item);
        return -1;
    }
    return append(*list, item);
}

static PyObject *list_of(PyObject *list) { return list ? list : PyList_New(0); }

/* A member; *text* is its name in UTF-8, NULL if not encodable. Either *data* is set, or *begin* and *size*. */
typedef struct {
    PyObject *name, *data;
    const char *text, *begin;
    int64_t length, size;
    long long offset;
} Piece;

static void replace(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    *place = object;
    Py_XDECREF(before);
}

/* Append an event: a member that is skipped, or a fault if there is no kind. */
static int note_event(Finds *finds, const char *kind, PyObject *name, PyObject *field, long long offset) {
    Py_ssize_t before = finds->samples ? PyList_Size(finds->samples) : 0;
    return append_to(&finds->events, Py_BuildValue("nzOOL", before, kind, name, field, offset));
}

/* Keep the keys, including the current one, in a set from now on. */
static int remember_in_set(Grouper *self) {
    if (!PySet_Check(self->earlier)) {
        PyObject *keys = PySet_New(self->earlier);
        if (!keys) return -1;
        replace(&self->earlier, keys);
    }
    return PySet_Add(self->earlier, self->key);
}

/* Keep the current key before *key* replaces it. */
static int keep_key(Grouper *self, PyObject *key) {
    self->is_passed = 0;
    if (PySet_Check(self->earlier)) return PySet_Add(self->earlier, self->key);
    if (PyList_Append(self->earlier, self->key) < 0) return -1;
    int is_less = PyObject_RichCompareBool(key, self->key, Py_LT);
    return is_less < 0 || (is_less && remember_in_set(self) < 0) ? -1 : 0;
}

/* Close the open sample: append it to *samples*. */
static int close_sample(Grouper *self, PyObject **samples) {
    PyObject *sample = self->sample;
    self->sample = NULL;
    return append_to(samples, sample);
}

static void put_octal(char *end, int64_t value, int digits);

/* Return whether a member has a single header, and that is as ``plain_members`` writes it. Its checksum was verified. */
static int has_plain_header(const char *data, const Found *found) {
    const char *block = data + found->header;
    char size[11];
    int64_t name = found->name_length;
    if (found->start - found->header != BLOCK || name > NAME || (found->end - found->start) >> 33) return 0;
    put_octal(size + 11, found->end - found->start, 11);
    for (int64_t i = 0; i < name; i++)
        if (block[i] & 0x80) return 0;
    for (int i = 148; i < 154; i++)
        if (block[i] < '0' || block[i] > '7') return 0;
    return !memcmp(block, found->name, (size_t)name) && !memcmp(block + name, zeros, (size_t)(NAME - name)) &&
           !memcmp(block + 100, "0000644\0" "0000000\0" "0000000\0", 24) && !memcmp(block + 124, size, 11) &&
           !memcmp(block + 135, "\0" "00000000000\0", 13) && !memcmp(block + 154, "\0 0", 3) &&
           !memcmp(block + 157, zeros, 100) && !memcmp(block + 257, "ustar\0" "00", 8) &&
           !memcmp(block + 265, zeros, BLOCK - 265);
}

/* Return whether a field has capitals, so that it would be written differently: in lower case. */
static int has_capitals(const char *field) {
    for (; *field; field++)
        if (*field >= 'A' && *field <= 'Z') return 1;
    return 0;
}

/* Open a sample; 1 if one is open, 0 if the sample of the key is left out, -1 for an exception. */
static int open_sample(Grouper *self, PyObject *key, long long offset, Finds *finds) {
    int is_same = PyObject_RichCompareBool(key, self->key, Py_EQ);
    if (is_same < 0) return -1;
    if (self->sample && is_same) return 1;
    if (self->sample || self->is_passed) {
        if (self->sample && close_sample(self, &finds->samples) < 0) return -1;
        if (keep_key(self, key) < 0) return -1;
    } else if (is_same && PySet_Check(self->earlier)) return 0;
    replace(&self->key, Py_NewRef(key));
    self->names.is_known = 0;
    if (PySet_Check(self->earlier)) {
        int is_earlier = PySet_Contains(self->earlier, key);
        if (is_earlier < 0 || (is_earlier && note_event(finds, NULL, key, Py_None, offset) < 0)) return -1;
        if (is_earlier && !self->splits) return 0;
    }
    if (!(self->sample = PyDict_Copy(self->first))) return -1;
    return PyDict_SetItem(self->sample, key_entry, key) < 0 ? -1 : 1;
}

/* Add a field to the open sample. A duplicate field, or one whose data is None, is a fault: the sample is left out. */
static int add_field(Grouper *self, PyObject *field, const Piece *piece, Finds *finds) {
    Py_ssize_t before = PyDict_Size(self->sample);
    PyObject *data = piece->data ? Py_NewRef(piece->data) : PyBytes_FromStringAndSize(piece->begin, (Py_ssize_t)piece->size);
    int failed = !data || PyDict_SetItem(self->sample, field, data) < 0;
    Py_XDECREF(data);
    if (failed) return -1;
    if (PyDict_Size(self->sample) > before && data != Py_None) return 0;
    Py_CLEAR(self->sample);
    return remember_in_set(self) < 0 ? -1 : note_event(finds, NULL, self->key, field, piece->offset);
}

/* Add a member whose name needs split(), and remember how it is split. */
static int add_by_split(Grouper *self, const Piece *piece, Finds *finds) {
    PyObject *parts = PyObject_CallFunctionObjArgs(self->split, piece->name, NULL);
    if (!parts || parts == Py_None) {
        Py_XDECREF(parts);
        return parts ? note_event(finds, "", piece->name, Py_None, piece->offset) : -1;
    }
    PyObject *key = PySequence_GetItem(parts, 0), *field = key ? PySequence_GetItem(parts, 1) : NULL;
    Py_DECREF(parts);
    int result = field ? open_sample(self, key, piece->offset, finds) : -1;
    if (result > 0 && self->is_default && piece->text) {
        int64_t length = key_length_of(piece->text, piece->length);
        if (length < 0 || note_key(&self->names, piece->text, length) < 0) result = -1;
        else if (note_field(&self->names, piece->text + length + 1, piece->length - length - 1, PyList_Size(self->fields)) &&
                 PyList_Append(self->fields, field) < 0)
            result = -1;
    }
    if (result > 0) result = add_field(self, field, piece, finds);
    Py_XDECREF(key);
    Py_XDECREF(field);
    return result;
}

static int add_piece(Grouper *self, const Piece *piece, Finds *finds) {
    int64_t length, number = -1;
    if (self->is_default && piece->text) number = split_plain(&self->names, piece->text, piece->length, &length);
    if (number >= 0) {
        int result = 1;
        if (!self->sample || !is_current_key(&self->names, piece->text, length)) {
            PyObject *key = PyUnicode_DecodeUTF8(piece->text, length, "surrogateescape");
            result = key ? open_sample(self, key, piece->offset, finds) : -1;
            Py_XDECREF(key);
            if (result > 0 && note_key(&self->names, piece->text, length) < 0) result = -1;
        }
        if (result < 1) return result;
        return add_field(self, PyList_GetItem(self->fields, (Py_ssize_t)number), piece, finds);
    }
    PyObject *name = piece->name ? Py_NewRef(piece->name)
                                 : PyUnicode_DecodeUTF8(piece->text, piece->length, "surrogateescape");
    if (!name) return -1;
    Piece named = *piece;
    named.name = name;
    int result = add_by_split(self, &named, finds);
    Py_DECREF(name);
    return result;
}

/* Return the exception that is set, as an object, and clear it. */
static PyObject *taken_exception(void) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* A run of adjacent samples in a buffer that are passed over. */
typedef struct {
    const char *data;           /* the buffer */
    int64_t length, limit;      /* bytes of the buffer, and the most of a member */
    int64_t at;                 /* the end of the samples found */
    int64_t parsed, next;       /* the offsets of the member parsed last, -1 if there is none, and of the one after it */
    int64_t key_length, number; /* of that member; number: of its field */
    char name[NAME + 1];
} Run;

/* Parse the member at *at*; 0 if it is not a whole one with a known field, written as plain_members() does. */
static int parse_member(const Grouper *self, Run *run, int64_t at) {
    Found found;
    Scan scan = {at, BLOCK, 0, NULL, 0};
    run->parsed = -1;
    if (!next_member(run->data, run->length, run->limit, &scan, &found) || found.header != at || *found.kind ||
        !has_plain_header(run->data, &found) ||
        (run->number = split_plain(&self->names, found.name, found.name_length, &run->key_length)) < 0 ||
        scan.position > run->length || memcmp(run->data + found.end, zeros, (size_t)(scan.position - found.end)))
        return 0;
    memcpy(run->name, found.name, (size_t)found.name_length);
    run->name[found.name_length] = 0;
    run->next = scan.position;
    run->parsed = at;
    return 1;
}

/* Find the next sample of a run; return its number of fields, with its key at the beginning of *name*. Return 0 if the next
   sample must be made, or continues beyond the buffer. */
static int64_t next_of_run(const Grouper *self, Run *run, char name[NAME + 1], int64_t *key_length) {
    int64_t at = run->at, fields = 0;
    uint32_t seen = 0; /* the fields of the sample, a bit for each number */
    while (at == run->parsed || parse_member(self, run, at)) {
        const char *field = run->name + run->key_length + 1;
        if (fields && (run->key_length != *key_length || memcmp(run->name, name, (size_t)*key_length))) {
            run->at = at;
            return fields;
        }
        if (has_capitals(field) || seen >> run->number & 1 || (seen && strcmp(name + *key_length + 1, field) > 0)) return 0;
        memcpy(name, run->name, sizeof run->name);
        *key_length = run->key_length;
        seen |= 1u << run->number; /* less than PLAIN */
        fields++;
        at = run->next;
    }
    return 0;
}

/* Pass over a sample with this key, as if it were made; 0 if the key is not new, -1 for an exception. */
static int pass_sample(Grouper *self, PyObject *key, PyObject **samples) {
    const int has_key = self->sample || self->is_passed;
    if (!self->is_passed) {
        const int is_same = PyObject_RichCompareBool(key, self->key, Py_EQ);
        if (is_same) return is_same < 0 ? -1 : 0; /* its sample continues, or is left out */
    }
    if (self->sample && close_sample(self, samples) < 0) return -1;
    if (has_key && keep_key(self, key) < 0) return -1;
    if (PySet_Check(self->earlier)) {
        const int is_earlier = PySet_Contains(self->earlier, key);
        if (is_earlier) return is_earlier < 0 ? -1 : 0;
    }
    replace(&self->key, Py_NewRef(key));
    self->names.is_known = 0;
    self->is_passed = 1;
    return 1;
}

/* Return whether a member in a buffer may be the first of a sample to pass over. */
static int may_pass(const Grouper *self, const char *data, const Found *found) {
    int64_t length = key_length_of(found->name, found->name_length);
    return self->packs && self->is_default && length >= 0 && has_plain_header(data, found) &&
           !(self->sample && is_current_key(&self->names, found->name, length));
}

/* Pass over the samples of a run: append the open sample, if it is complete, and a tuple for them. */
static int pass_over(Grouper *self, Run *run, PyObject **samples) {
    PyObject *keys = NULL;
    char text[NAME + 1];
    int64_t fields, total = 0, length = 0, begin = run->at, end = begin;
    int passed = 1;
    while (passed > 0 && (fields = next_of_run(self, run, text, &length))) {
        PyObject *key = PyUnicode_DecodeUTF8(text, length, "surrogateescape");
        passed = key ? pass_sample(self, key, samples) : -1;
        if (passed > 0) {
            total += fields;
            end = run->at;
            if (append_to(&keys, Py_NewRef(key)) < 0) passed = -1;
        }
        Py_XDECREF(key);
    }
    run->at = end;
    if (passed < 0) {
        Py_XDECREF(keys);
        return -1;
    }
    return keys ? append_to(samples, Py_BuildValue("NLLL", keys, (long long)begin, (long long)end, (long long)total)) : 0;
}

static PyObject *grouper_read(PyObject *object, PyObject *args) {
    Grouper *self = (Grouper *)object;
    Py_buffer view;
    long long position, zeros_before, limit, base;
    if (!PyArg_ParseTuple(args, "y*LLLL:read", &view, &position, &zeros_before, &limit, &base)) return NULL;
    Finds finds = {NULL, NULL};
    PyObject *last = NULL, *problem = NULL;
    Scan scan = {position, BLOCK, zeros_before, NULL, 0};
    Found found;
    Run run = {.data = view.buf, .length = view.len, .limit = limit, .parsed = -1};
    int failed = position < 0 || zeros_before < 0 || limit < 0;
    if (failed) PyErr_SetString(PyExc_ValueError, "position, zeros and limit must not be negative");
    while (!failed && !last && !problem && next_member(view.buf, view.len, limit, &scan, &found)) {
        if (found.end > view.len || found.elsewhere) {
            failed = !(last = scanned_member(&found));
            break;
        }
        Piece piece = {.text = found.name, .length = found.name_length, .begin = (const char *)view.buf + found.start,
                       .size = found.end - found.start, .offset = base + found.header};
        if (*found.kind) {
            PyObject *name = PyUnicode_DecodeUTF8(found.name, found.name_length, "surrogateescape");
            failed = !name || note_event(&finds, found.kind, name, Py_None, piece.offset) < 0;
            Py_XDECREF(name);
            continue;
        }
        if (may_pass(self, view.buf, &found)) {
            run.at = found.header;
            failed = pass_over(self, &run, &finds.samples) < 0;
            if (run.at > found.header) scan.position = run.at;
            if (failed || run.at > found.header) continue;
        }
        if (add_piece(self, &piece, &finds) < 0) problem = taken_exception();
    }
    PyBuffer_Release(&view);
    if (failed) {
        Py_XDECREF(finds.samples);
        Py_XDECREF(finds.events);
        Py_XDECREF(problem);
        Py_XDECREF(last);
        return NULL;
    }
    if (!problem) problem = Py_BuildValue("z", scan.problem);
    return Py_BuildValue("NNLLLNN", list_of(finds.samples), list_of(finds.events), (long long)scan.position, (long long)scan.need,
                         (long long)scan.zeros, problem, last ? last : Py_NewRef(Py_None));
}

/* Add a (name, data, offset), a tuple. */
static int add_given(Grouper *self, PyObject *member, Finds *finds) {
    Piece piece = {.name = PyTuple_GetItem(member, 0), .data = PyTuple_GetItem(member, 1)};
    PyObject *offset = PyTuple_GetItem(member, 2);
    if (!offset || (piece.offset = PyLong_AsLongLong(offset)) == -1) {
        if (PyErr_Occurred()) return -1;
    }
    if (self->is_default && PyUnicode_Check(piece.name)) {
        Py_ssize_t length;
        piece.text = PyUnicode_AsUTF8AndSize(piece.name, &length);
        piece.length = piece.text ? length : 0;
        PyErr_Clear();
    }
    return add_piece(self, &piece, finds);
}

static PyObject *grouper_next(PyObject *object, PyObject *members) {
    Grouper *self = (Grouper *)object;
    Finds finds = {NULL, NULL};
    PyObject *item;
    while (!finds.samples && !finds.events) {
        if (!(item = PyIter_Next(members))) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        PyObject *member = PyTuple_Check(item) ? Py_NewRef(item) : PySequence_Tuple(item);
        int failed = !member || add_given(self, member, &finds) < 0;
        Py_XDECREF(member);
        Py_DECREF(item);
        if (failed) {
            Py_XDECREF(finds.samples);
            Py_XDECREF(finds.events);
            return NULL;
        }
    }
    return Py_BuildValue("NN", list_of(finds.samples), list_of(finds.events));
}

static PyObject *grouper_end(PyObject *object, PyObject *none) {
    (void)none;
    Grouper *self = (Grouper *)object;
    PyObject *samples = PyList_New(0);
    if (samples && self->sample && close_sample(self, &samples) < 0) Py_CLEAR(samples);
    return samples;
}

static int grouper_traverse(PyObject *object, visitproc visit, void *arg) {
    Grouper *self = (Grouper *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->split);
    Py_VISIT(self->fields);
    Py_VISIT(self->first);
    Py_VISIT(self->key);
    Py_VISIT(self->sample);
    Py_VISIT(self->earlier);
    return 0;
}

static int grouper_clear(PyObject *object) {
    Grouper *self = (Grouper *)object;
    Py_CLEAR(self->split);
    Py_CLEAR(self->fields);
    Py_CLEAR(self->first);
    Py_CLEAR(self->key);
    Py_CLEAR(self->sample);
    Py_CLEAR(self->earlier);
    return 0;
}

static void grouper_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    grouper_clear(object);
    PyMem_Free(((Grouper *)object)->names.key.data);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *grouper_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    PyObject *url, *split;
    int is_default, packs = 0, splits = 0;
    if (options && PyDict_Size(options)) return PyErr_Format(PyExc_TypeError, "Grouper takes no keywords");
    if (!PyArg_ParseTuple(args, "OOp|pp:Grouper", &url, &split, &is_default, &packs, &splits)) return NULL;
    Grouper *self = (Grouper *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    self->split = Py_NewRef(split);
    self->is_default = is_default;
    self->packs = packs;
    self->splits = splits;
    self->fields = PyList_New(0);
    self->first = PyDict_New();
    self->key = PyUnicode_FromString("");
    self->earlier = PyList_New(0);
    if (!self->fields || !self->first || !self->key || !self->earlier ||
        PyDict_SetItem(self->first, key_entry, Py_None) < 0 || PyDict_SetItem(self->first, url_entry, url) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef grouper_methods[] = {
    {"read", grouper_read, METH_VARARGS, "Group the members in a buffer."},
    {"next", grouper_next, METH_O, "Group members up to the next sample or event."},
    {"end", grouper_end, METH_NOARGS, "Return the sample that is open."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot grouper_slots[] = {
    {Py_tp_new, grouper_new},
    {Py_tp_dealloc, grouper_dealloc},
    {Py_tp_traverse, grouper_traverse},
    {Py_tp_clear, grouper_clear},
    {Py_tp_methods, grouper_methods},
    {Py_tp_doc, "Groups members into samples; see tarshards.kernels._tar_py."},
    {0, NULL},
};

static PyType_Spec grouper_spec = {
    .name = "tarshards.kernels._tar.Grouper",
    .basicsize = sizeof(Grouper),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = grouper_slots,
};

/* Whether a field may contain a text: it does, begins with a byte order mark, or is not bytes. */
static int value_may_contain(PyObject *value, PyObject *text) {
    if (!PyBytes_Check(value)) return 1;
    const char *data = PyBytes_AsString(value);
    size_t size = (size_t)PyBytes_Size(value);
    return (size >= 2 && (!memcmp(data, "\xff\xfe", 2) || !memcmp(data, "\xfe\xff", 2))) ||
           (size >= 4 && !memcmp(data, "\0\0\xfe\xff", 4)) ||
           memmem(data, size, PyBytes_AsString(text), (size_t)PyBytes_Size(text));
}

static PyObject *may_contain(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 3 || !PyDict_Check(args[0]) || !PyBytes_Check(args[1]) || !(PyList_Check(args[2]) || args[2] == Py_None))
        return PyErr_Format(PyExc_TypeError, "may_contain takes a sample (dict), a text (bytes) and fields");
    PyObject *value;
    if (args[2] == Py_None) {
        for (Py_ssize_t at = 0; PyDict_Next(args[0], &at, NULL, &value);)
            if (PyBytes_Check(value) && value_may_contain(value, args[1])) Py_RETURN_TRUE;
        Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(args[2]); i++) {
        PyObject *names = PyList_GetItem(args[2], i);
        if (!names || !PyList_Check(names)) return PyErr_Format(PyExc_TypeError, "fields are lists of names");
        value = NULL;
        for (Py_ssize_t j = 0; !value && j < PyList_Size(names); j++)
            if (!(value = PyDict_GetItemWithError(args[0], PyList_GetItem(names, j))) && PyErr_Occurred()) return NULL;
        if (!value || value_may_contain(value, args[1])) Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

/* Write a number in octal digits before *end*. */
static void put_octal(char *end, int64_t value, int digits) {
    for (; digits--; value >>= 3) *--end = (char)('0' + (value & 7));
}

/* Return the bytes of an ASCII text, NULL (with an exception only if it is not a str); *length* is always set. */
static const char *ascii_text(PyObject *text, Py_ssize_t *length) {
    Py_ssize_t bytes;
    if ((*length = PyUnicode_GetLength(text)) < 0) return NULL;
    const char *data = PyUnicode_AsUTF8AndSize(text, &bytes);
    if (!data && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) PyErr_Clear();
    return data && bytes == *length ? data : NULL;
}

/* Complete the header of a regular file in a block that has its name, and zeros after that. */
static void put_header(char *block, int64_t size) {
    memcpy(block + 100, "0000644\0" "0000000\0" "0000000\0", 24); /* mode, owner, group */
    put_octal(block + 135, size, 11);
    memcpy(block + 136, "00000000000\0" "        0", 21); /* time, no checksum yet, a regular file */
    memcpy(block + 257, "ustar\0" "00", 8);
    put_octal(block + 154, sum_bytes((const unsigned char *)block), 6);
    block[154] = 0;
}

static PyObject *plain_header(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2 || !PyUnicode_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "plain_header takes a name (str) and a size");
    long long size = PyLong_AsLongLong(args[1]);
    if (size < 0) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a size must not be negative");
    Py_ssize_t length;
    const char *name = ascii_text(args[0], &length);
    if (PyErr_Occurred()) return NULL;
    if (!name || length > NAME || size >> 33) return Py_NewRef(Py_None);
    PyObject *header = PyBytes_FromStringAndSize(NULL, BLOCK);
    if (!header) return NULL;
    char *block = PyBytes_AsString(header);
    memset(block, 0, BLOCK);
    memcpy(block, name, (size_t)length);
    put_header(block, size);
    return header;
}

/* Return the size of the members of a sample, header and padding included; 0 if some are not plain, -1 for an exception. */
static Py_ssize_t plain_size(PyObject *fields, PyObject *values, Py_ssize_t key_length, long long limit) {
    Py_ssize_t total = 0, length;
    for (Py_ssize_t i = 0; i < PyTuple_Size(fields); i++) {
        const char *field = ascii_text(PyTuple_GetItem(fields, i), &length);
        PyObject *value = PyList_GetItem(values, i);
        Py_ssize_t size = field ? PyObject_Size(value) : 0; /* values that are not copied here need not be bytes */
        if (PyErr_Occurred()) return -1;
        if (!field || key_length + 1 + length > NAME || size >= limit || (int64_t)size >> 33) return 0;
        if (!PyBytes_Check(value)) {
            PyErr_SetString(PyExc_TypeError, "values must be bytes");
            return -1;
        }
        if (!PyBytes_CheckExact(value)) return 0; /* it may have headers */
        total += BLOCK + (Py_ssize_t)round_up(size);
    }
    return total;
}

static PyObject *plain_members(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 4 || !PyUnicode_Check(args[0]) || !PyTuple_Check(args[1]) || !PyList_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "plain_members takes a key (str), fields (tuple), values (list) and a limit");
    PyObject *fields = args[1], *values = args[2];
    if (PyTuple_Size(fields) != PyList_Size(values))
        return PyErr_Format(PyExc_ValueError, "there must be as many values as fields");
    long long limit = PyLong_AsLongLong(args[3]);
    Py_ssize_t key_length, length;
    const char *key = ascii_text(args[0], &key_length);
    if (PyErr_Occurred()) return NULL;
    Py_ssize_t total = key ? plain_size(fields, values, key_length, limit) : 0;
    if (total <= 0) return total ? NULL : Py_NewRef(Py_None);
    PyObject *members = PyBytes_FromStringAndSize(NULL, total);
    if (!members) return NULL;
    char *at = PyBytes_AsString(members);
    for (Py_ssize_t i = 0; i < PyTuple_Size(fields); i++) {
        PyObject *value = PyList_GetItem(values, i);
        const char *field = ascii_text(PyTuple_GetItem(fields, i), &length);
        Py_ssize_t size = PyBytes_Size(value), padded = (Py_ssize_t)round_up(size);
        memset(at, 0, BLOCK);
        memcpy(at, key, (size_t)key_length);
        at[key_length] = '.';
        memcpy(at + key_length + 1, field, (size_t)length);
        put_header(at, size);
        memcpy(at + BLOCK, PyBytes_AsString(value), (size_t)size);
        memset(at + BLOCK + size, 0, (size_t)(padded - size));
        at += BLOCK + padded;
    }
    return members;
}

/* The bytes of one field in many samples, each by its address (uint64) and size (int64); a negative size is no field. */
typedef struct {
    PyObject *field;
    long long number;
    Py_buffer addresses, sizes;
} Column;

static void release_columns(Column *columns, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyBuffer_Release(&columns[i].addresses);
        PyBuffer_Release(&columns[i].sizes);
    }
    PyMem_Free(columns);
}

/* Take the columns in a list, each for *rows* rows; NULL with an exception set. */
static Column *take_columns(PyObject *list, Py_ssize_t rows) {
    Py_ssize_t count = PyList_Size(list);
    Column *columns = PyMem_Calloc((size_t)count + 1, sizeof *columns);
    if (!columns) return (Column *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        Column *column = columns + i;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "ULy*y*:plain_rows", &column->field, &column->number,
                              &column->addresses, &column->sizes)) {
            release_columns(columns, i);
            return NULL;
        }
        if (column->addresses.len / 8 < rows || column->sizes.len / 8 < rows) {
            PyErr_SetString(PyExc_ValueError, "a column must have as many addresses and sizes as there are rows");
            release_columns(columns, i + 1);
            return NULL;
        }
    }
    return columns;
}

static int64_t size_of(const Column *column, Py_ssize_t row) { return ((const int64_t *)column->sizes.buf)[row]; }

/* Return whether a name with this key and any unreserved field reads back as the same two. */
static int is_plain_key(const char *key, Py_ssize_t length) {
    if (!key || !length || key[length - 1] == '/') return 0;
    for (Py_ssize_t i = 0; i < length; i++)
        if (!key[i] || key[i] == '.' || (key[i] == '_' && i && key[i - 1] == '_')) return 0;
    return 1;
}

/* Return the size of the members of a row, header and padding included; 0 if they are not plain, -1 for an exception. */
static int64_t plain_row_size(PyObject *key, const Column *columns, Py_ssize_t count, Py_ssize_t row, long long limit) {
    Py_ssize_t key_length = 0, length;
    const char *text = key ? ascii_text(key, &key_length) : NULL;
    if (!is_plain_key(text, key_length)) return PyErr_Occurred() ? -1 : 0;
    int64_t total = 0;
    for (const Column *column = columns; column < columns + count; column++) {
        const int64_t size = size_of(column, row);
        if (size < 0) continue;
        if (!ascii_text(column->field, &length) || key_length + 1 + length > NAME || size >= limit || size >> 33) return 0;
        total += BLOCK + round_up(size);
    }
    return total;
}

static PyObject *plain_rows(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *keys, *list, *members = NULL, *result = NULL;
    Py_ssize_t row, stop, key_length, length;
    long long limit, most, offset, sample;
    if (!PyArg_ParseTuple(args, "O!O!nnLLLL:plain_rows", &PyList_Type, &keys, &PyList_Type, &list, &row, &stop, &limit,
                          &most, &offset, &sample))
        return NULL;
    Py_ssize_t count = PyList_Size(list), end = row;
    if (row < 0 || stop > PyList_Size(keys)) return PyErr_Format(PyExc_ValueError, "there must be as many keys as rows");
    Column *columns = take_columns(list, stop);
    if (!columns) return NULL;
    Bytes arrays[4] = {{0}};
    int64_t total = 0, size = 0;
    for (; end < stop; end++, total += size) {
        size = plain_row_size(PyList_GetItem(keys, end), columns, count, end, limit);
        if (size <= 0 || (total && total + size > most)) break;
    }
    if (size < 0 || !(members = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total))) goto done;
    char *start = PyBytes_AsString(members), *at = start;
    for (; row < end; row++, sample++) {
        const char *key = ascii_text(PyList_GetItem(keys, row), &key_length);
        for (const Column *column = columns; column < columns + count; column++) {
            const char *field = ascii_text(column->field, &length);
            if ((size = size_of(column, row)) < 0) continue;
            memset(at, 0, BLOCK);
            memcpy(at, key, (size_t)key_length);
            at[key_length] = '.';
            memcpy(at + key_length + 1, field, (size_t)length);
            put_header(at, size);
            at += BLOCK;
            if (put(arrays, sample, 4) < 0 || put(arrays + 1, column->number, 2) < 0 ||
                put(arrays + 2, offset + (at - start), 8) < 0 || put(arrays + 3, size, 8) < 0)
                goto done;
            if (size) memcpy(at, (const char *)(uintptr_t)((const uint64_t *)column->addresses.buf)[row], (size_t)size);
            memset(at + size, 0, (size_t)(round_up(size) - size));
            at += round_up(size);
        }
    }
    result = Py_BuildValue("nO(NNNN)", end, members, PyBytes_FromStringAndSize(arrays[0].data, (Py_ssize_t)arrays[0].used),
                           PyBytes_FromStringAndSize(arrays[1].data, (Py_ssize_t)arrays[1].used),
                           PyBytes_FromStringAndSize(arrays[2].data, (Py_ssize_t)arrays[2].used),
                           PyBytes_FromStringAndSize(arrays[3].data, (Py_ssize_t)arrays[3].used));
done:
    for (int i = 0; i < 4; i++) PyMem_Free(arrays[i].data);
    Py_XDECREF(members);
    release_columns(columns, count);
    return result;
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_VARARGS,
     "scan(buffer, position, zeros, limit, stops=False) -> (members, position, need, zeros, problem); see tarshards.kernels._tar_py"},
    {"cut", cut, METH_VARARGS, "cut(buffer, scanned, base, type) -> members; see tarshards.kernels._tar_py"},
    {"walk", walk, METH_VARARGS,
     "walk(source, size, reads, limit, split, concatenated=False) -> (keys, fields, arrays, archives, end) or None; see "
     "tarshards.kernels._tar_py"},
    {"may_contain", (PyCFunction)(void (*)(void))may_contain, METH_FASTCALL,
     "may_contain(sample, text, fields) -> bool; see tarshards.kernels._tar_py"},
    {"plain_header", (PyCFunction)(void (*)(void))plain_header, METH_FASTCALL,
     "plain_header(name, size) -> bytes or None; see tarshards.kernels._tar_py"},
    {"plain_members", (PyCFunction)(void (*)(void))plain_members, METH_FASTCALL,
     "plain_members(key, fields, values, limit) -> bytes or None; see tarshards.kernels._tar_py"},
    {"plain_rows", plain_rows, METH_VARARGS,
     "plain_rows(keys, columns, row, stop, limit, most, offset, sample) -> (end, members, arrays); see "
     "tarshards.kernels._tar_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tar", "Parse and create tar headers, and group members.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tar(void) {
    PyObject *result = PyModule_Create(&module), *grouper = PyType_FromSpec(&grouper_spec);
    key_entry = PyUnicode_InternFromString("__key__");
    url_entry = PyUnicode_InternFromString("__url__");
    if (!result || !grouper || !key_entry || !url_entry || PyModule_AddObjectRef(result, "Grouper", grouper) < 0)
        Py_CLEAR(result);
    Py_XDECREF(grouper);
    return result;
}

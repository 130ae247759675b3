/* Take members of mapped shards, each after its header was compared with the index: the native twin of _headers_py.py,
 * where the contracts are written.
 *
 * A member matches where the 512 bytes before its data are the header of a regular file with its name and size, and no
 * extended header can stand before these: the header of the member before it has the size that the index says, so its
 * data ends where this one's headers begin. What does not match in this way is left to tarshards.index.headers.
 */
#include <Python.h>
#include <stdlib.h>

#include "../storage/_guard.h"
#include "../tar/_tar.h"

#define LARGE (1 << 16) /* bytes from which taking a sample lets other threads run */
#define FEW 16          /* members of a sample that need no memory of their own */
#define AHEAD 8         /* members whose headers are fetched ahead */

static Guarded guarded;

typedef struct {
    const char *text;
    Py_ssize_t length;
} Text;

typedef struct {
    PyObject_HEAD
    Py_buffer shard, first, sample, field, offset, size;
    PyObject *keys, *encoded; /* lists of str, and of the bytes that *fields* points to */
    Text *fields;
    int64_t members;
    unsigned char *compared; /* for each member, whether it is known to match */
} MappedMembers;

/* Read a little-endian number of 8 bytes, 4 or 2. */
static int64_t number(const Py_buffer *array, int64_t place, int width) {
    const unsigned char *bytes = (const unsigned char *)array->buf + place * width;
    uint64_t value = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(&value, bytes, (size_t)width);
#else
    for (int i = 0; i < width; i++) value |= (uint64_t)bytes[i] << 8 * i;
#endif
    return (int64_t)value;
}

static int64_t first_of(const MappedMembers *self, int64_t sample) { return number(&self->first, sample, 8); }
static int64_t offset_of(const MappedMembers *self, int64_t member) { return number(&self->offset, member, 8); }
static int64_t size_of(const MappedMembers *self, int64_t member) { return number(&self->size, member, 8); }
static const char *header_of(const MappedMembers *self, int64_t member) {
    return (const char *)self->shard.buf + offset_of(self, member) - BLOCK;
}

/* Prefetch what is read of a header: its name, its size and type, and its prefix. */
static void fetch(const char *header) {
    __builtin_prefetch(header);
    __builtin_prefetch(header + 124);
    __builtin_prefetch(header + 156);
    __builtin_prefetch(header + 345);
}

/* Prefetch what is read of the header of the member before one that is taken: its size, type and magic. */
static void fetch_before(const char *header) {
    __builtin_prefetch(header + 124);
    __builtin_prefetch(header + 156);
    __builtin_prefetch(header + 257);
}

static int is_regular(char type) { return type == 0 || type == '0' || type == '7'; }

/* Return whether a name splits into a key and a field; the index has the field in lower case. */
static int is_name(const char *name, int64_t length, Text key, Text field) {
    if (length != key.length + 1 + field.length || memcmp(name, key.text, (size_t)key.length)) return 0;
    if (name[key.length] != '.') return 0;
    name += key.length + 1;
    if (!memcmp(name, field.text, (size_t)field.length)) return 1;
    for (Py_ssize_t i = 0; i < field.length; i++)
        if ((name[i] >= 'A' && name[i] <= 'Z' ? name[i] + 'a' - 'A' : name[i]) != field.text[i]) return 0;
    return 1;
}

/* Return whether a block is the header of a regular file with this name and size. */
static int is_header(const char *block, Text key, Text field, int64_t size) {
    const int64_t length = bounded_length(block, 100);
    if (!is_regular(block[156]) || parse_size(block + 124) != size) return 0;
    if (!block[345] || memcmp(block + 257, "ustar", 6)) return is_name(block, length, key, field);
    char joined[257];
    const int64_t before = bounded_length(block + 345, 155);
    memcpy(joined, block + 345, (size_t)before);
    joined[before] = '/';
    memcpy(joined + before + 1, block, (size_t)length);
    return is_name(joined, before + 1 + length, key, field);
}

/* Return whether the headers from *begin* on are followed by data at *offset*, of a regular file of this name and size.
 * That a header begins there is known, so their checksums are not needed to find out. */
static int leads_to(const char *shard, int64_t begin, int64_t offset, Text key, Text field, int64_t size) {
    Scan scan = {begin, BLOCK, 0, NULL, 1};
    Found found;
    do {
        while (next_member(shard, offset, MAX_SIZE, &scan, &found))
            if (found.start == offset)
                return !*found.kind && found.end - offset == size && is_name(found.name, found.name_length, key, field);
    } while (pass_end(&scan)); /* the index may be of concatenated archives */
    return 0;
}

/* Return whether a member's header has the size that the index says. */
static int has_its_size(const MappedMembers *self, int64_t member) {
    const char *block = header_of(self, member);
    if (!is_regular(block[156]) || parse_size(block + 124) != size_of(self, member)) return 0;
    return !memcmp(block + 257, "ustar", 5) || checksum_is_right((const unsigned char *)block);
}

/* Return whether a member matches; *before* says that the one before it does. */
static int matches(MappedMembers *self, int64_t member, Text key, int before) {
    const Text field = self->fields[number(&self->field, member, 2)];
    const int64_t offset = offset_of(self, member), size = size_of(self, member);
    const int64_t begin = member ? round_up(offset_of(self, member - 1) + size_of(self, member - 1)) : 0;
    if (member && !before && !self->compared[member] && !has_its_size(self, member - 1)) return 0;
    const int same = begin == offset - BLOCK ? is_header(header_of(self, member), key, field, size)
                                             : leads_to(self->shard.buf, begin, offset, key, field, size);
    if (same) self->compared[member] = 1;
    return same;
}

/* Return the UTF-8 of a key; *held* is NULL, or a new reference to what holds it. text is NULL with an exception set. */
static Text text_of(PyObject *key, PyObject **held) {
    Text text;
    *held = NULL;
    if ((text.text = key ? PyUnicode_AsUTF8AndSize(key, &text.length) : NULL)) return text;
    if (key && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) { /* the name is not UTF-8 */
        PyErr_Clear();
        *held = PyUnicode_AsEncodedString(key, "utf-8", "surrogateescape");
        if (*held && PyBytes_AsStringAndSize(*held, (char **)&text.text, &text.length) < 0) text.text = NULL;
    }
    return text;
}

/* The members of a sample that are taken at once. */
typedef struct {
    MappedMembers *table;
    Text key;
    int64_t count, settled; /* members before this one need not be compared */
    struct Taken {
        int64_t member;
        PyObject *name, *data;
        char *target;
    } *taken;
    int64_t undecided; /* -1: none, all were copied */
} Taking;

static void take(void *argument) {
    Taking *taking = argument;
    MappedMembers *table = taking->table;
    for (int64_t i = 0; i < taking->count; i++) {
        const int64_t member = taking->taken[i].member;
        if (member < taking->settled) continue;
        if (!matches(table, member, taking->key, i && taking->taken[i - 1].member == member - 1)) {
            taking->undecided = member;
            return;
        }
    }
    for (int64_t i = 0; i < taking->count; i++) {
        const int64_t member = taking->taken[i].member;
        memcpy(taking->taken[i].target, header_of(table, member) + BLOCK, (size_t)size_of(table, member));
    }
}

/* Allocate the members of a sample; return their total size, -1 with an exception set. */
static int64_t prepare(Taking *taking, PyObject *names, int64_t begin, int64_t end) {
    const MappedMembers *table = taking->table;
    int64_t total = 0;
    for (int64_t member = begin; member < end; member++) {
        PyObject *name = PyList_GetItem(names, (Py_ssize_t)number(&table->field, member, 2));
        if (name == Py_None) continue;
        fetch(header_of(table, member));
        if (member && !taking->count && !table->compared[member]) fetch_before(header_of(table, member - 1));
        const int64_t size = size_of(table, member);
        PyObject *data = name ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size) : NULL;
        if (!data) return -1;
        taking->taken[taking->count++] = (struct Taken){member, name, data, PyBytes_AsString(data)};
        total += size;
    }
    return total;
}

static PyObject *members_fill(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    MappedMembers *self = (MappedMembers *)object;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "fill takes a dict, names, a sample and a settled member");
    const Py_ssize_t sample = PyLong_AsSsize_t(args[2]), settled = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (sample < 0 || sample > self->first.len / 8 - 2) return PyErr_Format(PyExc_IndexError, "sample %zd", sample);
    const int64_t begin = first_of(self, sample), end = first_of(self, sample + 1);
    struct Taken few[FEW];
    PyObject *held;
    Taking taking = {self, text_of(PyList_GetItem(self->keys, sample), &held), 0, settled, few, -1};
    if (end - begin > FEW && !(taking.taken = PyMem_Malloc((size_t)(end - begin) * sizeof *few))) PyErr_NoMemory();
    int failed = PyErr_Occurred() != NULL;
    if (!failed) {
        const int64_t total = prepare(&taking, args[1], begin, end);
        failed = total < 0;
        if (!failed && total < LARGE) {
            failed = guarded(take, &taking);
        } else if (!failed) {
            Py_BEGIN_ALLOW_THREADS
            failed = guarded(take, &taking);
            Py_END_ALLOW_THREADS
        }
        if (failed && total >= 0) PyErr_SetString(PyExc_OSError, SHRUNK);
    }
    for (int64_t i = 0; i < taking.count; i++) {
        if (!failed && taking.undecided < 0)
            failed = PyDict_SetItem(args[0], taking.taken[i].name, taking.taken[i].data) < 0;
        Py_DECREF(taking.taken[i].data);
    }
    if (taking.taken != few) PyMem_Free(taking.taken);
    Py_XDECREF(held);
    return failed ? NULL : PyLong_FromLongLong(taking.undecided);
}

static PyObject *members_settle(PyObject *object, PyObject *member) {
    MappedMembers *self = (MappedMembers *)object;
    const Py_ssize_t place = PyLong_AsSsize_t(member);
    if (PyErr_Occurred()) return NULL;
    if (place < 0 || place >= self->members) return PyErr_Format(PyExc_IndexError, "member %zd", place);
    self->compared[place] = 1;
    Py_RETURN_NONE;
}

/* Members of several shards that are compared at once. */
typedef struct {
    struct Row {
        MappedMembers *table;
        int64_t member, place;
        PyObject *key;
        Text text;
    } *rows;
    int64_t count;
    volatile int64_t at; /* in memory, for when the guard ends the work */
    int64_t *undecided, differing;
} Comparing;

static void compare(void *argument) {
    Comparing *comparing = argument;
    for (; comparing->at < comparing->count; comparing->at++) {
        const int64_t i = comparing->at;
        const struct Row *row = comparing->rows + i;
        if (i + AHEAD < comparing->count) {
            fetch(header_of(row[AHEAD].table, row[AHEAD].member));
            if (row[AHEAD].member) fetch_before(header_of(row[AHEAD].table, row[AHEAD].member - 1));
        }
        const int before = row->member && row->table->compared[row->member - 1];
        if (!matches(row->table, row->member, row->text, before))
            comparing->undecided[comparing->differing++] = row->place;
    }
}

static PyTypeObject *members_type;

/* Note the rows that were not compared before; return 0 with an exception set where one is not a member. */
static int collect(Comparing *comparing, PyObject *tables, const int64_t *shards, const int64_t *members, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (members[i] < 0) continue;
        PyObject *object = PyList_GetItem(tables, (Py_ssize_t)shards[i]);
        if (!object) return 0;
        if (object == Py_None) continue;
        MappedMembers *table = (MappedMembers *)object;
        if (!PyObject_TypeCheck(object, members_type) || members[i] >= table->members)
            return PyErr_SetString(PyExc_ValueError, "not a member of a mapped shard"), 0;
        if (table->compared[members[i]]) continue;
        PyObject *key = PyList_GetItem(table->keys, (Py_ssize_t)number(&table->sample, members[i], 4));
        if (!key) return 0;
        __builtin_prefetch(key);
        comparing->rows[comparing->count++] = (struct Row){table, members[i], i, key, {NULL, 0}};
    }
    return 1;
}

/* Get the texts of the keys; return 0 with an exception set where that fails. *held* receives what holds them. */
static int read_keys(Comparing *comparing, PyObject *held) {
    for (int64_t i = 0; i < comparing->count; i++) {
        PyObject *bytes;
        comparing->rows[i].text = text_of(comparing->rows[i].key, &bytes);
        const int kept = !bytes || PyList_Append(held, bytes) == 0;
        Py_XDECREF(bytes);
        if (!kept || !comparing->rows[i].text.text) return 0;
    }
    return 1;
}

static PyObject *find_undecided(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables, *result = NULL;
    Py_buffer shards, members;
    if (!PyArg_ParseTuple(args, "O!y*y*:find_undecided", &PyList_Type, &tables, &shards, &members)) return NULL;
    const int64_t count = members.len / 8;
    Comparing comparing = {PyMem_Malloc((size_t)count * sizeof(struct Row) + 1), 0, 0,
                           PyMem_Malloc((size_t)count * 8 + 1), 0};
    PyObject *held = PyList_New(0);
    if (!comparing.rows || !comparing.undecided) PyErr_NoMemory();
    else if (shards.len != members.len) PyErr_SetString(PyExc_ValueError, "shards and members differ in length");
    else if (held && collect(&comparing, tables, shards.buf, members.buf, count) && read_keys(&comparing, held)) {
        Py_BEGIN_ALLOW_THREADS
        while (guarded(compare, &comparing)) /* a shard has shrunk: whoever decides on this member finds out */
            comparing.undecided[comparing.differing++] = comparing.rows[comparing.at++].place;
        Py_END_ALLOW_THREADS
        result = PyList_New(0);
        for (int64_t i = 0; result && i < comparing.differing; i++) {
            PyObject *place = PyLong_FromLongLong(comparing.undecided[i]);
            if (!place || PyList_Append(result, place) < 0) Py_CLEAR(result);
            Py_XDECREF(place);
        }
    }
    Py_XDECREF(held);
    PyMem_Free(comparing.rows);
    PyMem_Free(comparing.undecided);
    PyBuffer_Release(&shards);
    PyBuffer_Release(&members);
    return result;
}

/* Return what is wrong with the arrays of an index, NULL if nothing is. */
static const char *inconsistency(const MappedMembers *self) {
    const int64_t members = self->size.len / 8, samples = PyList_Size(self->keys);
    if (self->offset.len != 8 * members || self->field.len != 2 * members || self->sample.len != 4 * members ||
        self->first.len != 8 * (samples + 1) || first_of(self, 0) != 0 || first_of(self, samples) != members)
        return "arrays of different lengths";
    for (int64_t i = 0; i < samples; i++)
        if (first_of(self, i) > first_of(self, i + 1)) return "samples out of order";
    for (int64_t i = 0; i < members; i++) {
        const int64_t offset = offset_of(self, i), size = size_of(self, i);
        if (offset < BLOCK || offset > self->shard.len || size < 0 || size > self->shard.len - offset)
            return "a member beyond the shard's end";
        if (number(&self->field, i, 2) >= PyList_Size(self->encoded)) return "a field without a name";
        if (number(&self->sample, i, 4) >= samples) return "a sample without a key";
    }
    return NULL;
}

/* Encode the fields; return 0 with an exception set where that fails. */
static int encode(MappedMembers *self, PyObject *fields) {
    const Py_ssize_t count = PyList_Size(fields);
    if (!(self->encoded = PyList_New(0)) || !(self->fields = PyMem_Calloc((size_t)count + 1, sizeof(Text))))
        return PyErr_NoMemory(), 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *field = PyUnicode_AsEncodedString(PyList_GetItem(fields, i), "utf-8", "surrogateescape");
        Text *text = self->fields + i;
        const int failed = !field || PyBytes_AsStringAndSize(field, (char **)&text->text, &text->length) < 0 ||
                           PyList_Append(self->encoded, field) < 0;
        Py_XDECREF(field);
        if (failed) return 0;
    }
    return 1;
}

static PyObject *members_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    static char *names[] = {"mapping", "keys", "fields", "first", "sample", "field", "offset", "size", NULL};
    MappedMembers *self = (MappedMembers *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    PyObject *fields;
    if (!self) return NULL;
    if (PyArg_ParseTupleAndKeywords(args, options, "y*O!O!y*y*y*y*y*:MappedMembers", names, &self->shard, &PyList_Type,
                                    &self->keys, &PyList_Type, &fields, &self->first, &self->sample, &self->field,
                                    &self->offset, &self->size)) {
        Py_INCREF(self->keys);
        if (encode(self, fields)) {
            const char *problem = inconsistency(self);
            self->members = self->size.len / 8;
            if (problem) PyErr_SetString(PyExc_ValueError, problem);
            else if (!(self->compared = PyMem_Calloc((size_t)self->members + 1, 1))) PyErr_NoMemory();
            else return (PyObject *)self;
        }
    } else {
        self->keys = NULL;
    }
    Py_DECREF(self);
    return NULL;
}

static void members_dealloc(PyObject *object) {
    MappedMembers *self = (MappedMembers *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_buffer *const held[] = {&self->shard, &self->first, &self->sample, &self->field, &self->offset, &self->size};
    for (int i = 0; i < 6; i++)
        if (held[i]->obj) PyBuffer_Release(held[i]);
    Py_XDECREF(self->keys);
    Py_XDECREF(self->encoded);
    PyMem_Free(self->fields);
    PyMem_Free(self->compared);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef members_methods[] = {
    {"fill", (PyCFunction)(void (*)(void))members_fill, METH_FASTCALL, "Put the members of a sample into a dict."},
    {"settle", members_settle, METH_O, "Note that a member matches."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot members_slots[] = {
    {Py_tp_new, members_new},
    {Py_tp_dealloc, members_dealloc},
    {Py_tp_methods, members_methods},
    {Py_tp_doc, "The members of a mapped shard; see tarshards.index._headers_py."},
    {0, NULL},
};

static PyType_Spec members_spec = {
    .name = "tarshards.index._headers.MappedMembers",
    .basicsize = sizeof(MappedMembers),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = members_slots,
};

static PyMethodDef methods[] = {
    {"find_undecided", find_undecided, METH_VARARGS,
     "find_undecided(tables, shards, members) -> places; see tarshards.index._headers_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_headers", "Members and their headers.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__headers(void) {
    if (!(guarded = import_guard())) return NULL;
    PyObject *result = PyModule_Create(&module);
    members_type = (PyTypeObject *)PyType_FromSpec(&members_spec);
    if (!result || !members_type || PyModule_AddObjectRef(result, "MappedMembers", (PyObject *)members_type) < 0)
        Py_CLEAR(result);
    return result;
}

/* Files mapped into memory, copied from without the danger of SIGBUS: the native twin of _mapped_py.py.
 *
 * A page of a mapping that lies beyond the end of its file, because the file has shrunk since, raises SIGBUS when it is
 * touched (mmap(2)). The handler here ends such a copy, which then fails as an OSError; any other SIGBUS goes to the
 * handler that was there before.
 */
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define LARGE (1 << 16) /* bytes from which a copy lets other threads run */

typedef struct {
    PyObject_HEAD
    char *address; /* NULL where the file is empty */
    Py_ssize_t size;
} Mapping;

static __thread sigjmp_buf *recovery; /* where to go on after a SIGBUS in this thread's copy */
static struct sigaction earlier;
static int guarded;

static void on_bus(int number, siginfo_t *info, void *context) {
    (void)info, (void)context;
    if (recovery) siglongjmp(*recovery, 1);
    sigaction(number, &earlier, NULL); /* not ours: the instruction is tried again, and fails there */
    guarded = 0;
}

static void after_fork(void) { guarded = 0; /* torch's workers put a handler of their own in its place */ }

static void guard(void) {
    struct sigaction ours = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_NODEFER}, current;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, &ours, &current) == 0 && current.sa_sigaction != on_bus) earlier = current;
    guarded = 1;
}

/* Copy, or return -1 where the source has gone. */
static int copy(char *target, const char *source, size_t size) {
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        recovery = NULL;
        return -1;
    }
    recovery = &here;
    memcpy(target, source, size);
    __asm__ volatile("" ::: "memory"); /* the copy is over before the guard is down */
    recovery = NULL;
    return 0;
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    static char *names[] = {"path", NULL};
    PyObject *path;
    if (!PyArg_ParseTupleAndKeywords(args, options, "O&:Mapping", names, PyUnicode_FSConverter, &path)) return NULL;
    Mapping *self = NULL;
    struct stat status;
    void *address = NULL;
    int file = open(PyBytes_AsString(path), O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &status) < 0) goto failed;
    if (!S_ISREG(status.st_mode)) {
        errno = S_ISDIR(status.st_mode) ? EISDIR : ENODEV;
        goto failed;
    }
    if (status.st_size) {
        address = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0);
        if (address == MAP_FAILED) goto failed;
    }
    close(file);
    Py_DECREF(path);
    self = (Mapping *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) {
        if (address) munmap(address, (size_t)status.st_size);
        return NULL;
    }
    self->address = address;
    self->size = (Py_ssize_t)status.st_size;
    return (PyObject *)self;
failed:
    PyErr_SetFromErrno(PyExc_OSError);
    if (file >= 0) close(file);
    Py_DECREF(path);
    return NULL;
}

static void mapping_dealloc(PyObject *object) {
    Mapping *self = (Mapping *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->address) munmap(self->address, (size_t)self->size);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *read_bytes(Mapping *self, Py_ssize_t offset, Py_ssize_t size) {
    if (offset < 0 || size < 0 || offset > self->size || size > self->size - offset)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at offset %zd of %zd", size, offset, self->size);
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    if (!data || !size) return data;
    char *target = PyBytes_AsString(data);
    int failure;
    if (!guarded) guard();
    if (size < LARGE) {
        failure = copy(target, self->address + offset, (size_t)size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failure = copy(target, self->address + offset, (size_t)size);
        Py_END_ALLOW_THREADS
    }
    if (failure) {
        Py_DECREF(data);
        return PyErr_Format(PyExc_OSError, "the file has shrunk since it was opened");
    }
    return data;
}

static PyObject *mapping_read(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "read takes an offset and a size");
    Py_ssize_t offset = PyLong_AsSsize_t(args[0]), size = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    return read_bytes((Mapping *)object, offset, size);
}

/* Put the bytes of members, rows (field, offset, size) of int64, into a dict under their names, but those named None. */
static PyObject *mapping_fill(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) return PyErr_Format(PyExc_TypeError, "fill takes a dict, names, members, a begin and an end");
    Py_ssize_t begin = PyLong_AsSsize_t(args[3]), end = PyLong_AsSsize_t(args[4]);
    Py_buffer members;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[2], &members, PyBUF_SIMPLE) < 0) return NULL;
    int failed = begin < 0 || end > members.len / 24;
    if (failed) PyErr_Format(PyExc_ValueError, "members %zd to %zd of %zd", begin, end, members.len / 24);
    for (Py_ssize_t i = begin; i < end && !failed; i++) {
        int64_t member[3];
        memcpy(member, (char *)members.buf + 24 * i, 24);
        PyObject *name = PyList_GetItem(args[1], (Py_ssize_t)member[0]);
        if (name == Py_None) continue;
        PyObject *data = name ? read_bytes((Mapping *)object, (Py_ssize_t)member[1], (Py_ssize_t)member[2]) : NULL;
        failed = !data || PyDict_SetItem(args[0], name, data) < 0;
        Py_XDECREF(data);
    }
    PyBuffer_Release(&members);
    if (failed) return NULL;
    Py_INCREF(Py_None);
    return Py_None;
}

static Py_ssize_t mapping_length(PyObject *object) { return ((Mapping *)object)->size; }

static int mapping_buffer(PyObject *object, Py_buffer *view, int flags) {
    static char nothing;
    Mapping *self = (Mapping *)object;
    return PyBuffer_FillInfo(view, object, self->address ? self->address : &nothing, self->size, 1, flags);
}

static PyMethodDef mapping_methods[] = {
    {"read", (PyCFunction)(void (*)(void))mapping_read, METH_FASTCALL, "Return *size* bytes at *offset*."},
    {"fill", (PyCFunction)(void (*)(void))mapping_fill, METH_FASTCALL, "Read members into a dict."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mapping_slots[] = {
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_methods, mapping_methods},
    {Py_tp_doc, "A file mapped for reading; also a buffer, of which a view must not outlive the file's length."},
    {Py_sq_length, mapping_length},
    {Py_bf_getbuffer, mapping_buffer},
    {0, NULL},
};

static PyType_Spec mapping_spec = {
    .name = "tarshards.storage._mapped.Mapping",
    .basicsize = sizeof(Mapping),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = mapping_slots,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "tarshards.storage._mapped", .m_size = -1};

PyMODINIT_FUNC PyInit__mapped(void) {
    PyObject *result = PyModule_Create(&module);
    PyObject *type = PyType_FromSpec(&mapping_spec);
    if (!result || !type || PyModule_AddObject(result, "Mapping", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(result);
        return NULL;
    }
    pthread_atfork(NULL, NULL, after_fork);
    return result;
}

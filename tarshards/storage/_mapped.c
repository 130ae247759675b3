/* Map files into memory, and copy from them even if they shrink: the native twin of _mapped_py.py.
 *
 * If a file shrinks, touching a page of its mapping beyond the new end raises SIGBUS (mmap(2)). The handler here ends such
 * a copy, which then fails with OSError; any other SIGBUS goes to the handler that was installed before. Other kernels run
 * their own work under this handler (_guard.h).
 */
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_guard.h"

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

#define LARGE (1 << 16) /* bytes: a copy of at least this size releases the GIL */

typedef struct {
    PyObject_HEAD
    char *address; /* NULL if the file is empty */
    int is_copy;   /* whether it was read rather than mapped */
    Py_ssize_t size;
    char *path;
    struct stat status; /* of the file, when it was opened */
    int held;           /* the descriptor of the file if it is held open, else -1 */
} Mapping;

static __thread sigjmp_buf *recovery; /* where this thread continues after a SIGBUS; NULL outside of guarded work */
static struct sigaction earlier;
static int guarded;

static void on_bus(int number, siginfo_t *info, void *context) {
    (void)info, (void)context;
    if (recovery) siglongjmp(*recovery, 1);
    sigaction(number, &earlier, NULL); /* not ours: the instruction is repeated, and its SIGBUS goes there */
    guarded = 0;
}

static void after_fork(void) { guarded = 0; /* torch's workers replace the handler by their own */ }

static void guard(void) {
    struct sigaction ours = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_NODEFER}, current;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, &ours, &current) == 0 && current.sa_sigaction != on_bus) earlier = current;
    guarded = 1;
}

static int run_guarded(void (*work)(void *), void *argument) {
    sigjmp_buf here;
    if (!guarded) guard();
    if (sigsetjmp(here, 0)) {
        recovery = NULL;
        return -1;
    }
    recovery = &here;
    work(argument);
    __asm__ volatile("" ::: "memory"); /* the compiler must not move work beyond this line */
    recovery = NULL;
    return 0;
}

static Guarded offered = run_guarded; /* a capsule holds pointers to data only, such as this variable */

typedef struct {
    char *target;
    const char *source;
    size_t size;
} Copy;

static void copy(void *argument) {
    const Copy *this = argument;
    memcpy(this->target, this->source, this->size);
}

/* Read *size* bytes of a file into memory; NULL, with errno set, if that fails or the file is shorter. */
static void *read_whole(int file, Py_ssize_t size) {
    char *data = malloc((size_t)size);
    Py_ssize_t done = 0, more = 1;
    while (data && done < size && more > 0) {
        more = pread(file, data + done, (size_t)(size - done), done);
        done += more > 0 ? more : 0;
    }
    if (data && done < size) {
        if (more == 0) errno = EIO;
        free(data);
        data = NULL;
    }
    return data;
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    static char *names[] = {"path", "copied", NULL};
    PyObject *path;
    Py_ssize_t copied = 0;
    if (!PyArg_ParseTupleAndKeywords(args, options, "O&|n:Mapping", names, PyUnicode_FSConverter, &path, &copied)) return NULL;
    Mapping *self = NULL;
    struct stat status;
    void *address = NULL;
    char *name = strdup(PyBytes_AsString(path));
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0 || fstat(file, &status) < 0) goto failed;
    if (!S_ISREG(status.st_mode)) {
        errno = S_ISDIR(status.st_mode) ? EISDIR : ENODEV;
        goto failed;
    }
    const int is_copy = status.st_size <= copied;
    if (status.st_size && is_copy) {
        if (!(address = read_whole(file, (Py_ssize_t)status.st_size))) goto failed;
    } else if (status.st_size) {
        address = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0);
        if (address == MAP_FAILED) goto failed;
    }
    close(file);
    Py_DECREF(path);
    self = (Mapping *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) {
        if (address && is_copy) free(address);
        else if (address) munmap(address, (size_t)status.st_size);
        free(name);
        return NULL;
    }
    self->is_copy = is_copy;
    self->address = address;
    self->size = (Py_ssize_t)status.st_size;
    self->path = name;
    self->status = status;
    self->held = -1;
    return (PyObject *)self;
failed:
    PyErr_SetFromErrno(PyExc_OSError);
    if (file >= 0) close(file);
    free(name);
    Py_DECREF(path);
    return NULL;
}

static void mapping_dealloc(PyObject *object) {
    Mapping *self = (Mapping *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->address && self->is_copy) free(self->address);
    else if (self->address) munmap(self->address, (size_t)self->size);
    if (self->held >= 0) close(self->held);
    free(self->path);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *read_bytes(Mapping *self, Py_ssize_t offset, Py_ssize_t size) {
    if (offset < 0 || size < 0 || offset > self->size || size > self->size - offset)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at offset %zd of %zd", size, offset, self->size);
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    if (!data || !size) return data;
    Copy this = {PyBytes_AsString(data), self->address + offset, (size_t)size};
    int failure;
    if (size < LARGE) {
        failure = run_guarded(copy, &this);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failure = run_guarded(copy, &this);
        Py_END_ALLOW_THREADS
    }
    if (failure) {
        Py_DECREF(data);
        return PyErr_Format(PyExc_OSError, SHRUNK);
    }
    return data;
}

static PyObject *mapping_read(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "read takes an offset and a size");
    Py_ssize_t offset = PyLong_AsSsize_t(args[0]), size = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    return read_bytes((Mapping *)object, offset, size);
}

static PyObject *mapping_drop(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "drop takes an offset and a size");
    Mapping *self = (Mapping *)object;
    Py_ssize_t offset = PyLong_AsSsize_t(args[0]), size = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (offset < 0 || size < 0 || offset > self->size || size > self->size - offset)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at offset %zd of %zd", size, offset, self->size);
    Py_ssize_t extra = offset % (Py_ssize_t)sysconf(_SC_PAGESIZE);
    if (size && !self->is_copy) madvise(self->address + offset - extra, (size_t)(size + extra), MADV_DONTNEED); /* only advice */
    Py_RETURN_NONE;
}

static PyObject *mapping_scatter(PyObject *object, PyObject *flag) {
    const Mapping *self = (Mapping *)object;
    int is_set = PyObject_IsTrue(flag);
    if (is_set < 0) return NULL;
    if (self->address && !self->is_copy) madvise(self->address, (size_t)self->size, is_set ? MADV_RANDOM : MADV_NORMAL); /* only advice */
    Py_RETURN_NONE;
}

static int is_same(const struct stat *now, const struct stat *then) {
    /* Compare sizes, too: truncating a file changes its size first, then its bytes, and its time last. */
    return now->st_dev == then->st_dev && now->st_ino == then->st_ino && now->st_size == then->st_size &&
           now->st_mtim.tv_sec == then->st_mtim.tv_sec && now->st_mtim.tv_nsec == then->st_mtim.tv_nsec;
}

static PyObject *mapping_is_current(PyObject *object, PyObject *unused) {
    (void)unused;
    const Mapping *self = (Mapping *)object;
    struct stat now;
    const int found = self->held < 0 ? stat(self->path, &now) : fstat(self->held, &now);
    return PyBool_FromLong(found == 0 && now.st_nlink && is_same(&now, &self->status));
}

static PyObject *mapping_was_written(PyObject *object, PyObject *unused) {
    (void)unused;
    const Mapping *self = (Mapping *)object;
    struct stat now;
    const int found = stat(self->path, &now) == 0;
    return PyBool_FromLong(found && now.st_dev == self->status.st_dev && now.st_ino == self->status.st_ino &&
                           !is_same(&now, &self->status));
}

static PyObject *mapping_modified(PyObject *object, void *unused) {
    (void)unused;
    const struct timespec *time = &((Mapping *)object)->status.st_mtim;
    return PyLong_FromLongLong((long long)time->tv_sec * 1000000000 + time->tv_nsec);
}

static PyObject *mapping_hold_open(PyObject *object, PyObject *unused) {
    (void)unused;
    Mapping *self = (Mapping *)object;
    struct stat status;
    const int file = self->held < 0 ? open(self->path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) Py_RETURN_NONE;
    if (fstat(file, &status) == 0 && is_same(&status, &self->status)) self->held = file;
    else close(file); /* another file has this path by now, which is_current reports */
    Py_RETURN_NONE;
}

static Py_ssize_t mapping_length(PyObject *object) { return ((Mapping *)object)->size; }

static int mapping_buffer(PyObject *object, Py_buffer *view, int flags) {
    static char nothing;
    Mapping *self = (Mapping *)object;
    return PyBuffer_FillInfo(view, object, self->address ? self->address : &nothing, self->size, 1, flags);
}

static PyMethodDef mapping_methods[] = {
    {"read", (PyCFunction)(void (*)(void))mapping_read, METH_FASTCALL, "Return *size* bytes at *offset*."},
    {"drop", (PyCFunction)(void (*)(void))mapping_drop, METH_FASTCALL,
     "Release the memory of *size* bytes at *offset*; they can still be read."},
    {"scatter", mapping_scatter, METH_O, "Tell the system whether reads are few and far apart, so that it does not read ahead."},
    {"is_current", mapping_is_current, METH_NOARGS,
     "Return whether the path is still that of the same file, unmodified."},
    {"was_written", mapping_was_written, METH_NOARGS,
     "Return whether the path is still that of the same file, but the file was written to."},
    {"hold_open", mapping_hold_open, METH_NOARGS,
     "Hold the file open, if possible: is_current is then faster, and checks whether the file was removed or written to."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef mapping_attributes[] = {
    {"modified", mapping_modified, NULL, "The time of the last modification when the file was opened, in nanoseconds.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot mapping_slots[] = {
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_methods, mapping_methods},
    {Py_tp_getset, mapping_attributes},
    {Py_tp_doc, "A file mapped for reading, or read if it has at most *copied* bytes; also a buffer, for guarded kernels only."},
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

/* Start writing bytes of a file to the disk. If that fails or is not supported, flushing the file does it later. */
static PyObject *begin_flush(PyObject *self, PyObject *args) {
    (void)self;
    int descriptor;
    long long offset, size;
    if (!PyArg_ParseTuple(args, "iLL:begin_flush", &descriptor, &offset, &size)) return NULL;
#ifdef SYNC_FILE_RANGE_WRITE
    Py_BEGIN_ALLOW_THREADS
    sync_file_range(descriptor, offset, size, SYNC_FILE_RANGE_WRITE);
    Py_END_ALLOW_THREADS
#endif
    Py_RETURN_NONE;
}

/* Write a word of memory that processes share, if no other process has written it meanwhile. */
static PyObject *replace_word(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer memory;
    Py_ssize_t number;
    long long before, after;
    if (!PyArg_ParseTuple(args, "w*nLL:replace_word", &memory, &number, &before, &after)) return NULL;
    int64_t *word = (int64_t *)memory.buf + number, expected = before;
    int is_word = number >= 0 && number < memory.len / 8 && (uintptr_t)memory.buf % 8 == 0;
    int replaced = is_word && __atomic_compare_exchange_n(word, &expected, after, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    PyBuffer_Release(&memory);
    if (!is_word) return PyErr_Format(PyExc_IndexError, "word %zd", number);
    return PyBool_FromLong(replaced);
}

static PyMethodDef functions[] = {
    {"begin_flush", begin_flush, METH_VARARGS, "Start writing *size* bytes at *offset* of a descriptor to the disk."},
    {"replace_word", replace_word, METH_VARARGS, "Write word *number* of shared memory if it is still *before*; return whether it was."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "tarshards.storage._mapped", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__mapped(void) {
    PyObject *result = PyModule_Create(&module);
    PyObject *type = PyType_FromSpec(&mapping_spec);
    PyObject *capsule = PyCapsule_New(&offered, GUARD, NULL);
    if (!result || !type || !capsule || PyModule_AddObjectRef(result, "Mapping", type) < 0 ||
        PyModule_AddObjectRef(result, "guarded", capsule) < 0)
        Py_CLEAR(result);
    Py_XDECREF(type);
    Py_XDECREF(capsule);
    if (!result) return NULL;
    pthread_atfork(NULL, NULL, after_fork);
    return result;
}

/* Map files into memory, and copy from them even if they shrink: the native twin of _mapped_py.py.
 *
 * If a file shrinks, touching a page of its mapping beyond the new end raises SIGBUS (mmap(2)). The handler here ends such
 * a copy, which then fails with OSError; any other SIGBUS goes to the handler that was installed before. Other kernels run
 * their own work under this handler (_guard.h).
 *
 * The page in which the file ends now raises no signal, and has zeros after that end. So a copy is valid only if a byte
 * that is looked at after it, the witness, is as it was. This takes no descriptor, of which a process may have fewer than
 * shards, and no system call, unless the byte has changed.
 *
 * Mappings are private, as some file systems (FUSE with direct I/O) have no shared ones; of a file that is only read, both
 * use the same pages. Other file systems map nothing: their files are kept open, and read.
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
#include <sys/uio.h>
#include <unistd.h>

#include "_guard.h"

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

#define OFTEN 32     /* copies after which it is looked whether they waited for a disk, which takes 0.3 us: 1% of them */
#define MOST_WAITED 8 /* of them; if more did, the next ones release the GIL. Of what is read ahead, fewer wait. */

typedef struct {
    PyObject_HEAD
    char *address; /* NULL if the file is empty */
    int is_copy;   /* whether it was read rather than mapped */
    int is_called; /* whether it is read by calls although it is mapped */
    int called;    /* the descriptor for these, or -1 */
    Py_ssize_t size;
    char *path;
    Witness witness;
    struct stat status; /* of the file, when it was opened */
    int held;           /* the descriptor of the file if it is held open, else -1 */
    int file, unmapped; /* the descriptor of a file that cannot be mapped, else -1; the errno of that, else 0 */
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

static void stop_guarded(void) { siglongjmp(*recovery, 1); }

/* Whether a witness is as it was, under the guard. */
typedef struct {
    Witness witness;
    volatile int is_unchanged;
} Look;

static void look(void *argument) {
    Look *this = argument;
    this->is_unchanged = is_unchanged(this->witness);
}

static void touch(void *address) { (void)*(const volatile char *)address; }

static PyTypeObject *mapping_type;

static Witness witness_of(PyObject *owner) {
    static const char nothing;
    const Mapping *self = (const Mapping *)owner;
    return Py_TYPE(owner) == mapping_type && self->witness.at ? self->witness : (Witness){&nothing, 0};
}

static int reaches(PyObject *owner, Py_ssize_t end) {
    const Mapping *self = (const Mapping *)owner;
    Look witness = {witness_of(owner), 0};
    struct stat now;
    if (Py_TYPE(owner) == mapping_type && self->file >= 0) return fstat(self->file, &now) == 0 && now.st_size >= end;
    if (!run_guarded(look, &witness) && witness.is_unchanged) return 1;
    const int found = self->held < 0 ? stat(self->path, &now) : fstat(self->held, &now);
    if (found == 0 && now.st_dev == self->status.st_dev && now.st_ino == self->status.st_ino) return now.st_size >= end;
    const Py_ssize_t page = (Py_ssize_t)sysconf(_SC_PAGESIZE), next = (end + page - 1) / page * page;
    return next < self->size && !run_guarded(touch, self->address + next); /* the size of a removed file is unknown */
}

static int waits(void) {
    static __thread struct {
        int copies, have_waited;
        long disk_reads;
    } recent;
    if (++recent.copies >= OFTEN) {
        const long now = disk_reads();
        recent.have_waited = now - recent.disk_reads > MOST_WAITED;
        recent.disk_reads = now;
        recent.copies = 0;
    }
    return recent.have_waited;
}

typedef struct {
    char *target;
    const char *source;
    size_t size;
} Copy;

static void copy(void *argument) {
    const Copy *this = argument;
    memcpy(this->target, this->source, this->size);
}

/* Copy bytes from the mapping; return 0, or -1 if the file has shrunk. */
static int copy_mapped(const Mapping *self, Py_ssize_t offset, char *target, Py_ssize_t size) {
    Copy this = {target, self->address + offset, (size_t)size};
    return run_guarded(copy, &this) || !reaches((PyObject *)self, offset + size) ? -1 : 0;
}

static int is_called(PyObject *owner) { return Py_TYPE(owner) == mapping_type && ((Mapping *)owner)->is_called; }

/* Return a descriptor to read the file by; -1 if it is not held open, and another file has its path now. */
static int begin_calls(const Mapping *self) {
    struct stat now;
    if (self->called >= 0) return self->called;
    const int file = open(self->path, O_RDONLY | O_CLOEXEC);
    if (file >= 0 && fstat(file, &now) == 0 && now.st_dev == self->status.st_dev && now.st_ino == self->status.st_ino) return file;
    if (file >= 0) close(file);
    return -1;
}

static int fetch(PyObject *owner, Py_ssize_t offset, char *head_target, Py_ssize_t head, char *target, Py_ssize_t size) {
    const Mapping *self = (const Mapping *)owner;
    const int file = begin_calls(self);
    if (file < 0) return copy_mapped(self, offset, head_target, head) || copy_mapped(self, offset + head, target, size) ? -1 : 0;
    struct iovec parts[] = {{head_target, (size_t)head}, {target, (size_t)size}};
    Py_ssize_t left = head + size;
    while (left) {
        const Py_ssize_t more = preadv(file, parts, 2, offset + head + size - left); /* at most 2 GiB */
        if (more < 0 && errno == EINTR) continue;
        if (more <= 0) break;
        left -= more;
        size_t taken = (size_t)more;
        for (int i = 0; i < 2; i++) {
            const size_t own = taken < parts[i].iov_len ? taken : parts[i].iov_len;
            parts[i].iov_base = (char *)parts[i].iov_base + own, parts[i].iov_len -= own, taken -= own;
        }
    }
    if (file != self->called) close(file);
    return left ? -1 : 0;
}

static Guard offered = {run_guarded, stop_guarded, witness_of, reaches, is_called, fetch, waits};

/* Read *size* bytes at an offset of a file into memory; NULL, with errno set, if that fails or the file is shorter. */
static char *read_part(int file, Py_ssize_t size, Py_ssize_t offset) {
    char *data = malloc((size_t)size);
    Py_ssize_t done = 0, more = 1;
    while (data && done < size && more > 0) {
        more = pread(file, data + done, (size_t)(size - done), offset + done);
        done += more > 0 ? more : 0;
    }
    if (data && done < size) {
        if (more == 0) errno = EIO;
        free(data);
        data = NULL;
    }
    return data;
}

/* Find the witness of a file: the offset and the value of the last byte of its last page that is not zero, or else of its
 * last byte. Return 0 with errno set if that fails. The page is not read through the mapping, which may read far around. */
static int find_witness(int file, Py_ssize_t size, Py_ssize_t *offset, char *value) {
    const Py_ssize_t last = size - 1, begin = last - last % (Py_ssize_t)sysconf(_SC_PAGESIZE);
    char *page = read_part(file, size - begin, begin);
    if (!page) return 0;
    *offset = last;
    while (*offset > begin && !page[*offset - begin]) --*offset;
    if (!(*value = page[*offset - begin])) *offset = last;
    free(page);
    return 1;
}

/* Map the file at the path, or read it if it has at most *copied* bytes; keep it open if it cannot be mapped. Return 0 with
 * errno set if that fails: EINTR if it is to be tried again. */
static int open_file(Mapping *self, Py_ssize_t copied) {
    const int file = open(self->path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    int is_open = fstat(file, &self->status) == 0;
    if (is_open && !S_ISREG(self->status.st_mode)) {
        errno = S_ISDIR(self->status.st_mode) ? EISDIR : ENODEV;
        is_open = 0;
    }
    const Py_ssize_t size = (Py_ssize_t)self->status.st_size;
    Py_ssize_t offset = 0;
    char value = 0;
    self->is_copy = is_open && size && size <= copied;
    if (self->is_copy) {
        is_open = (self->address = read_part(file, size, 0)) != NULL;
    } else if (is_open && size && (is_open = find_witness(file, size, &offset, &value))) {
        void *address = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, file, 0);
        if (address != MAP_FAILED) {
            self->address = address;
            self->witness = (Witness){self->address + offset, value};
        } else if ((is_open = errno != EINTR)) {
            self->unmapped = errno;
            self->file = file;
        }
    }
    self->size = size;
    if (self->file >= 0) return 1;
    const int error = errno;
    close(file);
    errno = error;
    return is_open;
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    static char *names[] = {"path", "copied", NULL};
    PyObject *path;
    Py_ssize_t copied = 0;
    if (!PyArg_ParseTupleAndKeywords(args, options, "O&|n:Mapping", names, PyUnicode_FSConverter, &path, &copied)) return NULL;
    Mapping *self = (Mapping *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self) {
        self->held = self->file = self->called = -1;
        self->path = strdup(PyBytes_AsString(path));
        int is_open;
        do {
            Py_BEGIN_ALLOW_THREADS
            is_open = self->path && open_file(self, copied);
            Py_END_ALLOW_THREADS
        } while (!is_open && errno == EINTR && !PyErr_CheckSignals());
        if (!is_open) {
            if (!PyErr_Occurred()) PyErr_SetFromErrno(PyExc_OSError);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static void mapping_dealloc(PyObject *object) {
    Mapping *self = (Mapping *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->address && self->is_copy) free(self->address);
    else if (self->address) munmap(self->address, (size_t)self->size);
    if (self->held >= 0) close(self->held);
    if (self->called >= 0) close(self->called);
    if (self->file >= 0) close(self->file);
    free(self->path);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Read *size* bytes at an offset of a file that is not mapped; return 0 with an exception set if that fails. */
static int read_file(const Mapping *self, char *target, Py_ssize_t size, Py_ssize_t offset) {
    for (Py_ssize_t done = 0, more; done < size; done += more > 0 ? more : 0) {
        Py_BEGIN_ALLOW_THREADS
        more = pread(self->file, target + done, (size_t)(size - done), offset + done);
        Py_END_ALLOW_THREADS
        if (more == 0) PyErr_SetString(PyExc_OSError, SHRUNK);
        else if (more < 0 && errno != EINTR) PyErr_SetFromErrno(PyExc_OSError);
        if (more <= 0 && (PyErr_Occurred() || PyErr_CheckSignals())) return 0;
    }
    return 1;
}

static PyObject *read_bytes(Mapping *self, Py_ssize_t offset, Py_ssize_t size) {
    if (offset < 0 || size < 0 || offset > self->size || size > self->size - offset)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at offset %zd of %zd", size, offset, self->size);
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    if (!data || !size) return data;
    if (self->file >= 0) {
        if (!read_file(self, PyBytes_AsString(data), size, offset)) Py_CLEAR(data);
        return data;
    }
    char *const target = PyBytes_AsString(data);
    int failure; /* of copying, or since bytes may be missing */
    if (self->is_called) {
        Py_BEGIN_ALLOW_THREADS
        failure = fetch((PyObject *)self, offset, NULL, 0, target, size);
        Py_END_ALLOW_THREADS
    } else if (size < LARGE && !waits()) {
        failure = copy_mapped(self, offset, target, size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failure = copy_mapped(self, offset, target, size);
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

static PyObject *mapping_check(PyObject *object, PyObject *end) {
    const Py_ssize_t bytes = PyLong_AsSsize_t(end);
    if (PyErr_Occurred()) return NULL;
    if (!reaches(object, bytes)) return PyErr_Format(PyExc_OSError, SHRUNK);
    Py_RETURN_NONE;
}

static PyObject *mapping_drop(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "drop takes an offset and a size");
    Mapping *self = (Mapping *)object;
    Py_ssize_t offset = PyLong_AsSsize_t(args[0]), size = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (offset < 0 || size < 0 || offset > self->size || size > self->size - offset)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at offset %zd of %zd", size, offset, self->size);
    Py_ssize_t extra = offset % (Py_ssize_t)sysconf(_SC_PAGESIZE);
    if (size && self->address && !self->is_copy) madvise(self->address + offset - extra, (size_t)(size + extra), MADV_DONTNEED); /* only advice */
    Py_RETURN_NONE;
}

static PyObject *mapping_scatter(PyObject *object, PyObject *flag) {
    const Mapping *self = (Mapping *)object;
    int is_set = PyObject_IsTrue(flag);
    if (is_set < 0) return NULL;
#ifdef POSIX_FADV_RANDOM
    const int file = self->file >= 0 ? self->file : self->called;
    if (file >= 0) posix_fadvise(file, 0, 0, is_set ? POSIX_FADV_RANDOM : POSIX_FADV_NORMAL);
#endif
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

static PyObject *mapping_read_by_calls(PyObject *object, PyObject *hold) {
    Mapping *self = (Mapping *)object;
    const int is_held = PyObject_IsTrue(hold);
    if (is_held < 0) return NULL;
    if (!self->address || self->is_copy) Py_RETURN_NONE;
    if (is_held && self->called < 0) self->called = begin_calls(self);
    self->is_called = 1;
    Py_RETURN_NONE;
}

static PyObject *mapping_unmapped(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLong(((Mapping *)object)->unmapped);
}

static Py_ssize_t mapping_length(PyObject *object) { return ((Mapping *)object)->size; }

static int mapping_buffer(PyObject *object, Py_buffer *view, int flags) {
    static char nothing;
    Mapping *self = (Mapping *)object;
    if (self->file >= 0) return PyErr_SetString(PyExc_TypeError, "a file that is not mapped has no buffer"), -1;
    return PyBuffer_FillInfo(view, object, self->address ? self->address : &nothing, self->size, 1, flags);
}

static PyMethodDef mapping_methods[] = {
    {"read", (PyCFunction)(void (*)(void))mapping_read, METH_FASTCALL, "Return *size* bytes at *offset*."},
    {"check", mapping_check, METH_O, "Raise OSError unless the file still has its first *end* bytes: call it after copying them."},
    {"drop", (PyCFunction)(void (*)(void))mapping_drop, METH_FASTCALL,
     "Release the memory of *size* bytes at *offset*; they can still be read."},
    {"scatter", mapping_scatter, METH_O, "Tell the system whether reads are few and far apart, so that it does not read ahead."},
    {"is_current", mapping_is_current, METH_NOARGS,
     "Return whether the path is still that of the same file, unmodified."},
    {"was_written", mapping_was_written, METH_NOARGS,
     "Return whether the path is still that of the same file, but the file was written to."},
    {"hold_open", mapping_hold_open, METH_NOARGS,
     "Hold the file open, if possible: is_current is then faster, and checks whether the file was removed or written to."},
    {"read_by_calls", mapping_read_by_calls, METH_O,
     "Read by calls from now on, which take no page tables; with a true argument, keep the file open for them."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef mapping_attributes[] = {
    {"modified", mapping_modified, NULL, "The time of the last modification when the file was opened, in nanoseconds.", NULL},
    {"unmapped", mapping_unmapped, NULL, "The errno of mapping the file if that failed, so that it is read and no buffer; else 0.", NULL},
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
    .name = "tarshards.kernels._mapped.Mapping",
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
    PyModuleDef_HEAD_INIT, .m_name = "tarshards.kernels._mapped", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__mapped(void) {
    PyObject *result = PyModule_Create(&module);
    mapping_type = (PyTypeObject *)PyType_FromSpec(&mapping_spec);
    PyObject *capsule = PyCapsule_New(&offered, GUARD, NULL);
    if (!result || !mapping_type || !capsule || PyModule_AddObjectRef(result, "Mapping", (PyObject *)mapping_type) < 0 ||
        PyModule_AddObjectRef(result, "guard", capsule) < 0)
        Py_CLEAR(result);
    Py_XDECREF(capsule);
    if (!result) return NULL;
    pthread_atfork(NULL, NULL, after_fork);
    return result;
}

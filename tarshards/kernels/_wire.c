/* Wait for many sockets, and receive from them into their places: the native twin of _wire_py.py.
 *
 * One call receives what comes for many bodies, over many wake-ups of its thread, and takes the GIL once at its end.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

#define LITTLE (1 << 17) /* bytes: after less than this, from all sockets, the thread rests before it looks again */
#define STREAM (1 << 14)
#define REST_NS 500000   /* at 80 MB/s, 40 KB come meanwhile; a thread that is woken for each packet takes twice the CPU */

typedef struct {
    Py_buffer place;
    int has_place;
    int is_stream; /* without a place, but of a body: it is worth waiting for more */
    Py_ssize_t done;
    int failure; /* an errno */
} Entry;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void rest(void) {
    const struct timespec pause = {0, REST_NS};
    nanosleep(&pause, NULL);
}

/* Receive into the places of those sockets that are ready. Return whether the call is over; add to *received*. */
static int receive_ready(struct pollfd *sockets, Entry *entries, Py_ssize_t count, Py_ssize_t *received) {
    int is_over = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Entry *entry = &entries[i];
        if (!sockets[i].revents) continue;
        if (!entry->has_place) {
            is_over = 1;
            continue;
        }
        if (entry->done && sockets[i].revents & POLLERR) { /* the next call returns the error, which is told once */
            is_over = 1;
            continue;
        }
        const Py_ssize_t left = entry->place.len - entry->done;
        const ssize_t got = recv(sockets[i].fd, (char *)entry->place.buf + entry->done, (size_t)left, MSG_DONTWAIT);
        if (got > 0) {
            entry->done += got;
            *received += got;
            if (got == left) is_over = 1;
        } else if (got == 0) {
            is_over = 1;
        } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            entry->failure = errno;
            is_over = 1;
        } else {
            sockets[i].revents = 0;
        }
    }
    return is_over;
}

/* Return whether all that is ready are streams with little to read: there is soon more, from others too. */
static int has_little(const struct pollfd *sockets, const Entry *entries, Py_ssize_t count) {
    Py_ssize_t there = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int size = 0;
        if (!sockets[i].revents) continue;
        if (!entries[i].is_stream || sockets[i].revents != POLLIN) return 0;
        if (ioctl(sockets[i].fd, FIONREAD, &size) < 0) return 0;
        there += size;
    }
    return there && there < LITTLE;
}

/* Wait, and receive, until something is complete or the time is over. Return 0, or an errno: EINTR if a signal has come. */
static int wait_for(struct pollfd *sockets, Entry *entries, Py_ssize_t count, int milliseconds) {
    const int64_t end = now_ns() + (int64_t)milliseconds * 1000000;
    for (int left = milliseconds;;) {
        const int ready = poll(sockets, (nfds_t)count, left);
        if (ready < 0) return errno;
        if (ready == 0) return 0;
        if (has_little(sockets, entries, count)) {
            rest();
            poll(sockets, (nfds_t)count, 0);
        }
        Py_ssize_t received = 0;
        if (receive_ready(sockets, entries, count, &received)) return 0;
        if (received < LITTLE) rest();
        const int64_t remaining = (end - now_ns()) / 1000000;
        if (remaining <= 0) return 0;
        left = (int)remaining;
    }
}

static PyObject *results_of(const struct pollfd *sockets, const Entry *entries, Py_ssize_t count) {
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        const Entry *entry = &entries[i];
        if (!sockets[i].revents && !entry->done) continue;
        long long value = sockets[i].revents;
        if (entry->has_place) value = entry->done ? entry->done : -entry->failure;
        PyObject *pair = Py_BuildValue("(nL)", i, value);
        if (!pair || PyList_Append(found, pair) < 0) Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    return found;
}

static int read_entry(PyObject *wait, struct pollfd *socket, Entry *entry) {
    PyObject *place;
    int events;
    if (!PyTuple_Check(wait) || PyTuple_Size(wait) < 3) {
        PyErr_SetString(PyExc_TypeError, "a wait is a descriptor, events and a place");
        return -1;
    }
    socket->fd = (int)PyLong_AsLong(PyTuple_GetItem(wait, 0));
    events = (int)PyLong_AsLong(PyTuple_GetItem(wait, 1));
    if (PyErr_Occurred()) return -1;
    socket->events = (short)(events & (STREAM - 1));
    entry->is_stream = (events & STREAM) != 0;
    place = PyTuple_GetItem(wait, 2);
    if (place == Py_None) return 0;
    if (PyObject_GetBuffer(place, &entry->place, PyBUF_WRITABLE) < 0) return -1;
    entry->has_place = 1;
    return 0;
}

static PyObject *receive(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *waits, *found = NULL;
    int milliseconds, failure = 0;
    if (!PyArg_ParseTuple(args, "Oi:receive", &waits, &milliseconds)) return NULL;
    if (!PyList_Check(waits)) return PyErr_Format(PyExc_TypeError, "waits are a list");
    const Py_ssize_t count = PyList_Size(waits);
    struct pollfd *sockets = calloc((size_t)count + 1, sizeof(struct pollfd));
    Entry *entries = calloc((size_t)count + 1, sizeof(Entry));
    Py_ssize_t known = 0;
    if (!sockets || !entries) PyErr_NoMemory();
    else
        while (known < count && read_entry(PyList_GetItem(waits, known), &sockets[known], &entries[known]) == 0) known++;
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        failure = wait_for(sockets, entries, count, milliseconds);
        Py_END_ALLOW_THREADS
        if (failure && failure != EINTR) {
            errno = failure;
            PyErr_SetFromErrno(PyExc_OSError);
        } else if (!failure || PyErr_CheckSignals() == 0) {
            found = results_of(sockets, entries, count);
        }
    }
    for (Py_ssize_t i = 0; i < known; i++)
        if (entries[i].has_place) PyBuffer_Release(&entries[i].place);
    free(sockets);
    free(entries);
    return found;
}

static PyMethodDef methods[] = {
    {"receive", receive, METH_VARARGS,
     "receive(waits, milliseconds) -> [(index, value)]; see tarshards.kernels._wire_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_wire", "Many sockets at once.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__wire(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "STREAM", STREAM) < 0) Py_CLEAR(made);
    return made;
}

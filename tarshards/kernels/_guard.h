/* The guard of _mapped.c, for kernels that read mapped files themselves: a capsule of this name. */
#define GUARD "tarshards.kernels._mapped.guard"

#include <sys/resource.h>

#define LARGE (1 << 16) /* bytes: a copy of at least this size releases the GIL */

#define SHRUNK "the file has shrunk since it was opened" /* the reason of the OSError after that */

/* A byte of the last page of a mapped file, the last one that is not zero. While it has its value, the file has not shrunk,
 * or only by zeros, which the page in which a file ends has after its end too. */
typedef struct {
    const volatile char *at;
    char value;
} Witness;

typedef struct {
    /* Call work(argument). Return 0, or -1 if it touched a page beyond the end of a file that has shrunk. A longjmp leaves
       it there, so it must not hold a lock or own memory. */
    int (*run)(void (*work)(void *argument), void *argument);

    /* End the work that this thread runs, as such a page does. */
    void (*stop)(void);

    /* Return the witness of a Mapping, or one that never changes for any other object. */
    Witness (*witness)(PyObject *owner);

    /* Return whether a Mapping still has its first *end* bytes, also where its witness has changed. Needs no GIL. */
    int (*reaches)(PyObject *owner, Py_ssize_t end);

    /* Return whether a Mapping is read by calls, which take no page tables. */
    int (*is_called)(PyObject *owner);

    /* Read bytes of such a Mapping, at first *head* ones, then *size* others. Return 0, or -1 if that fails. Needs no GIL. */
    int (*fetch)(PyObject *owner, Py_ssize_t offset, char *head_target, Py_ssize_t head, char *target, Py_ssize_t size);

    /* Return whether a copy of this thread, even a small one, should release the GIL, since others before it have waited
       for a disk. Call it once for each copy. */
    int (*waits)(void);
} Guard;

/* Return whether what was copied of a file is valid: whether the witness is as it was. Needs the guard. */
static inline int is_unchanged(Witness witness) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the copy is made before */
    return *witness.at == witness.value;
}

#ifndef RUSAGE_THREAD
#define RUSAGE_THREAD RUSAGE_SELF /* systems that count by process only */
#endif

/* Return how many pages this thread has waited for. */
static inline long disk_reads(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_majflt;
}

/* Return the guard; NULL with an exception set if the module is missing. */
static inline const Guard *import_guard(void) {
    PyObject *storage = PyImport_ImportModule("tarshards.kernels._mapped");
    PyObject *capsule = storage ? PyObject_GetAttrString(storage, "guard") : NULL;
    const Guard *guard = capsule ? PyCapsule_GetPointer(capsule, GUARD) : NULL;
    Py_XDECREF(storage);
    Py_XDECREF(capsule);
    return guard;
}

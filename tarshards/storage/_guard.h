/* The guard of _mapped.c, for kernels that read mapped files themselves: a capsule of this name. */
#define GUARD "tarshards.storage._mapped.guarded"

/* Call work(argument). Return 0, or -1 if it touched a page beyond the end of a file that has shrunk. A longjmp leaves it
   there, so it must not hold a lock or own memory. */
typedef int (*Guarded)(void (*work)(void *argument), void *argument);

#define SHRUNK "the file has shrunk since it was opened" /* the reason of the OSError after that */

/* Return the function; NULL with an exception set if the module is missing. */
static inline Guarded import_guard(void) {
    PyObject *storage = PyImport_ImportModule("tarshards.storage._mapped");
    PyObject *capsule = storage ? PyObject_GetAttrString(storage, "guarded") : NULL;
    const Guarded *offered = capsule ? PyCapsule_GetPointer(capsule, GUARD) : NULL;
    Py_XDECREF(storage);
    Py_XDECREF(capsule);
    return offered ? *offered : NULL;
}

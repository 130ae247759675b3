/* What _mapped.c offers to kernels that read mapped files themselves, as a capsule of this name. */
#define GUARD "tarshards.storage._mapped.guarded"

/* Call work(argument). Return 0, or -1 where it touched a page that has gone because the file has shrunk: it was left
   there, so it must hold no lock and own no memory. */
typedef int (*Guarded)(void (*work)(void *argument), void *argument);

#define SHRUNK "the file has shrunk since it was opened" /* the reason of the OSError after that */

/* Return the function; NULL with an exception set where the module is missing. */
static inline Guarded import_guard(void) {
    PyObject *storage = PyImport_ImportModule("tarshards.storage._mapped");
    PyObject *capsule = storage ? PyObject_GetAttrString(storage, "guarded") : NULL;
    const Guarded *offered = capsule ? PyCapsule_GetPointer(capsule, GUARD) : NULL;
    Py_XDECREF(storage);
    Py_XDECREF(capsule);
    return offered ? *offered : NULL;
}

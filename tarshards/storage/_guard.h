/* What _mapped.c offers to kernels that read mapped files themselves, as a capsule of this name. */
#define GUARD "tarshards.storage._mapped.guarded"

/* Call work(argument). Return 0, or -1 where it touched a page that has gone because the file has shrunk: it was left
   there, so it must hold no lock and own no memory. */
typedef int (*Guarded)(void (*work)(void *argument), void *argument);

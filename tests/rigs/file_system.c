/* A file system with faults: preloaded, it lets system calls on files below a folder fail.
 *
 * FAULTS_BELOW is the folder. FAULTS has the faults, as "mmap:19,fsync:22,pread:4:2": the errno of each call, and of how
 * many calls one fails, the first included; without the last number all fail. "private:19" is mmap without MAP_SHARED.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(const char *call, const char *path, unsigned *calls) {
    const char *below = getenv("FAULTS_BELOW"), *faults = getenv("FAULTS");
    char name[32];
    if (!below || !faults || strncmp(path, below, strlen(below))) return 0;
    snprintf(name, sizeof name, "%s:", call);
    for (const char *at = faults; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, name, strlen(name))) continue;
        char *end;
        const long number = strtol(at + strlen(name), &end, 10), every = *end == ':' ? strtol(end + 1, NULL, 10) : 1;
        if (__atomic_fetch_add(calls, 1, __ATOMIC_SEQ_CST) % (unsigned)every) return 0;
        errno = (int)number;
        return 1;
    }
    return 0;
}

static int fails_at(const char *call, int file, unsigned *calls) {
    char link[64], path[PATH_MAX + 1];
    const int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, PATH_MAX);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path, calls);
}

static int fails_from(const char *call, int folder, const char *path, unsigned *calls) {
    return *path == '/' || folder == AT_FDCWD ? fails(call, path, calls) : fails_at(call, folder, calls);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define COUNT static unsigned calls

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        COUNT;                                                                                                         \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                \
        va_end(rest);                                                                                                  \
        return fails("open", path, &calls) ? -1 : NEXT(name)(path, flags, mode);                                       \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        COUNT;                                                                                                         \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                \
        va_end(rest);                                                                                                  \
        return fails_from("open", folder, path, &calls) ? -1 : NEXT(name)(folder, path, flags, mode);                  \
    }
OPENAT(openat)
OPENAT(openat64)

#define MMAP(name)                                                                                                     \
    void *name(void *address, size_t size, int protection, int flags, int file, off_t offset) {                        \
        COUNT;                                                                                                         \
        const char *call = flags & MAP_SHARED ? "mmap" : "private";                                                    \
        const int failed = file >= 0 && !(protection & PROT_EXEC) && fails_at(call, file, &calls);                     \
        return failed ? MAP_FAILED : NEXT(name)(address, size, protection, flags, file, offset);                       \
    }
MMAP(mmap)
MMAP(mmap64)

#define OF_FILE(type, failed, call, name, parameters, arguments)                                                       \
    type name parameters {                                                                                             \
        COUNT;                                                                                                         \
        return fails_at(call, file, &calls) ? failed : NEXT(name) arguments;                                           \
    }
OF_FILE(ssize_t, -1, "read", read, (int file, void *data, size_t size), (file, data, size))
OF_FILE(ssize_t, -1, "pread", pread, (int file, void *data, size_t size, off_t at), (file, data, size, at))
OF_FILE(ssize_t, -1, "pread", pread64, (int file, void *data, size_t size, off_t at), (file, data, size, at))
OF_FILE(ssize_t, -1, "write", write, (int file, const void *data, size_t size), (file, data, size))
OF_FILE(ssize_t, -1, "pwrite", pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
OF_FILE(ssize_t, -1, "pwrite", pwrite64, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
OF_FILE(int, -1, "fsync", fsync, (int file), (file))
OF_FILE(int, -1, "fsync", fdatasync, (int file), (file))
OF_FILE(int, -1, "ftruncate", ftruncate, (int file, off_t size), (file, size))
OF_FILE(int, -1, "ftruncate", ftruncate64, (int file, off_t size), (file, size))
OF_FILE(int, -1, "fchmod", fchmod, (int file, mode_t mode), (file, mode))
OF_FILE(int, -1, "flock", flock, (int file, int kind), (file, kind))

int link(const char *path, const char *target) {
    COUNT;
    return fails("link", target, &calls) ? -1 : NEXT(link)(path, target);
}

int linkat(int folder, const char *path, int other, const char *target, int flags) {
    COUNT;
    return fails_from("link", other, target, &calls) ? -1 : NEXT(linkat)(folder, path, other, target, flags);
}

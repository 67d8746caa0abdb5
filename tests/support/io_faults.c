/* Loaded by LD_PRELOAD: reading files whose path contains $FAULT_PATH fails, as on a broken disk.

   $FAULT_ERRNO   errno of the failure (5 EIO, 116 ESTALE, 2 ENOENT); 0: reads are cut short instead
   $FAULT_AT      "open": opening fails; "read": reading does
   $FAULT_AFTER   number of opens that succeed and can be read before it begins
   $FAULT_COUNTER file in which the opens of all processes are counted, one byte each */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define FDS 65536
static char faulty[FDS];

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

static int fault(void) { return atoi(setting("FAULT_ERRNO")); }

/* Count an open of a path, and return whether the fault has begun for it. */
static int begins(const char *path) {
    const char *wanted = setting("FAULT_PATH"), *counter = setting("FAULT_COUNTER");
    if (!path || !*wanted || !strstr(path, wanted)) return 0;
    long seen = 0;
    if (*counter) {
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
        int fd = real(counter, O_WRONLY | O_CREAT | O_APPEND, 0600);
        struct stat state;
        if (fd >= 0 && write(fd, "x", 1) == 1 && fstat(fd, &state) == 0) seen = state.st_size - 1;
        close(fd);
    }
    return seen >= atol(setting("FAULT_AFTER"));
}

static int opened(const char *path, int fd, int bad) {
    if (fd >= 0 && fd < FDS) faulty[fd] = (char)bad;
    return fd;
}

#define OPEN(NAME)                                                                     \
    int NAME(const char *path, int flags, ...) {                                       \
        va_list rest;                                                                  \
        va_start(rest, flags);                                                         \
        mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                                  \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #NAME);                 \
        int bad = begins(path);                                                        \
        if (bad && fault() && !strcmp(setting("FAULT_AT"), "open")) {                  \
            errno = fault();                                                           \
            return -1;                                                                 \
        }                                                                              \
        return opened(path, real(path, flags, mode), bad);                             \
    }
OPEN(open)
OPEN(open64)

/* Return whether a read fails; cut `count` to a few bytes where it is only to be short. */
static int fails(int fd, size_t *count) {
    if (fd < 0 || fd >= FDS || !faulty[fd]) return 0;
    if (fault()) {
        errno = fault();
        return 1;
    }
    if (*count > 37) *count = 37;
    return 0;
}

ssize_t read(int fd, void *buffer, size_t count) {
    ssize_t (*real)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    return fails(fd, &count) ? -1 : real(fd, buffer, count);
}

#define PREAD(NAME)                                                                    \
    ssize_t NAME(int fd, void *buffer, size_t count, off_t offset) {                   \
        ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, #NAME);         \
        return fails(fd, &count) ? -1 : real(fd, buffer, count, offset);               \
    }
PREAD(pread)
PREAD(pread64)

#define PREADV(NAME)                                                                   \
    ssize_t NAME(int fd, const struct iovec *parts, int n, off_t offset) {             \
        ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, #NAME); \
        struct iovec first = n > 0 ? parts[0] : (struct iovec){0};                     \
        if (fails(fd, &first.iov_len)) return -1;                                      \
        int cut = n > 0 && first.iov_len != parts[0].iov_len;                          \
        return cut ? real(fd, &first, 1, offset) : real(fd, parts, n, offset);         \
    }
PREADV(preadv)
PREADV(preadv64)

#define PREADV2(NAME)                                                                  \
    ssize_t NAME(int fd, const struct iovec *parts, int n, off_t offset, int flags) {  \
        ssize_t (*real)(int, const struct iovec *, int, off_t, int) = dlsym(RTLD_NEXT, #NAME); \
        struct iovec first = n > 0 ? parts[0] : (struct iovec){0};                     \
        if (fails(fd, &first.iov_len)) return -1;                                      \
        int cut = n > 0 && first.iov_len != parts[0].iov_len;                          \
        return cut ? real(fd, &first, 1, offset, flags) : real(fd, parts, n, offset, flags); \
    }
PREADV2(preadv2)
PREADV2(preadv64v2)

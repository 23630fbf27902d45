/* A library to preload (LD_PRELOAD): chosen calls of the C library fail on files below a folder.

   `faults_arm` chooses the calls: those that write, or those that read, from number `first` to before number `stop`.
   A failing call has no effect and sets errno to `error`. With `error` 0 it does half of its work instead, if it moves
   two bytes or more. `faults_count` says how many calls there were since `faults_arm`. */

#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, WRITES, READS };

static char folder[PATH_MAX];
static size_t folder_length;
static int armed, failure;
static long first, stop;
static atomic_long count;

void faults_arm(const char *where, int which, long from, long before, int error)
{
    armed = NOTHING;
    folder_length = strlen(where);
    memcpy(folder, where, folder_length + 1);
    first = from, stop = before, failure = error;
    count = 0;
    armed = which;
}

long faults_count(void) { return count; }

/* whether this call fails; it counts if `path` is in the folder */
static int fails(int which, const char *path)
{
    if (which != armed || path == NULL || strncmp(path, folder, folder_length) != 0)
        return 0;
    long number = count++;
    return number >= first && number < stop;
}

static int fails_at(int which, int file)
{
    if (which != armed)
        return 0;
    int before = errno;
    char link[32], path[PATH_MAX];
    static ssize_t (*follow)(const char *, char *, size_t);
    if (!follow)
        follow = dlsym(RTLD_NEXT, "readlink");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = follow(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    errno = before;
    return fails(which, path);
}

/* a path as it was given, absolute or below an open folder */
static int fails_in(int which, int parent, const char *path)
{
    return path != NULL && path[0] == '/' ? fails(which, path) : parent == AT_FDCWD ? 0 : fails_at(which, parent);
}

#define FAILING(test)                                                                                                  \
    if ((test) && failure)                                                                                             \
        return errno = failure, -1;

#define ORIGINAL(name)                                                                                                 \
    static __typeof__(name) *original;                                                                                 \
    if (!original)                                                                                                     \
        original = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);

/* what moves bytes: half of them, if errno is 0 */
#define MOVE(which, type, name, parameters, file, size, whole, half)                                                   \
    type name parameters                                                                                               \
    {                                                                                                                  \
        ORIGINAL(name)                                                                                                 \
        if (fails_at(which, file)) {                                                                                   \
            if (failure)                                                                                               \
                return errno = failure, -1;                                                                            \
            if (size > 1)                                                                                              \
                return original half;                                                                                  \
        }                                                                                                              \
        return original whole;                                                                                         \
    }

#define MOVE_VECTOR(which, name, parameters, whole, one)                                                               \
    ssize_t name parameters                                                                                            \
    {                                                                                                                  \
        ORIGINAL(name)                                                                                                 \
        if (fails_at(which, file)) {                                                                                   \
            if (failure)                                                                                               \
                return errno = failure, -1;                                                                            \
            if (pieces > 0 && piece[0].iov_len > 1) {                                                                  \
                struct iovec cut = {piece[0].iov_base, piece[0].iov_len / 2};                                          \
                return original one;                                                                                   \
            }                                                                                                          \
        }                                                                                                              \
        return original whole;                                                                                         \
    }

MOVE(WRITES, ssize_t, write, (int file, const void *data, size_t size), file, size, (file, data, size),
     (file, data, size / 2))
MOVE(WRITES, ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), file, size, (file, data, size, at),
     (file, data, size / 2, at))
MOVE(WRITES, ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), file, size,
     (file, data, size, at), (file, data, size / 2, at))
MOVE_VECTOR(WRITES, writev, (int file, const struct iovec *piece, int pieces), (file, piece, pieces), (file, &cut, 1))
MOVE_VECTOR(WRITES, pwritev, (int file, const struct iovec *piece, int pieces, off_t at), (file, piece, pieces, at),
            (file, &cut, 1, at))
MOVE_VECTOR(WRITES, pwritev64, (int file, const struct iovec *piece, int pieces, off64_t at), (file, piece, pieces, at),
            (file, &cut, 1, at))
MOVE_VECTOR(WRITES, pwritev2, (int file, const struct iovec *piece, int pieces, off_t at, int flags),
            (file, piece, pieces, at, flags), (file, &cut, 1, at, flags))
MOVE_VECTOR(WRITES, pwritev64v2, (int file, const struct iovec *piece, int pieces, off64_t at, int flags),
            (file, piece, pieces, at, flags), (file, &cut, 1, at, flags))

MOVE(READS, ssize_t, read, (int file, void *data, size_t size), file, size, (file, data, size), (file, data, size / 2))
MOVE(READS, ssize_t, pread, (int file, void *data, size_t size, off_t at), file, size, (file, data, size, at),
     (file, data, size / 2, at))
MOVE(READS, ssize_t, pread64, (int file, void *data, size_t size, off64_t at), file, size, (file, data, size, at),
     (file, data, size / 2, at))
MOVE_VECTOR(READS, readv, (int file, const struct iovec *piece, int pieces), (file, piece, pieces), (file, &cut, 1))
MOVE_VECTOR(READS, preadv, (int file, const struct iovec *piece, int pieces, off_t at), (file, piece, pieces, at),
            (file, &cut, 1, at))
MOVE_VECTOR(READS, preadv64, (int file, const struct iovec *piece, int pieces, off64_t at), (file, piece, pieces, at),
            (file, &cut, 1, at))
MOVE_VECTOR(READS, preadv2, (int file, const struct iovec *piece, int pieces, off_t at, int flags),
            (file, piece, pieces, at, flags), (file, &cut, 1, at, flags))
MOVE_VECTOR(READS, preadv64v2, (int file, const struct iovec *piece, int pieces, off64_t at, int flags),
            (file, piece, pieces, at, flags), (file, &cut, 1, at, flags))

#define CALL(name, parameters, test, arguments)                                                                        \
    int name parameters                                                                                                \
    {                                                                                                                  \
        ORIGINAL(name)                                                                                                 \
        FAILING(test)                                                                                                  \
        return original arguments;                                                                                     \
    }

/* what copies from file to file: an error, if either fails */
#define COPY(name, parameters, to, from, arguments)                                                                    \
    ssize_t name parameters                                                                                            \
    {                                                                                                                  \
        ORIGINAL(name)                                                                                                 \
        FAILING(fails_at(WRITES, to) || fails_at(READS, from))                                                         \
        return original arguments;                                                                                     \
    }

COPY(sendfile, (int to, int from, off_t *at, size_t size), to, from, (to, from, at, size))
COPY(sendfile64, (int to, int from, off64_t *at, size_t size), to, from, (to, from, at, size))
COPY(copy_file_range, (int from, off64_t *at, int to, off64_t *place, size_t size, unsigned flags), to, from,
     (from, at, to, place, size, flags))

CALL(ftruncate, (int file, off_t size), fails_at(WRITES, file), (file, size))
CALL(ftruncate64, (int file, off64_t size), fails_at(WRITES, file), (file, size))
CALL(fsync, (int file), fails_at(WRITES, file), (file))
CALL(fdatasync, (int file), fails_at(WRITES, file), (file))
CALL(rename, (const char *old, const char *new), fails(WRITES, new), (old, new))
CALL(renameat, (int from, const char *old, int to, const char *new), fails_in(WRITES, to, new), (from, old, to, new))
CALL(link, (const char *old, const char *new), fails(WRITES, new), (old, new))
CALL(linkat, (int from, const char *old, int to, const char *new, int flags), fails_in(WRITES, to, new),
     (from, old, to, new, flags))
CALL(symlink, (const char *old, const char *new), fails(WRITES, new), (old, new))
CALL(mkdir, (const char *path, mode_t mode), fails(WRITES, path), (path, mode))
CALL(mkdirat, (int parent, const char *path, mode_t mode), fails_in(WRITES, parent, path), (parent, path, mode))
CALL(unlink, (const char *path), fails(WRITES, path), (path))
CALL(unlinkat, (int parent, const char *path, int flags), fails_in(WRITES, parent, path), (parent, path, flags))
CALL(rmdir, (const char *path), fails(WRITES, path), (path))
CALL(utimensat, (int parent, const char *path, const struct timespec times[2], int flags),
     fails_in(WRITES, parent, path), (parent, path, times, flags))

CALL(stat, (const char *path, struct stat *found), fails(READS, path), (path, found))
CALL(stat64, (const char *path, struct stat64 *found), fails(READS, path), (path, found))
CALL(lstat, (const char *path, struct stat *found), fails(READS, path), (path, found))
CALL(lstat64, (const char *path, struct stat64 *found), fails(READS, path), (path, found))
CALL(fstat, (int file, struct stat *found), fails_at(READS, file), (file, found))
CALL(fstat64, (int file, struct stat64 *found), fails_at(READS, file), (file, found))
CALL(fstatat, (int parent, const char *path, struct stat *found, int flags), fails_in(READS, parent, path),
     (parent, path, found, flags))
CALL(fstatat64, (int parent, const char *path, struct stat64 *found, int flags), fails_in(READS, parent, path),
     (parent, path, found, flags))
CALL(access, (const char *path, int mode), fails(READS, path), (path, mode))
CALL(faccessat, (int parent, const char *path, int mode, int flags), fails_in(READS, parent, path),
     (parent, path, mode, flags))

/* the same for programs that were linked with an older C library */
int __xstat(int version, const char *path, struct stat *found);
int __lxstat(int version, const char *path, struct stat *found);
int __fxstat(int version, int file, struct stat *found);
int __xstat64(int version, const char *path, struct stat64 *found);
int __lxstat64(int version, const char *path, struct stat64 *found);
int __fxstat64(int version, int file, struct stat64 *found);
CALL(__xstat, (int version, const char *path, struct stat *found), fails(READS, path), (version, path, found))
CALL(__lxstat, (int version, const char *path, struct stat *found), fails(READS, path), (version, path, found))
CALL(__fxstat, (int version, int file, struct stat *found), fails_at(READS, file), (version, file, found))
CALL(__xstat64, (int version, const char *path, struct stat64 *found), fails(READS, path), (version, path, found))
CALL(__lxstat64, (int version, const char *path, struct stat64 *found), fails(READS, path), (version, path, found))
CALL(__fxstat64, (int version, int file, struct stat64 *found), fails_at(READS, file), (version, file, found))

static int opens(int parent, const char *path, int flags)
{
    int writes = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY;
    return fails_in(writes ? WRITES : READS, parent, path);
}

#define OPEN(name, parameters, last, parent, arguments)                                                                \
    int name parameters                                                                                                \
    {                                                                                                                  \
        ORIGINAL(name)                                                                                                 \
        va_list rest;                                                                                                  \
        va_start(rest, last);                                                                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        FAILING(opens(parent, path, flags))                                                                            \
        return original arguments;                                                                                     \
    }

OPEN(open, (const char *path, int flags, ...), flags, AT_FDCWD, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), flags, AT_FDCWD, (path, flags, mode))
OPEN(openat, (int parent, const char *path, int flags, ...), flags, parent, (parent, path, flags, mode))
OPEN(openat64, (int parent, const char *path, int flags, ...), flags, parent, (parent, path, flags, mode))

DIR *opendir(const char *path)
{
    ORIGINAL(opendir)
    if (fails(READS, path))
        return errno = failure ? failure : EIO, NULL;
    return original(path);
}

struct dirent64 *readdir64(DIR *found)
{
    ORIGINAL(readdir64)
    if (fails_at(READS, dirfd(found)))
        return errno = failure ? failure : EIO, NULL;
    return original(found);
}

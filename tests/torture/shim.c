/* Counts the file system calls of one process on paths under one folder, and at the n-th of them kills the process or
 * fails the call. Preloaded with LD_PRELOAD; silent until `torture_arm`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* What a call does; a case counts the kinds in its mask. tests/torture/shim.py has the same list. */
enum { OPEN = 1, CREATE = 2, WRITE = 4, SYNC = 8, RENAME = 16, LINK = 32, UNLINK = 64, TRUNCATE = 128, MKDIR = 256,
       READ = 512 };
/* What happens at the n-th counted call. */
enum { NOTHING, KILL, KILL_HALF_WRITTEN, FAIL, FAIL_HALF_WRITTEN };

#define DESCRIPTORS 65536
static char folder[PATH_MAX];
static size_t folder_length;
static int armed, mask, action, error, sticky, trace = -1;
static long at, count;
static char watched[DESCRIPTORS];

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* Arm the shim: at the `n`-th call of a kind in `kinds` (0: never) do `what`; `again`: and at every later one. */
void torture_arm(const char *under, int kinds, long n, int what, int with, int again, int trace_into) {
  strncpy(folder, under, sizeof folder - 1);
  folder_length = strlen(folder);
  mask = kinds, at = n, action = what, error = with, sticky = again, trace = trace_into;
  count = 0;
  armed = 1;
}

/* Let every call through again; returns how many were counted. */
long torture_disarm(void) {
  armed = 0;
  return count;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int is_under(const char *path) {
  char absolute[PATH_MAX];
  if (!armed || path == NULL) return 0;
  if (path[0] != '/') {
    if (getcwd(absolute, sizeof absolute) == NULL) return 0;
    size_t length = strlen(absolute);
    snprintf(absolute + length, sizeof absolute - length, "/%s", path);
    path = absolute;
  }
  return strncmp(path, folder, folder_length) == 0 && (path[folder_length] == '/' || path[folder_length] == 0);
}

static int is_watched(int fd) { return armed && fd >= 0 && fd < DESCRIPTORS && watched[fd]; }

/* Count a call and tell what to do with it. */
static int verdict(int kind, const char *name, const char *path, long long size) {
  if (!(mask & kind)) return NOTHING;
  long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
  if (trace >= 0) {
    char line[PATH_MAX + 100];
    int length = snprintf(line, sizeof line, "%ld %d %s %lld %s\n", number, kind, name, size, path ? path : "-");
    ssize_t written = REAL(write)(trace, line, (size_t)length);
    (void)written;
  }
  if (number == at) {
    if (action == KILL) die();
    return action;
  }
  if (number > at && at > 0 && (sticky || (action == FAIL_HALF_WRITTEN && number == at + 1)) && action >= FAIL)
    return FAIL;
  return NOTHING;
}

static int fails(int kind, const char *name, const char *path) {
  int what = verdict(kind, name, path, 0);
  if (what == KILL_HALF_WRITTEN) die();
  if (what != FAIL && what != FAIL_HALF_WRITTEN) return 0;
  errno = error;
  return 1;
}

/* Judge a write: returns how many bytes of it to write, -1 for a failure; `*then` is 1 to die afterwards. */
static ssize_t allowed(const char *name, size_t size, int *then) {
  int what = verdict(WRITE, name, NULL, (long long)size);
  *then = what == KILL_HALF_WRITTEN;
  if (what == FAIL) {
    errno = error;
    return -1;
  }
  return (ssize_t)(what == KILL_HALF_WRITTEN || what == FAIL_HALF_WRITTEN ? size / 2 : size);
}

static int mark(int fd, const char *path) {
  if (fd >= 0 && fd < DESCRIPTORS) watched[fd] = (char)is_under(path);
  return fd;
}

static int kind_of_open(int flags) { return flags & (O_CREAT | O_TRUNC) ? CREATE : OPEN; }

#define OPENER(name)                                                                                                 \
  int name(const char *path, int flags, ...) {                                                                       \
    va_list rest;                                                                                                    \
    va_start(rest, flags);                                                                                           \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                          \
    va_end(rest);                                                                                                    \
    if (is_under(path) && fails(kind_of_open(flags), #name, path)) return -1;                                        \
    return mark(REAL(name)(path, flags, mode), path);                                                                \
  }
OPENER(open)
OPENER(open64)

#define OPENER_AT(name)                                                                                              \
  int name(int place, const char *path, int flags, ...) {                                                            \
    va_list rest;                                                                                                    \
    va_start(rest, flags);                                                                                           \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                          \
    va_end(rest);                                                                                                    \
    if (is_under(path) && fails(kind_of_open(flags), #name, path)) return -1;                                        \
    return mark(REAL(name)(place, path, flags, mode), path);                                                         \
  }
OPENER_AT(openat)
OPENER_AT(openat64)

int __open_2(const char *path, int flags) {
  if (is_under(path) && fails(kind_of_open(flags), "open", path)) return -1;
  return mark(REAL(open)(path, flags), path);
}
int __open64_2(const char *path, int flags) { return __open_2(path, flags); }

int close(int fd) {
  if (fd >= 0 && fd < DESCRIPTORS) watched[fd] = 0;
  return REAL(close)(fd);
}

ssize_t write(int fd, const void *bytes, size_t size) {
  if (!is_watched(fd)) return REAL(write)(fd, bytes, size);
  int then;
  ssize_t part = allowed("write", size, &then);
  if (part < 0) return -1;
  ssize_t done = REAL(write)(fd, bytes, (size_t)part);
  if (then) die();
  return done;
}

#define PWRITER(name, offset_type)                                                                                   \
  ssize_t name(int fd, const void *bytes, size_t size, offset_type offset) {                                         \
    if (!is_watched(fd)) return REAL(name)(fd, bytes, size, offset);                                                 \
    int then;                                                                                                        \
    ssize_t part = allowed(#name, size, &then);                                                                      \
    if (part < 0) return -1;                                                                                         \
    ssize_t done = REAL(name)(fd, bytes, (size_t)part, offset);                                                      \
    if (then) die();                                                                                                 \
    return done;                                                                                                     \
  }
PWRITER(pwrite, off_t)
PWRITER(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int parts_count) {
  if (is_watched(fd) && fails(WRITE, "writev", NULL)) return -1;
  return REAL(writev)(fd, parts, parts_count);
}
ssize_t pwritev(int fd, const struct iovec *parts, int parts_count, off_t offset) {
  if (is_watched(fd) && fails(WRITE, "pwritev", NULL)) return -1;
  return REAL(pwritev)(fd, parts, parts_count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int parts_count, off64_t offset) {
  if (is_watched(fd) && fails(WRITE, "pwritev64", NULL)) return -1;
  return REAL(pwritev64)(fd, parts, parts_count, offset);
}

ssize_t read(int fd, void *bytes, size_t size) {
  if (is_watched(fd) && fails(READ, "read", NULL)) return -1;
  return REAL(read)(fd, bytes, size);
}
ssize_t pread(int fd, void *bytes, size_t size, off_t offset) {
  if (is_watched(fd) && fails(READ, "pread", NULL)) return -1;
  return REAL(pread)(fd, bytes, size, offset);
}
ssize_t pread64(int fd, void *bytes, size_t size, off64_t offset) {
  if (is_watched(fd) && fails(READ, "pread64", NULL)) return -1;
  return REAL(pread64)(fd, bytes, size, offset);
}
ssize_t preadv(int fd, const struct iovec *parts, int parts_count, off_t offset) {
  if (is_watched(fd) && fails(READ, "preadv", NULL)) return -1;
  return REAL(preadv)(fd, parts, parts_count, offset);
}
ssize_t preadv64(int fd, const struct iovec *parts, int parts_count, off64_t offset) {
  if (is_watched(fd) && fails(READ, "preadv64", NULL)) return -1;
  return REAL(preadv64)(fd, parts, parts_count, offset);
}

int fsync(int fd) { return is_watched(fd) && fails(SYNC, "fsync", NULL) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return is_watched(fd) && fails(SYNC, "fdatasync", NULL) ? -1 : REAL(fdatasync)(fd); }

int ftruncate(int fd, off_t size) {
  return is_watched(fd) && fails(TRUNCATE, "ftruncate", NULL) ? -1 : REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) {
  return is_watched(fd) && fails(TRUNCATE, "ftruncate64", NULL) ? -1 : REAL(ftruncate64)(fd, size);
}
int truncate(const char *path, off_t size) {
  return is_under(path) && fails(TRUNCATE, "truncate", path) ? -1 : REAL(truncate)(path, size);
}
int truncate64(const char *path, off64_t size) {
  return is_under(path) && fails(TRUNCATE, "truncate64", path) ? -1 : REAL(truncate64)(path, size);
}
int posix_fallocate(int fd, off_t offset, off_t size) {
  return is_watched(fd) && fails(TRUNCATE, "posix_fallocate", NULL) ? error : REAL(posix_fallocate)(fd, offset, size);
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  return is_watched(fd) && fails(TRUNCATE, "posix_fallocate64", NULL) ? error
                                                                      : REAL(posix_fallocate64)(fd, offset, size);
}

int rename(const char *from, const char *to) {
  return is_under(to) && fails(RENAME, "rename", to) ? -1 : REAL(rename)(from, to);
}
int renameat(int from_place, const char *from, int to_place, const char *to) {
  return is_under(to) && fails(RENAME, "renameat", to) ? -1 : REAL(renameat)(from_place, from, to_place, to);
}
int renameat2(int from_place, const char *from, int to_place, const char *to, unsigned flags) {
  return is_under(to) && fails(RENAME, "renameat2", to) ? -1
                                                        : REAL(renameat2)(from_place, from, to_place, to, flags);
}
int link(const char *from, const char *to) {
  return is_under(to) && fails(LINK, "link", to) ? -1 : REAL(link)(from, to);
}
int linkat(int from_place, const char *from, int to_place, const char *to, int flags) {
  return is_under(to) && fails(LINK, "linkat", to) ? -1 : REAL(linkat)(from_place, from, to_place, to, flags);
}
int symlink(const char *target, const char *path) {
  return is_under(path) && fails(LINK, "symlink", path) ? -1 : REAL(symlink)(target, path);
}
int unlink(const char *path) { return is_under(path) && fails(UNLINK, "unlink", path) ? -1 : REAL(unlink)(path); }
int unlinkat(int place, const char *path, int flags) {
  return is_under(path) && fails(UNLINK, "unlinkat", path) ? -1 : REAL(unlinkat)(place, path, flags);
}
int rmdir(const char *path) { return is_under(path) && fails(UNLINK, "rmdir", path) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) {
  return is_under(path) && fails(MKDIR, "mkdir", path) ? -1 : REAL(mkdir)(path, mode);
}
int mkdirat(int place, const char *path, mode_t mode) {
  return is_under(path) && fails(MKDIR, "mkdirat", path) ? -1 : REAL(mkdirat)(place, path, mode);
}

/* SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A shared filesystem's latency: LATENCY_US microseconds before each call on a path below LATENCY_UNDER, or on a
 * descriptor of something there, by LD_PRELOAD. Reading a directory costs it once for each that is opened and again for
 * every 1,000 entries. What a program does without libc is not seen.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define SLOW_FDS 65536

static char known[SLOW_FDS]; /* of descriptors: 1 elsewhere, 2 there, 0 not asked yet (they also come by sockets) */

static const char *under(void) {
    static const char *place;
    if (!place) place = getenv("LATENCY_UNDER");
    return place ? place : "/nowhere";
}

static void wait_a_while(void) {
    static long us = -1;
    if (us < 0) us = getenv("LATENCY_US") ? atol(getenv("LATENCY_US")) : 0;
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

static int is_slow(int fd) {
    if (fd < 0 || fd >= SLOW_FDS) return 0;
    if (!known[fd]) {
        char name[64], path[PATH_MAX];
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(name, path, sizeof path - 1);
        path[n > 0 ? n : 0] = 0;
        known[fd] = 1 + !strncmp(path, under(), strlen(under()));
    }
    return known[fd] == 2;
}

static int is_there(int dir, const char *path) {
    if (!path || !*path) return is_slow(dir);
    if (*path == '/') return !strncmp(path, under(), strlen(under()));
    if (dir != AT_FDCWD) return is_slow(dir);
    char here[PATH_MAX];
    return getcwd(here, sizeof here) && !strncmp(here, under(), strlen(under()));
}

static void pay(int dir, const char *path) { if (is_there(dir, path)) wait_a_while(); }

static int opened(int fd, int there) {
    if (fd >= 0 && fd < SLOW_FDS) known[fd] = 1 + there;
    return fd;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
        int there = is_there(AT_FDCWD, path); if (there) wait_a_while(); \
        return opened(real(path, flags, mode), there); }
#define OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        REAL(int, #name, int, const char *, int, ...); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
        int there = is_there(dir, path); if (there) wait_a_while(); \
        return opened(real(dir, path, flags, mode), there); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define STAT(name, buf) \
    int name(const char *path, struct buf *st) { \
        REAL(int, #name, const char *, struct buf *); pay(AT_FDCWD, path); return real(path, st); }
STAT(stat, stat) STAT(lstat, stat) STAT(stat64, stat64) STAT(lstat64, stat64)
#define FSTATAT(name, buf) \
    int name(int dir, const char *path, struct buf *st, int flags) { \
        REAL(int, #name, int, const char *, struct buf *, int); pay(dir, path); return real(dir, path, st, flags); }
FSTATAT(fstatat, stat) FSTATAT(fstatat64, stat64)
int statx(int dir, const char *path, int flags, unsigned mask, struct statx *st) {
    REAL(int, "statx", int, const char *, int, unsigned, struct statx *);
    pay(dir, path); return real(dir, path, flags, mask, st); }

#define AT1(name) \
    int name(int dir, const char *path, int arg) { \
        REAL(int, #name, int, const char *, int); pay(dir, path); return real(dir, path, arg); }
AT1(unlinkat)
int unlink(const char *path) { REAL(int, "unlink", const char *); pay(AT_FDCWD, path); return real(path); }
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t); pay(AT_FDCWD, path); return real(path, mode); }
int mkdirat(int dir, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t); pay(dir, path); return real(dir, path, mode); }
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *); pay(AT_FDCWD, to); return real(from, to); }
int renameat(int one, const char *from, int other, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *); pay(other, to); return real(one, from, other, to); }
int renameat2(int one, const char *from, int other, const char *to, unsigned flags) {
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
    pay(other, to); return real(one, from, other, to, flags); }
int linkat(int one, const char *from, int other, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    pay(other, to); return real(one, from, other, to, flags); }

DIR *opendir(const char *path) { REAL(DIR *, "opendir", const char *); pay(AT_FDCWD, path); return real(path); }
DIR *fdopendir(int fd) { REAL(DIR *, "fdopendir", int); pay(fd, ""); return real(fd); }
#define READDIR(name, entry) \
    struct entry *name(DIR *dir) { \
        REAL(struct entry *, #name, DIR *); static __thread int count; \
        if (++count % 1000 == 0 && is_slow(dirfd(dir))) wait_a_while(); \
        return real(dir); }
READDIR(readdir, dirent) READDIR(readdir64, dirent64)

#define MOVE(name, ...) \
    REAL(ssize_t, name, int, __VA_ARGS__); if (is_slow(fd)) wait_a_while()
ssize_t read(int fd, void *buf, size_t n) { MOVE("read", void *, size_t); return real(fd, buf, n); }
ssize_t write(int fd, const void *buf, size_t n) { MOVE("write", const void *, size_t); return real(fd, buf, n); }
ssize_t pread64(int fd, void *buf, size_t n, off64_t at) {
    MOVE("pread64", void *, size_t, off64_t); return real(fd, buf, n, at); }
ssize_t pwrite64(int fd, const void *buf, size_t n, off64_t at) {
    MOVE("pwrite64", const void *, size_t, off64_t); return real(fd, buf, n, at); }
ssize_t preadv2(int fd, const struct iovec *iov, int n, off_t at, int flags) {
    MOVE("preadv2", const struct iovec *, int, off_t, int); return real(fd, iov, n, at, flags); }
ssize_t pwritev2(int fd, const struct iovec *iov, int n, off_t at, int flags) {
    MOVE("pwritev2", const struct iovec *, int, off_t, int); return real(fd, iov, n, at, flags); }
ssize_t preadv64v2(int fd, const struct iovec *iov, int n, off64_t at, int flags) {
    MOVE("preadv64v2", const struct iovec *, int, off64_t, int); return real(fd, iov, n, at, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *iov, int n, off64_t at, int flags) {
    MOVE("pwritev64v2", const struct iovec *, int, off64_t, int); return real(fd, iov, n, at, flags); }
ssize_t copy_file_range(int fd, off64_t *from, int out, off64_t *to, size_t n, unsigned flags) {
    MOVE("copy_file_range", off64_t *, int, off64_t *, size_t, unsigned); return real(fd, from, out, to, n, flags); }

int close(int fd) {
    REAL(int, "close", int);
    if (fd >= 0 && fd < SLOW_FDS) known[fd] = 0;
    return real(fd); }

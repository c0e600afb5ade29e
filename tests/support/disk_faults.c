/*
 * Breaks the calls by which a process writes to disk: the n-th one ends the process, fails, or does
 * half of what was asked. Preloaded; nothing is counted before faults_arm(), from then on the calls
 * of all threads are.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum mode { COUNT, KILL, FAIL, HALF, KILL_HALF };

static long left;
static long counted;
static int armed;
static enum mode mode;
static int error;
static char only[16];
static int log_fd = -1;

/* The n-th call (from 1) named *name* (any, where it is empty) meets *how*; log: -1, or where to. */
void faults_arm(long n, int how, int number, const char *name, int log)
{
	left = n;
	counted = 0;
	mode = (enum mode)how;
	error = number;
	strncpy(only, name, sizeof(only) - 1);
	log_fd = log;
	armed = 1;
}

/* Returns how many calls were counted. */
long faults_disarm(void)
{
	armed = 0;
	return counted;
}

static ssize_t (*real_write(void))(int, const void *, size_t)
{
	return (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
}

static void note(const char *name, int fd, const char *first, const char *second)
{
	char line[2048], link[32], path[512] = "";
	ssize_t got;
	int size;

	if (log_fd < 0)
		return;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	got = fd >= 0 ? readlink(link, path, sizeof(path) - 1) : 0;
	path[got > 0 ? got : 0] = '\0';
	size = snprintf(line, sizeof(line), "%s\t%s\t%.500s\t%.500s\n", name, path,
			first ? first : "", second ? second : "");
	if (real_write()(log_fd, line, (size_t)size) != size)
		_exit(99);
}

/* Returns what the call that is about to be made meets: COUNT for nothing. */
static enum mode meets(const char *name, int fd, const char *first, const char *second)
{
	if (!armed || (only[0] && strcmp(only, name) != 0))
		return COUNT;
	__atomic_add_fetch(&counted, 1, __ATOMIC_RELAXED);
	note(name, fd, first, second);
	if (__atomic_sub_fetch(&left, 1, __ATOMIC_RELAXED) != 0 || mode == COUNT)
		return COUNT;
	if (mode == KILL)
		_exit(137);
	return mode;
}

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, name))

ssize_t write(int fd, const void *data, size_t size)
{
	enum mode met = meets("write", fd, NULL, NULL);

	if (met == FAIL) {
		errno = error;
		return -1;
	}
	if (met == KILL_HALF) {
		real_write()(fd, data, size / 2);
		_exit(137);
	}
	if (met == HALF && size > 1)
		size /= 2;
	return real_write()(fd, data, size);
}

int fsync(int fd)
{
	enum mode met = meets("fsync", fd, NULL, NULL);

	if (met == KILL_HALF)
		_exit(137);
	if (met == FAIL) {
		errno = error;
		return -1;
	}
	return REAL("fsync", int (*)(int))(fd);
}

static int opened(const char *symbol, int dir, const char *path, int flags, mode_t bits)
{
	/* Opening to read changes nothing, and is not counted. */
	enum mode met = flags & O_CREAT ? meets("create", dir, path, NULL) : COUNT;

	if (met == KILL_HALF)
		_exit(137);
	if (met == FAIL) {
		errno = error;
		return -1;
	}
	return REAL(symbol, int (*)(int, const char *, int, mode_t))(dir, path, flags, bits);
}

static mode_t bits_of(int flags, va_list rest)
{
	return flags & O_CREAT ? va_arg(rest, mode_t) : 0;
}

int openat(int dir, const char *path, int flags, ...)
{
	va_list rest;
	mode_t bits;

	va_start(rest, flags);
	bits = bits_of(flags, rest);
	va_end(rest);
	return opened("openat", dir, path, flags, bits);
}

int openat64(int dir, const char *path, int flags, ...)
{
	va_list rest;
	mode_t bits;

	va_start(rest, flags);
	bits = bits_of(flags, rest);
	va_end(rest);
	return opened("openat64", dir, path, flags, bits);
}

#define FACED(name, dir, first, second)                     \
	do {                                                \
		enum mode met = meets(name, dir, first, second); \
		if (met == KILL_HALF)                       \
			_exit(137);                         \
		if (met == FAIL) {                          \
			errno = error;                      \
			return -1;                          \
		}                                           \
	} while (0)

int mkdir(const char *path, mode_t bits)
{
	FACED("mkdir", -1, path, NULL);
	return REAL("mkdir", int (*)(const char *, mode_t))(path, bits);
}

int mkdirat(int dir, const char *path, mode_t bits)
{
	FACED("mkdir", dir, path, NULL);
	return REAL("mkdirat", int (*)(int, const char *, mode_t))(dir, path, bits);
}

int renameat(int from, const char *old, int to, const char *new)
{
	FACED("rename", from, old, new);
	return REAL("renameat", int (*)(int, const char *, int, const char *))(from, old, to, new);
}

int unlinkat(int dir, const char *path, int flags)
{
	FACED("unlink", dir, path, NULL);
	return REAL("unlinkat", int (*)(int, const char *, int))(dir, path, flags);
}

int flock(int fd, int operation)
{
	FACED("flock", fd, NULL, NULL);
	return REAL("flock", int (*)(int, int))(fd, operation);
}

int close(int fd)
{
	enum mode met = meets("close", fd, NULL, NULL);
	int code;

	if (met == KILL_HALF)
		_exit(137);
	code = REAL("close", int (*)(int))(fd);
	if (met == FAIL) {
		errno = error;
		return -1;
	}
	return code;
}

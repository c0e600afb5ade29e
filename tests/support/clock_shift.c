/* Shifts this process' wall clock by as many seconds as stand in the file $CLOCK_SHIFT. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift_s(void)
{
	const char *path = getenv("CLOCK_SHIFT");
	char text[32] = "0";
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

	if (fd >= 0) {
		ssize_t got = read(fd, text, sizeof(text) - 1);
		text[got > 0 ? got : 0] = '\0';
		close(fd);
	}
	return strtol(text, NULL, 10);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	static int (*real)(clockid_t, struct timespec *);
	int code;

	if (!real)
		real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	code = real(clock, now);
	if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += shift_s();
	return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec exact;
	int code = clock_gettime(CLOCK_REALTIME, &exact);

	(void)zone;
	now->tv_sec = exact.tv_sec;
	now->tv_usec = exact.tv_nsec / 1000;
	return code;
}

/* A node that sends slowly: a tenth of a second before each message of gloo. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static void *real(const char *name)
{
	usleep(100000);
	return dlsym(RTLD_NEXT, name);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
	return ((ssize_t (*)(int, const struct iovec *, int))real("writev"))(fd, parts, count);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	return ((ssize_t (*)(int, const struct msghdr *, int))real("sendmsg"))(fd, message, flags);
}

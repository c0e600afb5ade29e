/* The scenario file that drives the mock; see scenario.c for its lines. */
#ifndef SCENARIO_H
#define SCENARIO_H

#include <stddef.h>

enum {
	SUCCESS = 0,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	INSUFFICIENT_SIZE = 7,
	TIMEOUT = 10,
	ARGUMENT_VERSION_MISMATCH = 25,
	NO_GPU = -1,
	ANY_GPU = -2,
	GPUS_MAX = 16,
};

/* One call of a function: of which GPU, and the how-manieth of it and of all calls of this GPU. */
struct call {
	const char *function;
	int gpu;
	unsigned nth, nth_of_all;
};

struct process {
	unsigned pid;
	unsigned long long bytes;
};

/* Count the call, do what the scenario has it do first (wait, crash, block); return its code. */
int enter(struct call *call, const char *function, int gpu);

/* Give the value of KEY, or of KEY:INDEX where that is set; return a code. */
int number(const struct call *call, const char *key, long long otherwise, long long *value);
int number_of(const struct call *call, const char *key, int index, long long otherwise,
	      long long *value);
int text(const struct call *call, const char *key, const char *otherwise, char *to,
	 unsigned size);

unsigned gpu_count(void);
unsigned processes(const struct call *call, const char *kind, struct process *found,
		   unsigned max);

/* Give the Xid that is next after the first SEEN of the file; return whether there is one. */
int xid_after(unsigned seen, int *gpu, unsigned long long *xid);

#endif

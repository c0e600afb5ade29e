/* MOCK_NVML names a file of lines; it is read again whenever it changes. A later line goes before
 * an earlier one. WHO is the index of a GPU or *, and WHO@N means from the N-th call on.
 *
 *   gpu UUID BUSID CODE NAME...   one GPU more; CODE is what opening it returns
 *   set WHO KEY VALUE             VALUE - makes its function or field NOT_SUPPORTED, !CODE return CODE
 *   return WHO FUNCTION CODE      FUNCTION as NVML names it, without _v2, or * for all
 *   delay WHO FUNCTION MS         how long it takes
 *   block WHO FUNCTION            it stays in the kernel in state D until it is killed
 *   crash WHO FUNCTION            it ends the process by SIGSEGV
 *   lost WHO                      every call says that the GPU is lost
 *   process WHO PID BYTES KIND    a compute, graphics or mps process on the GPU
 *   xid WHO CODE                  an event, told once to each event set
 *   driver VERSION                the version of the driver
 *   deaf                          ignore SIGTERM from nvmlInit on
 *   init CODE, count CODE         what nvmlInit and nvmlDeviceGetCount return
 *   delay_ms MS                   how long nvmlInit takes
 *   segfault                      crash in nvmlInit
 */
#define _GNU_SOURCE
#include "scenario.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FUNCTIONS_MAX = 128, NAME_MAX_ = 64, VALUE_MAX = 128 };

struct rule {
	char verb[8], name[NAME_MAX_], value[VALUE_MAX];
	int gpu;
	unsigned from;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule *rules;
static size_t rule_count, rule_room;
static unsigned gpus;
static int deaf;
static struct stat read_at;
/* One row more, for the calls that ask no GPU. */
static struct { char name[NAME_MAX_]; unsigned calls[GPUS_MAX + 1]; } functions[FUNCTIONS_MAX];
static unsigned calls_of_all[GPUS_MAX + 1];

static void add(const char *verb, int gpu, unsigned from, const char *name, const char *value)
{
	struct rule *rule;

	if (rule_count == rule_room) {
		rule_room = rule_room ? 2 * rule_room : 256;
		rules = realloc(rules, rule_room * sizeof *rules);
		if (!rules)
			abort();
	}
	rule = &rules[rule_count++];
	snprintf(rule->verb, sizeof rule->verb, "%s", verb);
	snprintf(rule->name, sizeof rule->name, "%s", name);
	snprintf(rule->value, sizeof rule->value, "%s", value);
	rule->gpu = gpu;
	rule->from = from;
}

static void add_gpu(const char *line)
{
	char uuid[96], bus_id[32], code[16], name[96];

	if (gpus == GPUS_MAX ||
	    sscanf(line, "gpu %95s %31s %15s %95[^\n]", uuid, bus_id, code, name) != 4)
		return;
	add("set", gpus, 1, "uuid", uuid);
	add("set", gpus, 1, "bus_id", bus_id);
	add("set", gpus, 1, "name", name);
	add("return", gpus, 1, "nvmlDeviceGetHandleByIndex", code);
	gpus++;
}

/* A line of VERB WHO NAME VALUE; the last two may be missing. */
static int add_rule(const char *line)
{
	static const char *const verbs[] = {"set", "return", "delay", "block", "crash", "lost",
					    "process", "xid", NULL};
	char verb[16] = "", who[16] = "", name[NAME_MAX_] = "*", value[VALUE_MAX] = "", *at;
	unsigned from = 1;
	int gpu;

	if (sscanf(line, "%15s %15s %63s %127[^\n]", verb, who, name, value) < 2)
		return 0;
	for (int i = 0;; i++) {
		if (!verbs[i])
			return 0;
		if (!strcmp(verb, verbs[i]))
			break;
	}
	at = strchr(who, '@');
	if (at)
		from = strtoul(at + 1, NULL, 10);
	gpu = *who == '*' ? ANY_GPU : atoi(who);
	if (!strcmp(verb, "lost"))
		add("return", gpu, from, "*", "15");
	else
		add(verb, gpu, from, name, value);
	return 1;
}

static void add_line(const char *line)
{
	char word[32] = "", value[VALUE_MAX] = "";

	if (add_rule(line) || sscanf(line, "%31s %127[^\n]", word, value) < 1)
		return;
	if (!strcmp(word, "gpu"))
		add_gpu(line);
	else if (!strcmp(word, "driver"))
		add("set", ANY_GPU, 1, "driver", value);
	else if (!strcmp(word, "init"))
		add("return", ANY_GPU, 1, "nvmlInit", value);
	else if (!strcmp(word, "count"))
		add("return", ANY_GPU, 1, "nvmlDeviceGetCount", value);
	else if (!strcmp(word, "delay_ms"))
		add("delay", ANY_GPU, 1, "nvmlInit", value);
	else if (!strcmp(word, "segfault"))
		add("crash", ANY_GPU, 1, "nvmlInit", "");
	else if (!strcmp(word, "deaf"))
		deaf = 1;
	else if (*word != '#') {
		fprintf(stderr, "mock NVML: what is %s?\n", line);
		abort();
	}
}

static void read_again_if_changed(void)
{
	const char *path = getenv("MOCK_NVML");
	struct stat now;
	char line[512];
	FILE *file;

	if (!path || stat(path, &now))
		return;
	if (now.st_ino == read_at.st_ino && now.st_size == read_at.st_size &&
	    now.st_mtim.tv_sec == read_at.st_mtim.tv_sec &&
	    now.st_mtim.tv_nsec == read_at.st_mtim.tv_nsec)
		return;
	file = fopen(path, "r");
	if (!file)
		return;
	read_at = now;
	rule_count = gpus = deaf = 0;
	while (fgets(line, sizeof line, file))
		add_line(line);
	fclose(file);
}

static unsigned *counter(const char *function, int gpu)
{
	unsigned column = gpu < 0 ? GPUS_MAX : gpu;

	for (int i = 0; i < FUNCTIONS_MAX; i++) {
		if (!*functions[i].name)
			snprintf(functions[i].name, NAME_MAX_, "%s", function);
		if (!strcmp(functions[i].name, function))
			return &functions[i].calls[column];
	}
	abort();
}

static const struct rule *newest(const struct call *call, const char *verb, const char *name)
{
	for (size_t i = rule_count; i-- > 0;) {
		const struct rule *rule = &rules[i];
		int any = !strcmp(rule->name, "*");
		unsigned nth = any ? call->nth_of_all : call->nth;

		if (strcmp(rule->verb, verb) || (!any && strcmp(rule->name, name)))
			continue;
		if (any && call->gpu == NO_GPU && rule->gpu != ANY_GPU)
			continue;
		if ((rule->gpu == ANY_GPU || rule->gpu == call->gpu) && nth >= rule->from)
			return rule;
	}
	return NULL;
}

static void wait_ms(long ms)
{
	struct timespec left = {ms / 1000, ms % 1000 * 1000000};

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

/* A thread whose vforked child runs waits for it in state D, and only SIGKILL ends that wait. */
static void block(void)
{
	pid_t pid = vfork();

	if (pid == 0)
		for (;;)
			pause();
}

int enter(struct call *call, const char *function, int gpu)
{
	const struct rule *delay, *code;
	int blocks, crashes, returned;
	long ms;

	pthread_mutex_lock(&lock);
	read_again_if_changed();
	call->function = function;
	call->gpu = gpu;
	call->nth = ++*counter(function, gpu);
	call->nth_of_all = ++calls_of_all[gpu < 0 ? GPUS_MAX : gpu];
	delay = newest(call, "delay", function);
	code = newest(call, "return", function);
	ms = delay ? atol(delay->value) : 0;
	returned = code ? atoi(code->value) : SUCCESS;
	blocks = newest(call, "block", function) != NULL;
	crashes = newest(call, "crash", function) != NULL;
	if (deaf)
		signal(SIGTERM, SIG_IGN);
	pthread_mutex_unlock(&lock);
	if (crashes)
		raise(SIGSEGV);
	if (blocks)
		block();
	wait_ms(ms);
	return returned;
}

/* The word set for KEY:INDEX or KEY; copied, because another thread may read the file again. */
static int word(const struct call *call, const char *key, int index, char *to)
{
	const struct rule *rule = NULL;
	char exact[NAME_MAX_];

	pthread_mutex_lock(&lock);
	if (index >= 0) {
		snprintf(exact, sizeof exact, "%s:%d", key, index);
		rule = newest(call, "set", exact);
	}
	if (!rule)
		rule = newest(call, "set", key);
	if (rule)
		memcpy(to, rule->value, VALUE_MAX);
	pthread_mutex_unlock(&lock);
	return rule != NULL;
}

int number_of(const struct call *call, const char *key, int index, long long otherwise,
	      long long *value)
{
	char set[VALUE_MAX];

	*value = otherwise;
	if (!word(call, key, index, set))
		return SUCCESS;
	if (!strcmp(set, "-"))
		return NOT_SUPPORTED;
	if (*set == '!')
		return atoi(set + 1);
	*value = strtoll(set, NULL, 0);
	return SUCCESS;
}

int number(const struct call *call, const char *key, long long otherwise, long long *value)
{
	return number_of(call, key, -1, otherwise, value);
}

int text(const struct call *call, const char *key, const char *otherwise, char *to,
	 unsigned size)
{
	char set[VALUE_MAX];

	if (!word(call, key, -1, set))
		snprintf(set, sizeof set, "%s", otherwise);
	if (!strcmp(set, "-"))
		return NOT_SUPPORTED;
	if (strlen(set) >= size)
		return INSUFFICIENT_SIZE;
	strcpy(to, set);
	return SUCCESS;
}

unsigned gpu_count(void)
{
	unsigned count;

	pthread_mutex_lock(&lock);
	count = gpus;
	pthread_mutex_unlock(&lock);
	return count;
}

unsigned processes(const struct call *call, const char *kind, struct process *found,
		   unsigned max)
{
	unsigned count = 0;

	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < rule_count && count < max; i++) {
		const struct rule *rule = &rules[i];
		char its_kind[16] = "compute";

		if (strcmp(rule->verb, "process") ||
		    (rule->gpu != ANY_GPU && rule->gpu != call->gpu))
			continue;
		found[count].pid = strtoul(rule->name, NULL, 10);
		found[count].bytes = 0;
		sscanf(rule->value, "%llu %15s", &found[count].bytes, its_kind);
		count += !strcmp(its_kind, kind);
	}
	pthread_mutex_unlock(&lock);
	return count;
}

int xid_after(unsigned seen, int *gpu, unsigned long long *xid)
{
	int found = 0;

	pthread_mutex_lock(&lock);
	read_again_if_changed();
	for (size_t i = 0; i < rule_count && !found; i++) {
		if (strcmp(rules[i].verb, "xid") || seen-- > 0)
			continue;
		*gpu = rules[i].gpu < 0 ? 0 : rules[i].gpu;
		*xid = strtoull(rules[i].name, NULL, 10);
		found = 1;
	}
	pthread_mutex_unlock(&lock);
	return found;
}

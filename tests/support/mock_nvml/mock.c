/* A libnvidia-ml.so.1 for tests, loaded by the real pynvml. MOCK_NVML names a scenario file:
 *
 *   init CODE              what nvmlInitWithFlags returns (default 0)
 *   count CODE             what nvmlDeviceGetCount_v2 returns (default 0)
 *   delay_ms MS            how long nvmlInitWithFlags takes
 *   deaf                   ignore SIGTERM while it takes that long
 *   segfault               crash in nvmlInitWithFlags
 *   driver VERSION
 *   gpu UUID BUSID CODE NAME...   CODE is what opening this GPU returns
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7, GPUS_MAX = 16 };

struct gpu {
	char uuid[80], bus_id[32], name[96];
	int code;
};

struct pci_info {
	char bus_id_legacy[16];
	unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
	char bus_id[32];
};

static struct gpu gpus[GPUS_MAX];
static unsigned gpu_count;
static int init_code, count_code, delay_ms, deaf, crash;
static char driver[80] = "0.0";

static void read_scenario(void)
{
	char line[512];
	const char *path = getenv("MOCK_NVML");
	FILE *file = path ? fopen(path, "r") : NULL;

	gpu_count = 0;
	if (!file)
		return;
	while (fgets(line, sizeof line, file)) {
		struct gpu *gpu = &gpus[gpu_count];

		sscanf(line, "init %d", &init_code);
		sscanf(line, "count %d", &count_code);
		sscanf(line, "delay_ms %d", &delay_ms);
		sscanf(line, "driver %79s", driver);
		deaf |= strncmp(line, "deaf", 4) == 0;
		crash |= strncmp(line, "segfault", 8) == 0;
		if (gpu_count < GPUS_MAX && sscanf(line, "gpu %79s %31s %d %95[^\n]", gpu->uuid,
						   gpu->bus_id, &gpu->code, gpu->name) == 4)
			gpu_count++;
	}
	fclose(file);
}

static int copy(char *to, unsigned size, const char *from)
{
	if (strlen(from) >= size)
		return INSUFFICIENT_SIZE;
	strcpy(to, from);
	return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	read_scenario();
	if (deaf)
		signal(SIGTERM, SIG_IGN);
	if (crash)
		raise(SIGSEGV);
	for (int slept = 0; slept < delay_ms; slept += 10)
		usleep(10000);
	return init_code;
}

int nvmlShutdown(void)
{
	return SUCCESS;
}

const char *nvmlErrorString(int code)
{
	(void)code;
	return "an error that the mock made up";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
	return copy(version, length, driver);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
	*count = gpu_count;
	return count_code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu)
{
	if (index >= gpu_count)
		return INVALID_ARGUMENT;
	*gpu = &gpus[index];
	return gpus[index].code;
}

int nvmlDeviceGetUUID(struct gpu *gpu, char *uuid, unsigned length)
{
	return copy(uuid, length, gpu->uuid);
}

int nvmlDeviceGetName(struct gpu *gpu, char *name, unsigned length)
{
	return copy(name, length, gpu->name);
}

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci_info *info)
{
	memset(info, 0, sizeof *info);
	return copy(info->bus_id, sizeof info->bus_id, gpu->bus_id);
}

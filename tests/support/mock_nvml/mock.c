/* A libnvidia-ml.so.1 for tests, loaded by the real pynvml and driven by scenario.c.
 *
 * Layouts and numbers are those of nvml.h as pynvml 13 has them. Built with -DOLD_DRIVER it lacks
 * what drivers before 530 lack.
 */
#include "scenario.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef long long i64;
typedef unsigned long long u64;

struct gpu {
	int index;
};

struct pci_info {
	char bus_id_legacy[16];
	unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
	char bus_id[32];
};

struct memory {
	u64 total, free, used;
};

struct memory_v2 {
	unsigned version;
	u64 total, reserved, free, used;
};

struct field_value {
	unsigned field, scope;
	i64 timestamp, latency_us;
	unsigned value_type, code;
	union {
		unsigned u;
		u64 ull;
	} value;
};

struct process_info {
	unsigned pid;
	u64 used;
	unsigned gpu_instance, compute_instance;
};

struct versioned_number {
	unsigned version;
	int value;
};

struct temperature {
	unsigned version, sensor;
	int celsius;
};

struct fabric {
	unsigned version;
	unsigned char cluster[16];
	unsigned status, clique, state, health_mask;
	unsigned char health_summary;
};

struct sram {
	unsigned version;
	u64 aggregate_parity, aggregate_secded, aggregate_corrected;
	u64 volatile_parity, volatile_secded, volatile_corrected;
	u64 buckets[5];
	unsigned threshold_exceeded;
};

struct event_set {
	u64 types[GPUS_MAX];
	unsigned seen;
};

struct event {
	struct gpu *gpu;
	u64 type, data;
	unsigned gpu_instance, compute_instance;
};

enum { MEMORY_V2 = 0x02000028, TEMPERATURE_V1 = 0x0100000C, MARGIN_V1 = 0x01000008 };
enum { FABRIC_V2 = 0x02000024, FABRIC_V3 = 0x03000028, SRAM_V1 = 0x01000068 };
enum { TYPE_UINT = 1, TYPE_ULL = 3, TYPE_INT = 5, EVENT_XID = 8, LINKS_MAX = 36, PROCESSES_MAX = 64 };

/* 2 (false) for each way of being degraded, 1 (none) for an incorrect configuration. */
enum { FABRIC_HEALTHY = 0x1AA };

#define DRIVER "550.163.01"

static struct gpu gpus[GPUS_MAX];

#define ENTER(name, gpu)                                                                          \
	struct call call;                                                                          \
	int code = enter(&call, name, gpu);                                                        \
	if (code)                                                                                  \
		return code

#define TELL(to, key, otherwise)                                                                  \
	do {                                                                                       \
		i64 told;                                                                          \
		code = number(&call, key, otherwise, &told);                                       \
		if (code)                                                                          \
			return code;                                                               \
		*(to) = told;                                                                      \
	} while (0)

/* A function of one GPU that gives one number. */
#define NUMBER(name, key, otherwise)                                                              \
	int name(struct gpu *gpu, unsigned *value)                                                 \
	{                                                                                          \
		ENTER(#name, gpu->index);                                                          \
		TELL(value, key, otherwise);                                                       \
		return SUCCESS;                                                                    \
	}

/* A function of one GPU that gives a word. */
#define TEXT(name, key, otherwise)                                                                \
	int name(struct gpu *gpu, char *to, unsigned size)                                         \
	{                                                                                          \
		ENTER(#name, gpu->index);                                                          \
		return text(&call, key, otherwise, to, size);                                      \
	}

/* A function of one GPU that gives one number of each kind. */
#define NUMBER_OF(name, otherwise, ...)                                                           \
	int name(struct gpu *gpu, unsigned kind, unsigned *value)                                  \
	{                                                                                          \
		static const char *const keys[] = {__VA_ARGS__};                                   \
		static const unsigned values[] = otherwise;                                        \
		ENTER(#name, gpu->index);                                                          \
		if (kind >= sizeof keys / sizeof *keys || !keys[kind])                             \
			return NOT_SUPPORTED;                                                      \
		TELL(value, keys[kind], values[kind]);                                             \
		return SUCCESS;                                                                    \
	}
#define VALUES(...) {__VA_ARGS__}

int nvmlInitWithFlags(unsigned flags)
{
	ENTER("nvmlInit", NO_GPU);
	(void)flags;
	return SUCCESS;
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

int nvmlSystemGetDriverVersion(char *to, unsigned size)
{
	ENTER("nvmlSystemGetDriverVersion", NO_GPU);
	return text(&call, "driver", DRIVER, to, size);
}

int nvmlSystemGetNVMLVersion(char *to, unsigned size)
{
	char driver[64], version[80];

	ENTER("nvmlSystemGetNVMLVersion", NO_GPU);
	code = text(&call, "driver", DRIVER, driver, sizeof driver);
	if (code)
		return code;
	snprintf(version, sizeof version, "12.%s", driver);
	return text(&call, "nvml_version", version, to, size);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
	ENTER("nvmlDeviceGetCount", NO_GPU);
	TELL(count, "count", gpu_count());
	return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu)
{
	if (index >= gpu_count())
		return INVALID_ARGUMENT;
	ENTER("nvmlDeviceGetHandleByIndex", (int)index);
	gpus[index].index = index;
	*gpu = &gpus[index];
	return SUCCESS;
}

TEXT(nvmlDeviceGetUUID, "uuid", "GPU-0")
TEXT(nvmlDeviceGetName, "name", "Mock GPU")
TEXT(nvmlDeviceGetVbiosVersion, "vbios", "96.00.A5.00.01")

int nvmlDeviceGetSerial(struct gpu *gpu, char *to, unsigned size)
{
	char serial[32];

	ENTER("nvmlDeviceGetSerial", gpu->index);
	snprintf(serial, sizeof serial, "165012300%04d", gpu->index);
	return text(&call, "serial", serial, to, size);
}

int nvmlDeviceGetMinorNumber(struct gpu *gpu, unsigned *minor)
{
	ENTER("nvmlDeviceGetMinorNumber", gpu->index);
	TELL(minor, "minor", gpu->index);
	return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci_info *info)
{
	ENTER("nvmlDeviceGetPciInfo", gpu->index);
	memset(info, 0, sizeof *info);
	return text(&call, "bus_id", "00000000:00:00.0", info->bus_id, sizeof info->bus_id);
}

int nvmlDeviceGetRemappedRows(struct gpu *gpu, unsigned *corrected, unsigned *uncorrected,
			      unsigned *pending, unsigned *failure)
{
	ENTER("nvmlDeviceGetRemappedRows", gpu->index);
	TELL(corrected, "remapped_correctable", 0);
	TELL(uncorrected, "remapped_uncorrectable", 0);
	TELL(pending, "remapped_pending", 0);
	TELL(failure, "remapped_failure", 0);
	return SUCCESS;
}

int nvmlDeviceValidateInforom(struct gpu *gpu)
{
	ENTER("nvmlDeviceValidateInforom", gpu->index);
	return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, unsigned error, unsigned counter, u64 *count)
{
	static const char *const keys[] = {"ecc_volatile_corrected", "ecc_aggregate_corrected",
					   "ecc_volatile_uncorrected", "ecc_aggregate_uncorrected"};

	ENTER("nvmlDeviceGetTotalEccErrors", gpu->index);
	if (error > 1 || counter > 1)
		return INVALID_ARGUMENT;
	TELL(count, keys[2 * error + counter], 0);
	return SUCCESS;
}

int nvmlDeviceGetTemperature(struct gpu *gpu, unsigned sensor, unsigned *celsius)
{
	ENTER("nvmlDeviceGetTemperature", gpu->index);
	(void)sensor;
	TELL(celsius, "temperature_c", 31);
	return SUCCESS;
}

NUMBER_OF(nvmlDeviceGetTemperatureThreshold, VALUES(92, 87, 95), "shutdown_c", "slowdown_c",
	  "memory_max_c")

NUMBER(nvmlDeviceGetPowerUsage, "power_mw", 72000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", 700000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "default_power_limit_mw", 700000)

int nvmlDeviceGetPowerManagementLimitConstraints(struct gpu *gpu, unsigned *least, unsigned *most)
{
	ENTER("nvmlDeviceGetPowerManagementLimitConstraints", gpu->index);
	TELL(least, "min_power_limit_mw", 200000);
	TELL(most, "max_power_limit_mw", 700000);
	return SUCCESS;
}

NUMBER_OF(nvmlDeviceGetClockInfo, VALUES(345, 345, 2619), "graphics_mhz", "sm_mhz", "memory_mhz")
NUMBER_OF(nvmlDeviceGetMaxClockInfo, VALUES(1980, 1980, 2619), "graphics_max_mhz", "sm_max_mhz",
	  "memory_max_mhz")
NUMBER_OF(nvmlDeviceGetApplicationsClock, VALUES(1980, 1980, 2619), "graphics_application_mhz",
	  "sm_application_mhz", "memory_application_mhz")

static int clock_reasons(const char *function, struct gpu *gpu, u64 *reasons)
{
	ENTER(function, gpu->index);
	TELL(reasons, "clock_reasons", 1);
	return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *gpu, u64 *reasons)
{
	return clock_reasons("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, reasons);
}

NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max", 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie_replays", 0)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", 1)
NUMBER(nvmlDeviceGetComputeMode, "compute_mode", 0)

int nvmlDeviceGetEccMode(struct gpu *gpu, unsigned *current, unsigned *pending)
{
	ENTER("nvmlDeviceGetEccMode", gpu->index);
	TELL(current, "ecc", 1);
	TELL(pending, "ecc_pending", *current);
	return SUCCESS;
}

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending)
{
	ENTER("nvmlDeviceGetMigMode", gpu->index);
	TELL(current, "mig", 0);
	TELL(pending, "mig_pending", *current);
	return SUCCESS;
}

static int memory_of(const struct call *call, i64 *total, i64 *reserved, i64 *used)
{
	int code = number(call, "memory_bytes", 85520809984, total);

	code = code ? code : number(call, "reserved_bytes", 578813952, reserved);
	return code ? code : number(call, "used_bytes", 0, used);
}

int nvmlDeviceGetMemoryInfo(struct gpu *gpu, struct memory *memory)
{
	i64 total, reserved, used;

	ENTER("nvmlDeviceGetMemoryInfo", gpu->index);
	code = memory_of(&call, &total, &reserved, &used);
	*memory = (struct memory){total, total - reserved - used, reserved + used};
	return code;
}

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned *rates)
{
	ENTER("nvmlDeviceGetUtilizationRates", gpu->index);
	TELL(&rates[0], "utilization_percent", 0);
	TELL(&rates[1], "memory_utilization_percent", 0);
	return SUCCESS;
}

static int running(const char *function, struct gpu *gpu, const char *kind, unsigned *count,
		   struct process_info *infos)
{
	struct process found[PROCESSES_MAX];
	unsigned room = *count;

	ENTER(function, gpu->index);
	*count = processes(&call, kind, found, PROCESSES_MAX);
	if (*count > room)
		return INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < *count; i++)
		infos[i] = (struct process_info){found[i].pid, found[i].bytes, ~0u, ~0u};
	return SUCCESS;
}

#ifdef OLD_DRIVER
#define NEWEST(name) name##_v2
#else
#define NEWEST(name) name##_v3
#endif
#define RUNNING(name, kind)                                                                       \
	int NEWEST(name)(struct gpu *gpu, unsigned *count, struct process_info *infos)                \
	{                                                                                          \
		return running(#name, gpu, kind, count, infos);                                    \
	}
RUNNING(nvmlDeviceGetComputeRunningProcesses, "compute")
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, "graphics")
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, "mps")

static int is_link(const struct call *call, unsigned link)
{
	i64 count;

	return !number(call, "nvlink_count", 18, &count) && link < count;
}

int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *active)
{
	i64 state;

	ENTER("nvmlDeviceGetNvLinkState", gpu->index);
	if (!is_link(&call, link))
		return INVALID_ARGUMENT;
	code = number_of(&call, "nvlink_state", link, 1, &state);
	*active = state < 0 ? state : state == 1;
	return code;
}

/* Where the value of a field comes from. A scope, or the number of the field, names a link. */
static const struct field {
	unsigned first, count;
	const char *key;
	enum { OF_GPU, OF_SCOPE, OF_LANE, OF_LATER_LANE } about;
	i64 otherwise;
	const char *needs;
} fields[] = {
	{3, 1, "ecc_volatile_corrected", OF_GPU, 0, NULL},
	{4, 1, "ecc_volatile_uncorrected", OF_GPU, 0, NULL},
	{5, 1, "ecc_aggregate_corrected", OF_GPU, 0, NULL},
	{6, 1, "ecc_aggregate_uncorrected", OF_GPU, 0, NULL},
	{29, 1, "retired_single_bit", OF_GPU, 0, "has_page_retirement"},
	{30, 1, "retired_double_bit", OF_GPU, 0, "has_page_retirement"},
	{31, 1, "retired_pending", OF_GPU, 0, "has_page_retirement"},
	{32, 6, "nvlink_crc", OF_LANE, 0, "has_nvlink_lane_counters"},
	{46, 6, "nvlink_replay", OF_LANE, 0, "has_nvlink_lane_counters"},
	{53, 6, "nvlink_recovery", OF_LANE, 0, "has_nvlink_lane_counters"},
	{82, 1, "memory_temperature_c", OF_GPU, 41, NULL},
	{91, 1, "nvlink_count", OF_GPU, 18, NULL},
	{94, 1, "pcie_replays", OF_GPU, 0, NULL},
	{96, 6, "nvlink_crc", OF_LATER_LANE, 0, "has_nvlink_lane_counters"},
	{108, 6, "nvlink_replay", OF_LATER_LANE, 0, "has_nvlink_lane_counters"},
	{114, 6, "nvlink_recovery", OF_LATER_LANE, 0, "has_nvlink_lane_counters"},
	{161, 1, "nvlink_replay", OF_SCOPE, 0, "has_nvlink_link_counters"},
	{162, 1, "nvlink_recovery", OF_SCOPE, 0, "has_nvlink_link_counters"},
	{163, 1, "nvlink_crc", OF_SCOPE, 0, "has_nvlink_link_counters"},
	{165, 1, "nvlink_state", OF_SCOPE, 1, "has_nvlink_state_field"},
	{193, 1, "shutdown_tlimit_c", OF_GPU, -8, NULL},
	{194, 1, "slowdown_tlimit_c", OF_GPU, -2, NULL},
	{195, 1, "memory_max_tlimit_c", OF_GPU, 0, NULL},
	{208, 1, "nvlink_receive", OF_SCOPE, 0, "has_nvlink_packet_counters"},
	{215, 1, "nvlink_recovery", OF_SCOPE, 0, "has_nvlink_packet_counters"},
	{220, 1, "nvlink_effective_ber", OF_SCOPE, 0xFFF, "has_nvlink_packet_counters"},
	{222, 1, "nvlink_symbol_ber", OF_SCOPE, 0xFFF, "has_nvlink_packet_counters"},
	{230, 1, "recovery_action", OF_GPU, 0, NULL},
};

/* What a GPU has unless it is set: the counters of Hopper. */
static i64 has(const struct call *call, const char *what)
{
	i64 it_has = !strcmp(what, "has_nvlink_link_counters") ||
		     !strcmp(what, "has_nvlink_state_field");

	number(call, what, it_has, &it_has);
	return it_has;
}

static int told(const struct call *call, const struct field_value *asked, i64 *value)
{
	for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
		const struct field *field = &fields[i];
		unsigned link = asked->field - field->first;

		if (asked->field < field->first || link >= field->count)
			continue;
		if (field->needs && !has(call, field->needs))
			return NOT_SUPPORTED;
		if (field->about == OF_GPU)
			return number(call, field->key, field->otherwise, value);
		link += field->about == OF_LATER_LANE ? 6 : 0;
		link = field->about == OF_SCOPE ? asked->scope : link;
		if (!is_link(call, link))
			return INVALID_ARGUMENT;
		return number_of(call, field->key, link, field->otherwise, value);
	}
	return NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field_value *values)
{
	ENTER("nvmlDeviceGetFieldValues", gpu->index);
	for (int i = 0; i < count; i++) {
		struct field_value *asked = &values[i];
		i64 value = 0;

		asked->code = told(&call, asked, &value);
		asked->timestamp = time(NULL) * 1000000LL;
		asked->value_type = value < 0 ? TYPE_INT : value >> 32 ? TYPE_ULL : TYPE_UINT;
		/* Only the bytes of the value's type are told: a reader of others reads rubbish. */
		memset(&asked->value, asked->code ? 0 : 0xA5, sizeof asked->value);
		if (asked->value_type == TYPE_ULL)
			asked->value.ull = value;
		else if (!asked->code)
			asked->value.u = value;
	}
	return SUCCESS;
}

int nvmlEventSetCreate(struct event_set **set)
{
	ENTER("nvmlEventSetCreate", NO_GPU);
	*set = calloc(1, sizeof **set);
	return SUCCESS;
}

int nvmlDeviceRegisterEvents(struct gpu *gpu, u64 types, struct event_set *set)
{
	ENTER("nvmlDeviceRegisterEvents", gpu->index);
	set->types[gpu->index] |= types;
	return SUCCESS;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms)
{
	struct timespec pause = {0, 5000000};
	int gpu;
	u64 xid;

	ENTER("nvmlEventSetWait", NO_GPU);
	for (unsigned waited_ms = 0;; waited_ms += 5) {
		while (xid_after(set->seen, &gpu, &xid)) {
			set->seen++;
			if (!(set->types[gpu] & EVENT_XID))
				continue;
			*event = (struct event){&gpus[gpu], EVENT_XID, xid, ~0u, ~0u};
			return SUCCESS;
		}
		if (waited_ms >= timeout_ms)
			return TIMEOUT;
		nanosleep(&pause, NULL);
	}
}

int nvmlEventSetFree(struct event_set *set)
{
	ENTER("nvmlEventSetFree", NO_GPU);
	free(set);
	return SUCCESS;
}

#ifndef OLD_DRIVER

int nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct memory_v2 *memory)
{
	i64 total, reserved, used;

	ENTER("nvmlDeviceGetMemoryInfo", gpu->index);
	if (memory->version != MEMORY_V2)
		return ARGUMENT_VERSION_MISMATCH;
	code = memory_of(&call, &total, &reserved, &used);
	memory->total = total;
	memory->reserved = reserved;
	memory->used = used;
	memory->free = total - reserved - used;
	return code;
}

int nvmlDeviceGetTemperatureV(struct gpu *gpu, struct temperature *temperature)
{
	ENTER("nvmlDeviceGetTemperatureV", gpu->index);
	if (temperature->version != TEMPERATURE_V1)
		return ARGUMENT_VERSION_MISMATCH;
	TELL(&temperature->celsius, "temperature_c", 31);
	return SUCCESS;
}

int nvmlDeviceGetMarginTemperature(struct gpu *gpu, struct versioned_number *margin)
{
	ENTER("nvmlDeviceGetMarginTemperature", gpu->index);
	if (margin->version != MARGIN_V1)
		return ARGUMENT_VERSION_MISMATCH;
	TELL(&margin->value, "margin_c", 56);
	return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(struct gpu *gpu, u64 *reasons)
{
	return clock_reasons("nvmlDeviceGetCurrentClocksEventReasons", gpu, reasons);
}

int nvmlDeviceGetGpuFabricInfoV(struct gpu *gpu, struct fabric *fabric)
{
	ENTER("nvmlDeviceGetGpuFabricInfoV", gpu->index);
	if (fabric->version != FABRIC_V2 && fabric->version != FABRIC_V3)
		return ARGUMENT_VERSION_MISMATCH;
	TELL(&fabric->state, "fabric_state", 3);
	TELL(&fabric->status, "fabric_status", 0);
	TELL(&fabric->clique, "fabric_clique", 0);
	TELL(&fabric->health_mask, "fabric_health_mask", FABRIC_HEALTHY);
	if (fabric->version == FABRIC_V3)
		TELL(&fabric->health_summary, "fabric_health_summary", 1);
	return SUCCESS;
}

int nvmlDeviceGetSramEccErrorStatus(struct gpu *gpu, struct sram *sram)
{
	ENTER("nvmlDeviceGetSramEccErrorStatus", gpu->index);
	if (sram->version != SRAM_V1)
		return ARGUMENT_VERSION_MISMATCH;
	TELL(&sram->aggregate_parity, "sram_aggregate_parity", 0);
	TELL(&sram->aggregate_secded, "sram_aggregate_secded", 0);
	TELL(&sram->aggregate_corrected, "sram_aggregate_corrected", 0);
	TELL(&sram->volatile_parity, "sram_volatile_parity", 0);
	TELL(&sram->volatile_secded, "sram_volatile_secded", 0);
	TELL(&sram->volatile_corrected, "sram_volatile_corrected", 0);
	TELL(&sram->threshold_exceeded, "sram_threshold_exceeded", 0);
	return SUCCESS;
}

#endif

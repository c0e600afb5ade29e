#!/bin/sh
# Slurm HealthCheckProgram: `gpuops slurm health` drains the node and takes back its own drains;
# slurmd ignores the exit code.
trap 'exit 0' EXIT

GPUOPS=/opt/gpuops/bin/gpuops
# Environment of gpuops in the hooks, where it needs any: a shell file, writable by root only.
HOOK_ENV=/etc/gpuops/hook.env
LOGGER=/usr/bin/logger
# slurmd kills it after 60 s.
LIMIT_S=54

# shellcheck disable=SC2016
/usr/bin/timeout --kill-after=1 "$LIMIT_S" /bin/sh -c '
	if [ -e "$1" ]; then . "$1"; fi
	exec "$2" slurm health
' sh "$HOOK_ENV" "$GPUOPS" >&2
ended=$?
if [ "$ended" -ne 0 ]; then
	# slurmd shows nothing of it: a gate out of order would never be noticed.
	/usr/bin/timeout --signal=KILL 0.5 "$LOGGER" -p daemon.err -t gpuops \
		"health: gpuops ended with $ended and judged nothing; see: gpuops config validate"
fi

#!/bin/sh
# Slurm Prolog: `gpuops slurm prolog` checks the node and decides; this script only obeys.
# Whatever goes wrong, a mistake in this file included, the job starts: the trap sees to it.
code=0
trap 'exit "$code"' EXIT

GPUOPS=/opt/gpuops/bin/gpuops
# Environment of gpuops in the hooks, where it needs any: a shell file, writable by root only.
HOOK_ENV=/etc/gpuops/hook.env
LOGGER=/usr/bin/logger
VERDICTS=/run/gpuops
# Slurm's MessageTimeout is 10 s.
LIMIT_S=8

read -r nonce </proc/sys/kernel/random/uuid
verdict="$VERDICTS/prolog.${nonce:?}"
# A shell of its own, with a time limit: a mistake in HOOK_ENV ends that one, not this.
# shellcheck disable=SC2016
/usr/bin/timeout --kill-after=1 "$LIMIT_S" /bin/sh -c '
	if [ -e "$1" ]; then . "$1"; fi
	exec "$2" slurm prolog --verdict "$3"
' sh "$HOOK_ENV" "$GPUOPS" "$verdict" >&2
ended=$?
# 124 and 137: gpuops took too long. A verdict that it had written by then counts.
case "$ended" in
1 | 124 | 137) if [ -f "$verdict" ] && [ "$(/bin/cat "$verdict")" = refuse ]; then code=1; fi ;;
esac
if [ "$code" -eq 0 ] && [ "$ended" -ne 0 ]; then
	# slurmd shows nothing of a hook that fails no job: a gate out of order would never be noticed.
	/usr/bin/timeout --signal=KILL 0.5 "$LOGGER" -p daemon.err -t gpuops \
		"prolog: gpuops ended with $ended and judged nothing; see: gpuops config validate"
fi
/bin/rm -f "$verdict"

#!/usr/bin/env bash
# Installs the Debian packages that the tests use, where it may (root and apt). Elsewhere the tests
# that need one are skipped, each with its reason. With `venv`: only what a virtual environment needs.
set -euo pipefail

missing=()
if [ "${1-}" = venv ]; then
  missing=(python3-venv)
else
  ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing+=(postgresql)
  command -v cc >/dev/null || missing+=(gcc libc6-dev)
  command -v setpriv >/dev/null || missing+=(util-linux)
  # Several hosts on one machine, and links that are cut: network namespaces.
  command -v ip >/dev/null && command -v tc >/dev/null || missing+=(iproute2)
  command -v shellcheck >/dev/null || missing+=(shellcheck)
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null || missing+=(slurm-wlm)
  command -v munged >/dev/null || missing+=(munge)
  command -v etcd >/dev/null || missing+=(etcd-server)
  # Of this package only promtool is used, which says whether a text is in Prometheus' format.
  command -v promtool >/dev/null || missing+=(prometheus)
fi
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # A cluster of the distribution's own is not wanted: the tests start a private server.
  mkdir -p /etc/postgresql-common/createcluster.d
  echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/gpuops-tests.conf
  # Nor are daemons of the distribution's own: the tests start a private munged and Slurm.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "not installed, and this is not root with apt: ${missing[*]}" >&2
fi

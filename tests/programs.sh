#!/usr/bin/env bash
# Install the programs that the tests compare with, on Debian or Ubuntu; apt is asked only for what is missing.
set -euo pipefail

missing=()
for pair in bsdtar:libarchive-tools gm:graphicsmagick tar:tar git:git bzip2:bzip2 xz:xz-utils zstd:zstd \
    slurmctld:slurm-wlm munged:munge slurmdbd:slurmdbd mariadbd:mariadb-server; do
    PATH=$PATH:/usr/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
as_root=$([ "$(id -u)" = 0 ] || echo sudo)
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq "${missing[@]}"

#!/usr/bin/env bash
# Make a stand-in for python:3.11-slim out of this Debian 12 machine's own packages, for machines
# that can pull no image. It proves the Dockerfiles and the compose file, not the real base image.
#
# usage: deploy/local-base-image.sh IMAGE
set -euo pipefail

IMAGE=${1:?usage: local-base-image.sh IMAGE}
# What a Debian slim image has and our Dockerfiles use; dependencies follow.
WANTED=(base-files base-passwd bash coreutils dash findutils grep libc-bin libstdc++6 passwd python3 python3-venv sed tar)
# Dependencies that only a package's installation needs.
UNUSED='apt|debconf|dpkg|perl-base|media-types'

main() {
  check_machine
  skeleton=$(mktemp -d)
  trap 'rm -rf "$skeleton"' EXIT
  make_skeleton
  { packages | files | pack; } | docker import - "$IMAGE-files" >/dev/null
  finish
}

check_machine() {
  dpkg-query -W python3.11 python3.11-venv >/dev/null 2>&1 && return
  echo "local-base-image.sh: needs Debian 12 with python3-venv" >&2
  exit 1
}

# The folders, and what is no package's file. /bin, /lib and so on are links of base-files.
make_skeleton() {
  mkdir -p "$skeleton"/{dev,etc,home,proc,root,run,sys,usr/{bin,lib,lib64,local,sbin},var}
  mkdir -m 1777 "$skeleton"/{tmp,var/tmp}
  cp /usr/share/base-passwd/passwd.master "$skeleton/etc/passwd"
  cp /usr/share/base-passwd/group.master "$skeleton/etc/group"
  echo 'hosts: files dns' >"$skeleton/etc/nsswitch.conf"
}

# The wanted packages and their dependencies, as far as this machine has them installed.
packages() {
  local closure
  closure=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts \
    --no-breaks --no-replaces --no-enhances "${WANTED[@]}" | grep '^[a-z0-9]' | grep -vxE "$UNUSED")
  # dpkg-query complains of names that are only virtual; their providers are in the list as well.
  # shellcheck disable=SC2086 # one argument a name
  dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' $closure 2>/dev/null | sed -n 's/^ii //p' || true
}

# Their files and links, relative to /. Folders are left out: tar would bring their whole content.
# Packages name /lib/... where the merged layout has /usr/lib/...
files() {
  xargs dpkg --listfiles | sed -n 's,^/,,p' | sed -E 's,^(bin|sbin|lib|lib64)/,usr/&,' |
    grep -vE '^usr/share/(doc|info|lintian|locale|man)/' | sort -u |
    while read -r path; do
      if [[ -L /$path || ! -d /$path ]]; then echo "$path"; fi
    done
}

pack() {
  tar --create --directory "$skeleton" . --directory / --files-from -
}

finish() {
  # Like in the real image, `python` and `pip` live in /usr/local.
  docker build --quiet --tag "$IMAGE" - >/dev/null <<EOF
FROM $IMAGE-files
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin LANG=C.UTF-8
RUN ldconfig && pwconv && python3 -m venv /usr/local
CMD ["python3"]
EOF
  echo "local-base-image.sh: made $IMAGE"
}

main

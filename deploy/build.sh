#!/usr/bin/env bash
# Build the images meshnet/shard and meshnet/head.
#
# Wheels are gathered on the host and installed in the build without a network: the build sees
# exactly the versions of deploy/constraints.txt, and whatever index, proxy or certificate pip is
# set up with here. Each image gets a folder of its own as build context, so the head's build
# could not install torch if it wanted to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BASE_IMAGE=${BASE_IMAGE:-python:3.11-slim}
TAG=${MESHNET_TAG:-local}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

main() {
  check_python
  gather_wheels
  build_image shard
  build_image head
}

check_python() {
  # A wheel fits one Python and one platform: the host's must be the image's.
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) or sys.platform != "linux")' && return
  echo "build.sh: the images run Python 3.11 on Linux, so their wheels must be gathered with it;" \
    "set PYTHON to such an interpreter (now: $PYTHON)" >&2
  exit 1
}

gather_wheels() {
  local started=$SECONDS
  rm -rf wheels # a wheel of another version left there would be installed as well
  mkdir -p wheels/{shard,head}/{deps,own}
  build_own_wheel wheels/shard/own
  cp wheels/shard/own/*.whl wheels/head/own/
  download wheels/shard/deps wheels/shard/own/*.whl
  rm wheels/shard/deps/meshnet-*.whl # pip puts what it was asked for there too
  download wheels/head/deps --requirement deploy/head.requirements.txt
  echo "build.sh: wheels gathered in $((SECONDS - started)) s," \
    "shard $(size_of wheels/shard), head $(size_of wheels/head)"
}

build_own_wheel() {
  # From a copy: setuptools builds in the tree, and would pack what an earlier build left there.
  local copy
  copy=$(mktemp -d)
  cp -r pyproject.toml README.md LICENSE meshnet services "$copy"
  pip_ wheel --no-deps --wheel-dir "$1" "$copy"
  rm -rf "$copy"
}

download() {
  pip_ download --only-binary :all: --constraint deploy/constraints.txt --dest "$@"
}

pip_() {
  "$PYTHON" -m pip --disable-pip-version-check "$1" --quiet --quiet "${@:2}"
}

size_of() {
  du -sh "$1" | cut -f1
}

build_image() {
  local name=$1 started=$SECONDS
  docker build --build-arg "BASE_IMAGE=$BASE_IMAGE" --tag "meshnet/$name:$TAG" \
    --file "deploy/$name.Dockerfile" "wheels/$name"
  echo "build.sh: meshnet/$name:$TAG built in $((SECONDS - started)) s," \
    "$(($(docker image inspect --format '{{.Size}}' "meshnet/$name:$TAG") / 1000000)) MB"
}

main

#!/usr/bin/env bash
# Build the images and try the composed cluster (smoke.sh), wherever an engine can be had: a running
# one, or one that root starts here for as long as this takes, and in CI (CI=true) installs. Where it
# can't be had, that is said in one line and is no failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

REAL_BASE=python:3.11-slim
STAND_IN=meshnet/local-base:3.11
MODEL_DIR=.models/smollm2
MESHNET=${MESHNET:-.venv/bin/meshnet}
RUN=$(mktemp -d)
LOG=$RUN/log
dockerd_pid=

main() {
  trap tidy_up EXIT
  install_engine
  start_engine
  choose_base_image
  [ -f "$MODEL_DIR/config.json" ] || "$MESHNET" model get smollm2 --dir "$MODEL_DIR"
  deploy/build.sh
  MESHNET_MODEL_DIR=$PWD/$MODEL_DIR deploy/smoke.sh
}

skip() {
  echo "compose smoke: SKIPPED: $1"
  exit 0
}

# `docker info` asks the engine, the others only need to be there.
engine_runs() { docker info >/dev/null 2>&1; }
has_compose() { docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null; }

install_engine() {
  if has_compose && { engine_runs || command -v dockerd >/dev/null; }; then return; fi
  [ "${CI:-}" = true ] || skip "no Docker with Compose here, and outside CI none is installed unasked"
  ((EUID == 0)) || skip "no Docker with Compose here, and only root can install it"
  command -v apt-get >/dev/null || skip "no Docker with Compose here, and no apt-get to install it"
  echo "ci.sh: installing Docker and Compose"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    docker.io docker-compose iptables python3-venv; } >"$LOG" 2>&1 ||
    skip "Docker could not be installed: $(tail -n 1 "$LOG")"
}

start_engine() {
  if engine_runs; then return; fi
  ((EUID == 0)) || skip "no Docker engine answers, and only root can start one"
  command -v dockerd >/dev/null || skip "no Docker engine answers, and there is no dockerd to start"
  echo "ci.sh: starting dockerd"
  # Where an engine was killed before, what it left in /run keeps a new one from starting.
  dockerd --pidfile "$RUN/pid" --exec-root "$RUN/exec" >"$LOG" 2>&1 &
  dockerd_pid=$!
  local deadline=$((SECONDS + 60))
  until engine_runs; do
    kill -0 "$dockerd_pid" 2>/dev/null || skip "dockerd ended: $(tail -n 1 "$LOG")"
    ((SECONDS < deadline)) || skip "dockerd does not answer after 60 s: $(tail -n 1 "$LOG")"
    sleep 1
  done
}

tidy_up() {
  if [ -n "$dockerd_pid" ]; then
    kill "$dockerd_pid" 2>/dev/null || true
    wait "$dockerd_pid" || true # only the one that was started here
  fi
  rm -rf "$RUN" || true
}

choose_base_image() {
  export BASE_IMAGE=${BASE_IMAGE:-$REAL_BASE}
  if docker image inspect "$BASE_IMAGE" >/dev/null 2>&1; then return; fi
  if timeout 300 docker pull --quiet "$BASE_IMAGE" 2>/dev/null; then return; fi
  echo "ci.sh: $BASE_IMAGE can't be pulled, taking a stand-in"
  # One that is there already is kept: the layers built on it are, too.
  docker image inspect "$STAND_IN" >/dev/null 2>&1 || deploy/local-base-image.sh "$STAND_IN" ||
    skip "$BASE_IMAGE can be neither pulled nor replaced here"
  BASE_IMAGE=$STAND_IN
}

main

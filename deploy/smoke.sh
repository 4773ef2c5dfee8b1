#!/usr/bin/env bash
# Bring the composed cluster up, kill a shard in the middle of an answer, start it again, and check
# that the stream went on to the very text of an undisturbed run. The exit status tells.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

START_LIMIT_S=${START_LIMIT_S:-300}
export MESHNET_PORT=${MESHNET_PORT:-0} # any free one
export MESHNET_MODEL_NAME=smollm2 # what the client asks for
MESHNET_CLUSTER_KEY=${MESHNET_CLUSTER_KEY:-$(python3 -c 'import secrets; print(secrets.token_hex(16))')}
export MESHNET_CLUSTER_KEY

if docker compose version >/dev/null 2>&1; then COMPOSE=(docker compose); else COMPOSE=(docker-compose); fi
# A project of its own: a cluster that runs here already is left alone.
COMPOSE+=(--project-name meshnet-smoke --file compose.yaml)

main() {
  local started=$SECONDS
  trap finish EXIT
  # Returns when the shards are healthy and the head is started, which waits for them.
  timeout "$START_LIMIT_S" "${COMPOSE[@]}" up --detach
  wait_for_head $((started + START_LIMIT_S))
  echo "compose smoke: cluster healthy after $((SECONDS - started)) s"
  python3 smoke_client.py "$("${COMPOSE[@]}" port head 8000)" "$(container shard-b)"
}

container() {
  "${COMPOSE[@]}" ps --quiet "$1"
}

wait_for_head() {
  local deadline=$1 head
  head=$(container head)
  until [ "$(docker inspect --format '{{.State.Health.Status}}' "$head")" = healthy ]; do
    if ((SECONDS > deadline)); then
      echo "compose smoke: the head was not healthy within $START_LIMIT_S s" >&2
      return 1
    fi
    sleep 1
  done
}

finish() {
  local status=$?
  if ((status != 0)); then "${COMPOSE[@]}" logs --no-color --tail 60 >&2 || true; fi
  "${COMPOSE[@]}" down --timeout 10 >/dev/null 2>&1 || echo "compose smoke: the cluster could not be taken down" >&2
  if ((status == 0)); then echo "compose smoke: PASSED"; else echo "compose smoke: FAILED" >&2; fi
}

main

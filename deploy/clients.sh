#!/usr/bin/env bash
# Run tests/clients, in environments of its own: the newest clients, and instructor with the openai
# that it still needs. The mesh they talk to runs from .venv. Arguments go to pytest, which otherwise
# runs all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
CLIENTS=.venv-clients
INSTRUCTOR=.venv-instructor
NODE=tests/clients/node

main() {
  environment "$CLIENTS" -c deploy/clients.constraints.txt -r deploy/clients.requirements.txt
  environment "$INSTRUCTOR" -r deploy/clients.instructor.txt
  node_modules
  # What the clients' own code warns of is not ours to mend.
  "$CLIENTS/bin/python" -m pytest -W ignore "${@:-tests/clients}"
}

# Made anew when a file it is made of is newer.
environment() {
  local folder=$1 file
  shift
  for file in "$@"; do
    [ ! "$file" -nt "$folder/.installed" ] || rm -rf "$folder"
  done
  [ ! -f "$folder/.installed" ] || return 0
  "$PYTHON" -m venv "$folder"
  echo '*' >"$folder/.gitignore"
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
  touch "$folder/.installed"
}

node_modules() {
  [ "$NODE/package-lock.json" -nt "$NODE/node_modules/.installed" ] || return 0
  # Node knows its own certificates only; a proxy's stand among the machine's.
  NODE_USE_SYSTEM_CA=1 "$CLIENTS/bin/npm" ci --prefix "$NODE" --no-audit --no-fund
  touch "$NODE/node_modules/.installed"
}

main "$@"

#!/usr/bin/env bash
# Which Pythons and torches the project works with: tests/matrix.sh [FOLDER]
# For each Python 3.11 to 3.13 that is here, and the oldest and the newest torch that are supported, it makes an
# environment below FOLDER, installs the project, and runs the quick tests of traces, recordings and commands. It prints
# what ran, what failed, and what could not be had. pip's own settings say where wheels come from (PIP_FIND_LINKS,
# PIP_EXTRA_INDEX_URL). A torch that brings CUDA is left out: it would be gigabytes, and the tests use the CPU.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.venv/matrix}
torches=(2.6.0 2.13.0) # the lowest of pyproject.toml, the one of constraints.txt
tests=(tests/trace/test_writer_reader.py tests/trace/test_sample_traces.py tests/recording/test_recorder.py
  tests/recording/test_start.py tests/tracereel/test_cli.py)
mkdir -p "$folder"

# the interpreter of a version: on the path, of pyenv, or one that uv has or installs
interpreter() {
  local found
  for found in "$(command -v "python$1")" ${PYENV_ROOT:-$HOME/.pyenv}/versions/"$1".*/bin/python; do
    if "$found" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$found"
      return
    fi
  done
  command -v uv >/dev/null && uv python install --quiet "$1" 2>/dev/null && uv python find "$1"
}

# what came of one pair, in a line; the logs are in its folder
pair() {
  local home=$folder/$1-$2 python log constraints=constraints.txt
  log=$home.log
  [ "$2" = "${torches[0]}" ] && constraints=constraints-oldest.txt
  python=$(interpreter "$1") || { echo "no Python $1 here"; return; }
  [ -x "$home/bin/python" ] || "$python" -m venv "$home" >"$log" 2>&1 || { echo "no environment, see $log"; return; }
  if ! "$home/bin/python" -c "import torch; assert torch.__version__.split('+')[0] == '$2'" 2>/dev/null; then
    if ! "$home/bin/python" -m pip install --quiet --dry-run --report "$home.json" "torch==$2" >"$log" 2>&1; then
      echo "torch $2 cannot be had, see $log"
      return
    elif grep -qE '"name": "(nvidia|cuda)-' "$home.json"; then
      echo "not run: this torch brings CUDA"
      return
    fi
    "$home/bin/python" -m pip install --quiet "torch==$2" >"$log" 2>&1 || { echo "torch failed, see $log"; return; }
  fi
  "$home/bin/python" -m pip install --quiet -c $constraints -e '.[fast,tables]' >"$log" 2>&1 &&
    "$home/bin/python" -m pip install --quiet pytest pytest-xdist hypothesis hdf5plugin >>"$log" 2>&1 ||
    { echo "dependencies cannot be had, see $log"; return; }
  timeout 600 "$home/bin/python" -m pytest -q -p no:cacheprovider -n 2 "${tests[@]}" >>"$log" 2>&1
  tail -1 "$log"
}

for version in 3.11 3.12 3.13; do
  for torch in "${torches[@]}"; do
    printf '%-6s %-8s %s\n' "$version" "$torch" "$(pair "$version" "$torch")"
  done
done

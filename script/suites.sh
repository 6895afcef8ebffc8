# The suites of script/test, one function each. A suite runs in the checkout with its output in a log. It
# tells its counts with count, pass and skip; a command that fails ends it as failed.
# Given: root, jobs, build (folder for everything that is built), logs, results (file of counts), quick.

# Budgets: a change that passes them is made on purpose, here.
readonly max_build_seconds=300 # of processor time, for the library alone, from nothing
readonly max_library_kib=4096  # stripped of symbols
readonly max_cuda_build_seconds=1200 # the library with CUDA code for one GPU architecture, likewise
readonly max_cuda_library_kib=12288
readonly max_release_build_seconds=3600 # with code for every architecture
readonly max_release_library_kib=24576

# count KIND FILE: counts from a runner's report (results.py).
count() { python3 "$root/script/results.py" "$1" "$2" >>"$results"; }
pass() { echo "passed ${1:-1}" >>"$results"; }
skip() { echo "skipped $suite: $1" >>"$results"; }
not_quick() {
    $quick || return 0
    skip "left out by --quick"
    return 1
}
need() {
    have "$1" && return
    skip "$1 is not installed"
    return 1
}

# configure FOLDER OPTIONS...
configure() {
    cmake -S "$root" -B "$build/$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_LIBDIR=lib "${@:2}"
}
# ctest_in FOLDER OPTIONS...: runs a build's tests and counts them.
ctest_in() {
    local report=$logs/$suite.xml status=0
    ctest --test-dir "$build/$1" -j "$jobs" --no-tests=error --output-on-failure --timeout 1800 \
        --test-output-size-passed 4000000 --output-junit "$report" "${@:2}" || status=$?
    count ctest "$report"
    return "$status"
}

# within WHAT VALUE BUDGET UNIT: a budget that is missed fails the suite, which goes on.
within() {
    echo "$1: $2 $4, budget $3 $4"
    if [ "$2" -le "$3" ]; then
        pass
    else
        echo "error: $1 is over its budget"
        echo "failed 1" >>"$results"
    fi
}
# processor_seconds NAME: sets NAME to what the suite's programs have used so far. (A clock would count other work of the
# machine; bash counts per shell, so this cannot print its result to a $(...).)
processor_seconds() {
    times >"$logs/$suite.times"
    printf -v "$1" %d "$(awk -F '[ms ]+' 'NR == 2 {print int($1 * 60 + $2 + $3 * 60 + $4)}' "$logs/$suite.times")"
}

# build_library FOLDER NAME SECONDS KIB: compiles the library of a configured build, within budgets. What its builds printed
# is kept in the folder's library.txt.
build_library() {
    local folder=$build/$1 before after
    processor_seconds before
    cmake --build "$folder" -j "$jobs" --target kivi >>"$folder/library.txt" 2>&1 || {
        tail -n 100 "$folder/library.txt"
        return 1
    }
    processor_seconds after
    within "compile of $2" $((after - before)) "$3" s
    strip -o "$folder/stripped" "$folder/core/libkivi.so"
    within "size of $2" $(($(stat -c %s "$folder/stripped") / 1024)) "$4" KiB
}

suite_build() {
    configure release
    build_library release libkivi.so $max_build_seconds $max_library_kib
    cmake --build "$build/release" -j "$jobs"
}

# The CUDA code for one architecture, compiled whether or not there is a GPU. The library must keep its names and
# needs, load without a driver and run its CPU backend. On a machine with a GPU its tests run too.
suite_cuda() {
    not_quick || return 0
    "$root/script/bootstrap" --cuda
    configure cuda -DKIVI_CUDA=ON -DKIVI_CUDA_ARCHITECTURES=90-real -DCMAKE_CUDA_FLAGS="-Xptxas=-v"
    build_library cuda "libkivi.so with CUDA for sm_90" $max_cuda_build_seconds $max_cuda_library_kib
    python3 "$root/script/spills.py" "$build/cuda/library.txt"
    pass
    cmake --build "$build/cuda" -j "$jobs" --target gpu gpu_error hot_path devices no_code decode prefill pack path step keep nogpu_load \
        abi_header_c abi_header_cpp abi_layout_lock abi_old_client decode_loop_c
    ctest_in cuda -R '^(gpu|gpu_error|hot_path|devices|no_code|decode|prefill|pack|path|step|keep|nogpu_.*|abi_.*|decode_loop_c)$'
}

# The library with code for every architecture of cmake/KiviCuda.cmake: the same names and needs, and it loads and works
# where there is no driver.
suite_release() {
    "$root/script/bootstrap" --cuda
    configure cuda-release -DKIVI_CUDA=ON
    build_library cuda-release "libkivi.so with CUDA for every GPU" $max_release_build_seconds $max_release_library_kib
    cmake --build "$build/cuda-release" -j "$jobs" --target nogpu_load conformance property abi_layout_lock abi_old_client
    ctest_in cuda-release -R '^(nogpu_.*|abi_.*|conformance_cpu|property_cpu)$' -E 'abi_header|abi_marks|abi_bindings'
}

# Every suite of tests/ and the examples, by CMake's own runner.
suite_ctest() { ctest_in release; }

suite_readme() {
    python3 "$root/script/snippets.py"
    pass "$(grep -c verbatim "$logs/$suite.log")"
}

# What the scripts say to bad arguments, and where there is no compiler and no network.
suite_scripts() { pytest_in tests/scripts; }

# The binding as a user gets it: a wheel, installed, and tested from outside its folder.
suite_python() {
    rm -rf "$build/wheel"
    python3 -m pip wheel -q --disable-pip-version-check --no-deps -w "$build/wheel" "$root/bindings/python"
    local wheel
    wheel=$(ls "$build"/wheel/kivi-*.whl)
    python3 -m pip install -q --disable-pip-version-check --force-reinstall --no-deps "$wheel"
    python3 -m pip install -q --disable-pip-version-check "$wheel[test]"
    pytest_in bindings/python/tests
    python3 "$root/script/support.py" --check
    pass
}

# The engine of the demo, on small models that the tests make.
suite_engine() {
    python3 -m pip install -q --disable-pip-version-check -r "$root/bindings/python/examples/requirements.txt"
    pytest_in bindings/python/examples/tests
}

pytest_in() {
    local status=0
    python3 -m pytest -q -p no:cacheprovider --junitxml "$logs/$suite.xml" "$root/$1" || status=$?
    count pytest "$logs/$suite.xml"
    return "$status"
}

suite_rust() {
    need cargo || return 0
    cmake --install "$build/release" --prefix "$build/prefix"
    local status=0
    KIVI_LIB_DIR=$build/prefix/lib KIVI_INCLUDE_DIR=$build/prefix/include bindings/rust/scripts/test 2>&1 |
        tee "$logs/rust.txt" || status=$?
    count summary "$logs/rust.txt"
    return "$status"
}

# The C loop on the very library that users get. Valgrind shows programs a CPU without AVX-512, so what
# runs here is the AVX2 path.
suite_valgrind() {
    need valgrind || return 0
    local examples=$build/release/bindings/c/examples program
    for program in "$examples/decode_loop_c" "$examples/decode_loop_cpp" \
        "$examples/dlopen_client $build/release/core/libkivi.so"; do
        # shellcheck disable=SC2086 # the words of a command
        valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect,possible $program
        pass
    done
}

suite_address() {
    not_quick || return 0
    sanitized address,undefined
}
suite_thread() {
    not_quick || return 0
    sanitized thread -L 'threads|examples|hpp'
}
# sanitized SANITIZERS CTEST-OPTIONS...
sanitized() {
    local folder=${1//,/-}
    configure "$folder" -DKIVI_SANITIZE="$1"
    cmake --build "$build/$folder" -j "$jobs"
    ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS=second_deadlock_stack=1 ctest_in "$folder" "${@:2}"
}

# 64-bit ARM: everything compiles, and what needs no long time runs in an emulator.
suite_aarch64() {
    not_quick || return 0
    need aarch64-linux-gnu-g++ || return 0
    configure aarch64 --toolchain "$root/cmake/aarch64-linux-gnu.cmake"
    cmake --build "$build/aarch64" -j "$jobs"
    pass
    need qemu-aarch64-static || return 0
    ctest_in aarch64 -L 'unit|examples|golden'
}

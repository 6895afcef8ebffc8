// Library calls without the global interpreter lock (GIL).
#pragma once
#include "errors.h"

namespace kivi_python {

// Takes the GIL back; does not return if the interpreter has shut down meanwhile.
void take_gil_back(PyThreadState* state);

// Runs one library call, which throws nothing, without the GIL; raises if it fails.
template <class Call>
void run_unlocked(Call&& call) {
    PyThreadState* state = PyEval_SaveThread();
    const kivi_status status = call();
    take_gil_back(state);
    check(status);
}

}  // namespace kivi_python

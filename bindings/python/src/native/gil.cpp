// Taking the GIL back, see gil.h.
//
// A daemon thread may come out of a library call when the interpreter is shutting down. Python before 3.14
// then ends the thread by unwinding its stack, through destructors that need the GIL or may not throw: the
// process would abort with a message. Such a thread waits here instead for the end of the process, which is
// what Python 3.14 does itself.
#include "gil.h"

#include <chrono>
#include <thread>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace kivi_python {

void take_gil_back(PyThreadState* state) {
#if defined(__GLIBCXX__)
    try {
        PyEval_RestoreThread(state);
    } catch (abi::__forced_unwind&) {
        for (;;) {
            std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
#else
    PyEval_RestoreThread(state);
#endif
}

}  // namespace kivi_python

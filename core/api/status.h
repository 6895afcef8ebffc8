// What every entry point of the C API shares: the floating-point environment of the numeric contract, and
// the translation of whatever the core throws into a status and this thread's last error.
#pragma once
#include "kivi/kivi.h"

namespace kivi {

const char* status_name(kivi_status status);

// Text of this thread's last failure. A fixed buffer: it works when memory is gone.
const char* last_error();
kivi_status set_last_error(kivi_status status, const char* sentence);

// Status and text of the exception that is being handled.
kivi_status translate_exception();

// Round to nearest, no flush to zero, no denormals as zero, no traps, until the end of the scope; then
// whatever the caller had. Codes are the same under any setting of the host program.
class FloatEnvironment {
  public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
    unsigned long long saved_;
    bool changed_;
};

template <class Body>
kivi_status guarded(Body&& body) {
    FloatEnvironment environment;
    try {
        body();
        return KIVI_OK;
    } catch (...) {
        return translate_exception();
    }
}

}  // namespace kivi

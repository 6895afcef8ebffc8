// Names of the statuses, the thread's last error, and the floating-point environment.
#include "api/status.h"

#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "format/error.h"

namespace kivi {
namespace {

thread_local char last_error_text[1024] = "";

#if defined(__SSE2__)
// MXCSR: rounding control 00 is to nearest; bits 7..12 mask the traps.
constexpr unsigned kRounding = 0x6000, kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kTrapMasks = 0x1f80;

unsigned long long read_control() { return _mm_getcsr(); }
void write_control(unsigned long long word) { _mm_setcsr(static_cast<unsigned>(word)); }
unsigned long long contract_control(unsigned long long word) {
    return (word & ~static_cast<unsigned long long>(kRounding | kFlushToZero | kDenormalsAreZero)) |
           kTrapMasks;
}
#elif defined(__aarch64__)
// FPCR: RMode in bits 22..23, FZ in 24, FZ16 in 19, trap enables in 8..12 and 15.
constexpr unsigned long long kContractClears = (3ull << 22) | (1ull << 24) | (1ull << 19) | 0x9f00ull;

unsigned long long read_control() {
    unsigned long long word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
}
void write_control(unsigned long long word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
unsigned long long contract_control(unsigned long long word) { return word & ~kContractClears; }
#else
#error "libkivi is built for x86-64 and AArch64"
#endif

}  // namespace

const char* status_name(kivi_status status) {
    switch (status) {
        case KIVI_OK: return "KIVI_OK";
        case KIVI_ERROR_INVALID_ARGUMENT: return "KIVI_ERROR_INVALID_ARGUMENT";
        case KIVI_ERROR_UNSUPPORTED: return "KIVI_ERROR_UNSUPPORTED";
        case KIVI_ERROR_OUT_OF_MEMORY: return "KIVI_ERROR_OUT_OF_MEMORY";
        case KIVI_ERROR_CAPACITY: return "KIVI_ERROR_CAPACITY";
        case KIVI_ERROR_NO_DEVICE: return "KIVI_ERROR_NO_DEVICE";
        case KIVI_ERROR_DEVICE: return "KIVI_ERROR_DEVICE";
        case KIVI_ERROR_STATE: return "KIVI_ERROR_STATE";
        case KIVI_ERROR_CORRUPT: return "KIVI_ERROR_CORRUPT";
        case KIVI_ERROR_MISMATCH: return "KIVI_ERROR_MISMATCH";
        case KIVI_ERROR_BUFFER_TOO_SMALL: return "KIVI_ERROR_BUFFER_TOO_SMALL";
        case KIVI_ERROR_INTERNAL: return "KIVI_ERROR_INTERNAL";
        default: return "KIVI_ERROR_UNKNOWN";
    }
}

const char* last_error() { return last_error_text; }

kivi_status set_last_error(kivi_status status, const char* sentence) {
    std::snprintf(last_error_text, sizeof last_error_text, "%s", sentence);
    return status;
}

kivi_status translate_exception() {
    try {
        throw;
    } catch (const Error& error) {
        return set_last_error(error.status(), error.what());
    } catch (const std::bad_alloc&) {
        return set_last_error(KIVI_ERROR_OUT_OF_MEMORY, "host memory is exhausted");
    } catch (const std::length_error&) {
        return set_last_error(KIVI_ERROR_OUT_OF_MEMORY,
                              "host memory is exhausted: a table exceeds the address space");
    } catch (const std::exception& error) {
        return set_last_error(KIVI_ERROR_INTERNAL, error.what());
    } catch (...) {
        return set_last_error(KIVI_ERROR_INTERNAL, "an exception of unknown kind");
    }
}

FloatEnvironment::FloatEnvironment() : saved_(read_control()) {
    const unsigned long long wanted = contract_control(saved_);
    changed_ = wanted != saved_;
    if (changed_) write_control(wanted);
}

FloatEnvironment::~FloatEnvironment() {
    if (changed_) write_control(saved_);
}

}  // namespace kivi

// Which SIMD instruction set this process runs on, and how a Highway source is called for it.
//
// Highway compiles one source several times, once for each instruction set, into namespaces of their own
// (hwy/foreach_target.h). Its own dispatcher lives in libhwy, which the library does not link; this is the
// small part of it that is needed. A source `x.cc` ends with
//
//   #if HWY_ONCE
//   const Table& table() { return *simd::choose(KIVI_SIMD_TARGETS(TableOf))(); }
//   #endif
//
// where every namespace defines `const Table* TableOf()`. Highway's own AVX3_DL target is not used (its flags
// let the compiler emit AVX-VNNI, which processors with AVX512-VNNI need not have): sources ask target() for
// avx512_vnni inside the AVX3 namespace and write the one instruction as inline assembly.
#pragma once

namespace kivi::cpu::simd {

// Worst to best on one architecture. `plain` is what the compiler may use without asking (NEON on ARM).
enum class Target { plain, sse4, avx2, avx512, avx512_vnni };

Target best_target();             // of this machine
Target target();                  // in use: the best one, unless a test forced another
bool runs_on(Target target);      // whether this machine can
void force_target(Target target); // for tests and benchmarks inside the build; not for a running cache
const char* target_name(Target target);

// Deduction looks at the plain function alone: targets that were not compiled are null pointers.
template <class T>
struct Given {
    using Type = T;
};
template <class T>
using Same = typename Given<T>::Type;

// The function for the target in use, or for the next lower one that was compiled.
template <class Function>
Function* choose(Same<Function>* avx512, Same<Function>* avx2, Same<Function>* sse4, Function* plain) {
    const Target now = target();
    if (now >= Target::avx512 && avx512 != nullptr) return avx512;
    if (now >= Target::avx2 && avx2 != nullptr) return avx2;
    if (now >= Target::sse4 && sse4 != nullptr) return sse4;
    return plain;
}

}  // namespace kivi::cpu::simd

// The four arguments of choose() for a function of every Highway namespace.
#define KIVI_SIMD_TARGETS(function) \
    HWY_CHOOSE_AVX3(function), HWY_CHOOSE_AVX2(function), HWY_CHOOSE_SSE4(function), &HWY_STATIC_DISPATCH(function)

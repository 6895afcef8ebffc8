// Main of the suites that every backend passes: --backend=NAME picks one, everything else goes to doctest.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <cstdio>
#include <string>

#include "support/backend.h"

int main(int argc, char** argv) {
    constexpr int kSkipped = 77;
    const std::string option = "--backend=";
    std::string wanted = "cpu";
    for (int i = 1; i < argc; ++i) {
        if (std::string(argv[i]).rfind(option, 0) == 0) wanted = argv[i] + option.size();
    }
#if defined(__GLIBC__)
    // Memory from malloc begins as 0xFE bytes: NaN as f16, huge as f32 and bf16. Whoever reads what nobody
    // wrote gives a wrong result.
    mallopt(M_PERTURB, 0x01);
#endif
    for (const kivi_test::Backend& backend : kivi_test::backends()) {
        if (backend.name != wanted) continue;
        const std::string reason = kivi_test::missing(backend);
        if (!reason.empty()) {
            std::printf("SKIP: %s: %s\n", backend.name, reason.c_str());
            return kSkipped;
        }
        kivi_test::choose(backend);
        doctest::Context context(argc, argv);
        return context.run();
    }
    std::fprintf(stderr, "unknown backend \"%s\"; there are:", wanted.c_str());
    for (const kivi_test::Backend& backend : kivi_test::backends()) std::fprintf(stderr, " %s", backend.name);
    std::fprintf(stderr, "\n");
    return 2;
}

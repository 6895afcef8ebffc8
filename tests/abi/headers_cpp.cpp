// kivi.h compiles as C++, twice, and its functions have C linkage.
#include "kivi/kivi.h"

extern "C" {
typedef int32_t version_function(void);
}

int main() {
    version_function* const version = kivi_version;
    return version() > 0 ? 0 : 1;
}

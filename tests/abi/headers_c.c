/* kivi.h is strict C99, needs nothing before it, and may be included twice. */
#include "kivi/kivi.h"

int main(void) {
    return kivi_version() == 10000 * KIVI_VERSION_MAJOR + 100 * KIVI_VERSION_MINOR + KIVI_VERSION_PATCH ? 0
                                                                                                        : 1;
}

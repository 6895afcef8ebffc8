// The entry points of the C API, each a few lines: check, translate, call the core.
#include "api/status.h"
#include "kivi/kivi.h"

const char* kivi_status_name(kivi_status status) { return kivi::status_name(status); }
const char* kivi_last_error(void) { return kivi::last_error(); }

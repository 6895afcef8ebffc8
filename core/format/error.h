// The one exception of the core: a status and a sentence. The C shim turns it into the thread's last error.
#pragma once
#include <stdexcept>
#include <string>

#include "kivi/kivi.h"

namespace kivi {

class Error : public std::runtime_error {
  public:
    Error(kivi_status status, const std::string& sentence) : std::runtime_error(sentence), status_(status) {}
    kivi_status status() const { return status_; }

  private:
    kivi_status status_;
};

}  // namespace kivi

/* Finds or starts the Python in this process and connects bridge.py. */
#pragma once

#include "bridge.h"

#include <csignal>
#include <string>

namespace nvdd {

// Sets `callback`; returns an error message, empty if all went well.
std::string start_python(Callback &callback, bool finalized_by_lammps);

// In the program `lmp`: what Ctrl-C does stays as it was, whatever Python code in this block sets. Elsewhere nothing.
class KeepInterrupt {
 public:
  KeepInterrupt();
  ~KeepInterrupt();
  KeepInterrupt(const KeepInterrupt &) = delete;
  KeepInterrupt &operator=(const KeepInterrupt &) = delete;

 private:
  struct sigaction before;
};

}    // namespace nvdd

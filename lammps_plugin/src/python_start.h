/* Finds or starts the Python in this process and connects bridge.py. */
#pragma once

#include "bridge.h"

#include <string>

namespace nvdd {

// Sets `callback`; returns an error message, empty if all went well.
std::string start_python(Callback &callback, bool finalized_by_lammps);

}    // namespace nvdd

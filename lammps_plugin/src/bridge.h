/* What the pair style and Python (plugin_data.py, through ctypes) tell each other. Plain structs in this order: a change
   here is a change there; the two compare sizes when they meet. */
#pragma once

#include <cstdint>

namespace nvdd {

// what the callback is asked for, and how it ends
enum Request : int { LOAD = 0, TYPES = 1, COMPUTE = 2, RELEASE = 3 };
enum Outcome : int {
  DONE = 0,
  FAILED_HERE = 1,         // other ranks may not know: they are ended
  FAILED_EVERYWHERE = 2    // every rank returns this, with the same message
};

// Filled in by Python for LOAD.
struct Model {
  int32_t handle;    // 0: none
  int32_t nelements;
  double cutoff;
  char elements[2048];    // separated by blanks
};

// One force evaluation. All arrays are LAMMPS's or the pair style's own, and valid until the callback returns.
struct Step {
  // counts and settings
  int32_t handle, tag_bytes, nlocal, ntotal, nlistatoms, npairs, nlistneighbors;
  int32_t eflag, vflag, want_energy, want_eatom, want_virial, want_vatom;
  int32_t ago, newton_pair, triclinic, periodic[3];
  int32_t world, me, nprocs, partition, npartitions;
  int32_t excludes;    // whether neigh_modify exclude leaves pairs out of the list
  int64_t timestep, list_generation;
  double box[9];    // xlo ylo zlo xhi yhi zhi xy xz yz
  const char *units;
  // atoms: ntotal rows; tag and q may be null
  double *x, *f, *q;
  void *tag;
  int32_t *type, *elems;
  // list atoms, pairs with r < cutoff, and the distinct neighbours in the whole list
  int32_t *iatoms, *ielems, *pair_i, *pair_j, *listneighbors;
  double *rij;
  // filled in by Python
  double energy;
  double *eatoms;
  int32_t eatoms_set, reserved;
  // for Python to call; each returns 0
  void *self;
  int (*pair_forces)(void *self, const double *fij);    // npairs x 3
  int (*add_forces)(void *self, const double *f);       // nlocal x 3
  int (*add_virial)(void *self, const double *w);       // xx yy zz xy xz yz
  // seconds since the pair style was made: building the views, in the callback, in pair_forces (part of the callback)
  double seconds_build, seconds_callback, seconds_pair_forces;
};

// `text`: file of LOAD; for TYPES the word of each type, separated by blanks. `message` takes the error's text.
typedef int (*Callback)(int request, void *data, const char *text, char *message, int size);

constexpr int MESSAGE_SIZE = 8192;

}    // namespace nvdd

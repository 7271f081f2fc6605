/* pair_style mliap unified FILE: a Python object computes energies and pair forces (LAMMPS's ML-IAP contract). */
#pragma once

#include "bridge.h"

#include "pair.h"

#include <string>
#include <vector>

namespace LAMMPS_NS {

class PairMLIAPNVDD : public Pair {
 public:
  PairMLIAPNVDD(class LAMMPS *);
  ~PairMLIAPNVDD() override;

  void settings(int, char **) override;
  void coeff(int, char **) override;
  void init_style() override;
  double init_one(int, int) override;
  void compute(int, int) override;
  double memory_usage() override;

 private:
  nvdd::Callback callback;
  nvdd::Model model;
  nvdd::Step step;
  std::vector<std::string> model_elements;

  // what the list was when it was last looked at
  bigint seen_lastcall;
  class NeighList *seen_list;
  int seen_nlocal, seen_nghost;

  // Buffers are kept from step to step; those of pairs hold at least the whole list's entries.
  std::vector<int> elems, iatoms, ielems, pair_i, pair_j, listneighbors;
  std::vector<double> rij, eatoms;

  bool list_is_new() const;
  void on_new_list();
  void find_pairs();
  void describe_step(int, int);
  void tally();
  void refuse_excluded_bonds();
  void agreed(int, const char *);
  [[noreturn]] void fail(int, const char *);

  // called from Python
  static int pair_forces(void *, const double *);
  static int add_forces(void *, const double *);
  static int add_virial(void *, const double *);
};

}    // namespace LAMMPS_NS

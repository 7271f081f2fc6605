#include "pair_mliap_nvdd.h"

#include "python_start.h"

#include "atom.h"
#include "comm.h"
#include "domain.h"
#include "error.h"
#include "force.h"
#include "library.h"
#include "memory.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "universe.h"
#include "update.h"
#include "utils.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mpi.h>

using namespace LAMMPS_NS;

namespace {

// adds the time of a block to a sum
class Stopwatch {
 public:
  explicit Stopwatch(double &total) : sum(total), start(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { sum += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); }

 private:
  double &sum;
  std::chrono::steady_clock::time_point start;
};

/* Calls Python. An exception outside of its `try` (Ctrl-C as the call begins) is dropped by ctypes, with a return value
   that means nothing; then the mark is still there, since Python writes the message last. */
int ask(nvdd::Callback callback, nvdd::Request request, void *data, const char *text, char *message)
{
  constexpr char MARK = '\x01';
  message[0] = MARK;
  message[1] = '\0';
  const int outcome = callback(request, data, text, message, nvdd::MESSAGE_SIZE);
  if (message[0] != MARK) return outcome;
  snprintf(message, nvdd::MESSAGE_SIZE, "interrupted, before the model was through");
  return nvdd::FAILED_HERE;
}

}    // namespace

/* ---------------------------------------------------------------------- */

PairMLIAPNVDD::PairMLIAPNVDD(LAMMPS *lmp) :
    Pair(lmp), callback(nullptr), model{}, step{}, seen_lastcall(-1), seen_list(nullptr), seen_nlocal(-1),
    seen_nghost(-1)
{
  single_enable = 0;
  restartinfo = 0;
  one_coeff = 1;
  manybody_flag = 1;
  respa_enable = 0;
  centroidstressflag = CENTROID_NOTAVAIL;
  // Forces that are no pair forces have a virial that sum f.x doesn't give, so the virial is always tallied here.
  no_virial_fdotr_compute = 1;
  etail = ptail = etail_ij = ptail_ij = 0.0;    // pair_modify tail adds nothing
}

PairMLIAPNVDD::~PairMLIAPNVDD()
{
  if (copymode) return;
  if (model.handle) {
    char message[nvdd::MESSAGE_SIZE];
    ask(callback, nvdd::RELEASE, &model, "", message);
  }
  if (allocated) {
    memory->destroy(setflag);
    memory->destroy(cutsq);
    delete[] map;
    map = nullptr;
  }
}

/* ---------------------------------------------------------------------- */

void PairMLIAPNVDD::settings(int narg, char **arg)
{
  if (narg > 0 && strcmp(arg[0], "model") == 0)
    error->all(FLERR, "from mliap unified to LAMMPS's own mliap model: write `pair_style none` between the two");
  if (narg < 2 || narg > 3 || strcmp(arg[0], "unified") != 0)
    error->all(FLERR, "expected: pair_style mliap unified FILE [0]");
  if (strcmp(arg[1], "EXISTS") == 0)
    error->all(FLERR, "pair_style mliap unified EXISTS needs a LAMMPS built with ML-IAP's Python interface: name a file");
  if (narg == 3 && utils::logical(FLERR, arg[2], false, lmp))
    error->all(FLERR, "neighbors of ghost atoms (ghostneigh 1) are not offered by nvdd's plugin: leave the 1 out");

  std::string problem = nvdd::start_python(callback, lammps_config_has_package("PYTHON"));
  char message[nvdd::MESSAGE_SIZE];
  int outcome = nvdd::DONE;
  if (!problem.empty()) {
    outcome = nvdd::FAILED_HERE;
    snprintf(message, sizeof message, "%s", problem.c_str());
  } else {
    if (model.handle) ask(callback, nvdd::RELEASE, &model, "", message);
    model.handle = 0;
    nvdd::KeepInterrupt keep;    // packages that models import may want Ctrl-C for themselves
    outcome = ask(callback, nvdd::LOAD, &model, arg[1], message);
  }
  agreed(outcome, message);
  if (allocated)    // the elements of another model: pair_coeff must come again
    for (int i = 1; i <= atom->ntypes; i++)
      for (int j = i; j <= atom->ntypes; j++) setflag[i][j] = 0;
  model_elements = utils::split_words(model.elements);
}

void PairMLIAPNVDD::coeff(int narg, char **arg)
{
  const int ntypes = atom->ntypes;
  if (!allocated) {
    allocated = 1;
    memory->create(setflag, ntypes + 1, ntypes + 1, "pair:setflag");
    memory->create(cutsq, ntypes + 1, ntypes + 1, "pair:cutsq");
    map = new int[ntypes + 1];
  }
  if (narg != ntypes + 2 || strcmp(arg[0], "*") != 0 || strcmp(arg[1], "*") != 0)
    error->all(FLERR, "expected: pair_coeff * * and one element (or NULL) for each of the {} atom types", ntypes);

  std::string words;
  for (int type = 1; type <= ntypes; type++) {
    const std::string word = arg[type + 1];
    auto found = std::find(model_elements.begin(), model_elements.end(), word);
    if (found != model_elements.end())
      map[type] = (int) (found - model_elements.begin());
    else if (word == "NULL")
      map[type] = -1;
    else
      error->all(FLERR, "element {} of atom type {} is not known to the model, which has: {}", word, type,
                 (const char *) model.elements);
    words += (type > 1 ? " " : "") + word;
  }
  int count = 0;
  for (int i = 1; i <= ntypes; i++)
    for (int j = i; j <= ntypes; j++) {
      setflag[i][j] = map[i] >= 0 && map[j] >= 0;
      count += setflag[i][j];
    }
  if (count == 0) error->all(FLERR, "pair_coeff gives no atom type an element of the model");

  char message[nvdd::MESSAGE_SIZE];
  agreed(ask(callback, nvdd::TYPES, &model, words.c_str(), message), message);
}

void PairMLIAPNVDD::init_style()
{
  if (force->newton_pair == 0) error->all(FLERR, "Pair style mliap requires newton pair on");
  if (utils::strmatch(update->integrate_style, "^respa"))
    error->all(FLERR, "Pair style mliap unified does not support run_style respa: use run_style verlet");
  neighbor->add_request(this, NeighConst::REQ_FULL);
  seen_list = nullptr;
}

double PairMLIAPNVDD::init_one(int i, int j)
{
  if (setflag[i][j] == 0)
    error->all(FLERR, "atom types {} and {} have no pair coefficients: NULL needs pair_style hybrid", i, j);
  return model.cutoff;
}

// LAMMPS leaves bonded atoms out of the list where special_bonds has zeros; no model means that. Known to all ranks.
void PairMLIAPNVDD::refuse_excluded_bonds()
{
  if (atom->molecular == Atom::ATOMIC || atom->nbonds == 0) return;
  for (int k = 1; k <= 3; k++)
    if (neighbor->special_flag[k] == 0)
      error->all(FLERR, "special_bonds takes bonded atoms out of the neighbor list, and so out of the model: "
                        "add the line `special_bonds lj/coul 1 1 1`");
}

/* ---------------------------------------------------------------------- */

// True also for a list that was looked at before, if in doubt: that costs a little time, the contrary a wrong number.
bool PairMLIAPNVDD::list_is_new() const
{
  return neighbor->ago == 0 || neighbor->lastcall != seen_lastcall || list != seen_list ||
      atom->nlocal != seen_nlocal || atom->nghost != seen_nghost;
}

void PairMLIAPNVDD::on_new_list()
{
  seen_lastcall = neighbor->lastcall;
  seen_list = list;
  seen_nlocal = atom->nlocal;
  seen_nghost = atom->nghost;
  step.list_generation++;
  refuse_excluded_bonds();

  const int ntotal = atom->nlocal + atom->nghost;
  std::vector<char> seen(ntotal, 0);
  bigint entries = 0;
  for (int ii = 0; ii < list->inum; ii++) {
    const int i = list->ilist[ii];
    entries += list->numneigh[i];
    for (int jj = 0; jj < list->numneigh[i]; jj++) seen[list->firstneigh[i][jj] & NEIGHMASK] = 1;
  }
  if (3 * entries > INT_MAX) fail(nvdd::FAILED_HERE, "more than 7e8 neighbor pairs on one rank: use more ranks");
  listneighbors.clear();
  for (int j = 0; j < ntotal; j++)
    if (seen[j] && map[atom->type[j]] >= 0) listneighbors.push_back(j);
  if ((size_t) entries >= pair_i.size()) {    // one more than there are entries: find_pairs writes before it decides
    const size_t size = entries + entries / 16 + 1;
    // not resize(), which would copy what is about to be overwritten
    pair_i = std::vector<int>(size);
    pair_j = std::vector<int>(size);
    rij = std::vector<double>(3 * size);
  }
}

// the pairs with r < cutoff of the atoms in the list
void PairMLIAPNVDD::find_pairs()
{
  const int ntotal = atom->nlocal + atom->nghost;
  const double cutoff_squared = model.cutoff * model.cutoff;
  elems.resize(ntotal);
  for (int i = 0; i < ntotal; i++) elems[i] = map[atom->type[i]];
  iatoms.clear();
  ielems.clear();
  // pointers of this function's own, which the compiler knows that no store changes
  const double *const x = ntotal ? atom->x[0] : nullptr;
  const int *const element = elems.data();
  int *const j_of_pair = pair_j.data();
  double *const r_of_pair = rij.data();
  int n = 0;
  for (int ii = 0; ii < list->inum; ii++) {
    const int i = list->ilist[ii];
    if (element[i] < 0) continue;
    iatoms.push_back(i);
    ielems.push_back(element[i]);
    const double xi = x[3 * i], yi = x[3 * i + 1], zi = x[3 * i + 2];
    const int *const neighbors = list->firstneigh[i];
    const int count = list->numneigh[i], first = n;
    for (int jj = 0; jj < count; jj++) {
      const int j = neighbors[jj] & NEIGHMASK;
      const double dx = x[3 * j] - xi, dy = x[3 * j + 1] - yi, dz = x[3 * j + 2] - zi;
      // written in any case and kept or not: a branch that can't be predicted costs more
      j_of_pair[n] = j;
      r_of_pair[3 * n] = dx;
      r_of_pair[3 * n + 1] = dy;
      r_of_pair[3 * n + 2] = dz;
      n += (dx * dx + dy * dy + dz * dz < cutoff_squared) & (element[j] >= 0);
    }
    std::fill(pair_i.begin() + first, pair_i.begin() + n, i);
  }
  step.npairs = n;
  eatoms.assign(iatoms.size(), 0.0);
}

void PairMLIAPNVDD::describe_step(int eflag, int vflag)
{
  step.handle = model.handle;
  step.tag_bytes = sizeof(tagint);
  step.nlocal = atom->nlocal;
  step.ntotal = atom->nlocal + atom->nghost;
  step.nlistatoms = (int) iatoms.size();
  step.nlistneighbors = (int) listneighbors.size();
  step.eflag = eflag;
  step.vflag = vflag;
  step.want_energy = eflag_global;
  step.want_eatom = eflag_atom;
  step.want_virial = vflag_global;
  step.want_vatom = vflag_atom;
  step.ago = neighbor->ago;
  step.newton_pair = force->newton_pair;
  step.triclinic = domain->triclinic;
  for (int d = 0; d < 3; d++) {
    step.periodic[d] = domain->periodicity[d];
    step.box[d] = domain->boxlo[d];
    step.box[3 + d] = domain->boxhi[d];
  }
  step.box[6] = domain->triclinic ? domain->xy : 0.0;
  step.box[7] = domain->triclinic ? domain->xz : 0.0;
  step.box[8] = domain->triclinic ? domain->yz : 0.0;
  step.world = world;
  step.me = comm->me;
  step.nprocs = comm->nprocs;
  step.partition = universe->iworld;
  step.npartitions = universe->nworlds;
  step.excludes = neighbor->exclude;
  step.timestep = update->ntimestep;
  step.units = update->unit_style;
  step.x = atom->x ? atom->x[0] : nullptr;
  step.f = atom->f ? atom->f[0] : nullptr;
  step.q = atom->q_flag ? atom->q : nullptr;
  step.tag = atom->tag_enable ? atom->tag : nullptr;
  step.type = atom->type;
  step.elems = elems.data();
  step.iatoms = iatoms.data();
  step.ielems = ielems.data();
  step.pair_i = pair_i.data();
  step.pair_j = pair_j.data();
  step.listneighbors = listneighbors.data();
  step.rij = rij.data();
  step.energy = 0.0;
  step.eatoms = eatoms.data();
  step.eatoms_set = 0;
  step.self = this;
  step.pair_forces = pair_forces;
  step.add_forces = add_forces;
  step.add_virial = add_virial;
}

void PairMLIAPNVDD::compute(int eflag, int vflag)
{
  ev_init(eflag, vflag);
  {
    Stopwatch watch(step.seconds_build);
    if (list_is_new()) on_new_list();
    find_pairs();
    describe_step(eflag, vflag);
  }
  // A rank without atoms calls as well: the model's exchanges wait for every rank.
  char message[nvdd::MESSAGE_SIZE];
  int outcome;
  {
    Stopwatch watch(step.seconds_callback);
    outcome = ask(callback, nvdd::COMPUTE, &step, "", message);
  }
  if (outcome != nvdd::DONE) fail(outcome, message);
  tally();
}

void PairMLIAPNVDD::tally()
{
  if (eflag_global) eng_vdwl += step.energy;
  if (eflag_atom)
    for (size_t ii = 0; ii < iatoms.size(); ii++) eatom[iatoms[ii]] += eatoms[ii];
}

/* ---------------------------------------------------------------------- */

// All ranks are here: what one of them met becomes an error of all, with the message of the first that failed.
void PairMLIAPNVDD::agreed(int outcome, const char *message)
{
  int first = outcome == nvdd::DONE ? INT_MAX : comm->me, failed;
  MPI_Allreduce(&first, &failed, 1, MPI_INT, MPI_MIN, world);
  if (failed == INT_MAX) return;
  char text[nvdd::MESSAGE_SIZE] = "";
  if (failed == comm->me) snprintf(text, sizeof text, "%s", message);
  MPI_Bcast(text, sizeof text, MPI_CHAR, failed, world);
  error->all(FLERR, std::string(text));
}

void PairMLIAPNVDD::fail(int outcome, const char *message)
{
  const std::string text = message;
  if (outcome == nvdd::FAILED_EVERYWHERE || universe->nprocs == 1) error->all(FLERR, text);
  // The other ranks wait for this one, in the model or in MPI: an exception that a script could catch would leave them.
  try {
    error->one(FLERR, text);
  } catch (std::exception &problem) {
    fprintf(stderr, "%s\n", problem.what());
    fflush(nullptr);
    MPI_Abort(universe->uworld, 1);
    throw;
  }
}

/* ----------------------------------------------------------------------
   called from Python through ctypes: nothing here throws
------------------------------------------------------------------------- */

// fij = dE/dr_ij of the energy of the list atoms on this rank: f_i += fij, f_j -= fij
int PairMLIAPNVDD::pair_forces(void *self, const double *fij)
{
  auto *const pair = (PairMLIAPNVDD *) self;
  Stopwatch watch(pair->step.seconds_pair_forces);
  const int npairs = pair->step.npairs;
  const int *const pair_i = pair->pair_i.data(), *const pair_j = pair->pair_j.data();
  const double *const rij = pair->rij.data();
  double *const f = pair->step.f;

  for (int k = 0; k < npairs;) {    // grouped by i
    const int i = pair_i[k];
    double fx = 0.0, fy = 0.0, fz = 0.0;
    for (; k < npairs && pair_i[k] == i; k++) {
      const double *const g = fij + 3 * (size_t) k;
      double *const fj = f + 3 * (size_t) pair_j[k];
      fx += g[0];
      fy += g[1];
      fz += g[2];
      fj[0] -= g[0];
      fj[1] -= g[1];
      fj[2] -= g[2];
    }
    f[3 * (size_t) i] += fx;
    f[3 * (size_t) i + 1] += fy;
    f[3 * (size_t) i + 2] += fz;
  }
  if (!pair->vflag_either) return 0;

  double w[6] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  for (int k = 0; k < npairs; k++) {
    const double *const r = rij + 3 * (size_t) k, *const g = fij + 3 * (size_t) k;
    // symmetric: the sum of x f_y differs from that of y f_x where a model is not invariant under rotation
    const double t[6] = {-r[0] * g[0],
                         -r[1] * g[1],
                         -r[2] * g[2],
                         -0.5 * (r[0] * g[1] + r[1] * g[0]),
                         -0.5 * (r[0] * g[2] + r[2] * g[0]),
                         -0.5 * (r[1] * g[2] + r[2] * g[1])};
    for (int d = 0; d < 6; d++) w[d] += t[d];
    if (pair->vflag_atom) {
      double *const vi = pair->vatom[pair_i[k]], *const vj = pair->vatom[pair_j[k]];
      for (int d = 0; d < 6; d++) {
        vi[d] += 0.5 * t[d];
        vj[d] += 0.5 * t[d];
      }
    }
  }
  if (pair->vflag_global)
    for (int d = 0; d < 6; d++) pair->virial[d] += w[d];
  return 0;
}

int PairMLIAPNVDD::add_forces(void *self, const double *forces)
{
  auto *const pair = (PairMLIAPNVDD *) self;
  const size_t n = 3 * (size_t) pair->step.nlocal;
  for (size_t k = 0; k < n; k++) pair->step.f[k] += forces[k];
  return 0;
}

int PairMLIAPNVDD::add_virial(void *self, const double *w)
{
  auto *const pair = (PairMLIAPNVDD *) self;
  if (pair->vflag_global)
    for (int d = 0; d < 6; d++) pair->virial[d] += w[d];
  return 0;
}

double PairMLIAPNVDD::memory_usage()
{
  double bytes = Pair::memory_usage();
  bytes += (double) (pair_i.capacity() + pair_j.capacity() + elems.capacity() + iatoms.capacity() + ielems.capacity() +
                     listneighbors.capacity()) * sizeof(int);
  bytes += (double) (rij.capacity() + eatoms.capacity()) * sizeof(double);
  return bytes;
}

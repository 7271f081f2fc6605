/* What LAMMPS calls when it loads the plugin: registers `mliap` (ours for `unified`, else the built-in style) and
   `mliap/nvdd` (always ours). */
#include "pair_mliap_nvdd.h"

#include "error.h"
#include "force.h"
#include "input.h"
#include "lammps.h"
#include "library.h"
#include "utils.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>

using namespace LAMMPS_NS;

// lammpsplugin.h, which the wheel doesn't have
extern "C" {
typedef void *(*lammpsplugin_factory1)(void *);
typedef struct {
  const char *version, *style, *name, *info, *author;
  union {
    lammpsplugin_factory1 v1;
    void *(*v2)(void *, int, char **);
  } creator;
  void *handle;
} lammpsplugin_t;
typedef void (*lammpsplugin_regfunc)(lammpsplugin_t *, void *);

void lammpsplugin_init(void *, void *, void *);
}

namespace {

Force::PairCreator builtin = nullptr;    // this LAMMPS library's own creator of `mliap`

void *create_ours(void *lmp) { return static_cast<Pair *>(new PairMLIAPNVDD((LAMMPS *) lmp)); }

// A creator isn't told the style's arguments; they are in the input line that is being executed.
void *create(void *pointer)
{
  auto *const lmp = (LAMMPS *) pointer;
  int unified = 0, other = 0;
  for (int i = 0; i + 1 < lmp->input->narg; i++) {
    if (strcmp(lmp->input->arg[i], "mliap") != 0) continue;
    (strcmp(lmp->input->arg[i + 1], "unified") == 0 ? unified : other)++;
  }
  if (unified && other)
    lmp->error->all(FLERR, "`mliap unified` and `mliap model` in one pair_style line: write mliap/nvdd unified for the first");
  if (unified || !builtin) return create_ours(pointer);
  return builtin(lmp);
}

}    // namespace

void lammpsplugin_init(void *pointer, void *handle, void *regfunc)
{
  auto *const lmp = (LAMMPS *) pointer;
  // nothing of LAMMPS's classes may be touched before this: their layout differs between versions
  const int version = lammps_version(pointer);
  if (version != NVDD_LAMMPS_VERSION) {
    if (lammps_extract_setting(pointer, "world_rank") == 0)
      fprintf(stderr, "nvdd: its plugin is for LAMMPS %d, this is LAMMPS %d, so `pair_style mliap unified` of nvdd is "
                      "not available here\n", NVDD_LAMMPS_VERSION, version);
    return;
  }
  // a LAMMPS with ML-IAP's own Python interface needs no plugin
  if (dlsym(RTLD_DEFAULT, "PyInit_mliap_unified_couple")) return;

  auto found = lmp->force->pair_map->find("mliap");
  if (found != lmp->force->pair_map->end() && (void *) found->second != (void *) &create) builtin = found->second;

  auto *const registered = (lammpsplugin_regfunc) regfunc;
  lammpsplugin_t plugin = {};
  plugin.version = lmp->version;
  plugin.style = "pair";
  plugin.info = "nvdd: machine-learning potentials over many ranks";
  plugin.author = "nvdd";
  plugin.handle = handle;
  plugin.name = "mliap/nvdd";
  plugin.creator.v1 = create_ours;
  registered(&plugin, lmp);
  plugin.name = "mliap";
  plugin.creator.v1 = create;
  registered(&plugin, lmp);
}

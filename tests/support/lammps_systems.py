"""Systems and runs for LAMMPS, in units lj: what its own lj/cut and a unified object of `lammps_objects` both can do."""

from __future__ import annotations

LJ = "pair_style lj/cut 2.5\npair_coeff * * 1 1"
OURS = "pair_style mliap unified lj.pkl\npair_coeff * * Ar"

MELT = """units lj
atom_style atomic
lattice fcc 0.8442
region box block 0 5 0 5 0 5
create_box 1 box
create_atoms 1 box
mass 1 1.0
displace_atoms all random 0.05 0.05 0.05 77 units box
velocity all create 3.0 87287 loop geom
"""
TRICLINIC = MELT.replace("block 0 5 0 5 0 5", "prism 0 5 0 5 0 5 1.3 0.7 -0.9")
TINY = """units lj
atom_style atomic
region box block 0 1.7 0 1.8 0 1.9 units box
create_box 1 box
create_atoms 1 single 0.1 0.1 0.1 units box
create_atoms 1 single 0.9 1.0 1.0 units box
mass 1 1.0
velocity all create 0.1 87287 loop geom
"""
ONE = TINY.replace("create_atoms 1 single 0.9 1.0 1.0 units box\n", "").replace(
    "velocity all create 0.1 87287 loop geom\n", ""
)
# the second of two ranks along x has no atoms; and neither atoms nor ghosts
EMPTY = """units lj
atom_style atomic
processors * 1 1
region box block 0 40 0 8 0 8 units box
create_box 1 box
region left block 1 8 1 7 1 7 units box
lattice fcc 0.8442
create_atoms 1 region left
mass 1 1.0
velocity all create 0.3 87287 loop geom
"""
FAR = EMPTY.replace("0 40", "0 60").replace("1 8 1 7", "4 12 1 7")
TWO = MELT.replace("create_box 1", "create_box 2").replace(
    "mass 1 1.0", "mass * 1.0\nset group all type/fraction 2 0.4 12393"
)
BONDED = MELT.replace("atom_style atomic", "atom_style bond").replace(
    "create_box 1 box", "create_box 1 box bond/types 1 extra/bond/per/atom 1 extra/special/per/atom 2"
) + "bond_style zero\nbond_coeff * 1.0\n"  # fmt: skip
BOND = "create_bonds single/bond 1 1 2\n"

NVE = "fix 1 all nve\nrun 20 post no"
LJ_TWO = "pair_coeff 1 1 1 1\npair_coeff 2 2 0.6 0.9\npair_coeff 1 2 0.8 0.95"

# name: (setup, potential of LAMMPS, the same by the plugin, what is run)
SYSTEMS = {
    "melt": (MELT, LJ, OURS, "run 0"),
    "nve": (MELT, LJ, OURS, NVE),
    "triclinic": (TRICLINIC, LJ, OURS, NVE),
    "two atoms in a box smaller than the cutoff": (TINY, LJ, OURS, NVE),
    "one atom": (ONE, LJ, OURS, NVE),
    "empty rank": (EMPTY, LJ, OURS, NVE),
    "rank without ghosts": (FAR, LJ, OURS, NVE),
    "two elements": (
        TWO,
        f"pair_style lj/cut 2.5\n{LJ_TWO}",
        "pair_style mliap unified two.pkl\npair_coeff * * Ar Kr",
        NVE,
    ),
    "two elements in another order": (
        TWO,
        "pair_style lj/cut 2.5\npair_coeff 1 1 0.6 0.9\npair_coeff 2 2 1 1\npair_coeff 1 2 0.8 0.95",
        "pair_style mliap unified two.pkl\npair_coeff * * Kr Ar",
        NVE,
    ),
    "hybrid/overlay": (
        MELT,
        LJ,
        "pair_style hybrid/overlay lj/cut 2.5 mliap unified half.pkl\npair_coeff * * lj/cut 0.5 1\npair_coeff * * mliap Ar",
        NVE,
    ),
    "hybrid with NULL": (
        TWO,
        f"pair_style lj/cut 2.5\n{LJ_TWO}",
        "pair_style hybrid mliap unified lj.pkl lj/cut 2.5\npair_coeff * * mliap Ar NULL\n"
        "pair_coeff 2 2 lj/cut 0.6 0.9\npair_coeff 1 2 lj/cut 0.8 0.95",
        NVE,
    ),
    "hybrid/overlay with NULL": (
        TWO,
        "pair_style lj/cut 2.5\npair_coeff 1 1 1 1\npair_coeff 2 2 1.5 1\npair_coeff 1 2 0.8 0.95",
        "pair_style hybrid/overlay lj/cut 2.5 mliap unified half.pkl\npair_coeff * * mliap NULL Ar\n"
        "pair_coeff 1 1 lj/cut 1 1\npair_coeff 2 2 lj/cut 1 1\npair_coeff 1 2 lj/cut 0.8 0.95",
        NVE,
    ),
    "two of ours": (
        MELT,
        LJ,
        "pair_style hybrid/overlay mliap unified half.pkl mliap/nvdd unified half.pkl\n"
        "pair_coeff * * mliap Ar\npair_coeff * * mliap/nvdd Ar",
        NVE,
    ),
    "NPT": (MELT, LJ, OURS, "fix 1 all npt temp 1 1 1 iso 0 0 5\nrun 20 post no"),
    "NPT, triclinic": (TRICLINIC, LJ, OURS, "fix 1 all npt temp 1 1 1 tri 0 0 5\nrun 20 post no"),
    "atom sort": (MELT, LJ, OURS, "atom_modify sort 5 2.0\n" + NVE),
    "check yes": (MELT, LJ, OURS, "neigh_modify every 1 delay 0 check yes\n" + NVE),
    "tiled and rcb": (MELT, LJ, OURS, "comm_style tiled\nbalance 1.0 rcb\n" + NVE),
    "fix balance": (EMPTY, LJ, OURS, "fix b all balance 5 1.0 shift x 5 1.0\n" + NVE),
    "fix balance rcb": (EMPTY, LJ, OURS, "comm_style tiled\nfix b all balance 5 1.0 rcb\n" + NVE),
    "minimize": (MELT, LJ, OURS, "minimize 0 1e-8 20 100"),
    "run again": (MELT, LJ, OURS, NVE + "\nrun 7 pre no post no\nrun 5 post no"),
    "exclude": (MELT, LJ, OURS, "group a id < 200\nneigh_modify exclude group a a\n" + NVE),
    "shrink-wrapped": (MELT.replace("units lj", "units lj\nboundary s s s"), LJ, OURS, NVE),
    "fixed, open, periodic": (EMPTY.replace("units lj", "units lj\nboundary f m p"), LJ, OURS, NVE),
    "map yes": (MELT.replace("atomic", "atomic\natom_modify map yes"), LJ, OURS, NVE),
    "deleted atoms": (MELT, LJ, OURS, "group d id < 300\ndelete_atoms group d compress no\n" + NVE),
    "evaporating": (MELT, LJ, OURS, "region r block INF INF INF INF 0 3\nfix e all evaporate 5 20 r 49892\n" + NVE),
    "all atoms leave a rank": (EMPTY, LJ, OURS, "displace_atoms all move 20 0 0 units box\n" + NVE),
    "type swaps": (TWO, f"pair_style lj/cut 2.5\n{LJ_TWO}", "pair_style mliap unified two.pkl\npair_coeff * * Ar Kr",
                   "fix s all atom/swap 5 20 12 1.0 ke no types 1 2\n" + NVE),
    "long neighbor skin": (MELT, LJ, OURS, "neighbor 1.0 bin\n" + NVE),
    "pair_modify": (MELT, LJ, OURS + "\npair_modify tail yes", "run 0"),
    "pair style given again": (MELT, LJ, OURS + "\n" + LJ + "\n" + OURS, NVE),
    "bonds, special_bonds 1": (BONDED + "special_bonds lj/coul 1 1 1\n" + BOND, LJ, OURS, "run 0"),
    "molecular atoms without bonds": (BONDED, LJ, OURS, "run 0"),
    "after clear": (MELT, LJ, f"{OURS}\nrun 1\nclear\n{MELT}\n{OURS}", "run 0"),
    "suffix": (MELT, LJ, "suffix omp\n" + OURS, NVE),
    "after a restart": (
        MELT,
        f"{LJ}\nrun 1\nwrite_restart r\nclear\nread_restart r\n{LJ}",
        f"{OURS}\nrun 1\nwrite_restart r\nclear\nread_restart r\n{OURS}",
        NVE,
    ),
    "rerun": (MELT, LJ, OURS, "dump 1 all custom 5 d id type x y z\n" + NVE + "\nundump 1\nrerun d dump x y z"),
    "checked": (MELT.replace("0 5 0 5", "0 4 0 4"), LJ, OURS.replace("lj", "checked"), NVE + "\nrun 7 pre no post no"),
    "checked, triclinic": (TRICLINIC.replace("0 5 0 5", "0 4 0 4"), LJ, OURS.replace("lj", "checked"), NVE),
    "checked, one atom": (ONE, LJ, OURS.replace("lj", "checked"), NVE),
    "checked, empty rank": (FAR, LJ, OURS.replace("lj", "checked"), NVE),
    "energies of pairs": (MELT, LJ, OURS.replace("lj", "pairwise"), NVE),
}  # fmt: skip

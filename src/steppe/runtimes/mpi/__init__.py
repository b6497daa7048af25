"""The `mpi` runtime: one MPI rank per worker slot."""

from steppe.core.contracts.capabilities import Capabilities

CAPABILITIES = Capabilities(
    workers_share_learner_slot=True,  # rank 0 is learner and manager, and every rank is a worker
    live_tuning=True,
    joins_ranks=True,
    modules=("mpi4py",),
    programs=("mpiexec",),
)

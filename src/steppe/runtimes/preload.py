"""Modules that the fork server imports before it forks, so that a role's process starts in a fraction of a second.

Only imports: a fork after torch has run on several threads can hang.
"""

from numba.core.registry import cpu_target

import steppe.algorithms.dqn.dqn
import steppe.algorithms.ppo.ppo
import steppe.envs.factory
import steppe.replay.transition_memory
import steppe.runtimes.builder
import steppe.transport.shm  # noqa: F401
from steppe.core.system import blas

blas.get_threads()  # finds the BLAS libraries once for all processes
cpu_target.target_context.refresh()  # imports what the first compiled kernel would import in every process

"""What the fork server imports before it forks, so that a role's process starts in a fraction of a second.

Only imports: a fork after torch has run on several threads can hang.
"""

from numba.core.registry import cpu_target

import steppe.agents.dqn
import steppe.agents.ppo
import steppe.envs.making
import steppe.replay.memory
import steppe.runtimes.wiring
import steppe.transport.shm  # noqa: F401
from steppe.core import blas

blas.get_threads()  # finds the libraries once for all
cpu_target.target_context.refresh()  # imports what the first compiled kernel would, in every process anew

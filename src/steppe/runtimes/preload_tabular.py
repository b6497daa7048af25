"""What the fork server imports for agents with tables: as in preload.py, without torch."""

from numba.core.registry import cpu_target

import steppe.agents.tabular.agent
import steppe.envs.making
import steppe.replay.rollout
import steppe.roles.crews
import steppe.roles.keeper
import steppe.roles.worker
import steppe.runtimes.wiring
import steppe.transport.tables  # noqa: F401

cpu_target.target_context.refresh()

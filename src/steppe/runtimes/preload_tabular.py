"""Modules that the fork server imports for tabular agents: as in preload.py, without torch."""

from numba.core.registry import cpu_target

import steppe.algorithms.tabular.agent
import steppe.envs.factory
import steppe.replay.rollout
import steppe.roles.tabular.learner
import steppe.roles.tabular.rollouts
import steppe.roles.tabular.worker
import steppe.runtimes.builder
import steppe.transport.tables.shared  # noqa: F401

cpu_target.target_context.refresh()

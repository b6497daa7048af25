"""The conformance suite of runtimes over one process and many."""

import pytest

from steppe.runtimes.inline import launch as inline
from steppe.runtimes.processes import launch as processes
from steppe.testing.runtime import RuntimeConformance

pytestmark = pytest.mark.integration


class TestInline(RuntimeConformance):
    runtime = "inline"

    def launch(self, plan, directory):
        return inline.launch(plan, directory)


class TestProcesses(RuntimeConformance):
    runtime = "processes"

    def launch(self, plan, directory):
        return processes.launch(plan, directory)

"""The conformance suite of channels over local and shared memory."""

from contextlib import contextmanager

import pytest

from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
from steppe.testing.channel import ChannelConformance
from steppe.transport.local import LocalChannel
from steppe.transport.shm import ShmChannel

pytestmark = pytest.mark.integration


class TestLocalChannel(ChannelConformance):
    @contextmanager
    def make(self, num_actors, slots_per_actor):
        yield LocalChannel(self.spec, num_actors, slots_per_actor)


class TestShmChannel(ChannelConformance):
    """Every writer has mappings of its own, as in a process of its own."""

    @contextmanager
    def make(self, num_actors, slots_per_actor):
        room = make_shared_dir(self.run, 1)
        self.opened, self.sizes = [], (room, self.spec, self.run, num_actors, slots_per_actor)
        try:
            self.opened.append(ShmChannel(*self.sizes, create=True))
            yield self.opened[0]
        finally:
            for channel in self.opened:
                channel.close()
            remove_shared_dir(room)

    def beside(self, channel):
        self.opened.append(ShmChannel(*self.sizes))
        return self.opened[-1]

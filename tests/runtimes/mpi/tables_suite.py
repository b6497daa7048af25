"""Program of every rank in test_workers.py: `train`, the documented call, or `table`, the transport alone."""

import json
import os
import sys

import numpy as np

from steppe.core.contracts.errors import UsageError
from tests.support.tabular_envs import Maze, Uneven


def train(kind, steps, batch_size, sync_frequency):
    from steppe.classic import DistAsyncQLearning, LinearSchedule, OptimalQLearning

    runtime = DistAsyncQLearning(
        OptimalQLearning, batch_size=batch_size, sync_frequency=sync_frequency, discount_factor=0.8, epsilon=1.0,
        epsilon_decay=1.0, learning_rate=LinearSchedule(0.05, 0.0, steps), seed=4,
    )  # fmt: skip
    env = Uneven() if kind == "uneven" else Maze()
    shares = {}

    def watch(view):
        shares.update({number: report.env_steps for number, report in view.actors.items()})

    runtime.train(env, steps, validation_every=steps // 2, validation_episodes=5, callbacks=[watch])
    assert runtime.rank == 0, "the others serve the first rank"
    found = {"state": runtime.result.state, "steps": runtime.algorithm.step_count, "size": runtime.size}
    found |= {"shares": shares, "validated": len(runtime.validation)}
    if kind == "maze":
        found["error"] = float(np.abs(runtime.q_table[:-1] - Maze().exact(0.8)).max())
    runtime.train(env, 100)  # another run of the same world
    found["again"] = runtime.algorithm.step_count
    try:
        runtime.train(Maze(), 100)
    except UsageError as error:
        found["another"] = str(error)
    print(json.dumps(found | {"torch": "torch" in sys.modules}), flush=True)


def table(rounds):
    """Every rank adds known numbers, each as often as its own number, and ends at any time."""
    import time

    from mpi4py import MPI

    from steppe.core.contracts.transport import TableDelta
    from steppe.transport.mpi.tables import MpiTable

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    link = MpiTable(world, range(size))
    local, nothing = np.zeros((32, size), np.float32), np.empty(0, np.int64)
    if rank == 0:
        link.create(np.zeros((32, size), np.float32), size, None)

    def answered(question):
        while (answer := question()) is None:
            link.progress()
            time.sleep(0.0001)
        return answer

    assert answered(lambda: link.begin(rank, local)) == 0
    stream = np.random.default_rng(rank)
    for number in range(rounds * (rank + 1)):
        np.add.at(local, (stream.integers(0, 32, 7), rank), 1.0)
        link.merge(rank, TableDelta(nothing, np.ones((32, size), np.float32), 7, 1), 0.0)
        if number % 5 == rank % 5:
            assert answered(lambda: link.claim(rank, 10, 0.0)) == 10
        link.progress()
    while not link.settled:
        link.progress()
    if rank == 0:
        wanted = sum(7 * rounds * (other + 1) for other in range(size))
        while link.totals().steps < wanted:
            link.progress()
        values = np.zeros((32, size), np.float32)
        link.read(values)
        print(json.dumps({"sums": values.sum(axis=0).tolist(), "steps": link.totals().steps}), flush=True)
        for other in range(1, size):
            world.Send(b"", other, 1)
    else:
        while not world.Iprobe(0, 1):
            link.progress()
        world.Recv(bytearray(0), 0, 1)
        answered(lambda: link.claim(rank, 1, 0.0))
        assert np.array_equal(local.sum(axis=0), [7 * rounds * (other + 1) for other in range(size)])
    if rank == 0:
        done = 0
        while done < size - 1:
            link.progress()
            if world.Iprobe(MPI.ANY_SOURCE, 2):
                world.Recv(bytearray(0), MPI.ANY_SOURCE, 2)
                done += 1
    else:
        world.Send(b"", 0, 2)
    link.close()


if __name__ == "__main__":
    os.environ.setdefault("STEPPE_RUNS", "runs")
    if sys.argv[1] == "table":
        table(int(sys.argv[2]))
    else:
        train(sys.argv[2], *(int(word) for word in sys.argv[3:]))

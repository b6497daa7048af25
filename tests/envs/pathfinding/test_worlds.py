"""Pathfinding worlds: scenes worked out by hand, seeds, snapshots, memory, and what is said of bad arguments."""

import subprocess
import sys

import numpy as np
import pytest

from steppe.core.contracts.errors import CannotResume, ConfigError, WorldError
from steppe.core.io import codec
from steppe.envs.pathfinding.kernels import PathfindingOutput
from steppe.envs.pathfinding.worlds import PathfindingWorlds, Scenario, greedy_walk
from tests.support.pathfinding_oracle import SlowWorld

pytestmark = pytest.mark.unit
STAY, UP, DOWN, LEFT, RIGHT = range(5)
MOVE, HIT, HOME, DONE = np.float32([-0.075, -0.5, 0.0, 3.0]).tolist()


def scene(*rows):
    """`#` is an obstacle; agent 0 starts at `a` and goes to `A`, agent 1 from `b` to `B`, and so on."""
    cells = {cell: (r, c) for r, row in enumerate(rows) for c, cell in enumerate(row)}
    names = sorted(cell for cell in cells if cell.islower())
    obstacles = np.array([[cell == "#" for cell in row] for row in rows])
    return Scenario(obstacles, np.array([cells[n] for n in names]), np.array([cells[n.upper()] for n in names]))


def played(given, *moves):
    """(rewards, positions) after each of the moves."""
    worlds = PathfindingWorlds(1, given.num_agents, maps=[given], autoreset=False)
    worlds.reset(0)
    results = []
    for actions in moves:
        output = worlds.step(np.array([actions]))
        results.append((output.rewards[0].tolist(), [tuple(cell) for cell in worlds.positions(0).tolist()]))
    return results


def test_walls_borders_and_waiting():
    given = scene("a#A", "...")
    results = played(given, [RIGHT], [UP], [LEFT], [STAY], [DOWN])
    assert [rewards[0] for rewards, _ in results] == [HIT, HIT, HIT, MOVE, MOVE]
    assert results[-1][1] == [(1, 0)]


def test_waiting_on_the_goal_costs_nothing_and_the_last_arrival_pays_everyone():
    given = scene("aA..", "bB..")
    results = played(given, [RIGHT, STAY], [STAY, STAY], [STAY, RIGHT])
    assert [rewards for rewards, _ in results] == [[MOVE, MOVE], [HOME, MOVE], [DONE, DONE]]


def test_agents_that_would_swap_both_stay():
    given = scene("abAB")
    assert played(given, [RIGHT, LEFT]) == [([HIT, HIT], [(0, 0), (0, 1)])]


def test_three_in_a_ring_may_turn():
    given = scene("ab", "Bc", "AC")
    assert played(given, [RIGHT, DOWN, LEFT]) == [([MOVE, MOVE, MOVE], [(0, 1), (1, 1), (1, 0)])]


def test_following_is_allowed_and_the_lowest_id_wins_a_free_cell():
    given = scene("ab.AB")
    assert played(given, [RIGHT, RIGHT]) == [([MOVE, MOVE], [(0, 1), (0, 2)])]
    given = scene("b.a", "A.B")
    assert played(given, [LEFT, RIGHT]) == [([MOVE, HIT], [(0, 1), (0, 0)])]


def test_who_is_sent_back_sends_back_who_follows():
    """c cannot enter the wall, so b, who follows c, and a, who follows b, stay; d, who wanted a's cell, too."""
    given = scene("dabc#", "DABC.")
    results = played(given, [RIGHT, RIGHT, RIGHT, RIGHT])
    assert results == [([HIT] * 4, [(0, 1), (0, 2), (0, 3), (0, 0)])]


def test_an_agent_that_stays_keeps_its_cell_for_any_order():
    given = scene("a.b", "A.B")
    results = played(given, [RIGHT, STAY], [RIGHT, STAY])
    assert results[1] == ([HIT, MOVE], [(0, 1), (0, 2)])


def test_an_agent_pushed_back_takes_its_cell_from_the_winner():
    """a and b want c's cell, a has the claim; c cannot leave it after all: both pay."""
    given = scene(".a.", ".c#", ".b.", "ABC")
    results = played(given, [DOWN, UP, RIGHT])
    assert results == [([HIT, HIT, HIT], [(0, 1), (2, 1), (1, 1)])]


def test_planes_by_hand():
    worlds = PathfindingWorlds(1, 2, maps=[scene("a.#", "b.A", "..B")], view=3)
    obs = worlds.reset(0).obs[0]
    assert obs[0, 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert obs[0, 1].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert obs[1, 0].tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    ways = obs[0, 2:, 1, 1].tolist(), obs[1, 2:, 1, 1].tolist()
    assert ways == ([0, 1, 0, 1], [0, 1, 0, 1])
    assert obs[0, 2:, 1, 2].tolist() == [0, 1, 0, 0]  # beside the wall only down leads nearer
    assert obs[1, 1].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_agents_receive_from_the_nearest_two_within_view():
    """a's nearest are b and c; d is in view but fourth. e is far from all, and hears nobody: its nearest are out of view."""
    given = scene("ab.......e", "c.........", "..d.......", "ABCDE.....")
    worlds = PathfindingWorlds(1, 5, maps=[given])
    mask = worlds.reset(0).comm_mask[0].astype(int).tolist()
    assert mask[0] == [1, 1, 1, 0, 0]
    assert mask[1] == [1, 1, 1, 0, 0]
    assert mask[2] == [1, 1, 1, 0, 0]
    assert mask[3] == [0, 1, 1, 1, 0]  # b and c are equally far and nearer than a
    assert mask[4] == [0, 0, 0, 0, 1]


def test_equal_distances_go_to_the_lower_id():
    given = scene("..d..", "..a..", "c...b", ".ABCD")
    mask = PathfindingWorlds(1, 4, maps=[given]).reset(0).comm_mask[0].astype(int).tolist()
    assert mask[0] == [1, 1, 0, 1]  # d at 1; b and c both at √5


def test_a_seed_is_all_there_is():
    runs = []
    for num_worlds in (2, 2, 5):
        worlds = PathfindingWorlds(num_worlds, 5, size=12, max_steps=10)
        stream, results = np.random.default_rng(0), [worlds.reset(7).obs[:2].copy()]
        for _ in range(25):
            actions = np.zeros((num_worlds, 5), int)
            actions[:2] = stream.integers(0, 5, (2, 5))
            results.append(worlds.step(actions).obs[:2].copy())
        runs.append(results)
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])  # a world depends on the seed and its number alone
    other = PathfindingWorlds(2, 5, size=12).reset(8).obs
    assert not np.array_equal(other, runs[0][0])


def test_without_a_seed_the_random_stream_continues():
    worlds = PathfindingWorlds(1, 3, size=12)
    first = worlds.reset(1).obs.copy()
    second = worlds.reset().obs.copy()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(worlds.reset(1).obs, first)
    np.testing.assert_array_equal(worlds.reset().obs, second)


def test_some_environments_can_be_reset():
    worlds = PathfindingWorlds(3, 4, size=12)
    worlds.reset(0)
    before = [worlds.positions(b).tolist() for b in range(3)]
    worlds.step(np.zeros((3, 4), int))
    worlds.reset(worlds=[1])
    assert worlds.elapsed.tolist() == [1, 0, 1]
    assert [worlds.positions(b).tolist() == before[b] for b in range(3)] == [True, False, True]


def test_obstacle_densities_are_the_requested_ones():
    fixed = PathfindingWorlds(40, 2, size=40, density=0.3)
    fixed.reset(0)
    shares = np.array([fixed.obstacles(b).mean() for b in range(40)])
    assert abs(shares.mean() - 0.3) < 4 * (0.3 * 0.7 / 1600 / 40) ** 0.5
    free = PathfindingWorlds(2000, 2, size=30)
    free.reset(0)
    shares = np.array([free.obstacles(b).mean() for b in range(2000)])
    low, top, high = 0.0, 0.33, 0.5
    deviation = ((low**2 + top**2 + high**2 - low * top - low * high - top * high) / 18) ** 0.5
    assert abs(shares.mean() - (low + top + high) / 3) < 4 * deviation / 2000**0.5
    assert abs(shares.std() - deviation) < 0.01
    assert shares.max() > 0.45


def test_starts_and_goals_are_anywhere():
    """On an empty map of 16 cells every cell is a start and a goal equally often."""
    worlds = PathfindingWorlds(4000, 3, size=4, density=0.0)
    worlds.reset(0)
    for places in (worlds.positions, worlds.goals):
        cells = np.concatenate([places(b) @ [4, 1] for b in range(4000)])
        counts = np.bincount(cells, minlength=16)
        assert np.abs(counts - 750).max() < 4.5 * 750**0.5


@pytest.mark.parametrize("given", [False, True])
def test_restored_snapshots_continue_bit_for_bit(given):
    def make():
        maps = [np.zeros((9, 9), bool), scene("a..b.c", "BC.#.A")] if given else ()
        size = None if given else 11
        return PathfindingWorlds(3, 3, size=size, maps=maps, max_steps=15)

    one, other = make(), make()
    assert one.snapshot() is None
    stream = np.random.default_rng(0)
    one.reset(5)
    other.reset(99)
    if not given:
        one.assign(2, 7, worlds=[2])
    for _ in range(23):
        one.step(stream.integers(0, 5, (3, 3)))
    tree = codec.unpack(codec.pack(one.snapshot()))
    restored = other.restore(tree)
    np.testing.assert_array_equal(restored.obs, one.output.obs)
    np.testing.assert_array_equal(restored.comm_mask, one.output.comm_mask)
    for _ in range(60):
        actions = stream.integers(0, 5, (3, 3))
        for own, its in zip(one.step(actions)[:5], other.step(actions)[:5], strict=True):
            np.testing.assert_array_equal(own, its)
    assert codec.pack(one.snapshot()) == codec.pack(other.snapshot())


def damage(tree, name, change):
    array = tree[name].copy()
    change(array)
    return {**tree, name: array}


def test_a_snapshot_that_does_not_fit_is_refused():
    worlds = PathfindingWorlds(2, 3, size=8)
    worlds.reset(0)
    tree = worlds.snapshot()
    elsewhere = PathfindingWorlds(2, 4, size=8)
    elsewhere.reset(0)
    with pytest.raises(CannotResume, match="differently configured"):
        elsewhere.restore(tree)
    with pytest.raises(CannotResume, match="'words'"):
        worlds.restore({name: array for name, array in tree.items() if name != "words"})
    for name, value in (("at", -1), ("at", 10**6), ("goal", 10**6), ("episode", 10**6), ("episode", 0), ("wanted", 99)):
        with pytest.raises(CannotResume, match="cannot have"):
            worlds.restore(damage(tree, name, lambda array, value=value: array.fill(value)))
    with pytest.raises(CannotResume, match="no free cell"):
        worlds.restore(damage(tree, "maps", lambda array: array.fill(255)))
    with pytest.raises(ConfigError, match="call reset"):
        worlds.step(np.zeros((2, 3), int))
    worlds.restore(tree)
    worlds.step(np.zeros((2, 3), int))


def test_it_writes_into_memory_of_the_callers():
    worlds, same = PathfindingWorlds(2, 3, size=8), PathfindingWorlds(2, 3, size=8)
    rows = [worlds.blank() for _ in range(4)]
    assert worlds.reset(0, into=rows[0]) is rows[0]
    same.reset(0)
    stream = np.random.default_rng(0)
    for row in rows[1:]:
        actions = stream.integers(0, 5, (2, 3))
        assert worlds.step(actions, row) is row
        for own, its in zip(row, same.step(actions), strict=True):
            np.testing.assert_array_equal(own, its)
    assert not worlds.output.obs.any()
    for wrong in (rows[0].obs[:1], rows[0].obs.astype(np.int64), rows[0].obs[:, ::-1]):
        with pytest.raises(ConfigError, match=r"into\.obs is"):
            worlds.step(actions, rows[0]._replace(obs=wrong))


def test_placing_an_episode():
    worlds = PathfindingWorlds(2, 4, size=9)
    worlds.reset(0)
    given = scene("a..#", "B#.A", "...b")
    output = worlds.place(1, given)
    slow = SlowWorld(given.obstacles, given.starts, given.goals)
    np.testing.assert_array_equal(output.obs[1, :2], slow.observe())
    assert worlds.agents.tolist() == [4, 2]
    assert worlds.goals(1).tolist() == given.goals.tolist()
    with pytest.raises(WorldError, match="no starts and goals"):
        worlds.place(0, Scenario(np.zeros((3, 3))))
    with pytest.raises(WorldError, match="10 × 9 cells, more than the worlds were made for"):
        worlds.place(0, Scenario(np.zeros((10, 9)), np.array([[0, 0]]), np.array([[1, 1]])))
    with pytest.raises(WorldError, match="5 agents, more than the 4"):
        worlds.place(0, Scenario(np.zeros((5, 5)), np.argwhere(np.eye(5)), np.argwhere(np.eye(5)[::-1])))


def refused(match, *args, error=ConfigError, **kwargs):
    with pytest.raises(error, match=match):
        PathfindingWorlds(*args, **kwargs)


def test_bad_arguments_are_one_sentence():
    for view in (8, 1, 0, -3):
        refused(f"view={view} must be odd and at least 3", 1, 2, view=view)
    for progress in (float("nan"), "much"):
        refused(f"progress={progress!r} must be a finite number", 1, 2, progress=progress)
    refused("num_worlds=0 must be at least 1", 0, 2)
    refused("num_agents=0 must be at least 1", 1, 0)
    refused("max_steps=0 must be at least 1", 1, 1, max_steps=0)
    refused("density=1.0 must be from 0 to below 1", 1, 1, density=1.0)
    for size in (0, (0, 4), (4, 5, 6), 2.5, "4"):
        refused("must be a whole number from 1, or two: height and width", 1, 1, size=size)
    refused("at most 32767", 1, 40_000)
    refused("given maps have their own", 1, 1, size=4, maps=[np.zeros((4, 4))])
    refused("17 agents are more than the 16 free cells of a map of 4 × 4", 1, 17, size=4, error=WorldError)
    refused(
        "64 agents are more than the 50 free cells .* at density 0.5", 1, 64, size=10, density=0.5, error=WorldError
    )
    lonely = np.array([[0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 1, 0]])  # the last cell has no way anywhere
    refused("8 agents are more than the 7 free cells of the map", 1, 8, maps=[lonely], error=WorldError)
    refused("3 agents are more than the 2 tasks of the map", 1, 3, maps=[scene("ab.", "A.B")], error=WorldError)


def test_reset_fails_if_the_agents_do_not_fit():
    """Half of 600 cells in a row are free, but a quarter of those have no free neighbour."""
    worlds = PathfindingWorlds(2, 299, size=(1, 600), density=0.5)
    with pytest.raises(WorldError, match="299 agents do not fit on any map of 1 × 600 cells: make maps larger"):
        worlds.reset(0)
    worlds.assign(100)
    worlds.reset(0)


def test_bad_calls_are_one_sentence():
    worlds = PathfindingWorlds(2, 3, size=8)
    with pytest.raises(ConfigError, match="call reset"):
        worlds.step(np.zeros((2, 3), int))
    with pytest.raises(ConfigError, match="call reset"):
        worlds.reset(worlds=[0])
    worlds.reset(0)
    before = worlds.snapshot()
    for wrong in (-1, 5):
        actions = np.ones((2, 3), int)
        actions[1, 2] = wrong
        with pytest.raises(ConfigError, match="world 1 is not a number from 0 to 4"):
            worlds.step(actions)
    assert codec.pack(worlds.snapshot()) == codec.pack(before)
    with pytest.raises(ConfigError, match=r"shape \(3, 2\), not \(2, 3\)"):
        worlds.step(np.zeros((3, 2), int))
    with pytest.raises(ConfigError, match="made for 1 to 3 agents"):
        worlds.assign(4)
    with pytest.raises(ConfigError, match="up to 8 × 8"):
        worlds.assign(size=9)
    with pytest.raises(WorldError, match="3 agents are more than the 2 free cells of a map of 1 × 2"):
        worlds.assign(size=(1, 2))
    with pytest.raises(ConfigError, match="a size of their own"):
        PathfindingWorlds(1, 1, maps=[np.zeros((4, 4))]).assign(size=3)


def test_success_rates_of_the_greedy_walk():
    """40 × 40 at density .3: about 100 % with 4 agents, 85 % with 16 and few with 32, in 256 steps."""
    solved = {}
    for agents in (4, 16, 32):
        worlds = PathfindingWorlds(100, agents, density=0.3)
        output, stream = worlds.reset(agents), np.random.default_rng(agents)
        first = np.full(100, -1)
        for _ in range(worlds.max_steps):
            output = worlds.step(greedy_walk(output.obs, stream))
            first = np.where((first < 0) & (output.terminated | output.truncated), output.terminated, first)
        solved[agents] = np.mean(first == 1)
    assert solved[4] >= 0.97
    assert 0.72 <= solved[16] <= 0.95
    assert solved[32] <= 0.35


def test_pathfinding_worlds_import_neither_torch_nor_pettingzoo():
    code = "import sys, steppe.envs.pathfinding.worlds as p; print([m for m in ('torch', 'pettingzoo', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_output_fields_have_fixed_names():
    assert PathfindingOutput._fields == (
        "obs",
        "comm_mask",
        "rewards",
        "terminated",
        "truncated",
        "final_obs",
        "final_mask",
    )

"""Maps and scenarios from arrays and from MovingAI's files, and what is said when they do not fit."""

import numpy as np
import pytest
from scipy import ndimage

from steppe.core.contracts.errors import WorldError
from steppe.envs.pathfinding.maps import _components
from steppe.envs.pathfinding.worlds import PathfindingWorlds, Scenario, load_map, load_scenario

pytestmark = pytest.mark.unit
MAP = "type octile\nheight 3\nwidth 5\nmap\n..G@.\n.TSO.\nW....\n"
# bucket, map, width, height, start x, start y, goal x, goal y, length
TASKS = [
    (0, "rooms.map", 5, 3, 0, 0, 2, 1, 3.0),
    (1, "rooms.map", 5, 3, 4, 0, 1, 2, 5.0),
    (1, "rooms.map", 5, 3, 2, 2, 0, 1, 4.41),
]


def scen(tasks=TASKS):
    return "version 1\n" + "".join("\t".join(map(str, task)) + "\n" for task in tasks)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "rooms.map").write_text(MAP)
    (tmp_path / "rooms.scen").write_text(scen())
    return tmp_path


def test_a_map_file(files):
    assert load_map(files / "rooms.map").astype(int).tolist() == [[0, 0, 0, 1, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0]]


def test_line_ends_of_another_system(files):
    (files / "dos.map").write_bytes(MAP.replace("\n", "\r\n").encode())
    np.testing.assert_array_equal(load_map(files / "dos.map"), load_map(files / "rooms.map"))


def test_a_scenario_file_has_columns_before_rows(files):
    found = load_scenario(files / "rooms.scen")
    assert found.starts.tolist() == [[0, 0], [0, 4], [2, 2]]
    assert found.goals.tolist() == [[1, 2], [2, 1], [1, 0]]
    assert load_scenario(files / "rooms.scen", 2).num_agents == 2
    (files / "elsewhere").mkdir()
    (files / "elsewhere" / "rooms.scen").write_text(scen())
    assert load_scenario(files / "elsewhere" / "rooms.scen", 1, map_path=files / "rooms.map").num_agents == 1


def test_maps_may_be_paths_arrays_or_scenarios(files):
    worlds = PathfindingWorlds(1, 2, maps=[str(files / "rooms.scen")])
    worlds.reset(0)
    assert worlds.positions(0).tolist() == [[0, 0], [0, 4]]
    np.testing.assert_array_equal(worlds.obstacles(0), load_map(files / "rooms.map"))
    mixed = PathfindingWorlds(60, 2, maps=[files / "rooms.map", np.zeros((7, 2)), load_scenario(files / "rooms.scen")])
    mixed.reset(0)
    shapes = [mixed.obstacles(b).shape for b in range(60)]
    assert 5 < shapes.count((7, 2)) < 35
    given = sum(mixed.positions(b).tolist() == [[0, 0], [0, 4]] for b in range(60))
    assert 5 < given < 35
    assert {mixed.obstacles(b)[0, 0] for b in range(60)} == {False}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("hello", "is not a MovingAI map"),
        (MAP.replace("height 3", "height three"), "is not a MovingAI map"),
        (MAP.replace("width 5", "width 6"), "promises 3 rows of 6 cells and has others"),
        (MAP.replace("height 3", "height 4"), "promises 4 rows of 5 cells and has others"),
        (MAP.replace("G", "x"), "has the cell 'x', which is none of"),
    ],
)
def test_a_bad_map_file(tmp_path, text, match):
    (tmp_path / "bad.map").write_text(text)
    with pytest.raises(WorldError, match=match):
        load_map(tmp_path / "bad.map")


def test_files_that_are_none(tmp_path):
    with pytest.raises(WorldError, match=r"cannot read .*none\.map: No such file"):
        load_map(tmp_path / "none.map")
    (tmp_path / "image.map").write_bytes(bytes(range(256)))
    with pytest.raises(WorldError, match="not a text file"):
        load_map(tmp_path / "image.map")


def changed(task, **fields):
    names = ["bucket", "map", "width", "height", "start_x", "start_y", "goal_x", "goal_y", "length"]
    return tuple(fields.get(name, value) for name, value in zip(names, task, strict=True))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0\trooms.map", "must begin with its version"),
        ("version 1\n", "has 0 tasks, too few for 1 agents"),
        ("version 1\n0\trooms.map\t5\n", "not the 9 fields of a task"),
        (scen([changed(TASKS[0], start_x="left")]), "not the 9 fields of a task"),
        (scen([changed(TASKS[0], width=9)]), r"is for a map of 9 × 3 cells, but .*rooms.map has 5 × 3"),
        (scen([changed(TASKS[0], start_x=5)]), "does not fit its map: agent 0 starts outside it, in row 0, column 5"),
        (scen([changed(TASKS[0], goal_y=-1)]), "does not fit its map: agent 0 has its goal outside it"),
        (scen([TASKS[0], changed(TASKS[1], goal_x=3, goal_y=1)]), "agent 1 has its goal in an obstacle"),
        (
            scen([TASKS[0], changed(TASKS[1], start_x=0, start_y=0)]),
            "two of the starts .* are the same cell: row 0, column 0",
        ),
        (scen([changed(TASKS[0], map="other.map")]), "cannot read .*other.map"),
    ],
)
def test_a_scenario_that_does_not_fit(files, text, match):
    (files / "bad.scen").write_text(text)
    with pytest.raises(WorldError, match=match):
        load_scenario(files / "bad.scen")


def test_too_few_tasks(files):
    with pytest.raises(WorldError, match="has 3 tasks, too few for 4 agents"):
        PathfindingWorlds(1, 4, maps=[files / "rooms.scen"])


def test_a_start_and_goal_that_are_not_connected():
    walled = np.array([[0, 1, 0], [0, 1, 0]])
    with pytest.raises(WorldError, match=r"no way leads agent 1 from its start \[1, 0\] to its goal \[1, 2\]"):
        Scenario(walled, np.array([[0, 0], [1, 0]]), np.array([[1, 0], [1, 2]]), name="walls")


def test_components_are_those_of_another_library():
    stream = np.random.default_rng(0)
    for _ in range(30):
        given = Scenario(stream.random(stream.integers(1, 25, 2)) < 0.45)
        labels, count = ndimage.label(~given.obstacles)
        sizes = np.bincount(labels.ravel(), minlength=count + 1)[1:]
        assert given.num_agents == sizes[sizes > 1].sum()
        np.testing.assert_array_equal(_components(given.obstacles), labels)


def test_arrays_that_are_no_scenario():
    with pytest.raises(WorldError, match="rows and columns"):
        Scenario(np.zeros(4))
    with pytest.raises(WorldError, match="both starts and goals, or neither"):
        Scenario(np.zeros((2, 2)), np.array([[0, 0]]))
    with pytest.raises(WorldError, match="2 starts and 1 goals"):
        Scenario(np.zeros((2, 2)), np.array([[0, 0], [0, 1]]), np.array([[1, 1]]))
    with pytest.raises(WorldError, match="whole numbers"):
        Scenario(np.zeros((2, 2)), np.array([[0.5, 0]]), np.array([[1, 1]]))
    with pytest.raises(WorldError, match="whole numbers"):
        Scenario(np.zeros((2, 2)), np.array([0, 0]), np.array([1, 1]))


def test_a_scenario_keeps_to_itself():
    """Changing the caller's arrays afterwards must not put agents into walls."""
    obstacles, starts, goals = np.zeros((3, 3), bool), np.array([[0, 0]]), np.array([[2, 2]])
    given = Scenario(obstacles, starts, goals)
    obstacles[:], starts[:], goals[:] = True, 9, 9
    assert not given.obstacles.any()
    assert (given.starts.tolist(), given.goals.tolist()) == ([[0, 0]], [[2, 2]])

"""The points of a sweep: how they combine, what they are called, and which are refused."""

import sys

import pytest
from absl import flags

from experiments import main
from experiments.configs import tiny
from experiments.points import chain, load_points, point_name, product, zip_
from tlt_jax.config import Config, from_dict

HEAD = """
from experiments.configs import tiny
from experiments.points import chain, product, zip_

def get_config(arg="smoke"):
    return tiny.get_config(arg)
"""


def test_product_zip_and_chain():
    assert product({"a": [1, 2], "b": "xy"}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert zip_({"a": [1, 2], "b": "xy"}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    pairs = zip_({"a": [1, 2]}, [{"b": 3}, {"b": 4}])
    assert product(pairs, {"seed": range(2)}) == [
        {"a": 1, "b": 3, "seed": 0},
        {"a": 1, "b": 3, "seed": 1},
        {"a": 2, "b": 4, "seed": 0},
        {"a": 2, "b": 4, "seed": 1},
    ]
    assert chain([{}], product({"a": [1]})) == [{}, {"a": 1}]
    assert product() == [{}] and product({"a": []}) == []
    with pytest.raises(ValueError, match=r"'a' is on two axes"):
        product({"a": [1]}, [{"a": 2}])
    with pytest.raises(ValueError, match=r"axes of one length, got \{'a': 2, 'b c': 1\}"):
        zip_({"a": [1, 2]}, [{"b": 1, "c": 2}])


VALUES = [0, 1, 1.0, "1", "1.0", 1e-5, "1e-05", True, "true", "True", "tRue", "rloo", "RLOO", ""]
VALUES += ["a b", "a_b", "a/b", "../x", "é", "x" * 300, "x" * 299 + "y", "a=b", "a,c=1", "nan", "~"]


def test_different_overrides_never_share_a_name():
    """Nor names that differ by case alone. The plain text of the values would collide."""
    points = [{"a.k": value} for value in VALUES] + [{}]
    points += [{"k": 1}, {"b": 1, "c": 2}, {"b": "1,c=2"}, {"B": 1, "c": 2}, {"b.c": 12}]
    names = [point_name(point).lower() for point in points]
    assert len(set(names)) == len(points)
    assert len({str(point).replace("'", "").lower() for point in points}) < len(points)
    for name in names:
        assert len(name) <= 120 and "/" not in name and name.isascii() and " " not in name
        assert not name.startswith((".", "-"))


def test_a_name_can_be_read_and_does_not_depend_on_the_order():
    name = point_name({"seed": 1, "algorithm.name": "reinforce++", "trainer.learning_rate": 1e-5})
    assert name == "algorithm.name=reinforce++,seed=1,trainer.learning_rate=1e-05"
    assert name == point_name(
        dict(reversed({"trainer.learning_rate": 1e-5, "seed": 1}.items()))
        | {"algorithm.name": "reinforce++"}
    )
    assert point_name({}) == "base"


@pytest.fixture
def config_file(tmp_path):
    def write(body, head=HEAD):
        path = tmp_path / "swept.py"
        path.write_text(head + body)
        return str(path)

    return write


@pytest.mark.parametrize(
    "points, words",
    [
        (
            "[{'trainer.learning_rat': 1.0}]",
            r"rat' in the sweep is no setting; is 'trainer\.learning_rate' m",
        ),
        ("[{'seed.x': 1}]", r"'seed\.x' in the sweep is no setting"),
        ("[{'trainer': 1}]", r"'trainer' in the sweep is a section"),
        ("[{'steps': 'many'}]", r"steps='many' in the sweep must be of type int"),
        ("[{'steps': 2.5}]", r"steps=2\.5 in the sweep must be of type int"),
        ("[{'seed': True}]", r"seed.* must be of type int"),
        ("[{'data.tasks': ['gcd']}]", r"data\.tasks=\['gcd'\] in the sweep: give a bool"),
        ("[{'seed': None}]", r"seed=None in the sweep: give a bool, a number or a string"),
        ("[{'trainer.learning_rate': float('nan')}]", r"learning_rate=nan in the sweep is not fin"),
        ("[{'seed': 0}, {'steps': 0}]", r"point 'steps=0' of the sweep: .*steps=0 must be at"),
        ("[{'seed': 1}, {'seed': 1}]", r"'seed=1' and 'seed=1' of the sweep are the same run"),
        ("[{}, {'seed': 0}]", r"'base' and 'seed=0' of the sweep are the same run"),
        ("[{'trainer.eps': 1}, {'trainer.eps': 1.0}]", r"are the same run"),
        ("[]", r"gave no points"),
        ("None", r"must give dictionaries of overrides, got None"),
        ("{'seed': 1}", r"must give dictionaries of overrides, got \{'seed'"),
        ("[('seed', 1)]", r"gave \('seed', 1\), which is no dict"),
    ],
)
def test_a_sweep_is_refused_before_any_work(config_file, points, words):
    with pytest.raises(ValueError, match=words):
        load_points(config_file(f"def sweep():\n    return {points}\n"))


def test_a_file_without_sweep_and_one_that_is_not_there(config_file, tmp_path):
    with pytest.raises(ValueError, match=r"swept\.py has no sweep\(\)"):
        load_points(config_file(""))
    with pytest.raises(ValueError, match=r"none\.py does not exist"):
        load_points(str(tmp_path / "none.py"))


def test_every_point_is_the_config_that_its_command_line_gives(config_file, monkeypatch):
    path = config_file(
        """
def sweep():
    yield {}
    yield {"trainer.learning_rate": 1e-05, "policy.remat": True, "seed": 3}
    yield {"data.template": "Q: {question} a=b, 'c' --x", "rollout.temperature": 1}
    yield {"data.tasks.basic_arithmetic.params.max_terms": 3, "logger": ""  , "data.seed": 2}
"""
    )
    points = load_points(path + ":full")
    assert points[0].config == from_dict(Config, tiny.get_config("full"))
    assert points[1].config.trainer.learning_rate == 1e-5 and points[1].config.seed == 3
    for point in points:
        argv = ["main", f"--config={path}:full", *point.flags()]
        monkeypatch.setattr(sys, "argv", argv)  # ml_collections reads it there
        main.parse_flags(argv)
        assert from_dict(Config, main.CONFIG.value) == point.config
        for name in [n for n in flags.FLAGS if n.startswith("config.")]:
            delattr(flags.FLAGS, name)

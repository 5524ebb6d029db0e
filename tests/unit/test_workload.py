"""Workload files: what they refuse, and that requests follow from the seed alone."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

from disagg.ab.workload import WARM_UP, Workload, check_workload, load_workload, plan_round, plan_warm_up, shipped_workloads
from disagg.config import SloClass, validated
from disagg.errors import ConfigError

CLASSES = (SloClass(name="chat"), SloClass(name="document"))


def workload(*streams: dict, **keys: object) -> Workload:
    default = {"name": "chat", "arrivals": {"poisson_per_s": 2}, "input_tokens": 8, "output_tokens": 4}
    raw = {"name": "test", "duration_s": 20, "streams": [{**default, **s} for s in streams or ({},)], **keys}
    return validated(Workload, raw, "test")


def test_shipped_workloads_are_found_by_name_and_plan():
    assert {"cpu-interference", "demo", "short-chat", "sim-mixed"} <= set(shipped_workloads())
    for name in shipped_workloads():
        loaded = load_workload(name)
        assert loaded.name == name
        check_workload(loaded, CLASSES, None)
        assert plan_round(loaded, CLASSES, loaded.seed, 0)


def test_cpu_interference_is_what_its_name_promises():
    loaded = load_workload("cpu-interference")
    planned = plan_round(loaded, CLASSES, loaded.seed, 0)
    documents = [r for r in planned if r.slo_class == "document"]
    chats = [r for r in planned if r.slo_class == "chat"]
    assert [(r.input_tokens, r.output_tokens) for r in documents] == [(3000, 16)] * 5
    assert {(r.input_tokens, r.output_tokens) for r in chats} == {(64, 128)}
    assert all(b.due_s - a.due_s == pytest.approx(15) for a, b in itertools.pairwise(documents))
    assert all(r.due_s < 75 and r.ignore_eos and r.temperature == 0 for r in planned)


def test_a_plan_follows_from_seed_and_round():
    w = workload({}, {"name": "other", "input_tokens": {"uniform": [5, 50]}})
    first = plan_round(w, CLASSES, 1, 0)
    assert first == plan_round(w, CLASSES, 1, 0)
    assert [r.due_s for r in first] == sorted(r.due_s for r in first)
    assert [r.index for r in first] == list(range(len(first)))
    assert [r.due_s for r in first] != [r.due_s for r in plan_round(w, CLASSES, 2, 0)]
    assert [r.due_s for r in first] != [r.due_s for r in plan_round(w, CLASSES, 1, 1)]


def test_no_prompt_repeats_in_rounds_or_warm_up():
    w = workload({"input_tokens": 12}, {"name": "other", "input_tokens": 12})
    planned = [*plan_round(w, CLASSES, 0, 0), *plan_round(w, CLASSES, 0, 1), *plan_warm_up(w, CLASSES, 0, 2)]
    prompts = [r.prompt_ids(1000) for r in planned]
    assert len(set(prompts)) == len(prompts)
    assert all(len(p) == 12 and min(p) >= 256 and max(p) < 1000 for p in prompts)
    assert prompts == [r.prompt_ids(1000) for r in planned]


def test_a_small_vocabulary_still_gives_valid_ids():
    (request, *_) = plan_round(workload({"input_tokens": 500}), CLASSES, 0, 0)
    assert set(request.prompt_ids(10)) <= set(range(5, 10))


def test_a_shared_prefix_is_shared_within_a_round_only():
    w = workload({"input_tokens": 20, "shared_prefix_tokens": 10})
    one, two = ([r.prompt_ids(1000) for r in plan_round(w, CLASSES, 0, n)] for n in (0, 1))
    assert len({p[:10] for p in one}) == 1
    assert len({p[10:] for p in one}) == len(one)
    assert one[0][:10] != two[0][:10]


def test_arrivals():
    every = plan_round(workload({"arrivals": {"every_s": 5, "first_s": 2}}), CLASSES, 0, 0)
    assert [r.due_s for r in every] == [2, 7, 12, 17]
    burst = plan_round(workload({"arrivals": {"every_s": 10, "requests": 3}}), CLASSES, 0, 0)
    assert [r.due_s for r in burst] == [0, 0, 0, 10, 10, 10]
    short = plan_round(workload({"arrivals": {"every_s": 5}, "duration_s": 6}), CLASSES, 0, 0)
    assert [r.due_s for r in short] == [0, 5]
    poisson = plan_round(workload({"arrivals": {"poisson_per_s": 50}}, duration_s=100), CLASSES, 0, 0)
    assert len(poisson) == pytest.approx(5000, rel=0.1)


def test_lengths_stay_in_their_bounds():
    w = workload(
        {
            "arrivals": {"every_s": 0.01},
            "input_tokens": {"lognormal": {"median": 100, "sigma": 1, "max": 300}},
            "output_tokens": {"uniform": [3, 5]},
        }
    )
    planned = plan_round(w, CLASSES, 0, 0)
    given = sorted(r.input_tokens for r in planned)
    assert given[0] >= 1
    assert given[-1] == 300
    assert given[len(given) // 2] == pytest.approx(100, rel=0.2)
    assert {r.output_tokens for r in planned} == {3, 4, 5}


def test_warm_up_has_each_length_on_each_worker():
    never_due = {"every_s": 1000, "first_s": 500}
    w = workload({"input_tokens": {"uniform": [10, 90]}}, {"name": "long", "input_tokens": 300, "arrivals": never_due})
    planned = plan_warm_up(w, CLASSES, 0, 3)
    assert all(r.round == WARM_UP for r in planned)
    kinds = {r.due_s: [q for q in planned if q.due_s == r.due_s] for r in planned}
    assert [len(k) for k in kinds.values()] == [3] * 4
    assert all(len({r.input_tokens for r in kind}) == 1 for kind in kinds.values())
    assert max(r.input_tokens for r in planned) == 300


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"duration_s": 0}, "duration_s", "greater than 0"),
        ({"duraton_s": 5}, "duraton_s", "did you mean 'duration_s'"),
        ({"streams": []}, "streams", "at least 1"),
        ({"rounds": 0}, "rounds", "greater than or equal to 1"),
    ],
)
def test_a_wrong_key_or_value_is_named(change: dict, key: str, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        workload(**change)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"arrivals": {}}, "streams.0.arrivals", "exactly one of poisson_per_s, gamma_per_s, ramp and every_s"),
        ({"arrivals": {"poisson_per_s": 1, "every_s": 2}}, "streams.0.arrivals", "exactly one"),
        ({"arrivals": {"poisson_per_s": 1, "requests": 2}}, "streams.0.arrivals", "every_s only"),
        ({"arrivals": {"poisson_per_s": float("inf")}}, "streams.0.arrivals.poisson_per_s", "finite"),
        ({"input_tokens": 0}, "streams.0.input_tokens.fixed", "greater than 0"),
        ({"input_tokens": {"uniform": [9, 3]}}, "streams.0.input_tokens", "low 9 is above high 3"),
        ({"input_tokens": {"fixed": 3, "uniform": [1, 2]}}, "streams.0.input_tokens", "exactly one of"),
        ({"output_tokns": 3}, "streams.0.output_tokns", "did you mean 'output_tokens'"),
        ({"temperature": -1}, "streams.0.temperature", "greater than or equal to 0"),
        ({"name": "a b"}, "streams.0.name", "pattern"),
    ],
)
def test_a_wrong_stream_is_named(change: dict, key: str, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        workload(change)
    assert caught.value.key == key


def test_two_streams_of_one_name():
    with pytest.raises(ConfigError, match="two streams of one name"):
        workload({}, {})


def test_a_class_that_the_topology_lacks_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'document'") as caught:
        check_workload(workload({}, {"name": "long", "slo_class": "documents"}), CLASSES, None)
    assert caught.value.key == "streams.1.slo_class"


def test_a_stream_without_a_class_gets_the_topologys_first():
    assert {r.slo_class for r in plan_round(workload(), CLASSES, 0, 0)} == {"chat"}


@pytest.mark.parametrize(
    ("given", "wanted", "field", "room"),
    [(3000, 16, "input_tokens", 2032), (64, 4000, "output_tokens", 1984), ({"uniform": [1, 2048]}, 8, "input_tokens", 2040)],
)
def test_longer_than_the_context(given: object, wanted: int, field: str, room: int):
    w = workload({"input_tokens": given, "output_tokens": wanted})
    check_workload(w, CLASSES, 4096)
    with pytest.raises(ConfigError, match=f"at most {room} tokens.*context of 2048") as caught:
        check_workload(w, CLASSES, 2048)
    assert caught.value.key == f"streams.0.{field}"


def test_a_workload_without_requests_or_with_far_too_many():
    with pytest.raises(ConfigError, match="no request"):
        plan_round(workload({"arrivals": {"every_s": 5, "first_s": 30}}), CLASSES, 0, 0)
    with pytest.raises(ConfigError, match="at most 1,000,000"):
        check_workload(workload({"arrivals": {"poisson_per_s": 1e9}}), CLASSES, None)


def test_unknown_missing_and_broken_files(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        load_workload("demos")
    with pytest.raises(ConfigError, match="does not exist"):
        load_workload(tmp_path / "absent.yaml")
    for text, says in (("a: [", "not valid YAML"), ("- 1", "expected a mapping"), ("name: x\n", "is missing"), ("\x00", "not valid YAML")):
        file = tmp_path / "w.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_workload(file)
    with pytest.raises(ConfigError, match="directory"):
        load_workload(os.fspath(tmp_path))

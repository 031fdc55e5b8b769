"""The table of routing keys, without engines."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.errors import RoutingError
from miles.router.bindings import Bindings, InFlight, place
from miles.router.upstream import Upstream


def upstreams(names: str, ranks: int = 1) -> list[Upstream]:
    engine = SimpleNamespace(dp_ranks=ranks)
    return [Upstream.of(name, engine, patience_s=60.0) for name in names]


@given(loads=st.lists(st.integers(0, 5), min_size=1, max_size=8), key=st.text(max_size=12))
def test_place_takes_the_fewest_active_and_the_same_for_the_same_key(
    loads: list[int], key: str
) -> None:
    fleet = upstreams("abcdefgh"[: len(loads)])
    for upstream, load in zip(fleet, loads, strict=True):
        upstream.active[0] = load
    chosen, rank = place(key, fleet)
    assert chosen.load == min(loads) and rank == 0
    assert place(key, fleet) == (chosen, 0)


def test_place_breaks_ties_evenly_over_engines_and_ranks() -> None:
    fleet = upstreams("abcd", ranks=4)
    places = [place(f"g{i}.{j}", fleet) for i in range(250) for j in range(8)]
    for upstream in fleet:
        for rank in range(4):
            count = sum(p == (upstream, rank) for p in places)
            assert 85 < count < 170, (upstream.name, rank, count)  # 125 expected


def test_place_takes_the_least_busy_rank_of_the_least_busy_engine() -> None:
    fleet = upstreams("ab", ranks=3)
    fleet[0].active[:] = [0, 0, 9]
    fleet[1].active[:] = [2, 1, 2]
    assert place("key", fleet) == (fleet[1], 1)


def test_bindings_keep_a_key_where_it_is_though_others_are_idle() -> None:
    fleet = upstreams("ab")
    table = Bindings(fleet, max_keys=10)
    binding = table.bind("key")
    assert binding is not None
    binding.upstream.active[0] = 50
    again = table.bind("key")
    assert again is binding and not again.moved and table.rebinds == 0


def test_bindings_forget_the_key_used_longest_ago_and_count_it() -> None:
    table = Bindings(upstreams("a"), max_keys=2)
    for key in ("old", "new"):
        table.bind(key)
    table.bind("old")  # now `new` is the older one
    table.bind("third")
    assert table.find("new") is None and table.find("old") is not None
    assert (len(table), table.expired, table.released) == (2, 1, 0)


def test_bindings_never_forget_a_key_in_use() -> None:
    table = Bindings(upstreams("a"), max_keys=2)
    first, second = table.bind("first"), table.bind("second")
    assert first is not None and second is not None
    with InFlight(first):
        table.bind("third")
        assert table.find("first") is first and table.find("second") is None
        third = table.find("third")
        assert third is not None
        with InFlight(third), pytest.raises(RoutingError) as caught:
            table.bind("fourth")
    assert "no room for the key 'fourth': all 2 keys that the table holds" in str(caught.value)


def test_bindings_release_says_whether_the_key_was_there() -> None:
    table = Bindings(upstreams("a"), max_keys=2)
    table.bind("key")
    assert table.release("key") and not table.release("key")
    assert (len(table), table.released, table.expired) == (0, 1, 0)


def test_in_flight_is_counted_where_it_began_though_the_key_moves() -> None:
    fleet = upstreams("ab")
    table = Bindings(fleet, max_keys=10)
    binding = table.bind("key")
    assert binding is not None
    first = binding.upstream
    with InFlight(binding):
        first.drained = "gone"
        moved = table.bind("key")
        assert moved is binding and moved.upstream is not first and moved.moved
        assert (first.load, moved.upstream.load, moved.active) == (1, 0, 1)
    assert first.load == 0 and binding.active == 0 and table.rebinds == 1


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["bind", "release", "drain", "readmit"]), st.integers(0, 9)),
        max_size=80,
    )
)
def test_a_bound_key_never_moves_while_its_engine_is_healthy(steps: list[tuple[str, int]]) -> None:
    fleet = upstreams("abc")
    table = Bindings(fleet, max_keys=100)
    known: dict[str, Upstream] = {}
    for what, number in steps:
        key, upstream = f"k{number}", fleet[number % 3]
        if what == "drain":
            upstream.drained = "on purpose"
        elif what == "readmit":
            upstream.readmit()
        elif what == "release":
            assert table.release(key) == (key in known)
            known.pop(key, None)
        else:
            before = known.get(key)
            binding = table.bind(key)
            if all(u.drained for u in fleet):
                assert binding is None
                continue
            assert binding is not None and binding.upstream.serving
            if before is not None and before.serving:
                assert binding.upstream is before
            known[key] = binding.upstream
    assert len(table) == len(known)

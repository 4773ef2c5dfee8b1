from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshnet.cache.policy import CacheKey, CacheLimits, EntryView, Need, Plan, plan_room
from meshnet.ids import SessionId

LIMITS = CacheLimits(ttl_s=10, max_sessions=3, max_bytes=100)


def view(
    name: str,
    *,
    nbytes: int = 10,
    last_used: float = 0.0,
    leased: bool = False,
    kept: bool = False,
) -> EntryView:
    return EntryView(CacheKey(SessionId(name), 0, 4), nbytes, last_used, leased, kept)


def names(keys: tuple[CacheKey, ...]) -> list[str]:
    return [key.session for key in keys]


def plan(entries: list[EntryView], need: Need, *, now: float = 0.0) -> Plan:
    found = plan_room(entries, LIMITS, need, now=now)
    assert found is not None
    return found


@st.composite
def entry_lists(draw: st.DrawFn) -> list[EntryView]:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 50), st.integers(0, 30).map(float), st.booleans()), max_size=8
        )
    )
    return [
        view(f"s{i}", nbytes=nbytes, last_used=last_used, leased=leased)
        for i, (nbytes, last_used, leased) in enumerate(rows)
    ]


limits = st.builds(
    CacheLimits,
    ttl_s=st.integers(0, 30).map(float),
    max_sessions=st.integers(0, 8),
    max_bytes=st.integers(0, 300),
)
needs = st.builds(Need, sessions=st.integers(0, 2), nbytes=st.integers(0, 100))
any_case = given(entries=entry_lists(), limits=limits, need=needs, now=st.just(30.0))


def fits(entries: list[EntryView], limits: CacheLimits, need: Need) -> bool:
    return (
        len(entries) + need.sessions <= limits.max_sessions
        and sum(e.nbytes for e in entries) + need.nbytes <= limits.max_bytes
    )


def without(entries: list[EntryView], gone: tuple[CacheKey, ...]) -> list[EntryView]:
    return [e for e in entries if e.key not in gone]


def test_nobody_goes_where_there_is_room() -> None:
    """An entry within its time stays as long as everything fits."""
    entries = [view("a"), view("b")]
    assert Plan((), ()) == plan(entries, Need(sessions=1, nbytes=80), now=10)


def test_the_expired_go_without_need() -> None:
    """What is older than the TTL goes, what is exactly as old stays."""
    entries = [view("young", last_used=1), view("old", last_used=0)]
    assert names(plan(entries, Need(), now=11).expired) == ["old"]


def test_the_expired_spare_the_least_recently_used() -> None:
    """Nobody is evicted where the expired make the room."""
    entries = [view("old", last_used=0), view("b", last_used=5), view("c", last_used=6)]
    assert plan(entries, Need(sessions=1), now=11).evicted == ()


def test_the_least_recently_used_goes_for_a_slot() -> None:
    """A new session takes the slot of the one used longest ago."""
    entries = [view("b", last_used=2), view("a", last_used=1), view("c", last_used=3)]
    assert names(plan(entries, Need(sessions=1)).evicted) == ["a"]


def test_kept_ones_go_first() -> None:
    """However lately they were used: those that somebody continues go after all of them."""
    entries = [
        view("a", last_used=1),
        view("new", last_used=9, kept=True),
        view("old", last_used=8, kept=True),
    ]
    assert names(plan(entries, Need(sessions=1)).evicted) == ["old"]
    assert names(plan(entries, Need(sessions=3)).evicted) == ["old", "new", "a"]


def test_as_many_go_as_the_bytes_ask_for() -> None:
    """Entries go until the bytes suffice, in the order of last use."""
    entries = [view("a", last_used=1), view("b", last_used=2), view("c", last_used=3)]
    assert names(plan(entries, Need(nbytes=90)).evicted) == ["a", "b"]


def test_a_leased_entry_is_passed_over() -> None:
    """The one used longest ago stays while a step uses it, whatever its age."""
    entries = [view("a", last_used=-99, leased=True), view("b", last_used=2), view("c")]
    assert names(plan(entries, Need(sessions=1)).evicted) == ["c"]


def test_a_need_above_the_budget_has_no_plan() -> None:
    """What is larger than the whole budget fits nowhere, empty store or not."""
    assert plan_room([], LIMITS, Need(nbytes=101), now=0) is None


@any_case
def test_the_leased_never_go(
    entries: list[EntryView], limits: CacheLimits, need: Need, now: float
) -> None:
    """No plan names a leased entry."""
    found = plan_room(entries, limits, need, now=now) or Plan((), ())
    leased = {e.key for e in entries if e.leased}
    assert leased.isdisjoint(found.expired + found.evicted)


@any_case
def test_a_plan_makes_room(
    entries: list[EntryView], limits: CacheLimits, need: Need, now: float
) -> None:
    """After a plan what stays and the need fit; there is none only where the leased leave none."""
    found = plan_room(entries, limits, need, now=now)
    if found is None:
        assert not fits([e for e in entries if e.leased], limits, need)
    else:
        assert fits(without(entries, found.expired + found.evicted), limits, need)


@any_case
def test_exactly_the_expired_expire(
    entries: list[EntryView], limits: CacheLimits, need: Need, now: float
) -> None:
    """Every plan expires all idle entries older than the TTL, and evicts none of them."""
    found = plan_room(entries, limits, need, now=now)
    if found is not None:
        old = {e.key for e in entries if not e.leased and now - e.last_used > limits.ttl_s}
        assert (old, set()) == (set(found.expired), old & set(found.evicted))


@any_case
def test_nobody_goes_in_vain(
    entries: list[EntryView], limits: CacheLimits, need: Need, now: float
) -> None:
    """Without the last eviction of a plan there would be no room."""
    found = plan_room(entries, limits, need, now=now)
    if found is not None and found.evicted:
        assert not fits(without(entries, found.expired + found.evicted[:-1]), limits, need)


@any_case
def test_victims_were_used_before_survivors(
    entries: list[EntryView], limits: CacheLimits, need: Need, now: float
) -> None:
    """Who is evicted was not used after any idle entry that stays."""
    found = plan_room(entries, limits, need, now=now)
    if found is not None and found.evicted:
        gone = {e.key: e.last_used for e in entries}
        stay = [
            e.last_used for e in without(entries, found.expired + found.evicted) if not e.leased
        ]
        assert all(gone[key] <= other for key in found.evicted for other in stay)

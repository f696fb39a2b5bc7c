"""Which functions the profile trusts to be fast."""

from rayrpc._concurrency.latency_profile import (
    MAX_ENTRIES,
    MAX_SCORE,
    MIN_SCORE,
    QUICK_SECONDS,
    SHORT_SECONDS,
    LatencyProfile,
    profiled_by_name,
)


def quick(profile, func, times, args=()):
    for _ in range(times):
        profile.record(LatencyProfile.key(func, args), 0.0, exclusive=True)


def test_functions_are_trusted_after_some_quick_runs():
    profile = LatencyProfile()
    assert not profile.is_quick(LatencyProfile.key(print, ()))
    quick(profile, print, 3)
    assert profile.is_quick(LatencyProfile.key(print, ()))
    assert not profile.is_quick(LatencyProfile.key(len, ()))


def test_one_slow_run_is_forgiven_and_many_are_not():
    profile, key = LatencyProfile(), LatencyProfile.key(print, ())
    quick(profile, print, 2 * MAX_SCORE)
    profile.record(key, 2 * QUICK_SECONDS, exclusive=True)
    assert profile.is_quick(key)
    for _ in range(10):
        profile.record(key, 2 * QUICK_SECONDS, exclusive=True)
    assert not profile.is_quick(key)
    quick(profile, print, 3 - MIN_SCORE)
    assert profile.is_quick(key)


def test_the_limit_of_a_fast_run_can_be_set():
    profile, key = LatencyProfile(SHORT_SECONDS), LatencyProfile.key(print, ())
    for _ in range(3):
        profile.record(key, 2 * QUICK_SECONDS, exclusive=True)
    assert profile.is_quick(key)
    profile.record(key, 2 * SHORT_SECONDS, exclusive=True)
    assert not profile.is_quick(key)


def test_slow_runs_beside_other_calls_do_not_count():
    profile, key = LatencyProfile(), LatencyProfile.key(print, ())
    quick(profile, print, 3)
    for _ in range(100):
        profile.record(key, 1.0, exclusive=False)
    assert profile.is_quick(key)


def test_methods_are_profiled_by_function_or_by_the_name_of_the_target():
    class Thing:
        def method(self):
            pass

    @profiled_by_name
    def invoke(target, name):
        pass

    assert LatencyProfile.key(Thing().method, ()) == LatencyProfile.key(Thing().method, ())
    assert LatencyProfile.key(invoke, (1, "a")) == LatencyProfile.key(invoke, (2, "a"))
    assert LatencyProfile.key(invoke, (1, "a")) != LatencyProfile.key(invoke, (1, "b"))


def test_a_profile_does_not_grow_without_bound():
    profile = LatencyProfile()
    for number in range(3 * MAX_ENTRIES):
        profile.record(number, 0.0, exclusive=True)
    assert len(profile._scores) <= MAX_ENTRIES

"""Lines of log that come once a minute, with a count."""

from pdmesh_kvcache.seldom import INTERVAL_S, Seldom


def test_each_kind_is_told_once_a_minute_with_its_number() -> None:
    now_s = 0.0
    seldom = Seldom(clock=lambda: now_s)
    assert [seldom.due("mac") for _ in range(4)] == [1, 0, 0, 0]
    assert seldom.due("length") == 1
    now_s = INTERVAL_S
    assert seldom.due("mac") == 4
    assert seldom.due("mac") == 0

"""What a member tells a directory that was restarted."""

from rayrpc._protocol.membership import RESTARTS, Change, Member, Snapshot
from rayrpc._transports.ray.group_record import KEPT_SYNCS, GroupRecord

ALICE = Member("a", "alice", 0)
BOB = Member("b", "bob", 1, epoch=2, extra={RESTARTS: -1})


def begun():
    record = GroupRecord()
    record.begin(Snapshot(3, ALICE, [ALICE, BOB], 7, b"secret"))
    return record


def test_the_members_are_those_of_the_join_and_of_the_changes_since():
    record = begun()
    assert record.members == {"a": ALICE, "b": BOB} and record.version == 7
    carol = Member("c", "carol", 2)
    record.add([Change(8, "joined", carol), Change(9, "left", ALICE)])
    assert record.members == {"b": BOB, "c": carol}


def test_a_report_says_which_ids_were_used_and_who_is_started_again():
    record = begun()
    died = Change(8, "died", BOB)
    record.add([died])
    record.version = 8
    report = record.report()
    assert (report.member, report.session, report.admitted, report.version) == (ALICE, 3, 7, 8)
    assert report.secret == b"secret" and report.epochs == {0: 1, 1: 3}
    assert report.restarting == [died]
    record.add([Change(9, "joined", BOB)])
    assert record.report().restarting == []


def test_the_results_of_the_last_barriers_are_kept():
    record = begun()
    for number in range(2 * KEPT_SYNCS):
        record.add_sync(f"tag {number}", {"alice": number})
    assert list(record.report().synced) == [
        f"tag {number}" for number in range(KEPT_SYNCS, 2 * KEPT_SYNCS)
    ]

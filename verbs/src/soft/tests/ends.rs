//! Garbage in the end of a peer: at worst, the connection to that peer ends.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::*;
use crate::QueuePairState;

/// Word of the end that says up to where the hostile process has taken our records.
const TAKEN: usize = 16;

#[test]
fn ends_full_of_garbage() {
    let mut honest = Honest::connected();
    for seed in 0..100 {
        let (hostile, victim) = Hostile::connected();
        (0..RECEIVES).for_each(|wr_id| assert!(victim.post_receive(wr_id)));
        victim.send(1, 100);
        hostile.scribble(random(seed));
        let mut taken = 0;
        for _ in 0..20 {
            victim.send(2, 200);
            taken += victim.drain().len();
        }
        assert!(taken <= RECEIVES as usize + 21, "seed {seed}");
        honest.exchange();
        victim.pair.to_error();
        victim.drain();
    }
}

/// A peer that never stops scribbling over its end, while this process sends and receives.
#[test]
fn scribbling_without_end() {
    let mut honest = Honest::connected();
    for round in 0..6 {
        let (hostile, victim) = Hostile::connected();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for seed in round << 32.. {
                    hostile.scribble(random(seed));
                    if stop.load(Relaxed) {
                        break;
                    }
                }
            });
            let until = Instant::now() + Duration::from_millis(50);
            while Instant::now() < until {
                victim.post_receive(1);
                victim.send(1, 64);
                victim.drain();
                honest.exchange();
            }
            stop.store(true, Relaxed);
        });
    }
}

/// A peer that says that it has taken records that were never written, or half a line, or less than before.
#[test]
fn impossible_positions() {
    let mut honest = Honest::connected();
    for position in [64, 1, 63, 1 << 40, u64::MAX, u64::MAX - 63] {
        let (hostile, victim) = Hostile::connected();
        hostile.set(TAKEN, position);
        assert!(victim.post_receive(3));
        victim.drain();
        // A position is checked when a request waits for progress.
        if position != 64 {
            assert!(victim.send(1, 10));
        } else {
            assert!(victim.send(1, 200));
            hostile.set(TAKEN, position);
        }
        let mut completions = victim.drain();
        wait_for("the end of the connection", || {
            completions.extend(victim.drain());
            victim.pair.state() == QueuePairState::Error && completions.len() == 2
        });
        if position != 64 {
            assert!(completions.iter().all(|it| it.status != CompletionStatus::Success), "{completions:?}");
        }
        honest.exchange();
    }
    // A position that goes back.
    let (hostile, victim) = Hostile::connected();
    assert!(victim.send(1, 10));
    hostile.set(TAKEN, 64);
    assert_eq!(victim.drain().len(), 1);
    hostile.set(TAKEN, 0);
    assert!(victim.send(1, 10));
    wait_for("the end of the connection", || {
        victim.drain();
        victim.pair.state() == QueuePairState::Error
    });
}

/// A skip continues to the end of the ring. Otherwise a peer that writes skips as fast as this process reads
/// them could keep a poll from returning.
#[test]
fn a_skip_ends_at_the_end_of_the_ring() {
    let (hostile, victim) = Hostile::connected();
    for line in 0..3 {
        hostile.set(PairEnd::FIRST_OF_RING + 8 * line + 1, 5 << 24 | 1);
        hostile.set(PairEnd::FIRST_OF_RING + 8 * line, hostile.end().key().wrapping_add(line as u64));
    }
    victim.drain();
    assert_eq!(victim.pair.state(), QueuePairState::Error);
    // One skip of the whole ring, and another: no writer needs that.
    let (hostile, victim) = Hostile::connected();
    let lines = hostile.end().ring_bytes() / 64;
    hostile.set(PairEnd::FIRST_OF_RING + 1, 5 << 24 | lines);
    hostile.set(PairEnd::FIRST_OF_RING, hostile.end().key());
    victim.drain();
    assert_eq!(victim.pair.state(), QueuePairState::Error);
}

/// Records that move few bytes count, too.
#[test]
fn a_poll_takes_a_limited_number_of_records() {
    for pull in [false, true] {
        let (mut hostile, victim) = Hostile::connected();
        let flags = Flags::FIRST.with(Flags::LAST).with_if(Flags::PULL, pull);
        let target = victim.remote(0);
        let record = Header { flags, address: target.address, key: target.rkey.0, ..header(Kind::Write, 0) };
        let mut records = 0u64;
        while hostile.put(&victim, &record, &[]) {
            records += 1;
        }
        victim.drain();
        let taken = victim.core.end.taken_word().load(Relaxed) / 64;
        assert!(taken > 0 && taken < records, "pull {pull}: one poll took {taken} of {records} records");
        wait_for("the rest", || {
            victim.drain();
            victim.core.end.taken_word().load(Relaxed) / 64 == records
        });
        assert_eq!(victim.pair.state(), QueuePairState::Rts);
    }
}

/// Keys, rights and ranges of a peer's requests are checked in this process's own table.
#[test]
fn memory_that_was_not_granted_stays() {
    let mut honest = Honest::connected();
    let other = Side::new();
    for case in 0..6 {
        let (mut hostile, victim) = Hostile::connected();
        victim.memory().copy_in(0, &[7; MEMORY]).unwrap();
        other.memory().copy_in(0, &[7; MEMORY]).unwrap();
        let address = victim.memory().address();
        let key = victim.region.rkey().0;
        let (address, key) = match case {
            0 => (address, key ^ 1 << 20),
            1 => (address - 8, key),
            2 => (address + MEMORY as u64 - 8, key),
            3 => (other.memory().address(), other.region.rkey().0),
            4 => (u64::MAX - 8, key),
            _ => (other.memory().address(), key),
        };
        let record = Header { address, key, ..header(Kind::Write, 16) };
        assert!(hostile.put(&victim, &record, &[u64::MAX; 2]));
        victim.drain();
        assert_eq!(victim.pair.state(), QueuePairState::Error, "case {case}");
        for side in [&victim, &other] {
            let mut bytes = vec![0; MEMORY];
            side.memory().copy_out(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 7), "case {case}");
        }
        honest.exchange();
    }
}

/// Records that do not belong together.
#[test]
fn impossible_sequences_of_records() {
    let part = |kind, flags, length, total| Header { flags, total, ..header(kind, length) };
    let (first, last) = (Flags::FIRST, Flags::LAST);
    let none = Flags::default();
    let cases: [&[Header]; 9] = [
        // A message without a beginning.
        &[part(Kind::Send, last, 8, 8)],
        // A second message within the first.
        &[part(Kind::Send, first, 8, 16), part(Kind::Send, first, 8, 16)],
        // More bytes than the message has.
        &[part(Kind::Send, first, 8, 16), part(Kind::Send, last, 16, 16)],
        // An end before the last byte.
        &[part(Kind::Send, first.with(last), 8, 16)],
        // A message without an end.
        &[part(Kind::Send, first, 8, 8)],
        // Data of a READ that this process has not posted.
        &[part(Kind::ReadData, last, 8, 8)],
        // The second half of another kind.
        &[part(Kind::Send, first, 8, 16), part(Kind::Write, last, 8, 16)],
        // A length that no message has.
        &[part(Kind::Write, first, 8, u64::MAX)],
        // A message in the middle of a READ's data.
        &[part(Kind::ReadData, none, 0, 0)],
    ];
    let mut honest = Honest::connected();
    for (number, records) in cases.into_iter().enumerate() {
        let (mut hostile, victim) = Hostile::connected();
        assert!(victim.post_receive(1) && victim.post_receive(2));
        for record in records {
            assert!(hostile.put(&victim, record, &vec![5; record.length as usize / 8]));
        }
        let completions = victim.drain();
        assert_eq!(victim.pair.state(), QueuePairState::Error, "case {number}: {completions:?}");
        assert!(completions.iter().all(|it| it.status != CompletionStatus::Success), "case {number}");
        honest.exchange();
    }
}

/// The peer has ended, so its last records are still taken. A record that can't be taken ends that, too.
#[test]
fn bad_records_of_a_peer_that_has_ended() {
    /// Word of the end that has its state.
    const STATE: usize = 9;
    for (pull, polls) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let (done, result) = std::sync::mpsc::channel();
        // A thread of its own, because the poll would not return.
        std::thread::spawn(move || {
            let (mut hostile, victim) = Hostile::connected();
            let flags = Flags::FIRST.with(Flags::LAST).with(Flags::PULL);
            let target = victim.remote(0);
            let bad = match pull {
                true => {
                    Header { flags, address: target.address, key: target.rkey.0, ..header(Kind::Write, 0) }
                }
                false => Header { flags: Flags::LAST, ..header(Kind::Write, 0) },
            };
            // Polls take sends and receives first by turns.
            (0..polls).for_each(|_| assert_eq!(victim.queue.poll(&mut [WorkCompletion::EMPTY; 4]), 0));
            assert!(hostile.put(&victim, &bad, &[]));
            hostile.set(STATE, 2);
            victim.send(1, 10);
            for _ in 0..4 {
                victim.drain();
            }
            done.send(victim.pair.state()).unwrap();
        });
        let state = result.recv_timeout(TIMEOUT).expect("the poll returns");
        assert_eq!(state, QueuePairState::Error, "pull {pull}, polls {polls}");
    }
}

//! Single exchanges, message by message.

use std::time::Duration;

use super::pair::ConnectionPair;
use crate::protocol::{AbortCode, Blocked, Event, Settings};
use crate::wire::MessageKind::{self, Abort, Ack, Eager, Fin, Ping, Pong, Rts};

fn small() -> Settings {
    Settings { receive_slots: 16, slot_size: 256, send_queue: 32, max_reads: 4, ..Settings::default() }
}

/// Checks the messages that went over the wire: (end, kind) of each.
fn transcript(pair: &ConnectionPair, expected: &[(usize, MessageKind)]) {
    assert_eq!(pair.log, expected);
}

#[test]
fn an_eager_message_needs_no_answer() {
    let mut pair = ConnectionPair::alike(small());
    assert_eq!(pair.write_eager(0, 100), 100);
    pair.settle(true);
    transcript(&pair, &[(0, Eager)]);
    assert_eq!(pair.ends[1].read, 100);
}

#[test]
fn an_eager_message_is_no_longer_than_a_slot() {
    let mut pair = ConnectionPair::alike(small());
    assert_eq!(pair.write_eager(0, 1000), 256 - 32);
    pair.settle(true);
    assert_eq!(pair.write_eager(0, 1000 - 224), 224);
}

#[test]
fn a_rendezvous_is_read_and_acknowledged() {
    let mut pair = ConnectionPair::alike(small());
    assert_eq!(pair.write_rendezvous(0, &[5000, 3000]), 2);
    pair.settle(true);
    // Each chunk is acknowledged when it has landed. Two control messages need an acknowledgement of their
    // own.
    transcript(&pair, &[(0, Rts), (1, Ack), (1, Ack), (0, Ack)]);
    assert_eq!(pair.ends[1].read, 8000);
    assert_eq!(pair.ends[0].events, [Event::SourcesDone { count: 1 }, Event::SourcesDone { count: 1 }]);
}

#[test]
fn an_acknowledgement_goes_with_data_if_there_is_data() {
    let mut pair = ConnectionPair::alike(small());
    pair.write_rendezvous(0, &[5000]);
    pair.arrive(1);
    pair.serve(1);
    pair.complete_read(1);
    pair.write_eager(1, 10);
    pair.settle(true);
    transcript(&pair, &[(0, Rts), (1, Eager)]);
    assert_eq!(pair.ends[0].sources_left(), 0);
}

#[test]
fn eager_data_is_delivered_after_an_earlier_rendezvous() {
    let mut pair = ConnectionPair::alike(small());
    pair.write_rendezvous(0, &[100]);
    pair.write_eager(0, 10);
    pair.arrive(1);
    pair.arrive(1);
    pair.serve(1);
    assert_eq!(pair.read(1, 1000), 0, "the rendezvous has not landed");
    pair.complete_read(1);
    assert_eq!(pair.read(1, 1000), 110);
}

#[test]
fn a_writer_without_credits_waits_until_the_peer_reads() {
    let mut pair = ConnectionPair::alike(small());
    let mut sent = 0;
    while pair.write_eager(0, 10) > 0 {
        sent += 1;
        assert_eq!(pair.ends[0].connection.data_room(), 12 - sent);
        pair.settle(false);
    }
    assert_eq!(sent, 12, "16 slots, of which 4 are kept back");
    assert_eq!(pair.ends[0].connection.blocked_on(), Some(Blocked::Credits));
    pair.settle(true);
    assert_eq!(pair.ends[0].connection.blocked_on(), None);
    // Twelve slots were freed, and a quarter of the sixteen needs an acknowledgement.
    let answers: Vec<MessageKind> =
        pair.log.iter().filter(|(end, _)| *end == 1).map(|(_, kind)| *kind).collect();
    assert_eq!(answers, [Ack, Ack, Ack]);
}

#[test]
fn a_full_send_queue_delays_data_but_no_control_message() {
    let mut pair = ConnectionPair::alike(Settings { send_queue: 16, ..small() });
    let mut sent = 0;
    while pair.write_eager(0, 10) > 0 {
        sent += 1;
        assert_eq!(pair.ends[0].connection.data_room(), 8 - sent);
        pair.arrive(1);
        pair.read(1, 10);
        pair.serve(1);
        pair.repost(1);
    }
    assert_eq!(sent, 8, "16 places, of which 8 are kept for control messages");
    assert_eq!(pair.ends[0].connection.blocked_on(), Some(Blocked::SendQueue));
    pair.ends[0].connection.close_write();
    pair.serve(0);
    assert_eq!(pair.log.last(), Some(&(0, Fin)));
}

#[test]
fn each_direction_closes_by_itself() {
    let mut pair = ConnectionPair::alike(small());
    pair.write_eager(0, 50);
    pair.ends[0].connection.close_write();
    assert_eq!(pair.write_eager(0, 10), 0, "closed for writing");
    pair.settle(true);
    assert!(pair.ends[1].connection.is_read_closed() && !pair.ends[1].connection.is_closed());
    pair.write_eager(1, 60);
    pair.ends[1].connection.close_write();
    pair.settle(true);
    transcript(&pair, &[(0, Eager), (0, Fin), (1, Eager), (1, Fin)]);
    assert!(pair.ends.iter().all(|end| end.connection.is_closed()));
}

#[test]
fn the_stream_ends_only_after_everything_was_read() {
    let mut pair = ConnectionPair::alike(small());
    pair.write_rendezvous(0, &[400]);
    pair.ends[0].connection.close_write();
    pair.serve(0);
    pair.arrive(1);
    pair.arrive(1);
    assert!(pair.ends[1].connection.is_fin_received() && !pair.ends[1].connection.is_read_closed());
    pair.settle(true);
    assert!(pair.ends[1].connection.is_read_closed());
    assert_eq!(pair.ends[1].read, 400);
}

#[test]
fn an_abort_is_sent_once_and_ends_both_directions() {
    let mut pair = ConnectionPair::alike(small());
    pair.ends[0].connection.abort(AbortCode::RESET);
    pair.ends[0].connection.abort(AbortCode::CLOSED);
    pair.settle(true);
    transcript(&pair, &[(0, Abort)]);
    assert_eq!(pair.ends[1].events, [Event::Aborted { code: AbortCode::RESET }]);
    assert_eq!(pair.write_eager(0, 1) + pair.write_eager(1, 1), 0);
}

const SECOND: Duration = Duration::from_secs(1);

/// The times of a default configuration.
fn pinging() -> Settings {
    Settings { ping_interval: Some(5 * SECOND), ping_timeout: 10 * SECOND, ..small() }
}

#[test]
fn a_silent_peer_is_pinged_and_answers() {
    let mut pair = ConnectionPair::new([pinging(), small()]);
    assert_eq!(pair.ends[0].connection.poll_timeout(), Some(pair.now + 5 * SECOND));
    pair.pass(4 * SECOND);
    pair.settle(true);
    transcript(&pair, &[]);
    pair.pass(SECOND);
    pair.settle(true);
    transcript(&pair, &[(0, Ping), (1, Pong)]);
    pair.pass(4 * SECOND);
    pair.settle(true);
    assert_eq!(pair.log.len(), 2, "an answer is good for another five seconds");
}

#[test]
fn a_ping_on_demand_is_answered() {
    let mut pair = ConnectionPair::new([small(), small()]);
    pair.ends[0].connection.ping();
    pair.serve(0);
    assert_eq!(pair.ends[0].connection.pongs(), 0);
    pair.settle(true);
    transcript(&pair, &[(0, Ping), (1, Pong)]);
    assert_eq!([0, 1].map(|end| pair.ends[end].connection.pongs()), [1, 0]);
}

#[test]
fn a_peer_that_does_not_answer_is_given_up() {
    let mut pair = ConnectionPair::new([pinging(), small()]);
    pair.pass(5 * SECOND);
    pair.serve(0);
    transcript(&pair, &[(0, Ping)]);
    pair.pass(9 * SECOND);
    pair.serve(0);
    assert_eq!(pair.ends[0].events, [Event::Idle]);
    pair.pass(SECOND);
    pair.serve(0);
    assert_eq!(pair.ends[0].events, [Event::Idle, Event::PingTimeout]);
    assert_eq!(pair.ends[0].connection.poll_timeout(), None);
}

/// Whenever the last message came, and whether or not pings were answered before.
#[test]
fn a_hang_is_found_15_seconds_after_the_last_message() {
    for tenths in 0..120 {
        let mut pair = ConnectionPair::new([pinging(), small()]);
        for _ in 0..tenths {
            pair.pass(SECOND / 10);
            pair.settle(true);
        }
        pair.write_eager(1, 10);
        pair.settle(true);
        pair.hang(1);
        for _ in 0..149 {
            pair.pass(SECOND / 10);
            pair.serve(0);
        }
        assert!(!pair.ends[0].timed_out, "after {tenths} tenths");
        pair.pass(SECOND / 10);
        assert!(pair.ends[0].timed_out, "after {tenths} tenths");
    }
}

#[test]
fn a_peer_that_runs_rarely_is_not_given_up() {
    let mut pair = ConnectionPair::new([pinging(), pinging()]);
    for _ in 0..20 {
        // Each answers 9.9 s after the other's ping.
        pair.pass(5 * SECOND);
        pair.serve(0);
        pair.serve(1);
        pair.pass(9 * SECOND + 9 * SECOND / 10);
        pair.settle(true);
        assert!(pair.ends.iter().all(|end| !end.timed_out));
    }
}

/// The time in which this process stood still is not the peer's silence: the answer may be there already, or
/// the peer stood still, too.
#[test]
fn a_process_that_stood_still_gives_its_peer_time_to_answer() {
    for before in [0, 1, 4, 5, 6] {
        for still in [11 * SECOND, 60 * SECOND, 8 * 3600 * SECOND] {
            let mut pair = ConnectionPair::new([pinging(), pinging()]);
            pair.pass(5 * SECOND);
            pair.serve(0);
            pair.serve(1);
            pair.pass(before * SECOND);
            pair.stand_still(still);
            pair.serve(0);
            // The peer needs another 3 s.
            pair.pass(3 * SECOND);
            pair.settle(true);
            assert!(pair.ends.iter().all(|end| !end.timed_out), "{before} s before {still:?}");
            pair.pass(5 * SECOND);
            pair.settle(true);
            assert!(pair.ends.iter().all(|end| !end.timed_out));
        }
    }
}

/// However often this process stands still, a peer that hangs is given up.
#[test]
fn a_hang_is_found_by_a_process_that_stands_still_often() {
    let mut pair = ConnectionPair::new([pinging(), small()]);
    pair.hang(1);
    let checks = (0..100).find(|_| {
        pair.stand_still(7 * SECOND);
        pair.serve(0);
        pair.ends[0].timed_out
    });
    // A ping, three late checks, and two that count.
    assert_eq!(checks, Some(5));
}

#[test]
fn a_ping_that_was_answered_is_followed_by_another() {
    let mut pair = ConnectionPair::new([pinging(), small()]);
    for _ in 0..3 {
        pair.pass(5 * SECOND);
        pair.serve(0);
        // The driver sets its timer now, because no event reports the answer.
        let due = pair.ends[0].connection.poll_timeout().unwrap();
        assert!(due <= pair.now + 5 * SECOND, "{:?} from now", due - pair.now);
        pair.settle(true);
    }
    transcript(&pair, &[(0, Ping), (1, Pong), (0, Ping), (1, Pong), (0, Ping), (1, Pong)]);
}

#[test]
fn any_message_is_a_sign_of_life() {
    let mut pair = ConnectionPair::new([pinging(), small()]);
    pair.pass(5 * SECOND);
    pair.serve(0);
    pair.write_eager(1, 10);
    pair.arrive(0);
    pair.pass(2 * SECOND);
    pair.pass(2 * SECOND);
    pair.serve(0);
    transcript(&pair, &[(0, Ping), (1, Eager)]);
    assert_eq!(pair.ends[0].events, [Event::Idle]);
}

//! Seeded schedules. In any order of events, bytes arrive as they were written, no side waits forever, no
//! queue overflows, and both sides become silent. If an end hangs, or its device fails a send or a READ, the
//! peer finds that by ping, neither early nor late, and its reader gets all data that had arrived.
//!
//! `TONIC_RDMA_SCHEDULES` sets the number of schedules; `TONIC_RDMA_SEED` runs a single one.

use std::time::Duration;

use super::pair::{ConnectionPair, Random};
use crate::protocol::{AbortCode, Settings};

const SCHEDULES: u64 = 20_000;
const INTERVAL: Duration = Duration::from_secs(1);

#[test]
fn any_schedule() {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    if let Some(seed) = number("TONIC_RDMA_SEED") {
        return run(seed);
    }
    let schedules = number("TONIC_RDMA_SCHEDULES").unwrap_or(SCHEDULES);
    for seed in 0..schedules {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "seed {seed}: set TONIC_RDMA_SEED={seed} to run it alone");
    }
}

/// The behaviour of an application.
#[derive(Debug)]
struct Application {
    to_write: u64,
    largest: u64,
    rendezvous_percent: u64,
    /// The percentage of steps that read.
    read_percent: u64,
    /// The largest number of bytes of a read.
    read_most: u64,
    /// The number of steps for which the application does nothing.
    paused: u64,
}

impl Application {
    fn random(random: &mut Random, is_long: bool) -> Self {
        let (magnitude, longest) = if is_long { (17, 6000) } else { (12, 400) };
        let magnitude = random.below(magnitude);
        Self {
            to_write: random.below(1 << magnitude << 1),
            largest: 1 + random.below(longest),
            paused: 0,
            rendezvous_percent: [0, 10, 50, 100][random.below(4) as usize],
            read_percent: [1, 20, 100][random.below(3) as usize],
            read_most: [1, 50, 100_000][random.below(3) as usize],
        }
    }
}

/// Returns the time that an end has to answer a ping. In some schedules this time is too short for the random
/// steps.
fn ping_timeout(random: &mut Random) -> Duration {
    [2 * INTERVAL, 10 * INTERVAL, 40 * INTERVAL][random.below(3) as usize]
}

fn settings(random: &mut Random) -> Settings {
    Settings {
        receive_slots: 16 + random.below(20) as u32,
        slot_size: Settings::MIN_SLOT_SIZE + random.below(200) as u32,
        send_queue: Settings::MIN_SEND_QUEUE + random.below(20) as u32,
        max_reads: 1 + random.below(6) as u32,
        ping_interval: Some(INTERVAL),
        ping_timeout: ping_timeout(random),
        ..Settings::default()
    }
}

/// The end of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Orderly,
    /// One end aborts.
    Abort(usize),
    /// One end hangs.
    Hang(usize),
    /// A send or a READ of one side fails, and with the request the queue pair of this side.
    Failure(usize),
}

fn run(seed: u64) {
    let mut random = Random::new(seed);
    let is_long = random.chance(3);
    let mut pair = ConnectionPair::new([settings(&mut random), settings(&mut random)]);
    let mut applications = [0, 1].map(|_| Application::random(&mut random, is_long));
    for end in &mut pair.ends {
        end.buffers = 1 + random.below(6) as usize;
    }
    let ending = match random.below(10) {
        0 => Ending::Abort(random.below(2) as usize),
        1 => Ending::Hang(random.below(2) as usize),
        2 => Ending::Failure(random.below(2) as usize),
        _ => Ending::Orderly,
    };
    let steps = random.below(if is_long { 4_000 } else { 150 });
    let gave_up = (0..steps).find_map(|_| {
        step(&mut pair, &mut applications, &mut random);
        [0, 1].into_iter().find(|&end| pair.ends[end].timed_out)
    });
    match (gave_up, ending) {
        // The peer is alive. It finds by its own ping that `end` is gone.
        (Some(end), _) => given_up(&mut pair, end, &mut random),
        (None, Ending::Orderly) => finish(&mut pair, &mut applications, &mut random),
        (None, Ending::Abort(end)) => abort(&mut pair, end, &mut random),
        (None, Ending::Hang(end)) => hang(&mut pair, end, &mut random),
        (None, Ending::Failure(end)) => fail(&mut pair, end, &mut random),
    }
    assert_eq!(pair.violation, None);
}

/// Runs one event at one side.
fn step(pair: &mut ConnectionPair, applications: &mut [Application; 2], random: &mut Random) {
    let end = random.below(2) as usize;
    let what = random.below(10);
    if what != 8 && applications[end].paused > 0 {
        applications[end].paused -= 1;
        return;
    }
    match what {
        8 => pair.pass(INTERVAL / 2),
        9 if random.chance(20) => pair.widen(end, 1 + random.below(30) as u32),
        9 if random.chance(5) => applications[end].paused = random.below(60),
        0 => write(pair, end, &mut applications[end], random),
        1 => drop(pair.arrive(end)),
        2 => drop(pair.complete_send(end)),
        3 => drop(pair.complete_read(end)),
        4 => drop(pair.repost(end)),
        5 if random.chance(applications[end].read_percent) => {
            let most = 1 + random.below(applications[end].read_most) as usize;
            pair.read(end, most);
        }
        _ => drop(pair.serve(end)),
    }
}

fn write(pair: &mut ConnectionPair, end: usize, application: &mut Application, random: &mut Random) {
    let left = application.to_write - pair.ends[end].written;
    if left == 0 {
        if random.chance(30) {
            pair.ends[end].connection.close_write();
        }
        return;
    }
    let length = (1 + random.below(application.largest)).min(left) as usize;
    if random.chance(application.rendezvous_percent) {
        let chunk = 1 + random.below(length as u64) as usize;
        let full = std::iter::repeat_n(chunk, length / chunk);
        let lengths: Vec<usize> =
            full.chain((!length.is_multiple_of(chunk)).then_some(length % chunk)).take(8).collect();
        pair.write_rendezvous(end, &lengths);
    } else {
        pair.write_eager(end, length);
    }
}

/// Lets both sides write everything, close and read. Checks that everything arrives, and that then no more
/// messages are sent.
fn finish(pair: &mut ConnectionPair, applications: &mut [Application; 2], random: &mut Random) {
    for application in applications.iter_mut() {
        application.read_percent = 100;
    }
    let mut rounds = 0;
    while [0, 1].iter().any(|&end| pair.ends[end].written < applications[end].to_write) {
        for end in [0, 1] {
            write(pair, end, &mut applications[end], random);
        }
        pair.settle_in_any_order(true, random);
        rounds += 1;
        assert!(rounds < 100_000, "a writer waits for ever");
    }
    idle(pair, random);
    for end in &mut pair.ends {
        end.connection.close_write();
    }
    pair.settle_in_any_order(true, random);
    for end in [0, 1] {
        let (this, other) = (&pair.ends[end], &pair.ends[1 - end]);
        assert_eq!(this.read, other.written, "bytes that end {end} got");
        assert!(this.connection.is_read_closed() && this.connection.is_closed(), "end {end} is not closed");
        assert_eq!(this.sources_left(), 0, "memory of end {end} that was never given back");
    }
}

/// Lets both sides be idle, with pings only. Checks that each side returns the credits that it has beyond
/// those at the start.
fn idle(pair: &mut ConnectionPair, random: &mut Random) {
    pair.widen(random.below(2) as usize, 1 + random.below(30) as u32);
    pair.settle_in_any_order(true, random);
    for _ in 0..4 {
        pair.pass(INTERVAL);
        pair.settle_in_any_order(true, random);
    }
    for end in &pair.ends {
        assert!(!end.timed_out, "{end:?} gave up a peer that answers");
        assert!(end.has_least_window(), "{end:?} keeps slots for nothing");
    }
}

/// Aborts at one side. Checks that the peer receives the abort, and that both sides become silent.
fn abort(pair: &mut ConnectionPair, end: usize, random: &mut Random) {
    pair.abort(end, AbortCode::RESET);
    pair.settle_in_any_order(false, random);
    let is_aborted =
        pair.ends[1 - end].events.iter().any(|event| matches!(event, super::super::Event::Aborted { .. }));
    assert!(is_aborted, "the other end received no abort");
    assert!(pair.ends.iter().all(|end| end.connection.is_closed()));
    assert_eq!(pair.write_eager(end, 10) + pair.write_eager(1 - end, 10), 0, "data after an abort");
}

/// Lets one side hang. Checks that the peer reads the data that had arrived, and then finds the failure by
/// ping.
fn hang(pair: &mut ConnectionPair, hanging: usize, random: &mut Random) {
    let alive = 1 - hanging;
    pair.hang(hanging);
    go_on_alone(pair, alive, random);
    assert_eq!(pair.ends[alive].read, pair.ends[hanging].written, "bytes that end {alive} got");
}

/// Fails a send or a READ of one side. Checks that this side reads the data that has arrived, and that the
/// peer finds the failure by ping.
fn fail(pair: &mut ConnectionPair, failed: usize, random: &mut Random) {
    let alive = 1 - failed;
    let arriving = random.below(1 + pair.on_the_way_to(alive) as u64) as usize;
    pair.fail(failed, arriving);
    pair.read(failed, usize::MAX);
    go_on_alone(pair, alive, random);
    let before = pair.log.len();
    pair.settle_in_any_order(true, random);
    assert_eq!(pair.log.len(), before, "messages of connections that are over");
}

/// Checks a side that has given up its peer: it sends no more messages, and the peer then gives up this side,
/// too.
fn given_up(pair: &mut ConnectionPair, end: usize, random: &mut Random) {
    check_silent(pair, end);
    pair.read(end, usize::MAX);
    pair.fail(end, usize::MAX);
    if !pair.ends[1 - end].timed_out {
        go_on_alone(pair, 1 - end, random);
    }
}

/// Lets the remaining end read and write until nothing moves. Checks that it gives up the peer, which does
/// not answer a ping.
fn go_on_alone(pair: &mut ConnectionPair, alive: usize, random: &mut Random) {
    while pair.write_eager(alive, 50) + pair.write_rendezvous(alive, &[300]) > 0 {
        pair.settle_in_any_order(random.chance(50), random);
    }
    pair.settle_in_any_order(true, random);
    while !pair.ends[alive].timed_out {
        pair.pass(INTERVAL / 2);
        pair.settle_in_any_order(true, random);
    }
    check_silent(pair, alive);
    assert_eq!(pair.read(alive, usize::MAX), 0, "bytes that were read late");
}

/// Checks that a connection that aborted takes no data, posts nothing, and needs no timer.
fn check_silent(pair: &mut ConnectionPair, end: usize) {
    let before = pair.log.len();
    pair.serve(end);
    assert_eq!(pair.write_eager(end, 10) + pair.write_rendezvous(end, &[10]), 0, "data after a time-out");
    assert_eq!(pair.log.len(), before, "a message after a time-out");
    let connection = &pair.ends[end].connection;
    assert!(connection.is_closed() && connection.poll_timeout().is_none());
    assert!(pair.ends[end].events.contains(&super::super::Event::PingTimeout), "it does not say why");
}

//! Seeded schedules: whatever order things happen in, bytes arrive as they were written, nobody waits for ever, no
//! queue overflows, and both ends fall silent.
//!
//! `TONIC_RDMA_SCHEDULES` sets how many, `TONIC_RDMA_SEED` runs a single one.

use std::time::Duration;

use super::pair::{Pair, Random};
use crate::protocol::{AbortCode, Settings};

const SCHEDULES: u64 = 100_000;
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

/// What an application does.
#[derive(Debug)]
struct Application {
    to_write: u64,
    largest: u64,
    rendezvous_percent: u64,
    /// How often it reads, and how much at most.
    read_percent: u64,
    read_most: u64,
}

impl Application {
    fn random(random: &mut Random) -> Self {
        let magnitude = random.below(12);
        Self {
            to_write: random.below(1 << magnitude << 1),
            largest: 1 + random.below(400),
            rendezvous_percent: [0, 10, 50, 100][random.below(4) as usize],
            read_percent: [1, 20, 100][random.below(3) as usize],
            read_most: [1, 50, 100_000][random.below(3) as usize],
        }
    }
}

fn settings(random: &mut Random) -> Settings {
    Settings {
        receive_slots: 16 + random.below(20) as u32,
        slot_size: Settings::MIN_SLOT_SIZE + random.below(200) as u32,
        send_queue: Settings::MIN_SEND_QUEUE + random.below(20) as u32,
        max_reads: 1 + random.below(6) as u32,
        ping_interval: Some(INTERVAL),
        ping_timeout: 1_000_000 * INTERVAL,
        ..Settings::default()
    }
}

/// How a schedule ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Orderly,
    /// One end gives up.
    Abort(usize),
    /// One end is gone from one moment to the next.
    Death(usize),
}

fn run(seed: u64) {
    let mut random = Random::new(seed);
    let mut pair = Pair::new([settings(&mut random), settings(&mut random)]);
    let mut applications = [Application::random(&mut random), Application::random(&mut random)];
    for end in &mut pair.ends {
        end.buffers = 1 + random.below(6) as usize;
    }
    let ending = match random.below(10) {
        0 => Ending::Abort(random.below(2) as usize),
        1 => Ending::Death(random.below(2) as usize),
        _ => Ending::Orderly,
    };
    let steps = random.below(150);
    for _ in 0..steps {
        step(&mut pair, &mut applications, &mut random);
    }
    match ending {
        Ending::Orderly => finish(&mut pair, &mut applications, &mut random),
        Ending::Abort(end) => abort(&mut pair, end),
        Ending::Death(end) => die(&mut pair, end, &mut random),
    }
    assert_eq!(pair.violation, None);
}

/// One thing happens, at one end.
fn step(pair: &mut Pair, applications: &mut [Application; 2], random: &mut Random) {
    let end = random.below(2) as usize;
    match random.below(10) {
        8 => pair.pass(INTERVAL / 2),
        9 if random.chance(20) => pair.widen(end, 1 + random.below(30) as u32),
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

fn write(pair: &mut Pair, end: usize, application: &mut Application, random: &mut Random) {
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

/// Both write all that they have and close, both read: everything arrives, and then nothing more is said.
fn finish(pair: &mut Pair, applications: &mut [Application; 2], random: &mut Random) {
    for application in applications.iter_mut() {
        application.read_percent = 100;
    }
    let mut rounds = 0;
    while [0, 1].iter().any(|&end| pair.ends[end].written < applications[end].to_write) {
        for end in [0, 1] {
            write(pair, end, &mut applications[end], random);
        }
        pair.settle(true);
        rounds += 1;
        assert!(rounds < 100_000, "a writer waits for ever");
    }
    idle(pair, random);
    for end in &mut pair.ends {
        end.connection.close_write();
    }
    pair.settle(true);
    for end in [0, 1] {
        let (this, other) = (&pair.ends[end], &pair.ends[1 - end]);
        assert_eq!(this.read, other.written, "bytes that end {end} got");
        assert!(this.connection.is_read_closed() && this.connection.is_closed(), "end {end} is not closed");
        assert_eq!(this.sources_left(), 0, "memory of end {end} that was never given back");
    }
}

/// Both say nothing for a while: each gives back the credits that it has beyond those of the start.
fn idle(pair: &mut Pair, random: &mut Random) {
    pair.widen(random.below(2) as usize, 1 + random.below(30) as u32);
    pair.settle(true);
    for _ in 0..4 {
        pair.pass(INTERVAL);
        pair.settle(true);
    }
    for end in &pair.ends {
        assert!(end.has_least_window(), "{end:?} keeps slots for nothing");
    }
}

/// One end gives up: the other learns of it, and both fall silent.
fn abort(pair: &mut Pair, end: usize) {
    pair.ends[end].connection.abort(AbortCode::RESET);
    pair.settle(false);
    let told =
        pair.ends[1 - end].events.iter().any(|event| matches!(event, super::super::Event::Aborted { .. }));
    assert!(told, "the other end was not told");
    assert!(pair.ends.iter().all(|end| end.connection.is_closed()));
    assert_eq!(pair.write_eager(end, 10) + pair.write_eager(1 - end, 10), 0, "data after an abort");
}

/// One end is gone: the other goes on with what it has, and does nothing that it may not.
fn die(pair: &mut Pair, dead: usize, random: &mut Random) {
    let alive = 1 - dead;
    while pair.arrive(alive) {}
    for _ in 0..200 {
        match random.below(4) {
            0 => drop(pair.write_eager(alive, 50)),
            1 => drop(pair.complete_send(alive)),
            2 => drop(pair.read(alive, 1000)),
            _ => drop(pair.serve(alive)),
        }
    }
    assert!(pair.ends[alive].read <= pair.ends[dead].written);
}

//! Seeded schedules. In any order of events, bodies arrive as they were sent, no call hangs unless its reader
//! does, no wake-up is missing, memory stays within the windows, and at the end both sides have nothing left.
//!
//! `TONIC_RDMA_SCHEDULES` sets the number of schedules; `TONIC_RDMA_SEED` runs a single one.

use std::collections::VecDeque;

use fastrand::Rng;

use super::application::{Call, Outcome, Plan, Side};
use super::network::{CorePair, Device};
use crate::grpc::core::stream::{InPart, OVERHEAD};
use crate::grpc::fault::CallFault;

const SCHEDULES: u64 = 1000;

#[test]
fn any_schedule() {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    if let Some(seed) = number("TONIC_RDMA_SEED") {
        return run(seed);
    }
    for seed in 0..number("TONIC_RDMA_SCHEDULES").unwrap_or(SCHEDULES) {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "seed {seed}: set TONIC_RDMA_SEED={seed} to run it alone");
    }
}

fn plan(random: &mut Rng, longest: usize) -> Vec<Plan> {
    let part = |random: &mut Rng| {
        let longest = [10, 1000, 5000, longest][random.usize(..4)];
        if random.u32(..4) == 0 {
            let parts = 1 + random.usize(..4);
            Plan::Message((0..parts).map(|_| 2 + random.usize(..longest)).collect())
        } else {
            Plan::Data(1 + random.usize(..longest))
        }
    };
    let most = [1, 1, 3, 12][random.usize(..4)];
    (0..random.usize(..=most)).map(|_| part(random)).collect()
}

fn call(number: usize, random: &mut Rng, longest: usize) -> Call {
    let percent = |random: &mut Rng| [2, 20, 100][random.usize(..3)];
    Call {
        number,
        bodies: [plan(random, longest), plan(random, longest)],
        reads_all: random.u32(..4) > 0,
        landed: [random.bool(), random.bool()],
        reads: [percent(random), percent(random)],
        reset: (random.u32(..6) == 0).then(|| (random.usize(..2), random.u32(..30))),
    }
}

fn device(random: &mut Rng) -> Device {
    Device {
        room: [256, 300, 1000, 4000, 16 << 10][random.usize(..5)],
        slots: 1 + random.usize(..6),
        exposed: [0, 50, 100][random.usize(..3)],
        refused: [0, 0, 10, 80][random.usize(..4)],
        longest: 1 << 30,
        ..Device::default()
    }
}

fn run(seed: u64) {
    let random = &mut Rng::with_seed(seed);
    let limits = || (1 << 16, 16 << 10, 1 << 20);
    let mut all = [limits(), limits()];
    for limits in &mut all {
        limits.0 = [1, 3, 100][random.usize(..3)];
        limits.2 = [16 << 10, 64 << 10, 1 << 20][random.usize(..3)];
    }
    let devices = [device(random), device(random)];
    let mut most = [(); 2].map(|()| [16 << 10, 200 << 10, 2 << 20, 1 << 30][random.usize(..4)]);
    let has_windows = random.u32(..4) > 0;
    if !has_windows {
        // Peers don't know when to stop.
        most = [1 << 30; 2];
    }
    let mut pair = CorePair::with_limit(seed, all, devices, most, has_windows);
    let longest = if seed.is_multiple_of(16) { 400_000 } else { 30_000 };
    let count = 1 + random.usize(..10);
    let calls: Vec<_> = (0..count).map(|number| call(number, random, longest)).collect();
    let mut sides: Vec<Side> = Vec::new();
    let mut opened = 0;
    let goes_away = (random.u32(..8) == 0).then(|| random.usize(..300));
    for step in 0..random.usize(..600) {
        match random.u32(..8) {
            0 if opened < calls.len() => {
                sides.push(Side::open(&mut pair, &calls[opened]));
                opened += 1;
            }
            1 => {
                pair.deliver(0);
            }
            2 => {
                pair.deliver(1);
            }
            3 => {
                let end = random.usize(..2);
                pair.land(end);
            }
            4 => sides.extend(Side::accept(&mut pair, &calls)),
            _ if !sides.is_empty() => {
                let side = random.usize(..sides.len());
                sides[side].step(&mut pair, Some(random));
            }
            _ => {}
        }
        if goes_away == Some(step) {
            pair.ends[1].core.go_away("it stops");
            pair.transmit(1);
        }
        check_bounds(&pair, all);
    }
    for call in &calls[opened..] {
        sides.push(Side::open(&mut pair, call));
    }
    finish(&mut pair, &calls, &mut sides);
    check_outcomes(&sides, goes_away.is_some());
    check_empty(&pair);
    if has_windows {
        // Both ends count alike, so that no window shrinks.
        let [client, server] = [0, 1].map(|end: usize| pair.ends[end].core.ledger.left());
        assert_eq!(client, server.map(|[credit, left]| [left, credit]));
    }
}

/// Runs everything that can run until nothing can.
fn finish(pair: &mut CorePair, calls: &[Call], sides: &mut Vec<Side>) {
    for _ in 0..100_000 {
        pair.settle();
        let mut moved = false;
        while let Some(side) = Side::accept(pair, calls) {
            sides.push(side);
            moved = true;
        }
        for side in &mut *sides {
            moved |= side.step(pair, None);
        }
        if !moved {
            return;
        }
    }
    panic!("the applications never become silent");
}

/// Each stream holds at most what its window allows.
fn check_bounds(pair: &CorePair, limits: [(u32, usize, usize); 2]) {
    for end in &pair.ends {
        end.core.ledger.check(64 << 10, 2 << 20);
    }
    for (end, (streams, _, window)) in pair.ends.iter().zip(limits) {
        let window = window as i64;
        for (_, stream) in end.core.streams.iter() {
            let receiving = &stream.receiving;
            let (mut inline, mut overdrawn) = (0, 0);
            for part in receiving.parts.iter() {
                match part {
                    InPart::Data(data) => inline += data.len() as i64 + OVERHEAD,
                    InPart::Offer(_) => overdrawn += 1,
                    InPart::Fault(_) => {}
                }
            }
            assert!(inline <= window + OVERHEAD, "{inline} bytes wait in a window of {window}");
            assert!(overdrawn <= 1 + window / OVERHEAD);
            assert!(receiving.allowance <= window);
            let landing_most = window as u64 + (512 << 10);
            assert!(receiving.landed_limit.is_some() || receiving.landing <= landing_most);
        }
        if end.core.role == crate::grpc::core::Role::Server {
            assert!(end.core.streams.open_len() <= streams as usize);
        }
    }
}

fn check_outcomes(sides: &[Side], goes_away: bool) {
    for side in sides {
        let call = &side.call;
        assert!(side.is_over(), "a call hangs: {side:?}");
        match &side.outcome {
            None => assert!(!call.reads_all || goes_away, "a call without an outcome: {side:?}"),
            Some(Outcome::Read { .. }) => {}
            Some(Outcome::Failed(CallFault::Ended)) => assert!(!call.reads_all),
            Some(Outcome::Failed(CallFault::GoneAway(_))) => assert!(goes_away),
            Some(Outcome::Failed(fault)) => assert!(call.reset.is_some(), "{fault:?}: {call:?}"),
        }
    }
}

/// Nothing is left at either end.
fn check_empty(pair: &CorePair) {
    for end in &pair.ends {
        let core = &end.core;
        assert!(end.fetches.is_empty() && end.sent.is_empty());
        assert!(core.output.offers.is_empty(), "memory is still lent: {:?}", core.output.offers);
        assert_eq!((core.output.offers.ended_counts(), core.output.offers.prepares()), (0, false));
        assert!(core.received_offers.is_empty(), "offers are left: {:?}", core.received_offers);
        assert!(core.received_offers.is_settled());
        assert_eq!(core.streams.len(), 0, "streams are left: {:?}", core.streams);
        assert_eq!((core.streams.open_len(), core.active()), (0, 0));
        assert!(core.streams.queues().iter().all(VecDeque::is_empty));
        assert!(!core.control.has_output(), "{:?}", core.control);
        assert!(core.ledger.is_empty(), "{:?}", core.ledger);
    }
}

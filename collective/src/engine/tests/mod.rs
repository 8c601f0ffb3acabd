//! Engines over simulated links, in virtual time: random delays, few slots, slow ranks, ranks that die or
//! stop, and calls that do not fit.
//!
//! `TONIC_RDMA_SCHEDULES` sets the number of schedules of each test. `TONIC_RDMA_SEED` runs the one schedule
//! of a seed.

mod simulation;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tonic_rdma_tensor::Dtype;

use self::simulation::{OperandKind, Rank, Task, World, whole_numbers};
use super::{Call, Kind};
use crate::error::{CollectiveError, CollectiveErrorKind};
use crate::plan::{Algorithm, Collective, Hosts, part};
use crate::reduce::{Kernel, Reduction};

const SCHEDULES: u64 = 40;

/// Runs `schedule` with each seed, and says which seed failed.
fn schedules(schedule: impl Fn(u64)) {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    if let Some(seed) = number("TONIC_RDMA_SEED") {
        return schedule(seed);
    }
    for seed in 0..number("TONIC_RDMA_SCHEDULES").unwrap_or(SCHEDULES) {
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| schedule(seed)));
        assert!(run.is_ok(), "failed with TONIC_RDMA_SEED={seed}");
    }
}

struct Group {
    world: Rc<RefCell<World>>,
    ranks: Vec<Rank>,
    /// How seldom each rank acts.
    slowness: Vec<u8>,
    gone: Option<usize>,
}

impl Group {
    /// Makes a group whose ranks carry out `calls`, with elements that are small whole numbers.
    fn new(ranks: usize, calls: &[Call], random: &mut fastrand::Rng) -> Self {
        let world = Rc::new(RefCell::new(World::new(ranks, random.fork())));
        let numbers = Arc::new(AtomicU64::new(0));
        let inline = *random.choice(&[0, 16, 64, 256]).unwrap();
        let slowness = (0..ranks).map(|_| *random.choice(&[0, 0, 0, 20]).unwrap()).collect();
        let hosts: Hosts = (0..ranks).map(|_| random.usize(0..3)).collect();
        let ranks = (0..ranks)
            .map(|rank| {
                let tasks = calls.iter().map(|call| task(*call, ranks, rank, random)).collect();
                let mut rank = Rank::new(rank, ranks, &world, &numbers, inline, tasks);
                rank.engine.hosts = hosts.clone();
                rank
            })
            .collect();
        Self { world, ranks, slowness, gone: None }
    }

    /// Lets a random rank act. Returns whether all ranks are done.
    fn act(&mut self) -> bool {
        let rank = {
            let mut world = self.world.borrow_mut();
            world.now += world.random.u64(0..5);
            let rank = world.random.usize(0..self.ranks.len());
            let slow = self.slowness[rank];
            if self.gone == Some(rank) || slow > 0 && world.random.u8(0..slow) > 0 {
                return false;
            }
            rank
        };
        self.ranks[rank].act();
        self.ranks.iter().all(|rank| self.gone == Some(rank.rank) || rank.is_done())
    }

    /// Lets ranks act until all are done.
    fn finish(&mut self) {
        let mut actions = 0_u64;
        while !self.act() {
            actions += 1;
            if actions > 3_000_000 {
                let open: Vec<_> =
                    self.ranks.iter().map(|rank| (rank.running(), rank.engine.position)).collect();
                panic!("no end after {actions} actions: {open:?}");
            }
        }
    }

    /// Checks all results of operations that have ended well.
    fn check(&self) {
        for at in 0..self.ranks[0].tasks.len() {
            let Some(expected) = expected(&self.ranks, at) else { continue };
            for (rank, expected) in self.ranks.iter().zip(expected) {
                if let Some(outcome) = &rank.outcomes[at]
                    && outcome.result.is_ok()
                {
                    let task = &rank.tasks[at];
                    assert_eq!(
                        outcome.out, expected,
                        "rank {}: {} as operation {at}, {:?}",
                        rank.rank, task.call, task.operand
                    );
                }
            }
        }
    }
}

fn task(call: Call, ranks: usize, rank: usize, random: &mut fastrand::Rng) -> Task {
    let count = match call.kind {
        Kind::Group(Collective::AllGather) => part(call.elements, ranks, rank).len(),
        _ => call.elements,
    };
    let kinds = [OperandKind::Buffer, OperandKind::BufferPair, OperandKind::Slice, OperandKind::SlicePair];
    Task {
        call,
        operand: *random.choice(&kinds).unwrap(),
        elements: whole_numbers(call.dtype, count, random),
        short: random.bool(),
    }
}

/// Returns the right results of all ranks.
fn expected(ranks: &[Rank], at: usize) -> Option<Vec<Vec<u8>>> {
    let call = ranks[0].tasks[at].call;
    let size = call.dtype.size().unwrap();
    let inputs = || ranks.iter().map(|rank| &rank.tasks[at].elements);
    let Kind::Group(collective) = call.kind else { return None };
    let reduced = || {
        let kernel = Kernel::of(call.dtype, call.reduction.unwrap()).unwrap();
        let mut sum = ranks[0].tasks[at].elements.clone();
        inputs().skip(1).for_each(|elements| kernel.reduce(&mut sum, elements));
        kernel.finish(&mut sum, ranks.len());
        sum
    };
    Some(match collective {
        Collective::AllReduce => vec![reduced(); ranks.len()],
        Collective::ReduceScatter => {
            let sum = reduced();
            (0..ranks.len())
                .map(|rank| {
                    let part = part(call.elements, ranks.len(), rank);
                    sum[part.start * size..part.end * size].to_vec()
                })
                .collect()
        }
        Collective::AllGather => vec![inputs().flatten().copied().collect(); ranks.len()],
        Collective::Broadcast { root } => vec![ranks[root].tasks[at].elements.clone(); ranks.len()],
        Collective::Barrier => vec![Vec::new(); ranks.len()],
    })
}

/// Returns an all-reduce by this algorithm.
fn sum(algorithm: Algorithm, elements: usize, chunk: usize) -> Call {
    let (kind, reduction) = (Kind::Group(Collective::AllReduce), Some(Reduction::Sum));
    Call { kind, dtype: Dtype::F32, reduction, algorithm, elements, chunk }
}

fn call(ranks: usize, random: &mut fastrand::Rng) -> Call {
    let dtypes = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::I32, Dtype::U8];
    let dtype = *random.choice(&dtypes).unwrap();
    let kind = match random.u8(0..8) {
        0 => Collective::ReduceScatter,
        1 => Collective::AllGather,
        2 => Collective::Broadcast { root: random.usize(0..ranks) },
        3 => Collective::Barrier,
        _ => Collective::AllReduce,
    };
    let reductions = match dtype {
        Dtype::I32 | Dtype::U8 => &[Reduction::Sum, Reduction::Min, Reduction::Max][..],
        _ => &[Reduction::Sum, Reduction::Mean, Reduction::Min, Reduction::Max],
    };
    let reduces = matches!(kind, Collective::ReduceScatter | Collective::AllReduce);
    let elements = match random.u8(0..4) {
        _ if kind == Collective::Barrier => 0,
        0 => random.usize(0..4),
        1 => random.usize(0..40),
        _ => random.usize(0..250),
    };
    Call {
        kind: Kind::Group(kind),
        dtype,
        reduction: reduces.then(|| *random.choice(reductions).unwrap()),
        algorithm: *random.choice(&Algorithm::ALL).unwrap(),
        elements,
        chunk: *random.choice(&[7, 32, 100, 1000]).unwrap(),
    }
}

fn group_size(random: &mut fastrand::Rng) -> usize {
    if random.u8(0..20) == 0 { random.usize(9..20) } else { random.usize(1..9) }
}

#[test]
fn results_are_right_whatever_the_timing() {
    schedules(|seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = group_size(&mut random);
        let calls: Vec<Call> = (0..random.usize(1..12)).map(|_| call(ranks, &mut random)).collect();
        let mut group = Group::new(ranks, &calls, &mut random);
        group.finish();
        for rank in &group.ranks {
            for outcome in &rank.outcomes {
                outcome.as_ref().unwrap().result.as_ref().unwrap();
            }
        }
        group.check();
    });
}

/// Operations get the numbers of the set-up when a group has carried out as many, which takes hours.
#[test]
fn numbers_beyond_those_of_the_set_up_are_numbers_like_others() {
    let mut random = fastrand::Rng::with_seed(5);
    let calls: Vec<Call> = (0..8).map(|_| call(3, &mut random)).collect();
    let mut group = Group::new(3, &calls, &mut random);
    for rank in &mut group.ranks {
        rank.engine.numbers.group = super::SET_UP - 4;
    }
    group.finish();
    group.check();
    for rank in &group.ranks {
        assert_eq!(rank.engine.numbers.group, super::SET_UP + 4);
        assert!(!rank.engine.sets_up);
    }
}

#[test]
fn many_operations_under_way_keep_apart() {
    schedules(|seed| {
        if seed % 20 != 0 {
            return;
        }
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = random.usize(2..6);
        let calls: Vec<Call> = (0..100).map(|_| call(ranks, &mut random)).collect();
        let mut group = Group::new(ranks, &calls, &mut random);
        group.finish();
        group.check();
        assert!(group.ranks.iter().all(|rank| rank.engine.is_idle()));
    });
}

/// Kills a rank after a random number of actions. All survivors learn which rank it was, and no result is
/// wrong.
#[test]
fn the_death_of_a_rank_is_named_by_all_survivors() {
    schedules(|seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = group_size(&mut random).max(2);
        let calls: Vec<Call> = (0..random.usize(1..6)).map(|_| call(ranks, &mut random)).collect();
        let mut group = Group::new(ranks, &calls, &mut random);
        let victim = random.usize(0..ranks);
        let mut done = false;
        for _ in 0..random.usize(0..400 * ranks) {
            done = group.act();
            if done {
                break;
            }
        }
        if !done {
            group.gone = Some(victim);
            group.world.borrow_mut().kill(victim);
            group.finish();
        }
        group.check();
        check_names(&group, victim);
    });
}

/// Runs an all-reduce by `algorithm` until a rank is before `step`, which does not act from then on. Returns
/// the group, and this rank. `None` if the operation has fewer steps.
fn lost_at(algorithm: Algorithm, ranks: usize, step: u64) -> Option<(Group, usize)> {
    let mut random = fastrand::Rng::with_seed(step ^ ranks as u64);
    let one = sum(algorithm, 300, 60);
    let mut group = Group::new(ranks, &[one], &mut random);
    group.slowness.fill(0);
    let victim = random.usize(0..ranks);
    group.ranks[victim].tasks[0].short = false;
    let mut done = false;
    let reached = |rank: &Rank| {
        let operation = rank.engine.in_flight.front();
        operation.is_some_and(|operation| u64::from(operation.at().step) >= step)
            || rank.engine.in_flight.is_empty() && rank.engine.numbers.group > 0
    };
    while !done && !reached(&group.ranks[victim]) {
        done = group.act();
    }
    if done || group.ranks[victim].engine.in_flight.is_empty() {
        return None;
    }
    group.gone = Some(victim);
    Some((group, victim))
}

/// Kills each rank of each group at each step of each algorithm.
#[test]
fn a_death_at_any_step_of_any_algorithm_is_named() {
    let mut deaths = 0;
    for algorithm in Algorithm::ALL {
        for ranks in [2, 3, 4, 5, 8] {
            for (mut group, victim) in (0..).map_while(|step| lost_at(algorithm, ranks, step)) {
                group.world.borrow_mut().kill(victim);
                group.finish();
                group.check();
                check_names(&group, victim);
                deaths += 1;
            }
        }
    }
    assert!(deaths > 100, "only {deaths} deaths");
}

/// Stops a rank at each step of each algorithm. From every rank that waits, the ranks that are waited for
/// lead to the stopped one.
#[test]
fn a_stop_at_any_step_of_any_algorithm_is_found_from_every_rank() {
    let (mut stops, mut paths) = (0, 0);
    for algorithm in Algorithm::ALL {
        for ranks in [2, 3, 4, 5, 6, 7, 8] {
            for (step, (mut group, victim)) in
                (0..).map_while(|step| lost_at(algorithm, ranks, step)).enumerate()
            {
                // The others go on as far as they can.
                for _ in 0..2000 * ranks {
                    group.act();
                }
                let waits_for: Vec<_> = group.ranks.iter().map(|rank| rank.engine.position.1).collect();
                for start in (0..ranks).filter(|rank| *rank != victim && waits_for[*rank].is_some()) {
                    let path = std::iter::successors(Some(start), |rank| {
                        waits_for[*rank].filter(|_| *rank != victim)
                    });
                    let path: Vec<_> = path.take(ranks + 1).collect();
                    assert_eq!(
                        path.last(),
                        Some(&victim),
                        "{algorithm:?}, {ranks} ranks, step {step}: {path:?}"
                    );
                    paths += 1;
                }
                stops += 1;
            }
        }
    }
    assert!(stops > 100 && paths > 2 * stops, "only {stops} stops and {paths} paths");
}

/// Returns the failures of all ranks but the victim: the rank, and an error with the rank of the first
/// failure.
fn failures(group: &Group, victim: usize) -> impl Iterator<Item = (usize, &CollectiveError)> {
    let survivors = group.ranks.iter().filter(move |rank| rank.rank != victim);
    survivors.flat_map(|rank| {
        let failed = rank.outcomes.iter().flatten().filter_map(|outcome| outcome.result.as_ref().err());
        failed.map(|error| (rank.rank, error))
    })
}

fn check_names(group: &Group, victim: usize) {
    for (at, error) in failures(group, victim) {
        assert_eq!(error.lost_rank(), Some(victim), "rank {at}: {error}");
    }
}

/// Stops a rank. All others end with a deadline, and the ranks that they wait for lead to the stopped one.
#[test]
fn a_rank_that_stops_runs_into_the_deadline() {
    schedules(|seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = random.usize(2..7);
        let mut one = call(ranks, &mut random);
        one.kind = Kind::Group(Collective::AllReduce);
        one.reduction = Some(Reduction::Max);
        one.elements += ranks;
        let mut group = Group::new(ranks, &[one; 3], &mut random);
        for rank in &mut group.ranks {
            rank.limit = Duration::from_millis(300);
        }
        let victim = random.usize(0..ranks);
        for _ in 0..random.usize(0..50 * ranks) {
            if group.act() {
                return;
            }
        }
        group.gone = Some(victim);
        group.finish();
        group.check();
        for (at, error) in failures(&group, victim) {
            assert!(error.reason().contains("did not answer within"), "rank {at}: {error}");
            if ranks == 2 {
                assert_eq!(error.rank(), Some(victim), "{error}");
            }
        }
    });
}

/// One rank calls something else. Some rank says so, with both calls; where each rank waits for another one,
/// the deadline ends the operations.
#[test]
fn calls_that_differ_are_named() {
    let (runs, deadlines) = (Cell::new(0), Cell::new(0));
    schedules(|seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = random.usize(2..7);
        let mut calls: Vec<Call> = (0..4).map(|_| call(ranks, &mut random)).collect();
        calls.push(sum(Algorithm::OneShot, 5, 1000));
        let mut group = Group::new(ranks, &calls, &mut random);
        let (wrong, at) = (random.usize(0..ranks), random.usize(0..4));
        let other = call(ranks, &mut random);
        // A call of no elements sends no message, so no rank can notice it.
        let silent = |call: &Call| call.elements == 0 && call.kind != Kind::Group(Collective::Barrier);
        if other.pack() == calls[at].pack() || silent(&other) && silent(&calls[at]) {
            return;
        }
        group.ranks[wrong].tasks[at] = task(other, ranks, wrong, &mut random);
        group.ranks.iter_mut().for_each(|rank| rank.limit = Duration::from_millis(200));
        let mut reported = false;
        for actions in 0.. {
            if group.act() {
                break;
            }
            let failed = group
                .ranks
                .iter()
                .find_map(|rank| rank.engine.failure().map(|failure| (rank.rank, failure.clone())));
            if let Some((reporter, failure)) = failed
                && !reported
                && group.world.borrow_mut().random.u8(0..10) == 0
            {
                reported = true;
                deadlines.set(deadlines.get() + u64::from(failure.kind() == CollectiveErrorKind::Deadline));
                runs.set(runs.get() + 1);
                for rank in group.ranks.iter_mut() {
                    rank.engine.fail(CollectiveError::reported(reporter, failure.reason()));
                }
            }
            assert!(actions < 3_000_000, "no end");
        }
        let failures = || group.ranks.iter().filter_map(|rank| rank.engine.failure());
        let named = failures().find(|failure| failure.kind() == CollectiveErrorKind::Mismatch);
        let late = failures().any(|failure| failure.kind() == CollectiveErrorKind::Deadline);
        assert!(named.is_some() || late, "{} passed for {}", other, calls[at]);
        if let Some(error) = named {
            assert!(error.to_string().contains(" called "), "{error}");
        }
    });
    assert!(deadlines.get() * 10 <= runs.get(), "{} of {} were deadlines", deadlines.get(), runs.get());
}

/// Messages carry the packed call, so the packed calls of ranks that name different roots must differ for
/// every root of a group.
#[test]
fn broadcasts_of_any_two_roots_are_told_apart() {
    let broadcast =
        |root| Call { kind: Kind::Group(Collective::Broadcast { root }), ..sum(Algorithm::Ring, 5, 1000) };
    let roots = 0..crate::group::Launch::MAX_SIZE;
    let packed: std::collections::HashSet<u64> = roots.clone().map(|root| broadcast(root).pack()).collect();
    assert_eq!(packed.len(), roots.len());
    for root in [0, 1, 1023, 1024, roots.end - 1] {
        let text = broadcast(root).to_string();
        assert!(text.ends_with(&format!("from rank {root}, ring")), "{text}");
    }
}

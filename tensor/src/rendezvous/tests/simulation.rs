//! Seeded schedules: whatever order things happen in, each request gets one result, the right one and in time, no memory is
//! written without a grant, and in the end nothing is kept, not even for a peer that hangs.
//!
//! `TONIC_RDMA_SCHEDULES` sets how many, `TONIC_RDMA_SEED` runs a single one.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use tonic::Code;

use super::world::{Asked, Came, Handle, Peer, Random, World};
use super::*;

const SCHEDULES: u64 = 20_000;
const NAMES: [&str; 5] = ["loss", "gradient/dense", "gradient/bias", "ä", "embedding"];
/// Steps that tensors are of; in a long schedule.
const STEPS: [u64; 2] = [4, 60];
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const OFFER_TIMEOUT: Duration = Duration::from_secs(600);

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

/// What goes wrong in a schedule, and how often in a hundred steps.
struct Trouble {
    cancel: u64,
    die: u64,
    write_fails: u64,
    no_memory: u64,
    late: u64,
    repeat: u64,
    withdraw: u64,
    hang: u64,
}

impl Trouble {
    const NONE: Self =
        Self { cancel: 0, die: 0, write_fails: 0, no_memory: 0, late: 0, repeat: 0, withdraw: 0, hang: 0 };

    fn random(random: &mut Random) -> Self {
        let mut some = || [0, 0, 3, 20][random.below(4) as usize];
        Self {
            cancel: some(),
            die: some() / 3,
            write_fails: some(),
            no_memory: some(),
            late: some() / 3,
            repeat: some(),
            withdraw: some() / 3,
            hang: some() / 3,
        }
    }
}

/// What is said of a tensor, once.
enum Truth {
    Tensor(WireMetadata, Weak<Vec<u8>>, Vec<u8>),
    Dead,
    Failed(Failure),
}

struct Run {
    world: World,
    truth: HashMap<(&'static str, u64), Truth>,
    dead: Vec<Peer>,
    trouble: Trouble,
    random: Random,
    readers: u64,
    steps: u64,
    quiet: bool,
}

fn run(seed: u64) {
    let mut random = Random::new(seed);
    let quiet = random.chance(30);
    let trouble = if quiet { Trouble::NONE } else { Trouble::random(&mut random) };
    let timeout = |timeout| (!quiet).then_some(timeout);
    let settings = ProviderSettings {
        request_timeout: timeout(REQUEST_TIMEOUT),
        offer_timeout: timeout(OFFER_TIMEOUT),
        ..ProviderSettings::default()
    };
    let readers = 1 + random.below(3);
    let world = World::new(settings, readers, random.chance(50));
    let is_long = random.chance(3);
    let steps = STEPS[usize::from(is_long)];
    let mut run =
        Run { world, truth: HashMap::new(), dead: Vec::new(), trouble, random, readers, steps, quiet };
    for _ in 0..run.random.below(if is_long { 8_000 } else { 400 }) {
        run.step();
    }
    if quiet { run.finish_orderly() } else { run.finish() }
}

impl Run {
    /// One thing happens.
    fn step(&mut self) {
        let peer = self.random.below(self.readers) as usize;
        match self.random.below(16) {
            // It does none of this while it hangs.
            0..=2 | 13 if self.world.peers[peer].hangs => {}
            0..=2 => self.ask(peer),
            3 | 4 => self.offer(),
            5..=7 => drop(self.world.serve(peer)),
            8..=10 => drop(self.world.peers[peer].receive()),
            11 => self.complete_write(),
            12 => {
                let fails = self.random.chance(self.trouble.no_memory);
                self.world.peers[peer].allocate(&mut self.random, fails);
            }
            13 if self.random.chance(self.trouble.cancel) => self.cancel(peer),
            14 if self.random.chance(self.trouble.die) => {
                let dead = self.world.die(peer);
                self.dead.push(dead);
            }
            15 if self.random.chance(self.trouble.late) => self.world.pass(REQUEST_TIMEOUT / 3),
            15 if self.random.chance(self.trouble.hang) => {
                // Or goes on.
                self.world.peers[peer].hangs ^= true;
            }
            15 if self.random.chance(self.trouble.withdraw) => {
                let (name, step) = self.tag();
                self.world.provider.withdraw(name, step);
            }
            _ => {}
        }
    }

    fn tag(&mut self) -> (&'static str, u64) {
        (NAMES[self.random.below(NAMES.len() as u64) as usize], self.random.below(self.steps))
    }

    fn ask(&mut self, peer: usize) {
        let (name, step) = self.tag();
        let repeat = self.random.chance(self.trouble.repeat);
        let peer = &mut self.world.peers[peer];
        if repeat || !peer.asked.values().any(|asked| (asked.name, asked.step) == (name, step)) {
            peer.ask(name, step);
        }
    }

    fn complete_write(&mut self) {
        let fails = self.random.chance(self.trouble.write_fails);
        self.world.complete_write(&mut self.random, fails);
    }

    fn cancel(&mut self, peer: usize) {
        let mut open: Vec<_> = self.world.peers[peer].asked.keys().copied().collect();
        open.sort_unstable();
        if !open.is_empty() {
            let request_id = open[self.random.below(open.len() as u64) as usize];
            self.world.peers[peer].cancel(request_id);
        }
    }

    /// Each tensor is offered once.
    fn offer(&mut self) {
        let (name, step) = self.tag();
        if !self.truth.contains_key(&(name, step)) {
            self.offer_this(name, step);
        }
    }

    fn offer_this(&mut self, name: &'static str, step: u64) {
        let (offer, truth) = match self.random.below(8) {
            0 => (OfferedTensor::Dead, Truth::Dead),
            1 => {
                let failure = Failure::new(Code::DataLoss, format!("{name} of step {step} is lost"));
                (OfferedTensor::Failed(failure.clone()), Truth::Failed(failure))
            }
            _ => {
                // The shape changes from step to step, not always.
                let metadata = metadata(&[self.random.below(3), 5]);
                let bytes = (0..metadata.bytes).map(|_| self.random.below(256) as u8).collect::<Vec<_>>();
                let handle: Handle = Arc::new(bytes.clone());
                let truth = Truth::Tensor(metadata, Arc::downgrade(&handle), bytes);
                (OfferedTensor::Tensor(handle, metadata), truth)
            }
        };
        self.truth.insert((name, step), truth);
        // Where nothing goes wrong there is enough for all.
        let readers = if self.quiet { self.readers } else { 1 + self.random.below(self.readers) };
        self.world.offer(name, step, offer, readers as u32);
    }

    /// Nothing goes wrong: everybody asks for everything, everything is offered, and all of it comes.
    fn finish_orderly(&mut self) {
        for name in NAMES {
            for step in 0..self.steps {
                for peer in &mut self.world.peers {
                    if !peer.asked.values().any(|asked| (asked.name, asked.step) == (name, step)) {
                        peer.ask(name, step);
                    }
                }
                if !self.truth.contains_key(&(name, step)) {
                    self.offer_this(name, step);
                }
            }
        }
        self.world.settle(&mut self.random);
        self.check();
        for asked in self.world.peers.iter().flat_map(|peer| peer.asked.values()) {
            let failed =
                matches!(&asked.result, Some(Came::Failed(failure)) if failure.code != Code::DataLoss);
            assert!(!failed, "{asked:?}");
        }
        assert_eq!(self.world.expired, 0);
    }

    /// No request waits for ever for what is not offered, no offer is kept for ever, and a peer that hangs holds nothing up.
    fn finish(&mut self) {
        self.world.settle(&mut self.random);
        // A share that a peer does not take in time goes to the next, which may hang too.
        for _ in 0..=self.readers {
            self.world.pass(REQUEST_TIMEOUT);
            self.world.settle(&mut self.random);
        }
        self.world.pass(OFFER_TIMEOUT);
        self.world.settle(&mut self.random);
        self.world.assert_provider_keeps_nothing();
        for peer in 0..self.world.peers.len() {
            if self.world.peers[peer].hangs {
                let dead = self.world.die(peer);
                self.dead.push(dead);
            }
        }
        self.check();
    }

    fn check(&self) {
        self.world.assert_nothing_left();
        for (tag, truth) in &self.truth {
            if let Truth::Tensor(_, handle, _) = truth {
                assert_eq!(handle.strong_count(), 0, "{tag:?} was never let go");
            }
        }
        let peers = || self.world.peers.iter().chain(&self.dead);
        peers().for_each(Peer::assert_nothing_left);
        for peer in peers() {
            let mut delivered = HashSet::new();
            for (&request_id, asked) in &peer.asked {
                self.check_result(request_id, asked, peer);
                if let Some(Came::Tensor(..) | Came::Dead) = asked.result {
                    assert!(delivered.insert((asked.name, asked.step)), "{asked:?} came twice");
                }
            }
        }
    }

    fn check_result(&self, request_id: RequestId, asked: &Asked, peer: &Peer) {
        let truth = self.truth.get(&(asked.name, asked.step));
        let as_offered = match (&asked.result, truth) {
            (None, _) => asked.cancelled,
            (Some(Came::Tensor(metadata, bytes)), Some(Truth::Tensor(expected, _, content))) => {
                metadata == expected && bytes == content
            }
            (Some(Came::Dead), Some(Truth::Dead)) => true,
            (Some(Came::Failed(failure)), Some(Truth::Failed(expected))) if failure == expected => true,
            (Some(Came::Failed(failure)), _) => self.may_fail(failure.code, request_id, asked, peer),
            _ => false,
        };
        assert!(as_offered, "{asked:?}");
    }

    /// Returns whether something happened to this request that it may fail by.
    fn may_fail(&self, code: Code, request_id: RequestId, asked: &Asked, peer: &Peer) -> bool {
        let reader = (peer.id, request_id);
        match code {
            Code::AlreadyExists => asked.repeated,
            Code::DeadlineExceeded => self.world.overdue.contains(&reader),
            Code::Internal => self.world.unwritten.contains(&reader),
            Code::ResourceExhausted => peer.without_memory.contains(&request_id),
            Code::Unavailable => !peer.alive,
            _ => false,
        }
    }
}

//! Random schedules from seeds: in any order of events, each request gets one correct result in time, also if
//! its reader gave up before, no memory is written without a grant, and in the end nothing is left, not even
//! for a peer that hangs.
//!
//! `TONIC_RDMA_SCHEDULES` sets the number of schedules. `TONIC_RDMA_SEED` runs the one schedule of a seed.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use tonic::Code;

use super::world::{Asked, Handle, Peer, Random, Received, World};
use super::*;

const SCHEDULES: u64 = 4_000;
const NAMES: [&str; 5] = ["loss", "gradient/dense", "gradient/bias", "ä", "embedding"];
/// Number of steps of the tensors, in a normal and in a long schedule.
const STEPS: [u64; 2] = [4, 60];
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const OFFER_TIMEOUT: Duration = Duration::from_secs(600);

#[test]
fn each_request_gets_one_result_in_any_schedule() {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    if let Some(seed) = number("TONIC_RDMA_SEED") {
        return run(seed);
    }
    for seed in 0..number("TONIC_RDMA_SCHEDULES").unwrap_or(SCHEDULES) {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "seed {seed}: set TONIC_RDMA_SEED={seed} to run it alone");
    }
}

/// Faults of a schedule, each with its probability in percent.
struct Faults {
    cancel: u64,
    die: u64,
    write_fails: u64,
    no_memory: u64,
    late: u64,
    repeat: u64,
    withdraw: u64,
    hang: u64,
}

impl Faults {
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

/// The offer of a tensor, which happens once.
enum OfferRecord {
    Tensor(WireMetadata, Weak<Vec<u8>>, Vec<u8>),
    Dead,
    Failed(Failure),
}

struct Run {
    world: World,
    offered: HashMap<(&'static str, u64), OfferRecord>,
    dead: Vec<Peer>,
    faults: Faults,
    random: Random,
    readers: u64,
    steps: u64,
    faultless: bool,
}

fn run(seed: u64) {
    let mut random = Random::new(seed);
    let faultless = random.chance(30);
    // Readers that give up and ask again are no fault.
    let faults = if faultless {
        Faults { cancel: random.below(2) * 20, ..Faults::NONE }
    } else {
        Faults::random(&mut random)
    };
    let timeout = |timeout| (!faultless).then_some(timeout);
    let settings = ProviderSettings {
        request_timeout: timeout(REQUEST_TIMEOUT),
        offer_timeout: timeout(OFFER_TIMEOUT),
        ..ProviderSettings::default()
    };
    let readers = 1 + random.below(3);
    let validate = random.chance(50);
    let world = World::new(settings, readers, validate, Random::new(random.below(u64::MAX)));
    let is_long = random.chance(3);
    let steps = STEPS[usize::from(is_long)];
    let mut run =
        Run { world, offered: HashMap::new(), dead: Vec::new(), faults, random, readers, steps, faultless };
    for _ in 0..run.random.below(if is_long { 8_000 } else { 400 }) {
        run.step();
    }
    if faultless { run.finish_without_faults() } else { run.finish() }
}

impl Run {
    /// Lets one random event happen.
    fn step(&mut self) {
        let peer = self.random.below(self.readers) as usize;
        self.world.write_fails = self.faults.write_fails;
        match self.random.below(18) {
            // A peer that hangs does none of these.
            0..=2 | 13 if self.world.peers[peer].hangs => {}
            0..=2 => self.ask(peer),
            3 | 4 => self.offer(),
            5..=7 => drop(self.world.serve(peer)),
            8..=10 => {
                self.world.peers[peer].receive();
                if self.random.chance(30) {
                    self.world.peers[peer].take();
                }
            }
            11 => drop(self.world.complete_write(&mut self.random)),
            16 | 17 => drop(self.world.carry(peer)),
            12 => {
                let fails = self.random.chance(self.faults.no_memory);
                self.world.peers[peer].allocate(&mut self.random, fails);
            }
            13 if self.random.chance(self.faults.cancel) => self.cancel(peer),
            14 if self.random.chance(self.faults.die) => {
                let dead = self.world.die(peer);
                self.dead.push(dead);
            }
            15 if self.random.chance(self.faults.late) => self.world.pass(REQUEST_TIMEOUT / 3),
            15 if self.random.chance(self.faults.hang) => {
                // A peer that hangs goes on.
                self.world.peers[peer].hangs ^= true;
            }
            15 if self.random.chance(self.faults.withdraw) => {
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
        let repeat = self.random.chance(self.faults.repeat);
        let peer = &mut self.world.peers[peer];
        if repeat || !peer.asked.values().any(|asked| asked.is_for(name, step)) {
            peer.ask(name, step);
        }
    }

    fn cancel(&mut self, peer: usize) {
        let mut open: Vec<_> = self.world.peers[peer].asked.keys().copied().collect();
        open.sort_unstable();
        if !open.is_empty() {
            let request_id = open[self.random.below(open.len() as u64) as usize];
            self.world.peers[peer].cancel(request_id);
        }
    }

    /// Offers a random tensor, unless it was offered before.
    fn offer(&mut self) {
        let (name, step) = self.tag();
        if !self.offered.contains_key(&(name, step)) {
            self.offer_this(name, step);
        }
    }

    fn offer_this(&mut self, name: &'static str, step: u64) {
        let (offer, offered) = match self.random.below(8) {
            0 => (OfferedTensor::Dead, OfferRecord::Dead),
            1 => {
                let failure = Failure::new(Code::DataLoss, format!("{name} of step {step} is lost"));
                (OfferedTensor::Failed(failure.clone()), OfferRecord::Failed(failure))
            }
            _ => {
                // The shape changes from some steps to the next.
                let metadata = metadata(&[self.random.below(3), 5]);
                let bytes = (0..metadata.bytes).map(|_| self.random.below(256) as u8).collect::<Vec<_>>();
                let handle: Handle = Arc::new(bytes.clone());
                let offered = OfferRecord::Tensor(metadata, Arc::downgrade(&handle), bytes);
                (OfferedTensor::Tensor(handle, metadata), offered)
            }
        };
        self.offered.insert((name, step), offered);
        // Without faults there is a share for each peer.
        let readers = if self.faultless { self.readers } else { 1 + self.random.below(self.readers) };
        self.world.offer(name, step, offer, readers as u32);
    }

    /// Ends a schedule without faults: each peer asks for each tensor, each tensor is offered, and all of
    /// them arrive.
    fn finish_without_faults(&mut self) {
        for name in NAMES {
            for step in 0..self.steps {
                for peer in &mut self.world.peers {
                    if !peer.asked.values().any(|asked| asked.is_for(name, step)) {
                        peer.ask(name, step);
                    }
                }
                if !self.offered.contains_key(&(name, step)) {
                    self.offer_this(name, step);
                }
            }
        }
        self.world.settle(&mut self.random);
        self.world.peers.iter_mut().for_each(Peer::take);
        self.check();
        for asked in self.world.peers.iter().flat_map(|peer| peer.asked.values()) {
            let failed =
                matches!(&asked.result, Some(Received::Failed(failure)) if failure.code != Code::DataLoss);
            assert!(!failed, "{asked:?}");
        }
        assert_eq!(self.world.expired, 0);
    }

    /// Ends a schedule with faults: requests and offers end at their deadlines, and a peer that hangs stops
    /// no other peer.
    fn finish(&mut self) {
        self.world.write_fails = 0;
        self.world.settle(&mut self.random);
        // A share that a peer does not use in time goes to the next peer, which may hang too.
        for _ in 0..=self.readers {
            self.world.pass(REQUEST_TIMEOUT);
            self.world.settle(&mut self.random);
        }
        self.world.pass(OFFER_TIMEOUT);
        self.world.settle(&mut self.random);
        self.world.assert_provider_keeps_nothing();
        for peer in &mut self.world.peers {
            peer.take();
            peer.age();
            peer.age();
        }
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
        for (tag, offered) in &self.offered {
            if let OfferRecord::Tensor(_, handle, _) = offered {
                assert_eq!(handle.strong_count(), 0, "{tag:?} was not released");
            }
        }
        let peers = || self.world.peers.iter().chain(&self.dead);
        peers().for_each(Peer::assert_nothing_left);
        for peer in peers() {
            let mut delivered = HashSet::new();
            for (&request_id, asked) in &peer.asked {
                self.check_result(request_id, asked, peer);
                if let Some(Received::Tensor(..)) = asked.result {
                    assert!(delivered.insert((asked.name, asked.step)), "{asked:?} arrived twice");
                }
            }
        }
    }

    fn check_result(&self, request_id: RequestId, asked: &Asked, peer: &Peer) {
        let offered = self.offered.get(&(asked.name, asked.step));
        let as_offered = match (&asked.result, offered) {
            (None, _) => asked.cancelled,
            (Some(Received::Tensor(metadata, bytes)), Some(OfferRecord::Tensor(expected, _, content))) => {
                metadata == expected && bytes == content
            }
            (Some(Received::Dead), Some(OfferRecord::Dead)) => true,
            (Some(Received::Failed(failure)), Some(OfferRecord::Failed(expected))) if failure == expected => {
                true
            }
            (Some(Received::Failed(failure)), _) => self.may_fail(failure.code, request_id, asked, peer),
            _ => false,
        };
        assert!(as_offered, "{asked:?}");
    }

    /// Returns whether an event justifies this failure of the request.
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

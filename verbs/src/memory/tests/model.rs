//! The pool against a model. The model knows the held addresses, and so which requests the pool must serve or
//! refuse.

use crate::VerbsErrorKind;
use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::memory::{Block, Quota, RegisteredBuf};

const SEND_QUOTA: u64 = 300 << 10;
const RECEIVE_QUOTA: u64 = 100 << 10;
/// Budgets. They are smaller than both quotas together with the unused parts of slabs, so that the tests
/// reach each of the three limits.
const BUDGETS: [u64; 3] = [130 << 10, 260 << 10, 380 << 10];
/// Largest extent that shares its slab: half of a slab.
const LARGEST_SHARED: usize = 32 << 10;

#[derive(Clone, Debug)]
enum Step {
    Lease(usize, bool),
    Allocate(usize),
    Freeze(usize),
    Slice(usize),
    Find(usize, usize, usize),
    Drop(usize),
    Trim,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let length = prop_oneof![8 => 0..3000_usize, 2 => 3000..40_000_usize, 1 => 40_000..90_000_usize];
    let step = prop_oneof![
        5 => (length.clone(), any::<bool>()).prop_map(|(length, send)| Step::Lease(length, send)),
        4 => length.prop_map(Step::Allocate),
        4 => any::<usize>().prop_map(Step::Freeze),
        2 => any::<usize>().prop_map(Step::Slice),
        3 => (any::<usize>(), 0..3000_usize, 0..3000_usize).prop_map(|(n, from, length)| Step::Find(n, from, length)),
        7 => any::<usize>().prop_map(Step::Drop),
        1 => Just(Step::Trim),
    ];
    prop::collection::vec(step, 1..120)
}

/// A held extent, and the byte that fills it.
enum Holding {
    Block(Block, Quota, u8),
    Buffer(RegisteredBuf, usize, u8),
    Frozen { bytes: Bytes, start: usize, length: usize, capacity: usize, fill: u8 },
}

impl Holding {
    /// Returns the first address and the capacity.
    fn place(&self) -> (usize, usize) {
        match self {
            Self::Block(block, ..) => (block.remote(0).address as usize, block.capacity()),
            Self::Buffer(buffer, capacity, _) => (buffer.as_ptr() as usize, *capacity),
            Self::Frozen { start, capacity, .. } => (*start, *capacity),
        }
    }

    fn quota(&self) -> Quota {
        match self {
            Self::Block(_, quota, _) => *quota,
            Self::Buffer(..) | Self::Frozen { .. } => Quota::Send,
        }
    }

    fn purpose(&self) -> Use {
        match self {
            Self::Block(..) => Use::Device,
            Self::Buffer(..) | Self::Frozen { .. } => Use::Application,
        }
    }

    fn check_content(&self) {
        match self {
            Self::Block(block, _, fill) => {
                let mut content = vec![0; block.capacity()];
                block.copy_out(0, &mut content).unwrap();
                assert!(content.iter().all(|byte| byte == fill));
            }
            Self::Buffer(buffer, _, fill) => assert!(buffer.iter().all(|byte| byte == fill)),
            Self::Frozen { bytes, fill, .. } => assert!(bytes.iter().all(|byte| byte == fill)),
        }
    }
}

/// The writer of an extent. All extents of a slab have one writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Device,
    Application,
}

/// Returns the capacity of an extent for `length` bytes: a power of two from 256 on, or the size halfway
/// between two of them; whole pages if the extent has its own slab.
fn capacity_for(length: usize) -> usize {
    let powers = (8..=15).map(|exponent| 1 << exponent);
    let mut sizes =
        powers.flat_map(|power: usize| [power, power + power / 2]).filter(|&size| size <= LARGEST_SHARED);
    sizes.find(|&size| size >= length).unwrap_or_else(|| length.next_multiple_of(rustix::param::page_size()))
}

struct Model {
    pool: Pool,
    budget: Arc<Budget>,
    domain: Arc<Domain>,
    held: Vec<Holding>,
    fill: u8,
}

impl Model {
    fn run(&mut self, step: &Step) {
        self.fill = self.fill.wrapping_add(1);
        let fill = self.fill;
        let pick = |n: usize, held: &[Holding]| (!held.is_empty()).then(|| n % held.len());
        match *step {
            Step::Lease(length, send) => {
                let quota = if send { Quota::Send } else { Quota::Receive };
                let leased = self.pool.lease(length, quota);
                let capacity = leased.as_ref().map(Block::capacity);
                self.check_outcome(length, quota, Use::Device, capacity);
                if let Ok(mut block) = leased {
                    block.copy_in(0, &vec![fill; block.capacity()]).unwrap();
                    self.held.push(Holding::Block(block, quota, fill));
                }
            }
            Step::Allocate(length) => {
                let before = self.pool.statistics().leased_send;
                let allocated = self.pool.allocate(length);
                let capacity = (self.pool.statistics().leased_send - before) as usize;
                self.check_outcome(
                    length,
                    Quota::Send,
                    Use::Application,
                    allocated.as_ref().map(|_| capacity),
                );
                if let Ok(mut buffer) = allocated {
                    buffer.fill(fill);
                    self.held.push(Holding::Buffer(buffer, capacity, fill));
                }
            }
            Step::Freeze(n) => {
                let Some(n) = pick(n, &self.held) else { return };
                let frozen = match self.held.swap_remove(n) {
                    Holding::Buffer(buffer, capacity, fill) => {
                        let (start, length) = (buffer.as_ptr() as usize, buffer.len());
                        Holding::Frozen { bytes: buffer.freeze(), start, length, capacity, fill }
                    }
                    other => other,
                };
                self.held.push(frozen);
            }
            Step::Slice(n) => {
                let Some(n) = pick(n, &self.held) else { return };
                // An empty slice keeps no memory.
                if let Holding::Frozen { bytes, .. } = &mut self.held[n]
                    && bytes.len() > 1
                {
                    *bytes = bytes.slice(bytes.len() / 3..bytes.len() / 2 + 1);
                }
            }
            Step::Find(n, from, length) => self.find(n, from, length),
            Step::Drop(n) => {
                if let Some(n) = pick(n, &self.held) {
                    self.held.swap_remove(n);
                }
            }
            Step::Trim => self.pool.trim(),
        }
    }

    /// Checks `outcome`, the pool's answer to a request of `length` bytes, against the model.
    fn check_outcome(&self, length: usize, quota: Quota, purpose: Use, outcome: Result<usize, &VerbsError>) {
        let (least, limit, leased) =
            (capacity_for(length), self.pool.settings().limit(quota), self.leased(quota));
        let room = limit - leased;
        let reason = outcome.err().map(VerbsError::reason).unwrap_or_default();
        match outcome.map_err(VerbsError::kind) {
            Ok(capacity) if least <= LARGEST_SHARED => {
                assert!(capacity as u64 <= room, "{length} bytes, with room for {room}");
                assert_eq!(capacity, least, "{length} bytes");
            }
            // A slab that was in use before may be larger.
            Ok(capacity) => {
                assert!(capacity as u64 <= room, "{length} bytes, with room for {room}");
                assert!((least..=least + least / 2).contains(&capacity), "{capacity} for {length} bytes");
            }
            Err(VerbsErrorKind::TooLarge) => {
                assert!(least as u64 > limit, "{length} bytes fit into {limit}")
            }
            Err(VerbsErrorKind::QuotaExhausted) => {
                let numbers = format!("asked for {least} bytes, {leased} of {limit} are leased");
                assert!(reason.ends_with(&numbers), "{reason}: {numbers}");
                assert!(least as u64 <= limit && least as u64 > room, "{length} bytes fit into {room}");
            }
            Err(VerbsErrorKind::NoMemory) => {
                let used = self.budget.used();
                assert!(least as u64 <= room, "the quota of {limit} has only room for {room} bytes");
                assert!(reason.contains(&format!(", {used} of ")), "{reason}: {used}");
                let slab = least.next_multiple_of(rustix::param::page_size()) as u64;
                assert!(
                    used + slab > self.budget.limit(),
                    "a slab of {slab} bytes fits into the rest of the budget"
                );
                self.check_full(least, purpose);
            }
            Err(_) => panic!("{reason}"),
        }
    }

    /// Checks that every slab has an extent in use, and that no slab of this use has a gap for `capacity`
    /// bytes.
    fn check_full(&self, capacity: usize, purpose: Use) {
        for slab in self.domain.regions() {
            let extents = self.held.iter().filter(|holding| slab.contains(&holding.place().0));
            let mut extents: Vec<_> = extents.map(|holding| (holding.place(), holding.purpose())).collect();
            extents.sort_unstable_by_key(|(place, _)| *place);
            let Some(&((_, length), of_slab)) = extents.first() else {
                panic!("{slab:?} is kept without an extent in use")
            };
            if of_slab != purpose || length > LARGEST_SHARED || capacity > LARGEST_SHARED {
                continue;
            }
            let mut free_from = slab.start;
            for ((start, length), _) in extents.into_iter().chain([((slab.end, 0), purpose)]) {
                let gap = start - free_from;
                assert!(
                    gap < capacity,
                    "{gap} bytes are free at {free_from:#x}, but {capacity} were refused"
                );
                free_from = start + length;
            }
        }
    }

    /// Returns the bytes leased against a quota.
    fn leased(&self, quota: Quota) -> u64 {
        let counted = self.held.iter().filter(|holding| holding.quota() == quota);
        counted.map(|holding| holding.place().1 as u64).sum()
    }

    /// Checks that lookups around the held extent `n` agree with the model.
    fn find(&self, n: usize, from: usize, wanted: usize) {
        if self.held.is_empty() {
            return;
        }
        let address = self.held[n % self.held.len()].place().0 + from;
        let expected = self.held.iter().find_map(|holding| match holding {
            Holding::Frozen { start, length, fill, .. } => {
                (wanted > 0 && address >= *start && address + wanted <= start + length).then_some(*fill)
            }
            _ => None,
        });
        let found = self.pool.find(address, wanted).map(|lease| {
            assert_eq!((lease.as_ptr() as usize, lease.len()), (address, wanted));
            lease[0]
        });
        assert_eq!(found, expected);
    }

    fn check(&self) {
        let statistics = self.pool.statistics();
        let mut places: Vec<_> = self.held.iter().map(Holding::place).collect();
        self.held.iter().for_each(Holding::check_content);
        let leased = [Quota::Send, Quota::Receive].map(|quota| self.leased(quota));
        assert_eq!([statistics.leased_send, statistics.leased_receive], leased);
        assert_eq!(statistics.registered, self.budget.used());
        assert_eq!(statistics.slabs, self.domain.live());
        assert!(statistics.leased_send + statistics.leased_receive <= statistics.registered);
        places.sort_unstable();
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_model(steps in steps(), budget in prop::sample::select(&BUDGETS[..])) {
        let settings = PoolSettings { send_quota: SEND_QUOTA, receive_quota: RECEIVE_QUOTA, ..small() };
        let (pool, domain, budget) = pool(settings, budget);
        let mut model = Model { pool, budget, domain, held: Vec::new(), fill: 0 };
        for step in &steps {
            model.run(step);
            model.check();
        }
        let Model { pool, budget, domain, held, .. } = model;
        drop(pool);
        drop(held);
        prop_assert_eq!((budget.used(), domain.live()), (0, 0));
    }
}

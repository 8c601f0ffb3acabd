//! The pool against a model that knows who holds which addresses.

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::memory::{Block, Quota, RegisteredBuf};

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

/// Something held, and the byte that all of it was filled with.
enum Holding {
    Block(Block, Quota, u8),
    Buffer(RegisteredBuf, usize, u8),
    Frozen { bytes: Bytes, start: usize, length: usize, capacity: usize, fill: u8 },
}

impl Holding {
    /// First address and capacity.
    fn place(&self) -> (usize, usize) {
        match self {
            Self::Block(block, ..) => (block.remote(0).address as usize, block.capacity()),
            Self::Buffer(buffer, capacity, _) => (buffer.as_ptr() as usize, *capacity),
            Self::Frozen { start, capacity, .. } => (*start, *capacity),
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
        let pick = |n: usize, held: &Vec<Holding>| (!held.is_empty()).then(|| n % held.len());
        match *step {
            Step::Lease(length, send) => {
                let quota = if send { Quota::Send } else { Quota::Receive };
                if let Ok(mut block) = self.pool.lease(length, quota) {
                    assert!(block.capacity() >= length);
                    block.copy_in(0, &vec![fill; block.capacity()]).unwrap();
                    self.held.push(Holding::Block(block, quota, fill));
                }
            }
            Step::Allocate(length) => {
                let before = self.pool.statistics().leased_send;
                if let Ok(mut buffer) = self.pool.allocate(length) {
                    buffer.fill(fill);
                    let capacity = self.pool.statistics().leased_send - before;
                    self.held.push(Holding::Buffer(buffer, capacity as usize, fill));
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
                // An empty slice would keep no memory at all.
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

    /// Whether what the pool finds is what the model knows, around the holding `n`.
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
        let (mut send, mut receive) = (0, 0);
        let mut places: Vec<_> = self.held.iter().map(Holding::place).collect();
        for holding in &self.held {
            match holding {
                Holding::Block(_, Quota::Receive, _) => receive += holding.place().1,
                _ => send += holding.place().1,
            }
            holding.check_content();
        }
        assert_eq!((statistics.leased_send, statistics.leased_receive), (send as u64, receive as u64));
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
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_model(steps in steps()) {
        let settings = PoolSettings { send_quota: 300 << 10, receive_quota: 100 << 10, ..small() };
        let (pool, domain, budget) = pool(settings, 500 << 10);
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

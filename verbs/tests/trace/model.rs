//! Random sequences of executions, against a model of the live allocations and of what the trace has learnt.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use tonic_rdma_verbs::memory::sites::{NodeSite, SiteAllocator};

use super::{execute, trace};

#[derive(Clone, Debug)]
enum Call {
    /// Executes a node that makes these allocations: sizes, and whether they are zeroed.
    Execute {
        node: u32,
        allocations: Vec<(usize, bool)>,
    },
    /// Resizes a vector, in an execution of a node or outside.
    Resize {
        which: usize,
        size: usize,
        node: Option<u32>,
    },
    Shrink {
        which: usize,
        node: Option<u32>,
    },
    Free {
        which: usize,
        other_thread: bool,
    },
    /// Sends a part of a vector: from one fraction of its length to another one.
    Cross {
        which: usize,
        part: (u8, u8),
    },
}

fn call() -> impl Strategy<Value = Call> {
    let size = || prop_oneof![4 => 1..300_usize, 4 => 300..10_000_usize, 1 => 1_000_000..2_500_000_usize];
    let allocations = || prop::collection::vec((size(), any::<bool>()), 0..4);
    let node = || prop::option::of(0..3_u32);
    prop_oneof![
        4 => (0..3_u32, allocations()).prop_map(|(node, allocations)| Call::Execute { node, allocations }),
        2 => (any::<usize>(), size(), node()).prop_map(|(which, size, node)| Call::Resize { which, size, node }),
        1 => (any::<usize>(), node()).prop_map(|(which, node)| Call::Shrink { which, node }),
        3 => (any::<usize>(), any::<bool>())
            .prop_map(|(which, other_thread)| Call::Free { which, other_thread }),
        4 => (any::<usize>(), any::<(u8, u8)>()).prop_map(|(which, part)| Call::Cross { which, part }),
    ]
}

/// A live allocation, as the model knows it.
struct Allocation {
    bytes: Vec<u8>,
    /// The value of all bytes.
    value: u8,
    site: Option<NodeSite>,
    /// Whether it lies in the pool, or `None` if that depends on the size of an extent.
    placed: Option<bool>,
}

/// What the trace must have learnt of a node.
#[derive(Default)]
struct Node {
    ordinals: BTreeSet<u32>,
    /// The sizes that were sent, the latest 16.
    sizes: Vec<usize>,
}

struct Model<'t> {
    trace: &'t SiteAllocator,
    live: Vec<Allocation>,
    nodes: BTreeMap<u32, Node>,
    value: u8,
}

impl Model<'_> {
    fn run(&mut self, call: Call) {
        match call {
            Call::Execute { node, allocations } => self.execute(node, &allocations),
            Call::Resize { which, size, node } => {
                self.reallocate(which, node, |bytes, value| bytes.resize(size, value));
            }
            Call::Shrink { which, node } => self.reallocate(which, node, |bytes, _| {
                bytes.truncate(bytes.len().div_ceil(2));
                bytes.shrink_to_fit();
            }),
            Call::Free { which, other_thread } => self.free(which, other_thread),
            Call::Cross { which, part } => self.cross(which, part),
        }
    }

    fn execute(&mut self, node: u32, allocations: &[(usize, bool)]) {
        let mut made = Vec::with_capacity(allocations.len());
        let first = self.value;
        execute(self.trace, node, || {
            for (&(size, zeroed), value) in allocations.iter().zip(first..) {
                made.push((if zeroed { vec![0; size] } else { vec![value | 1; size] }, value | 1));
            }
        });
        self.value = self.value.wrapping_add(8) % 128;
        for ((bytes, value), (ordinal, &(size, zeroed))) in made.into_iter().zip((0..).zip(allocations)) {
            let site = NodeSite { node, ordinal };
            let (value, placed) = (if zeroed { 0 } else { value }, Some(self.is_learnt(site, size)));
            self.live.push(Allocation { bytes, value, site: Some(site), placed });
        }
    }

    fn is_learnt(&self, site: NodeSite, size: usize) -> bool {
        let node = self.nodes.get(&site.node);
        node.is_some_and(|node| node.ordinals.contains(&site.ordinal) || node.sizes.contains(&size))
    }

    fn reallocate(&mut self, which: usize, node: Option<u32>, change: impl FnOnce(&mut Vec<u8>, u8)) {
        let Some(index) = which.checked_rem(self.live.len()) else { return };
        let Allocation { bytes, value, site, placed } = &mut self.live[index];
        let former = bytes.capacity();
        match node {
            Some(node) => execute(self.trace, node, || change(bytes, *value)),
            None => change(bytes, *value),
        }
        let size = bytes.capacity();
        if size == former {
            return;
        }
        if let Some(node) = node {
            site.get_or_insert(NodeSite { node, ordinal: 0 });
        }
        let (site, before) = (*site, *placed);
        let learnt = site.is_some_and(|site| self.is_learnt(site, size));
        let places = node.is_some_and(|node| self.nodes.contains_key(&node));
        self.live[index].placed = match before {
            Some(false) => Some(places && learnt),
            Some(true) | None => None,
        };
    }

    fn free(&mut self, which: usize, other_thread: bool) {
        let Some(index) = which.checked_rem(self.live.len()) else { return };
        let Allocation { bytes, value, .. } = self.live.swap_remove(index);
        assert!(bytes.iter().all(|&byte| byte == value));
        if other_thread {
            std::thread::scope(|scope| scope.spawn(move || drop(bytes)).join()).unwrap();
        }
    }

    fn cross(&mut self, which: usize, part: (u8, u8)) {
        let Some(index) = which.checked_rem(self.live.len()) else { return };
        let Allocation { bytes, site, placed, .. } = &mut self.live[index];
        let at = |fraction: u8| bytes.len() * usize::from(fraction) / usize::from(u8::MAX);
        let part = at(part.0.min(part.1))..at(part.0.max(part.1));
        if part.is_empty() {
            assert_eq!(self.trace.crossed(&bytes[part]), Default::default());
            return;
        }
        let crossed = self.trace.crossed(&bytes[part]);
        assert_eq!((crossed.site, crossed.registered), (*site, placed.unwrap_or(crossed.registered)));
        *placed = Some(crossed.registered);
        if let Some(site) = *site {
            let size = bytes.capacity();
            let node = self.nodes.entry(site.node).or_default();
            node.ordinals.insert(site.ordinal);
            if !node.sizes.contains(&size) {
                if node.sizes.len() == 16 {
                    node.sizes.remove(0);
                }
                node.sizes.push(size);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_executions_keep_content_and_sites(calls in prop::collection::vec(call(), 1..80)) {
        let trace = trace();
        let mut model = Model { trace: &trace, live: Vec::new(), nodes: BTreeMap::new(), value: 1 };
        for call in calls {
            model.run(call);
            let whole = |allocation: &Allocation| allocation.bytes.iter().all(|&byte| byte == allocation.value);
            assert!(model.live.iter().all(whole), "the content of another allocation has changed");
        }
        let sites: usize = model.nodes.values().map(|node| node.ordinals.len()).sum();
        model.live.clear();
        let report = trace.report();
        assert_eq!((report.sites.len(), report.pool.leased_send, report.refused), (sites, 0, 0));
    }
}

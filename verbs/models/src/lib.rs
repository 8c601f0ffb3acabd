//! Models of the software device's shared memory. loom runs the shipping code of `verbs/src/soft/shared` on
//! atomics of its own, and explores all interleavings of two or three threads, and all values that the memory
//! model lets a load return.
//!
//! Each model is generic over the orderings. With the shipping ones
//! ([`Shipping`](tonic_rdma_verbs::unstable::shared_memory::Shipping)) it must pass. `tests/models.rs`
//! lists weaker ones, and for each the model that must fail.
//!
//! loom does not reorder a load with a later store of the same thread. Models that need that
//! ([`ring::places_are_used_again`]) mark the accesses to the content, and loom checks that they do not race.
#![forbid(unsafe_code)]
#![allow(clippy::panic, reason = "a model fails by a panic")]
#![allow(clippy::arc_with_non_send_sync, reason = "loom runs all threads of a model on one thread")]

pub mod bias;
pub mod revocation;
pub mod ring;
pub mod waking;

use std::sync::atomic::{AtomicU64, Ordering};

use tonic_rdma_verbs::unstable::shared_memory::{Platform, Word};

/// The atomics of loom.
#[derive(Clone, Copy, Debug)]
pub enum Loom {}

impl Platform for Loom {
    type Word = LoomWord;

    fn fence(order: Ordering) {
        loom::sync::atomic::fence(order);
    }

    /// A light fence and a heavy one order as two ordinary fences do. Nothing here relies on two light ones.
    fn light_fence(order: Ordering) {
        loom::sync::atomic::fence(order);
    }

    fn heavy_fence(order: Ordering) {
        loom::sync::atomic::fence(order);
    }
}

/// A 64-bit atomic of loom.
#[derive(Debug)]
pub struct LoomWord(loom::sync::atomic::AtomicU64);

impl Word for LoomWord {
    fn new(value: u64) -> Self {
        Self(loom::sync::atomic::AtomicU64::new(value))
    }

    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    fn change(&self, set: u64, clear: u64) {
        self.0.fetch_and(!clear, Ordering::Relaxed);
        self.0.fetch_or(set, Ordering::Relaxed);
    }

    fn add(&self, value: u64) {
        self.0.fetch_add(value, Ordering::Relaxed);
    }

    fn raise(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_max(value, order)
    }

    fn take(&self, order: Ordering) -> u64 {
        self.0.swap(0, order)
    }
}

/// Runs all executions of `model`. Returns their number.
pub fn explore(model: impl Fn() + Sync + Send + 'static) -> u64 {
    let count = std::sync::Arc::new(AtomicU64::new(0));
    let counted = std::sync::Arc::clone(&count);
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 10_000;
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    count.load(Ordering::Relaxed)
}

/// Returns words that are 0.
fn words(count: usize) -> Vec<LoomWord> {
    (0..count).map(|_| LoomWord::new(0)).collect()
}

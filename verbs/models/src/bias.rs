//! The lock with a bias towards one thread.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use loom::cell::UnsafeCell;
use loom::sync::{Mutex, MutexGuard};
use loom::thread;
use tonic_rdma_verbs::unstable::shared_memory::{Bias, Orders, Seats, Word};

use crate::{Loom, LoomWord, explore};

/// A lock, as `BiasedLock`.
struct Lock<O> {
    bias: Bias<Loom, O>,
    gate: Mutex<Seats>,
    /// What the lock guards. loom checks that two threads do not use it at one time.
    content: UnsafeCell<()>,
}

impl<O: Orders> Lock<O> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            bias: Bias::default(),
            gate: Mutex::new(Seats::default()),
            content: UnsafeCell::new(()),
        })
    }

    /// Takes the lock as the thread `me`, and uses what it guards. If the thread comes through the gate, it
    /// `claims` the bias.
    fn take(&self, me: u64, claims: bool) {
        if let Some(seat) = self.bias.enter(me) {
            self.use_content();
            self.bias.leave(seat);
            return;
        }
        let mut gate = self.pass_gate(me);
        self.use_content();
        if claims {
            self.bias.give(me, &mut gate);
        }
        drop(gate);
    }

    /// As `BiasedLock::lock_by_gate`.
    fn pass_gate(&self, me: u64) -> MutexGuard<'_, Seats> {
        let Ok(mut gate) = self.gate.lock() else { panic!("model: a lock") };
        if let Some(seat) = self.bias.take_away() {
            while !self.bias.is_free(seat) {
                thread::yield_now();
            }
        }
        gate.free(me);
        gate
    }

    fn use_content(&self) {
        self.content.with_mut(|_| {});
    }
}

/// The owner of the bias takes the lock again, while another thread takes the bias away.
pub fn one_thread_is_inside<O: Orders + 'static>() -> u64 {
    explore(|| {
        let lock = Lock::<O>::new();
        lock.take(1, true);
        let other = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.take(2, false))
        };
        lock.take(1, false);
        lock.take(1, false);
        assert!(other.join().is_ok());
    })
}

/// Two threads take the bias from one another. A thread that is interrupted between its two checks of the
/// bias, while the other one gets it, does no harm.
pub fn the_bias_moves<O: Orders + 'static>() -> u64 {
    explore(|| {
        let lock = Lock::<O>::new();
        lock.take(1, true);
        let other = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                lock.take(2, true);
                lock.take(2, false);
            })
        };
        lock.take(1, true);
        assert!(other.join().is_ok());
    })
}

/// What a thread has stored before it takes the lock is seen by a thread that takes the lock later: either
/// this thread finds the other's store, or the other one finds this thread's. As `SoftPair::ask_for_events`:
/// the poller arms its queue and takes the lock; the other thread posts a request and checks whether the
/// queue is armed, both with the lock held.
pub fn the_lock_orders_what_is_beside_it<O: Orders + 'static>() -> u64 {
    explore(|| {
        let lock = Lock::<O>::new();
        lock.take(1, true);
        let (armed, posted) = (Arc::new(LoomWord::new(0)), Arc::new(LoomWord::new(0)));
        let poller = {
            let (lock, armed, posted) = (Arc::clone(&lock), Arc::clone(&armed), Arc::clone(&posted));
            thread::spawn(move || {
                armed.store(1, Relaxed);
                lock.take(2, false);
                posted.load(Relaxed)
            })
        };
        let entered = lock.bias.enter(1);
        let gate = if entered.is_some() { None } else { Some(lock.pass_gate(1)) };
        posted.store(1, Relaxed);
        let finds = armed.load(Relaxed);
        drop(gate);
        entered.into_iter().for_each(|seat| lock.bias.leave(seat));
        let found = poller.join().unwrap_or(0);
        assert!(finds == 1 || found == 1, "model: neither thread finds the other's store");
    })
}

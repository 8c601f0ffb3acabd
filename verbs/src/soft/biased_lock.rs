//! A lock that costs a thread little if this thread alone takes it repeatedly: no atomic read-modify-write,
//! and no fence. Queue pairs and completion queues have such locks, because most of them belong to one
//! thread.
//!
//! At first the lock is an ordinary mutex, the *gate*. When one thread has taken it often, and no other
//! thread meanwhile, the lock gets a [bias](super::shared::bias) towards this thread. Another thread that
//! takes the lock takes the bias away, for some microseconds of waiting (a fence that all threads of the
//! process execute), and the lock is its gate again. Each time it takes longer until the lock gets a bias.

use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, fence};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

use super::shared::bias::{Bias, Seat, Seats};
use super::shared::platform::{Native, Shipping};
use crate::panics::lock;

/// Number of times in a row that one thread takes a new lock before it gets the bias. Taking the bias away
/// once costs about as much as the bias saves in this many times.
const FIRST: u32 = 1 << 10;
/// Factor by which this number grows each time that the bias is taken away.
const FACTOR: u32 = 8;
/// Greatest value of this number.
const MOST: u32 = 1 << 20;

/// A lock around a value.
pub(super) struct BiasedLock<T> {
    bias: Bias<Native, Shipping>,
    gate: Mutex<Gate>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time, by `BiasedGuard`.
unsafe impl<T: Send> Send for BiasedLock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// Who has taken the lock by its gate.
#[derive(Debug)]
struct Gate {
    /// The last thread, and how many times it has taken the lock since another one did.
    last: u64,
    times: u32,
    /// The number of times after which a thread gets the bias.
    needed: u32,
    seats: Seats,
    /// The threads that have the seats, and whether they have ended.
    seated: Vec<(u64, Arc<AtomicBool>)>,
}

/// The lock, held. The value is the caller's until this is dropped.
pub(super) struct BiasedGuard<'a, T> {
    lock: &'a BiasedLock<T>,
    by: HeldBy<'a>,
    /// Only the thread that holds the lock releases it.
    stays: PhantomData<*const ()>,
}

/// How a lock is held.
enum HeldBy<'a> {
    Bias(Seat),
    /// The gate is taken out when the lock is released.
    Gate(Option<MutexGuard<'a, Gate>>),
}

impl<T> BiasedLock<T> {
    /// Makes a lock without a bias.
    pub(super) fn new(value: T) -> Self {
        Self::with_first(value, FIRST)
    }

    fn with_first(value: T, needed: u32) -> Self {
        let gate =
            Mutex::new(Gate { last: 0, times: 0, needed, seats: Seats::default(), seated: Vec::new() });
        Self { bias: Bias::default(), gate, value: UnsafeCell::new(value) }
    }

    /// Takes the lock. Like that of a mutex, this call does not end if this thread holds the lock already.
    #[inline]
    pub(super) fn lock(&self) -> BiasedGuard<'_, T> {
        let me = number_of_this_thread();
        let by = match self.bias.enter(me) {
            Some(seat) => HeldBy::Bias(seat),
            None => HeldBy::Gate(Some(self.lock_by_gate(me))),
        };
        BiasedGuard { lock: self, by, stays: PhantomData }
    }

    #[inline(never)]
    fn lock_by_gate(&self, me: u64) -> MutexGuard<'_, Gate> {
        let mut gate = lock(&self.gate);
        if let Some(seat) = self.bias.take_away() {
            self.wait_for(seat);
            gate.needed = gate.needed.saturating_mul(FACTOR).min(MOST);
        }
        gate.seats.free(me);
        if gate.last == me {
            gate.times = gate.times.saturating_add(1);
        } else {
            (gate.last, gate.times) = (me, 0);
        }
        gate
    }

    /// Waits until the former owner of the bias is outside. It never waits for a peer while it holds the
    /// lock.
    #[cold]
    fn wait_for(&self, seat: Seat) {
        /// Number of checks before this thread lets others run, and before it sleeps: the owner may have lost
        /// its core.
        const SPINS: u32 = 100;
        const YIELDS: u32 = 120;
        const NAP: Duration = Duration::from_micros(50);
        let mut tries = 0;
        while !self.bias.is_free(seat) {
            match tries {
                0..SPINS => std::hint::spin_loop(),
                SPINS..YIELDS => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
            tries = tries.saturating_add(1);
        }
    }

    #[inline(never)]
    fn release_gate(&self, mut gate: MutexGuard<'_, Gate>) {
        if gate.times >= gate.needed && is_ready() {
            self.give_bias(&mut gate);
        }
    }

    /// Gives the bias to this thread, if a seat is free. Otherwise this thread has to take the lock as many
    /// times again.
    #[cold]
    fn give_bias(&self, gate: &mut Gate) {
        let me = gate.last;
        let Gate { seats, seated, .. } = gate;
        seated.retain(|(thread, ended)| {
            // SYNC: pairs with the drop of `Life`, after which the thread does not use its number any more.
            let stays = *thread != me && !ended.load(Acquire);
            if !stays {
                seats.free(*thread);
            }
            stays
        });
        let given = match LIFE.try_with(|life| Arc::clone(&life.0)) {
            Ok(life) if self.bias.give(me, seats) => {
                seated.push((me, life));
                true
            }
            // The thread is about to end, or there is no seat.
            _ => false,
        };
        if !given {
            gate.times = 0;
        }
    }
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock, by the gate or by the bias, so no other thread reaches the
        // value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for BiasedGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        match &mut self.by {
            HeldBy::Bias(seat) => self.lock.bias.leave(*seat),
            HeldBy::Gate(gate) => {
                if let Some(gate) = gate.take() {
                    self.lock.release_gate(gate);
                }
            }
        }
    }
}

impl<T> fmt::Debug for BiasedLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BiasedLock").field("bias", &self.bias).finish_non_exhaustive()
    }
}

thread_local! {
    /// The number of this thread; 0 if it has none yet.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
    /// Made when this thread gets its first bias.
    static LIFE: Life = Life::default();
}

/// Shows whether a thread has ended.
#[derive(Debug, Default)]
struct Life(Arc<AtomicBool>);

impl Drop for Life {
    /// Gives up the number of this thread. If the thread takes a lock once more while it ends, it gets a new
    /// number, and no bias.
    fn drop(&mut self) {
        NUMBER.set(0);
        // SYNC: pairs with the check of the thread that frees the seat.
        self.0.store(true, Release);
    }
}

/// Returns the number of this thread, which no other thread of this process has or had.
#[inline]
fn number_of_this_thread() -> u64 {
    #[cold]
    fn new() -> u64 {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Relaxed) + 1;
        NUMBER.set(number);
        number
    }
    match NUMBER.get() {
        0 => new(),
        number => number,
    }
}

const UNKNOWN: u8 = 0;
const READY: u8 = 1;
const REFUSED: u8 = 2;

/// Whether the kernel makes such fences. No lock guards this, because a fork might leave the lock taken in
/// the child forever; to ask twice does no harm.
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Asks the kernel for such fences, once. With several threads this may take some milliseconds, so the
/// device's thread does it.
pub(super) fn prepare() {
    if STATE.load(Acquire) == UNKNOWN {
        STATE.store(if register() { READY } else { REFUSED }, Release);
    }
}

/// Returns whether the kernel makes such fences.
pub(super) fn is_ready() -> bool {
    STATE.load(Acquire) == READY
}

fn register() -> bool {
    membarrier_query().contains_command(MembarrierCommand::PrivateExpedited)
        && membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// Makes all threads of the process execute a fence. Called only after [`is_ready`] has returned true.
#[cold]
pub(super) fn execute() {
    /// Time in which each core has executed, or discarded, the instructions that it had begun.
    const LONG: Duration = Duration::from_millis(10);
    fence(SeqCst);
    let expedited = || membarrier(MembarrierCommand::PrivateExpedited).is_ok();
    // A forked child may have to ask anew. A sandbox that this process has entered meanwhile may refuse the
    // call.
    let executed = expedited() || (register() && expedited());
    if !executed {
        // No lock gets a bias any more.
        STATE.store(REFUSED, Release);
        std::thread::sleep(LONG);
    }
    fence(SeqCst);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    impl<T> BiasedLock<T> {
        fn is_biased(&self) -> bool {
            let gate = lock(&self.gate);
            gate.times >= gate.needed
        }

        /// Returns whether the lock has a bias towards this thread.
        fn is_ours(&self) -> bool {
            let seat = self.bias.enter(number_of_this_thread());
            seat.inspect(|seat| self.bias.leave(*seat)).is_some()
        }
    }

    fn take(lock: &BiasedLock<[u64; 2]>, times: u64) {
        for _ in 0..times {
            let mut held = lock.lock();
            held[0] += 1;
            std::hint::black_box(&mut *held);
            held[1] += 1;
            assert_eq!(held[0], held[1]);
        }
    }

    #[test]
    fn a_thread_that_is_alone_gets_the_bias_and_another_takes_it_away() {
        prepare();
        if !is_ready() {
            return;
        }
        let lock = BiasedLock::with_first([0; 2], 10);
        take(&lock, 10);
        assert!(!lock.is_biased());
        take(&lock, 1000);
        assert!(lock.is_biased());
        std::thread::scope(|scope| scope.spawn(|| take(&lock, 1)).join().unwrap());
        assert!(!lock.is_biased());
        take(&lock, 11);
        assert!(!lock.is_biased(), "the next bias takes longer");
        take(&lock, 1000);
        assert!(lock.is_biased());
        assert_eq!(*lock.lock(), [2022; 2]);
    }

    /// A thread that has ended leaves its seat to others.
    #[test]
    fn threads_that_have_ended_keep_no_thread_from_the_bias() {
        prepare();
        if !is_ready() {
            return;
        }
        let lock = BiasedLock::with_first([0; 2], 1);
        for thread in 0..8 {
            std::thread::scope(|scope| {
                let has_bias = || {
                    super::lock(&lock.gate).needed = 1;
                    take(&lock, 10);
                    lock.is_ours()
                };
                assert!(scope.spawn(has_bias).join().unwrap(), "thread {thread}");
            });
        }
    }

    /// The variable that makes [`in_a_sandbox`] run.
    const SANDBOX: &str = "TONIC_RDMA_NO_MEMBARRIER";

    /// A kernel or a sandbox refuses the fences of all threads: before the first bias, or when a bias is to
    /// be taken away.
    #[test]
    fn locks_do_without_the_fence_of_all_threads() {
        for moment in ["before", "meanwhile"] {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args([
                    "soft::biased_lock::tests::in_a_sandbox",
                    "--exact",
                    "--nocapture",
                    "--test-threads=1",
                ])
                .env(SANDBOX, moment)
                .output()
                .unwrap();
            let printed = |bytes| String::from_utf8_lossy(bytes).into_owned();
            assert!(
                output.status.success(),
                "{moment}: {}{}",
                printed(&output.stdout),
                printed(&output.stderr)
            );
        }
    }

    /// Has the kernel refuse `membarrier` to this thread, and to the threads that it starts.
    fn refuse_membarrier() {
        const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        const SKIP_UNLESS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
        let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
        let mut steps = [
            step(LOAD_NUMBER, 0, 0),
            step(SKIP_UNLESS, 1, libc::SYS_membarrier as u32),
            step(RETURN, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            step(RETURN, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the program and its steps live until the calls return. The calls change only what this
        // thread may ask the kernel for.
        let refused = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        assert!(refused, "{}", std::io::Error::last_os_error());
    }

    /// Runs in a process of its own. Without [`SANDBOX`] this test does nothing.
    #[test]
    fn in_a_sandbox() {
        let Some(moment) = std::env::var_os(SANDBOX) else { return };
        if moment == "before" {
            refuse_membarrier();
        }
        prepare();
        let lock = BiasedLock::with_first([0; 2], 3);
        take(&lock, 100);
        let had_one = lock.is_ours();
        assert!(moment != "before" || !had_one);
        refuse_membarrier();
        // The threads take the bias of this one away, though the kernel refuses the fence.
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| take(&lock, 1000));
            }
            take(&lock, 1000);
        });
        assert_eq!(*lock.lock(), [3100; 2]);
        assert!(!lock.is_ours(), "no lock gets a bias any more");
        assert!(!had_one || !is_ready());
    }

    /// The threads often take the bias from one another, because it comes at once.
    #[test]
    fn one_thread_at_a_time_holds_the_lock() {
        prepare();
        const ROUNDS: u64 = 2000;
        let lock = BiasedLock::with_first([0; 2], 0);
        std::thread::scope(|scope| {
            for thread in 1..4 {
                let lock = &lock;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        take(lock, thread);
                        if round % 16 == thread {
                            std::thread::yield_now();
                        }
                        // Biases come as quickly as at first.
                        super::lock(&lock.gate).needed = 3;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), [6 * ROUNDS; 2]);
    }

    #[test]
    fn a_holder_that_panics_releases_the_lock() {
        prepare();
        let lock = BiasedLock::with_first([0; 2], 3);
        take(&lock, 100);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(panic.is_err());
        take(&lock, 1);
        std::thread::scope(|scope| scope.spawn(|| take(&lock, 1)).join().unwrap());
        assert_eq!(*lock.lock(), [102; 2]);
    }
}

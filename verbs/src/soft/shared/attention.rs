//! The attention of an end: the wake-ups that its owner wants for news. Only the owner writes the word.
//!
//! This is Dekker's algorithm. The peer stores news, executes a fence, then loads the attention. The owner
//! stores its attention, executes a fence, then checks for news. At least one of the two finds the other's
//! store, so no news stays unseen.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use super::platform::{Orders, Platform, Word, fence_of};

/// The owner's last request that got an event. The peer of the owner keeps it, for one completion queue of
/// the owner.
#[derive(Debug)]
pub struct Answered<P: Platform>(P::Word);

impl<P: Platform> Default for Answered<P> {
    /// Makes a record of no request.
    fn default() -> Self {
        Self(P::Word::new(u64::MAX))
    }
}

impl<P: Platform> Answered<P> {
    /// Notes that the request in `attention` gets an event. Returns false if it has got one before. If two
    /// threads call this function at one time, there may be two events.
    #[inline]
    pub fn answer(&self, attention: Attention) -> bool {
        let is_new = self.0.load(Relaxed) != attention.request();
        if is_new {
            self.0.store(attention.request(), Relaxed);
        }
        is_new
    }
}

/// The wake-ups that the owner of an end wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention(u64);

impl Attention {
    /// No wake-up.
    pub const NONE: Self = Self(0);
    /// The owner's device checks the end when the peer asks for it, because no thread polls the end.
    pub const DEVICE: Self = Self(1);
    /// News in the ring makes an event of the completion queue of receives. WRITEs without immediate data are
    /// no such news.
    pub const NEWS: Self = Self(2);
    /// Progress of the owner's requests makes an event of the completion queue of sends.
    pub const PROGRESS: Self = Self(4);

    /// The owner has requests that wait for progress of the peer.
    pub const STUCK: Self = Self(8);

    /// A WRITE without immediate data makes an event of the completion queue of receives.
    pub const WRITES: Self = Self(16);

    /// The bits of wake-ups. The bits above count the requests of the owner.
    const ALL: u64 = 31;

    /// One request of the owner. The count may wrap.
    const REQUEST: u64 = 1 << 8;

    /// Returns both.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether one of `other` is wanted.
    #[inline]
    pub fn wants(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Adds this attention to `word`. Before it relies on the wake-ups, the owner calls
    /// [`fence`](Self::fence), then checks for news.
    #[inline]
    pub fn add<P: Platform>(self, word: &P::Word) {
        word.change(self.0, 0);
    }

    /// Adds this attention to `word`, as a new request: the peer makes one event for each request, although
    /// more news may come before the owner has woken up. Called whenever the owner begins to rely on the
    /// wake-ups. See [`add`](Self::add).
    #[inline]
    pub fn ask<P: Platform>(self, word: &P::Word) {
        word.add(Self::REQUEST);
        self.add::<P>(word);
    }

    /// Returns the number of the owner's request.
    #[inline]
    pub fn request(self) -> u64 {
        self.0 / Self::REQUEST
    }

    /// Returns whether no wake-up is wanted.
    #[inline]
    pub fn is_polled(self) -> bool {
        !self.wants(Self(Self::ALL))
    }

    /// Orders stores of attention before the checks for news that follow.
    #[inline]
    pub fn fence<P: Platform, O: Orders>() {
        fence_of::<P>(O::ATTENTION_FENCE);
    }

    /// Takes this attention away from `word`.
    #[inline]
    pub fn remove<P: Platform>(self, word: &P::Word) {
        word.change(0, self.0);
    }

    /// Returns the attention in `word`, which this side wrote.
    #[inline]
    pub fn of_own<P: Platform>(word: &P::Word) -> Self {
        Self(word.load(Relaxed))
    }

    /// Returns the attention that the peer shows in `word`. The caller has stored its news before. A peer may
    /// show any value.
    #[inline]
    pub fn of_peer<P: Platform, O: Orders>(word: &P::Word) -> Self {
        fence_of::<P>(O::NEWS_FENCE);
        Self(word.load(Relaxed))
    }
}

/// Whether the poller of a completion queue wants an event, because it sleeps or is about to sleep.
///
/// Threads that sleep, and threads that wake them. Each rule is Dekker's algorithm: one thread stores its
/// flag, executes a fence, then checks the work; the other thread stores the work, executes a fence, then
/// checks the flag. At least one of them finds the other's store.
#[derive(Debug)]
pub struct Arming<P: Platform, O> {
    armed: P::Word,
    orders: PhantomData<fn() -> O>,
}

impl<P: Platform, O: Orders> Default for Arming<P, O> {
    /// Makes a queue that is not armed.
    fn default() -> Self {
        Self { armed: P::Word::new(0), orders: PhantomData }
    }
}

impl<P: Platform, O: Orders> Arming<P, O> {
    /// Notes that the poller wants an event. Afterwards the poller executes a fence
    /// ([`Attention::fence`](Attention::fence)), and checks for work once more.
    pub fn arm(&self) {
        self.armed.store(1, Relaxed);
    }

    /// Notes that the poller does not want an event any more. Only pollers call this function, one at a time.
    /// Returns whether the queue was armed.
    pub fn disarm(&self) -> bool {
        let was_armed = self.is_armed();
        if was_armed {
            self.armed.store(0, Relaxed);
        }
        was_armed
    }

    /// Returns whether the poller wants an event. A thread that has stored work executes a fence first, or
    /// holds a lock that the poller takes after [`arm`](Self::arm).
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.armed.load(Relaxed) != 0
    }

    /// Returns whether the poller wants an event for the work that this thread has stored before.
    #[inline]
    pub fn wants_event(&self) -> bool {
        // SYNC: pairs with the fence after `arm`.
        fence_of::<P>(O::NOTIFY_FENCE);
        self.is_armed()
    }
}

/// Whether the device's thread watches the records of a queue pair.
#[derive(Debug)]
pub struct Guarded<P: Platform, O> {
    guarded: P::Word,
    orders: PhantomData<fn() -> O>,
}

impl<P: Platform, O: Orders> Default for Guarded<P, O> {
    /// Makes a queue pair without a guard.
    fn default() -> Self {
        Self { guarded: P::Word::new(0), orders: PhantomData }
    }
}

/// How often the device's thread watches the records of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u64)]
pub enum Watch {
    /// Not at all: there are no records.
    Never,
    /// Seldom: the peer has got an event, or sleeps at times and is awake.
    Seldom,
    /// Often: perhaps no thread of the peer polls.
    Often,
}

impl<P: Platform, O: Orders> Guarded<P, O> {
    /// Asks the guard to watch as often as `watch`, or more often, because a record was published, and the
    /// caller has executed a fence since. Returns how often it watched before: if that was less often, the
    /// caller tells the guard, and lists the queue pair if it was [`Watch::Never`]. Of threads that ask at one
    /// time, one lists it.
    #[inline]
    pub fn ask(&self, watch: Watch) -> Watch {
        if self.is(watch) {
            return watch;
        }
        match self.guarded.raise(watch as u64, Relaxed) {
            0 => Watch::Never,
            1 => Watch::Seldom,
            _ => Watch::Often,
        }
    }

    /// Returns whether the guard watches as often as `watch`, or more often.
    #[inline]
    pub fn is(&self, watch: Watch) -> bool {
        self.guarded.load(Relaxed) >= watch as u64
    }

    /// Has the guard watch less often: as often as `watch`, unless `has_records` finds records. Returns
    /// whether it does so, or another thread has asked meanwhile and tells the guard.
    pub fn lower(&self, watch: Watch, has_records: impl FnOnce() -> bool) -> bool {
        self.guarded.store(watch as u64, Relaxed);
        // SYNC: pairs with the fence between the store of a record and `ask`.
        fence_of::<P>(O::GUARD_FENCE);
        !has_records() || self.ask(Watch::Often) > watch
    }
}

/// The checks that an end owes. Each kind has a word of its own, so that adding to the debt is a plain store:
/// an operation that reads and writes would wait as long as the fence.
///
/// After a store of news a fence must come before the check of the peer's attention. The fence waits until
/// the peer's core has given the cache line away, some 100 ns. So a thread that stores news checks once,
/// without the fence, which finds a peer that has been asleep for a while. The end owes one check with the
/// fence, for a peer that is just falling asleep. The next poll that finds nothing else to do settles this
/// debt, and so does the thread that arms the queue.
///
/// A thread that stores news holds a lock while it checks whether the queue is armed, and while it adds to
/// the debt. A thread that arms the queue takes this lock afterwards. So either it finds the debt, or the
/// other thread finds that the queue is armed.
#[derive(Debug)]
pub struct Debt<P: Platform, O> {
    words: [P::Word; 3],
    orders: PhantomData<fn() -> O>,
}

impl<P: Platform, O> Debt<P, O> {
    /// The end has published records, not only of WRITEs without immediate data.
    pub const NEWS: u8 = 1;
    /// The end has taken records or posted receives.
    pub const PROGRESS: u8 = 2;
    /// The end has published records of WRITEs without immediate data.
    pub const WRITES: u8 = 4;
}

impl<P: Platform, O: Orders> Default for Debt<P, O> {
    /// Makes an end that owes nothing.
    fn default() -> Self {
        Self { words: [(); 3].map(|()| P::Word::new(0)), orders: PhantomData }
    }
}

impl<P: Platform, O: Orders> Debt<P, O> {
    /// Adds to the debt, for the news that this thread has stored before.
    #[inline]
    pub fn add(&self, debt: u8) {
        for (index, word) in self.words.iter().enumerate() {
            if debt & (1 << index) != 0 {
                // SYNC: pairs with `take`. Stored even if the word is set, because another thread may be
                // taking the debt now, and check before this thread's news are visible.
                word.store(1, O::OWE);
            }
        }
    }

    /// Returns whether the end owes a check.
    #[inline]
    pub fn is_any(&self) -> bool {
        self.words.iter().any(|word| word.load(Relaxed) != 0)
    }

    /// Takes the debt. The caller executes a fence, then makes the checks.
    pub fn take(&self) -> u8 {
        let mut debt = 0;
        for (index, word) in self.words.iter().enumerate() {
            // SYNC: pairs with `add`: the news that the debt is for come before the caller's fence.
            if word.load(Relaxed) != 0 && word.take(O::SETTLE) != 0 {
                debt |= 1 << index;
            }
        }
        debt
    }
}

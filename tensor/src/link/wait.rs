//! Waiting for a word that the peer writes.
//!
//! Such a word brings no completion, so the queue's poller looks at it with every poll. Before the poller sleeps, it asks the
//! peer for a bell: a message, whose completion wakes it. A wait that begins while the poller sleeps already asks by itself.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

use super::super::{ChannelError, lock};
use super::{End, Link, Notification};
use tonic_rdma::internal::{UnannouncedArrival, Watched};
use tonic_rdma_verbs::memory::SharedRegion;

/// The future of a word: ready once it has its value, or once the link has ended.
#[derive(Debug)]
#[must_use = "nothing is waited for unless it is polled"]
pub(crate) struct Wait {
    word: Arc<Word>,
    watching: bool,
    spins: bool,
}

/// A word, the value that it is to reach, and the task that waits.
#[derive(Debug)]
struct Word {
    link: Arc<Link>,
    end: Arc<End>,
    port: u32,
    memory: SharedRegion,
    offset: usize,
    /// A tail, which must have exactly this value; a count may have gone on.
    exactly: bool,
    target: u64,
    waker: Mutex<Option<Waker>>,
    asked: AtomicBool,
    /// Bells that the peer had rung for this pair when the wait began.
    bells: u64,
}

impl Wait {
    /// Waits until the word at `offset` of `memory` is at least `target`; if `exactly`, until it equals `target`.
    pub(crate) fn until(
        link: &Arc<Link>,
        end: &Arc<End>,
        port: u32,
        (memory, offset): (&SharedRegion, usize),
        target: u64,
        exactly: bool,
    ) -> Self {
        let (link, end, memory) = (Arc::clone(link), Arc::clone(end), memory.clone());
        let (waker, asked, bells) =
            (Mutex::new(None), AtomicBool::new(false), end.bells().load(Ordering::Relaxed));
        let word = Word { link, end, port, memory, offset, exactly, target, waker, asked, bells };
        Self { word: Arc::new(word), watching: false, spins: true }
    }

    /// One of several that are waited for at once: to spin for one would be to overlook the others.
    pub(crate) fn without_a_spin(self) -> Self {
        Self { spins: false, ..self }
    }
}

impl Future for Wait {
    type Output = Result<(), ChannelError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { word, watching, spins } = &mut *self;
        if word.has_come() {
            if *watching {
                word.link.slept_for(word.port);
            }
            return Poll::Ready(word.result());
        }
        if *spins && !*watching && word.link.spin(word.port, || word.has_come()) {
            return Poll::Ready(word.result());
        }
        let queue = word.link.queue(word.port);
        let registered = lock(&word.waker).replace(context.waker().clone()).is_some();
        // A poll that found the word took the waker, and looks no more.
        if !*watching || !registered {
            *watching = true;
            queue.watch(Arc::downgrade(word) as Weak<dyn Watched>);
        }
        // SYNC: the word is watched before this look; a poller says that it sleeps before it asks for those that are watched.
        if queue.is_asleep() {
            word.ask_for_completion();
        }
        if word.has_come() { Poll::Ready(word.result()) } else { Poll::Pending }
    }
}

impl Word {
    fn is_reached(&self) -> bool {
        let value = self.memory.load_u64(self.offset).unwrap_or(0);
        if self.exactly { value == self.target } else { value >= self.target }
    }

    fn has_come(&self) -> bool {
        self.is_reached() || self.link.fault().is_some()
    }

    /// What came before the link ended counts.
    fn result(&self) -> Result<(), ChannelError> {
        if self.is_reached() { Ok(()) } else { self.link.check() }
    }
}

impl Watched for Word {
    fn check(&self, wakers: &mut Vec<Waker>) -> bool {
        let come = self.has_come();
        if come {
            wakers.extend(lock(&self.waker).take());
        }
        come
    }

    fn unannounced(&self) -> Option<UnannouncedArrival> {
        let asked = self.asked.load(Ordering::Relaxed);
        let by_bell = self.link.notification() == Notification::Word;
        (by_bell && self.is_reached()).then(|| UnannouncedArrival {
            announcements: Arc::clone(self.end.bells()),
            before: self.bells,
            asked,
        })
    }

    fn ask_for_completion(&self) {
        // If that fails the link does, which the wait finds. What can't be asked for, the poller's nap finds.
        if !self.asked.swap(true, Ordering::Relaxed) {
            let _ = self.link.say_asleep(&self.end, self.target, self.port);
        }
    }
}

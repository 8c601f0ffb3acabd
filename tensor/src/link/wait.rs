//! Waiting for a word that the peer writes.
//!
//! The write of such a word makes no completion, so the poller of the queue looks at the word with every poll. Before the
//! poller sleeps, it asks the peer for a bell: a message, whose completion wakes the poller. A wait that begins while the
//! poller sleeps asks for the bell itself.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

use crate::error::ChannelError;
use crate::link::Link;
use crate::link::notification::Notification;
use crate::link::word_pair::WordPair;
use crate::lock::lock;
use tonic_rdma::internal::{UnannouncedArrival, Watched};
use tonic_rdma_verbs::memory::SharedRegion;

/// A future that is ready once a word has its value, or once the link has ended.
#[derive(Debug)]
#[must_use = "nothing is waited for unless it is polled"]
pub(crate) struct Wait {
    word: Arc<Word>,
    watching: bool,
    spins: bool,
}

/// A word, the value that it must reach, and the task that waits.
#[derive(Debug)]
struct Word {
    link: Arc<Link>,
    pair: Arc<WordPair>,
    port: u32,
    memory: SharedRegion,
    offset: usize,
    /// Whether the word must equal the target, as a tail must. A count may be greater.
    exactly: bool,
    target: u64,
    waker: Mutex<Option<Waker>>,
    asked: AtomicBool,
    /// The number of bells that the peer had rung for this pair when the wait began.
    bells: u64,
}

impl Wait {
    /// Makes a wait until the word at `offset` of `memory` is at least `target`, or equals `target` if `exactly`.
    pub(crate) fn until(
        link: &Arc<Link>,
        pair: &Arc<WordPair>,
        port: u32,
        (memory, offset): (&SharedRegion, usize),
        target: u64,
        exactly: bool,
    ) -> Self {
        let (link, pair, memory) = (Arc::clone(link), Arc::clone(pair), memory.clone());
        let (waker, asked, bells) =
            (Mutex::new(None), AtomicBool::new(false), pair.bells().load(Ordering::Relaxed));
        let word = Word { link, pair, port, memory, offset, exactly, target, waker, asked, bells };
        Self { word: Arc::new(word), watching: false, spins: true }
    }

    /// Makes a wait that does not spin, for a task that waits for several words. A spin for one word would overlook the other
    /// words.
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
        // A poll of the queue that found the word has taken the waker, and does not look at the word any more.
        if !*watching || !registered {
            *watching = true;
            queue.watch(Arc::downgrade(word) as Weak<dyn Watched>);
        }
        // SYNC: the word is watched before this look. A poller marks itself asleep before it asks for the bells of watched
        // words.
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

    /// Returns success if the word has its value, even if the link ended later.
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
            announcements: Arc::clone(self.pair.bells()),
            before: self.bells,
            asked,
        })
    }

    fn ask_for_completion(&self) {
        // If the request fails, the link fails too, and the wait finds that. A request that can't be made is replaced by the
        // poller's time-out.
        if !self.asked.swap(true, Ordering::Relaxed) {
            let _ = self.link.say_asleep(&self.pair, self.target, self.port);
        }
    }
}

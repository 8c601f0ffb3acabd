//! Waiting for a word that the peer writes.
//!
//! The write of such a word makes no completion, so the poller of the queue reads the word in every poll.
//! On a device that announces writes, each write makes an event, which wakes a poller that sleeps. On other
//! devices the poller asks the peer for a bell before it sleeps: a message, whose completion wakes the
//! poller. A wait that begins while the poller sleeps asks for the event or the bell itself.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

use crate::error::TensorError;
use crate::link::Link;
use crate::link::words::{Notification, WordPair};
use tonic_rdma::unstable::{Queue, UnannouncedArrival, Watched};
use tonic_rdma_verbs::memory::SharedRegion;
use tonic_rdma_verbs::unstable::lock;

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
    /// The port through which the peer writes the word; `None` if it may be any port.
    port: Option<u32>,
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
    /// Makes a wait until the word at `offset` of `memory` is at least `target`, or equals `target` if
    /// `exactly`. The peer writes the word through `port`, or through any port.
    pub(crate) fn until(
        link: &Arc<Link>,
        pair: &Arc<WordPair>,
        port: Option<u32>,
        (memory, offset): (&SharedRegion, usize),
        target: u64,
        exactly: bool,
    ) -> Self {
        link.begin_wait(port);
        let (link, pair, memory) = (Arc::clone(link), Arc::clone(pair), memory.clone());
        let (waker, asked, bells) =
            (Mutex::new(None), AtomicBool::new(false), pair.bells.load(Ordering::Relaxed));
        let word = Word { link, pair, port, memory, offset, exactly, target, waker, asked, bells };
        Self { word: Arc::new(word), watching: false, spins: true }
    }

    /// Makes a wait that does not spin, for a task that waits for several words. A spin for one word would
    /// overlook the other words.
    pub(crate) fn without_a_spin(self) -> Self {
        Self { spins: false, ..self }
    }
}

impl Future for Wait {
    type Output = Result<(), TensorError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { word, watching, spins } = &mut *self;
        if word.has_arrived() {
            if *watching {
                word.link.arrived_after_sleep(word.port.unwrap_or(0));
            }
            return Poll::Ready(word.result());
        }
        if *spins && !*watching && word.spin() {
            return Poll::Ready(word.result());
        }
        let registered = lock(&word.waker).replace(context.waker().clone()).is_some();
        // A poll of the queue that found the word has taken the waker, and does not check the word any more.
        if !*watching || !registered {
            *watching = true;
            for queue in word.queues() {
                queue.watch(Arc::downgrade(word) as Weak<dyn Watched>);
            }
        }
        // SYNC: the word is watched before these checks. A poller marks itself asleep before it asks for the
        // bells of watched words. A thread that carries out a write of the peer stores the word before it
        // checks the watched words.
        fence(Ordering::SeqCst);
        if word.queues().any(|queue| queue.is_asleep()) {
            word.ask_for_completion();
        }
        if word.has_arrived() { Poll::Ready(word.result()) } else { Poll::Pending }
    }
}

impl Word {
    /// Returns the queues whose polls may bring the word.
    fn queues(&self) -> impl Iterator<Item = &Arc<Queue>> {
        let ports = match self.port {
            Some(port) => port..port + 1,
            // The poll that carries out a write is that of the queue pair's own queue. Other devices write
            // the word themselves.
            None if self.link.announces_writes => 0..self.link.ports().count() as u32,
            None => 0..1,
        };
        let distinct = ports.clone().filter(move |port| {
            let queue = self.link.queue(*port);
            !(ports.start..*port).any(|earlier| Arc::ptr_eq(self.link.queue(earlier), queue))
        });
        distinct.map(|port| self.link.queue(port))
    }

    fn spin(&self) -> bool {
        match self.port {
            Some(port) => self.link.spin(port, || self.has_arrived()),
            None => self.link.spin(0, || {
                self.link.progress_all();
                self.has_arrived()
            }),
        }
    }

    fn is_reached(&self) -> bool {
        let value = self.memory.load_u64(self.offset).unwrap_or(0);
        if self.exactly { value == self.target } else { value >= self.target }
    }

    fn has_arrived(&self) -> bool {
        self.is_reached() || self.link.fault().is_some()
    }

    /// Returns success if the word has its value, even if the link ended later.
    fn result(&self) -> Result<(), TensorError> {
        if self.is_reached() { Ok(()) } else { self.link.check() }
    }
}

impl Watched for Word {
    fn check(&self, wakers: &mut Vec<Waker>) -> bool {
        let arrived = self.has_arrived();
        if arrived {
            wakers.extend(lock(&self.waker).take());
        }
        arrived
    }

    fn unannounced(&self) -> Option<UnannouncedArrival> {
        let asked = self.asked.load(Ordering::Relaxed);
        let by_bell = self.link.notification == Notification::Word && !self.is_announced();
        (by_bell && self.is_reached()).then(|| UnannouncedArrival {
            announcements: Arc::clone(&self.pair.bells),
            before: self.bells,
            asked,
        })
    }

    fn ask_for_completion(&self) {
        if self.link.announces_writes {
            self.link.need_events(self.port);
        } else if !self.asked.swap(true, Ordering::Relaxed) {
            // If the request fails, the link fails too, and the wait finds that. A request that can't be made
            // is replaced by the poller's time-out.
            let _ = self.link.send_sleeper(&self.pair, self.target, self.port.unwrap_or(0));
        }
    }

    fn is_announced(&self) -> bool {
        self.link.announces_writes
    }
}
